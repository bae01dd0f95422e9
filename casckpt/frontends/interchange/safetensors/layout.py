"""Computes the layout of safetensors files, with every byte position, without reading or writing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from casckpt.base.groups import in_batches
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
    """A file: the bytes ``head``, followed by the data of ``tensors`` in order, without holes."""

    name: str
    head: bytes
    tensors: tuple[ViewTensor, ...]

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.head) + sum(tensor.entry.nbytes for tensor in self.tensors)

    @property
    def starts(self) -> list[int]:
        """The byte offset in the file at which each tensor begins."""
        return list(accumulate((tensor.entry.nbytes for tensor in self.tensors[:-1]), initial=len(self.head)))


@dataclass(frozen=True)
class Layout:
    """A layout. ``files``: the files with tensors.

    ``index``: the bytes of the file `INDEX`, if there are several files.
    """

    files: tuple[FileLayout, ...]
    index: bytes | None = None

    @property
    def names(self) -> list[str]:
        """The names of all files. The index is last, because its presence marks a folder as complete."""
        return [file.name for file in self.files] + ([INDEX] if self.index is not None else [])


def lay_out(tensors: Iterable[ViewTensor], metadata: Mapping[str, str], most: int | None = None) -> Layout:
    """Lay out files for the given tensors. Equal names, dtypes, shapes and ``metadata`` yield equal bytes.

    ``most``: the maximum number of data bytes in a file, or None for one file of any size. A larger tensor has its own
    file. The tensors are in the safetensors library's order. Raises InvalidInput, naming the tensor, if such a file
    cannot hold it.
    """
    given = sorted(tensors, key=lambda tensor: tensor.name)
    for tensor in given:
        file_type(tensor.name, tensor.entry.dtype, tensor.entry.shape)
    shards = [given] if most is None else plan_shards(given, most)
    names = _file_names(len(shards))
    files = tuple(_file(name, shard, metadata) for name, shard in zip(names, shards, strict=True))
    if len(files) == 1:
        return Layout(files)
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    return Layout(files, encode_index(weight_map, sum(tensor.entry.nbytes for tensor in given)))


def _file(name: str, tensors: Sequence[ViewTensor], metadata: Mapping[str, str]) -> FileLayout:
    ordered = sorted(tensors, key=lambda tensor: (-rank_of(tensor.entry.dtype), tensor.name))
    headers = (TensorHeader(name, entry.dtype, entry.shape, entry.nbytes) for name, entry, _ in ordered)
    return FileLayout(name, encode_header(headers, metadata), tuple(ordered))


def plan_shards(streams: Sequence[ViewTensor], most: int) -> list[list[ViewTensor]]:
    """Split tensors, in order, into files of at most ``most`` data bytes. A larger tensor has its own file."""
    if most < 1:
        raise InvalidInput(
            f"files of at most {most} bytes are too small to hold any tensor; pass a larger --max-shard-size"
        )
    return list(in_batches(streams, lambda tensor: tensor.entry.nbytes, most)) or [[]]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [f"{STEM}{SUFFIX}"]
    if count > 99_999:
        raise Refused(f"{count} files are too many; pass a larger --max-shard-size")
    return [f"{STEM}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
