"""Messages between ranks. A message carries a value or an error, and is sent as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from casckpt.base.text import listed
from casckpt.errors import CasckptError, InvalidInput, RankFailed

FRAME: Final = 4096  # bytes of the first frame of a message; most messages do not need a second frame
_LENGTH: Final = 8


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


@dataclass(frozen=True)
class WithObjects:
    """A message from a rank that has whole objects. ``keys``: the keys of these objects."""

    value: Any
    keys: Sequence[str]


def pack(message: Message) -> bytes:
    """Encode a message for a rank of the same job.

    Replace an error that would not survive encoding with a `RankFailed`.
    """
    error, rank = message.error, message.rank
    if error is not None and not isinstance(error, CasckptError):  # many other errors pickle but do not unpickle
        return pickle.dumps(Message(error=_failure(rank, error), rank=rank))
    try:
        data = pickle.dumps(message)
        if error is not None:
            unpack(data)
        return data
    except Exception as problem:  # noqa: BLE001 - it holds a lock or a socket, so send only its text
        return pickle.dumps(Message(error=_failure(rank, error or problem), rank=rank))


def unpack(data: bytes) -> Message:
    """Decode the result of `pack`."""
    message: Message = pickle.loads(data)  # noqa: S301 - from a rank of the same job, which runs the same code
    return message


def to_frames(data: bytes) -> list[torch.Tensor]:
    """Split ``data`` into a frame of ``FRAME`` bytes and, if necessary, a second frame with the rest."""
    room = FRAME - _LENGTH
    first = bytearray(FRAME)
    first[:_LENGTH] = len(data).to_bytes(_LENGTH, "little")
    first[_LENGTH : _LENGTH + min(len(data), room)] = data[:room]
    parts = [first] + ([bytearray(data[room:])] if len(data) > room else [])
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def empty_frame() -> torch.Tensor:
    """Return an empty frame, to receive a message into."""
    return torch.zeros(FRAME, dtype=torch.uint8, device="cpu")


def alive_frame(warning: str = "") -> torch.Tensor:
    """Return a frame that carries no message. It shows that its sender is alive, and may contain a ``warning``."""
    text = warning.encode()[: FRAME - _LENGTH - 1]
    return torch.frombuffer(bytearray(_LENGTH) + b"\1" + text.ljust(FRAME - _LENGTH - 1, b"\0"), dtype=torch.uint8)


def is_alive(frame: torch.Tensor) -> bool:
    """Return whether a frame is empty or was made by `alive_frame`. A message is never empty."""
    return not frame[:_LENGTH].any()


def has_come(frame: torch.Tensor) -> bool:
    """Return whether a frame has received any bytes."""
    return bool(frame[: _LENGTH + 1].any())


def warning_in(frame: torch.Tensor) -> str:
    """Return the warning in a frame that `alive_frame` made."""
    return frame[_LENGTH + 1 :].numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def from_frame(frame: torch.Tensor) -> tuple[bytes, int]:
    """Return the bytes of a message in its first frame, and the number of bytes that follow in a second frame."""
    data = frame.numpy().tobytes()
    length = int.from_bytes(data[:_LENGTH], "little")
    held = data[_LENGTH : _LENGTH + length]
    return held, length - len(held)


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
    text = f"rank {rank} is {where}: all ranks must make the same casckpt calls in the same order"
    keys = {one.rank: one.value.keys for one in messages if isinstance(one.value, WithObjects) and one.value.keys}
    without = [one.rank for one in messages if one.rank not in keys]
    if not keys or not without:
        return InvalidInput(
            f"{text}. Make the calls in one thread, or pass each thread its own process_group=...", rank=rank
        )
    holder, held = next(iter(keys.items()))
    return InvalidInput(
        f"{text}. Rank {holder} has the whole objects {listed(held)} in its state, but rank {without[0]} has none: "
        "pass the objects on every rank, or pass the state_dict of each object",
        rank=rank,
        keys=tuple(held),
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


def _failure(rank: int | None, error: BaseException) -> RankFailed:
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
    return Message(error=_failure(origin, error), rank=origin)


def broken(rank: int, error: RuntimeError) -> RankFailed:
    """Return the error for a failed connection to ``rank``."""
    late = timed_out(error)
    how = "did not answer in time" if late else "died or closed its connection"
    done = (
        "nothing was saved or loaded"
        if rank
        else "the call may already have committed, so check the list of checkpoints"
    )
    done += ". Every rank must make the call" * late
    return RankFailed(
        f"rank {rank} {how}: {done}. Check the log of rank {rank}, then restart the job ({first_line(error)})",
        rank=rank,
        lost="late" if late else "died",
    )


def first_line(error: RuntimeError) -> str:
    """Return the first line of a gloo error."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def timed_out(error: RuntimeError) -> bool:
    """Return whether the error text is a timeout message from gloo or from torch's stores."""
    return "imed out" in str(error) or "timeout" in str(error).lower()
