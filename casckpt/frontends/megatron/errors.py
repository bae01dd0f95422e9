"""Errors of the Megatron front end: Megatron's one exception, which is also the error of casckpt that it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from casckpt.errors import CasckptError, Conflict, InvalidInput, Mismatch, MissingKey, NotFound


class CheckpointingException(InvalidInput):
    """A sharded state dict, or a checkpoint, that cannot be used as it is."""


class CheckpointNotFound(NotFound, CheckpointingException):
    """There is no such store or checkpoint."""


class CheckpointExists(Conflict, CheckpointingException):
    """The step has a checkpoint already."""


class ShardedKeyMissing(MissingKey, CheckpointingException):
    """The checkpoint lacks what was asked for. ``keys`` lists it."""


class ShardedMismatch(Mismatch, CheckpointingException):
    """Shape, dtype or kind differs between the checkpoint and what it is loaded into."""


def refused(key: str, why: str, rank: int | None = None) -> CheckpointingException:
    """Say what is wrong with a value of a state dict, by its key."""
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
    """Raise errors of casckpt that Megatron code expects as a CheckpointingException as one; the others as they are."""
    try:
        yield
    except CheckpointingException:
        raise
    except CasckptError as error:
        like = next((like for kind, like in _LIKE.items() if isinstance(error, kind)), None)
        if like is None:
            raise
        raise like(str(error), **error.__dict__) from error
