from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest

import casckpt
from casckpt.loading.options import LoadArguments, LoadOptions, MatchArguments, ReadArguments
from casckpt.saving.options import SaveArguments, SaveOptions


@pytest.mark.parametrize(
    ("call", "names", "options"),
    [
        ("save", SaveArguments, SaveOptions),
        ("load", LoadArguments, LoadOptions),
        ("read", ReadArguments, LoadOptions),
        ("pre_download", MatchArguments, LoadOptions),
    ],
)
def test_every_option_has_a_default_and_is_documented(call: str, names: Any, options: Any) -> None:
    described = inspect.getdoc(getattr(casckpt.Store, call)) or ""
    assert [name for name in names.__annotations__ if f"``{name}``" not in described] == []
    defaults = {one.name for one in fields(options) if one.default is not MISSING}
    assert names.__annotations__.keys() <= defaults
