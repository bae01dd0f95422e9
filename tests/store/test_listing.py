"""A listing contains the checkpoints and tags at one instant."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import NotFound


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    store = casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")
    for step in (1, 2, 3):
        store.save({"w": torch.full((4,), float(step))}, run="a", step=step)
    return store


def steps(checkpoints: list[Checkpoint]) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints]


def test_a_store_exists_after_the_first_save(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "new")
    assert not store.exists()
    with pytest.raises(NotFound, match="there is no store"):
        store.listing()
    store.save({"w": torch.zeros(1)}, step=1)
    assert store.exists()
    assert casckpt.open(tmp_path / "new").marker.cell_bytes == 1 << 20


def test_a_listing_shows_forgotten_checkpoints_separately(store: casckpt.Store) -> None:
    store.forget("a@2")
    listing = store.listing()
    assert (steps(listing.visible), steps(listing.standing), steps(listing.forgotten)) == ([1, 3], [1, 2, 3], [2])
    assert listing.superseded == frozenset()


def test_a_listing_object_does_not_change(store: casckpt.Store) -> None:
    listing = store.listing()
    store.tag("best", "a@1")
    store.forget("a@3")
    assert steps(listing.visible) == [1, 2, 3]
    assert listing.tags == {}
    assert steps(store.listing().visible) == [1, 2]


def test_a_tag_shows_its_checkpoint_expiration_and_holder(store: casckpt.Store) -> None:
    store.tag("best", "a@1")
    store.tag("held", "a@2", expires=timedelta(hours=1))
    listing = store.listing()
    assert list(listing.tags) == ["best", "held"]
    best, held = listing.tags["best"], listing.tags["held"]
    assert (best.checkpoint.step, best.expires) == (1, None)
    assert (held.checkpoint.step, held.expires is None) == (2, False)
    assert ":" in held.holder
    assert listing.tags_of(best.checkpoint) == ["best"]
    assert (listing.damaged_tags, listing.lost_tags, listing.damaged_records) == ([], [], [])


def test_a_damaged_tag_is_listed_separately(store: casckpt.Store, tmp_path: Path) -> None:
    store.tag("best", "a@1")
    (record,) = (path for path in (tmp_path / "store" / "tags").rglob("*") if path.is_file())
    record.chmod(0o600)
    record.write_bytes(b"not a record")
    listing = casckpt.open(tmp_path / "store", cache_dir=tmp_path / "other").listing()
    assert (list(listing.tags), listing.damaged_tags) == ([], ["best"])


def test_a_listing_includes_runs_with_similar_names(store: casckpt.Store) -> None:
    assert "existing runs: a" in store.listing().about_run("zebra")


def test_a_checkpoint_forgotten_with_forget_now_is_purged_immediately(store: casckpt.Store) -> None:
    store.tag("best", "a@1")
    assert steps(store.forget_now(store.get("a@1"), store.get("a@2"))) == [2]
    assert steps(store.listing().standing) == [1, 3]


def test_the_details_of_a_checkpoint_match_its_save(store: casckpt.Store) -> None:
    saved = store.save({"w": torch.zeros(4), "n": {1, 2}}, run="a", step=4)
    details = saved.details
    assert (details.world_size, details.objects, details.pickled, details.differing) == (1, ("n",), (), ())
    assert (details.casckpt, details.torch) == (casckpt.__version__, torch.__version__)
    assert details.parent is not None
    assert saved.signers == []
