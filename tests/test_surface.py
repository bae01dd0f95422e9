"""The public surface is complete: tests/data/surface.json lists the names at 0e24385 and 6ce87e2."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import commands
import pytest

from casckpt.cli.main import cli
from tests.test_packaging import ROOT

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


def options() -> list[str]:
    """Return the long options of all commands, such as "casckpt gc: --dry-run"."""
    found = {f"casckpt {name}": commands.command_of(name) for name in commands.names()}
    pairs = [(name, param) for name, command in (*found.items(), ("casckpt", cli)) for param in command.params]
    own = [f"{name}: {option}" for name, param in pairs for option in (*param.opts, *param.secondary_opts)]
    return [*own, *(f"{name}: --help" for name in (*found, "casckpt"))]


def is_there(name: str) -> bool:
    """Report whether a front end has a name, such as "dcp: StorageWriter". True if its package is not installed."""
    page, _, wanted = name.partition(": ")
    module = {"casckpt": "casckpt", "errors": "casckpt.errors", "README": ""}.get(page, f"casckpt.frontends.{page}")
    module = page if page.startswith("casckpt.") else module
    try:
        return hasattr(import_module(module), wanted)
    except ImportError:
        return find_spec(module) is not None


@pytest.mark.process  # front ends import packages that start processes
@pytest.mark.filterwarnings("ignore")  # from the imports of front ends
def test_every_public_name_is_listed() -> None:
    before = json.loads((ROOT / "tests" / "data" / "surface.json").read_text())
    now = {**surface(ROOT), "options": options(), "imports": list(filter(is_there, before["imports"]))}
    assert [f"{kind}: {name}" for kind, names in before.items() for name in names if name not in now[kind]] == []
