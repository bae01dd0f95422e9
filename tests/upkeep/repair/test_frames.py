"""Encoded cells are decoded and compared."""

from __future__ import annotations

import pytest
import torch

from casckpt.contents import manifests
from casckpt.errors import Damaged, InvalidInput
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.repair import frames
from tests.support.repositories import again
from tests.support.saves import cells, reopened
from tests.upkeep.repair.test_coded import cells_of, misframed, objects, plain, weights

STEPS = (1, 2, 3)


def state(step: int) -> dict[str, torch.Tensor]:
    """Return a state with a tensor that changes, one with different changes, and one that never changes."""
    return {"hit": weights(step), "other": weights(step, seed=2), "stays": cells(2, 3)}


def saved(key: str | None = None) -> Store:
    """Return a store with three checkpoints of a run, each encoded against the previous one.

    ``key``: whether the first one is raw or encoded in planes.
    """
    return Store(Repository(again(objects(key), near=False)))


def object_of(store: Store, step: int, cell: StoredCell) -> str:
    ref = manifests.get(store.repository, store.get(f"r@{step}").commit).blob(cell.blob)
    return blob_key(ref.uploader, ref.hash)


def content(step: int) -> dict[str, bytes]:
    return {key: bytes(tensor.view(torch.uint8).numpy()) for key, tensor in state(step).items()}


def ids(store: Store, *steps: int) -> tuple[str, ...]:
    return tuple(store.get(f"r@{step}").id for step in steps)


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
    assert (found.keys, found.checkpoints) == (("hit",), ids(store, *hit))
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
