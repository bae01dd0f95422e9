"""Classes that describe sharded values."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casckpt.errors import InvalidInput
from casckpt.frontends import megatron
from casckpt.frontends.megatron import (
    CheckpointingException,
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    is_main_replica,
    load,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
    save,
)
from tests.support.ranks import Pool


def flat(data: int, shape: tuple[int, ...], at: slice, *offsets: tuple[int, int, int], **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets_flat("k", torch.ones(data), shape, *offsets, flattened_range=at, **more)


def test_a_part_has_the_fields_that_megatron_defines() -> None:
    data = torch.ones(2, 3)
    part = ShardedTensor.from_rank_offsets("k", data, (0, 1, 4), (2, 2, 3), prepend_axis_num=1, replica_id=(0, 1))
    assert part.key == "k"
    assert part.data is data
    assert part.replica_id == (0, 1)
    assert (part.prepend_axis_num, part.allow_shape_mismatch, part.flattened_range) == (1, False, None)
    assert part.local_shape == (2, 3)
    assert part.global_shape == (4, 2, 9)
    assert part.global_offset == (1, 0, 6)
    assert part.axis_fragmentations == (4, 1, 3)
    assert part.global_slice() == (1, slice(0, 2), slice(6, 9))
    assert part.max_allowed_chunks() == (1, 2, 3)
    assert part.local_chunk_offset_in_global() == (1, 0, 2)
    assert part.dtype is torch.float32


def test_a_scalar_or_an_empty_tensor_can_have_parts() -> None:
    scalar = ShardedTensor.from_rank_offsets("k", torch.tensor(3.0))
    assert (scalar.global_shape, scalar.global_slice(), scalar.max_allowed_chunks()) == ((), (), ())
    empty = ShardedTensor.from_rank_offsets("k", torch.ones(0, 2), (0, 1, 2))
    assert (empty.global_shape, empty.global_offset, empty.local_chunk_offset_in_global()) == ((0, 2), (0, 0), (0, 0))


@pytest.mark.parametrize("triple", [(-1, 0, 1), (0, 1, 1), (0, -1, 2), (0, 0, 0), (5, 0, 1)])
def test_an_invalid_rank_offset_is_rejected(triple: tuple[int, int, int]) -> None:
    with pytest.raises(CheckpointingException, match="'k'") as caught:
        ShardedTensor.from_rank_offsets("k", torch.ones(2), triple)
    assert isinstance(caught.value, ValueError | InvalidInput)
    assert caught.value.key == "k"


def test_the_last_of_two_offsets_for_the_same_axis_is_used() -> None:
    assert ShardedTensor.from_rank_offsets("k", torch.ones(2), (0, 0, 2), (0, 2, 3)).global_offset == (4,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_offset": (0,)}, "differ in length"),
        ({"prepend_axis_num": 1}, "do not add up"),
        ({"global_offset": (1, 0)}, "not a multiple of local_shape"),
        ({"dtype": torch.float64}, "data is torch.float32"),
        ({"local_shape": (4, 3), "global_offset": (0, 0)}, r"data has shape \[2, 3\]"),
        ({"flattened_range": slice(0, 6)}, "flattened_range requires"),
        ({"flattened_range": slice(0, 6, 2)}, "has a step"),
    ],
)
def test_contradictory_fields_are_rejected(changed: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "key": "k", "data": torch.ones(2, 3), "dtype": torch.float32, "local_shape": (2, 3), "global_shape": (4, 3),
        "global_offset": (2, 0), "axis_fragmentations": (2, 1),
    }  # fmt: skip
    assert ShardedTensor(**fields).replica_id == 0
    with pytest.raises(CheckpointingException, match=message):
        ShardedTensor(**fields | changed)


def test_unevenly_split_parts_do_not_form_a_grid() -> None:
    part = ShardedTensor("k", None, torch.float32, (2,), (5,), (3,), None)
    assert part.has_regular_grid is False
    with pytest.raises(CheckpointingException, match="does not have a regular grid"):
        part.max_allowed_chunks()


def test_an_axis_that_cannot_be_divided_evenly_is_rejected() -> None:
    part = ShardedTensor("k", None, torch.float32, (2,), (5,), (2,), (2,))
    with pytest.raises(CheckpointingException, match="not a multiple of 2"):
        part.max_allowed_chunks()
    padded = ShardedTensor("k", None, torch.float32, (2,), (5,), (2,), (2,), allow_shape_mismatch=True)
    assert padded.max_allowed_chunks() == (2,)


def test_a_flat_range_refers_to_the_local_shape() -> None:
    part = flat(3, (2, 4), slice(2, 5), (0, 1, 3), (1, 1, 2), prepend_axis_num=1)
    assert part.global_shape == (3, 4, 4)
    assert [index.tolist() for index in part.local_coordinates()] == [[0, 0, 1], [2, 3, 0]]
    found = part.global_coordinates()
    assert found[0] == 1
    assert [np.asarray(index).tolist() for index in found[1:]] == [[2, 2, 3], [2, 3, 0]]


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_the_coordinates_of_a_flat_part_match_its_elements(shape: list[int], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    lo, hi = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    part = flat(hi - lo, tuple(shape), slice(lo, hi), (0, 1, 2))
    numbers = torch.arange(2 * count).view(2 * shape[0], *shape[1:])
    local = numbers[part.global_slice()]
    assert local[part.local_coordinates()].tolist() == local.flatten()[lo:hi].tolist()
    assert numbers[part.global_coordinates()].tolist() == local.flatten()[lo:hi].tolist()


def test_a_flat_part_without_dimensions_is_valid() -> None:
    part = flat(1, (), slice(0, 1))
    assert (part.local_coordinates(), part.global_coordinates()) == ((), ())
    stacked = flat(1, (), slice(0, 1), (0, 2, 3), prepend_axis_num=1)
    assert (stacked.local_coordinates(), stacked.global_coordinates()) == ((), (2,))


def test_only_a_flat_part_has_coordinates_of_its_elements() -> None:
    part = ShardedTensor.from_rank_offsets("k", torch.ones(2))
    for call in (part.local_coordinates, part.global_coordinates):
        with pytest.raises(CheckpointingException, match="flattened_range"):
            call()


@pytest.mark.parametrize(
    ("data", "at", "message"),
    [
        (torch.ones(2, 2), slice(0, 4), "flat data must be 1-d"),
        (torch.ones(3), slice(0, 4), "flattened_range requires"),
        (torch.ones(4), None, "needs a flattened_range"),
    ],
)
def test_flat_data_of_the_wrong_size_is_rejected(data: torch.Tensor, at: slice | None, message: str) -> None:
    with pytest.raises(CheckpointingException, match=message):
        ShardedTensor.from_rank_offsets_flat("k", data, (2, 2), flattened_range=at)


def test_a_flat_range_is_rejected_by_from_rank_offsets() -> None:
    with pytest.raises(ValueError, match="from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("k", torch.ones(2), flattened_range=slice(0, 2))  # type: ignore[arg-type]  # a wrong type on purpose


def test_the_data_of_a_part_is_created_only_if_it_is_missing() -> None:
    part = ShardedTensor.from_rank_offsets("k", torch.ones(2, 3)).without_data()
    assert part.data is None
    part.init_data("cpu", torch.zeros)
    data = part.data
    assert torch.equal(torch.zeros(2, 3), torch.as_tensor(data))
    part.init_data("meta")
    assert part.data is data
    flat_part = flat(3, (2, 4), slice(2, 5)).without_data()
    flat_part.init_data("meta")
    assert torch.as_tensor(flat_part.data).shape == (3,)


@pytest.mark.parametrize(
    ("replica_id", "main"), [(0, True), (1, False), ((0, 0), True), ((0, 1), False), ((), True), (False, True)]
)
def test_the_main_replica_has_the_id_zero_or_all_zeros(replica_id: Any, main: bool) -> None:
    assert is_main_replica(replica_id) is main


def test_each_sharded_object_has_a_unique_key() -> None:
    one = ShardedObject("a/b", {"x": 1}, (1, 8), (0, 3))
    assert one.unique_key == "a/b/shard_0.3_1.8"
    assert ShardedObject.empty_from_unique_key(one.unique_key) == one.without_data()
    assert str(one) == "ShardedObject(key='a/b')"


def test_the_repr_of_a_part_is_short() -> None:
    tensor = ShardedTensor.from_rank_offsets("k", torch.ones(2))
    factory = ShardedTensorFactory("f", torch.ones(2), lambda *_: {}, lambda built: built)
    assert [str(tensor), str(factory)] == ["ShardedTensor(key='k')", "ShardedTensorFactory(key='f')"]
    assert ShardedObject.empty_from_unique_key("a/shard_0.3_1").global_shape == (1, -1)


def test_an_object_has_the_fields_that_megatron_defines() -> None:
    one = ShardedObject("a", [1], (1, 8), (0, 3), 2)
    assert (one.key, one.data, one.global_shape, one.global_offset, one.replica_id) == ("a", [1], (1, 8), (0, 3), 2)
    assert ShardedObject("a", [1], (1,), (0,)).replica_id == 0


@pytest.mark.parametrize("text", ["a", "a/shard_1", "a/shard_x_1", "a/shard_1_2_3"])
def test_strings_in_a_different_format_are_rejected_as_unique_keys(text: str) -> None:
    with pytest.raises(CheckpointingException, match="does not name a shard"):
        ShardedObject.empty_from_unique_key(text)


def test_an_object_with_one_offset_too_few_is_rejected() -> None:
    with pytest.raises(CheckpointingException, match="differ in length"):
        ShardedObject("a", 1, (1, 2), (0,))


def test_parts_objects_and_factories_are_instances_of_sharded_base() -> None:
    factory = ShardedTensorFactory("f", torch.ones(2), lambda key, data, replica_id: {}, torch.cat)
    values = [ShardedTensor.from_rank_offsets("k", torch.ones(2)), ShardedObject("o", 1, (1,), (0,)), factory]
    for value in values:
        assert isinstance(value, ShardedBase)
        value.validate_metadata_integrity()
        assert value.without_data().data is None
    with pytest.raises(TypeError):
        ShardedBase()  # type: ignore[abstract]  # to try is the test


def test_a_local_nonpersistent_object_has_two_names() -> None:
    assert LocalNonpersitentObject is LocalNonpersistentObject
    assert LocalNonpersistentObject(5).unwrap() == 5


def three(key: str, data: torch.Tensor, replica_id: Any) -> Any:
    return [key, data, replica_id]


def four(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
    return [key, data, replica_id, flattened_range]


def test_a_factory_calls_its_function_with_three_or_four_arguments() -> None:
    data = torch.ones(2)
    assert ShardedTensorFactory("k", data, three, torch.cat, 5).build() == ["k", data, 5]
    assert ShardedTensorFactory("k", data, four, torch.cat, 5).build() == ["k", data, 5, None]
    assert ShardedTensorFactory("k", data, lambda *all: all, torch.cat).build() == ("k", data, 0, None)
    assert ShardedTensorFactory("k", data, four, torch.cat, 5, slice(0, 1)).build()[3] == slice(0, 1)
    silent: Any = ShardedTensorFactory("k", "z", max, torch.cat, "a", "b")  # type: ignore[arg-type] # no signature
    assert silent.build() == "z"
    with pytest.raises(CheckpointingException, match="accepts three arguments"):
        ShardedTensorFactory("k", data, three, torch.cat, 5, slice(0, 1)).build()


def test_a_factory_has_the_fields_that_megatron_defines() -> None:
    data = torch.ones(2)
    factory = ShardedTensorFactory("k", data, three, torch.stack)
    assert (factory.key, factory.data, factory.replica_id, factory.flattened_range) == ("k", data, 0, None)
    assert (factory.build_fn, factory.merge_fn) == (three, torch.stack)
    assert factory.merge([data, data]).shape == (2, 2)


def test_factories_are_replaced_in_place_and_undone() -> None:
    factory = ShardedTensorFactory("k", torch.ones(2), lambda key, data, replica_id: {"parts": [data, data]}, sum_of)
    state: dict[str, Any] = {"a": [factory, 1]}
    apply_factories(state)
    assert torch.equal(state["a"][0]["parts"][1], torch.ones(2))
    assert apply_factory_merges(state, {"a": {0: factory}}) is state
    assert torch.equal(state["a"][0], torch.full((2,), 2.0))
    assert apply_factory_merges({"parts": [torch.ones(1)]}, factory).tolist() == [1.0]


def sum_of(state: dict[str, Any]) -> torch.Tensor:
    return torch.stack(state["parts"]).sum(0)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({}, r"\('a',\)"),
        ({"a": [1]}, r"\('a', 1\)"),
        ({"a": {"x": 1}}, r"\('a', 1\)"),
        ({"a": 5}, r"at \('a',\), the factories are in a dict, which does not match int"),
    ],
)
def test_a_factory_outside_a_container_is_rejected(state: dict[str, Any], where: str) -> None:
    factory = ShardedTensorFactory("k", torch.ones(2), three, torch.cat)
    with pytest.raises(ValueError, match=where):
        apply_factory_merges(state, {"a": {1: factory}})


def test_lists_of_factories_and_values_must_have_equal_lengths() -> None:
    factory = ShardedTensorFactory("k", torch.ones(2), three, torch.cat)
    with pytest.raises(ValueError, match="the list has length 2, but the factories are in a list of length 1"):
        apply_factory_merges([1, 2], [factory])
    assert megatron.apply_factory_merges([[torch.ones(1)]], [factory])[0].tolist() == [1.0]


def test_the_type_names_for_annotations_exist() -> None:
    dicts = (megatron.StateDict, megatron.CommonStateDict, megatron.ShardedStateDict)
    assert dicts == (dict[str, Any],) * 3
    assert megatron.ReplicaId == int | tuple[int, ...]
    hints = get_type_hints(ShardedTensorFactory)
    assert (hints["build_fn"], hints["merge_fn"]) == (megatron.FactoryBuildFn, megatron.FactoryMergeFn)


def halves(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
    parts = enumerate(data.chunk(2))
    return {half: ShardedTensor.from_rank_offsets(f"{key}.{half}", part, replica_id=replica_id) for half, part in parts}


def merged(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parts[0], parts[1]])


def sharded(model: nn.Module) -> dict[str, Any]:
    """Return whole weights, and the bias in two halves."""
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name.endswith("bias"):
            state[name] = ShardedTensorFactory(name, value, halves, merged)
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, value, (0, 0, 1))
    return state


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).to(torch.bfloat16)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optim.step()
    return model, optim


def test_parameters_are_numbered_and_tied_ones_share_a_number() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert get_optim_param_to_id_map([a, b, a]) == {id(a): 0, id(b): 1}


def test_parameters_are_found_by_identity() -> None:
    model, _ = trained()
    found = get_param_id_to_sharded_param_map(sharded(model), model.parameters())
    assert [value.key for _, value in sorted(found.items())] == ["weight", "bias"]


def test_a_state_dict_without_parameters_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = trained()
    copies = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4, 3))}
    with caplog.at_level(logging.WARNING):
        assert get_param_id_to_sharded_param_map(copies, model.parameters()) == {}
    assert "keep_vars=True" in caplog.text


def test_state_with_the_wrong_shape_is_rejected() -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.ones(2, 2), (0, 1, 2), replica_id=3)
    made = make_sharded_optimizer_tensor(param, torch.ones(2, 2, dtype=torch.float64), "optim.exp_avg")
    assert (made.key, made.dtype, made.global_offset, made.replica_id) == ("optim.exp_avg.w", torch.float64, (2, 0), 3)
    with pytest.raises(CheckpointingException, match=r"'p.w' has shape \[\].*exclude_keys"):
        make_sharded_optimizer_tensor(param, torch.tensor(1.0), "p")


def test_a_whole_optimizer_is_saved_and_loaded(tmp_path: Path) -> None:
    model, optim = trained()
    numbers = get_param_id_to_sharded_param_map(sharded(model), model.parameters())
    state = optim.state_dict()
    groups = state["param_groups"]
    optim_state_to_sharding_state(state, numbers, exclude_keys=("step",))
    assert isinstance(state["param_groups"][0]["params"], LocalNonpersistentObject)
    assert groups[0]["params"] == [0, 1]
    save({"optimizer": state}, f"{tmp_path}#o@1")

    fresh = torch.optim.AdamW(model.parameters()).state_dict()
    fresh["state"] = {n: {k: torch.zeros_like(v) for k, v in s.items()} for n, s in optim.state_dict()["state"].items()}
    optim_state_to_sharding_state(fresh, numbers, exclude_keys=("step",))
    found = load({"optimizer": fresh}, f"{tmp_path}#o@1")["optimizer"]
    assert found["param_groups"] == groups
    for number, values in optim.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found["state"][number][name], values[name])


def test_state_of_an_unknown_parameter_is_rejected() -> None:
    state: dict[str, Any] = {"state": {5: {"m": torch.ones(1)}}, "param_groups": []}
    with pytest.raises(ValueError, match="parameter 5"):
        optim_state_to_sharding_state(state, {})
    optim_state_to_sharding_state(state, {}, exclude_keys=("m",))
    assert state["state"] == {5: {}}


def numbered_dtensors(rank: int, size: int) -> tuple[list[int], dict[int, str]]:
    mesh = init_device_mesh("cpu", (size,))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])) for _ in range(3)]
    data: list[Any] = [param if rank else param.to_local() for param in params]  # type: ignore[attr-defined] # DTensors
    model = [ShardedTensor.from_rank_offsets(f"p{i}", value, (0, rank, size)) for i, value in enumerate(data)]
    found = get_param_id_to_sharded_param_map(model, params)
    return list(get_optim_param_to_id_map(params).values()), {number: one.key for number, one in found.items()}


def test_dtensor_parameters_are_matched_by_their_local_part(ranks: Pool) -> None:
    assert ranks.run(2, numbered_dtensors) == [([0, 1, 2], {0: "p0", 1: "p1", 2: "p2"})] * 2
