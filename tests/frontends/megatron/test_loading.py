"""Loads into a sharded state dict: different shapes, objects, factories, and errors that all ranks raise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Mismatch, MissingKey
from casckpt.frontends import megatron
from casckpt.frontends.megatron import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_objects,
    save,
)
from tests.frontends.megatron.conftest import numbered, obj
from tests.support.gpt import COMMON
from tests.support.logs import logged
from tests.support.megatron_core import core
from tests.support.ranks import Pool, outcome_of


def tensor(key: str, *shape: int, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, -1.0), **more)


def untouched(part: ShardedTensor) -> bool:
    return torch.equal(torch.as_tensor(part.data), torch.full(part.local_shape, -1.0))


def test_tensors_are_filled_in_place_and_plain_values_are_ignored(where: str) -> None:
    w = tensor("w", 4, 3)
    asked = {"x": [w], "args": "mine", "more": 1}
    found = load(asked, where)
    assert found["x"][0].data_ptr() == torch.as_tensor(w.data).data_ptr()
    assert found["x"][0].flatten().tolist() == list(range(12))
    assert found["args"] == COMMON["args"]
    assert "more" not in found
    assert asked == {"x": [w], "args": "mine", "more": 1}


def test_a_part_without_data_is_loaded_into_a_new_tensor_of_its_dtype(where: str) -> None:
    asked = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2, 3, dtype=torch.bfloat16), (0, 1, 2)).without_data()
    }
    found = load(asked, where, validate_access_integrity=False)["w"]
    assert (found.dtype, found.flatten().tolist()) == (torch.bfloat16, [6, 7, 8, 9, 10, 11])
    assert asked["w"].data is None


def test_a_parameter_is_filled_in_place(where: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    found = load({"w": ShardedTensor.from_rank_offsets("w", weight)}, where)["w"]
    assert weight.flatten().tolist() == found.flatten().tolist() == list(range(12))


def test_nonpersistent_values_are_returned(where: str) -> None:
    found = load({"groups": [{"params": LocalNonpersistentObject([7])}]}, where)
    assert found["groups"] == [{"lr": 1.0, "params": [7]}]


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((6, 3), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [0] * 3, [0] * 3]), ((2, 2), [[0, 1], [3, 4]])],
)
def test_a_different_shape_is_padded_and_truncated(where: str, shape: tuple[int, ...], rows: list[list[int]]) -> None:
    found = load({"w": tensor("w", *shape, allow_shape_mismatch=True)}, where)["w"]
    assert found.tolist() == rows
    count = found.numel()
    flat = [
        ShardedTensor.from_rank_offsets_flat(
            "w", torch.full((hi - lo,), -1.0), shape, flattened_range=slice(lo, hi), allow_shape_mismatch=True
        )
        for lo, hi in ((0, 1), (1, count - 1), (count - 1, count))
    ]
    assert torch.cat(load({"w": flat}, where)["w"]).tolist() == found.flatten().tolist()


@pytest.mark.parametrize("more", [{}, {"allow_shape_mismatch": True}])
def test_a_different_shape_is_rejected(where: str, more: dict[str, Any]) -> None:
    shape = (4, 3, 1) if more else (5, 3)
    asked = tensor("w", *shape, **more)
    with pytest.raises(CheckpointingException, match="'w' has global shape") as caught:
        load({"w": asked}, where)
    assert isinstance(caught.value, Mismatch)
    assert untouched(asked)


@pytest.mark.parametrize("notes", [b"{", b"[]", b'{"common_tensors": 5}'])
def test_a_checkpoint_with_invalid_megatron_notes_is_rejected(tmp_path: Path, notes: bytes) -> None:
    casckpt.open(tmp_path).save({"w": torch.ones(1)}, run="a", step=1, attachments={"megatron.json": notes})
    with pytest.raises(CheckpointingException, match=r"megatron.json is invalid"):
        load({}, f"{tmp_path}#a@1")


def test_objects_are_replaced_in_place(where: str) -> None:
    state: dict[str, Any] = {"objects": [obj("o", 1, 2), obj("o", 0, 2)], "w": tensor("w", 4, 3), "plain": 3}
    assert load_sharded_objects(state, where) is None  # type: ignore[func-returns-value] # that is what is tested
    assert state["objects"][0] == "second"
    assert state["objects"][1]["e"] == {}
    assert untouched(state["w"])
    assert state["plain"] == 3
    whole: list[Any] = [obj("groups")]  # the common part is a single object
    load_sharded_objects(whole, where)
    assert whole == [[{"lr": 1.0}]]
    for missing in (obj("o", 2, 3), obj("nothing"), obj("args", 0, 2)):
        with pytest.raises(CheckpointingException, match=f"lacks the object '{missing.key}' at") as caught:
            load_sharded_objects({"o": missing}, where)
        assert isinstance(caught.value, MissingKey)
    with pytest.raises(CheckpointingException, match=r"it has the object at \(0,\) of \(2,\), \(1,\) of \(2,\)"):
        load({"o": obj("o", 0, 1)}, where, strict="log_all")


def test_values_other_than_plain_data_need_pickle_in_saves_and_loads(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@1"
    with pytest.raises(CheckpointingException, match="o/shard_0_1"):
        save({"o": obj("o", data=Odd())}, where)
    save({"o": obj("o", data=Odd()), "c": Odd()}, where, allow_pickle=True)
    with pytest.raises(CheckpointingException, match="allow_pickle=True"):
        load({"o": obj("o")}, where)
    found = load({"o": obj("o")}, where, allow_pickle=True)
    assert isinstance(found["o"], Odd)
    assert isinstance(found["c"], Odd)


@pytest.mark.parametrize("value", [{}, [], {"a": {}}, [torch.ones(1)], None, torch.ones(2), {"a": [1, torch.ones(1)]}])
def test_an_object_can_contain_any_plain_data(tmp_path: Path, value: Any) -> None:
    where = f"{tmp_path}#a@1"
    save({"o": obj("o", data=value), "i": 1}, where)
    assert load_common_state_dict(where) == {"i": 1}
    assert load_plain_tensors(where) == {}
    assert megatron.diff(load({"o": obj("o")}, where), {"i": 1, "o": value}) == ([], [], [])


class Odd:
    """Not plain data."""


def test_empty_flat_parts_are_dropped(tmp_path: Path) -> None:
    def part(lo: int, hi: int) -> ShardedTensor:
        data = torch.arange(float(lo), float(hi))
        return ShardedTensor.from_rank_offsets_flat("w", data, (2, 3), flattened_range=slice(lo, hi))

    state = {"a": part(0, 6), "b": part(6, 6)}
    save(dict(state), f"{tmp_path}#a@1")
    found = load(dict(state), f"{tmp_path}#a@1")
    assert list(found) == ["a"]
    assert found["a"].tolist() == [0, 1, 2, 3, 4, 5]


# several ranks


def alike(rank: int, size: int, where: str) -> list[str]:
    """Errors that occur on only one rank."""
    part = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), -1.0), (0, rank, 2))
    asked: list[dict[str, Any]] = [
        {"w": part} | ({"x": tensor("x", 1)} if rank else {}),
        {"w": part if rank == 0 else tensor("w", 4, 3)},
        {"w": part} | ({"o": obj("o", 0, 1)} if rank else {}),
        {"w": part if rank == 0 else tensor("w", 7, 3, replica_id=1)},
    ]
    errors = [repr(outcome_of(lambda state=state: load(state, where))) for state in asked]  # type: ignore[misc]  # a default binds the loop variable
    return [*errors, str(untouched(part)), str(load({"w": part}, where)["w"].sum().item())]


def test_every_rank_raises_the_same_error_and_nothing_changes(where: str, ranks: Pool) -> None:
    first, second = ranks.run(2, alike, where)
    words = ["lacks 'x'", "local shape is", "lacks the object 'o'", "global shape"]
    for found in (first, second):
        assert [word in text for word, text in zip(words, found, strict=False)] == [True] * 4, found
        assert found[4] == "True"
    assert (first[5], second[5]) == ("15.0", "51.0")


def objects_of_ranks(rank: int, size: int, where: str) -> list[Any]:
    save({"rng": obj("rng", rank, size, {"state": torch.full((2,), rank)}), "i": rank}, where)
    found = load({"rng": obj("rng", size - 1 - rank, size)}, where)
    return [found["rng"]["state"].tolist(), found["i"]]


def test_each_rank_has_its_own_objects(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, objects_of_ranks, f"{tmp_path}#a@1") == [[[1, 1], 0], [[0, 0], 0]]
    assert set(casckpt.open(tmp_path).read("a@1")) == {"rng/shard_0_2", "rng/shard_1_2", "i"}


def odd_memory(rank: int, size: int, where: str) -> list[Any]:
    """Return tensors that are not contiguous, have 16 bytes per element, have no dimensions, or are duplicates."""
    numbers = torch.arange(12.0)
    tensors = {"c": numbers.to(torch.complex128), "t": numbers.view(3, 4), "s": torch.tensor(3.0)}
    state = {name: ShardedTensor.from_rank_offsets(name, value, replica_id=rank) for name, value in tensors.items()}
    save(dict(state) | {"o": ShardedObject("o", 5, (1,), (0,), rank)}, where)
    asked = {
        "c": state["c"].without_data(),
        "t": ShardedTensor.from_rank_offsets("t", torch.zeros(4, 3).t(), replica_id=rank),
        "s": [ShardedTensor.from_rank_offsets("s", torch.tensor(0.0), replica_id=i + rank) for i in range(2)],
        "o": ShardedObject("o", None, (1,), (0,), rank),
    }
    found = load(asked, where)
    same = [torch.equal(found[name], tensors[name]) for name in "ct"]
    return [*same, [value.item() for value in found["s"]], found["o"]]


def test_a_load_fills_tensors_of_any_memory_layout(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, odd_memory, f"{tmp_path}#a@1") == [[True, True, [3, 3], 5]] * 2


def in_a_group(rank: int, size: int, where: str) -> Any:
    group = torch.distributed.new_group([1, 2])
    if rank in (1, 2):
        part = ShardedTensor.from_rank_offsets("w", torch.full((2,), rank), (0, rank - 1, 2))
        save({"w": part}, where, process_group=group)
        return load({"w": part.without_data()}, where, process_group=group)["w"].tolist()
    return None


def test_a_process_group_saves_independently(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(3, in_a_group, f"{tmp_path}#a@1") == [None, [1, 1], [2, 2]]


def test_each_strictness_handles_missing_and_unexpected_keys(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def asked() -> dict[str, Any]:
        return {"w": tensor("w", 4, 3), "x": tensor("x", 1), "y": obj("y")}

    for strict in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(CheckpointingException, match="a@1 lacks 'x', 'y'") as caught:
            load(asked(), where, strict=strict)
        assert isinstance(caught.value, MissingKey)
        assert caught.value.keys == ("x", "y")
    with pytest.raises(CheckpointingException, match="'b', 'o', which no rank requests"):
        load({"w": tensor("w", 4, 3)}, where, strict=StrictHandling.RAISE_ALL)
    for strict, missing in (("return_unexpected", set()), ("return_all", {"b", "o"})):
        found = load(asked(), where, strict=strict)
        assert found[1:] == (missing, {"x", "y"})
        assert "x" not in found[0]
    assert not caplog.records
    for strict, lines in (("ignore_all", 0), ("log_unexpected", 1), ("log_all", 2)):
        with caplog.at_level(logging.WARNING):
            assert load(asked(), where, strict=strict)["w"].sum() == 66
        assert len(caplog.records) == lines
        caplog.clear()
    with pytest.raises(ValueError, match="strict='no' is not a known value; use one of 'assume_ok_unexpected'"):
        load({}, where, strict="no")


def halves(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
    return [ShardedTensor.from_rank_offsets(f"{key}.{i}", part, replica_id=replica_id) for i, part in enumerate(data)]


def test_a_factory_with_an_unexpected_part_is_omitted_entirely(tmp_path: Path) -> None:
    save({"a": numbered("f.0", 3), "b": numbered("b", 1)}, f"{tmp_path}#a@1")
    factory = ShardedTensorFactory("f", torch.ones(2, 3), halves, torch.stack)
    found, _, unexpected = load({"f": factory, "b": tensor("b", 1)}, f"{tmp_path}#a@1", strict="return_all")
    assert (set(found), unexpected) == ({"b"}, {"f.1"})


# several ranks


def said_by_each(rank: int, size: int, where: str, strict: str) -> list[str]:
    """Each rank's log, for keys that only the other rank requests or that no rank requests."""
    with logged("casckpt.frontends.megatron.loading") as said:
        load({"b": tensor("b", 4, replica_id=rank)}, where, strict=strict)
    return said


def test_missing_keys_are_logged_on_every_rank(where: str, ranks: Pool) -> None:
    words = "a@1 holds 'o', 'w', which no rank requested"
    assert ranks.run(2, said_by_each, where, "log_all") == [[words], [words]]
    assert ranks.run(2, said_by_each, where, "log_unexpected") == [[], []]


@pytest.mark.parametrize("value", [one.value for one in megatron.StrictHandling])
def test_each_strictness_agrees_with_megatron_core(value: str) -> None:
    validation, ours = core(".validation"), megatron.parse_strict_flag(value)
    one = validation.parse_strict_flag(value)
    assert megatron.parse_strict_flag(one) is ours
    questions = (
        "requires_explicit_ckpt_mismatch_check",
        "requires_global_app_metadata",
        "requires_returning_mismatch_keys",
    )
    for question in questions:
        wanted = getattr(validation.StrictHandling, question)(one)
        assert getattr(megatron.StrictHandling, question)(ours) is wanted
        assert getattr(megatron.StrictHandling, question)(one) is wanted
