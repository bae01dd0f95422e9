"""How the ranks of a process group talk: the only place with collectives.

One primitive, `Ranks.exchange`: every rank hands something up, rank 0 decides, every rank gets its answer; or all of
them raise. It is a star of point-to-point messages over a gloo group of casckpt's own, so that one rank's failure never
leaves another one waiting:

- a rank that raises hands its error up; every rank raises it, with the rank named, and the group stays usable
- a rank that dies closes its connection; rank 0 finds it closed, at the latest when all others have answered, and
  tells them
- a rank that stalls runs into the group's timeout at rank 0, which leaves word in the process group's store; one that
  only takes long, and says so (`Ranks.alive`), does not
- if rank 0 is gone, the others see their connection closed, find no word, and name rank 0
- if rank 0 stalls, they run into a longer timeout, leave word in their turn, and rank 0 finds it

After a death or a stall the group is dropped and made anew by the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeVar
from weakref import ref

import torch

from casckpt.checkpoint.messages import (
    FRAME,
    Message,
    alive_frame,
    astray,
    broken,
    first_line,
    from_frame,
    is_alive,
    pack,
    seen_from,
    timed_out,
    to_frames,
    unpack,
)
from casckpt.errors import CasckptError, InvalidInput, RankFailed, Unsupported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Up = TypeVar("Up")
Down = TypeVar("Down")
Transfer: TypeAlias = "tuple[torch.Tensor, int]"
"""Bytes, and the other rank."""

_WORD_SECONDS = 5.0  # how long a rank looks for rank 0's word after its connection broke
_MARGIN = timedelta(seconds=30)  # beyond twice the timeout, how long the others wait for rank 0
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_LOST = "lost"
_SWAP = 1  # the tag of what is not a message
_SIGNS = 4  # signs of life within a timeout


class Ranks(Protocol):
    """The processes that take part in one save or load."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def exchanges(self) -> int:
        """How many exchanges were made."""

    @property
    def name(self) -> str:
        """What tells it from other groups of this process."""

    def fail(self, error: CasckptError) -> NoReturn:
        """Raise ``error`` here, and its like on all other ranks, which are about to make an exchange."""

    def alive(self) -> None:
        """Inside an exchange: this rank gets on with its part. Who waits for it is patient anew. Cheap, for threads."""

    def exchange(self, call: Callable[[], Up], decide: Callable[[list[Up]], Sequence[Down]]) -> Down:
        """Run ``call`` on every rank; hand the results to ``decide`` on rank 0, whose answers go back, one a rank.

        If any of it raises, every rank raises: the same error on the rank where it arose, and the like of it, with that
        rank named, on the others. Raises RankFailed for a rank that died or did not answer in time.
        """

    def swap(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Inside an exchange: hand bytes to other ranks, and take theirs, in the order that each pair of ranks has.

        On the CPU, of one dimension. Raises RankFailed.
        """


def everyone(value: Down, size: int) -> list[Down]:
    """The same answer for all ranks."""
    return [value] * size


def telling(ranks: Ranks, progress: Callable[[int], None]) -> Callable[[int], None]:
    """``progress``, which is also taken as a sign of life."""

    def both(nbytes: int) -> None:
        ranks.alive()
        progress(nbytes)

    return progress if ranks.size == 1 else both


class Solo:
    """The twin of a process group for one process."""

    rank = 0
    size = 1
    name = "alone"

    def __init__(self) -> None:
        self.exchanges = 0

    def fail(self, error: CasckptError) -> NoReturn:
        """Raise it."""
        raise error

    def alive(self) -> None:
        """Nobody waits."""

    def swap(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """There is nobody to swap with."""

    def exchange(self, call: Callable[[], Up], decide: Callable[[list[Up]], Sequence[Down]]) -> Down:
        """Call both."""
        self.exchanges += 1
        return decide([call()])[0]


def open_ranks(process_group: ProcessGroup | None = None, *, no_dist: bool = False, purpose: str = "main") -> Ranks:
    """The ranks of ``process_group`` (None: all, if torch.distributed is initialised); one process with ``no_dist``.

    The first call for a group makes a gloo group of the same ranks, so all of them must make it. ``purpose``: calls
    that may run at the same time (a save in the background) need groups of their own.
    """
    if no_dist:
        return Solo()
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise InvalidInput("process_group was given, but torch.distributed is not initialised")
        return Solo()
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise InvalidInput("this process is not in process_group; call only on its ranks, or pass no_dist=True")
    if dist.get_world_size(group) == 1:
        return Solo()
    return _groups.get(group, purpose)


def this_rank() -> int:
    """This process among all of them; 0 if torch.distributed is not initialised. Talks to nobody."""
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class GroupRanks:
    """The ranks of a process group, over a gloo group of their own."""

    def __init__(self, parent: ProcessGroup, purpose: str, generation: int) -> None:
        """``generation``: how many of this purpose were dropped before, in this process group; alike on all ranks."""
        self._parent = ref(parent)
        self._name = f"casckpt/{parent.group_name}/{purpose}/{generation}"
        self.generation = generation
        self.dropped = False
        self.rank, self.size = torch.distributed.get_rank(parent), torch.distributed.get_world_size(parent)
        self.exchanges = 0
        self._timeout = _timeout_of(parent)
        self._patience = 2 * self._timeout + _MARGIN  # of the others with rank 0, which waits for them
        self._store = _store_for(parent, self._name)
        self._group = _connect(self._store, self.rank, self.size, self._patience)
        self._dead: RankFailed | None = None
        self._lock = Lock()
        self._alive_lock = Lock()
        self._told = monotonic()
        self._signs: list[Any] = []  # signs of life on their way; gone only with the message that follows them

    @property
    def name(self) -> str:
        """See `Ranks.name`."""
        return self._name

    def is_for(self, parent: ProcessGroup) -> bool:
        """Is it of this very process group, not of an earlier one of the same name?"""
        return self._parent() is parent

    def fail(self, error: CasckptError) -> NoReturn:
        """See `Ranks.fail`."""

        def call() -> NoReturn:
            raise error

        self.exchange(call, lambda values: values)
        raise error

    def alive(self) -> None:
        """See `Ranks.alive`."""
        if monotonic() - self._told < self._timeout.total_seconds() / _SIGNS:
            return
        with self._alive_lock:
            if monotonic() - self._told < self._timeout.total_seconds() / _SIGNS:
                return
            self._told = monotonic()
            others = [0] if self.rank else range(1, self.size)
            self._signs += [self._isend(alive_frame(), rank) for rank in others]

    def swap(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """See `Ranks.swap`."""
        works = [(rank, self._irecv(data, rank, _SWAP)) for data, rank in receives]
        works += [(rank, self._isend(data, rank, _SWAP)) for data, rank in sends]
        for rank, work in works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise broken(rank, error) from error  # the exchange finds out why
            self.alive()

    def exchange(self, call: Callable[[], Up], decide: Callable[[list[Up]], Sequence[Down]]) -> Down:
        """See `Ranks.exchange`."""
        if self._dead is not None:
            raise RankFailed(str(self._dead), rank=self._dead.rank)
        with self._lock:
            self.exchanges += 1
            self._told = monotonic()
            mine = self._attempt(call)
            mine.step = f"{decide.__module__}.{decide.__qualname__}".replace(".<locals>", "")
            answer = self._lead(mine, decide) if self.rank == 0 else self._follow(mine)
            self._signs.clear()
        if mine.error is not None:
            raise mine.error
        if answer.error is not None:
            raise answer.error
        found: Down = answer.value
        return found

    def _attempt(self, call: Callable[[], Up]) -> Message:
        try:
            return Message(call(), rank=self.rank)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, whatever it is; it is raised again
            return Message(error=error, rank=self.rank)

    # rank 0

    def _lead(self, mine: Message, decide: Callable[[list[Any]], Sequence[Any]]) -> Message:
        received, lost = self._receive_all(mine)
        failed = [message for message in received if message is not None and message.error is not None]
        failed += [
            Message(error=astray(rank, message.step, mine.step), rank=rank)
            for rank, message in enumerate(received)
            if message is not None and message.error is None and message.step != mine.step
        ]
        if lost:
            answers = [Message(error=lost[0], rank=lost[0].rank)] * self.size
        elif failed:
            answers = [Message(error=failed[0].error, rank=failed[0].rank)] * self.size
        else:
            outcome = self._attempt(lambda: list(decide([message.value for message in received if message])))
            if outcome.error is not None:
                answers = [Message(error=outcome.error, rank=0)] * self.size
            else:
                same: dict[int, Message] = {}  # what all are told alike is packed once
                answers = [same.setdefault(id(value), Message(value)) for value in outcome.value]
        given_up = self._send_all(answers, skip={error.rank for error in lost})
        if lost:
            self._give_up(lost[0])
        elif given_up is not None:
            self._give_up(given_up)
            return Message(error=given_up)
        return seen_from(answers[0], 0)

    def _receive_all(self, mine: Message) -> tuple[list[Message | None], list[RankFailed]]:
        timeout = self._timeout.total_seconds()
        deadline = monotonic() + timeout
        frames = {rank: torch.empty(FRAME, dtype=torch.uint8) for rank in range(1, self.size)}
        works = {rank: self._irecv(frame, rank) for rank, frame in frames.items()}
        received: list[Message | None] = [mine] + [None] * (self.size - 1)
        lost: list[RankFailed] = []
        for rank, work in works.items():
            try:
                self._wait_for_message(work, frames[rank], rank, deadline, timeout)
                received[rank] = self._message(frames[rank], rank, max(deadline, monotonic() + 60))
            except RuntimeError as error:
                lost.append(self._why_lost(rank, error))
                if lost[-1].lost == "late":  # gloo closes all connections of a group after a timeout
                    self._leave_word(lost[-1])
                    break
        return received, lost

    def _send_all(self, answers: Sequence[Message], skip: set[int | None]) -> RankFailed | None:
        """What to raise if the others have given up on rank 0 meanwhile."""
        packed: dict[int, list[torch.Tensor]] = {}
        sent: list[tuple[int, Any]] = []
        for rank in range(1, self.size):
            if rank not in skip:
                message = answers[rank]
                frames = packed.get(id(message)) or packed.setdefault(id(message), to_frames(pack(message)))
                sent += [(rank, self._isend(frame, rank)) for frame in frames]
        for rank, work in sent:
            try:
                work.wait(self._patience)
            except RuntimeError as error:
                why = self._why_lost(rank, error)
                if why.rank == 0:
                    return why
                continue  # it died after it had answered; the next exchange finds it
        return None

    # the others

    def _follow(self, mine: Message) -> Message:
        deadline = monotonic() + self._patience.total_seconds()
        try:
            sent = [self._isend(part, 0) for part in to_frames(pack(mine))]  # taken once rank 0 is done
            frame = torch.empty(FRAME, dtype=torch.uint8)
            self._wait_for_message(self._irecv(frame, 0), frame, 0, deadline, self._patience.total_seconds())
            answer = self._message(frame, 0, max(deadline, monotonic() + 60))
            for sending in sent:
                sending.wait(self._patience)
        except RuntimeError as error:
            failure = self._why_lost(0, error)
            self._give_up(failure)
            raise failure from error
        if isinstance(answer.error, RankFailed) and answer.error.lost:
            self._drop(answer.error)
        return seen_from(answer, self.rank)

    # the wire

    def _irecv(self, data: torch.Tensor, rank: int, tag: int = 0) -> Any:
        try:
            return self._group.recv([data], rank, tag)
        except RuntimeError as error:  # the connection is broken already
            return _Broken(error)

    def _isend(self, frame: torch.Tensor, rank: int, tag: int = 0) -> Any:
        try:
            return self._group.send([frame], rank, tag)
        except RuntimeError as error:
            return _Broken(error)

    def _wait_for_message(
        self, work: Any, frame: torch.Tensor, rank: int, deadline: float, patience: float
    ) -> None:  # fmt: skip
        """Until ``frame`` holds one; each sign of life gives the rank ``patience`` seconds more."""
        _wait(work, deadline)
        while is_alive(frame):
            if self.rank == 0:
                self.alive()  # the others wait for rank 0, which waits for this one
            _wait(self._irecv(frame, rank), monotonic() + patience)

    def _message(self, frame: torch.Tensor, rank: int, deadline: float) -> Message:
        """The message that begins with ``frame``. Most end there too: each frame costs a turn of gloo's thread."""
        head, missing = from_frame(frame)
        if not missing:
            return unpack(head)
        rest = torch.empty(missing, dtype=torch.uint8)
        _wait(self._irecv(rest, rank), deadline)
        return unpack(head + rest.numpy().tobytes())

    # when somebody is gone

    def _leave_word(self, error: RankFailed) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it whoever has it
            self._store.set(_LOST, f"{error.rank}\n{error.lost}\n{error}")

    def _give_up(self, error: RankFailed) -> None:
        if error.lost == "late":
            self._leave_word(error)
        self._drop(error)

    def _drop(self, error: RankFailed) -> None:
        """A group with a dead rank stays useless; one with a rank that was only late is made anew."""
        if error.lost == "died":
            self._dead = error
        else:
            self.dropped = True

    def _why_lost(self, rank: int, error: RuntimeError) -> RankFailed:
        """Why a connection failed: who gives up on somebody closes all of its own, and leaves word of it."""
        if not timed_out(error):
            with suppress(RuntimeError):  # no word, or no store any more
                self._store.wait([_LOST], timedelta(seconds=_WORD_SECONDS))
                who, lost, text = self._store.get(_LOST).decode().split("\n", 2)
                return RankFailed(text, rank=int(who), lost=lost)
        return broken(rank, error)


class _Broken:
    """What never comes."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> NoReturn:
        """Say why."""
        raise self._error


def _wait(work: Any, deadline: float) -> None:
    work.wait(timedelta(seconds=max(deadline - monotonic(), 0.001)))


def _timeout_of(group: ProcessGroup) -> timedelta:
    """The timeout that the caller gave the group."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (RuntimeError, AttributeError):
            continue
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return _DEFAULT_TIMEOUT


def _store_for(group: ProcessGroup, name: str) -> Any:
    c10d = torch.distributed.distributed_c10d
    return c10d.PrefixStore(name, c10d._world.pg_map[group][1])


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group. Made by hand: `new_group` names groups by how many a rank is in, which may differ between ranks."""
    if not torch.distributed.is_gloo_available():
        raise Unsupported("this build of torch has no gloo, over which the ranks of a save talk")
    store.set(f"here/{rank}", "")
    try:
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        try:
            absent = [other for other in range(size) if not store.check([f"here/{other}"])]
        except RuntimeError:  # the store is gone, and with it whoever has it
            absent = [0]
        raise RankFailed(
            f"not all ranks came to save or load together (absent: {absent or 'none by now'}); all of them must make "
            f"the call ({first_line(error)})",
            rank=absent[0] if absent else None,
        ) from error


class _Groups:
    """The gloo groups of this process, made on first use; all ranks make and drop them alike."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], GroupRanks] = {}
        self._lock = Lock()

    def get(self, parent: ProcessGroup, purpose: str) -> GroupRanks:
        key = (parent.group_name, purpose)
        with self._lock:
            found = self._made.get(key)
            if found is None or not found.is_for(parent):
                found = self._made[key] = GroupRanks(parent, purpose, 0)
            elif found.dropped:
                found = self._made[key] = GroupRanks(parent, purpose, found.generation + 1)
            return found


_groups = _Groups()
