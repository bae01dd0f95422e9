"""Each planted bug has exactly one location in the code, and tests that detect it."""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from pathlib import Path

import page_tables
import pytest

import _draw
import _mutants
from _places import NoPlace, Planted, around, scopes
from planted import BUGS, PLANTED
from tests.test_packaging import ROOT


def test_the_code_that_each_planted_bug_changes_exists_and_the_change_compiles() -> None:
    for planted in PLANTED:
        file, start, end = planted.place()
        assert file.startswith("casckpt/")
        text = (ROOT / file).read_text()
        around_it = [(first, last) for _, first, last in scopes(text) if first <= start and end <= last]
        first, last = around_it[-1] if around_it else (0, len(text))
        ast.parse(textwrap.dedent(text[first:start] + planted.after + text[end:last]), planted.name)


def test_the_location_of_a_planted_bug_is_found_in_any_module(tmp_path: Path) -> None:
    method = "class Log:\n    def put(self):\n        return 1\n\n\ndef put():\n    return 1\n"
    module = tmp_path / "casckpt" / "deep" / "log.py"
    module.parent.mkdir(parents=True)
    module.write_text(method)
    bug = Planted("it puts nothing", "Log.put", "return 1", "return 0", "")
    start = method.index("return 1")
    assert bug.place(tmp_path) == ("casckpt/deep/log.py", start, start + len("return 1"))
    assert around(method, start, start + 8) == "Log.put"
    assert around(method, start, method.index("def put():")) == ""


@pytest.mark.parametrize(
    ("function", "text", "count"), [("put", "return 2", 0), ("get", "return 1", 0), ("put", "1", 2)]
)
def test_an_ambiguous_or_missing_location_of_a_planted_bug_is_rejected(
    tmp_path: Path, function: str, text: str, count: int
) -> None:
    (tmp_path / "casckpt").mkdir()
    for name in "ab":
        (tmp_path / "casckpt" / f"{name}.py").write_text("def put():\n    return 1\n")
    with pytest.raises(NoPlace, match=f"occurs {count} times in {function}"):
        Planted("a bug", function, text, "", "").place(tmp_path)


def test_each_planted_bug_has_an_existing_test() -> None:
    tests = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    for one in PLANTED:
        file, *_, test = one.tests.split("::")
        assert (ROOT / file).is_file(), file
        assert test in tests, f"run: tools/mutants --table {one.name!r}"  # perhaps inherited from another file


def test_names_of_planted_bugs_are_unique() -> None:
    assert (ROOT / "tools/planted.py").read_text().count(": (\n") == len(PLANTED)


@pytest.mark.sweep
def test_a_randomly_drawn_bug_is_one_change_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    paths = ["casckpt/plan", "casckpt/frontends/dcp/schema.py"]
    drawn = list(_draw.draw(paths, 12, seed=1))
    assert drawn == list(_draw.draw(paths, 12, seed=1)) != list(_draw.draw(paths, 12, seed=2))
    places = [one.place() for one in drawn]
    assert [file.startswith(paths[number % 2]) for number, (file, _, _) in enumerate(places)] == [True] * 12
    for one, (file, start, end) in zip(drawn, places, strict=True):
        text = (ROOT / file).read_text()
        compile(text[:start] + one.after + text[end:], file, "exec")
        assert all((ROOT / name).is_file() for name in one.tests.split())
    with pytest.raises(ValueError, match="not known which tests are near"):
        list(_draw.draw(["casckpt/frontends/dcp/ids.py"], 1, seed=1))


@pytest.mark.parametrize("bug", [PLANTED[0], PLANTED[-1]], ids=["first", "last"])
def test_a_new_test_that_kills_a_planted_bug_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Planted
) -> None:
    monkeypatch.setattr(_mutants, "LIST", tmp_path / "planted.py")
    known = (ROOT / "tools/planted.py").read_text()
    (tmp_path / "planted.py").write_text(known)
    _mutants.list_killer(bug, "tests/test_a.py::test_b")
    listed: dict[str, tuple[str, ...]] = runpy.run_path(str(tmp_path / "planted.py"))["BUGS"]
    assert {name: tests for name, (*_, tests) in listed.items() if tests != BUGS[name][-1]} == {
        bug.name: "tests/test_a.py::test_b"
    }


def test_the_site_lists_the_planted_bugs() -> None:
    table = page_tables.planted_bugs().splitlines()
    assert len(table) == 2 + len(PLANTED)
    assert f"| {PLANTED[0].name} | `{PLANTED[0].tests.removeprefix('tests/')}` |" in table
