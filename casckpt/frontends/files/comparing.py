"""Which files differ between two stored folders of other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from casckpt.base.progress import silent
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.format.manifest import Manifest
from casckpt.format.sections.recipe import Item, ItemKind
from casckpt.frontends.files.exporting import recipe_of, slices_of
from casckpt.loading.regions import RegionReader


class FileChanges(NamedTuple):
    """The paths of the items that only the new checkpoint has, only the old one, and that differ in bytes or mode."""

    added: Sequence[str]
    removed: Sequence[str]
    changed: Sequence[str]


class _Folder:
    """A stored folder. Equal bytes of two of them are in equal cells, except in small files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._repo = checkpoint.repo
        self._manifest: Manifest = Contents.open(checkpoint.repo, checkpoint.commit).manifest
        self.items = {one.path: one for one in recipe_of(self._manifest) or ()}

    def described(self, path: str) -> object:
        one = self.items[path]
        entries = self._manifest.body.entries
        cells = [(bytes(self._manifest.raw_cells(entries[piece.entry])), *piece[1:]) for piece in one.pieces]
        return one.kind, one.mode, one.target, cells

    def packed(self, path: str) -> bytes | None:
        """Return the bytes of a small file, whose cells also hold other files."""
        one = self.items[path]
        if len(one.pieces) != 1 or not self._manifest.body.entries[one.pieces[0].entry].key.startswith("/"):
            return None
        reader = RegionReader(self._repo, self._manifest, one.pieces[0].length, silent)
        return b"".join(bytes(part) for part in reader.read_joined(slices_of(self._manifest, [one])))


def file_changes(old: Checkpoint, new: Checkpoint) -> FileChanges:
    """Compare two stored folders. Reads only small files that share cells with others. Raises the errors of a load."""
    before, after = _Folder(old), _Folder(new)

    def differs(path: str) -> bool:
        if before.described(path) == after.described(path):
            return False
        mine, other = before.packed(path), after.packed(path)
        return mine is None or mine != other or _outer(before.items[path]) != _outer(after.items[path])

    both = [path for path in before.items if path in after.items]
    return FileChanges(
        [path for path in after.items if path not in before.items],
        [path for path in before.items if path not in after.items],
        [path for path in both if differs(path)],
    )


def _outer(one: Item) -> tuple[ItemKind, int, str]:
    return one.kind, one.mode, one.target
