"""The catalogue is a local SQLite file that caches a store's immutable objects. It can be rebuilt at any time.

Beside the catalogues are notes of where stores are, so that casckpt does not take a missing mount for a store that does
not exist yet.

Every row has a digest of its key and content. If the disk or a network file system has damaged a row, casckpt rereads
the object from the store. Any SQLite error turns the catalogue off for this process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from casckpt.base.digest import hex_digest
from casckpt.format.digest import cell_digest
from casckpt.format.names import TxId
from casckpt.storage.base import ObjectStore
from casckpt.storage.local.store import mount_point

SCHEMA = 2
"""The file's user_version. casckpt drops and rebuilds a file with a different version."""
BUSY_SECONDS = 10.0

_TABLES = ("records", "blobs", "notes")
_COLUMNS = {"key": str, "data": bytes, "digest": bytes}
_INSERT = {table: f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)" for table in _TABLES}  # noqa: S608
_SELECT = {table: f"SELECT data, digest FROM {table} WHERE key = ?" for table in _TABLES}  # noqa: S608

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class _File:
    """The connection to a catalogue's file, or None while it is closed."""

    connection: sqlite3.Connection | None = None

    def close(self) -> None:
        with suppress(sqlite3.Error):
            connection, self.connection = self.connection, None
            if connection is not None:
                connection.close()


_sqlite = threading.RLock()
"""Held during SQLite calls and during a fork."""
_files: WeakSet[_File] = WeakSet()


def _close_files() -> None:
    with _sqlite:
        for file in list(_files):
            file.close()


def _before_fork() -> None:
    """Close all files. SQLite's locks and counters are per process, and a forked child would never release them."""
    _sqlite.acquire()
    _close_files()


atexit.register(_close_files)
os.register_at_fork(before=_before_fork, after_in_parent=_sqlite.release, after_in_child=_sqlite.release)


class Catalogue:
    """The catalogue of one store. Safe across threads, processes and forked children. No method raises an exception.

    ``is_off``: whether an error has turned the file off for this process. If so, the catalogue is kept in memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _File()
        self._memory = _tables()
        self.is_off = False
        with _sqlite:
            _files.add(self._file)
        # unlocked, because this may run while another lock is held; not at exit, when other threads may use the file
        weakref.finalize(self, self._file.close).atexit = False

    def records(self, prefix: str, first: str = "") -> dict[str, bytes]:
        """Return the bytes of all known records under ``prefix`` ("commits/") by key, from the key ``first`` on."""
        first, end = max(prefix, first), prefix + chr(0x10FFFF)

        def select(connection: sqlite3.Connection) -> dict[str, bytes]:
            sql = "SELECT key, data, digest FROM records WHERE key >= ? AND key < ?"
            rows = connection.execute(sql, (first, end)).fetchall()
            return {key: data for key, data, digest in rows if digest == _digest(key, data)}

        return self._do(select, lambda: {k: v for k, v in self._memory["records"].items() if first <= k < end})

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all known records under ``prefix``."""
        end = prefix + chr(0x10FFFF)

        def select(connection: sqlite3.Connection) -> list[str]:
            sql = "SELECT key FROM records WHERE key >= ? AND key < ?"
            return [key for (key,) in connection.execute(sql, (prefix, end))]

        return self._do(select, lambda: [key for key in self._memory["records"] if key.startswith(prefix)])

    def add_records(self, records: Mapping[str, bytes]) -> None:
        """Store the bytes of records, by key."""
        self._insert("records", records)

    def remove_records(self, ranges: Iterable[tuple[str, str]]) -> None:
        """Remove the records whose keys are in ``ranges``. The end of a range is not part of it."""

        def remove(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                connection.executemany("DELETE FROM records WHERE key >= ? AND key < ?", ranges)

        self._do(remove, lambda: None)  # memory does not last

    def blobs(self, txid: TxId, head: str) -> bytes | None:
        """Return the cached blob section of a commit's manifest, or None. ``head``: the hash of the manifest's head."""
        return self._value("blobs", f"{txid}/{head}")

    def add_blobs(self, txid: TxId, head: str, data: bytes) -> None:
        """Store the blob section of a manifest."""
        self._insert("blobs", {f"{txid}/{head}": data})

    def note(self, name: str) -> bytes | None:
        """Return a note that this host stored, such as the state of a paused gc, or None if it does not exist."""
        return self._value("notes", name)

    def _value(self, table: str, key: str) -> bytes | None:
        def select(connection: sqlite3.Connection) -> bytes | None:
            row = connection.execute(_SELECT[table], (key,)).fetchone()
            return row[0] if row is not None and row[1] == _digest(key, row[0]) else None

        return self._do(select, lambda: self._memory[table].get(key))

    def set_note(self, name: str, data: bytes | None) -> None:
        """Store a note, or remove it if ``data`` is None."""
        if data is not None:
            self._insert("notes", {name: data})
            return

        def remove(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM notes WHERE key = ?", (name,))

        self._do(remove, lambda: self._memory["notes"].pop(name, None))

    def reindex(self) -> None:
        """Remove all content, and turn the file back on if an error had turned it off."""
        with _sqlite:
            self.is_off, self._memory = False, _tables()
            try:
                self._do_or_raise(lambda connection: _rebuild(connection, anyway=True))
            except (sqlite3.Error, OSError):
                self.close()
                self._remove_files()

    def close(self) -> None:
        """Close the file in this process. The next use reopens it."""
        with _sqlite:
            self._file.close()

    def _do(self, action: Callable[[sqlite3.Connection], T], otherwise: Callable[[], T]) -> T:
        """Call ``action`` with the connection, or ``otherwise`` if the file is unusable."""
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

    def _insert(self, table: str, rows: Mapping[str, bytes]) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back on an error
                connection.executemany(_INSERT[table], [(key, data, _digest(key, data)) for key, data in rows.items()])

        self._do(insert, lambda: self._memory[table].update(rows))

    def _turn_off(self, error: Exception) -> None:
        self.close()
        self.is_off = True
        log.warning(
            "casckpt cannot use the catalogue %s (%s); this process continues without it, but more slowly. Run "
            "`casckpt reindex` to create a new one, or choose a different folder with --cache-dir",
            self.path,
            error,
        )

    def _remove_files(self) -> None:
        for suffix in ("-wal", "-shm", ""):  # the log first, so that an old one is not replayed into a new file
            try:
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            except OSError as error:
                self._turn_off(error)
                return


def _tables() -> dict[str, dict[str, bytes]]:
    """Return empty in-memory tables."""
    return {table: {} for table in _TABLES}


def _digest(*values: object) -> bytes:
    """Return the digest of a row's key and columns."""
    parts = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    lengths = ",".join(str(len(part)) for part in parts).encode()
    return cell_digest(b"\0".join((lengths, *parts)))


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        if _version(connection) != SCHEMA:
            with suppress(sqlite3.OperationalError):  # another process may be doing this right now
                connection.execute("PRAGMA journal_mode = WAL")
            _rebuild(connection)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _rebuild(connection: sqlite3.Connection, *, anyway: bool = False) -> None:
    """Drop all tables and create them again, unless another process has done so since."""
    import sqlite_utils  # the import takes 50 ms and is not needed if the tables exist

    connection.execute("BEGIN IMMEDIATE")
    with connection:
        if _version(connection) == SCHEMA and not anyway:
            return
        database = sqlite_utils.Database(connection, execute_plugins=False)
        for name in database.table_names():
            database.table(name).drop()
        for name in _TABLES:
            database.table(name).create(_COLUMNS, pk="key")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")


def remember(folder: Path, storage: ObjectStore) -> None:
    """Note in ``folder`` that there is a store, unless it is in memory. A note that cannot be written is left out."""
    path = getattr(storage, "path", None)
    real = storage.url if path is None else os.path.realpath(path)
    mount = "" if path is None else mount_point(real)
    with suppress(OSError):
        if recall(folder, storage) != (real, mount) and not storage.url.startswith("memory:"):
            note = _note(folder, storage)
            note.parent.mkdir(parents=True, exist_ok=True)
            new = note.with_suffix(f".{os.getpid()}")  # a note that is cut off would name another mount
            new.write_bytes(os.fsencode(f"{real}\0{mount}"))
            new.replace(note)


def recall(folder: Path, storage: ObjectStore) -> tuple[str, str] | None:
    """Return the real path and the mount point of the store that was here before, or None if there is no note.

    The mount point is "" if there was none except /.
    """
    with suppress(OSError):
        real, _, mount = os.fsdecode(_note(folder, storage).read_bytes()).partition("\0")
        return real, mount
    return None


def _note(folder: Path, storage: ObjectStore) -> Path:
    return folder / "places" / hex_digest(os.fsencode(storage.url))[:16]
