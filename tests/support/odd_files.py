"""Files with tensors, and files that seem to have some, as attackers write them."""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

N = 72_000
"""The bytes of a tensor. A file with one is large enough to be cut."""


def drawn(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def safetensors(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Sequence[int] = (N // 4,), start: int = 0, end: int = N) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [start, end]}


def torch_file(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


class Unseekable(io.BytesIO):
    """A pipe. A zip file that is written to it has sizes of 0 in its local headers."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation

    def tell(self) -> int:
        raise io.UnsupportedOperation


def pickled(*keys: str, kind: bytes = b"ctorch\nFloatStorage\n") -> bytes:
    """Return a pickle with the persistent ids of these storages."""
    ids = b"".join(b"(X\7\0\0\0storage%bX\1\0\0\0%bX\3\0\0\0cpuM\0\1tQ" % (kind, key.encode()) for key in keys)
    return b"\x80\2]" + b"".join((b"(", ids, b"e.")) if keys else b"\x80\2]."


def archive(
    members: Sequence[tuple[str, bytes]], *, file: io.BytesIO | None = None, how: int = zipfile.ZIP_STORED,
    zip64: bool = False,
) -> bytes:  # fmt: skip
    """Return a zip file."""
    file = file or io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", how) as written:
        warnings.simplefilter("ignore")  # names that occur twice
        for name, data in members:
            with written.open(name, "w", force_zip64=zip64) as member:
                member.write(data)
    return file.getvalue()


PLAIN = [("a/data.pkl", pickled("0")), ("a/data/0", drawn(N)), ("a/version", b"3\n")]
TWICE = [("a/data.pkl", pickled("0", "1")), ("a/data/0", drawn(N)), ("a/data/1", drawn(N, 1))]


class _Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


def hostile(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Yield pickles that touch a file, or import the module ``this``, when they are run, or cost much."""
    touch = f"touch {canary}"
    text = touch.encode()
    for protocol in range(6):
        yield f"os.system {protocol}", pickle.dumps(_Calls(os.system, touch), protocol)
        yield f"eval {protocol}", pickle.dumps(_Calls(eval, f"open({str(canary)!r}, 'w')"), protocol)
        yield f"getattr {protocol}", pickle.dumps(_Calls(getattr, _Calls(__import__, "this"), "s"), protocol)
        yield f"copyreg {protocol}", pickle.dumps(_Calls(copyreg.add_extension, "os", "system", 77), protocol)
    yield "INST", b"(S'%b'\nios\nsystem\n." % text
    yield "OBJ", b"(cos\nsystem\nS'%b'\no." % text
    yield "NEWOBJ", b"\x80\2cthis\ns\n)\x81."
    yield "NEWOBJ_EX", b"\x80\4cthis\ns\n)}\x92."
    yield "STACK_GLOBAL", b"\x80\4\x8c\4this\x8c\1s\x93."
    yield "a dotted name", b"\x80\4\x8c\2os\x8c\x0fpath.os.system.x\x93\x8c%c%b\x85R." % (len(text), text)
    yield "EXT1", b"\x80\2\x82\xf0X%b%b\x85R." % (struct.pack("<I", len(text)), text)
    yield "EXT2", b"\x80\2\x83\xf0\0X%b%b\x85R." % (struct.pack("<I", len(text)), text)
    yield "EXT4", b"\x80\2\x84\xf0\0\0\0X%b%b\x85R." % (struct.pack("<I", len(text)), text)
    yield "BUILD of a class", b"ctorch\nFloatStorage\n}S'x'\nK\1sb."
    yield "BUILD of a list", b"]}S'append'\nK\1sb."
    yield "REDUCE of a storage", b"ctorch\nFloatStorage\n(I9\ntR."
    yield "REDUCE of a number", b"K\1)R."
    yield "a large memo", b"\x80\2]r\xff\xff\xff\x7f."
    yield "a large bytearray", b"\x80\5\x96" + struct.pack("<Q", 1 << 40) + b"."
    yield "large bytes", b"\x80\4\x8e" + struct.pack("<Q", 1 << 40) + b"."
    yield "a large number", b"\x80\2\x8b\xff\xff\xff\x7f\1."
    yield "a long text of a number", b"I" + b"9" * 100_000 + b"\n."
    yield "nested tuples as a key", b"\x80\2}" + b")" + b"\x85" * 100_000 + b"K\1s."
    yield "tuples that double, as a key", b"\x80\2})" + b"2\x86" * 60 + b"K\1s."
    yield "nested marks", b"(" * 100_000 + b"."
    yield "no end", b"\x80\2]"
    yield "nothing", b""
    yield "an out-of-band buffer", b"\x80\5\x97."
    for name, pid in {
        "an int": b"K\1", "None": b"N", "a list": b"]", "a dict": b"}", "nested": b")" + b"\x85" * 1000,
        "a tuple of five": b"(K\1K\1K\1K\1K\1t", "a tuple of lists": b"(]]]]]t", "a key that is a list":
        b"(X\7\0\0\0storagectorch\nFloatStorage\n]X\3\0\0\0cpuK\1t",
    }.items():  # fmt: skip
        yield f"a persistent id: {name}", b"\x80\2" + pid + b"Q."
    yield "a persistent id as text", b"Pstorage\n."


def array(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode() + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + (data or drawn(N))


def saved(value: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # only later versions of numpy read this
        np.lib.format.write_array(file, value, version)
    return file.getvalue()


def index(name: Any = "w", **attributes: Any) -> MetadataIndex:
    made = MetadataIndex(name)
    for key, value in attributes.items():
        object.__setattr__(made, key, value)
    return made


def metadata(**places: tuple[MetadataIndex, Any, Any, Any]) -> bytes:
    return pickle.dumps(Metadata({}, storage_data={key: _StorageInfo(*place) for key, *place in places.values()}))


WHOLE = archive(PLAIN)
LENGTH = len(WHOLE)


def placed(offset: Any = 0, length: Any = LENGTH, key: MetadataIndex | None = None, path: Any = "x.distcp") -> Any:
    return key or index(), path, offset, length
