"""The catalogue: a local SQLite file of what immutable objects of a store say. Rebuildable, never the truth.

Every row carries a digest of its key and content, so that a row that the disk, or a network file system without
proper locks, mixed up is read from the store again. Any error of SQLite turns the catalogue off for this process.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from casckpt.format.digest import cell_digest
from casckpt.format.names import BlobHash, ManifestId, TxId

SCHEMA = 1
"""Stands in user_version. A file with another one is dropped and rebuilt."""
BUSY_SECONDS = 10.0

_TABLES: dict[str, dict[str, type]] = {
    "records": {"key": str, "data": bytes, "digest": bytes},
    "manifests": {
        "key": str,
        "tensors": int,
        "bytes": int,
        "hashes": bytes,
        "sizes": bytes,
        "uploaders": str,
        "uploader_index": bytes,
        "digest": bytes,
    },
    "notes": {"key": str, "data": bytes, "digest": bytes},
}
_INSERT = {
    "records": "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
    "manifests": "INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "notes": "INSERT OR REPLACE INTO notes VALUES (?, ?, ?)",
}
_MANIFEST = "SELECT tensors, bytes, hashes, sizes, uploaders, uploader_index, digest FROM manifests WHERE key = ?"

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class ManifestSummary:
    """What a manifest names, as the packed columns it is stored with (see `casckpt.format.manifest`).

    ``committed_at``: time of the commit record. A copy that is made again, after the store was put back from a backup,
    has the same uploader and id, and other places. ``tensors``: number of keys. ``nbytes``: of all its entries, as held
    in memory.
    """

    uploader: TxId
    manifest: ManifestId
    committed_at: int
    tensors: int
    nbytes: int
    hashes: bytes
    sizes: bytes
    uploaders: tuple[TxId, ...]
    index: bytes

    def blobs(self) -> list[tuple[TxId, BlobHash, int]]:
        """Return (uploader, hash, size of the file in bytes) of every blob, in order."""
        from casckpt.format.columns import unpack

        digests = self.hashes.hex()
        hashes = (BlobHash(digests[at : at + 64]) for at in range(0, len(digests), 64))
        uploaders = (self.uploaders[number] for number in unpack(self.index).tolist())
        return list(zip(uploaders, hashes, unpack(self.sizes).tolist(), strict=True))


@dataclass
class _Memory:
    """What takes over when the file cannot be used."""

    records: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, ManifestSummary] = field(default_factory=dict)
    notes: dict[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class _File:
    """The connection to a catalogue's file, while there is one."""

    connection: sqlite3.Connection | None = None

    def close(self) -> None:
        with suppress(sqlite3.Error):
            connection, self.connection = self.connection, None
            if connection is not None:
                connection.close()


_sqlite = threading.RLock()
"""Held while SQLite is called, and over a fork."""
_files: WeakSet[_File] = WeakSet()


def _before_fork() -> None:
    """Close all files: SQLite keeps locks and counts for the process, and in a child nobody would ever lower them."""
    _sqlite.acquire()
    for file in list(_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_sqlite.release, after_in_child=_sqlite.release)


class Catalogue:
    """See the module. Safe for several threads and processes, and in forked children; nothing here raises.

    ``is_off``: has an error turned the file off for this process?
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _File()
        self._memory = _Memory()
        self.is_off = False
        with _sqlite:
            _files.add(self._file)
        weakref.finalize(self, self._file.close)  # without the lock: a thread may hold any other where this runs

    def records(self, prefix: str, first: str = "") -> dict[str, bytes]:
        """Return the bytes of all records known under ``prefix`` ("commits/"), by key; from the key ``first`` on."""
        first, end = max(prefix, first), prefix + chr(0x10FFFF)

        def select(connection: sqlite3.Connection) -> dict[str, bytes]:
            sql = "SELECT key, data, digest FROM records WHERE key >= ? AND key < ?"
            rows = connection.execute(sql, (first, end)).fetchall()
            return {key: data for key, data, digest in rows if digest == _digest(key, data)}

        return self._do(select, lambda: {k: v for k, v in self._memory.records.items() if first <= k < end})

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all records that are known under ``prefix``."""
        end = prefix + chr(0x10FFFF)

        def select(connection: sqlite3.Connection) -> list[str]:
            sql = "SELECT key FROM records WHERE key >= ? AND key < ?"
            return [key for (key,) in connection.execute(sql, (prefix, end))]

        return self._do(select, lambda: [key for key in self._memory.records if key.startswith(prefix)])

    def add_records(self, records: Mapping[str, bytes]) -> None:
        """Keep the bytes of records of the store, by key."""
        rows = [(key, data, _digest(key, data)) for key, data in records.items()]
        self._insert("records", rows, lambda: self._memory.records.update(records))

    def manifest(self, uploader: TxId, manifest: ManifestId, committed_at: int) -> ManifestSummary | None:
        """Return what is known of a manifest."""
        key = _manifest_name(uploader, manifest, committed_at)

        def select(connection: sqlite3.Connection) -> ManifestSummary | None:
            row = connection.execute(_MANIFEST, (key,)).fetchone()
            if row is None or row[-1] != _digest(key, *row[:-1]):
                return None
            tensors, nbytes, hashes, sizes, uploaders, index, _ = row
            names = tuple(TxId(name) for name in uploaders.split())
            return ManifestSummary(uploader, manifest, committed_at, tensors, nbytes, hashes, sizes, names, index)

        return self._do(select, lambda: self._memory.manifests.get(key))

    def add_manifest(self, summary: ManifestSummary) -> None:
        """Keep what a manifest names."""
        key, one = _manifest_name(summary.uploader, summary.manifest, summary.committed_at), summary
        row = (one.tensors, one.nbytes, one.hashes, one.sizes, " ".join(one.uploaders), one.index)
        rows = [(key, *row, _digest(key, *row))]
        self._insert("manifests", rows, lambda: self._memory.manifests.update({key: summary}))

    def drop_manifest(self, uploader: TxId, manifest: ManifestId, committed_at: int) -> None:
        """Forget what is known of a manifest: it may not hold any more."""
        key = _manifest_name(uploader, manifest, committed_at)

        def drop(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM manifests WHERE key = ?", (key,))

        self._do(drop, lambda: self._memory.manifests.pop(key, None))

    def note(self, name: str) -> bytes | None:
        """Return a note of this host (the paused state of a gc); None if there is none."""

        def select(connection: sqlite3.Connection) -> bytes | None:
            row = connection.execute("SELECT data, digest FROM notes WHERE key = ?", (name,)).fetchone()
            return row[0] if row is not None and row[1] == _digest(name, row[0]) else None

        return self._do(select, lambda: self._memory.notes.get(name))

    def set_note(self, name: str, data: bytes | None) -> None:
        """Keep a note; None removes it."""
        if data is not None:
            kept = data
            self._insert("notes", [(name, data, _digest(name, data))], lambda: self._memory.notes.update({name: kept}))
            return

        def remove(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM notes WHERE key = ?", (name,))

        self._do(remove, lambda: self._memory.notes.pop(name, None))

    def reindex(self) -> None:
        """Forget everything, and try the file again if it was turned off."""
        with _sqlite:
            self.is_off, self._memory = False, _Memory()
            try:
                self._do_or_raise(lambda connection: _rebuild(connection, anyway=True))
            except (sqlite3.Error, OSError):
                self.close()
                self._remove_files()

    def close(self) -> None:
        """Close the file in this process; the next use opens it again."""
        with _sqlite:
            self._file.close()

    def _do(self, action: Callable[[sqlite3.Connection], T], otherwise: Callable[[], T]) -> T:
        """Call ``action`` with the file; return ``otherwise`` where the file cannot be used."""
        with _sqlite:
            if not self.is_off:
                try:
                    return self._do_or_raise(action)
                except (sqlite3.Error, OSError) as error:
                    self._turn_off(error)
            return otherwise()

    def _do_or_raise(self, action: Callable[[sqlite3.Connection], T]) -> T:
        if self._file.connection is None:
            self._file.connection = _open(self.path)
        return action(self._file.connection)

    def _insert(self, table: str, rows: Sequence[tuple[object, ...]], otherwise: Callable[[], None]) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back on an error
                connection.executemany(_INSERT[table], rows)

        self._do(insert, otherwise)

    def _turn_off(self, error: Exception) -> None:
        self.close()
        self.is_off = True
        log.warning(
            "the catalogue %s cannot be used (%s); this process goes on without it, more slowly. "
            "`casckpt reindex` makes a new one, --cache-dir names another place",
            self.path,
            error,
        )

    def _remove_files(self) -> None:
        for suffix in ("-wal", "-shm", ""):  # the log first: an old one must not be replayed into a new file
            try:
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            except OSError as error:
                self._turn_off(error)
                return


def _manifest_name(uploader: TxId, manifest: ManifestId, committed_at: int) -> str:
    return f"{uploader}/{manifest}/{committed_at}"


def _digest(*values: object) -> bytes:
    """Return the digest of a row: its key and its columns."""
    parts = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    lengths = ",".join(str(len(part)) for part in parts).encode()
    return cell_digest(b"\0".join((lengths, *parts)))


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        if _version(connection) != SCHEMA:
            with suppress(sqlite3.OperationalError):  # another process may be doing this just now
                connection.execute("PRAGMA journal_mode = WAL")
            _rebuild(connection)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _rebuild(connection: sqlite3.Connection, *, anyway: bool = False) -> None:
    """Drop all tables and make ours, unless another process has done so since."""
    import sqlite_utils  # takes 50 ms, and is not needed where the tables are there

    connection.execute("BEGIN IMMEDIATE")
    with connection:
        if _version(connection) == SCHEMA and not anyway:
            return
        database = sqlite_utils.Database(connection, execute_plugins=False)
        for name in database.table_names():
            database.table(name).drop()
        for name, columns in _TABLES.items():
            database.table(name).create(columns, pk="key")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
