"""Host memory for the copy of a state that a background save reads while the state changes.

The next copy reuses the same memory, because new memory costs about three times as much as the copy itself: the kernel
has to find and clear every page. The memory is pinned if any of the tensors is on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from casckpt.base.groups import in_batches
from casckpt.base.parallel import run_all
from casckpt.errors import CasckptError
from casckpt.storage.buffers import AlignedBuffer
from casckpt.tensors.gpu import on_gpu, pin
from casckpt.tensors.memory import as_bits, copy_bytes, tensor_bytes

_ALIGNMENT = 64  # bytes; a cache line, which is more than any dtype needs
_PIECE = 16 << 20  # bytes; so large that the C library's copy bypasses the CPU's cache, unlike torch's
_Same: TypeAlias = tuple[torch.device, int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]


class Staging:
    """The memory for copies. Not thread-safe. Each `copy` overwrites the tensors that the previous one returned.

    ``used``: the bytes that the last copy takes up.
    """

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._memory: AlignedBuffer | None = None
        self._pinned, self.used = False, 0

    @property
    def nbytes(self) -> int:
        """The size of the memory in bytes."""
        return self._arena.nbytes

    def lacks(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the size of the new memory that a copy of ``tensors`` needs, or 0 if the present memory is enough."""
        need = sum(_room(data) for data in distinct(tensors).values())
        return 0 if self._is_enough(need, on_gpu(tensors)) else need

    def release(self) -> None:
        """Free the memory, once no tensor refers to it."""
        self._arena, self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu"), False
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reserve memory for a copy of ``tensors``, and touch its pages. Raises CasckptError if this is impossible."""
        before = self.nbytes
        self._grow(sum(_room(data) for data in distinct(tensors).values()), on_gpu(tensors))
        if self.nbytes != before:
            self._arena.zero_()

    def copy(self, tensors: Sequence[torch.Tensor], threads: int = 1) -> list[torch.Tensor]:
        """Return contiguous, complete copies with the same bits. A tensor that is passed twice is copied only once."""
        needed = distinct(tensors)
        self._grow(sum(_room(data) for data in needed.values()), on_gpu(tensors))
        copies: dict[_Same, torch.Tensor] = {}
        streams: dict[torch.device, torch.cuda.Stream] = {}
        in_place: list[tuple[memoryview, memoryview]] = []
        start = 0
        try:
            for same, data in needed.items():
                copies[same] = self._view(data, start)
                source, target = tensor_bytes(data), tensor_bytes(copies[same])
                if source is None or target is None:
                    _copy(copies[same], data, streams)
                else:
                    cuts = range(0, data.nbytes, _PIECE)
                    in_place += [(target[cut : cut + _PIECE], source[cut : cut + _PIECE]) for cut in cuts]
                start += _room(data)
            _copy_in_place(in_place, threads)
        finally:
            for stream in streams.values():
                stream.synchronize()
        self.used = start
        return [copies[_same(data)] for data in tensors]

    def _view(self, data: torch.Tensor, start: int) -> torch.Tensor:
        """Return a view of the memory from byte ``start`` on, as the target for a copy of ``data``."""
        if not data.numel():
            return torch.empty(data.shape, dtype=data.dtype, device="cpu")
        return self._arena[start : start + data.numel() * data.element_size()].view(data.dtype).view(data.shape)

    def _is_enough(self, nbytes: int, pinned: bool) -> bool:
        return nbytes <= self.nbytes and (self._pinned or not pinned or not nbytes)

    def _grow(self, nbytes: int, pinned: bool) -> None:
        if self._is_enough(nbytes, pinned):
            return
        self.release()
        try:
            self._memory = AlignedBuffer(nbytes)
        except OSError as error:  # `ulimit -v` or the kernel's overcommit policy
            raise CasckptError(
                f"cannot allocate {nbytes} bytes for a copy of the state: {error}; allow this process more memory, or "
                "open the store with staging_bytes=0, which saves without copies"
            ) from error
        self._memory.wipe_in_forks()  # otherwise, the next copy would duplicate the pages that a child still has
        self._arena = torch.frombuffer(self._memory.view, dtype=torch.uint8)
        self._pinned = pinned
        if pinned:  # not pinned with torch, which rounds up to a power of two and never frees pinned memory
            self._arena.zero_()  # touches pages with several threads; the driver would use one
            pin(self._memory)


def _copy(target: torch.Tensor, data: torch.Tensor, streams: dict[torch.device, torch.cuda.Stream]) -> None:
    if data.device.type != "cuda":
        as_bits(target).copy_(as_bits(data.detach().resolve_conj().resolve_neg()))
        return
    if data.device not in streams:  # runs after the GPU's earlier work, and in parallel with its later work
        streams[data.device] = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call] # torch's
        streams[data.device].wait_stream(torch.cuda.current_stream(data.device))
    with torch.cuda.stream(streams[data.device]):  # conjugates are resolved in the same stream
        as_bits(target).copy_(as_bits(data.detach().resolve_conj().resolve_neg()), non_blocking=True)
    data.record_stream(streams[data.device])


def _copy_in_place(pairs: Sequence[tuple[memoryview, memoryview]], threads: int) -> None:
    """Copy bytes in host memory."""

    def copy(lot: Sequence[tuple[memoryview, memoryview]]) -> None:
        for target, source in lot:
            copy_bytes(target, source)

    run_all(copy, in_batches(pairs, lambda pair: pair[0].nbytes, _PIECE), threads)


def distinct(tensors: Sequence[torch.Tensor]) -> dict[_Same, torch.Tensor]:
    """Return the tensors, but only one of those that share the same bits in the same layout."""
    return {_same(data): data for data in tensors}


def _same(data: torch.Tensor) -> _Same:
    """Return a key that is equal for tensors that share the same bits in the same layout."""
    return (
        data.device, data.data_ptr(), tuple(data.shape), data.stride(), data.dtype, data.is_conj(), data.is_neg(),
    )  # fmt: skip


def _room(data: torch.Tensor) -> int:
    """Compute the size of a tensor's copy in bytes, rounded up."""
    return -(-data.numel() * data.element_size() // _ALIGNMENT) * _ALIGNMENT
