"""Advice about tensors and values that cannot be stored as they are."""

from __future__ import annotations

import enum
import sys
from collections import deque
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import casckpt
from casckpt.errors import InvalidInput, Mismatch
from casckpt.tensors.kinds import KINDS
from casckpt.tensors.wrappers import rebuilt
from tests.store.test_foreign import flat
from tests.support.hints import Advice, Messages, follows
from tests.support.ranks import Pool, outcome_of
from tests.support.wrappers import Mode, Options, Scaled, scaled

Store = casckpt.Store


class Kind(enum.IntEnum):
    ONE = 1


WHOLE = torch.arange(8.0).reshape(4, 2)


def described(tensor: torch.Tensor, at: int) -> torch.Tensor:
    chunk = ChunkStorageMetadata(torch.Size((at,)), tensor.size())
    tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    return tensor


@follows("tensors/dtensors.py:described_shards", "Correct its …, or save its parts as casckpt.Shard")
def test_a_tensor_with_a_wrong_description_can_be_corrected_or_saved_in_parts(store: Store, messages: Messages) -> None:
    with messages.error(InvalidInput) as advice:
        store.save({"w": described(torch.ones(2), at=2)}, run="a", step=1)
    advice.says("Correct its __create_chunk_list__")
    store.save({"w": described(torch.ones(2), at=0)}, run="a", step=1)
    assert torch.equal(store.read("a@1")["w"], torch.ones(2))
    advice.says("casckpt.Shard")
    store.save({"w": [casckpt.Shard(torch.ones(2), (4,), (at,)) for at in (0, 2)]}, run="a", step=2)
    assert torch.equal(store.read("a@2")["w"], torch.ones(4))


@follows("tensors/foreign.py:parts_of", "call its mark_as_sharded() first")
def test_a_flat_tensor_can_be_marked_as_sharded_as_advised(store: Store, messages: Messages) -> None:
    tensor: Any = flat(torch.ones(3), (3,), (0, 3), known=False)

    def mark_as_sharded() -> None:  # OLMo-core has this function, and the tests do not install OLMo-core
        tensor.metadata_set = True

    with messages.error(InvalidInput) as advice:
        store.save({"w": tensor}, run="a", step=1)
    advice.says("mark_as_sharded()")
    mark_as_sharded()
    store.save({"w": tensor}, run="a", step=1)
    assert torch.equal(store.read("a@1")["w"], torch.ones(3))


@follows("tensors/objects.py:_not_allowed", "pass allow_pickle=True if you trust its source")
def test_a_pickled_object_can_be_loaded_with_allow_pickle(store: Store, messages: Messages) -> None:
    store.save({"kind": Kind.ONE}, run="a", step=1, allow_pickle=True)
    with messages.error(InvalidInput) as advice:
        store.read("a@1")
    assert store.read("a@1", **advice.argument("allow_pickle")) == {"kind": Kind.ONE}


@follows("tensors/objects.py:", "store its get_state()")
def test_the_state_of_a_generator_can_be_stored_in_its_place(store: Store, messages: Messages) -> None:
    generator = torch.Generator().manual_seed(3)
    with messages.error(InvalidInput) as advice:
        store.save({"rng": deque([generator])}, run="a", step=1)
    advice.says("get_state()")
    store.save({"rng": [generator.get_state()]}, run="a", step=1)
    assert torch.equal(store.read("a@1")["rng"][0], generator.get_state())


@follows("tensors/shards.py:_problem", "for a load, call module.to_empty(device=...), tie its")
def test_a_meta_tensor_can_be_materialized_as_advised(store: Store, messages: Messages) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with messages.error(InvalidInput) as advice:
        store.save({"model": model.state_dict()}, run="a", step=1)
    advice.says("For a save, fill the module")
    filled = nn.Linear(2, 2)
    store.save({"model": filled.state_dict()}, run="a", step=1)
    with pytest.raises(InvalidInput):
        store.load({"model": model.state_dict()}, "a@1")
    advice.says("for a load, call module.to_empty(device=...)")
    model.to_empty(device="cpu")
    store.load({"model": model.state_dict()}, "a@1")
    assert torch.equal(model.weight, filled.weight)


@follows("tensors/shards.py:_problem", "store to_dense()")
def test_all_elements_of_a_tensor_with_an_unsupported_layout_can_be_stored(store: Store, messages: Messages) -> None:
    packed = torch.eye(3).to_mkldnn()
    with messages.error(InvalidInput) as advice:
        store.save({"w": packed}, run="a", step=1)
    advice.says("store to_dense()")
    store.save({"w": packed.to_dense()}, run="a", step=2)
    assert torch.equal(store.read("a@2")["w"], torch.eye(3))


@follows(
    "tensors/wrappers.py:_whole",
    "pass a flatten that returns plain values to casckpt.register_wrapper",
)
def test_a_registered_function_can_convert_a_context_to_plain_data(store: Store, messages: Messages) -> None:
    two: Any = scaled(1, 2, 4)
    two.options = torch.relu
    with messages.error(InvalidInput) as advice:
        store.save({"w": two}, run="a", step=1)
    advice.says("pass a flatten that returns plain values to casckpt.register_wrapper")
    inner = {"codes": two.codes, "scale": two.scale, "table": two.table}
    casckpt.register_wrapper(Scaled, flatten=lambda value: (inner, "relu"))
    try:
        store.save({"w": two}, run="a", step=1)
    finally:
        del KINDS["tests:Scaled"]
    assert torch.equal(store.read("a@1")["w"].tensors["codes"], two.codes)


@follows(
    "tensors/wrappers.py:_check_inner",
    "correct that method, or pass a flatten to casckpt.register_wrapper",
)
def test_a_method_that_lists_no_tensor_can_be_corrected_as_advised(store: Store, messages: Messages) -> None:
    wrapper: Any = scaled(1, 2, 4)
    wrapper.scale = 5
    with messages.error(InvalidInput) as advice:
        store.save({"w": wrapper}, run="a", step=1)
    advice.says("correct that method")
    wrapper.scale = torch.ones(2)
    store.save({"w": wrapper}, run="a", step=1)


@follows("loading/wrapped.py:has_wrapper", "Create it as it was created for the save; ignore_mismatched= leaves it")
def test_a_wrapper_can_be_created_as_it_was_for_the_save(store: Store, messages: Messages) -> None:
    store.save({"w": scaled(1, 2, 4), "b": torch.ones(1)}, run="a", step=1)
    template: Any = {"w": scaled(1, 2, 4, options=Options(Mode.EXACT)), "b": torch.zeros(1)}
    with messages.error(Mismatch) as advice:
        store.load(template, "a@1")
    advice.says("ignore_mismatched= leaves it unchanged")
    assert store.load(template, "a@1", ignore_mismatched="w").mismatched_keys == ("w",)
    advice.says("Create it as it was created for the save")
    store.load({"w": scaled(2, 2, 4), "b": torch.zeros(1)}, "a@1")


@follows("loading/load_plan.py:LoadPlan._add_container", "call dequantize() (sparse: to_dense()) on what store.read")
def test_the_values_of_a_wrapper_can_be_read_as_advised(store: Store, messages: Messages, tmp_path: Path) -> None:
    store.save({"model": {"a": {"w": torch.eye(3).to_sparse()}}}, run="a", step=1)
    with messages.error(Mismatch) as advice:
        store.load({"model": {"a": {"w": torch.zeros(3, 3)}}}, "a@1")
    advice.says("to_dense()) on what store.read returns")
    dense = store.read("a@1")["model"]["a"]["w"].to_dense()
    assert torch.equal(dense, torch.eye(3))
    store.save({"model": {"a": {"w": dense}}}, run="a", step=2)
    store.export("a@2", tmp_path / "hf", format="hf")


@follows("loading/wrapped.py:has_wrapper", "ignore_mismatched= leaves it unchanged")
def test_a_wrapper_that_was_saved_as_a_plain_tensor_can_be_left_unchanged(store: Store, messages: Messages) -> None:
    store.save({"w": torch.ones(2, 4), "b": torch.ones(1)}, run="a", step=1)
    template: Any = {"w": scaled(1, 2, 4), "b": torch.zeros(1)}
    with messages.error(Mismatch) as advice:
        store.load(template, "a@1")
    advice.says("ignore_mismatched= leaves it unchanged")
    assert store.load(template, "a@1", ignore_mismatched="w", unread="ignore").mismatched_keys == ("w",)


@follows("contents/contents.py:Contents.check_no_wrappers", "load it with store.load")
def test_a_store_can_load_a_checkpoint_with_wrappers_as_advised(
    store: Store, messages: Messages, tmp_path: Path
) -> None:
    store.save({"w": scaled(1, 2, 4)}, run="a", step=1)
    with messages.error(InvalidInput) as advice:
        store.export("a@1", tmp_path / "a.pt", format="torch")
    advice.says("load it with store.load")
    with messages.error(InvalidInput) as advice:
        store.export("a@1", tmp_path / "dcp", format="dcp")
    advice.says("load it with store.load")
    store.load({"w": scaled(2, 2, 4)}, "a@1")


@follows("tensors/wrappers.py:rebuilt", "pass a rebuild to casckpt.register_wrapper, or load it into an existing one")
def test_a_registered_function_can_rebuild_an_unknown_wrapper(messages: Messages) -> None:
    with messages.error(InvalidInput) as advice:
        rebuilt("w", {"kind": "a:B"}, {})
    advice.says("pass a rebuild to casckpt.register_wrapper")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@follows("tensors/shards.py:_problem", "a quantized tensor cannot be stored directly; store int_repr() with")
def test_the_integers_of_a_quantized_tensor_can_be_stored_as_advised(store: Store, messages: Messages) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.quint8)
    with messages.error(InvalidInput) as advice:
        store.save({"w": quantized}, run="a", step=1)
    advice.says("int_repr() with q_scale() and q_zero_point()")
    state = {"w": quantized.int_repr(), "scale": quantized.q_scale(), "zero": quantized.q_zero_point()}
    store.save(state, run="a", step=1)
    found = store.read("a@1")
    made = torch._make_per_tensor_quantized_tensor(found["w"], found["scale"], found["zero"])
    assert torch.equal(made.dequantize(), torch.arange(3.0))


def uneven(rank: int, size: int, path: str) -> str:
    mesh = init_device_mesh("cpu", (size, 1))
    mesh._shard_order = [1, 0]  # type: ignore[attr-defined] # as Megatron-FSDP sets it
    local = WHOLE[:3] if rank == 0 else WHOLE[3:]
    tensor = DTensor.from_local(
        local.clone(), mesh, [Shard(0), Shard(0)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )
    store = casckpt.open(path)
    advice = Advice(str(outcome_of(lambda: store.save({"w": tensor}, run="a", step=1))))
    module = advice.says("megatron_fsdp.uneven_dtensor")
    parent = advice.says("megatron.core.distributed.fsdp.src")
    preprocess = function_of(f"{parent}.{module}", advice.says("preprocess_state_dict_for_uneven_dtensor"))
    store.save(preprocess({"w": tensor}), run="a", step=1)
    return advice.message


def function_of(module: str, name: str) -> Any:
    """Return a function of a module, without the imports of its package, which take 5 seconds per rank."""
    place = Path(next(iter(find_spec("megatron").submodule_search_locations or ()))).parent  # type: ignore[union-attr]
    path = place.joinpath(*module.split(".")).with_suffix(".py")
    package = ModuleType("alone")
    package.__path__ = []
    utils = ModuleType("alone.utils")
    utils.get_mesh_names = None  # type: ignore[attr-defined]
    sys.modules |= {"alone": package, "alone.utils": utils}
    spec = spec_from_file_location("alone.module", path)
    assert spec is not None
    made = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(made)
    return getattr(made, name)


@follows("tensors/dtensors.py:_mesh_order", "call preprocess_state_dict_for_uneven_dtensor")
def test_a_dtensor_of_megatron_fsdp_can_be_saved_after_preprocessing(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    for message in ranks.run(2, uneven, str(store_path)):
        messages.text(message).says("on the state first")
    assert torch.equal(casckpt.open(store_path).read("a@1")["w"], WHOLE)


class Float8(torch.Tensor):
    """A weight as TransformerEngine holds it: codes and a scale, without ``__tensor_flatten__``."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return float8(args[0].codes, args[0].scale)
        raise NotImplementedError(str(func))


def float8(codes: torch.Tensor, scale: torch.Tensor) -> Any:
    made: Any = torch.Tensor._make_wrapper_subclass(Float8, codes.shape, dtype=torch.bfloat16)
    made.codes, made.scale = codes, scale
    return made


@follows(
    "tensors/shards.py:_problem",
    "store the tensors that it wraps, or pass a flatten for its class to casckpt.register_wrapper",
)
def test_a_class_without_tensor_flatten_can_be_stored_with_a_registered_function(
    store: Store, messages: Messages
) -> None:
    saved = torch.nn.Parameter(float8(torch.arange(8, dtype=torch.uint8), torch.tensor([0.5])), requires_grad=False)
    with messages.error(InvalidInput) as advice:
        store.save({"w": saved}, run="a", step=1)
    advice.says("pass a flatten for its class to casckpt.register_wrapper")
    casckpt.register_wrapper(Float8, flatten=lambda w: ({"codes": w.codes, "scale": w.scale}, {"format": "E4M3"}))
    try:
        store.save_async({"w": saved}, run="a", step=1).result()
        other = float8(torch.zeros(8, dtype=torch.uint8), torch.zeros(1))
        store.load({"w": other}, "a@1")
    finally:
        del KINDS["tests:Float8"]
    assert torch.equal(other.codes, torch.arange(8, dtype=torch.uint8))
    assert other.scale.item() == 0.5


@follows("store/reading.py:read", "omit mapped=True, or omit the device")
def test_a_memory_mapped_read_is_rejected_for_other_devices(tmp_path: Path, messages: Messages) -> None:
    store = casckpt.open(tmp_path / "mapped")
    store.save({"w": torch.ones(3)}, step=1)
    with messages.error(InvalidInput) as advice:
        store.read("latest", mapped=True, device="meta")
    advice.says("omit mapped=True, or omit the device")
    assert store.read("latest", device="meta")["w"].is_meta
    assert torch.equal(store.read("latest", mapped=True)["w"], torch.ones(3))
