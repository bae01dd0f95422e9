"""The ``rename`` that an error or a warning suggests."""

from __future__ import annotations

import ast
import re

_NAME = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PAIR = re.compile(f"{_NAME} here looks like {_NAME} there")


def pair_in(text: str) -> tuple[str, str]:
    """Return the names here and there that the text shows."""
    found = _PAIR.search(text)
    assert found is not None, text
    return ast.literal_eval(found[1]), ast.literal_eval(found[2])


def rename_for(text: str) -> dict[str, str]:
    """Return the rule that a user writes after reading the two names. It replaces what is before their equal end."""
    here, there = (name.split(".") for name in pair_in(text))
    while here and there and here[-1] == there[-1]:
        here, there = here[:-1], there[:-1]
    before, after = ("".join(f"{part}." for part in parts) for parts in (here, there))
    return {f"{re.escape(before)}(.*)": after.replace("\\", r"\\") + r"\1"}
