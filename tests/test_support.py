"""The list of helpers in tests/support/__init__.py is complete, and each of them says what it is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import support

MODULES = [path for path in Path(__file__).parent.glob("support/*.py") if path.stem != "__init__"]


def test_the_list_of_helpers_names_every_module_once() -> None:
    rows = re.findall(r"^    ([a-z_, ]+): ", support.__doc__ or "", re.MULTILINE)
    assert sorted(", ".join(rows).split(", ")) == sorted(path.stem for path in MODULES)


def test_every_helper_says_what_it_is_for() -> None:
    assert [path.stem for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []
