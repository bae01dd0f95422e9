"""The common part of all hooks that DCP calls: their errors travel to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from casckpt.ranks.messages import portable
from casckpt.saving.exit_status import note_if_late

P = ParamSpec("P")
T = TypeVar("T")


def hook(method: Callable[P, T]) -> Callable[P, T]:
    """Raise only what comes back from a pickle: DCP sends errors so, and ranks wait for ever for one that does not.

    What fails when the program is ending already is told: DCP drops it with the future.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            note_if_late(error)
            found = portable(error)
            if found is error:
                raise
            raise found from error

    return call
