"""The blobs of a load. Each blob is opened once, from this host's cache or from the store.

An error for a damaged blob names the checkpoints that use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

from casckpt.contents.manifests import blobs_of
from casckpt.errors import CasckptError, Damaged, NotFound, StorageError
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList, gone, list_commits
from casckpt.plan.reads import Batch
from casckpt.repository.fetching import BlobDamaged
from casckpt.repository.host_reads import HostReads
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader
from casckpt.storage.local.reader import LocalReader

T = TypeVar("T")


@dataclass
class BlobReader:
    """One blob of a load. The first thread that reads it opens it, from this host's cache or from the store.

    ``keep``: whether to copy the blob into this host's cache. ``is_cached``: whether the blob may be in this cache, and
    once it is open, whether it is read from there. ``number``: the number of the blob. ``reads``: if it is set, the
    ranks of this host share their reads. ``left``: the number of batches that remain.
    """

    repo: Repository
    ref: BlobRef
    shared: bool
    keep: bool
    is_cached: bool = True
    number: int = 0
    reads: HostReads | None = None
    left: int = 0
    _lock: Lock = field(default_factory=Lock)
    _current: Reader | None = None
    _opened: ExitStack = field(default_factory=ExitStack)

    def reader(self) -> Reader:
        """Return the open reader. Open it first if necessary. Raises NotFound and StorageError."""
        with self._lock:
            if self._current is None:
                self._current = self._open()
            return self._current

    def _open(self) -> Reader:
        cached = self._from_cache() if self.is_cached else None
        if cached is not None:
            return self._opened.enter_context(cached)
        self.is_cached = False
        source = self._opened.enter_context(
            self.repo.storage.open(blob_key(self.ref.uploader, self.ref.hash), shared=self.shared)
        )
        return source if self.reads is None else self.reads.reader(self.number, self.ref, source)

    def _from_cache(self) -> LocalReader | None:
        repo = self.repo
        try:
            here = not self.keep or repo.blob_cache.keep(repo.storage, self.ref)
        except BlobDamaged:  # the cells that this load reads may still be correct
            return None
        return repo.blob_cache.open(self.ref) if here else None

    def distrust(self, reader: Reader | None, *, failed: bool = False) -> bool:
        """Return whether there is another reader to try after ``reader`` returned wrong bytes.

        ``failed``: whether the storage failed instead of returning wrong bytes.
        """
        with self._lock:
            if reader is not None and reader is not self._current:
                return True  # another thread has already replaced it
            if self.is_cached:
                self.repo.blob_cache.drop(self.ref)
                self.is_cached = False
            elif self.reads is not None and not failed:
                self.reads.drop(self.number)
                self.reads = None
            else:
                return False
            self._current = None  # the old reader remains open, because other threads may use it
            return True

    def done(self) -> None:
        """Record that one batch is done. After the last batch, close the blob."""
        with self._lock:
            self.left -= 1
            if not self.left:
                self.close()

    def close(self) -> None:
        """Close all readers."""
        self._opened.close()


class BlobReaders:
    """The blobs of a load. ``blob_at``: returns the blob with a given number.

    ``shared``: whether other processes on this host read the same blobs. ``stays``: whether the bytes that are read
    remain in the page cache. A blob never remains there if less than half of it is read, because skipping the gaps
    costs more. ``reads``: if it is set, the ranks of this host share their reads.
    """

    def __init__(
        self,
        repo: Repository,
        blob_at: Callable[[int], BlobRef],
        batches: Sequence[Batch[T]],
        *,
        shared: bool,
        stays: Callable[[], bool],
        reads: HostReads | None = None,
    ) -> None:
        if reads is not None and not reads.begin([(batch.blob, batch.offset, batch.nbytes) for batch in batches]):
            reads = None
        wanted: Counter[int] = Counter()
        for batch in batches:
            wanted[batch.blob] += batch.nbytes
        fills = bool(wanted) and repo.fills_cache
        cached = bool(wanted) and (fills or repo.blob_cache.is_there)
        self._slots: dict[int, BlobReader] = {}
        for blob, nbytes in wanted.items():
            ref = blob_at(blob)
            most = 2 * nbytes >= ref.size
            self._slots[blob] = BlobReader(
                repo,
                ref,
                shared=shared or (most and stays()),
                keep=fills and most,
                is_cached=cached,
                number=blob,
                reads=reads,
            )
        for batch in batches:
            self._slots[batch.blob].left += 1

    def is_in_memory(self, blob: int) -> bool:
        """Return whether this host's page cache holds a blob.

        Return False if this is unknown, or if the blob cannot be opened.
        """
        try:
            reader = self._slots[blob].reader()
        except (NotFound, StorageError):  # the read will raise the error
            return False
        return isinstance(reader, LocalReader) and reader.is_cached

    def is_shared(self, blob: int) -> bool:
        """Return whether a blob is always read through this host's page cache."""
        return self._slots[blob].shared

    @contextmanager
    def use(self, blob: int) -> Iterator[BlobReader]:
        """Yield the reader of a blob, for one batch."""
        try:
            yield self._slots[blob]
        finally:
            self.skip(blob)

    def close(self) -> None:
        """Close the blobs that are still open after a failure."""
        for slot in self._slots.values():
            slot.close()

    def skip(self, blob: int) -> None:
        """Record that one batch of a blob is done."""
        self._slots[blob].done()


class Lost(Exception):
    """Raised if bytes of a blob that the tensor ``key`` needs are missing or wrong."""

    def __init__(self, ref: BlobRef, key: str, why: str) -> None:
        super().__init__(why)
        self.ref, self.key = ref, key


def damaged_error(repo: Repository, manifest: Manifest, ref: BlobRef, key: str, why: str) -> CasckptError:
    """Return the error for missing or wrong bytes: Damaged, or Gone if the checkpoint was purged in the meantime."""
    commits = list_commits(repo)
    head = manifest.head.digest  # other places of the same id may use different blobs
    exists = {places.record.head for one in commits.commits.values() for places in one.existing}
    ended = {places.record.head for one in commits.commits.values() for places in one.ended} - exists
    name = f"{manifest.body.run}@{manifest.body.step}"
    if head in ended:
        return gone(f"{name} ({manifest.id})", manifest.id, "while it was read", key=key)
    users = list(checkpoints_using(repo, commits, ref))
    listed = ", ".join(map(str, users[:8])) + (", ..." if len(users) > 8 else "")
    others = f", and so do these checkpoints: {listed}" if users else ""
    is_here = head in exists
    older = (
        "" if is_here else f" This process does not list {name}, so it may see an older state of the store: try again."
    )
    return Damaged(
        f"blob {ref.hash} is damaged: {why}. Tensor {key!r} of {name} needs it{others}. "
        f"The contents of the load's target are now undefined.{older} "
        "Run `casckpt verify`, then `casckpt repair`, on the store",
        key=key,
        blob=ref.hash,
        checkpoints=tuple(commit.id for commit in users),
    )


def checkpoints_using(repo: Repository, commits: CommitList, ref: BlobRef) -> Iterator[Commit]:
    """Yield the live checkpoints that refer to a blob. Skip checkpoints whose manifest cannot be read."""
    for commit in commits.live():
        for one in (commit, *commit.old):
            with suppress(CasckptError):
                if any((uploader, name) == (ref.uploader, ref.hash) for uploader, name, _ in blobs_of(repo, one)):
                    yield commit
                    break
