"""The bytes of a tensor, without a copy where that is possible.

A `Memory` is a flat sequence of elements in row-major order. `view` gives the bytes in place (contiguous CPU tensors);
where that cannot be, `copy_out` and `copy_in` move them piece by piece, so that no whole copy is ever made.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from casckpt.format.regions import Box, Region, flat_boxes, full_box


class Memory(Protocol):
    """Elements that can be saved from. Positions are elements of the row-major order, buffers are bytes."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    def view(self, lo: int, hi: int) -> memoryview | None:
        """The bytes of elements [lo, hi) in place; None if they do not lie together in host memory."""

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Copy elements [lo, hi) into ``buffer``, which has just their size."""


class BufferMemory:
    """Bytes that are in host memory anyway: attachments and the large buffers of objects."""

    itemsize = 1

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    def view(self, lo: int, hi: int) -> memoryview:
        """The bytes in place."""
        return self._data[lo:hi]

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Copy the bytes."""
        buffer[:] = self._data[lo:hi]


class TensorMemory:
    """The elements of a strided tensor on any device."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data.detach()
        self.itemsize = data.element_size()
        self._bytes = tensor_bytes(self.data)

    def view(self, lo: int, hi: int) -> memoryview | None:
        """The bytes in place."""
        return None if self._bytes is None else self._bytes[lo * self.itemsize : hi * self.itemsize]

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Copy elements out of a tensor with any strides, device, conjugate or negative bit."""
        source = self.view(lo, hi)
        if source is not None:
            copy_bytes(buffer, source)
            return
        data = self.data if self.data.is_conj() or self.data.is_neg() else as_bits(self.data)
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        aligned = raw if _is_aligned(raw, data.dtype) else torch.empty_like(raw)
        target = aligned.view(data.dtype)
        shape = tuple(data.shape)
        for box, start in flat_boxes(Region(full_box(shape), lo, hi)):
            piece = target[start - lo : start - lo + box.numel].view(box.shape)
            piece.copy_(narrow(data, box))
        if aligned is not raw:
            raw.copy_(aligned)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between buffers of equal size, letting other threads run, which assignment between memoryviews does not."""
    if len(source) < 1 << 14:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def tensor_bytes(data: torch.Tensor) -> memoryview | None:
    """The bytes of a tensor in place: a writable view of memory that the tensor must outlive; None if it has none.

    By address, since not every dtype can be viewed as bytes by torch.
    """
    in_place = data.device.type == "cpu" and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    nbytes = data.numel() * data.element_size()
    if not in_place:
        return None
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(data.data_ptr())).cast("B")


def _is_aligned(raw: torch.Tensor, dtype: torch.dtype) -> bool:
    """Does it begin where elements of ``dtype`` may?

    What is stored as bytes may lie anywhere in a blob, and torch's copies of 16 bytes at once crash elsewhere.
    """
    return raw.data_ptr() % dtype.itemsize == 0


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(data: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size: torch has copies for these, and they keep every bit of a NaN."""
    return data.view(_BITS.get(data.element_size(), data.dtype))


def narrow(data: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``data`` that a box (relative to it) names."""
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        if extent != data.shape[dim]:
            data = data.narrow(dim, start, extent)
    return data


class Destination:
    """Where a load puts a piece: the local data of one region of a tensor.

    ``box``, ``lo``, ``hi``: the region. ``data``: a tensor of the box's shape, or flat if it is a part of it. Another
    dtype than the stored one converts.
    """

    def __init__(self, region: Region, data: torch.Tensor, stored: torch.dtype) -> None:
        data = data.detach()
        same = data.dtype == stored
        self.region = region
        self.itemsize = stored.itemsize
        self._bytes = tensor_bytes(data) if same else None
        as_is = same and not data.is_conj() and not data.is_neg()
        self._data = as_bits(data) if as_is else data
        self._read_as = self._data.dtype if as_is else stored
        self._keep = data

    def view(self, lo: int, hi: int) -> memoryview | None:
        """The bytes of elements [lo, hi) of the local data, in place; None if they must be copied in."""
        return None if self._bytes is None else self._bytes[lo * self.itemsize : hi * self.itemsize]

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        """Copy what ``buffer``, which holds the elements of ``region``, has of this piece."""
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        source = (raw if _is_aligned(raw, self._read_as) else raw.clone()).view(self._read_as)
        for box, start in flat_boxes(region):
            held = source[start - region.lo : start - region.lo + box.numel].view(box.shape)
            for target_box, target in self._pieces:
                common = box.intersect(target_box)
                if common is not None:
                    piece = narrow(held, common.relative_to(box))
                    narrow(target, common.relative_to(target_box)).copy_(piece)

    @cached_property
    def _pieces(self) -> list[tuple[Box, torch.Tensor]]:
        return [(box, self._piece(box, start)) for box, start in flat_boxes(self.region)]

    def _piece(self, box: Box, start: int) -> torch.Tensor:
        if self.region.is_whole and tuple(self._data.shape) == self.region.box.shape:
            return self._data
        flat = self._data.view(-1)  # a part of a box is held flat; the front end made sure of it
        return flat[start - self.region.lo : start - self.region.lo + box.numel].view(box.shape)
