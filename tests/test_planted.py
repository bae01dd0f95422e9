"""The bugs that tools/mutants plants have a place to be planted, and tests to be noticed by."""

from __future__ import annotations

import re

import pytest

import _draw
import _mutants
from planted import PLANTED, Planted
from tests.test_packaging import ROOT


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: str(planted.name))
def test_a_planted_bug_has_its_place(planted: Planted) -> None:
    text = (ROOT / planted.file).read_text()
    assert text.count(planted.before) == 1
    for name in planted.tests.split():
        assert (ROOT / name).is_file()


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

ROWS = _mutants.rows(_mutants.PAGE.read_text())
TESTS = {name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}


def test_the_table_has_the_bugs_that_are_planted() -> None:
    assert list(ROWS) == [one.name for one in PLANTED], "run: tools/mutants --table, with a word of what is new"


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_the_default_run_kills_each_by_a_test_that_is_there(row: str) -> None:
    _, quick, default, full = row.strip("| ").split(" | ")
    assert default != "none"
    assert full == "the same"
    assert (quick != "none") == (default == "the same")
    for file, test in re.findall(r"`(\w+\.py)::(?:\w+::)*(\w+)`", row):
        assert list((ROOT / "tests").rglob(file))
        assert test in TESTS
