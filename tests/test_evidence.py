"""Counts of tests are added up and written into docs/reliability.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from _evidence import BEGIN, END, PAGE, ROWS, added, figures, soaked, soaked_on, with_table
from _filesystems import TABLE, TESTS
from _result_table import ResultTable
from casckpt.errors import StorageError
from planted import PLANTED
from tests.model.protocol.explorer import TOO_LARGE, Verdict
from tests.support.faulty import Call, FaultyStore, call_first, fail_before, look_on
from tests.support.repositories import memory

EMPTY = f"before\n{BEGIN}{END}after\n"


def test_counts_of_evidence_are_added_up_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASCKPT_TALLY", str(tmp_path / "tally"))
    storage = FaultyStore(memory(), [fail_before("put", times=3)])
    for _ in range(3):
        with pytest.raises(StorageError):
            storage.put("a", b"")
    storage.put("a", b"")
    assert figures(added((tmp_path / "tally").read_text()))["fault: fail before"] == "3"


def test_observers_and_truncated_explorations_are_not_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASCKPT_TALLY", str(tmp_path / "tally"))
    seen: list[Call] = []
    FaultyStore(memory(), [look_on("put", seen.append), call_first("put", seen.append)]).put("a", b"")
    assert len(seen) == 2
    for broken in (TOO_LARGE, "something is lost", "something is lost", ""):
        Verdict(broken, 10)
    counted = figures(added((tmp_path / "tally").read_text()))
    told = {"fault: call something": "1", "models that are UNSAFE": "2", "models that are SAFE": "1"}
    assert counted == told | {"states of models": "40", "planted": str(len(PLANTED))}


def test_a_figure_on_the_page_is_kept_until_it_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(
        json.dumps({"save": 1234, "seconds": 5400, "load": 2, "load under a lease": 3})
    )
    soaks = {"soak in a bucket": "2025-12-31, 123 to 456"}
    counted = figures(added("5 states of models\n"), [tmp_path])
    first = with_table(EMPTY, counted, "tools/evidence", "2026-01-01, abc", soaks)
    page = with_table(first, figures(added("7 states of models\n")), "tools/evidence tests/model", "later, def")
    rows = [line.split(" | ") for line in page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]]
    told = {row[0].removeprefix("| "): (row[1], row[2], row[3]) for row in rows}
    assert told["checked states of the protocol models"] == (
        "7",
        "`tools/evidence tests/model`",
        "later, def |",
    )
    assert told["soak in a bucket"][0].startswith(
        "1.50 hours; 1,234 saves (0 revoked by a gc); 5 loads (3 under a lease)"
    )
    assert told["soak in a bucket"][1:] == ("`tools/soak`", "2025-12-31, 123 to 456 |")
    assert told["planted bugs that the default run detects"][2] == "2026-01-01, abc |"  # the bugs were not replanted
    (tmp_path / "store").mkdir()
    assert "; 5 loads (3 under a lease) and 0 updates, all compared; " in soaked(tmp_path)["soak in a folder"]
    (tmp_path / "failures").write_text("{}")
    with pytest.raises(SystemExit, match="nothing was written"):
        soaked(tmp_path)
    assert list(told) == [what for what in ROWS if what in told]
    assert page.startswith("before\n")
    assert page.endswith("after\n")


def test_a_soak_result_names_the_commits_that_were_tested(tmp_path: Path) -> None:
    runs = [{"commit": "123", "time": 0}, {"commit": "456", "time": 86400}]
    (tmp_path / "runs").write_text("".join(f"{json.dumps(one)}\n" for one in runs))
    assert soaked_on(tmp_path) == "1970-01-02, 123 to 456"
    (tmp_path / "runs").write_text(f"{json.dumps(runs[1])}\n" * 2)
    assert soaked_on(tmp_path) == "1970-01-02, 456"
    (tmp_path / "runs").write_text(f"{json.dumps({'commit': None, 'time': None})}\n{json.dumps(runs[1])}\n")
    assert soaked_on(tmp_path) == "1970-01-02, earlier ones to 456"


def test_the_page_contains_its_table() -> None:
    assert PAGE.read_text().count(BEGIN) == 1


def test_a_result_replaces_the_earlier_one_with_the_same_versions() -> None:
    table = ResultTable("versions", ("Python", "torch", "failed"), keys=2)
    page = "before\n<!-- versions -->\n<!-- end of versions -->\nafter\n"
    for row in [("3.13", "2.13.0", "1"), ("3.13", "2.9.1", ""), ("3.9", "2.13.0", "0"), ("3.13", "2.13.0", "0")]:
        page = table.with_row(page, row)
    assert page.splitlines() == [
        "before",
        "<!-- versions -->",
        "| Python | torch | failed |",
        "|---|---|---|",
        "| 3.9 | 2.13.0 | 0 |",
        "| 3.13 | 2.9.1 |  |",
        "| 3.13 | 2.13.0 | 0 |",
        "<!-- end of versions -->",
        "after",
    ]


def test_the_page_contains_the_table_of_file_systems_and_their_tests_exist() -> None:
    assert PAGE.read_text().count(f"<!-- {TABLE.name} -->\n| {' | '.join(TABLE.columns)} |\n") == 1
    assert [path for path in TESTS if not (PAGE.parent.parent / path).exists()] == []
