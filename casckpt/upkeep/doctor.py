"""Checks of storage: the guarantees that a store needs, and its settings.

The checks write objects under probes/ and then delete them. They do not touch the store itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from casckpt.base.parallel import in_parallel
from casckpt.contents.manifests import stored_blobs
from casckpt.errors import CasckptError, NotFound, StorageError
from casckpt.format.keys import blob_key
from casckpt.history.commits import list_commits
from casckpt.repository.exclusive import PREFIX, new_name, probe, remove_leftovers
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists, Examinable, Finding, ShortObject

RACERS = 8
_SMALL = 20  # objects
_FIX = "fix this error, then rerun doctor"
_USE_ANOTHER = "checkpoints are not safe here: use a different storage, or repair this one"


def examine(repo: Repository) -> Iterator[Finding]:
    """Yield the finding of each check as soon as the check ends. A storage error is reported as a finding."""
    probes = _Probes(repo)
    yield (writes := _safely("write", probes.write, f"{_FIX}: without writes, only settings are checked"))
    if writes.ok:
        yield _safely("create-only", lambda: _creates(repo))
        for name, check in probes.checks().items():
            yield _safely(name, check)
    if isinstance(repo.storage, Examinable):
        yield from _settings_of(repo.storage)
    yield _safely("store", lambda: _reads(repo.fresh()))


def _reads(repo: Repository) -> Finding:
    """Read what `casckpt list` reads, and the manifest and a byte of each blob of the newest checkpoint."""
    if not repo.exists():
        repo.check_lost()
        return Finding("store", None, "there is no store here")
    listed = list_commits(repo, anew=True)
    for error in listed.damaged.values():
        return Finding("store", False, str(error), "run `casckpt verify`")

    def read(key: str) -> None:
        with repo.storage.open(key) as reader:
            reader.read_into(0, [memoryview(bytearray(1))])

    for newest in (visible := listed.visible())[-1:]:
        keys = (blob_key(uploader, blob) for uploader, blob, _ in stored_blobs(repo, newest).names())
        deque(in_parallel(repo.storage.traits.parallel, read, keys), maxlen=0)
    return Finding("store", True, f"checkpoints listed: {len(visible)}{'; the newest is readable' * bool(visible)}")


def _settings_of(storage: Examinable) -> Iterator[Finding]:
    try:
        yield from storage.examine()
    except CasckptError as error:
        yield Finding("settings", False, str(error), "see above")


def _safely(name: str, check: Callable[[], Finding], advice: str = _FIX) -> Finding:
    try:
        return check()
    except ShortObject as error:
        return Finding(name, False, f"{error.key} ends after {error.size} bytes of those just written", _USE_ANOTHER)
    except CasckptError as error:
        return Finding(name, False, str(error), advice)


def _creates(repo: Repository) -> Finding:
    """Check that the storage refuses a second create. If the storage holds a store, note the result in its settings."""
    why = probe(repo.storage, repo.clock, repo.entropy, RACERS)
    if repo.storage.traits.exclusive is None and repo.exists() and repo.settings.exclusive_create is not (not why):
        repo.note_creates(exclusive=not why)
    if why and repo.single_writer:
        return Finding("create-only", None, f"a key can be created twice, which single_writer allows: {why}")
    if why:
        advice = "use a different storage, or allow only one writer at a time with single_writer (--single-writer)"
        return Finding("create-only", False, f"a key can be created twice: {why}", advice)
    found = f"a second create is refused, and one of {RACERS} concurrent creates succeeded"
    return Finding("create-only", True, found)


class _Probes:
    """Checks that write, read, list and delete objects in a separate folder."""

    def __init__(self, repo: Repository) -> None:
        self.repo, self._storage = repo, repo.storage
        self.folder = new_name(repo.clock, repo.entropy)

    def checks(self) -> dict[str, Callable[[], Finding]]:
        """Return the checks by name, in the order in which they must run."""
        return {
            "read-after-write": self.read,
            "ranges": self.ranges,
            "list-after-write": self.list,
            "delete": self.delete,
        }

    def write(self) -> Finding:
        """Put some small objects. List first, because some servers create a missing bucket on a put."""
        with suppress(StorageError):  # the list check reports this error
            next(iter(self._storage.list(f"{self.folder}/")), None)
        for number in range(_SMALL):
            self._put(self._key(number), self._data(number))
        return Finding("write", True, f"{_SMALL} objects were written")

    def read(self) -> Finding:
        """Check that each object can be read immediately and is complete."""
        for number in range(_SMALL):
            data = self._data(number)
            found = self._storage.get(self._key(number), limit=1 << 20)
            if found != data or self._storage.size(self._key(number)) != len(data):
                why = f"{self._key(number)} differs from the bytes that were just written"
                return Finding("read-after-write", False, why, _USE_ANOTHER)
        return Finding("read-after-write", True, "new objects can be read immediately")

    def ranges(self) -> Finding:
        """Check reads of parts of an object, and a read past its end."""
        data = self._data(1)
        with self._storage.open(self._key(1)) as reader:
            for start, stop in ((0, 1), (3, 700), (len(data) - 5, len(data)), (0, len(data))):
                buffer = bytearray(stop - start)
                reader.read_into(start, [memoryview(buffer)])
                if buffer != data[start:stop]:
                    return Finding("ranges", False, f"bytes {start} to {stop} are wrong", _USE_ANOTHER)
            try:
                reader.read_into(len(data) - 1, [memoryview(bytearray(2))])
            except ShortObject:
                return Finding("ranges", True, "parts of objects can be read")
        return Finding("ranges", False, "a read past the end of an object does not raise an error", _USE_ANOTHER)

    def list(self) -> Finding:
        """Check that a listing contains all objects."""
        listed = {entry.key: entry.size for entry in self._storage.list(f"{self.folder}/")}
        wanted = {self._key(number): len(self._data(number)) for number in range(_SMALL)}
        if stale := self._storage.traits.stale:
            return Finding("list-after-write", False, stale, "gc refuses to run here until listings are complete")
        if listed != wanted:
            missing = len(wanted.keys() - listed.keys())
            found = f"a listing lacks {missing} of {_SMALL} objects that were just written, or shows wrong sizes"
            return Finding("list-after-write", False, found, _USE_ANOTHER)
        in_order = list(listed) == sorted(listed) or not self._storage.traits.remote
        order = "" if in_order else ", in no particular order, and casckpt needs none"
        return Finding("list-after-write", True, f"new objects are listed immediately{order}")

    def delete(self) -> Finding:
        """Check that deleted objects are neither read nor listed."""
        try:
            for number in range(_SMALL):
                self._storage.delete(self._key(number))
        except StorageError as error:
            found = f"objects cannot be deleted: {error}"
            return Finding("delete", None, found, "saves work, but gc needs credentials that allow deletes")
        remove_leftovers(self._storage, self.repo.clock)
        left = [entry.key for entry in self._storage.list(f"{self.folder}/")]
        self._storage.sweep(PREFIX.rstrip("/"), below=True)
        self._storage.sweep(PREFIX.rstrip("/"))
        self._storage.sweep("")
        if left or self._is_there(self._key(0)):
            return Finding("delete", False, "deleted objects can still be read or listed", _USE_ANOTHER)
        return Finding("delete", True, "deleted objects disappear immediately")

    def _is_there(self, key: str) -> bool:
        with suppress(NotFound):
            self._storage.get(key, limit=1 << 20)
            return True
        return False

    def _put(self, key: str, data: bytes) -> None:
        with suppress(AlreadyExists):  # the keys are unique, so an earlier attempt at this put succeeded
            self._storage.put(key, data)

    def _key(self, number: int) -> str:
        return f"{self.folder}/{number}"

    def _data(self, number: int) -> bytes:
        """Return the bytes of an object. No object is empty, and no two objects have the same size."""
        return bytes((number + i) % 251 for i in range(1000 + number))
