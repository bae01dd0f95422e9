"""Leases on checkpoints that are being sent. Each of these has one lease, which ends some time after its last file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, NotFound
from casckpt.store.store import Store

_EXPIRES = "10m"
_MOST_IDLE = 32
"""The maximum number of idle leases, which is limited because each lease has threads."""
LINGER_SECONDS = 30.0
"""How long a lease remains after a file was sent, in case the client requests another file."""

log = logging.getLogger("casckpt.frontends.serve")


@dataclass
class _Held:
    """The lease of one checkpoint. ``lease``: closing it ends the lease; None until the lease is acquired."""

    users: int = 0
    lease: ExitStack | None = None
    timer: threading.Timer | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """End the lease and stop its timer."""
        if self.timer is not None:
            self.timer.cancel()
        if self.lease is not None:
            self.lease.close()


class Leases:
    """The leases of a server. If the store is not writable, the server logs a warning and serves without leases."""

    def __init__(self, store: Store, linger: float = LINGER_SECONDS) -> None:
        self._store, self._linger = store, linger
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._has_warned = self._is_closed = False

    @contextmanager
    def hold(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Hold a lease during a block and for a while after it.

        This never raises an error, but reading a purged checkpoint does.
        """
        held = self._enter(checkpoint.id)
        try:
            with held.lock:
                if held.lease is None:
                    held.lease = self._taken(checkpoint)
                    if self._is_closed:  # closed in the meantime
                        held.lease.close()
            yield
        finally:
            self._leave(checkpoint.id, held)

    def _enter(self, id: str) -> _Held:
        with self._lock:
            held = self._held.setdefault(id, _Held())
            held.users += 1
            if held.timer is not None:
                held.timer.cancel()
                held.timer = None
            return held

    def _taken(self, checkpoint: Checkpoint) -> ExitStack:
        with ExitStack() as taken:
            try:
                taken.enter_context(self._store.lease(checkpoint, expires=_EXPIRES))
            except NotFound as error:
                log.info("%s is sent without a lease: %s", checkpoint, error)
            except CasckptError as error:
                level = logging.DEBUG if self._has_warned else logging.WARNING
                log.log(level, "cannot acquire a lease, so a gc may delete data that is being sent: %s", error)
                self._has_warned = True
            return taken.pop_all()

    def _leave(self, id: str, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            if not held.users and self._held.get(id) is held:
                held.timer = threading.Timer(self._linger, self._end, (id, held))
                held.timer.daemon = True
                held.timer.start()
                self._held[id] = self._held.pop(id)
            idle = [item for item in self._held.items() if not item[1].users]
        for item in idle[:-_MOST_IDLE]:
            self._end(*item)

    def _end(self, id: str, held: _Held) -> None:
        with self._lock:
            if held.users or self._held.get(id) is not held:
                return
            del self._held[id]
        held.end()

    def close(self) -> None:
        """End all leases."""
        with self._lock:
            self._is_closed = True
            every, self._held = self._held, {}
        for held in every.values():
            held.end()
