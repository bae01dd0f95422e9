"""The package: its names, types and version, and the contents of a fresh clone."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import casckpt

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = [name for name in casckpt.__all__ if name not in {"__version__", "errors"}]


def imported_for_types() -> dict[str, str]:
    """Map each name that casckpt/__init__.py imports only for type checkers to its module."""
    tree = ast.parse((ROOT / "casckpt/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in found for alias in node.names}


def functions(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the callables of a public name: itself, or the public methods of a class."""
    if not inspect.isclass(thing):
        yield thing.__name__, thing
        return
    for name, member in inspect.getmembers(thing):
        is_ours = inspect.isfunction(member) and member.__module__.startswith("casckpt")  # not those of UserDict
        if is_ours and (name == "__init__" or not name.startswith("_")):
            yield f"{thing.__name__}.{name}", member


def files() -> list[Path]:
    """Return all text files in a clone."""
    folders = ("casckpt", "tests", "tools", "docs", ".ci")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    local = {".venv.lock", ".coverage", ".git"}  # a file in a worktree
    beside = [path for path in ROOT.iterdir() if path.is_file() and path.name not in local]
    return [path for path in (*inside, *beside) if "__pycache__" not in path.parts and b"\0" not in path.read_bytes()]


def test_type_checkers_and_users_see_the_same_names() -> None:
    assert imported_for_types() == casckpt._HOME
    assert sorted([*casckpt._HOME, "__version__", "errors"]) == sorted(casckpt.__all__) == dir(casckpt)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    thing = getattr(casckpt, name)
    assert inspect.getdoc(thing), f"{name} has no docstring"
    for label, function in functions(thing):
        assert inspect.getdoc(function), f"{label} has no docstring"
        signature = inspect.signature(function)
        bare = [
            p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in {"self", "cls"}
        ]
        assert bare == [], f"{label} has parameters without a type"
        assert signature.return_annotation is not signature.empty, f"{label} has no return type"


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stroe'"):
        casckpt.Stroe  # noqa: B018 (to name it is the test)


def test_all_version_numbers_agree() -> None:
    assert casckpt.__version__ == importlib.metadata.version("casckpt")
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc|\.dev)\d+)?", casckpt.__version__)
    readme = (ROOT / "README.md").read_text()
    assert f"version {casckpt.__version__}" in readme
    assert f"version = {{{casckpt.__version__}}}" in readme
    assert f"\n## {casckpt.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "casckpt/py.typed").read_bytes() == b""


def test_a_wheel_contains_only_the_package() -> None:
    """Hatchling includes all files of the package that git does not ignore."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["casckpt"]}
    inside = [path for path in (ROOT / "casckpt").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.name for path in inside if path.suffix != ".py"} == {"py.typed", "style.css"}
    assert [path for path in inside if "test" in path.stem.split("_")] == []


def test_every_requested_extra_exists() -> None:
    known = set(PROJECT["optional-dependencies"])
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "casckpt").rglob("*.py")]
    asked = {
        extra
        for path in pages
        for found in re.findall(r"(?:casckpt|'\.)\[([a-z0-9,]+)\]", path.read_text())
        for extra in found.split(",")
    }
    assert asked <= known
    assert {"s3", "report", "transformers"} <= asked


def test_tested_versions_are_within_the_declared_ranges() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    wanted = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    assert len(pinned) == len(lines)
    for requirement in map(Requirement, wanted):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_no_file_contains_a_machine_name() -> None:
    machine = re.compile(r"(?:^|[\s\"'=(:`])/(?:work|farm|root|home|Users|opt)/|(?:extra-)?index-url|find-links")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if machine.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "name", ["tools/setup", "tools/check", "tools/test", "tools/demo", "tools/mutants", "tools/docs", ".ci/run"]
)
def test_every_tool_can_be_run(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert (ROOT / name).read_text().startswith("#!/usr/bin/env ")


def test_the_readme_begins_with_the_two_commands() -> None:
    top = (ROOT / "README.md").read_text()[:1500]
    assert "tools/demo" in top
    assert "tools/test" in top
