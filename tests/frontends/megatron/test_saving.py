"""Replicas: how the writing is divided, and whether they are equal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

import casckpt
from casckpt.frontends.megatron import ShardedTensor, load, load_plain_tensors, save
from casckpt.frontends.megatron.claims import claims_of
from casckpt.frontends.megatron.saving import Saving
from casckpt.saving import rank_part
from casckpt.saving import save as saving
from tests.support.ranks import outcome_of
from tests.support.told import Told

if TYPE_CHECKING:
    from tests.support.ranks import Pool

MIB = 1 << 18  # elements of float32


def tensor(key: str, data: torch.Tensor, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **more)


def random(key: str, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(len(key)))


def uneven(rank: int) -> dict[str, ShardedTensor]:
    """A large tensor and small ones on all ranks, one on two of them, one that rank 2 has without data."""
    state = {"large": tensor("large", random("large", 16 * MIB), replica_id=rank)}
    state |= {f"s{i}": tensor(f"s{i}", random(f"s{i}" * i, 1000 + i), replica_id=(0, rank)) for i in range(20)}
    if rank < 2:
        state["of two"] = tensor("of two", random("of two", 4 * MIB), replica_id=rank)
    some = tensor("empty on 2", random("empty on 2", 4 * MIB), replica_id=rank)
    return state | {"empty on 2": some.without_data() if rank == 2 else some}


def shared(rank: int, size: int, where: str) -> list[Any]:
    """(bytes that this rank wrote, bytes that it read, is all as it was saved?)."""
    written: list[int] = []

    def write_part(*args: Any, **kwargs: Any) -> Any:
        part = rank_part.write_part(*args, **kwargs)
        written.extend(ref.size for ref in part.share.refs)
        return part

    with patch.object(saving, "write_part", write_part):
        save(uneven(rank), where, fully_parallel=True, check_replicas=True)
    read = Told()
    asked = {name: one.without_data() for name, one in uneven(rank).items()}
    found = load(asked, where, fully_parallel=True, progress=read)
    same = [torch.equal(found[name], one.data) for name, one in uneven(rank).items() if one.data is not None]
    return [sum(written), read.done, all(same)]


def test_writing_is_balanced_by_bytes_and_a_load_reads_each_byte_once(tmp_path: Path, ranks: Pool) -> None:
    found = ranks.run(4, shared, f"{tmp_path}#a@1")
    total = sum(info.bytes for info in casckpt.open(tmp_path).get("a@1").tensors.values())
    written, read, same = zip(*found, strict=True)
    assert all(same)
    assert sum(read) == total
    assert total <= sum(written) < total * 1.01
    assert max(written) - min(written) < 4 << 20, written  # a cell has 1 MiB, and three tensors are cut


@pytest.mark.parametrize("options", [{}, {"fully_parallel": True}, {"check_replicas": "raise"}])
def test_replicas_are_passed_on_only_to_share_writing_or_to_compare(options: Any) -> None:
    claims = [claims_of([tensor("w", torch.ones(3), replica_id=rank)]) for rank in range(2)]
    assert Saving({}, 0, **options).select(claims) == [[True], [bool(options)]]


def differing(rank: int, size: int, where: str, fully_parallel: bool) -> str:
    data = random("w", 2 * MIB)
    data[-1] += rank
    return repr(outcome_of(lambda: save(state(rank, data), where, fully_parallel=fully_parallel, check_replicas=True)))


def state(rank: int, data: torch.Tensor) -> dict[str, ShardedTensor]:
    """The main replica is on the last rank."""
    return {"w": tensor("w", data, replica_id=2 - rank), "alone": tensor("alone", torch.ones(3), replica_id=rank)}


@pytest.mark.parametrize("fully_parallel", [True, False])
def test_differing_replicas_are_refused_if_compared(tmp_path: Path, ranks: Pool, fully_parallel: bool) -> None:
    found = ranks.run(3, differing, f"{tmp_path}#a@1", fully_parallel)
    assert all(re.search(r"CheckpointingException.*'w' differs between ranks 0 and [12]", text) for text in found), (
        found
    )
    assert casckpt.open(tmp_path).checkpoints() == []


def compared(rank: int, size: int, where: str) -> None:
    save(state(rank, random("w", 2 * MIB)), where, check_replicas=True)


def test_equal_replicas_are_saved_once(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(3, compared, f"{tmp_path}#a@1")
    assert torch.equal(load_plain_tensors(f"{tmp_path}#a@1")["w"], random("w", 2 * MIB))
    assert casckpt.open(tmp_path).get("a@1").stats.bytes_total == 8 * MIB + 12


def with_a_common_part_of_each_rank(rank: int, size: int, where: str) -> None:
    state = {"w": tensor("w", torch.ones(3), replica_id=rank), "common": torch.full((3,), float(rank))}
    save(state, where, validate_access_integrity=False)


def test_only_rank_0_saves_the_common_part(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(2, with_a_common_part_of_each_rank, f"{tmp_path}#a@1")
    assert torch.equal(casckpt.open(tmp_path).read("a@1")["common"], torch.zeros(3))
