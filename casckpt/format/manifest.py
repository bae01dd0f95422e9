"""The manifest: the immutable description of a checkpoint, in sections that are read and verified separately.

=======  ==========================================================================================================
head     where the sections are, and their hashes (`casckpt.format.sections`); the commit record names its hash
index    what was saved (`casckpt.format.sections.index`); its BLAKE3 is the checkpoint's id
places   a hash for each entry's rows, or for the rows of a few entries
blobs    hash, size and uploader of each blob, and which are worn: all that gc, copies and statistics read
objects  the data of objects and short attachments
cells    for each entry, the table of its cells (`casckpt.format.sections.tables`)
rows     for each entry, the locations of its cells
=======  ==========================================================================================================

The index, objects and cells are identical in every store that holds the checkpoint. The other sections may differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.msgpack import Decoder

from casckpt.base.digest import Buffer
from casckpt.base.lazy import cached_property
from casckpt.base.text import listed
from casckpt.errors import Damaged, InvalidInput, MissingKey, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.extents import ExtentTable, renumbered
from casckpt.format.names import ManifestId
from casckpt.format.records import changed
from casckpt.format.sections.blobs import DECODE_ERRORS, BlobList, BlobRef, encode_blobs
from casckpt.format.sections.columns import Ints, pack
from casckpt.format.sections.head import (
    BLOBS,
    CELLS,
    COPIED,
    INDEX,
    KNOWN,
    OBJECTS,
    PLACES,
    ROWS,
    Head,
    Read,
    Section,
    assemble,
    check_section,
    check_size,
    decode_head,
)
from casckpt.format.sections.health import HEALTH, Rows, decode_health, encode_health
from casckpt.format.sections.index import (
    TENSOR,
    Description,
    Entry,
    ManifestBody,
    Name,
    ObjectColumns,
    StoredObject,
    entry_columns,
    pack_ranks,
)
from casckpt.format.sections.pieces import PieceReader, Pieces, cut
from casckpt.format.sections.tables import (
    CELL_BYTES,
    ROW_BYTES,
    Extents,
    WholeCells,
    decode_cells,
    decode_table,
    decode_whole_cells,
    encode_rows,
)
from casckpt.format.tree import Wrapper, outer_keys, wrappers_in

FRONT = (INDEX, PLACES, BLOBS)
"""The sections that every load reads."""


class PlacesSection(msgspec.Struct, frozen=True, kw_only=True):
    """The places section. ``rows``: the hashes of the entries' rows."""

    rows: Pieces


_BODY: Decoder[ManifestBody] = Decoder(ManifestBody)
_READERS = {CELLS: "_cells", ROWS: "_rows", OBJECTS: "_objects"}
"""For each section that consists of pieces, the attribute that reads it."""

_PLACES: Decoder[PlacesSection] = Decoder(PlacesSection)
_METADATA: Decoder[dict[str, Any]] = Decoder(dict[str, Any])
"""Created at import. See `casckpt.format.records.DECODERS`."""


class Manifest:
    """A manifest. Parts of it may not have been read yet. Decoded parts have been checked against the limits.

    ``front``: the `FRONT` sections. ``read``: a function that reads the other sections, whose pieces are verified on
    use. ``data``: all of the manifest's bytes, if they were read. A manifest that was pickled for other ranks has no
    ``read``: see `attach`. ``left_out``: for a thinned checkpoint, the rule and the time, and otherwise None.

    The id is the hash of the index, and only the index proves what was saved and signed. Therefore, pieces are
    compared with the hashes in the index, even though the head has hashes too: whoever writes the commit record can
    write any head.
    """

    left_out: str | None = None

    def __init__(
        self,
        head: Head,
        front: Mapping[str, Buffer],
        read: Read | None = None,
        *,
        data: Buffer | None = None,
    ) -> None:
        self.head = head
        self.id = ManifestId(head[INDEX].digest.hex())
        self._front, self._read, self._data = front, read, data

    def check(self) -> Self:
        """Verify and decode the sections of `FRONT`, and return the manifest. Raises Damaged or Refused."""
        try:
            for name in FRONT:
                check_section(self.head[name], self._front[name])
            self.head.check_known()
            self.body.check()
            _ = self.places, self.blob_list
        except (*DECODE_ERRORS, InvalidInput, Damaged) as error:
            raise _unfit(self.id, error) from error
        return self

    @cached_property
    def body(self) -> ManifestBody:
        """The index."""
        return _BODY.decode(self._front[INDEX])

    @cached_property
    def places(self) -> PlacesSection:
        """The rows' hashes."""
        return _PLACES.decode(self._front[PLACES])

    @cached_property
    def blob_list(self) -> BlobList:
        """The blob list."""
        return BlobList(self._front[BLOBS])

    def __reduce__(self) -> tuple[Any, ...]:
        if self._data is not None:
            return decode, (bytes(self._data), self.id)
        return _from_rank, (self.head, zlib.compress(b"".join(self._front[name] for name in FRONT), 1))

    def attach(self, read: Read) -> None:
        """Set the function that reads the parts that have not been read yet."""
        self._read = read

    @property
    def blob_sizes(self) -> Sequence[int]:
        """The file size of each blob in bytes."""
        return self.blob_list.sizes

    def blob(self, index: int) -> BlobRef:
        """Return the blob with this number."""
        return self.blob_list[index]

    @property
    def blobs(self) -> Iterator[BlobRef]:
        """All blobs, in order."""
        return iter(self.blob_list)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The user's metadata."""
        try:
            return _METADATA.decode(self.body.metadata)
        except DECODE_ERRORS as error:
            raise Refused(f"manifest {self.id} is invalid: metadata: {error}") from error

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """All entries. Raises Refused if they are invalid."""
        try:
            return self.body.entries
        except InvalidInput as error:
            raise _unfit(self.id, error) from error

    @property
    def held(self) -> Sequence[Entry]:
        """All entries except those that a thinned checkpoint lacks. Raises Refused if they are invalid."""
        return self.entries if self.left_out is None else [entry for entry in self.entries if not self.lacks(entry)]

    def lacks(self, entry: Entry) -> bool:
        """Return whether the checkpoint was thinned and lacks the bytes of an entry."""
        return self.left_out is not None and bool(entry.nbytes) and not self._rows.length(entry.number)

    @cached_property
    def objects(self) -> Sequence[StoredObject]:
        """All leaves that are not tensors. Raises Refused if they are invalid."""
        try:
            return self.body.objects
        except InvalidInput as error:
            raise _unfit(self.id, error) from error

    @cached_property
    def tensors(self) -> dict[str, Entry]:
        """The tensors by key. For a `PerRank` value, this is the tensor of the lowest rank."""
        by_key: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.kind == TENSOR:
                by_key.setdefault(entry.key, entry)
        return by_key

    @cached_property
    def wrappers(self) -> dict[str, Wrapper]:
        """The outermost wrappers, by key. Most checkpoints have none, and their tree is not decoded for this."""
        return wrappers_in(self.body.tree)

    @cached_property
    def outer(self) -> dict[str, str]:
        """For each tensor in a wrapper, the key of that wrapper, by the tensor's key."""
        return outer_keys(self.wrappers)

    def matches(self, key: str, patterns: Iterable[str] | None) -> bool:
        """Return whether an fnmatch pattern matches a key, or the key of the wrapper that the tensor belongs to.

        None matches every key.
        """
        names = {key, self.outer.get(key, key)}
        return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

    @cached_property
    def _cells(self) -> PieceReader:
        return self._pieces(CELLS, self.body.cells, len(self.body.entry_columns.keys))

    @cached_property
    def _rows(self) -> PieceReader:
        return self._pieces(ROWS, self.places.rows, len(self.body.entry_columns.keys))

    @cached_property
    def _objects(self) -> PieceReader:
        count = len(self.body.object_columns.keys) + len(self.body.attachment_names)
        return self._pieces(OBJECTS, self.body.data, count)

    def _pieces(self, name: str, table: Pieces, count: int) -> PieceReader:
        try:
            return PieceReader(table, count, self.head[name], self.read)
        except InvalidInput as error:
            raise _unfit(self.id, error) from error

    def read(self, ranges: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """Read ranges (offset, length) of the manifest. Raises the errors of reading."""
        if self._data is not None:
            view = memoryview(self._data)
            return [view[offset : offset + length] for offset, length in ranges]
        if self._read is None:
            raise Refused(f"manifest {self.id} came from a different rank and was not attached to a store")
        return self._read(ranges)

    def ready(self, entries: Iterable[int] | None = None, objects: Iterable[int] | None = None) -> None:
        """Fetch, in few reads, what `extents` and `data` need for these numbers. None means all numbers.

        Raises the errors of reading. `extents` and `data` report damage.
        """
        if self._data is None:
            numbers = range(len(self._cells)) if entries is None else list(entries)
            self._cells.ready(numbers)
            self._rows.ready(numbers)
            self._objects.ready(range(len(self._objects)) if objects is None else objects)

    def extents(self, entry: Entry) -> ExtentTable:
        """Decode and check the extents of an entry. Raises Refused, Damaged, and the errors of reading.

        Raises MissingKey, with the reason, for an entry that a thinned checkpoint lacks.
        """
        if self.lacks(entry):
            where = f"{self.body.run}@{self.body.step}"
            why = f"{where} no longer has the bytes of {entry.key!r}: {self.left_out}"
            raise MissingKey(why, key=entry.key, keys=(entry.key,), checkpoints=(self.id,))
        try:
            cells, rows = self._cells.get(entry.number), self._rows.get(entry.number)
            cell = self.body.cell_bytes // entry.itemsize
            return decode_table(cells, rows, self.blob_sizes, shape=entry.shape, itemsize=entry.itemsize, cell=cell)
        except (*DECODE_ERRORS, InvalidInput, Damaged) as error:
            raise _unfit(self.id, error, entry.key) from error

    def whole_cells(self, numbers: Ints) -> WholeCells:
        """Of the entries with these numbers, decode the extents of those that consist of a single cell.

        Raises Refused and the errors of reading. An entry with invalid or damaged extents is skipped. `extents` reports
        what is wrong with it.
        """
        _ = self.entries  # raises Refused if they are invalid
        has_cells, cells = self._cells.rows(numbers, CELL_BYTES)
        has_rows, rows = self._rows.rows(numbers, ROW_BYTES)
        found = decode_whole_cells(cells, rows, self.blob_sizes, self.body.sizes[numbers], self.body.cell_bytes)
        return found._replace(is_whole=found.is_whole & has_cells & has_rows)

    def cells(self, entry: Entry) -> ExtentTable:
        """Decode the cells of an entry, even if a thinned checkpoint lacks their bytes.

        Their locations are meaningless. Raises Refused, Damaged, and the errors of reading.
        """
        try:
            cell = self.body.cell_bytes // entry.itemsize
            return decode_cells(self._cells.get(entry.number), shape=entry.shape, itemsize=entry.itemsize, cell=cell)
        except (*DECODE_ERRORS, InvalidInput, Damaged) as error:
            raise _unfit(self.id, error, entry.key) from error

    def raw_cells(self, entry: Entry) -> memoryview:
        """Return the stored table of an entry's cells. It contains their digests, but not their locations.

        Raises Damaged and the errors of reading.
        """
        try:
            return self._cells.get(entry.number)
        except Damaged as error:
            raise _unfit(self.id, error, entry.key) from error

    @property
    def health(self) -> dict[int, Rows] | None:
        """The health of its tensors' cells, by entry number, or None if the save did not scan them.

        Raises Damaged, Refused, and the errors of reading.
        """
        if HEALTH not in self.head:
            return None
        try:
            return decode_health(self.section(HEALTH), len(self.body.entry_columns.keys))
        except Refused as error:
            raise _unfit(self.id, error) from error

    def raw_rows(self) -> list[memoryview]:
        """Return the stored rows of all entries. Raises Damaged and the errors of reading."""
        self.ready()
        return [self._rows.get(number) for number in range(len(self._rows))]

    @property
    def is_damaged(self) -> bool:
        """Whether a part did not match its hash when it was read. The store may have been repaired since then."""
        readers = map(vars(self).get, _READERS.values())
        return any(reader is not None and reader.is_damaged for reader in readers)

    def data(self, stored: StoredObject) -> bytes:
        """Return the data of an object or attachment. Raises Damaged and the errors of reading."""
        try:
            return bytes(self._objects.get(stored.number))
        except Damaged as error:
            raise _unfit(self.id, error, stored.key) from error

    def size(self, stored: StoredObject) -> int:
        """Return the size of a short attachment in bytes."""
        return self._objects.length(stored.number)

    def faults(self) -> list[str]:
        """Return a message for each part that does not match its hash. Raises Refused and the errors of reading."""
        self.ready()
        keys = [entry.key for entry in self.entries]
        others = [*(stored.key for stored in self.objects), *self.body.attachment_names]
        messages = []
        parts = (CELLS, self._cells, keys), (ROWS, self._rows, keys), (OBJECTS, self._objects, others)
        for name, pieces, owners in parts:
            hit = dict.fromkeys(owner for number, owner in enumerate(owners) if not pieces.is_right(number))
            if hit:
                messages.append(f"its section {name!r} does not match its hash, which affects {listed(list(hit))}")
        for section in self.head.foreign:
            (data,) = self.read([(section.offset, section.length)])
            try:
                check_section(section, data)
            except Damaged as error:
                messages.append(str(error))
        return messages

    def section(self, name: str) -> Buffer:
        """Read a whole section, and verify it and its pieces. Raises Damaged, Refused, and the errors of reading."""
        section = self.head[name]
        data = self._front.get(name) or self.read([(section.offset, section.length)])[0]
        try:
            check_section(section, data)
            if name in _READERS and not getattr(self, _READERS[name]).prove(data):
                raise Damaged(f"its section {name!r} does not belong to this checkpoint")
        except Damaged as error:
            raise _unfit(self.id, error) from error
        return data

    @property
    def is_sound(self) -> bool:
        """Whether each of its sections matches its hash."""
        sections = self.head.sections
        parts = self.read([(section.offset, section.length) for section in sections])
        return all(cell_digest(data) == section.digest for section, data in zip(sections, parts, strict=True))

    def encoded(self) -> bytes:
        """Return all of its bytes, verified. Raises Damaged and the errors of reading."""
        return b"".join((self.head.data, *(self.section(section.name) for section in self.head.sections)))

    @property
    def nbytes(self) -> int:
        """Its approximate size in memory, in bytes, without attributes that are computed on first use."""
        return sum(map(len, self._front.values())) if self._data is None else len(self._data)


def _from_rank(head: Head, packed: bytes) -> Manifest:
    """Return a manifest that a different rank has pickled."""
    front, parts = memoryview(zlib.decompress(packed)), {}
    for name in FRONT:  # consecutive here, without the bytes between them in the manifest
        parts[name], front = front[: head[name].length], front[head[name].length :]
    return Manifest(head, parts).check()


def decode(data: Buffer, id: ManifestId, head: str | None = None) -> Manifest:
    """Decode the manifest with this id from all of its bytes. ``head`` is its hash from the commit record.

    Raises Damaged if the bytes are not what was written, and Refused if they are invalid. Damage to a piece is
    reported only when the piece is used.
    """
    decoded = decode_front(data, id, head)
    try:
        check_size(decoded, len(data))
    except Damaged as error:
        raise _unfit(id, error) from error
    return of_bytes(decoded, data).check()


def of_bytes(head: Head, data: Buffer) -> Manifest:
    """Return the manifest with these bytes, which are not yet verified."""
    view = memoryview(data)
    return Manifest(head, {name: view[head[name].offset : head[name].end] for name in FRONT}, data=data)


def decode_front(data: Buffer, id: ManifestId, head: str | None) -> Head:
    """Decode the head of the manifest with this id. Raises Damaged or Refused."""
    try:
        decoded = decode_head(data, head)
        if decoded[INDEX].digest.hex() != id:
            raise Damaged("it is the manifest of a different checkpoint")
        return decoded
    except (Damaged, InvalidInput) as error:
        raise _unfit(id, error) from error


def _unfit(id: ManifestId, error: Exception, key: str | None = None) -> Damaged | Refused:
    where = "" if key is None else f" key {key!r}:"
    if isinstance(error, Damaged):
        return Damaged(f"manifest {id} is damaged:{where} {error}", key=key, checkpoints=(id,))
    return Refused(f"manifest {id} is invalid:{where} {error}", key=key, checkpoints=(id,))


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True):
    """A leaf that is not a tensor. ``data``: plain data (`casckpt.format.plain`), or a pickle if ``pickled``."""

    key: str
    rank: int | None
    data: bytes
    parts: int = 0
    pickled: bool = False


class Attachment(msgspec.Struct, frozen=True, array_like=True):
    """A short attachment, stored inline. Long ones are entries of kind "attachment"."""

    name: str
    data: bytes


class Draft(Description, frozen=True, kw_only=True):
    """The contents of a manifest. ``streams``: the dtype and extents of each entry.

    Blob numbers are indices into ``blobs``.

    ``unhashed``: the entries that were not hashed completely, because they were declared frozen. ``health``: the health
    of the entries' cells, by entry number, or None if it was not requested.
    """

    blobs: Sequence[BlobRef]
    streams: Extents
    unhashed: Collection[Name] = ()
    objects: Sequence[ObjectEntry] = ()
    attachments: Sequence[Attachment] = ()
    health: Mapping[int, Rows] | None = None


class Encoded(NamedTuple):
    """An encoded manifest."""

    decoded_head: Head
    data: bytes

    @property
    def id(self) -> ManifestId:
        """The checkpoint's id."""
        return ManifestId(self.decoded_head[INDEX].digest.hex())

    @property
    def head(self) -> str:
        """The hash that the commit record contains."""
        return self.decoded_head.digest

    def manifest(self) -> Manifest:
        """Return the manifest as if it had been read."""
        return of_bytes(self.decoded_head, self.data)


def encode(draft: Draft) -> Encoded:
    """Encode a manifest. Raises InvalidInput or Refused for contents that readers would not accept."""
    every_cells, every_rows = draft.streams.encoded()
    (cells, cell_bytes), (rows, row_bytes) = cut(every_cells), cut(every_rows)
    data, data_bytes = cut([*(stored.data for stored in draft.objects), *(item.data for item in draft.attachments)])
    body = ManifestBody(
        **{name: getattr(draft, name) for name in Description.__struct_fields__},
        entry_columns=entry_columns(draft.streams.streams, draft.unhashed) if draft.unhashed else draft.streams.columns,
        object_columns=ObjectColumns(
            keys=[stored.key for stored in draft.objects],
            rank=pack_ranks(stored.rank for stored in draft.objects),
            parts=pack([stored.parts for stored in draft.objects]),
            pickled=pack([stored.pickled for stored in draft.objects]),
        ),
        attachment_names=[attachment.name for attachment in draft.attachments],
        cells=cells,
        data=data,
    )
    body.check()
    places = msgspec.msgpack.encode(PlacesSection(rows=rows))
    index, blobs = msgspec.msgpack.encode(body), encode_blobs(draft.blobs)
    health = [] if draft.health is None else [(Section(HEALTH, COPIED, 0, 0, b""), encode_health(draft.health))]
    return _assembled(
        {INDEX: index, PLACES: places, BLOBS: blobs, OBJECTS: data_bytes, CELLS: cell_bytes, ROWS: row_bytes}, health
    )


def placed(manifest: Manifest, blobs: Buffer, moved: Mapping[int, ExtentTable] | None = None) -> Encoded:
    """Encode the same checkpoint with a new ``blobs`` section, in which the blobs have the same order.

    ``moved``: the new extents of entries whose cells moved inside the blobs, by entry number. All sections that
    describe what was saved keep their bytes. Raises Damaged and the errors of reading.
    """
    parts = {name: manifest.section(name) for name in (INDEX, PLACES, OBJECTS, CELLS, ROWS)} | {BLOBS: blobs}
    if moved:
        raw = manifest.raw_rows()
        rows, parts[ROWS] = cut([encode_rows(moved[n]) if n in moved else row for n, row in enumerate(raw)])
        parts[PLACES] = msgspec.msgpack.encode(PlacesSection(rows=rows))
    taken = [section for section in manifest.head.foreign if section.flags & COPIED]
    return _assembled(parts, [(section, manifest.section(section.name)) for section in taken])


def thinned(manifest: Manifest, drop: Container[int]) -> Encoded:
    """Encode the same checkpoint without the entries numbered ``drop`` and the blobs that only they use.

    Raises Damaged, Refused, and the errors of reading.
    """
    tables = {entry.number: manifest.extents(entry) for entry in manifest.held}
    kept = [table for number, table in tables.items() if number not in drop]
    used = sorted({link.blob for table in kept for extent in table.extents for link in extent.chain})
    numbers = {old: new for new, old in enumerate(used)}
    moved = {n: changed(table, extents=()) if n in drop else renumbered(table, numbers) for n, table in tables.items()}
    return placed(manifest, encode_blobs(manifest.blob(number) for number in used), moved)


def _assembled(parts: Mapping[str, Buffer], foreign: Sequence[tuple[Section, Buffer]] = ()) -> Encoded:
    return Encoded(*assemble(((name, parts[name]) for name in KNOWN), foreign))
