"""Host memory for a copy of a state that a save in the background reads while the state changes.

One arena, used again by the next copy: fresh memory costs about three times as much as the copy itself, since the
kernel has to find and clear every page. Pinned where any of the tensors is on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from casckpt.storage.buffers import AlignedBuffer
from casckpt.tensors.gpu import on_gpu, pin
from casckpt.tensors.memory import as_bits

_ALIGNMENT = 64  # bytes: of a core's cache line, and more than any dtype needs
_Same: TypeAlias = tuple[torch.device, int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]


class Staging:
    """The arena. Not safe for use by several threads; what `copy` gave is overwritten by the next `copy`."""

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._memory: AlignedBuffer | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._arena.nbytes

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reserve memory for a copy of ``tensors``, and touch it."""
        before = self.nbytes
        self._grow(sum(_room(data) for data in _distinct(tensors).values()), on_gpu(tensors))
        if self.nbytes != before:
            self._arena.zero_()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous copies of the same bits, complete on return. A tensor given twice is copied once."""
        distinct = _distinct(tensors)
        self._grow(sum(_room(data) for data in distinct.values()), on_gpu(tensors))
        copies: dict[_Same, torch.Tensor] = {}
        streams: dict[torch.device, torch.cuda.Stream] = {}
        start = 0
        try:
            for same, data in distinct.items():
                copies[same] = self._view(data, start)
                _copy(copies[same], data, streams)
                start += _room(data)
        finally:
            for stream in streams.values():
                stream.synchronize()
        return [copies[_same(data)] for data in tensors]

    def _view(self, data: torch.Tensor, start: int) -> torch.Tensor:
        """Return room for ``data`` in the arena."""
        if not data.numel():
            return torch.empty(data.shape, dtype=data.dtype, device="cpu")
        return self._arena[start : start + data.numel() * data.element_size()].view(data.dtype).view(data.shape)

    def _grow(self, nbytes: int, pinned: bool) -> None:
        if nbytes <= self.nbytes and (self._pinned or not pinned or not nbytes):
            return
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")  # give back what there is: two are one too many
        if self._memory is not None:
            self._memory.close()
        self._memory = AlignedBuffer(nbytes)
        self._arena = torch.frombuffer(self._memory.view, dtype=torch.uint8)
        self._pinned = pinned
        if pinned:  # torch's pinned memory would be of the next power of two, and would never be given back
            self._arena.zero_()  # by several threads: the driver would touch it with one
            pin(self._memory)


def _copy(target: torch.Tensor, data: torch.Tensor, streams: dict[torch.device, torch.cuda.Stream]) -> None:
    if data.device.type != "cuda":
        as_bits(target).copy_(as_bits(data.detach().resolve_conj().resolve_neg()))
        return
    if data.device not in streams:  # beside what the GPU computes, after what it was told to compute before
        streams[data.device] = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call] # torch's
        streams[data.device].wait_stream(torch.cuda.current_stream(data.device))
    with torch.cuda.stream(streams[data.device]):  # conjugates are made in it, too: another one is not waited for
        as_bits(target).copy_(as_bits(data.detach().resolve_conj().resolve_neg()), non_blocking=True)
    data.record_stream(streams[data.device])


def _distinct(tensors: Sequence[torch.Tensor]) -> dict[_Same, torch.Tensor]:
    return {_same(data): data for data in tensors}


def _same(data: torch.Tensor) -> _Same:
    """Return a key that is equal for tensors that show the same bits in the same way."""
    return (
        data.device, data.data_ptr(), tuple(data.shape), data.stride(), data.dtype, data.is_conj(), data.is_neg(),
    )  # fmt: skip


def _room(data: torch.Tensor) -> int:
    """Compute the bytes it takes in the arena."""
    return -(-data.numel() * data.element_size() // _ALIGNMENT) * _ALIGNMENT
