"""Manifests as objects in a store.

A small manifest is read in one go. For a large manifest, casckpt first reads the front sections. Later, it reads each
part that a load needs, by range. A reader that only needs the blobs reads only the blob list.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from casckpt.base.parallel import in_parallel
from casckpt.base.units import time_of
from casckpt.contents import blobs
from casckpt.errors import Damaged, Gone, InvalidInput, NotFound, Refused, StorageError
from casckpt.format.keys import manifest_key
from casckpt.format.manifest import FRONT, Draft, Encoded, Manifest, decode, decode_front, encode
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.records import Committed
from casckpt.format.sections.blobs import BlobList, BlobRef
from casckpt.format.sections.head import BLOBS, HEAD_BYTES, MAX_MANIFEST_BYTES, Head, check_section, check_size
from casckpt.format.sections.index import ManifestBody
from casckpt.history.commits import Commit, exists, gone, list_commits
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists, Reader, ShortObject

WHOLE_BYTES = 1 << 20
"""The maximum size of a manifest that is read in one go. For a small manifest, several requests would take longer."""

T = TypeVar("T")


def put(repo: Repository, txid: TxId, draft: Draft) -> Encoded:
    """Write a manifest durably, under ``txid``, the transaction that will commit it.

    Raises `StorageError`. Raises `InvalidInput` if the manifest is too large or exceeds the format's limits.
    """
    return put_encoded(repo, txid, encode(draft))


def put_encoded(repo: Repository, txid: TxId, made: Encoded, *, may_prepare: bool = False) -> Encoded:
    """Write an encoded manifest. An existing one counts as success. ``may_prepare``: whether it lets gc free space.

    Raises the errors of `put`.
    """
    key = manifest_key(txid, made.id)
    if len(made.data) > MAX_MANIFEST_BYTES:
        raise InvalidInput(
            f"the manifest has {len(made.data)} bytes, which exceeds the limit of {MAX_MANIFEST_BYTES} bytes"
        )
    try:
        repo.put_small(key, made.data) if may_prepare else repo.storage.put(key, made.data)
    except AlreadyExists:
        if repo.storage.size(key) != len(made.data):
            raise StorageError(f"{key} exists with a different size; save again", key=key) from None
    repo.manifests.add(txid, made.manifest())
    return made


def get(repo: Repository, commit: Commit) -> Manifest:
    """Return the verified manifest of a checkpoint, from memory if it was used recently.

    Raises `Damaged` if it is missing or differs from what was written, `Refused` if it is not valid, and `Gone` if the
    checkpoint was purged after ``commit`` was read. Raises `StorageError`. Later reads of its parts raise the same
    errors.
    """
    manifest = _unless_purged(repo, commit, lambda: _read(repo, commit))
    manifest.left_out = left_out(commit)
    return manifest


def get_with_extents(repo: Repository, commit: Commit) -> Manifest:
    """Return the manifest with the extents of all entries already read. Raises the errors of `get`."""
    manifest = get(repo, commit)
    manifest.ready(objects=())
    return manifest


def readable(repo: Repository, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Manifest]]:
    """Yield each of ``commits`` that has a readable manifest, with the manifest. Raises `StorageError`."""
    for commit in commits:
        try:
            yield commit, get_with_extents(repo, commit)
        except (Damaged, Gone, Refused):
            continue


def left_out(commit: Commit) -> str | None:
    """Describe which entries thinning dropped, with the rule, time and advice. Return None for a complete checkpoint.

    For a copied checkpoint, the time is the time of the copy.
    """
    if commit.dropped is None:
        return None
    when = f"{time_of(commit.moved_at):%Y-%m-%d %H:%M} UTC"
    return f"it was thinned by {commit.dropped.rule[:500]} ({when}). Load other keys, or a different checkpoint"


def others(repo: Repository, id: ManifestId, tried: Container[str]) -> list[Commit]:
    """Return the live commits with an id, at all of their places, fullest first.

    Omit places whose head or transaction is in ``tried``. This makes a new listing, because the checkpoint may have
    been rewritten. Raises `StorageError`.
    """
    same = (commit for commit in list_commits(repo).placed() if commit.id == id)
    left = (commit for commit in same if commit.places.txid not in tried and commit.committed.head not in tried)
    return sorted(left, key=lambda commit: (-commit.lacking, *commit.rank), reverse=True)


def use(repo: Repository, commit: Commit, act: Callable[[Commit, Manifest], T]) -> T:
    """Call ``act`` with a manifest. If it is missing or damaged, use that of other places, or of another commit.

    The other commit's record must agree with the record of ``commit``, because a hostile record may name the id of a
    different checkpoint. ``act`` may be called several times. Raises the errors of `get` and ``act``.
    """
    tried, shared = set[str](), _shared_fields(commit.committed)
    while True:
        tried.add(commit.places.txid)
        try:
            return act(commit, get(repo, commit))
        except (Gone, Damaged):
            left = [one for one in others(repo, commit.id, tried) if _shared_fields(one.committed) == shared]
            if not left:
                raise
            commit = left[0]


def adopt(repo: Repository, commit: Commit, manifest: Manifest) -> None:
    """Cache a manifest that another rank has sent. Its missing parts are read from ``repo``."""
    manifest.attach(partial(_read_later, repo, commit))
    manifest.left_out = left_out(commit)
    repo.manifests.add(commit.places.txid, manifest)


def _unless_purged(repo: Repository, commit: Commit, act: Callable[[], T]) -> T:
    try:
        return act()
    except Damaged:
        if commit.live and not exists(repo, commit):
            raise gone(commit, commit.id, "just now") from None
        raise


def _read(repo: Repository, commit: Commit) -> Manifest:
    record = commit.committed
    held = repo.manifests.get(commit.places.txid, record.head)
    if held is not None and held.id == record.manifest and not held.is_damaged:
        return held
    with _naming(commit):
        if record.manifest_bytes <= WHOLE_BYTES:
            manifest = decode(repo.storage.get(_key(commit), limit=MAX_MANIFEST_BYTES), record.manifest, record.head)
        else:
            with repo.storage.open(_key(commit)) as reader:
                head = _head(reader, record)
                first = head[FRONT[0]].offset
                front = _range(reader, first, head[FRONT[-1]].end - first)
            sections = {name: front[head[name].offset - first : head[name].end - first] for name in FRONT}
            manifest = Manifest(head, sections, partial(_read_later, repo, commit)).check()
        body = manifest.body
        if _shared_fields(record) != _shared_fields(body):  # a hostile record could claim to belong to a different run
            raise Refused(f"its commit record does not match its manifest ({body.run}@{body.step})")
    # not cached if damaged, because it may be repaired in the store
    if record.manifest_bytes > WHOLE_BYTES or manifest.is_sound:
        repo.manifests.add(commit.places.txid, manifest)
    return manifest


def _read_later(repo: Repository, commit: Commit, ranges: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
    """Read ranges of a manifest whose head is known."""

    def read() -> list[memoryview]:
        with _naming(commit), repo.storage.open(_key(commit)) as reader:
            return list(in_parallel(repo.storage.traits.requests, lambda span: _range(reader, *span), ranges))

    return _unless_purged(repo, commit, read)


def _key(commit: Commit) -> str:
    return manifest_key(commit.places.txid, commit.id)


def _head(reader: Reader, record: Committed) -> Head:
    head = decode_front(_range(reader, 0, HEAD_BYTES), record.manifest, record.head)
    check_size(head, reader.size)
    return head


def _range(reader: Reader, offset: int, length: int) -> memoryview:
    data = memoryview(bytearray(length))
    reader.read_into(offset, [data])
    return data.toreadonly()


@contextmanager
def _naming(commit: Commit) -> Iterator[None]:
    """Name the checkpoint in errors about its manifest."""
    try:
        yield
    except (NotFound, ShortObject, Damaged) as error:
        key, why = _key(commit), "is missing" if isinstance(error, NotFound) else "is damaged"
        reason = str(error).removeprefix(f"manifest {commit.id} is damaged: ")
        more = f" ({reason})" if isinstance(error, Damaged) else ""
        message = (
            f"the manifest of checkpoint {commit.run}@{commit.step} ({commit.id}) {why}: {key}{more}. Restore it "
            "with `casckpt repair`, or give up the checkpoint with `casckpt forget`: a day later, gc continues "
            "without it (immediately, if the settings have a min_age and the manifest is missing). "
            f"`--run {shlex.quote(commit.run)} --min-age 0` makes gc continue immediately, but also purges all other "
            "forgotten checkpoints of that run"
        )
        raise Damaged(message, key=key, checkpoints=(commit.id,)) from error
    except Refused as error:
        key, name = _key(commit), f"{commit.run}@{commit.step}"
        raise Refused(f"checkpoint {name}: {error}", key=key, checkpoints=(commit.id,)) from error


def _shared_fields(of: Committed | ManifestBody) -> tuple[str, int | None, int, ManifestId | None]:
    """Return the fields that a commit record and its manifest have in common."""
    return of.run, of.step, of.created_at, of.parent


def blob_list(repo: Repository, commit: Commit) -> BlobList:
    """Return the blobs of a checkpoint, from the catalogue or the store.

    Raises `Damaged` if the manifest differs from the one that the record names. Raises `Refused` and `StorageError`.
    Never raises `Gone`.
    """
    head = commit.committed.head
    known = repo.catalogue.blobs(commit.places.txid, head)
    if known is not None:
        return BlobList(known)
    held = repo.manifests.get(commit.places.txid, head)
    listed = _read_blobs(repo, commit) if held is None else held.blob_list
    repo.catalogue.add_blobs(commit.places.txid, head, listed.data)
    return listed


def stored_blobs(repo: Repository, commit: Commit) -> BlobList:
    """Return the blobs of a checkpoint from the store, without caches.

    Raises the errors of `blob_list`, or `Gone` if the checkpoint was purged.
    """
    return _unless_purged(repo, commit, lambda: _read_blobs(repo, commit))


def is_stored(repo: Repository, commit: Commit) -> bool:
    """Return whether the manifest at these places can be read, even if they have ended. Raises `StorageError`."""
    try:
        _read_blobs(repo, commit)
    except (Damaged, Refused):
        return False
    return True


def _read_blobs(repo: Repository, commit: Commit) -> BlobList:
    record = commit.committed
    with _naming(commit):
        if record.manifest_bytes <= WHOLE_BYTES:
            whole = memoryview(repo.storage.get(_key(commit), limit=MAX_MANIFEST_BYTES))
            head = decode_front(whole, record.manifest, record.head)
            check_size(head, len(whole))
            data = whole[head[BLOBS].offset : head[BLOBS].end]
        else:
            with repo.storage.open(_key(commit)) as reader:
                head = _head(reader, record)
                data = _range(reader, head[BLOBS].offset, head[BLOBS].length)
        check_section(head[BLOBS], data)
        return BlobList(data)


def blobs_of(repo: Repository, commit: Commit) -> list[tuple[TxId, BlobHash, int]]:
    """Return (uploader, hash, bytes) for every blob of a checkpoint. Raises the errors of `blob_list`."""
    return blob_list(repo, commit).names()


def learn(repo: Repository, commits: Iterable[Commit]) -> list[Commit]:
    """Read, in parallel, the blob lists that the catalogue lacks. Return the commits whose list can be read.

    Raises `StorageError`.
    """
    wanted = list(commits)

    def is_known(commit: Commit) -> bool:
        try:
            blob_list(repo, commit)
        except (Damaged, Refused):
            return False
        return True

    known = in_parallel(repo.storage.traits.requests, is_known, wanted)
    return [commit for commit, is_there in zip(wanted, known, strict=True) if is_there]


def locate(repo: Repository, commits: Iterable[Commit], wanted: Mapping[BlobHash, BlobRef]) -> dict[BlobHash, BlobRef]:
    """Return, by hash, the locations in ``repo`` of the ``wanted`` blobs that any of the live ``commits`` names.

    A blob without a live commit does not count, because gc may delete it. A blob that is marked as damaged does not
    count either. Raises `StorageError`.
    """
    marked = blobs.damaged_marks(repo)
    heads = np.array([int.from_bytes(bytes.fromhex(name[:16]), "little") for name in wanted], dtype="<u8")
    named = (ref for commit in learn(repo, commits) for ref in _named(repo, commit, heads))
    return {
        ref.hash: ref
        for ref in named
        if ref.hash in wanted and wanted[ref.hash].size == ref.size and (ref.uploader, ref.hash) not in marked
    }


def _named(repo: Repository, commit: Commit, heads: npt.NDArray[np.uint64]) -> Iterator[BlobRef]:
    """Yield the blobs of a checkpoint whose hash begins with one of ``heads``. Skipping a blob costs almost nothing."""
    known = blob_list(repo, commit)
    column = np.frombuffer(known.hashes, dtype="<u8").reshape(-1, 4)[:, 0]
    for number in np.flatnonzero(np.isin(column, heads)).tolist():
        yield replace(known[number], worn=False)


def reindex(repo: Repository) -> int:
    """Rebuild the catalogue from the store. Return the number of live checkpoints in it.

    Checkpoints with an unreadable manifest are omitted. gc and verify report them. Raises `StorageError`, for example
    if the catalogue cannot be written.
    """
    repo.catalogue.reindex()
    known = {commit.txid for commit in learn(repo, list_commits(repo).placed())}
    if repo.catalogue.is_off:
        raise StorageError(
            f"casckpt cannot write {repo.catalogue.path}: free some space there, or pass a different --cache-dir"
        )
    return len(known)
