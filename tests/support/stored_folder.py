"""Folders of other programs in checkpoints. `tests.support.frozen_store` writes such a store to tests/data."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import casckpt
from casckpt.contents import manifests
from casckpt.format import plain
from casckpt.format.sections.recipe import NOTE, Item, ItemKind, decode_recipe, encode_recipe

CELL, BLOB = 4096, 65536
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def columns_of(items: Sequence[Item]) -> dict[str, Any]:
    """Return the note, before it is encoded."""
    return plain.decode(encode_recipe(items))  # type: ignore[no-any-return] # a dict


def read_folder(folder: Path) -> Iterator[tuple[Item, bytes]]:
    """Yield the items of a folder in order, and the bytes of its files."""
    for path in sorted([folder, *folder.rglob("*")], key=lambda path: _below(folder, path)):
        name, mode = _below(folder, path), path.lstat().st_mode & 0o777
        if path.is_symlink():
            yield Item(name, ItemKind.LINK, 0, target=os.readlink(path)), b""
        elif path.is_dir():
            yield Item(name, ItemKind.FOLDER, mode), b""
        else:
            yield Item(name, ItemKind.FILE, mode), path.read_bytes()


def _below(folder: Path, path: Path) -> str:
    return "" if path == folder else path.relative_to(folder).as_posix()


def items_of(store: casckpt.Store, checkpoint: casckpt.Checkpoint) -> list[Item]:
    """Return the items of the folder in a checkpoint."""
    manifest = manifests.get(store.repository, checkpoint.commit)
    return decode_recipe(manifest.body.notes[NOTE], manifest.entries)


def write_folder(folder: Path, step: int) -> None:
    """Write the folder of a trainer, and some names and kinds that are rare there."""
    (folder / f"checkpoint-{step}").mkdir(parents=True)
    (folder / "logs").mkdir(mode=0o700)
    (folder / "shared").mkdir()
    (folder / "odd \\ names\n").mkdir()
    weights = {"w": torch.arange(2600.0).view(40, 65) + step, "b": torch.arange(64).bfloat16()}
    average = weights["w"] / 7
    optimizer = {"exp_avg": average, "a view": average[3:5], "step": step}
    here = folder / f"checkpoint-{step}"
    (here / "model.safetensors").write_bytes(safetensors_of(weights))
    torch.save(optimizer, here / "optimizer.pt")
    (here / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (here / "tokenizer.json").symlink_to("../shared/tokenizer.json")
    (here / "empty.bin").touch(0o600)
    (folder / "latest").symlink_to(f"checkpoint-{step}/")
    (folder / "shared" / "tokenizer.json").write_text('{"é": 1}\n')
    (folder / "odd \\ names\n" / "名 .txt").write_text("odd\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o750)
    (folder / "legacy.bin").write_bytes(bytes(range(251)) * 55)


def safetensors_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a safetensors file."""
    header, at = dict[str, Any](), 0
    names = {dtype: name for name, dtype in _DTYPES.items()}
    for key, value in tensors.items():
        header[key] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at := at + value.nbytes],
        }
    text = json.dumps(header).encode()
    data = (value.contiguous().view(torch.uint8).numpy().tobytes() for value in tensors.values())
    return len(text).to_bytes(8, "little") + text + b"".join(data)


def described(folder: Path) -> list[dict[str, Any]]:
    """Return the items of a folder as JSON can hold them."""
    return [
        {"path": item.path, "kind": item.kind.name, "mode": item.mode, "target": item.target,
         "data": base64.b64encode(data).decode()}
        for item, data in read_folder(folder)
    ]  # fmt: skip


def fill(store: casckpt.Store, folder: Path) -> None:
    """Write the folder, and store it."""
    os.umask(0o022)
    write_folder(folder, 2)
    store.import_files(folder, run="files", step=2)
