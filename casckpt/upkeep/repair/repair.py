"""The repair command: restores damaged and missing objects from intact copies.

A copy of a blob may be under another uploader, in the cache of this host, or in another store. The blob's name proves
its bytes. A copy of a manifest is in another store; the hash in the commit record proves it.

`repair` checks the blobs that `verify` or a save has marked, and blobs that are missing or have the wrong size. A
blob with a wrong frame cannot be restored, because all copies with its name have the same bytes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from casckpt.base.progress import Progress, silent
from casckpt.contents import blobs, manifests
from casckpt.errors import CasckptError, Damaged, Gone, NotFound, Refused, StorageError
from casckpt.format.keys import blob_key, manifest_key, parse_object, uploader_folder
from casckpt.format.manifest import placed
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, list_commits
from casckpt.repository.fetching import prove
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.upkeep.inventory import BLOB, list_objects
from casckpt.upkeep.repair.affected import DamagedBlob, describe
from casckpt.upkeep.repair.blob_check import Checked, check_blobs
from casckpt.upkeep.repair.frames import Frames
from casckpt.upkeep.repair.verify import DamagedManifest, DamagedRecord, Survey, damaged_records, survey

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RepairResult:
    """The result of a repair.

    ``blobs``, ``manifests``: what was repaired, by hash and id. ``lost``: what could not be repaired. ``records``:
    records that are unreadable or missing. Only a copy of the store's files can have these records. Repair cannot know
    whether that copy is current, so a user must restore them.
    """

    blobs: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    lost: tuple[DamagedBlob, ...] = ()
    lost_manifests: tuple[DamagedManifest, ...] = ()
    records: tuple[DamagedRecord, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether the store still has damage."""
        return bool(self.lost or self.lost_manifests or self.records)


def repair(repo: Repository, *, sources: Sequence[Repository] = (), progress: Progress = silent) -> RepairResult:
    """Repair ``repo``. ``sources``: other stores that may hold missing bytes. Repair only reads them.

    ``progress``: called with the number of bytes just restored. Raises `NotFound` (also for a missing source) and
    `StorageError`. Damage that cannot be repaired is reported, not raised.
    """
    for source in sources:
        source.check_exists()
    check_requirements(repo)
    listed = list_commits(repo)
    needed = survey(repo, listed.placed())
    restored, lost_manifests = _repair_manifests(repo, needed.broken, sources)
    if restored:
        needed = survey(repo, listed.placed())
    damaged, misframed = _wrong(repo, needed)
    log.info("%d blobs are damaged or missing; %d manifests were restored", len(damaged), len(restored))
    copies = _BlobCopies(repo, sources if damaged else ())
    fixed, lost = list[BlobHash](), misframed
    for blob in damaged:
        ref = blob.ref
        data = copies.fetch(ref)
        if data is None:
            lost.append(replace(blob, why=blob.why or blob.failed))
            continue
        _put_back(repo, ref.uploader, blob_key(ref.uploader, ref.hash), data)
        blobs.mark_repaired(repo, ref.uploader, ref.hash, "from another copy")
        fixed.append(ref.hash)
        progress(ref.size)
    return RepairResult(
        blobs=tuple(fixed),
        manifests=tuple(restored),
        lost=tuple(describe(repo, needed.commits, lost)),
        lost_manifests=tuple(lost_manifests),
        records=tuple(damaged_records(repo, list_commits(repo, anew=True), anew=True)),
    )


def _repair_manifests(
    repo: Repository, broken: Iterable[tuple[Commit, CasckptError]], sources: Sequence[Repository]
) -> tuple[list[ManifestId], list[DamagedManifest]]:
    """Restore damaged manifests. Return the restored ids, and the manifests that could not be restored."""
    restored, lost = [], []
    for commit, error in broken:
        data = next(_same_manifests(repo, commit, sources), None)
        if data is None:
            lost.append(DamagedManifest(commit.id, commit.run, commit.step, str(error)))
        else:
            _put_back(repo, commit.places.txid, manifest_key(commit.places.txid, commit.id), data)
            restored.append(commit.id)
    return restored, lost


def _same_manifests(repo: Repository, commit: Commit, sources: Sequence[Repository]) -> Iterator[bytes]:
    """Yield the bytes of a manifest, from each source that has them.

    A copy of a checkpoint may have its blobs elsewhere. Then the locations come from the catalogue of this host.
    """
    wanted = commit.committed.head
    known = repo.catalogue.blobs(commit.places.txid, wanted)
    for source in sources:
        same = [other for other in list_commits(source).placed() if other.id == commit.id]
        for _, manifest in manifests.readable(source.fresh(), same):
            for places in (manifest.blob_list.data, known):
                with suppress(Damaged, Gone, Refused):
                    made = None if places is None else placed(manifest, places)
                    if made is not None and made.head == wanted:
                        yield made.data


class _BlobCopies:
    """Blobs by hash: in this store, in ``sources``, and in this host's cache."""

    def __init__(self, repo: Repository, sources: Iterable[Repository]) -> None:
        self._cache = repo.blob_cache
        self._places: dict[str, list[tuple[Repository, str]]] = defaultdict(list)
        for store in (repo, *sources):
            for key in list_objects(store):
                name = parse_object(key)
                if name is not None and name.kind == BLOB:
                    self._places[name.hash].append((store, key))

    def fetch(self, ref: BlobRef) -> memoryview | None:
        """Return the bytes of a blob, or None if there is no intact copy."""
        data = memoryview(bytearray(ref.size))
        for reader in self._readers(ref):
            try:
                if reader.size == ref.size and not prove(reader, ref, data):
                    return data
            except (CasckptError, ShortObject):
                continue
        return None

    def _readers(self, ref: BlobRef) -> Iterator[Reader]:
        """Yield a reader for each copy, open until the next iteration."""
        cached = self._cache.open(ref)
        if cached is not None:
            with cached:
                yield cached
        for store, key in self._places.get(ref.hash, ()):
            try:
                with store.storage.open(key) as reader:
                    yield reader
            except (NotFound, Refused, StorageError):
                continue


def _put_back(repo: Repository, uploader: TxId, key: str, data: memoryview | bytes) -> None:
    """Replace an object with the bytes that it had. Also remove the remains of a killed repair."""
    repo.storage.sweep(uploader_folder(uploader))
    repo.storage.replace(key, data)


def _wrong(repo: Repository, needed: Survey) -> tuple[list[Checked], list[Checked]]:
    """Return the damaged needed blobs, and those with a wrong frame.

    Checks the blobs that are marked, missing or of the wrong size. Removes the marks of intact ones.
    """
    sizes, marked = list_objects(repo), blobs.damaged_marks(repo)
    suspects = [
        ref for ref in needed.refs()
        if (ref.uploader, ref.hash) in marked or sizes.get(blob_key(ref.uploader, ref.hash)) != ref.size
    ]  # fmt: skip
    checked = list(check_blobs(repo, suspects, silent))
    right = [blob for blob in checked if blob.is_right]
    misframed = Frames(repo, right, silent).wrong(needed.commits)
    wrong = {blob.ref for blob in misframed}
    for ref in (blob.ref for blob in right if blob.ref not in wrong):
        repo.storage.sweep(uploader_folder(ref.uploader))
        blobs.mark_repaired(repo, ref.uploader, ref.hash, "repair found it intact")
    return [blob for blob in checked if not blob.is_right], misframed
