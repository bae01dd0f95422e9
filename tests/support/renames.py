"""Extracts the suggested ``rename`` from an error or a warning, as a user would copy it."""

from __future__ import annotations

import ast


def rename_in(text: str) -> dict[str, str]:
    """Return the literal after ``rename=``. Raise ValueError if there is none."""
    start = text.index("rename={") + len("rename=")
    for end in (at + 1 for at, character in enumerate(text) if character == "}" and at > start):
        try:
            found: dict[str, str] = ast.literal_eval(text[start:end])
        except (SyntaxError, ValueError):
            continue  # a brace inside a pattern
        return found
    raise ValueError(text)
