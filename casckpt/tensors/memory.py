"""Access to a tensor's bytes, without a copy where possible.

A `Memory` is a flat sequence of elements in row-major order. `view` returns the bytes of a contiguous CPU tensor in
place. For other tensors, `copy_out` and `copy_in` move the bytes in pieces, which avoids a complete copy. `sampled`
reads a few runs of bytes from many tensors.
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
from casckpt.format.light import LightStruct
from casckpt.format.regions import Box, Region, Shape, flat_boxes, full_box, intersect
from casckpt.format.sections.columns import Ints
from casckpt.format.sections.index import Entry
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.file_memory import FileMemory
from casckpt.tensors.gpu import wait_for_gpus

ADDRESSES = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")
"""All memory of this process. Small views are slices of it, because it would be slow to create each of them anew."""

T = TypeVar("T", npt.NDArray[Any], torch.Tensor)


class BufferMemory:
    """Bytes in host memory: attachments and the large buffers of objects."""

    itemsize = 1

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    def view(self, lo: int, hi: int) -> memoryview:
        """View the bytes [lo, hi) in place."""
        return self._data[lo:hi]

    @property
    def on_gpu(self) -> bool:
        """Whether the bytes are in GPU memory."""
        return False

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Copy the bytes [lo, hi) into ``buffer``."""
        buffer[:] = self._data[lo:hi]


class TensorMemory:
    """The elements of a strided tensor on any device."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data.detach()  # keeps the memory alive, even if another thread assigns to `data.data`
        self.itemsize = data.element_size()
        self._bytes = tensor_bytes(self.data)

    @cached_property
    def _whole(self) -> Destination:
        shape = tuple(self.data.shape)
        return Destination(Region(full_box(shape), 0, self.data.numel()), self.data, self.data.dtype)

    @property
    def on_gpu(self) -> bool:
        """Whether the bytes are in GPU memory."""
        return self.data.is_cuda

    def view(self, lo: int, hi: int) -> memoryview | None:
        """View the bytes of elements [lo, hi) in place, or return None if they are not contiguous in host memory."""
        return None if self._bytes is None else self._bytes[lo * self.itemsize : hi * self.itemsize]

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        """Copy elements [lo, hi) into ``buffer``.

        Works for all strides and devices, and for conjugated or negated tensors.
        """
        if self._bytes is not None:
            copy_bytes(buffer, self._bytes[lo * self.itemsize : hi * self.itemsize])
        else:
            self._whole.copy_out(Region(self._whole.region.box, lo, hi), buffer)


Memory: TypeAlias = BufferMemory | TensorMemory | FileMemory
"""A source of elements. Positions count elements in row-major order. A buffer has exactly the size of the elements."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between buffers of equal size without holding the GIL, unlike assignment between memoryviews."""
    if len(source) < 1 << 14:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def tensor_bytes(data: torch.Tensor) -> memoryview | None:
    """Return a writable view of a tensor's bytes, or None if they are not contiguous.

    The tensor must outlive the view.

    The view is created from the address, because torch cannot view every dtype as bytes.
    """
    in_place = data.is_cpu and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    if not in_place:
        return None
    nbytes, address = data.nbytes, data.data_ptr()
    if not nbytes:
        return memoryview(bytearray())
    if not address:  # the memory is not readable or writable
        raise InvalidInput(
            "a tensor has no memory of its own, for example in a FakeTensorMode: call casckpt outside that mode"
        )
    return ADDRESSES[address : address + nbytes]


def tensor_over(data: memoryview, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """View bytes as a tensor, in place."""
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def has_memory(data: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own.

    Wrappers of other tensors do not, and neither do tensors whose storage was freed. The address of a tensor identifies
    it only if it has its own memory.
    """
    try:
        storage = data.untyped_storage()
        return storage.device.type != "meta" and storage.data_ptr() != 0  # a FakeTensor has meta storage
    except RuntimeError:  # torch raises this for a wrapper without storage
        return False


def _is_aligned(raw: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``raw`` begins at a multiple of the size of ``dtype``.

    Elements that are stored as bytes may begin at any byte of a blob, and torch's vectorized copies crash if addresses
    are unaligned.
    """
    return raw.data_ptr() % dtype.itemsize == 0


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""


def as_bits(data: torch.Tensor) -> torch.Tensor:
    """View the elements as integers of the same size. Copying integers preserves every bit of a NaN."""
    return data.view(BITS.get(data.element_size(), data.dtype))


def note_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd about writes that bypass torch, so that it does not use values that it saved earlier.

    This covers all views and detached versions of a tensor, but not the DTensor of a local tensor. Work that is
    already queued on a GPU finishes first.
    """
    tensors = list(tensors)
    wait_for_gpus(tensors)
    counting = [data for data in tensors if not data.is_inference()]  # inference tensors are not part of any graph
    torch.autograd.graph.increment_version(counting)


def narrow(data: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of ``data`` that a box (relative to it) selects."""
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        if extent != data.shape[dim]:
            data = data.narrow(dim, start, extent)
    return data


class Destination(LightStruct, frozen=True, eq=False, gc=True, dict=True):
    """The local data of one region of a tensor: the target of a load, or the source of a copy.

    ``data``: a tensor with the shape of the region's box, or a flat one if the region is only a part of the box. A load
    converts elements from the ``stored`` dtype to that of the tensor. ``part_of``: the DTensor whose local data it is.
    """

    region: Region
    data: torch.Tensor
    stored: torch.dtype
    part_of: torch.Tensor | None = None

    @property
    def itemsize(self) -> int:
        """The stored size of an element in bytes."""
        return self.stored.itemsize

    @property
    def nbytes(self) -> int:
        """The stored size of the region in bytes."""
        return (self.region.hi - self.region.lo) * self.stored.itemsize

    @property
    def address(self) -> int:
        """The address of its bytes if they are contiguous in host memory and have the stored dtype, and otherwise 0."""
        return address_of(self.data) if self.data.dtype == self.stored else 0

    @cached_property
    def _bytes(self) -> memoryview | None:
        return tensor_bytes(self.data) if self.data.dtype == self.stored else None

    def view(self, lo: int, hi: int) -> memoryview | None:
        """View the bytes of elements [lo, hi) of the local data in place. Return None if they must be copied in."""
        data, size = self._bytes, self.itemsize
        return None if data is None else data[lo * size : hi * size]

    def holds(self, region: Region) -> bool:
        """Return whether this destination has the whole region, in its stored dtype, so that it can be copied out."""
        if self.data.dtype != self.stored:
            return False
        here = region.box == self.region.box and self.region.lo <= region.lo and region.hi <= self.region.hi
        return here or sum(common.numel for common in intersect(region, self.region)) == region.numel

    @property
    def on_gpu(self) -> bool:
        """Whether the bytes are in GPU memory."""
        return self.data.is_cuda

    @property
    def written(self) -> Sequence[torch.Tensor]:
        """The tensors that a write changes. See `note_writes`."""
        return (self.data,) if self.part_of is None else (self.data, self.part_of)

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        """From ``buffer``, which holds the elements of ``region``, copy those that this destination needs."""
        self._target.copy_in(region, buffer)

    def copy_out(self, region: Region, buffer: memoryview) -> None:
        """Copy the elements of ``region``, which this destination holds, into ``buffer``."""
        self._target.copy_out(region, buffer)

    @cached_property
    def _target(self) -> _Arrays | _Tensors:
        data = self.data.detach()
        if data.dtype != self.stored or data.is_conj() or data.is_neg():
            return _Tensors(self.region, data, self.stored)
        bits = as_bits(data)
        return (_Arrays if data.device.type == "cpu" else _Tensors)(self.region, bits, bits.dtype)


class _Tensors:
    """A target for copies with torch, which move or convert elements. ``stored``: their dtype in the buffer."""

    def __init__(self, region: Region, data: torch.Tensor, stored: torch.dtype) -> None:
        self._targets = boxes_with_data(region, data)
        self._stored = stored
        self._region, self._flat = region, data.view(-1) if data.is_contiguous() else None

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        elements = (raw if _is_aligned(raw, self._stored) else raw.clone()).view(self._stored)
        with torch.inference_mode():  # inference tensors are writable only in this mode
            for target, source in self._copies(region, elements):
                target.copy_(source)

    def _copies(self, region: Region, elements: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        whole = self._together(region)
        return _pairs(region, elements, self._targets) if whole is None else [(whole, elements)]

    def _together(self, region: Region) -> torch.Tensor | None:
        """View the elements of ``region`` if they are contiguous, so that a single copy is enough."""
        held = self._region
        if self._flat is None or region.box != held.box or region.lo < held.lo or region.hi > held.hi:
            return None
        return self._flat[region.lo - held.lo : region.hi - held.lo]

    def copy_out(self, region: Region, buffer: memoryview) -> None:
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        aligned = raw if _is_aligned(raw, self._stored) else torch.empty_like(raw)
        for source, target in self._copies(region, aligned.view(self._stored)):
            target.copy_(source)
        if aligned is not raw:
            raw.copy_(aligned)


class _Arrays:
    """A target in host memory for bitwise copies with numpy.

    numpy copies in the calling thread. torch would use additional threads on top of casckpt's own threads.
    """

    def __init__(self, region: Region, data: torch.Tensor, stored: torch.dtype) -> None:
        self._targets = [(box, piece.numpy()) for box, piece in boxes_with_data(region, data)]
        self._stored = torch.empty(0, dtype=stored, device="cpu").numpy().dtype

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        for target, source in _pairs(region, np.frombuffer(buffer, self._stored), self._targets):
            np.copyto(target, source)

    def copy_out(self, region: Region, buffer: memoryview) -> None:
        for source, target in _pairs(region, np.frombuffer(buffer, self._stored), self._targets):
            np.copyto(target, source)


def boxes_with_data(region: Region, data: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a region, each with its elements in ``data``."""
    if region.is_whole and tuple(data.shape) == region.box.shape:
        return [(region.box, data)]
    flat = data.view(-1)  # the front end checks that the data is flat if the region is only a part of its box
    spans = [(box, start - region.lo) for box, start in flat_boxes(region)]
    return [(box, flat[start : start + box.numel].view(box.shape)) for box, start in spans]


def _pairs(region: Region, held: T, targets: Sequence[tuple[Box, T]]) -> Iterator[tuple[T, T]]:
    """Yield (target, source) views of the common elements. ``held``: the elements of ``region``, flat."""
    for box, start in flat_boxes(region):
        source = held[start - region.lo : start - region.lo + box.numel].reshape(box.shape)
        for target_box, target in targets:
            common = box.intersect(target_box)
            if common is not None:
                yield target[common.within(target_box)], source[common.within(box)]


def new_empty(entry: Entry, device: torch.device) -> torch.Tensor:
    """Allocate a whole tensor in its stored dtype. Raises InvalidInput if ``device`` does not have enough memory."""
    try:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=device)
    except (RuntimeError, AssertionError) as error:  # not enough memory, or no such device
        raise InvalidInput(
            f"cannot allocate {entry.key!r} ({entry.nbytes} bytes) on {device}: {error}; pass a different device",
            key=entry.key,
        ) from error


RUN = 16
"""The size of a run in bytes, which is a whole number of elements for every dtype."""


def sampled(tensors: Sequence[torch.Tensor], starts: Ints, count: Ints, size: Ints) -> npt.NDArray[np.uint64]:
    """Read runs of each tensor in row-major order. Returns one row for each tensor, with two words for each run.

    ``starts``: the first element of each run, with one column per run. ``count``, ``size``: the number of elements of
    each tensor, and the bytes per element. If a tensor has too few elements, its last one is repeated. The words of an
    empty tensor are 0.
    """
    words = np.zeros((len(tensors), starts.shape[1] * 2), np.uint64)
    addresses = np.array([address_of(data) for data in tensors], np.int64)
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
        bits = (as_bits(tensors[row].detach().resolve_conj().resolve_neg()) for row in chosen)
        runs = [one.take(at).view(torch.uint8) for one, at in zip(bits, places, strict=True)]
        words[chosen] = torch.cat(runs).cpu().numpy().view(np.uint64).reshape(len(chosen), -1)
    return words


class Block(LightStruct, frozen=True):
    """The ``nbytes`` of ``data``, a contiguous tensor, at ``address``, or at 0 if they are not in host memory as such.

    ``storage`` keeps the memory alive, even if another thread assigns to ``data.data``.
    """

    data: torch.Tensor
    address: int
    nbytes: int
    storage: torch.UntypedStorage


def block_of(data: torch.Tensor) -> Block | None:
    """Return the memory of a plain tensor. Return None if it is empty, not contiguous, or larger than its storage."""
    if data.layout is not torch.strided or data.is_nested or data.is_quantized or not data.is_contiguous():
        return None
    # the storage of a functional tensor raises an error if it is asked for its address
    storage, nbytes, address = data.untyped_storage(), data.nbytes, data.data_ptr()
    start = int(data.storage_offset()) * data.itemsize
    if not nbytes or address in (0, start) or storage.nbytes() < start + nbytes:
        return None
    in_host = data.is_cpu and not data.is_conj() and not data.is_neg()
    return Block(data, address if in_host else 0, nbytes, storage)


def address_of(data: torch.Tensor) -> int:
    """Return the address of a tensor's bytes if they are contiguous in host memory, and otherwise 0."""
    is_plain = data.is_cpu and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    return data.data_ptr() if is_plain else 0


WIDE = 16 << 10
"""The size in bytes from which ranges are copied one by one. numpy limits the number of items times their size to
2**63, and addresses may be 2**48 bytes apart."""


class _HostMemory:
    """Host memory at an address, as an array of overlapping items of ``width`` bytes.

    One item begins at every byte.
    """

    def __init__(self, first: int, count: int, width: int, *, writable: bool = False) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{width}", "shape": (count,), "strides": (1,), "data": (first, not writable),
        }  # fmt: skip


def _at(addresses: Ints, width: int) -> npt.NDArray[Any]:
    first = int(addresses.min())
    return np.asarray(_HostMemory(first, int(addresses.max()) - first + 1, width))[addresses - first]


def copy_addresses(targets: Ints, sources: Ints, nbytes: Ints) -> None:
    """Copy ranges of host memory. Each range has a target address, a source address, and a size in bytes.

    All of this memory must be alive. Ranges of the same size are copied together.
    """
    for width in np.unique(nbytes).tolist():
        same = nbytes == width
        if width >= WIDE:
            for target, source in zip(targets[same].tolist(), sources[same].tolist(), strict=True):
                ctypes.memmove(target, source, width)
            continue
        into, first = targets[same], int(targets[same].min())
        memory = np.asarray(_HostMemory(first, int(into.max()) - first + 1, width, writable=True))
        memory[into - first] = _at(sources[same], width)
