"""Safetensors files and folders that tests import and export, or read as `casckpt serve` sends them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

import casckpt
from casckpt.contents.checkpoint import Checkpoint
from casckpt.format.dtypes import itemsize
from casckpt.format.sections.index import Entry
from casckpt.frontends.interchange.safetensors.files import SUFFIX, decode_head
from casckpt.frontends.interchange.safetensors.layout import is_index, stem_of
from casckpt.frontends.serve.folders import FileSpan, ServedFolders
from casckpt.frontends.serve.sending import WINDOW_BYTES, RangeReader
from casckpt.frontends.views.recut import ViewTensor

Tensors = dict[str, torch.Tensor]


def tensors(seed: int) -> Tensors:
    """Return one tensor of each kind: empty, 0-d, of odd size, with NaN payloads, and larger than a cell."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (3, 7, 4), dtype=torch.uint8, generator=generator)
    return {
        "model.w": torch.randn(700, 500, generator=generator),
        "model.b": torch.randn(11, generator=generator).bfloat16(),
        "nan": bits.view(torch.float32).clone(),
        "half": torch.randn(5, 3, generator=generator).half(),
        "f64": torch.randn(2, 2, 2, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "c64": torch.randn(3, generator=generator, dtype=torch.complex64),
        "f8": bits[0].clone().view(torch.float8_e5m2),
        "f8fnuz": bits[1].clone().view(torch.float8_e4m3fnuz),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "i8": torch.tensor([-128, 127], dtype=torch.int8),
    }


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Report whether keys, shapes, dtypes and bits agree."""

    def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return {key: bits(tensor) for key, tensor in one.items()} == {key: bits(tensor) for key, tensor in other.items()}


def file_of(folder: Path, state: Tensors, name: str = "in.safetensors", **metadata: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(state, folder / name, metadata=metadata or None)
    return folder / name


def hugging_face(folder: Path, state: Tensors) -> Path:
    """Create a folder with two shards, an index and the usual other files."""
    keys = list(state)
    names = {key: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, key in enumerate(keys)}
    for name in sorted(set(names.values())):
        file_of(folder, {key: state[key] for key in keys if names[key] == name}, name, format="pt")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text('{"hidden": 4}')
    (folder / "vocab.txt").write_text("word\n" * 2000)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same again")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "secret").write_text("secret")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder tree, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpacked(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the content of a folder, however its models are divided into files.

    For each model, its dtypes, shapes, bits and metadata, under the stem of its files; for other files, their bytes.
    The metadata always has the format, which an export of a model adds.
    """
    found: dict[str, Any] = {}
    for path, data in files.items():
        folder, slash, name = path.rpartition("/")
        if is_index(name):
            held = json.loads(data)["weight_map"]
            for file in set(held.values()):
                listed = {key for key in held if held[key] == file}
                assert safetensors.torch.load(files[f"{folder}{slash}{file}"]).keys() == listed
        elif name.endswith(SUFFIX):
            header = decode_head(data[: 8 + int.from_bytes(data[:8], "little")])
            model = found.setdefault(f"{folder}{slash}{stem_of(name)}*{SUFFIX}", {"metadata": {"format": "pt"}})
            model["metadata"] |= {key: one for key, one in header.metadata.items() if not key.startswith("DCP_")}
            for key, tensor in safetensors.torch.load(data).items():
                assert key not in model
                bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                model[key] = tensor.dtype, tensor.shape, bits
        else:
            found[path] = data
    return found


def streams(kinds: list[tuple[str, int]]) -> list[ViewTensor]:
    return [
        ViewTensor(f"k{number}", Entry("tensor", f"k{number}", 0, None, dtype, itemsize(dtype), (count,), number))
        for number, (dtype, count) in enumerate(kinds)
    ]


def served(store: casckpt.Store, ref: str | Checkpoint = "latest") -> dict[str, bytes]:
    """Return the bytes of each file, by path."""
    folder = ServedFolders(store, None).of(store.get(ref))
    found: dict[str, bytes] = {}
    for name, file in folder.files.items():
        reader = RangeReader(store.repository, folder, file, FileSpan(0, file.nbytes))
        found[name] = bytes(reader.head)
        while window := reader.next():
            found[name] += reader.read(window, memoryview(bytearray(WINDOW_BYTES)))
    return found
