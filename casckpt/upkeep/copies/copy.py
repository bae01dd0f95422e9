"""The copy command: copies the checkpoints that a target store lacks.

A copy skips a checkpoint that the target has under the same id. If the target has forgotten or purged a checkpoint, it
is copied only when the call names it, because the target has its own retention. Each checkpoint is copied separately
(`casckpt.upkeep.copies.replication`). If one cannot be copied, because it is damaged or because a different checkpoint
has its run and step, the others are still copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from casckpt.base.names import is_among
from casckpt.base.progress import Progress, silent
from casckpt.base.text import check_outside
from casckpt.contents import manifests
from casckpt.contents.refs import about_run, resolve_many, unread_within
from casckpt.errors import Conflict, Damaged, Gone, InvalidInput, NotFound, Refused, StorageError
from casckpt.format.keys import commit_key
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList, list_commits, restore
from casckpt.history.tags import Tag, TagList, get_tag, list_tags, set_tag
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.mirrored import unsafe_in
from casckpt.upkeep.copies.replication import (
    BlobLocations,
    Work,
    copy_signatures,
    occupant,
    replicate,
    taken,
    twin,
)
from casckpt.upkeep.gc.forgetting import CommitFailure
from casckpt.upkeep.repair.verify import DamagedRecord

REMOTE_JOBS, LOCAL_JOBS = 16, 4
_NOT_COPIED = (Conflict, Damaged, Gone, Refused)

T = TypeVar("T")


@dataclass(frozen=True)
class CopyPlan:
    """The plan of a copy. All tuples are oldest first.

    ``missing``: checkpoints to copy. ``forgotten``: commits of the target to restore. ``present``: checkpoints that
    the target has. ``left``: checkpoints that the target has forgotten or purged and that the call did not name.
    ``failed``: checkpoints that cannot be copied. ``nbytes``: size of the blobs that the target lacks. ``total``: the
    total for progress reports. It is ``nbytes`` or, if cells are encoded, the size of all blobs of each missing
    checkpoint. ``compress``: encode the cells. ``for_mirror``: whether the target is the source's mirror. ``records``:
    unreadable records of the source, which may belong to checkpoints to copy.
    """

    missing: tuple[Commit, ...] = ()
    forgotten: tuple[Commit, ...] = ()
    present: tuple[Commit, ...] = ()
    left: tuple[Commit, ...] = ()
    failed: tuple[CommitFailure, ...] = ()
    records: tuple[DamagedRecord, ...] = ()
    nbytes: int = 0
    total: int = 0
    compress: bool = False
    for_mirror: bool = False


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy or, with ``dry_run``, the expected result. ``copied``: the new commits in the target.

    ``blobs``, ``nbytes``: number and size of the blobs that this process uploaded. ``made_store``: whether the target
    was created. ``tags``: names of the tags that were set in the target. ``tags_left``: why other tags were not set, in
    a copy of the whole store without ``tags``.
    ``records``: unreadable records of the source, whose checkpoints were not copied.
    """

    copied: tuple[Commit, ...] = ()
    restored: tuple[Commit, ...] = ()
    present: tuple[Commit, ...] = ()
    left: tuple[Commit, ...] = ()
    failed: tuple[CommitFailure, ...] = ()
    records: tuple[DamagedRecord, ...] = ()
    tags: tuple[str, ...] = ()
    tags_left: Mapping[str, str] = field(default_factory=dict)
    blobs: int = 0
    nbytes: int = 0
    made_store: bool = False
    dry_run: bool = False

    def raise_failure(self) -> None:
        """If ``failed`` or ``records`` is not empty, raise the most severe error.

        Its message includes the number of errors.
        """
        unread = [Damaged(f"a checkpoint was not copied: {record.why}", key=record.key) for record in self.records]
        errors = [*(failure.error for failure in self.failed), *unread]
        if not errors:
            return
        worst = max(errors, key=lambda error: isinstance(error, Damaged))
        more = f" (one of {len(errors)} checkpoints that were not copied)" if len(errors) > 1 else ""
        raise type(worst)(f"{worst}{more}", **worst.__dict__) from worst


def plan_copy(
    source: Repository,
    target: Repository,
    refs: Iterable[str | Commit] = (),
    *,
    run: str | None = None,
    compress: Literal["off", "always"] | None = None,
) -> CopyPlan:
    """Plan a copy of the checkpoints or ranges in ``refs``, or of all visible checkpoints, or of those of ``run``.

    ``run``: a name or a pattern. ``compress``: "always" encodes the cells of floats, except in checkpoints that already
    have encoded cells. Writes nothing. Raises `NotFound`, `InvalidInput`, and `StorageError`.
    """
    if compress not in {None, "off", "always"}:
        raise InvalidInput(f"compress={compress!r} is not valid for a copy: pass 'always' or 'off'")
    encodes = compress == "always"
    named = list(refs)
    listed = list_commits(source)
    source.check_exists()  # a missing store is an error, unlike an empty one
    check_outside(source.storage.url, target.storage.url)
    chosen = resolve_many(source, named, listed) if named else listed.current()
    chosen = sorted((commit for commit in chosen if is_among(commit.run, run)), key=lambda commit: commit.txid)
    records = _unread(source, listed, named, chosen, run)
    if run is not None and not (named or chosen or records):
        raise NotFound(about_run(source, listed, run))
    there, settings = list_commits(target) if target.exists() else CommitList({}, {}), source.settings
    is_mirror = settings.mirror == target.storage.url
    behind = unsafe_in(target, chosen, thinned=bool(settings.mirror_thinned), listed=there) if is_mirror else ()
    plan = _plan_for(source, target, chosen, there, behind, named=bool(named))
    total = plan.total if encodes else plan.nbytes
    return replace(plan, records=records, compress=encodes, for_mirror=is_mirror, total=total)


def _unread(
    source: Repository, listed: CommitList, named: Sequence[str | Commit], chosen: Sequence[Commit], run: str | None
) -> tuple[DamagedRecord, ...]:
    """Return the unreadable records of the source that may be among the wanted checkpoints."""
    seen = {commit.txid for commit in chosen}
    advice = f"Restore the record from a copy of {source.storage.url}; `casckpt verify` shows the details"
    return tuple(
        DamagedRecord(commit_key(txid), f"{listed.damaged[txid]}. {advice}")
        for txid in unread_within(listed, named, run)
        if txid not in seen
    )


def _plan_for(
    source: Repository,
    target: Repository,
    chosen: Sequence[Commit],
    there: CommitList,
    behind: Iterable[Commit],
    *,
    named: bool,
) -> CopyPlan:
    """Compare ``chosen`` with the commits ``there`` of the target, and plan the copy.

    ``behind``: those that are not safe in the target, which is the source's mirror. They are copied in any case.
    """
    ended = {commit.id for commit in there.commits.values() if commit.last == "purged"}
    unsafe = {commit.txid: commit for commit in behind}
    missing, forgotten, present, left, failed = [], [], [], [], []
    for commit in chosen:
        other, same = occupant(there, commit), there.of_id(commit.id)
        is_gone = commit.id in ended if same is None else not same.visible
        if commit.txid not in unsafe and twin(there, commit) is not None:
            present.append(commit)
        elif other is not None:
            failed.append(CommitFailure(commit, taken(target, commit, other)))
        elif commit.txid in unsafe or not is_gone:
            missing.append(unsafe.get(commit.txid, commit))
        elif not named:
            left.append(commit)
        elif same is not None and same.places.holds(commit.places):
            forgotten.append(same)
        else:
            missing.append(commit)
    total, nbytes = _bytes_of(source, target, missing, there)
    return CopyPlan(
        tuple(missing), tuple(forgotten), tuple(present), tuple(left), tuple(failed), nbytes=nbytes, total=total
    )


def _bytes_of(source: Repository, target: Repository, missing: Sequence[Commit], there: CommitList) -> tuple[int, int]:
    """Return the total size of the blobs of ``missing``, and of those that the target lacks.

    Skips unreadable manifests.
    """
    named = list(_named(source, missing))
    wanted = {ref.hash: ref for ref in named}
    known = manifests.locate(target, there.placed(), wanted) if there.commits else {}
    return sum(ref.size for ref in named), sum(ref.size for name, ref in wanted.items() if name not in known)


def _named(repo: Repository, commits: Iterable[Commit]) -> Iterator[BlobRef]:
    """Yield the blobs that each of ``commits`` names. Skips manifests that cannot be read."""
    for commit in manifests.learn(repo, commits):
        yield from manifests.blob_list(repo, commit)


def preview(source: Repository, target: Repository, plan: CopyPlan, *, with_tags: bool | None = False) -> CopyResult:
    """Return the result that `execute` would have. Writes nothing."""
    result = CopyResult(
        plan.missing, plan.forgotten, plan.present, plan.left, plan.failed, plan.records, nbytes=plan.nbytes,
        made_store=not target.exists(), dry_run=True,
    )  # fmt: skip
    return result if with_tags is False else _with_tags(source, target, result, with_tags)


def execute(
    source: Repository,
    target: Repository,
    plan: CopyPlan,
    *,
    with_tags: bool | None = False,
    jobs: int | None = None,
    progress: Progress = silent,
) -> CopyResult:
    """Carry out ``plan``. If the target does not exist, create it with the source's cell and blob sizes.

    ``with_tags``: set the source's tags on the copied and present checkpoints (None: those that the target does not
    have). ``jobs``: number of concurrent transfers. ``progress``: called with the number of bytes of finished blobs,
    `CopyPlan.total` in all.

    The result lists the checkpoints that cannot be copied. Raises `Unsupported` if this version does not know one of a
    store's requirements for writers. Raises `StorageError`; the next copy then continues the work.
    """
    progress.expect(plan.total)
    places = BlobLocations(target, {ref.hash for ref in _named(source, plan.missing)})
    work = Work(
        _jobs(source, target, jobs), for_mirror=plan.for_mirror, progress=progress, compress=plan.compress,
        places=places,
    )  # fmt: skip
    made = _create_target(source, target)
    copy_signatures(source, target, {commit.id for commit in (*plan.missing, *plan.present)})
    copied, not_copied = _each(plan.missing, lambda commit: replicate(source, target, commit, work))
    restored, not_restored = _each(plan.forgotten, lambda commit: restore(target, commit))
    failed = (*plan.failed, *not_copied, *not_restored)
    result = CopyResult(
        tuple(copied), tuple(restored), plan.present, plan.left, failed, plan.records,
        blobs=len(work.uploaded), nbytes=sum(work.uploaded), made_store=made,
    )  # fmt: skip
    return result if with_tags is False else _with_tags(source, target, result, with_tags)


def _create_target(source: Repository, target: Repository) -> bool:
    """Create ``target`` if it is missing. Return whether it was missing. Raises `Unsupported` if it refuses writers."""
    sizes = source.marker
    made = target.create(cell_bytes=sizes.cell_bytes, blob_bytes=sizes.blob_bytes)
    check_requirements(target)  # check now: after a refused commit, the copy could not use its own transaction id
    return made


def _each(commits: Iterable[Commit], call: Callable[[Commit], T]) -> tuple[list[T], list[CommitFailure]]:
    """Call ``call`` for each commit. Return the results, and the commits for which the call failed.

    Raises `StorageError` with the number of finished commits in its message.
    """
    wanted = list(commits)
    done, failed = [], []
    for commit in wanted:
        try:
            done.append(call(commit))
        except _NOT_COPIED as error:
            failed.append(CommitFailure(commit, error))
        except StorageError as error:
            so_far = f"{len(done)} of {len(wanted)} checkpoints are done; repeat the same call to continue"
            raise StorageError(f"{error}. {so_far}", **error.__dict__) from error
    return done, failed


def _jobs(source: Repository, target: Repository, jobs: int | None) -> int:
    if jobs is None:
        remote = source.storage.traits.remote or target.storage.traits.remote
        return REMOTE_JOBS if remote else max(2, min(LOCAL_JOBS, os.cpu_count() or 1))
    if type(jobs) is not int or jobs < 1:
        raise InvalidInput(f"jobs={jobs!r} is not valid: pass a positive number")
    return jobs


def _with_tags(source: Repository, target: Repository, result: CopyResult, with_tags: bool | None) -> CopyResult:
    """Set the tags of the copied and present checkpoints, except tags that expire. Return ``result`` with their names.

    ``with_tags``: None leaves the tags that the target has, and notes in the result what was left.
    """
    there = {commit.id: commit for commit in list_commits(target).visible()} if target.exists() else {}
    here = {one.id for one in (*result.copied, *result.restored, *result.present) if result.dry_run or one.id in there}
    found, before = list_tags(source), list_tags(target) if target.exists() else TagList({}, {})
    if with_tags:
        found.raise_damage()
    wanted, left = [], {name: str(error) for name, error in found.damaged.items()}
    for name, tag in found.tags.items():
        now = before.tags.get(name, before.damaged.get(name))
        if tag.expires is not None or (isinstance(now, Tag) and now.expires is None and now.manifest == tag.manifest):
            continue
        if tag.manifest in here and (with_tags or now is None):
            wanted.append(tag)
        else:
            why = "the target has it on a different checkpoint; --tags (tags=True) moves it"
            left[name] = why if tag.manifest in here else "its checkpoint was not copied"
    for tag in () if result.dry_run else wanted:
        try:
            set_tag(target, tag.name, there[tag.manifest])
        except Conflict:  # another process of the same copy may have set it first
            moved = get_tag(target, tag.name)
            if moved is None or moved.manifest != tag.manifest:
                raise
    return replace(result, tags=tuple(tag.name for tag in wanted), tags_left={} if with_tags else left)
