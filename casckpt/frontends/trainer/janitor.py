"""A gc beside the training: one at a time, in a thread of its own, where no save is in progress that it would wait for.

It waits for nobody: what saves in progress may need is left to the gc after the next save, which goes on from there.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from casckpt.checkpoint.store import Store
from casckpt.errors import CasckptError

log = logging.getLogger(__name__)


class Janitor:
    """Deletes what of a run is forgotten, and needed by nobody."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def ask(self) -> None:
        """Begin a gc, unless one runs."""
        if self._running is None or self._running.done():
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="casckpt-gc")
            self._running = self._thread.submit(self._collect)

    def _collect(self) -> None:
        try:
            self._store.gc(run=self._run, wait=0)
        except CasckptError as error:
            log.warning("gc of %s left its work to the next one: %s", self._store.url, error)

    def close(self) -> None:
        """Wait until it is done."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
