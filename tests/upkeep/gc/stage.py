"""Threads that take turns: at every storage call, an actor stops until the stage lets it continue.

Each actor has its own storage object, and all of these wrap the same inner storage. Only one actor runs at a time, so
that the same choices result in the same run. A listing has two pages, with a stop before each. An actor is a single
sequence of calls: if it hands work to a thread, it waits for that thread.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from casckpt.storage.base import Known, ListedObject, ObjectStore, Reader, Traits

Choose = Callable[[list[str]], str]
PATIENCE = 60.0  # seconds without progress after which a stage is considered broken


class Curtain(BaseException):
    """Ends an actor that will never continue because its process was killed."""


@dataclass
class _Actor:
    """An actor. ``turn``: receives an item when the actor may continue or must end."""

    thread: threading.Thread | None = None
    turn: SimpleQueue[None] = field(default_factory=SimpleQueue)
    at: str = ""  # the next call, before which it waits
    killed: bool = False
    done: bool = False
    error: BaseException | None = None


@dataclass
class Stage:
    """The actors and their storage. ``log``: every call that was allowed to proceed, in order."""

    inner: ObjectStore
    log: list[tuple[str, str]] = field(default_factory=list)
    _actors: dict[str, _Actor] = field(default_factory=dict)
    _still: SimpleQueue[str] = field(default_factory=SimpleQueue)  # the actors that have reached a call or their end

    def store(self, name: str) -> SteppedStore:
        """Return the storage of an actor."""
        return SteppedStore(self, name)

    def add(self, name: str, act: Callable[[], None]) -> None:
        """Add an actor that runs ``act`` once the stage runs."""
        actor = self._actors[name] = _Actor()

        def run() -> None:
            try:
                self.stop(name, "start")
                act()
            except Curtain:
                pass
            except BaseException as error:  # noqa: BLE001 - shown by `run`
                actor.error = error
            actor.done = True
            self._still.put(name)

        actor.thread = threading.Thread(target=run, name=name, daemon=True)
        actor.thread.start()

    def stop(self, name: str, call: str) -> None:
        """Wait for the stage. Actors call this."""
        actor = self._actors.get(name)
        if actor is None or actor.done:
            return  # outside of `run`, actors do not wait
        if not actor.killed:
            actor.at = call
            self._still.put(name)
            self._next(actor.turn)
        if actor.killed:
            raise Curtain
        self.log.append((name, call))

    def at(self, name: str) -> str:
        """Return the next call of an actor, before which it waits."""
        return self._actors[name].at

    def run(self, choose: Choose, after: Callable[[], None], killed: frozenset[str] = frozenset()) -> None:
        """Let actors continue one at a time until all are done. Call ``after`` whenever all actors are waiting.

        When only actors in ``killed`` are left, they do not continue, and their threads are ended.
        """
        try:
            for _ in self._actors:
                self._next(self._still)
            while waiting := [name for name, actor in self._actors.items() if not actor.done]:
                after()
                if killed.issuperset(waiting):
                    break
                self._actors[choose(waiting)].turn.put(None)
                self._next(self._still)
            after()
        finally:
            self._end()
        for actor in self._actors.values():
            if actor.error is not None:
                raise actor.error

    def _end(self) -> None:
        for actor in self._actors.values():
            actor.killed = not actor.done
            actor.turn.put(None)
        for actor in self._actors.values():
            if actor.thread is not None:
                actor.thread.join(PATIENCE)

    def _next(self, queue: SimpleQueue[Any]) -> None:
        try:
            queue.get(timeout=PATIENCE)
        except Empty:
            raise RuntimeError(f"the stage stands still: {self._actors}") from None


class SteppedStore:
    """The inner storage, with a stop before each call."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage = stage
        self._name = name
        self._inner = stage.inner

    def _stop(self, method: str, key: str) -> None:
        self._stage.stop(self._name, f"{method} {key}")

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def traits(self) -> Traits:
        return Traits(remote=False, read_gap=0, parallel=1, exclusive=True)

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        self._stop("put", key)
        self._inner.put(key, data, settle=settle)

    def settle(self, folder: str) -> None:
        self._inner.settle(folder)

    def get(self, key: str, *, limit: int) -> bytes:
        self._stop("get", key)
        return self._inner.get(key, limit=limit)

    def open(self, key: str, *, shared: bool = False) -> AbstractContextManager[Reader]:
        self._stop("open", key)
        return self._inner.open(key, shared=shared)

    def size(self, key: str) -> int | None:
        self._stop("size", key)
        return self._inner.size(key)

    def list(self, prefix: str, *, known: Known | None = None) -> Iterator[ListedObject]:
        self._stop("list", prefix)
        first = sorted(self._inner.list(prefix, known=known), key=lambda entry: entry.key)
        pivot = first[len(first) // 2].key if first else ""
        yield from (entry for entry in first if entry.key <= pivot)
        self._stop("list more of", prefix)
        yield from (entry for entry in self._inner.list(prefix, known=known) if entry.key > pivot)

    def list_folder(self, folder: str) -> tuple[builtins.list[ListedObject], builtins.list[str]]:
        self._stop("list", folder)
        return self._inner.list_folder(folder)

    def delete(self, key: str) -> None:
        self._stop("delete", key)
        self._inner.delete(key)

    def replace(self, key: str, data: memoryview | bytes) -> None:
        self._stop("replace", key)
        self._inner.replace(key, data)

    def sweep(self, folder: str, *, below: bool = False) -> int:
        return self._inner.sweep(folder, below=below)

    def prepare(self) -> int:
        return self._inner.prepare()

    def put_prepared(self, key: str, data: bytes) -> bool:
        self._stop("put", key)
        return self._inner.put_prepared(key, data)

    def bytes_free(self) -> int | None:
        return self._inner.bytes_free()
