"""The costs of listing, gc, saves and copies on a remote store depend on what is new, not on the size of the store.

The tests count the requests of a new process on a host that has seen the store before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import casckpt
from casckpt.cli.commands.list import checkpoint_rows
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.copies.copy import execute, plan_copy
from tests.support.far import FarStore, far
from tests.support.saves import cells, small

FEW, MANY = 4, 24
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
]
NAMES = ["list", "stats", "diff", "gc", "save", "copy"]


@pytest.mark.parametrize("work", WORKS, ids=NAMES)
def test_the_size_of_a_store_does_not_add_requests(tmp_path: Path, work: Work) -> None:
    found = []
    for count in (FEW, MANY):
        storage, host = far(), tmp_path / str(count)
        grown(storage, host, count)
        gc(Store(Repository(storage, host)))  # this host has seen everything
        found.append(requests(storage, host, work))
    assert found[0] == found[1]
    assert found[0]["list"] <= 21


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
