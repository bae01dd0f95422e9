"""Moving averages for a follower. Each one is in a store of its own, which is removed after the next one.

The store holds ``exact@0`` in the dtypes in which the average is computed, with the decay as metadata, from which the
next one continues, and ``rounded@0`` in the dtypes of the run, for the export.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Damaged, InvalidInput, Mismatch, MissingKey, NotFound, Refused
from casckpt.frontends.merging import merge
from casckpt.plan.averages import fraction, terms_of
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from casckpt.tensors.dtypes import dtype_name

log = logging.getLogger("casckpt")


@dataclass(frozen=True)
class MovingAverage:
    """The exponential moving average of ``run`` of ``store``. ``keys``: patterns for what to average.

    ``decay``: the weight of the earlier average at each checkpoint.
    """

    store: Store
    run: str
    decay: str
    keys: Sequence[str]

    def advance(self, before: Path | None, after: str, newest: Checkpoint, folder: Path) -> Checkpoint:
        """Store the average of all checkpoints up to ``newest`` in ``folder``, and return it.

        It continues the average in ``before``, if it exists, whose newest checkpoint has the id ``after``. A new one
        begins after the last checkpoint with other keys or shapes. Checkpoints that are damaged, gone, or marked
        unhealthy are left out. ``newest`` is not marked; if it is damaged or gone, this raises Damaged, Refused or
        NotFound. Raises MissingKey, Mismatch, and the errors of `held_in`.
        """
        exact = None if before is None else self.held_in(before)
        try:
            arrivals = self.store.watch(self.run, after=after if exact else "start", timeout="0s")
        except NotFound:  # a different store has replaced this one
            exact, arrivals = None, self.store.watch(self.run, after="start", timeout="0s")
        new = _up_to(newest, (arrival.checkpoint for arrival in arrivals))
        while True:
            try:
                return self._fold(exact, new, folder)
            except (Damaged, Refused, NotFound) as error:
                if before is not None and exact is not None and exact.id in error.checkpoints:
                    raise _is_damaged(before) from error
                rest = [one for one in new if one.id not in error.checkpoints]
                if rest == new or rest[-1:] != [newest]:
                    raise
                log.error("the average of %s leaves out a checkpoint: %s", self.run, error)
                new = rest
            except (MissingKey, Mismatch) as error:
                why, _, advice = str(error).rpartition(": ")
                if "select other keys" not in advice:  # all checkpoints fit together
                    raise
                if exact is None and new[1:] and "keep=" not in advice:
                    log.warning("the average of %s begins after step %d: %s", self.run, new[0].step, why)
                    new = new[1:]
                    continue
                begin = "" if exact is None else "begin a new average in a different folder, or "
                raise type(error)(f"{why}: {begin}select other keys with keys= (--keys)", key=error.key) from error

    def held_in(self, folder: Path) -> Checkpoint | None:
        """Return the unrounded average in a folder, or None if there is none.

        Raises InvalidInput if it is damaged, or has a different decay.
        """
        store = _store_in(folder)
        try:
            exact = store.get("exact@0") if "exact@0" in store else None
        except (Damaged, Refused) as error:
            raise _is_damaged(folder) from error
        decay = self.decay if exact is None else exact.metadata["ema"]
        if fraction(decay, "ema") != fraction(self.decay, "ema"):
            raise InvalidInput(
                f"the average in {folder} has the decay {decay}, not {self.decay}: choose an empty folder, or pass "
                f"ema:{decay}"
            )
        return exact

    def _fold(self, exact: Checkpoint | None, new: Sequence[Checkpoint], folder: Path) -> Checkpoint:
        shutil.rmtree(folder, ignore_errors=True)
        store, keys = _store_in(folder), list(self.keys) or None
        chosen = [*([] if exact is None else [exact]), *new]
        metadata = {"ema": self.decay}
        exact = merge(
            store, chosen, run="exact", step=0, ema=self.decay, keys=keys, metadata=metadata,
            dtype_of=lambda _, computed_in: dtype_name(computed_in),
        )  # fmt: skip
        own = {key: tensor.dtype for key, tensor in new[-1].tensors.items()}
        return merge(store, [exact], run="rounded", step=0, keys=keys, dtype_of=lambda name, _: own[name[1]])


def _up_to(newest: Checkpoint, arrivals: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the arrivals up to ``newest``, without unhealthy ones. Raises NotFound if ``newest`` is not among them."""
    new = list[Checkpoint]()
    for checkpoint in arrivals:
        if checkpoint.healthy is False:
            log.warning("the average leaves out %s@%d: it is marked unhealthy", checkpoint.run, checkpoint.step)
        else:
            new.append(checkpoint)
        if checkpoint.id == newest.id:
            return new
    # what arrived after it does not count now, because the next average begins there
    raise NotFound(f"{newest.run}@{newest.step} was forgotten before it was averaged")


def _is_damaged(folder: Path) -> InvalidInput:
    return InvalidInput(f"the average in {folder} is damaged: delete this folder, and a new average begins")


def _store_in(folder: Path) -> Store:
    return open_store(folder / "store", cache_dir=folder / "cache")


def moving_average(store: Store, run: str, rule: str, keys: Sequence[str]) -> MovingAverage:
    """Return the moving average by a rule such as "ema:0.99". Raises InvalidInput."""
    name, _, decay = rule.partition(":")
    if name != "ema":
        raise InvalidInput(f"merge={rule!r:.40} is not valid: pass ema:DECAY, such as ema:0.99")
    terms_of(1, ema=decay)  # checks the decay
    return MovingAverage(store, run, decay, keys)
