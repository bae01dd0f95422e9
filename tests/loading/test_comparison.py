"""A state in memory is compared with a checkpoint. Differences are reported by rank and position, for any topology."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import casckpt
from casckpt.errors import Conflict, InvalidInput, MissingKey, NotFound
from casckpt.loading.comparison import Comparison, Differs
from tests.support.ranks import Pool
from tests.support.saves import counted, small, small_folder
from tests.support.tensors import bytes_of, raw
from tests.support.together import line, numbers, spread
from tests.support.worlds import World, reference


def state() -> dict[str, Any]:
    return {"w": numbers("w", 70, 300), "t": numbers("t", 50, 90).t(), "half": raw("bfloat16", (9000,), 3).clone(),
            "step": 7, "none": torch.empty(0, 3), "one": torch.tensor(1.5)}  # fmt: skip


def test_diff_with_an_equal_state_reads_no_blobs() -> None:
    store, mine = small(), state()
    store.save(mine, step=1)
    with counted(store) as counts:
        found = store.compare(mine, "default@1")
    assert found == Comparison((), 70 * 300 * 4 + 50 * 90 * 4 + 9000 * 2 + 4)
    assert found.is_same
    assert counts.bytes_read < 1000  # the size of the records


def test_per_rank_values_are_compared_with_the_value_of_the_same_rank() -> None:
    store, mine = small(), {"own": casckpt.PerRank(numbers("own", 9000))}
    store.save(mine, step=1)
    with counted(store) as counts:
        assert store.compare(mine, "default@1").is_same
    assert counts.bytes_read < 1000  # the size of the records
    assert store.compare({"own": numbers("own", 9000)}, "default@1").is_same


@given(key=st.sampled_from(["w", "t", "half", "one"]), at=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_a_single_flipped_bit_is_reported(key: str, at: int, bit: int) -> None:
    store, mine = small(), state()
    store.save(mine, step=1)
    shape = mine[key].shape
    number = at % mine[key].numel()
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), shape))
    flipped = mine[key].contiguous().view(-1).view(torch.uint8)
    flipped[number * mine[key].element_size()] ^= 1 << bit
    found = store.compare(mine | {key: flipped.view(mine[key].dtype).view(shape)}, "default@1")
    (one,) = found.differs
    assert (one.key, one.rank, one.what, one.elements, one.first) == (key, 0, "bytes", 1, index)
    assert len(one.where) == 1


def test_diff_reports_differing_dtypes_shapes_and_missing_tensors() -> None:
    store, mine = small(), state()
    store.save(mine, step=1)
    mine |= {"w": mine["w"].double(), "one": torch.tensor([1.5]), "new": torch.ones(2), "step": 8}
    found = store.compare(mine, "default@1").differs
    assert found == (Differs("w", 0, "dtype"), Differs("one", 0, "shape"), Differs("new", 0, "missing"))
    assert store.compare({"one": torch.tensor(1.5)}, "default@1").is_same


def test_diff_compares_bits_rather_than_numbers() -> None:
    store, nan = small(), torch.full((2000,), float("nan"))
    mine = {"nan": nan, "zero": torch.zeros(2000), "c": torch.randn(1500, dtype=torch.complex64).conj()}
    store.save(mine, step=1)
    assert store.compare(mine, "default@1").is_same
    payload = (nan.view(torch.int32) | 1).view(torch.float32)
    found = store.compare({"nan": payload, "zero": -mine["zero"], "c": mine["c"].conj()}, "default@1").differs
    assert {one.key: one.elements for one in found} == {"nan": 2000, "zero": 2000, "c": 1500}


def test_any_stride_can_be_compared_with_any_other() -> None:
    store, one = small(), numbers("one", 300, 200)

    def views(one: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows": one[::2], "columns": one[:, ::3], "repeated": one[:1].expand(50, 200),
                "odd": one.view(-1)[1:], "parameter": torch.nn.Parameter(one)}  # fmt: skip

    store.save(views(one), step=1)
    assert store.compare({key: part.detach().contiguous() for key, part in views(one).items()}, "default@1").is_same
    one[10, 3] += 1
    found = {one.key: (one.elements, one.first) for one in store.compare(views(one), "default@1").differs}
    assert found == {"rows": (1, (5, 3)), "columns": (1, (10, 1)), "odd": (1, (2002,)), "parameter": (1, (10, 3))}


def test_diff_counts_all_differences_and_reports_the_first() -> None:
    store, mine = small(), {"w": torch.zeros(100_000)}
    store.save(mine, step=1)
    mine["w"][::5000] = 1
    (found,) = store.compare(mine, "default@1").differs
    assert (found.elements, len(found.where), found.first) == (20, 8, (0,))
    assert found.where[1] == "[0:100000] elements 5000..5001"


def test_diff_rejects_states_that_cannot_be_compared() -> None:
    store = small()
    store.save({"model.w": numbers("w", 9000), "optim.m": numbers("m", 9000)}, step=1)
    store.thin("default@1", drop="optim.*")
    assert store.compare({"model.w": numbers("w", 9000)}, "default@1").is_same
    with pytest.raises(MissingKey, match="thinned by"):
        store.compare({"optim.m": numbers("m", 9000)}, "default@1")
    with pytest.raises(NotFound):
        store.compare({}, "default@2")
    with pytest.raises(InvalidInput, match="a state must be a mapping"):
        store.compare([], "default@1")  # type: ignore[arg-type]  # as a slip


# several ranks


def save_rows(rank: int, size: int, path: Path) -> None:
    casckpt.open(path).save(spread({"w": numbers("w", 70, 300)}, line(size), [Shard(0)]), step=1)


def compare_flipped(rank: int, size: int, path: Path, dim: int | None, sick: int | None) -> Comparison:
    mine = spread({"w": numbers("w", 70, 300)}, line(size), [Replicate() if dim is None else Shard(dim)])
    if rank == sick:
        local = mine["w"].to_local()
        local.view(torch.int32)[-1, -1] ^= 1
    return casckpt.open(path).compare(mine, "default@1")


@pytest.mark.parametrize(("dim", "first"), [(0, (53, 299)), (1, (69, 224)), (None, (69, 299))])
def test_all_ranks_report_the_rank_and_the_element(
    ranks: Pool, tmp_path: Path, dim: int | None, first: tuple[int, int]
) -> None:
    small_folder(tmp_path / "store")
    ranks.run(2, save_rows, tmp_path / "store")
    assert all(one.is_same for one in ranks.run(4, compare_flipped, tmp_path / "store", dim, None))
    found = ranks.run(4, compare_flipped, tmp_path / "store", dim, 2)
    assert all(one == found[0] for one in found)
    (differs,) = found[0].differs
    assert (differs.key, differs.rank, differs.elements, differs.first) == ("w", 2, 1, first)


def compare_in(rank: int, size: int, path: Path, world: World, at: tuple[int, int]) -> Comparison:
    return casckpt.open(path).compare(world.state(rank, reference(*at)), "a@1")


@pytest.mark.parametrize("seed", range(3))
def test_any_topology_can_be_compared_with_any_other(ranks: Pool, tmp_path: Path, seed: int) -> None:
    store, world = small_folder(tmp_path / "store"), World.drawn(random.Random(f"compare {seed}"))
    before, after = reference(seed, 0), reference(seed, 2)
    store.save(before, run="a", step=1)
    assert all(one.is_same for one in ranks.run(world.size, compare_in, tmp_path / "store", world, (seed, 0)))
    (found, *_) = ranks.run(world.size, compare_in, tmp_path / "store", world, (seed, 2))
    changed = {key for key in after if bytes_of(after[key]) != bytes_of(before[key])}
    assert {one.key for one in found.differs} <= changed


def compare_apart(rank: int, size: int, path: Path) -> Comparison:
    mine = {f"w{rank}": numbers("w", 70, 300), "new": torch.ones(rank)}
    return casckpt.open(path).compare(mine if rank < 2 else {}, "default@1")


def test_each_rank_compares_its_own_part(ranks: Pool, tmp_path: Path) -> None:
    one = numbers("w", 70, 300)
    small_folder(tmp_path / "store").save({"w0": one, "w1": one + 1, "more": one}, step=1)
    for found in ranks.run(3, compare_apart, tmp_path / "store"):
        told = [(one.key, one.rank, one.what, one.elements) for one in found.differs]
        assert told == [("new", 0, "missing", 0), ("new", 1, "missing", 0), ("w1", 1, "bytes", 21000)]


def compare_others(rank: int, size: int, path: Path) -> None:
    with pytest.raises(Conflict, match="different checkpoints"):
        casckpt.open(path).compare({}, f"default@{rank}")


def test_diff_rejects_ranks_with_different_references(ranks: Pool, tmp_path: Path) -> None:
    small_folder(tmp_path / "store")
    ranks.run(2, save_rows, tmp_path / "store")
    ranks.run(2, compare_others, tmp_path / "store")
