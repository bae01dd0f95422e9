"""Thinning: removes some of a checkpoint's tensors, such as the optimizer state, and keeps its id.

A thinned checkpoint has new places, without the dropped entries and without the blobs that only these entries use.
Thinning does not read or write tensor bytes. gc trims the old places like a forgotten checkpoint. Until then, `restore`
recovers all entries.

A tag protects the whole checkpoint. Thinning reads the log, then lists the tags, and then takes the log's next number.
A process that sets a tag takes that number too, so at least one of the two notices the other.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from casckpt.base.names import Runs, is_among
from casckpt.base.parallel import in_parallel
from casckpt.base.units import time_of
from casckpt.contents import manifests
from casckpt.contents.refs import resolve_many
from casckpt.errors import CasckptError, Conflict, Damaged, Gone, InvalidInput, MissingKey, NotFound
from casckpt.format.manifest import Manifest, thinned
from casckpt.format.names import BlobHash, TxId
from casckpt.format.records import Dropped, Rewritten, changed
from casckpt.format.sections.index import ATTACHMENT, Entry
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.tags import Tag, tagged_txids, tags, tags_of, write_generation
from casckpt.plan.retention import Policy, patterns_of, reasons_to_keep
from casckpt.plan.reuse import coded_bytes
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.ages import min_age_of
from casckpt.upkeep.gc.purge import check_metrics, kept_of
from casckpt.upkeep.inventory import BlobUse
from casckpt.upkeep.rewrite import rewrite, rewritten
from casckpt.upkeep.saves import check_own

log = logging.getLogger(__name__)
_Sizes = dict[tuple[TxId, BlobHash], int]


@dataclass(frozen=True)
class Thin:
    """The plan for one checkpoint.

    ``entries``: numbers of the entries to drop. ``nbytes``: size of these entries. ``goes``: sizes of the blobs that
    only dropped entries use. ``stays``: sizes of the blobs that other entries use.
    """

    commit: Commit
    entries: frozenset[int]
    nbytes: int
    goes: _Sizes
    stays: _Sizes


@dataclass(frozen=True)
class ThinPlan:
    """The checkpoints to thin, oldest first.

    ``done``: checkpoints that are already thinned. ``failed``: errors of checkpoints that cannot be thinned.
    ``tagged``: whether tags move to the new places. ``chosen``: how many checkpoints the call named or the rule
    selected.
    """

    drop: tuple[str, ...]
    thin: tuple[Thin, ...] = ()
    done: tuple[Commit, ...] = ()
    failed: tuple[CasckptError, ...] = ()
    tagged: bool = False
    chosen: int = 0


@dataclass(frozen=True)
class ThinResult:
    """The new commits of the thinned checkpoints or, with ``dry_run``, the current commits of the checkpoints to thin.

    ``entries``, ``nbytes``: number and size of the dropped tensors. ``freed_bytes``: size of the blobs that gc deletes
    after it trims the old places. gc may trim them after ``until`` (None: at the next gc). ``shared_bytes``: size
    of the blobs that the thinned checkpoints no longer use but other checkpoints still need.
    """

    thinned: tuple[Commit, ...] = ()
    entries: int = 0
    nbytes: int = 0
    freed_bytes: int = 0
    shared_bytes: int = 0
    until: datetime | None = None
    dry_run: bool = False


def plan_thin(
    repo: Repository,
    refs: Iterable[str | Commit] = (),
    *,
    drop: str | Sequence[str],
    keep: Policy | None = None,
    run: Runs = None,
    tagged: bool = False,
    among: Container[str] | None = None,
) -> ThinPlan:
    """Plan to drop the entries that match ``drop`` (fnmatch patterns on keys), from ``refs`` or by a rule.

    ``keep``: a policy that selects the checkpoints to leave whole. The newest checkpoint of each run is always left
    whole. ``tagged``: also thin checkpoints that have a tag without an expiration time. ``among``: the ids
    of the only checkpoints that may be thinned; None for all. Writes nothing.

    Raises `Conflict` if one of ``refs`` is tagged, `InvalidInput`, `NotFound`, and `StorageError`.
    """
    rule, wanted = patterns_of(drop), list(refs)
    if bool(wanted) is not (keep is None or keep.is_empty):
        raise InvalidInput("specify either the checkpoints to thin, or a rule for the ones to keep whole (keep-last)")
    listed = list_commits(repo)
    named = _barring(repo, tagged=tagged, listed=listed)
    if wanted:
        chosen = resolve_many(repo, wanted, listed)
        _check_untagged(named, chosen)
    else:
        check_own(repo, listed.visible())
        chosen = _beyond(listed, keep or Policy(), repo.clock(), tagged_txids(named, listed.visible()), run)
    left = [commit for commit in chosen if among is None or commit.id in among]
    done = tuple(commit for commit in left if rule <= _rule(commit))
    todo = [commit for commit in left if not rule <= _rule(commit)]
    plans = list(in_parallel(repo.storage.traits.requests, partial(_plan_one, repo, rule), todo))
    thin = tuple(plan for plan in plans if isinstance(plan, Thin) and plan.entries)
    failed = tuple(error for error in plans if isinstance(error, CasckptError))
    return ThinPlan(tuple(sorted(rule)), thin, done, failed, tagged, len(left))


def _barring(repo: Repository, *, tagged: bool, listed: CommitList | None = None) -> dict[str, Tag]:
    """Return the tags whose checkpoints must not be thinned. ``listed``: see `casckpt.history.tags.list_tags`."""
    return {name: tag for name, tag in tags(repo, listed=listed).items() if not tagged or tag.expires is not None}


def _rule(commit: Commit) -> frozenset[str]:
    """Return the patterns with which a checkpoint was thinned."""
    return frozenset() if commit.dropped is None else commit.dropped.patterns


def _check_untagged(named: Mapping[str, Tag], chosen: Iterable[Commit]) -> None:
    for commit in chosen:
        if names := tags_of(named, commit.id):
            raise Conflict(
                f"{commit} is tagged {', '.join(names)}, so nothing was thinned. Wait until any tags with an "
                "expiry date have expired, and then pass --tagged (tagged=True)",
                checkpoints=(commit.id,),
            )


def _beyond(listed: CommitList, keep: Policy, now: int, tagged: set[TxId], run: Runs) -> list[Commit]:
    """Return the visible checkpoints that ``keep`` does not keep and whose logs can be read, oldest first."""
    certain = (commit for commit in listed.visible() if commit.txid not in listed.damaged)
    visible = [commit for commit in certain if is_among(commit.run, run)]
    left = reasons_to_keep(map(kept_of, visible), keep, now).keys() | tagged
    return [commit for commit in visible if commit.txid not in left]


def _plan_one(repo: Repository, rule: frozenset[str], commit: Commit) -> Thin | CasckptError:
    try:
        manifest = manifests.get_with_extents(repo, commit)
        goes = list(_matching(manifest, rule))
        numbers = frozenset(entry.number for entry in goes)
        stays = [entry for entry in manifest.held if entry.number not in numbers]
        if goes and not any(entry.nbytes for entry in stays):
            raise InvalidInput(f"thinning would drop every tensor of {commit}: forget it instead (`casckpt forget`)")
        used = _sizes(manifest, stays)
        gone = {name: size for name, size in _sizes(manifest, goes).items() if name not in used}
        return Thin(commit, numbers, sum(entry.nbytes for entry in goes), gone, used)
    except (Damaged, Gone, InvalidInput) as error:
        return error


def _matching(manifest: Manifest, rule: Iterable[str]) -> Iterator[Entry]:
    for entry in manifest.held:
        given = [one for one in rule if one[:1] == "/" or entry.key[:1] != "/"]  # an entry of several files has a slash
        if entry.nbytes and entry.kind != ATTACHMENT and manifest.matches(entry.key, given):
            yield entry


def _sizes(manifest: Manifest, entries: Iterable[Entry]) -> _Sizes:
    used = {one.blob for entry in entries for extent in manifest.extents(entry).extents for one in extent.chain}
    refs = (manifest.blob(number) for number in used)
    return {(ref.uploader, ref.hash): ref.size for ref in refs}


def thin(repo: Repository, plan: ThinPlan, *, dry_run: bool = False) -> ThinResult:
    """Carry out ``plan`` or, with ``dry_run``, only return the expected result. Raises the errors of `execute`."""
    chosen = [one.commit for one in plan.thin]
    freed, shared = _space(repo, plan)
    result = ThinResult(
        thinned=tuple(chosen),
        entries=sum(len(one.entries) for one in plan.thin),
        nbytes=sum(one.nbytes for one in plan.thin),
        freed_bytes=freed,
        shared_bytes=shared,
        until=_until(repo, chosen),
        dry_run=True,
    )
    return result if dry_run else replace(result, thinned=execute(repo, plan), dry_run=False)


def _space(repo: Repository, plan: ThinPlan) -> tuple[int, int]:
    """Return two totals: blobs that gc can delete once the old places are trimmed, and blobs that others still need."""
    goes: _Sizes = {name: size for one in plan.thin for name, size in one.goes.items()}
    bases = {one.commit.places.txid for one in plan.thin}
    others = (one for one in list_commits(repo).placed() if one.places.txid not in bases)
    needed = {name for one in plan.thin for name in one.stays} | BlobUse(repo, others).named
    free = sum(size for name, size in goes.items() if name not in needed)
    return free, sum(goes.values()) - free


def _until(repo: Repository, chosen: Sequence[Commit]) -> datetime | None:
    ages = min_age_of(repo, None)
    longest = max((ages.of(commit) for commit in chosen), default=0)
    return time_of(repo.clock() + longest) if longest else None


def execute(repo: Repository, plan: ThinPlan) -> tuple[Commit, ...]:
    """Carry out ``plan``, and return the new commits. Skips checkpoints that another process has changed.

    Raises `Unsupported` if this version does not know one of the store's requirements for writers. Raises
    `StorageError`; the checkpoints that were thinned before the error remain thinned.
    """
    check_requirements(repo)
    made = [done for one in plan.thin if (done := _thin(repo, one, plan.drop)) is not None]
    if plan.tagged:
        _move_tags(repo, [*plan.done, *made])
    return tuple(made)


def thin_chosen(
    repo: Repository,
    refs: Iterable[str | Commit],
    keep: Policy,
    *,
    drop: str | Sequence[str],
    run: Runs,
    tagged: bool,
    dry_run: bool,
) -> ThinResult:
    """Thin the checkpoints in ``refs``, or by ``keep``. Then raise the errors of those that cannot be thinned."""
    check_metrics(repo, keep, run)
    plan = plan_thin(repo, refs, drop=drop, keep=keep, run=run, tagged=tagged)
    result = thin(repo, plan, dry_run=dry_run)
    check(plan)
    return result


def _thin(repo: Repository, plan: Thin, drop: Iterable[str]) -> Commit | None:
    def save(txid: TxId) -> Rewritten:
        manifest = manifests.get(repo, plan.commit)
        kept = (manifest.extents(entry) for entry in manifest.held if entry.number not in plan.entries)
        coded = coded_bytes(kept)._asdict()
        made = rewritten(repo, txid, plan.commit, thinned(manifest, plan.entries), **coded)
        return changed(made, dropped=_dropped(plan, drop))

    with suppress(Conflict, Gone):
        return rewrite(repo, plan.commit, save)
    return None


def _dropped(one: Thin, drop: Iterable[str]) -> Dropped:
    """Return the record of the dropped entries. It depends only on the patterns, not on their order or the store."""
    before = one.commit.dropped or Dropped(entries=0, bytes=0, rule="")
    words = [word for pattern in sorted(_rule(one.commit) | {*drop}) for word in ("--drop", pattern)]
    return Dropped(entries=before.entries + len(one.entries), bytes=before.bytes + one.nbytes, rule=shlex.join(words))


def _move_tags(repo: Repository, thin: Sequence[Commit]) -> None:
    """Move these checkpoints' tags to the new places. Skip leases, because their holders need all tensors."""
    now = {commit.id: commit for commit in thin}
    for tag in tags(repo).values() if thin else ():
        commit = now.get(tag.manifest)
        if commit is not None and tag.expires is None and tag.txid != commit.places.txid:
            with suppress(Conflict):  # another process has moved it
                write_generation(repo, tag.name, tag.generation + 1, commit)


def thin_alike(repo: Repository, others: Iterable[Commit]) -> list[Commit]:
    """Thin the checkpoints of ``repo`` like ``others``, their copies in a different store. Return the new commits.

    Skips checkpoints of ``repo`` that have a tag or cannot be read. Raises `StorageError`.
    """
    listed, named = list_commits(repo), {tag.manifest for tag in tags(repo).values()}
    made = []
    for other in others:
        here, rule = listed.of_id(other.id), _rule(other)
        if here is not None and here.visible and here.id not in named and not rule <= _rule(here):
            plan = _plan_one(repo, rule, here)
            if not isinstance(plan, CasckptError) and (done := _thin(repo, plan, rule)) is not None:
                made.append(done)
    return made


def whole_of(commit: Commit) -> Commit:
    """Return a thinned checkpoint at its fullest older places.

    Raises `NotFound` if they were trimmed or the checkpoint was never thinned.
    """
    fullest = min(reversed(commit.old), key=lambda one: one.lacking, default=commit)
    if fullest.lacking >= commit.lacking:
        raise NotFound(f"{commit} was never thinned, or gc has purged its old places")
    return fullest


def check(plan: ThinPlan) -> None:
    """Raise the first error of ``plan``. Raise MissingKey if its patterns do not match any entry."""
    for error in plan.failed:
        more = f" (the first error of {len(plan.failed)} checkpoints that cannot be thinned)" if plan.failed[1:] else ""
        raise type(error)(f"{error}{more}", **error.__dict__) from error
    if plan.chosen and not plan.thin and not plan.done:
        patterns = " or ".join(map(repr, plan.drop))
        raise MissingKey(
            f"no tensor of the chosen checkpoints matches {patterns}; `casckpt show --tensors` lists keys",
            keys=plan.drop,
        )
