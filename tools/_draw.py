"""Bugs at random positions: see ``tools/mutants --draw``. Each bug is one small edit of one statement."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from _places import NoPlace, Planted, around
from planted import PLANTED

Edit: TypeAlias = tuple[str, int, int, str]  # the kind, the first and last byte to replace, and the new text

_EDGES: dict[type, str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_PAIRS = ("min max", "any all", "lo hi", "start stop", "first last", "startswith endswith", "removeprefix removesuffix")
_TWINS = {one: other for pair in _PAIRS for one, other in (pair.split(), pair.split()[::-1])}
_NO_CODE = {"annotation", "returns", "decorator_list", "bases", "type"}  # fields of syntax nodes
_WORDS = ("log.", "warn", "super()", "isinstance", "getattr", "hasattr", "cast", "next", "min", "max", "zip")


class Source:
    """A module, and all edits of it that can be drawn."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_bytes()
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _span(self, node: Any) -> tuple[int, int]:
        first, last = self._lines[node.lineno - 1], self._lines[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def _of(self, node: ast.AST) -> str:
        return self.text[slice(*self._span(node))].decode()

    def edits(self) -> Iterator[Edit]:
        """Return all edits, except those in error messages, log messages and types."""
        nodes: list[ast.AST] = [ast.parse(self.text)]
        while nodes:
            node = nodes.pop()
            called = node.value if isinstance(node, ast.Expr) else node
            if isinstance(called, ast.Call) and self._of(called.func).startswith(_WORDS[:3]):
                continue
            if not isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
                fields = (value for name, value in ast.iter_fields(node) if name not in _NO_CODE)
                values = [one for value in fields for one in (value if isinstance(value, list) else [value])]
                nodes += (one for one in values if isinstance(one, ast.AST))
                found = (*self._statements(node), *self._operands(node))
                yield from ((kind, *self._span(at), new) for kind, at, new in found)

    def _statements(self, node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
        match node:
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                for left_out in values:
                    kept = word.join(self._of(value) for value in values if value is not left_out)
                    yield "missing condition", node, f"({kept})"
            case ast.If(test=test, orelse=[]):
                yield "missing condition", test, "False"
            case ast.IfExp(body=body, orelse=orelse):
                yield from (("missing condition", node, self._of(one)) for one in (body, orelse))
            case ast.With(items=[ast.withitem(context_expr=lock)]) if "lock" in self._of(lock):
                yield "lock left out", lock, "__import__('contextlib').nullcontext()"
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield "call left out", node, "pass"
            case ast.Delete() | ast.Assign(targets=[ast.Attribute()], value=ast.Constant()):
                yield "stale state", node, "pass"

    def _operands(self, node: Any) -> Iterator[tuple[str, ast.AST, str]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _EDGES:
                yield "off by one", node, f"{self._of(left)} {_EDGES[type(op)]} {self._of(right)}"
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv(), right=right):
                yield "off by one" if isinstance(right, ast.Constant) else "wrong operand", node, self._of(left)
            case ast.Slice(lower=lower, upper=upper) if lower or upper:
                yield "off by one", node, f"{self._of(lower)}:" if lower and upper else ":"
            case ast.Tuple(elts=[first, second, *rest], ctx=ast.Load()):
                for one in (first, second):
                    yield "key", node, f"({', '.join(self._of(part) for part in (one, one, *rest))})"
            case ast.Call(func=func, args=[first, second, *_]) if not self._of(func).startswith(_WORDS):
                behind = self.text[self._span(second)[1] : self._span(node)[1]].decode()
                yield "swapped arguments", node, f"{self._of(func)}({self._of(second)}, {self._of(first)}{behind}"
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _TWINS and _TWINS[name].encode() in self.text:
                yield "wrong operand", node, self._of(node).removesuffix(name) + _TWINS[name]

    def planted(self, edit: Edit, tests: str) -> Planted:
        """Return the bug, with enough lines of context to make its text unique in the file.

        Raises SyntaxError if the edited program is invalid.
        """
        kind, start, stop, new = edit
        first, last = self.text.rfind(b"\n", 0, start) + 1, self.text.find(b"\n", stop) + 1
        while self.text.count(self.text[first:last]) > 1:
            first = self.text.rfind(b"\n", 0, first - 1) + 1
        after = self.text[first:start] + new.encode() + self.text[stop:last]
        ast.parse(self.text[:first] + after + self.text[last:])
        line = self.text.count(b"\n", 0, start) + 1
        name = f"{self.path}:{line}: {kind}: {after.decode().strip().splitlines()[-1].strip()}"
        text = self.text.decode()
        begin, end = (len(self.text[:offset].decode()) for offset in (first, last))
        return Planted(name, around(text, begin, end), text[begin:end], after.decode(), tests)


def draw(paths: Sequence[str], count: int, seed: int) -> Iterator[Planted]:
    """Draw ``count`` bugs, evenly over paths and kinds. Each gets the tests for the existing bugs in its file."""
    chance, tests = random.Random(seed), defaultdict[str, dict[str, None]](dict)  # noqa: S311 - nothing is secret
    for one in PLANTED:
        tests[one.place()[0]][one.tests.partition("::")[0]] = None
    kinds = [defaultdict[str, list[tuple[Source, Edit]]](list) for _ in paths]
    for path, by_kind in zip(map(Path, paths), kinds, strict=True):
        for source in [Source(file) for file in sorted(path.rglob("*.py")) or [path] if str(file) in tests]:
            for edit in source.edits():
                by_kind[edit[0]].append((source, edit))
        if not by_kind:
            raise ValueError(f"nothing is planted in {path}, so it is not known which tests are near")
    while count:
        by_kind = kinds[count % len(kinds)]
        source, edit = chance.choice(by_kind[chance.choice(sorted(by_kind))])
        with suppress(SyntaxError, NoPlace):
            bug = source.planted(edit, " ".join(tests[str(source.path)]))
            bug.place()
            yield bug
            count -= 1
