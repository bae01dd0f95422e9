"""The types of torch that are plain data: dtype, Size and device."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from casckpt.errors import Refused
from casckpt.format.plain import Extension
from casckpt.format.plain_codecs import Unfit

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in _DTYPES:
        raise Refused(f"this torch ({torch.__version__}) has no dtype {name!r:.40}")
    return _DTYPES[name]


def _size(numbers: Any) -> torch.Size:
    if type(numbers) is not tuple or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise Refused("a torch.Size is not made of sizes")
    return torch.Size(numbers)


def _device(payload: Any) -> torch.device:
    if type(payload) is not tuple or len(payload) != 2 or type(payload[0]) is not str:
        raise Refused("a torch.device is not one")
    kind, number = payload
    if number is not None and (type(number) is not int or not 0 <= number < 128):
        raise Refused("a torch.device has a number that none has")
    try:
        return torch.device(kind if number is None else f"{kind}:{number}")
    except RuntimeError as error:
        raise Refused(f"this torch ({torch.__version__}) has no device {kind[:40]!r}") from error


def _refusing(kind: type, what: str, hint: str) -> Extension:
    """Make an extension that refuses a type, with a hint."""

    def to_plain(value: Any) -> NoReturn:
        raise Unfit(what, hint)

    def from_plain(payload: Any) -> NoReturn:
        raise Refused(f"{what} is never stored as plain data")

    return Extension(f"torch.{kind.__name__}", kind, to_plain, from_plain)


_HOLDERS = "tensors may stand in dicts, lists and tuples only: move it into one"

TORCH_EXTENSIONS: tuple[Extension, ...] = (
    Extension("torch.dtype", torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _dtype),
    Extension("torch.Size", torch.Size, lambda size: tuple(int(n) for n in size), _size),
    Extension("torch.device", torch.device, lambda device: (device.type, device.index), _device),
    _refusing(torch.Generator, "a torch.Generator", "store its get_state()"),
    _refusing(torch.Tensor, "a tensor", _HOLDERS),
    _refusing(torch.nn.Parameter, "a parameter", _HOLDERS),
)
"""For `casckpt.format.plain.encode` and `decode`."""
