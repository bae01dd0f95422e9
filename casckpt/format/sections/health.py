"""The health of a checkpoint: how many elements of each cell are NaN or infinite, and the largest other element.

It is a separate section. Older readers ignore it, and copies keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.msgpack import Decoder

from casckpt.base.digest import Buffer
from casckpt.errors import Refused
from casckpt.format.sections.blobs import DECODE_ERRORS
from casckpt.format.sections.columns import pack, unpack

HEALTH = "health"
"""The name of the section."""


class CellHealth(NamedTuple):
    """The numbers of NaN and infinite elements, and the largest absolute value of the others, or 0 if there are none.

    Each part of a complex number counts as an element.
    """

    nan: int
    inf: int
    largest: float


class HealthColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The health section. ``entries``: the numbers of the scanned entries. ``cells``: the number of cells in each.

    ``nan``, ``inf`` and ``largest`` (8 bytes each, float64) have one row for each of these cells.
    """

    entries: bytes
    cells: bytes
    nan: bytes
    inf: bytes
    largest: bytes


_HEALTH: Decoder[HealthColumns] = Decoder(HealthColumns)
Rows: TypeAlias = npt.NDArray[np.float64]
"""The health of an entry's cells: for each cell, a row with the three numbers of `CellHealth`."""


def rows_of(cells: Sequence[CellHealth]) -> Rows:
    """Return the rows for an entry's cells."""
    return np.array(cells, np.float64).reshape(-1, 3)


def sum_of(rows: Rows) -> CellHealth:
    """Return the combined health of all these cells."""
    nan, inf = rows[:, :2].sum(axis=0).tolist()
    return CellHealth(int(nan), int(inf), float(rows[:, 2].max(initial=0)))


def joined(found: Iterable[Rows]) -> Rows:
    """Join the rows of several entries."""
    return np.concatenate([np.empty((0, 3)), *found])


def encode_health(found: Mapping[int, Rows]) -> bytes:
    """Encode the rows of entries, by entry number."""
    rows = joined(found.values())
    columns = HealthColumns(
        entries=pack(list(found)),
        cells=pack([len(one) for one in found.values()]),
        nan=pack(rows[:, 0]),
        inf=pack(rows[:, 1]),
        largest=rows[:, 2].astype("<f8").tobytes(),
    )
    return msgspec.msgpack.encode(columns)


def decode_health(data: Buffer, entries: int) -> dict[int, Rows]:
    """Decode the health section of a manifest with ``entries`` entries. Raises Refused for invalid bytes."""
    try:
        columns = _HEALTH.decode(data)
    except DECODE_ERRORS as error:
        raise Refused(f"its health section is invalid: {error}") from error
    numbers, counts = unpack(columns.entries), unpack(columns.cells)
    nan, inf, total = unpack(columns.nan), unpack(columns.inf), sum(counts)
    if len(numbers) != len(counts) or {len(nan), len(inf), len(columns.largest) / 8} != {total}:
        raise Refused("the columns of its health section differ in length")
    if any(one >= other for one, other in pairwise([-1, *numbers, entries])):
        raise Refused("its health section names entries that do not exist, or that are out of order")
    rows = np.column_stack([nan, inf, np.frombuffer(columns.largest, "<f8")]).reshape(-1, 3)
    if not (np.isfinite(rows) & (rows >= 0)).all():
        raise Refused("its health section has a largest value that is negative or not finite")
    parts = np.split(rows, np.cumsum(counts))
    return dict(zip(numbers, parts, strict=False))
