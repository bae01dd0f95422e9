"""The bytes that each checkpoint added, and the reason for them; damage does not hide other checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.contents import blobs
from casckpt.store.store import Store
from casckpt.upkeep.history import heat, history

SIZE = 4 * 4096


@pytest.fixture
def store(store_path: Path) -> Store:
    return casckpt.open(store_path)


def save(store: Store, step: int, run: str = "a", **layers: float) -> None:
    model = {"layers": {name[1:]: torch.full((4096,), value) for name, value in layers.items()}}
    store.save({"model": model}, run=run, step=step)


def test_each_checkpoint_is_listed_with_the_bytes_that_it_added(store: Store) -> None:
    save(store, 1, _0=0.5, _1=1.5)
    save(store, 2, _0=0.5, _1=2.5)
    save(store, 3, _0=0.5, _1=2.5)
    save(store, 1, run="b", _0=0.5, _1=9.5)
    found = history(store.repository, ["a", "b"]).added
    assert [one.why for one in found] == [
        "all of it was new", "changed: model 16.0 KiB", "nothing changed", "16.0 KiB of it was already stored",
    ]  # fmt: skip
    assert found[0].bytes_added >= 2 * SIZE
    assert SIZE <= found[1].bytes_added < 2 * SIZE
    assert found[2].bytes_added == 0
    assert sum(one.bytes_added for one in found) == store.stats().bytes_blobs


def test_the_heat_of_a_layer_is_the_fraction_that_changed(store: Store) -> None:
    save(store, 1, _0=0.5, _1=1.5)
    save(store, 2, _0=0.5, _1=2.5)
    save(store, 3, _0=3.5, _1=2.5)
    found = heat(store.repository, history(store.repository, ["a"]).added)
    assert found is not None
    assert (found.layers, found.steps) == (["model.layers.0", "model.layers.1"], [2, 3])
    assert found.shares == [[0.0, 1.0], [1.0, 0.0]]


def test_only_the_newest_checkpoints_of_the_named_runs_are_compared(store: Store) -> None:
    for step in range(1, 6):
        save(store, step, _0=float(step))
    save(store, 1, run="b", _0=1.0)
    save(store, 2, run="b", _0=2.0)
    found = history(store.repository, ["a"], looked_at=2).added
    assert [(one.commit.run, one.commit.step) for one in found if one.changed is not None] == [("a", 4), ("a", 5)]
    assert heat(store.repository, [one for one in found if one.commit.run == "b"]) is None


def test_a_forgotten_checkpoint_is_hidden_but_its_bytes_still_count(store: Store) -> None:
    save(store, 1, _0=0.5)
    save(store, 2, _0=0.5)
    store.forget("a@1")
    found = history(store.repository, ["a"]).added
    assert [(one.commit.step, one.bytes_added) for one in found] == [(2, 0)]


def test_blobs_marked_as_damaged_are_listed(store: Store) -> None:
    save(store, 1, _0=0.5)
    commit = store.get("a@1").commit
    [(uploader, blob, _)] = casckpt.contents.manifests.blobs_of(store.repository, commit)
    blobs.mark_damaged(store.repository, uploader, blob, "a test")
    assert history(store.repository, ["a"]).damaged == [blob]


def test_an_unreadable_manifest_does_not_hide_other_checkpoints(store: Store, store_path: Path) -> None:
    for step in (1, 2, 3):
        save(store, step, _0=float(step))
    manifest = next(store_path.rglob(f"objects/**/{store.get('a@2').id}*"))
    manifest.unlink()
    found = history(casckpt.open(store_path).repository, ["a"]).added
    assert [one.commit.step for one in found] == [1, 2, 3]
    assert found[1].changed is None
