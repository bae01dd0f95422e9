"""Tensors of every dtype and layout, their bytes, computed in a slow and independent way, and what autograd notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from casckpt.format.dtypes import DTYPES

NAMES = [name for name in DTYPES if hasattr(torch, name)]
"""The storable dtypes that the installed torch has."""
COMPLEX = [name for name in NAMES if name.startswith("complex")]


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def raw(name: str, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """Return a contiguous tensor of random bytes, which include all kinds of NaN."""
    dtype = dtype_of(name)
    count = 1
    for extent in shape:
        count *= extent
    data = bytearray(random.Random(f"{seed}{name}{shape}").randbytes(count * dtype.itemsize))
    if name == "bool":
        data = bytearray(byte & 1 for byte in data)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in row-major order, gathered by strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    size, count = tensor.element_size(), tensor.numel()
    if not count:
        return b""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    strides = [stride * size for stride in tensor.stride()]
    gathered = storage.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size)
    return gathered.contiguous().view(-1).numpy().tobytes()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Report whether dtype, shape and every bit agree."""
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def _view(name: str, seed: int) -> torch.Tensor:
    return raw(name, (6, 10), seed)[1:5, 2:9:3]


LAYOUTS: dict[str, Callable[[str, int], torch.Tensor]] = {
    "scalar": lambda name, seed: raw(name, (), seed),
    "empty": lambda name, seed: raw(name, (3, 0, 2), seed),
    "contiguous": lambda name, seed: raw(name, (5, 7), seed),
    "one": lambda name, seed: raw(name, (1, 1, 1), seed),
    "strided": _view,
    "transposed": lambda name, seed: raw(name, (3, 4, 5), seed).permute(2, 0, 1),
    "expanded": lambda name, seed: raw(name, (4, 1), seed).expand(4, 6),
    "expanded scalar": lambda name, seed: raw(name, (), seed).expand(2, 3),
    "overlapping": lambda name, seed: raw(name, (12,), seed).as_strided((5, 4), (2, 1)),
    "tail": lambda name, seed: raw(name, (100,), seed)[37:],
}
"""Functions from a dtype and a seed to a tensor, one for every memory layout that elements can have."""


def conjugated(name: str) -> dict[str, torch.Tensor]:
    """Return views with a conjugate or negative bit. They contain no NaN, because the sign of NaN is undefined."""
    numbers = torch.arange(48, dtype=torch.float32).view(4, 6, 2) - 20
    data = torch.view_as_complex(numbers).to(dtype_of(name))
    return {
        "conj": data.conj(),
        "conj transposed": data.conj().t(),
        "conj of a part": data[1:, ::2].conj(),
        "neg": data.conj().imag,
        "neg transposed": data.conj().imag.t(),
        "imag": data.imag,
        "real": data.real.t(),
    }


def wrong(problem: str) -> Any:
    """Return a tensor that does not have its own bytes."""
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "meta": lambda: torch.empty(3, device="meta"),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "sparse_csr": lambda: torch.sparse_csr_tensor(
            torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1.0]), (1, 1)
        ),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }
    return makers[problem]()


WRONG = ["meta", "sparse", "sparse_csr", "quantized", "nested", "nested jagged"]


def is_noticed(tensor: torch.Tensor, load: Callable[[], Any]) -> bool:
    """Report whether autograd rejects a backward pass through values that were computed before ``load``."""
    weight = torch.ones_like(tensor, requires_grad=True)
    result = (weight * tensor).sum()
    load()
    try:
        result.backward()  # type: ignore[no-untyped-call]  # torch's own
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False
