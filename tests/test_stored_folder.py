"""The current version rebuilds the folder in a store that an earlier version wrote (tests/data/folder_store)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.format.sections.recipe import NOTE, FilePiece, ItemKind
from tests.support.saves import small_folder
from tests.support.stored_folder import described, items_of, rebuild, save_folder, write_folder

DATA = Path(__file__).parent / "data" / "folder_store"


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    """A writable copy of the store."""
    shutil.copytree(DATA, tmp_path / "store", ignore=shutil.ignore_patterns("expected.json"))
    return casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")


def reader(store: casckpt.Store, checkpoint: casckpt.Checkpoint) -> Callable[[FilePiece], bytes]:
    """Return a function that reads a piece of a file."""
    entries = manifests.get(store.repository, checkpoint.commit).entries
    state = store.read(checkpoint)
    values = {f"{path}.{name}": value for path, parts in state.items() for name, value in parts.items()}

    def read(piece: FilePiece) -> bytes:
        data = bytes(values[entries[piece.entry].key].reshape(-1).view(torch.uint8).numpy())
        return data[piece.offset : piece.offset + piece.length]

    return read


def test_the_stored_folder_is_rebuilt_with_all_bytes_modes_and_links(store: casckpt.Store, tmp_path: Path) -> None:
    checkpoint = store.get("files@2")
    rebuild(items_of(store, checkpoint), reader(store, checkpoint), tmp_path / "out")
    assert described(tmp_path / "out") == json.loads((DATA / "expected.json").read_text())


def test_the_fixture_has_each_kind_of_item_and_of_piece_and_is_small(store: casckpt.Store) -> None:
    items = {item.path: item for item in items_of(store, store.get("files@2"))}
    assert {item.kind for item in items.values()} == set(ItemKind)
    assert items["checkpoint-2/empty.bin"].pieces == ()
    assert len(items["checkpoint-2/model.safetensors"].pieces) > 2
    assert len({item.pieces[0].entry for item in items.values() if item.pieces}) < len(items)
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 150_000


def test_a_folder_is_an_ordinary_checkpoint(store: casckpt.Store, tmp_path: Path) -> None:
    checkpoint = store.get("files@2")
    other = casckpt.open(tmp_path / "other", cache_dir=tmp_path / "cache")
    store.copy_to(other)
    assert items_of(other, other.get(checkpoint.id)) == items_of(store, checkpoint)
    assert not other.verify().is_damaged
    assert other.read(checkpoint.id)["legacy.bin"]["bytes"].dtype == torch.uint8
    other.gc()
    assert other.stats().checkpoints == 1


def test_a_thinned_checkpoint_still_rebuilds_the_files_whose_entries_it_has(store: casckpt.Store) -> None:
    store.save({"later": torch.ones(1)}, run="files", step=3)
    store.thin("files@2", drop="*optimizer.pt*data*")
    checkpoint = store.get("files@2")
    manifest = manifests.get(store.repository, checkpoint.commit)
    lacking = [
        item.path
        for item in items_of(store, checkpoint)
        if any(manifest.lacks(manifest.entries[piece.entry]) for piece in item.pieces)
    ]
    assert lacking == ["checkpoint-2/optimizer.pt"]


def test_tensors_are_shared_with_other_steps_and_with_saves_of_the_training(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    write_folder(tmp_path / "run", 2)
    store.save({"model": {"w": torch.arange(2600.0).view(40, 65) + 2}}, run="files", step=1)
    first = save_folder(store, tmp_path / "run", run="files", step=2)
    assert first.stats.bytes_reused >= 2600 * 4
    with (tmp_path / "run" / "legacy.bin").open("ab") as file:
        file.write(b"more")
    second = save_folder(store, tmp_path / "run", run="files", step=3)
    assert second.stats.bytes_written < 2 * 4096 + 4096 + 200  # the last cell of the file, and the header and proof
    assert NOTE in manifests.get(store.repository, second.commit).body.notes
