"""Scans for NaN and infinities during a save. Also finds each cell's largest value.

A cell is scanned right after it is hashed, while it is still in the CPU's cache. A cell whose digest matches a cell of
the parent has the same health, so the save does not scan it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from casckpt.base.groups import grouped
from casckpt.format.names import CellDigest
from casckpt.format.sections.health import CellHealth, Rows, rows_of
from casckpt.format.sections.index import TENSOR, Name
from casckpt.saving.local_entries import LocalEntry


class _Float(NamedTuple):
    """A dtype whose parts are floats of ``width`` bytes.

    ``unfit``: the smallest bit pattern, without the sign, that is infinite or NaN. ``fnuz``: the bit pattern of -0
    means NaN.
    """

    width: int
    unfit: int
    part: str
    fnuz: bool = False


_FLOATS = {
    "float16": _Float(2, 0x7C00, "<f2"),
    "bfloat16": _Float(2, 0x7F80, "bfloat16"),
    "float32": _Float(4, 0x7F80_0000, "<f4"),
    "float64": _Float(8, 0x7FF0_0000_0000_0000, "<f8"),
    "complex32": _Float(2, 0x7C00, "<f2"),
    "complex64": _Float(4, 0x7F80_0000, "<f4"),
    "complex128": _Float(8, 0x7FF0_0000_0000_0000, "<f8"),
    "float8_e5m2": _Float(1, 0x7C, "float8_e5m2"),
    "float8_e4m3fn": _Float(1, 0x7F, "float8_e4m3fn"),
    "float8_e5m2fnuz": _Float(1, 0x80, "float8_e5m2fnuz", fnuz=True),
    "float8_e4m3fnuz": _Float(1, 0x80, "float8_e4m3fnuz", fnuz=True),
    "float8_e8m0fnu": _Float(1, 0, "float8_e8m0fnu"),  # unsigned, so `health_of` reads each value
}
_INTS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}

ScanReport: TypeAlias = Mapping[str, tuple[bytes, Rows]]
"""The results of one rank: for each dtype, the concatenated digests of its cells, and their health."""


def has_health(dtype: str) -> bool:
    """Return whether cells of a dtype are scanned. This is true for all floats, and for ints that fill whole bytes."""
    return dtype in _FLOATS or dtype in _INTS


def health_of(dtype: str, data: memoryview) -> CellHealth:
    """Return the health of a cell. The cell must have at least one element."""
    if dtype in _INTS:
        whole = np.frombuffer(data, dtype)
        return CellHealth(0, 0, float(max(int(whole.max()), -int(whole.min()))))
    kind = _FLOATS[dtype]
    top = _top(kind, data)
    if top < kind.unfit and not (kind.fnuz and (np.frombuffer(data, np.uint8) == 0x80).any()):
        return CellHealth(0, 0, float(_values(kind, memoryview(top.to_bytes(kind.width, "little")))[0]))
    values = _values(kind, data)
    nan, inf = np.isnan(values), np.isinf(values)
    largest = np.abs(values, where=~(nan | inf), out=np.zeros_like(values)).max()
    return CellHealth(int(nan.sum()), int(inf.sum()), float(largest))


def _top(kind: _Float, data: memoryview) -> int:
    """Return the largest bit pattern, without the sign. The absolute values of floats sort in the order of these bits.

    This takes two passes, and copies nothing. Read as integers, negative floats are the lowest signed and the highest
    unsigned numbers.
    """
    bits = np.frombuffer(data, f"<u{kind.width}")
    most = np.maximum.reduce  # like `max` of an array, but faster for a small array
    return max(int(most(bits.view(f"<i{kind.width}"))), int(most(bits)) - (1 << (8 * kind.width - 1)))


def _values(kind: _Float, data: memoryview) -> npt.NDArray[np.floating]:
    """Return the elements as numpy floats."""
    if kind.part == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if kind.width == 1:
        return _values_of_bytes(kind.part)[np.frombuffer(data, np.uint8)]
    return np.frombuffer(data, kind.part)


@cache
def _values_of_bytes(dtype: str) -> npt.NDArray[np.floating]:
    every = torch.arange(256, dtype=torch.uint8, device="cpu").view(getattr(torch, dtype))
    values: npt.NDArray[np.floating] = every.to(torch.float32).numpy()
    return values


@dataclass
class HealthScan:
    """The scan of the cells whose health is unknown, in one save on one rank. Thread-safe.

    ``unscanned``: the streams whose health the parent does not have.
    """

    unscanned: frozenset[Name]
    found: dict[tuple[str, CellDigest], CellHealth] = field(default_factory=dict)

    def scan(self, source: LocalEntry, data: memoryview, digest: CellDigest, *, is_unchanged: bool) -> None:
        """Scan a cell if necessary. ``data``: its freshly hashed bytes. ``is_unchanged``: since the parent."""
        if source.kind != TENSOR or not has_health(source.dtype):
            return
        if not is_unchanged or source.name in self.unscanned:
            self.found[source.dtype, digest] = health_of(source.dtype, data)

    @property
    def report(self) -> ScanReport:
        """The results, for rank 0."""
        return {
            dtype: (b"".join([digest for _, digest in cells]), rows_of([self.found[cell] for cell in cells]))
            for dtype, cells in grouped(self.found, lambda cell: cell[0]).items()
        }
