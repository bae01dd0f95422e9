"""Loads into existing tensors (`load_together`) or into new tensors (`read`).

A load checks everything before it changes the first byte: missing keys, shapes, dtypes and holes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import torch

from casckpt.base.cycle_collector import collector_paused
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.contents.signatures import check_verified
from casckpt.errors import MissingKey, NotFound
from casckpt.format.manifest import Manifest
from casckpt.format.names import TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import StoredObject
from casckpt.format.tree import Node, Path, Wrapper, children, join, leaves, units
from casckpt.history.commits import Commit
from casckpt.loading.fit import Fit, log_once
from casckpt.loading.job_reads import WAIT_SHARE, Deal, JobReads, Needs, deals, run_together
from casckpt.loading.load_plan import LoadPlan
from casckpt.loading.options import LoadOptions, check_used, matches, usable_patterns
from casckpt.loading.template import Template, Told
from casckpt.loading.unread import also_unread, on_all, that_hold, warn_moved, warn_unread
from casckpt.ranks.agreement import StoreIdentity, check_same, named
from casckpt.ranks.ranks import Ranks, everyone, exchange_keeping
from casckpt.repository.repository import Repository
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.state import LeafValue, inflate, replace_leaves

Kept = TypeVar("Kept")
Up = TypeVar("Up")
Down = TypeVar("Down")
_QUICK_BYTES = 256 << 20  # a smaller checkpoint loads in well under a second


@dataclass(frozen=True)
class _ResolveRequest:
    """Every rank's first message. ``shares``: whether it shares reads. ``names``: the manifests that it holds."""

    ref: str
    host: str
    shares: bool
    names: set[tuple[TxId, str]]


@dataclass(frozen=True)
class _ResolveAnswer:
    """The answer of rank 0. ``manifest``: None if the receiving rank already holds the manifest.

    ``ranks_here``: the number of ranks on the receiver's host. ``sharing``: see `LoadOptions`. ``load_id``: a unique
    name of this load.
    """

    commit: Commit
    manifest: Manifest | None
    ranks_here: int
    sharing: int
    load_id: str
    home: StoreIdentity


def load_together(
    repo: Repository,
    ranks: Ranks,
    state: Any,
    ref: str | Checkpoint,
    options: LoadOptions,
    *,
    resolve: Callable[[], Commit],
) -> Checkpoint:
    """Fill the tensors of ``state`` in place, and replace its other leaves. Every rank of ``ranks`` must call this.

    Rank 0 resolves the reference, and sends the manifest to the ranks that do not hold it. All ranks must pass the
    same ``ref``. If a check fails on any rank, all ranks raise the error, before anything changes on any of them.
    """
    answer, options = _resolved(repo, ranks, ref, options, resolve)
    commit = answer.commit

    def plan(manifest: Manifest) -> tuple[Template, LoadPlan, Told]:
        template = Template(manifest, options)
        template.plan(repo, state)
        return template, template.reads, template.told

    def check(fits: Sequence[Fit]) -> Sequence[str | None]:
        return everyone(template.check_fit(fits), ranks.size)

    def run(job: JobReads | None) -> list[bool]:
        replace_leaves(state, template.reads.run(repo, job))
        return also_unread(asked, (*template.subtrees, *template.unread))

    def finish(done: Sequence[list[bool]]) -> tuple[str, ...]:
        unread, own = on_all(asked, done), frozenset(template.subtrees)
        if options.unread == "warn":
            _warn(commit, template, options, unread, warning)
        return tuple(key for key in unread if key in own)

    with collector_paused() if commit.committed.bytes_total < _QUICK_BYTES else nullcontext():
        template, (asked, partly), deal = _planned(repo, ranks, answer, plan, Template.compare)  # raises every mismatch
        warning = ranks.exchange(lambda: template.fit, check) if partly else None  # some tensors are not filled
        subtrees = run_together(ranks, deal, run, finish)  # reads, decodes and verifies every cell
    return Checkpoint(
        repo, commit, template.missing, template.unread, tuple(filter(None, subtrees)), template.mismatched,
        frames=template.reads.frames,
    )  # fmt: skip


def read_together(
    repo: Repository,
    ranks: Ranks,
    checkpoint: Checkpoint,
    *,
    keys: Callable[[], Sequence[str] | None],
    device: Callable[[], torch.device],
    options: LoadOptions,
) -> Any:
    """Read as `read` does, on every rank of ``ranks``, which share their reads. All ranks raise the errors of any rank.

    ``keys``, ``device``: functions that return these arguments.
    """
    answer, options = _resolved(repo, ranks, checkpoint, options, lambda: checkpoint.commit)

    def plan(manifest: Manifest) -> tuple[tuple[LoadPlan, Sequence[str] | None], LoadPlan, None]:
        patterns = usable_patterns(keys())
        reads = _plan_to_read(manifest, patterns, device(), options)
        return (reads, patterns), reads, None

    def compare(_: object, __: object) -> None:
        """Do nothing: no rank raised an error."""

    def run(job: JobReads | None) -> None:
        values.update(reads.run(repo, job))

    values = dict[str, Any]()
    (reads, patterns), _, deal = _planned(repo, ranks, answer, plan, compare)
    run_together(ranks, deal, run, lambda _: None)
    return _in_structure(reads, values, patterns)


def _planned(
    repo: Repository,
    ranks: Ranks,
    answer: _ResolveAnswer,
    plan: Callable[[Manifest], tuple[Kept, LoadPlan, Up]],
    compare: Callable[[Kept, Sequence[Up]], Down],
) -> tuple[Kept, Down, Deal | None]:
    """Plan the reads on every rank. Return what ``plan`` keeps, the result of ``compare``, and what hosts pass on.

    ``plan``: returns a value that stays on its rank, the reads, and a message. ``compare``: receives rank 0's value and
    all messages.
    """
    commit = answer.commit
    if answer.manifest is not None and ranks.rank != 0:
        manifests.adopt(repo, commit, answer.manifest)

    def call() -> tuple[tuple[Kept, Manifest], tuple[Up, Needs | None]]:
        answer.home.check(repo)
        mine, reads, message = manifests.use(repo, commit, lambda _, manifest: plan(manifest))
        return (mine, reads.contents.manifest), (message, reads.needs(repo))

    @wraps(compare)  # ranks compare its name to check that they are at the same point
    def decide(
        first: tuple[Kept, Manifest], told: Sequence[tuple[Up, Needs | None]]
    ) -> Sequence[tuple[Down, Deal | None]]:
        mine, manifest = first
        down = compare(mine, [message for message, _ in told])
        dealt = deals([needs for _, needs in told], manifest.head.digest, manifest.blob_sizes)
        same = {id(deal): (down, deal) for deal in dealt}  # an answer for several ranks is packed once
        return [same[id(deal)] for deal in dealt]

    (mine, _), (down, deal) = exchange_keeping(ranks, call, decide)
    return mine, down, deal


def _warn(commit: Commit, template: Template, options: LoadOptions, unread: Sequence[str], warning: str | None) -> None:
    """Log what no rank read, the ``warning`` about unfilled tensors, and other ranks' values that no rank read."""
    logged = [key for key in unread if not that_hold(options.meant, [key])]
    warn_unread(commit.run, commit.step, logged, 'pass unread="ignore"')
    log_once(commit.id, warning, template.missing)
    left_here = frozenset(template.unread)
    read = {key: held for key, held in template.per_rank.items() if key not in left_here}
    warn_moved(commit.run, commit.step, read, options.ranks)


def _resolved(
    repo: Repository, ranks: Ranks, ref: str | Checkpoint, options: LoadOptions, resolve: Callable[[], Commit]
) -> tuple[_ResolveAnswer, LoadOptions]:
    """Resolve ``ref`` on rank 0, and send the answer to all ranks. Return the answer, and this rank's options."""

    def hello() -> tuple[LoadOptions, _ResolveRequest]:
        checked = options.checked()
        check_verified(repo, verify=options.verify)
        return checked, _ResolveRequest(named(ref), repo.host, repo.shares, repo.manifests.names())

    def find(_: LoadOptions, requests: Sequence[_ResolveRequest]) -> list[_ResolveAnswer]:
        check_same([request.ref for request in requests])
        commit, manifest = manifests.use(repo, resolve(), lambda commit, manifest: (commit, manifest))
        home, name, load_id = StoreIdentity.of(repo), (commit.places.txid, commit.committed.head), repo.entropy(8).hex()
        on_host = Counter(request.host for request in requests)
        sharing = Counter(request.host for request in requests if request.shares)
        sharing = sharing if sharing.total() > 1 else Counter()
        answers = {}  # a single object for all ranks that receive the same answer
        for request in requests:
            known = name in request.names
            answers[request.host, known] = _ResolveAnswer(
                commit, None if known else manifest, on_host[request.host], sharing[request.host], load_id, home
            )
        return [answers[request.host, name in request.names] for request in requests]

    checked, answer = exchange_keeping(ranks, hello, find)
    return answer, replace(
        checked, rank=ranks.rank, ranks=ranks.size, ranks_here=answer.ranks_here, sharing=answer.sharing,
        load_id=answer.load_id, alive=ranks.alive if ranks.size > 1 else None, patience=WAIT_SHARE * ranks.timeout,
    )  # fmt: skip


def wanted_blobs(repo: Repository, manifest: Manifest, state: Any, options: LoadOptions) -> list[BlobRef]:
    """Return the blobs that a load into ``state`` reads.

    Raises MissingKey, Mismatch or InvalidInput in the same cases as the load.
    """
    template = Template(manifest, options)
    template.plan(repo, state)
    return template.reads.reader(repo).blobs(template.reads.wants())


def read(
    repo: Repository, commit: Commit, *, keys: Sequence[str] | None, device: torch.device, options: LoadOptions
) -> Any:
    """Load new tensors on ``device``, and the other leaves, in the saved structure. ``keys``: fnmatch patterns."""
    patterns = usable_patterns(keys)
    plan = manifests.use(repo, commit, lambda _, manifest: _plan_to_read(manifest, patterns, device, options))
    return _in_structure(plan, plan.run(repo), patterns)


def _in_structure(plan: LoadPlan, values: Mapping[str, Any], patterns: Sequence[str] | None) -> Any:
    return inflate(
        plan.contents.tree, lambda key, leaf: values[key], lambda key: key in values or matches(key, patterns)
    )


def _plan_to_read(
    manifest: Manifest, patterns: Sequence[str] | None, device: torch.device, options: LoadOptions
) -> LoadPlan:
    contents = Contents(manifest, options.rank, TORCH_EXTENSIONS)
    plan = LoadPlan(contents, options)
    wanted = _wanted(contents.tree, patterns)
    contents.ready(wanted)
    for key in sorted(wanted) if options.mapped else wanted:  # neighbors in a blob usually have neighboring keys
        plan.new(key, device)
    if patterns is not None:
        check_used(patterns, list(_names(contents.tree, ())), contents.where)
    return plan


def _wanted(tree: Node, patterns: Sequence[str] | None) -> list[str]:
    """Return the keys of all leaves that match.

    All tensors of a wrapper match if its key, or the key of one of them, does.
    """
    wanted = list[str]()
    for above, node in units(tree):
        keys = [join(path) for path, _ in leaves(node, above)]
        if any(matches(key, patterns) for key in (join(above), *keys)):
            wanted += keys
    return wanted


def values_at(repo: Repository, contents: Contents, keys: Sequence[str], options: LoadOptions) -> dict[str, Any]:
    """Return the values of leaves or whole containers, by flat key. Tensors are new, and on the CPU.

    Raises MissingKey.
    """
    plan = LoadPlan(contents, options)
    contents.ready(keys)
    for key in keys:
        if not plan.add(key, key, LeafValue(key, (key,), None, False, False)):
            raise MissingKey(f"{contents.where} lacks {key!r}", keys=(key,))
    return plan.run(repo)


def _names(node: Node, path: Path) -> Iterator[str]:
    """Yield the flat keys of all leaves, wrappers and empty containers."""
    if isinstance(node, Wrapper):
        yield join(path)
    if isinstance(node, int) or not node:
        yield join(path)
    else:
        for element, child in children(node):
            yield from _names(child, (*path, element))


def read_attachment(repo: Repository, manifest: Manifest, name: str, options: LoadOptions) -> bytes:
    """Return the contents of one attachment. Raises NotFound."""
    contents = Contents(manifest)
    attached = contents.attachments.get(name)
    if attached is None:
        names = sorted(contents.attachments)
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise NotFound(f"{contents.where} has no attachment {name!r}; it has {listed or 'none'}")
    if isinstance(attached, StoredObject):
        return manifest.data(attached)
    plan = LoadPlan(contents, options)
    data = plan.new_tensor(attached, torch.device("cpu"))
    plan.run(repo)
    return data.numpy().tobytes()
