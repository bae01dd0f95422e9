"""Finds the tensors that are stored whole and contiguous in a file. Runs no pickle.

What a file claims is checked against its size. A file that breaks a rule is not cut: its bytes are stored all the same.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import prod
from tokenize import TokenError
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from typing_extensions import override

from casckpt.errors import Conflict, StorageError
from casckpt.format import dtypes
from casckpt.format.regions import Shape, check_shape
from casckpt.frontends.interchange.safetensors.files import decode_head
from casckpt.tensors.file_memory import ReadableFile
from casckpt.tensors.untrusted import MISREAD, BoundedUnpickler

LEAST: Final = 4096
"""The size in bytes from which a tensor is an entry of its own."""
_MOST_BYTES = 16 << 20  # of a header, a pickle, or the directory of a zip file, for which Python needs 20 times as many
_ZIP, _NUMPY = b"PK\x03\x04", b"\x93NUMPY"
_STORED_SIZES = struct.Struct("<26xHH")  # at the end of a member's local header
_RAW = "uint8"
_MISREAD: Final[tuple[type[Exception], ...]] = (*MISREAD, SyntaxError, TokenError)  # the last two are numpy's


class Tensor(NamedTuple):
    """A tensor in a file: its first byte, its name in the file, and how it is stored."""

    start: int
    name: str
    dtype: str
    shape: Shape

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + prod(self.shape) * dtypes.itemsize(self.dtype)


class Cut(NamedTuple):
    """The tensors in a file, in order. ``is_whole``: False for a file that seems to be truncated."""

    tensors: tuple[Tensor, ...] = ()
    is_whole: bool = True


class Span(NamedTuple):
    """``length`` bytes of a file that hold an archive, from ``start`` on, and the archive's name in the file."""

    start: int
    length: int
    name: str


def cut(file: ReadableFile, size: int, archives: Iterable[Span] = ()) -> Cut:
    """Return the tensors in a file of ``size`` bytes. ``archives``: the archives that the file consists of.

    Raises the errors of ``file``.
    """
    try:
        spans = [*archives] or [Span(0, size, "")]
        found = [one for span in spans for one in _tensors(_Window(file, span, size), span.name)]
    except (Conflict, StorageError):
        raise
    except _Truncated:
        return Cut(is_whole=False)
    except _MISREAD:
        return Cut()
    found = sorted(one for one in found if one.end - one.start >= LEAST)
    if any(one.end > other.start for one, other in pairwise(found)) or (found and found[-1].end > size):
        return Cut()
    return Cut(tuple(found))


class _Truncated(Exception):
    """The file begins as a known format, but lacks its end."""


class _Window(io.RawIOBase):
    """A part of a file, as a file object that holds no handle, and refuses to read too much at once."""

    def __init__(self, file: ReadableFile, span: Span, size: int) -> None:
        self.start, self.length = span.start, span.length
        if self.start + self.length > size:
            raise _Truncated
        self._file, self._at = file, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        if self._at < 0:
            raise OSError("it begins before the file")
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if size > _MOST_BYTES:
            raise ValueError("it is too large")
        data = bytearray(size)
        if size:
            self._file.read_into(self.start + self._at, memoryview(data))
        self._at += size
        return bytes(data)


def _tensors(window: _Window, name: str) -> Iterator[Tensor]:
    """Yield the tensors in a file, or in an archive with this name in it."""
    head = window.read(9)
    if head.startswith(_ZIP):
        yield from _in_archive(window, name)
    elif head.startswith(_NUMPY):
        yield from _in_array(window, 0, window.length, "array")
    elif head[8:] == b"{" and (length := int.from_bytes(head[:8], "little")) < _MOST_BYTES:
        window.seek(0)
        header = decode_head(window.read(8 + length))
        at = window.start + 8 + length
        for tensor in header.tensors:
            yield Tensor(at, tensor.key, tensor.dtype, tensor.shape)
            at += tensor.nbytes
        if at > window.start + window.length:
            raise _Truncated


def _in_archive(window: _Window, name: str) -> Iterator[Tensor]:
    """Yield the storages and arrays in a zip file. Those of torch.save are in its folder data/, without shapes."""
    try:
        archive = zipfile.ZipFile(window)
    except zipfile.BadZipFile as error:
        raise _Truncated from error
    members = archive.infolist()
    pickled = next((one for one in members if one.filename.endswith("/data.pkl")), None)
    types = {} if pickled is None else _storage_types(window, pickled)
    for member in members:
        if (start := _start_of(window, member)) is None:
            continue
        inner = name + (member.filename if pickled is None else member.filename.partition("/")[2])
        if member.filename.endswith(".npy"):
            yield from _in_array(window, start, member.file_size, inner)
        elif member.file_size >= LEAST:
            dtype = types.get(member.filename.rpartition("/data/")[2], _RAW)
            count, rest = divmod(member.file_size, dtypes.itemsize(dtype))
            dtype, count = (_RAW, member.file_size) if rest else (dtype, count)
            yield Tensor(window.start + start, inner, dtype, (count,))


def _start_of(window: _Window, member: zipfile.ZipInfo) -> int | None:
    """Return where a member's bytes begin, behind its local header, whose sizes may be 0. None: they are encoded."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        return None
    window.seek(member.header_offset)
    header = window.read(_STORED_SIZES.size)
    start: int = member.header_offset + _STORED_SIZES.size + sum(_STORED_SIZES.unpack(header))
    if not header.startswith(_ZIP) or start + member.file_size > window.length:
        raise ValueError("a member is outside the archive")
    return start


def _in_array(window: _Window, start: int, size: int, name: str) -> Iterator[Tensor]:
    """Yield the array in a file of numpy, whose elements are stored in one piece."""
    window.seek(start)
    version = np.lib.format.read_magic(window)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(window)
    known = dtype.name if dtype.isnative and dtype.name in dtypes.DTYPES else _RAW
    nbytes = prod(shape) * dtype.itemsize
    if not dtype.hasobject and window.tell() + nbytes <= start + size:
        shape = (nbytes,) if known == _RAW else shape[::-1] if is_fortran else shape
        yield Tensor(window.start + window.tell(), name, known, check_shape(shape))


def _storage_types(window: _Window, member: zipfile.ZipInfo) -> dict[str, str]:
    """Return the dtypes of the storages that a pickle of torch names, by key. Nothing that it names is looked up."""
    if (start := _start_of(window, member)) is None:
        return {}
    window.seek(start)
    types = dict[str, str]()
    try:
        _Storages(window.read(member.file_size), types).load()
    except (Conflict, StorageError):
        raise
    except MISREAD:
        return {}
    return types


class _Nothing:
    """Stands for everything that a pickle names, creates, and fills."""

    def __new__(cls, *_: Any) -> _Nothing:
        return super().__new__(cls)

    def __call__(self, *_: Any) -> _Nothing:
        return self

    def __setitem__(self, *_: Any) -> None: ...

    append = extend = add = update = __call__


class _Storages(BoundedUnpickler):
    """Reads the dtypes of storages, and ignores all else."""

    def __init__(self, data: bytes, types: dict[str, str]) -> None:
        super().__init__(data)
        self._types = types

    @override
    def find_class(self, module: str, name: str) -> Any:
        return _STORAGES.get(name, _Nothing) if module == "torch" else _Nothing

    @override
    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[1], str) and isinstance(pid[2], str):
            self._types[pid[2]] = pid[1]
        return _Nothing()

    def _ignore_state(self) -> None:
        self.stack.pop()

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **BoundedUnpickler.dispatch, pickle.BUILD[0]: _ignore_state,
    }  # fmt: skip


_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
