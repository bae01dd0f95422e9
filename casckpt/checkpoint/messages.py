"""What ranks tell each other: a value or an error, as bytes; and errors in the words of those who did not make them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from casckpt.errors import CasckptError, RankFailed


@dataclass
class Message:
    """What goes through the wire: a value or an error."""

    value: Any = None
    error: BaseException | None = None
    rank: int | None = None


def pack(message: Message) -> bytes:
    """For another rank of the same job. An error that would not come back as it is goes as a `RankFailed`."""
    error, rank = message.error, message.rank
    if error is not None and not isinstance(error, CasckptError):  # many others pickle, but do not come back
        return pickle.dumps(Message(error=_failure(rank, error), rank=rank))
    try:
        data = pickle.dumps(message)
        if error is not None:
            unpack(data)
        return data
    except Exception as problem:  # noqa: BLE001 - something with a lock or a socket in it: its text must do
        return pickle.dumps(Message(error=_failure(rank, error or problem), rank=rank))


def unpack(data: bytes) -> Message:
    """What `pack` made."""
    message: Message = pickle.loads(data)  # noqa: S301 - from a rank of the same job, which runs the same code
    return message


def _failure(rank: int | None, error: BaseException) -> RankFailed:
    return RankFailed(f"rank {rank} failed: {type(error).__name__}: {error}", rank=rank)


def seen_from(answer: Message, rank: int) -> Message:
    """An answer as this rank is to raise it: errors of other ranks name them."""
    error, origin = answer.error, answer.rank
    if error is None or origin is None or origin == rank or (isinstance(error, RankFailed) and error.rank is not None):
        return answer
    if isinstance(error, CasckptError):
        like = type(error)(f"rank {origin}: {error}")
        like.__dict__.update({"rank": origin} | error.__dict__)
        return Message(error=like, rank=origin)
    return Message(error=_failure(origin, error), rank=origin)


def broken(rank: int, error: RuntimeError) -> RankFailed:
    """What to raise where the connection to ``rank`` failed."""
    late = timed_out(error)
    how = "did not answer in time" if late else "died, or closed its connection"
    done = "nothing was saved or loaded" if rank else "see in the list of checkpoints whether it had committed by then"
    return RankFailed(
        f"rank {rank} {how}: {done}. Look at the log of rank {rank}, then start again ({first_line(error)})",
        rank=rank,
        lost="late" if late else "died",
    )


def first_line(error: RuntimeError) -> str:
    """Of what gloo says."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def timed_out(error: RuntimeError) -> bool:
    """Is it about time, in the words of gloo or of torch's stores?"""
    return "imed out" in str(error) or "timeout" in str(error).lower()
