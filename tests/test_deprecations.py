"""A deprecated name says what replaces it, and ends after one minor version: see docs/promises.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version
from typing_extensions import deprecated

from casckpt import __version__

ROOT = Path(__file__).resolve().parent.parent
MESSAGE = re.compile(r"use `[^`]+`; ends in (\d+\.\d+)")
"""What the decorator ``typing_extensions.deprecated``, and ``deprecated=`` of click, are called with."""


def problems(source: str, version: Version) -> Iterator[str]:
    """Yield what is wrong with the deprecations in a module of this version."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        is_decorator = ast.unparse(node.func).rpartition(".")[2] == "deprecated"
        given = [*node.args[:1]] if is_decorator else [word.value for word in node.keywords if word.arg == "deprecated"]
        for value in given:
            found = MESSAGE.fullmatch(str(value.value)) if isinstance(value, ast.Constant) else None
            if not found:
                yield f"{ast.unparse(value)} does not have the form 'use `NAME`; ends in 0.5'"
            elif version.release >= Version(found[1]).release:
                yield f"{ast.unparse(value)}: remove what was deprecated"


def test_every_deprecation_names_its_replacement_and_is_not_over() -> None:
    paths = (ROOT / "casckpt").rglob("*.py")
    found = [f"{path}: {why}" for path in paths for why in problems(path.read_text(), Version(__version__))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ('@deprecated("use `load`; ends in 0.5")\ndef read(): ...', []),
        ('@deprecated("old")\ndef read(): ...', ["'old' does not have the form"]),
        ('@click.option("--all", deprecated=True)\ndef read(): ...', ["True does not have the form"]),
        ('@click.option("--all", deprecated="use `--every`; ends in 0.4")\ndef read(): ...', ["remove what was"]),
    ],
)
def test_bad_deprecations_are_found(source: str, wanted: list[str]) -> None:
    found = list(problems(source, Version("0.4.0.dev0")))
    assert len(found) == len(wanted)
    assert all(part in why for part, why in zip(wanted, found, strict=True))


def test_a_deprecated_function_warns_and_works_as_before() -> None:
    @deprecated("use `load`; ends in 0.5")
    def read() -> int:
        return 1

    with pytest.warns(DeprecationWarning, match="use `load`; ends in 0.5"):
        assert read() == 1
