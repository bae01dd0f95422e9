"""An attribute is computed once. No thread waits for another, even in a child that is forked during the
computation."""

from __future__ import annotations

from threading import Barrier, Event, Thread

from casckpt.base.lazy import cached_property
from tests.support.forks import forked


class Slow:
    """An attribute whose computation waits until the test releases it."""

    def __init__(self) -> None:
        self.begun, self.go_on = Event(), Event()
        self.times = 0

    @cached_property
    def value(self) -> object:
        """What is computed."""
        self.times += 1
        self.begun.set()
        self.go_on.wait()
        return object()


def quick() -> Slow:
    made = Slow()
    made.go_on.set()
    return made


def test_a_lazy_value_is_computed_once() -> None:
    one, other = quick(), quick()
    assert one.value is one.value
    assert one.value is not other.value
    assert one.times == 1
    assert Slow.value.__doc__ == "What is computed."


def test_threads_that_compute_a_lazy_value_concurrently_get_the_same_value() -> None:
    class Met:
        together = Barrier(2, timeout=60)

        @cached_property
        def value(self) -> object:
            self.together.wait()
            return object()

    met, found = Met(), list[object]()
    threads = [Thread(target=lambda: found.append(met.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is met.value


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    slow = Slow()
    thread = Thread(target=lambda: slow.value)
    thread.start()
    slow.begun.wait()
    with forked(lambda: quick().value):
        slow.go_on.set()
    thread.join()
