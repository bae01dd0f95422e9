"""Small models that train under every kind of parallelism, and their states as torch gathers them.

`TOPOLOGIES` lists them by name: (ranks, wrap). A job of `tests.support.ranks` calls `trained` with one of them.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from casckpt.frontends.training_state.names import plain_name
from tests.support.training import identical

Wrap: TypeAlias = Callable[["Stack"], nn.Module]
Factory: TypeAlias = Callable[[Iterable[Any]], Optimizer]

CPU = torch.device("cpu")


class Stack(nn.Module):
    """Odd-sized layers with values drawn from ``seed``.

    They include a frozen layer, tied weights, buffers, and a weight that has fewer elements than there are ranks.
    """

    def __init__(self, seed: int, shape_seed: int | None = None) -> None:
        super().__init__()
        sizes = random.Random(seed if shape_seed is None else shape_seed)
        wide, narrow = 4 * sizes.randint(1, 4), sizes.randint(2, 9)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.up = nn.Sequential(nn.Linear(6, wide), nn.Tanh())
            self.down = nn.Linear(wide, narrow, bias=sizes.random() < 0.7)
            self.frozen = nn.Linear(narrow, narrow).requires_grad_(False)
            self.norm = nn.LayerNorm(narrow)
            self.scale = nn.Parameter(torch.rand(sizes.randint(1, 3)))
            self.tied = nn.ModuleList([nn.Linear(narrow, narrow, bias=False) for _ in range(2)])
        self.tied[1].weight = self.tied[0].weight
        self.register_buffer("counts", torch.arange(seed % 100, seed % 100 + sizes.randint(1, 5)))
        self.register_buffer("mean", torch.full((narrow,), float(seed % 100)))
        self.register_buffer("scratch", torch.full((2,), float(seed % 100)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.down(self.up(x))))
        found: torch.Tensor = self.tied[1](torch.tanh(self.tied[0](x))) * self.scale.sum()
        return found


# wraps


def plain(model: Stack) -> nn.Module:
    """Return the model as it is, for one rank or for the same model on several ranks."""
    return model


def ddp(model: Stack) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Apply fully_shard to each layer, with the rest in the root."""
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.get_submodule("up"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hsdp(model: Stack) -> nn.Module:
    """Shard the model over two ranks, twice."""
    return fsdp2(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def by_columns(model: Stack) -> nn.Module:
    """Apply fully_shard along the second dimension where its size is even."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % 2 == 0 else None

    return sharded(model, shard_placement_fn=placement)


def tp(model: Stack, mesh: Any = None) -> nn.Module:
    """Make two layers tensor-parallel. The other parameters are plain."""
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up.0": ColwiseParallel(), "down": RowwiseParallel()})


def tp_fsdp2(model: Stack) -> nn.Module:
    """Make two layers tensor-parallel, and apply FSDP2, which results in strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fsdp2(tp(model, mesh["tensor"]), mesh["data"])


@dataclass(frozen=True)
class Fsdp1:
    """FullyShardedDataParallel around a layer and around the rest. ``nested``: the root is plain. ``hybrid``: 2 x 2."""

    strategy: str = "FULL_SHARD"
    nested: bool = False
    mixed: bool = False

    def __call__(self, model: nn.Module) -> nn.Module:
        model.up = self._wrap(model.get_submodule("up"))
        if not self.nested:
            return self._wrap(model)
        model.down = self._wrap(model.get_submodule("down"))
        model.norm = self._wrap(model.get_submodule("norm"))
        return model

    def _wrap(self, module: nn.Module) -> nn.Module:
        lower = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        options: dict[str, Any] = {"mixed_precision": lower} if self.mixed else {}
        if "HYBRID" in self.strategy:
            options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about NO_SHARD, which is deprecated
            return FullyShardedDataParallel(
                module,
                sharding_strategy=ShardingStrategy[self.strategy],
                use_orig_params=True,
                device_id=CPU,
                **options,
            )


TOPOLOGIES: dict[str, tuple[int, Wrap]] = {
    "plain": (1, plain),
    "ddp": (3, ddp),
    "fsdp2 on 2": (2, fsdp2),
    "fsdp2 on 3": (3, fsdp2),
    "fsdp2 on 4": (4, fsdp2),
    "fsdp2 by columns": (2, by_columns),
    "hsdp": (4, hsdp),
    "tp": (2, tp),
    "tp on 4": (4, tp),
    "tp + fsdp2": (4, tp_fsdp2),
    "fsdp1": (4, Fsdp1()),
    "fsdp1 on 3": (3, Fsdp1()),
    "fsdp1 nested": (2, Fsdp1(nested=True)),
    "fsdp1 SHARD_GRAD_OP": (2, Fsdp1("SHARD_GRAD_OP")),
    "fsdp1 HYBRID_SHARD": (4, Fsdp1("HYBRID_SHARD")),
    "fsdp1 NO_SHARD": (2, Fsdp1("NO_SHARD")),
    "fsdp1 mixed precision": (2, Fsdp1(mixed=True)),
}


def adamw(parameters: Iterable[Any]) -> Optimizer:
    """Return AdamW with large steps, which make small differences visible."""
    return optim.AdamW(parameters, lr=0.05)


def build(
    topology: str, seed: int, factory: Factory = adamw, *, shape_seed: int | None = None
) -> tuple[nn.Module, Optimizer]:
    """Return a model under a topology, and an optimizer for it."""
    model = TOPOLOGIES[topology][1](Stack(seed, shape_seed))
    return model, factory(model.parameters())


def step(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Train some steps with distinct inputs, which are the same on all ranks."""
    for number in steps:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        value = model(x).float().square().sum()
        value.backward()
        optimizer.step()


def by_gradients(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Train some steps without a forward pass."""
    for number in steps:
        for parameter in model.parameters():
            if parameter.numel():  # FSDP does not set gradients for parameters on other ranks
                parameter.grad = (parameter * (number + 2)).detach() + 1
        optimizer.step()


# wrappers for any module


def as_it_is(module: nn.Module) -> nn.Module:
    """Return the module without a wrapper."""
    return module


def sharded(module: nn.Module, **options: Any) -> nn.Module:
    """Apply fully_shard, with a known return type."""
    found: Any = fully_shard(module, **options)
    assert isinstance(found, nn.Module)
    return found


def offloaded(module: nn.Module) -> nn.Module:
    """Apply fully_shard with parameters on the CPU."""
    return sharded(module, offload_policy=CPUOffloadPolicy(pin_memory=False))


def joined(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap the module in FullyShardedDataParallel."""
    options = {"use_orig_params": True, "device_id": CPU, **options}
    return FullyShardedDataParallel(module, **options)


def compiled(module: nn.Module) -> nn.Module:
    """Compile the module at its first call."""
    found: Any = torch.compile(module, backend="eager")
    assert isinstance(found, nn.Module)
    return found


class Blocks(nn.Module):
    def __init__(self, seed: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = wrap(nn.Sequential(nn.Linear(6, 5), nn.Tanh()))
            self.second = wrap(nn.Sequential(nn.Linear(5, 3), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


# states as torch describes them


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@dataclass(frozen=True)
class Everything:
    """Whole tensors of the model by plain name, and of the optimizer by name and kind, with its groups."""

    model: dict[str, torch.Tensor]
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]] = field(default_factory=list)

    def differences(self, other: Everything) -> list[str]:
        """Return the values that differ in any bit."""
        found = [
            f"{what}.{name}"
            for what, one, two in (("model", self.model, other.model), ("state", self.state, other.state))
            for name in {**one, **two}
            if not identical(one.get(name), two.get(name))
        ]
        return found + ([] if identical(self.groups, other.groups) else [f"{self.groups} != {other.groups}"])


def everything(model: nn.Module, optimizer: Optimizer) -> Everything:
    """Return everything, as torch gathers it. Every rank must call this.

    Buffers are the ones of this rank, in their original precision.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = {plain_name(model, key): buffer.detach().clone() for key, buffer in _kept_buffers(model)}
        names = {id(p): plain_name(model, key) for key, p in model.named_parameters()}
        state = {names[id(p)]: values for p, values in optimizer.state.items()}
        groups = [
            dict(sorted({**group, "params": [names[id(p)] for p in group["params"]]}.items()))
            for group in optimizer.param_groups
        ]
        held = _by_name_everywhere(state)
        values = {(name, what): value for name, kept in held.items() for what, value in kept.items()}
        parameters = {(plain_name(model, key), ""): p for key, p in model.named_parameters(remove_duplicate=False)}
        whole = _whole(values | parameters, _flat_shapes(model))
        tensors |= {name: whole[name, what] for name, what in parameters}
        found = {name: {what: whole[name, what] for what in kept} for name, kept in held.items()}
    return Everything(dict(sorted(tensors.items())), dict(sorted(found.items())), groups)


def _kept_buffers(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    kept = [(key, buffer) for key, buffer in model.named_buffers() if not key.endswith("scratch")]
    return [(key, buffer.float() if buffer.dtype == torch.bfloat16 else buffer) for key, buffer in kept]


def _by_name_everywhere(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the states of all parameters of all ranks.

    FSDP keeps a state only on ranks that have elements of the parameter.
    """
    if dist.get_world_size() == 1:
        return state
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, {name: list(values) for name, values in state.items()})
    merged: dict[str, list[str]] = {}
    for one in keys:
        merged |= one
    return {name: state.get(name, dict.fromkeys(merged[name])) for name in sorted(merged)}


def _flat_shapes(model: nn.Module) -> dict[str, Sequence[int]]:
    """Return the shapes of the parameters that FSDP splits. Their parts are in rank order."""
    found: dict[str, Sequence[int]] = {}
    for path, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if isinstance(module, FullyShardedDataParallel) and handle is not None and handle.uses_sharded_strategy:
            flat = handle.flat_param
            shapes = dict(zip(flat._fqns, flat._shapes, strict=True))
            for info in flat._shared_param_infos:
                first = f"{info.prim_module_name}.{info.prim_param_name}"
                shapes[f"{info.module_name}.{info.param_name}"] = shapes[first]
            found |= {plain_name(model, f"{path}.{own}" if path else own): tuple(shapes[own]) for own in shapes}
    return found


def _whole(values: dict[tuple[str, str], Any], flat_shapes: dict[str, Sequence[int]]) -> dict[tuple[str, str], Any]:
    """Return whole tensors by name and kind. The parts of FSDP's parameters are sent together."""
    mine = {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
        if key[0] in flat_shapes
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    if mine:
        dist.all_gather_object(everyones, mine)
    found = {}
    for key, value in values.items():
        if isinstance(value, DTensor):
            found[key] = value.full_tensor().detach().clone()
        elif key in mine:
            found[key] = _joined([one[key] for one in everyones], flat_shapes[key[0]])
        else:
            found[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return found


def _joined(parts: list[Any], shape: Sequence[int]) -> Any:
    held = [part for part in parts if part is not None]
    if not all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in held):
        return held[0]
    numel = torch.Size(shape).numel()
    return torch.cat(held)[:numel].view(tuple(shape))  # HYBRID_SHARD: the first replica
