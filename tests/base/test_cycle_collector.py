"""The cycle collector is paused while plans are created, and then restored to its previous state."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from casckpt.base.cycle_collector import collector_paused
from tests.support.forks import forked


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


class Planning(threading.Thread):
    """A thread that pauses the collector until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self._inside, self._leave = threading.Event(), threading.Event()

    def run(self) -> None:
        with collector_paused():
            self._inside.set()
            self._leave.wait(60)

    def begin(self) -> None:
        self.start()
        assert self._inside.wait(60)

    def let_go(self) -> None:
        self._leave.set()
        self.join(60)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_paused_and_then_restored_to_its_previous_state(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is was_on
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled() is was_on


def test_the_collector_is_paused_until_the_last_of_several_threads_finishes() -> None:
    gc.enable()
    thread = Planning()
    with collector_paused():
        thread.begin()
    assert not gc.isenabled()
    thread.let_go()
    assert gc.isenabled()


def test_the_collector_runs_in_a_child_forked_during_a_pause() -> None:
    """Otherwise, a data loader's worker would keep every cycle, because it does not have the thread that ends the
    pause."""
    gc.enable()
    thread = Planning()

    def child() -> None:
        assert gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled()

    thread.begin()
    try:
        with forked(child):
            assert not gc.isenabled()
    finally:
        thread.let_go()
    assert gc.isenabled()


def test_a_child_forked_inside_a_pause_restores_the_collector() -> None:
    gc.enable()
    with collector_paused():

        def child() -> None:
            with collector_paused():
                assert not gc.isenabled()
            assert gc.isenabled()

        with forked(child):
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
