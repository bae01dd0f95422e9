"""Encoded cells are decoded and compared; damage to a frame affects all cells that need it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from casckpt.contents import blobs, manifests
from casckpt.errors import Damaged, InvalidInput
from casckpt.format.digest import cell_digest
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key, manifest_key
from casckpt.repository.repository import Repository
from casckpt.store.opening import open as opened
from casckpt.store.store import Store
from casckpt.upkeep.repair import frames
from casckpt.upkeep.repair.frames import locate
from tests.support.coded import Stored, chain, code, encode
from tests.support.repositories import again, objects_of
from tests.support.saves import BLOB, CELL, cells, flip, reopened, small

STEPS = (1, 2, 3)


def weights(step: int, *, seed: int = 1, count: int = 4) -> torch.Tensor:
    """Return a tensor of ``count`` cells, in which each step changes a few elements."""
    data = cells(2 * count, seed).bfloat16().view(torch.int16)
    for number in range(1, step):
        data[number::97] += number
    return data.view(torch.bfloat16)


def state(step: int) -> dict[str, torch.Tensor]:
    """Return a state with a tensor that changes, one with different changes, and one that never changes."""
    return {"hit": weights(step), "other": weights(step, seed=2), "stays": cells(2, 3)}


def saved(key: str | None = None) -> Store:
    """Return a store with three checkpoints of a run, each encoded against the previous one.

    ``key``: whether the first one is raw or encoded in planes.
    """
    return Store(Repository(again(objects(key), near=False)))


@cache
def objects(key: str | None) -> dict[str, bytes]:
    """Return the objects of that store by key."""
    store = small()
    for step in STEPS:
        store.save(state(step), run="r", step=step)
    if key == "planes":
        code(store, "r@1")
    chain(store, [f"r@{step}" for step in STEPS])
    store.gc(min_age=0)
    return objects_of(store.repository.storage)


def cells_of(store: Store, step: int, key: str = "hit") -> list[StoredCell]:
    manifest = manifests.get(store.repository, store.get(f"r@{step}").commit)
    (entry,) = (entry for entry in manifest.entries if entry.key == key)
    return list(manifest.extents(entry).stored_cells())


def object_of(store: Store, step: int, cell: StoredCell) -> str:
    ref = manifests.get(store.repository, store.get(f"r@{step}").commit).blob(cell.blob)
    return blob_key(ref.uploader, ref.hash)


def plain(store: Store, step: int) -> dict[str, bytes]:
    """Return the contents of a checkpoint, decoded cell by cell."""
    manifest = manifests.get(store.repository, store.get(f"r@{step}").commit)
    return {
        entry.key: b"".join(
            bytes(locate(store.repository, manifest, cell).read()) for cell in manifest.extents(entry).stored_cells()
        )
        for entry in manifest.entries
    }


def content(step: int) -> dict[str, bytes]:
    return {key: bytes(tensor.view(torch.uint8).numpy()) for key, tensor in state(step).items()}


def ids(store: Store, *steps: int) -> tuple[str, ...]:
    return tuple(store.get(f"r@{step}").id for step in steps)


def damage(store: Store, step: int, link: int, *, whole: bool = False) -> str:
    """Flip a byte in the middle of a checkpoint's second cell, or of one of its bases. Return the blob's key."""
    cell = [*cells_of(store, step)[1].chain][link]
    key = object_of(store, step, cell)
    if whole:
        store.repository.storage.delete(key)
    else:
        flip(store, key, cell.offset + cell.stored // 2)
    return key


@pytest.mark.parametrize("key", ["raw", "planes"])
@pytest.mark.parametrize(("step", "link", "hit"), [(1, 0, (1, 2, 3)), (3, 2, (1, 2, 3)), (2, 0, (2, 3)), (3, 0, (3,))])
def test_a_flipped_byte_affects_all_cells_encoded_against_it(
    key: str, step: int, link: int, hit: tuple[int, ...]
) -> None:
    store = saved(key)
    blob = damage(store, step, link)
    found = store.verify(decode=True)
    (damaged,) = found.damaged
    assert damaged.blob in blob
    assert damaged.keys == (("hit", "other", "stays") if 1 in hit else ("hit", "other"))
    assert damaged.checkpoints == ids(store, *hit)
    assert not found.manifests, "the rows are right"
    assert [one.step for one in store.checkpoints()] == list(STEPS)
    for other in set(STEPS) - set(hit):
        assert plain(store, other) == content(other)


@pytest.mark.parametrize("link", [0, 1])
def test_a_flipped_byte_in_an_extent_row_is_reported_as_manifest_damage(link: int) -> None:
    store = saved()
    commit = store.get("r@3").commit
    lengths = b"".join(cell.stored.to_bytes(4, "little") for cell in cells_of(store, 3))
    row = [*cells_of(store, 3)[1].chain][link].digest if link else lengths
    at = manifests.get(store.repository, commit).encoded().index(row)
    flip(store, manifest_key(commit.places.txid, commit.id), at)
    store = reopened(store)
    found = store.verify(decode=True)
    assert not found.damaged, "the blobs are right"
    assert [(one.run, one.step) for one in found.manifests] == [("r", 3)]
    assert "'rows'" in found.manifests[0].why
    assert "'hit'" in found.manifests[0].why
    assert [one.step for one in store.checkpoints()] == list(STEPS)
    assert [plain(store, step) for step in (1, 2)] == [content(step) for step in (1, 2)]
    with pytest.raises(Damaged, match="'hit'"):
        plain(store, 3)


def misframed(at: int = 3) -> Store:
    """Return a store in which the frame of a step's second cell has the right hash but decodes to a different cell."""
    store, wrong = small(), content(at)["hit"][CELL : 2 * CELL]

    def lying(data: memoryview, width: int, base: memoryview | None) -> bytes | None:
        return encode(memoryview(data[:-2].tobytes() + b"zz") if data == wrong else data, width, base)

    for step in STEPS:
        store.save(state(step), run="r", step=step)
    every = (data for step in STEPS for data in content(step).values())
    parts = (data[start : start + CELL] for data in every for start in range(0, len(data), CELL))
    true = {cell_digest(data): memoryview(data) for data in parts}
    # Otherwise, a later frame would be encoded against the wrong cell.
    with patch.object(Stored, "plain", lambda _, cell: true[cell.digest]):
        chain(store, ["r@1", "r@2", "r@3"], encode=lying)
    store.gc(min_age=0)
    return reopened(store)


@pytest.mark.parametrize("key", ["raw", "planes"])
def test_complete_frames_are_decoded_once(key: str) -> None:
    store = saved(key)
    found = store.verify(decode=True)
    assert not found.is_damaged
    stays, *others = (len(content(1)[name]) for name in ("stays", "hit", "other"))
    assert found.decoded_bytes == sum(others) * len(STEPS) + (stays if key == "planes" else 0)
    assert store.verify().decoded_bytes == 0
    assert [plain(store, step) for step in STEPS] == [content(step) for step in STEPS]
    with pytest.raises(InvalidInput, match="full"):
        store.verify(mode="exists", decode=True)


@pytest.mark.parametrize("at", [2, 3])
def test_an_incorrect_frame_is_detected_only_by_decoding(at: int) -> None:
    store = misframed(at)
    store.save(state(3), run="r", step=4)
    hit = [step for step in (*STEPS, 4) if step >= at]
    assert not store.verify().is_damaged
    (found,) = reopened(store).verify(decode=True).damaged
    assert found.blob in object_of(store, at, cells_of(store, at)[1])
    assert (found.keys, found.checkpoints) == (("hit", "other"), ids(store, *hit))
    assert f"bytes {cells_of(store, at)[1].offset} to" in found.why
    assert "are unchanged, but are not a frame of the saved cell" in found.why
    assert [plain(store, step) for step in range(1, at)] == [content(step) for step in range(1, at)]
    with pytest.raises(Damaged, match="decode") as caught:
        store.read(f"r@{at}")
    assert (caught.value.key, caught.value.blob) == ("hit", found.blob)


def test_a_check_keeps_only_a_few_cells_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved()
    whole = store.verify(decode=True)
    monkeypatch.setattr(frames, "_AT_ONCE", 5)
    found = store.verify(decode=True)
    assert not found.is_damaged
    assert whole.decoded_bytes < found.decoded_bytes, "bases once for each lot"


def test_an_incorrect_frame_is_not_reused_once_detected() -> None:
    store, copy = misframed(), small()
    store.copy_to(copy)
    (wrong,) = store.verify(decode=True).damaged
    for found in (store.verify(), store.verify("r@1", decode=True), store.verify(part=(0, 9))):
        assert found.repaired == (), "its bytes are right, but that proves nothing"
    assert store.verify().damaged == (wrong,)
    repaired = store.repair(copy)
    assert repaired.blobs == ()
    assert repaired.lost == (wrong,), "the copy has the same frame"
    store.save(state(3), run="r", step=4)
    assert plain(reopened(store), 4) == content(3)
    store.forget("r@3")
    store.gc(min_age=0)
    assert not reopened(store).verify(decode=True).is_damaged


def test_a_mark_on_a_blob_with_correct_frames_is_removed() -> None:
    store = saved()
    ref = manifests.get(store.repository, store.get("r@3").commit).blob(cells_of(store, 3)[1].blob)
    for heal in (store.repair, store.verify):
        blobs.mark_damaged(store.repository, ref.uploader, ref.hash, "for a test")
        heal()
        assert not blobs.damaged_marks(store.repository)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("step", "link"), [(1, 0), (2, 0), (3, 0)])
def test_frames_are_recovered_unchanged_from_a_copy(step: int, link: int, *, whole: bool) -> None:
    store, mirror = saved(), small()
    store.copy_to(mirror)
    blob = damage(store, step, link, whole=whole)
    store.verify()
    found = store.repair(mirror)
    assert [name in blob for name in found.blobs] == [True]
    assert not found.is_damaged
    assert [plain(reopened(store), step) for step in STEPS] == [content(step) for step in STEPS]


@pytest.mark.parametrize(("step", "hit"), [(1, STEPS), (2, (2, 3)), (3, (3,))])
def test_lost_cells_are_reported_with_all_their_checkpoints(step: int, hit: tuple[int, ...]) -> None:
    store = saved()
    damage(store, step, 0)
    store.verify()
    found = store.repair()
    (lost,) = found.lost
    assert lost.keys == (("hit", "other", "stays") if 1 in hit else ("hit", "other"))
    assert lost.checkpoints == ids(store, *hit)
    assert found.blobs == ()


def test_copying_a_damaged_checkpoint_names_the_affected_keys() -> None:
    store = saved()
    damage(store, 1, 0)
    with pytest.raises(Damaged, match="'hit'"):
        store.copy_to(small(), "r@3")


def test_encoded_checkpoints_are_copied_and_compared_by_their_decoded_cells() -> None:
    store, other = saved(), small()
    store.copy_to(other, tags=True)
    assert not other.verify(decode=True).is_damaged
    assert [plain(other, step) for step in STEPS] == [content(step) for step in STEPS]
    assert ids(other, *STEPS) == ids(store, *STEPS)
    found = store.diff("r@1", "r@3")
    assert list(found.changed) == ["hit", "other"]
    assert found.bytes_changed == 2 * len(content(1)["hit"])
    forgetful = reopened(other)
    forgetful.forget("r@1")
    forgetful.gc(min_age=0)
    assert [plain(forgetful, step) for step in (2, 3)] == [content(step) for step in (2, 3)]


def test_a_mirror_supplies_a_cell_of_a_checkpoint_that_is_forgotten_in_the_mirror(tmp_path: Path) -> None:
    local = opened(tmp_path / "local", mirror=tmp_path / "mirror")
    local.create(cell_bytes=CELL, blob_bytes=BLOB)
    for step in STEPS:
        local.save(state(step), run="r", step=step, compress="auto")
    local.forget("r@1")
    local.wait_for_mirror()
    local.gc(min_age=0)
    damage(local, 3, 2)
    assert local.verify().damaged[0].checkpoints == ids(local, 2, 3)
    assert not local.repair(tmp_path / "mirror").is_damaged
    assert not local.verify(decode=True).is_damaged
    assert [plain(local, step) for step in (2, 3)] == [content(step) for step in (2, 3)]
