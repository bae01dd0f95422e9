"""Folders and files that training programs write come back complete: names, bytes, permission bits and links."""

from __future__ import annotations

from pathlib import Path

import pytest

import casckpt
from tests.support.program_folders import PROGRAMS, STARTS_PROCESSES
from tests.support.trees import same_tree

pytestmark = pytest.mark.filterwarnings("ignore")  # the programs warn about devices, formats and each other


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.process] * (name in STARTS_PROCESSES)) for name in PROGRAMS]
)
def test_what_a_program_writes_comes_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "given"
    folder.mkdir()
    checkpoint = PROGRAMS[name](folder)
    store = casckpt.open(tmp_path / "store")
    for step, given in enumerate((checkpoint, folder)):
        made = store.import_files(given, run="a", step=step)
        store.export(made, tmp_path / "out" / str(step), format="files")
        same_tree(given, tmp_path / "out" / str(step))
