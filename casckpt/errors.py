"""The errors of casckpt and the warning about forgotten checkpoints.

::

    CasckptError                        kind            exit status
    |-- NotFound       FileNotFoundError  not-found       3   store, checkpoint, tag, attachment or object is absent
    |   `-- Gone                          gone            3   the checkpoint was purged, perhaps while it was read
    |-- Conflict       FileExistsError    conflict        5   it already exists, or another writer changed it
    |   `-- Revoked                       revoked         5   gc revoked this save
    |-- MissingKey     KeyError           missing-key     3   the checkpoint lacks a requested key
    |-- Mismatch       ValueError         mismatch        1   shape, dtype or kind differs
    |-- Damaged        OSError            damaged         4   stored bytes are missing, or differ from the written bytes
    |-- InvalidInput   ValueError         invalid-input   1   an argument or a state is not valid
    |   |-- Unsupported                   unsupported     1   the store or storage needs something that is not available
    |   `-- Refused                       refused         1   stored data is hostile, or has a later version
    |       `-- Unsigned                  unsigned        1   no trusted key has signed the checkpoint
    |-- StorageError   OSError            storage         1   the storage failed; trying again may help
    `-- RankFailed     RuntimeError       rank-failed     1   another rank of the process group failed or died

Every error accepts a message and keyword attributes (``key``, ``blob``, ``rank``, ...). The attributes survive
pickling. The end of each message says what to do next. Code that retries should catch `StorageError`, not OSError:
`Damaged` and `NotFound` are also OSErrors, and a retry does not help with them.

`ForgottenWarning`, a category for Python's `warnings`, means that the next gc may purge the loaded checkpoint.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CasckptError(Exception):
    """The base class of all errors. ``kind``: a stable name for programs.

    ``exit_status``: the exit status of a command. ``done``: the `GcResult` of the work that gc did before the error.
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
    """An error for a store, checkpoint, tag, attachment or object that does not exist."""

    kind = "not-found"
    exit_status = 3


class Gone(NotFound):
    """An error for a checkpoint that was purged before or during the read.

    Load a different checkpoint. A lease protects a checkpoint from gc.
    """

    kind = "gone"


class Conflict(CasckptError, FileExistsError):
    """An error for something that already exists or that another writer changed first."""

    kind = "conflict"
    exit_status = 5


class Revoked(Conflict):
    """An error for a save that gc revoked because it showed no sign of life.

    No part of the save is visible. Repeat the save.
    """

    kind = "revoked"


class MissingKey(CasckptError, KeyError):
    """An error for requested keys that the checkpoint lacks. ``keys`` lists them."""

    kind = "missing-key"
    exit_status = 3


class Mismatch(CasckptError, ValueError):
    """An error for a value of the state whose shape, dtype, or kind differs between the checkpoint and the target."""

    kind = "mismatch"


class Damaged(CasckptError, OSError):
    """An error for stored bytes that are missing, or that differ from what was written.

    ``blob``, ``keys`` and ``checkpoints`` name what is affected.
    """

    kind = "damaged"
    exit_status = 4


class InvalidInput(CasckptError, ValueError):
    """An error for an argument or a state that casckpt cannot use."""

    kind = "invalid-input"


class Unsupported(InvalidInput):
    """An error for a store or storage that needs something this environment lacks."""

    kind = "unsupported"


class Refused(InvalidInput):
    """An error for stored data that breaks the rules of the format because it is hostile or from a later version."""

    kind = "refused"


class Unsigned(Refused):
    """An error for a checkpoint that none of the required keys has signed. ``checkpoints`` contains its id."""

    kind = "unsigned"


class StorageError(CasckptError, OSError):
    """An error that the storage raised. A retry may help.

    ``path``: the file or folder. ``refused``: whether this user may not create or delete it. ``full``: whether the
    disk has no room left, or a quota is used up.
    """

    path: str = ""
    refused: bool = False
    full: bool = False

    kind = "storage"


class RankFailed(CasckptError, RuntimeError):
    """An error for the failure or death of another rank of the process group.

    ``rank``: the failed rank. ``lost``: "died", "late", or None.
    """

    lost: str | None = None

    kind = "rank-failed"


class ForgottenWarning(UserWarning):
    """A warning that a forgotten checkpoint was loaded. The next gc may purge it; `Store.restore` prevents that."""
