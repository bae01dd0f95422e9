"""Saves once more when the scheduler stops the job. A handler records the signal, and all ranks save between two steps.

A save in the handler itself would run in the middle of a step or of another save, and at a different time on each
rank.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Self, Unpack

from casckpt.errors import InvalidInput
from casckpt.frontends.trainer.checkpointer import Checkpointer
from casckpt.frontends.trainer.settings import StepArguments
from casckpt.frontends.training_state.contents import AnyTrainState, TrainModel
from casckpt.frontends.training_state.parts import AnyOptimizer
from casckpt.ranks.ranks import everyone, open_ranks, this_rank, warn_of_torchrun

log = logging.getLogger(__name__)
# What restores the handlers of each block, the innermost last. A forked child restores them at once: a signal is to end
# it, for example when `multiprocessing` terminates a daemon.
_entered: list[ExitStack] = []
os.register_at_fork(after_in_child=lambda: [*map(ExitStack.close, _entered[::-1])])


class SaveOnSignal:
    """A context manager that catches ``signals``. If any rank receives a signal, the next `check` saves and exits.

    ``every``: compare with the other ranks only at steps that are a multiple of this number. Each comparison costs one
    exchange. ``exit_status``: by default, 128 plus the signal number, as in a shell. A copy (`pickle`, `copy.deepcopy`)
    catches nothing until it is entered. Raises InvalidInput outside the main thread, because Python can handle signals
    only there.
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
        self._handlers = ExitStack()
        self._received = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handlers": ExitStack(), "_received": 0}

    def __enter__(self) -> Self:
        with ExitStack() as before:
            for number in self._signals:
                try:
                    handler = signal.signal(number, self._note)
                except (ValueError, OSError) as error:
                    raise InvalidInput(
                        f"{number!r} cannot be handled: {error}; enter SaveOnSignal in the main thread"
                    ) from error
                before.callback(signal.signal, number, signal.SIG_DFL if handler is None else handler)
            if self._signals and this_rank() == 0:
                warn_of_torchrun()
            self._handlers = before.pop_all()
        _entered.append(self._handlers)
        self._handlers.callback(_entered.remove, self._handlers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._handlers.close()

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

        Then raise SystemExit on every rank. Call this method between two steps, on every rank. ``options``: the options
        of `Checkpointer.save`. Further signals have no effect. Raises the errors of the save.
        """
        if not (number := self.received(step)):
            return
        name = signal.Signals(number).name
        if self._saved_already(step):
            log.warning("%s: exiting after step %d, which is saved", name, step)
        else:
            log.warning("%s: saving step %d, then exiting", name, step)
            with self._checkpointer.keeping():
                self._checkpointer.save(step, model, optim, train_state, **options)
        raise SystemExit(128 + number if self._status is None else self._status)

    def received(self, step: int) -> int:
        """Return the number of a signal that any rank received, or 0. Every rank makes the call."""
        if step % self._every:
            return 0
        ranks = open_ranks(self._checkpointer.process_group)
        return ranks.exchange(lambda: self._received, lambda found: everyone(max(found), ranks.size))

    def _saved_already(self, step: int) -> bool:
        """Wait for the background save. Return whether this checkpointer has last saved ``step``."""
        self._checkpointer._settle()
        return self._checkpointer.saved_step == step and not self._checkpointer.has_loaded(step)
