"""If ranks pass different arguments, either all of them raise an error or all succeed.

No rank waits for a different one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import CasckptError
from casckpt.frontends import megatron
from casckpt.frontends.megatron import ShardedTensor
from casckpt.frontends.trainer import Checkpointer, TrainState
from tests.support.ranks import Pool, outcome_of

Call = Callable[[casckpt.Store, bool], Any]
"""The call that a rank makes. The flag says whether the rank is the odd one."""


def pair() -> tuple[nn.Linear, optim.Optimizer]:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(9.0)
    return model, optim.SGD(model.parameters())


def trainer(store: casckpt.Store, run: str = "r") -> Checkpointer:
    return Checkpointer(store, run=run)


def sharded(**more: Any) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3), replica_id=torch.distributed.get_rank())} | more


def ref(odd: bool) -> str:
    return "r@1" if odd else "r@2"


NAMES: dict[str, Call] = {
    "load_model_and_optim_state": lambda store, odd: casckpt.load_model_and_optim_state(store, ref(odd), *pair()),
    "unshard_model_state": lambda store, odd: casckpt.unshard_model_state(store, ref(odd)),
    "unshard_model_state on rank 0": lambda store, odd: casckpt.unshard_model_state(store, ref(odd), rank0_only=True),
    "unshard_optim_state": lambda store, odd: casckpt.unshard_optim_state(store, ref(odd)),
    "Checkpointer.load": lambda store, odd: trainer(store).load(ref(odd), *pair()),
    "Checkpointer.resume": lambda store, odd: trainer(store, "bare" if odd else "r").resume(*pair()),
    "newest_of_all_ranks": lambda store, odd: trainer(store).newest_of_all_ranks(1 if odd else 2),
    "Megatron style": lambda store, odd: megatron.load(sharded(), f"{store.url}#m@{1 if odd else 2}"),
}

REFUSED: dict[str, tuple[str, Call]] = {
    "a train state that is not there": (
        "NotFound", lambda store, odd: trainer(store).load("r@1", *pair(), load_trainer_state=odd or None)
    ),
    "an optimizer that is not there": (
        "NotFound", lambda store, odd: trainer(store).load("bare@1", *pair(), load_optim_state=odd or None)
    ),
    "no optimizer to load into": (
        "InvalidInput", lambda store, odd: trainer(store).load("r@1", pair()[0], load_optim_state=odd or None)
    ),
    "no optimizer at all": (
        "InvalidInput", lambda store, odd: trainer(store).load("r@1", pair()[0], object() if odd else pair()[1])  # type: ignore[arg-type]
    ),
    "a train state that cannot be set": (
        "InvalidInput", lambda store, odd: trainer(store).resume(*pair(), [] if odd else TrainState())  # type: ignore[arg-type]
    ),
    "attachments that are none": (
        "InvalidInput", lambda store, odd: trainer(store).save(7, *pair(), attachments=5 if odd else None)  # type: ignore[arg-type]
    ),
    "a store that is none, for a save": (
        "Unsupported",
        lambda store, odd: casckpt.save_model_and_optim_state("x://y" if odd else store, *pair(), run="r", step=7),
    ),
    "a store that is none, for a load": (
        "Unsupported", lambda store, odd: casckpt.load_model_and_optim_state("x://y" if odd else store, "r@1", *pair())
    ),
    "a store that is none, for weights": (
        "Unsupported", lambda store, odd: casckpt.unshard_model_state("x://y" if odd else store, "r@1")
    ),
    "a strategy of somebody else, for a save": (
        "CheckpointingException",
        lambda store, odd: megatron.save(sharded(), f"{store.url}#m@7", sharded_strategy=("zarr", 1) if odd else None),
    ),
    "one that saves in the background": (
        "CheckpointingException",
        lambda store, odd: megatron.save(sharded(), f"{store.url}#m@7", async_sharded_save=odd),
    ),
    "a strategy of somebody else, for a load": (
        "CheckpointingException",
        lambda store, odd: megatron.load(sharded(), f"{store.url}#m@1", sharded_strategy=("zarr", 1) if odd else None),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the runs r (model and optimizer), bare (top-level weights, train states) and m (Megatron's
    layout)."""
    where = tmp_path_factory.mktemp("differ") / "store"
    store = casckpt.open(where)
    for step in (1, 2):
        model, optimizer = pair()
        casckpt.save_model_and_optim_state(store, model, optimizer, run="r", step=step)
        train = {rank: {"epoch": 3} for rank in range(2)}
        store.save({**model.state_dict(), "train": train}, run="bare", step=step)
        store.save({"w": torch.ones(3)}, run="m", step=step)
    return where


def told(call: Callable[[], Any]) -> tuple[str, str]:
    found = outcome_of(call)
    return type(found).__name__, str(found) if isinstance(found, CasckptError) else repr(found)


def one_is_odd(rank: int, size: int, path: Path, calls: dict[str, Call]) -> dict[str, list[tuple[str, str]]]:
    """Try each call with one rank, each in turn, that passes different arguments.

    The final call succeeds only if no rank waits and the process group is intact.
    """
    store = casckpt.open(path)
    found = {name: [told(partial(call, store, rank == odd)) for odd in range(size)] for name, call in calls.items()}
    casckpt.load_model_and_optim_state(store, "r@1", *pair())
    return found


def names_another(rank: int, size: int, path: Path) -> Any:
    return one_is_odd(rank, size, path, NAMES)


def test_different_references_on_two_ranks_raise_conflict(path: Path, ranks: Pool) -> None:
    for found in ranks.run(2, names_another, path, timeout=20):
        for name, outcomes in found.items():
            for odd, (kind, text) in enumerate(outcomes):
                assert kind in ("Conflict", "CheckpointExists"), (name, kind, text)
                assert "ranks name different checkpoints" in text
                assert f"on rank {odd}" in text


def is_refused(rank: int, size: int, path: Path) -> Any:
    return one_is_odd(rank, size, path, {name: call for name, (_, call) in REFUSED.items()})


def test_all_ranks_reject_a_state_that_one_rank_rejects(path: Path, ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(2, is_refused, path, timeout=20)):
        for name, outcomes in found.items():
            for odd, (kind, text) in enumerate(outcomes):
                assert kind == REFUSED[name][0], (name, kind, text)
                assert rank == odd or f"rank {odd}" in text, (name, text)
    assert 7 not in [one.step for one in casckpt.open(path).checkpoints()]


def together(rank: int, size: int, path: Path) -> list[Any]:
    store, found = casckpt.open(path), []
    for odd in range(size):
        wanted = False if rank == odd else None
        found.append(trainer(store).load("bare@1", pair()[0], load_trainer_state=wanted))
        train = TrainState(rng=False, epoch=0)
        trainer(store, "bare").resume(pair()[0], None, None if rank == odd else train)
        found.append(train["epoch"])
    return found


def test_each_rank_can_request_its_own_train_state(path: Path, ranks: Pool) -> None:
    found = ranks.run(2, together, path, timeout=20)
    assert found == [[None, 0, {"epoch": 3}, 3], [{"epoch": 3}, 3, None, 0]]
