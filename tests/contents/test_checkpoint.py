from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint
from casckpt.format.metrics import MAX_METADATA_BYTES
from casckpt.format.records import changed
from casckpt.format.sections.index import lineage_of
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.rewrites import move
from tests.support.saves import small
from tests.support.signing import pair

STATE = {"w": torch.arange(6.0), "x": [1]}


def test_a_checkpoint_has_the_fields_of_its_save() -> None:
    store = small()
    before = datetime.now(UTC) - timedelta(seconds=1)
    ckpt = store.save(STATE, run="sft/lora", step=100, metadata={"loss": 1.2}, ephemeral=True)
    assert (ckpt.run, ckpt.step, ckpt.metadata, ckpt.ephemeral) == ("sft/lora", 100, {"loss": 1.2}, True)
    assert len(ckpt.id) == 64
    assert before <= ckpt.created_at <= datetime.now(UTC)
    assert ckpt.created_at.tzinfo is UTC
    assert ckpt.tags == []
    assert not ckpt.forgotten
    assert {key: (t.dtype, t.shape, t.bytes) for key, t in ckpt.tensors.items()} == {"w": ("float32", (6,), 24)}
    assert ckpt.stats.bytes_total == 24
    assert ckpt.stats.bytes_written == 4096 + 24 + 72  # the header, the data, and the proof
    assert (ckpt.stats.blobs_written, ckpt.stats.blobs_reused, ckpt.stats.bytes_reused) == (1, 0, 0)
    assert ckpt.stats.seconds >= 0
    assert "sft/lora@100" in repr(ckpt)


def test_handles_of_the_same_checkpoint_compare_equal() -> None:
    store = small()
    ckpt = store.save(STATE, step=1, metadata={"a": [1, {"b": None}]})
    again = Store(store.repository).get("default@1")
    assert again == ckpt
    assert hash(again) == hash(ckpt)
    assert again.metadata == ckpt.metadata
    assert again.stats == ckpt.stats
    assert again.tensors == ckpt.tensors
    assert again != store.save(STATE, step=2)


@pytest.mark.parametrize("metadata", [{"loss": math.nan}, {"text": "x" * 70_000}], ids=["nan", "long"])
def test_metadata_absent_from_the_record_is_read_from_the_manifest(metadata: dict[str, Any]) -> None:
    store = small()
    store.save(STATE, step=1, metadata=metadata)
    assert repr(store.get("default@1").metadata) == repr(metadata)


LINEAGE = {"resumed_from": {"id": "ab" * 32, "run": "gone", "step": 7}, "imported_from": {"path": "/tmp/x"}}


def test_the_lineage_survives_copies_thinning_repacking_and_rewrites() -> None:
    store, other, repacked = small(), small(), small()
    saved = store.save({"w": torch.ones(3000), "x": torch.ones(4)}, step=1, lineage=LINEAGE)
    store.copy_to(other)
    other.copy_to(repacked, compress="always")
    move(store.repository, saved.commit)
    store.thin("default@1", drop="w")
    for place in (store, other, repacked):
        found = place.get("default@1")
        assert found.id == saved.id
        assert found.lineage == found.commit.committed.lineage == LINEAGE
        assert lineage_of(manifests.get(place.repository, found.commit).body.notes) == LINEAGE


def test_a_lineage_that_is_too_large_for_the_record_is_in_the_manifest() -> None:
    store, lineage = small(), {"merged_from": ["x" * MAX_METADATA_BYTES]}
    saved = store.save(STATE, step=1, lineage=lineage)
    assert saved.commit.committed.lineage == {"merged_from": None}
    assert saved.lineage == lineage
    assert store.save(STATE, step=2).lineage == {}


def test_a_store_that_requires_signatures_shows_the_signed_lineage(tmp_path: Path) -> None:
    keys = pair(tmp_path)
    store = open_store(tmp_path / "store", sign_with=keys.private, require_signature=keys.public)
    saved = store.save(STATE, step=1, lineage=LINEAGE)
    claimed = changed(saved.commit.committed, lineage={"resumed_from": "elsewhere"})
    forged = saved.commit.at(saved.commit.places._replace(record=claimed))
    assert Checkpoint(store.repository, forged).lineage == LINEAGE
