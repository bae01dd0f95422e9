"""Makes folders of files durable, drops them from the page cache, reads them into it, and measures them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PIECE = 8 << 20
_FIRST = 64 << 10
_COLD = 0.01  # the fraction of pages that may remain in the cache for a cold load


class NotCold(Exception):
    """The pages of a checkpoint could not be dropped from the page cache."""


def files_of(folder: Path) -> list[Path]:
    """Return all regular files below a folder (or the file itself), sorted."""
    if folder.is_file():
        return [folder]
    found = (Path(base) / name for base, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def make_durable(folder: Path) -> None:
    """Sync every file and folder below ``folder``, and its parent, four at a time, with folders last."""
    folders = [Path(base) for base, _, _ in os.walk(folder, topdown=False)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(sync, files_of(folder)))
    for path in (*folders, folder.parent):
        sync(path)


def sync(path: Path) -> None:
    """Make a file or a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def stored(folder: Path) -> int:
    """Return the number of bytes that the files below a folder occupy on disk."""
    return sum(path.stat().st_blocks * 512 for path in files_of(folder))


def drop_from_cache(folder: Path, *, everything: bool) -> None:
    """Empty the page cache of a folder's files.

    Raises `NotCold` if more than 1 % of their pages remain. ``everything``: also drop the folders and inodes of the
    whole machine if that is allowed.
    """
    paths = files_of(folder)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if everything:
        _drop_all_caches()
    left = resident(paths)
    if left > _COLD:
        raise NotCold(f"{left:.0%} of the pages remain in the page cache: use a folder that is on a disk")


def _drop_all_caches() -> None:
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return


def resident(paths: Sequence[Path]) -> float:
    """Return the fraction of the files' pages that is in the page cache."""
    counts = [_pages(path) for path in paths]
    total = sum(count for _, count in counts)
    return sum(found for found, _ in counts) / total if total else 0.0


def _pages(path: Path) -> tuple[int, int]:
    """Return (pages in the page cache, all pages) for a file."""
    size = path.stat().st_size
    count = -(-size // mmap.PAGESIZE)
    if not size:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=3) as mapped:
        vector = (ctypes.c_ubyte * count)()
        where = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        failed = libc.mincore(ctypes.c_void_p(where), ctypes.c_size_t(size), vector)
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return sum(page & 1 for page in bytes(vector)), count


def bring_into_cache(folder: Path) -> None:
    """Read every file twice through the page cache, each time beginning with a small read.

    The first read of cached pages may be slower than later ones. After a large first read, Linux keeps the first few
    MiB of a file in single pages, which slows down sets of many files.
    """
    buffer = bytearray(_PIECE)
    for path in files_of(folder) * 2:
        with path.open("rb", buffering=0) as file:
            file.read(_FIRST)
            while file.readinto(buffer):
                pass


def pieces(size: int, length: int = _PIECE) -> Iterator[tuple[int, int]]:
    """Return (start, length) for the pieces of ``size`` bytes."""
    return ((start, min(length, size - start)) for start in range(0, size, length))
