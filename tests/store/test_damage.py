"""Loads of damaged, missing or hostile data raise an error that names the affected keys, with no other effect."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, Gone, Refused
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.digest import cell_digest
from casckpt.format.keys import commit_key, manifest_key
from casckpt.format.manifest import Manifest
from casckpt.format.records import encode
from casckpt.format.sections.columns import pack
from casckpt.format.sections.head import assemble, decode_head
from casckpt.history import commits
from casckpt.history.transactions import begin
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first, corrupt, truncate
from tests.support.forging import (
    Change,
    Parts,
    Table,
    setting,
    taken_apart,
    with_column,
    with_piece,
    with_row,
    with_table,
)
from tests.support.repositories import again, memory, objects_of
from tests.support.saves import (
    blob_keys,
    cells,
    content,
    flip,
    manifest_keys,
    overwrite,
    reopened,
    same_state,
    small,
    small_folder,
)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """a@1 and a@2 share the tensor "shared"; b@1 does not share anything."""
    made = small() if request.param == "memory" else small_folder(tmp_path / "store")
    made.save({"m": {"shared": cells(3, seed=1)}}, run="a", step=1)
    made.save({"m": {"shared": cells(3, seed=1), "own": cells(3, seed=2)}}, run="a", step=2)
    made.save({"own": cells(3, seed=3)}, run="b", step=1)
    return made


def key_of(store: Store, ref: str, tensor: str) -> str:
    """Return the object key of a tensor's first blob."""
    manifest = manifests.get(store.repository, store.get(ref).commit)
    blob = manifest.blob(manifest.extents(manifest.tensors[tensor]).extents[0].blob)
    return f"objects/{blob.uploader}/{blob.hash}.safetensors"


def _flip(store: Store, key: str) -> None:
    flip(store, key, DATA_OFFSET + 5000)


def _cut(store: Store, key: str) -> None:
    overwrite(store, key, content(store, key)[: DATA_OFFSET + 6000])


def _delete(store: Store, key: str) -> None:
    store.repository.storage.delete(key)


def _empty(store: Store, key: str) -> None:
    overwrite(store, key, b"")


DAMAGE: dict[str, Callable[[Store, str], None]] = {"flipped": _flip, "cut": _cut, "deleted": _delete, "empty": _empty}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_error_for_a_damaged_blob_names_affected_keys(store: Store, damage: str) -> None:
    key, users = key_of(store, "a@1", "m.shared"), tuple(store.get(ref).id for ref in ("a@1", "a@2"))
    DAMAGE[damage](store, key)
    template = {"m": {"shared": torch.zeros(3 * 1024)}}
    for call in (lambda: store.read("a@2"), lambda: store.load(template, "a@2"), lambda: reopened(store).read("a@1")):
        with pytest.raises(Damaged) as caught:
            call()
        assert caught.value.key == "m.shared"
        assert caught.value.blob == key.split("/")[2].split(".")[0]
        assert caught.value.checkpoints == users
        text = str(caught.value)
        for part in (
            "'m.shared'",
            caught.value.blob,
            f"a@1 ({users[0][:12]}), a@2 ({users[1][:12]})",
            "undefined",
            "casckpt repair",
        ):
            assert part in text
    assert same_state(store.read("a@2", keys=["m.own"]), {"m": {"own": cells(3, seed=2)}})
    assert same_state(store.read("b@1"), {"own": cells(3, seed=3)})


def test_a_revoked_transaction_does_not_hide_the_damage(store: Store) -> None:
    begin(store.repository, "a", 9).abort("a test")
    _flip(store, key_of(store, "a@1", "m.shared"))
    with pytest.raises(Damaged):
        store.read("a@1")


def test_unverified_reads_detect_missing_but_not_flipped_bytes(store: Store) -> None:
    key = key_of(store, "b@1", "own")
    _flip(store, key)
    back = store.read("b@1", verify=False)["own"]
    want = cells(3, seed=3)
    assert (back.view(torch.int32) != want.view(torch.int32)).sum() == 1
    _cut(store, key)
    with pytest.raises(Damaged, match=rf"it ends after {DATA_OFFSET + 6000} of \d+ bytes"):
        store.read("b@1", verify=False)


@pytest.mark.parametrize("cell", [0, 1, 2])
def test_a_cell_that_is_not_read_is_not_verified(store: Store, cell: int) -> None:
    from casckpt.tensors.values import Shard

    flip(store, key_of(store, "b@1", "own"), DATA_OFFSET + 4096 * cell)
    for part in range(3):
        shard = Shard(torch.zeros(1024), (3072,), offset=(1024 * part,))
        if part == cell:
            with pytest.raises(
                Damaged, match=rf"its bytes {DATA_OFFSET + 4096 * cell} to {DATA_OFFSET + 4096 * cell + 4096}"
            ):
                store.load({"own": shard}, "b@1")
        else:
            store.load({"own": shard}, "b@1")
            assert torch.equal(shard.data, cells(3, seed=3)[1024 * part : 1024 * part + 1024])


def test_damage_during_transfer_is_detected() -> None:
    faulty = FaultyStore(memory())
    store = small(faulty)
    store.save({"w": cells(40)}, step=1)
    for fault in (corrupt("read_into", at=2), truncate("read_into", at=1)):
        faulty.inject(fault)
        with pytest.raises(Damaged, match="Tensor 'w'"):
            store.read("default@1")
        faulty.heal()
    assert store.read("default@1")["w"].numel()


def test_a_flipped_byte_in_a_blob_header_does_not_affect_loads(store: Store) -> None:
    flip(store, key_of(store, "b@1", "own"), 100)
    assert same_state(store.read("b@1"), {"own": cells(3, seed=3)})


def test_damaged_attachments_and_object_parts_raise_an_error(store: Store) -> None:
    data = random.Random(1).randbytes(9000)
    store.save({"blob": data}, run="c", step=1, attachments={"big": data[::-1]})
    for key in blob_keys(store):
        _delete(store, key)
    with pytest.raises(Damaged, match="'blob'"):
        store.read("c@1")
    with pytest.raises(Damaged, match="'big'"):
        store.read_attachment("c@1", "big")
    template = {"blob": None}
    with pytest.raises(Damaged):
        store.load(template, "c@1")
    assert template == {"blob": None}


def test_a_checkpoint_purged_during_a_load_is_reported_as_gone() -> None:
    faulty = FaultyStore(memory())
    store = small(faulty)
    ckpt = store.save({"w": cells(3)}, step=1)

    def purge(_: object) -> None:
        faulty.heal()
        commits.purge(store.repository, commits.forget(store.repository, ckpt.commit))
        for key in blob_keys(store):
            faulty.inner.delete(key)

    faulty.inject(call_first("open", purge))
    with pytest.raises(Gone, match=r"default@1 .* was purged while it was read"):
        store.read("default@1")


# manifests


@pytest.mark.parametrize("damage", ["garbage", "empty", "flip", "deleted", "other"])
def test_a_damaged_manifest_raises_an_error(store: Store, damage: str) -> None:
    ckpt = store.get("a@2")
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    other = next(one for one in manifest_keys(store) if one != key)
    if damage == "flip":
        flip(store, key, 200)
    elif damage == "deleted":
        _delete(store, key)
    else:
        overwrite(store, key, {"garbage": b"x" * 5000, "empty": b"", "other": content(store, other)}[damage])
    again = reopened(store)
    for call in (lambda: again.read("a@2"), lambda: again.load({}, "a@2"), lambda: again.diff("a@1", "a@2")):
        with pytest.raises(Damaged) as caught:
            call()
        assert caught.value.checkpoints == (ckpt.id,)
        assert "a@2" in str(caught.value)
    assert [(one.run, one.step) for one in again.checkpoints()] == [("a", 1), ("a", 2), ("b", 1)]
    assert same_state(again.read("a@1"), {"m": {"shared": cells(3, seed=1)}})


SECTIONS = ("index", "places", "blobs", "cells", "rows")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_flipped_byte_in_a_manifest_section_is_detected(store: Store, section: str) -> None:
    """The error names the damage, other entries load, and gc stops only if it cannot determine what to keep."""
    ckpt = store.get("a@2")
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    found = decode_head(content(store, key))[section]
    flip(store, key, found.offset + 3)
    again = reopened(store)
    (broken,) = again.verify().manifests
    assert section in broken.why
    assert broken.id == ckpt.id
    with pytest.raises(Damaged, match=section):
        again.read("a@2")
    if section in ("cells", "rows"):
        assert "'m.own'" in broken.why or "'m.shared'" in broken.why
        right, wrong = ("m.own", "m.shared") if "'m.shared'" in broken.why else ("m.shared", "m.own")
        assert same_state(again.read("a@2", keys=[right]), reopened(store).read("a@2", keys=[right]))
        with pytest.raises(Damaged, match=wrong):
            again.read("a@2", keys=[wrong])
    assert same_state(again.read("a@1"), {"m": {"shared": cells(3, seed=1)}})
    if section == "blobs":
        with pytest.raises(Damaged, match="gc deletes nothing"):
            reopened(store).gc(min_age=0)
    else:
        assert reopened(store).gc(min_age=0).deleted_blobs == 0
    assert same_state(again.read("b@1"), {"own": cells(3, seed=3)})


def test_a_flipped_byte_in_an_object_affects_only_that_object(store: Store) -> None:
    ckpt = store.save({"w": cells(3, seed=4), "text": "x" * 300, "other": 5}, run="c", step=1)
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    flip(store, key, content(store, key).index(b"x" * 300) + 3)
    again = reopened(store)
    (broken,) = again.verify().manifests
    assert "'objects' does not match its hash, which affects 'text'" in broken.why
    with pytest.raises(Damaged, match="'text'"):
        again.read("c@1")
    assert same_state(again.read("c@1", keys=["w", "other"]), {"w": cells(3, seed=4), "other": 5})
    assert reopened(store).gc(min_age=0).deleted_blobs == 0


@pytest.mark.parametrize("change", ["swapped sections", "of another commit", "a head alone"])
def test_a_manifest_that_contradicts_its_record_prevents_gc(store: Store, change: str) -> None:
    ckpt = store.get("a@2")
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    data = content(store, key)
    head = decode_head(data)
    parts = {name: data[head[name].offset : head[name].end] for name in SECTIONS}
    if change == "swapped sections":
        parts["rows"], parts["cells"] = parts["cells"], parts["rows"]
        overwrite(store, key, assemble(parts.items())[1])
    elif change == "of another commit":
        other = next(one for one in manifest_keys(store) if one != key)
        overwrite(store, key, content(store, other))
    else:
        overwrite(store, key, data[:4096])
    again = reopened(store)
    with pytest.raises(Damaged, match=r"a@2.*is damaged"):
        again.read("a@2")
    again.forget("b@1")
    with pytest.raises(Damaged, match=r"gc deletes nothing.*a@2"):
        again.gc(min_age=0)
    assert len(blob_keys(store)) == 3


def forge(store: Store, change: Change) -> str:
    """Store a checkpoint evil@1 with a changed copy of a@2's manifest and correct hashes."""
    manifest = manifests.get(store.repository, store.get("a@2").commit)
    parts = taken_apart(manifest)
    parts.index |= {"run": "evil", "step": 1}
    change(parts, manifest)
    made = parts.put_together()
    txid = store.repository.new_txid("evil", 1)
    store.repository.storage.put(manifest_key(txid, made.id), made.data)
    record = msgspec.structs.replace(
        store.get("a@2").commit.committed, txid=txid, run="evil", step=1, manifest=made.id,
        head=made.head, manifest_bytes=len(made.data), metadata=None,
    )  # fmt: skip
    store.repository.storage.put(commit_key(txid), encode(record))
    return "evil@1"


def all_of(*changes: Change) -> Change:
    return lambda parts, manifest: [change(parts, manifest) for change in changes]


def shapes(*shapes: tuple[int, ...]) -> Change:
    """Return the shapes of the two entries."""
    return all_of(
        setting("index", "entries", "dimensions", to=pack([len(shape) for shape in shapes])),
        setting("index", "entries", "shape", to=pack([extent for shape in shapes for extent in shape])),
    )


def without_entries(parts: Parts, _: Manifest) -> None:
    parts.index["entries"] |= dict.fromkeys(("kind", "index", "rank", "dtype", "dimensions", "shape"), b"\x01")
    parts.index["entries"]["keys"] = []
    parts.pieces |= {"cells": [], "rows": []}


def kinds(*names: str) -> Change:
    return all_of(
        setting("index", "entries", "kinds", to=list(names)), setting("index", "entries", "kind", to=pack([0, 1]))
    )


HOSTILE: dict[str, Change] = {
    "shape": shapes((2**40, 2**20), (3072,)),
    "shape of another size": shapes((3071,), (3072,)),
    "larger shape": shapes((4096,), (3072,)),
    "dtype": setting("index", "entries", "dtypes", to=[["float7", 4]]),
    "another size of its elements": setting("index", "entries", "dtypes", to=[["float32", 2]]),
    "wider dtype": setting("index", "entries", "dtypes", to=[["float64", 8]]),
    "no cells": with_piece("cells", b"\xc0"),
    "empty cells": with_piece("cells", b""),
    "no rows": with_piece("rows", b"\0"),
    "rows left out": with_piece("rows", b""),
    "offset": with_column("offset", lambda column: [column[0] + 4096]),
    "offset in the header": with_column("offset", lambda column: [0]),
    "huge offset": with_column("offset", lambda column: [2**62]),
    "blob": with_column("blob", lambda column: [99]),
    "box": with_column("box", lambda column: [5]),
    "lo": with_column("lo", lambda column: [1]),
    "hi": with_column("hi", lambda column: [2**62]),
    "cells of a row": with_column("cells", lambda column: [column[0] + 1]),
    "whole: blob": with_row(blob=2),
    "whole: huge blob": with_row(blob=2**32 - 1),
    "whole: offset": with_row(offset=8192),
    "whole: in the header": with_row(offset=0),
    "whole: huge offset": with_row(offset=2**32 - 1),
    "rows": with_column("hi", lambda column: column * 2),
    "uploader": setting("blobs", "uploaders", to=["../../x"] * 2),
    "uploader index": setting("blobs", "index", to=pack([9, 9])),
    "blob size": setting("blobs", "sizes", to=pack([2**40] * 2)),
    "tree": setting("index", "tree", to=b"\x93\x01"),
    "tree without entries": without_entries,
    "cell size": setting("index", "cell_bytes", to=0),
    "part": all_of(kinds("part", "tensor"), setting("index", "entries", "dtypes", to=[["bfloat16", 2]])),
    "another kind": kinds("attachment", "tensor"),
    "run": setting("index", "run", to="../y"),
    "another run": setting("index", "run", to="a"),
    "another step": setting("index", "step", to=2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_rejected(name: str) -> None:
    store = small()
    store.save({"m": {"shared": cells(3, seed=1)}}, run="a", step=1)
    store.save({"m": {"shared": cells(3, seed=1), "own": cells(3, seed=2)}}, run="a", step=2)
    again = reopened(store)
    ref = forge(store, HOSTILE[name])
    with pytest.raises((Refused, Damaged)):
        again.read(ref)
    template = {"m": {"shared": torch.zeros(3072)}}
    try:
        again.load(template, ref)
    except CasckptError:
        pass
    else:  # for example, a damaged tree, which a load with a template does not need
        assert same_state(template, {"m": {"shared": cells(3, seed=1)}})
    assert same_state(again.read("a@1"), {"m": {"shared": cells(3, seed=1)}})
    for run, step in (("a", 3), ("new", 1), ("evil", 2)):  # the saves reuse less, but nothing else changes
        state = {"m": {"shared": cells(3, seed=1), "other": cells(3, seed=step)}}
        again.save(state, run=run, step=step)
        assert same_state(again.read(f"{run}@{step}"), state)


def _overlapping(table: Table) -> None:
    table.boxes[1:] = [((0, 1), (4, 2))]


def test_extents_that_overlap_across_boxes_do_not_expose_other_memory() -> None:
    """If overlaps could make up for holes, a new tensor would contain uninitialized memory."""
    from casckpt.tensors.values import Shard

    store, w = small(), torch.ones(4, 4)
    shards = [Shard(w[:, :2], (4, 4), (0, 0)), Shard(w[:, 2:], (4, 4), (0, 2))]
    store.save({"m": {"shared": shards}}, run="a", step=2)
    ref = forge(store, with_table(_overlapping))
    with pytest.raises((Refused, Damaged)):
        reopened(store).read(ref)


@pytest.mark.in_memory
def test_random_damage_to_any_object_is_detected_or_harmless(seed: int) -> None:
    """After any bit flip or truncation, loads return correct bytes or raise a casckpt error, and listings still
    work."""
    rng = random.Random(seed)
    state = {"w": cells(20, seed=1), "x": {"y": torch.arange(300)}, "o": b"z" * 6000}
    made = small()
    made.save(state, step=1)
    made.save(state | {"more": 1}, step=2)
    objects = objects_of(made.repository.storage)
    for _ in range(150):
        store = Store(type(made.repository)(again(objects, near=False)))
        key = rng.choice([key for key, whole in objects.items() if whole])
        data = bytearray(content(store, key))
        if rng.random() < 0.7:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        overwrite(store, key, bytes(data))
        opened = reopened(store)
        for step, want in ((1, state), (2, state | {"more": 1})):
            with suppress(CasckptError):
                assert same_state(opened.read(f"default@{step}"), want)


@pytest.mark.parametrize("long", [False, True])
def test_a_manifest_that_is_forged_without_a_change_can_be_read(long: bool) -> None:
    """This proves that the tests above pass for the right reason."""
    store = small()
    store.save({"m": {"shared": cells(3, seed=1), "own": cells(3, seed=2)}}, run="a", step=2)
    same = with_column("lo", lambda column: column) if long else all_of()
    assert same_state(reopened(store).read(forge(store, same)), reopened(store).read("a@2"))


def test_a_whole_cell_is_verified_even_if_a_load_needs_only_part_of_it(store: Store) -> None:
    """The damage may be outside the requested part."""
    key = key_of(store, "b@1", "own")
    data = bytearray(store.repository.storage.get(key, limit=1 << 20))
    data[DATA_OFFSET + 4000] ^= 1  # in the first cell; the load reads the cell's first 100 numbers
    overwrite(store, key, bytes(data))
    part = casckpt.Shard(torch.zeros(100), (3072,), flat=(0, 100))
    with pytest.raises(Damaged, match="own"):
        reopened(store).load({"own": part}, "b@1")


def test_a_verification_compares_every_byte_of_a_digest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_byte_wrong(data: memoryview) -> bytes:
        found = cell_digest(data)
        return found[:-1] + bytes([found[-1] ^ 1])

    monkeypatch.setattr("casckpt.loading.transfer.cell_digest", last_byte_wrong)
    with pytest.raises(Damaged):
        store.read("b@1")
