"""The health of a checkpoint: joins the counts of the scanned cells with the parent's counts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import TypeAlias

from casckpt.errors import CasckptError, Damaged, Refused
from casckpt.format.extents import DIGEST_BYTES, ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest
from casckpt.format.records import Health
from casckpt.format.sections.health import CellHealth, Rows, joined, rows_of, sum_of
from casckpt.format.sections.index import TENSOR, Entry, Name
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.saving.health_scan import ScanReport, has_health
from casckpt.saving.reuse_offer import readable

Found: TypeAlias = Mapping[tuple[str, CellDigest], CellHealth]
"""The health of each cell, by dtype and digest."""

log = logging.getLogger(__name__)
_MAX_KEYS = 8  # the maximum number of keys with NaN or infinities that a commit record names


class ParentHealth:
    """The health of the parent's entries, for a save. It is empty if there is no readable parent."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest
        self._rows = {} if manifest is None else _stored_rows(manifest)
        self._entries = {} if manifest is None else {entry.name: entry for entry in manifest.entries}

    @classmethod
    def of_commit(cls, repo: Repository, commit: Commit | None) -> ParentHealth:
        """Read the health of the parent."""
        return cls(None if commit is None else readable(repo, commit))

    @property
    def is_readable(self) -> bool:
        """Whether there is a parent with a readable manifest."""
        return self._manifest is not None

    @property
    def unknown(self) -> frozenset[Name]:
        """The streams whose health the parent does not have."""
        entries = self._entries.values()
        return frozenset(entry.name for entry in entries if has_health(entry.dtype) and entry.number not in self._rows)

    def rows(self, name: Name, dtype: str, table: ExtentTable, scanned: Found) -> Rows | None:
        """Return the rows of a stream with these cells, or None if the health of any cell is unknown.

        ``scanned``: the health of the cells that this save scanned.
        """
        digests, entry = _digests(table), self._entries.get(name)
        rows = _rows(dtype, digests, scanned, {})
        if rows is not None or entry is None or entry.dtype != dtype or entry.number not in self._rows:
            return rows
        before, stored = self._cells(entry), self._rows[entry.number]
        if before == digests and len(stored) == len(digests):  # the common case
            return stored
        known = dict(zip(before, starmap(CellHealth, stored.tolist()), strict=False))
        return _rows(dtype, digests, scanned, known)

    def _cells(self, entry: Entry) -> list[CellDigest]:
        """Return the digests of an entry's cells. Return an empty list if they cannot be read."""
        try:
            return [] if self._manifest is None else _digests(self._manifest.cells(entry))
        except (Damaged, Refused):
            return []


def _stored_rows(manifest: Manifest) -> Mapping[int, Rows]:
    try:
        return manifest.health or {}
    except CasckptError as error:
        log.debug("casckpt cannot read the parent's health: %s", error)
        return {}


def health_of_all(
    streams: Mapping[Name, tuple[str, ExtentTable]], reports: Iterable[ScanReport], parent: ParentHealth
) -> dict[int, Rows]:
    """Return the rows of each entry, by number, from the ``reports`` of ranks and from ``parent``.

    Omits a stream if the health of any of its cells is unknown, as in a frozen stream.
    """
    scanned = {
        (dtype, digest): CellHealth(*row)
        for report in reports
        for dtype, (digests, rows) in report.items()
        for digest, row in zip(_cut(digests), rows.tolist(), strict=True)
    }
    health: dict[int, Rows] = {}
    for number, (name, (dtype, table)) in enumerate(streams.items()):
        if name[0] == TENSOR and has_health(dtype):
            rows_of_entry = parent.rows(name, dtype, table, scanned)
            health |= {} if rows_of_entry is None else {number: rows_of_entry}
    return health


def _rows(
    dtype: str, digests: Sequence[CellDigest], scanned: Found, known: Mapping[CellDigest, CellHealth]
) -> Rows | None:
    cells = [scanned.get((dtype, digest)) or known.get(digest) for digest in digests]
    present = [cell for cell in cells if cell is not None]
    return rows_of(present) if len(present) == len(cells) else None


def _digests(table: ExtentTable) -> list[CellDigest]:
    return _cut(b"".join([extent.digests for extent in table.extents]))


def _cut(every: bytes) -> list[CellDigest]:
    return [CellDigest(every[at : at + DIGEST_BYTES]) for at in range(0, len(every), DIGEST_BYTES)]


def summed_health(streams: Iterable[Name], rows: Mapping[int, Rows]) -> Health:
    """Return the total health of all tensors, for the commit record."""
    names, total = list(streams), sum_of(joined(rows.values()))
    sums = {names[number]: sum_of(one) for number, one in rows.items()} if total.nan or total.inf else {}
    bad = sorted((name for name, one in sums.items() if one.nan or one.inf), key=lambda name: not sums[name].nan)
    keys = dict.fromkeys(key for _, key, _, _ in bad)
    return Health(nan=total.nan, inf=total.inf, keys=list(keys)[:_MAX_KEYS])
