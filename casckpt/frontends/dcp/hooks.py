"""What all hooks that DCP calls have in common: their errors travel to other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from casckpt.checkpoint.messages import portable
from casckpt.errors import InvalidInput

P = ParamSpec("P")
T = TypeVar("T")


def id_text(checkpoint_id: object) -> str:
    """A ``checkpoint_id`` of DCP's calls, a text or a path, as text. Raises InvalidInput for another one, as 6."""
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise InvalidInput(f"checkpoint_id={checkpoint_id!r:.80} is neither text nor a path; give 'RUN@STEP'")
    return str(os.fspath(checkpoint_id))


def hook(method: Callable[P, T]) -> Callable[P, T]:
    """Raise only what comes back from a pickle: DCP sends errors so, and ranks wait for ever for one that does not."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            found = portable(error)
            if found is error:
                raise
            raise found from error

    return call
