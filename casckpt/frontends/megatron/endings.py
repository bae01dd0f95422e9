"""The end of a background save, for another process to wait for: Megatron's queues ask one whether a save is over."""

from __future__ import annotations

import fcntl
from tempfile import NamedTemporaryFile


class Ending:
    """Something that has not ended yet: a file that this process holds locked, and the system unlocks if it dies.

    A lock of the kind that a forked child does not inherit.
    """

    def __init__(self) -> None:
        self._file = NamedTemporaryFile(prefix="casckpt-save-")  # noqa: SIM115 (it lives until `reached`)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    @property
    def path(self) -> str:
        """What `wait_for_end` takes, in whatever process."""
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
