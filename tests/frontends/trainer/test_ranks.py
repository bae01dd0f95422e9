"""Many ranks: train state of each, agreement, failures of one, signals, and turns to upload."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from casckpt.errors import InvalidInput, RankFailed, StorageError, Unsupported
from casckpt.frontends.trainer import Checkpointer, SaveOnSignal, TrainState
from casckpt.frontends.trainer.throttle import ThrottledStore, Turn
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.faulty import Call, FaultyStore, call_first, fail_before, look_on
from tests.support.parallel import local, sharded
from tests.support.ranks import die, outcome_of, tell, wait_for
from tests.support.repositories import Ticks, meanwhile
from tests.support.saves import cells, small_folder, steps

if TYPE_CHECKING:
    from tests.support.ranks import Pool


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def draws() -> tuple[Any, ...]:
    rng = np.random.mtrand._rand  # the global generator
    return random.random(), float(rng.random()), float(torch.rand(()))


# train state


def save_draws(rank: int, size: int, path: Path) -> Any:
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the global generator is what is saved
    torch.manual_seed(rank)
    own: dict[str, Any] = {"only on 1": {"deep": torch.ones(2)}} if rank == 1 else {"value": rank}
    Checkpointer(small_folder(path), run="sft").save(1, model(), None, TrainState(own=own))
    return draws()


def load_draws(rank: int, size: int, path: Path) -> Any:
    checkpointer = Checkpointer(small_folder(path), run="sft")
    state = TrainState(own=None)
    assert checkpointer.resume(model(), None, state)
    raw = checkpointer.load("sft@1", model())
    return draws(), state["own"], raw["own"]


def test_each_rank_gets_its_own_and_ranks_beyond_those_of_rank_0(store_path: Path, ranks: Pool) -> None:
    saved = ranks.run(2, save_draws, store_path)
    for size in (1, 2, 3):
        found = ranks.run(size, load_draws, store_path)
        assert [drawn for drawn, _, _ in found][:2] == saved[:size]
        assert found[0][1:] == ({"value": 0}, {"value": 0})
        if size > 1:
            assert list(found[1][1]) == ["only on 1"]
        if size > 2:
            assert found[2][1:] == ({"value": 0}, {"value": 0})
            assert found[2][0] not in saved  # no two ranks draw the same
            assert ranks.run(3, load_draws, store_path)[2][0] == found[2][0]  # but always the same


class Stage(nn.Module):
    """One layer of a model, under the name that it has in the whole."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(int(name))
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3)})


def two_stages_a_rank(rank: int, size: int, path: Path) -> Any:
    """A pipeline of two ranks, twice: each rank has two stages, and an optimizer for each."""
    stages = [Stage(str(2 * (rank % 2) + number)) for number in range(2)]

    def optims(rate: float) -> list[torch.optim.AdamW]:
        return [torch.optim.AdamW(one.parameters(), lr=rate * (at + 1)) for at, one in enumerate(stages)]

    trained = optims(0.1)
    for stage, optim in zip(stages, trained, strict=True):
        next(iter(stage.layers.values()))(torch.ones(1, 3)).sum().backward()
        optim.step()
    checkpointer = Checkpointer(small_folder(path), run="sft")
    checkpointer.save_async(1, stages, trained)
    weights = [parameter for stage in stages for parameter in stage.parameters()]
    want = [parameter.detach().clone() for parameter in weights]
    checkpointer.wait()
    for parameter in weights:
        nn.init.zeros_(parameter)
    fresh = optims(7.0)
    checkpointer.load("sft@1", stages, fresh, load_optim_state=True)
    rates = [group["lr"] for optim in fresh for group in optim.param_groups]
    return all(map(torch.equal, want, weights)), rates, [len(optim.state) for optim in fresh]


def test_pipeline_stages_and_their_optimizers_are_lists(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(4, two_stages_a_rank, store_path) == [(True, [0.1, 0.2], [2, 2])] * 4
    assert len(small_folder(store_path).read("sft@1")["model"]) == 8


# failures


def fails_on_one(rank: int, size: int, path: Path) -> Any:
    storage = FaultyStore(LocalStore(path))
    store = Store(Repository(storage))
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=1)
    whole = {"model": torch.ones(4)}

    class Failing:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise ZeroDivisionError("of the loader")
            return {}

    found = [outcome_of(lambda: checkpointer.save_async(1, model(), None, Failing()))]
    if rank == 1:
        storage.inject(fail_before("put", key="objects/*.safetensors"))
    future = checkpointer.save_async(1, model(), None, {"big": cells(3, seed=rank)} | whole)
    found.append(future.exception(60))
    seen = steps(store)
    checkpointer.save(1, model(), None, {"big": cells(3, seed=rank)} | whole)
    mine = checkpointer.load("sft@1", model())
    same = bool(torch.equal(mine["big"], cells(3, seed=rank)))
    return [type(one) for one in found], [str(one) for one in found], seen, same


def test_what_fails_on_one_rank_fails_on_all_and_the_step_can_be_saved_again(store_path: Path, ranks: Pool) -> None:
    kinds, texts, seen, same = zip(*ranks.run(3, fails_on_one, store_path), strict=True)
    assert kinds == (
        [RankFailed, StorageError],
        [ZeroDivisionError, StorageError],
        [RankFailed, StorageError],
    )
    assert "rank 1" in texts[0][0]
    assert "rank 1" in texts[2][1]
    assert seen == ([], [], [])
    assert all(same)


def fails_again_and_again(rank: int, size: int, path: Path, *, repeats: bool) -> tuple[type, int]:
    """Only rank 1 fails, and only its clock says that much time has gone by: (what was raised, at which step)."""
    storage, clock = FaultyStore(LocalStore(path)), Ticks()
    checkpointer = Checkpointer(Store(Repository(storage, clock=clock)), run="sft", save_interval=2)
    if rank == 1:
        error = Unsupported("by the storage") if repeats else None
        storage.inject(fail_before("put", key="objects/*.safetensors", times=99, error=error))
    for step in range(2, 99):
        if rank == 1:
            clock.advance(60)
        saving = outcome_of(partial(checkpointer.save_if_due, step, model(), None, {"x": cells(2, seed=rank)}))
        if isinstance(saving, Exception):
            return type(saving), step
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("repeats", "want"), [(True, (Unsupported, 4)), (False, (StorageError, 20))])
def test_failures_are_raised_at_the_same_step_on_all_ranks(
    repeats: bool, want: tuple[type, int], store_path: Path, ranks: Pool
) -> None:
    assert ranks.run(2, fails_again_and_again, store_path, repeats=repeats) == [want] * 2


def dies_in_the_background(rank: int, size: int, path: Path) -> Any:
    storage = FaultyStore(LocalStore(path))
    checkpointer = Checkpointer(Store(Repository(storage)), run="sft")
    checkpointer.save(1, model(), None, {"x": rank})
    if rank == 1:
        storage.inject(call_first("put", lambda _: die(), key="objects/*"))
    future = checkpointer.save_async(2, model(), None, {"x": cells(2, seed=rank)})
    return type(future.exception(60)), [step for _, step in steps(checkpointer.store)]


def test_other_ranks_name_a_rank_that_dies_in_a_save(store_path: Path, ranks: Pool) -> None:
    found = ranks.outcomes(3, dies_in_the_background, store_path)
    assert found[1].died == -signal.SIGKILL
    assert [one.value for one in (found[0], found[2])] == [(RankFailed, [1])] * 2


def resume_while_another_saves(rank: int, size: int, path: Path) -> int:
    store, state = small_folder(path), {"model": model().state_dict()}
    if rank == 0:
        store.save(state, run="sft", step=1, no_dist=True)
    else:
        store.repository.storage = FaultyStore(
            store.repository.storage,
            [
                call_first(
                    "open", meanwhile(lambda: store.save(state, run="sft", step=2, no_dist=True)), key="objects/*"
                )
            ],
        )
    found = Checkpointer(store, run="sft").resume(model())
    assert found is not None
    return found.step


def test_all_ranks_resume_from_the_checkpoint_that_rank_0_finds(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, resume_while_another_saves, store_path) == [1, 1]


# signals


def stopped_by_a_signal(rank: int, size: int, path: Path, saved_before: bool) -> Any:
    checkpointer = Checkpointer(small_folder(path), run="sft")
    made = []
    try:
        with SaveOnSignal(checkpointer) as last:
            for step in range(1, 100):
                if step == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)  # impatient
                made.append(step)
                if saved_before:
                    checkpointer.save_async(step, model(), None, {"step": step})
                last.check(step, model(), None, {"step": step}, metadata={"why": "signal"})
    except SystemExit as left:
        handler = signal.getsignal(signal.SIGTERM)
        return made[-1], left.code, [step for _, step in steps(checkpointer.store)], handler == signal.SIG_DFL
    return None


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_signal_to_one_rank_lets_all_save_once_and_leave(store_path: Path, ranks: Pool, saved_before: bool) -> None:
    found = ranks.run(3, stopped_by_a_signal, store_path, saved_before)
    there = [1, 2, 3] if saved_before else [3]
    assert found == [(3, 128 + signal.SIGTERM, there, True)] * 3


def test_ranks_exchange_signals_at_multiples_of_every(store: Store) -> None:
    checkpointer = Checkpointer(store, run="sft")
    with SaveOnSignal(checkpointer, [signal.SIGUSR1], every=5, exit_status=0) as last:
        os.kill(os.getpid(), signal.SIGUSR1)
        for step in range(1, 5):
            last.check(step, model())
        with pytest.raises(SystemExit) as left:
            last.check(5, model())
    assert left.value.code == 0
    assert checkpointer.latest_checkpoint().step == 5
    with pytest.raises(InvalidInput, match="every=0"):
        SaveOnSignal(checkpointer, every=0)


def test_signals_are_for_the_main_thread(store: Store) -> None:
    found: list[Any] = []

    def enter() -> None:
        found.append(outcome_of(lambda: SaveOnSignal(Checkpointer(store, run="sft")).__enter__()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert isinstance(found[0], InvalidInput)


def test_a_signal_that_cannot_be_handled_leaves_the_others_as_they_were(store: Store) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(InvalidInput, match="SIGKILL"):
        SaveOnSignal(Checkpointer(store, run="sft"), [signal.SIGUSR1, signal.SIGKILL]).__enter__()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_failed_save_is_repeated_before_the_exit(store_path: Path) -> None:
    storage = FaultyStore(LocalStore(store_path), [fail_before("put", key="objects/*.manifest")])
    checkpointer = Checkpointer(Store(Repository(storage)), run="sft")
    with SaveOnSignal(checkpointer, [signal.SIGUSR1]) as last:
        checkpointer.save_async(1, model())
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit):
            last.check(1, model())
    assert checkpointer.latest_checkpoint().step == 1


# turns


def uploads_in_turn(rank: int, size: int, path: Path, count: int) -> int:
    """How many ranks were in an upload at once, at the most, as this one saw."""
    here, most = path / "here", [0]
    here.mkdir(exist_ok=True)

    def look(_: Call) -> None:
        mark = here / f"{rank}"
        mark.touch()
        most[0] = max(most[0], len(list(here.iterdir())))
        mark.unlink()

    faulty = FaultyStore(LocalStore(path / "store"), [look_on("put", look, key="objects/*", times=1 << 20)])
    checkpointer = Checkpointer(Store(Repository(faulty)), run="sft", throttle=count, work_dir=path / "locks")
    for step in range(4):
        checkpointer.save(step, model(), None, {"x": cells(9, seed=100 * step + rank)})
    return most[0]


def test_throttle_limits_the_ranks_of_a_node_that_upload(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(4, uploads_in_turn, tmp_path, 1) == [1, 1, 1, 1]
    (tmp_path / "two").mkdir()
    assert max(ranks.run(4, uploads_in_turn, tmp_path / "two", 2)) <= 2


def holds_a_turn(rank: int, size: int, path: Path) -> None:
    turn = Turn(1, path)
    if rank == 0:
        with turn:
            tell("held")
            die()
    wait_for("held")
    with turn:  # a dead process holds nothing
        pass


def test_a_process_that_dies_frees_its_turn(tmp_path: Path, ranks: Pool) -> None:
    found = ranks.outcomes(2, holds_a_turn, tmp_path)
    assert found[0].died == -signal.SIGKILL
    assert found[1].ok


def test_the_threads_of_a_process_share_its_turn(tmp_path: Path) -> None:
    turn = Turn(1, tmp_path)
    with turn, turn:
        assert (tmp_path / "upload-0.lock").exists()


def test_a_save_raises_an_error_if_it_cannot_lock_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(tmp_path / "store", run="sft", throttle=1, work_dir=tmp_path / "file")
    with pytest.raises(StorageError, match=r"cannot be locked: .* give work_dir="):
        checkpointer.save(1, model())
    assert not list(checkpointer.find_checkpoints())


def test_a_throttled_store_is_a_store_otherwise(store_path: Path) -> None:
    inner = LocalStore(store_path)
    throttled: Any = ThrottledStore(inner, Turn(2))
    assert throttled.url == inner.url
    assert throttled.traits == inner.traits
    checkpointer = Checkpointer(str(store_path), run="sft", throttle=2)
    checkpointer.save(1, model())
    assert not checkpointer.store.verify().is_damaged


# what is left out


def train_thinned(rank: int, size: int, path: Path) -> Any:
    """Six checkpoints with AdamW, sharded; all but the last two without the optimizer's state."""
    torch.manual_seed(0)
    whole = sharded(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)))
    optimizer = torch.optim.AdamW(whole.parameters())
    checkpointer = Checkpointer(open_store(path), run="sft", thin={"drop": ["optim.*"], "keep_last": 2})
    sums = []
    for step in range(6):
        whole(torch.randn(3, 1024)).square().mean().backward()
        optimizer.step()
        checkpointer.save(step, whole, optimizer)
        sums.append([local(one).double().sum().item() for one in whole.parameters()])
    return sums


def load_thinned(rank: int, size: int, path: Path) -> Any:
    whole = sharded(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)))
    optimizer = torch.optim.AdamW(whole.parameters())
    checkpointer = Checkpointer(open_store(path), run="sft")
    sums = []
    for step in range(6):
        checkpointer.load(f"sft@{step}", whole)
        sums.append([local(one).double().sum().item() for one in whole.parameters()])
    told = outcome_of(lambda: checkpointer.load("sft@0", whole, optimizer))
    resumed = checkpointer.resume(whole, optimizer)
    assert resumed is not None
    return sums, str(told), resumed.step


def test_sharded_optimizers_are_left_out(store_path: Path, ranks: Pool) -> None:
    saved = ranks.run(2, train_thinned, store_path)
    store = open_store(store_path)
    before = store.stats().bytes_blobs
    dropped = [one.dropped for one in store.checkpoints()]
    assert [one is not None for one in dropped] == [True] * 4 + [False] * 2
    freed = store.gc(wait=0).deleted_bytes
    assert freed >= 0.95 * sum(one.bytes for one in dropped if one is not None)
    assert store.stats().bytes_blobs == before - freed
    for rank, (sums, told, resumed) in enumerate(ranks.run(2, load_thinned, store_path)):
        assert (sums, resumed) == (saved[rank], 5)
        assert "thinned by --drop 'optim.*'" in told
    assert not store.verify().is_damaged


def load_without_an_optimizer(rank: int, size: int, path: Path) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a test may
    logging.getLogger("casckpt").addHandler(handler)
    checkpointer, whole = Checkpointer(open_store(path), run="sft"), model()
    checkpointer.save(1, whole)
    said.clear()
    checkpointer.load("sft@1", whole, torch.optim.AdamW(whole.parameters()))
    logging.getLogger("casckpt").removeHandler(handler)
    return [text for text in said if "holds no optimizer" in text]


def test_one_rank_logs_that_there_is_no_optimizer(store_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, load_without_an_optimizer, store_path)
    assert (len(first), second) == (1, [])
