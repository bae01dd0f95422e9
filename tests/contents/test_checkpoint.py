from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch

from casckpt.store.store import Store
from tests.support.saves import small

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
