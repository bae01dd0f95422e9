"""A whole blob out of a store, proved to be what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from casckpt.errors import NotFound, Refused
from casckpt.format.blob import DATA_OFFSET, decode_header
from casckpt.format.digest import hex_digest
from casckpt.format.keys import blob_key
from casckpt.storage.base import ObjectStore, ShortObject

if TYPE_CHECKING:
    from casckpt.format.manifest import BlobRef

_ATTEMPTS = 2  # the network may have spoilt the first


class Spoilt(Exception):
    """A blob, ``ref``, is not there as it was written; the text says why.

    Caught by the layer above, which knows who needs it.
    """

    def __init__(self, ref: BlobRef, why: str) -> None:
        super().__init__(why)
        self.ref = ref


def fetch(storage: ObjectStore, ref: BlobRef, buffer: memoryview) -> memoryview:
    """Read a blob into the start of ``buffer``, and return that part. Raises `Spoilt`, `StorageError`."""
    view = buffer[: ref.size]
    for _ in range(_ATTEMPTS):
        _read(storage, ref, view)
        if hex_digest(view) == ref.hash:
            _check_header(ref, view)
            return view
    raise Spoilt(ref, "its bytes do not have the hash in its name")


def _read(storage: ObjectStore, ref: BlobRef, view: memoryview) -> None:
    try:
        with storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            reader.read_into(0, [view])
    except NotFound as error:
        raise Spoilt(ref, "it is gone") from error
    except ShortObject as error:
        raise Spoilt(ref, f"it ends after {error.size} of {ref.size} bytes") from error


def _check_header(ref: BlobRef, view: memoryview) -> None:
    try:
        decode_header(bytes(view[:DATA_OFFSET]), view.nbytes)
    except Refused as error:
        raise Spoilt(ref, str(error)) from error
