"""The package: its names, types and version, and the contents of a fresh clone."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import casckpt
from casckpt import _version

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
    number = re.fullmatch(r"(\d+\.\d+\.\d+)(?:(?:a|b|rc)\d+)?(\.dev0)?(?:\+g[0-9a-f]{8})?", casckpt.__version__)
    assert number
    installed = importlib.metadata.version("casckpt")  # when .venv was made
    assert installed.partition("+")[0] == casckpt.__version__.partition("+")[0]
    sections = re.findall(r"^## (\S+)\n\n(.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0][0] == number[1]
    assert [text == "Not released yet." for _, text in sections[:2]] == [bool(number[2]), False]
    readme, (released, _) = (ROOT / "README.md").read_text(), sections[bool(number[2])]
    assert f"version {released}" in readme
    assert f"version = {{{released}}}" in readme


def git(folder: Path, *command: str | Path) -> str:
    """Run git in a folder, and return what it prints."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


HOW = ["a branch", "a packed branch", "a commit", "a worktree", "a clone", "no commit", "no checkout"]


@pytest.mark.parametrize("how", HOW)
def test_a_development_version_names_the_commit_of_its_checkout(how: str, tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    if how != "no checkout":
        git(root, "init")
    if not how.startswith("no "):
        git(root, "commit", "--allow-empty", "-m", "one")
    if how == "a packed branch":
        git(root, "pack-refs", "--all")
    if how == "a commit":
        git(root, "checkout", "--detach")
    if how == "a worktree":
        git(root, "worktree", "add", "-b", "team/other", tmp_path / "other")
        git(tmp_path / "other", "commit", "--allow-empty", "-m", "two")
        root = tmp_path / "other"
    if how == "a clone":
        git(tmp_path, "clone", root, "cloned")
        root = tmp_path / "cloned"
    commit = "" if how.startswith("no ") else f"+g{git(root, 'rev-parse', 'HEAD')[:8]}"
    assert _version._with_commit("1.2.3.dev0", root) == f"1.2.3.dev0{commit}"
    assert _version._with_commit("1.2.3", root) == "1.2.3"


def test_a_wheel_says_the_version_of_its_commit_wherever_it_is_installed(tmp_path: Path) -> None:
    """It is built from an sdist, which is not a checkout."""
    for what, of in (("sdist", ROOT), ("wheel", tmp_path)):
        command = [sys.executable, "-m", "hatchling", "build", "--target", what, "--directory", str(tmp_path)]
        subprocess.run(command, cwd=next(of.glob("casckpt-*/"), of), check=True, capture_output=True)
        if what == "sdist":
            shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path, filter="data")
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name == f"casckpt-{casckpt.__version__}-py3-none-any.whl"
    with ZipFile(wheel) as files:
        text = files.read("casckpt/_version.py").decode()
    assert "Path" not in text
    assert f'__version__ = "{casckpt.__version__}"' in text


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "casckpt/py.typed").read_bytes() == b""


def test_a_wheel_contains_only_the_package() -> None:
    """Hatchling includes all files of the package that git does not ignore."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["casckpt"]}
    inside = [path for path in (ROOT / "casckpt").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.name for path in inside if path.suffix != ".py"} == {"py.typed"}
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
    assert {"s3", "transformers"} <= asked


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
