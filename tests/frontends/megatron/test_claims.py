"""In a fully parallel load, one rank reads a value and sends it to the others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.frontends import megatron
from casckpt.frontends.megatron import ShardedObject, ShardedTensor
from casckpt.frontends.megatron.claims import claims_of, plan_sharing
from tests.support import gpt
from tests.support.gpt import Topology, differences, saved
from tests.support.progress_calls import ProgressCalls
from tests.support.ranks import die, outcome_of

if TYPE_CHECKING:
    from tests.support.ranks import Pool


def part(name: int, at: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(f"w{name}", torch.ones(2 * name + 1), (0, at, 2))


WANTED = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=6), min_size=1, max_size=4)


@given(wanted=WANTED)
def test_every_part_is_read_or_received_from_its_reader(wanted: list[list[tuple[int, int]]]) -> None:
    sharings = plan_sharing([claims_of([part(*one) for one in mine]) for mine in wanted])
    sent = [(rank, to, wanted[rank][n]) for rank, sharing in enumerate(sharings) for n, to in sharing.sends]
    taken = [(of, rank, wanted[rank][n]) for rank, sharing in enumerate(sharings) for n, of in sharing.receives]
    assert sorted(sent) == sorted(taken)
    for one, other in {(sender, receiver) for sender, receiver, _ in sent}:
        assert [x for x in sent if x[:2] == (one, other)] == [x for x in taken if x[:2] == (one, other)]
    for rank, sharing in enumerate(sharings):
        assert all(sharing.is_read(number) for number, _ in sharing.sends)
        for number in range(len(wanted[rank])):
            assert sum(number == n for n, _ in sharing.receives) == (not sharing.is_read(number))
    read = {
        one
        for mine, sharing in zip(wanted, sharings, strict=True)
        for number, one in enumerate(mine)
        if sharing.is_read(number)
    }
    assert read == {one for mine in wanted for one in mine}


def test_ranks_read_balanced_shares() -> None:
    claims = claims_of([ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(10)) for i in range(8)])
    sharings = plan_sharing([claims] * 4)
    assert Counter(sum(sharing.is_read(n) for n in range(8)) for sharing in sharings) == {2: 4}
    sizes = [1, 1, 2]  # the largest value is assigned first
    claims = claims_of([ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(n)) for i, n in enumerate(sizes)])
    sharings = plan_sharing([claims] * 2)
    assert [sum(n for i, n in enumerate(sizes) if sharing.is_read(i)) for sharing in sharings] == [2, 2]


def loaded(rank: int, size: int, where: str, topology: Topology) -> list[Any]:
    template = gpt.emptied(gpt.state(topology.at(rank)))
    read = ProgressCalls()
    found = megatron.load(template, where, fully_parallel=True, progress=read)
    return [read.done, *differences(found, gpt.expected(gpt.state(topology.at(rank))))]


def test_a_parallel_load_returns_the_same_values_and_reads_less(tmp_path: Path, ranks: Pool) -> None:
    place, topology = f"{tmp_path}#gpt@7", Topology(tp=2, dp=2)
    total = sum(ranks.run(1, saved, place, Topology()))
    found = ranks.run(4, loaded, place, topology)
    assert [differing for _, *differing in found] == [[]] * 4
    assert sum(read for read, *_ in found) < 2 * total


def odd_memory(rank: int, size: int, where: str) -> list[Any]:
    """Return tensors that are not contiguous, have 16 bytes per element, have no dimensions, or are duplicates."""
    numbers = torch.arange(12.0)
    tensors = {"c": numbers.to(torch.complex128), "t": numbers.view(3, 4), "s": torch.tensor(3.0)}
    state = {name: ShardedTensor.from_rank_offsets(name, value, replica_id=rank) for name, value in tensors.items()}
    megatron.save(dict(state) | {"o": ShardedObject("o", 5, (1,), (0,), rank)}, where)
    asked = {
        "c": state["c"].without_data(),
        "t": ShardedTensor.from_rank_offsets("t", torch.zeros(4, 3).t(), replica_id=rank),
        "s": [ShardedTensor.from_rank_offsets("s", torch.tensor(0.0), replica_id=i + rank) for i in range(2)],
        "o": ShardedObject("o", None, (1,), (0,), rank),
    }
    found = megatron.load(asked, where, fully_parallel=True)
    same = [torch.equal(found[name], tensors[name]) for name in "ct"]
    return [*same, [value.item() for value in found["s"]], found["o"]]


def test_a_parallel_load_fills_tensors_of_any_memory_layout(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, odd_memory, f"{tmp_path}#a@1") == [[True, True, [3, 3], 5]] * 2


def test_a_parallel_load_by_a_single_process_reads_everything(tmp_path: Path) -> None:
    place = f"{tmp_path}#gpt@7"
    saved(0, 1, place, Topology())
    assert loaded(0, 1, place, Topology())[1:] == []


def dies_on_the_way(rank: int, size: int, where: str) -> str:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=rank)}
    megatron.save(state, where)
    if rank == 2:
        from casckpt.ranks.ranks import GroupRanks

        GroupRanks.swap = lambda *_: die()  # type: ignore[method-assign]  # in a process of its own
    return repr(outcome_of(lambda: megatron.load(state, where, fully_parallel=True)))


def test_a_rank_that_dies_during_a_load_is_named_on_all_other_ranks(tmp_path: Path, ranks: Pool) -> None:
    found = ranks.outcomes(3, dies_on_the_way, f"{tmp_path}#a@1")
    assert found[2].died is not None
    for outcome in found[:2]:
        assert "RankFailed" in outcome.value
        assert "rank 2" in outcome.value
