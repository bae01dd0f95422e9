"""Background saves as Megatron's training loop schedules them, with an end that another process can wait for."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple


class AsyncRequest(NamedTuple):
    """A request with the fields and methods of Megatron-core's. The save runs already; the caller only waits for it.

    ``async_fn``: a function to run in another process, or None. ``finalize_fns``: functions to call on every rank once
    ``async_fn`` has returned on all ranks. They return when the checkpoint is committed, and raise the error of the
    save.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to call after the others. Raises RuntimeError if the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen; add functions before it is scheduled")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Run ``async_fn`` and the finalize functions now."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> AsyncRequest:
        """Return a copy that accepts no more functions."""
        return self._replace(is_frozen=True)


class Ending:
    """The end of a save, for other processes to wait for: a file that this process locks until `reached`.

    The system releases the lock if the process dies. A forked child does not inherit a lock of this kind.
    """

    def __init__(self) -> None:
        self._file = NamedTemporaryFile(prefix="casckpt-save-")  # noqa: SIM115 (it lives until `reached`)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    @property
    def path(self) -> str:
        """The argument of `wait_for_end`, for any process."""
        return self._file.name

    def reached(self) -> None:
        """Release the processes that wait."""
        self._file.close()


def wait_for_end(path: str) -> None:
    """Return when the save has ended; at once in the process that runs it, which cannot wait for itself here."""
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return
