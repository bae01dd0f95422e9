"""Runs with a long history that is created without saves, and the requests of the next save and a first listing."""

from __future__ import annotations

import builtins
import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Measured, Meter
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here
    from casckpt.history.commits import Commit
    from casckpt.storage.base import Known, ListedObject, Traits
    from casckpt.store.store import Store

FOLDER, BUCKET = "folder", "bucket"
PLAIN, CLOCKS, COPIES, RESTORE = "", "another writer's clock is 10 minutes ahead", "old commits copied", "one restored"
_RUN, _PAGE = "history", 1000
_BEGAN = timedelta(days=90)
_NUMBERS = itertools.count()


@dataclass
class Asked:
    """Requests to storage. ``names``, ``nbytes``: the number of keys in listings, and their bytes."""

    requests: int = 0
    names: int = 0
    nbytes: int = 0


class Counting:
    """A folder that counts requests. ``remote``: it behaves like a bucket, with pages of 1,000 names."""

    def __init__(self, inner: Any, *, remote: bool) -> None:
        self.inner, self.asked, self._remote = inner, Asked(), remote

    @property
    def url(self) -> str:
        """Return the URL of the inner storage."""
        return str(self.inner.url)

    @property
    def traits(self) -> Traits:
        """Return the traits of local or remote storage."""
        from casckpt.storage.base import Traits

        return Traits(remote=self._remote, read_gap=0, parallel=4, exclusive=True)

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        """List, and count a request for each page."""
        entries = [*self.inner.list(prefix, known=known)]
        self._count([entry.key for entry in entries])
        return iter(entries)

    def list_folder(self, folder: str) -> tuple[builtins.list[ListedObject], builtins.list[str]]:
        """List a folder, and also count folder names."""
        entries, folders = self.inner.list_folder(folder)
        self._count([*(entry.key for entry in entries), *folders])
        return entries, folders

    def _count(self, names: builtins.list[str]) -> None:
        self.asked.requests += max(1, -(-len(names) // _PAGE))
        self.asked.names += len(names)
        self.asked.nbytes += sum(map(len, names))

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        def counted(*args: Any, **more: Any) -> Any:
            self.asked.requests += 1
            return call(*args, **more)

        return counted


@dataclass
class _History:
    """A store whose run has ``length`` checkpoints, all committed and announced, the last two by saves.

    ``store``, ``other``, ``maker``: the store on three hosts. Only saves on the first host count.
    """

    storage: Counting
    store: Store
    other: Store
    maker: Store
    length: int
    first: Commit | None = None
    copied: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311 - names for a benchmark


def build(here: Here, where: str, case: str, length: int, folder: str) -> None:
    """Create a run of ``length`` checkpoints. All except the last two have only records."""
    storage = _storage(where, folder)
    store, other = _open(storage, folder, 0), _open(storage, folder, 600 if case == CLOCKS else 0)
    store.create()
    history = _History(storage, store, other, _open(storage, folder, 0), length - 2)
    history.first = _synthesize(history, _RUN, length - 2, datetime.now(UTC) - _BEGAN)
    here.kept[f"{where} {case} {length}"] = history
    _save(history)
    _save(history)


def save(here: Here, where: str, case: str, length: int, copies: int) -> Measured:
    """Return the cost of the next save after the event named by ``case``."""
    from casckpt.format.records import Forgotten, Restored
    from casckpt.history.commits import append

    history: _History = here.kept[f"{where} {case} {length}"]
    if case == CLOCKS:
        _save(history, history.other)
    elif case == COPIES:
        history.copied += copies
        old = datetime.now(UTC) - 2 * _BEGAN + timedelta(minutes=history.copied)
        _synthesize(history, _RUN, copies, old, first=10**9 + history.copied, copied=True)
    elif case == RESTORE and history.first is not None:
        forgotten = append(history.maker.repository, history.first, Forgotten)
        history.first = append(history.maker.repository, forgotten, Restored)
    before, meter = Asked(**asdict(history.storage.asked)), Meter()
    _save(history)
    return _measured(meter, history.storage.asked, before)


def latest(here: Here, where: str, length: int, folder: str) -> Measured:
    """Count a new host's requests to find a run's newest checkpoint, after ``length`` later commits of other runs."""
    from casckpt.contents.refs import resolve

    key = f"{where} latest {length}"
    if key not in here.kept:
        storage = _storage(where, folder)
        store = _open(storage, folder, 0)
        history = here.kept[key] = _History(storage, store, store, store, 0)
        _save(history)
        for number in range(10):
            _synthesize(history, f"other-{number}", length // 10, datetime.now(UTC))
    history = here.kept[key]
    host = _open(history.storage, folder, 0).repository
    before, meter = Asked(**asdict(history.storage.asked)), Meter()
    found = resolve(host, f"{_RUN}@latest")
    measured = _measured(meter, history.storage.asked, before)
    if (found.run, found.step) != (_RUN, 0):
        raise WrongBytes(f"the newest of {_RUN} is not {found}")
    return measured


def drop(here: Here, folder: str) -> None:
    """Remove the stores."""
    here.kept.clear()
    shutil.rmtree(folder, ignore_errors=True)


def _measured(meter: Meter, now: Asked, before: Asked) -> Measured:
    measured = meter.stop()
    measured.extra = {name: float(value - getattr(before, name)) for name, value in asdict(now).items()}
    return measured


def _storage(where: str, folder: str) -> Counting:
    from casckpt.storage.local.store import LocalStore

    return Counting(LocalStore(Path(folder) / str(next(_NUMBERS))), remote=where == BUCKET)


def _open(storage: Counting, folder: str, ahead: int) -> Store:
    """Open the store as a different host would, with a clock that is this many seconds ahead."""
    from casckpt.repository.repository import Repository, microseconds
    from casckpt.store.store import Store

    cache = Path(folder) / f"cache-{next(_NUMBERS)}"
    clock = lambda: microseconds() + ahead * 10**6  # noqa: E731 - a clock
    return Store(Repository(storage, cache, clock=clock, cache_bytes=0))


def _save(history: _History, store: Store | None = None) -> None:
    import torch

    state = {"kept": torch.arange(10_000), "step": torch.tensor([history.length])}
    (store or history.store).save(state, run=_RUN, step=history.length)
    history.length += 1


def _synthesize(
    history: _History, run: str, count: int, began: datetime, *, first: int = 0, copied: bool = False
) -> Commit | None:
    """Write records of ``count`` checkpoints that are 30 seconds apart, and announcements, but no objects.

    Return the last checkpoint.
    """
    from casckpt.base.names import run_hash
    from casckpt.format import records
    from casckpt.format.keys import announcement_key, commit_key, make_txid
    from casckpt.format.names import ManifestId
    from casckpt.format.records import Announced, Committed
    from casckpt.history.announcements import look
    from casckpt.history.commits import just_committed

    made, number = None, look(history.maker.repository, run_hash(run)).head
    for step in range(first, first + count):
        number += 1
        began += timedelta(seconds=30)
        txid, now = make_txid(began, history.draw.randbytes(8), run, step), int(began.timestamp() * 1e6)
        announced = Announced(time=now, announced=[(txid, 0)], seen=None if copied else number - 1)
        committed = Committed(
            txid=txid, run=run, step=step, time=now, manifest=ManifestId(history.draw.randbytes(32).hex()),
            head="0" * 64, manifest_bytes=1, created_at=now, bytes_total=0,
            store=history.maker.repository.marker.store_id, who="ann@node3",
        )  # fmt: skip
        _write(history.storage.inner, announcement_key(run_hash(run), number), records.encode(announced))
        _write(history.storage.inner, commit_key(txid), records.encode(committed))
        made = just_committed(committed)
    return made


def _write(inner: Any, key: str, data: bytes) -> None:
    """Put an object without making it durable."""
    path = Path(inner.path) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
