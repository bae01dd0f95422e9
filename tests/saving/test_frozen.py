"""A save reuses frozen tensors without a full comparison if a sample is unchanged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput
from casckpt.format import digest
from casckpt.format.sections.columns import unpack


@pytest.fixture
def small(tmp_path: Path) -> casckpt.Store:
    store = casckpt.open(tmp_path / "store")
    store.create(cell_bytes=4096, blob_bytes=1 << 20)
    return store


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    backbone = torch.randn(256, 1024, generator=generator)
    return {"backbone.w": backbone, "backbone.t": backbone.t(), "head.w": torch.full((10,), float(step))}


def unhashed(store: casckpt.Store, checkpoint: Checkpoint) -> set[str]:
    manifest = manifests.get(store.repository, checkpoint.commit)
    return {manifest.entries[number].key for number in unpack(manifest.body.entry_columns.unhashed)}


def test_only_a_sample_is_hashed_and_the_manifest_records_it(
    small: casckpt.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.save(state(1), step=1)
    hashed: list[int] = []

    def counting(data: memoryview) -> bytes:
        hashed.append(len(data))
        return digest.cell_digest(data)

    monkeypatch.setattr("casckpt.saving.upload.cell_digest", counting)
    second = small.save(state(2), step=2, frozen=["backbone.*"])
    assert sum(hashed) < 40 * 4096  # cells of 512 elements
    assert unhashed(small, second) == {"backbone.w", "backbone.t"}
    assert second.stats.blobs_written == 1
    for key, value in state(2).items():
        assert torch.equal(small.read(second)[key], value)


def test_a_change_detected_by_the_sample_is_stored_with_a_warning(
    small: casckpt.Store, caplog: pytest.LogCaptureFixture
) -> None:
    small.save(state(1), step=1)
    changed = state(2)
    changed["backbone.w"] = changed["backbone.w"] + 1
    with caplog.at_level(logging.WARNING):
        saved = small.save(changed, step=2, frozen=lambda key: key == "backbone.w")
    assert "backbone.w" in caplog.text
    assert unhashed(small, saved) == set()
    assert torch.equal(small.read(saved)["backbone.w"], changed["backbone.w"])


def test_tensors_that_differ_in_dtype_from_the_parent_or_are_new_are_hashed(small: casckpt.Store) -> None:
    first = small.save(state(1), step=1, frozen=["*"])
    assert unhashed(small, first) == set()
    other = {"backbone.w": state(2)["backbone.w"].half(), "new": torch.ones(9000)}
    saved = small.save(other, step=2, frozen=["*"])
    assert unhashed(small, saved) == set()
    for key, value in other.items():
        assert torch.equal(small.read(saved)[key], value)


def test_frozen_accepts_a_list_of_patterns_or_a_function(small: casckpt.Store) -> None:
    with pytest.raises(InvalidInput, match="list of patterns"):
        small.save(state(1), step=1, frozen="backbone.*")
