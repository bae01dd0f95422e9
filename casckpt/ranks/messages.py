"""Messages between ranks. A message carries a value or an error."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from casckpt.errors import CasckptError, InvalidInput, RankFailed


@dataclass
class Message:
    """A value or an error that one rank sends to another.

    ``step``: the sender's position in the code. ``call``: the function of casckpt that the user called.
    """

    value: Any = None
    error: BaseException | None = None
    rank: int | None = None
    step: str = ""
    call: str = ""


def astray(messages: Sequence[Message], mine: Message) -> InvalidInput | None:
    """Return the error for a rank at a different point in the code than rank 0, or None if there is no such rank.

    ``mine``: the message of rank 0. ``messages``: the messages of all ranks, in rank order.
    """
    away = [message for message in messages if message.step != mine.step]
    if not away:
        return None
    call, rank = away[0].call, away[0].rank
    where = (
        f"in {call}, but rank 0 is in {mine.call}"
        if call != mine.call
        else f"not at the same point in {call} as rank 0"
    )
    return InvalidInput(
        f"rank {rank} is {where}: all ranks must make the same casckpt calls, with the same whole objects in their "
        "states, in the same order. Make the calls in one thread, or pass each thread its own process_group=...",
        rank=rank,
    )


def public_call(frame: FrameType | None) -> str:
    """Return the name of the outermost public function of casckpt around ``frame``, or "casckpt"."""
    found = "casckpt"
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("casckpt."):
            name = frame.f_code.co_qualname.partition(".<locals>")[0]
            found = found if name.startswith(("_", "<")) or "._" in name else name
        frame = frame.f_back
    return found


def portable(error: Exception) -> Exception:
    """Return the error if it survives pickling, or else a `RankFailed` with its text.

    A different library pickles the result. If an error could not be unpickled, ranks would wait for each other.
    """
    try:
        back = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was pickled just now
        if type(back) is type(error) and str(back) == str(error):
            return error
    except Exception:  # noqa: BLE001, S110 - its class may raise any error when it is pickled
        pass
    return RankFailed(f"{type(error).__name__}: {error}")


def failure_of(rank: int | None, error: BaseException) -> RankFailed:
    """Return an error of any kind as one that other ranks can raise."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return RankFailed(f"rank {rank} failed: {type(error).__name__}: {error}{notes}", rank=rank)


def seen_from(answer: Message, rank: int) -> Message:
    """Return the answer. If it has an error that another rank raised, make the error name that rank."""
    error, origin = answer.error, answer.rank
    if error is None or origin is None or origin == rank or (isinstance(error, RankFailed) and error.rank is not None):
        return answer
    if isinstance(error, CasckptError):
        like = type(error)(f"rank {origin}: {error}")
        like.__dict__.update({"rank": origin} | error.__dict__)
        return Message(error=like, rank=origin)
    return Message(error=failure_of(origin, error), rank=origin)
