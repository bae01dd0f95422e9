"""tools/which-test finds functions by the end of their names, and finds their tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverage import CoverageData

import _which_test
from planted import PLANTED
from tests.test_packaging import ROOT


@pytest.mark.parametrize(
    "name", ["CommitList.live", "folding.CommitList.live", "casckpt.history.folding.CommitList.live"]
)
def test_a_function_is_found_by_a_unique_part_of_its_name(name: str) -> None:
    assert [function for _, function in _which_test.functions(name)] == ["CommitList.live"]


def test_a_name_may_match_several_functions_or_none() -> None:
    assert len(_which_test.functions("newest_settings")) == 1 < len(_which_test.functions("settle"))
    assert _which_test.functions("live_long") == {}


def test_which_test_names_tests_that_kill_bugs_and_that_call_a_function() -> None:
    bug = next(one for one in PLANTED if one.name == "a save reuses blobs that only a purged checkpoint names")
    file, _, _ = bug.place()
    assert any(bug.name in one and "::test_" in one for one in _which_test.planted_in(file, bug.function))
    function = "newest_reusable"
    tests = [*_which_test.naming(function)]
    assert tests
    assert all((ROOT / one.partition("::")[0]).is_file() for one in tests)


def test_which_test_names_the_tests_that_ran_the_body_of_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_which_test, "RECORD", tmp_path / "record")
    data = CoverageData(str(tmp_path / "record"))
    for context, lines in {
        "": [3, 4],
        "tests/test_a.py::test_one|run": [4],
        "tests/test_a.py::test_two|run": [3, 5],
    }.items():
        data.set_context(context)
        data.add_lines({str(ROOT / "casckpt/base/lazy.py"): lines})
    data.write()
    assert [*_which_test.recorded("casckpt/base/lazy.py", (3, 4))] == ["tests/test_a.py::test_one"]
