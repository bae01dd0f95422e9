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
from casckpt.format.names import TxId

SCHEMA = 2
"""Stands in user_version. A file with another one is dropped and rebuilt."""
BUSY_SECONDS = 10.0

_TABLES: dict[str, dict[str, type]] = {
    "records": {"key": str, "data": bytes, "digest": bytes},
    "blobs": {"key": str, "data": bytes, "digest": bytes},
    "notes": {"key": str, "data": bytes, "digest": bytes},
}
_INSERT = {
    "records": "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
    "blobs": "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)",
    "notes": "INSERT OR REPLACE INTO notes VALUES (?, ?, ?)",
}
_SELECT = {table: f"SELECT data, digest FROM {table} WHERE key = ?" for table in ("blobs", "notes")}  # noqa: S608

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class _Memory:
    """What takes over when the file cannot be used."""

    records: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
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

    def blobs(self, txid: TxId, head: str) -> bytes | None:
        """Return the section of blobs of the manifest that a commit names by its head, as it is stored."""
        return self._value("blobs", f"{txid}/{head}", self._memory.blobs)

    def add_blobs(self, txid: TxId, head: str, data: bytes) -> None:
        """Keep a section of blobs."""
        key = f"{txid}/{head}"
        self._insert("blobs", [(key, data, _digest(key, data))], lambda: self._memory.blobs.update({key: data}))

    def note(self, name: str) -> bytes | None:
        """Return a note of this host (the paused state of a gc); None if there is none."""
        return self._value("notes", name, self._memory.notes)

    def _value(self, table: str, key: str, otherwise: Mapping[str, bytes]) -> bytes | None:
        def select(connection: sqlite3.Connection) -> bytes | None:
            row = connection.execute(_SELECT[table], (key,)).fetchone()
            return row[0] if row is not None and row[1] == _digest(key, row[0]) else None

        return self._do(select, lambda: otherwise.get(key))

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
