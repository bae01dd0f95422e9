"""The data that a process remembers about its saved runs, for their next saves from any front end."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from casckpt.errors import StorageError
from casckpt.frontends.dcp import StorageWriter
from casckpt.frontends.trainer import Checkpointer
from casckpt.repository.repository import Repository
from casckpt.saving.encoder import MAX_RUNS, Pause, RunMemory
from casckpt.store.store import Store
from tests.support import dcp
from tests.support.far import FarStore, far
from tests.support.faulty import fail_before
from tests.support.held import held_bytes
from tests.support.saves import another_process, reopened, same_state, small, trained

STEPS = 4


def state(step: int, *, seed: int = 0) -> dict[str, Any]:
    return {f"layer{n}": trained(9, step, seed=seed + n) for n in range(3)}


def nbytes(tensors: dict[str, Any]) -> int:
    return sum(one.nbytes for one in tensors.values())


@pytest.fixture
def storage() -> FarStore:
    """A remote storage. A save never reads from it."""
    found = far()
    small(found).change_settings(compress="auto")
    return found


def here(storage: FarStore) -> Store:
    """Return the store, reopened."""
    return Store(Repository(storage))


def check(storage: FarStore, run: str = "default", first: int = 0, *, seed: int = 0) -> None:
    """Check that each version loads unchanged, and that all versions except the ``first`` are encoded."""
    store = here(storage)
    for step in range(STEPS):
        assert same_state(store.read(f"{run}@{step}"), state(step, seed=seed)), step
        assert (store.get(f"{run}@{step}").commit.committed.bytes_deltas > 0) == (step > first), step
    assert not store.verify(decode=True).is_damaged


def by_save(storage: FarStore, step: int) -> None:
    here(storage).save(state(step), step=step)


def by_turns(storage: FarStore, step: int) -> None:
    """This covers foreground and background saves."""
    if step % 2:
        here(storage).save_async(state(step), step=step).result()
    else:
        here(storage).save(state(step), step=step)


def by_dcp(storage: FarStore, step: int) -> None:
    dcp.save(state(step), StorageWriter(here(storage), step=step))


@pytest.mark.parametrize("save", [by_save, by_turns, by_dcp])
def test_the_next_save_continues_encoding_from_any_front_end(
    storage: FarStore, save: Callable[[FarStore, int], None]
) -> None:
    for step in range(STEPS):
        save(storage, step)
    check(storage)
    assert storage.reads_of_blobs(), "of the loads"


def test_a_trainer_on_remote_storage_encodes_deltas(storage: FarStore) -> None:
    model = nn.Module()
    for key, value in state(0).items():
        model.register_parameter(key, nn.Parameter(value))
    checkpointer = Checkpointer(here(storage), run="default")
    for step in range(STEPS):
        with torch.no_grad():
            for key, value in state(step).items():
                getattr(model, key).copy_(value)
        checkpointer.save_async(step, model).result()
    checkpointer.close()
    deltas = [ckpt.commit.committed.bytes_deltas > 0 for ckpt in here(storage).checkpoints()]
    assert deltas == [False] + [True] * (STEPS - 1)
    assert same_state(dict(here(storage).read("default@3")["model"]), state(3))


def test_a_pickled_writer_continues_encoding(tmp_path: Any) -> None:
    """Each DCP save in a separate process has its own writer."""
    store = small()
    for step in range(STEPS):
        writer = StorageWriter(store, step=step, compress="auto")
        assert set(writer.__getstate__()) == {"_store", "_run", "_place", "_options"}
        dcp.save(state(step), writer)
    assert store.get("default@3").commit.committed.bytes_deltas
    url = str(tmp_path / "s")
    again = pickle.loads(pickle.dumps(StorageWriter(url, step=0)))
    dcp.save(state(0), again)


def test_memory_is_kept_for_a_limited_number_of_runs(storage: FarStore) -> None:
    for step in range(STEPS):
        for number in range(MAX_RUNS):
            here(storage).save(state(step, seed=10 * number), run=f"run{number}", step=step)
    for number in range(MAX_RUNS):
        check(storage, f"run{number}", seed=10 * number)
    with another_process():
        for step in range(STEPS):
            for number in range(MAX_RUNS + 1):
                here(storage).save(state(step + 1, seed=10 * number), run=f"run{number}", step=10 + step)
                assert held_bytes() <= MAX_RUNS * 1.3 * nbytes(state(0))
        assert not here(storage).get("run0@13").commit.committed.bytes_deltas


def test_cells_of_removed_keys_are_released(storage: FarStore) -> None:
    more = {"old": trained(20, 0, seed=9)}
    with another_process():
        here(storage).save(state(0) | more, step=0)
        assert held_bytes() == nbytes(state(0)) + nbytes(more)
        here(storage).save(state(1), step=1)
        assert nbytes(state(1)) < held_bytes() < 1.2 * nbytes(state(1))
        here(storage).save({"layer0": state(2)["layer0"].view(-1, 64), "small": torch.ones(3)}, step=2)
        assert held_bytes() == state(2)["layer0"].nbytes, "in another shape, cut anew"
        here(storage).save({"n": 3}, step=3)
        assert held_bytes() == 0


def test_all_windows_of_a_dcp_save_count_together(storage: FarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casckpt.frontends.dcp.items.WINDOW_BYTES", 1)
    for step in range(STEPS):
        by_dcp(storage, step)
    check(storage)


def test_a_failed_save_releases_nothing(storage: FarStore) -> None:
    for step in (0, 1):
        by_save(storage, step)
    storage.inject(fail_before("put", key="*.safetensors", times=1 << 30))
    with pytest.raises(StorageError):
        by_save(storage, 2)
    storage.heal()
    with another_process():
        by_save(storage, 7)
    here(storage).forget("default@7")
    for step in (2, 3):
        by_save(storage, step)
    for step in range(STEPS):
        assert same_state(reopened(here(storage)).read(f"default@{step}"), state(step))


def test_a_save_without_encoding_releases_everything(storage: FarStore) -> None:
    with another_process():
        for step in (0, 1):
            by_save(storage, step)
        here(storage).save(state(2), step=2, compress="off")
        assert held_bytes() == 0
        by_save(storage, 3)
        assert not here(storage).get("default@3").commit.committed.bytes_deltas


def test_the_pause_doubles_each_time_encoding_turns_out_to_be_useless() -> None:
    stream, tried = ("tensor", "w", 0, None), list[int]()
    kept = RunMemory()
    for kept.saves in range(1, 200):
        if not kept.pauses(stream):
            tried.append(kept.saves)
            for _ in range(2):  # by two threads at the same time
                kept.pause(stream, 8, 64)
    assert tried == [1, 9, 25, 57, 121, 185]


def test_a_different_thread_can_resume_encoding_at_any_time() -> None:
    stream = ("tensor", "w", 0, None)

    class Shared(dict[Any, Pause]):
        def __contains__(self, name: object) -> bool:
            found = super().__contains__(name)
            self.clear()  # by the other thread, right after this check
            return found

    kept = RunMemory(saves=9, in_vain=Shared({stream: Pause(9, 8)}))
    assert not kept.pauses(stream)
