from __future__ import annotations

import json
import re
import time

import pytest

from casckpt.errors import InvalidInput
from casckpt.frontends.views.view_file import BoundedMatch, read_hub_names


@pytest.mark.parametrize(
    "pattern",
    ["", r"model\.layers\.(\d+)\.(.*)", r"(.+)\.a\(\*\)b", r"a.c(\d*)", "\u00e9\n"],
)  # fmt: skip
def test_a_simple_pattern_is_accepted(pattern: str) -> None:
    BoundedMatch("the view", [pattern], [])


@pytest.mark.parametrize(
    "pattern",
    ["(a|a)*b", "(a*)*b", "(?:a+)+", "(a){2}", "(a+)?*", r"(a)\1", "(?=a)a", "(?<=a)a", "(?i)a", r"a\b", "a*+",
     "(?>a*)", "a?", "a{9}", "[a]", "a|b", "x" * 1001, "(?#a)b", r"\Aa", "(?P=a)", "(?a:b)", "(.*)*", "(.*", r"\\d*"],
)  # fmt: skip
def test_a_pattern_that_is_not_simple_is_rejected(pattern: str) -> None:
    with pytest.raises(InvalidInput, match=r"(?s)the view was saved with the checkpoint.*only letters.*--view FILE"):
        BoundedMatch("the view", [pattern], [])


@pytest.mark.parametrize(("pattern", "longest"), [(r"(\d+)b", 3_999_999), ("(.*)(.*)", 2826), ("(.*)(.*)(.*)b", 286)])
def test_a_match_with_too_many_attempts_is_rejected(pattern: str, longest: int) -> None:
    match, compiled = BoundedMatch("the view", [pattern], []), re.compile(pattern)
    with pytest.raises(InvalidInput, match=r"(?s)the view was saved with the checkpoint.*too many ways.*--view FILE"):
        match(compiled, "a" * (longest + 1))
    match(compiled, "b" * longest)


def test_the_patterns_of_a_names_file_match_as_in_re() -> None:
    pattern = re.compile(r"(.*)\.layers\.(\d+)\.self_attn\.(.*)")
    match = BoundedMatch("the view", [pattern.pattern], [r"\1.\2"])
    name = "model.language_model.layers.17.self_attn.q_proj.weight"
    found = match(pattern, name)
    assert found is not None
    assert found.groups() == ("model.language_model", "17", "q_proj.weight")
    assert match(pattern, "lm_head.weight") is None


def test_matching_all_names_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    match, pattern = BoundedMatch("the view", ["a(.*)"], []), re.compile("a(.*)")
    assert match(pattern, "ab")
    now = time.thread_time()
    monkeypatch.setattr(time, "thread_time", lambda: now + 11)
    with pytest.raises(InvalidInput, match="take more than 10 s"):
        match(pattern, "ab")


def test_replacements_that_could_grow_without_bound_are_rejected() -> None:
    for name in ("\\1" * 21, "x" * 1001):
        with pytest.raises(InvalidInput, match=r"the name .* is too long"):
            BoundedMatch("the view", ["(.*)"], [name])


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
        b'{"views": {"model": {"rename": {"(a|a)*b": "x"}}}}',
        b'{"views": {"model": {"split": {"a": {"b": [[2, 1, 0]]}}}}}',
        json.dumps({"views": {f"m{number}": {} for number in range(101)}}).encode(),
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
