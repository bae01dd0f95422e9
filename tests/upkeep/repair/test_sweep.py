"""A flipped byte at any position is reported, and only the part that contains it no longer loads."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from casckpt.contents import manifests
from casckpt.errors import Damaged
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.sections.head import KNOWN, decode_head
from casckpt.store.store import Store
from tests.support.repositories import memory
from tests.support.saves import blob_keys, cells, content, flip, manifest_keys, reopened, same_state, small

pytestmark = pytest.mark.sweep
CELL = 64 << 10  # bytes, so that large cells are leaves
MANY = 400  # tensors, so that pieces are grouped
KEYS = ("large", "short", "bytes", "text", *(f"many.{n}" for n in (0, 1, 99, MANY // 2, MANY - 1)))
STOP_GC = ("head", "blobs")


@cache
def state() -> dict[str, Any]:
    """Return a state whose blob has two large leaves, padding, a third leaf, joined small cells, and the proof."""
    return {
        "large": cells(40.25, seed=1),
        "short": cells(17, seed=2),
        "bytes": torch.arange(100, dtype=torch.uint8),
        "text": "x" * 3000,
        "many": {str(n): torch.full((3,), float(n)) for n in range(MANY)},
    }


@pytest.fixture(params=["whole", "by range"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a@1, and with b@1, which shares nothing with it.

    Manifests are read whole, or by range as large ones are.
    """
    if request.param == "by range":
        monkeypatch.setattr(manifests, "WHOLE_BYTES", 0)
    made = small(cell_bytes=CELL, blob_bytes=1 << 20)
    made.save(state(), run="a", step=1, attachments={"notes.txt": b"y" * 500})
    made.save({"own": cells(3, seed=9)}, run="b", step=1)
    return made


def copy_of(store: Store) -> Store:
    """Copy the store into a new one."""
    other = Store(type(store.repository)(memory()))
    store.copy_to(other)
    return other


def readable(store: Store) -> set[str]:
    """Return the keys of a@1 that load unchanged. Loads of the others raise errors that report damage."""
    found = set()
    for key in KEYS:
        wanted: Any = state()
        for element in key.split("."):
            wanted = wanted[element]
        try:
            read = store.read("a@1", keys=[key])
        except Damaged:
            continue
        for element in key.split("."):
            read = read[element]
        assert same_state(read, wanted)
        found.add(key)
    return found


def places(store: Store, *, full: bool) -> list[tuple[str, int]]:
    """Return (section, position) of the first and last byte of each part of a manifest, and (full) of the middle."""
    head = decode_head(content(store, manifest_of(store)))
    found = [("head", at) for at in (0, 9, 40, 3000, 4095)]
    for name in KNOWN:
        one = head[name]
        middle = {one.offset + one.length // 2} if full else set()
        found += [(name, at) for at in {one.offset, one.end - 1} | middle]
    return found


def manifest_of(store: Store) -> str:
    commit = reopened(store).get("a@1").commit
    return manifest_key(commit.txid, commit.id)


IN_FRONT = ("head", "index", "places", "blobs")


@pytest.mark.parametrize("store", ["by range", pytest.param("whole", marks=pytest.mark.soak)], indirect=True)
def test_damage_to_any_part_of_a_manifest_is_found_and_repaired(store: Store, full: bool) -> None:
    other = copy_of(store)
    key, objects = manifest_of(store), set(blob_keys(store)) | set(manifest_keys(store))
    before = content(store, key)
    for section, position in places(store, full=full):
        flip(store, key, position)
        user = reopened(store)  # a user who knows about the damage and continues
        found = user.verify()
        assert (found.damaged, len(found.manifests)) == ((), 1)
        assert section in found.manifests[0].why
        right = readable(user)
        if section in IN_FRONT:
            assert right == set()
        else:
            assert len(right) > len(KEYS) // 2, (section, position)
            assert all(repr(lost) in found.manifests[0].why for lost in sorted(set(KEYS) - right)[:1])
        assert same_state(user.read("b@1"), {"own": cells(3, seed=9)})
        with pytest.raises(Damaged, match="gc deletes nothing") if section in STOP_GC else nullcontext():
            assert reopened(store).gc(min_age=0).deleted_blobs == 0
        assert objects <= set(blob_keys(store)) | set(manifest_keys(store))
        assert [one.id for one in user.repair().lost_manifests] == [found.manifests[0].id]
        assert user.repair(other).manifests == (found.manifests[0].id,)
        assert content(store, key) == before, (section, position)
        assert readable(user) == set(KEYS), (section, position)


@pytest.mark.parametrize("store", ["whole", pytest.param("by range", marks=pytest.mark.soak)], indirect=True)
def test_damage_to_any_part_of_a_blob_is_found_and_repaired(store: Store) -> None:
    other = copy_of(store)
    manifest = manifests.get(store.repository, store.get("a@1").commit)
    (ref,) = manifest.blobs
    key, before = blob_key(ref.uploader, ref.hash), content(store, blob_key(ref.uploader, ref.hash))
    small_keys = {"short", "bytes", *(key for key in KEYS if key.startswith("many."))}
    data = [(cell, entry.key) for entry in manifest.entries for cell in manifest.extents(entry).stored_cells()]
    hits, every = {cell.offset: {name} for cell, name in data}, {entry.key for entry in manifest.entries}
    end = max(cell.offset + cell.nbytes for cell, _ in data)
    cuts = sorted([(cell.offset, cell.offset + cell.nbytes) for cell, _ in data])
    padding = [stop for (_, stop), (start, _) in pairwise(cuts) if start > stop]
    assert padding, "there is padding"
    sweep: list[tuple[int, set[str]]] = [
        (at, set()) for at in (0, 7, 100, DATA_OFFSET - 1, *padding, end, end + 40, len(before) - 1)
    ]
    sweep += [(at, hit) for at, hit in hits.items() if hit <= {"large", "short", "bytes"}]
    for position, hit in sweep:
        flip(store, key, position)
        user = reopened(store)
        found = user.verify()
        (wrong,) = found.damaged
        assert (wrong.blob, set(wrong.keys), found.manifests) == (ref.hash, every, ())
        assert set(KEYS) - readable(user) == hit & set(KEYS)
        assert reopened(store).gc(min_age=0).deleted_blobs == 0
        assert [set(lost.keys) for lost in user.repair().lost] == [every]
        assert user.repair(other).blobs == (ref.hash,)
        assert content(store, key) == before, position
        assert not user.verify().is_damaged
        assert small_keys <= readable(user)
