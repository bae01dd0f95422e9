"""Unusual state dicts: a load restores them exactly, or the error gives advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import CasckptError
from casckpt.frontends.megatron import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    diff,
    load,
    load_common_state_dict,
    load_plain_tensors,
    remove_sharded_tensors,
    save,
)
from tests.support.ranks import Pool, outcome_of


def tensor(key: str, data: torch.Tensor, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **more)


def nothing_is_there(path: Path) -> bool:
    return not path.exists() or not list(path.iterdir())


@pytest.mark.parametrize("prepend", [0, 1])
def test_the_error_for_an_unsupported_tensor_names_the_key(tmp_path: Path, prepend: int) -> None:
    for data in (torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(CheckpointingException, match=r"'t': a (tensor of layout torch.sparse_coo|meta tensor)"):
            save({"t": tensor("t", data, prepend_axis_num=prepend)}, f"{tmp_path}/s#a@1")
    assert nothing_is_there(tmp_path)


def test_the_error_for_data_changed_after_construction_names_the_key(tmp_path: Path) -> None:
    part = tensor("t", torch.ones(4))
    part.data = torch.ones(3)
    with pytest.raises(CheckpointingException, match=r"'t': data of shape \[3\] does not fill"):
        save({"t": part}, f"{tmp_path}/s#a@1")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(1, dtype=torch.complex128).expand(4), "'t': the elements of an expanded tensor"),
        (torch.ones(4, dtype=torch.complex128, device="meta"), "'t': a meta tensor"),
        (torch.ones(4, dtype=torch.float64), "'t' is float64 here, but complex128"),
    ],
)
def test_the_error_for_an_unsupported_destination_names_the_key(
    tmp_path: Path, data: torch.Tensor, message: str
) -> None:
    where = f"{tmp_path}#a@1"
    save({"t": tensor("t", torch.ones(4, dtype=torch.complex128))}, where)
    with pytest.raises(CheckpointingException, match=message):
        load({"t": tensor("t", data)}, where)
    with pytest.raises(CheckpointingException, match=message):
        load({"other": tensor("t", data, replica_id=1), "t": tensor("t", torch.ones(4, dtype=data.dtype))}, where)


def test_a_rejected_load_does_not_change_padded_tensors(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@1"
    save({"t": tensor("t", torch.ones(4, dtype=torch.complex128))}, where)
    data = torch.full((6,), -1.0)
    with pytest.raises(CheckpointingException, match="'t' is float32 here, but complex128"):
        load({"t": tensor("t", data, allow_shape_mismatch=True)}, where)
    assert data.tolist() == [-1] * 6


@pytest.mark.parametrize(
    "value", [tensor("t", torch.ones(1)), ShardedObject("o", 1, (1,), (0,)), LocalNonpersistentObject(1)]
)
def test_tuples_are_not_searched_for_sharded_tensors(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointingException, match=rf"\('a', 1, 'b'\) is a {type(value).__name__} in a tuple"):
        save({"a": (5, {"b": value})}, f"{tmp_path}/s#a@1", allow_pickle=True)
    assert nothing_is_there(tmp_path)


@pytest.mark.parametrize(
    "state", [{"x/shard_0_1": 5}, {"x/shard_0_1": {"y": torch.ones(1)}}, {"w": tensor("x/shard_0_1", torch.ones(2))}]
)
def test_keys_that_look_like_object_keys_are_rejected(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointingException, match="'x/shard_0_1' would load as an object"):
        save(state, f"{tmp_path}/s#a@1")
    assert nothing_is_there(tmp_path)


@pytest.mark.parametrize("key", ["a/b", "a.b", "ü/ö", "a/b/c", " ", "*", "shard_0_1", "a/shard_0"])
def test_every_valid_key_is_saved_and_loaded(tmp_path: Path, key: str) -> None:
    where = f"{tmp_path}#a@1"
    save({"t": tensor(key, torch.ones(3)), "o": ShardedObject(f"{key}o", {1: 2}, (1,), (0,))}, where)
    asked = {"t": tensor(key, torch.zeros(3)), "o": ShardedObject(f"{key}o", None, (1,), (0,))}
    found = load(asked, where)
    assert (found["t"].tolist(), found["o"]) == ([1, 1, 1], {1: 2})


def halves(key: str, data: torch.Tensor, replica_id: Any) -> list[ShardedTensor]:
    return [tensor(f"{key}.{i}", half.clone(), replica_id=replica_id) for i, half in enumerate(data.chunk(2))]


BUILDS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "a list": (halves, torch.cat),
    "a dict by number": (lambda *all: dict(enumerate(halves(*all[:3]))), lambda parts: torch.cat([parts[0], parts[1]])),
    "a nested dict": (
        lambda *all: {"x": halves(*all[:3])[0], "y": [{"z": halves(*all[:3])[1]}]},
        lambda parts: torch.cat([parts["x"], parts["y"][0]["z"]]),
    ),
    "a single one": (lambda key, data, replica_id: tensor(key, data * 2, replica_id=replica_id), lambda x: x / 2),
}


@pytest.mark.parametrize("kind", BUILDS)
def test_a_factory_can_build_any_value_at_any_path(tmp_path: Path, kind: str) -> None:
    def state(fill: float) -> dict[str, Any]:
        made = [ShardedTensorFactory(f"f{i}", torch.arange(4.0) + fill, *BUILDS[kind]) for i in range(2)]
        return {"a": made[0], "l": [tensor("t", torch.ones(2)), made[1]]}

    where = f"{tmp_path}#a@1"
    save(state(0), where)
    found = load(state(9), where)
    assert found["a"].tolist() == found["l"][1].tolist() == [0, 1, 2, 3]


def test_a_factory_can_merge_to_any_value_but_cannot_build_factories(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@1"
    named = ShardedTensorFactory("f", torch.ones(4), halves, lambda parts: {"sum": float(sum(map(torch.sum, parts)))})
    save({"a": named}, where)
    assert load({"a": ShardedTensorFactory("f", torch.ones(4), halves, named.merge_fn)}, where)["a"] == {"sum": 4.0}
    nested = ShardedTensorFactory("g", torch.ones(4), lambda *all: {"in": named}, torch.cat)
    with pytest.raises(CheckpointingException, match="'f': a ShardedTensorFactory is neither"):
        save({"a": nested}, f"{tmp_path}#a@2")


def two_values_for_one_place(rank: int, size: int, where: str) -> list[str]:
    """On only one rank, a sharded tensor has the path of a common value in the checkpoint."""
    data = torch.full((4,), -1.0)
    asked = {"common" if rank else "mine": tensor("t", data, replica_id=rank)}
    error = outcome_of(lambda: load(asked, where))
    return [repr(error), str(data.tolist())]


def test_two_values_for_a_path_are_rejected_before_anything_is_read(tmp_path: Path, ranks: Pool) -> None:
    where = f"{tmp_path}#a@1"
    save({"t": tensor("t", torch.ones(4)), "common": 5}, where)
    for text, data in ranks.run(2, two_values_for_one_place, where):
        assert "CheckpointingException" in text
        assert "two values for the same position, at ('common',)" in text
        assert data == str([-1.0] * 4)
    with pytest.raises(CheckpointingException, match="two values for the same position"):
        load({"common": LocalNonpersistentObject(1)}, where)


def test_thousands_of_objects_and_large_objects_are_saved_and_loaded(tmp_path: Path) -> None:
    where = f"{tmp_path}#a@1"
    many = [ShardedObject("o", {"i": i}, (2000,), (i,)) for i in range(2000)]
    large = ShardedObject("large", {"bytes": bytes(3 << 20), "tensor": torch.ones(1 << 19)}, (1,), (0,))
    save({"many": many, "large": large}, where)
    found = load({"many": [one.without_data() for one in many], "large": large.without_data()}, where)
    assert found["many"] == [{"i": i} for i in range(2000)]
    assert found["large"]["bytes"] == bytes(3 << 20)
    assert torch.equal(found["large"]["tensor"], torch.ones(1 << 19))
    assert len(list((tmp_path / "blobs").rglob("*.safetensors"))) < 10


def some_have_nothing(rank: int, size: int, where: str) -> list[Any]:
    save({"w": tensor("w", torch.arange(4.0))} if rank == 1 else {}, where)
    mine = {} if rank == 0 else {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank - 1, 2))}
    found = load(mine, where)
    asked = tensor("w", torch.zeros(4), replica_id=rank)
    without = load({"w": asked.without_data() if rank else asked}, where)
    return [[value.tolist() for value in found.values()], without["w"].tolist(), load_common_state_dict(where)]


def test_ranks_without_data_can_take_part_in_saves_and_loads(tmp_path: Path, ranks: Pool) -> None:
    whole = [0, 1, 2, 3]
    found = ranks.run(3, some_have_nothing, f"{tmp_path}#a@1")
    assert found == [[[], whole, {}], [[[0, 1]], whole, {}], [[[2, 3]], whole, {}]]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16, torch.int8, torch.complex32],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 6)], ids=str)
def test_any_dtype_and_layout_is_saved_and_loaded(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        data = (torch.rand(shape) * 9).to(dtype)
    where = f"{tmp_path}#a@1"
    save({"t": tensor("t", data), "turned": tensor("turned", data.mT if data.ndim else data)}, where)
    asked = torch.empty_like(data.mT if data.ndim else data)
    found = load({"t": tensor("t", torch.empty_like(data)), "turned": tensor("turned", asked)}, where)
    for value in (found["t"], found["turned"].mT if data.ndim else found["turned"]):
        assert value.dtype == dtype
        assert bytes_of(value) == bytes_of(data)


def bytes_of(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().view(-1).view(torch.uint8).numpy())


class DoesNotComeBack:
    """An instance of this class cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class IsNotComparable:
    """A dict that cannot be compared."""

    def __ne__(self, other: object) -> bool:
        raise LookupError("it depends")

    __hash__ = None  # type: ignore[assignment] # as of anything that compares its contents


ODD: dict[str, Callable[[], Any]] = {
    "does not pickle": lambda: lambda: 1,
    "does not come back": DoesNotComeBack,
    "cannot be compared": IsNotComparable,
}


def odd_common_part(rank: int, size: int, where: str, name: str) -> list[str]:
    state = {"w": tensor("w", torch.ones(2), replica_id=rank), "odd": ODD[name]()}
    refused = outcome_of(lambda: save(dict(state), f"{where}@1"))
    compared = outcome_of(lambda: save(dict(state), f"{where}@2", allow_pickle=True))
    good = outcome_of(lambda: save({"w": state["w"]}, f"{where}@3"))
    return [repr(refused), repr(compared), repr(good)]


@pytest.mark.parametrize("name", ODD)
def test_a_common_part_that_cannot_be_compared_does_not_block_any_rank(tmp_path: Path, ranks: Pool, name: str) -> None:
    found = ranks.run(2, odd_common_part, f"{tmp_path}#a", name, timeout=10)
    for refused, compared, good in found:
        assert "CheckpointingException" in refused
        assert "odd: a" in refused
        assert good == "None"
        assert compared == ("None" if name != "does not pickle" else compared)
    assert 3 in [ckpt.step for ckpt in casckpt.open(tmp_path).checkpoints()]


@pytest.mark.parametrize(
    "common",
    [
        {"a": {"b": 3}},
        {"a": {"b": {}}, "c": 1},
        {"a.b": 3, "a.b (common)": 4, "a": {"x": 5}},
        {"a": {"b": torch.ones(2)}},
        {"a": {"b": {"t": torch.ones(2)}}},
        {7: torch.ones(1), "a": {"b": {"c": 1}}},
    ],
)
@pytest.mark.parametrize("key", ["a.b", "a.b.t", "a", "7", "a (common).b"])
def test_a_common_value_at_the_path_of_a_key_is_kept(tmp_path: Path, common: dict[Any, Any], key: str) -> None:
    """Megatron allows this, because it stores the two values in different files."""
    where = f"{tmp_path}#a@1"
    save({**common, "x": {"y": tensor(key, torch.arange(2.0))}}, where)
    wanted = {**common, "x": {"y": torch.arange(2.0)}}
    found = load({"x": {"y": tensor(key, torch.zeros(2))}}, where)
    assert diff(found, wanted) == ([], [], [])
    assert diff(load_common_state_dict(where), common) == ([], [], [])
    assert casckpt.open(tmp_path).read("a@1")[key].tolist() == [0, 1]
    assert set(load_plain_tensors(where)) == {key}


def test_an_object_in_the_common_part_is_stored_exactly_or_rejected(tmp_path: Path) -> None:
    state = {"common": {"net": torch.nn.Linear(1, 1)}} | {key: tensor(key, torch.ones(2)) for key in "xy"}
    with pytest.raises(CasckptError, match=r"common\.net: a .*Linear cannot be stored"):
        save(dict(state), f"{tmp_path}#a@1")
    save(dict(state), f"{tmp_path}#a@2", allow_pickle=True)
    for _ in range(2):
        found = load({"x": tensor("x", torch.ones(2))}, f"{tmp_path}#a@2", allow_pickle=True)
        assert type(found["common"]["net"]) is torch.nn.Linear
        remove_sharded_tensors(f"{tmp_path}#a@2", "y.", allow_pickle=True)


def key_on_the_other_rank(rank: int, size: int, where: str) -> Any:
    part = {"x": tensor("a.b", torch.ones(2))} if rank else {"y": tensor("c", torch.ones(2))}
    save({"a": {"b": 3}, **part}, where)
    return load({"x": tensor("a.b", torch.zeros(2), replica_id=rank)}, where)["a"]


def test_a_key_on_a_different_rank_can_equal_a_common_path(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, key_on_the_other_rank, f"{tmp_path}#a@1") == [{"b": 3}] * 2
