"""Traces of the states of real training runs, step by step, which scenarios can replay.

A trace is a folder. Its ``index.json`` is written last. Each checkpoint has ``<step>.<part>.npy`` files, which are
flat arrays with the elements of all tensors. Each step in a run of consecutive versions has a file
``<step>.changes.npz``: which elements of the weights have changed since the previous step, and their new values. The
parts are "weights" (bfloat16 as uint16, or float32), "master", "exp_avg" and "exp_avg_sq" (float32).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import platformdirs

Flat: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.float32]
CELL = 1 << 20
VERSION = 1  # of the training code; traces of a different version are regenerated


class Tensor(msgspec.Struct, frozen=True):
    """A tensor of the model.

    Its elements are at [``start``, ``stop``) in each part. ``matrix``: whether it is a matrix of the encoder.
    """

    name: str
    start: int
    stop: int
    matrix: bool


class Index(msgspec.Struct, frozen=True):
    """The contents of a trace. ``steps``: steps with whole states. ``run``: the first and last consecutive version."""

    version: int
    name: str
    about: str
    tensors: tuple[Tensor, ...]
    parts: tuple[str, ...]
    steps: tuple[int, ...]
    run: tuple[int, int] | None


@dataclass(frozen=True)
class Trace:
    """A trace in a folder."""

    folder: Path
    index: Index

    def part(self, step: int, part: str) -> Flat:
        """Map all elements of a part at one step into memory.

        Raises ValueError if there is no checkpoint of that step.
        """
        if step not in self.index.steps or part not in self.index.parts:
            raise ValueError(f"{self.index.name} has no {part} at step {step}; it has steps {self.index.steps}")
        found: Flat = np.load(self.folder / f"{step}.{part}.npy", mmap_mode="r")
        return found

    def versions(self) -> Iterator[tuple[int, Flat]]:
        """Yield the consecutive weight versions with their steps, in one array that is updated for each version."""
        if self.index.run is None:
            return
        first, last = self.index.run
        weights = self.part(first, "weights").copy()
        yield first, weights
        for step in range(first + 1, last + 1):
            with np.load(self.folder / f"{step}.changes.npz") as changes:
                weights[changes["places"]] = changes["values"]
            yield step, weights


def cut(tensor: Tensor, itemsize: int) -> list[slice]:
    """Split a tensor into cells of at most 1 MiB."""
    each = CELL // itemsize
    return [slice(start, min(start + each, tensor.stop)) for start in range(tensor.start, tensor.stop, each)]


def default_folder() -> Path:
    """Return the default folder for traces, which is in the user's cache."""
    return platformdirs.user_cache_path("casckpt") / "bench" / "traces"


def find(above: Path, name: str) -> Trace | None:
    """Return the trace with this name if it exists, is complete, and has this version."""
    folder = above / name
    try:
        index = msgspec.json.decode((folder / "index.json").read_bytes(), type=Index)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return Trace(folder, index) if index.version == VERSION else None


class Recorder:
    """Writes a trace, part by part and step by step. `close` completes it."""

    def __init__(self, above: Path, name: str) -> None:
        self.folder = above / name
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "index.json").unlink(missing_ok=True)
        self._last: Flat | None = None
        self._run: list[int] = []
        self._steps: list[int] = []
        self._parts: tuple[str, ...] = ()

    def checkpoint(self, step: int, parts: dict[str, Flat]) -> None:
        """Add a whole state."""
        for name, values in parts.items():
            np.save(self.folder / f"{step}.{name}.npy", values)
        self._steps.append(step)
        self._parts = tuple(parts)

    def version(self, step: int, weights: Flat) -> None:
        """Add the next consecutive version. The first one also needs a checkpoint."""
        if self._last is not None:
            places = np.flatnonzero(weights != self._last).astype(np.uint32)
            np.savez(self.folder / f"{step}.changes.npz", places=places, values=weights[places])
        self._last = weights.copy()
        self._run.append(step)

    def close(self, about: str, tensors: Iterable[Tensor]) -> Trace:
        """Complete the trace."""
        run = (self._run[0], self._run[-1]) if self._run else None
        name = self.folder.name
        index = Index(VERSION, name, about, tuple(tensors), self._parts, tuple(self._steps), run)
        (self.folder / "index.json").write_bytes(msgspec.json.encode(index))
        return Trace(self.folder, index)
