"""Messages between ranks: a value or an error, as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from casckpt.base.text import listed
from casckpt.errors import CasckptError, InvalidInput, RankFailed

FRAME: Final = 4096  # bytes of the first frame of a message: most need no second one
_LENGTH: Final = 8


@dataclass
class Message:
    """What goes through the wire: a value or an error.

    ``step``: where in the code its sender is; ``call``: the function of casckpt that its user has called.
    """

    value: Any = None
    error: BaseException | None = None
    rank: int | None = None
    step: str = ""
    call: str = ""


@dataclass(frozen=True)
class WithObjects:
    """A value of a call that ranks make where there are whole objects in their state. ``keys``: of these objects."""

    value: Any
    keys: Sequence[str]


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


def to_frames(data: bytes) -> list[torch.Tensor]:
    """``data`` as one frame of ``FRAME`` bytes, and one of what that could not take, if anything."""
    room = FRAME - _LENGTH
    first = bytearray(FRAME)
    first[:_LENGTH] = len(data).to_bytes(_LENGTH, "little")
    first[_LENGTH : _LENGTH + min(len(data), room)] = data[:room]
    parts = [first] + ([bytearray(data[room:])] if len(data) > room else [])
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def empty_frame() -> torch.Tensor:
    """A frame to receive into."""
    return torch.zeros(FRAME, dtype=torch.uint8, device="cpu")


def alive_frame(warning: str = "") -> torch.Tensor:
    """A frame that holds no message: its sender still works on its own, or waits, and gives a ``warning`` of that."""
    text = warning.encode()[: FRAME - _LENGTH - 1]
    return torch.frombuffer(bytearray(_LENGTH) + b"\1" + text.ljust(FRAME - _LENGTH - 1, b"\0"), dtype=torch.uint8)


def is_alive(frame: torch.Tensor) -> bool:
    """Whether it is a frame of `alive_frame`, or an empty one; a message is never empty."""
    return not frame[:_LENGTH].any()


def has_come(frame: torch.Tensor) -> bool:
    """Whether anything was received into it."""
    return bool(frame[: _LENGTH + 1].any())


def warning_in(frame: torch.Tensor) -> str:
    """What `alive_frame` was given."""
    return frame[_LENGTH + 1 :].numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def from_frame(frame: torch.Tensor) -> tuple[bytes, int]:
    """What the first frame holds of a message, and how many bytes of it are still to come."""
    data = frame.numpy().tobytes()
    length = int.from_bytes(data[:_LENGTH], "little")
    held = data[_LENGTH : _LENGTH + length]
    return held, length - len(held)


def astray(messages: Sequence[Message], mine: Message) -> InvalidInput | None:
    """What to raise where a rank is elsewhere in the code than rank 0, which sends ``mine``; None where none is.

    ``messages``: of all ranks, in their order.
    """
    away = [message for message in messages if message.step != mine.step]
    if not away:
        return None
    call, rank = away[0].call, away[0].rank
    where = f"in {call}, rank 0 in {mine.call}" if call != mine.call else f"at another point of {call} than rank 0"
    said = f"rank {rank} is {where}: all ranks must make the same calls of casckpt in the same order"
    keys = {one.rank: one.value.keys for one in messages if isinstance(one.value, WithObjects) and one.value.keys}
    without = [one.rank for one in messages if one.rank not in keys]
    if not keys or not without:
        return InvalidInput(f"{said}, from one thread or with process_group=... for each", rank=rank)
    holder, held = next(iter(keys.items()))
    return InvalidInput(
        f"{said}. Rank {holder} has the whole objects {listed(held)} in its state, and rank {without[0]} has none: "
        "give the objects on every rank, or the state_dict of each",
        rank=rank,
        keys=tuple(held),
    )


def public_call(frame: FrameType | None) -> str:
    """Return the outermost public function of casckpt that ``frame`` runs in, by name; "casckpt" if there is none."""
    found = "casckpt"
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("casckpt."):
            name = frame.f_code.co_qualname.partition(".<locals>")[0]
            found = found if name.startswith(("_", "<")) or "._" in name else name
        frame = frame.f_back
    return found


def portable(error: Exception) -> Exception:
    """The error itself if it comes back from a pickle as it is, else one that says the same in one text.

    For errors that somebody else pickles: one that does not come back leaves ranks waiting for each other.
    """
    try:
        back = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was pickled just now
        if type(back) is type(error) and str(back) == str(error):
            return error
    except Exception:  # noqa: BLE001, S110 - whatever its class does when it is pickled
        pass
    return RankFailed(f"{type(error).__name__}: {error}")


def _failure(rank: int | None, error: BaseException) -> RankFailed:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return RankFailed(f"rank {rank} failed: {type(error).__name__}: {error}{notes}", rank=rank)


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
    done += ". Every rank must make the call" * late
    return RankFailed(
        f"rank {rank} {how}: {done}. Look at the log of rank {rank}, then start again ({first_line(error)})",
        rank=rank,
        lost="late" if late else "died",
    )


def first_line(error: RuntimeError) -> str:
    """Of what gloo says."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def timed_out(error: RuntimeError) -> bool:
    """Whether it is about time, in the words of gloo or of torch's stores."""
    return "imed out" in str(error) or "timeout" in str(error).lower()
