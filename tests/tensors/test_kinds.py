"""torchao's weights are saved in the background and loaded with the same bytes, and compute the same outputs.

These kinds run on CPUs: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, NF4Tensor, NVFP4Tensor, MXTensor (compared
by its values, because its linear is refused here) and Int8QuantizedTrainingLinearWeight. The kinds that need a GPU
(Int4Tensor, Int4PlainInt32Tensor) are stand-ins: their constructors only wrap tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import casckpt
from casckpt.errors import Mismatch, Refused
from casckpt.format.forms import decode_form, encode_form
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.tensors.wrappers import Wrapped, opened, rebuilt
from tests.support.ranks import Pool, die
from tests.support.saves import small
from tests.support.wrappers import bits, check_rebuilt

pytest.importorskip("torchao", reason="needs torchao")
pytestmark = pytest.mark.filterwarnings("ignore")


def of_torchao(module: str, name: str) -> Any:
    return getattr(import_module(f"torchao.{module}"), name)


def by_config(name: str) -> Callable[[torch.Tensor], Any]:
    def make(values: torch.Tensor) -> Any:
        linear: Any = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)
        linear.weight.data.copy_(values)
        of_torchao("quantization", "quantize_")(linear, of_torchao("quantization", name)())
        return linear.weight

    return make


def mx(dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    return lambda values: of_torchao("prototype.mx_formats.mx_tensor", "MXTensor").to_mx(values, dtype, 32)


def int4(values: torch.Tensor) -> Any:
    packed = torch.randint(
        0, 127, (64, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(int(values.sum()))
    )
    scale = values[:, :4].t().contiguous()
    return of_torchao("quantization", "Int4Tensor")(packed, scale, scale.clone(), [1, 32], torch.Size([64, 128]))


def trained(values: torch.Tensor) -> Any:
    kind = of_torchao("prototype.quantized_training.int8", "Int8QuantizedTrainingLinearWeight")
    return nn.Parameter(kind.from_float(values))


MAKE: dict[str, Callable[[torch.Tensor], Any]] = {
    "Float8 weight only": by_config("Float8WeightOnlyConfig"),
    "Int8 weight only": by_config("Int8WeightOnlyConfig"),
    "Int8 dynamic": by_config("Int8DynamicActivationInt8WeightConfig"),
    "Intx": by_config("IntxWeightOnlyConfig"),
    "Intx dynamic": by_config("Int8DynamicActivationIntxWeightConfig"),
    "NF4": lambda values: of_torchao("quantization.quantize_.workflows.nf4.nf4_tensor", "to_nf4")(values, 64, 64),
    "NVFP4": lambda values: of_torchao("prototype.mx_formats.nvfp4_tensor", "NVFP4Tensor").to_nvfp4(values),
    "MX fp8": mx(torch.float8_e4m3fn),
    "MX fp4": mx(torch.float4_e2m1fn_x2),
    "MX transposed": lambda values: mx(torch.float4_e2m1fn_x2)(values).t(),
    "Int8 training": trained,
    "Int4 (stand-in)": int4,
}
NOT_REBUILT = ("Int8 training",)


def make(name: str, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return MAKE[name](torch.randn(64, 128, dtype=torch.bfloat16, generator=draw))


def forward(name: str, weight: Any) -> torch.Tensor:
    x = torch.randn(32, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(5))
    if name.startswith("MX"):
        return torch.as_tensor(weight.dequantize())
    values: torch.Tensor = weight.scale if "stand-in" in name else nn.functional.linear(x, weight).detach()
    return values


@pytest.mark.parametrize("name", MAKE)
def test_every_kind_of_weight_is_saved_in_the_background_and_loaded(name: str) -> None:
    store, saved = small(), make(name, 1)
    model = nn.ParameterDict({"w": nn.Parameter(saved, requires_grad=False), "b": nn.Parameter(torch.ones(3))})
    expected, values = bits(saved), forward(name, saved)
    save_model_and_optim_state(store, model, run="r", step=1)
    with casckpt.Checkpointer(store, run="loop") as checkpointer:
        checkpointer.save(1, model)
        other = nn.ParameterDict(
            {"w": nn.Parameter(make(name, 2), requires_grad=False), "b": nn.Parameter(torch.zeros(3))}
        )
        assert bits(other["w"]) != expected
    with casckpt.Checkpointer(store, run="loop") as checkpointer:
        assert checkpointer.resume(other) is not None
    assert bits(other["w"]) == expected
    assert torch.equal(forward(name, other["w"]), values)
    assert store.save({"model": other.state_dict()}, run="r", step=2).commit.committed.bytes_written == 0
    read = store.read("r@1", keys="model.w")["model"]["w"]
    if name in NOT_REBUILT:
        assert isinstance(read, Wrapped)
    else:
        assert type(read) is type(saved)
        assert bits(read) == expected
        assert torch.equal(forward(name, read), values)


OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def stepped(kind: str, seed: int, steps: range) -> tuple[nn.Linear, Any]:
    """Return a model and an optimizer of torchao after some steps."""
    torch.manual_seed(seed)
    model = nn.Linear(64, 128)
    optimizer = of_torchao("optim", kind)(model.parameters(), lr=0.01)
    take(model, optimizer, steps)
    return model, optimizer


def take(model: nn.Linear, optimizer: Any, steps: range) -> None:
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # it would compile for a minute
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((2, 64), step + 1.0)).square().mean().backward()
            optimizer.step()


def killed(rank: int, size: int, path: Path) -> None:
    """Save all kinds and optimizers in the background. Die while the next save runs."""
    store = casckpt.open(path)
    weights: Any = nn.ParameterList(nn.Parameter(make(name, 1), requires_grad=False) for name in MAKE)
    with casckpt.Checkpointer(store, run="weights") as checkpointer:
        checkpointer.save_async(1, weights)
    for kind in OPTIMIZERS:
        with casckpt.Checkpointer(store, run=kind) as checkpointer:
            checkpointer.save_async(1, *stepped(kind, 1, range(3)))
    store.save_async({"w": make("NF4", 3)}, run="weights", step=2)
    die()


def test_all_kinds_and_optimizers_of_a_killed_process_are_resumed(tmp_path: Path, ranks: Pool) -> None:
    (outcome,) = ranks.outcomes(1, killed, tmp_path)
    assert outcome.died
    store = casckpt.open(tmp_path)
    weights: Any = nn.ParameterList(nn.Parameter(make(name, 2), requires_grad=False) for name in MAKE)
    casckpt.load_model_and_optim_state(store, "weights@1", weights)
    for name, weight in zip(MAKE, weights, strict=True):
        expected = make(name, 1)
        assert bits(weight) == bits(expected)
        assert torch.equal(forward(name, weight), forward(name, expected))
    for kind in OPTIMIZERS:
        expected, resumed = stepped(kind, 1, range(3)), stepped(kind, 2, range(1))
        with casckpt.Checkpointer(store, run=kind) as checkpointer:
            assert checkpointer.resume(*resumed) is not None
        for pair in (expected, resumed):
            take(*pair, range(3, 5))
        for one, two in zip(expected[0].parameters(), resumed[0].parameters(), strict=True):
            assert torch.equal(one, two)


def test_a_different_kernel_or_kind_is_refused_and_nothing_changes() -> None:
    store = small()
    store.save({"w": make("Int8 weight only", 1)}, run="r", step=1)
    for name in ("Int8 dynamic", "Float8 weight only"):
        template = {"w": make(name, 2)}
        before = bits(template["w"])
        with pytest.raises(Mismatch, match="context.act_quant_kwargs" if name == "Int8 dynamic" else "kind is"):
            store.load(template, "r@1")
        assert bits(template["w"]) == before


def test_a_trainable_weight_has_the_same_next_step_after_a_load() -> None:
    store, steps = small(), []
    model = nn.ParameterDict({"w": trained(torch.randn(64, 128))})
    other = nn.ParameterDict({"w": trained(torch.randn(64, 128))})
    save_model_and_optim_state(store, model, run="r", step=1)
    load_model_and_optim_state(store, "r@1", other)
    for one in (model, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        torch.manual_seed(3)  # rounds stochastically
        x = torch.randn(4, 128)
        nn.functional.linear(x, one["w"]).square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps.append(bits(one["w"]))
    assert steps[0] == steps[1]


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a class": lambda form: form["context"].update(act_quant_kwargs={"_type": "Popen", "_data": {"args": "ls"}}),
    "a dtype": lambda form: form["context"].update(dtype={"_type": "torch.dtype", "_data": "hub"}),
    "an enum": lambda form: form["context"].update(act_quant_kwargs={"_type": "MappingType", "_data": "__class__"}),
    "a field": lambda form: form["context"].update(more=1),
    "no context": lambda form: form.pop("context"),
    "a shape": lambda form: form.update(shape=[2**62, 2**62]),
    "a negative shape": lambda form: form.update(shape=[-1]),
    "no shape": lambda form: form.update(shape="all"),
    "a different shape": lambda form: form.update(shape=[1, 1]),
    "an unknown dtype": lambda form: form.update(dtype="hub"),
    "a nested list": lambda form: form["context"].update(block_size=[[{"_type": "os", "_data": {}}]]),
    "strides": lambda form: form.update(strides={"qdata": [5, 7]}),
    "strange strides": lambda form: form.update(strides=[1]),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_contexts_are_refused(change: str) -> None:
    found = opened("w", make("Int8 weight only", 1))
    assert found is not None
    form = decode_form(encode_form(found.form))
    HOSTILE[change](form)
    with pytest.raises((Refused, casckpt.errors.InvalidInput)):
        rebuilt("w", form, dict(found.parts))


@pytest.mark.parametrize(
    "name", ["Int8 dynamic", "Float8 weight only", "NF4", "MX fp8", "OptimState8bit", "OptimState4bit"]
)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_wrappers_with_changed_forms_or_tensors_are_rebuilt_as_described_or_refused(
    name: str, draw: st.DataObject
) -> None:
    if name.startswith("Optim"):
        weight = of_torchao(f"optim.subclass_{name[-4:]}", name).zeros((64, 128))
    else:
        weight = make(name, 1)
    found = opened("w", weight)
    assert found is not None
    check_rebuilt(found, draw)


def test_hostile_optimizer_states_and_nf4_are_refused() -> None:
    state = opened("w", of_torchao("optim.subclass_8bit", "OptimState8bit").zeros((64, 128)))
    nf4 = opened("w", make("NF4", 1))
    assert state is not None and nf4 is not None  # noqa: PT018
    for form, parts in (
        (state.form, {**state.parts, "qmap": torch.zeros(2)}),
        (state.form, {"codes": state.parts["codes"]}),
        ({**state.form, "cut": {"codes": 1, "scale": 1, "qmap": 0}}, state.parts),
        ({**state.form, "shape": [8]}, state.parts),
        ({**nf4.form, "context": {**nf4.form["context"], "block_size": 0}}, nf4.parts),
        ({**nf4.form, "context": {**nf4.form["context"], "n_blocks": "x"}}, nf4.parts),
        (nf4.form, {**nf4.parts, "nf4": torch.zeros(2)}),
    ):
        with pytest.raises(Refused, match="'w': the form of a stored"):
            rebuilt("w", form, parts)
