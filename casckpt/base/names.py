"""Checks for run names, steps, attachment names, and the parts of references."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any, TypeAlias

from casckpt.base.digest import hex_digest
from casckpt.errors import InvalidInput

MAX_STEP = 2**63 - 1
MAX_METRICS = 64
MAX_METRIC_NAME = 100
LATEST = "latest"
TAG = "tag:"
ID = re.compile("[0-9a-f]{6,64}")
"""The parts of references. See `casckpt.contents.refs`."""
HEADS = "casckpt.heads/"
"""The prefix of attachments in which older versions described imported files. Exports do not write them."""
HUB_FILE = "casckpt.hub.json"
"""The attachment that defines the names of files and tensors in an export. It has one view for each model."""
_SIMILAR, _ALMOST = 5, 0.8
_MAX_ATTACHMENT_NAME = 1024
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_MONTHS = ("(?:0[1-9]|1[0-2])(?:0[1-9]|1[0-9]|2[0-8])", "(?:0[13-9]|1[0-2])(?:29|30)", "(?:0[13578]|1[02])31")
_DAY = rf"(?!0000)(?:[0-9]{{4}}(?:{'|'.join(_MONTHS)})|{_LEAP_YEAR}0229)"
_TIME = "(?:[01][0-9]|2[0-3])[0-5][0-9][0-5][0-9][0-9]{6}"
TXID = rf"{_DAY}T{_TIME}Z-[0-9a-f]{{16}}-[0-9a-f]{{16}}-(?:0|[1-9][0-9]{{0,18}})"
"""A txid whose time exists. It uses no \\d, which matches all Unicode digits."""
_TXID_RE = re.compile(TXID)
_RUN_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_DATE_RE = re.compile("20[0-9]{2}([-_.]?)[01][0-9]\\1[0-3][0-9]")
_UNFIT_RE = re.compile("[\0-\x1f\\\\\ud800-\udfff]")  # UTF-8 cannot encode lone surrogates

Runs: TypeAlias = str | Sequence[str] | None
"""Names of runs, or fnmatch patterns of names. None for all runs."""


def is_among(run: str, runs: Runs) -> bool:
    """Return whether ``runs`` includes a run."""
    return runs is None or any(fnmatchcase(run, one) for one in ([runs] if isinstance(runs, str) else runs))


def is_reference(text: str) -> bool:
    """Return whether ``text`` has the form of a reference, and not that of a path."""
    is_one = "@" in text or text == LATEST or text.startswith(TAG) or ID.fullmatch(text.lower()) is not None
    return is_one and not text.startswith(("/", "."))


def is_txid(text: str) -> bool:
    """Return whether ``text`` has the form of a txid."""
    return _TXID_RE.fullmatch(text) is not None


def run_hash(run: str) -> str:
    """Return the 16 hex digits that represent a run's name in a txid."""
    return hex_digest(run.encode())[:16]


def check_run(run: str) -> str:
    """Return ``run`` if it is a valid run name. Otherwise, raise `InvalidInput`."""
    if type(run) is not str or not _RUN_RE.fullmatch(run):
        raise InvalidInput(
            f"run {run!r} is not a valid name: use up to 200 of A-Z a-z 0-9 . _ - /, starting with a letter or digit"
        )
    return run


def check_new_run(run: str) -> str:
    """Do the same for a run to save to."""
    if run == LATEST:
        raise InvalidInput(f"run {run!r} means the newest checkpoint of all runs; choose a different name")
    return check_run(run)


def check_step(step: Any) -> int:
    """Return ``step`` as an int. Raises `InvalidInput` if it is not a valid step."""
    if isinstance(step, bool) or not isinstance(step, Integral) or not 0 <= int(step) <= MAX_STEP:
        raise InvalidInput(f"step {step!r} is not valid: pass an int from 0 to 2**63 - 1")
    return int(step)  # may be a numpy integer


def check_attachment_name(name: str) -> str:
    """Return ``name`` if it is a relative path without "..". Otherwise, raise `InvalidInput`."""
    if not is_attachment_name(name):
        raise InvalidInput(f"attachment name {name!r} is not valid: pass a relative path without '..', in UTF-8")
    return name


def is_attachment_name(name: Any) -> bool:
    """Return whether ``name`` is a relative path without ".." in which all characters are allowed in file names."""
    if type(name) is not str or len(name) > _MAX_ATTACHMENT_NAME or _UNFIT_RE.search(name):
        return False
    return not any(part in ("", ".", "..") for part in name.split("/"))


def similar(name: str, others: Sequence[str]) -> list[str]:
    """Return the ``others`` that ``name`` may mean: it is almost equal, has the same letters, or begins them.

    Case is ignored. Names with different digits are different on purpose, such as those of a sweep, but not those
    that differ in a date or time: a job that was started again has another one.
    """
    mine = name.casefold()
    close = difflib.get_close_matches(mine, [other.casefold() for other in others], _SIMILAR, _ALMOST)

    def is_meant(other: str) -> bool:
        is_near = other in close or other.startswith(mine) or sorted(other) == sorted(mine)
        return (is_near and _digits(other) == _digits(mine)) or _undated(other) == _undated(mine)

    return [other for other in others if other != name and is_meant(other.casefold())][-_SIMILAR:]


def _undated(name: str) -> str:
    return re.sub("[0-9]", "0", name) if _DATE_RE.search(name) else name


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def check_keywords(call: str, given: Mapping[str, object], known: type) -> None:
    """Raise Python's usual TypeError for ``call`` if a keyword is not in the TypedDict ``known``."""
    for name in given:
        if name not in known.__annotations__:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
