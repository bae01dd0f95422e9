"""Orbax, which writes with TensorStore, on CPUs, in an environment of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.base import LOAD, SAVE, Best, Peer, missing

if TYPE_CHECKING:
    import numpy as np
    import torch

    from benchmarks.peers.base import State

_MIB = 1 << 20


class Orbax(Peer):
    """Orbax's first version of its API, with arrays in host memory, which it neither copies nor compresses.

    ``ocdbt``: pack all tensors into a few files. Otherwise, each has a folder. ``file``, ``chunk``: the largest size of
    a file and of a chunk, in MiB. ``zarr``: the version of the format.
    """

    name = "orbax"
    environment = "orbax"
    best: ClassVar[Best] = dict.fromkeys(
        (SAVE, LOAD),
        (
            {"ocdbt": True, "zarr": 3, "file": 128, "chunk": 16},
            {"ocdbt": True, "zarr": 3},
            {"ocdbt": False, "zarr": 2},
        ),
    )
    matters = ("ocdbt", "zarr", "file", "chunk")

    def __init__(self, setting: dict[str, Any], threads: int) -> None:
        """See `Peer`."""
        super().__init__(setting, threads)
        self._found: dict[str, Any] = {}

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("orbax.checkpoint")

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        from orbax.checkpoint import v1

        with self._context():
            v1.save(folder, {name: _array(tensor) for name, tensor in state.items()})

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`. Orbax returns new arrays."""
        from orbax.checkpoint import v1

        with self._context():
            self._found = v1.load(folder, {name: _array(tensor) for name, tensor in state.items()})

    def hand_over(self, state: State) -> None:
        """See `Peer.hand_over`."""
        for name, tensor in state.items():
            _array(tensor)[...] = self._found[name]
        self._found = {}

    def _context(self) -> Any:
        from orbax.checkpoint import v1

        logging.getLogger("absl").setLevel(logging.ERROR)
        context = v1.Context()
        saving = context.array.saving
        saving.use_compression = context.memory_options.deepcopy_host_arrays = False
        saving.use_ocdbt, saving.use_zarr3 = self.setting["ocdbt"], self.setting["zarr"] == 3
        if "file" in self.setting:
            saving.ocdbt_target_data_file_size = self.setting["file"] * _MIB
            saving.storage_options.chunk_byte_size = self.setting["chunk"] * _MIB
        return context


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as an array of the same type."""
    import ml_dtypes
    import torch

    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    array: np.ndarray[Any, Any] = tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return array
