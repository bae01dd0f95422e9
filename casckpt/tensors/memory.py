"""The bytes of a tensor, without a copy where that is possible.

A `Memory` is a flat sequence of elements in row-major order. `view` gives the bytes in place (contiguous CPU tensors);
where that cannot be, `copy_out` and `copy_in` move them piece by piece, so that no whole copy is ever made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from casckpt.base.lazy import cached_property
from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region, Shape, flat_boxes, full_box, intersect
from casckpt.tensors.gpu import wait_for_gpus

T = TypeVar("T", npt.NDArray[Any], torch.Tensor)


class BufferMemory:
    """Bytes that are in host memory anyway: attachments and the large buffers of objects."""

    itemsize = 1

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    def view(self, lo: int, hi: int) -> memoryview:
        """View the bytes in place."""
        return self._data[lo:hi]

    @property
    def on_gpu(self) -> bool:
        """Whether it is in a GPU's memory."""
        return False

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Copy the bytes."""
        buffer[:] = self._data[lo:hi]


class TensorMemory:
    """The elements of a strided tensor on any device."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data.detach()
        self.itemsize = data.element_size()
        self._bytes = tensor_bytes(self.data)

    @cached_property
    def _array(self) -> npt.NDArray[Any] | None:
        return host_array(self.data)

    @property
    def on_gpu(self) -> bool:
        """Whether it is in a GPU's memory."""
        return self.data.is_cuda

    def view(self, lo: int, hi: int) -> memoryview | None:
        """View the bytes of elements [lo, hi) in place; None if they are not contiguous in host memory."""
        return None if self._bytes is None else self._bytes[lo * self.itemsize : hi * self.itemsize]

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Copy elements [lo, hi), of a tensor with any strides, device, conjugate or negative bit, into ``buffer``."""
        source = self.view(lo, hi)
        if source is not None:
            copy_bytes(buffer, source)
        elif self._array is not None:
            array, target = self._array, np.frombuffer(buffer, dtype=self._array.dtype)
            for box, start in flat_boxes(Region(full_box(array.shape), lo, hi)):
                piece = target[start - lo : start - lo + box.numel].reshape(box.shape)
                np.copyto(piece, array[box.within(full_box(array.shape))])
        else:
            self._copy_by_torch(lo, hi, buffer)

    def _copy_by_torch(self, lo: int, hi: int, buffer: memoryview) -> None:
        data = self.data if self.data.is_conj() or self.data.is_neg() else as_bits(self.data)
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        aligned = raw if _is_aligned(raw, data.dtype) else torch.empty_like(raw)
        target = aligned.view(data.dtype)
        if data.is_contiguous():
            target.copy_(data.view(-1)[lo:hi])
        else:
            for box, start in flat_boxes(Region(full_box(tuple(data.shape)), lo, hi)):
                piece = target[start - lo : start - lo + box.numel].view(box.shape)
                piece.copy_(narrow(data, box))
        if aligned is not raw:
            raw.copy_(aligned)


Memory: TypeAlias = BufferMemory | TensorMemory
"""Elements that can be saved from. Positions are elements of the row-major order, buffers have just their bytes."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between buffers of equal size without the GIL, which assignment between memoryviews would hold."""
    if len(source) < 1 << 14:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def tensor_bytes(data: torch.Tensor) -> memoryview | None:
    """View the bytes of a tensor in place, writable; the tensor must outlive it. None if they are not contiguous.

    By address, since not every dtype can be viewed as bytes by torch.
    """
    in_place = data.is_cpu and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    if not in_place:
        return None
    nbytes, address = data.nbytes, data.data_ptr()
    if not nbytes:
        return memoryview(bytearray())
    if not address:  # nothing may be read or written there
        raise InvalidInput("a tensor has no memory of its own, as in a FakeTensorMode: call casckpt outside of it")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def tensor_over(data: memoryview, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """View bytes as a tensor, in place."""
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def has_memory(data: torch.Tensor) -> bool:
    """Tell whether it has memory of its own: a wrapper of other tensors has none, nor one whose storage was freed.

    Only then its address tells what it is.
    """
    try:
        storage = data.untyped_storage()
        return storage.device.type != "meta" and storage.data_ptr() != 0  # of a FakeTensor it is meta
    except RuntimeError:  # what torch raises for a wrapper: there is no storage
        return False


def _is_aligned(raw: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether it begins at an address where elements of ``dtype`` may lie.

    What is stored as bytes may lie anywhere in a blob, and torch's copies of 16 bytes at once crash elsewhere.
    """
    return raw.data_ptr() % dtype.itemsize == 0


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def as_bits(data: torch.Tensor) -> torch.Tensor:
    """View the elements as integers of their size: torch can copy these, and they keep every bit of a NaN."""
    return data.view(BITS.get(data.element_size(), data.dtype))


def host_array(data: torch.Tensor) -> npt.NDArray[Any] | None:
    """View the elements in place like `as_bits`; None if they are not in host memory, or not as they are read.

    For copies by one thread, whose turn it is: torch shares each small copy among threads of its own, beside those
    that load or save others.
    """
    as_is = data.device.type == "cpu" and not data.is_conj() and not data.is_neg()
    return as_bits(data.detach()).numpy() if as_is else None


def note_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd of writes that bypass torch, so that it refuses to use values that it saved before.

    All views and detached forms of a tensor hear of it; a DTensor does not hear of its local tensor. What a GPU was
    told to do with them before ends first.
    """
    tensors = list(tensors)
    wait_for_gpus(tensors)
    counting = [data for data in tensors if not data.is_inference()]  # the others are in no graph
    torch.autograd.graph.increment_version(counting)


def narrow(data: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of ``data`` that a box (relative to it) selects."""
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        if extent != data.shape[dim]:
            data = data.narrow(dim, start, extent)
    return data


class Destination:
    """The target of a load: the local data of one region of a tensor.

    ``box``, ``lo``, ``hi``: the region. ``data``: a tensor of the box's shape, or flat if it is a part of it. Another
    dtype than the stored one converts. ``part_of``: a DTensor whose local data it is.
    """

    def __init__(
        self, region: Region, data: torch.Tensor, stored: torch.dtype, part_of: torch.Tensor | None = None
    ) -> None:
        self.region = region
        self.itemsize = stored.itemsize
        self._part_of = part_of
        self.data = data
        self._stored = stored
        self._bytes = tensor_bytes(data) if data.dtype == stored else None

    def view(self, lo: int, hi: int) -> memoryview | None:
        """View the bytes of elements [lo, hi) of the local data in place; None if they must be copied in."""
        return None if self._bytes is None else self._bytes[lo * self.itemsize : hi * self.itemsize]

    def holds(self, region: Region) -> bool:
        """Whether all of a region is here, as it is stored: it can be copied out."""
        if self.data.dtype != self._stored:
            return False
        here = region.box == self.region.box and self.region.lo <= region.lo and region.hi <= self.region.hi
        return here or sum(one.numel for one in intersect(region, self.region)) == region.numel

    @property
    def on_gpu(self) -> bool:
        """Whether it is in a GPU's memory."""
        return self.data.is_cuda

    @property
    def written(self) -> Sequence[torch.Tensor]:
        """The tensors that a write to it changes; see `note_writes`."""
        return (self.data,) if self._part_of is None else (self.data, self._part_of)

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        """Copy the elements of this piece from ``buffer``, which holds those of ``region``."""
        self._target.copy_in(region, buffer)

    def copy_out(self, region: Region, buffer: memoryview) -> None:
        """Copy the elements of ``region``, which is here, into ``buffer``."""
        self._target.copy_out(region, buffer)

    @cached_property
    def _target(self) -> _Arrays | _Tensors:
        data = self.data.detach()
        if data.dtype != self._stored or data.is_conj() or data.is_neg():
            return _Tensors(self.region, data, self._stored)
        bits = as_bits(data)
        return (_Arrays if data.device.type == "cpu" else _Tensors)(self.region, bits, bits.dtype)


class _Tensors:
    """Where elements go that torch must move, or convert. ``stored``: as which they are read."""

    def __init__(self, region: Region, data: torch.Tensor, stored: torch.dtype) -> None:
        self._targets = _pieces(region, data)
        self._stored = stored
        self._region, self._flat = region, data.view(-1) if data.is_contiguous() else None

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        elements = (raw if _is_aligned(raw, self._stored) else raw.clone()).view(self._stored)
        with torch.inference_mode():  # in whatever thread: tensors that were made in it can only be written in it
            whole = self._together(region)
            for target, source in _pairs(region, elements, self._targets) if whole is None else [(whole, elements)]:
                target.copy_(source)

    def _together(self, region: Region) -> torch.Tensor | None:
        """View the elements of ``region``, if they lie one after the other: then one copy does."""
        mine = self._region
        if self._flat is None or region.box != mine.box or region.lo < mine.lo or region.hi > mine.hi:
            return None
        return self._flat[region.lo - mine.lo : region.hi - mine.lo]

    def copy_out(self, region: Region, buffer: memoryview) -> None:
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        aligned = raw if _is_aligned(raw, self._stored) else torch.empty_like(raw)
        for source, target in _pairs(region, aligned.view(self._stored), self._targets):
            target.copy_(source)
        if aligned is not raw:
            raw.copy_(aligned)


class _Arrays:
    """Where elements go that are bits for the processor, whose thread copies them; see `host_array`."""

    def __init__(self, region: Region, data: torch.Tensor, stored: torch.dtype) -> None:
        self._targets = [(box, piece.numpy()) for box, piece in _pieces(region, data)]
        self._stored = torch.empty(0, dtype=stored, device="cpu").numpy().dtype

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        for target, source in _pairs(region, np.frombuffer(buffer, self._stored), self._targets):
            np.copyto(target, source)

    def copy_out(self, region: Region, buffer: memoryview) -> None:
        for source, target in _pairs(region, np.frombuffer(buffer, self._stored), self._targets):
            np.copyto(target, source)


def _pieces(region: Region, data: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Yield the boxes that make up a region, and their elements in ``data``."""
    if region.is_whole and tuple(data.shape) == region.box.shape:
        return [(region.box, data)]
    flat = data.view(-1)  # a part of a box is held flat; the front end made sure of it
    spans = [(box, start - region.lo) for box, start in flat_boxes(region)]
    return [(box, flat[start : start + box.numel].view(box.shape)) for box, start in spans]


def _pairs(region: Region, held: T, targets: Sequence[tuple[Box, T]]) -> Iterator[tuple[T, T]]:
    """Yield (target, source) views of the elements that are in both. ``held``: those of ``region``, flat."""
    for box, start in flat_boxes(region):
        source = held[start - region.lo : start - region.lo + box.numel].reshape(box.shape)
        for target_box, target in targets:
            common = box.intersect(target_box)
            if common is not None:
                yield target[common.within(target_box)], source[common.within(box)]
