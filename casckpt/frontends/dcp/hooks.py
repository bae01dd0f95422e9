"""The decorator for all hooks that DCP calls. It makes their errors safe to send to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from casckpt.ranks.messages import portable
from casckpt.saving.exit_status import note_if_late

P = ParamSpec("P")
T = TypeVar("T")


def hook(method: Callable[P, T]) -> Callable[P, T]:
    """Ensure that a method raises only errors that can be pickled. If DCP fails to pickle an error, ranks wait forever.

    An error that occurs while the program exits is logged, because DCP drops it along with the future.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            note_if_late(error)
            sendable = portable(error)
            if sendable is error:
                raise
            raise sendable from error

    return call
