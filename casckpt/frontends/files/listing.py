"""What is in a folder of another program, with all that identifies its state."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from casckpt.base.digest import hex_digest
from casckpt.base.text import is_url, listed, local_path
from casckpt.errors import Conflict, InvalidInput, NotFound
from casckpt.format.sections.recipe import MAX_MODE, MAX_PATH_BYTES, Item, ItemKind, stays_inside
from casckpt.storage.failures import reporting

SMALL: Final = 64 << 10
"""The size in bytes below which a file is not cut, and shares an entry with other small files."""


@dataclass(frozen=True, slots=True)
class Found:
    """An item of a folder, before its bytes are read.

    ``place``: where it is. It is not below the root if a link led there. ``state``: size, inode, and the times of the
    last changes, in nanoseconds.
    """

    item: Item
    place: Path
    state: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of bytes of a file."""
        return self.state[0] if self.item.kind == ItemKind.FILE else 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from ``offset`` on. Raises Conflict if the file has changed."""
        with reporting("read", self.place):
            try:
                handle = os.open(self.place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                raise changed(self.place) from None
            try:
                if _state(os.fstat(handle)) != self.state:
                    raise changed(self.place)
                while len(buffer):
                    if not (done := os.preadv(handle, [buffer], offset)):
                        raise changed(self.place)
                    offset, buffer = offset + done, buffer[done:]
            finally:
                os.close(handle)


@dataclass(frozen=True)
class Listing:
    """The items of the folder or file ``path``, in the order of a recipe: the root first, and then by path."""

    path: Path
    follow_links: bool
    items: tuple[Found, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all files."""
        return sum(one.size for one in self.items)

    @property
    def digest(self) -> str:
        """A digest of all paths, links, modes, sizes, and times of change of files, as hex digits."""
        times = [one.state[2] if one.item.kind == ItemKind.FILE else 0 for one in self.items]
        return hex_digest(repr([(one.item, one.size, at) for one, at in zip(self.items, times, strict=True)]).encode())

    def check_unchanged(self) -> None:
        """Raise Conflict, with the names, unless a new listing is equal."""
        now = list_folder(self.path, follow_links=self.follow_links)
        if now != self:
            before, after = ({one.item.path: one for one in each.items} for each in (self, now))
            names = [path for path in {**before, **after} if before.get(path) != after.get(path)]
            raise changed(self.path, [name for name in names if name] or names)


def changed(path: Path, names: list[str] | None = None) -> Conflict:
    """Return the error for a folder or file that another program changes."""
    which = f" ({listed(names)})" if names and names != [""] else ""
    return Conflict(
        f"{path}{which} changed while it was read, and nothing was stored: import it once the program has finished it, "
        "or let `casckpt import --watch` wait for that"
    )


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local folder or file. Raises InvalidInput for a URL."""
    if is_url(path):
        raise InvalidInput(f"{os.fspath(path)} is a URL: copy the folder to this machine, and import the copy")
    return local_path(path)


def list_folder(path: str | os.PathLike[str], *, follow_links: bool = False) -> Listing:
    """Return what is in a folder, or the file at ``path``, which may be a link itself.

    ``follow_links``: replace links that lead out of the folder by what they lead to. Raises NotFound, Conflict if
    items vanish meanwhile, and InvalidInput, with the path, for links that lead out of the folder, names that are not
    UTF-8, and what is neither a file, a folder, nor a link. Raises StorageError.
    """
    root = local_folder(path)
    with reporting("read", root):
        if not root.exists():
            raise NotFound(f"there is no file or folder {root}; pass the path of what to import")
    try:
        items = list(_walk(Path(os.path.realpath(root)), follow=follow_links))
    except FileNotFoundError as error:
        raise changed(Path(error.filename or root)) from error
    except OSError as error:
        with reporting("read", Path(error.filename or root)):
            raise
    return Listing(root, follow_links, tuple(sorted(items, key=lambda one: one.item.path)))


def _walk(root: Path, *, follow: bool) -> Iterator[Found]:
    """Yield the root, and what is below it."""
    waiting: list[tuple[Path, str, int, tuple[tuple[int, int], ...]]] = [(root, "", 0, ())]
    while waiting:
        # outside: the part of the path that leads out of the folder; above: what identifies the folders that it is in
        place, path, outside, above = waiting.pop()
        there, target = os.lstat(place), ""
        if len(path.encode()) > MAX_PATH_BYTES:
            raise InvalidInput(f"{path[:80]!r}... has more than {MAX_PATH_BYTES} bytes: shorten it")
        if stat.S_ISLNK(there.st_mode):
            target = os.readlink(place)
            if not (_is_text(target) and stays_inside(path[outside:], target)):
                there, place, target = _followed(place, path, target, follow=follow), Path(os.path.realpath(place)), ""
                outside = len(path) + 1
        mode, state = stat.S_IMODE(there.st_mode) & MAX_MODE, _state(there)
        if target:
            yield Found(Item(path, ItemKind.LINK, 0, target), place, state)
        elif stat.S_ISREG(there.st_mode):
            yield Found(Item(path, ItemKind.FILE, mode), place, state)
        elif stat.S_ISDIR(there.st_mode):
            yield Found(Item(path, ItemKind.FOLDER, mode), place, state)
            if (here := (there.st_dev, there.st_ino)) in above:
                raise InvalidInput(f"{path!r} is a link to a folder that contains it: remove the link")
            names, above = _names(place), (*above, here)
            waiting += [(place / name, f"{path}/{name}" if path else name, outside, above) for name in names]
        else:
            raise InvalidInput(f"{path or str(place)!r} is neither a file, a folder, nor a link: move it elsewhere")


def _names(folder: Path) -> list[str]:
    names = os.listdir(folder)
    for name in names:
        if not _is_text(name):
            raise InvalidInput(f"{os.fsencode(folder / name)!r} is not a name in UTF-8: rename it")
    return names


def _followed(place: Path, path: str, target: str, *, follow: bool) -> os.stat_result:
    """Return what is behind a link that leads out of the folder. Raise InvalidInput if it may not be followed."""
    with suppress(FileNotFoundError):
        if follow:
            return os.stat(place)
    why = "pass follow_links=True (--follow-links) to store what it leads to" * place.exists() or "remove the link"
    raise InvalidInput(f"{path!r} is a link to {target!r}, which leads out of the folder: {why}")


def _state(there: os.stat_result) -> tuple[int, ...]:
    return there.st_size, there.st_ino, there.st_mtime_ns, there.st_ctime_ns


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
