"""A checkpoint out of a store, into safetensors files: window by window, never a whole model in memory.

What is written stands under temporary names until it is whole and on the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

import torch

from casckpt.checkpoint.contents import Contents
from casckpt.checkpoint.download import Download, Want
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.store import Store
from casckpt.errors import Damaged, InvalidInput, MissingKey, Refused
from casckpt.format.dtypes import itemsize
from casckpt.format.manifest import ATTACHMENT, TENSOR, Entry, Manifest
from casckpt.format.regions import Region, full_box, whole
from casckpt.frontends.attached import check_file_names
from casckpt.frontends.new_files import new_file, new_folder, place_for
from casckpt.frontends.safetensors_files import Named, encode_header, encode_index, file_type
from casckpt.frontends.safetensors_import import METADATA_KEY
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.plan.progress import Progress, Shown
from casckpt.plan.reads import covers
from casckpt.plan.sizes import parse_size
from casckpt.repository import manifests
from casckpt.storage.files import is_url
from casckpt.tensors.memory import BITS, Destination

WINDOW_BYTES: Final = 64 << 20
STEM, SUFFIX = "model", ".safetensors"
INDEX: Final = f"{STEM}{SUFFIX}.index.json"
_OURS = re.compile(rf"{STEM}(-[0-9]{{5}}-of-[0-9]{{5}})?\{SUFFIX}")


class Stream(NamedTuple):
    """An entry of a manifest, and its number there."""

    number: int
    entry: Entry


class Piece(NamedTuple):
    """Elements [lo, hi) of a stream."""

    stream: Stream
    lo: int
    hi: int

    @property
    def nbytes(self) -> int:
        """Bytes of these elements."""
        return (self.hi - self.lo) * itemsize(self.stream.entry.dtype)


@dataclass(frozen=True)
class Exported:
    """What an export wrote. ``left_out``: keys that a safetensors file cannot hold, for they are no tensors."""

    checkpoint: Checkpoint
    files: tuple[Path | str, ...]
    tensors: int
    nbytes: int
    attachments: tuple[str, ...]
    left_out: tuple[str, ...]


def export_safetensors(
    store: AnyStore,
    ref: str | Checkpoint,
    out: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    keys: Sequence[str] | None = None,
    attachments: bool = True,
    force: bool = False,
    progress: Shown | None = None,
) -> Exported:
    """Write the tensors of a checkpoint as safetensors, under their flat keys; every byte that is read is verified.

    ``out``, a path or a URL (to which a temporary one is copied): with the suffix ".safetensors" that one file; else a
    folder, for which ``model.safetensors``, or several files of at most ``max_shard_size`` bytes and their index, and
    all attachments are made (``attachments``: unless False). ``keys``: fnmatch patterns. ``force``: write over what is
    there. ``progress`` is called with numbers of bytes.

    Raises NotFound, MissingKey if a pattern matches nothing, Conflict if ``out`` is there, InvalidInput naming a key
    that safetensors cannot hold or an attachment that can be no file, Damaged, StorageError. After an error nothing
    stands under the final names.
    """
    opened = as_store(store)
    job = _Job(opened, opened.get(ref), keys, progress)
    with place_for(out, force=force, last=(INDEX,)) as target:
        found = _exported_to(target, job, max_shard_size, attached=attachments, force=force)
    if not is_url(out):
        return found
    names = (Path(path).relative_to(target).as_posix() for path in found.files)
    return replace(found, files=tuple(f"{out}/{name}" if name != "." else str(out) for name in names))


def _exported_to(target: Path, job: _Job, max_shard_size: int | str, *, attached: bool, force: bool) -> Exported:
    if target.suffix == SUFFIX and not os.path.isdir(target):  # Path.is_dir raises what the system refuses
        with new_file(target, force=force) as path:
            job.write_tensors(path, job.streams)
        return job.exported((target,), ())
    most = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    shards = plan_shards(job.streams, most)
    names = _file_names(len(shards))
    attachments = job.attachments([*names, INDEX]) if attached else {}
    with new_folder(target, force=force, stale=_is_ours, last=(*names, INDEX)) as folder:
        for name, stream in attachments.items():
            job.write_attachment(folder / name, name, stream)
        for name, shard in zip(names, shards, strict=True):
            job.write_tensors(folder / name, shard)
        if len(shards) > 1:
            index = {one.entry.key: name for name, shard in zip(names, shards, strict=True) for one in shard}
            (folder / INDEX).write_bytes(encode_index(index, job.nbytes))
            names = [*names, INDEX]
    return job.exported([target / name for name in (*names, *attachments)], tuple(attachments))


def plan_shards(streams: Sequence[Stream], most: int) -> list[list[Stream]]:
    """Split into files of at most ``most`` bytes of data, in order; a larger tensor has its own. One at least."""
    if most < 1:
        raise InvalidInput(f"files of at most {most} bytes hold nothing; give a larger --max-shard-size")
    shards: list[list[Stream]] = [[]]
    room = most
    for one in streams:
        if one.entry.nbytes > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(one)
        room -= one.entry.nbytes
    return shards


def plan_windows(streams: Iterable[Stream], most: int, cell_bytes: int) -> Iterator[list[Piece]]:
    """Cut the data of ``streams``, one after the other, into pieces of at most ``most`` bytes together.

    Tensors are cut between cells, so that no cell is read twice, unless ``most`` is less than a cell.
    """
    window: list[Piece] = []
    room = most
    for one in streams:
        lo, size = 0, itemsize(one.entry.dtype)
        cell = max(cell_bytes // size, 1)
        while lo < one.entry.numel:
            fits = room // size if window else max(room // size, 1)
            hi = min(lo + fits, one.entry.numel)
            if hi < one.entry.numel:
                hi = max(hi // cell * cell, lo) if window or fits >= cell else hi
            if hi > lo:
                window.append(Piece(one, lo, hi))
                room -= (hi - lo) * size
                lo = hi
            if lo < one.entry.numel:
                yield window
                window, room = [], most
    if window:
        yield window


class _Job:
    """One export."""

    def __init__(
        self, store: Store, checkpoint: Checkpoint, keys: Sequence[str] | None, progress: Shown | None
    ) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifests.get(store.repository, checkpoint.commit)
        self.streams, self.left_out = _chosen(self.manifest, keys)
        counted = Progress(progress).of(sum(one.entry.nbytes for one in self.streams))
        self.download = Download(store.repository, self.manifest, True, min(8, os.cpu_count() or 1), counted)
        self.metadata = _file_metadata(checkpoint)
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        for one in self.streams:
            file_type(one.entry.key, one.entry.dtype, one.entry.shape)  # before anything is written

    @property
    def nbytes(self) -> int:
        """Bytes of all chosen tensors."""
        return sum(one.entry.nbytes for one in self.streams)

    def attachments(self, taken: Sequence[str]) -> dict[str, Stream | bytes]:
        """All attachments by name: short ones whole."""
        body = self.manifest.body
        found: dict[str, Stream | bytes] = {one.name: one.data for one in body.attachments}
        for number, entry in enumerate(body.entries):
            if entry.kind == ATTACHMENT:
                found[entry.key] = Stream(number, entry)
        check_file_names(found, frozenset(taken).__contains__)
        return found

    def write_attachment(self, path: Path, name: str, found: Stream | bytes) -> None:
        """Write one attachment."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path, found if isinstance(found, bytes) else b"", [] if isinstance(found, bytes) else [found])

    def write_tensors(self, path: Path, streams: Sequence[Stream]) -> None:
        """Write one safetensors file."""
        named = (Named(one.entry.key, one.entry.dtype, one.entry.shape, one.entry.nbytes) for one in streams)
        self._write(path, encode_header(named, self.metadata), streams)

    def _write(self, path: Path, head: bytes, streams: Sequence[Stream]) -> None:
        with path.open("xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(head))
            for window in plan_windows(streams, WINDOW_BYTES, self.manifest.body.cell_bytes):
                _write_all(file.fileno(), self._read(window))
            os.fsync(file.fileno())

    def _read(self, window: Sequence[Piece]) -> memoryview:
        total = sum(piece.nbytes for piece in window)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.uint8, device="cpu")
        wants, start = [], 0
        for piece in window:
            wants.append(self._want(piece, self._buffer[start : start + piece.nbytes]))
            start += piece.nbytes
        self.download.run(wants)
        return memoryview(self._buffer.numpy().data)[:total]

    def _want(self, piece: Piece, data: torch.Tensor) -> Want:
        entry = piece.stream.entry
        region = Region(full_box(entry.shape), piece.lo, piece.hi)
        kind = BITS[itemsize(entry.dtype)]
        return Want(piece.stream.number, Destination(region, data.view(kind), kind))

    def exported(self, files: Sequence[Path], attachments: tuple[str, ...]) -> Exported:
        """What was written."""
        return Exported(
            self.checkpoint, tuple(files), len(self.streams), self.nbytes, attachments, tuple(self.left_out)
        )


def _chosen(manifest: Manifest, patterns: Sequence[str] | None) -> tuple[list[Stream], list[str]]:
    """The tensors to export, largest elements first so that all are aligned; and what is left out."""
    contents = Contents(manifest, 0)
    tensors = [Stream(number, manifest.body.entries[number]) for number in contents.numbers.values()]
    tensors = [one for one in tensors if one.entry.kind == TENSOR and _matches(one.entry.key, patterns)]
    _check_used(manifest, [one.entry.key for one in tensors], patterns)
    for one in tensors:
        if not covers(manifest.extents(one.entry), whole(one.entry.shape)):
            raise Damaged(f"the checkpoint holds {one.entry.key!r} only in part", key=one.entry.key)
    mine = {one.number for one in tensors}
    others = [
        f"{entry.key} (of rank {entry.rank})"
        for number, entry in enumerate(manifest.body.entries)
        if entry.kind == TENSOR and number not in mine and _matches(entry.key, patterns)
    ]
    objects = [key for key in contents.objects if _matches(key, patterns)]
    return sorted(tensors, key=lambda one: -itemsize(one.entry.dtype)), objects + others


def _matches(key: str, patterns: Sequence[str] | None) -> bool:
    return not patterns or any(fnmatchcase(key, pattern) for pattern in patterns)


def _check_used(manifest: Manifest, keys: Sequence[str], patterns: Sequence[str] | None) -> None:
    for pattern in patterns or ():
        if not any(fnmatchcase(key, pattern) for key in keys):
            raise MissingKey(
                f"no tensor of {manifest.body.run}@{manifest.body.step} matches {pattern!r}; `casckpt show` lists them",
                keys=(pattern,),
            )


def _file_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """What the imported file said of itself; else what transformers asks for."""
    said = checkpoint.metadata.get(METADATA_KEY)
    if isinstance(said, dict) and all(isinstance(value, str) for value in said.values()):
        return said
    return {"format": "pt"}


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [f"{STEM}{SUFFIX}"]
    if count > 99_999:
        raise Refused(f"{count} files are too many; give a larger --max-shard-size")
    return [f"{STEM}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def _is_ours(name: str) -> bool:
    """Has an export of another shape made this file? Then it must not stay beside the new ones."""
    return name == INDEX or _OURS.fullmatch(name) is not None


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]
