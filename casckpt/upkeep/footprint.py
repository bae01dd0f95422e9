"""The sizes of a store's checkpoints, tags and state branches, and the bytes that retention rules would free.

The catalogue lists each checkpoint's blobs. A blob's branches are read once, from the manifest of the first checkpoint
that names the blob.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from casckpt.base.parallel import in_parallel
from casckpt.base.units import time_of
from casckpt.contents import manifests
from casckpt.errors import CasckptError
from casckpt.format.notes import BLOB_NAMES, BLOB_SHARES, BlobShares, decode, encode
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.tags import Tag, tags, tags_of
from casckpt.plan.cells import branch_of
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.blob_use import BlobUse
from casckpt.upkeep.gc.purge import GcPlan, check_metrics, plan_of

_NO_TIME = ("tagged", "unmirrored")


@dataclass(frozen=True, slots=True)
class StepUsage:
    """The space that one live checkpoint uses. Sizes count blob files, except ``bytes_logical``, which counts tensors.

    ``bytes_used``: all blobs that the checkpoint names. ``bytes_new``: those that no earlier checkpoint names.
    ``bytes_alone``: those that no other checkpoint names, which gc would free if this checkpoint were purged.
    ``state``: "visible", "forgotten" or "replaced" (the old places of a rewritten checkpoint). ``until``: the time from
    which gc may purge a forgotten or replaced checkpoint. None means immediately, or once the reason in ``waits_for``
    ("tagged", "unmirrored") no longer applies. ``thin``: whether it was thinned.
    """

    run: str
    step: int
    id: str
    state: str
    thin: bool
    bytes_logical: int
    bytes_used: int
    bytes_new: int
    bytes_alone: int
    until: datetime | None
    waits_for: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TagUsage:
    """One tag or lease. A lease has an expiration time and a holder.

    ``bytes_alone``: blobs that only its checkpoint uses.
    """

    name: str
    run: str
    step: int
    id: str
    expires: datetime | None
    holder: str
    bytes_alone: int


@dataclass(frozen=True, slots=True)
class BranchUsage:
    """The blob bytes of one branch of the state (the keys with the same first element) in all live checkpoints.

    ``bytes_bases``: the part of ``bytes_blobs`` in blobs that visible checkpoints use only as bases of their frames.
    """

    branch: str
    bytes_blobs: int
    bytes_bases: int


@dataclass(frozen=True, slots=True)
class RuleUsage:
    """The effect of one retention rule if it were the only rule.

    ``checkpoints``: how many checkpoints the rule forgets. ``bytes``: how many bytes gc frees once these are purged,
    not counting checkpoints that are already forgotten.
    """

    rule: str
    checkpoints: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """The footprint of a store. ``branches``: empty unless requested. ``unreadable``: ids of skipped checkpoints."""

    steps: Sequence[StepUsage]
    tags: Sequence[TagUsage]
    branches: Sequence[BranchUsage]
    rules: Sequence[RuleUsage]
    unreadable: Sequence[str]


def footprint(
    repo: Repository, *, run: str | None = None, branches: bool = False, policy: Policy | None = None
) -> Footprint:
    """Compute the footprint of a store, or of ``run``.

    Other runs still count as users of the run's blobs. ``policy``: the rules to report, one by one. Raises
    InvalidInput for a metric that no checkpoint has, Damaged or Refused if a tag cannot be read, NotFound, and
    StorageError.
    """
    check_metrics(repo, policy or Policy(), run)
    commits = list_commits(repo)
    live = commits.placed()
    use, named = BlobUse(repo, live), tags(repo)
    wanted = [commit for commit in use.readable if run is None or commit.run == run]
    ids = {commit.id for commit in wanted}
    return Footprint(
        steps=_steps(wanted, use, plan_of(repo, commits, Policy()), named),
        tags=[_tag_usage(tag, use, commits) for tag in named.values() if tag.manifest in ids],
        branches=_branches(repo, wanted, use) if branches else (),
        rules=[_rule_usage(repo, commits, use, rule, run) for rule in _each_rule(policy or Policy())],
        unreadable=[commit.id for commit in live if commit.places.txid not in use.blobs],
    )


def _steps(wanted: Sequence[Commit], use: BlobUse, plan: GcPlan, named: Mapping[str, Tag]) -> list[StepUsage]:
    waiting = {deferred.txid: deferred for deferred in plan.waiting}
    first, steps = use.bytes_new(), []
    for commit in wanted:
        waits, used = waiting.get(commit.places.txid), int(use.sizes[use.blobs[commit.places.txid]].sum())
        made = StepUsage(
            commit.run, commit.step, commit.id, _state(commit), commit.dropped is not None, commit.bytes_held, used,
            first[commit.places.txid], use.alone([commit]).blob_bytes, None if waits is None else waits.until,
            None if waits is None or waits.reason not in _NO_TIME else waits.reason, tuple(tags_of(named, commit.id)),
        )  # fmt: skip
        steps.append(made)
    return steps


def _state(commit: Commit) -> str:
    if commit.visible:
        return "visible"
    return "replaced" if commit.is_old_places else "forgotten"


def _tag_usage(tag: Tag, use: BlobUse, commits: CommitList) -> TagUsage:
    same = [commit for commit in commits.placed() if commit.id == tag.manifest]
    end = None if tag.expires is None else time_of(tag.expires)
    alone = use.alone(same).blob_bytes
    return TagUsage(tag.name, same[-1].run, same[-1].step, tag.manifest, end, tag.holder, alone)


def _each_rule(policy: Policy) -> list[tuple[str, Policy]]:
    """Return each rule of a policy as a string, with a policy that consists only of this rule."""
    given = {field.name: getattr(policy, field.name) for field in fields(policy)}
    rules = []
    for name, value in given.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None:
                alone: dict[str, Any] = dict.fromkeys(given) | {name: each}
                rules.append((f"{name.replace('_', '-')} {each}", replace(policy, **alone)))
    return rules


def _rule_usage(
    repo: Repository, commits: CommitList, use: BlobUse, rule: tuple[str, Policy], run: str | None
) -> RuleUsage:
    gone = [commit for commit in commits.placed() if not commit.visible]
    forgets = plan_of(repo, commits, rule[1], run).forget
    freed = use.alone([*gone, *forgets]).blob_bytes - use.alone(gone).blob_bytes
    return RuleUsage(rule[0], len(forgets), freed)


# branches


def _branches(repo: Repository, wanted: Sequence[Commit], use: BlobUse) -> list[BranchUsage]:
    """Divide each blob among the branches of the first checkpoint that names it."""
    totals, bases = defaultdict[str, float](float), defaultdict[str, float](float)
    is_base = _only_bases(repo, use)
    work = [(commit, new.tolist(), [use.names[number] for number in new]) for commit, new in use.new(wanted)]
    read = in_parallel(repo.storage.traits.requests, lambda item: _shares_of(repo, item[0], item[2]), work)
    for (_, numbers, names), shares in zip(work, read, strict=True):
        for number, name in zip(numbers, names, strict=True):
            held = shares.get(name, {"": 1})
            for branch, nbytes in held.items():
                part = int(use.sizes[number]) * nbytes / sum(held.values())
                totals[branch] += part
                bases[branch] += part if is_base[number] else 0
    rows = [BranchUsage(branch, round(nbytes), round(bases[branch])) for branch, nbytes in totals.items()]
    return sorted(rows, key=lambda row: (-row.bytes_blobs, row.branch))


def _shares_of(repo: Repository, commit: Commit, names: Sequence[str]) -> BlobShares:
    """Return each branch's bytes in the blobs ``names``, or {} if they are unreadable. Caches them in the catalogue."""
    note = f"branches/{commit.places.txid}/{commit.committed.head}"
    known = decode(repo.catalogue.note(note), BLOB_SHARES) if names else {}
    if known is not None and known.keys() >= {*names}:
        return known
    shares: dict[str, Counter[str]] = defaultdict(Counter)
    try:
        manifest = manifests.get_with_extents(repo, commit)
        for entry in manifest.held:
            table, branch = manifest.extents(entry), branch_of(entry.kind, entry.key)
            for link in (link for extent in table.extents for link in extent.chain):
                shares[_name(manifest.blob(link.blob))][branch] += table.stored_bytes(link)
    except CasckptError:
        return {}
    made = {name: dict(shares[name]) or {"": 1} for name in names}
    repo.catalogue.set_note(note, encode(made))
    return made


def _only_bases(repo: Repository, use: BlobUse) -> npt.NDArray[np.bool_]:
    """Return, for each blob, whether visible checkpoints use it only for bases."""
    visible = [commit for commit in use.readable if commit.visible]
    needed, direct = np.zeros((2, len(use.names)), bool)
    bases = in_parallel(repo.storage.traits.requests, partial(_bases_of, repo), visible)
    for commit, only_bases in zip(visible, bases, strict=True):
        own = use.blobs[commit.places.txid]
        needed[own] = True
        direct[[number for number in own if use.names[number] not in only_bases] if only_bases else own] = True
    return needed & ~direct


def _bases_of(repo: Repository, commit: Commit) -> frozenset[str]:
    """Return the blobs that a checkpoint uses only for bases. Cache them in the catalogue."""
    if not commit.committed.bytes_deltas:
        return frozenset()
    note = f"bases/{commit.places.txid}/{commit.committed.head}"
    known = decode(repo.catalogue.note(note), BLOB_NAMES)
    if known is None:
        try:
            manifest = manifests.get_with_extents(repo, commit)
            every = [extent for entry in manifest.held for extent in manifest.extents(entry).extents]
            bases = {link.blob for extent in every for link in extent.chain} - {extent.blob for extent in every}
            known = [_name(manifest.blob(number)) for number in sorted(bases)]
        except CasckptError:
            return frozenset()
        repo.catalogue.set_note(note, encode(known))
    return frozenset(known)


def _name(ref: BlobRef) -> str:
    return f"{ref.uploader}/{ref.hash}"
