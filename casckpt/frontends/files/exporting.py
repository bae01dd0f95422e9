"""Gives back a stored folder or file of another program, byte for byte."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from casckpt.base.progress import Progress, Shown
from casckpt.base.text import is_url, listed, local_path
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import Conflict, InvalidInput, Unsupported
from casckpt.format.manifest import Manifest
from casckpt.format.sections.recipe import NOTE, Item, ItemKind, decode_recipe
from casckpt.frontends.files.listing import SMALL
from casckpt.frontends.interchange.new_files import copied, exchanged_folder, new_file
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.loading.regions import EntrySlice, RegionReader
from casckpt.storage.local.syscalls import sync_file_system
from casckpt.store.exports import Exported

log = logging.getLogger(__name__)


def recipe_of(manifest: Manifest) -> list[Item] | None:
    """Return the items of the folder that a checkpoint holds, or None. Raises Refused."""
    note = manifest.body.notes.get(NOTE)
    return None if note is None else decode_recipe(note, manifest.body.entries)


def export_files(
    store: AnyStore,
    ref: str | Checkpoint,
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Shown | None = None,
) -> Exported:
    """Give back the folder or file that `import_files` stored: all bytes, links and permission bits.

    It appears under its final name in one step. ``force``: replace an existing folder, whose unchanged files are
    copied, with shared blocks if possible, instead of read from the store. Files that the checkpoint does not have are
    then in a folder with the suffix ".before" (or ".before2", ...), and the result's ``notes`` list them. ``left_out``
    of the result: files whose tensors a thinned checkpoint lacks.

    Raises NotFound, InvalidInput, Damaged, StorageError, and Conflict if ``path`` is not empty.
    """
    opened = as_store(store)
    checkpoint = opened.get(ref)
    if is_url(path):
        raise InvalidInput(f"{os.fspath(path)} is a URL, which cannot hold links and modes: export to a local folder")
    target = local_path(path)
    if not is_url(opened.url) and Path(opened.url).resolve().is_relative_to(target.resolve()):
        raise InvalidInput(f"{target} contains the store itself: choose a different folder")
    job, notes = _Job(checkpoint, progress), list[str]()

    def look(before: Path) -> None:
        if moved := _left_in(before, job.items):
            notes.append(f"the checkpoint does not have {listed(moved)}: now in {before.name}")
            log.warning("%s: %s", target, notes[0])

    held = target if force else None
    if job.items[0].kind == ItemKind.FILE:
        if target.is_dir():
            raise Conflict(f"{target} is a folder, but a file is stored; choose the name of a file in it")
        with new_file(target, force=force) as new:
            job.write(new, held)
    else:
        with exchanged_folder(target, force=force, old=look) as new:
            job.write(new, held)
        os.chmod(target, job.items[0].mode)  # a folder that is read-only cannot move
    files = tuple(target / one.path for one in job.items if one.kind == ItemKind.FILE and one.path not in job.lacking)
    return Exported(
        checkpoint, files, len(job.manifest.entries), job.nbytes, left_out=tuple(job.lacking), format="files",
        notes=tuple(notes),
    )  # fmt: skip


class _Job:
    """An export. ``lacking``: the files whose bytes a thinned checkpoint does not have all of."""

    def __init__(self, checkpoint: Checkpoint, progress: Shown | None) -> None:
        contents = Contents.open(checkpoint.repo, checkpoint.commit)
        self.manifest = contents.manifest
        items = recipe_of(self.manifest)
        if items is None:
            raise InvalidInput(
                f"{checkpoint.run}@{checkpoint.step} does not hold a folder of another program, which `casckpt import "
                "--format files` stores: choose a different format"
            )
        self.items = items
        here = {entry.number for entry in self.manifest.held}
        self.lacking = [one.path for one in items if not here.issuperset(piece.entry for piece in one.pieces)]
        contents.check_whole(self.manifest.held)
        self.nbytes = sum(piece.length for one in items if one.path not in self.lacking for piece in one.pieces)
        self._reader = RegionReader(checkpoint.repo, self.manifest, self.nbytes, Progress(progress))
        self._checkpoint = checkpoint

    def write(self, root: Path, held: Path | None) -> None:
        """Create all items. The root of a folder remains writable. ``held``: a folder with earlier files."""
        lacking = set(self.lacking)
        made = [(root / one.path if one.path else root, one) for one in self.items if one.path not in lacking]
        for path, one in made:
            if one.kind == ItemKind.FOLDER:
                path.mkdir(mode=0o700)
            elif one.kind == ItemKind.LINK:
                path.symlink_to(one.target)
        files = [(path, one) for path, one in made if one.kind == ItemKind.FILE]
        self._write(pair for pair in files if held is None or not self._revise(*pair, held / pair[1].path))
        for path, one in reversed(made):
            if one.kind == ItemKind.FILE or (one.kind == ItemKind.FOLDER and one.path):
                path.chmod(one.mode)
        sync_file_system(root.parent)

    def _write(self, files: Iterable[tuple[Path, Item]]) -> None:
        """Write files together, because many small ones are in the same cells."""
        listed_files = list(files)
        windows = self._reader.read_joined(slices_of(self.manifest, [one for _, one in listed_files]))
        window = memoryview(b"")
        for path, one in listed_files:
            left = _size(one)
            with path.open("xb") as file:
                while left:
                    window = window or next(windows)
                    part, window = window[:left], window[left:]
                    file.write(part)
                    left -= len(part)

    def _revise(self, path: Path, one: Item, old: Path) -> bool:
        """Create a file from one of the same size, and read only what differs.

        Return False if there is none, or if it is so small that others are in the same cells.
        """
        if _size(one) < SMALL or not os.access(old, os.R_OK) or old.is_symlink() or not old.is_file():
            return False
        if old.stat().st_size != _size(one) or not copied(old, path):
            return False
        with path.open("r+b") as file:
            self._reader.revise(slices_of(self.manifest, [one]), file, self._checkpoint)
        return True


def slices_of(manifest: Manifest, items: Iterable[Item]) -> Iterator[EntrySlice]:
    """Yield the slices that hold the bytes of files, in order."""
    for piece in (piece for one in items for piece in one.pieces):
        entry = manifest.body.entries[piece.entry]
        if piece.offset % entry.itemsize or piece.length % entry.itemsize:
            raise Unsupported(f"a file begins or ends inside an element of {entry.key!r}", key=entry.key)
        lo = piece.offset // entry.itemsize
        yield EntrySlice(entry, lo, lo + piece.length // entry.itemsize)


def _size(one: Item) -> int:
    return sum(piece.length for piece in one.pieces)


def _left_in(before: Path, items: Sequence[Item]) -> list[str]:
    """Remove the earlier versions of the items from a folder. Return the paths of all else."""
    folders = set[str]()  # not through links
    for one in items:
        path, parent = before / one.path, one.path.rpartition("/")[0]
        if one.path and parent not in folders:
            continue
        if one.kind == ItemKind.FOLDER and path.is_dir() and not path.is_symlink():
            folders.add(one.path)
            path.chmod(0o700)
        elif one.kind != ItemKind.FOLDER and (path.is_symlink() or path.is_file()):
            path.unlink()
    for name in sorted(folders, reverse=True):
        with suppress(OSError):  # it is not empty
            (before / name).rmdir()
    names = (path.relative_to(before).as_posix() for path in before.rglob("*"))
    return sorted(name for name in names if name not in folders)
