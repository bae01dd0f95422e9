"""Versions of casckpt work in one store at the same time, and a run moves from one to another and back.

``tests/data/wheels`` has a wheel of each minor version. A release adds its own: see docs/contributing.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support import fleets
from tests.support.fleets import ERR, OUT

ROOT = Path(__file__).resolve().parent.parent
WHEELS = sorted((ROOT / "tests/data/wheels").glob("*.whl"))
assert WHEELS, "without a wheel, pytest would skip these tests"
LAST = 6
PROGRAM = ROOT / "tests/support/fleet.py"


@pytest.fixture(params=WHEELS, ids=lambda wheel: wheel.name.split("-")[1])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with an older version of casckpt."""
    with ZipFile(request.param) as archive:
        archive.extractall(tmp_path / "older")
    return tmp_path / "older"


class Fleet:
    """Runs `PROGRAM` with versions of casckpt, as forks of one process."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self.server, self.folder = server, folder

    def run(self, *jobs: tuple[object, ...]) -> list[str]:
        """Return the outputs of programs that ran at the same time and succeeded.

        Each job consists of the folder of a version and the arguments.
        """
        assert self.server.stdin
        assert self.server.stdout
        outputs = [self.folder / str(number) for number in range(len(jobs))]
        sent = [
            (str(library), str(PROGRAM), [*map(str, arguments)], str(output))
            for (library, *arguments), output in zip(jobs, outputs, strict=True)
        ]
        print(json.dumps(sent), file=self.server.stdin, flush=True)
        statuses = json.loads(self.server.stdout.readline())
        told = "\n".join(output.with_suffix(ERR).read_text() for output in outputs)
        assert statuses == [0] * len(jobs), told
        return [output.with_suffix(OUT).read_text() for output in outputs]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", fleets.__file__]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        assert server.stdin
        server.stdin.close()  # this ends it


@pytest.fixture
def fleet(server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(server, tmp_path_factory.mktemp("outputs"))


def work_together(fleet: Fleet, one: Path, other: Path, store: Path) -> None:
    """Save, watch, thin and collect with two versions at the same time. Then read everything with both."""
    fleet.run((one, "create", store, "-", 0, 0))
    fleet.run(
        (one, "save", store, "one", 1, LAST),
        (other, "save", store, "other", 1, LAST),
        (one, "watch", store, "other", 1, LAST),
        (other, "watch", store, "one", 1, LAST),
        (one, "keep", store, "other", 1, LAST),
        (other, "keep", store, "one", 1, LAST),
    )
    for library in (one, other):
        for run in ("one", "other"):
            fleet.run((library, "read", store, run, 1, LAST))


def test_two_versions_work_in_one_store_at_the_same_time(fleet: Fleet, older: Path, tmp_path: Path) -> None:
    work_together(fleet, older, ROOT, tmp_path / "store")


def test_a_run_is_upgraded_and_goes_back(fleet: Fleet, older: Path, tmp_path: Path) -> None:
    mixed = [
        fleet.run((library, "train", tmp_path / "mixed", "sft", step, step + 1))
        for step, library in ((1, older), (3, ROOT), (5, older), (7, ROOT))
    ]
    alone = fleet.run((ROOT, "train", tmp_path / "alone", "sft", 1, 8))
    assert mixed[-1] == alone


def test_an_incompatible_field_is_found(fleet: Fleet, older: Path, tmp_path: Path) -> None:
    """A record whose field older versions do not find makes their programs fail."""
    shutil.copytree(ROOT / "casckpt", tmp_path / "later" / "casckpt")
    records = tmp_path / "later" / "casckpt/format/records.py"
    text, planted = records.read_text(), '    head: str = msgspec.field(name="planted")\n'
    begin = text.index("class Committed(")
    records.write_text(text[:begin] + text[begin:].replace("    head: str\n", planted, 1))
    assert planted in records.read_text()
    fleet.run((tmp_path / "later", "save", tmp_path / "store", "one", 1, 2))
    with pytest.raises(AssertionError, match="head"):
        fleet.run((older, "read", tmp_path / "store", "one", 1, 2))
