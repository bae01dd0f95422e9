"""safetensors: one file."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from benchmarks.peers.base import LOAD, MAPPED, PART, RESTART, SAVE, Best, Part, Peer, missing

if TYPE_CHECKING:
    import torch

    from benchmarks.peers.base import State

_FILE = "state.safetensors"


class Safetensors(Peer):
    """Settings of safetensors.

    ``way``: "file" means load_file and a copy; "open" means safe_open and ``threads`` threads that copy. ``gpu``: only
    for states on a GPU; in this case, "file" loads onto the GPU, and "prefetch" uses the reader threads of version
    0.9.
    """

    name = "safetensors"
    best: ClassVar[Best] = {
        SAVE: ({"way": "file"},),
        RESTART: ({"way": "file"},),
        LOAD: (
            {"way": "file"},
            {"way": "open", "threads": 2},
            {"way": "file", "gpu": True},
            {"way": "prefetch", "threads": 8, "gpu": True},
            {"way": "prefetch", "threads": 16, "gpu": True},
        ),
        MAPPED: ({"way": "file"},),
        PART: ({"way": "open", "threads": 1}, {"way": "open", "threads": 2}),
    }

    @classmethod
    def absent(cls) -> str | None:
        """See `Peer.absent`."""
        return missing("safetensors.torch")

    def save(self, state: State, folder: Path) -> None:
        """See `Peer.save`."""
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(state, folder / _FILE)

    def load(self, state: State, folder: Path) -> None:
        """See `Peer.load`."""
        if self.setting["way"] == "prefetch":
            self._prefetch(state, folder)
            return
        if self.setting["way"] == "file":
            from safetensors.torch import load_file

            found = load_file(folder / _FILE, device=device_of(state) if self.setting.get("gpu") else "cpu")
            for name, tensor in state.items():
                tensor.copy_(found[name])
            return
        self._in_threads({name: Part(one, (), (0,) * one.ndim) for name, one in state.items()}, folder)

    def _prefetch(self, state: State, folder: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / _FILE, framework="pt", device=device_of(state)) as file:
            if not hasattr(file, "prefetch"):
                raise ImportError("safetensors does not have prefetch before 0.9")
            with file.prefetch(threads=self.setting["threads"]) as loader:
                for name, tensor in loader:
                    state[name].copy_(tensor)

    def load_part(self, parts: Mapping[str, Part], folder: Path) -> None:
        """See `Peer.load_part`."""
        self._in_threads(parts, folder)

    def _in_threads(self, parts: Mapping[str, Part], folder: Path) -> None:
        threads = self.setting["threads"]
        names = sorted(parts, key=lambda name: parts[name].data.nbytes)

        def read(first: int) -> None:
            from safetensors import safe_open

            with safe_open(folder / _FILE, framework="pt") as file:
                for name in names[first::threads]:
                    part = parts[name]
                    box = [slice(at, at + n) for at, n in zip(part.offset, part.data.shape, strict=True)]
                    part.data.copy_(file.get_slice(name)[tuple(box)])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))


def device_of(state: State) -> str:
    """Return the device of a state in the form that safetensors uses."""
    tensor: torch.Tensor = next(iter(state.values()))
    return "cpu" if tensor.is_cpu else f"cuda:{tensor.device.index or 0}"
