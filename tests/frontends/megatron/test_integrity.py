"""Every rank refuses an inconsistent state before casckpt writes anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.frontends import megatron
from casckpt.frontends.megatron import CheckpointingException, ShardedObject, ShardedTensor, validate_sharding_integrity
from tests.support.logs import logged
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import files

State = dict[str, Any]


def part(rank: int, *, at: int | None = None, of: int = 2, **more: Any) -> ShardedTensor:
    where = rank if at is None else at
    return ShardedTensor.from_rank_offsets("w", torch.full((2, 3), float(rank)), (0, where, of), **more)


def flat(at: slice, replica_id: int = 0, key: str = "w") -> ShardedTensor:
    data = torch.ones(at.stop - at.start)
    return ShardedTensor.from_rank_offsets_flat(key, data, (2, 3), flattened_range=at, replica_id=replica_id)


def obj(at: int, of: int = 2, replica_id: int = 0) -> ShardedObject:
    return ShardedObject("o", at, (of,), (at,), replica_id)


def uneven(lo: int, hi: int) -> ShardedTensor:
    return ShardedTensor("w", torch.ones(hi - lo), torch.float32, (hi - lo,), (5,), (lo,), None)


@dataclass(frozen=True)
class Bad:
    """A state dict for each rank, and the text of the error."""

    make: Callable[[int], State]
    message: str


BAD = {
    "two main replicas": Bad(lambda r: {"w": part(r, at=0, of=1)}, r"'w': \[0:2\]x\[0:3\] of rank 0 and .* of rank 1"),
    "no main replica": Bad(lambda r: {"w": part(r, replica_id=1)}, r"'w': no rank has a main replica of \[0:4\]"),
    "a hole": Bad(lambda r: {"w": part(r, of=3)}, r"'w': no rank has a main replica of .* hold parts of it: 0, 1\)"),
    "an overlap": Bad(lambda r: {"w": uneven(2 * r, 3 + 2 * r)}, r"'w': .* of rank 0 and .* of rank 1 overlap"),
    "another dtype": Bad(
        lambda r: {"w": replace(part(r), data=None, dtype=(torch.float32, torch.float64)[r])},
        "'w': dtype is float32 on rank 0, but float64 on rank 1",
    ),
    "another global shape": Bad(lambda r: {"w": part(r, of=2 + r)}, r"'w': global shape is \(4, 3\) on rank 0"),
    "another local shape": Bad(
        lambda r: {"w": ShardedTensor("w", None, torch.float32, (2 - r,), (3,), (2 * r,), (2,))},
        "'w': local shape is",
    ),
    "flat and not flat": Bad(lambda r: {"w": (part(0, of=1), flat(slice(0, 6)))[r]}, "'w': flattened is False"),
    "flat ranges with a hole": Bad(lambda r: {"w": flat((slice(0, 3), slice(4, 6))[r])}, "'w': no rank has .*3..4"),
    "flat ranges that overlap": Bad(lambda r: {"w": flat((slice(0, 4), slice(3, 6))[r])}, "'w': .*0..4.* of rank 0"),
    "outside of the global shape": Bad(
        lambda r: {"w": ShardedTensor("w", torch.ones(3), torch.float32, (3,), (5,), (3 * r,), None)},
        r"'w': a part at \[3\] of shape \[3\] is outside the global shape",
    ),
    "a tensor and an object": Bad(
        lambda r: {"w": (part(0, of=1), ShardedObject("w", 1, (1,), (0,)))[r]},
        "'w' is a tensor on rank 0",
    ),
    "an object twice": Bad(lambda r: {"o": obj(0, of=1)}, r"'o': the object at \(0,\) .* on ranks 0 and 1"),
    "an object twice on a rank": Bad(lambda r: {"o": [obj(0, 1, r), obj(0, 1, r)]}, "on ranks 0 and 0"),
    "an object is missing": Bad(lambda r: {"o": obj(r, of=4)}, r"'o': .*objects at \(2,\), \(3,\) of \(4,\)"),
    "an object with a wrong offset": Bad(lambda r: {"o": obj(2 * r)}, r"'o': the object at \(2,\) of \(2,\) on rank 1"),
    "objects of two shapes": Bad(lambda r: {"o": obj(r, of=2 + r)}, r"'o': the object at \(1,\) of \(3,\) on rank 1"),
    "a factory that was not built": Bad(lambda r: {"o": Unbuilt()}, "neither a ShardedTensor nor a ShardedObject"),
    "a list of two kinds": Bad(lambda r: {"l": [part(r), 5]}, r"list at \('l',\) mixes plain values, sharded values"),
    "only on one rank": Bad(lambda r: {"w": part(r)} if r else {"w": part(0), "o": obj(1)}, r"'o': .*s at \(0,\)"),
}


class Unbuilt:
    """A factory that builds another factory."""

    key, data, replica_id, merge_fn = "f", None, 0, None

    def build_fn(self) -> None: ...

    def build(self) -> Unbuilt:
        return self


def refused(rank: int, size: int, path: Path, name: str) -> tuple[str, str, bool]:
    """Return the error, and whether the store is unchanged and still works."""
    megatron.save({"w": part(rank)}, f"{path}#before@1")
    before = files(path)
    error = outcome_of(lambda: megatron.save(BAD[name].make(rank), f"{path}#a@1"))
    unchanged = files(path) == before
    good = outcome_of(lambda: megatron.save({"w": part(rank)}, f"{path}#after@1"))
    return type(error).__name__, str(error), unchanged and good is None


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_state_is_rejected_on_every_rank(name: str, tmp_path: Path, ranks: Pool) -> None:
    found = ranks.run(2, refused, tmp_path, name)
    for kind, text, unchanged_and_usable in found:
        assert (kind, unchanged_and_usable) == ("CheckpointingException", True), text
    assert any(re.search(BAD[name].message, text) for _, text, _ in found), found
    assert [ckpt.run for ckpt in casckpt.open(tmp_path).checkpoints()] == ["before", "after"]


def nothing_written(rank: int, size: int, path: Path) -> bool:
    outcome_of(lambda: megatron.save({"w": part(rank, at=0, of=1)}, f"{path}#a@1"))
    return path.exists()


def test_a_rejected_save_writes_nothing(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, nothing_written, tmp_path / "store") == [False, False]


def test_the_store_rejects_an_invalid_state_even_without_validation(tmp_path: Path, ranks: Pool) -> None:
    found = ranks.run(2, without_validation, tmp_path)
    assert all("CheckpointingException" in text and "'w'" in text for text in found), found
    assert casckpt.open(tmp_path).checkpoints() == []


def without_validation(rank: int, size: int, path: Path) -> str:
    return repr(outcome_of(lambda: megatron.save({"w": part(rank, of=3)}, f"{path}#a@1", None, None, False)))


def validated(rank: int, size: int) -> list[str]:
    good = [part(rank), obj(rank), flat(slice(3 * rank, 3 * rank + 3), key="f"), part(rank, at=0, replica_id=1)]
    validate_sharding_integrity(good)
    validate_sharding_integrity({"nested": [{"in a state": good}]})
    validate_sharding_integrity(good if rank == 0 else [part(1), obj(1), flat(slice(3, 6), key="f")])
    validate_sharding_integrity([])
    return [repr(outcome_of(lambda: validate_sharding_integrity([part(rank, at=0)])))]


def test_validation_gathers_metadata_if_none_is_passed(ranks: Pool) -> None:
    found = ranks.run(2, validated)
    assert all("CheckpointingException" in text and "of rank 0" in text for (text,) in found), found


def test_validation_works_in_one_process() -> None:
    validate_sharding_integrity(iter([part(0, of=1)]))
    with pytest.raises(CheckpointingException, match="no rank has a main replica"):
        validate_sharding_integrity([ShardedTensor.from_rank_offsets("w", torch.ones(0, 2), replica_id=1)])


@pytest.mark.parametrize(("of", "told"), [(6, r"\(4,\), \(5,\) of \(6,\)"), (7, r"\(5,\) and 1 more of \(7,\)")])
def test_the_error_names_the_first_gap_and_counts_the_others(of: int, told: str) -> None:
    with pytest.raises(CheckpointingException, match=told):
        validate_sharding_integrity([obj(0, of=of)])


def differing(rank: int, size: int, path: Path) -> list[str]:
    preprocess: Any = {"preprocess_common_before_consistancy_check": lambda common: {"same": common["same"]}}
    with logged("casckpt.frontends.megatron.saving") as caught:
        megatron.save({"w": part(rank), "lr": rank, "same": [1]}, f"{path}#a@1")
        megatron.save({"w": part(rank), "lr": rank, "same": [1]}, f"{path}#a@2", **preprocess)
    return caught


def test_rank_0_saves_the_common_state_and_ranks_that_differ_log_a_warning(tmp_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, differing, tmp_path)
    assert first == []
    (warning,) = second
    assert "rank 1" in warning
    assert "('lr',)" in warning
    assert "same" not in warning
    assert megatron.load_common_state_dict(f"{tmp_path}#a@1") == {"lr": 0, "same": [1]}
