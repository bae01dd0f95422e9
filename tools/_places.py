"""Locations of planted bugs. A location names a function without its module, so bugs follow functions that move."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class NoPlace(Exception):
    """The text does not occur, or occurs more than once."""


@dataclass(frozen=True)
class Planted:
    """``before`` occurs once in ``function``. Replacing it with ``after`` is the bug.

    ``tests``: what detects it: a test, or files of tests.

    ``function``: the innermost scope that contains the text, as "function", "Class.method" or "Class", or "".
    """

    name: str
    function: str
    before: str
    after: str
    tests: str

    def place(self, root: Path = ROOT) -> tuple[str, int, int]:
        """Return the file (relative to ``root``) and the start and end of the text in it. Raises NoPlace."""
        found = []
        for name, text in _texts(root).items():
            ends = [(at, at + len(self.before)) for at in _all(self.before, text)]
            found += [(name, *span) for span in ends if around(text, *span) == self.function]
        if len(found) != 1:
            where = ", ".join(sorted({name for name, _, _ in found})) or "casckpt/"
            raise NoPlace(
                f"{self.name!r}: its text occurs {len(found)} times in {self.function or 'modules'} of {where}"
            )
        return found[0]


@cache
def _texts(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted((root / "casckpt").rglob("*.py"))}


def _all(part: str, text: str) -> list[int]:
    found, at = [], text.find(part)
    while at >= 0:
        found.append(at)
        at = text.find(part, at + 1)
    return found


@cache
def scopes(text: str) -> tuple[tuple[str, int, int], ...]:
    """Return (qualified name, start, end) of a module's functions and classes, in whole lines, outermost first."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = list[tuple[str, int, int]]()

    def visit(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([inner.lineno, *(one.lineno for one in inner.decorator_list)])
                name = f"{prefix}{inner.name}"
                found.append((name, starts[first - 1], starts[inner.end_lineno or 0]))
                visit(inner, f"{name}.")
            else:
                visit(inner, prefix)

    visit(ast.parse(text), "")
    return tuple(found)


def around(text: str, start: int, end: int) -> str:
    """Return the innermost function or class that contains part of a module, or ""."""
    inside = [name for name, first, last in scopes(text) if first <= start and end <= last]
    return inside[-1] if inside else ""


def lost() -> list[str]:
    """Return the problems of planted bugs that have no valid location."""
    from planted import PLANTED

    found = []
    for one in PLANTED:
        try:
            one.place()
        except NoPlace as error:
            found.append(f"tools/planted.py: {error}")
    return found


if __name__ == "__main__":
    print(*lost(), sep="\n", end="")
