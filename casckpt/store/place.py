"""The place of one checkpoint for front ends that expect a folder: a store, run and step."""

from __future__ import annotations

import os
from dataclasses import dataclass

from casckpt.base.names import check_run, check_step
from casckpt.store.store import Store


@dataclass(frozen=True, slots=True)
class At:
    """The place of a checkpoint: a run and a step of a store. As text: ``STORE#RUN@STEP``."""

    store: Store | str | os.PathLike[str]
    run: str
    step: int

    def __str__(self) -> str:
        url = self.store.url if isinstance(self.store, Store) else os.fspath(self.store)
        return f"{url}#{self.run}@{self.step}"


def at(store: Store | str | os.PathLike[str], *, run: str, step: int) -> At:
    """Return the place of a checkpoint. Raises InvalidInput for an unusable run or step."""
    return At(store, check_run(run), check_step(step))
