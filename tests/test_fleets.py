"""Versions of casckpt work in one store at the same time, and a run moves from one to another and back.

``tests/data/wheels`` has a wheel of each minor version. A release adds its own: see docs/contributing.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHEELS = sorted((ROOT / "tests/data/wheels").glob("*.whl"))
assert WHEELS, "without a wheel, pytest would skip these tests"
LAST = 6
PROGRAM = ROOT / "tests/support/fleet.py"
SMALL = "import casckpt, sys; casckpt.open(sys.argv[1]).create(cell_bytes=4096, blob_bytes=65536)"


@pytest.fixture(params=WHEELS, ids=lambda wheel: wheel.name.split("-")[1])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with an older version of casckpt."""
    with ZipFile(request.param) as archive:
        archive.extractall(tmp_path / "older")
    return tmp_path / "older"


def started(library: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start the program with a version of casckpt."""
    environment = os.environ | {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """Return the outputs of programs that succeed. If one of them fails, end the others."""
    with ThreadPoolExecutor(len(processes)) as pool:
        outputs = {pool.submit(process.communicate, timeout=240): process for process in processes}
        for done in as_completed(outputs):
            if outputs[done].returncode != 0:
                for process in processes:
                    process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(
        done.result()[1] for done in outputs
    )
    return [done.result()[0] for done in outputs]


def work_together(one: Path, other: Path, store: Path) -> None:
    """Save, watch, thin and collect with two versions at the same time. Then read everything with both."""
    ended(started(one, "-c", SMALL, store))
    ended(
        started(one, PROGRAM, "save", store, "one", 1, LAST),
        started(other, PROGRAM, "save", store, "other", 1, LAST),
        started(one, PROGRAM, "watch", store, "other", 1, LAST),
        started(other, PROGRAM, "watch", store, "one", 1, LAST),
        started(one, PROGRAM, "keep", store, "other", 1, LAST),
        started(other, PROGRAM, "keep", store, "one", 1, LAST),
    )
    for library in (one, other):
        for run in ("one", "other"):
            ended(started(library, PROGRAM, "read", store, run, 1, LAST))


def test_two_versions_work_in_one_store_at_the_same_time(older: Path, tmp_path: Path) -> None:
    work_together(older, ROOT, tmp_path / "store")


def test_a_run_is_upgraded_and_goes_back(older: Path, tmp_path: Path) -> None:
    mixed = [
        ended(started(library, PROGRAM, "train", tmp_path / "mixed", "sft", step, step + 1))
        for step, library in ((1, older), (3, ROOT), (5, older), (7, ROOT))
    ]
    alone = ended(started(ROOT, PROGRAM, "train", tmp_path / "alone", "sft", 1, 8))
    assert mixed[-1] == alone


def test_an_incompatible_field_is_found(older: Path, tmp_path: Path) -> None:
    """A record whose field older versions do not find makes their programs fail."""
    shutil.copytree(ROOT / "casckpt", tmp_path / "later" / "casckpt")
    records = tmp_path / "later" / "casckpt/format/records.py"
    text, planted = records.read_text(), '    head: str = msgspec.field(name="planted")\n'
    begin = text.index("class Committed(")
    records.write_text(text[:begin] + text[begin:].replace("    head: str\n", planted, 1))
    assert planted in records.read_text()
    ended(started(tmp_path / "later", PROGRAM, "save", tmp_path / "store", "one", 1, 2))
    with pytest.raises(AssertionError, match="head"):
        ended(started(older, PROGRAM, "read", tmp_path / "store", "one", 1, 2))
