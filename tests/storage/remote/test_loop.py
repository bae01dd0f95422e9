"""Waiting for calls that run in the thread of an event loop."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from casckpt.storage.remote.loop import _result
from casckpt.storage.remote.patience import Call, Patience, PatientRequest


class Held(Future[None]):
    """A call that its client does not release, and the seconds of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.waited = 1000.0, list[float]()

    def result(self, timeout: float | None = None) -> None:
        assert timeout is not None
        assert len(self.waited) < 9, "it is waited for for ever"
        self.waited.append(timeout)
        self.now += timeout
        raise TimeoutError


def test_a_client_gets_a_second_more_than_its_call() -> None:
    held, patience = Held(), Patience(request=60, call=180)
    one = PatientRequest(Call(patience), patience.request, clock=lambda: held.now)
    with pytest.raises(TimeoutError, match=r"did not end a request in time: the server was silent.* for 60 s"):
        _result(held, one)
    assert held.waited == [61, 1]


def test_a_late_result_that_is_done_is_used() -> None:
    done, patience = Future[int](), Patience(request=60, call=180)
    done.set_result(3)
    one = PatientRequest(Call(patience), patience.request)
    one.moved(0)
    assert _result(done, one) == 3
