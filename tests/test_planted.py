"""The bugs that tools/mutants plants have a place to be planted, and tests to be noticed by."""

from __future__ import annotations

import re
from functools import cache

import pytest

import _draw
import _mutants
from planted import PLANTED
from tests.test_packaging import ROOT


def test_a_planted_bug_has_its_place() -> None:
    text = cache(lambda file: (ROOT / file).read_text())
    assert [one.name for one in PLANTED if text(one.file).count(one.before) != 1] == []
    assert {name for one in PLANTED for name in one.tests.split() if not (ROOT / name).is_file()} == set()


def test_names_are_told_apart() -> None:
    assert len({one.name for one in PLANTED}) == len(PLANTED)


def test_what_a_seed_draws_is_one_change_that_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    paths = ["casckpt/plan", "casckpt/frontends/dcp/schema.py"]
    drawn = list(_draw.draw(paths, 12, seed=1))
    assert drawn == list(_draw.draw(paths, 12, seed=1)) != list(_draw.draw(paths, 12, seed=2))
    assert [one.file.startswith(paths[number % 2]) for number, one in enumerate(drawn)] == [True] * 12
    for one in drawn:
        text = (ROOT / one.file).read_text()
        assert text.count(one.before) == 1
        compile(text.replace(one.before, one.after), one.file, "exec")
        assert all((ROOT / name).is_file() for name in one.tests.split())
    with pytest.raises(ValueError, match="not known which tests are near"):
        list(_draw.draw(["casckpt/frontends/dcp/hooks.py"], 1, seed=1))


# docs/testing.md


def test_the_table_has_the_bugs_that_are_planted() -> None:
    rows = _mutants.rows(_mutants.PAGE.read_text())
    assert list(rows) == [one.name for one in PLANTED], "run: tools/mutants --table, with a word of what is new"


def test_the_default_run_kills_each_by_a_test_that_is_there() -> None:
    paths = list((ROOT / "tests").rglob("*.py"))
    files = {path.name for path in paths}
    tests = {name for path in paths for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    for row in _mutants.rows(_mutants.PAGE.read_text()).values():
        _, quick, default, full = row.strip("| ").split(" | ")
        assert default != "none", row
        assert full == "the same", row
        assert (quick != "none") == (default == "the same"), row
        for file, test in re.findall(r"`(\w+\.py)::(?:\w+::)*(\w+)`", row):
            assert file in files, row
            assert test in tests, row
