"""Computes the differences between two checkpoints from their manifests, without reading tensor data."""

from __future__ import annotations

from dataclasses import dataclass

from casckpt.format.manifest import Manifest
from casckpt.format.sections.index import Entry
from casckpt.format.sections.tables import encode_cells
from casckpt.format.tree import Node, Wrapper


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that differs. ``what``: "dtype", "shape" or "bytes". ``bytes``: the number of changed bytes.

    If the description of a wrapper differs, such as its block size, ``what`` is "description", and ``key`` is the key
    of the wrapper.
    """

    key: str
    what: str
    bytes: int


@dataclass(frozen=True)
class Difference:
    """The keys of the tensors that were added, removed, changed or left unchanged.

    Bytes are compared cell by cell, by digest. If two saves split a tensor into different cells (because the topology
    changed and no bytes are equal), the whole tensor counts as changed.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changes: tuple[Change, ...]
    unchanged: tuple[str, ...]
    bytes_added: int
    bytes_removed: int
    bytes_unchanged: int

    @property
    def changed(self) -> tuple[str, ...]:
        """The keys of the tensors that are in both checkpoints and differ."""
        return tuple(change.key for change in self.changes)

    @property
    def bytes_changed(self) -> int:
        """The number of bytes in the changed cells of tensors that are in both checkpoints."""
        return sum(change.bytes for change in self.changes)


def difference(old: Manifest, new: Manifest) -> Difference:
    """Compare two manifests."""
    before, after = old.tensors, new.tensors
    wrappers, unchanged = old.wrappers, list[str]()
    changes = [
        Change(key, "description", 0) for key, node in new.wrappers.items() if _is_redescribed(wrappers.get(key), node)
    ]
    for key, entry in after.items():
        if key in before:
            change = _change(old, before[key], new, entry)
            if change is None:
                unchanged.append(key)
            else:
                changes.append(change)
    added = tuple(key for key in after if key not in before)
    removed = tuple(key for key in before if key not in after)
    kept = sum(after[key].nbytes for key in unchanged) + sum(
        after[c.key].nbytes - c.bytes for c in changes if c.what != "description"
    )
    return Difference(
        added=added,
        removed=removed,
        changes=tuple(changes),
        unchanged=tuple(unchanged),
        bytes_added=sum(after[key].nbytes for key in added),
        bytes_removed=sum(before[key].nbytes for key in removed),
        bytes_unchanged=kept,
    )


def _is_redescribed(before: Node | None, after: Node) -> bool:
    if not (isinstance(before, Wrapper) and isinstance(after, Wrapper)):
        return False
    both = before.nodes.keys() & after.nodes.keys()
    return before.form != after.form or any(_is_redescribed(before.nodes[name], after.nodes[name]) for name in both)


def _change(old: Manifest, before: Entry, new: Manifest, after: Entry) -> Change | None:
    if before.shape != after.shape:
        return Change(after.key, "shape", after.nbytes)
    if before.dtype != after.dtype:
        return Change(after.key, "dtype", after.nbytes)
    old_cells, new_cells = old.cells(before), new.cells(after)
    if old_cells.cell == new_cells.cell and encode_cells(old_cells) == encode_cells(new_cells):
        return None  # the common case, which is fast to compare
    old_digests = {(cell.region, cell.digest) for cell in old_cells.stored_cells()}
    nbytes = sum(cell.nbytes for cell in new_cells.stored_cells() if (cell.region, cell.digest) not in old_digests)
    return Change(after.key, "bytes", nbytes) if nbytes else None
