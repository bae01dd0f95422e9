"""Randomly changed inputs for importers. Importing any of them either succeeds or raises a casckpt error.

``python -m tests.support.fuzz KIND COUNT SEED`` imports COUNT changed inputs of one kind, with 1 GiB of memory. It
prints the outcomes as JSON: counts by error name, or "ok". If an import raises anything else, runs code that a pickle
names, or commits an unreadable checkpoint, it stops with a traceback and keeps the input.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import casckpt
from casckpt.errors import CasckptError
from casckpt.frontends.convert import import_any, look_at
from tests.support.dcp import save
from tests.support.tally import tally

MEMORY: Final = 1 << 30
sung: list[str] = []


def sing(note: str) -> str:
    """A function that imports must never call."""
    sung.append(note)
    return note


class Canary:
    """Its pickle calls `sing`."""

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return sing, ("run",)


def _state(rare: Any) -> dict[str, Any]:
    weights = {f"layer.{i}": torch.arange(6, dtype=torch.float32).view(2, 3) + i for i in range(3)}
    return {"model": weights, "step": 7, "lr": [0.1, None, "x"], "rng": {"seed": b"abc", 3: (1, 2)}, "rare": rare}


def _safetensors(path: Path, rare: Any) -> Path:
    save_file(_state(rare)["model"], path / "a.safetensors", metadata={"format": "pt"})
    return path / "a.safetensors"


def _hugging_face(path: Path, rare: Any) -> Path:
    files = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(_state(rare)["model"])}
    for name in set(files.values()):
        save_file({key: value for key, value in _state(rare)["model"].items() if files[key] == name}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (path / "config.json").write_text("{}")
    return path


def _dcp(path: Path, rare: Any) -> Path:
    save(_state(rare), FileSystemWriter(path))
    if isinstance(rare, Canary):
        found = pickle.loads((path / ".metadata").read_bytes())
        found.planner_data["rare"] = rare
        (path / ".metadata").write_bytes(pickle.dumps(found))
    return path


def _zip(path: Path, rare: Any) -> Path:
    torch.save(_state(rare), path / "a.pt")
    return path / "a.pt"


def _legacy(path: Path, rare: Any) -> Path:
    torch.save(_state(rare), path / "a.pt", _use_new_zipfile_serialization=False)
    return path / "a.pt"


def _olmo(path: Path, rare: Any) -> Path:
    groups = {"_param_names": ["layer.0"], "params": [0], "lr": 0.5, "betas": (0.9, 0.99), "rare": rare}
    packed = torch.frombuffer(bytearray(pickle.dumps(groups)), dtype=torch.uint8).clone()
    weights = _state(rare)["model"]
    optim = {f"state.{key}.__exp_avg": value for key, value in weights.items()} | {"param_group0": packed}
    for part, tensors in (("model", weights), ("optim", optim)):
        (path / part).mkdir()
        described = {}
        for key, value in tensors.items():
            spec = {"rank_0.safetensors": {"flattened_offsets": [[0, value.numel()]]}}
            described[key] = {"shape": list(value.shape), "is_sharded": True, "shard_spec_per_file": spec}
        (path / part / "metadata.json").write_text(json.dumps({"tensors": described}))
        flat = {key: value.reshape(-1).clone() for key, value in tensors.items()}
        save_file(flat, path / part / "rank_0.safetensors")
    return path


def _olmo_trainer(path: Path, rare: Any) -> Path:
    (path / "train").mkdir()
    torch.save({"step": 10, "rare": rare}, path / "train/rank0.pt")
    save({"model": _state(rare)["model"]}, FileSystemWriter(path / "model_and_optim"))
    return path


def _torch_dist(path: Path, rare: Any) -> Path:
    from tests.support.torch_dist_folder import FOLDER  # imports Megatron-core

    shutil.copytree(FOLDER, path, dirs_exist_ok=True)
    return path


KINDS: Final[dict[str, Callable[[Path, Any], Path]]] = {
    "safetensors": _safetensors, "hugging-face": _hugging_face, "dcp": _dcp, "torch-zip": _zip,
    "torch-legacy": _legacy, "olmo": _olmo, "olmo-trainer": _olmo_trainer, "torch-dist": _torch_dist,
}  # fmt: skip
"""For each kind of input, what creates it in an empty folder, and the path to import."""


# ways to change inputs

_ODD = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b".", b"N", b"]", b"}", b")", b"(", b"t", b"R", b"b", b"u", b"h\x00", b"0",
    b"\x85", b"q\xff", b"r\xff\xff\xff\x7f", b"j\x00\x00\x00\x00", b"ctests.support.fuzz\nsing\n",
    b"\x8a\x08" + b"\xff" * 8,
    b"\xff" * 8, b"\x00" * 8, b"[" * 3000, b"9" * 5000, b'"\\ud800"', b"-1", b"1e999", b"null",
)  # fmt: skip


def bent(data: bytes, random: Random) -> bytes:
    """Change one to four positions.

    Half of the time, they are near the beginning; half of the time, the length is unchanged.
    """
    same_length, near = random.random() < 0.5, random.random() < 0.5
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(min(len(data), 2000) + 1 if near else len(data) + 1)
        data = _changed(data, at, random.randrange(4 if same_length else 8), random)
    return data


def _changed(data: bytes, at: int, how: int, random: Random) -> bytes:
    n, odd = random.choice((1, 1, 2, 4, 8, 40)), random.choice(_ODD)
    start = random.randrange(len(data) + 1)
    before, behind = data[:at], data[at:]
    number = int.from_bytes(behind[:4], "little") + random.choice((-1, 1, 1 << 16, 1 << 31))
    flipped = bytes([(behind or b"\0")[0] ^ 1 << random.randrange(8)])
    changes = (
        flipped + behind[1:], random.randbytes(n) + behind[n:], odd + behind[len(odd) :],
        (number % (1 << 32)).to_bytes(4, "little") + behind[4:],
        odd + behind, behind[n:], b"", data[start : start + n] + behind,
    )  # fmt: skip
    return before + changes[how]


class Bender:
    """Creates changed inputs of one kind, one after the other, in ``folder``.

    An input that fails the test is left there.
    """

    def __init__(self, kind: str, folder: Path, seed: int) -> None:
        self._kind = kind
        self._random = Random(f"{kind} {seed}")
        self._place = folder / "bent"
        self._made = [self._files(KINDS[kind], folder / f"in{i}", rare) for i, rare in enumerate((None, Canary()))]
        self._name = f"memory://fuzz-{kind}-{os.getpid()}-{seed}"
        self._step = 0

    @staticmethod
    def _files(make: Callable[[Path, Any], Path], folder: Path, rare: Any) -> tuple[str, dict[str, bytes]]:
        folder.mkdir()
        given = make(folder, rare).relative_to(folder).as_posix()
        files = (path for path in folder.rglob("*") if path.is_file())
        return given, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def outcomes(self, count: int) -> Counter[str]:
        """Count the outcomes of ``count`` imports: "ok" or the name of a casckpt error. Raise any other error."""
        return Counter(self._one() for _ in range(count))

    def _one(self) -> str:
        given, files = self._made[self._random.random() < 0.25]
        chosen = self._random.sample(sorted(files), self._random.choice((1, 1, 1, min(2, len(files)))))
        for name, data in files.items():
            path = self._place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bent(data, self._random) if name in chosen else data)
        sung.clear()  # creating an input may call `sing`
        self._step += 1
        tally(f"bent input: {self._kind}")
        outcome = self._imported(self._place / given)
        if sung:
            raise AssertionError(f"what {self._place} names was called")
        return outcome

    def _imported(self, path: Path) -> str:
        store = casckpt.open(f"{self._name}-{self._step // 50}")  # saves slow down in a store with thousands of commits
        try:
            made = import_any(store, look_at(path), step=self._step)
        except CasckptError as error:
            return type(error).__name__
        store.read(made)  # a committed checkpoint must be readable
        return "ok"


def bound_memory(nbytes: int) -> None:
    """Limit the address space of this process to its current size plus ``nbytes``."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(kind: str, count: int, seed: int) -> None:
    """Import ``count`` changed inputs, and print the outcomes."""
    bound_memory(MEMORY)
    warnings.simplefilter("ignore")  # about deprecated protocols and types of torch
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="casckpt-fuzz-")
    outcomes = Bender(kind, Path(folder), seed).outcomes(count)
    shutil.rmtree(folder)
    print(json.dumps(outcomes))  # noqa: T201 - its parent reads it


if __name__ == "__main__":
    from tests.support.fuzz import main as run  # the module that the pickles name, not a second copy

    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
