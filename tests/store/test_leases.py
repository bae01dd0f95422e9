"""Expiring tags and leases: a leased checkpoint can be loaded despite gcs and policies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Conflict, Gone, InvalidInput, MissingKey, NotFound, StorageError, Unsupported
from casckpt.history.tags import list_tags
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.ranks import Pool
from tests.support.repositories import meanwhile, memory
from tests.support.saves import cells, same_state, small, small_folder, steps


@pytest.fixture
def store() -> Store:
    """A store with run@0 to run@2, each with its own tensor."""
    made = small()
    for step in range(3):
        made.save(state(step), run="run", step=step, metrics={"loss": 1.0 / (step + 1)}, healthy=step > 0)
    return made


def state(step: int) -> dict[str, Any]:
    return {"w": cells(3, seed=step)}


def gc(store: Store) -> list[int]:
    return [one.step for one in store.gc(keep_last=1, min_age=0, wait=0).purged]


def test_a_leased_checkpoint_loads_despite_gcs(store: Store) -> None:
    with store.lease("run@0") as ckpt:
        assert ckpt == store.get("run@0")
        assert gc(store) == [1]
        store.forget(ckpt, tagged=True)
        assert gc(store) == []
        with pytest.warns(UserWarning, match="forgotten"):
            assert same_state(store.read(ckpt), state(0))
    assert gc(store) == [0]
    with pytest.raises(Gone, match="purged"), store.lease(ckpt):
        pass
    with pytest.raises(NotFound), store.lease(ckpt.id):
        pass


def test_an_expiring_tag_refers_to_its_checkpoint_until_it_expires(store: Store) -> None:
    store.tag("eval", "run@0", expires="12h")
    store.tag("eval", "run@0", expires=timedelta(hours=12))
    assert store.get("tag:eval") == store.tags()["eval"] == store.get("run@0")
    assert store.get("run@0").tags == ["eval"]
    with pytest.raises(Conflict, match="tagged"):
        store.forget("run@0")
    assert gc(store) == [1]
    store.untag("eval")
    assert gc(store) == [0]


@pytest.mark.parametrize("expires", [0, "0", "12", -1, 3600, "soon", True])
def test_an_invalid_duration_of_a_tag_or_lease_is_rejected(store: Store, expires: Any) -> None:
    with pytest.raises(InvalidInput):
        store.tag("eval", "run@0", expires=expires)
    with pytest.raises(InvalidInput), store.lease("run@0", expires=expires):
        pass
    assert store.tags() == {}


def test_an_expired_tag_does_not_refer_to_a_checkpoint(store: Store) -> None:
    repo = store.repository
    store.tag("eval", "run@0", expires="1h")
    now = repo.clock
    repo.clock = lambda: now() + 2 * 3600 * 10**6
    assert store.tags() == {}
    assert store.get("run@0").tags == []
    with pytest.raises(NotFound, match="there is no tag 'eval'"):
        store.get("tag:eval")


def test_a_forgotten_checkpoint_is_neither_leased_nor_restored(store: Store) -> None:
    (gone,) = store.forget("run@0")
    with pytest.raises(NotFound, match="only a visible checkpoint can be leased"):
        store.tag("eval", gone.id, expires="1h")
    with pytest.raises(NotFound, match="only a visible checkpoint can be leased"), store.lease(gone.id):
        pass
    assert steps(store) == [("run", 1), ("run", 2)]
    assert store.tags() == {}


def test_copies_keep_metrics_and_health_but_not_leases(store: Store) -> None:
    target = small()
    store.tag("best", "run@1")
    with store.lease("run@0"):
        store.tag("eval", "run@0", expires="1h")
        copied = store.copy_to(target, tags=True)
    assert copied.tags == ("best",)
    assert target.tags().keys() == {"best"}
    for mine, theirs in zip(store.checkpoints(), target.checkpoints(), strict=True):
        assert (mine.metrics, mine.healthy) == (theirs.metrics, theirs.healthy)
        assert mine.metrics


def test_leases_leave_nothing_behind(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save(state(0), run="run", step=0)
    for _ in range(3):
        with store.lease("run@0"):
            pass
    assert list((tmp_path / "store" / "leases").iterdir()) == []
    assert not (tmp_path / "store" / "tags").exists()


def test_a_lease_can_be_ended_by_its_name_and_is_found_by_it(store: Store) -> None:
    with store.lease("run@0"):
        (name,) = store.tags()
        assert store.get(f"tag:{name}") == store.get("run@0")
        with pytest.raises(InvalidInput, match="choose a different one"):
            store.tag(name, "run@1")
        with pytest.raises(Conflict, match=f"protect 1 of the checkpoints.*{name}"):
            store.forget("run@0")
        store.untag(name)
        assert store.tags() == {}


# loads under a lease


def empty() -> dict[str, Any]:
    return {"w": torch.zeros_like(state(0)["w"])}


def test_a_leased_checkpoint_is_kept_until_its_load_ends(store: Store) -> None:
    held: list[int] = []

    def look(done: int, total: int | None) -> None:
        held.append(len(store.tags()))
        assert gc(store) in ([1], [])

    found = empty()
    with store.lease("run@0") as leased:
        assert store.load(found, leased, progress=look) == leased
    assert same_state(found, state(0))
    assert set(held) == {1}
    assert store.tags() == {}
    assert gc(store) == [0]


def test_an_error_in_the_block_ends_the_lease(store: Store) -> None:
    with pytest.raises(MissingKey), store.lease("run@0") as held:
        store.load({"other": torch.zeros(1)}, held)
    assert store.tags() == {}


@pytest.mark.parametrize("error", [StorageError("access denied"), Unsupported("it can only be read")])
def test_a_lease_that_cannot_be_written_is_an_error(error: Exception) -> None:
    storage = FaultyStore(memory())
    store = small(storage)
    store.save(state(0), run="run", step=0)
    storage.inject(fail_before("put", key="leases/*", times=99, error=error))
    with pytest.raises(type(error), match=str(error)), store.lease("run@0"):
        pytest.fail("the block must not run")


def test_a_lease_on_latest_holds_the_checkpoint_that_is_latest_at_that_time(store: Store) -> None:
    """A different process forgets the checkpoint between the listing and the lease."""
    storage = FaultyStore(store.repository.storage)
    reader = small(storage)

    def rotate() -> None:
        store.save(state(3), run="run", step=3)
        gc(store)

    storage.inject(call_first("put", meanwhile(rotate), key="leases/*"))
    with reader.lease("run@latest") as held:
        assert held.step == 3
    assert steps(store) == [("run", 3)]


def leases_of(rank: int, size: int, path: Path) -> tuple[int, int]:
    """Return the number of leases during the call and after it."""
    store, found, most = casckpt.open(path), empty(), [0]

    def look(done: int, total: int | None) -> None:
        most.append(len(store.tags()))

    with store.lease("run@0") as held:
        torch.distributed.barrier()
        store.load(found, held, progress=look)
        torch.distributed.barrier()
    assert same_state(found, state(0))
    torch.distributed.barrier()
    return max(most), len(store.tags())


def test_several_ranks_load_the_checkpoint_that_each_has_leased(ranks: Pool, tmp_path: Path) -> None:
    small_folder(tmp_path / "store").save(state(0), run="run", step=0)
    assert ranks.run(2, leases_of, tmp_path / "store") == [(2, 0)] * 2
    assert list((tmp_path / "store" / "leases").iterdir()) == []


# during a gc


HOLD = """
import sys, casckpt
with casckpt.open(sys.argv[1]).lease("run@0"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lease_of_a_killed_process_expires(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    for step in range(2):
        store.save(state(step), run="run", step=step)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert gc(store) == []
        holder.send_signal(signal.SIGKILL)
    (tag,) = list_tags(store.repository).tags.values()
    assert tag.holder.endswith(f":{holder.pid}")
    later(store, 1.9)
    assert gc(store) == [], "for a gc it counts an hour longer"
    later(store, 0.2)
    assert gc(store) == [0]
    assert store.stats().blobs == 1


def later(store: Store, hours: float) -> None:
    now = store.repository.clock
    store.repository.clock = lambda: now() + round(hours * 3600e6)


def test_gc_does_not_delete_leased_checkpoints(tmp_path: Path) -> None:
    """Two readers and a gc run repeatedly while a training run saves."""
    store, over = small_folder(tmp_path / "store"), threading.Event()
    store.save(state(0), run="run", step=0)
    read: list[int] = []

    def reads() -> None:
        mine = casckpt.open(tmp_path / "store")
        while not over.is_set():
            with mine.lease("run@latest") as ckpt:
                assert same_state(mine.read(ckpt), state(ckpt.step))
            found = empty()
            with mine.lease("run@latest") as ckpt:
                mine.load(found, ckpt)
            assert same_state(found, state(ckpt.step))
            read.append(ckpt.step)

    def collects() -> None:
        mine = casckpt.open(tmp_path / "store")
        while not over.is_set():
            mine.gc(keep_last=1, min_age=0, wait=0)

    with ThreadPoolExecutor() as pool:
        tasks = [pool.submit(call) for call in (reads, reads, collects)]
        for step in range(1, 15):
            store.save(state(step), run="run", step=step)
        over.set()
        for task in tasks:
            task.result()
    assert len(read) > 2
    gc(store)
    assert steps(store) == [("run", 14)]
    assert store.stats().blobs == 1
