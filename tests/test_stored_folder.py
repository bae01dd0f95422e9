"""The current version rebuilds the folder in a store that an earlier version wrote (tests/data/folder_store)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.format.sections.recipe import ItemKind
from tests.support.saves import hashes
from tests.support.stored_folder import described, items_of

DATA = Path(__file__).parent / "data" / "folder_store"


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    """A writable copy of the store."""
    shutil.copytree(DATA, tmp_path / "store", ignore=shutil.ignore_patterns("expected.json"))
    return casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")


def test_the_stored_folder_is_rebuilt_with_all_bytes_modes_and_links(store: casckpt.Store, tmp_path: Path) -> None:
    store.export("files@2", tmp_path / "out")
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
    assert hashes(other, checkpoint.id) == hashes(store, checkpoint.id)
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
