"""The manifest: the immutable description of one checkpoint, and its bytes.

::

    8 bytes   b"CASCKPT" and the version of this layout, 1
    8 bytes   length of the body, little-endian
    body      msgpack of `ManifestBody`; its BLAKE3 is the checkpoint's id
    places    msgpack of `BlobUploaders`: whose folder holds each blob; differs between stores of the same checkpoint
    32 bytes  BLAKE3 of the places

What is large in it stays undecoded (`msgspec.Raw`) until it is wanted: the extents of each tensor, objects, the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import msgspec
from msgspec.msgpack import Decoder

from casckpt.errors import Damaged, InvalidInput, Refused
from casckpt.format import dtypes
from casckpt.format.blob import DATA_OFFSET, MAX_LEAVES, RECORD_BYTES
from casckpt.format.columns import pack, unpack
from casckpt.format.digest import cell_digest, hex_digest
from casckpt.format.extents import ExtentTable, Packed, unpacked
from casckpt.format.keys import check_attachment_name, check_hash, check_run, check_step, check_txid
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.records import MAX_METADATA_BYTES
from casckpt.format.regions import check_shape
from casckpt.lazy import cached_property

MAGIC = b"CASCKPT\x01"
MAX_MANIFEST_BYTES = 4 << 30
MAX_BLOB_BYTES = (1 << 30) + DATA_OFFSET + MAX_LEAVES * RECORD_BYTES
MAX_KEY_CHARACTERS = 4096
MAX_METADATA_DEPTH = 32
TENSOR, PART, ATTACHMENT = "tensor", "part", "attachment"
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that nobody vouches for."""


Name: TypeAlias = tuple[str, str, int, int | None]
"""What tells the streams of a checkpoint apart: kind, key, index, rank; see `StreamEntry`."""


class StreamEntry(msgspec.Struct, frozen=True, array_like=True):
    """One stream of elements that lies in blobs.

    ``kind``: "tensor"; "part", a large buffer of an object (``key`` is the object's, ``index`` its number); or
    "attachment", a file that travels along (``key`` is its name). ``rank``: of a value that each rank has for itself
    (`casckpt.PerRank`), else None. ``dtype``: as torch names it.
    """

    kind: str
    key: str
    index: int
    rank: int | None
    dtype: str
    shape: tuple[int, ...]
    extents: msgspec.Raw

    @property
    def name(self) -> Name:
        """Identity of the stream in its manifest."""
        return self.kind, self.key, self.index, self.rank

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, as held in memory."""
        return self.numel * dtypes.itemsize(self.dtype)


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True):
    """One leaf that is not a tensor. ``data``: plain data (`casckpt.format.plain`); ``pickled``: it is a pickle."""

    key: str
    rank: int | None
    data: bytes
    parts: int = 0
    pickled: bool = False


class Attachment(msgspec.Struct, frozen=True, array_like=True):
    """A short attachment, inline. Long ones are entries of kind "attachment"."""

    name: str
    data: bytes


class Blobs(msgspec.Struct, frozen=True, array_like=True):
    """The blobs of a checkpoint as columns: hashes (32 bytes each), sizes of the files in bytes, and which are worn."""

    hashes: bytes
    sizes: bytes
    worn: bytes


class ManifestBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content whose hash is the id of a checkpoint. ``created_at``: microseconds since the epoch, UTC.

    ``notes``: what a front end adds for itself, as plain data under its name. Readers ignore notes they do not know.
    """

    format: int
    casckpt: str
    torch: str
    run: str
    step: int
    created_at: int
    parent: ManifestId | None
    world_size: int
    cell_bytes: int
    metadata: msgspec.Raw
    blobs: Blobs
    entries: list[StreamEntry]
    objects: list[ObjectEntry]
    attachments: list[Attachment]
    tree: bytes
    notes: dict[str, bytes] = {}


class BlobUploaders(msgspec.Struct, frozen=True, kw_only=True):
    """The uploader whose folder holds each blob: ``uploaders[index[i]]`` for blob i."""

    uploaders: list[str]
    index: bytes


_BODY: Decoder[ManifestBody] = Decoder(ManifestBody)
_PLACES: Decoder[BlobUploaders] = Decoder(BlobUploaders)
_PACKED: Decoder[Packed] = Decoder(Packed)
_METADATA: Decoder[dict[str, Any]] = Decoder(dict[str, Any])
"""Made here, and not by the first who decodes: see `casckpt.format.records.DECODERS`."""


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob of a manifest. ``size``: of the file in bytes. ``worn``: not to be reused by the next save of the run."""

    hash: BlobHash
    size: int
    uploader: TxId
    worn: bool = False


class Manifest:
    """A decoded manifest. Everything in it was checked against the limits of the format."""

    def __init__(self, id: ManifestId, body: ManifestBody, places: BlobUploaders) -> None:
        self.id = id
        self.body = body
        self._uploaders = [check_txid(uploader) for uploader in places.uploaders]
        self._uploader_of = unpack(places.index)
        self.blob_sizes = unpack(body.blobs.sizes)
        self._worn = frozenset(unpack(body.blobs.worn).tolist())
        count = len(self.blob_sizes)
        if len(body.blobs.hashes) != 32 * count or len(self._uploader_of) != count:
            raise Refused("its columns of blobs differ in length")
        if count and int(self.blob_sizes.max()) > MAX_BLOB_BYTES:
            raise Refused(f"a blob is larger than {MAX_BLOB_BYTES} bytes")
        if count and int(self._uploader_of.max()) >= len(self._uploaders):
            raise Refused("a blob has no uploader")
        _check_body(body)

    @property
    def blob_count(self) -> int:
        """Number of blobs."""
        return len(self.blob_sizes)

    def blob(self, index: int) -> BlobRef:
        """Return one blob."""
        digest = self.body.blobs.hashes[32 * index : 32 * index + 32]
        uploader = self._uploaders[int(self._uploader_of[index])]
        return BlobRef(BlobHash(digest.hex()), int(self.blob_sizes[index]), uploader, index in self._worn)

    @property
    def blobs(self) -> Iterable[BlobRef]:
        """All blobs, in order."""
        return (self.blob(index) for index in range(self.blob_count))

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The user's metadata."""
        try:
            return _METADATA.decode(self.body.metadata)
        except DECODE_ERRORS as error:
            raise Refused(f"manifest {self.id} is not usable: its metadata: {error}") from error

    @cached_property
    def tensors(self) -> dict[str, StreamEntry]:
        """Tensors by key; of values that each rank has for itself, that of the lowest rank."""
        found: dict[str, StreamEntry] = {}
        for entry in self.body.entries:
            if entry.kind == TENSOR:
                found.setdefault(entry.key, entry)
        return found

    def extents(self, entry: StreamEntry) -> ExtentTable:
        """Decode and check the extents of an entry. Raises Refused."""
        try:
            packed = _PACKED.decode(entry.extents)
            itemsize = dtypes.itemsize(entry.dtype)
            cell = self.body.cell_bytes // itemsize
            return unpacked(packed, entry.shape, itemsize, cell, self.blob_sizes)
        except (*DECODE_ERRORS, InvalidInput) as error:
            raise Refused(f"manifest {self.id} is not usable: key {entry.key!r}: {error}", key=entry.key) from error

    @property
    def nbytes(self) -> int:
        """About how much memory it takes, in bytes."""
        body = self.body
        parts = [len(entry.extents) + 200 for entry in body.entries] + [len(one.data) + 200 for one in body.objects]
        return sum(parts) + len(body.tree) + 40 * self.blob_count + sum(len(one.data) for one in body.attachments)

    def encoded(self) -> bytes:
        """Return its bytes, as `encode` made them."""
        return encode(self.body, self.places())[1]

    def places(self) -> BlobUploaders:
        """Return the table of places, as it is stored."""
        return BlobUploaders(uploaders=list(self._uploaders), index=pack(self._uploader_of))


def _check_body(body: ManifestBody) -> None:
    check_run(body.run)
    check_step(body.step)
    if body.parent is not None:
        check_hash(body.parent)
    if not 4096 <= body.cell_bytes <= 1 << 30 or body.cell_bytes % 4096:
        raise Refused(f"a cell of {body.cell_bytes} bytes")
    for attachment in body.attachments:
        check_attachment_name(attachment.name)
    for entry in body.entries:
        if entry.kind not in (TENSOR, PART, ATTACHMENT) or len(entry.key) > MAX_KEY_CHARACTERS:
            raise Refused(f"an entry of kind {entry.kind[:20]!r}, key {entry.key[:80]!r}")
        if entry.kind == ATTACHMENT:
            check_attachment_name(entry.key)
        check_shape(entry.shape)
        dtypes.itemsize(entry.dtype)
        if entry.kind != TENSOR and (entry.dtype != "uint8" or len(entry.shape) != 1):
            raise Refused(f"key {entry.key[:80]!r} of kind {entry.kind} that is not made of bytes")


def encode(body: ManifestBody, places: BlobUploaders) -> tuple[ManifestId, bytes]:
    """Return the id and the bytes of a manifest."""
    head, tail = msgspec.msgpack.encode(body), msgspec.msgpack.encode(places)
    data = b"".join((MAGIC, len(head).to_bytes(8, "little"), head, tail, cell_digest(tail)))
    return ManifestId(hex_digest(head)), data


def decode(data: bytes, id: ManifestId) -> Manifest:
    """Decode the manifest with this id. Raises Damaged if its bytes have changed, Refused if it is unusable."""
    view = memoryview(data)
    length = int.from_bytes(view[8:16], "little")
    head, tail, check = view[16 : 16 + length], view[16 + length : -32], view[-32:]
    if len(data) < 48 or data[:8] != MAGIC or hex_digest(head) != id or cell_digest(tail) != bytes(check):
        if len(data) >= 8 and data[:7] == MAGIC[:7] and data[7] > MAGIC[7]:
            raise Refused(f"manifest {id} is of a later version of casckpt; upgrade casckpt to read it")
        raise Damaged(f"manifest {id} is damaged: its bytes do not have the hash in its name", checkpoints=(id,))
    try:
        return Manifest(id, _BODY.decode(head), _PLACES.decode(tail))
    except (*DECODE_ERRORS, InvalidInput) as error:
        raise Refused(f"manifest {id} is not usable: {error}", checkpoints=(id,)) from error


def moved(data: bytes, refs: Iterable[BlobRef]) -> bytes:
    """Rewrite manifest ``data`` with its blobs at other places: ``refs``, in its order. The body keeps every byte."""
    end = 16 + int.from_bytes(data[8:16], "little")
    tail = msgspec.msgpack.encode(packed_blobs(refs)[1])
    return b"".join((memoryview(data)[:end], tail, cell_digest(tail)))


def packed_entry(
    kind: str, key: str, dtype: str, table: ExtentTable, *, index: int = 0, rank: int | None = None
) -> StreamEntry:
    """Make an entry with its extents encoded."""
    raw = msgspec.Raw(msgspec.msgpack.encode(table.packed()))
    return StreamEntry(kind, key, index, rank, dtype, table.shape, raw)


def encode_metadata(metadata: Mapping[str, Any]) -> tuple[msgspec.Raw, dict[str, Any] | None]:
    """Encode the user's metadata for the manifest and for the commit record (None if that cannot hold it exactly).

    Raises InvalidInput for anything but None, bool, int, float, str, and lists and str-keyed dicts of them.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata is a dict of names to values, not a {type(metadata).__name__}")
    plain = _plain(metadata, "metadata", 0)
    try:
        raw = msgspec.Raw(msgspec.msgpack.encode(plain))
        text = msgspec.json.encode(plain)
    except UnicodeEncodeError as error:
        raise InvalidInput("metadata holds text with a lone surrogate, which no JSON can hold; replace it") from error
    exact = len(text) <= MAX_METADATA_BYTES and msgspec.json.decode(text) == plain
    return raw, plain if exact else None


def _plain(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, float):
        return float(value)
    if depth > MAX_METADATA_DEPTH:
        raise InvalidInput(f"{path[:80]}...: metadata is nested more than {MAX_METADATA_DEPTH} levels deep; flatten it")
    if kind in (list, tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) is not str]:
            raise InvalidInput(f"{path} has the key {odd[0]!r:.80}; the keys of metadata are text: give str() of it")
        return {key: _plain(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    raise InvalidInput(
        f"{path} is a {kind.__name__}; metadata holds None, bool, int (64 bits), float, str, and lists and dicts with "
        "str keys of them. Put anything else into the state, or into an attachment"
    )


def packed_blobs(blobs: Iterable[BlobRef]) -> tuple[Blobs, BlobUploaders]:
    """Encode blobs and their places as they are stored."""
    blobs = list(blobs)
    uploaders = {uploader: i for i, uploader in enumerate(dict.fromkeys(blob.uploader for blob in blobs))}
    stored = Blobs(
        b"".join(bytes.fromhex(blob.hash) for blob in blobs),
        pack([blob.size for blob in blobs]),
        pack([i for i, blob in enumerate(blobs) if blob.worn]),
    )
    return stored, BlobUploaders(uploaders=list(uploaders), index=pack([uploaders[blob.uploader] for blob in blobs]))
