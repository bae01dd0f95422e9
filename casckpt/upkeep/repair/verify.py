"""verify: read what live checkpoints need, compare it with its hashes, and mark the blobs that are damaged."""

from __future__ import annotations

import logging
import random
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from casckpt.base.progress import Progress, silent
from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve_many
from casckpt.contents.signatures import is_trusted
from casckpt.errors import CasckptError, Damaged, Gone, InvalidInput, NotFound, Refused, StorageError
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key, commit_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import BlobHash, TxId
from casckpt.format.proof import Leaf, as_leaves
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.tags import list_tags
from casckpt.repository.fetching import compare_size, holds_cell
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.upkeep.gc.recovery import faults
from casckpt.upkeep.inventory import list_objects
from casckpt.upkeep.lost_records import ADVICE, lost_records
from casckpt.upkeep.repair.affected import DamagedBlob, describe
from casckpt.upkeep.repair.blob_check import Checked, check_blobs
from casckpt.upkeep.repair.frames import Frames

_AT_ONCE = 64  # blobs whose leaves are held


def wrong_rows(
    repo: Repository, commits: Iterable[Commit], right: Sequence[Checked]
) -> Iterator[tuple[Commit, CasckptError]]:
    """Yield the ``commits`` whose manifests disagree with the proofs of ``right``, which are verified blobs.

    A manifest with wrong rows has a right hash, so only this comparison or a load finds it. Cells that are stored as
    frames are checked elsewhere (`casckpt.upkeep.repair.frames`).
    """
    proofs = {(one.ref.uploader, one.ref.hash): one.proof for one in right}
    for commit in commits if proofs else ():
        try:
            _compare(repo, manifests.get(repo, commit), proofs)
        except (Damaged, Gone):
            continue  # of a manifest that is damaged others tell
        except Refused as error:
            yield commit, error


def _compare(repo: Repository, manifest: Manifest, proofs: Mapping[tuple[TxId, BlobHash], bytes]) -> None:
    refs = list(manifest.blobs)
    leaves_of = lru_cache(_AT_ONCE)(partial(_leaves, refs, proofs))
    manifest.ready(objects=())
    for entry in manifest.held:
        if entry.nbytes < LEAF_BYTES:
            continue
        for cell in (link for one in manifest.extents(entry).stored_cells() for link in one.chain):
            if cell.frame or cell.nbytes < LEAF_BYTES or not (leaves := leaves_of(cell.blob)):
                continue
            if not _holds(repo, refs[cell.blob], cell, leaves.get(cell.offset)):
                where = f"bytes {cell.offset} to {cell.offset + cell.nbytes} of blob {refs[cell.blob].hash}"
                raise Refused(f"key {entry.key!r}: {where} are right, but not what it says that lies there")


def _leaves(refs: Sequence[BlobRef], proofs: Mapping[tuple[TxId, BlobHash], bytes], number: int) -> dict[int, Leaf]:
    """Return the leaves of a blob by their offset; none where it was not looked at, or is damaged."""
    return {leaf.offset: leaf for leaf in as_leaves(proofs.get((refs[number].uploader, refs[number].hash), b""))}


def _holds(repo: Repository, ref: BlobRef, cell: StoredCell, leaf: Leaf | None) -> bool:
    if leaf is not None and leaf.nbytes == cell.nbytes:
        return leaf.digest == cell.digest
    try:  # cut by another writer
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            return holds_cell(reader, cell.offset, memoryview(bytearray(cell.nbytes)), cell.digest)
    except (NotFound, StorageError):
        return True  # it was purged just now


Mode = Literal["full", "exists"]
Name = tuple[TxId, BlobHash]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DamagedManifest:
    """A live checkpoint whose manifest cannot be read: nothing of it can be loaded, and gc deletes nothing."""

    id: str
    run: str
    step: int
    why: str


class DamagedRecord(NamedTuple):
    """A commit or tag record that cannot be read, or is missing."""

    key: str
    why: str


class UnreadBlob(NamedTuple):
    """A blob that the storage did not let be read: whether it is damaged is not known."""

    blob: BlobHash
    why: str


@dataclass(frozen=True)
class VerifyResult:
    """What was read, and what is wrong. ``checked_bytes``: of blobs, read and hashed. ``blobs``: needed, in all.

    ``damaged``: also, if cells were decoded, blobs that are what was written but hold a frame of another cell.
    ``decoded_bytes``: of coded cells and their bases, decoded and compared, if that was asked for. ``repaired``: blobs
    that had been marked and are right. ``unsigned``: what nobody has signed whose signature the store was opened to
    require.
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
        """Is anything that was written not there as it was written?"""
        return bool(self.damaged or self.manifests or self.records)


@dataclass
class Survey:
    """What live checkpoints need. ``sizes``: of the blobs, by name. ``broken``: whose manifest cannot be read."""

    commits: list[Commit] = field(default_factory=list)
    sizes: dict[Name, int] = field(default_factory=dict)
    broken: list[tuple[Commit, CasckptError]] = field(default_factory=list)

    def refs(self) -> list[BlobRef]:
        """Return the blobs, those of one uploader together."""
        return [BlobRef(blob, self.sizes[uploader, blob], uploader) for uploader, blob in sorted(self.sizes)]


def verify(
    repo: Repository,
    *,
    refs: Iterable[str | Commit] | None = None,
    mode: Mode = "full",
    sample: float = 1.0,
    mark: bool = True,
    decode: bool = False,
    progress: Progress = silent,
) -> VerifyResult:
    """Check all that live checkpoints need, forgotten ones too; not those that were rewritten without a loss.

    ``refs``: only what these checkpoints need (None: all). ``mode``: "full" reads every blob once and proves it, and
    compares the manifests with what was proved; "exists" looks at presence and size, and goes by the marks.
    ``sample``: the fraction of the blobs to look at, drawn at random, beside those that are marked. ``mark``: mark
    damaged blobs in the store, so that no save reuses them, and unmark those that are right again; a warning where the
    store cannot be written. ``decode``: decode coded cells, too, and compare them. ``progress``: counts the bytes that
    are read.

    Raises `NotFound`, `InvalidInput`, `StorageError`; what is damaged is reported, not raised.
    """
    _check_arguments(mode, sample, decode)
    listed = list_commits(repo, anew=mode == "full")
    chosen = listed.needed() if refs is None else resolve_many(repo, refs, listed)
    records = damaged_records(repo, listed, is_all=refs is None, anew=mode == "full")
    found = survey(repo, chosen, with_extents=mode == "full")
    needed, marked = found.refs(), {} if mode == "full" and sample >= 1 else _marked(repo)
    wanted = _sampled(repo, needed, sample, marked.keys())
    log.info("%d checkpoints, %d blobs to look at", len(found.commits), len(wanted))
    progress.expect(sum(ref.size for ref in wanted) if mode == "full" else 0)
    read = 0

    def count(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(nbytes)

    checked = list(_look(repo, wanted, marked) if mode == "exists" else check_blobs(repo, wanted, count))
    damaged = describe(repo, found.commits, [one for one in checked if one.why])
    right = [one for one in checked if one.proof and one.is_right]
    frames = Frames(repo, right if decode else (), progress)
    misframed = frames.wrong(found.commits if decode else ())
    broken = [*found.broken, *wrong_rows(repo, found.commits, right)]
    told = describe(repo, found.commits, misframed)
    unmarked = [one for one in damaged if mode == "full" or (one.uploader, one.blob) not in marked]
    is_all = decode and refs is None and sample >= 1
    healing = _Healing(unmarked, told, checked if mode == "full" else (), is_all=is_all)
    return VerifyResult(
        checked_blobs=len(checked),
        blobs=len(needed),
        checked_bytes=read,
        checked_checkpoints=len(chosen),
        decoded_bytes=frames.decoded_bytes,
        damaged=(*damaged, *told),
        manifests=tuple(DamagedManifest(c.id, c.run, c.step, str(error)) for c, error in broken),
        records=tuple(records),
        failed=tuple(UnreadBlob(one.ref.hash, one.failed) for one in checked if one.failed),
        repaired=_mark(repo, healing) if mark else (),
        unsigned=tuple(one for one in chosen if not is_trusted(repo, one.id)),
    )


def damaged_records(repo: Repository, listed: CommitList, *, is_all: bool = True, anew: bool) -> list[DamagedRecord]:
    """Return the records that cannot be read, or are missing: of commits and tags; ``is_all``: those of runs, too.

    ``anew``: what this host has read before is read again. Raises `StorageError`.
    """
    found = [(f"commits/{txid}", str(error)) for txid, error in sorted(listed.damaged.items())]
    found += [(f"tags/{name}", str(error)) for name, error in sorted(list_tags(repo).damaged.items())]
    if is_all:
        why = f"it is missing, and there is a manifest of this save under objects/. {ADVICE}"
        found += [(commit_key(txid), why) for txid in lost_records(repo, list_objects(repo))]
        found += faults(repo, listed, anew=anew)
    return [DamagedRecord(*record) for record in found]


def _check_arguments(mode: Any, sample: Any, decode: bool) -> None:
    if decode and mode != "full":
        raise InvalidInput(f"mode={mode!r} reads nothing that could be decoded; give mode='full', or leave out decode")
    if mode not in ("full", "exists") or not isinstance(sample, int | float) or not 0 < sample <= 1:
        raise InvalidInput(f"mode={mode!r}, sample={sample!r}: give 'full' or 'exists', and a fraction from 0 to 1")


def survey(repo: Repository, commits: Iterable[Commit], *, with_extents: bool = False) -> Survey:
    """Read the manifests of ``commits``; those that were purged meanwhile are left out. Raises `StorageError`.

    ``with_extents``: each tensor's part of a manifest is looked at too. What is damaged in a part of a manifest alone
    leaves it among those that can be read.
    """
    found = Survey()
    reader = repo.fresh()  # what lies in the store is what counts
    for commit in commits:
        try:
            manifest = manifests.get(reader, commit)
            wrong = _look_into(manifest, commit, with_extents)
        except Gone:
            continue
        except (Damaged, Refused) as error:
            found.broken.append((commit, error))
            continue
        if wrong is not None:
            found.broken.append((commit, wrong))
        found.commits.append(commit)
        for ref in manifest.blobs:
            found.sizes[ref.uploader, ref.hash] = ref.size
    return found


def _look_into(manifest: Manifest, commit: Commit, with_extents: bool) -> Damaged | None:
    """Look at all of a manifest; what is damaged in a part of it. Raises `Refused`, `Gone`, `StorageError`."""
    faults = manifest.faults()
    if faults:
        return Damaged(f"the manifest of {commit} is damaged: {'; '.join(faults)}", checkpoints=(commit.id,))
    for entry in manifest.held if with_extents else ():
        manifest.extents(entry)
    return None


def _marked(repo: Repository) -> dict[Name, str]:
    """Return the blobs that are known to be damaged, and why they were marked."""
    return {(mark.uploader, mark.blob): mark.why for mark in blobs.marks(repo) if mark.state != blobs.REPAIRED}


def _sampled(repo: Repository, refs: list[BlobRef], fraction: float, marked: Container[Name]) -> list[BlobRef]:
    if fraction >= 1 or not refs:
        return refs
    count = max(1, round(fraction * len(refs)))
    chosen = set(random.Random(repo.entropy(8)).sample(range(len(refs)), count))  # noqa: S311  # nothing secret
    return [ref for index, ref in enumerate(refs) if index in chosen or (ref.uploader, ref.hash) in marked]


def _look(repo: Repository, refs: Iterable[BlobRef], marked: Mapping[Name, str]) -> Iterable[Checked]:
    """Compare presence and sizes, from one listing; what is there may be ``marked``."""
    sizes = list_objects(repo)
    for ref in refs:
        size, told = sizes.get(blob_key(ref.uploader, ref.hash)), marked.get((ref.uploader, ref.hash))
        why = compare_size(ref, size)
        if not why and told is not None:
            yield Checked(ref, f"it was marked as damaged before: {told}", ranges=((0, ref.size),))
        else:
            yield Checked(ref, why, ranges=((min(size or 0, ref.size), ref.size),))


class _Healing(NamedTuple):
    """What is to be marked. ``misframed``: damaged by frames alone; ``is_all``: of all frames of all that lives."""

    damaged: Sequence[DamagedBlob]
    misframed: Sequence[DamagedBlob]
    checked: Iterable[Checked]
    is_all: bool


def _mark(repo: Repository, found: _Healing) -> tuple[str, ...]:
    """Mark what is damaged, unmark what is right, where the store can be written; the blobs that were unmarked."""
    try:
        return _write_marks(repo, found)
    except CasckptError as error:  # what was found is worth more than the marks
        log.warning("the marks of damaged blobs are as before, and saves go by them: %s", error)
        return ()


def _write_marks(repo: Repository, found: _Healing) -> tuple[str, ...]:
    right = {(one.ref.uploader, one.ref.hash) for one in found.checked if one.is_right}
    right -= {(one.uploader, one.blob) for one in found.misframed}
    healed = blobs.damaged_marks(repo) & right if right else set[Name]()
    if healed and not found.is_all:
        healed -= blobs.frame_marks(repo)
    if found.damaged or found.misframed or healed:
        check_requirements(repo)
    for one in (*found.damaged, *found.misframed):
        blobs.mark_damaged(repo, one.uploader, one.blob, one.why, by_frames=one in found.misframed)
    for uploader, blob in sorted(healed):
        blobs.mark_repaired(repo, uploader, blob, "verify found it right")
    return tuple(blob for _, blob in sorted(healed))
