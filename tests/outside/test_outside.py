"""tools/outside on a small project: counts, differences, and their reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from _outside import NOT_STORED, counts_of, differences, explained, outcomes, parsed, ran, version_of
from tests.outside import frame

PROJECT = """
import subprocess, sys
import pytest
from jotter import jot, read

def test_reads_back(tmp_path):
    jot({"a": 1}, tmp_path / "x")
    assert read(tmp_path / "x") == {"a": 1}

def test_writes_a_file(tmp_path):
    jot({}, tmp_path / "x")
    assert (tmp_path / "x").is_file()

def test_in_another_process(tmp_path):
    subprocess.run([sys.executable, "-c", "import jotter; jotter.jot({}, 'y')"], check=True, cwd=tmp_path)

def test_checks_types():
    with pytest.raises(TypeError):
        jot(1, "z")

@pytest.mark.skip
def test_skipped(): ...

@pytest.fixture
def broken():
    yield
    raise OSError("no rest")

def test_cleans_up(broken): ...
"""
JOTTER = """
import json

def jot(values, path):
    if not isinstance(values, dict):
        raise TypeError
    path = str(path)
    open(path, "w").write(json.dumps(values))

def read(path):
    return json.load(open(path))
"""
ADAPTER = """
TESTS = ["tests"]
SOURCE = "src"
SAVES = ["jotter.jot"]
REASONS = {r"writes_a_file: passed, then failed: .*is_file": "casckpt writes no file", "never": "never"}

def install(store):
    import casckpt
    import jotter

    def jot(values, path):
        if not isinstance(values, dict):
            raise TypeError
        casckpt.open(store()).save(values, run="jots", step=1)

    jotter.jot = jot
    jotter.read = lambda path: casckpt.open(store()).read("jots@1")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a checkout with one commit, beside its adapter."""
    for name, text in {"tests/test_jots.py": PROJECT, "src/jotter.py": JOTTER, "../adapter.py": ADAPTER}.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git = ["git", "-C", str(tmp_path / "checkout"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    return tmp_path / "checkout"


def test_a_difference_needs_a_reason_and_each_save_a_store(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take seconds to import
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    adapter = project.parent / "adapter.py"
    plain, ours = (ran(adapter, project, sys.executable, [], casckpt=casckpt) for casckpt in (False, True))
    assert (counts_of(plain), counts_of(ours)) == ("4 / 1 / 1", "3 / 2 / 1")
    found = list(differences(plain, ours))
    assert [(test.rpartition("::")[2], what) for test, what in found[:1]] == [("test_checks_types", NOT_STORED)]
    assert [test.rpartition("::")[2] for test, _ in found] == ["test_checks_types", "test_writes_a_file"]
    reasons = {r"writes_a_file: passed, then failed: .*is_file": "casckpt writes no file", "never": "never"}
    counts, problems = explained(found, reasons)
    assert counts == {"casckpt writes no file": 1}
    assert problems == [f"no reason: tests/test_jots.py::test_checks_types: {NOT_STORED}", "explains nothing: never"]
    saving = {test.rpartition("::")[2]: outcome.stored for test, outcome in ours.items() if outcome.saved}
    assert saving == {
        "test_checks_types": False, "test_in_another_process": True, "test_reads_back": True, "test_writes_a_file": True
    }  # fmt: skip


def test_tests_run_in_a_copy_of_their_folder_even_if_some_cannot_be_imported(project: Path) -> None:
    (project / "tests" / "test_writes.py").write_text("def test_writes(): open('here', 'x')")
    (project / "tests" / "test_broken.py").write_text("import nothing_has_this_name")
    adapter = project.parent / "adapter.py"
    adapter.write_text(
        ADAPTER.replace('TESTS = ["tests"]', 'TESTS = ["test_broken.py", "test_writes.py"]\nFOLDER = "tests"')
    )
    found = ran(adapter, project, sys.executable, [], casckpt=False)
    assert {test: outcome.result for test, outcome in found.items()} == {
        "test_broken.py": "failed", "test_writes.py::test_writes": "passed"
    }  # fmt: skip
    assert not (project / "tests" / "here").exists()


def test_an_adapter_is_imported_once_so_that_its_classes_can_be_pickled(project: Path) -> None:
    adapter = project.parent / "adapter.py"
    assert frame.load(adapter) is frame.load(adapter)


def test_a_test_that_only_one_run_has_is_a_difference() -> None:
    lines = [json.dumps({"test": test, "what": "passed", "error": ""}) for test in ("a", "b")]
    assert list(differences(outcomes(lines), outcomes(lines[:1]))) == [("b", "runs only without casckpt")]


def test_the_version_is_a_commit_or_the_name_of_a_folder(project: Path) -> None:
    assert len(version_of(project)) == 8
    assert version_of(project.parent) == project.parent.name


def test_what_follows_two_dashes_is_for_pytest() -> None:
    asked, arguments = parsed(["torch-dcp", "--source", ".", "--table", "--", "-k", "hf"])
    assert (asked.name, asked.source, asked.table, arguments) == ("torch-dcp", Path(), True, ["-k", "hf"])


def test_a_missing_source_and_a_python_without_pytest_end_with_a_message(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(["torch-dcp", "--source", str(tmp_path / "none")])
    assert f"--source {tmp_path / 'none'} is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="pytest ended with status 1, and ran no test"):
        ran(project.parent / "adapter.py", project, "/bin/false", [], casckpt=False)
