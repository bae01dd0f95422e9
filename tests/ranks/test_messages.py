"""An error on one rank reaches all ranks, with a message that names the rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Conflict, InvalidInput, MissingKey, RankFailed
from casckpt.ranks.ranks import everyone, open_ranks
from tests.support.ranks import Pool, outcome_of, total


class OfTwoArguments(Exception):
    """An object that can be pickled but not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def with_a_lock() -> Exception:
    error = InvalidInput("locked", key="some.key")
    error.lock = threading.Lock()  # type: ignore[attr-defined]  # what does not pickle
    return error


ERRORS: dict[str, Callable[[], Exception]] = {
    "ours": lambda: MissingKey("no such key", key="some.key", keys=("a", "b")),
    "another's": lambda: ZeroDivisionError("by nothing"),
    "not from a pickle": lambda: OfTwoArguments("one", "two"),
    "not into a pickle": with_a_lock,
}


TEXTS = {
    "ours": "no such key",
    "another's": "ZeroDivisionError: by nothing",
    "not from a pickle": "OfTwoArguments: one two",
    "not into a pickle": "InvalidInput: locked",
}


def raising(rank: int, size: int, kind: str, who: int, *, decides: bool) -> Any:
    ranks = open_ranks()

    def call() -> int:
        if rank == who and not decides:
            raise ERRORS[kind]()
        return rank

    def decide(values: Sequence[int]) -> list[int]:
        if decides:
            raise ERRORS[kind]()
        return everyone(sum(values), size)

    error = outcome_of(lambda: ranks.exchange(call, decide))
    assert total(ranks) == total(open_ranks()) == 6
    assert open_ranks() is ranks
    mine = type(ERRORS[kind]()).__name__ if rank == who else type(error).__name__
    return type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "key", None), mine


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("who", range(4))
def test_an_error_on_one_rank_is_raised_on_all_ranks(ranks: Pool, who: int, kind: str) -> None:
    for rank, (name, text, named, key, mine) in enumerate(ranks.run(4, raising, kind, who, decides=False)):
        assert name == mine
        if rank == who:
            assert text in TEXTS[kind]
            continue
        assert f"rank {who}" in text
        assert TEXTS[kind] in text
        assert named == who
        assert name == ("MissingKey" if kind == "ours" else "RankFailed")
        assert key == ("some.key" if kind == "ours" else None)


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_in_rank_0s_decision_is_raised_on_all_ranks(ranks: Pool, kind: str) -> None:
    for rank, (_, text, named, _, _) in enumerate(ranks.run(4, raising, kind, 0, decides=True)):
        assert text in TEXTS[kind] if rank == 0 else TEXTS[kind] in text
        assert rank == 0 or named == 0


def blaming(rank: int, size: int) -> Any:
    def decide(values: Sequence[int]) -> list[int]:
        raise Conflict("rank 2 has another shape", rank=2)

    return outcome_of(lambda: open_ranks().exchange(lambda: rank, decide))


def test_every_rank_names_the_rank_that_caused_an_error(ranks: Pool) -> None:
    assert [error.rank for error in ranks.run(4, blaming)] == [2, 2, 2, 2]


def failing_before(rank: int, size: int) -> Any:
    ranks = open_ranks()
    if rank == 1:
        return outcome_of(lambda: ranks.fail(InvalidInput("step is negative", key="k")))
    return outcome_of(lambda: total(ranks))


def test_an_error_before_an_exchange_is_sent_in_the_exchange(ranks: Pool) -> None:
    for rank, error in enumerate(ranks.run(3, failing_before)):
        assert isinstance(error, InvalidInput)
        assert str(error) == ("step is negative" if rank == 1 else "rank 1: step is negative")
        assert error.key == "k"


def two_at_once(rank: int, size: int) -> Any:
    def call() -> int:
        if rank in (1, 2):
            raise InvalidInput(f"mine, {rank}")
        return rank

    return str(outcome_of(lambda: open_ranks().exchange(call, lambda values: values)))


def test_failed_ranks_raise_their_own_error_and_other_ranks_raise_the_first(ranks: Pool) -> None:
    assert ranks.run(4, two_at_once) == ["rank 1: mine, 1", "mine, 1", "mine, 2", "rank 1: mine, 1"]


def unsendable(rank: int, size: int) -> Any:
    ranks = open_ranks()
    error = outcome_of(lambda: ranks.exchange(threading.Lock if rank == 1 else int, lambda values: everyone(0, size)))
    return type(error), error.rank, total(ranks)


def test_a_value_that_cannot_be_sent_fails_on_all_ranks(ranks: Pool) -> None:
    assert ranks.run(3, unsendable) == [(RankFailed, 1, 3)] * 3


def elsewhere(rank: int, size: int) -> Any:
    ranks = open_ranks()
    error = outcome_of(
        lambda: ranks.exchange(lambda: 0, lambda values: everyone(0, size)) if rank == 2 else total(ranks)
    )
    return type(error), error.rank, total(ranks)


def test_a_rank_that_makes_a_different_call_is_named_immediately(ranks: Pool) -> None:
    assert ranks.run(3, elsewhere) == [(InvalidInput, 2, 3)] * 3


def saving_or_loading(rank: int, size: int, where: str) -> Any:
    store, state = casckpt.open(where), {"w": torch.zeros(4)}
    store.save(state, step=0)
    error = outcome_of(lambda: store.load(state, "default@0") if rank else store.save(state, step=1))
    store.save(state, step=2)
    return type(error), str(error), [one.step for one in store.checkpoints()]


def test_a_save_on_one_rank_and_a_load_on_the_other_fail_on_both(ranks: Pool, tmp_path: Path) -> None:
    """The error names the calls that the user made, not internal calls."""
    for kind, text, steps in ranks.run(2, saving_or_loading, str(tmp_path / "store")):
        assert (kind, steps) == (InvalidInput, [0, 2])
        assert (
            "rank 1 is in Store.load, but rank 0 is in Store.save: all ranks must make the same casckpt calls" in text
        )


def with_objects_on_one_rank(rank: int, size: int, where: str) -> str:
    store, module = casckpt.open(where), torch.nn.Linear(2, 2)
    return str(outcome_of(lambda: store.save({"m": module if rank else module.state_dict()}, step=1)))


def test_a_call_with_objects_on_a_single_rank_is_reported_as_out_of_step(ranks: Pool, tmp_path: Path) -> None:
    for text in ranks.run(2, with_objects_on_one_rank, str(tmp_path / "store")):
        assert "rank 1 is not at the same point in Store.save as rank 0" in text
        assert "with the same whole objects in their states" in text
