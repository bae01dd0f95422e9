"""The ids that DCP's calls are given: RUN@STEP, a step, or a path, as in loops that save into folders.

The number at the end of a path is its step, and all before it its run: ``/ckpt/step-500`` is step 500 of ``ckpt/step``.
A path without one, ``/ckpt/last``, is step 0 of ``ckpt/last``: a place that is saved to again and again.
"""

from __future__ import annotations

import os
import posixpath
import re
import string
from collections.abc import Callable

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from casckpt.base.names import check_run, check_step
from casckpt.contents.refs import is_reference
from casckpt.errors import InvalidInput
from casckpt.format.names import TxId

_STEP = re.compile(r"[0-9]{1,19}")
_PLACE = re.compile(r"(?P<run>.+)@(?P<step>[0-9]{1,19})", re.DOTALL)


def place_of(checkpoint_id: str | os.PathLike[str], run: str) -> tuple[str, int]:
    """(run, step) of the id of a save. ``run``: of an id that is a step alone. Raises InvalidInput."""
    text = _text(checkpoint_id)
    if _STEP.fullmatch(text):
        return run, check_step(int(text))
    found = _PLACE.fullmatch(text)
    if found:
        return check_run(found["run"]), check_step(int(found["step"]))
    if is_reference(text):
        raise InvalidInput(
            f"checkpoint_id={text!r} names no place in a store: a load would take it for a reference to what is there. "
            "Give 'RUN@STEP'"
        )
    return _place_of_path(text)


def reference_of(checkpoint_id: str | os.PathLike[str], run: str | None) -> str:
    """The reference that the id of a load stands for. ``run``: of a step alone; None leaves that as it is.

    Raises InvalidInput.
    """
    text = _text(checkpoint_id)
    if run is None if _STEP.fullmatch(text) else is_reference(text):
        return text
    run, step = place_of(text, run or "")
    return f"{run}@{step}"


def is_usable(of: Callable[[str | os.PathLike[str], str], object], checkpoint_id: str | os.PathLike[str]) -> bool:
    """Tell whether `place_of`, or `reference_of`, takes an id."""
    try:
        of(checkpoint_id, "default")
    except InvalidInput:
        return False
    return True


def _text(checkpoint_id: object) -> str:
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidInput(f"checkpoint_id={checkpoint_id!r:.80} is neither text nor a path; give 'RUN@STEP'")
    return text


def _place_of_path(text: str) -> tuple[str, int]:
    path = posixpath.normpath(text.replace("://", "/", 1)).lstrip("/")
    before = path.rstrip(string.digits)
    number = path[len(before) :]
    run = before.rstrip(string.punctuation) if number else path
    try:
        return check_run(run), check_step(int(number.lstrip("0")[:30] or "0"))
    except InvalidInput as error:
        raise InvalidInput(f"checkpoint_id={text!r} is taken for a path, but {error}; give 'RUN@STEP'") from error


def stamp(metadata: Metadata, run: str, step: int, txid: TxId) -> None:
    """Say in DCP's metadata which checkpoint they are of, and in which form."""
    metadata.storage_meta = StorageMeta(checkpoint_id=f"{run}@{step}", save_id=txid)
    if hasattr(metadata, "version"):  # older versions of torch know none
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
