"""Encodes leaves that are not tensors as plain data, or as a pickle if the user allows it."""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from typing import Any, Final, NoReturn
from zipfile import BadZipFile, ZipFile

import torch

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.plain import extension
from casckpt.format.plain_codecs import Codec, Unfit
from casckpt.tensors.shards import inner_names
from casckpt.tensors.untrusted import MISREAD

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in _DTYPES:
        raise Refused(f"this version of torch ({torch.__version__}) does not have the dtype {name!r:.40}")
    return _DTYPES[name]


def _size(numbers: Any) -> torch.Size:
    if type(numbers) is not tuple or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise Refused("a torch.Size contains something other than sizes")
    return torch.Size(numbers)


def _device(payload: Any) -> torch.device:
    if type(payload) is not tuple or len(payload) != 2 or type(payload[0]) is not str:
        raise Refused("a torch.device is invalid")
    kind, number = payload
    if number is not None and (type(number) is not int or not 0 <= number < 128):
        raise Refused("a torch.device has an invalid number")
    try:
        return torch.device(kind if number is None else f"{kind}:{number}")
    except RuntimeError as error:
        raise Refused(f"this version of torch ({torch.__version__}) does not have the device {kind[:40]!r}") from error


def _refusing(kind: type, what: str, hint: str) -> Codec:
    """Return an extension that rejects a type with a hint."""

    def to_plain(value: Any) -> NoReturn:
        raise Unfit(what, hint)

    def from_plain(payload: Any) -> NoReturn:
        raise Refused(f"{what} is never stored as plain data")

    return extension(f"torch.{kind.__name__}", kind, to_plain, from_plain)


_HOLDERS = "only dicts, lists and tuples may contain tensors: move it into one of these"

TORCH_EXTENSIONS: tuple[Codec, ...] = (
    extension("torch.dtype", torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _dtype),
    extension("torch.Size", torch.Size, lambda size: tuple(int(n) for n in size), _size),
    extension("torch.device", torch.device, lambda device: (device.type, device.index), _device),
    _refusing(torch.Generator, "a torch.Generator", "store its get_state()"),
    _refusing(torch.Tensor, "a tensor", _HOLDERS),
    _refusing(torch.nn.Parameter, "a parameter", _HOLDERS),
)
"""For `casckpt.format.plain.encode` and `decode`."""


_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError)
_NO_ARCHIVE: Final[tuple[type[Exception], ...]] = (BadZipFile, *MISREAD)
_RECORD: Final = re.compile(
    r"[^/]+/(?:data\.pkl|data/[0-9]+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)


@dataclass(frozen=True)
class Archived:
    """A leaf tensor that consists of other tensors.

    If pickles are allowed, it is stored in the form that torch.save writes.
    """

    tensor: torch.Tensor


def encode_object(key: str, value: Any, allow_pickle: bool, spill: plain.Spill | None = None) -> tuple[bytes, bool]:
    """Encode the leaf ``key``. Returns (bytes, pickled).

    Plain data is never pickled. Other data is pickled if ``allow_pickle`` is set. Otherwise, raises an InvalidInput
    that names the position inside the value. Long buffers, including that of a pickle, are passed to ``spill``.
    """
    if isinstance(value, Archived):
        if not allow_pickle:
            kind, made_of = type(value.tensor).__name__, ", ".join(inner_names(value.tensor))
            raise InvalidInput(
                f"{key!r}: a {kind} consists of other tensors ({made_of}); pass a rebuild to "
                "casckpt.register_wrapper, or pass allow_pickle=True to store it as torch.save does",
                key=key,
            )
        return plain.encode(write_archive(value.tensor.detach()), spill=spill, where=key), True
    if allow_pickle and not _is_plain(key, value):
        try:
            data = pickle.dumps(value, protocol=5)
        except _PICKLE_ERRORS as error:
            raise InvalidInput(f"{key}: it is not plain data, and it cannot be pickled: {error}", key=key) from error
        return plain.encode(data, spill=spill, where=key), True
    return plain.encode(value, extensions=TORCH_EXTENSIONS, spill=spill, where=key), False


def _is_plain(key: str, value: Any) -> bool:
    """Return whether a value is plain data. This is checked before any part of it is spilled."""
    try:
        plain.encode(value, extensions=TORCH_EXTENSIONS, spill=lambda _: 0, where=key)
    except InvalidInput:
        return False
    return True


def decode_object(key: str, data: bytes, pickled: bool, allow_pickle: bool, load: plain.Load | None = None) -> Any:
    """Decode the leaf ``key``.

    Raises InvalidInput for a pickle without ``allow_pickle``, and Refused for invalid bytes.

    A torch.save archive that contains only tensors and plain data can be read even without ``allow_pickle``.
    """
    try:
        value = plain.decode(data, extensions=TORCH_EXTENSIONS, load=load, strict=True)
    except Refused as error:
        raise Refused(f"key {key!r}: {error}", key=key) from error
    return _unpickle(key, value, allow_pickle) if pickled else value


def is_archive(data: bytes | memoryview) -> bool:
    """Return whether ``data`` is an archive written by torch.save."""
    return bytes(data[:4]) == b"PK\x03\x04"


def read_archive(data: bytes | memoryview) -> Any:
    """Read a torch.save archive with torch's restricted unpickler. Raises pickle.UnpicklingError if it is rejected.

    Invalid bytes raise any of `casckpt.tensors.untrusted.MISREAD`.
    """
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def write_archive(value: Any) -> bytes:
    """Encode a value in the form that torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def is_only_torchs(archive: bytes) -> bool:
    """Return whether an archive has only records that some version of torch.save writes, and no bytes after them."""
    try:
        with ZipFile(io.BytesIO(archive)) as opened:
            names = opened.namelist()
    except _NO_ARCHIVE:
        return False
    return archive[-22:-18] == b"PK\x05\x06" and all(map(_RECORD.fullmatch, names))


def refused_name(error: Exception) -> str:
    """Extract the rejected name from the long message of torch's restricted unpickler."""
    match = re.search(r"GLOBAL (\S+) was not", str(error))
    return f"it contains {match[1]}" if match else str(error).partition("\n")[0][:200]


def _unpickle(key: str, data: Any, allow_pickle: bool) -> Any:
    if type(data) is not bytes:
        raise Refused(f"key {key!r}: its pickle does not consist of bytes", key=key)
    try:
        if is_archive(data) and not allow_pickle:
            return read_archive(data)
        if allow_pickle:
            return _run_pickle(data)
    except MISREAD as error:
        if allow_pickle or not isinstance(error, pickle.UnpicklingError):
            raise Refused(f"key {key!r}: cannot load its pickle here: {error!r}", key=key) from error
    raise _not_allowed(key)


def refuse_pickle(key: str, data: bytes, parts: int) -> None:
    """Raise InvalidInput for a pickle that requires ``allow_pickle``. A pickle in several parts always requires it."""
    if parts:
        raise _not_allowed(key)
    decode_object(key, data, True, allow_pickle=False)


def _not_allowed(key: str) -> InvalidInput:
    return InvalidInput(
        f"{key} is stored as a pickle, and loading one runs code from the store; "
        "pass allow_pickle=True if you trust its source",
        key=key,
    )


def _run_pickle(data: bytes) -> Any:
    if is_archive(data):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return pickle.loads(data)  # noqa: S301 - the caller trusts the store
