"""The layout of safetensors files: where each tensor lies is known before a byte is read or written. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from casckpt.errors import InvalidInput, Refused
from casckpt.frontends.interchange.safetensors.files import (
    INDEX_SUFFIX,
    TensorHeader,
    encode_header,
    encode_index,
    file_type,
    rank_of,
)
from casckpt.frontends.views.recut import ViewTensor

STEM, SUFFIX = "model", ".safetensors"
INDEX: Final = f"{STEM}{INDEX_SUFFIX}"


@dataclass(frozen=True)
class FileLayout:
    """One file: ``head``, its first bytes, and then the data of ``tensors``, one after the other without holes."""

    name: str
    head: bytes
    tensors: tuple[ViewTensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(one.entry.nbytes for one in self.tensors)

    @property
    def starts(self) -> list[int]:
        """The byte of the file at which each tensor begins."""
        return list(accumulate((one.entry.nbytes for one in self.tensors[:-1]), initial=len(self.head)))


@dataclass(frozen=True)
class Layout:
    """``files``: with tensors. ``index``: the bytes of the file `INDEX`, where there are several."""

    files: tuple[FileLayout, ...]
    index: bytes | None = None

    @property
    def names(self) -> list[str]:
        """Of all files, that of the index at the end: a folder counts as whole when it is there."""
        return [one.name for one in self.files] + ([INDEX] if self.index is not None else [])


def lay_out(tensors: Iterable[ViewTensor], metadata: Mapping[str, str], most: int | None = None) -> Layout:
    """The files for some tensors: the same, to the byte, for the same names, dtypes, shapes and ``metadata``.

    ``most``: bytes of data in one file, of which a larger tensor has its own; None: one file, whatever its size.
    Within a file tensors lie as the safetensors library orders them. Raises InvalidInput, naming the name, for what
    such a file cannot hold.
    """
    given = sorted(tensors, key=lambda one: one.name)
    for one in given:
        file_type(one.name, one.entry.dtype, one.entry.shape)
    shards = [given] if most is None else plan_shards(given, most)
    names = _file_names(len(shards))
    files = tuple(_file(name, shard, metadata) for name, shard in zip(names, shards, strict=True))
    if len(files) == 1:
        return Layout(files)
    weight_map = {one.name: file.name for file in files for one in file.tensors}
    return Layout(files, encode_index(weight_map, sum(one.entry.nbytes for one in given)))


def _file(name: str, tensors: Sequence[ViewTensor], metadata: Mapping[str, str]) -> FileLayout:
    ordered = sorted(tensors, key=lambda one: (-rank_of(one.entry.dtype), one.name))
    named = (TensorHeader(one.name, one.entry.dtype, one.entry.shape, one.entry.nbytes) for one in ordered)
    return FileLayout(name, encode_header(named, metadata), tuple(ordered))


def plan_shards(streams: Sequence[ViewTensor], most: int) -> list[list[ViewTensor]]:
    """Split into files of at most ``most`` bytes of data, in order; a larger tensor has its own. One at least."""
    if most < 1:
        raise InvalidInput(f"files of at most {most} bytes hold nothing; give a larger --max-shard-size")
    shards: list[list[ViewTensor]] = [[]]
    room = most
    for one in streams:
        if one.entry.nbytes > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(one)
        room -= one.entry.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [f"{STEM}{SUFFIX}"]
    if count > 99_999:
        raise Refused(f"{count} files are too many; give a larger --max-shard-size")
    return [f"{STEM}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
