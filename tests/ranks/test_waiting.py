"""A waiting rank names the absent ranks, and an absent rank is named on all other ranks."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from weakref import proxy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, though not in its __all__

import casckpt
from casckpt.errors import InvalidInput, RankFailed
from casckpt.ranks import ranks as module
from casckpt.ranks import waiting, wire
from casckpt.ranks.ranks import everyone, open_ranks
from casckpt.ranks.waiting import Meeting, announced, late
from casckpt.ranks.wire import alive_frame, empty_frame, has_come, is_alive, warning_in
from tests.support.ranks import Pool, die, outcome_of, tell, total, wait_for


class _Telling(logging.Handler):
    """Collects warnings, and reports each to the other ranks."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.prefix, self.texts = f"warned {name} {rank}", list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        tell(f"{self.prefix} {len(self.texts)}")


@contextmanager
def impatient(rank: int, name: str = "") -> Iterator[list[str]]:
    """Make ranks warn soon and repeatedly. Return the warnings of this rank."""
    handler, logger = _Telling(name, rank), logging.getLogger("casckpt.ranks")
    before = waiting.FIRST, waiting.NEXT, wire.AFTER_RANK_0
    logger.addHandler(handler)
    waiting.FIRST, waiting.NEXT, wire.AFTER_RANK_0 = 0.2, 0.2, 0.2
    try:
        yield handler.texts
    finally:
        waiting.FIRST, waiting.NEXT, wire.AFTER_RANK_0 = before
        logger.removeHandler(handler)


# warnings


def waited_for(rank: int, size: int, who: int, times: int, *, connected: bool) -> Any:
    """``who`` arrives only after each other rank has logged ``times`` warnings."""
    if connected:
        total(open_ranks())
    with impatient(rank) as warnings:
        if rank == who:
            for other in range(size):
                if other != who:
                    wait_for(f"warned  {other} {times}")
        return total(open_ranks()), list(warnings)


@pytest.mark.parametrize("connected", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("who", [0, 2])
def test_every_waiting_rank_names_the_absent_rank(ranks: Pool, who: int, *, connected: bool) -> None:
    for rank, (found, warnings) in enumerate(ranks.run(3, waited_for, who, 2, connected=connected)):
        assert found == 3
        if rank == who:
            assert not warnings
            continue
        for warning in warnings[:2]:
            named = (
                rf"s for ranks? (\d, )*{who}(, \d)*: every rank of the process group must make the same casckpt call"
            )
            assert re.search(named, warning), warning  # another rank may not have come yet, either
            assert "no_dist=True" in warning


def working(rank: int, size: int) -> Any:
    """Rank 1 is silent until a warning names it. Then it sends a heartbeat, and works until rank 0 has polled again."""
    ranks = open_ranks()
    total(ranks)
    with impatient(rank) as warnings:
        before: list[int] = []

        def seen(frame: torch.Tensor) -> bool:
            if has_come(frame):
                tell(f"looked {len(before)}")
                before.append(len(warnings))
            return has_come(frame)

        def call() -> int:
            if rank == 1:
                wait_for("warned  0 1")
                ranks.alive()
                wait_for("looked 2")
            return rank

        if rank == 0:
            wire.has_come = seen
        try:
            found = ranks.exchange(call, lambda values: everyone(sum(values), size))
        finally:
            wire.has_come = has_come
        return found, len(set(before)) < 2


def test_a_rank_that_reports_progress_is_not_named(ranks: Pool) -> None:
    assert ranks.run(2, working) == [(1, True)] * 2


def loading_alone(rank: int, size: int, where: str) -> Any:
    """Rank 0 loads, then unshards. The other rank makes each call only after a warning has named it."""
    torch.manual_seed(0)
    store, model = casckpt.open(where), nn.Linear(2, 2)
    casckpt.save_model_and_optim_state(store, model, run="r", step=1)
    calls: dict[str, Any] = {
        "load": lambda: casckpt.load_model_and_optim_state(store, "r@1", model),
        "unshard": lambda: casckpt.unshard_model_state(store, "r@1"),
    }
    found = []
    for name, call in calls.items():
        with impatient(rank, name) as warnings:
            if rank:
                wait_for(f"warned {name} 0 1")
            call()
            found.append(bool(warnings))
    return found


def test_a_load_on_rank_0_only_logs_a_warning(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(2, loading_alone, str(tmp_path / "store")) == [[True, True], [False, False]]


def test_a_warning_about_many_ranks_names_only_a_few() -> None:
    assert "waited 30 s for rank 7: " in late([7], 30.1)
    assert "for ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more: " in late(range(1000), 330)


def test_no_warning_is_logged_if_no_rank_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "FIRST", 0.001)
    monkeypatch.setattr(waiting, "NEXT", 0.001)
    looked = [Event(), Event()]
    told: list[str] = []

    def missing() -> list[int]:
        looked[looked[0].is_set()].set()
        return []

    def tell(warning: str) -> bool:
        told.append(warning)
        return True

    with announced(missing, tell):
        assert all(event.wait(60) for event in looked)
    assert not told
    assert not caplog.records


def test_a_heartbeat_carries_a_warning_and_does_not_count_as_a_message() -> None:
    for text in ("", "for rank 3: é", "x" * 10_000):
        frame = alive_frame(text)
        assert is_alive(frame)
        assert has_come(frame)
        assert frame.shape == empty_frame().shape
        assert text.startswith(warning_in(frame))
        assert bool(warning_in(frame)) == bool(text)
    assert is_alive(empty_frame())
    assert not has_come(empty_frame())


# meetings


def met(store: Any, size: int, *, here: range | list[int], seconds: float = 60, **problems: str) -> list[Any]:
    """Let the ranks in ``here`` arrive at the same time. Return the outcome of each."""

    def come(rank: int) -> Any:
        return outcome_of(lambda: Meeting(store, rank, size).come("start", seconds, problems.get(f"of_{rank}", "")))

    with ThreadPoolExecutor(len(here)) as pool:
        return list(pool.map(come, here))


def test_ranks_continue_once_all_are_present() -> None:
    store = HashStore()
    assert met(store, 4, here=range(4)) == [None] * 4
    assert met(store, 4, here=range(4)) == [None] * 4  # the next process group uses the same store


def test_an_absent_rank_is_named_on_all_other_ranks_and_gets_the_error_when_it_arrives() -> None:
    store = HashStore()
    for error in (*met(store, 3, here=[0, 2], seconds=0.05), *met(store, 3, here=[1])):
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        assert "absent: [1]" in str(error)


def test_a_problem_on_one_rank_is_raised_on_all_ranks() -> None:
    for error in met(HashStore(), 3, here=range(3), of_1="no interface"):
        assert isinstance(error, RankFailed)
        assert (error.rank, str(error)) == (1, "no interface")


def test_an_absent_rank_takes_precedence_over_an_error_on_a_present_rank() -> None:
    (error,) = met(HashStore(), 2, here=[0], seconds=0, of_0="Connection reset")
    assert error.rank == 1
    assert "(Connection reset)" in str(error)


class _Counting:
    """A store that lacks some keys and counts requests."""

    def __init__(self, lacks: set[str]) -> None:
        self.lacks, self.asked = lacks, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return not self.lacks & set(keys)


def test_a_few_absent_ranks_among_many_are_found_with_few_requests() -> None:
    store = _Counting({"start/17", "start/900"})
    assert Meeting(store, 0, 1024)._absent("start", range(1024)) == [17, 900]
    assert store.asked < 50


def test_a_failed_rank_waits_until_the_others_have_received_the_error() -> None:
    """The store may stop when the rank exits."""
    store = HashStore()
    failed = met(store, 3, here=[0, 1], seconds=0.05)
    assert [error.rank for error in failed] == [2, 2]
    assert store.add("start/heard", 0) == 2


class _Gone:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def test_rank_0_is_named_without_the_rendezvous_store() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 .*died.*Connection reset") as caught:
        Meeting(_Gone(), 1, 2).come("start", 60)
    assert caught.value.rank == 0


class _Stopped:
    """A store whose host was stopped."""

    def __init__(self) -> None:
        self.goes_on = Event()

    def __getattr__(self, name: str) -> Any:
        assert self.goes_on.wait(60)
        raise RuntimeError("Connection reset by peer")


def test_rank_0_is_named_if_the_rendezvous_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "HEARD_SECONDS", 0.01)
    store = _Stopped()
    with pytest.raises(RankFailed, match=r"rank 0 .*stopped.*timed out") as caught:
        Meeting(store, 1, 2).come("start", 0)
    store.goes_on.set()
    assert caught.value.rank == 0


# connections


def dying_early(rank: int, size: int, *, connecting: bool) -> Any:
    """The last rank dies before its first call, or during that call, when it connects."""
    waiting.HEARD_SECONDS = 1
    if rank == size - 1 and not connecting:
        die()
    if rank == size - 1:
        module.greet = lambda *_: die()  # type: ignore[attr-defined]  # where it connects
    return outcome_of(open_ranks)


@pytest.mark.parametrize("connecting", [False, True], ids=["before", "while"])
def test_a_rank_that_dies_before_or_while_connecting_is_named(ranks: Pool, *, connecting: bool) -> None:
    outcomes = ranks.outcomes(3, dying_early, connecting=connecting, timeout=2, tcp=True)
    assert outcomes[2].died == -9
    for outcome in outcomes[:2]:
        assert isinstance(outcome.value, RankFailed), outcome
        assert outcome.value.rank == 2
        assert "absent: [2]" in str(outcome.value)


def without_interface(rank: int, size: int) -> Any:
    """Rank 1 names an interface that does not exist. Then it follows the error's advice."""
    before = os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent0"
    try:
        error = outcome_of(open_ranks)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return error, total(open_ranks())
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME")
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def test_a_gloo_startup_failure_is_reported_on_all_ranks(ranks: Pool) -> None:
    for error, found in ranks.run(3, without_interface):
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        for part in ("gloo cannot start on rank 1", "Unable to find address", "GLOO_SOCKET_IFNAME", "nonexistent0"):
            assert part in str(error)
        assert found == 3


def coming_late(rank: int, size: int) -> Any:
    """Rank 1 arrives after the others have given up."""
    waiting.HEARD_SECONDS = 1
    if rank == 1:
        wait_for("given up")
    error = outcome_of(open_ranks)
    tell("given up")
    return error.rank, total(open_ranks())


def test_a_late_rank_participates_in_the_next_call(ranks: Pool) -> None:
    assert ranks.run(3, coming_late, timeout=1) == [(1, 3)] * 3


def alone(rank: int, size: int, here: list[int], connected: bool) -> Any:
    """The ranks that are not ``here`` make the call only when rank 0 has given up."""
    module.MARGIN, waiting.HEARD_SECONDS = timedelta(0), 1
    if connected:
        total(open_ranks())
    with impatient(rank):
        if rank not in here:
            wait_for("given up")
        error = outcome_of(lambda: total(open_ranks()))
        if rank == 0:
            tell("given up")
    return error, total(open_ranks())


@pytest.mark.parametrize("connected", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("here", [[0], [0, 2]], ids=str)
def test_rank_0_gives_up_early_only_if_no_other_rank_comes(ranks: Pool, here: list[int], *, connected: bool) -> None:
    for error, again in ranks.run(3, alone, here, connected, timeout=3):
        assert isinstance(error, RankFailed)
        assert (error.rank, again) == (1, 3)
        is_early = re.match(r"waited [0-2] s for ranks? .*every rank .* same casckpt call.*no_dist=True", str(error))
        assert bool(is_early) is (here == [0]), str(error)
        assert "The wait continues" not in str(error)


# process groups


class _Forwarding:
    """A wrapper of a process group that can reconnect, as used by programs that move models between GPUs."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def other_groups(rank: int, size: int) -> Any:
    stale = dist.new_group([0, 1])
    dist.destroy_process_group(stale)
    world = dist.group.WORLD
    others: list[Any] = [stale, proxy(world), _Forwarding(world)]
    return [outcome_of(partial(open_ranks, one)) for one in others]


def test_an_unknown_group_is_rejected(ranks: Pool) -> None:
    for found in ranks.run(2, other_groups):
        for error in found:
            assert isinstance(error, InvalidInput)
            assert "that torch.distributed does not know" in str(error)
