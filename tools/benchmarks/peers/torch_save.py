"""torch.save and torch.load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from benchmarks.peers.base import LOAD, MAPPED, PART, SAVE, Best, Part, Peer

if TYPE_CHECKING:
    from benchmarks.peers.base import State

_FILE = "state.pt"


class TorchSave(Peer):
    """One file. ``mmap``: load by mapping it."""

    name = "torch.save"
    best: ClassVar[Best] = {
        SAVE: ({},),
        LOAD: ({}, {"mmap": True}),
        MAPPED: ({"mmap": True},),
        PART: ({"mmap": True},),
    }

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        import torch

        folder.mkdir()
        torch.save(state, folder / _FILE)

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`."""
        import torch

        found = torch.load(folder / _FILE, mmap=self.setting.get("mmap", False), weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(found[name])

    def load_part(self, parts: Mapping[str, Part], folder: Path) -> None:
        """See `Peer.load_part`."""
        import torch

        found = torch.load(folder / _FILE, mmap=True, weights_only=True)
        for name, part in parts.items():
            box = tuple(slice(at, at + length) for at, length in zip(part.offset, part.data.shape, strict=True))
            part.data.copy_(found[name][box])
