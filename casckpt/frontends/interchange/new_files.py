"""Writes files and folders that are either complete under their final names, or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate, chain, count
from os.path import samestat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from casckpt.base.names import HEADS, HUB_FILE
from casckpt.base.text import is_url, local_path
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, InvalidInput, StorageError
from casckpt.storage.failures import LIMITED
from casckpt.storage.local import syscalls
from casckpt.storage.local.syscalls import Lacking, exchange
from casckpt.store.store import Store

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # None comes from torch.save; see `torch_saves`
_LONGEST = 255  # the maximum number of bytes in a file name


@contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path beside ``path``. At the end, rename the temporary file to ``path``.

    ``force``: overwrite ``path``. Otherwise, raises Conflict if ``path`` exists. Raises StorageError for other file
    system errors.
    """
    _check_no_file(path, force=force)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(path.parent, path.name) as folder:
            yield folder / path.name
            _check_no_file(path, force=force)  # another process may have created it in the meantime
            os.replace(folder / path.name, path)
            sync_folder(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, or replace it as a whole. Raises StorageError."""
    with new_file(path, force=True) as temporary:
        temporary.write_bytes(data)


@contextmanager
def new_folder(path: Path, *, force: bool, stale: Callable[[str], bool], last: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary folder. At the end, move its files into the folder ``path``.

    Raises Conflict if ``path`` exists and is not empty. ``force``: move the files into it anyway, and overwrite files
    of the same name. ``last``: the names of the files that are moved last, in that order. ``stale``: a function that
    returns whether to remove the file with this name. It is called for the files that are beside new ones.
    """
    with storage_errors(path):
        exists = os.path.lexists(path)
        if exists and not path.is_dir():
            raise Conflict(f"{path} is a file; choose the name of a folder, or of a file that ends in .safetensors")
        if exists:
            _clear(path, path.name)
            _check_empty(path, force=force)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(path if exists else path.parent, path.name) as temporary:
            yield temporary
            if not exists and path.is_dir():  # another process created it in the meantime
                _check_empty(path, force=force)
                exists = True
            if exists:
                _move_into(temporary, path, stale, last)
            else:
                sync_folder(temporary)  # files may have been moved here
                os.rename(temporary, path)
            sync_folder(path if exists else path.parent)


@contextmanager
def exchanged_folder(path: Path, *, force: bool, old: Callable[[Path], None]) -> Iterator[Path]:
    """Yield the path of a folder to create. At the end, it takes the place of the folder ``path`` in one step.

    If that is not empty, raises Conflict. ``force``: it is then renamed to ``path`` with the suffix ".before" (or
    ".before2", ..., if that exists), and passed to ``old``. Raises StorageError, at first, if the file system cannot
    exchange folders.
    """
    path = Path(os.path.realpath(path))
    with storage_errors(path):
        if os.path.lexists(path) and not path.is_dir():
            raise Conflict(f"{path} is a file; choose the name of a folder")
        if os.path.ismount(path):
            raise StorageError(f"{path} is where a file system is mounted, and cannot move: export to a folder in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        is_full = path.is_dir() and any(path.iterdir())
        if is_full:
            _check_empty(path, force=force)
        with _scratch(path.parent, path.name) as scratch:
            if is_full:
                for name in ("one", "other"):
                    (scratch / name).mkdir()
                _exchange(scratch / "one", scratch / "other")
            yield (new := scratch / "new")
            if is_full:
                names = (path.with_name(f"{path.name}.before{number}") for number in chain([""], count(2)))
                made, before = new.stat(), next(name for name in names if not os.path.lexists(name))
                try:
                    os.rename(new, before)  # if this process dies here, nothing is lost
                    _exchange(path, before)
                except BaseException:
                    if before.exists() and samestat(made, before.stat()):  # an interrupt may come after each call
                        os.rename(before, new)
                    raise
                sync_folder(path.parent)
                old(before)
            else:
                if path.is_dir():  # another program may have created it in the meantime
                    _check_empty(path, force=False)
                os.rename(new, path)
            sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> None:
    handle = os.open(one.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        exchange(handle, one.name, other.name)
    except Lacking as error:
        raise StorageError(
            f"{one.parent} is on a file system that cannot exchange folders: export to a folder that does not exist"
        ) from error
    finally:
        os.close(handle)


@contextmanager
def place_for(
    path: str | os.PathLike[str], *, force: bool, is_last: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Yield a local path for ``path``. For a URL, it is in a temporary folder, which is copied to the URL at the end.

    ``is_last``: a function that returns whether a file is copied last, because its presence marks a folder as complete.
    Raises Conflict if ``path`` exists, unless ``force`` is set.
    """
    if not is_url(path):
        yield local_path(path)
        return
    from casckpt.storage.remote.files import RemoteFiles  # fsspec takes a while to import

    remote = RemoteFiles(os.fspath(path))
    remote.check_free(force=force)
    with TemporaryDirectory(prefix="casckpt-") as folder:
        target = Path(folder, remote.url.rpartition("/")[2])
        yield target
        remote.put(target, is_last=is_last)


def remove_others(url: str, names: Collection[str], is_stale: Callable[[str], bool]) -> None:
    """Delete the stale files in a folder at a URL other than ``names``."""
    from casckpt.storage.remote.files import RemoteFiles

    RemoteFiles(url).remove_others(names, is_stale)


def check_file_names(names: Iterable[str], is_taken: Callable[[str], bool]) -> None:
    """Raise InvalidInput, naming each attachment that cannot become a file in an export.

    ``is_taken``: a function that returns whether the export itself writes a file with the given path. The path is in
    lower case, because some file systems ignore case.
    """
    wrong = [f"{name!r} {why}" for name in names if (why := _why_no_file(name, is_taken))]
    if wrong:
        raise InvalidInput(
            f"the attachment {', '.join(wrong)}; omit attachments with attachments=False (--no-attachments), and "
            "read them with store.read_attachment"
        )


def _why_no_file(name: str, is_taken: Callable[[str], bool]) -> str:
    parts = name.split("/")
    if any(map(is_taken, accumulate(name.lower().split("/"), "{}/{}".format))):
        return "has the same name as a file with tensors"
    if any(len(part.encode(errors="surrogateescape")) > _LONGEST for part in parts):
        return f"has a name that is too long for a file: more than {_LONGEST} bytes"
    return ""


def _check_no_file(path: Path, *, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise Conflict(f"{path} already exists; choose a different name, or pass --force to overwrite it")


def _check_empty(path: Path, *, force: bool) -> None:
    if not force and any(path.iterdir()):
        raise Conflict(f"{path} is not empty; choose a different folder, or pass --force to write into it")


def _move_into(source: Path, target: Path, stale: Callable[[str], bool], last: Sequence[str]) -> None:
    """Move all files of a directory tree. During the move, ``target`` may hold both old and new files."""
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    for folder in {(target / name).parent for name in names}:
        for path in folder.iterdir() if folder.is_dir() else ():
            if stale(path.relative_to(target).as_posix()) and path.is_file():
                path.unlink()
    for name in sorted(names, key=lambda name: (last.index(name) if name in last else -1, name)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)


@contextmanager
def _scratch(beside: Path, name: str) -> Iterator[Path]:
    """Yield a temporary folder for ``name`` in ``beside``. It is locked while this process uses it."""
    _clear(beside, name)
    with ExitStack() as held:
        folder = _newlocked(beside, name, held)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _newlocked(beside: Path, name: str, held: ExitStack) -> Path:
    while True:
        folder = beside / f"{_prefix(name)}{secrets.token_hex(4)}"
        folder.mkdir()
        # the file system does not support locks, or another process removed the folder before it was locked
        with suppress(OSError):
            held.enter_context(locked(folder, fcntl.LOCK_SH))
        if folder.exists():
            return folder


def _clear(beside: Path, name: str) -> None:
    """Remove temporary folders that are not locked by any process. The processes that created them have died.

    On file systems that cannot lock folders, such as NFS, these folders remain.
    """
    for path in list(beside.iterdir()):
        if path.name.startswith(_prefix(name)):
            with suppress(OSError), locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path, ignore_errors=True)


def _prefix(name: str) -> str:
    return f".{name[:100]}.casckpt-"


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock on a folder. Raises OSError if it cannot be locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert OSErrors from a write to ``path`` to StorageError, with advice."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CasckptError):
            raise
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        is_limited = error.errno == errno.EFBIG or (error.errno is None and limit != resource.RLIM_INFINITY)
        room = "free some space, or " if error.errno in _NO_ROOM else ""
        way = LIMITED if is_limited else f"{room}choose a different location"
        raise StorageError(f"{path} cannot be written: {error.strerror or error}; {way}") from error


@contextmanager
def torch_saves() -> Iterator[None]:
    """Convert errors from torch.save to OSError (for a full disk) or InvalidInput (for an unsupported dtype)."""
    try:
        yield
    except KeyError as error:
        raise InvalidInput(
            f"torch.save cannot write this checkpoint ({error.args[0]}); choose different keys"
        ) from error
    except RuntimeError as error:
        raise OSError(f"torch.save failed ({error})") from error


def file_attachments(store: Store, checkpoint: Checkpoint) -> list[str]:
    """Return the names of the attachments that become files in an export."""
    return [name for name in store.attachments(checkpoint) if not name.startswith(HEADS) and name != HUB_FILE]


def write_attached(store: Store, checkpoint: Checkpoint, names: Iterable[str], folder: Path) -> None:
    """Write attachments into a folder."""
    for name in names:
        write_durably(folder / name, store.read_attachment(checkpoint, name))


def write_durably(path: Path, data: bytes) -> None:
    """Write a file durably, and create its parent folders if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with synced_file(path) as file:
        file.write(data)


def copied(source: Path, target: Path) -> bool:
    """Let the kernel copy a file, with shared blocks if possible. Return False if the kernel cannot copy it."""
    with source.open("rb") as old, target.open("xb") as new:
        left = os.fstat(old.fileno()).st_size
        try:
            while left and (done := os.copy_file_range(old.fileno(), new.fileno(), left)):
                left -= done
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
        if not left:
            return True
    target.unlink()
    return False


@contextmanager
def synced_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file. At the end, its content is durable."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a folder's file names durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        syscalls.sync_folder(handle)
    finally:
        os.close(handle)
