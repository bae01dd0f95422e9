"""Samples of tensors: a few runs of bytes of each, read without a torch operation a tensor where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from casckpt.format.columns import Ints
from casckpt.tensors.memory import TensorMemory, as_bits

RUN = 16
"""Bytes of a run: a whole number of elements of every dtype."""


def sampled(tensors: Sequence[torch.Tensor], starts: Ints, nbytes: Ints) -> npt.NDArray[np.uint64]:
    """Read runs of each tensor: 2 words a run, in a row a tensor.

    ``starts``: the byte at which each run begins in the row-major order of the tensor, a column a run; at most
    ``nbytes - RUN``, or 0. ``nbytes``: of each tensor. What a tensor of less than `RUN` bytes lacks is 0.
    """
    found = np.zeros((len(tensors), starts.shape[1] * 2), np.uint64)
    addresses = np.array([_address(data) for data in tensors], np.int64)
    here = (addresses != 0) & (nbytes >= RUN)
    if here.any():
        found[here] = _at(addresses[here, None] + starts[here])
    there: list[tuple[int, int]] = []
    for row in np.flatnonzero(~here & (nbytes > 0)).tolist():
        data = tensors[row]
        if data.is_cuda and data.is_contiguous() and nbytes[row] >= RUN:
            there += [(row, start) for start in starts[row].tolist()]
            continue
        memory, length = TensorMemory(data), min(RUN, int(nbytes[row]))
        target = memoryview(found[row].view(np.uint8).data)
        for number, start in enumerate(starts[row].tolist()):
            lo = start // memory.itemsize
            memory.copy_out(lo, lo + length // memory.itemsize, target[number * RUN : number * RUN + length])
    if there:
        rows = list(dict.fromkeys(row for row, _ in there))
        found[rows] = _on_gpus(tensors, there).reshape(len(rows), -1)
    return found


def _address(data: torch.Tensor) -> int:
    """Where its bytes lie one after the other in host memory, else 0."""
    plain = data.is_cpu and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    return data.data_ptr() if plain else 0


class _HostMemory:
    """Host memory from an address on, as an array of runs that begin at every byte."""

    def __init__(self, first: int, count: int) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{RUN}", "shape": (count,), "strides": (1,), "data": (first, True),
        }  # fmt: skip


def _at(addresses: Ints) -> npt.NDArray[np.uint64]:
    first = int(addresses.min())
    runs: npt.NDArray[Any] = np.asarray(_HostMemory(first, int(addresses.max()) - first + 1))
    return runs[addresses - first].view(np.uint64).reshape(len(addresses), -1)


def _on_gpus(tensors: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """Runs of contiguous tensors on GPUs, brought over together, device by device."""
    flat = {row: as_bits(tensors[row].detach()).view(-1).view(torch.uint8) for row, _ in places}
    found = np.empty((len(places), RUN), np.uint8)
    for device in {data.device for data in flat.values()}:
        mine = [number for number, (row, _) in enumerate(places) if flat[row].device == device]
        runs = [flat[row][start : start + RUN] for row, start in (places[number] for number in mine)]
        found[mine] = torch.cat(runs).cpu().numpy().reshape(-1, RUN)
    return found.view(np.uint64)
