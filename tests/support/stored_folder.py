"""Folders of other programs in checkpoints. `tests.support.frozen_store` writes such a store to tests/data."""

from __future__ import annotations

import base64
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import casckpt
from casckpt.contents import manifests
from casckpt.format import plain
from casckpt.format.sections.columns import pack
from casckpt.format.sections.recipe import NOTE, FilePiece, Item, ItemKind, decode_recipe
from casckpt.saving.leader import Leader

CELL, BLOB = 4096, 65536
LEAST = 1024  # bytes of a tensor that becomes an entry, and of other bytes that do not go into the pack
PACK = "/0"  # no path begins with a slash
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class Tensor(NamedTuple):
    """A tensor in a file: its first byte, and how it is stored."""

    start: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes


def encode_recipe(items: Sequence[Item]) -> bytes:
    """Encode the note. The pieces of an entry must follow each other."""
    return plain.encode(columns_of(items))


def columns_of(items: Sequence[Item]) -> dict[str, Any]:
    """Return the note, before it is encoded."""
    pieces = [piece for item in items for piece in item.pieces]
    return {
        "paths": [item.path for item in items],
        "kinds": pack([item.kind for item in items]),
        "modes": pack([item.mode for item in items]),
        "targets": [item.target for item in items if item.kind == ItemKind.LINK],
        "pieces": pack([len(item.pieces) for item in items if item.kind == ItemKind.FILE]),
        "entries": pack([piece.entry for piece in pieces]),
        "lengths": pack([piece.length for piece in pieces]),
    }


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


def rebuild(items: Iterable[Item], read: Callable[[FilePiece], bytes], out: Path) -> None:
    """Create the items below ``out``. Folders get their modes last, because they may be read-only."""
    made = list(items)
    for item in made:
        path = out / item.path
        if item.kind == ItemKind.LINK:
            path.symlink_to(item.target)
        elif item.kind == ItemKind.FOLDER:
            path.mkdir()
        else:
            with path.open("xb") as file:
                file.writelines(map(read, item.pieces))
            path.chmod(item.mode)
    for item in reversed(made):
        if item.kind == ItemKind.FOLDER:
            (out / item.path).chmod(item.mode)


def tensors_in(name: str, data: bytes) -> list[Tensor]:
    """Return the tensors that lie whole in a safetensors file, and the storages in one of torch.save (of float32)."""
    if name.endswith(".safetensors"):
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        found = [
            Tensor(begin + one["data_offsets"][0], key, _DTYPES[one["dtype"]], tuple(one["shape"]))
            for key, one in header.items()
        ]
    elif name.endswith(".pt"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [one for one in archive.infolist() if "/data/" in one.filename]
        found = [Tensor(_begin(data, one), one.filename, torch.float32, (one.file_size // 4,)) for one in members]
    else:
        found = []
    return sorted(one for one in found if one.nbytes >= LEAST)


def _begin(data: bytes, member: zipfile.ZipInfo) -> int:
    """Return where a member's bytes begin, behind its local header of 30 bytes, its name, and extra bytes."""
    header = data[member.header_offset : member.header_offset + 30]
    return member.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def cut(files: Iterable[tuple[Item, bytes]]) -> tuple[dict[str, dict[str, torch.Tensor]], list[Item]]:
    """Return the state to save, and the items with their pieces."""
    forms: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...], bytearray]]] = {}
    placed = []
    for item, data in files:
        tensors, places, at = tensors_in(item.path, data), [], 0
        is_small = len(data) - sum(one.nbytes for one in tensors) < LEAST
        others = Tensor(0, "bytes", torch.uint8, (-1,))
        for one in (*tensors, Tensor(len(data), "", torch.uint8, (0,))):
            end = one.start + one.nbytes
            for path, part, found in (
                (PACK if is_small else item.path, others, data[at : one.start]),
                (item.path, one, data[one.start : end]),
            ):
                if found:
                    held = forms.setdefault(path, {}).setdefault(part.name, (part.dtype, part.shape, bytearray()))[2]
                    places.append((path, part.name, len(held), len(found)))
                    held.extend(found)
            at = end
        placed.append((item, places))
    keys = [(path, name) for path, parts in forms.items() for name in parts]  # in the order of the manifest
    state = {
        path: {n: torch.frombuffer(held, dtype=t).reshape(shape) for n, (t, shape, held) in parts.items()}
        for path, parts in forms.items()
    }
    return state, [
        replace(item, pieces=tuple(FilePiece(keys.index((path, name)), *where) for path, name, *where in places))
        for item, places in placed
    ]


def save_folder(store: casckpt.Store, folder: Path, *, run: str, step: int) -> casckpt.Checkpoint:
    """Store a folder of another program in a checkpoint."""
    state, items = cut(read_folder(folder))
    conclude, note = Leader.conclude, {NOTE: encode_recipe(items)}

    def with_note(leader: Leader, parts: Any, streams: Any, tree: bytes) -> Any:
        return conclude(leader, parts, streams, tree, note)

    with mock.patch.object(Leader, "conclude", with_note):
        return store.save(state, run=run, step=step)


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
    save_folder(store, folder, run="files", step=2)
