"""Invalid state is reported before the training starts or at its first step, before anything is written."""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from casckpt.errors import CasckptError, InvalidInput
from casckpt.frontends.accelerate import AcceleratorCheckpointer
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.storage.buffers import AlignedBuffer
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from casckpt.tensors import staging
from tests.support.local import failing
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import files, reopened, small, small_folder, steps
from tests.support.training import made, train, trained


class Phase(enum.Enum):
    WARMUP = 1


class Phased(optim.AdamW):
    """An optimizer whose first step creates state that is not plain data."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["phase"] = Phase.WARMUP


class Drawing:
    """A train state whose state_dict draws a random number and counts its calls."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"drawn": float(torch.rand(()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def stepped(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_a_check_neither_writes_nor_draws_random_numbers(tmp_path: Path) -> None:
    store, (model, optimizer) = open_store(tmp_path / "store"), trained()
    checkpointer, state, before = Checkpointer(store, run="sft"), TrainState(loader=Drawing()), torch.get_rng_state()
    checkpointer.check(model, optimizer, state)
    assert not (tmp_path / "store").exists()
    assert torch.equal(torch.get_rng_state(), before)
    assert state["loader"].asked == 1
    checkpointer.save(1, model, optimizer, state)
    there = files(tmp_path / "store")
    checkpointer.check(model, optimizer, state)
    assert files(tmp_path / "store") == there


def test_a_check_raises_the_errors_that_a_save_would_raise() -> None:
    model, optimizer = trained()
    elsewhere = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    cases: dict[str, Callable[[Checkpointer], None]] = {
        r"train\.0\.phase": lambda run: run.check(model, optimizer, {"phase": Phase.WARMUP}),
        "pass the list of these": lambda run: run.check(model, elsewhere),
        "pass a dict of the models": lambda run: run.check([nn.Linear(2, 2), nn.Linear(2, 2)]),
    }
    for message, check in cases.items():
        with pytest.raises(InvalidInput, match=message):
            check(Checkpointer(small(), run="sft"))
    both = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    optimizers = [optim.AdamW([parameter]) for parameter in both.parameters()]
    Checkpointer(small(), run="sft").check(both, optimizers)  # as the messages advise
    Checkpointer(small(), run="sft").check({"generator": nn.Linear(2, 2), "discriminator": nn.Linear(2, 2)})
    Checkpointer(small(), run="sft", allow_pickle=True).check(model, optimizer, {"phase": Phase.WARMUP})


def test_store_check_raises_the_errors_that_a_save_would_raise() -> None:
    store = small()
    store.check({"w": torch.ones(2)}, run="a")
    with pytest.raises(InvalidInput, match="phase"):
        store.check({"phase": Phase.WARMUP})
    assert steps(store) == []


@pytest.mark.parametrize("found", [False, True])
def test_a_resume_raises_the_errors_that_later_saves_would_raise(found: bool) -> None:
    store, model = small(), net()
    if found:
        Checkpointer(store, run="sft").save(1, model, None, TrainState(phase=1))
    with pytest.raises(InvalidInput, match=r"train\.0\.more\.func"):
        Checkpointer(store, run="sft").resume(model, None, TrainState(more={"func": max}), missing="warn")


def loop(store: Store, make: Callable[[nn.Module], optim.Optimizer], every: int = 1, state: Any = None) -> int:
    """Train for 10 steps, with an optimizer step at every ``every``-th one.

    Return the step at which the training ends.
    """
    model = net()
    optimizer = make(model)
    checkpointer = Checkpointer(store, run="sft", save_interval=8)
    for step in range(1, 11):
        if step % every == 0:
            stepped(model, optimizer)
        try:
            checkpointer.save_if_due(step, model, optimizer, state)
        except InvalidInput:
            return step
    checkpointer.close()
    return 0


def test_a_check_finds_optimizer_state_that_cannot_be_saved() -> None:
    assert loop(small(), lambda model: Phased(model.parameters())) == 1
    assert loop(small(), lambda model: Phased(model.parameters()), every=3) == 3
    assert loop(small(), lambda model: optim.SGD(model.parameters()), state={"phase": Phase.WARMUP}) == 1


def test_steps_are_checked_until_the_optimizer_has_state() -> None:
    store, state = small(), TrainState(loader=Drawing())
    assert loop(store, lambda model: optim.AdamW(model.parameters()), every=4, state=state) == 0
    assert state["loader"].asked == 3  # at steps 1 and 4, and by the save at step 8
    state = TrainState(loader=Drawing())
    assert loop(small(), lambda model: optim.AdamW(model.parameters()), state=state) == 0
    assert state["loader"].asked == 2


# many ranks


def bad_on_one(rank: int, size: int, path: Path) -> Any:
    """Try each kind of invalid state on the last rank alone. Return the step at which each rank raises the error."""
    last, model = rank == size - 1, net()
    found = []
    ways: list[tuple[dict[str, Any], Any]] = [
        ({"phase": Phase.WARMUP} if last else {}, optim.AdamW), ({}, Phased if last else optim.AdamW)
    ]  # fmt: skip
    for number, (state, make) in enumerate(ways):
        run = Checkpointer(small_folder(path), run=f"sft{number}", save_interval=5)
        optimizer = make(model.parameters())
        found.append(type(outcome_of(lambda: run.resume(model, optimizer, TrainState(**state)))).__name__)  # noqa: B023
        for step in range(1, 4):
            stepped(model, optimizer)
            error = outcome_of(lambda: run.save_if_due(step, model, optimizer))  # noqa: B023
            if error is not None:
                found.append(f"{type(error).__name__} of rank {error.rank} at step {step}")
                break
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_raise_an_error_at_the_same_step(store_path: Path, ranks: Pool, size: int) -> None:
    expected = ["InvalidInput", "NoneType", f"InvalidInput of rank {size - 1} at step 1"]
    found = ranks.run(size, bad_on_one, store_path)
    assert [of_rank[:2] for of_rank in found] == [expected[:2]] * size
    assert [of_rank[2].replace("None", str(size - 1)) for of_rank in found] == [expected[2]] * size
    assert steps(open_store(store_path)) == []


def stepped_on_one(rank: int, size: int, path: Path) -> Any:
    """Train so that only rank 1's optimizer creates state, at the second step."""
    model = net()
    optimizer = Phased(model.parameters(), lr=0.0)
    run = Checkpointer(small_folder(path), run="sft", save_interval=5)
    for step in range(1, 5):
        if step == 2 and rank == 1:
            stepped(model, optimizer)
        error = outcome_of(lambda: run.save_if_due(step, model, optimizer))  # noqa: B023
        if error is not None:
            return type(error).__name__, step
    return None


def test_optimizer_state_on_a_single_rank_is_checked_on_all_ranks(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, stepped_on_one, store_path) == [("InvalidInput", 2)] * 2


def differing(rank: int, size: int, path: Path) -> Any:
    model = net()
    nn.init.constant_(model.weight, rank)
    run = Checkpointer(small_folder(path), run="sft", save_interval=5)
    found = [run.resume(model), outcome_of(lambda: run.check(model)), outcome_of(lambda: run.save_if_due(1, model))]
    wide = nn.Linear(3, 3 + rank)
    return [type(one).__name__ for one in (*found, outcome_of(lambda: run.resume(wide)))]


def test_a_check_compares_values_across_ranks_only_during_training(store_path: Path, ranks: Pool) -> None:
    # two weights may become equal after a resume
    expected = [
        "NoneType",
        "InvalidInput",
        "InvalidInput",
        "InvalidInput",
    ]
    assert ranks.run(2, differing, store_path) == [expected] * 2


def test_a_check_of_an_accelerator_includes_everything_that_it_prepared() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs casckpt[transformers]")
    it, model = accelerate.Accelerator(cpu=True), nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"step": torch.ones(()), "projector": object()}
    it.prepare(model, optimizer)
    run = AcceleratorCheckpointer(it, small(), run="gan")
    for call in (run.check, run.resume):
        with pytest.raises(InvalidInput, match="projector"):
            call()


def test_a_check_that_failed_is_repeated_at_the_next_step() -> None:
    model, optimizer = trained()
    run = Checkpointer(small(), run="sft", save_interval=9)
    parameter = next(model.parameters())
    optimizer.state[parameter]["projector"] = object()
    for step in (1, 2):
        with pytest.raises(InvalidInput, match="projector"):
            run.save_if_due(step, model, optimizer)
    del optimizer.state[parameter]["projector"]
    assert run.save_if_due(3, model, optimizer) is None


def test_training_continues_if_all_state_is_valid() -> None:
    store, (model, optimizer) = small(), made(1)
    checkpointer = Checkpointer(store, run="sft", save_interval=2)
    checkpointer.resume(model, optimizer)
    for step in range(1, 5):
        train(model, optimizer, range(step, step + 1))
        checkpointer.save_if_due(step, model, optimizer)
    checkpointer.close()
    assert steps(store) == [("sft", 2), ("sft", 4)]


# the memory for the first background save


def prepared(checkpointer: Checkpointer) -> int:
    """Return the size of the memory for copies."""
    return checkpointer.store._saver.get().background.staging.nbytes


def copied_into(checkpointer: Checkpointer, step: int, *parts: Any) -> int:
    """Save in the background. Return the size of the copy."""
    assert checkpointer.save_if_due(step, *parts) is not None
    checkpointer.wait()
    assert checkpointer.summary is not None
    return checkpointer.summary.bytes_copied


def test_a_call_that_is_not_due_prepares_the_memory_of_background_saves(store: Store) -> None:
    model, optimizer = made()
    with Checkpointer(store, run="sft", save_interval=3) as checkpointer:
        assert checkpointer.resume(model, optimizer) is None
        checkpointer.save_if_due(1, model, optimizer)
        assert prepared(checkpointer) == 0  # the optimizer still lacks its state
        train(model, optimizer, range(1))
        checkpointer.save_if_due(2, model, optimizer)
        memory = prepared(checkpointer)
        assert memory == copied_into(checkpointer, 3, model, optimizer) == prepared(checkpointer) > 0


@pytest.mark.parametrize(("interval", "prepares"), [(1, True), (None, False)])
def test_a_resume_prepares_the_memory_of_background_saves(store: Store, interval: int | None, prepares: bool) -> None:
    model, optimizer = trained()
    Checkpointer(store, run="sft").save(1, model, optimizer)
    other, fresh = made(1)
    with Checkpointer(reopened(store), run="sft", save_interval=interval, last_step=2) as checkpointer:
        checkpointer.resume(other, fresh)
        memory = prepared(checkpointer)
        assert (memory == copied_into(checkpointer, 2, other, fresh)) is prepares
        assert bool(memory) is prepares


def test_without_memory_a_resume_succeeds_and_the_save_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    Checkpointer(store, run="sft").save(1, model, optimizer)
    monkeypatch.setattr(staging, "AlignedBuffer", failing(AlignedBuffer, errno.ENOMEM, times=9))
    checkpointer = Checkpointer(store, run="sft", save_interval=1)
    assert checkpointer.resume(model, optimizer) is not None
    checkpointer.save_if_due(2, model, optimizer)
    with pytest.raises(CasckptError, match="cannot allocate"):
        checkpointer.wait()


def resumed_with_memory(rank: int, size: int, path: Path) -> int:
    model, optimizer = trained()
    checkpointer = Checkpointer(open_store(path), run="sft", save_interval=1)
    if checkpointer.resume(model, optimizer) is None:
        checkpointer.save(1, model, optimizer)
    memory = prepared(checkpointer)
    copied = checkpointer.save_async(2, model, optimizer) if memory else None
    checkpointer.close()
    return 0 if copied is None else memory


def test_ranks_prepare_their_memory_together(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, resumed_with_memory, store_path) == [0, 0]
    assert all(ranks.run(2, resumed_with_memory, store_path))
