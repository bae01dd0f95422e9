"""The room on the store's disk for the saves of a run: foreseen, kept free, and made when a save meets a full disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from math import inf

from casckpt.base.units import format_duration, format_size, parse_size
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, StorageError
from casckpt.frontends.trainer.ownership import RunOwnership
from casckpt.frontends.trainer.saves import Events, Janitor, of_checkpoint
from casckpt.frontends.trainer.settings import TrainerSettings
from casckpt.plan.retention import Rotation
from casckpt.store.store import Store

log = logging.getLogger(__name__)

_SEEN = 3  # saves
_ADVICE = "With gc=True and a rule such as max_checkpoints=2, a Checkpointer frees what they do not keep, and retries"


def space_of(store: Store, run: str, *, gc: bool, min_free: str | int | None) -> RunSpace:
    """Return the space of a run whose checkpoints a framework removes by its own rules. Raises InvalidInput."""
    settings = TrainerSettings(run=run, gc=gc, min_free=min_free)
    return RunSpace(store, settings, RunOwnership(store, run, settings.rotation), Events(None), Janitor(store))


class RunSpace:
    """Looks after the room for the saves of one run; see `casckpt.saving.options.Space`. Used on rank 0 only.

    ``ownership``: says which checkpoints may go. ``events``: receives those that go to make room.
    """

    def __init__(
        self, store: Store, settings: TrainerSettings, ownership: RunOwnership, events: Events, janitor: Janitor
    ) -> None:
        self._store, self._settings, self._ownership = store, settings, ownership
        self._events, self._janitor = events, janitor
        self._has_warned = False

    @property
    def bytes_free(self) -> int | None:
        """The free bytes of the store's disk, or None if the storage does not know, as in a bucket."""
        return self._store.repository.storage.bytes_free()

    def check(self, nbytes: Callable[[], int]) -> None:
        """Raise StorageError, as on a full disk, if the next save would go below ``min_free``."""
        free = self.bytes_free
        if self._settings.min_free is None or free is None:
            return
        kept = self._checkpoints()
        need = max(self._written(kept), default=0) if kept else nbytes()
        lacking = need + parse_size(str(self._settings.min_free)) - free
        if lacking > 0:
            raise StorageError(
                f"{self._store.url} has {format_size(free)} free: {format_size(lacking)} more are needed "
                f"for a save of up to {format_size(need)} that leaves min_free={self._settings.min_free!r}. Free some "
                "space, or lower min_free",
                full=True,
            )

    def free(self) -> str:
        """Remove what the rules do not keep, and what failed saves left, at once. Without ``gc``, only say what helps.

        A checkpoint that the training went back to remains, because the rules would let it go only after a save.
        Without rules, a second save is worth a try only if the gc has freed something.
        """
        if not self._settings.gc:
            return _ADVICE
        among = self._ownership.removable - self._ownership.went_back_to
        for checkpoint in self.rotate(self._settings.rotation, among, "on a full disk")[0]:
            self._events.emit(of_checkpoint("forgotten", checkpoint))
        freed = self._janitor.gc(self._settings.run)
        if not freed and self._settings.rotation.changes_nothing:
            return _ADVICE
        min_age = self._store.settings.min_age if self._store.repository.is_there() else None
        held = f"; min_age keeps what is forgotten for {format_duration(min_age.total_seconds())}" if min_age else ""
        log.warning(
            "a save of run %s met a full disk; gc freed %s of %s, and the save is tried once more%s",
            self._settings.run, format_size(freed), self._store.url, held,
        )  # fmt: skip
        return ""

    def rotate(self, rotation: Rotation, among: Set[str], when: str) -> tuple[list[Checkpoint], list[Checkpoint]]:
        """Forget and thin checkpoints ``among`` these ids. Return both. Errors are only logged."""
        gone, thinned = list[Checkpoint](), list[Checkpoint]()
        try:
            gone = self._store.rotate(self._settings.run, rotation, among)
            thinned = self._store.thin_now(self._settings.run, rotation.thin, among)
        except CasckptError as error:
            log.warning("retention %s failed: %s", when, error)
        return gone, thinned

    def foresee(self, nbytes: int) -> None:
        """Warn once, before the first step, if the coming saves do not fit. ``nbytes``: the size of the state."""
        try:
            free = self.bytes_free
            if self._has_warned or free is None:
                return
            kept = self._checkpoints()
            saves, each = (self._coming(kept), max(self._written(kept), default=0)) if kept else (1, nbytes)
            need = saves * each + parse_size(str(self._settings.min_free or 0))
            if need > free and need > free + self._freed_by_gc():
                self._has_warned = True
                log.warning(
                    "%s has %s free, but run %s needs %s for its next saves (%d of up to %s). Free some space before a "
                    "save fails",
                    self._store.url, format_size(free), self._settings.run, format_size(need), saves, format_size(each),
                )  # fmt: skip
        except CasckptError as error:
            log.info("casckpt cannot tell whether the saves of run %s fit: %s", self._settings.run, error)

    def _coming(self, kept: Sequence[Checkpoint]) -> int:
        """Return how many further saves take up more space, at least: until the rules remove as many as are saved."""
        settings, rules = self._settings, self._settings.rotation
        if rules.thin is not None:
            return 1
        counted = [one for one in kept if not (one.ephemeral or one.step in rules.fixed)]
        most = max(rules.max_checkpoints or 0, (rules.keep and rules.keep.keep_last) or 0)
        until_full = inf if rules.is_empty else most + 1 - len(counted)
        last, interval = settings.last_step, settings.save_interval
        until_end = inf if last is None or interval is None else last // interval - kept[-1].step // interval
        more = min(until_full, until_end)
        return 1 if more == inf else max(0, int(more))

    def _freed_by_gc(self) -> int:
        freed = self._store.sizes().freed() if self._store.exists() else None
        return 0 if freed is None else freed.now + freed.later

    def _checkpoints(self) -> list[Checkpoint]:
        return self._store.checkpoints(self._settings.run) if self._store.repository.is_there() else []

    @staticmethod
    def _written(kept: Sequence[Checkpoint]) -> list[int]:
        """Return how many bytes the last saves wrote, without a run's first save, which can reuse nothing."""
        return [one.stats.bytes_written for one in kept if one.commit.committed.parent is not None][-_SEEN:]
