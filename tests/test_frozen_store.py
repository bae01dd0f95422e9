"""The current version reads, extends and prunes copies of the stores in tests/data."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.errors import Damaged
from casckpt.format.encodings.frames import Form
from casckpt.upkeep.repair.located import locate
from tests.format.test_plain_reader import assert_same
from tests.support import frozen_store
from tests.support.exact import same
from tests.support.frozen_store import NAMES, told, value_of
from tests.support.plain_reader import Checkpoint
from tests.support.plain_reader import Store as PlainStore

DATA = Path(__file__).parent / "data" / "frozen_store"
EXPECTED = json.loads((DATA / "expected.json").read_text())
WHOLE = [(one["run"], one["step"]) for one in EXPECTED if one["visible"] and one["run"] != "hurt"]


CODED = DATA.with_name("frozen_store_coded")
CODED_STEPS = (2, 3, 4, 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A writable copy of the files."""
    shutil.copytree(DATA, tmp_path / "frozen")
    (tmp_path / "frozen" / "expected.json").unlink()
    return tmp_path / "frozen"


@pytest.fixture
def store(folder: Path) -> casckpt.Store:
    """The store, on a host that does not have notes about it."""
    return casckpt.open(folder)


def assert_equal(found: Any, saved: Any) -> None:
    """Check that every value is unchanged, bit for bit."""
    if type(saved) is list and any(isinstance(one, torch.Tensor) for one in saved):
        found, saved = dict(enumerate(found)), dict(enumerate(saved))
    if isinstance(saved, torch.Tensor):
        assert found.dtype == saved.dtype
        assert found.shape == saved.shape
        one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, saved))
        assert torch.equal(one, other)
    elif type(saved) is dict:
        assert list(found) == list(saved)
        for key in saved:
            assert_equal(found[key], saved[key])
    else:
        assert same(found, saved)


def test_the_frozen_store_has_the_expected_content_and_is_small() -> None:
    kinds = {path.relative_to(DATA).parts[0] for path in DATA.rglob("*") if path.is_file()}
    assert kinds >= {"casckpt.json", "commits", "damaged", "mirrored", "objects", "runs", "settings", "tags"}
    records = [path.read_text() for path in (DATA / "commits").iterdir()]
    for type_ in ("committed", "forgotten", "replaced", "purged"):
        assert any(f'"type":"{type_}"' in record for record in records), type_
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 1_000_000


def test_the_frozen_store_lists_its_original_ids(store: casckpt.Store) -> None:
    assert told(store) == EXPECTED
    first, best = store.get("kinds@1"), store.get("train@6")
    assert first.metadata == frozen_store.METADATA
    assert first.healthy is True
    assert math.isnan(first.metrics["bad"])
    assert math.isinf(first.metrics["far"])
    assert best.metrics == {"loss": 1 / 6}
    assert store.get("train@5").healthy is False
    assert store.get("tag:best") == store.get("train@2")
    assert list(store.tags()) == ["best"]  # the other one has expired


@pytest.mark.parametrize(("run", "step"), WHOLE)
def test_each_checkpoint_of_the_frozen_store_loads_bit_for_bit(store: casckpt.Store, run: str, step: int) -> None:
    assert_equal(store.read(f"{run}@{step}"), value_of(run, step))


def test_the_attachments_in_the_frozen_store_are_unchanged(store: casckpt.Store) -> None:
    assert store.attachments("kinds@1") == {name: len(data) for name, data in frozen_store.ATTACHMENTS.items()}
    for name, data in frozen_store.ATTACHMENTS.items():
        assert store.read_attachment("kinds@1", name) == data


def test_the_documented_reader_reads_the_frozen_store(folder: Path) -> None:
    visible = PlainStore(folder).visible()
    assert sorted(visible) == sorted((one["run"], one["step"]) for one in EXPECTED if one["visible"])


def test_verify_names_exactly_the_damaged_checkpoints(store: casckpt.Store) -> None:
    found = store.verify()
    assert {key for one in found.damaged for key in one.keys} == {"hit"}
    assert {id for one in found.damaged for id in one.checkpoints} == {store.get("hurt@1").id}
    assert not found.manifests
    with pytest.raises(Damaged, match="'hit'"):
        store.read("hurt@1")
    target = {"whole": torch.zeros(70_000, dtype=torch.uint8)}
    store.load(target, "hurt@1", strict=False, unread="ignore")
    assert_equal(target, {"whole": frozen_store.hurt()["whole"]})


def test_a_forgotten_checkpoint_of_the_frozen_store_is_restored(store: casckpt.Store) -> None:
    store.restore(next(one["id"] for one in EXPECTED if (one["run"], one["step"]) == ("train", 3)))
    assert_equal(store.read("train@3"), frozen_store.train(3))


def test_a_save_reuses_cells_of_the_frozen_store_except_those_of_worn_blobs(store: casckpt.Store) -> None:
    again = store.save(frozen_store.train(6) | {"step": 6}, run="train", step=7)
    assert again.stats.blobs_written == 0
    tensors = frozen_store.train(6)["model"]
    old = store.save({"model": {name: tensors[name] for name in NAMES}, "step": 8}, run="train", step=8)
    assert old.stats.blobs_written == 0
    assert_equal(store.read("train@latest")["model"], tensors)


def test_the_frozen_store_is_copied_with_ids_and_tags(store: casckpt.Store, tmp_path: Path) -> None:
    result = store.copy_to(tmp_path / "copy", tags=True, check=False)
    assert [(one.commit.run, one.commit.step) for one in result.failed] == [("hurt", 1)]
    copy = casckpt.open(tmp_path / "copy")
    kept = [one for one in EXPECTED if one["visible"] and one["run"] != "hurt"]
    assert told(copy) == kept
    assert not copy.verify().is_damaged
    assert copy.get("tag:best").id == store.get("train@2").id


def test_the_frozen_store_is_pruned_once_its_mirror_is_unset(store: casckpt.Store) -> None:
    store.change_settings(mirror=None)
    store.forget("hurt@1")
    result = store.gc(keep_last=1, min_age=0)
    assert result.deleted_bytes > 0
    left = [(one.run, one.step) for one in store.checkpoints(forgotten=True)]
    assert left == [("kinds", 1), ("train", 2), ("train", 6), ("moved", 2)]
    assert not store.verify().is_damaged
    for run, step in left:
        assert_equal(store.read(f"{run}@{step}"), value_of(run, step))


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """A writable copy of the store whose cells are frames."""
    shutil.copytree(CODED, tmp_path / "coded")
    (tmp_path / "coded" / "expected.json").unlink()
    return tmp_path / "coded"


def test_the_frozen_store_has_small_frames_of_every_encoding(coded: Path) -> None:
    store, forms, links = casckpt.open(coded), set[Form](), set[int]()
    for step in CODED_STEPS:
        manifest = manifests.get(store.repository, store.get(f"coded@{step}").commit)
        for cell in (cell for entry in manifest.entries for cell in manifest.extents(entry).stored_cells()):
            frame = locate(store.repository, manifest, cell).stored(cell)
            forms.add(Form.RAW if cell.frame is None else Form(frame[0]))
            links.add(len([*cell.chain]))
    assert forms == set(Form)
    assert links == {1, 2, 3, 4, 5}
    assert told(store) == json.loads((CODED / "expected.json").read_text())
    assert not store.verify(decode=True).is_damaged
    assert sum(path.stat().st_size for path in CODED.rglob("*") if path.is_file()) < 250_000


@pytest.mark.parametrize("step", CODED_STEPS)
def test_the_frames_in_the_frozen_store_decode_bit_for_bit(coded: Path, step: int) -> None:
    assert_equal(casckpt.open(coded).read(f"coded@{step}"), value_of("coded", step))


@pytest.mark.parametrize("step", CODED_STEPS)
def test_the_documented_reader_decodes_the_frames_in_the_frozen_store(coded: Path, step: int) -> None:
    store = PlainStore(coded)
    read = Checkpoint(coded, store.log(store.visible()["coded", step])[1])
    assert_same(read.read(), value_of("coded", step))
    assert all(sound for leaves in read.leaves().values() for _, _, sound in leaves)


def test_a_save_continues_from_frames_and_gc_keeps_their_bases(coded: Path) -> None:
    store = casckpt.open(coded)
    again = store.save(value_of("coded", 5), run="coded", step=6)
    assert again.stats.blobs_written == 0
    assert again.stats.bytes_coded == store.get("coded@5").stats.bytes_coded > 0
    store.gc(keep_last=1, min_age=0)
    assert not store.verify(decode=True).is_damaged
    assert_equal(store.read("coded@6"), value_of("coded", 5))
