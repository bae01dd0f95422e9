"""A storage wrapper that fails on demand. A test specifies faults by method and count.

::

store = FaultyStore(inner, [fail_before("put", at=3), fail_after("put", key="commits/*"), corrupt("read_into")])
store.calls # every call so far, in order: Call(method, key)
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from casckpt.errors import StorageError
from casckpt.storage.base import Known, ListedObject, ObjectStore, Reader, ShortObject, Traits
from tests.support.tally import tally

METHODS = ("put", "settle", "get", "open", "read_into", "size", "list", "delete", "replace", "sweep", "put_prepared")


@dataclass(frozen=True)
class Call:
    """A storage call. ``key`` is its first argument, or the key of the object that is read."""

    method: str
    key: str


class Kind(Enum):
    """The effect of a fault."""

    BEFORE = "fail before anything happens"
    AFTER = "fail after it happened: the answer got lost"
    HOOK = "call something first, which may wait or raise"
    LOOK = "call something first, which looks on"
    TRUNCATE = "the object ends too early"
    CORRUPT = "one byte of what is read is wrong"


@dataclass(frozen=True)
class Fault:
    """A fault in calls ``at`` to ``at + times - 1`` (from 1) of ``method`` whose key matches ``key``."""

    method: str
    kind: Kind
    at: int = 1
    times: int = 1
    key: str = "*"
    error: Exception | None = None
    hook: Callable[[Call], None] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.at < 1 or self.times < 1:
            raise ValueError(f"no such call: {self}")
        if self.kind in (Kind.TRUNCATE, Kind.CORRUPT) and self.method not in ("get", "read_into"):
            raise ValueError(f"only reads can be spoiled: {self}")


def fail_before(method: str, **where: Any) -> Fault:
    """Raise StorageError, or ``error``, without calling the storage."""
    return Fault(method, Kind.BEFORE, **where)


def fail_after(method: str, **where: Any) -> Fault:
    """Raise StorageError, or ``error``, after the call has succeeded."""
    return Fault(method, Kind.AFTER, **where)


def call_first(method: str, hook: Callable[[Call], None], **where: Any) -> Fault:
    """Call ``hook`` first. It may wait for a different thread, change the store, or raise an error."""
    return Fault(method, Kind.HOOK, hook=hook, **where)


def look_on(method: str, hook: Callable[[Call], None], **where: Any) -> Fault:
    """Call ``hook`` first. It does not count as a fault."""
    return Fault(method, Kind.LOOK, hook=hook, **where)


def truncate(method: str, **where: Any) -> Fault:
    """`get` returns half of the object; `read_into` raises ShortObject."""
    return Fault(method, Kind.TRUNCATE, **where)


def corrupt(method: str, **where: Any) -> Fault:
    """Flip a bit in the middle of what is read."""
    return Fault(method, Kind.CORRUPT, **where)


class FaultyStore:
    """``inner`` with the faults in ``plan``. `inject` and `heal` can change the plan at any time."""

    def __init__(self, inner: ObjectStore, plan: Iterable[Fault] = ()) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self._plan = [(fault, [0]) for fault in plan]
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[FaultyStore], tuple[ObjectStore, list[Fault]]]:
        return FaultyStore, (self.inner, [fault for fault, _ in self._plan])

    def inject(self, *faults: Fault) -> None:
        """Add faults. Their calls are counted from now on."""
        with self._lock:
            self._plan += [(fault, [0]) for fault in faults]

    def heal(self) -> None:
        with self._lock:
            self._plan.clear()

    def count(self, method: str, key: str = "*") -> int:
        """Count the calls of ``method`` whose key matches ``key``."""
        with self._lock:
            return sum(call.method == method and fnmatchcase(call.key, key) for call in self.calls)

    def keys(self, method: str) -> list[str]:
        """Return the keys that ``method`` received, in order."""
        with self._lock:
            return [call.key for call in self.calls if call.method == method]

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        with self.faults("put", key):
            self.inner.put(key, data, settle=settle)

    def settle(self, folder: str) -> None:
        with self.faults("settle", folder):
            self.inner.settle(folder)

    def get(self, key: str, *, limit: int) -> bytes:
        with self.faults("get", key) as kinds:
            data = bytearray(self.inner.get(key, limit=limit))
            if Kind.TRUNCATE in kinds:
                del data[len(data) // 2 :]
            if Kind.CORRUPT in kinds:
                _flip([memoryview(data)])
            return bytes(data)

    @contextmanager
    def open(self, key: str, *, shared: bool = False) -> Iterator[Reader]:
        with self.faults("open", key):
            opened = self.inner.open(key, shared=shared)
        with opened as reader:
            yield FaultyReader(self, key, reader)

    def size(self, key: str) -> int | None:
        with self.faults("size", key):
            return self.inner.size(key)

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        with self.faults("list", prefix):
            yield from self.inner.list(prefix, known=known)

    def list_folder(self, folder: str) -> tuple[builtins.list[ListedObject], builtins.list[str]]:
        with self.faults("list", folder):
            return self.inner.list_folder(folder)

    def delete(self, key: str) -> None:
        with self.faults("delete", key):
            self.inner.delete(key)

    def replace(self, key: str, data: memoryview | bytes) -> None:
        with self.faults("replace", key):
            self.inner.replace(key, data)

    def sweep(self, folder: str, *, below: bool = False) -> int:
        with self.faults("sweep", folder):
            return self.inner.sweep(folder, below=below)

    def prepare(self) -> int:
        return self.inner.prepare()

    def put_prepared(self, key: str, data: bytes) -> bool:
        with self.faults("put_prepared", key):
            return self.inner.put_prepared(key, data)

    def bytes_free(self) -> int | None:
        return self.inner.bytes_free()

    @contextmanager
    def faults(self, method: str, key: str) -> Iterator[set[Kind]]:
        """Log a call and apply the faults that match it."""
        call = Call(method, key)
        hit = self._hit(call)
        for fault in hit:
            if fault.hook:
                fault.hook(call)
        _fail(call, hit, Kind.BEFORE)
        yield {fault.kind for fault in hit}
        _fail(call, hit, Kind.AFTER)

    def _hit(self, call: Call) -> Sequence[Fault]:
        with self._lock:
            self.calls.append(call)
            hit = []
            for fault, seen in self._plan:
                if fault.method == call.method and fnmatchcase(call.key, fault.key):
                    seen[0] += 1
                    if fault.at <= seen[0] < fault.at + fault.times:
                        if fault.kind is not Kind.LOOK:
                            tally(f"fault: {fault.kind.value}")
                        hit.append(fault)
            return hit


class FaultyReader:
    """A reader whose `read_into` can fail."""

    def __init__(self, store: FaultyStore, key: str, inner: Reader) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    @property
    def size(self) -> int:
        return self._inner.size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._store.faults("read_into", self._key) as kinds:
            if Kind.TRUNCATE in kinds:
                raise ShortObject(self._key, offset)
            self._inner.read_into(offset, buffers)
            if Kind.CORRUPT in kinds:
                _flip(buffers)


def _fail(call: Call, hit: Iterable[Fault], kind: Kind) -> None:
    for fault in hit:
        if fault.kind is kind:
            raise fault.error or StorageError(f"injected fault: {call.method} {call.key}: {kind.value}; try again")


def _flip(buffers: Sequence[memoryview]) -> None:
    largest = max(buffers, key=lambda buffer: buffer.nbytes)
    if not largest.nbytes:
        raise ValueError("nothing was read, so nothing can be corrupted: choose another call")
    largest[largest.nbytes // 2] ^= 0x40
