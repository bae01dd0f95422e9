"""Coders for weights, by casckpt and by others. Each compresses an array, alone or against another array."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np

from benchmarks.tasks.storing import Skipped
from benchmarks.traces import Flat
from casckpt.format.encodings.frames import decode, encode_delta, encode_planes


class Coder(Protocol):
    """A coder. ``by_cell``: it receives cells of 1 MiB instead of whole tensors."""

    by_cell: ClassVar[bool]

    def encode(self, plain: Flat, base: Flat | None) -> bytes:
        """Encode an array or, with a ``base``, only the changes since that base."""

    def decode(self, stored: bytes, out: Flat, *, has_base: bool) -> None:
        """Return the array, in the memory of its base if it has one."""


class Ours:
    """casckpt's frames, or the raw bytes if encoding is not worthwhile."""

    by_cell: ClassVar[bool] = True

    def encode(self, plain: Flat, base: Flat | None) -> bytes:
        """See `Coder`."""
        frame = None if base is None else encode_delta(view(plain), plain.itemsize, view(base))
        return frame or encode_planes(view(plain), plain.itemsize) or plain.tobytes()

    def decode(self, stored: bytes, out: Flat, *, has_base: bool) -> None:
        """See `Coder`."""
        if len(stored) == out.nbytes:
            view(out)[:] = stored
        else:
            decode(memoryview(stored), view(out), view(out))


class Zstd:
    """zstd at level 1, applied to the bytes or to their XOR with the base, as in slime, miles and SGLang."""

    by_cell: ClassVar[bool] = False

    def __init__(self) -> None:
        self._zstd: Any = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

    def encode(self, plain: Flat, base: Flat | None) -> bytes:
        """See `Coder`."""
        bits = plain.view(np.uint8)
        found: bytes = self._zstd.compress(bits if base is None else bits ^ base.view(np.uint8), level=1)
        return found

    def decode(self, stored: bytes, out: Flat, *, has_base: bool) -> None:
        """See `Coder`."""
        bits = self._zstd.decompress(stored)
        if has_base:
            np.bitwise_xor(out.view(np.uint8), np.frombuffer(bits, np.uint8), out=out.view(np.uint8))
        else:
            view(out)[:] = bits


class ZipNN:
    """ZipNN, which does not support bases."""

    by_cell: ClassVar[bool] = False

    def __init__(self) -> None:
        self._library: Any = _imported("zipnn", "zipnn")

    def encode(self, plain: Flat, base: Flat | None) -> bytes:
        """See `Coder`."""
        return bytes(self._coder(plain).compress(plain.tobytes()))

    def decode(self, stored: bytes, out: Flat, *, has_base: bool) -> None:
        """See `Coder`."""
        view(out)[:] = self._coder(out).decompress(stored)

    def _coder(self, like: Flat) -> Any:
        dtype = "bfloat16" if like.itemsize == 2 else "float32"
        return self._library.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)


class Dcp:
    """The zstd extension of torch.distributed.checkpoint, which does not support bases."""

    by_cell: ClassVar[bool] = False

    def __init__(self) -> None:
        _imported("zstandard", "zstandard")
        self._extension: Any = import_module("torch.distributed.checkpoint._extension").ZStandard()

    def encode(self, plain: Flat, base: Flat | None) -> bytes:
        """See `Coder`."""
        out = io.BytesIO()
        stream = self._extension.transform_to(out)
        stream.write(plain.tobytes())
        stream.flush()
        return out.getvalue()

    def decode(self, stored: bytes, out: Flat, *, has_base: bool) -> None:
        """See `Coder`."""
        view(out)[:] = self._extension.transform_from(io.BytesIO(stored)).read(out.nbytes)


class Raw:
    """The bytes without encoding."""

    by_cell: ClassVar[bool] = True

    def encode(self, plain: Flat, base: Flat | None) -> bytes:
        """See `Coder`."""
        return plain.tobytes()

    def decode(self, stored: bytes, out: Flat, *, has_base: bool) -> None:
        """See `Coder`."""
        view(out)[:] = stored


CODERS: dict[str, type[Coder]] = {"casckpt": Ours, "zstd-1": Zstd, "zipnn": ZipNN, "dcp": Dcp, "raw": Raw}


def coder(name: str) -> Coder:
    """Return the coder with a name. Raises `Skipped` if its library is not installed."""
    return CODERS[name]()


def view(array: Flat) -> memoryview:
    """Return the bytes of an array."""
    return array.view(np.uint8).data


def touched(like: Flat) -> Flat:
    """Return memory for an array of this form, with all pages touched."""
    made: Flat = like.copy()
    made.fill(1)
    return made


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise Skipped(f"not installed (pip install {package}): {error}") from error
