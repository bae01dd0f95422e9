"""Repositories, commits and manifests without tensors, for tests of layers that do not need tensors."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from casckpt.base.digest import hex_digest
from casckpt.contents import blobs, manifests
from casckpt.errors import NotFound
from casckpt.format.keys import manifest_key
from casckpt.format.manifest import Draft, Encoded
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.records import Committed, Marker, Rewritten
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.head import MAX_MANIFEST_BYTES
from casckpt.format.sections.tables import Extents
from casckpt.history import commits
from casckpt.history.commits import Commit, list_commits, read_log, refresh
from casckpt.history.folding import OF_PLACES
from casckpt.history.transactions import begin
from casckpt.repository.repository import Clock, Entropy, Repository
from casckpt.storage.base import ObjectStore
from casckpt.storage.memory import MemoryStore
from casckpt.storage.remote.store import RemoteStore
from casckpt.upkeep.rewrite import rewrite
from tests.support import elsewhere
from tests.support.faulty import Call

START = 1_700_000_000_000_000  # microseconds: a day in 2023
_STORES = itertools.count()


class Ticks:
    """A clock that advances by a millisecond at each read, or on request."""

    def __init__(self, now: int = START, step: int = 1000) -> None:
        self.now = now
        self.step = step
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self.now += self.step
            return self.now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.now += int(seconds * 1_000_000)


def meanwhile(action: Callable[[], object]) -> Callable[[Call], None]:
    """Return a hook for `call_first` that runs ``action`` right before a call, as a different process would."""

    def hook(_: Call) -> None:
        action()

    return hook


def memory(*, near: bool = True) -> MemoryStore | RemoteStore:
    """Return new storage, in memory or where ``pytest --storage`` specifies. See `tests.support.elsewhere`."""
    return elsewhere.storage(near=near) or MemoryStore(f"test-{next(_STORES)}")


def objects_of(storage: ObjectStore) -> dict[str, bytes]:
    """Return all objects in storage, for `again`."""
    return {entry.key: storage.get(entry.key, limit=1 << 30) for entry in storage.list("")}


def again(objects: Mapping[str, bytes], *, near: bool = True) -> MemoryStore | RemoteStore:
    """Return new storage with these objects, so that a test does not have to recreate what it changes."""
    storage = memory(near=near)
    for key, data in objects.items():
        storage.put(key, data)
    return storage


def repository(
    tmp_path: Path,
    storage: ObjectStore | None = None,
    *,
    seed: int = 1,
    clock: Clock | None = None,
    entropy: Entropy | None = None,
    **fields: Any,
) -> Repository:
    """Return a repository with a ticking clock and seeded IDs. Its catalogue is below ``tmp_path``. The store
    exists."""
    repo = Repository(
        memory() if storage is None else storage,
        tmp_path / "cache",
        clock=clock or Ticks(),
        entropy=entropy or random.Random(seed).randbytes,
        **fields,
    )
    if not repo.exists():
        repo.create()
    return repo


MARKER = Marker(
    format=1, store_id="abc", created_at=5, features=["history-2"], hash="blake3", cell_bytes=4096, blob_bytes=8192
)


def blob_hash(text: str) -> BlobHash:
    """Return the hash of a blob with these bytes."""
    return BlobHash(hex_digest(text.encode()))


def manifest_id(text: str) -> ManifestId:
    """Return a fake manifest ID."""
    return ManifestId(hex_digest(text.encode()))


def committed(
    repo: Repository, run: str = "run", step: int = 0, *, manifest: ManifestId | None = None, **fields: Any
) -> Committed:
    """Return a record with a new transaction ID. The record is not written."""
    txid = fields.pop("txid", None) or repo.new_txid(run, step)
    found = manifest_id(txid) if manifest is None else manifest
    now = repo.clock()
    given: dict[str, Any] = {
        "time": now, "created_at": now, "head": hex_digest(b"no head"), "manifest_bytes": 0, "bytes_total": 0,
        "store": fields.get("store") or repo.marker.store_id, "who": repo.who,
    }  # fmt: skip
    return Committed(txid=txid, run=run, step=step, manifest=found, **given | fields)


def commit_bare(repo: Repository, run: str = "run", step: int = 0, **fields: Any) -> Commit:
    """Create a commit without a manifest, for tests that use only records."""
    record = committed(repo, run, step, **fields)
    commits.commit(repo, record)
    return commits.just_committed(record)


def put_manifest_of(repo: Repository, base: Commit, txid: TxId) -> None:
    """If a commit has a manifest, also write that manifest under a different transaction."""
    with suppress(NotFound):
        data = repo.storage.get(manifest_key(base.places.txid, base.id), limit=MAX_MANIFEST_BYTES)
        repo.storage.put(manifest_key(txid, base.id), data)


def rewritten_bare(repo: Repository, base: Commit, txid: TxId, **fields: Any) -> Rewritten:
    """Write the manifest of a commit, if it has one, under a rewrite's transaction. Return the rewrite's record."""
    put_manifest_of(repo, base, txid)
    values = {name: getattr(base.committed, name) for name in OF_PLACES} | fields
    return Rewritten(txid=base.txid, time=repo.clock(), who=repo.who, by=txid, **values)


def rewrite_bare(repo: Repository, base: Commit, **fields: Any) -> Commit:
    """Rewrite a commit, with its manifest if it has one."""
    return rewrite(repo, base, lambda txid: rewritten_bare(repo, base, txid, **fields))


def half_rewrite(repo: Repository, base: Commit) -> Rewritten:
    """Leave what a rewriter left that died before its record. Return that record."""
    transaction = begin(repo, base.run, base.step, after=[base.txid], slot=(base.txid, base.number + 1))
    transaction.leave()
    return rewritten_bare(repo, base, transaction.txid)


def draft(refs: Iterable[BlobRef], run: str = "run", step: int = 0, **fields: Any) -> Draft:
    """Return a manifest without tensors that names ``refs``."""
    values: dict[str, Any] = {
        "created_at": START,
        "parent": None,
        "metadata": msgspec.Raw(msgspec.msgpack.encode({})),
        "cell_bytes": 1 << 20,
        "streams": {},
        "tree": b"",
    }
    values |= fields
    values["streams"] = Extents.of(values["streams"])
    return Draft(casckpt="0", torch="0", run=run, step=step, world_size=1, blobs=list(refs), **values)


def save(
    repo: Repository, run: str = "run", step: int = 0, *, texts: Iterable[str] = (), reused: Iterable[BlobRef] = ()
) -> Commit:
    """Store a save's objects: a blob for each of ``texts``, a manifest that names these and ``reused``, and a
    commit."""
    txid = repo.new_txid(run, step)
    refs = [put_blob(repo, txid, text) for text in texts]
    return commit_draft(repo, txid, draft([*refs, *reused], run, step))


def commit_draft(repo: Repository, txid: TxId, made: Draft, **fields: Any) -> Commit:
    """Write and commit a manifest."""
    record = committed_draft(repo, txid, made, **fields)
    commits.commit(repo, record)
    return commits.just_committed(record)


def committed_draft(repo: Repository, txid: TxId, made: Draft, **fields: Any) -> Committed:
    """Write a manifest. Return its record."""
    fields = {"created_at": made.created_at, "parent": made.parent} | fields
    return committed_encoded(repo, txid, manifests.put(repo, txid, made), made.run, made.step, **fields)


def committed_encoded(repo: Repository, txid: TxId, made: Encoded, run: str, step: int, **fields: Any) -> Committed:
    """Return the record of a manifest that was written under ``txid``."""
    fields = {"head": made.head, "manifest_bytes": len(made.data)} | fields
    return committed(repo, run, step, manifest=made.id, txid=txid, **fields)


def put_blob(repo: Repository, uploader: TxId, text: str) -> BlobRef:
    """Write a blob with these bytes, which do not have to be a safetensors file."""
    blobs.put(repo, uploader, blob_hash(text), text.encode())
    return BlobRef(blob_hash(text), len(text.encode()), uploader)


def now(repo: Repository, commit: Commit) -> Commit:
    """Read the log, and check that a listing and a refresh see the same state."""
    found = list_commits(repo).commits[commit.txid]
    assert read_log(repo, commit.txid) == found
    assert refresh(repo, commit) == found
    return found


def wait_for_clean_up() -> None:
    """Wait until failed saves of this process have removed their objects."""
    for thread in threading.enumerate():
        if thread.name == "casckpt-clean-up":
            assert thread.daemon  # the program may end before
            thread.join(60)
            assert not thread.is_alive()
