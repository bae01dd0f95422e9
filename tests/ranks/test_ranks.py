"""How ranks exchange values: in a single process, in groups, and beside forked children."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casckpt.errors import CasckptError, InvalidInput, MissingKey, RankFailed
from casckpt.ranks import ranks as module
from casckpt.ranks import waiting
from casckpt.ranks.ranks import GroupRanks, Solo, everyone, exchange_keeping, open_ranks
from tests.support.forks import forked
from tests.support.ranks import Pool, outcome_of, tell, total, wait_for

# values


def answers(rank: int, size: int) -> Any:
    ranks = open_ranks()
    first = ranks.exchange(lambda: rank * 10, lambda values: [(values, number) for number in range(size)])
    second = ranks.exchange(lambda: bytes([rank]) * 3_000_000, lambda values: [value[:1] for value in values])
    return first, second, ranks.rank, ranks.size, ranks.exchanges


def test_rank_0_sees_all_values_in_order_and_each_rank_gets_its_own_answer(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(4, answers)):
        assert found == (([0, 10, 20, 30], rank), bytes([rank]), rank, 4, 2)


def test_a_single_process_is_rank_0() -> None:
    ranks = open_ranks()
    assert isinstance(ranks, Solo)
    assert ranks.exchange(lambda: 7, lambda values: [value + 1 for value in values]) == 8
    assert (ranks.rank, ranks.size, ranks.exchanges) == (0, 1, 1)
    with pytest.raises(MissingKey):
        ranks.fail(MissingKey("no"))


@pytest.fixture
def unwarned() -> Iterator[None]:
    """Reset the warning that a process logs only once."""
    module._warn_of_others.cache_clear()
    yield
    module._warn_of_others.cache_clear()


@pytest.mark.usefixtures("unwarned")
def test_a_launched_process_without_a_group_logs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    open_ranks(no_dist=True)  # deliberately alone
    assert not caplog.records
    assert isinstance(open_ranks(), Solo)
    assert "WORLD_SIZE is 4" in caplog.text
    assert "init_process_group" in caplog.text
    open_ranks()
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("unwarned")
def test_a_launcher_with_a_single_process_causes_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    open_ranks()
    assert not caplog.records


def alone(rank: int, size: int) -> list[type]:
    single = dist.new_group([rank], use_local_synchronization=True)
    return [type(open_ranks()), type(open_ranks(no_dist=True)), type(open_ranks(single))]


def test_a_rank_works_alone_in_a_group_of_one_or_with_no_dist(ranks: Pool) -> None:
    assert ranks.run(2, alone) == [[GroupRanks, Solo, Solo]] * 2
    assert ranks.run(1, alone) == [[Solo, Solo, Solo]]


def keeping(rank: int, size: int) -> Any:
    ranks = open_ranks()
    kept, down = exchange_keeping(
        ranks, lambda: ((threading.Lock(), rank), rank * 10), lambda mine, values: [(mine[1], sum(values))] * size
    )
    return kept[0].locked(), kept[1], down, ranks.exchanges


def test_a_kept_value_never_leaves_its_rank(ranks: Pool) -> None:
    """The value need not be picklable."""
    assert ranks.run(3, keeping) == [(False, rank, (0, 30), 1) for rank in range(3)]


def test_a_single_process_keeps_its_value() -> None:
    assert exchange_keeping(Solo(), lambda: ("mine", 7), lambda mine, values: [(mine, values)]) == (
        "mine", ("mine", [7])
    )  # fmt: skip


def keeping_apart(rank: int, size: int) -> Any:
    """Rank 2 keeps a value in a different call than the others. Then rank 1 raises an error."""
    ranks = open_ranks()

    def call() -> tuple[int, int]:
        if rank == 1:
            raise MissingKey("no")
        return rank, rank

    def here() -> Any:
        return exchange_keeping(ranks, lambda: (rank, rank), lambda _, values: values)

    def there() -> Any:
        return exchange_keeping(ranks, lambda: (rank, rank), lambda _, values: values)

    stray = outcome_of(there if rank == 2 else here)
    failed = outcome_of(lambda: exchange_keeping(ranks, call, lambda _, values: values))
    return type(stray), stray.rank, type(failed), str(failed), total(ranks)


def test_a_rank_that_keeps_a_value_in_a_different_call_is_named(ranks: Pool) -> None:
    texts = ["rank 1: no", "no", "rank 1: no"]
    assert ranks.run(3, keeping_apart) == [(InvalidInput, 2, MissingKey, text, 3) for text in texts]


# groups


def subgroup(rank: int, size: int) -> Any:
    inner = dist.new_group([1, 3])
    if rank not in (1, 3):
        return outcome_of(lambda: open_ranks(inner))
    ranks = open_ranks(inner)
    return ranks.rank, ranks.size, total(ranks)


def test_a_subgroup_numbers_its_own_ranks(ranks: Pool) -> None:
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
        dist.distributed_c10d._update_default_pg(None)  # the child must not shut down its parent's process group
        assert isinstance(open_ranks(), Solo)

    with forked(child):
        pass
    return before, total(open_ranks())


def test_a_forked_child_does_not_act_as_its_parents_rank(ranks: Pool) -> None:
    assert ranks.run(2, beside_a_child) == [(1, 1)] * 2


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(InvalidInput, match="not initialized"):
        open_ranks(object())  # type: ignore[arg-type]  # a wrong type on purpose


def several_groups(rank: int, size: int) -> Any:
    """Exchange values in two half groups at once and then in all ranks, while a thread uses a different purpose."""
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


def test_groups_do_not_interfere_with_each_other(ranks: Pool) -> None:
    assert ranks.run(4, several_groups) == [({(1, 6)}, {6}, True)] * 4


def lopsided(rank: int, size: int) -> Any:
    """Put rank 0 in more groups than the others, as in the first stage of a pipeline."""
    groups = [dist.new_group(members) for members in ([0, 3], [0, 1], [0, 1, 2])]
    inner = total(open_ranks(groups[2])) if rank < 3 else None
    return inner, total(open_ranks())


def test_ranks_may_be_in_different_numbers_of_groups(ranks: Pool) -> None:
    assert ranks.run(4, lopsided) == [(3, 6), (3, 6), (3, 6), (None, 6)]


def test_messages_work_without_a_cpu_backend_in_the_default_group(ranks: Pool) -> None:
    """NCCL, for example, cannot send objects from host memory."""
    assert ranks.run(4, answers, backend="fake") == ranks.run(4, answers)


# connections


def sockets() -> set[str]:
    """Return the sockets of this process."""
    links = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it
            links.add(os.readlink(one))
    return {link for link in links if link.startswith("socket:")}


def connecting(rank: int, size: int) -> Any:
    before = sockets()
    found = total(open_ranks(purpose="more"))
    return found, len(sockets() - before)


@pytest.mark.skipif(not module._devices(), reason="gloo before torch 2.8 connects all pairs of ranks")
def test_a_rank_connects_only_to_rank_0(ranks: Pool) -> None:
    """In addition, each rank has a socket that listens."""
    assert ranks.run(5, connecting) == [(10, 5), *[(10, 2)] * 4]


def all_connected(rank: int, size: int) -> Any:
    """Work as with a gloo that cannot connect on demand."""
    real, module._devices = module._devices, list
    try:
        ranks = open_ranks()
    finally:
        module._devices = real
    received = torch.zeros(1, dtype=torch.uint8)
    sends = [(torch.full((1,), 7, dtype=torch.uint8), 2)] if rank == 1 else []
    assert isinstance(ranks, GroupRanks)
    ranks.pass_on(sends, [(received, 1)] if rank == 2 else [], 60)
    return total(ranks), int(received)


def test_ranks_work_with_a_gloo_that_connects_all_pairs(ranks: Pool) -> None:
    assert ranks.run(3, all_connected) == [(3, 0), (3, 0), (3, 7)]


def on_interfaces(rank: int, size: int) -> Any:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
    try:
        return total(open_ranks())
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME")
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def test_ranks_may_use_several_interfaces(ranks: Pool) -> None:
    assert ranks.run(3, on_interfaces) == [3] * 3


# stalls


def test_an_incorrect_number_of_answers_is_an_error() -> None:
    assert everyone("x", 3) == ["x", "x", "x"]
    assert issubclass(RankFailed, CasckptError)


def passed_to_absent(rank: int, size: int, who: int) -> float:
    """Pass a byte to a rank that does not take part. Return the seconds until that fails."""
    ranks, begun = open_ranks(), monotonic()
    assert isinstance(ranks, GroupRanks)
    if rank == who:
        with pytest.raises(RankFailed):
            ranks.pass_on([(torch.zeros(1, dtype=torch.uint8), 3 - who)], [], 0.5)
        tell("failed")
    wait_for("failed")
    return monotonic() - begun


@pytest.mark.parametrize("who", [1, 2])
def test_bytes_for_a_rank_that_does_not_connect_do_not_wait_longer_than_asked(ranks: Pool, who: int) -> None:
    assert max(ranks.run(3, passed_to_absent, who, timeout=6)) < 15  # gloo waits for five times the timeout


def passed(ranks: GroupRanks, *, drops: bool) -> int:
    """Pass a byte from each rank to the next one. Return the byte that this rank receives."""
    total(ranks)
    beside, received = ranks.beside(), torch.zeros(1, dtype=torch.uint8)
    sends = [(torch.full((1,), ranks.rank, dtype=torch.uint8), (ranks.rank + 1) % ranks.size)]
    try:
        beside.pass_on(sends, [(received, (ranks.rank - 1) % ranks.size)], 60)
    except RankFailed:
        beside.drop()
        raise
    if drops:
        beside.drop()
    return int(received)


def disagreeing(rank: int, size: int) -> list[Any]:
    """Pass bytes three times. Rank 1 never drops the group, as if it had been interrupted in each load."""
    waiting.HEARD_SECONDS = 1
    ranks = open_ranks()
    assert isinstance(ranks, GroupRanks)
    found = [outcome_of(lambda: passed(ranks, drops=rank != 1)) for _ in range(3)]
    return [None if isinstance(one, RankFailed) else one for one in found]


def test_ranks_that_disagree_on_a_failure_can_pass_on_bytes_later(ranks: Pool) -> None:
    assert ranks.run(3, disagreeing, timeout=3) == [[2, None, 2], [0, None, 0], [1, None, 1]]


def destroyed(rank: int, size: int) -> int:
    """Use several process groups and destroy them. Return how many more files are open in the end than at first."""
    counts = []
    for _ in range(6):
        group = dist.new_group(list(range(size)))
        open_ranks(group).exchange(lambda: None, lambda values: values)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1] - counts[1]


def test_connections_of_destroyed_groups_are_closed(ranks: Pool) -> None:
    assert max(ranks.run(2, destroyed)) < 4
