"""Errors name the ranks that have died or stalled."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # public, though not in its __all__

import casckpt
from casckpt.errors import RankFailed
from casckpt.ranks import ranks as module
from casckpt.ranks import wire
from casckpt.ranks.ranks import GroupRanks, Solo, everyone, open_ranks
from tests.support.ranks import Outcome, Pool, die, outcome_of, tell, total, wait_for

SHORT = 5.0  # seconds until the others give up on a stalled rank


# values


# groups


def anew(rank: int, size: int, path: Path, keeps: bool) -> Any:
    """Make the default group again with the ranks in reverse order. ``keeps``: keep a reference to the old one."""
    store = casckpt.open(path)
    store.save({"mine": casckpt.PerRank(torch.tensor([rank]))}, step=1)
    first, kept = open_ranks(), dist.group.WORLD if keeps else None
    before = total(first)
    dist.destroy_process_group()
    alone = type(open_ranks())
    dist.init_process_group("gloo", store=FileStore("again", size), rank=size - 1 - rank, world_size=size)
    second, state = open_ranks(), {"mine": casckpt.PerRank(torch.tensor([-1]))}
    store.load(state, "default@1")
    mine = int(state["mine"].value)
    store.save({"mine": casckpt.PerRank(torch.tensor([10 * dist.get_rank()]))}, step=2)
    store.load(state, "default@2")
    del kept
    return before, alone, second is first, second.rank, total(second), mine, int(state["mine"].value)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_new_default_group_gets_new_connections_and_its_own_ranks(ranks: Pool, store_path: Path, keeps: bool) -> None:
    found = ranks.run(3, anew, store_path, keeps)
    assert found == [(3, Solo, False, rank, 3, rank, 10 * rank) for rank in (2, 1, 0)]


def anew_in_one_store(rank: int, size: int) -> Any:
    """Make the default group again and again in the same store, as under torchrun."""
    store, found = FileStore("again", size), []
    for number in (rank, size - 1 - rank, rank):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=store, rank=number, world_size=size)
        found.append((number, total(open_ranks()), total(open_ranks(purpose="more"))))
    return found


def test_a_default_group_can_be_made_again_in_the_same_store(ranks: Pool) -> None:
    """The backend is "fake", because torch's own gloo sometimes finds the addresses of the previous group."""
    found = ranks.run(3, anew_in_one_store, timeout=10)
    assert found == [[(rank, 3, 3), (2 - rank, 3, 3), (rank, 3, 3)] for rank in range(3)]


# deaths


def dying(rank: int, size: int, who: int, phase: str) -> Any:
    """``who`` dies in its own part ("call"), while rank 0 decides ("decide"), or after its answer ("answered")."""
    wire.WORD_SECONDS = 1
    ranks = open_ranks()
    assert total(ranks) == 6

    def call() -> int:
        if phase == "call" and rank == who:
            die()
        return rank

    def decide(values: Sequence[int]) -> list[int]:
        if phase == "decide" and who == 0:
            die()
        if phase == "decide":
            tell("decides")
            wait_for("death")
        return everyone(sum(values), size)

    if phase == "decide" and rank == who != 0:
        threading.Thread(target=_die_when_told, daemon=True).start()
    found = outcome_of(lambda: ranks.exchange(call, decide))
    if phase == "answered" and rank == who:
        die()
    again = outcome_of(lambda: total(ranks)) if phase in ("decide", "answered") else None
    last = outcome_of(lambda: total(open_ranks()))
    return found, again, last


def _die_when_told() -> None:
    wait_for("decides")
    tell("death")
    die()


def survivors(outcomes: Sequence[Outcome], who: int) -> list[Any]:
    """Check that ``who`` died. Return the results of the other ranks."""
    assert [outcome.died for outcome in outcomes] == [-9 if rank == who else None for rank in range(len(outcomes))]
    assert all(outcome.ok for rank, outcome in enumerate(outcomes) if rank != who), outcomes
    return [outcome.value for rank, outcome in enumerate(outcomes) if rank != who]


def _check_failed(error: Any, who: int) -> None:
    assert isinstance(error, RankFailed)
    assert error.rank == who
    assert f"rank {who} died" in str(error)


@pytest.mark.parametrize(
    ("who", "phase", "tcp"),
    [(0, "call", True), (0, "call", False), (0, "answered", True), (1, "call", False), (3, "answered", False)],
)
def test_all_surviving_ranks_detect_and_name_a_dead_rank(ranks: Pool, who: int, phase: str, tcp: bool) -> None:
    for found, again, last in survivors(ranks.outcomes(4, dying, who, phase, tcp=tcp), who):
        if phase == "answered":
            assert found == 6
            _check_failed(again, who)
        else:
            _check_failed(found, who)
        _check_failed(last, who)  # the process group has lost a rank and can no longer be used


def test_the_death_of_rank_0_during_its_decision_is_detected(ranks: Pool) -> None:
    for found, _, last in survivors(ranks.outcomes(4, dying, 0, "decide"), 0):
        _check_failed(found, 0)
        _check_failed(last, 0)


def test_a_rank_that_dies_while_rank_0_decides_is_named_in_the_next_exchange(ranks: Pool) -> None:
    for found, again, last in survivors(ranks.outcomes(4, dying, 2, "decide"), 2):
        if isinstance(found, RankFailed):  # if its connection was already closed when its answer was sent
            _check_failed(found, 2)
        else:
            assert found == 6
        _check_failed(again, 2)
        _check_failed(last, 2)


def two_dead(rank: int, size: int) -> Any:
    wire.WORD_SECONDS = 1
    ranks = open_ranks()
    assert total(ranks) == 10  # all ranks are connected
    return outcome_of(lambda: ranks.exchange(lambda: die() if rank in (1, 3) else rank, lambda values: values))


def test_the_first_of_two_dead_ranks_is_named(ranks: Pool) -> None:
    outcomes = ranks.outcomes(5, two_dead)
    assert [outcome.died for outcome in outcomes] == [None, -9, None, -9, None]
    for rank in (0, 2, 4):
        _check_failed(outcomes[rank].value, 1)


# stalls


def stalling(rank: int, size: int, who: int, phase: str = "call") -> Any:
    """``who`` does not answer until the others have given up. Then all ranks try again."""
    module.MARGIN = timedelta(0)
    wire.WORD_SECONDS = 1
    ranks = open_ranks()
    assert total(ranks) == sum(range(size))

    def call() -> int:
        if rank == who and phase == "call":
            wait_for("the others")
        return rank

    def decide(values: Sequence[int]) -> list[int]:
        if phase == "decide":
            wait_for("the others")
        return everyone(sum(values), size)

    error = outcome_of(lambda: ranks.exchange(call, decide))
    if rank != who:
        tell(f"given up {rank}")
    if rank == (who + 1) % size:
        for other in range(size):
            if other != who:
                wait_for(f"given up {other}")
        tell("the others")
    return error, total(open_ranks()), open_ranks() is ranks


@pytest.mark.parametrize("tcp", [False, True], ids=["file", "tcp"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_stalled_rank_is_named_and_the_next_exchange_succeeds(ranks: Pool, who: int, tcp: bool) -> None:
    for rank, (error, again, same) in enumerate(ranks.run(4, stalling, who, timeout=SHORT, tcp=tcp)):
        assert isinstance(error, RankFailed)
        assert error.rank == who, rank
        assert f"rank {who} did not answer in time" in str(error)
        assert again == 6
        assert not same


def test_a_stall_of_rank_0_during_its_decision_is_detected(ranks: Pool) -> None:
    for error, again, same in ranks.run(3, stalling, 0, "decide", timeout=SHORT / 2):
        assert isinstance(error, RankFailed)
        assert error.rank == 0
        assert "rank 0 did not answer in time: the call may already have committed" in str(error)
        assert again == 3
        assert not same


def not_receiving(rank: int, size: int) -> Any:
    """Rank 2 does not receive its answer, which is too large for the buffers of its connection."""
    module.MARGIN = timedelta(0)
    ranks = open_ranks()
    assert isinstance(ranks, GroupRanks)
    if rank == 2:
        wait, receive = True, ranks._wire._message

        def later(*args: Any) -> Any:
            nonlocal wait
            if wait:
                wait_for("the others")
            wait = False
            return receive(*args)

        ranks._wire._message = later  # type: ignore[method-assign,assignment]
    first = outcome_of(lambda: len(ranks.exchange(lambda: rank, lambda values: everyone(b"x" * (1 << 27), size))))
    error = outcome_of(lambda: total(ranks)) if rank != 2 else first
    tell(f"given up {rank}")
    if rank == 0:
        wait_for("given up 1")
        tell("the others")
    return first if rank != 2 else 1 << 27, error, total(open_ranks())


def test_a_rank_that_does_not_receive_its_answer_is_named_in_the_next_exchange(ranks: Pool) -> None:
    for rank, (first, error, again) in enumerate(ranks.run(3, not_receiving, timeout=SHORT)):
        assert first == 1 << 27
        assert isinstance(error, RankFailed)
        assert error.rank == 2, rank
        assert again == 3


def slow(rank: int, size: int, who: int, seconds: float) -> Any:
    ranks = open_ranks()

    def call() -> int:
        end = time.monotonic() + seconds
        while rank == who and time.monotonic() < end:
            ranks.alive()
            time.sleep(0.01)
        return rank

    total_of_all = ranks.exchange(call, lambda values: everyone(sum(values), size))
    return total_of_all, total(ranks), open_ranks() is ranks


@pytest.mark.parametrize("who", [0, 1])
def test_the_others_wait_for_a_slow_rank_that_makes_progress(ranks: Pool, who: int) -> None:
    timeout = SHORT / 2
    assert ranks.run(3, slow, who, 2.5 * timeout, timeout=timeout) == [(3, 3, True)] * 3


def absent(rank: int, size: int) -> Any:
    module.MARGIN = timedelta(0)
    if rank == 1:
        wait_for("the others")
        return None
    found = outcome_of(open_ranks)
    tell("the others")
    return found


def test_an_absent_rank_is_named(ranks: Pool) -> None:
    found = ranks.run(3, absent, timeout=1)
    for rank in (0, 2):
        assert isinstance(found[rank], RankFailed)
        assert found[rank].rank == 1
        assert "absent: [1]" in str(found[rank])
