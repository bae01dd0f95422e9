"""Small models and their training, and exact comparisons of their states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.support.exact import same

Params = Iterable[Any]
Factory = Callable[[Params], Optimizer]


class Network(nn.Module):
    """A model with weights, buffers (one of which is not saved) and a frozen layer."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.frozen = nn.Linear(6, 5).requires_grad_(False)
            self.norm = nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 3, bias=False)
        self.register_buffer("scratch", torch.full((4,), float(seed)), persistent=False)
        self.register_buffer("counts", torch.arange(seed, seed + 3))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.norm(self.frozen(x))))
        return found


class Words(nn.Module):
    """A model whose rows have sparse gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.rows = nn.Embedding(9, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows that the input selects."""
        found: torch.Tensor = self.rows((x.abs() * 8).long().clamp(max=8))
        return found


def train(model: nn.Module, optim: Optimizer, steps: range) -> None:
    """Train with distinct inputs: the same steps on the same state yield the same bits."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).to(dtype)

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optim.zero_grad()
            value: torch.Tensor = model(x).square().sum()
            value.backward()  # type: ignore[no-untyped-call]  # torch's own
            return value

        optim.step(loss)  # type: ignore[arg-type]  # LBFGS takes a closure


def identical(one: Any, other: Any) -> bool:
    """Report whether two values agree in type, order, dtype, device and bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        return alike and bytes_of(one) == bytes_of(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(identical(a, b) for a, b in zip(one, other, strict=True))
    return same(one, other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes in memory order."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(model: nn.Module, optim: Optimizer | None = None) -> Any:
    """Return a deep copy of a model and an optimizer, with gradients and random state."""
    modules = {name: module.training for name, module in model.named_modules()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    found = [modules, gradients, tensors, torch.get_rng_state()]
    if optim is not None:
        found += [
            list(optim.state.values()),
            [group | {"params": len(group["params"])} for group in optim.param_groups],
        ]
    return copy.deepcopy(found)


def made(seed: int = 0) -> tuple[Network, optim.AdamW]:
    model = Network(seed)
    return model, optim.AdamW(model.parameters(), lr=0.01)


def trained(seed: int = 0) -> tuple[Network, optim.AdamW]:
    """Return the same model and optimizer after two steps."""
    model, optimizer = made(seed)
    train(model, optimizer, range(2))
    return model, optimizer


def contents(model: nn.Module, optimizer: optim.Optimizer) -> Any:
    """Return a copy of everything that a save of the model and the optimizer stores."""
    state = optimizer.state_dict()
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    return copy.deepcopy([dict(model.state_dict()), state["state"], groups])


class WithProjector(torch.optim.SGD):
    """An optimizer whose first step creates state that is not plain data."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = object()


class Refusing(optim.AdamW):
    """An optimizer that refuses to take a step."""

    def step(self, closure: Any = None) -> NoReturn:
        raise AssertionError("a step was taken")
