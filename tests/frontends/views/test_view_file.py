from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.frontends.views.view_file import BoundedMatch, _check, read_hub_names, ways


@pytest.mark.parametrize(
    ("pattern", "repeats", "choices"),
    [
        ("", 0, 1),
        (r"model\.layers\.(\d+)\.(.*)", 2, 1),
        (r"(.*)\.(?:q|k|v)_proj\.(weight|bias)", 1, 6),
        (r"(?P<head>.*?)\.old", 1, 1),
        (r"^a?[^.]{2,3}$", 1, 2),
        (r"(_orig_mod\.)?[]x]+[^]]*", 2, 2),
        (r"a|b(c|d|e)", 0, 6),
    ],
)
def test_the_number_of_attempts_that_a_pattern_may_need_is_computed(pattern: str, repeats: int, choices: int) -> None:
    assert ways(pattern) == (repeats, choices)


@pytest.mark.parametrize(
    "pattern",
    ["(a|a)*b", "(a*)*b", "(?:a+)+", "(a){2}", "(a+)?*", r"(a)\1", "(?=a)a", "(?<=a)a", "(?i)a", r"a\b", "a*+",
     "(?>a*)", "(a?){9}", "[[a]", "a{1}{2}", "x" * 1001, "(?#a)b", r"\Aa", "(?P=a)", "(?a:b)"],
)  # fmt: skip
def test_a_pattern_with_unbounded_attempts_is_rejected(pattern: str) -> None:
    with pytest.raises(InvalidInput):
        ways(pattern)


@given(st.text("a", min_size=50, max_size=200), st.sampled_from(["a?", "a*", ".*?", "(a|a)", "(a*)?", "[a-c]{0,30}"]))
def test_a_match_with_too_many_attempts_is_rejected(name: str, piece: str) -> None:
    match = BoundedMatch("the view", {pattern := piece * 25 + "b"}, [])
    with pytest.raises(InvalidInput, match=r"(?s)the view was saved with the checkpoint.*too many ways.*--view FILE"):
        match(re.compile(pattern), name)


def test_a_match_does_not_exceed_the_computed_attempts() -> None:
    """In the worst case, `re` backtracks over every split of the letters among the repeats."""
    name = "a" * 12
    for repeats in range(1, 5):
        tried = sum(1 for _ in islice(splits(len(name), repeats), 10**6))
        assert tried == ways(".*" * repeats).of(name)


def splits(left: int, repeats: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to divide up to ``left`` letters among ``repeats``."""
    if not repeats:
        yield ()
        return
    for taken in range(left + 1):
        for rest in splits(left - taken, repeats - 1):
            yield (taken, *rest)


def test_the_patterns_of_a_names_file_match_as_in_re() -> None:
    pattern = re.compile(r"(.*)\.layers\.(\d+)\.(?:self_attn|mlp)\.(.*)")
    match = BoundedMatch("the view", {pattern.pattern}, [r"\1.\2"])
    name = "model.language_model.layers.17.self_attn.q_proj.weight"
    found = match(pattern, name)
    assert found is not None
    assert found.groups() == ("model.language_model", "17", "q_proj.weight")
    assert match(pattern, "lm_head.weight") is None


def test_matching_all_names_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    match, pattern = BoundedMatch("the view", {"a.*"}, []), re.compile("a.*")
    assert match(pattern, "ab")
    now = time.thread_time()
    monkeypatch.setattr(time, "thread_time", lambda: now + 11)
    with pytest.raises(InvalidInput, match="take more than 10 s"):
        match(pattern, "ab")


def test_replacements_that_could_grow_without_bound_are_rejected() -> None:
    for name in ("\\1" * 21, "x" * 1001):
        with pytest.raises(InvalidInput, match=r"the name .* is too long"):
            BoundedMatch("the view", {"(.*)"}, [name])


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


@pytest.mark.parametrize("field", ["rename", "split", "concat"])
def test_the_error_for_an_invalid_field_says_what_the_field_must_be(field: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field} is .*, but it must map .*regular expression"):
        _check("views.json", field, {"w": 1})
