"""Messages between ranks over gloo, with timeouts.

Each error names the rank that failed. All messages are between rank 0 and another rank, except the bytes of
`Wire.pass_on`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Container, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from time import monotonic
from typing import Any, Final, NoReturn, TypeAlias

import torch

from casckpt.base import parallel
from casckpt.errors import CasckptError, RankFailed
from casckpt.ranks import waiting
from casckpt.ranks.messages import Message, failure_of

log = logging.getLogger(__name__)

Transfer: TypeAlias = "tuple[torch.Tensor, int]"
"""Bytes to send or receive, and the other rank."""

FRAME: Final = 4096  # bytes of the first frame of a message; most messages do not need a second frame
WORD_SECONDS = 5.0  # time to find a note from rank 0 after a connection breaks
_MOMENT = 0.5  # seconds in which gloo receives what has already arrived
_REST_SECONDS = 60.0  # minimum time for the rest of a message
_LENGTH: Final = 8  # bytes at the start of the first frame, which say how long the message is
_LOST = "lost"
_BYTES = 1  # the tag for bytes that are not part of a message
_SIGNS = 4  # signs of life per timeout; an exchange's first sign is sent before any rank warns
AFTER_RANK_0 = 10.0  # seconds; rank 0 warns first, because it knows which ranks are missing


class Wire:
    """The connections of one rank.

    ``group``: the gloo group. ``store``: holds notes for ranks whose connection is closed. ``timeout``: how long rank
    0 waits for another rank. ``patience``: how long the other ranks wait for rank 0. It is longer, because rank 0
    waits for all ranks.
    """

    def __init__(
        self, group: Any, store: Any, rank: int, size: int, *, timeout: timedelta, patience: timedelta
    ) -> None:
        self._group, self._store = group, store
        self._rank, self._size = rank, size
        self._timeout, self._patience = timeout, patience
        self._alive_lock = Lock()
        self._met: set[int] = set()  # the ranks that `pass_on` has connected to
        self._signs: list[Any] = []  # signs of life in transit, kept until the message that follows them is sent
        self.begin()

    @property
    def timeout(self) -> float:
        """How long rank 0 waits for another rank, in seconds."""
        return self._timeout.total_seconds()

    def begin(self) -> None:
        """Begin an exchange, and restart the pauses between signs of life."""
        self._reported, self._pause = monotonic(), min(self._timeout.total_seconds() / _SIGNS, waiting.FIRST * 2 / 3)

    def end(self) -> None:
        """End an exchange."""
        self._signs.clear()

    def alive(self) -> None:
        """See `casckpt.ranks.ranks.GroupRanks.alive`."""
        if self._reported_lately():
            return
        with self._alive_lock:
            if self._reported_lately():
                return
            self._reported, self._pause = monotonic(), self._timeout.total_seconds() / _SIGNS
            others = [0] if self._rank else range(1, self._size)
            self._signs += [self._isend(alive_frame(), rank) for rank in others]

    def _reported_lately(self) -> bool:
        return monotonic() - self._reported < self._pause

    def pass_on(self, sends: Sequence[Transfer], receives: Sequence[Transfer], within: float) -> None:
        """See `casckpt.ranks.ranks.GroupRanks.pass_on`."""
        seconds = min(within, self._timeout.total_seconds() / 2)
        deadline, others = monotonic() + seconds, {rank for _, rank in (*sends, *receives)}
        works: list[Any] = []

        def start() -> None:
            works.extend(self._group.recv([data], rank, _BYTES) for data, rank in receives)
            works.extend(self._group.send([data], rank, _BYTES) for data, rank in sends)

        try:
            if others <= self._met:
                start()
            else:  # gloo connects, and may wait for a rank that was stopped
                parallel.within(seconds, start)
                self._met |= others
            for work in works:
                _wait(work, deadline)
        except RuntimeError as error:
            raise RankFailed(first_line(error)) from None

    # rank 0

    def gather(self, mine: Message) -> tuple[list[Message | None], list[RankFailed]]:
        """Return the messages of all ranks, starting with ``mine``, and the errors of lost ranks.

        Lost ranks have None as their message.
        """
        timeout = self._timeout.total_seconds()
        deadline = monotonic() + timeout
        frames = {rank: empty_frame() for rank in range(1, self._size)}
        works = {rank: self._irecv(frame, rank) for rank, frame in frames.items()}
        received: list[Message | None] = [mine] + [None] * (self._size - 1)
        lost: list[RankFailed] = []

        def missing() -> list[int]:
            return [rank for rank, frame in frames.items() if not has_come(frame)]

        def warn(warning: str) -> bool:
            those = [rank for rank, frame in frames.items() if not is_alive(frame)]
            self._signs += [self._isend(alive_frame(warning), rank) for rank in those]
            absent, waited = missing(), monotonic() + timeout - deadline
            if len(absent) < self._size - 1 or waited < waiting.patience_alone(timeout):
                return True
            self.leave_word(RankFailed(waiting.late(absent, waited, is_over=True), rank=absent[0], lost="late"))
            with suppress(RuntimeError):  # gloo then closes all connections, which ends the wait below
                works[absent[0]].wait(timedelta(milliseconds=1))
            return False

        with waiting.announced(missing, warn):
            for rank, work in works.items():
                try:
                    received[rank] = self._message(work, frames[rank], rank, deadline, timeout)
                except RuntimeError as error:
                    lost.append(self._why_lost(rank, error))
                    if lost[-1].lost == "late":  # after a timeout, gloo closes all connections of the group
                        self.leave_word(lost[-1])
                        break
        return received, lost

    def scatter(self, answers: Sequence[Message], *, skip: Container[int | None]) -> RankFailed | None:
        """Send each rank its answer.

        Returns the error to raise if the other ranks have given up on rank 0 in the meantime.
        """
        packed: dict[int, list[torch.Tensor]] = {}  # an answer for several ranks is packed only once
        sent: list[tuple[int, Any]] = []
        for rank in range(1, self._size):
            if rank not in skip:
                message = answers[rank]
                frames = packed.get(id(message)) or packed.setdefault(id(message), to_frames(pack(message)))
                sent += [(rank, self._isend(frame, rank)) for frame in frames]
        for rank, work in sent:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                why = self._why_lost(rank, error)
                if why.rank == 0:
                    return why
                if why.lost == "late":  # gloo has closed all connections
                    self.leave_word(why)  # also for this rank's next exchange
                    return None
                continue  # it died after it sent its message; the next exchange raises an error
        return None

    # the others

    def ask(self, mine: Message) -> Message:
        """Send a message to rank 0, and return its answer. Raises RankFailed."""
        patience = self._patience.total_seconds()
        deadline = monotonic() + patience
        try:
            sent = [self._isend(part, 0) for part in to_frames(pack(mine))]  # arrives when rank 0 finishes its call
            frame = empty_frame()
            with waiting.announced(lambda: [] if has_come(frame) else [0], lambda _: True, AFTER_RANK_0):
                answer = self._message(self._irecv(frame, 0), frame, 0, deadline, patience)
            for sending in sent:
                sending.wait(self._patience)
        except RuntimeError as error:
            raise self._why_lost(0, error) from error
        return answer

    # frames

    def _irecv(self, data: torch.Tensor, rank: int) -> Any:
        try:
            return self._group.recv([data], rank, 0)
        except RuntimeError as error:  # the connection is already broken
            return _Broken(error)

    def _isend(self, frame: torch.Tensor, rank: int) -> Any:
        try:
            return self._group.send([frame], rank, 0)
        except RuntimeError as error:
            return _Broken(error)

    def _message(self, work: Any, frame: torch.Tensor, rank: int, deadline: float, patience: float) -> Message:
        """Return the message that begins in ``frame``, which ``work`` fills.

        Each sign of life extends the wait by ``patience`` seconds. The frame size is large enough for most messages,
        because each frame costs a turn of gloo's thread.
        """
        _wait(work, deadline)
        while is_alive(frame):
            if warning := warning_in(frame):
                log.warning("%s", warning)
            if self._rank == 0:
                self.alive()  # the other ranks wait for rank 0, and rank 0 waits for this rank
            _wait(self._irecv(frame, rank), monotonic() + patience)
        head, missing = from_frame(frame)
        if not missing:
            return unpack(head)
        rest = torch.empty(missing, dtype=torch.uint8, device="cpu")
        _wait(self._irecv(rest, rank), max(deadline, monotonic() + _REST_SECONDS))
        return unpack(head + rest.numpy().tobytes())

    # lost ranks

    def leave_word(self, error: RankFailed) -> None:
        """Store a note for ranks whose connection is closed."""
        with suppress(RuntimeError):  # the process that hosts the store died
            self._store.set(_LOST, f"{error.rank}\n{error.lost}\n{error}")

    def _why_lost(self, rank: int, error: RuntimeError) -> RankFailed:
        """Return the reason for a failed connection.

        A rank that gives up on another rank closes all its connections and leaves a note. After a timeout, only rank 0
        looks for a note, because a stopped rank 0 may host the store.
        """
        with suppress(RuntimeError):  # there is no note, or the store no longer exists
            if not timed_out(error) or (self._rank == 0 and self._store.check([_LOST])):
                self._store.wait([_LOST], timedelta(seconds=WORD_SECONDS))
                who, lost, text = self._store.get(_LOST).decode().split("\n", 2)
                return RankFailed(text, rank=int(who), lost=lost)
        return broken(rank, error)


class _Broken:
    """A send or receive over a broken connection."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> NoReturn:
        """Raise the connection's error."""
        raise self._error


def greet(group: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Connect rank 0 to each other rank of ``group``. Raises RuntimeError."""
    deadline = monotonic() + timeout.total_seconds()
    call, others = (group.send, [0]) if rank else (group.recv, range(1, size))
    for other in others:
        _wait(call([torch.ones(1, dtype=torch.uint8, device="cpu")], other, 0), deadline)


def _wait(work: Any, deadline: float) -> None:
    """Wait until ``deadline``, or for a moment if it has passed: this process may have been stopped in the meantime."""
    work.wait(timedelta(seconds=max(deadline - monotonic(), _MOMENT)))


# messages as bytes


def pack(message: Message) -> bytes:
    """Encode a message for a rank of the same job.

    Replace an error that would not survive encoding with a `RankFailed`.
    """
    error, rank = message.error, message.rank
    if error is not None and not isinstance(error, CasckptError):  # many other errors pickle but do not unpickle
        return pickle.dumps(Message(error=failure_of(rank, error), rank=rank))
    try:
        data = pickle.dumps(message)
        if error is not None:
            unpack(data)
        return data
    except Exception as problem:  # noqa: BLE001 - it holds a lock or a socket, so send only its text
        return pickle.dumps(Message(error=failure_of(rank, error or problem), rank=rank))


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
