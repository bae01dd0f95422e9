"""Ranks exchange values, or all of them fail alike: whatever is raised, whoever dies or stalls, in whatever phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # public, though not in its __all__

import casckpt
from casckpt.errors import CasckptError, Conflict, InvalidInput, MissingKey, RankFailed
from casckpt.ranks import ranks as module
from casckpt.ranks import wire
from casckpt.ranks.ranks import GroupRanks, Ranks, Solo, everyone, open_ranks
from tests.support.forks import forked
from tests.support.ranks import die, outcome_of, tell, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.ranks import Outcome, Pool

SHORT = 5.0  # seconds until a stalled rank is given up on


def total(ranks: Ranks) -> int:
    """An exchange in which nothing goes wrong."""
    return ranks.exchange(lambda: ranks.rank, lambda values: everyone(sum(values), ranks.size))


# values


def answers(rank: int, size: int) -> Any:
    ranks = open_ranks()
    first = ranks.exchange(lambda: rank * 10, lambda values: [(values, number) for number in range(size)])
    second = ranks.exchange(lambda: bytes([rank]) * 3_000_000, lambda values: [value[:1] for value in values])
    return first, second, ranks.rank, ranks.size, ranks.exchanges


def test_rank_0_sees_all_in_order_and_each_rank_gets_its_own_answer(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(4, answers)):
        assert found == (([0, 10, 20, 30], rank), bytes([rank]), rank, 4, 2)


def test_one_process_is_its_own_rank_0() -> None:
    ranks = open_ranks()
    assert isinstance(ranks, Solo)
    assert ranks.exchange(lambda: 7, lambda values: [value + 1 for value in values]) == 8
    assert (ranks.rank, ranks.size, ranks.exchanges) == (0, 1, 1)
    with pytest.raises(MissingKey):
        ranks.fail(MissingKey("no"))


@pytest.fixture
def unwarned() -> Iterator[None]:
    """As in a process that has not said it yet."""
    module._warn_of_others.cache_clear()
    yield
    module._warn_of_others.cache_clear()


@pytest.mark.usefixtures("unwarned")
def test_one_of_several_processes_without_a_group_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    open_ranks(no_dist=True)  # it is meant
    assert not caplog.records
    assert isinstance(open_ranks(), Solo)
    assert "WORLD_SIZE is 4" in caplog.text
    assert "init_process_group" in caplog.text
    open_ranks()
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("unwarned")
def test_one_process_of_a_launcher_is_not_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    open_ranks()
    assert not caplog.records


def alone(rank: int, size: int) -> list[type]:
    single = dist.new_group([rank], use_local_synchronization=True)
    return [type(open_ranks()), type(open_ranks(no_dist=True)), type(open_ranks(single))]


def test_alone_in_a_group_or_by_choice(ranks: Pool) -> None:
    assert ranks.run(2, alone) == [[GroupRanks, Solo, Solo]] * 2
    assert ranks.run(1, alone) == [[Solo, Solo, Solo]]


# groups


def subgroup(rank: int, size: int) -> Any:
    inner = dist.new_group([1, 3])
    if rank not in (1, 3):
        return outcome_of(lambda: open_ranks(inner))
    ranks = open_ranks(inner)
    return ranks.rank, ranks.size, total(ranks)


def test_a_group_of_some_ranks_counts_its_own(ranks: Pool) -> None:
    found = ranks.run(4, subgroup)
    assert (found[1], found[3]) == ((0, 2, 1), (1, 2, 1))
    for outside in (found[0], found[2]):
        assert isinstance(outside, InvalidInput)
        assert "not in process_group" in str(outside)


def beside_a_child(rank: int, size: int) -> Any:
    before, made = total(open_ranks()), []

    def child() -> None:
        made.append(open_ranks(no_dist=True))
        for purpose in ("main", "new"):
            with pytest.raises(InvalidInput, match="no_dist=True"):
                open_ranks(purpose=purpose)
        dist.distributed_c10d._update_default_pg(None)  # what its parent had is not for it to end
        assert isinstance(open_ranks(), Solo)

    with forked(child):
        pass
    return before, total(open_ranks())


def test_a_forked_child_does_not_speak_for_its_parent(ranks: Pool) -> None:
    assert ranks.run(2, beside_a_child) == [(1, 1)] * 2


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(InvalidInput, match="not initialised"):
        open_ranks(object())  # type: ignore[arg-type]  # a wrong type on purpose


def several_groups(rank: int, size: int) -> Any:
    """Two halves at the same time, all of them in between, and another purpose in a thread."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, every = open_ranks(halves[rank // 2]), open_ranks()
    behind = open_ranks(purpose="async")
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(total(behind) for _ in range(20)))
    thread.start()
    sums = [(total(mine), total(every)) for _ in range(20)]
    thread.join()
    assert len({mine.name, every.name, behind.name}) == 3
    return set(sums), set(found), open_ranks() is every


def test_groups_do_not_disturb_each_other(ranks: Pool) -> None:
    assert ranks.run(4, several_groups) == [({(1, 6)}, {6}, True)] * 4


def lopsided(rank: int, size: int) -> Any:
    """Rank 0 is in more groups than the others, as the first stage of a pipeline may be."""
    groups = [dist.new_group(members) for members in ([0, 3], [0, 1], [0, 1, 2])]
    inner = total(open_ranks(groups[2])) if rank < 3 else None
    return inner, total(open_ranks())


def test_ranks_may_be_in_different_numbers_of_groups(ranks: Pool) -> None:
    assert ranks.run(4, lopsided) == [(3, 6), (3, 6), (3, 6), (None, 6)]


def test_the_default_group_need_not_carry_anything(ranks: Pool) -> None:
    """As NCCL, which has no way for objects of the host."""
    assert ranks.run(4, answers, backend="fake") == ranks.run(4, answers)


def anew(rank: int, size: int) -> Any:
    first = open_ranks()
    before = total(first)
    dist.destroy_process_group()
    alone = type(open_ranks())
    store = FileStore("again", size)
    dist.init_process_group("gloo", store=store, rank=size - 1 - rank, world_size=size)
    second = open_ranks()
    return before, alone, second is first, second.rank, total(second)


def test_a_new_process_group_gets_new_connections(ranks: Pool) -> None:
    assert ranks.run(3, anew) == [(3, Solo, False, 2 - rank, 3) for rank in range(3)]


# errors


class OfTwoArguments(Exception):
    """Pickles, but does not come back."""

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
def test_an_error_of_one_rank_is_raised_by_all(ranks: Pool, who: int, kind: str) -> None:
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
def test_an_error_of_what_rank_0_decides_is_raised_by_all(ranks: Pool, kind: str) -> None:
    for rank, (_, text, named, _, _) in enumerate(ranks.run(4, raising, kind, 0, decides=True)):
        assert text in TEXTS[kind] if rank == 0 else TEXTS[kind] in text
        assert rank == 0 or named == 0


def blaming(rank: int, size: int) -> Any:
    def decide(values: Sequence[int]) -> list[int]:
        raise Conflict("rank 2 has another shape", rank=2)

    return outcome_of(lambda: open_ranks().exchange(lambda: rank, decide))


def test_who_is_blamed_stays_blamed(ranks: Pool) -> None:
    assert [error.rank for error in ranks.run(4, blaming)] == [2, 2, 2, 2]


def failing_before(rank: int, size: int) -> Any:
    ranks = open_ranks()
    if rank == 1:
        return outcome_of(lambda: ranks.fail(InvalidInput("step is negative", key="k")))
    return outcome_of(lambda: total(ranks))


def test_an_error_before_an_exchange_is_told_in_it(ranks: Pool) -> None:
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


def test_of_several_errors_each_keeps_its_own_and_the_others_hear_of_the_first(ranks: Pool) -> None:
    assert ranks.run(4, two_at_once) == ["rank 1: mine, 1", "mine, 1", "mine, 2", "rank 1: mine, 1"]


def unsendable(rank: int, size: int) -> Any:
    ranks = open_ranks()
    error = outcome_of(lambda: ranks.exchange(threading.Lock if rank == 1 else int, lambda values: everyone(0, size)))
    return type(error), error.rank, total(ranks)


def test_a_value_that_cannot_be_sent_fails_on_all(ranks: Pool) -> None:
    assert ranks.run(3, unsendable) == [(RankFailed, 1, 3)] * 3


def elsewhere(rank: int, size: int) -> Any:
    ranks = open_ranks()
    error = outcome_of(
        lambda: ranks.exchange(lambda: 0, lambda values: everyone(0, size)) if rank == 2 else total(ranks)
    )
    return type(error), error.rank, total(ranks)


def test_a_rank_that_makes_another_call_is_named_at_once(ranks: Pool) -> None:
    assert ranks.run(3, elsewhere) == [(InvalidInput, 2, 3)] * 3


def saving_or_loading(rank: int, size: int, where: str) -> Any:
    store, state = casckpt.open(where), {"w": torch.zeros(4)}
    store.save(state, step=0)
    error = outcome_of(lambda: store.load(state, "default@0") if rank else store.save(state, step=1))
    store.save(state, step=2)
    return type(error), str(error), [one.step for one in store.checkpoints()]


def test_a_save_on_one_rank_and_a_load_on_another_fail_on_both(ranks: Pool, tmp_path: Path) -> None:
    """The error names the calls that the user has made, not what runs inside them."""
    for kind, text, steps in ranks.run(2, saving_or_loading, str(tmp_path / "store")):
        assert (kind, steps) == (InvalidInput, [0, 2])
        assert "rank 1 is in Store.load, rank 0 in Store.save: all ranks must make the same calls" in text


def with_objects_on_one_rank(rank: int, size: int, where: str) -> str:
    store, module = casckpt.open(where), torch.nn.Linear(2, 2)
    return str(outcome_of(lambda: store.save({"m": module if rank else module.state_dict()}, step=1)))


def test_the_same_call_with_objects_on_one_rank_alone_is_said_to_be_at_another_point(
    ranks: Pool, tmp_path: Path
) -> None:
    for text in ranks.run(2, with_objects_on_one_rank, str(tmp_path / "store")):
        assert "rank 1 is at another point of Store.save than rank 0" in text
        assert "Rank 1 has the whole objects 'm' in its state, and rank 0 has none" in text


# deaths


def dying(rank: int, size: int, who: int, phase: str) -> Any:
    """``who`` dies in its own part ("call"), while rank 0 decides ("decide"), or with its answer ("answered")."""
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
    """What the others returned, after a look at who died."""
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
def test_a_death_is_seen_by_all_and_named(ranks: Pool, who: int, phase: str, tcp: bool) -> None:
    for found, again, last in survivors(ranks.outcomes(4, dying, who, phase, tcp=tcp), who):
        if phase == "answered":
            assert found == 6
            _check_failed(again, who)
        else:
            _check_failed(found, who)
        _check_failed(last, who)  # the process group has lost a rank: this one is of no use any more


def test_rank_0_dies_while_it_decides(ranks: Pool) -> None:
    for found, _, last in survivors(ranks.outcomes(4, dying, 0, "decide"), 0):
        _check_failed(found, 0)
        _check_failed(last, 0)


def test_a_rank_that_dies_while_rank_0_decides_is_missed_at_the_next_exchange(ranks: Pool) -> None:
    for found, again, last in survivors(ranks.outcomes(4, dying, 2, "decide"), 2):
        if isinstance(found, RankFailed):  # seen when its answer was sent, if its connection was closed by then
            _check_failed(found, 2)
        else:
            assert found == 6
        _check_failed(again, 2)
        _check_failed(last, 2)


def two_dead(rank: int, size: int) -> Any:
    wire.WORD_SECONDS = 1
    ranks = open_ranks()
    assert total(ranks) == 10  # all are connected
    return outcome_of(lambda: ranks.exchange(lambda: die() if rank in (1, 3) else rank, lambda values: values))


def test_of_two_dead_the_first_is_named(ranks: Pool) -> None:
    outcomes = ranks.outcomes(5, two_dead)
    assert [outcome.died for outcome in outcomes] == [None, -9, None, -9, None]
    for rank in (0, 2, 4):
        _check_failed(outcomes[rank].value, 1)


# stalls


def stalling(rank: int, size: int, who: int, phase: str = "call") -> Any:
    """``who`` does not answer until the others have given up; then all of them try again."""
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
def test_who_stalls_is_named_and_the_next_exchange_works(ranks: Pool, who: int, tcp: bool) -> None:
    for rank, (error, again, same) in enumerate(ranks.run(4, stalling, who, timeout=SHORT, tcp=tcp)):
        assert isinstance(error, RankFailed)
        assert error.rank == who, rank
        assert f"rank {who} did not answer in time" in str(error)
        assert again == 6
        assert not same


def test_rank_0_stalls_while_it_decides(ranks: Pool) -> None:
    for error, again, same in ranks.run(3, stalling, 0, "decide", timeout=SHORT / 2):
        assert isinstance(error, RankFailed)
        assert error.rank == 0
        assert "rank 0 did not answer in time: see in the list" in str(error)
        assert again == 3
        assert not same


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
def test_who_takes_long_but_gets_on_is_waited_for(ranks: Pool, who: int) -> None:
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


def test_who_does_not_come_is_named(ranks: Pool) -> None:
    found = ranks.run(3, absent, timeout=1)
    for rank in (0, 2):
        assert isinstance(found[rank], RankFailed)
        assert found[rank].rank == 1
        assert "absent: [1]" in str(found[rank])


def test_answers_are_as_many_as_ranks() -> None:
    assert everyone("x", 3) == ["x", "x", "x"]
    assert issubclass(RankFailed, CasckptError)
