"""Which values of a run are stored as pickles: said once, when the first of them is saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from casckpt.format.draft import ObjectEntry
from casckpt.format.tree import listed

log = logging.getLogger(__name__)
_NAMED: Final = 8
_said: Final[set[tuple[str, str, str]]] = set()  # in this process


def say_pickled(url: str, run: str, objects: Iterable[ObjectEntry]) -> None:
    """Name those of ``objects`` in the log that are pickles, and were not named of this run before."""
    new = {(url, run, one.key) for one in objects if one.pickled} - _said
    if not new:
        return
    _said.update(new)
    keys = sorted(key for _, _, key in new)
    log.warning(
        "%s in %s: stored as pickles: %s. They are no plain data, or bytes that a planner made; a load needs "
        "allow_pickle=True for what torch's restricted unpickler does not know. This is said once",
        run,
        url,
        listed(keys, _NAMED),
    )
