"""A save in the background: as Megatron's training loop schedules it, and its end, for another process to wait for."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple


class AsyncRequest(NamedTuple):
    """The fields and methods of Megatron-core's. The save runs already: what is left is to wait for it, in the end.

    ``async_fn``: what to run elsewhere; None, there is nothing. ``finalize_fns``: to be called, on every rank, when
    ``async_fn`` is done on all; they return when the checkpoint is committed, and raise what went wrong.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call ``fn`` too, after the others. Raises RuntimeError for a frozen request."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen; add functions before it is scheduled")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Wait for all of it now."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> AsyncRequest:
        """The same, to which nothing can be added."""
        return self._replace(is_frozen=True)


class Ending:
    """Something that has not ended yet: a file that this process holds locked, and the system unlocks if it dies.

    A lock of the kind that a forked child does not inherit.
    """

    def __init__(self) -> None:
        self._file = NamedTemporaryFile(prefix="casckpt-save-")  # noqa: SIM115 (it lives until `reached`)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    @property
    def path(self) -> str:
        """Give what `wait_for_end` takes, in whatever process."""
        return self._file.name

    def reached(self) -> None:
        """Let them go on who wait for it."""
        self._file.close()


def wait_for_end(path: str) -> None:
    """Return when it has ended. At once in the process that it goes on in, which cannot wait for itself here."""
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return
