"""Tests of the explorer: the errors that it finds in minimal models, and explorations that must not pass."""

from __future__ import annotations

import pytest

from tests.model.protocol.explorer import (
    Goto,
    Invariant,
    Model,
    Process,
    Program,
    Store,
    choose,
    create,
    delete,
    explore,
    goto,
    look,
    network,
    when_quiet,
)

pytestmark = pytest.mark.usefixtures("uncounted")


def puts(name: str, *, lost: bool = False) -> Program:
    yield create(("key",), name, lost=lost)
    return None


def counts(left: int) -> Program:
    seen = yield look("reads", lambda store: store.get("count"))
    yield delete(("count",))
    yield create(("count",), seen + 1)
    return goto(counts, left - 1) if left > 1 else None


def never(says: str, key: str, value: object) -> Invariant:
    return Invariant(says, lambda store: store.get(key) != value)


def test_all_interleavings_of_two_processes_are_explored() -> None:
    processes = [Process(name, goto(puts, name)) for name in ("one", "two")]
    verdict = explore(Model(Store({}), processes))
    assert verdict.broken == ""
    assert verdict.states == 5  # neither has moved; either was first; then the other has lost
    assert "two finds key taken" in verdict.done


def test_a_broken_invariant_is_reported_with_its_steps() -> None:
    processes = [Process("one", goto(puts, "x")), Process("two", goto(puts, "y"))]
    verdict = explore(Model(Store({}), processes, always=[never("It is not y.", "key", "y")]))
    assert (verdict.broken, verdict.trace) == ("It is not y.", ("two creates key = y",))


def test_the_invariants_are_checked_in_the_first_state() -> None:
    wrong = Model(Store({("key",): "y"}), [], always=[never("It is not y.", "key", "y")])
    assert explore(wrong).broken == "It is not y."


def test_an_invariant_of_steps_is_told_which_process_made_the_step() -> None:
    processes = [Process("one", goto(puts, "x")), Process("two", goto(puts, "y"))]
    one_only = Invariant("Only one puts.", lambda who, before, after: who == "one" or before == after)
    assert explore(Model(Store({}), processes, steps=[one_only])).broken == "Only one puts."


def test_the_explorer_finds_a_lost_update() -> None:
    def adds() -> Program:
        seen = yield look("reads", lambda store: len(store.under("put")))
        yield create(("put", seen), True)
        return None

    processes = [Process(name, goto(adds)) for name in ("one", "two")]
    late = Invariant("Both are there.", lambda store: len(store.under("put")) == 2)
    verdict = explore(Model(Store({}), processes, at_end=[late]))
    assert verdict.broken == "Both are there."
    assert [step.split()[1].strip(":") for step in verdict.trace] == ["reads", "reads", "creates", "finds"]


def test_a_put_without_a_response_may_arrive_late_or_never() -> None:
    def asks() -> Program:
        answer = yield create(("key",), "mine", lost=True)
        if answer is None:
            yield create(("gave up",), True)
        return None

    done = Invariant("What is given up on is not there.", lambda s: not (s.get("gave up") and s.get("key")))
    processes = [Process("one", goto(asks)), Process("network", Goto(network), daemon=True)]
    verdict = explore(Model(Store({}), processes, always=[done]))
    assert verdict.broken == "What is given up on is not there."
    assert verdict.trace[-1] == "network delivers key = mine"


def test_waiting_until_all_processes_are_idle_includes_dead_ones() -> None:
    def after() -> Program:
        yield when_quiet()
        yield create(("after",), True)
        return None

    ended = Invariant("It was there.", lambda store: store.get("after") is None or store.get("key") == "one")
    live = Model(Store({}), [Process("one", goto(puts, "one")), Process("two", goto(after))], always=[ended])
    assert explore(live).broken == ""
    mortal = Model(Store({}), [Process("one", goto(puts, "one"), mortal=True), *live.processes[1:]], always=[ended])
    assert explore(mortal).trace[0] == "one dies"


def test_every_choice_is_explored_as_a_separate_step() -> None:
    def picks(key: str) -> Program:
        yield create((key,), (yield choose((1, 2))))
        return None

    both = Invariant("Not both are 2.", lambda store: not (store.get("a") == store.get("b") == 2))
    found = explore(Model(Store({}), [Process("a", goto(picks, "a")), Process("b", goto(picks, "b"))], always=[both]))
    assert found.broken == "Not both are 2."


def test_a_truncated_exploration_does_not_pass() -> None:
    endless = Model(Store({("count",): 0}), [Process("one", goto(counts, 1000))])
    assert explore(endless, limit=100).broken == "too large"
