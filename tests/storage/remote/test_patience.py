"""Time limits include silence and slow transfers, but not the time in which bytes arrive fast enough."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.storage.remote.patience import SLOWEST, Call, Patience, PatientRequest, _result, begin_request

PATIENCE = Patience(request=60, call=180)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def lasts(piece: int, every: float, *, most: float = 1000, nbytes: int = 0) -> float:
    """Return the seconds until a request times out if it receives ``piece`` bytes every ``every`` seconds."""
    clock = Clock()
    one = PatientRequest(Call(PATIENCE), PATIENCE.request, nbytes, clock)
    begun = clock.now
    while clock.now - begun < most:
        if one.left < every:
            return clock.now + one.left - begun
        clock.now += every
        one.moved(piece)
    return most


def test_silence_and_dropped_connections_end_a_request() -> None:
    assert lasts(0, 1) == 60
    assert lasts(1, 1) == pytest.approx(60, abs=1)
    assert lasts(SLOWEST // 2, 1) == pytest.approx(120, abs=2)


@given(st.floats(1, 50), st.floats(1, 1000))
def test_casckpt_waits_for_a_slow_server_that_makes_progress(every: float, faster: float) -> None:
    """The size of the pieces does not matter, because a slow link sends bursts."""
    assert lasts(int(faster * every * SLOWEST) + 1, every) == 1000


def test_bytes_that_arrive_fast_do_not_extend_the_time_limit_for_silence() -> None:
    clock = Clock()
    one = PatientRequest(Call(PATIENCE), PATIENCE.request, clock=clock)
    for _ in range(1000):
        one.moved(1 << 30)
    assert one.left == 60


def test_a_transfer_that_does_not_report_its_bytes_has_a_longer_time_limit() -> None:
    assert lasts(0, 1, nbytes=800 * SLOWEST) == 160


def test_attempts_and_pauses_share_the_time_limit_of_a_call() -> None:
    whole = Call(PATIENCE)
    whole.spend(100)
    clock = Clock()
    one = PatientRequest(whole, PATIENCE.request, clock=clock)
    assert one.left == 60
    assert "60 s (request_timeout" in one.why
    whole.spend(50)
    assert one.left == 30
    assert "180 s in total (call_timeout" in one.why


def test_immediate_responses_do_not_count_against_the_call() -> None:
    """Listing a web server takes thousands of requests."""
    whole = Call(Patience(request=1, call=1e-9))
    with whole.running():
        for _ in range(100):
            with begin_request(PATIENCE):
                pass
    assert whole.left == 1e-9


def test_a_failed_request_counts_against_its_call() -> None:
    whole = Call(PATIENCE)
    with whole.running(), pytest.raises(TimeoutError), begin_request(PATIENCE):
        raise TimeoutError
    assert whole.left < 180


def test_a_call_after_one_that_timed_out_in_silence_has_less_time() -> None:
    whole = Call(PATIENCE, hopeless=True)
    assert whole.left == 15
    assert "this call had only 15 s (limited by request_timeout in storage_options)" in whole.why
    assert "20 s (limited by call_timeout in storage_options)" in Call(Patience(600, 20), hopeless=True).why


@pytest.mark.parametrize("value", [0, -1, True, "60", float("inf"), float("nan"), None])
def test_options_that_are_not_seconds_are_rejected(value: object) -> None:
    for name in ("request_timeout", "call_timeout"):
        with pytest.raises(InvalidInput, match=f"{name} in storage_options"):
            Patience.of({name: value})


def test_casckpt_options_and_client_options_are_separated() -> None:
    assert Patience.of({"call_timeout": 5, "key": "k"}) == (Patience(call=5.0), {"key": "k"})


class Held(Future[None]):
    """A call that its client does not end, and the seconds that casckpt waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.waited = 1000.0, list[float]()

    def result(self, timeout: float | None = None) -> None:
        assert timeout is not None
        assert len(self.waited) < 9, "it is waited for for ever"
        self.waited.append(timeout)
        self.now += timeout
        raise TimeoutError


def test_the_timeout_of_a_client_is_one_second_longer_than_its_call() -> None:
    held, patience = Held(), Patience(request=60, call=180)
    one = PatientRequest(Call(patience), patience.request, clock=lambda: held.now)
    with pytest.raises(TimeoutError, match=r"did not finish a request in time; the server was silent.* for 60 s"):
        _result(held, one)
    assert held.waited == [61, 1]


def test_a_result_that_is_finished_late_is_used() -> None:
    done, patience = Future[int](), Patience(request=60, call=180)
    done.set_result(3)
    one = PatientRequest(Call(patience), patience.request)
    one.moved(0)
    assert _result(done, one) == 3
