"""A hand-made wrapper (int8 codes, one scale for each `BLOCK` elements, and a shared table), and hostile wrappers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Refused
from casckpt.format.forms import Form, encode_form
from casckpt.tensors.wrappers import Opened, opened, rebuilt

BLOCK = 4
calls: Counter[str] = Counter()
"""The operations that were called on wrappers."""


class Mode(Enum):
    """A choice in the context."""

    FAST = 1
    EXACT = 2


@dataclass(frozen=True)
class Options:
    """A part of the context."""

    mode: Mode = Mode.FAST
    blocks: tuple[int, ...] = (1, BLOCK)
    dtype: torch.dtype = torch.float16


class Scaled(torch.Tensor):
    """A wrapper of ``codes`` (with its own shape), ``scale`` and ``table``."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    options: Options

    @staticmethod
    def __new__(  # noqa: PLR0917 - like torchao's
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, options: Options, dtype: torch.dtype
    ) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        made.codes, made.scale, made.table, made.options = codes, scale, table, options
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], {"options": self.options, "device": self.codes.device}

    def dequantize(self) -> torch.Tensor:
        return (self.codes.view(-1, BLOCK) * self.scale.view(-1, 1)).view(self.codes.shape).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        calls[str(func)] += 1
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            one = args[0]
            return cls(one.codes, one.scale, one.table, one.options, one.dtype)
        raise NotImplementedError(str(func))


make: Callable[..., Scaled] = Scaled


def scaled(seed: int, *shape: int, options: Options | None = None, dtype: torch.dtype = torch.float32) -> Scaled:
    """Return a wrapper with random inner tensors. Its table is the same for all seeds."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-99, 99, shape, dtype=torch.int8, generator=draw)
    scale = torch.rand(codes.numel() // BLOCK, generator=draw)
    return make(codes, scale, torch.arange(3.0), options or Options(), dtype)


def part_of(whole: Scaled, rows: slice) -> Scaled:
    """Return a copy of some rows of a wrapper, as a rank would hold them."""
    codes = whole.codes[rows].clone()
    each = whole.codes[0].numel() // BLOCK
    scale = whole.scale.view(-1, each)[rows].reshape(-1).clone()
    return make(codes, scale, whole.table.clone(), whole.options, whole.dtype)


def rebuild(inner: Any, context: Any, shape: Any, dtype: torch.dtype) -> Scaled:
    """Return a wrapper. See `casckpt.register_wrapper`."""
    given = context["options"]["_data"]
    mode = Mode[given["mode"]["_data"]]
    return make(*(inner[name] for name in ("codes", "scale", "table")), Options(mode, tuple(given["blocks"])), dtype)


def bits(value: Any) -> list[bytes]:
    """Return the bytes of the inner tensors, in order."""
    names = value.__tensor_flatten__()[0]
    return [bytes(getattr(value, name).contiguous().reshape(-1).view(torch.uint8).tolist()) for name in names]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
TENSORS = st.sampled_from([
    torch.zeros(0), torch.zeros(()), torch.zeros(2, 2), torch.full((2,), 2**62), torch.tensor([-1, 7]),
    torch.zeros(3, dtype=torch.uint8), torch.ones(4, dtype=torch.bool), torch.zeros(1, dtype=torch.complex64),
])  # fmt: skip


def changed(form: Any, draw: st.DataObject) -> Any:
    """Return JSON in which one value at any depth was replaced, removed or added."""
    form = copy.deepcopy(form)
    at = form
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw.draw(st.sampled_from(keys)) if keys else None
        if key is not None and isinstance(at[key], dict | list) and draw.draw(st.booleans()):
            at = at[key]
            continue
        if key is not None and draw.draw(st.integers(0, 3)) == 0:
            del at[key]
        elif isinstance(at, dict):
            at[draw.draw(st.text(max_size=5)) if key is None else key] = draw.draw(VALUES)
        elif key is not None:
            at[key] = draw.draw(VALUES)
        return form


def check_rebuilt(found: Opened, draw: st.DataObject) -> None:
    """Change the form or an inner tensor. The result is either a wrapper with this form, or a refusal."""
    form: Form = changed(found.form, draw) if draw.draw(st.booleans()) else found.form
    parts = dict(found.parts)
    if draw.draw(st.booleans()):
        parts[draw.draw(st.sampled_from(sorted(parts)))] = draw.draw(TENSORS)
    try:
        made = rebuilt("w", form, parts)
    except (Refused, InvalidInput):  # nothing else may be raised
        return
    again = opened("w", made)
    assert again is not None
    assert encode_form(again.form) == encode_form(form)
