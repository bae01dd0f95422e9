"""The verify command: compares the objects of live checkpoints with their hashes, and marks damaged blobs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from casckpt.base.progress import Progress, silent
from casckpt.base.text import few
from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve_many
from casckpt.contents.signatures import is_trusted
from casckpt.errors import CasckptError, Damaged, Gone, InvalidInput, Refused
from casckpt.format.keys import blob_key, commit_key, manifest_key, tag_folder
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, TxId
from casckpt.format.records import Settings
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.tags import list_tags
from casckpt.repository.fetching import compare_size
from casckpt.repository.reading import PREFIX, check_requirements, read_records
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.recovery import faults
from casckpt.upkeep.inventory import BlobUse, list_objects
from casckpt.upkeep.repair.affected import DamagedBlob, describe
from casckpt.upkeep.repair.blob_check import Checked, check_blobs
from casckpt.upkeep.repair.frames import Frames
from casckpt.upkeep.saves import RESTORE, about_unreadable, foreign_commits, lost_records, why_foreign

Mode = Literal["full", "exists"]
Name = tuple[TxId, BlobHash]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DamagedManifest:
    """A live checkpoint with an unreadable manifest. It cannot be loaded. Until it is repaired, gc deletes nothing."""

    id: str
    run: str
    step: int
    why: str


class DamagedRecord(NamedTuple):
    """A commit or tag record that cannot be read, or is missing."""

    key: str
    why: str


class UnreadBlob(NamedTuple):
    """A blob that could not be read, and may be damaged."""

    blob: BlobHash
    why: str


@dataclass(frozen=True)
class VerifyResult:
    """The result of a verification. ``checked_bytes``: size of the hashed blobs. ``blobs``: number of needed blobs.

    ``damaged``: damaged blobs, and blobs with a frame that decodes to a wrong cell. ``decoded_bytes``: size of the
    decoded cells and their bases. ``repaired``: marked blobs that are intact again. ``unsigned``: checkpoints without a
    trusted signature, if the store was opened with ``require_signature``.
    """

    checked_blobs: int = 0
    blobs: int = 0
    checked_bytes: int = 0
    checked_checkpoints: int = 0
    decoded_bytes: int = 0
    damaged: tuple[DamagedBlob, ...] = ()
    manifests: tuple[DamagedManifest, ...] = ()
    records: tuple[DamagedRecord, ...] = ()
    failed: tuple[UnreadBlob, ...] = ()
    repaired: tuple[str, ...] = ()
    unsigned: tuple[Commit, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether any object is missing or damaged."""
        return bool(self.damaged or self.manifests or self.records)


@dataclass
class Survey:
    """The objects that checkpoints need. ``sizes``: sizes of the blobs, by name.

    ``broken``: checkpoints with a damaged manifest.
    """

    commits: list[Commit] = field(default_factory=list)
    sizes: dict[Name, int] = field(default_factory=dict)
    broken: list[tuple[Commit, CasckptError]] = field(default_factory=list)

    def refs(self) -> list[BlobRef]:
        """Return the blobs, sorted by uploader."""
        return [BlobRef(blob, self.sizes[uploader, blob], uploader) for uploader, blob in sorted(self.sizes)]


def verify(
    repo: Repository,
    *,
    refs: Iterable[str | Commit] | None = None,
    mode: Mode = "full",
    part: tuple[int, int] = (0, 1),
    decode: bool = False,
    progress: Progress = silent,
) -> VerifyResult:
    """Check all objects of live checkpoints, including forgotten ones, and update the marks of damaged blobs.

    Skips commits that were rewritten without a loss. ``refs``: check only these checkpoints (None: all). ``mode``:
    "full" reads and verifies every blob once. "exists" compares presence and size, and trusts the marks. ``part``: (K,
    N) checks the K-th of N parts of the blobs, in addition to marked blobs. A blob is always in the same part, so N
    calls check all. ``decode``: also decode all encoded cells and compare them; without it, only those in marked blobs.
    ``progress``: called with the number of bytes just read.

    No save reuses a marked blob. Only a check of all checkpoints removes marks. If the store is not writable, the old
    marks remain and verify logs a warning. Raises `NotFound`, `InvalidInput`, and `StorageError`. Damage does not raise
    an error; it is reported in the result.
    """
    _check_arguments(mode, part, decode)
    listed = list_commits(repo, anew=mode == "full")
    chosen = listed.placed() if refs is None else resolve_many(repo, refs, listed)
    records = damaged_records(repo, listed, is_all=refs is None, anew=mode == "full")
    needs = survey(repo, chosen, with_extents=mode == "full")
    needed, marked = needs.refs(), marked_blobs(repo)
    index, parts = part
    wanted = [ref for ref in needed if int(ref.hash[:8], 16) % parts == index or (ref.uploader, ref.hash) in marked]
    log.info("%d checkpoints, %d blobs to check", len(needs.commits), len(wanted))
    progress.expect(sum(ref.size for ref in wanted) if mode == "full" else 0)
    read = 0

    def count(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(nbytes)

    by_size = mode == "exists"
    checked = list(compare_sizes(wanted, list_objects(repo), marked) if by_size else check_blobs(repo, wanted, count))
    right = [blob for blob in checked if blob.is_right and not by_size]
    frames = Frames(repo, [blob for blob in right if decode or _name(blob) in marked], progress)
    wrong = [*(blob for blob in checked if blob.why), *frames.wrong(needs.commits)]
    damaged = describe(repo, needs.commits, wrong)
    unmarked = [blob for blob in damaged if mode == "full" or (blob.uploader, blob.blob) not in marked]
    healed = marked.keys() & set(map(_name, right if refs is None else ())) - set(map(_name, wrong))
    repaired = _update_marks(repo, unmarked, healed)
    return VerifyResult(
        checked_blobs=len(checked),
        blobs=len(needed),
        checked_bytes=read,
        checked_checkpoints=len(chosen),
        decoded_bytes=frames.decoded_bytes,
        damaged=tuple(damaged),
        manifests=tuple(DamagedManifest(c.id, c.run, c.step, str(error)) for c, error in needs.broken),
        records=tuple(records),
        failed=tuple(UnreadBlob(blob.ref.hash, blob.failed) for blob in checked if blob.failed),
        repaired=repaired,
        unsigned=tuple(commit for commit in chosen if not is_trusted(repo, commit.id)),
    )


def damaged_records(
    repo: Repository, listed: CommitList, *, is_all: bool = True, anew: bool, objects: Iterable[str] | None = None
) -> list[DamagedRecord]:
    """Return the unreadable and missing records of commits and tags. With ``is_all``, include announcements of runs.

    ``anew``: also reread records that this host has read before. ``objects``: the keys of a listing of objects/ (None:
    make one). Raises `StorageError`.
    """
    unread = sorted(listed.damaged.items())
    damaged = [(f"commits/{name}", f"{error}. {about_unreadable(name)}") for name, error in unread]
    tags = list_tags(repo, anew=anew, listed=listed)
    damaged += [(tag_folder(name), str(error)) for name, error in sorted(tags.damaged.items())]
    if is_all:
        why = f"it is missing, although objects/ has a manifest of this save. {RESTORE}"
        damaged += [(commit_key(txid), why) for txid in lost_records(repo, objects or list_objects(repo))]
        settings = read_records(repo, PREFIX, repo.numbered(PREFIX).values(), lambda _: Settings, anew=anew)
        damaged += [(key, str(one)) for key, one in sorted(settings.items()) if not isinstance(one, Settings)]
        damaged += faults(repo, listed, anew=anew)
        foreign = foreign_commits(repo, listed.visible())
        damaged += [(commit_key(one.txid), why_foreign([one])) for one in foreign]
    return [DamagedRecord(*record) for record in damaged]


def known_damage(repo: Repository, listed: CommitList, objects: Mapping[str, int]) -> list[DamagedRecord]:
    """Return the damage that is found without reading blobs: what stops a gc, missing and truncated blobs, and marks.

    ``objects``: the sizes of all objects, listed after ``listed``. Remote manifests are read only if the listing or the
    catalogue gives a reason. Writes nothing. Raises `StorageError`.
    """
    live, near = listed.placed(), not repo.storage.traits.remote
    use, found = BlobUse(repo, live), list[DamagedRecord]()
    for commit in live:
        key, is_known = manifest_key(commit.places.txid, commit.id), commit.places.txid in use.blobs
        if near or not is_known or objects.get(key) != commit.committed.manifest_bytes:
            try:
                manifests.stored_blobs(repo, commit)
            except (Damaged, Refused) as error:
                found.append(DamagedRecord(key, str(error)))
            except Gone:
                continue
    refs = [BlobRef(blob, size, uploader) for uploader, blob, size in use.refs]
    wrong = {number: one.why for number, one in enumerate(compare_sizes(refs, objects, marked_blobs(repo))) if one.why}
    now = list_commits(repo).placed() if wrong else ()  # without what gc has purged since
    users = [(one, {*own.tolist()}) for one in now if (own := use.blobs.get(one.places.txid)) is not None]
    for number, why in wrong.items():
        if needs := [commit for commit, numbers in users if number in numbers]:
            key = blob_key(refs[number].uploader, refs[number].hash)
            found.append(DamagedRecord(key, f"{why} (needed by {few(needs, 3)})"))
    return found + damaged_records(repo, listed, anew=near, objects=objects)


def _check_arguments(mode: Any, part: tuple[int, int], decode: bool) -> None:
    if not 0 <= part[0] < part[1]:
        raise InvalidInput(f"part={part!r} is not valid: pass (K, N), with K from 0 to N - 1")
    if decode and mode != "full":
        raise InvalidInput(
            f"mode={mode!r} does not read cells, so it cannot decode them: pass mode='full', or omit decode"
        )
    if mode not in ("full", "exists"):
        raise InvalidInput(f"mode={mode!r} is not valid: pass mode='full' or mode='exists'")


def survey(repo: Repository, commits: Iterable[Commit], *, with_extents: bool = False) -> Survey:
    """Read the manifests of ``commits``. Skip commits that were purged in the meantime. Raises `StorageError`.

    ``with_extents``: also read the extents of each tensor. A manifest with a damaged part still counts as readable.
    """
    needs = Survey()
    reader = repo.fresh()  # without caches, because verify checks the store itself
    for commit in commits:
        try:
            manifest = manifests.get(reader, commit)
            wrong = _check_manifest(manifest, commit, with_extents)
        except Gone:
            continue
        except (Damaged, Refused) as error:
            needs.broken.append((commit, error))
            continue
        if wrong is not None:
            needs.broken.append((commit, wrong))
        needs.commits.append(commit)
        for ref in manifest.blobs:
            needs.sizes[ref.uploader, ref.hash] = ref.size
    return needs


def _check_manifest(manifest: Manifest, commit: Commit, with_extents: bool) -> Damaged | None:
    """Read a whole manifest, and return the damage in its parts. Raises `Refused`, `Gone`, and `StorageError`."""
    faults = manifest.faults()
    if faults:
        return Damaged(f"the manifest of {commit} is damaged: {'; '.join(faults)}", checkpoints=(commit.id,))
    for entry in manifest.held if with_extents else ():
        manifest.extents(entry)
    return None


def _name(blob: Checked) -> Name:
    return blob.ref.uploader, blob.ref.hash


def marked_blobs(repo: Repository) -> dict[Name, str]:
    """Return the marked blobs, and the reason for each mark."""
    return {(mark.uploader, mark.blob): mark.why for mark in blobs.marks(repo) if mark.state != blobs.REPAIRED}


def compare_sizes(refs: Iterable[BlobRef], sizes: Mapping[str, int], marked: Mapping[Name, str]) -> Iterator[Checked]:
    """Compare presence and sizes with a listing. ``marked``: the marked blobs, and the reason for each mark."""
    for ref in refs:
        size, mark = sizes.get(blob_key(ref.uploader, ref.hash)), marked.get((ref.uploader, ref.hash))
        why = compare_size(ref, size)
        if not why and mark is not None:
            yield Checked(ref, f"it was marked as damaged before: {mark}")
        else:
            yield Checked(ref, why)


def _update_marks(repo: Repository, damaged: Sequence[DamagedBlob], healed: AbstractSet[Name]) -> tuple[BlobHash, ...]:
    """Mark ``damaged`` blobs, and unmark ``healed`` ones. Return the blobs that were unmarked.

    If the store is not writable, logs a warning and returns no blobs, so that the caller still gets the result.
    """
    try:
        if damaged or healed:
            check_requirements(repo)
        for blob in damaged:
            blobs.mark_damaged(repo, blob.uploader, blob.blob, blob.why)
        for uploader, name in sorted(healed):
            blobs.mark_repaired(repo, uploader, name, "verify found it intact")
    except CasckptError as error:
        log.warning("casckpt could not update the marks of damaged blobs, so saves may reuse damaged blobs: %s", error)
        return ()
    return tuple(name for _, name in sorted(healed))
