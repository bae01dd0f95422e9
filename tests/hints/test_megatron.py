"""The advice of the front end for Megatron-core, and of its strategies."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.errors import Conflict
from casckpt.frontends import megatron
from casckpt.frontends.megatron import CheckpointingException, ShardedObject, ShardedTensor, load, save
from casckpt.frontends.megatron.mapping import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from tests.frontends.megatron.test_mapping import sharded, trained
from tests.support.hints import Messages, follows
from tests.support.megatron_core import core, module

Store = casckpt.Store


class Phase(enum.Enum):
    WARM = 1


def tensor(key: str = "w", *, value: float = 1.0, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((4,), value), **more)


@pytest.fixture
def where(store_path: Path) -> str:
    return f"{store_path}#a@1"


# writers


@follows("frontends/megatron/claims.py:_check_cover", "use a different replica_id for all but one of them")
@follows("frontends/megatron/claims.py:_check_object", "use a different replica_id for all but one of them")
@follows("frontends/megatron/claims.py:_without_main", "use replica_id 0 on one rank")
def test_a_state_is_saved_if_exactly_one_replica_is_the_main_replica(store_path: Path, messages: Messages) -> None:
    def shared(replica_id: int) -> ShardedObject:
        return ShardedObject("w", {"n": 1}, (1,), (0,), replica_id=replica_id)

    def part(replica_id: int) -> ShardedTensor:
        return tensor(replica_id=replica_id)

    makers: list[Any] = [part, shared]
    for make in makers:
        twice, once = f"{store_path}#{make.__name__}@1", f"{store_path}#{make.__name__}@2"
        with messages.error(CheckpointingException) as advice:
            save({"a": make(0), "b": make(0)}, twice)
        advice.says("a different replica_id")
        save({"a": make(0), "b": make(1)}, twice)
        with messages.error(CheckpointingException) as advice:
            save({"a": make(1)}, once)
        save({"a": make(int(advice.says("use replica_id 0")[-1]))}, once)
        for place in (twice, once):
            found = load({"a": make(0)}, place)["a"]
            assert found == {"n": 1} if make is shared else torch.equal(found, torch.ones(4))


# shapes and places


@follows("frontends/megatron/loading.py:RankLoad._shards", "allow_shape_mismatch=True pads and truncates")
def test_a_tensor_with_a_different_shape_can_be_padded_as_advised(where: str, messages: Messages) -> None:
    save({"w": tensor()}, where)
    longer = torch.full((6,), -1.0)
    with messages.error(CheckpointingException) as advice:
        load({"w": ShardedTensor.from_rank_offsets("w", longer)}, where)
    given = advice.argument("allow_shape_mismatch")
    found = load({"w": ShardedTensor.from_rank_offsets("w", longer, **given)}, where)["w"]
    assert found.tolist() == [1, 1, 1, 1, 0, 0]


@follows("frontends/megatron/mapping.py:ShardedTensor._problem", "for uneven parts, pass axis_fragmentations=None")
def test_an_uneven_split_can_be_described_without_axis_fragmentations(messages: Messages) -> None:
    def part(**more: Any) -> ShardedTensor:
        fields: dict[str, Any] = {"axis_fragmentations": (2,), "replica_id": 0} | more
        return ShardedTensor("w", torch.ones(3), torch.float32, (3,), (5,), (2,), **fields)

    with messages.error(CheckpointingException) as advice:
        part()
    assert part(**advice.argument("axis_fragmentations", after="pass")).global_slice() == (slice(2, 5),)


@follows("frontends/megatron/mapping.py:ShardedTensor.local_coordinates", "which it does not have; use global_slice()")
def test_the_position_of_a_part_that_is_not_flat_is_given_by_its_slice(messages: Messages) -> None:
    with messages.error(CheckpointingException) as advice:
        tensor().local_coordinates()
    assert getattr(tensor(), advice.says("global_slice()")[:-2])() == (slice(0, 4),)


@follows(
    "frontends/megatron/mapping.py:ShardedTensor.max_allowed_chunks", "pass allow_shape_mismatch=True if it is padded"
)
def test_a_padded_axis_does_not_have_to_divide_evenly(messages: Messages) -> None:
    def part(**more: Any) -> ShardedTensor:
        return ShardedTensor("w", None, torch.float32, (2,), (5,), (2,), (2,), **more)

    with messages.error(CheckpointingException) as advice:
        part().max_allowed_chunks()
    assert part(**advice.argument("allow_shape_mismatch")).max_allowed_chunks() == (2,)


@follows(
    "frontends/megatron/mapping.py:ShardedTensor.from_rank_offsets", "for a flattened_range, use from_rank_offsets_flat"
)
@follows("frontends/megatron/mapping.py:ShardedTensor.from_rank_offsets_flat", "or use from_rank_offsets")
def test_flat_parts_and_other_parts_can_be_created_as_advised(messages: Messages) -> None:
    flat: Any = {"flattened_range": slice(0, 3)}
    with messages.error(CheckpointingException) as advice:
        ShardedTensor.from_rank_offsets("w", torch.ones(3), **flat)
    make = getattr(ShardedTensor, advice.says("from_rank_offsets_flat"))
    assert make("w", torch.ones(3), (2, 2), **flat).local_shape == (2, 2)
    with messages.error(CheckpointingException) as advice:
        make("w", torch.ones(4), (4,))
    assert getattr(ShardedTensor, advice.says("from_rank_offsets"))("w", torch.ones(4)).local_shape == (4,)


@follows(
    "frontends/megatron/place.py:place_of",
    "pass STORE#RUN@STEP, such as ckpts#sft@100, or casckpt.at(store, run=, step=)",
)
@follows(
    "frontends/megatron/place.py:_text", "pass STORE#RUN@STEP, such as ckpts#sft@100, or casckpt.at(store, run=, step=)"
)
def test_a_location_can_be_a_reference_or_the_result_of_at(store_path: Path, messages: Messages) -> None:
    wrong: list[Any] = ["iter_0000001", 5]
    for step, place in enumerate(wrong):
        with messages.error(CheckpointingException) as advice:
            save({"w": tensor()}, place)
        form = advice.says("ckpts#sft@100").replace("ckpts", str(store_path))
        save({"w": tensor()}, form, overwrite=True)
        assert casckpt.open(store_path).get("sft@100").step == 100
        advice.says("casckpt.at(store, run=, step=)")
        save({"w": tensor()}, casckpt.at(store_path, run="at", step=step))
        assert casckpt.open(store_path).get(f"at@{step}").run == "at"


@follows(
    "frontends/megatron/saving.py:located",
    "pass None as sharded_strategy, or pass the strategy to megatron.core.dist_checkpointing",
)
def test_a_strategy_works_when_it_is_passed_to_functions_of_megatron(
    where: str, store_path: Path, tmp_path: Path, messages: Messages
) -> None:
    core()
    strategy: Any = megatron.CasSaveShardedStrategy(store_path, run="b")
    with messages.error(CheckpointingException) as advice:
        save({"w": tensor()}, where, strategy)
    advice.says("pass None as sharded_strategy")
    save({"w": tensor()}, where, None)
    advice.says("megatron.core.dist_checkpointing")
    (tmp_path / "iter_2").mkdir()
    strategy.save({"w": tensor()}, tmp_path / "iter_2")
    assert [str(one.run) for one in casckpt.open(store_path).checkpoints()] == ["a", "b"]


@follows("frontends/megatron/stored.py:load_content_metadata", "pass a checkpoint_dir, or a preloaded_state_dict")
def test_content_metadata_can_be_loaded_from_a_checkpoint_or_a_state(where: str, messages: Messages) -> None:
    save({"w": tensor()}, where, content_metadata={"n": 1})
    with messages.error(ValueError) as advice:
        megatron.load_content_metadata()
    given: Any = {advice.says("checkpoint_dir"): where}
    assert megatron.load_content_metadata(**given) == {"n": 1}
    given = {advice.says("preloaded_state_dict"): megatron.load_common_state_dict(where)}
    assert megatron.load_content_metadata(**given) == {"n": 1}


@follows("frontends/megatron/loading.py:check_unexpected", "strict='log_unexpected' omits them")
@follows("frontends/megatron/loading.py:RankLoad.missing", "strict='raise_unexpected' leaves them unread")
def test_keys_on_only_one_side_can_be_left_unchanged_as_advised(where: str, messages: Messages) -> None:
    save({"w": tensor(), "v": tensor("v")}, where)
    wanted = {"w": tensor(value=0), "x": tensor("x", value=0)}
    with messages.error(CheckpointingException) as advice:
        load(wanted, where)
    assert load(wanted, where, **advice.argument("strict")).keys() == {"w"}
    with messages.error(CheckpointingException) as advice:
        load({"w": tensor(value=0)}, where, strict="raise_all")
    assert torch.equal(load({"w": tensor(value=0)}, where, **advice.argument("strict"))["w"], torch.ones(4))


@follows(
    "frontends/megatron/mapping.py:get_param_id_to_sharded_param_map",
    "create the state dict with keep_vars=True, and transform",
)
def test_the_error_for_a_state_dict_without_parameters_says_to_pass_parameters(messages: Messages) -> None:
    model = nn.Linear(3, 4)
    with messages.log() as advice:
        copies = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in model.state_dict().items()}
        get_param_id_to_sharded_param_map(copies, model.parameters())
    kept = model.state_dict(**advice.argument("keep_vars"))
    made = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in kept.items()}
    assert len(get_param_id_to_sharded_param_map(made, model.parameters())) == 2
    advice.says("ShardedTensorFactory")
    assert len(get_param_id_to_sharded_param_map(sharded(model), model.parameters())) == 2


@follows("frontends/megatron/mapping.py:make_sharded_optimizer_tensor", "such as 'step', into exclude_keys")
def test_state_with_a_different_shape_can_be_excluded_from_sharding(store_path: Path, messages: Messages) -> None:
    model, optim = trained()
    numbers = get_param_id_to_sharded_param_map(sharded(model), model.parameters())
    with messages.error(CheckpointingException) as advice:
        optim_state_to_sharding_state(optim.state_dict(), numbers)
    left: Any = {advice.says("exclude_keys"): [advice.says("'step'").strip("'")]}
    state = optim.state_dict()
    optim_state_to_sharding_state(state, numbers, **left)
    save({"optimizer": state}, f"{store_path}#a@1")
    assert "optimizer.state.exp_avg.weight" in casckpt.open(store_path).get("a@1").tensors


# features that need Megatron-core


@follows("frontends/megatron/common.py:read", "pass allow_pickle=True if you trust its source. Importing")
@follows("frontends/megatron/strategies.py:CasSaveShardedStrategy._warn_of_classes", "and allow_pickle=True for others")
def test_classes_in_the_common_part_can_be_loaded_with_allow_pickle_or_by_megatron(
    store_path: Path, tmp_path: Path, messages: Messages
) -> None:
    core()
    backend = module("megatron.core.transformer.enums").AttnBackend.flash
    strategy: Any = megatron.CasSaveShardedStrategy(store_path, run="a")

    def saved(step: int, phase: Any) -> None:
        (tmp_path / f"iter_{step}").mkdir()
        common = ShardedObject("common_state", {"phase": phase}, (1,), (0,))
        strategy.save({"common_state": common}, tmp_path / f"iter_{step}")

    with messages.log() as said:
        saved(1, Phase.WARM)
    saved(2, backend)
    where = f"{store_path}#a@1"
    with messages.error(CheckpointingException) as advice:
        megatron.load_common_state_dict(where)
    for leave in (said.argument("allow_pickle"), advice.argument("allow_pickle")):
        assert megatron.load_common_state_dict(where, **leave)["phase"] is Phase.WARM
        assert megatron.load_content_metadata(where, **leave) is None
    assert advice.says("Importing megatron.core registers")
    assert megatron.load_common_state_dict(f"{store_path}#a@2")["phase"] is backend


@follows(
    "frontends/megatron/strategies.py:CasSaveShardedStrategy._step",
    "pass step= (a number or a function) to the strategy",
)
def test_the_step_of_a_folder_without_a_number_can_be_passed(
    store_path: Path, tmp_path: Path, messages: Messages
) -> None:
    core()
    folder = tmp_path / "newest"
    folder.mkdir()
    with messages.error(CheckpointingException) as advice:
        megatron.CasSaveShardedStrategy(store_path, run="a").save({"w": tensor()}, folder)
    name = advice.says("step=")[:-1]
    ways: list[Any] = [{name: 4}, {name: lambda path: len(path.name)}]
    for given in ways:
        megatron.CasSaveShardedStrategy(store_path, run="a", **given).save({"w": tensor()}, folder)
    assert [one.step for one in casckpt.open(store_path).checkpoints()] == [4, 6]


@follows("frontends/megatron/training_loop.py:install", "call undo() on the result of install()")
def test_the_megatron_patch_can_be_undone_before_other_saves_as_advised(store_path: Path, messages: Messages) -> None:
    core()
    installed = megatron.install(store_path, run="a")
    with messages.error(Conflict) as advice:
        megatron.install(store_path, run="b")
    getattr(installed, advice.says("undo()")[:-2])()
    megatron.install(store_path, run="b").undo()
