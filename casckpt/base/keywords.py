"""Keywords that a call takes as a TypedDict: one that it does not have is refused in the call's own name."""

from __future__ import annotations

from collections.abc import Mapping


def check_keywords(call: str, given: Mapping[str, object], known: type) -> None:
    """Raise TypeError, as Python itself would of ``call``, for a keyword that ``known``, a TypedDict, does not have."""
    for name in given:
        if name not in known.__annotations__:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
