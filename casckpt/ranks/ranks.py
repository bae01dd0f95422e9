"""The ranks of a process group, and the only collectives in casckpt.

`Ranks.exchange` is the only primitive: every rank sends a message, rank 0 decides, and either every rank receives its
answer or all ranks raise an error. The messages are sent point to point over casckpt's own gloo group, in a star
around rank 0. As a result, the failure of one rank never leaves another rank waiting:

- A rank that raises an error sends it. Every rank raises the error and names that rank. The group remains usable.
- A rank that dies closes its connection. Rank 0 detects this, at the latest when all other ranks have answered, and
  sends them the error.
- A rank that stalls exceeds the group's timeout. Rank 0 then leaves a note in the store of the process group. A slow
  rank that reports that it is alive (`Ranks.alive`) does not exceed the timeout. If no rank has come to rank 0 at all,
  most likely only rank 0 makes the call, and it gives up earlier (`patience_alone`).
- If rank 0 dies, the other ranks see that their connection is closed, find no note, and name rank 0.
- If rank 0 stalls, the other ranks wait for a longer timeout and then leave a note, which rank 0 finds.

After a rank dies or stalls, casckpt drops the group. After a stall, the next call creates a new group.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial, wraps
from itertools import count
from math import inf
from threading import Lock, current_thread, main_thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar
from weakref import ref

import torch

from casckpt.base import parallel
from casckpt.base.progress import Progress
from casckpt.errors import CasckptError, InvalidInput, RankFailed, Unsupported
from casckpt.ranks import waiting
from casckpt.ranks.messages import Message, astray, public_call, seen_from
from casckpt.ranks.waiting import Meeting
from casckpt.ranks.wire import Transfer, Wire, first_line, greet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

Kept = TypeVar("Kept")
Up = TypeVar("Up")
Down = TypeVar("Down")
MARGIN = timedelta(seconds=30)  # additional time that the other ranks wait for rank 0, beyond twice the timeout
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def everyone(value: Down, size: int) -> list[Down]:
    """Return the same answer for each of ``size`` ranks."""
    return [value] * size


def exchange_keeping(
    ranks: Ranks, call: Callable[[], tuple[Kept, Up]], decide: Callable[[Kept, list[Up]], Sequence[Down]]
) -> tuple[Kept, Down]:
    """Exchange messages as `Ranks.exchange` does, but let ``call`` also return a value that is not sent.

    ``call`` returns (value to keep, message). ``decide`` receives rank 0's kept value and the messages of all ranks.
    Returns (this rank's kept value, its answer).
    """
    kept: list[Kept] = []

    def message() -> Up:
        mine, up = call()
        kept.append(mine)
        return up

    @wraps(decide)  # ranks compare its name to check that they are at the same point
    def answers(messages: list[Up]) -> Sequence[Down]:
        return decide(kept[0], messages)

    down = ranks.exchange(message, answers)
    return kept[0], down


def on_each(ranks: Ranks, call: Callable[[], Up]) -> Up:
    """Run ``call`` on every rank, and return this rank's result. If it fails on any rank, all ranks raise the error."""

    @wraps(call)
    def done(_: Up, messages: list[None]) -> list[None]:
        return messages

    return exchange_keeping(ranks, lambda: (call(), None), done)[0]


def telling(ranks: Ranks, progress: Progress) -> Progress:
    """Return a version of ``progress`` that also reports, at each call, that this rank is alive."""
    return progress if ranks.size == 1 else progress.with_callback(ranks.alive)


class Solo:
    """The counterpart of `GroupRanks` for a single process."""

    rank = 0
    size = 1
    name = group = "alone"
    timeout = inf
    failure: BaseException | None = None

    def __init__(self) -> None:
        self.exchanges = 0

    def fail(self, error: CasckptError) -> NoReturn:
        """Raise ``error``."""
        raise error

    def alive(self) -> None:
        """Do nothing, because no other rank is waiting."""

    def exchange(self, call: Callable[[], Up], decide: Callable[[list[Up]], Sequence[Down]]) -> Down:
        """Run ``call`` and ``decide``."""
        self.exchanges += 1
        return decide([call()])[0]


def open_ranks(process_group: ProcessGroup | None = None, *, no_dist: bool = False, purpose: str = "main") -> Ranks:
    """Return the ranks of ``process_group`` (None: all ranks).

    With ``no_dist`` or without torch.distributed, return only this process. The first call for a group creates a gloo
    group of the same ranks, so all of them must make the call. ``purpose``: calls that may run at the same time, such
    as a save in the background, need separate groups.
    """
    if no_dist:
        return Solo()
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise InvalidInput("process_group was given, but torch.distributed is not initialized")
        _warn_of_others()
        return Solo()
    _refuse_inherited()
    group = process_group if process_group is not None else dist.group.WORLD
    known = (*dist.distributed_c10d._world.pg_map, dist.GroupMember.NON_GROUP_MEMBER)
    if group is None or not any(group is one for one in known):
        raise InvalidInput(
            f"process_group is a {type(group).__name__} that torch.distributed does not know: it was destroyed, or "
            "it wraps a different group. Pass a group from new_group or from DeviceMesh.get_group"
        )
    if dist.get_rank(group) < 0:
        raise InvalidInput(
            "this process is not in process_group: make this call only on its ranks, or pass no_dist=True"
        )
    if dist.get_world_size(group) == 1:
        return Solo()
    return _groups.get(group, purpose)


@cache
def _warn_of_others() -> None:
    """If a launcher started this process as one of several, warn once that it works alone."""
    if os.environ.get("WORLD_SIZE", "1") not in {"", "0", "1"}:
        log.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialized: this process saves and loads its own complete "
            "checkpoints, without the other processes. Call torch.distributed.init_process_group first, or pass "
            "no_dist=True if this is intended",
            os.environ["WORLD_SIZE"],
        )


@cache
def warn_of_torchrun() -> None:
    """If torchrun started this process, and kills it soon after a signal, warn once."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        log.warning(
            "torchrun passes signals such as SIGTERM on, and kills its processes 30 s later, even during the last "
            "save, unless it was started with --shutdown-timeout (torch 2.12). TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 does "
            "the same, and ends this warning"
        )


_inherited: list[Any] = []  # the process group that the parent process had when it forked this process


def _note_inherited() -> None:
    _inherited[:] = [torch.distributed.group.WORLD] if torch.distributed.is_available() else []


os.register_at_fork(after_in_child=_note_inherited)


def _refuse_inherited() -> None:
    """Raise InvalidInput in a forked process, because it would corrupt messages on the parent's connections."""
    if any(world is torch.distributed.group.WORLD for world in _inherited):
        raise InvalidInput(
            "this process was forked by a torch.distributed rank, but is not a rank itself: call Store.read, or pass "
            "no_dist=True"
        )


def this_rank() -> int:
    """Return this process's global rank without communication, or 0 if torch.distributed is not initialized."""
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def connect_all(name: str, within: float) -> GroupRanks:
    """Return all ranks, in a group for `GroupRanks.pass_on`. ``name``: equal on all ranks, and never reused.

    All ranks must make the call. ``within``: how long to wait for them in seconds. Raises RankFailed on all of them.
    """
    world: Any = torch.distributed.group.WORLD  # it exists, because there are several ranks
    ranks = GroupRanks(world, name, 0)
    ranks.connect(world, within)
    return ranks


def job_size() -> int:
    """Return the number of all ranks without communication, or 1 if torch.distributed is not initialized."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def job_timeout() -> float:
    """Return the timeout of the group of all ranks in seconds, or infinity without torch.distributed."""
    world: Any = torch.distributed.group.WORLD if job_size() > 1 else None
    return inf if world is None else _timeout_of(world).total_seconds()


class GroupRanks:
    """The ranks of a process group, connected by a separate gloo group.

    ``rank``: this process's rank, from 0. ``exchanges``: the number of exchanges so far. ``name``: a unique name.
    ``group``: the name of the process group, which does not depend on the purpose. ``failure``: why the last exchange
    failed, or None: the error of the same rank on all ranks, even on a rank that raised an error of its own.
    """

    def __init__(self, parent: ProcessGroup, purpose: str, generation: int) -> None:
        """Set up the ranks. ``generation``: the number of dropped groups for this purpose. It is equal on all ranks."""
        self.parent = ref(parent)
        self.group, self.purpose = parent.group_name, purpose
        self.name = f"casckpt/{parent.group_name}/{purpose}/{generation}"
        self.generation = generation
        self.dropped = True  # until it is connected
        self.rank, self.size = torch.distributed.get_rank(parent), torch.distributed.get_world_size(parent)
        self.exchanges = 0
        self.failure: BaseException | None = None
        self._dead: RankFailed | None = None
        self._beside: GroupRanks | None = None
        self._lock = Lock()

    @property
    def timeout(self) -> float:
        """How long rank 0 waits for another rank, in seconds."""
        return self._wire.timeout

    def connect(self, parent: ProcessGroup, within: float = inf) -> None:
        """Connect to the other ranks. ``within``: how long to wait for them in seconds, at most the timeout.

        If this fails, raises RankFailed on all ranks, and the next group has a different name.
        """
        self._wire = _connect(parent, self.name, self.rank, self.size, within)
        self.dropped = False

    def fail(self, error: CasckptError) -> NoReturn:
        """Raise ``error`` here, and an equal error on all other ranks at their next exchange."""

        def call() -> NoReturn:
            raise error

        self.exchange(call, lambda values: values)
        raise error

    def alive(self) -> None:
        """Report, during an exchange, that this rank is alive.

        This restarts the timeouts of the other ranks. The call is cheap and thread-safe.
        """
        self._wire.alive()

    def beside(self) -> GroupRanks:
        """Return a separate group of the same ranks for `pass_on`. All ranks must make the call after an exchange.

        Its name contains the number of that exchange, because ranks may disagree on how many such groups have failed.
        """
        parent = self.parent()
        if parent is None:
            raise InvalidInput("the process group was destroyed: create it again")
        if self._beside is None or self._beside.dropped:
            self._beside = GroupRanks(parent, f"{self.purpose} {self.generation} bytes", self.exchanges)
            self._beside.connect(parent)
        return self._beside

    def pass_on(self, sends: Sequence[Transfer], receives: Sequence[Transfer], within: float) -> None:
        """Send bytes to other ranks and receive theirs, at any time, in a group that is only for this.

        Several threads may make the call, but each pair of ranks must use the same order in each direction.
        ``within``: the longest wait in seconds. It is at most half of the timeout. Raises RankFailed, and the ranks
        must then `drop` the group.
        """
        self._wire.pass_on(sends, receives, within)

    def drop(self) -> None:
        """Drop this group, so that the next call creates a new one. All ranks must make the call."""
        self.dropped = True
        with suppress(AttributeError):
            del self._wire  # gloo ends a process if a rank connects after a wait has timed out

    def exchange(self, call: Callable[[], Up], decide: Callable[[list[Up]], Sequence[Down]]) -> Down:
        """Run ``call`` on every rank, then run ``decide`` on rank 0 with all results.

        ``decide`` returns an answer for each rank. If either function raises an error, every rank raises. The rank
        where the error occurred raises that error, and the other ranks raise an equal error that names that rank.
        Raises RankFailed for a rank that died or did not answer in time.
        """
        self.failure = None
        if self._dead is not None:
            raise RankFailed(str(self._dead), rank=self._dead.rank)
        with self._lock:
            self.exchanges += 1
            self._wire.begin()
            mine = self._attempt(call)
            mine.step = f"{decide.__module__}.{decide.__qualname__}"
            mine.call = public_call(sys._getframe())
            answer = self._lead(mine, decide) if self.rank == 0 else self._follow(mine)
            self._wire.end()
            self.failure = answer.error
        error = mine.error or answer.error
        if error is not None:
            raise error
        found: Down = answer.value
        return found

    def _attempt(self, call: Callable[[], Up]) -> Message:
        try:
            return Message(call(), rank=self.rank)
        except Exception as error:  # noqa: BLE001 - sent to the other ranks, and reraised
            return Message(error=error, rank=self.rank)

    def _lead(self, mine: Message, decide: Callable[[list[Any]], Sequence[Any]]) -> Message:
        """Act as rank 0: receive all messages, decide, and send the answers."""
        received, lost = self._wire.gather(mine)
        heard = [message for message in received if message is not None]
        failed = Message(error=lost[0], rank=lost[0].rank) if lost else _first_failure(heard, mine)
        answers = [failed] * self.size if failed else self._decided(decide, [message.value for message in heard])
        given_up = self._wire.scatter(answers, skip={error.rank for error in lost})
        if lost:
            self._give_up(lost[0])
        elif given_up is not None:
            self._give_up(given_up)
            return Message(error=given_up)
        return seen_from(answers[0], 0)

    def _decided(self, decide: Callable[[list[Any]], Sequence[Any]], values: list[Any]) -> list[Message]:
        outcome = self._attempt(lambda: list(decide(values)))
        if outcome.error is not None:
            return [outcome] * self.size
        same: dict[int, Message] = {}  # one message for all ranks with the same answer
        return [same.setdefault(id(value), Message(value)) for value in outcome.value]

    def _follow(self, mine: Message) -> Message:
        """Act as one of the other ranks: send a message to rank 0, and receive its answer."""
        try:
            answer = self._wire.ask(mine)
        except RankFailed as failure:
            self._give_up(failure)
            raise
        if isinstance(answer.error, RankFailed) and answer.error.lost:
            self._drop(answer.error)
        return seen_from(answer, self.rank)

    def _give_up(self, error: RankFailed) -> None:
        if error.lost == "late":
            self._wire.leave_word(error)
        self._drop(error)

    def _drop(self, error: RankFailed) -> None:
        """Drop the group. If a rank died, no new group can replace it.

        If a rank was late, the next call creates a new group.
        """
        if error.lost == "died":
            self._dead = error
        else:
            self.dropped = True


def _first_failure(messages: Sequence[Message], mine: Message) -> Message | None:
    """Return the first error of any rank, or else an error for a rank at a different point in the code, or None."""
    failed = (Message(error=message.error, rank=message.rank) for message in messages if message.error is not None)
    strayed = astray(messages, mine)
    return next(failed, None if strayed is None else Message(error=strayed, rank=strayed.rank))


def _timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout that the group's creator set."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (RuntimeError, AttributeError):
            continue
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return _DEFAULT_TIMEOUT


def _connect(parent: ProcessGroup, name: str, rank: int, size: int, within: float) -> Wire:
    """Connect over a new gloo group.

    Do not use `new_group`, because it names groups by a per-rank count that may differ.
    """
    if not torch.distributed.is_gloo_available():
        raise Unsupported("this build of torch does not include gloo, which casckpt uses for messages between ranks")
    dist: Any = torch.distributed
    shared = dist.distributed_c10d._world.pg_map[parent][1]
    if current_thread() is not main_thread() and hasattr(shared, "clone"):
        shared = shared.clone()  # a torch store serves one thread at a time, and another thread may be waiting in it
    number = 0
    with suppress(RuntimeError):  # the store does not answer: the meeting says so
        number = parallel.within(waiting.HEARD_SECONDS, lambda: _times_met(shared, f"{name}/{size}", rank))
    store = dist.PrefixStore(f"{name}/{size}/{number}", shared)
    timeout = _timeout_of(parent)
    on_demand = _devices()
    _, problem = _tried(lambda: _gloo(dist.HashStore(), 0, 1, timeout, on_demand))  # to check whether gloo can start
    meeting, seconds = Meeting(store, rank, size), min(within, timeout.total_seconds())
    meeting.come("start", seconds, problem and f"gloo cannot start on rank {rank}: {problem}")
    end = monotonic() + seconds + waiting.HEARD_SECONDS
    unable = f"gloo cannot connect rank {rank} to the other ranks: "
    group, problem = _tried(lambda: _gloo(store, rank, size, timeout, on_demand and _devices()))
    meeting.come("addresses", end - monotonic(), problem and unable + problem)
    _, problem = _tried(partial(parallel.within, seconds / 2, partial(greet, group, rank, size, timeout)))
    if problem:
        group = None  # no reference may be left, see `_gloo`
    meeting.come("connected", end - monotonic(), problem and unable + problem)

    return Wire(group, store, rank, size, timeout=timeout, patience=2 * timeout + MARGIN)


def _times_met(store: Any, name: str, rank: int) -> int:
    """Return how often this rank has connected in ``store``.

    A group that is made again has the same name and, under torchrun, the same store.
    """
    prefix: Any = torch.distributed.distributed_c10d.PrefixStore
    return next(number for number in count() if not prefix(f"{name}/{number}", store).check([f"start/{rank}"]))


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, devices: list[Any]) -> Any:
    """Return a gloo group, whose ranks connect on demand if there are ``devices``. Raises RuntimeError.

    gloo waits for a connection for five times ``timeout``. The caller must give up earlier, from another thread: if a
    rank that was stopped connects after gloo has given up, gloo ends the process.
    """
    dist: Any = torch.distributed
    if not devices:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = devices, 1, timeout
    # the prefix: ranks that connect all pairs at once cannot read the addresses of ranks that do not
    return dist.ProcessGroupGloo(dist.PrefixStore("on demand", store), rank, size, options)


def _tried(call: Callable[[], Kept]) -> tuple[Kept | None, str]:
    """Return the result of a call to gloo, or the reason why it failed."""
    try:
        return call(), ""
    except RuntimeError as error:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        chosen = f" (here it is {name})" if name else ""
        return None, (
            f"{first_line(error)}. On each host, set GLOO_SOCKET_IFNAME to a network interface that the other "
            f"hosts can reach{chosen}. `ip address` lists the interfaces"
        )


def _devices() -> list[Any]:
    """Return gloo devices that connect ranks on demand, for the interfaces that torch would use.

    Returns [] if this torch (before 2.8) or its transport cannot connect on demand.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        if len(names) > 1:  # as in torch
            return [gloo.create_device(interface=name, lazy_init=True) for name in names.split(",")]
        return [gloo.create_default_device(lazy_init=True)]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return []


class _Groups:
    """The gloo groups of this process, created on first use. All ranks create and drop the same groups."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], GroupRanks] = {}
        self._locks: dict[tuple[str, str], Lock] = {}

    def get(self, parent: ProcessGroup, purpose: str) -> GroupRanks:
        self._forget_destroyed()
        key = (parent.group_name, purpose)
        with self._locks.setdefault(key, Lock()):  # a lock per group: ranks may connect two groups in any order
            group = self._made.get(key)
            # the group belongs to an earlier process group with the same name
            if group is not None and group.parent() is not parent:
                group = None
            if group is None or group.dropped:
                group = self._made[key] = GroupRanks(parent, purpose, group.generation + 1 if group else 0)
                group.connect(parent)
            return group

    def _forget_destroyed(self) -> None:
        """Forget the groups of destroyed process groups, because gloo keeps sockets and threads for them."""
        for key, group in list(self._made.items()):
            if group.parent() is None and self._made.get(key) is group:
                self._made.pop(key, None)


_groups = _Groups()

Ranks: TypeAlias = GroupRanks | Solo
"""The processes that take part in one save or load."""
