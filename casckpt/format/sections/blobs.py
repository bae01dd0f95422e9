"""The blob list of a manifest, which is the only section that gc, copies, mirrors and statistics read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec.msgpack import Decoder

from casckpt.base.digest import Buffer
from casckpt.errors import Refused
from casckpt.format.blob import DATA_OFFSET, MAX_LEAVES, RECORD_BYTES
from casckpt.format.keys import check_txid
from casckpt.format.names import BlobHash, TxId
from casckpt.format.sections.columns import pack, unpack

MAX_BLOB_BYTES = (1 << 30) + DATA_OFFSET + MAX_LEAVES * RECORD_BYTES
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for untrusted bytes."""


class BlobColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The blobs section: hashes (32 bytes each), file sizes in bytes, uploaders, and which blobs are worn.

    Blob i is in the folder of ``uploaders[index[i]]``.
    """

    hashes: bytes
    sizes: bytes
    uploaders: list[str]
    index: bytes
    worn: bytes


_BLOBS: Decoder[BlobColumns] = Decoder(BlobColumns)


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob in a manifest. ``size``: the file size in bytes.

    ``worn``: whether the run's next save must not reuse it.
    """

    hash: BlobHash
    size: int
    uploader: TxId
    worn: bool = False


class BlobList:
    """The decoded blobs section. Raises Refused for values outside the limits."""

    def __init__(self, data: Buffer) -> None:
        try:
            columns = _BLOBS.decode(data)
        except DECODE_ERRORS as error:
            raise Refused(f"its blob list is invalid: {error}") from error
        self.data = bytes(data)
        self.hashes = columns.hashes
        self.sizes = unpack(columns.sizes)
        self.uploaders = [check_txid(uploader) for uploader in columns.uploaders]
        self._uploader_of = unpack(columns.index)
        self._worn = frozenset(unpack(columns.worn))
        count = len(self.sizes)
        if len(self.hashes) != 32 * count or len(self._uploader_of) != count:
            raise Refused("its blob columns differ in length")
        if max(self.sizes, default=0) > MAX_BLOB_BYTES:
            raise Refused(f"a blob is larger than {MAX_BLOB_BYTES} bytes")
        if max(self._uploader_of, default=-1) >= len(self.uploaders):
            raise Refused("a blob does not have an uploader")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> BlobRef:
        digest = self.hashes[32 * index : 32 * index + 32]
        uploader = self.uploaders[self._uploader_of[index]]
        return BlobRef(BlobHash(digest.hex()), self.sizes[index], uploader, index in self._worn)

    def __iter__(self) -> Iterator[BlobRef]:
        return map(self.__getitem__, range(len(self)))

    def names(self) -> list[tuple[TxId, BlobHash, int]]:
        """Return (uploader, hash, file size in bytes) for every blob, in order."""
        digests = self.hashes.hex()
        hashes = (BlobHash(digests[at : at + 64]) for at in range(0, len(digests), 64))
        uploaders = (self.uploaders[number] for number in self._uploader_of)
        return list(zip(uploaders, hashes, self.sizes, strict=True))


def encode_blobs(refs: Iterable[BlobRef]) -> bytes:
    """Encode the blobs section."""
    refs = list(refs)
    uploaders = {uploader: number for number, uploader in enumerate(dict.fromkeys(ref.uploader for ref in refs))}
    columns = BlobColumns(
        hashes=bytes.fromhex("".join(ref.hash for ref in refs)),
        sizes=pack([ref.size for ref in refs]),
        uploaders=list(uploaders),
        index=pack([uploaders[ref.uploader] for ref in refs]),
        worn=pack([number for number, ref in enumerate(refs) if ref.worn]),
    )
    return msgspec.msgpack.encode(columns)
