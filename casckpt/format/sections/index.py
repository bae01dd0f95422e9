"""The index of a manifest: what was saved, as columns over its entries and objects. Its hash is the checkpoint's id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from casckpt.base.lazy import cached_property
from casckpt.base.names import check_attachment_name, check_run, check_step
from casckpt.errors import InvalidInput, Refused
from casckpt.format import dtypes, plain
from casckpt.format.keys import check_hash
from casckpt.format.metrics import LINEAGE
from casckpt.format.names import ManifestId
from casckpt.format.regions import MAX_DIMENSIONS, Shape, check_shape
from casckpt.format.sections.columns import Ints, pack, unpack
from casckpt.format.sections.pieces import Pieces

MAX_KEY_CHARACTERS = 4096
MAX_ITEMSIZE = 4096
TENSOR, PART, ATTACHMENT = "tensor", "part", "attachment"
REPLICAS_NOTE: Final = "replicas"
"""The name of the note that lists the keys of replicas that differed across ranks, as plain data."""

Name: TypeAlias = tuple[str, str, int, int | None]
"""The identity of an entry in a checkpoint: kind, key, index, rank. See `Entry`."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One stored tensor, buffer or attachment: a sequence of elements in blobs.

    ``kind``: "tensor"; "part", a large buffer of an object (``key`` is the object's key, and ``index`` the buffer's
    number); or "attachment", an attached file (``key`` is its name). ``rank``: for a value that each rank stores
    separately (`casckpt.PerRank`), the rank, and otherwise None. ``dtype``: torch's name of the dtype, whose elements
    have ``itemsize`` bytes. ``number``: the entry's number in its manifest.
    """

    kind: str
    key: str
    index: int
    rank: int | None
    dtype: str
    itemsize: int
    shape: Shape
    number: int

    def converted(self, dtype: str, itemsize: int) -> Entry:
        """Return the entry with a different dtype, as it is after a load that converts it."""
        return Entry(self.kind, self.key, self.index, self.rank, dtype, itemsize, self.shape, self.number)

    @property
    def name(self) -> Name:
        """The identity of the entry in its manifest."""
        return self.kind, self.key, self.index, self.rank

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in memory, in bytes."""
        return self.numel * self.itemsize


class StoredObject(msgspec.Struct, frozen=True, gc=False):
    """A leaf that is not a tensor, or a short attachment, without its data.

    ``number``: the number of its piece in the objects section.
    """

    key: str
    rank: int | None
    parts: int
    pickled: bool
    number: int


class EntryColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each entry. ``kind``, ``dtype``: indices into ``kinds`` and ``dtypes``.

    Each dtype is listed with its bytes per element. ``rank``: the rank plus 1, or 0 for none. ``dimensions``: the
    number of dimensions. ``shape``: the shapes of all entries, one after the other. ``unhashed``: the numbers of the
    entries that were not hashed completely, because the user declared them frozen.
    """

    kinds: list[str]
    kind: bytes
    keys: list[str]
    index: bytes
    rank: bytes
    dtypes: list[tuple[str, int]]
    dtype: bytes
    dimensions: bytes
    shape: bytes
    unhashed: bytes


class ObjectColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each object. ``rank``: as for entries. ``parts``: the number of parts. ``pickled``: 0 or 1."""

    keys: list[str]
    rank: bytes
    parts: bytes
    pickled: bytes


class Description(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of the whole checkpoint. ``created_at``: microseconds since the epoch, in UTC.

    ``notes``: plain data that front ends add under their own names. Readers ignore unknown notes.
    """

    casckpt: str
    torch: str
    run: str
    step: int
    created_at: int
    parent: ManifestId | None
    world_size: int
    cell_bytes: int
    metadata: msgspec.Raw
    tree: bytes
    notes: dict[str, bytes] = {}


_STORED_AS = {"entry_columns": "entries", "object_columns": "objects", "attachment_names": "attachments"}


class ManifestBody(Description, frozen=True, kw_only=True, dict=True, rename=_STORED_AS):
    """The content whose hash is the id of a checkpoint.

    ``cells``: the cell tables of the entries. ``data``: the data of the objects, and then of the attachments.
    """

    entry_columns: EntryColumns
    object_columns: ObjectColumns
    attachment_names: list[str]
    cells: Pieces
    data: Pieces

    def check(self) -> None:
        """Raise Refused or InvalidInput for values that are outside the limits or not valid in a key or path."""
        check_run(self.run)
        check_step(self.step)
        if self.parent is not None:
            check_hash(self.parent)
        if not 4096 <= self.cell_bytes <= 1 << 30 or self.cell_bytes % 4096:
            raise Refused(f"its cell size of {self.cell_bytes} bytes is invalid")
        for name in self.attachment_names:
            check_attachment_name(name)

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """All entries. Raises Refused or InvalidInput for invalid columns."""
        return _entries(self.entry_columns)

    @cached_property
    def sizes(self) -> Ints:
        """The size of each entry in bytes. Sizes above 2**50 may be too low. Call this only after `entries`."""
        dimensions = np.array(unpack(self.entry_columns.dimensions), np.int64)
        extents = np.array([*unpack(self.entry_columns.shape), 1], np.int64)
        products = np.multiply.reduceat(extents, np.cumsum(dimensions) - dimensions)
        itemsizes = np.array([itemsize for _, itemsize in self.entry_columns.dtypes], np.int64)
        numels = np.minimum(np.where(dimensions > 0, products, 1), 1 << 50)  # so that no product overflows
        return numels * itemsizes[unpack(self.entry_columns.dtype)]

    @cached_property
    def objects(self) -> Sequence[StoredObject]:
        """All objects. Raises Refused."""
        columns = self.object_columns
        ranks, parts, pickled = _ranks(columns.rank), unpack(columns.parts), unpack(columns.pickled)
        if {len(ranks), len(parts), len(pickled)} != {len(columns.keys)}:
            raise Refused("its object columns differ in length")
        _check_keys(columns.keys)
        rows = zip(columns.keys, ranks, parts, map(bool, pickled), strict=True)
        return [StoredObject(*row, number) for number, row in enumerate(rows)]

    @cached_property
    def attachments(self) -> Sequence[StoredObject]:
        """All short attachments. Long ones are entries."""
        first = len(self.object_columns.keys)
        return [StoredObject(name, None, 0, False, first + n) for n, name in enumerate(self.attachment_names)]


def lineage_of(notes: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the notes that say where the state came from, decoded. Raises Refused if one of them is not valid."""
    return {name: plain.decode(notes[name], strict=True) for name in LINEAGE if name in notes}


def _entries(columns: EntryColumns) -> list[Entry]:
    count, keys = len(columns.keys), columns.keys
    kinds, types = _of(columns.kinds, columns.kind), _of(columns.dtypes, columns.dtype)
    indices, ranks, shapes = unpack(columns.index), _ranks(columns.rank), _shapes(columns)
    if {len(row) for row in (kinds, indices, ranks, types, shapes)} != {count}:
        raise Refused("its entry columns differ in length")
    for name, itemsize in columns.dtypes:
        if not 1 <= itemsize <= MAX_ITEMSIZE or itemsize != dtypes.DTYPES.get(name, (itemsize,))[0]:
            raise Refused(f"dtype {name[:80]!r} cannot have elements of {itemsize} bytes")
    _check_keys(keys)
    rows = zip(kinds, keys, indices, ranks, types, shapes, range(count), strict=True)
    made = [
        Entry(kind, key, index, rank, dtype, itemsize, shape, number)
        for kind, key, index, rank, (dtype, itemsize), shape, number in rows
    ]
    if columns.kinds != [TENSOR]:
        _check_bytes(made)
    return made


def _check_keys(keys: Sequence[str]) -> None:
    if max(map(len, keys), default=0) > MAX_KEY_CHARACTERS:
        raise Refused("one of its keys is too long")


def _check_bytes(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.kind == ATTACHMENT:
            check_attachment_name(entry.key)
        if entry.kind in (PART, ATTACHMENT) and (entry.dtype != "uint8" or len(entry.shape) != 1):
            raise Refused(f"key {entry.key[:80]!r} of kind {entry.kind} does not consist of bytes")


def _of(table: Sequence[Any], column: bytes) -> list[Any]:
    numbers = unpack(column)
    if max(numbers, default=-1) >= len(table):
        raise Refused("an entry has a kind or dtype that its manifest does not list")
    return [table[number] for number in numbers]


def _ranks(column: bytes) -> list[int | None]:
    return [number - 1 if number else None for number in unpack(column)]


def _shapes(columns: EntryColumns) -> list[Shape]:
    dimensions, numbers = unpack(columns.dimensions), unpack(columns.shape)
    if max(dimensions, default=0) > MAX_DIMENSIONS or sum(dimensions) != len(numbers):
        raise Refused("its shape columns differ in length, or a shape has too many dimensions")
    sizes = zip(dimensions, accumulate(dimensions), strict=True)
    return [check_shape(tuple(numbers[end - size : end])) for size, end in sizes]


def pack_ranks(ranks: Iterable[int | None]) -> bytes:
    """Encode ranks as a column."""
    return pack([0 if rank is None else rank + 1 for rank in ranks])


def entry_columns(streams: Mapping[Name, tuple[str, Shape]], unhashed: Collection[Name]) -> EntryColumns:
    """Return the entry columns for ``streams``, the dtype and shape of each entry.

    Raises InvalidInput for a key that readers would not accept, and Refused for an unknown dtype.
    """
    types, shapes = [dtype for dtype, _ in streams.values()], [shape for _, shape in streams.values()]
    kinds, keys, indices, ranks = map(list, zip(*streams, strict=True)) if streams else ([], [], [], [])
    if keys and len(long := max(keys, key=len)) > MAX_KEY_CHARACTERS:
        raise InvalidInput(f"key {long[:80]!r}... has more than {MAX_KEY_CHARACTERS} characters", key=long)
    kind_of = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    type_of = {dtype: number for number, dtype in enumerate(dict.fromkeys(types))}
    return EntryColumns(
        kinds=list(kind_of),
        kind=pack([kind_of[kind] for kind in kinds]),
        keys=keys,
        index=pack(indices),
        rank=pack_ranks(ranks),
        dtypes=[(name, dtypes.itemsize(name)) for name in type_of],
        dtype=pack([type_of[dtype] for dtype in types]),
        dimensions=pack([len(shape) for shape in shapes]),
        shape=pack([extent for shape in shapes for extent in shape]),
        unhashed=pack([number for number, name in enumerate(streams) if name in unhashed] if unhashed else []),
    )
