"""What holds the bytes of a store: each checkpoint, each tag, each branch of the states; and what rules would free.

All from the lists of blobs that the catalogue has, but for the branches: of each blob these are read once, in the
manifest of the first checkpoint that names it.
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

from casckpt.base.durations import time_of
from casckpt.base.parallel import in_parallel
from casckpt.contents import manifests
from casckpt.errors import CasckptError
from casckpt.format.notes import BLOB_NAMES, BLOB_SHARES, BlobShares, decode, encode
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.tags import Tag, tags, tags_of
from casckpt.plan.packing import branch_of
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.blob_use import BlobUse
from casckpt.upkeep.gc.purge import GcPlan, check_metrics, plan_of

_NO_TIME = ("tagged", "unmirrored")


@dataclass(frozen=True, slots=True)
class StepUsage:
    """One live checkpoint. Bytes are those of blob files, but for ``bytes_logical``: of the tensors that it holds.

    ``bytes_used``: of all that it names; ``bytes_new``: of those that no earlier one names; ``bytes_alone``: of those
    that no other names, so much a gc would free without it. ``state``: "visible", "forgotten" or "replaced" (old places
    of one that was rewritten); of the last two, ``until``: when a gc may purge it; None: at once, or not while
    ``waits_for`` lasts ("tagged", "unmirrored"). ``thin``: something was left out of it.
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
    """One tag, or lease: it has an end, and a holder. ``bytes_alone``: of blobs that only what it names needs."""

    name: str
    run: str
    step: int
    id: str
    expires: datetime | None
    holder: str
    bytes_alone: int


@dataclass(frozen=True, slots=True)
class BranchUsage:
    """What has one first element in its keys, in all live checkpoints. ``bytes_blobs``: what it takes in blobs.

    ``bytes_bases``: of that, in blobs that visible checkpoints need for bases alone: deltas of theirs are told from it.
    """

    branch: str
    bytes_blobs: int
    bytes_bases: int


@dataclass(frozen=True, slots=True)
class RuleUsage:
    """One rule of retention, as if it were the only one.

    ``checkpoints``: that it forgets; ``bytes``: that it frees in the end, beside what is forgotten already.
    """

    rule: str
    checkpoints: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """What holds the bytes. ``branches``: empty unless they were asked for. ``unreadable``: ids left out of it all."""

    steps: Sequence[StepUsage]
    tags: Sequence[TagUsage]
    branches: Sequence[BranchUsage]
    rules: Sequence[RuleUsage]
    unreadable: Sequence[str]


def footprint(
    repo: Repository, *, run: str | None = None, branches: bool = False, policy: Policy | None = None
) -> Footprint:
    """Find out. ``run``: of this one alone, though others count as users. ``policy``: rules to count, one by one.

    Raises NotFound, InvalidInput for a metric that no checkpoint has, Damaged or Refused if a tag cannot be read,
    StorageError.
    """
    check_metrics(repo, policy or Policy(), run)
    commits = list_commits(repo)
    live = sorted(commits.live(), key=lambda commit: commit.order)
    use, found = BlobUse(repo, live), tags(repo)
    wanted = [commit for commit in use.readable if run is None or commit.run == run]
    ids = {commit.id for commit in wanted}
    return Footprint(
        steps=_steps(wanted, use, plan_of(repo, commits, Policy()), found),
        tags=[_tag_usage(tag, use, commits) for tag in found.values() if tag.manifest in ids],
        branches=_branches(repo, wanted, use) if branches else (),
        rules=[_rule_usage(repo, commits, use, one, run) for one in _each_rule(policy or Policy())],
        unreadable=[commit.id for commit in live if commit.txid not in use.blobs],
    )


def _steps(wanted: Sequence[Commit], use: BlobUse, plan: GcPlan, found: Mapping[str, Tag]) -> list[StepUsage]:
    waiting = {one.txid: one for one in plan.waiting}
    first, steps = use.bytes_new(), []
    for commit in wanted:
        waits, used = waiting.get(commit.txid), int(use.sizes[use.blobs[commit.txid]].sum())
        made = StepUsage(
            commit.run, commit.step, commit.id, _state(commit), commit.dropped is not None, commit.bytes_held, used,
            first[commit.txid], use.alone([commit.txid]).blob_bytes, None if waits is None else waits.until,
            None if waits is None or waits.reason not in _NO_TIME else waits.reason, tuple(tags_of(found, commit.id)),
        )  # fmt: skip
        steps.append(made)
    return steps


def _state(commit: Commit) -> str:
    if commit.visible:
        return "visible"
    return "forgotten" if commit.is_forgotten else "replaced"


def _tag_usage(tag: Tag, use: BlobUse, commits: CommitList) -> TagUsage:
    mine = [commit for commit in commits.live() if commit.id == tag.manifest]
    end = None if tag.expires is None else time_of(tag.expires)
    alone = use.alone(commit.txid for commit in mine).blob_bytes
    return TagUsage(tag.name, mine[-1].run, mine[-1].step, tag.manifest, end, tag.holder, alone)


def _each_rule(policy: Policy) -> list[tuple[str, Policy]]:
    """Return the rules of a policy, each as a policy of its own, with its words."""
    given = {one.name: getattr(policy, one.name) for one in fields(policy)}
    found = []
    for name, value in given.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None:
                alone: dict[str, Any] = dict.fromkeys(given) | {name: each}
                found.append((f"{name.replace('_', '-')} {each}", replace(policy, **alone)))
    return found


def _rule_usage(
    repo: Repository, commits: CommitList, use: BlobUse, rule: tuple[str, Policy], run: str | None
) -> RuleUsage:
    gone = [commit.txid for commit in commits.live() if not commit.visible]
    forgets = [commit.txid for commit in plan_of(repo, commits, rule[1], run).forget]
    freed = use.alone([*gone, *forgets]).blob_bytes - use.alone(gone).blob_bytes
    return RuleUsage(rule[0], len(forgets), freed)


# branches


def _branches(repo: Repository, wanted: Sequence[Commit], use: BlobUse) -> list[BranchUsage]:
    """Divide the blobs of these, each by what the first checkpoint that names it has in it."""
    totals, bases = defaultdict[str, float](float), defaultdict[str, float](float)
    is_base = _only_bases(repo, use)
    work = [(commit, new.tolist(), [use.names[number] for number in new]) for commit, new in use.new(wanted)]
    read = in_parallel(repo.storage.traits.requests, lambda one: _shares_of(repo, one[0], one[2]), work)
    for (_, numbers, names), shares in zip(work, read, strict=True):
        for number, name in zip(numbers, names, strict=True):
            held = shares.get(name, {"": 1})
            for branch, nbytes in held.items():
                part = int(use.sizes[number]) * nbytes / sum(held.values())
                totals[branch] += part
                bases[branch] += part if is_base[number] else 0
    found = [BranchUsage(branch, round(nbytes), round(bases[branch])) for branch, nbytes in totals.items()]
    return sorted(found, key=lambda one: (-one.bytes_blobs, one.branch))


def _shares_of(repo: Repository, commit: Commit, names: Sequence[str]) -> BlobShares:
    """Return the bytes of each branch in some blobs; what was found out before is in the catalogue."""
    note = f"branches/{commit.txid}/{commit.committed.head}"
    known = decode(repo.catalogue.note(note), BLOB_SHARES) if names else {}
    if known is not None and known.keys() >= {*names}:
        return known
    try:
        found = _read_shares(repo, commit)
    except CasckptError:
        return {}
    made = {name: found.get(name, {"": 1}) for name in names}
    repo.catalogue.set_note(note, encode(made))
    return made


def _read_shares(repo: Repository, commit: Commit) -> BlobShares:
    manifest = manifests.get(repo, commit)
    manifest.ready(objects=())
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for entry in manifest.held:
        table, branch = manifest.extents(entry), branch_of(entry.kind, entry.key)
        for extent in table.extents:
            for one in extent.chain:
                found[one.blob][branch] += table.stored_bytes(one)
    return {_name(manifest.blob(number)): dict(held) for number, held in found.items()}


def _only_bases(repo: Repository, use: BlobUse) -> npt.NDArray[np.bool_]:
    """Tell of each blob whether visible checkpoints need it, and all of them for bases alone."""
    visible = [commit for commit in use.readable if commit.visible]
    needed, direct = np.zeros((2, len(use.names)), bool)
    bases = in_parallel(repo.storage.traits.requests, partial(_bases_of, repo), visible)
    for commit, told in zip(visible, bases, strict=True):
        mine = use.blobs[commit.txid]
        needed[mine] = True
        direct[[number for number in mine if use.names[number] not in told] if told else mine] = True
    return needed & ~direct


def _bases_of(repo: Repository, commit: Commit) -> frozenset[str]:
    """Return the blobs in which a checkpoint has bases and no cell; what was found out before is in the catalogue."""
    if not commit.committed.bytes_deltas:
        return frozenset()
    note = f"bases/{commit.txid}/{commit.committed.head}"
    known = decode(repo.catalogue.note(note), BLOB_NAMES)
    if known is None:
        try:
            known = _read_bases(repo, commit)
        except CasckptError:
            return frozenset()
        repo.catalogue.set_note(note, encode(known))
    return frozenset(known)


def _read_bases(repo: Repository, commit: Commit) -> list[str]:
    manifest = manifests.get(repo, commit)
    manifest.ready(objects=())
    every = [extent for entry in manifest.held for extent in manifest.extents(entry).extents]
    bases = {one.blob for extent in every for one in extent.chain} - {extent.blob for extent in every}
    return [_name(manifest.blob(number)) for number in sorted(bases)]


def _name(ref: BlobRef) -> str:
    return f"{ref.uploader}/{ref.hash}"
