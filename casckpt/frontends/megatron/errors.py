"""Errors of the Megatron front end. Each is both a CheckpointingException and the matching casckpt error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from casckpt.errors import CasckptError, Conflict, InvalidInput, Mismatch, MissingKey, NotFound


class CheckpointingException(InvalidInput):
    """A sharded state dict or a checkpoint cannot be used."""


class CheckpointNotFound(NotFound, CheckpointingException):
    """The store or the checkpoint does not exist."""


class CheckpointExists(Conflict, CheckpointingException):
    """The step already has a checkpoint."""


class ShardedKeyMissing(MissingKey, CheckpointingException):
    """The checkpoint lacks requested keys. ``keys`` lists them."""


class ShardedMismatch(Mismatch, CheckpointingException):
    """The shape, dtype or kind of a value differs between the checkpoint and the state dict."""


def refused(key: str, why: str, rank: int | None = None) -> CheckpointingException:
    """Create an error about the value with this key in a state dict."""
    return CheckpointingException(f"{key!r}: {why}", key=key, rank=rank)


_LIKE: dict[type[CasckptError], type[CheckpointingException]] = {
    NotFound: CheckpointNotFound,
    Conflict: CheckpointExists,
    MissingKey: ShardedKeyMissing,
    Mismatch: ShardedMismatch,
    InvalidInput: CheckpointingException,
}


@contextmanager
def checkpointing_errors() -> Iterator[None]:
    """Raise the casckpt errors in `_LIKE` as the matching CheckpointingException, and other errors unchanged."""
    try:
        yield
    except CheckpointingException:
        raise
    except CasckptError as error:
        like = next((like for kind, like in _LIKE.items() if isinstance(error, kind)), None)
        if like is None:
            raise
        raise like(str(error), **error.__dict__) from error
