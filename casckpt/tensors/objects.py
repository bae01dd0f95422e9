"""Encoding of leaves that are not tensors: as plain data, or as a pickle if the user allows it."""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from typing import Any, Final
from zipfile import BadZipFile, ZipFile

import torch

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.tensors.plain_torch import TORCH_EXTENSIONS
from casckpt.tensors.shards import inner_names
from casckpt.tensors.untrusted import MISREAD

_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError)
_NO_ARCHIVE: Final[tuple[type[Exception], ...]] = (BadZipFile, *MISREAD)
_RECORD: Final = re.compile(
    r"[^/]+/(?:data\.pkl|data/[0-9]+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)


@dataclass(frozen=True)
class Archived:
    """A leaf tensor that consists of other tensors. If pickles are allowed, it is stored as torch.save writes it."""

    tensor: torch.Tensor


def encode_object(key: str, value: Any, allow_pickle: bool, spill: plain.Spill | None = None) -> tuple[bytes, bool]:
    """Encode the leaf ``key``: (bytes, pickled).

    Plain data is never pickled. Other data is pickled if ``allow_pickle``, else InvalidInput names the place inside the
    value. Long buffers, also that of a pickle, go to ``spill``.
    """
    if isinstance(value, Archived):
        if not allow_pickle:
            kind, made_of = type(value.tensor).__name__, ", ".join(inner_names(value.tensor))
            raise InvalidInput(
                f"{key!r}: a {kind} consists of other tensors ({made_of}); pass allow_pickle=True to store it as "
                "torch.save does",
                key=key,
            )
        return plain.encode(write_archive(value.tensor.detach()), spill=spill, where=key), True
    if allow_pickle and not _is_plain(key, value):
        try:
            data = pickle.dumps(value, protocol=5)
        except _PICKLE_ERRORS as error:
            raise InvalidInput(f"{key}: it is neither plain data nor can it be pickled: {error}", key=key) from error
        return plain.encode(data, spill=spill, where=key), True
    return plain.encode(value, extensions=TORCH_EXTENSIONS, spill=spill, where=key), False


def _is_plain(key: str, value: Any) -> bool:
    """Tell whether a value is plain data, before any part of it is spilled."""
    try:
        plain.encode(value, extensions=TORCH_EXTENSIONS, spill=lambda _: 0, where=key)
    except InvalidInput:
        return False
    return True


def decode_object(key: str, data: bytes, pickled: bool, allow_pickle: bool, load: plain.Load | None = None) -> Any:
    """Decode the leaf ``key``. Raises InvalidInput for a pickle without ``allow_pickle``, Refused for unusable bytes.

    An archive of torch.save with only tensors and plain data is read without ``allow_pickle`` too.
    """
    try:
        value = plain.decode(data, extensions=TORCH_EXTENSIONS, load=load, strict=True)
    except Refused as error:
        raise Refused(f"key {key!r}: {error}", key=key) from error
    return _unpickle(key, value, allow_pickle) if pickled else value


def is_archive(data: bytes | memoryview) -> bool:
    """Tell whether ``data`` is an archive as torch.save writes it."""
    return bytes(data[:4]) == b"PK\x03\x04"


def read_archive(data: bytes | memoryview) -> Any:
    """Read an archive of torch.save with torch's restricted unpickler. Raises pickle.UnpicklingError if that refuses.

    Unusable bytes raise any of `casckpt.tensors.untrusted.MISREAD`.
    """
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def write_archive(value: Any) -> bytes:
    """Encode a value as torch.save does."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def is_only_torchs(archive: bytes) -> bool:
    """Tell whether all records are those of torch.save, of any version, and no byte follows them."""
    try:
        with ZipFile(io.BytesIO(archive)) as opened:
            names = opened.namelist()
    except _NO_ARCHIVE:
        return False
    return archive[-22:-18] == b"PK\x05\x06" and all(map(_RECORD.fullmatch, names))


def refused_name(error: pickle.UnpicklingError) -> str:
    """Extract the refused name from the long message of torch's restricted unpickler."""
    match = re.search(r"GLOBAL (\S+) was not", str(error))
    return f"it holds {match[1]}" if match else str(error).partition("\n")[0][:200]


def _unpickle(key: str, data: Any, allow_pickle: bool) -> Any:
    if type(data) is not bytes:
        raise Refused(f"key {key!r}: its pickle is not made of bytes", key=key)
    try:
        if is_archive(data) and not allow_pickle:
            return read_archive(data)
        if allow_pickle:
            return _run_pickle(data)
    except MISREAD as error:
        if allow_pickle or not isinstance(error, pickle.UnpicklingError):
            raise Refused(f"key {key!r}: its pickle cannot be loaded here: {error!r}", key=key) from error
    raise _not_allowed(key)


def refuse_pickle(key: str, data: bytes, parts: int) -> None:
    """Raise InvalidInput for a pickle that needs ``allow_pickle``. A pickle with parts always does."""
    if parts:
        raise _not_allowed(key)
    decode_object(key, data, True, allow_pickle=False)


def _not_allowed(key: str) -> InvalidInput:
    return InvalidInput(
        f"{key} is stored as a pickle, and loading one runs code from the store; "
        "pass allow_pickle=True if you trust whoever wrote it",
        key=key,
    )


def _run_pickle(data: bytes) -> Any:
    if is_archive(data):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return pickle.loads(data)  # noqa: S301 - the caller said that the store is trusted
