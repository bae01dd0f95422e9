"""A load, from a manifest into tensors that are there (`load_together`) or into new ones (`read`).

Everything that can be known to be wrong is found before the first byte changes: missing keys, shapes, dtypes, holes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from socket import gethostname
from typing import Any

import torch

from casckpt.base.cycle_collector import collecting_later
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint, Frames
from casckpt.contents.signatures import check_verified
from casckpt.errors import MissingKey, NotFound
from casckpt.format.manifest import Manifest
from casckpt.format.names import TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import ATTACHMENT
from casckpt.format.tree import Node, Path, children, join, leaves
from casckpt.history.commits import Commit
from casckpt.loading.arguments import matches, usable_patterns
from casckpt.loading.contents import Contents
from casckpt.loading.fit import Fit, log_once
from casckpt.loading.load_plan import LoadPlan
from casckpt.loading.options import LoadOptions
from casckpt.loading.template import Template
from casckpt.loading.unread import also_unread, on_all, that_hold, warn_moved, warn_unread
from casckpt.ranks.agreement import StoreIdentity, check_same, named
from casckpt.ranks.ranks import Ranks, everyone
from casckpt.repository.repository import Repository
from casckpt.tensors.state import LeafValue, inflate

_QUICK_BYTES = 256 << 20  # of a checkpoint: it is loaded in well under a second


@dataclass(frozen=True)
class _Hello:
    """What every rank says first. ``names``: the manifests that it holds."""

    ref: str
    host: str
    names: set[tuple[TxId, str]]


@dataclass(frozen=True)
class _Found:
    """What a rank is told. ``manifest``: None if it holds it. ``ranks_here``: how many share its host."""

    commit: Commit
    manifest: Manifest | None
    ranks_here: int
    home: StoreIdentity


@dataclass(frozen=True)
class Loaded:
    """What was loaded. ``subtrees``: what no rank read, the same on all of them; the rest is of this rank.

    ``frames``: what an update decoded.
    """

    commit: Commit
    missing: tuple[str, ...]
    mismatched: tuple[str, ...]
    unread: tuple[str, ...]
    subtrees: tuple[str, ...]
    frames: Frames


def load_together(
    repo: Repository,
    ranks: Ranks,
    state: Any,
    ref: str | Checkpoint,
    options: LoadOptions,
    *,
    resolve: Callable[[], Commit],
) -> Loaded:
    """Fill the tensors of ``state`` in place and replace its other leaves; every rank of ``ranks`` calls it.

    Rank 0 alone resolves, and reads the manifest for those that do not hold it; all must have given the same ``ref``.
    What is wrong on any rank is raised on all of them, before anything changes on one.
    """
    found, mine = _find(repo, ranks, ref, options, resolve)
    with collecting_later() if found.commit.committed.bytes_total < _QUICK_BYTES else nullcontext():
        return _load(repo, ranks, state, found, mine)


def _load(repo: Repository, ranks: Ranks, state: Any, found: _Found, mine: LoadOptions) -> Loaded:
    commit, told = found.commit, found.manifest
    if told is not None and ranks.rank != 0:
        manifests.adopt(repo, commit, told)
    templates: list[Template] = []  # the last one: a plan may find the manifest gone, and begin anew

    def plan_by(_: Commit, manifest: Manifest) -> None:
        templates.append(Template(manifest, mine))
        templates[-1].plan(repo, state)

    def plan() -> tuple[Mapping[str, str], bool]:
        found.home.check(repo)
        manifests.use(repo, commit, plan_by)
        return templates[-1].empties, templates[-1].is_full

    def compare(planned: Sequence[tuple[Mapping[str, str], bool]]) -> Sequence[tuple[tuple[str, ...], bool]]:
        templates[-1].check_empty([empties for empties, _ in planned])
        warns, first = mine.unread == "warn", templates[-1]
        held = first.per_rank
        own = [key for key in first.unread if key in held and not that_hold(first.subtrees, [key])]
        asked = tuple(dict.fromkeys((*first.subtrees, *((*first.dropped, *own) if warns else ()))))
        return everyone((asked, warns and not all(is_full for _, is_full in planned)), ranks.size)

    def check(fits: Sequence[Fit]) -> Sequence[str | None]:
        return everyone(template.check_fit(fits), ranks.size)

    asked, partly = ranks.exchange(plan, compare)
    template = templates[-1]
    said = ranks.exchange(lambda: template.fit, check) if partly else None

    def run() -> list[bool]:
        template.run(repo, state)
        return also_unread(asked, (*template.subtrees, *template.unread))

    def finish(left: Sequence[list[bool]]) -> Sequence[tuple[str, ...]]:
        unread = on_all(asked, left)
        if mine.unread == "warn":
            told = [key for key in unread if not that_hold(mine.meant, [key])]
            warn_unread(commit.run, commit.step, told, 'pass unread="ignore"')
            log_once(commit.id, said, template.missing)
            left_here = frozenset(template.unread)
            read = {key: held for key, held in template.per_rank.items() if key not in left_here}
            warn_moved(commit.run, commit.step, read, ranks.size)
        subtrees = frozenset(template.subtrees)
        return everyone(tuple(key for key in unread if key in subtrees), ranks.size)

    subtrees = ranks.exchange(run, finish)
    return Loaded(commit, template.missing, template.mismatched, template.unread, subtrees, template.frames)


def _find(
    repo: Repository, ranks: Ranks, ref: str | Checkpoint, options: LoadOptions, resolve: Callable[[], Commit]
) -> tuple[_Found, LoadOptions]:
    """What ``ref`` names, as rank 0 finds it, and what this rank was asked for."""
    settings: list[LoadOptions] = []

    def hello() -> _Hello:
        settings.append(options.checked())
        check_verified(repo, verify=options.verify)
        return _Hello(named(ref), gethostname(), repo.manifests.names())

    def find(told: Sequence[_Hello]) -> list[_Found]:
        check_same([one.ref for one in told])
        commit, manifest = manifests.use(repo, resolve(), lambda commit, manifest: (commit, manifest))
        home, name = StoreIdentity.of(repo), (commit.txid, commit.committed.head)
        on_host = Counter(one.host for one in told)
        answers = {}  # one object for all that are told the same
        for one in told:
            known = name in one.names
            answers[one.host, known] = _Found(commit, None if known else manifest, on_host[one.host], home)
        return [answers[one.host, name in one.names] for one in told]

    found = ranks.exchange(hello, find)
    alive = ranks.alive if ranks.size > 1 else None
    mine = replace(settings[0], rank=ranks.rank, ranks=ranks.size, ranks_here=found.ranks_here, alive=alive)
    return found, mine


def wanted_blobs(repo: Repository, manifest: Manifest, state: Any, options: LoadOptions) -> list[BlobRef]:
    """The blobs that a load into ``state`` reads. Raises MissingKey, Mismatch or InvalidInput, as the load would."""
    template = Template(manifest, options)
    template.plan(repo, state)
    return template.blobs(repo)


def read(
    repo: Repository, commit: Commit, *, keys: Sequence[str] | None, device: torch.device, options: LoadOptions
) -> Any:
    """New tensors on ``device`` and the other leaves, nested as they were saved; ``keys``: fnmatch patterns."""
    patterns = usable_patterns(keys)
    plan = manifests.use(repo, commit, lambda _, manifest: _plan_to_read(manifest, patterns, device, options))
    tree, values = plan.contents.tree, plan.run(repo)
    return inflate(tree, lambda key, leaf: values[key], lambda key: matches(key, patterns))


def _plan_to_read(
    manifest: Manifest, patterns: Sequence[str] | None, device: torch.device, options: LoadOptions
) -> LoadPlan:
    contents = Contents(manifest, options.rank)
    plan = LoadPlan(contents, options)
    wanted = [key for path, _ in leaves(contents.tree) if matches(key := join(path), patterns)]
    contents.ready(wanted)
    for key in wanted:
        plan.new(key, device)
    if patterns is not None:
        check_used(manifest, patterns, list(_names(contents.tree, ())))
    return plan


def values_at(repo: Repository, contents: Contents, keys: Sequence[str], options: LoadOptions) -> dict[str, Any]:
    """What stands at flat keys, leaves or containers with all below them, in new tensors on the CPU.

    Raises MissingKey for one that is not there.
    """
    manifest, plan = contents.manifest, LoadPlan(contents, options)
    contents.ready(keys)
    for key in keys:
        if not plan.add(key, key, LeafValue(key, (key,), None, False, False)):
            raise MissingKey(f"{manifest.body.run}@{manifest.body.step} lacks {key!r}", keys=(key,))
    return plan.run(repo)


def _names(node: Node, path: Path) -> Iterator[str]:
    """The flat keys of all leaves, and of the containers that were saved empty."""
    if isinstance(node, int) or not node:
        yield join(path)
    else:
        for element, child in children(node):
            yield from _names(child, (*path, element))


def check_used(manifest: Manifest, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise MissingKey for a pattern that matches none of ``names``."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MissingKey(
                f"nothing in {manifest.body.run}@{manifest.body.step} matches {pattern!r}; "
                "`casckpt show --tensors` lists its keys",
                keys=(pattern,),
            )


def read_attachment(repo: Repository, manifest: Manifest, name: str, options: LoadOptions) -> bytes:
    """The contents of one attachment. Raises NotFound."""
    for short in manifest.body.attachments:
        if short.key == name:
            return manifest.data(short)
    contents = Contents(manifest, options.rank)
    entry = contents.entries.get((ATTACHMENT, name, 0))
    if entry is None:
        long = [one.key for one in manifest.entries if one.kind == ATTACHMENT]
        there = sorted([*long, *(short.key for short in manifest.body.attachments)])
        listed = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
        where = f"{manifest.body.run}@{manifest.body.step}"
        raise NotFound(f"{where} has no attachment {name!r}; it has {listed or 'none'}")
    plan = LoadPlan(contents, options)
    data = plan.new_tensor(entry, torch.device("cpu"))
    plan.run(repo)
    return data.numpy().tobytes()
