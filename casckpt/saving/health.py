"""The health of a checkpoint: counts of changed cells, joined with those of the parent."""

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
"""Of cells, by dtype and digest."""

log = logging.getLogger(__name__)
_TOLD = 8  # keys with NaN or infinities that a commit record names


class Parent:
    """The health of the entries of the parent of a save; empty if there is no parent, or it cannot be read."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest
        self._told = {} if manifest is None else _told(manifest)
        self._entries = {} if manifest is None else {one.name: one for one in manifest.entries}

    @classmethod
    def of_commit(cls, repo: Repository, commit: Commit | None) -> Parent:
        """Read the health of a parent."""
        return cls(None if commit is None else readable(repo, commit))

    @property
    def unknown(self) -> frozenset[Name]:
        """The streams that it has told nothing of."""
        every = self._entries.values()
        return frozenset(one.name for one in every if has_health(one.dtype) and one.number not in self._told)

    def rows(self, name: Name, dtype: str, table: ExtentTable, scanned: Found) -> Rows | None:
        """Return the rows of a stream that has these cells, of which some were ``scanned``; None if any is unknown."""
        digests, entry = _digests(table), self._entries.get(name)
        made = _rows(dtype, digests, scanned, {})
        if made is not None or entry is None or entry.dtype != dtype or entry.number not in self._told:
            return made
        before, told = self._cells(entry), self._told[entry.number]
        if before == digests and len(told) == len(digests):  # as of most
            return told
        known = dict(zip(before, starmap(CellHealth, told.tolist()), strict=False))
        return _rows(dtype, digests, scanned, known)

    def _cells(self, entry: Entry) -> list[CellDigest]:
        """Return the digests of the cells of an entry; none, if these cannot be read."""
        try:
            return [] if self._manifest is None else _digests(self._manifest.cells(entry))
        except (Damaged, Refused):
            return []


def _told(manifest: Manifest) -> Mapping[int, Rows]:
    try:
        return manifest.health or {}
    except CasckptError as error:
        log.debug("the health of the parent cannot be read: %s", error)
        return {}


def health_of_all(
    streams: Mapping[Name, tuple[str, ExtentTable]], told: Iterable[ScanReport], parent: Parent
) -> dict[int, Rows]:
    """Return the rows of each entry, by number, as ranks have ``told`` them, and ``parent`` the others.

    A stream of which any cell is unknown, as one that was declared frozen, is left out.
    """
    every = {
        (dtype, digest): CellHealth(*row)
        for rank in told
        for dtype, (digests, rows) in rank.items()
        for digest, row in zip(_cut(digests), rows.tolist(), strict=True)
    }
    found: dict[int, Rows] = {}
    for number, (name, (dtype, table)) in enumerate(streams.items()):
        if name[0] == TENSOR and has_health(dtype):
            made = parent.rows(name, dtype, table, every)
            found |= {} if made is None else {number: made}
    return found


def _rows(
    dtype: str, digests: Sequence[CellDigest], found: Found, told: Mapping[CellDigest, CellHealth]
) -> Rows | None:
    cells = [found.get((dtype, digest)) or told.get(digest) for digest in digests]
    known = [cell for cell in cells if cell is not None]
    return rows_of(known) if len(known) == len(cells) else None


def _digests(table: ExtentTable) -> list[CellDigest]:
    return _cut(b"".join([extent.digests for extent in table.extents]))


def _cut(every: bytes) -> list[CellDigest]:
    return [CellDigest(every[at : at + DIGEST_BYTES]) for at in range(0, len(every), DIGEST_BYTES)]


def summed_health(streams: Iterable[Name], rows: Mapping[int, Rows]) -> Health:
    """Return what a commit record tells of all tensors together."""
    names, total = list(streams), sum_of(joined(rows.values()))
    sums = {names[number]: sum_of(one) for number, one in rows.items()} if total.nan or total.inf else {}
    bad = sorted((name for name, one in sums.items() if one.nan or one.inf), key=lambda name: not sums[name].nan)
    keys = dict.fromkeys(key for _, key, _, _ in bad)
    return Health(nan=total.nan, inf=total.inf, keys=list(keys)[:_TOLD])
