"""Tensors without memory of their own, or with shared memory, are refused everywhere, and errors name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.dcp import StorageReader, StorageWriter
from tests.support.dcp import causes, failure, load, save
from tests.support.saves import small


class Wrapped(torch.Tensor):
    """A wrapper of another tensor, like quantized weights, that reports ``device``."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor, device: str) -> Any:
        at = torch.device(device)
        found = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype, device=at)
        found.wrapped = wrapped
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        device = next(one.device.type for one in args if isinstance(one, cls))
        found = func(*(one.wrapped if isinstance(one, cls) else one for one in args), **(kwargs or {}))
        return cls(found, device) if isinstance(found, torch.Tensor) else found


class Beside(torch.Tensor):
    """A tensor with memory of its own, and separate scales."""

    scale: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["scale"], None


def beside(device: str) -> torch.Tensor:
    found = torch.ones(8).as_subclass(Beside)
    found.scale = torch.ones(1)
    return found


def freed(_: str) -> torch.Tensor:
    """Return a parameter that FSDP has freed: its address is computed from its offset, but there is no memory at this
    address."""
    whole = torch.ones(16)
    part = whole[8:]
    whole.untyped_storage().resize_(0)
    return part


MAKE: dict[str, Callable[[], torch.Tensor]] = {
    **{f"wrapped {device}": lambda device=device: Wrapped(torch.ones(8), device) for device in ("cpu", "cuda", "hpu")},  # type: ignore[misc]
    "wrapped meta": lambda: Wrapped(torch.ones(8), "meta"),
    "beside": lambda: beside(""),
    "freed": lambda: freed(""),
}


def two() -> torch.Tensor:
    made: torch.Tensor = TwoTensor(torch.ones(8), torch.zeros(8))  # type: ignore[no-untyped-call]
    return made


class Holder(nn.Module):
    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        for name in "ab":
            self.register_buffer(name, make())


def by_optimizer(store: casckpt.Store, make: Callable[[], torch.Tensor]) -> None:
    model = nn.Linear(8, 1, bias=False)
    optim = torch.optim.SGD(model.parameters(), momentum=0.9)
    optim.state[model.weight] = {"momentum_buffer": make()}
    casckpt.save_model_and_optim_state(store, model, optim, run="m", step=2)


CALLS: dict[str, Callable[[casckpt.Store, Callable[[], torch.Tensor]], object]] = {
    "save": lambda store, make: store.save({"a": make(), "b": make()}, run="a", step=2),
    "save_async": lambda store, make: store.save_async({"a": make(), "b": make()}, run="a", step=2).result(),
    "save a list": lambda store, make: store.save({"a": [make()]}, run="a", step=2),
    "save a Shard": lambda store, make: store.save({"a": casckpt.Shard(make(), (8,))}, run="a", step=2),
    "load": lambda store, make: store.load({"a": make(), "b": make()}, "a@1"),
    "update": lambda store, make: store.update({"a": make(), "b": make()}, "a@1", held=store.get("a@1")),
    "compare": lambda store, make: store.compare({"a": make(), "b": make()}, "a@1"),
    "save a model": lambda store, make: casckpt.save_model_and_optim_state(store, Holder(make), run="m", step=2),
    "load a model": lambda store, make: casckpt.load_model_and_optim_state(store, "m@1", Holder(make)),
    "save an optimizer": by_optimizer,
    "Checkpointer": lambda store, make: casckpt.Checkpointer(store, run="m").save(2, Holder(make)),
}


@pytest.fixture
def store() -> casckpt.Store:
    found = small()
    found.save({"a": torch.full((8,), 5.0), "b": torch.full((8,), 6.0)}, run="a", step=1)
    casckpt.save_model_and_optim_state(found, Holder(lambda: torch.ones(8)), run="m", step=1)
    return found


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_the_error_for_a_tensor_without_memory_names_it(
    store: casckpt.Store,
    call: Callable[[casckpt.Store, Callable[[], torch.Tensor]], object],
    make: Callable[[], torch.Tensor],
) -> None:
    before = [(one.run, one.step) for one in store.checkpoints()]
    with pytest.raises(InvalidInput, match=r"^'[\w.]*(a|weight\.momentum_buffer)(\.0)?': (a|an) ") as caught:
        call(store, make)
    assert caught.value.key is not None
    assert [(one.run, one.step) for one in store.checkpoints()] == before


@pytest.mark.parametrize("make", [MAKE["wrapped cpu"], two], ids=["wrapped", "of two"])
def test_dcp_rejects_a_tensor_without_memory(store: casckpt.Store, make: Callable[[], torch.Tensor]) -> None:
    calls = (
        lambda: save({"a": make()}, StorageWriter(store, run="d", step=1)),
        lambda: load({"a": make()}, StorageReader(store, "a@1")),
    )
    for call in calls:
        (cause,) = causes(failure(call)).values()
        assert isinstance(cause, InvalidInput)
        assert "'a'" in str(cause)


def test_state_without_memory_does_not_replace_a_parameter_without_memory(store: casckpt.Store) -> None:
    """Both tensors have the address 0. A load would replace tied tensors, but refuses these."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(8)), "none": nn.Parameter(torch.empty(0))})
    optim = torch.optim.SGD(model.parameters(), momentum=0.9)
    optim.state[model["w"]] = {"momentum_buffer": torch.ones(8)}
    casckpt.save_model_and_optim_state(store, model, optim, run="o", step=1)
    optim.state[model["w"]] = {"momentum_buffer": Wrapped(torch.ones(8), "cpu")}
    with pytest.raises(InvalidInput, match=r"'optim.state.w.momentum_buffer': a Wrapped has no memory"):
        casckpt.load_model_and_optim_state(store, "o@1", model, optim)


# ZeRO-3


def partitioned() -> nn.Module:
    """Return a model as DeepSpeed leaves it between passes."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = number, parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    return model


def test_a_model_of_placeholders_can_be_neither_saved_nor_loaded(store: casckpt.Store) -> None:
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    casckpt.save_model_and_optim_state(store, whole, run="z", step=1)
    model = partitioned()
    for call in (
        lambda: casckpt.save_model_and_optim_state(store, model, run="z", step=2),
        lambda: casckpt.Checkpointer(store, run="z").save(2, model),
        lambda: casckpt.load_model_and_optim_state(store, "z@1", model),
        lambda: casckpt.Checkpointer(store, run="z").load("z@1", model),
    ):
        with pytest.raises(InvalidInput, match=r"'model\.0\.weight'.*ZeRO-3 for a tensor of shape \[6, 6\]"):
            call()
    assert [one.step for one in store.checkpoints("z")] == [1]


def test_a_model_whose_parameters_were_gathered_is_saved(store: casckpt.Store) -> None:
    model = partitioned()
    for parameter in model.parameters():
        parameter.data = torch.ones(parameter.ds_shape)  # type: ignore[attr-defined]
    casckpt.save_model_and_optim_state(store, model, run="z", step=1)


@pytest.mark.parametrize(("empty", "warned"), [(1, False), (2, False), (3, True)])
def test_a_state_whose_tensors_are_mostly_empty_causes_one_warning(
    store: casckpt.Store, caplog: pytest.LogCaptureFixture, *, empty: int, warned: bool
) -> None:
    floats = [torch.empty(0)] * empty + [torch.ones(2)] * (4 - empty)
    store.save({"w": dict(enumerate(floats)), "ids": torch.ones(3, dtype=torch.int64)}, run="e", step=1)
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == warned
    assert all(f"{empty} of the 4 floating-point tensors of this state are empty" in line for line in lines)
