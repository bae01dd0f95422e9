"""Computes the layout of safetensors files, with every byte position, without reading or writing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from casckpt.base.groups import in_batches
from casckpt.errors import InvalidInput, Refused
from casckpt.frontends.interchange.safetensors.files import (
    INDEX_SUFFIX,
    SUFFIX,
    TensorHeader,
    encode_header,
    encode_index,
    order,
)
from casckpt.frontends.views.recut import ViewTensor

STEM: Final = "model"
MAX_SHARD_BYTES: Final = 5_000_000_000
"""The default maximum number of data bytes in a file."""
_INDEX = re.compile(r"(.+)\.safetensors\.index(\.[^.]+)?\.json")
_SHARD = re.compile(r"-[0-9]+-of-[0-9]+")


@dataclass(frozen=True)
class FileLayout:
    """A file: the bytes ``head``, followed by the data of ``tensors`` in order, without holes.

    An index, or any other file without tensors, consists only of ``head``.
    """

    name: str
    head: bytes
    tensors: tuple[ViewTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.head) + sum(tensor.entry.nbytes for tensor in self.tensors)


def lay_out(
    tensors: Iterable[ViewTensor], metadata: Mapping[str, str], most: int | None = None, stem: str = STEM
) -> list[FileLayout]:
    """Lay out files for the given tensors. Equal names, dtypes, shapes and ``metadata`` yield equal bytes.

    ``most``: the maximum number of data bytes in a file, or None for one file of any size. A larger tensor has its own
    file. The tensors are in the safetensors library's order. ``stem``: the beginning of the files' names. If there are
    several files, their index is last, because its presence marks a folder as complete. Raises InvalidInput, naming the
    tensor, if such a file cannot hold it.
    """
    given = sorted(tensors, key=lambda tensor: tensor.name)
    shards = [given] if most is None else plan_shards(given, most)
    names = _file_names(len(shards), stem)
    files = [_file(name, shard, metadata) for name, shard in zip(names, shards, strict=True)]
    if len(files) > 1:
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        index = encode_index(weight_map, sum(tensor.entry.nbytes for tensor in given))
        files.append(FileLayout(index_name(stem), index))
    return files


def exported_metadata(imported: Mapping[str, str], *, is_model: bool) -> dict[str, str]:
    """Return the ``__metadata__`` of a new file, given that of the imported files.

    The metadata of a model includes what Transformers requires.
    """
    return ({"format": "pt"} if is_model else {}) | dict(imported)


def _file(name: str, tensors: Sequence[ViewTensor], metadata: Mapping[str, str]) -> FileLayout:
    ordered = sorted(tensors, key=lambda tensor: order(_header(tensor)))
    return FileLayout(name, encode_header(map(_header, ordered), metadata), tuple(ordered))


def _header(tensor: ViewTensor) -> TensorHeader:
    return TensorHeader(tensor.name, tensor.entry.dtype, tensor.entry.shape, tensor.entry.nbytes)


def plan_shards(streams: Sequence[ViewTensor], most: int) -> list[list[ViewTensor]]:
    """Split tensors, in order, into files of at most ``most`` data bytes. A larger tensor has its own file."""
    if most < 1:
        raise InvalidInput(
            f"files of at most {most} bytes are too small to hold any tensor; pass a larger --max-shard-size"
        )
    return list(in_batches(streams, lambda tensor: tensor.entry.nbytes, most)) or [[]]


def is_index(name: str) -> bool:
    """Return whether a file has the name of an index."""
    return _INDEX.fullmatch(name) is not None


def stem_of(name: str) -> str:
    """Return the part of a file's name that the files of one model share, such as "model" or "model.fp16"."""
    match = _INDEX.fullmatch(name)
    return _SHARD.sub("", name.removesuffix(SUFFIX)) if match is None else match[1] + (match[2] or "")


def index_name(stem: str) -> str:
    """Return the name of a model's index. A variant ("model.fp16") has its own index."""
    base, dot, variant = stem.partition(".")
    return f"{base}{INDEX_SUFFIX.removesuffix('.json')}{dot}{variant}.json"


def _file_names(count: int, stem: str) -> list[str]:
    if count == 1:
        return [f"{stem}{SUFFIX}"]
    if count > 99_999:
        raise Refused(f"{count} files are too many; pass a larger --max-shard-size")
    return [f"{stem}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
