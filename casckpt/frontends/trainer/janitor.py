"""A thread that runs gc during training, one gc at a time.

The gc does not wait for saves in progress. Blobs that these saves may need remain until the next gc.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from casckpt.errors import CasckptError
from casckpt.store.store import Store

log = logging.getLogger(__name__)


class Janitor:
    """Runs gc in a thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._waiting: set[str] = set()

    def ask(self, run: str) -> None:
        """Start a gc of ``run``, either now or after the current gc."""
        with self._lock:
            if run not in self._waiting:
                self._waiting.add(run)
                self._queue = self._queue or ThreadPoolExecutor(1, thread_name_prefix="casckpt-gc")
                self._queue.submit(self._gc, run)

    def _gc(self, run: str) -> None:
        with self._lock:
            self._waiting.remove(run)
        try:
            for one in self._store.gc(run=run, wait=0).refused:
                log.warning("gc left a file of run %s: %s (owner: %s)", one.run, one.why, one.owner)
        except CasckptError as error:
            log.warning("gc of %s in %s failed; the next gc continues it: %s", run, self._store.url, error)

    def close(self) -> None:
        """Wait until all gcs have finished."""
        if self._queue is not None:
            self._queue.shutdown()
            self._queue = None
