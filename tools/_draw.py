"""Places for bugs, drawn by a seed: ``tools/mutants --draw`` plants them. Each is one small edit of one statement."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

EDGES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
EQUAL = {ast.Eq: ">=", ast.NotEq: ">"}
ORDERED = {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "cast",
    "next",
    "iter",
    "min",
    "max",
    "zip",
    "partial",
}
TWINS = ["min max", "any all", "start stop", "lo hi", "first last", "offset size", "rank world_size", "keys names"]
TWINS += ["offset length", "offset nbytes", "isdisjoint issubset", "startswith endswith", "removeprefix removesuffix"]
TWIN = {one: other for pair in TWINS for one, other in (pair.split(), pair.split()[::-1])}


OFTEN = [
    *["missing condition", "off by one", "wrong operand"] * 3,
    *["call left out"] * 2,
    "key",
    "swapped",
    "stale",
    "lock",
]
NO_CODE = {"annotation", "returns", "decorator_list", "bases", "type"}


class Edit(NamedTuple):
    """``new`` in place of the bytes from ``start`` to ``stop`` of a file."""

    kind: str
    start: int
    stop: int
    new: str


class Source:
    """A module's text and tree, and the bytes at which its nodes lie."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_bytes()
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """From where to where a node goes."""
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        return self._lines[first] + node.col_offset, self._lines[last] + node.end_col_offset  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        """Its text."""
        return self.text[slice(*self.span(node))].decode()

    def edits(self) -> Iterator[Edit]:
        """All that can be drawn here; what only words an error, a log or a type is left alone."""
        nodes: list[ast.AST] = [ast.parse(self.text)]
        while nodes:
            node = nodes.pop()
            if not self._only_words(node):
                nodes += (child for name, child in _children(node) if name not in NO_CODE)
                yield from (Edit(kind, *self.span(at), new) for kind, at, new in self._of(node))

    def _only_words(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Expr):
            node = node.value
        named = self.of(node.func).startswith(("log.", "warn", "super()")) if isinstance(node, ast.Call) else False
        return named or isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)

    def _of(self, node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
        of = self.of
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in EDGES:
                yield "off by one", node, f"{of(left)} {EDGES[type(op)]} {of(right)}"
            case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=int()) as right]) if (
                type(op) in EQUAL
            ):
                yield "off by one", node, f"{of(left)} {EQUAL[type(op)]} {of(right)}"
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv()):
                if not any(isinstance(side, ast.JoinedStr | ast.List) for side in (left, node.right)):
                    yield "off by one" if isinstance(node.right, ast.Constant) else "wrong operand", node, of(left)
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                for left_out in values:
                    rest = word.join(of(value) for value in values if value is not left_out)
                    yield "missing condition", node, f"({rest})"
            case ast.If(test=test, orelse=[]):
                yield "missing condition", test, "False"
            case ast.IfExp(body=body, orelse=orelse):
                yield "missing condition", node, of(body)
                yield "missing condition", node, of(orelse)
            case ast.Tuple(elts=[first, second, *rest], ctx=ast.Load()):
                others = "".join(f", {of(one)}" for one in rest)
                yield "key", node, f"({of(second)}, {of(second)}{others})"
                yield "key", node, f"({of(first)}, {of(first)}{others})"
            case ast.Call(args=[first, second, *_], func=func) if (
                not any(isinstance(x, ast.Starred) for x in node.args) and of(func) not in ORDERED
            ):
                text = of(node)
                head, tail = of(node.func), text[self.span(second)[1] - self.span(node)[0] :]
                yield "swapped", node, f"{head}({of(second)}, {of(first)}{tail}"
            case ast.Call(func=ast.Name(id="sorted"), args=[only]):
                yield "wrong operand", node, f"list({of(only)})"
            case ast.keyword(value=ast.Constant(value=bool(value))):
                yield "wrong operand", node.value, str(not value)
            case ast.Slice(lower=lower, upper=upper) if lower or upper:
                yield "off by one", node, of(lower) + ":" if lower and upper else ":"
            case ast.With(items=[ast.withitem(context_expr=lock)]) if "lock" in of(lock):
                yield "lock", lock, "__import__('contextlib').nullcontext()"
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield "call left out", node, "pass"
            case ast.Delete() | ast.Assign(targets=[ast.Attribute()], value=ast.Constant()):
                yield "stale", node, "pass"
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in TWIN:
                yield "wrong operand", node, of(node).removesuffix(name) + TWIN[name]

    def lines(self, edit: Edit) -> tuple[str, str]:
        """The lines that an edit changes, and as they are then; so many that they stand once in the file."""
        first = self.text.rfind(b"\n", 0, edit.start) + 1
        last = self.text.find(b"\n", edit.stop) + 1
        while self.text.count(self.text[first:last]) > 1:
            first = self.text.rfind(b"\n", 0, first - 1) + 1
        after = self.text[first : edit.start] + edit.new.encode() + self.text[edit.stop : last]
        return self.text[first:last].decode(), after.decode()


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The nodes below, each with the name of its field."""
    for name, value in ast.iter_fields(node):
        yield from (
            (name, child) for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
        )


def draw(paths: Sequence[Path], count: int, seed: int) -> Iterator[tuple[Path, str, str, str]]:
    """``count`` of them, evenly over ``paths`` and over kinds: the file, the kind, the lines before and after."""
    chance, drawn = random.Random(seed), set[tuple[Path, Edit]]()  # noqa: S311
    kinds: list[dict[str, list[tuple[Source, Edit]]]] = [defaultdict(list) for _ in paths]
    for path, by_kind in zip(paths, kinds, strict=True):
        for file in sorted(path.rglob("*.py")) or [path]:
            source = Source(file)
            for edit in source.edits():
                by_kind[edit.kind].append((source, edit))
    while len(drawn) < count:
        by_kind = kinds[len(drawn) % len(kinds)]
        source, edit = chance.choice(by_kind[chance.choice([kind for kind in OFTEN if kind in by_kind])])
        if (source.path, edit) not in drawn:
            drawn.add((source.path, edit))
            yield source.path, edit.kind, *source.lines(edit)
