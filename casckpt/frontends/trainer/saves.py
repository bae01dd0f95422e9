"""The results of saves: the summary of a save, and background failures that the next save raises."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self, Unpack

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, InvalidInput, Revoked
from casckpt.frontends.trainer.checkpointer import Checkpointer
from casckpt.frontends.trainer.settings import StepArguments
from casckpt.frontends.training_state.contents import AnyTrainState, TrainModel
from casckpt.frontends.training_state.parts import AnyOptimizer
from casckpt.ranks.ranks import everyone, open_ranks

PATIENCE = 15 * 60 * 1_000_000
"""How long saves may fail, in microseconds, before a save runs in the foreground."""


def will_repeat(error: BaseException) -> bool:
    """Return whether the next save would fail too: the error concerns the state, an argument or an existing step."""
    return isinstance(error, InvalidInput) or (isinstance(error, Conflict) and not isinstance(error, Revoked))


class HeardFuture(Future[Checkpoint]):
    """The future of a save. ``is_heard``: whether the caller has read the result or the error."""

    is_heard = False

    def result(self, timeout: float | None = None) -> Checkpoint:
        """See `Future.result`."""
        self.is_heard = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future.exception`."""
        self.is_heard = True
        return super().exception(timeout)

    def unheard_exception(self) -> BaseException | None:
        """Wait until the save ends, and return its error. ``is_heard`` does not change."""
        return super().exception()


class Failures:
    """Counts the failed saves of one rank since the last successful save. ``clock``: returns microseconds.

    ``most``: the number of consecutive failures, over at least `PATIENCE`, that is too many. None: no limit.
    """

    def __init__(self, most: int | None, clock: Callable[[], int]) -> None:
        self.count = 0
        self._most, self._clock, self._first = most, clock, 0

    def note(self, error: BaseException | None) -> None:
        """Record the end of a save. ``error``: None if the checkpoint is durable."""
        if error is None:
            self.count = 0
            return
        if self.count == 0:
            self._first = self._clock()
        self.count += 1

    @property
    def too_many(self) -> bool:
        """Whether the next save must run in the foreground and raise its error."""
        if self._most is None or self.count < self._most:
            return False
        return self._clock() - self._first >= PATIENCE


_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SaveSummary:
    """The cost of a save. ``blocked``: how long the training waited, in seconds.

    ``durable``: the seconds until the commit.
    ``bytes_new``: the bytes that all ranks wrote. ``bytes_reused``: the bytes that the store already held.
    ``forgotten``: the steps that retention forgot after the save.
    """

    checkpoint: Checkpoint
    blocked: float
    durable: float
    forgotten: tuple[int, ...] = ()

    @property
    def bytes_new(self) -> int:
        """The bytes of tensors that the save wrote."""
        return self.checkpoint.stats.bytes_written

    @property
    def bytes_reused(self) -> int:
        """The bytes of tensors that the store already held."""
        return self.checkpoint.stats.bytes_reused

    def __str__(self) -> str:
        ckpt = self.checkpoint
        kind = " (ephemeral)" if ckpt.ephemeral else ""
        gone = f"; forgot {', '.join(f'{ckpt.run}@{step}' for step in self.forgotten)}" if self.forgotten else ""
        return (
            f"saved {ckpt.run}@{ckpt.step}{kind}: blocked {self.blocked:.2f} s, durable after {self.durable:.2f} s, "
            f"{self.bytes_new / _MIB:.1f} MiB new, {self.bytes_reused / _MIB:.1f} MiB reused{gone}"
        )


log = logging.getLogger(__name__)


class SaveOnSignal:
    """A context manager that catches ``signals``. If any rank receives a signal, the next `check` saves and exits.

    ``every``: compare with the other ranks only at steps that are a multiple of this number. Each comparison costs one
    exchange. ``exit_status``: by default, 128 plus the signal number, as in a shell. Raises InvalidInput outside the
    main thread, because Python can handle signals only there.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        *,
        every: int = 1,
        exit_status: int | None = None,
    ) -> None:
        if type(every) is not int or every < 1:
            raise InvalidInput(f"every={every!r} is not valid; pass a number of steps, 1 or more")
        self._checkpointer, self._signals, self._every, self._status = checkpointer, tuple(signals), every, exit_status
        self._before: dict[signal.Signals, Any] = {}
        self._received = 0

    def __enter__(self) -> Self:
        for one in self._signals:
            try:
                self._before[one] = signal.signal(one, self._note)
            except (ValueError, OSError) as error:
                self._restore()
                raise InvalidInput(
                    f"{one!r} cannot be handled: {error}; enter SaveOnSignal in the main thread"
                ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            one, handler = self._before.popitem()
            signal.signal(one, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def check(
        self,
        step: int,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: AnyTrainState = None,
        **options: Unpack[StepArguments],
    ) -> None:
        """If any rank received a signal, save ``step`` unless it is already saved.

        Then raise SystemExit on every rank.
        Call this method between two steps, on every rank. ``options``: the options of `Checkpointer.save`. Further
        signals have no effect. Raises the errors of the save.
        """
        number = self.received(step)
        if not number:
            return
        name = signal.Signals(number).name
        if self._saved_already(step):
            log.warning("%s: exiting after step %d, which is saved", name, step)
        else:
            log.warning("%s: saving step %d, then exiting", name, step)
            self._checkpointer.save(step, model, optim, train_state, **options)
        raise SystemExit(128 + number if self._status is None else self._status)

    def received(self, step: int) -> int:
        """Return the number of a signal that any rank got, or 0. Every rank makes the call."""
        if step % self._every:
            return 0
        ranks = open_ranks(self._checkpointer.process_group)
        return ranks.exchange(lambda: self._received, lambda found: everyone(max(found), ranks.size))

    def _saved_already(self, step: int) -> bool:
        """Wait for the background save. Return whether ``step`` is the last saved step."""
        try:
            self._checkpointer.wait()
        except CasckptError as error:
            log.error("the previous save failed: %s", error)
        return self._checkpointer.saved_step == step
