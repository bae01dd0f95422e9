"""Folders that real libraries write are imported and exported, and these libraries load the result.

The site shows the table of these folders (tests/data/hub_folders.json). After a change, this program writes it:
``python -m tests.frontends.interchange.test_hub_folders``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import casckpt
from casckpt.frontends.convert import import_any, look_at
from tests.support.hub_folders import FOLDERS, HubFolder
from tests.support.safetensors_files import contents, same, served, unpacked
from tests.support.torch_versions import has_torch

TABLE = Path(__file__).parents[2] / "data" / "hub_folders.json"
_LEFT_OUT, _TORCH = "left out: ", (".bin", ".bin.index.json")


def came_back(folder: HubFolder, home: Path) -> dict[str, Any]:
    """Make, import, export and load a folder. Return its row of the table."""
    given, out = home / "hub" / "snapshots" / "given", home / "out"
    folder.make(given)
    store = casckpt.open(home / "store")
    made = import_any(store, look_at(given), step=1)
    assert store.export(made, out).notes == ()
    left_out = [note.removeprefix(_LEFT_OUT) for note in made.notes if note.startswith(_LEFT_OUT)]
    assert (len(made.notes) > len(left_out)) == (folder.library == "torchao")  # the note about its inner tensors
    expected = unpacked({name: data for name, data in contents(given).items() if name not in left_out})
    kept = {name: data for name, data in expected.items() if not name.endswith(_TORCH)}
    found = unpacked(contents(out))
    new = [name.replace("*", "") for name in found if name not in kept]
    assert {name: data for name, data in found.items() if name in kept} == kept
    assert bool(new) == (len(expected) > len(kept))
    assert same(folder.load(out), folder.load(given))
    assert unpacked(served(store, made)) == found
    found_as = {"layout": folder.layout, "library": folder.library, "as safetensors": sorted(new)}
    return found_as | {"left out": sorted(left_out)}


def _by_layout() -> Iterator[Any]:
    """Yield the folders. Without ``--full``, only the first of each layout and library is tested."""
    seen = set[tuple[str, str]]()
    for folder in FOLDERS:
        kind = folder.layout, folder.library
        yield pytest.param(folder, marks=pytest.mark.soak) if kind in seen else folder
        seen.add(kind)


@pytest.fixture(autouse=True)
def _quiet_and_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("folder", [*_by_layout()], ids=lambda folder: folder.name)
def test_an_imported_hub_folder_is_exported_with_the_same_tensors(folder: HubFolder, tmp_path: Path) -> None:
    for library in ("transformers", folder.library):
        pytest.importorskip(library, reason=f"needs {library}")
    if folder.library == "torch" and not has_torch("2.8"):
        pytest.skip("torch 2.8 added HuggingFaceStorageWriter")
    assert came_back(folder, tmp_path) == json.loads(TABLE.read_text())[folder.name]


def test_the_table_of_hub_folders_lists_thirty_folders_in_twelve_layouts() -> None:
    rows = json.loads(TABLE.read_text())
    assert list(rows) == [folder.name for folder in FOLDERS]
    assert len(rows) >= 30
    assert len({row["layout"] for row in rows.values()}) >= 12


def _write() -> None:
    rows = {} if not TABLE.exists() else json.loads(TABLE.read_text())
    for folder in FOLDERS:
        if find_spec(folder.library) is not None:
            with TemporaryDirectory() as home:
                rows[folder.name] = came_back(folder, Path(home))
    rows = {folder.name: rows[folder.name] for folder in FOLDERS}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    _write()
