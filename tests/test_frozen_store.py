"""The current version reads, extends and prunes copies of the stores in tests/data."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.errors import Damaged, InvalidInput, NotFound, Refused
from casckpt.format.dtypes import DTYPES
from casckpt.history.commits import list_commits
from casckpt.tensors.kinds import KINDS
from tests.format.test_plain_reader import assert_same
from tests.support import frozen_store
from tests.support.exact import same
from tests.support.frozen_store import LETTERS, told, value_of
from tests.support.plain_reader import Checkpoint
from tests.support.plain_reader import Store as PlainStore
from tests.support.signing import pair
from tests.support.tensors import NAMES
from tests.support.wrappers import Scaled, bits, rebuild

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
DATA = frozen_store.DATA / "frozen_store"
EXPECTED = json.loads((DATA / "expected.json").read_text())
VISIBLE = [one for one in EXPECTED if not (one["forgotten"] or one["replaced"])]
OTHERS = {("wrapped", 1), ("ranks", 1), ("pickled", 1)}
"""Checkpoints whose state differs from the value that was saved."""
STEPS = [(one["run"], one["step"]) for one in VISIBLE if not one["lacks"]]
WHOLE = [step for step in STEPS if step not in {*OTHERS, ("hurt", 1)}]
CODED = DATA.with_name("frozen_store_coded")
CODED_STEPS = (3, 4, 5)  # coded@2 was thinned


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
    elif isinstance(saved, BytesIO):
        assert (found.getvalue(), found.tell()) == (saved.getvalue(), saved.tell())
    elif isinstance(saved, np.random.BitGenerator):
        assert same(found.state, saved.state)
    elif isinstance(saved, np.random.RandomState):
        assert same(found.get_state(), saved.get_state())
    elif type(saved) is dict:
        assert list(found) == list(saved)
        for key in saved:
            assert_equal(found[key], saved[key])
    else:
        assert same(found, saved)


def test_the_frozen_store_lists_its_original_ids(store: casckpt.Store) -> None:
    assert told(store) == EXPECTED
    first, best = store.get("kinds@1"), store.get("train@6")
    assert first.metadata == frozen_store.METADATA
    assert first.healthy is True
    assert first.lineage == frozen_store.LINEAGE
    assert math.isnan(first.metrics["bad"])
    assert math.isinf(first.metrics["far"])
    assert best.metrics == {"loss": 1 / 6}
    assert store.get("train@5").healthy is False
    assert store.get("tag:best") == store.get("train@2")
    assert list(store.tags()) == ["best"]  # the other one has expired


@pytest.mark.parametrize(("run", "step"), WHOLE)
def test_each_checkpoint_of_the_frozen_store_loads_bit_for_bit(store: casckpt.Store, run: str, step: int) -> None:
    if run == "dtypes" and len(NAMES) < len(DTYPES):
        pytest.skip("the installed torch lacks some dtypes")
    assert_equal(store.read(f"{run}@{step}"), value_of(run, step))


def test_the_wrappers_in_the_frozen_store_are_rebuilt(store: casckpt.Store) -> None:
    casckpt.register_wrapper(Scaled, rebuild=rebuild)
    try:
        found, saved = store.read("wrapped@1"), frozen_store.wrapped()
    finally:
        del KINDS["tests:Scaled"]
    assert torch.equal(found["sparse"].to_dense(), torch.eye(4))
    assert found["sparse"].layout == torch.sparse_coo
    assert type(found["hand-made"]) is Scaled
    assert bits(found["hand-made"]) == bits(saved["hand-made"])
    assert found["hand-made"].options == saved["hand-made"].options


def test_the_shards_of_two_ranks_in_the_frozen_store_are_joined(store: casckpt.Store) -> None:
    found = store.read("ranks@1")
    assert manifests.get(store.repository, store.get("ranks@1").commit).body.world_size == 2
    assert_equal(found["rows"], frozen_store.of_dtype(torch.float32, (64, 64), 55))
    assert_equal(found["own"], torch.full((3,), 0))
    assert found["name"] == "rank 0"


def test_pickles_in_the_frozen_store_are_loaded_only_on_request(store: casckpt.Store) -> None:
    with pytest.raises(InvalidInput, match="pickle"):
        store.read("pickled@1")
    assert store.read("pickled@1", allow_pickle=True) == frozen_store.PICKLED


def test_thinned_checkpoints_of_the_frozen_store_come_back_unless_they_were_trimmed(store: casckpt.Store) -> None:
    assert [one.commit.lacking for one in store.checkpoints("thin")] == [2, 0, 2, 0]
    for step in (1, 3):
        target = {"model": torch.zeros(1024)}
        store.load(target, f"thin@{step}", strict=False, unread="ignore")
        assert_equal(target, {"model": frozen_store.model(step)["model"]})
    store.restore("thin@1", whole=True)
    assert_equal(store.read("thin@1"), frozen_store.model(1))
    with pytest.raises(NotFound):
        store.restore("thin@3", whole=True)


def test_the_frozen_store_knows_who_signed_and_which_lineage_a_checkpoint_has(
    store: casckpt.Store, tmp_path: Path
) -> None:
    trusting = casckpt.open(store.url, require_signature=[pair(tmp_path).public])
    assert_equal(trusting.read("train@6"), frozen_store.train(6))
    with pytest.raises(Refused):
        trusting.read("train@5")


def test_the_frozen_store_has_saves_in_progress(store: casckpt.Store) -> None:
    assert [(one.run, one.step) for one in store.transactions()] == [("open", 1), ("train", 6), ("copied", 3)]


def test_the_attachments_in_the_frozen_store_are_unchanged(store: casckpt.Store) -> None:
    assert store.attachments("kinds@1") == {name: len(data) for name, data in frozen_store.ATTACHMENTS.items()}
    for name, data in frozen_store.ATTACHMENTS.items():
        assert store.read_attachment("kinds@1", name) == data


@pytest.mark.parametrize("name", frozen_store.STORES)
def test_the_documented_reader_folds_each_log_as_casckpt_does(name: str) -> None:
    plain, store = PlainStore(frozen_store.DATA / name), casckpt.open(frozen_store.DATA / name)
    listed = list_commits(store.repository)
    for txid, commit in listed.commits.items():
        log = plain.log(txid)
        assert (log.state == "visible", log.state in {"visible", "forgotten"}) == (commit.visible, commit.live)
        assert (log.existing, log.tagged) == ([one.txid for one in commit.existing], [*commit.tagged])
        assert log.record["places"] == (commit.current.txid if commit.current else txid)
    assert sorted(plain.visible()) == [
        (one.run, one.step) for one in sorted(listed.visible(), key=lambda one: (one.run, one.step))
    ]


@pytest.mark.parametrize(("run", "step"), [*WHOLE, *sorted(OTHERS)])
def test_the_documented_reader_reads_the_frozen_store(run: str, step: int) -> None:
    store = PlainStore(DATA)
    read = Checkpoint(DATA, store.log(store.visible()[run, step]).record)
    found = read.read()
    if run == "ranks":
        assert [read.read(rank)["name"] for rank in (0, 1)] == ["rank 0", "rank 1"]
    elif run == "wrapped":
        form, inner = found["hand-made"]
        assert (form["kind"], form["shape"], [*inner]) == ("tests:Scaled", [8, 4], ["codes", "scale", "table"])
    elif run != "pickled":
        saved = value_of(run, step)
        if run == "kinds":
            del found["plain"], saved["plain"]  # test_plain_reader.py compares each kind of plain data
        assert_same({name: found[name] for name in saved}, saved)


def test_verify_names_exactly_the_damaged_checkpoints(store: casckpt.Store) -> None:
    found = store.verify()
    assert {key for one in found.damaged for key in one.keys} == {"hit"}
    assert {id for one in found.damaged for id in one.checkpoints} == {store.get("hurt@1").id}
    assert not found.manifests
    with pytest.raises(Damaged, match="'hit'"):
        store.read("hurt@1")
    target = {"whole": torch.zeros(70_000, dtype=torch.uint8)}
    store.load(target, "hurt@1", strict=False, unread="ignore")
    assert_equal(target, {"whole": frozen_store.hurt(1)["whole"]})


def test_a_forgotten_checkpoint_of_the_frozen_store_is_restored(store: casckpt.Store) -> None:
    store.restore(next(one["id"] for one in EXPECTED if (one["run"], one["step"]) == ("train", 3)))
    assert_equal(store.read("train@3"), frozen_store.train(3))


def test_a_save_reuses_cells_of_the_frozen_store_except_those_of_worn_blobs(store: casckpt.Store) -> None:
    again = store.save(frozen_store.train(6) | {"step": 6}, run="train", step=7)
    assert again.stats.blobs_written == 0
    tensors = frozen_store.train(6)["model"]
    old = store.save({"model": {name: tensors[name] for name in LETTERS}, "step": 8}, run="train", step=8)
    assert old.stats.blobs_written == 0
    assert_equal(store.read("train@latest")["model"], tensors)


def test_the_frozen_store_is_copied_with_ids_and_tags(store: casckpt.Store, tmp_path: Path) -> None:
    result = store.copy_to(tmp_path / "copy", tags=True, check=False)
    assert [(one.commit.run, one.commit.step) for one in result.failed] == [("hurt", 1)]
    copy = casckpt.open(tmp_path / "copy")
    assert told(copy) == [one for one in VISIBLE if (one["run"], one["step"]) != ("hurt", 1)]
    assert not copy.verify().is_damaged
    assert copy.get("tag:best").id == store.get("train@2").id


def test_the_frozen_store_is_pruned_once_its_mirror_is_unset(folder: Path, store: casckpt.Store) -> None:
    store.change_settings(mirror=None, min_age=None, min_age_ephemeral=None)
    for path in (folder / "settings").iterdir():  # in a new clone, the files of the store are new
        os.utime(path, (time.time() - 9000,) * 2)  # older than the floor that the newest lowers
    store.forget("hurt@1")
    result = store.gc(keep_last=1, min_age=0, wait=0, revoke_after=0)
    assert result.deleted_bytes > 0
    assert len(result.revoked) == 3
    assert not [path for name in ("leases", "transactions") for path in (folder / name).rglob("*") if path.is_file()]
    left = {(one.run, one.step) for one in store.checkpoints(forgotten=True)}
    assert left == {("train", 2), *OTHERS, *dict(sorted(WHOLE)).items()}  # a tagged one, and the newest of each run
    assert not store.verify().is_damaged
    for run, step in left & set(WHOLE):
        assert_equal(store.read(f"{run}@{step}"), value_of(run, step))


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """A writable copy of the store whose cells are frames."""
    shutil.copytree(CODED, tmp_path / "coded")
    (tmp_path / "coded" / "expected.json").unlink()
    return tmp_path / "coded"


def test_the_coded_frozen_store_lists_its_original_ids_and_is_not_damaged(coded: Path) -> None:
    store = casckpt.open(coded)
    assert told(store) == json.loads((CODED / "expected.json").read_text())
    assert not store.verify(decode=True).is_damaged


@pytest.mark.parametrize("step", CODED_STEPS)
def test_the_frames_in_the_frozen_store_decode_bit_for_bit(coded: Path, step: int) -> None:
    assert_equal(casckpt.open(coded).read(f"coded@{step}"), value_of("coded", step))


@pytest.mark.parametrize("step", CODED_STEPS)
def test_the_documented_reader_decodes_the_frames_in_the_frozen_store(coded: Path, step: int) -> None:
    store = PlainStore(coded)
    read = Checkpoint(coded, store.log(store.visible()["coded", step]).record)
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
