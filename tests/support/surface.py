"""The public surface: stored fields and tags, JSON keys, keywords, and error kinds.

It is extracted from the source of a checkout, so that versions can be compared.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

Surface = dict[str, list[str]]


def surface(root: Path) -> Surface:
    """Return sorted strings by kind. ``root``: the root folder of a checkout."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((root / "casckpt").rglob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    stored = [node for path, tree in trees.items() if "format" in path.parts for node in tree.body]
    structs = [node for node in stored if isinstance(node, ast.ClassDef) and _bases(node) & {"Struct", "Record"}]
    typed = {node.name: node for node in classes if "TypedDict" in _bases(node)}
    while more := {node.name: node for node in classes if _bases(node) & typed.keys() and node.name not in typed}:
        typed |= more
    return {
        "stored": sorted({", ".join([*_tags(node), *sorted(_fields(node))]) for node in structs}),
        "keywords": sorted({f"{name}: {key}" for name in typed for key in _keywords(name, typed)}),
        "errors": sorted(_error_kinds(trees[root / "casckpt" / "errors.py"])),
        "json": sorted(_json_keys((root / "docs" / "cli.md").read_text())),
    }


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def _keywords(name: str, typed: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Return the keys of a TypedDict and of its bases."""
    yield from _fields(typed[name])
    for base in _bases(typed[name]) & typed.keys():
        yield from _keywords(base, typed)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def _tags(node: ast.ClassDef) -> list[str]:
    return [f"tag={ast.unparse(word.value)}" for word in node.keywords if word.arg == "tag"]


def _error_kinds(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            values = {ast.unparse(one.targets[0]): one.value for one in node.body if isinstance(one, ast.Assign)}
            kind, status = (ast.unparse(values[name]) if name in values else "" for name in ("kind", "exit_status"))
            yield f"{node.name}: {kind} {status}".strip()


def _json_keys(page: str) -> Iterator[str]:
    """Return the keys in docs/cli.md. A test compares the table on that page with the output of the commands."""
    yield from set(re.findall(r"`(\w+)`", page[page.index("## JSON output") : page.index("## Shell completion")]))
