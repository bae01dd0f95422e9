"""Samples of tensors: a few runs of bytes of each. For CPU tensors there is no torch operation for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from casckpt.format.columns import Ints
from casckpt.tensors.memory import as_bits

RUN = 16
"""Bytes of a run: a whole number of elements of every dtype."""


def sampled(tensors: Sequence[torch.Tensor], starts: Ints, count: Ints, size: Ints) -> npt.NDArray[np.uint64]:
    """Read runs of each tensor, in its row-major order. Returns a row for each tensor, with 2 words for each run.

    ``starts``: the first element of each run, a column for each run. ``count``, ``size``: elements of each tensor, and
    bytes of an element. A tensor with too few elements repeats its last one. The words of an empty tensor are 0.
    """
    words = np.zeros((len(tensors), starts.shape[1] * 2), np.uint64)
    addresses = np.array([_address(data) for data in tensors], np.int64)
    here, is_long = (addresses != 0) & (count > 0), count * size >= RUN
    rows = np.flatnonzero(here & is_long)
    if len(rows):
        words[rows] = _at(addresses[rows, None] + (starts * size[:, None])[rows], RUN).view(np.uint64)
    rows = np.flatnonzero(here & ~is_long)
    if len(rows):
        byte, wide = np.tile(np.arange(RUN), starts.shape[1]), size[rows, None]
        element = np.minimum(byte // wide, count[rows, None] - 1)
        words[rows] = _at(addresses[rows, None] + element * wide + byte % wide, 1).view(np.uint64)
    others: list[int] = np.flatnonzero(~here & (count > 0)).tolist()
    for device in {tensors[row].device for row in others}:
        chosen = [row for row in others if tensors[row].device == device]
        wanted = [
            np.minimum(starts[row][:, None] + np.arange(RUN // size[row]), count[row] - 1).ravel() for row in chosen
        ]
        places = torch.split(torch.from_numpy(np.concatenate(wanted)).to(device), list(map(len, wanted)))
        runs = [_bits(tensors[row]).take(at).view(torch.uint8) for row, at in zip(chosen, places, strict=True)]
        words[chosen] = torch.cat(runs).cpu().numpy().view(np.uint64).reshape(len(chosen), -1)
    return words


def _bits(data: torch.Tensor) -> torch.Tensor:
    return as_bits(data.detach().resolve_conj().resolve_neg())


def _address(data: torch.Tensor) -> int:
    """Return the address of its bytes if they are contiguous in host memory, else 0."""
    plain = data.is_cpu and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    return data.data_ptr() if plain else 0


class _HostMemory:
    """Host memory at an address, as an array of overlapping items of ``width`` bytes: one begins at every byte."""

    def __init__(self, first: int, count: int, width: int) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{width}", "shape": (count,), "strides": (1,), "data": (first, True),
        }  # fmt: skip


def _at(addresses: Ints, width: int) -> npt.NDArray[Any]:
    first = int(addresses.min())
    return np.asarray(_HostMemory(first, int(addresses.max()) - first + 1, width))[addresses - first]
