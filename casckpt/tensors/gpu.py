"""Tensors in a GPU's memory: what it is still told to do with them, and host memory that it copies to and from itself.

Whatever copies them here runs in threads of its own, and so in the GPU's default stream: what was queued in another one
is not before it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

import torch

from casckpt.storage.buffers import AlignedBuffer, KeptBuffers, address

log = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs of this process


def on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them is in a GPU's memory."""
    return any(data.is_cuda for data in tensors)


def wait_for_gpus(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what was queued so far in this thread's streams of the GPUs that have ``tensors``."""
    for device in {data.device for data in tensors if data.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def wait_for_copies(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what threads of casckpt have queued for ``tensors``: a copy into strides ends on the GPU."""
    for device in {data.device for data in tensors if data.is_cuda}:
        torch.cuda.default_stream(device).synchronize()


def pin(buffer: AlignedBuffer) -> None:
    """Let GPUs copy to and from a buffer without the driver's own buffers between, until it is closed.

    Where the driver refuses, as it may with little memory that can be locked, copies are slower.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's own
    at = address(buffer.view)
    buffer.wipe_in_forks()
    found = int(runtime.cudaHostRegister(at, buffer.nbytes, _PORTABLE))
    if found:
        log.info("%d bytes of memory cannot be pinned: CUDA error %d", buffer.nbytes, found)
        with suppress(RuntimeError):  # the error stays until it is asked for, and would be that of what comes next
            torch.zeros(1, device="cuda")
    else:
        buffer.at_end(lambda: runtime.cudaHostUnregister(at))


PINNED = KeptBuffers(ready=pin)
"""Pinned buffers of this process for copies to and from GPUs, kept because pinning is slow: about 2 ms for 8 MiB."""
