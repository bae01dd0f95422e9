"""The error tree of casckpt.

::

    CasckptError                        kind            exit status
    |-- NotFound       FileNotFoundError  not-found       3   store, checkpoint, tag, attachment or object is absent
    |   `-- Gone                          gone            3   the checkpoint was purged, perhaps while it was read
    |-- Conflict       FileExistsError    conflict        5   exists already, or was changed by someone else
    |   `-- Revoked                       revoked         5   this save was given up on by a gc
    |-- MissingKey     KeyError           missing-key     3   the checkpoint lacks a key that was asked for
    |-- Mismatch       ValueError         mismatch        1   shape, dtype or kind differs
    |-- Damaged        OSError            damaged         4   stored bytes are not what was written, or are gone
    |-- InvalidInput   ValueError         invalid-input   1   an argument or a state that cannot be used
    |   |-- Unsupported                   unsupported     1   this store or storage needs what is not here
    |   `-- Refused                       refused         1   stored data that is hostile, or of the future
    |       `-- Unsigned                  unsigned        1   no signature of a key that is trusted
    |-- StorageError   OSError            storage         1   the storage failed; trying again may help
    `-- RankFailed     RuntimeError       rank-failed     1   another rank of the process group failed or died

Every error takes one message and keyword attributes (``key``, ``blob``, ``rank``, ...), which survive pickling. The
last line of a message says what to do next. Code that retries catches `StorageError`, never OSError: `Damaged` and
`NotFound` are OSErrors too, and trying again does not mend them.

`ForgottenWarning` is a warning, for `warnings`: what was loaded may be gone tomorrow.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CasckptError(Exception):
    """Root of the tree. ``kind`` is a stable name for programs, ``exit_status`` what the command line returns.

    ``done``: of a gc, the `GcResult` of what it had done by then.
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
    """The store, checkpoint, tag, attachment or object that was named is not there."""

    kind = "not-found"
    exit_status = 3


class Gone(NotFound):
    """The checkpoint was purged, before it was read or meanwhile. Load another one; a lease keeps what is read."""

    kind = "gone"


class Conflict(CasckptError, FileExistsError):
    """What was to be created exists already, or somebody else changed it first."""

    kind = "conflict"
    exit_status = 5


class Revoked(Conflict):
    """This save was given up on by a gc, which took it for dead; nothing of it is visible. Save again."""

    kind = "revoked"


class MissingKey(CasckptError, KeyError):
    """The checkpoint lacks a key that was asked for. ``keys`` lists all of them."""

    kind = "missing-key"
    exit_status = 3


class Mismatch(CasckptError, ValueError):
    """Shape, dtype or kind of a leaf differs between the checkpoint and what it is loaded into."""

    kind = "mismatch"


class Damaged(CasckptError, OSError):
    """Stored bytes are missing or are not what was written. ``blob``, ``keys`` and ``checkpoints`` say what is hit."""

    kind = "damaged"
    exit_status = 4


class InvalidInput(CasckptError, ValueError):
    """An argument or a state that cannot be used as it is."""

    kind = "invalid-input"


class Unsupported(InvalidInput):
    """The store or the storage needs something that is not available here."""

    kind = "unsupported"


class Refused(InvalidInput):
    """Stored data that breaks the rules of the format: of a later version, or hostile."""

    kind = "refused"


class Unsigned(Refused):
    """A checkpoint that none of the keys has signed whose signature was demanded. ``checkpoints`` has its id."""

    kind = "unsigned"


class StorageError(CasckptError, OSError):
    """The storage failed. Trying again may help."""

    kind = "storage"


class RankFailed(CasckptError, RuntimeError):
    """Another rank of the process group failed or died. ``rank`` says which; ``lost``: "died", "late" or None."""

    lost: str | None = None

    kind = "rank-failed"


class ForgottenWarning(UserWarning):
    """A checkpoint was loaded that was forgotten: the next gc may purge it. `Store.restore` keeps it."""
