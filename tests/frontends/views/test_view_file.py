from __future__ import annotations

import json
import re
from typing import Any

import pytest

from casckpt.errors import InvalidInput
from casckpt.frontends.views.view_file import read_hub_names
from casckpt.loading.options import renamer


def renamed(pattern: str, name: str = "x") -> bytes:
    return json.dumps({"views": {"model": {"rename": {pattern: name}}}}).encode()


@pytest.mark.parametrize(
    "pattern",
    ["", r"model\.layers\.(\d+)\.w", r"(\d+)\.(\d+)\.(\d+)\.(\d+)", re.escape("a(*) b-\u0663#\n9"), "x" * 1000],
)  # fmt: skip
def test_an_expression_with_numbers_is_accepted(pattern: str) -> None:
    read_hub_names(renamed(pattern, r"\g<1>" * 200), "the file")


@pytest.mark.parametrize(
    "pattern",
    ["(a|a)*b", "(a*)*b", "(?:a+)+", "(a){2}", "(a+)?*", r"(a)\1", "(?=a)a", "(?<=a)a", "(?i)a", r"a\b", "a*+",
     "(?>a*)", "a?", "a{9}", "[a]", "a|b", "x" * 1001, "(?#a)b", r"\Aa", "(?P=a)", "(?a:b)", "(.*)", "(.*", r"\\d*",
     "a.c", r"(\d*)", r"\d+", r"(\d+)(\d+)", r"(\d+)7", "(\\d+)\u0663", "(\\d+)\\\u0663"],
)  # fmt: skip
def test_an_expression_that_may_take_long_to_match_is_rejected(pattern: str) -> None:
    for text in (renamed(pattern), json.dumps({"views": {"model": {"split": {pattern: {"x": []}}}}}).encode()):
        with pytest.raises(InvalidInput, match="the file is not valid; export with --strip-prefix or --rename"):
            read_hub_names(text, "the file")


def test_accepted_expressions_match_in_linear_time() -> None:
    (view,) = read_hub_names(renamed(r"(\d+)a" * 100 + "b"), "the file").views
    rename = renamer(view.rules.rename)
    for name in ("9" * 1000, "9a" * 2000, "9" * 2000 + "a" * 2000, ("9" * 39 + "a") * 100):
        assert rename(name) == name


def test_replacements_that_could_grow_without_bound_are_rejected() -> None:
    long: Any = {"views": {"model": {"split": {"a": {"x" * 1001: []}}}}}
    for text in (renamed("a", "x" * 1001), json.dumps(long).encode()):
        with pytest.raises(InvalidInput, match="the file is not valid"):
            read_hub_names(text, "the file")


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"nothing",
        b"[" * 100_000,
        b'{"views": []}',
        b'{"views": {"../model": {}}}',
        b'{"views": {"/model": {}}}',
        b'{"views": {"model": {}, "other": {}}}',
        b'{"views": {"a/model": {}, "a/other": {}}}',
        b'{"views": {"model": {"rename": {"a": "\\ud800"}}}}',
        b'{"views": {"model": []}}',
        b'{"views": {"model": {"keys": "a"}}}',
        b'{"views": {"model": {"keys": [1]}}}',
        b'{"views": {"model": {"model": 1}}}',
        b'{"views": {"model": {"other": 1}}}',
        b'{"views": {"model": {"rename": {"a": 1}}}}',
        b'{"views": {"model": {"split": {"a": 1}}}}',
        b'{"views": {"model": {"split": {"a": {}}}}}',
        b'{"views": {"model": {"split": {"a": {"b": "c"}}}}}',
        b'{"views": {"model": {"split": {"a": {"b": [true]}}}}}',
        b'{"views": {"model": {"split": {"a": {"b": [[2, 1, 0]]}}}}}',
        json.dumps({"views": {f"m{number}": {} for number in range(1001)}}).encode(),
        b'{"notes": "x"}',
        b'{"notes": [1]}',
        b'{"tied": ["a"]}',
        b'{"tied": {"a": 1}}',
        b" " * (1 << 20) + b"{}",
    ],
    ids=lambda text: repr(text[:40]),
)
def test_an_invalid_names_file_is_rejected(text: bytes) -> None:
    with pytest.raises(InvalidInput, match="the file"):
        read_hub_names(text, "the file")


def test_a_valid_names_file_is_read() -> None:
    views = {"other/adapter_model": {"strip_prefix": "model", "keys": ["model.a*"]}, "model": {}}
    found = read_hub_names(json.dumps({"views": views, "notes": ["x"], "tied": {"a": "b"}}).encode(), "the file")
    assert [view.stem for view in found.views] == [*views]
    assert (found.views[0].rules.strip_prefix, found.views[0].rules.model) == ("model", True)
    assert (found.notes, found.tied) == (("x",), (("a", "b"),))
    assert read_hub_names(b"{}", "the file") == ((), (), ())
