"""The errors of casckpt and the warning about forgotten checkpoints.

::

    CasckptError                        kind            exit status
    |-- NotFound       FileNotFoundError  not-found       3   store, checkpoint, tag, attachment or object is absent
    |   `-- Gone                          gone            3   the checkpoint was purged, perhaps while it was read
    |-- Conflict       FileExistsError    conflict        5   it already exists, or another writer changed it
    |   `-- Revoked                       revoked         5   a gc revoked this save
    |-- MissingKey     KeyError           missing-key     3   the checkpoint lacks a key that was asked for
    |-- Mismatch       ValueError         mismatch        1   shape, dtype or kind differs
    |-- Damaged        OSError            damaged         4   stored bytes are missing, or are not what was written
    |-- InvalidInput   ValueError         invalid-input   1   an argument or a state cannot be used
    |   |-- Unsupported                   unsupported     1   the store or storage needs something that is missing
    |   `-- Refused                       refused         1   stored data is hostile, or of a later version
    |       `-- Unsigned                  unsigned        1   no trusted key has signed the checkpoint
    |-- StorageError   OSError            storage         1   the storage failed; trying again may help
    `-- RankFailed     RuntimeError       rank-failed     1   another rank of the process group failed or died

Every error takes one message and keyword attributes (``key``, ``blob``, ``rank``, ...), which survive pickling. The
last line of a message says what to do next. Code that retries catches `StorageError`, never OSError: `Damaged` and
`NotFound` are OSErrors too, and trying again does not help there.

`ForgottenWarning` is for `warnings`: the next gc may purge the checkpoint that was loaded.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CasckptError(Exception):
    """Base of all errors. ``kind``: a stable name for programs. ``exit_status``: of the command line.

    ``done``: the `GcResult` of what a gc had done before the error.
    """

    kind: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1

    key: str | None = None
    keys: tuple[str, ...] = ()
    blob: str | None = None
    checkpoints: tuple[str, ...] = ()
    rank: int | None = None
    done: Any = None

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show the repr


class NotFound(CasckptError, FileNotFoundError):
    """The store, checkpoint, tag, attachment or object does not exist."""

    kind = "not-found"
    exit_status = 3


class Gone(NotFound):
    """The checkpoint was purged before or during the read. Load another one. A lease keeps a checkpoint."""

    kind = "gone"


class Conflict(CasckptError, FileExistsError):
    """The thing to create already exists, or another writer changed it first."""

    kind = "conflict"
    exit_status = 5


class Revoked(Conflict):
    """A gc revoked this save because it showed no sign of life. Nothing of it is visible. Save again."""

    kind = "revoked"


class MissingKey(CasckptError, KeyError):
    """The checkpoint lacks a key that was asked for. ``keys`` lists all of them."""

    kind = "missing-key"
    exit_status = 3


class Mismatch(CasckptError, ValueError):
    """Shape, dtype or kind of a leaf differs between the checkpoint and what it is loaded into."""

    kind = "mismatch"


class Damaged(CasckptError, OSError):
    """Stored bytes are missing or are not what was written. See ``blob``, ``keys`` and ``checkpoints``."""

    kind = "damaged"
    exit_status = 4


class InvalidInput(CasckptError, ValueError):
    """An argument or a state cannot be used as it is."""

    kind = "invalid-input"


class Unsupported(InvalidInput):
    """The store or the storage needs something that is not available here."""

    kind = "unsupported"


class Refused(InvalidInput):
    """Stored data breaks the rules of the format: it is of a later version, or hostile."""

    kind = "refused"


class Unsigned(Refused):
    """None of the required keys has signed the checkpoint. ``checkpoints`` has its id."""

    kind = "unsigned"


class StorageError(CasckptError, OSError):
    """The storage failed. Trying again may help."""

    kind = "storage"


class RankFailed(CasckptError, RuntimeError):
    """Another rank of the process group failed or died: ``rank``. ``lost``: "died", "late" or None."""

    lost: str | None = None

    kind = "rank-failed"


class ForgottenWarning(UserWarning):
    """A forgotten checkpoint was loaded. The next gc may purge it. `Store.restore` keeps it."""
