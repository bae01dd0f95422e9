"""The costs of listing, gc, saves and copies on a remote store depend on what is new, not on the size of the store.

The tests count the requests of a new process on a host that has seen the store before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import casckpt
from casckpt.base.names import run_hash
from casckpt.cli.commands.list import checkpoint_rows
from casckpt.format.keys import announcement_key, commit_key
from casckpt.format.records import Announced, Forgotten, Purged, Record, changed, encode
from casckpt.repository.repository import Repository
from casckpt.storage.base import Known, ListedObject
from casckpt.store.store import Store
from casckpt.upkeep.copies.copy import execute, plan_copy
from tests.support.far import FarStore, far
from tests.support.faulty import Call, look_on
from tests.support.repositories import committed, memory, repository
from tests.support.saves import cells, small

FEW, MANY = 4, 24
RUN = run_hash("run")
AHEAD = 4  # concurrent requests
Work = Callable[[Store], object]


def grown(storage: FarStore, host: Path, count: int, first: int = 0) -> None:
    store = Store(Repository(storage, host, cache_bytes=0))
    if not store.repository.exists():
        small(storage)
    for step in range(first, first + count):
        store.save({"shared": cells(2, seed=0), "own": cells(2, seed=step)}, run="run", step=step)
    store.tag("best", "run@0")


def requests(storage: FarStore, host: Path, work: Work) -> Counter[str]:
    """Return the requests that ``work`` makes in a new process, by method. Opening and closing a reader are reads."""
    before = len(storage.calls)
    work(Store(Repository(storage, host, cache_bytes=0)))
    return Counter(call.method for call in storage.calls[before:] if call.method != "open")


def gc(store: Store) -> object:
    return store.gc(keep_last=10_000)


def diff(store: Store) -> object:
    return store.diff("run@0", "run@latest")


def save(store: Store) -> casckpt.Checkpoint:
    newest = store.get("run@latest").step
    return store.save({"shared": cells(2, seed=0), "own": cells(2)}, run="run", step=newest + 1)


def copy_nothing(store: Store) -> object:
    near = small()
    return execute(store.repository, near.repository, plan_copy(store.repository, near.repository, ["run@0"]))


WORKS: list[Work] = [
    lambda store: checkpoint_rows(store.listing()),
    Store.stats,
    diff,
    gc,
    save,
    copy_nothing,
    Store.status,
]
NAMES = ["list", "stats", "diff", "gc", "save", "copy", "status"]


@pytest.mark.parametrize("work", WORKS, ids=NAMES)
def test_the_size_of_a_store_does_not_add_requests(tmp_path: Path, work: Work) -> None:
    found = []
    for count in (FEW, MANY):
        storage, host = far(), tmp_path / str(count)
        grown(storage, host, count)
        gc(Store(Repository(storage, host)))  # this host has seen everything
        found.append(requests(storage, host, work))
    assert found[0] == found[1]
    assert found[0]["list"] <= 26


@pytest.mark.parametrize(("work", "reads"), [*zip(WORKS[:4], (1, 2, 2, 3), strict=True)], ids=NAMES[:4])
def test_the_cost_of_new_data_is_proportional_to_its_amount(tmp_path: Path, work: Work, reads: int) -> None:
    """For each new checkpoint, a commit record is read.

    Followers also read its announcement and look for a few numbers that do not exist yet. stats and gc also read its
    manifest.
    """
    storage, host = far(), tmp_path / "host"
    grown(storage, host, FEW)
    gc(Store(Repository(storage, host)))
    work(Store(Repository(storage, host)))
    seen = requests(storage, host, work)
    grown(storage, tmp_path / "another host", 3, first=FEW)
    assert requests(storage, host, work)["get"] <= seen["get"] + 3 * reads + 1 + AHEAD  # the tag was set again
    assert requests(storage, host, work) == seen


class Paged(FarStore):
    """Counts each page of a listing as a request, as S3 does."""

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        for number, entry in enumerate(super().list(prefix, known=known)):
            if number and number % 1000 == 0:
                self.calls.append(Call("list", prefix))
            yield entry

    @property
    def requests(self) -> int:
        return sum(call.method not in ("open", "settle") for call in self.calls)


def over(repo: Repository, count: int) -> Iterator[tuple[str, Record]]:
    """Yield the records of checkpoints that were saved, forgotten and purged one after the other."""
    for step in range(count):
        record = committed(repo, "run", step)
        txid, time = record.txid, record.time
        for number, one in enumerate(
            (record, Forgotten(txid=txid, time=time, who="x"), Purged(txid=txid, time=time, who="x"))
        ):
            at = 3 * step + number
            seen = None if number else at - 1
            yield announcement_key(RUN, at), Announced(time=time, announced=[(txid, number)], seen=seen)
            yield commit_key(txid, number), one


def short_lived(storage: FarStore, host: Path, count: int) -> None:
    """Create a run of ``count`` checkpoints that are over, and five behind them that are not."""
    store, repo, said = small(storage), repository(host, storage), dict[str, Record]()
    for step in range(count, count + 5):
        store.save({"own": cells(2, seed=step)}, run="run", step=step)
    for at in range(5):
        record = repo.get_record(announcement_key(RUN, at), Announced)
        later = 3 * count + at
        said[announcement_key(RUN, later)] = changed(record, seen=later - 1)
        storage.delete(announcement_key(RUN, at))
    for key, record in (*over(repo, count), *said.items()):
        storage.inner.put(key, encode(record))


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_first_save_on_a_fresh_host_lists_the_names_of_many_short_lived_saves(tmp_path: Path, count: int) -> None:
    """It makes no request for each of them, and neither does any other reader of a step."""
    storage = Paged(memory())
    short_lived(storage, tmp_path, count)
    pages = -(-(3 * count + 5) // 1000)

    def opened(host: str) -> Store:
        storage.calls.clear()
        return Store(Repository(storage, tmp_path / host, cache_bytes=0))

    before: list[int] = []
    storage.inject(look_on("put", lambda _: before.append(storage.requests), key="*.safetensors"))
    store = opened("fresh")
    store.save({"own": cells(2, seed=count + 5)}, run="run", step=count + 5)
    assert before[0] <= pages + 19
    for host in ("fresh", "another"):
        assert opened(host).get(f"run@{count + 1}").step == count + 1
        assert storage.requests <= 10 + pages * (host == "another")
    store.save({"own": cells(2, seed=count + 6)}, run="run", step=count + 6)
    assert storage.count("list", "commits/") == pages  # the one above
    watcher = opened("third").watch("run", timeout=0)
    assert list(watcher) == []
    assert storage.requests <= 12


def counts(storage: Paged, host: Path) -> list[int]:
    """Return the requests of a listing, a gc, and a first save up to its first blob, each on a host of its own."""
    found: list[int] = []
    for number, work in enumerate((WORKS[0], gc)):
        storage.calls.clear()
        work(Store(Repository(storage, host / f"{number}", cache_bytes=0)))
        found.append(storage.requests)
    storage.calls.clear()
    storage.inject(look_on("put", lambda _: found.append(storage.requests), key="*.safetensors"))
    save(Store(Repository(storage, host / "fresh", cache_bytes=0)))
    return found[:3]


@pytest.mark.parametrize("count", [600, pytest.param(5_000, marks=pytest.mark.soak)])
def test_saves_that_are_over_cost_nothing_a_month_later(tmp_path: Path, count: int) -> None:
    """A host reads each list of a thousand logs once, to see which logs are over. A single log does not need it."""
    five, many = Paged(memory()), Paged(memory())
    short_lived(five, tmp_path / "five", 0)
    short_lived(many, tmp_path / "many", count)
    for storage in (five, many):
        gc(Store(Repository(storage, tmp_path / f"gc of {len(storage.calls)}", cache_bytes=0)))
    files = [entry.key for entry in many.list("")]
    assert len(files) <= 50
    lists = len([key for key in files if key.startswith("commits/ended/")])
    assert lists == -(-count // 1000)
    few, more = counts(five, tmp_path / "of five"), counts(many, tmp_path / "of many")
    assert more[0] == few[0] + lists
    assert more[1] == few[1] + lists + 3  # gc also looks for the lowest announcement
    assert more[2] <= few[2]
