"""Checkpoint ids in DCP calls: RUN@STEP, a step, or a path (for training loops that save into folders).

`hook` makes the errors of these calls safe to send to other ranks.

The number at the end of a path is the step, and the rest is the run: ``/ckpt/step-500`` is step 500 of ``ckpt/step``.
A path without a number, such as ``/ckpt/last``, is step 0 of ``ckpt/last``.
"""

from __future__ import annotations

import os
import posixpath
import re
import string
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from casckpt.base.exit_status import note_if_late
from casckpt.base.names import check_run, check_step, is_reference
from casckpt.errors import InvalidInput
from casckpt.format.names import TxId
from casckpt.ranks.messages import portable

_STEP = re.compile(r"[0-9]{1,19}")
_PLACE = re.compile(r"(?P<run>.+)@(?P<step>[0-9]{1,19})", re.DOTALL)


def place_of(checkpoint_id: str | os.PathLike[str], run: str) -> tuple[str, int]:
    """Return the run and step for a save's id.

    ``run``: the run to use if the id is only a step. Raises InvalidInput.
    """
    text = _text(checkpoint_id)
    if _STEP.fullmatch(text):
        return run, check_step(int(text))
    match = _PLACE.fullmatch(text)
    if match:
        return check_run(match["run"]), check_step(int(match["step"]))
    if is_reference(text):
        raise InvalidInput(
            f"checkpoint_id={text!r} cannot be the target of a save, because a load would read it as a reference. "
            "Pass 'RUN@STEP'"
        )
    return _place_of_path(text)


def reference_of(checkpoint_id: str | os.PathLike[str], run: str | None) -> str:
    """Return the reference for a load's id.

    Raises InvalidInput.
    """
    text = _text(checkpoint_id)
    if run is None if _STEP.fullmatch(text) else is_reference(text):
        return text
    run, step = place_of(text, run or "")
    return f"{run}@{step}"


def is_usable(of: Callable[[str | os.PathLike[str], str], object], checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether ``of``, which is `place_of` or `reference_of`, accepts an id."""
    try:
        of(checkpoint_id, "default")
    except InvalidInput:
        return False
    return True


def _text(checkpoint_id: object) -> str:
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidInput(f"checkpoint_id={checkpoint_id!r:.80} is neither a string nor a path; pass 'RUN@STEP'")
    return text


def _place_of_path(text: str) -> tuple[str, int]:
    path = posixpath.normpath(text.replace("://", "/", 1)).lstrip("/")
    before = path.rstrip(string.digits)
    number = path[len(before) :]
    run = before.rstrip(string.punctuation) if number else path
    try:
        return check_run(run), check_step(int(number.lstrip("0")[:30] or "0"))
    except InvalidInput as error:
        raise InvalidInput(f"checkpoint_id={text!r} looks like a path, but {error}; pass 'RUN@STEP'") from error


def stamp(metadata: Metadata, run: str, step: int, txid: TxId) -> None:
    """Write the checkpoint's name and DCP's version into DCP's metadata."""
    metadata.storage_meta = StorageMeta(checkpoint_id=f"{run}@{step}", save_id=txid)
    if hasattr(metadata, "version"):  # older versions of torch lack it
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)


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
