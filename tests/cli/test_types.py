from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from casckpt.cli.types import SETTING
from tests.cli.conftest import Run


def test_the_error_for_a_storage_option_names_it(run: Run, saved: Path) -> None:
    assert "would do nothing: ['anon']" in run("list", saved, "--storage-option", "anon=true", status=1).stderr
    assert "KEY=VALUE" in run("list", saved, "--storage-option", "anon", status=2).stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=true", True),
        ("a=8", 8),
        ('a={"b": 1}', {"b": 1}),
        ("a=text", "text"),
        ('a="8"', "8"),
        ("a=x=y", "x=y"),
        ("a=", ""),
    ],
)
def test_values_of_storage_options_are_json_or_text(text: str, value: Any) -> None:
    assert SETTING.convert(text, None, None) == ("a", value)
