"""Replication of one checkpoint: copies the blobs that the target lacks, verifies them, and commits.

A copy follows the save protocol in docs/format.md. Its transaction has the id of the save in the first store, or the
next free id. Therefore, all processes that copy the same places of a checkpoint use the same transaction, and share the
work without exchanging messages. Each process skips blobs that another one has uploaded, and commits when all blobs
have been uploaded. Another process can continue a killed copy, unless gc has revoked its transaction. If the target has
the checkpoint, but lacks some of its entries, the copy is a rewrite there. A copy includes the signatures of the
checkpoint.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from casckpt.base.names import run_hash
from casckpt.base.parallel import in_parallel
from casckpt.base.progress import Progress, silent
from casckpt.base.text import listed
from casckpt.base.units import time_of
from casckpt.contents import blobs, manifests
from casckpt.contents.signatures import list_signatures
from casckpt.errors import CasckptError, Conflict, Damaged, Gone, NotFound, Refused, Revoked, StorageError
from casckpt.format import manifest as format_manifest
from casckpt.format.keys import blob_key, commit_key, copied_txid, manifest_key, parse_txid, uploader_folder
from casckpt.format.manifest import Encoded, Manifest, placed
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.records import Began, Restored, Rewritten, changed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.format.sections.head import MAX_MANIFEST_BYTES
from casckpt.format.sections.index import TENSOR
from casckpt.format.sections.tables import Extents
from casckpt.history.commits import Commit, CommitList, append, exists, list_commits, read_log, refresh, restore
from casckpt.history.folding import OF_PLACES
from casckpt.history.transactions import Transaction, join
from casckpt.plan.reuse import bytes_in, coded_bytes
from casckpt.repository.fetching import BlobDamaged, fetch
from casckpt.repository.processes import this_process
from casckpt.repository.reading import fetch_record
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists
from casckpt.storage.buffers import BufferPool
from casckpt.upkeep.repack import Recoding, is_coded
from casckpt.upkeep.repair.affected import keys_of
from casckpt.upkeep.rewrite import rewrite


class BlobLocations:
    """A cached `casckpt.contents.manifests.locate`, for repeated lookups of the blobs ``names``."""

    def __init__(self, repo: Repository, names: AbstractSet[BlobHash]) -> None:
        self._repo = repo
        self._names = names
        self._seen: set[TxId] = set()
        self._found: dict[BlobHash, tuple[TxId, BlobRef]] = {}

    def locate(self, listed: CommitList, wanted: Mapping[BlobHash, BlobRef]) -> dict[BlobHash, BlobRef]:
        """Return the locations of the blobs that a live commit of ``listed`` names. Raises `StorageError`."""
        live = {commit.places.txid: commit for commit in listed.placed()}
        for commit in manifests.learn(self._repo, [one for txid, one in live.items() if txid not in self._seen]):
            self._seen.add(commit.places.txid)
            blobs_of = manifests.blobs_of(self._repo, commit)
            refs = (BlobRef(name, size, uploader) for uploader, name, size in blobs_of if name in self._names)
            self._found |= {ref.hash: (commit.places.txid, ref) for ref in refs}
        named = {name: self._found[name] for name in wanted if name in self._found}
        marked = blobs.damaged_marks(self._repo) if named else set[tuple[TxId, BlobHash]]()
        if any(txid not in live or (ref.uploader, ref.hash) in marked for txid, ref in named.values()):
            return manifests.locate(self._repo, live.values(), wanted)  # another location may still be readable
        return {name: ref for name, (_, ref) in named.items() if ref.size == wanted[name].size}


log = logging.getLogger(__name__)

_TRIES = 4  # revoked transactions after which the copy fails
_MEMORY = 1 << 30  # bytes of buffers
_AHEAD = timedelta(days=1)  # allowed lead of another host's clock


@dataclass(frozen=True)
class Work:
    """The options of a copy. ``jobs``: number of concurrent transfers, each with a buffer.

    ``progress``: called with the number of bytes of finished blobs. ``for_mirror``: copy a checkpoint even if a
    different checkpoint in the target has its run and step (otherwise, this raises Conflict), or if the target has the
    checkpoint under a transaction at which gc does not look. ``compress``: encode the cells of checkpoints that have no
    encoded cells; otherwise, whole blobs are copied. ``places``: locations of blobs in the target that earlier copies
    found. ``damaged``: damaged blobs of the source that earlier copies found. ``uploaded``: the sizes of the blobs that
    this process has uploaded.
    """

    jobs: int = 4
    for_mirror: bool = False
    progress: Progress = silent
    compress: bool = False
    places: BlobLocations | None = None
    damaged: dict[BlobRef, BlobDamaged] = field(default_factory=dict)
    uploaded: list[int] = field(default_factory=list)


def replicate(source: Repository, target: Repository, commit: Commit, work: Work) -> Commit:
    """Copy one checkpoint into ``target``, which must exist. Return when the copy is durable and visible.

    Copies the places of ``commit`` or, if they are trimmed in the meantime, the current ones.

    Raises `Damaged` or `Refused`, which names the blob and the keys, if the source is damaged. Raises `Gone` if the
    checkpoint was purged there in the meantime, and `Conflict` if a different checkpoint in ``target`` has its run and
    step. Raises `StorageError`; the next call continues where this one stopped, unless the target is a full mirror in a
    folder. After an
    error, the copy is not visible.
    """
    while True:
        try:
            return _replicate(source, target, commit, work)
        except Gone:
            now = refresh(source, commit)
            if not now.live or commit.places in now.existing:
                raise
            commit = now


def _replicate(source: Repository, target: Repository, commit: Commit, work: Work) -> Commit:
    data = manifests.get(source, commit).encoded()  # verify the whole manifest before the first put
    manifest = format_manifest.decode(data, commit.id, commit.committed.head)
    manifest.left_out = manifests.left_out(commit)
    _check(target, commit)
    known = next((work.damaged[ref] for ref in map(_bare, manifest.blobs) if ref in work.damaged), None)
    if known is not None:  # raise before beginning a transaction for each checkpoint that shares the damaged blob
        raise _damaged_blob(source, commit, manifest, known)
    kind = _Recoded if work.compress and not is_coded(manifest) else _Copy
    copy, attempt = partial(kind, source, target, commit, manifest, work), 0
    for _ in range(_TRIES):
        found, attempt = _join(target, commit, attempt)
        if isinstance(found, Commit):
            return _complete(target, found, commit, work, copy)
        try:
            return _share(target, found, copy(found.txid, found.joined))
        except Revoked:
            found.close()
    raise Conflict(
        f"the copy of {commit} was revoked {_TRIES} times, by gc or because other processes failed; copy it again"
    )


def _check(target: Repository, commit: Commit) -> None:
    """Check that a commit matches its transaction id.

    Without this check, a hostile store could imitate or block a run.
    """
    name = parse_txid(commit.txid)
    if (name.run_hash, name.step) != (run_hash(commit.run), commit.step):
        raise Refused(f"{commit} was not copied: its transaction belongs to a different run or step")
    if name.time > time_of(target.clock()) + _AHEAD:
        raise Refused(
            f"{commit} has a save time in the future ({name.time:%Y-%m-%d}), so later saves would sort before it: "
            "correct the clock, or save the checkpoint again"
        )


def _join(target: Repository, commit: Commit, attempt: int) -> tuple[Transaction | Commit, int]:
    """Begin or join this copy's transaction, or find a copy that has all of its entries, or fewer and no others.

    Also return the number of transactions of the sequence that had ended before.
    """
    while True:
        txid = copied_txid(commit.txid, attempt)
        began = Began(
            txid=txid, run=commit.run, step=commit.step, time=target.clock(), process=this_process(),
            manifest=commit.id, places=commit.places.txid,
        )  # fmt: skip
        transaction = join(target, began)
        if transaction is not None:
            return transaction, attempt
        with suppress(Damaged, Refused):
            there = read_log(target, txid)
            now = there.places if there is not None and there.live and there.id == commit.id else None
            if there is not None and now is not None and (now.holds(commit.places) or commit.places.holds(now)):
                return there, attempt
        attempt += 1


def _share(target: Repository, transaction: Transaction, copy: _Copy) -> Commit:
    """Make a copy in a transaction that other processes may join. Raises `Revoked` if the caller should try again."""
    commit, work = copy.commit, copy.work
    try:
        listed = list_commits(target)  # after the transaction began, so that gc keeps their blobs
        made = None if work.for_mirror else twin(listed, commit)
        if made is not None:
            transaction.abort("the target already has the checkpoint")
            return made
        other = None if work.for_mirror else occupant(listed, commit)
        if other is not None:
            raise taken(target, commit, other)
        fields = copy.put(listed)
        made = transaction.commit(changed(commit.committed, txid=transaction.txid, time=target.clock(), **fields))
        target.storage.sweep(uploader_folder(transaction.txid))  # what killed processes left there
    except (Conflict, Damaged, Gone, Refused) as error:
        if isinstance(error, Revoked):
            raise
        transaction.abort(f"{type(error).__name__}: {error}")
        raise
    except BaseException as error:
        is_full = isinstance(error, StorageError) and error.full and not target.storage.traits.remote
        if work.for_mirror and is_full:
            transaction.abort(error)  # gc would wait for it, because this process lives on, and could not free anything
        else:
            transaction.leave()
        raise
    return made


def _complete(target: Repository, there: Commit, commit: Commit, work: Work, make: Callable[[TxId], _Copy]) -> Commit:
    """Make an earlier copy visible, and give it the entries that it lacks. No other process can join this."""
    if not there.visible:
        there = append(target, there, Restored) if work.for_mirror else restore(target, there)
    if there.places.holds(commit.places):
        return there

    def save(txid: TxId) -> Rewritten:
        fields = make(txid).put(list_commits(target))
        return Rewritten(txid=there.txid, time=target.clock(), who=target.who, by=txid, **fields)

    return rewrite(target, there, save)


def _bare(ref: BlobRef) -> BlobRef:
    """Return a blob's location without its ``worn`` flag."""
    return replace(ref, worn=False)


def _damaged_blob(source: Repository, commit: Commit, manifest: Manifest, error: BlobDamaged) -> CasckptError:
    """Return the error for a damaged blob of ``source``, or `Gone` if the checkpoint was purged meanwhile."""
    if not exists(source, commit):
        return Gone(f"{commit} was purged from {source.storage.url} during the copy; copy a different checkpoint")
    ref = error.ref
    numbers = [number for number, other in enumerate(manifest.blobs) if other.hash == ref.hash]
    keys = sorted(set().union(*keys_of(manifest, numbers).values()))
    return Damaged(
        f"blob {ref.hash}, which holds {listed(keys)}, is damaged: {error}. Checkpoint {commit} of "
        f"{source.storage.url} needs it, and was not copied. Run `casckpt verify` and `casckpt repair` on that store, "
        "then copy again",
        checkpoints=(commit.id,),
        blob=ref.hash,
        keys=tuple(keys),
        key=keys[0] if keys else None,
    )


@dataclass
class _Copy:
    """One copy, in the transaction ``txid``. ``joined``: whether a different process began the transaction."""

    source: Repository
    target: Repository
    commit: Commit
    manifest: Manifest
    work: Work
    txid: TxId
    joined: bool = False
    places: dict[BlobHash, BlobRef] = field(default_factory=dict)

    def put(self, listed: CommitList) -> dict[str, Any]:
        """Upload what the target lacks. Return the fields of the record that describe the copy's places.

        ``listed``: the target's commits, after the transaction began.
        """
        started = self.target.clock()
        self._copy_blobs(listed)
        return self._fields(started, self._put_manifest())

    def _copy_blobs(self, listed: CommitList) -> None:
        """Upload every blob of the manifest that the target lacks. Return when all of them are durable."""
        wanted = {ref.hash: ref for ref in self.manifest.blobs}
        known = self.work.places or BlobLocations(self.target, wanted.keys())
        self.places = known.locate(listed, wanted)
        if self.work.compress:  # see `CopyPlan.total`
            self.work.progress(sum(ref.size for ref in self.places.values()))

        def place() -> None:
            there = self._uploaded()
            new = [ref for ref in wanted.values() if ref.hash not in self.places]
            self.places |= {ref.hash: BlobRef(ref.hash, ref.size, self.txid) for ref in new}
            missing = [ref for ref in new if there.get(blob_key(self.txid, ref.hash)) != ref.size]
            log.info("%s: %d of %d blobs to upload", self.commit, len(missing), len(wanted))
            self.work.progress(sum(ref.size for ref in new) - sum(ref.size for ref in missing))
            if self.joined:
                random.Random(self.target.entropy(8)).shuffle(missing)  # noqa: S311 - so that processes rarely collide
            self._upload(missing)

        def exclude(lost: Collection[BlobRef]) -> None:
            for ref in lost:
                del self.places[ref.hash]

        blobs.store(self.target, self.txid, place, lambda _: self.places.values(), exclude)
        self.target.storage.settle(uploader_folder(self.txid))

    def _uploaded(self) -> dict[str, int]:
        """Return the sizes by key of the objects that this transaction's processes have already uploaded."""
        if not self.joined:
            return {}
        folder = uploader_folder(self.txid)
        return {entry.key: entry.size for entry in self.target.storage.list(f"{folder}/")}

    def _upload(self, refs: Sequence[BlobRef]) -> None:
        if not refs:
            return
        largest = max(ref.size for ref in refs)
        buffers = BufferPool(max(1, min(self.work.jobs, len(refs), _MEMORY // largest)), largest)
        try:
            for ref in in_parallel(buffers.count, partial(self._move, buffers), refs, name="copy"):
                self.work.progress(ref.size)
        finally:
            buffers.close()

    def _move(self, buffers: BufferPool, ref: BlobRef) -> BlobRef:
        own = self.txid
        if self.target.storage.size(blob_key(own, ref.hash)) == ref.size:
            return ref
        with buffers.borrow() as buffer:
            try:
                data = fetch(self.source.storage, ref, buffer.view)
            except BlobDamaged as error:
                self.work.damaged[_bare(ref)] = error
                raise _damaged_blob(self.source, self.commit, self.manifest, error) from error
            blobs.put(self.target, own, ref.hash, data)
        self.work.uploaded.append(ref.size)
        return ref

    def _check_open(self) -> None:
        """Raise `Revoked` if the transaction has ended. Only then may gc delete its blobs or those that it reuses."""
        if self.target.storage.size(commit_key(self.txid)) is not None:
            raise Revoked("a gc revoked this copy because it seemed dead, and may have deleted its blobs; copy again")

    def _put_manifest(self) -> Encoded:
        key, made = manifest_key(self.txid, self.commit.id), self._placed()
        try:
            self.target.storage.put(key, made.data)
        except AlreadyExists:  # another process of this transaction put it, and the blobs that it reuses were live too
            return self._existing_manifest(key)
        return made

    def _placed(self) -> Encoded:
        refs = (replace(self.places[ref.hash], worn=ref.worn) for ref in self.manifest.blobs)
        return placed(self.manifest, encode_blobs(refs))

    def _existing_manifest(self, key: str) -> Encoded:
        try:
            data = self.target.storage.get(key, limit=MAX_MANIFEST_BYTES)
        except NotFound:
            self._check_open()
            raise
        there = format_manifest.decode(data, self.commit.id)
        self.places = {ref.hash: ref for ref in there.blobs}
        if blobs.check(self.target, there.blobs):
            self._check_open()
            raise Damaged(
                f"{key} of {self.target.storage.url} names blobs that no longer exist; run the copy again", key=key
            )
        return Encoded(there.head, data)

    def _bytes_reused(self, made: Encoded) -> int:
        """Return how many tensor bytes, in their decoded form, the target already had.

        Return 0 if this version cannot read all rows.
        """
        manifest = made.manifest()
        manifest.left_out = self.manifest.left_out
        new = {number for number, ref in enumerate(manifest.blobs) if ref.uploader == self.txid}
        with suppress(Refused):
            tensors = [entry for entry in manifest.held if entry.kind == TENSOR]
            extents = Extents.of({entry.name: (entry.dtype, manifest.extents(entry)) for entry in tensors})
            return sum(entry.nbytes for entry in tensors) - bytes_in(extents, new)
        return 0

    def _fields(self, started: int, made: Encoded) -> dict[str, Any]:
        refs = list(dict.fromkeys(self.places.values()))
        new = [ref.size for ref in refs if ref.uploader == self.txid]
        return {name: getattr(self.commit.committed, name) for name in OF_PLACES} | {
            "head": made.head,
            "manifest_bytes": len(made.data),
            "bytes_written": sum(new),
            "bytes_reused": self._bytes_reused(made),
            "blobs_written": len(new),
            "blobs_reused": len(refs) - len(new),
            "seconds": round(max(0, self.target.clock() - started) / 1e6, 6),
        }


class _Recoded(_Copy):
    """A copy that encodes cells. A process that joins it without encoding shares the commit, but not the work."""

    made: Encoded

    def _copy_blobs(self, listed: CommitList) -> None:
        work, own = self.work, self.txid
        recoding = Recoding(self.source, self.target, self.manifest, own, listed, work.jobs, work.progress)
        try:
            self.made = recoding.run()
        except BlobDamaged as error:
            raise _damaged_blob(self.source, self.commit, self.manifest, error) from error
        self.places = {ref.hash: ref for ref in self.made.manifest().blobs}
        work.uploaded.extend(ref.size for ref in self.places.values() if ref.uploader == own)

    def _placed(self) -> Encoded:
        return self.made

    def _fields(self, started: int, made: Encoded) -> dict[str, Any]:
        manifest = made.manifest()
        manifest.left_out = self.manifest.left_out
        coded = coded_bytes(map(manifest.extents, manifest.held))
        return super()._fields(started, made) | coded._asdict()


def twin(listed: CommitList, commit: Commit) -> Commit | None:
    """Return the visible commit in ``listed``, a listing of a different store, that has all entries of ``commit``."""
    same = (other for other in listed.visible() if other.id == commit.id)
    return next((other for other in same if other.places.holds(commit.places)), None)


def occupant(listed: CommitList, commit: Commit) -> Commit | None:
    """Return the visible commit of a different checkpoint with the same run and step."""
    place = (commit.run, commit.step)
    same = (other for other in listed.visible() if (other.run, other.step) == place)
    return next((other for other in same if other.id != commit.id), None)


def taken(target: Repository, commit: Commit, other: Commit) -> Conflict:
    """Return the error for a run and step that the target uses for a different checkpoint."""
    return Conflict(
        f"{commit} was not copied: {target.storage.url} has a different checkpoint with that run and step, "
        f"{other.id}. If you do not need it, forget it there first (`casckpt forget`)",
        checkpoints=(commit.id, other.id),
    )


def copy_signatures(source: Repository, target: Repository, ids: Container[ManifestId]) -> None:
    """Upload the missing signatures of ``ids`` to ``target``. Makes one LIST if the source has none.

    Logs and skips a signature that cannot be read. Raises `StorageError`.
    """
    here = [key for key, id in list_signatures(source).items() if id in ids]
    there = list_signatures(target) if here else {}
    for key in here:
        if key in there:
            continue
        data = fetch_record(source, key)
        if isinstance(data, CasckptError):
            log.warning("%s of %s was not copied: %s", key, source.storage.url, data)
            continue
        with suppress(AlreadyExists):
            target.storage.put(key, data)
