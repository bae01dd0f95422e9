"""Leases of a server: how many remain when no file is being sent, and that none remain after shutdown."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, NotFound, StorageError
from casckpt.frontends.serve.leases import _MOST_IDLE, Leases
from casckpt.store.store import Store
from tests.support.saves import small


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace leases with a record of the steps that have one."""
    found = list[int]()

    @contextmanager
    def lease(_: Store, checkpoint: Checkpoint, **__: Any) -> Iterator[None]:
        found.append(checkpoint.step)
        yield
        found.remove(checkpoint.step)

    monkeypatch.setattr(Store, "lease", lease)
    return found


def saved(count: int) -> tuple[Store, list[Checkpoint]]:
    store = small()
    for step in range(count):
        store.save({"w": torch.ones(1)}, step=step)
    return store, store.checkpoints()


def test_the_number_of_idle_leases_is_limited(taken: list[int]) -> None:
    store, found = saved(_MOST_IDLE + 4)
    leases = Leases(store)
    with leases.hold(found[0]):
        for one in (*found[1:], found[2]):
            with leases.hold(one):
                assert one.step in taken
        assert sorted(taken) == [0, 2, *range(5, _MOST_IDLE + 4)]
    leases.close()
    assert not taken


def test_a_lease_acquired_during_shutdown_is_ended(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    store, (one,) = saved(1)
    leases, lease = Leases(store), Store.lease

    @contextmanager
    def at_the_end(*args: Any, **options: Any) -> Iterator[Checkpoint]:
        leases.close()
        with lease(*args, **options) as held:
            yield held

    monkeypatch.setattr(Store, "lease", at_the_end)
    with leases.hold(one):
        pass
    assert not taken


class Timer:
    """A timer that the test fires manually."""

    made: ClassVar[list[Timer]] = []

    def __init__(self, seconds: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.seconds, self.fire = seconds, partial(call, *args)
        self.daemon = self.is_on = False
        self.made.append(self)

    def start(self) -> None:
        self.is_on = True

    def cancel(self) -> None:
        self.is_on = False


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    monkeypatch.setattr(Timer, "made", found := list[Timer]())
    monkeypatch.setattr(threading, "Timer", Timer)
    return found


def test_a_lease_remains_for_a_while_after_its_last_user(taken: list[int], timers: list[Timer]) -> None:
    store, (one,) = saved(1)
    leases = Leases(store, linger=7)
    with leases.hold(one):
        with leases.hold(one):
            assert taken == [0]
        assert timers == []
    assert (timers[0].seconds, timers[0].daemon, timers[0].is_on, taken) == (7, True, True, [0])
    with leases.hold(one):
        assert not timers[0].is_on
        timers[0].fire()  # it had just fired
        assert taken == [0]
    timers[1].fire()
    assert taken == []
    with leases.hold(one):
        timers[1].fire()
        assert taken == [0]
    leases.close()
    assert taken == []
    assert not timers[2].is_on


def test_simultaneous_requests_for_a_checkpoint_share_a_lease(taken: list[int], timers: list[Timer]) -> None:
    store, (one,) = saved(1)
    leases, lease, start = Leases(store), Store.lease, Timer.start

    def taking(*args: Any, **options: Any) -> Any:
        assert leases._held[one.id].lock.locked()
        assert not leases._lock.locked(), "other clients must be served in the meantime"
        return lease(*args, **options)

    def starting(timer: Timer) -> None:
        assert leases._lock.locked()
        start(timer)

    with patch.object(Store, "lease", taking), patch.object(Timer, "start", starting), leases.hold(one):
        pass
    with patch.object(leases, "_lock", MagicMock()) as lock:
        leases.close()
    lock.__enter__.assert_called_once_with()
    assert taken == []


def test_failures_to_acquire_leases_are_logged_once(
    timers: list[Timer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, found = saved(3)
    errors: list[CasckptError] = [StorageError("only reads"), NotFound("purged"), StorageError("only reads")]
    monkeypatch.setattr(Store, "lease", Mock(side_effect=errors))
    leases = Leases(store)
    with caplog.at_level(logging.DEBUG, "casckpt"):
        for one in found:
            with leases.hold(one):
                pass
    said = [(one.levelname, one.getMessage()) for one in caplog.records if "lease" in one.getMessage()]
    assert [level for level, _ in said] == ["WARNING", "INFO", "DEBUG"]
    assert "cannot acquire a lease, so a gc may delete data that is being sent: only reads" in said[0][1]
    assert "is sent without a lease: purged" in said[1][1]
