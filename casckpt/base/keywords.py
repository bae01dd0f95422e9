"""Check of keyword arguments that a call declares as a TypedDict."""

from __future__ import annotations

from collections.abc import Mapping


def check_keywords(call: str, given: Mapping[str, object], known: type) -> None:
    """Raise TypeError, as Python does for ``call``, for a keyword that the TypedDict ``known`` does not have."""
    for name in given:
        if name not in known.__annotations__:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
