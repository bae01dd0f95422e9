"""Synchronization with GPUs, and pinned host memory for copies to and from GPUs.

casckpt copies in its own threads, and therefore in the GPU's default stream. That stream does not wait for work that
is queued in other streams.
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
    """Return whether any of the tensors is in GPU memory."""
    return any(data.is_cuda for data in tensors)


def wait_for_gpus(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the work in this thread's current streams on the GPUs that hold ``tensors``."""
    for device in {data.device for data in tensors if data.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def wait_for_copies(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the copies that casckpt's threads have queued for ``tensors``."""
    for device in {data.device for data in tensors if data.is_cuda}:
        torch.cuda.default_stream(device).synchronize()


def pin(buffer: AlignedBuffer) -> None:
    """Pin a buffer until it is closed, so that GPUs copy to and from it directly.

    If the driver does not allow this, for example because too little memory can be locked, copies are slower.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's own
    at = address(buffer.view)
    buffer.wipe_in_forks()
    status = int(runtime.cudaHostRegister(at, buffer.nbytes, _PORTABLE))
    if status:
        log.info("cannot pin %d bytes of memory: CUDA error %d", buffer.nbytes, status)
        with suppress(RuntimeError):  # clear the error, because otherwise the next call would raise it
            torch.zeros(1, device="cuda")
    else:
        buffer.at_end(lambda: runtime.cudaHostUnregister(at))


PINNED = KeptBuffers(ready=pin)
"""This process's pinned buffers. They are kept because pinning is slow: about 2 ms for 8 MiB."""
