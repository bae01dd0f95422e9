"""An attacker without a key stores different bytes under an ID that is pinned or signed.

The ID is the hash of the index. The attacks rewrite everything else in a manifest, its head, and the record that names
the head. All hashes are correct except those in the index.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.errors import Damaged, InvalidInput, Refused
from casckpt.format import records
from casckpt.format.keys import blob_key, commit_key, manifest_key
from casckpt.format.sections.head import CELLS, INDEX, KNOWN, OBJECTS, Section, assemble, decode_head
from casckpt.store.store import Store
from tests.support.saves import same_state, small_folder
from tests.support.signing import Pair, pair

GOOD = {"model": {"w": torch.zeros(64, 64)}, "optim": {"m": torch.ones(64, 64)}, "note": "hello"}
EVIL = {"model": {"w": torch.full((64, 64), 666.0)}, "optim": {"m": torch.ones(64, 64)}, "note": "pwned"}


class Called:
    """Stands in for code that a pickle runs."""

    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return run, ()


def run() -> str:
    Called.ran = True
    return "ran"


@pytest.fixture
def alice(tmp_path: Path) -> Pair:
    return pair(tmp_path / "keys")


@pytest.fixture
def store(tmp_path: Path, alice: Pair) -> Store:
    made = small_folder(tmp_path / "store")
    made.save(GOOD, run="run", step=1, health=True)
    made.sign("run@1", key=alice.private)
    return made


@pytest.fixture(params=["read whole", "read in parts"])
def open_trusting(
    tmp_path: Path, store: Store, alice: Pair, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Store]:
    """Reopen the store, trusting Alice's signatures, with an empty cache."""
    if request.param == "read in parts":
        monkeypatch.setattr(manifests, "WHOLE_BYTES", 0)
    return lambda: casckpt.open(
        store.url, cache_dir=tmp_path / "caches" / os.urandom(4).hex(), require_signature=alice.public
    )


def sections(data: bytes) -> dict[str, tuple[Section, bytes]]:
    return {one.name: (one, data[one.offset : one.end]) for one in decode_head(data).sections}


def manifest_of(store: Store, ref: str) -> bytes:
    commit = store.get(ref).commit
    return store.repository.storage.get(manifest_key(commit.txid, commit.id), limit=1 << 30)


def put_instead(store: Store, ref: str, changed: Mapping[str, bytes]) -> None:
    """Replace sections of a checkpoint, with a matching head and record."""
    storage, commit = store.repository.storage, store.get(ref).commit
    had = sections(manifest_of(store, ref))
    parts = {name: changed.get(name, data) for name, (_, data) in had.items()}
    foreign = [(one, parts[name]) for name, (one, _) in had.items() if name not in KNOWN]
    head, data = assemble([(name, parts[name]) for name in KNOWN], foreign)
    record = msgspec.structs.replace(commit.committed, head=head.digest, manifest_bytes=len(data))
    storage.replace(manifest_key(commit.txid, commit.id), data)
    storage.replace(commit_key(commit.txid), records.encode(record))


def forge(store: Store, elsewhere: Path, evil: Mapping[str, Any]) -> None:
    """Give run@1 the contents of ``evil`` under its own index."""
    other = small_folder(elsewhere)
    made = other.save(evil, run="run", step=1, allow_pickle=True, health=True)
    for ref in manifests.get(other.repository, made.commit).blobs:
        key = blob_key(ref.uploader, ref.hash)
        store.repository.storage.put(key, other.repository.storage.get(key, limit=1 << 30))
    of_evil = sections(manifest_of(other, "run@1"))
    put_instead(store, "run@1", {name: data for name, (_, data) in of_evil.items() if name != INDEX})


@pytest.mark.parametrize("evil", [EVIL, {**EVIL, "note": Called()}])
def test_all_readers_reject_different_bytes_under_a_signed_id(
    tmp_path: Path, store: Store, open_trusting: Callable[[], Store], evil: dict[str, Any]
) -> None:
    id = store.get("run@1").id
    forge(store, tmp_path / "evil", evil)
    mine = {"model": {"w": torch.full((64, 64), 5.0)}, "optim": {"m": torch.zeros(64, 64)}, "note": ""}
    ways: list[Callable[[Store], object]] = [
        lambda s: s.load(mine, id, allow_pickle=True),
        lambda s: s.read(id, allow_pickle=True),
        lambda s: s.read(id, keys=["note"], allow_pickle=True),
        lambda s: s.update(mine, id, held=None, allow_pickle=True),
        lambda s: s.export(id, tmp_path / "out", allow_pickle=True),
        lambda s: s.copy_to(small_folder(tmp_path / "copy"), id),
        lambda s: s.copy_to(small_folder(tmp_path / "small"), id, compress="always"),
    ]
    for way in ways:
        with pytest.raises((Damaged, Refused)):
            way(open_trusting())
    assert mine["note"] == ""
    assert not Called.ran
    assert list(small_folder(tmp_path / "copy").checkpoints()) == []
    found = open_trusting().verify(decode=True)
    assert found.is_damaged


def test_a_forged_thinned_checkpoint_is_rejected(
    tmp_path: Path, store: Store, open_trusting: Callable[[], Store]
) -> None:
    forge(store, tmp_path / "evil", {**GOOD, "note": "pwned"})
    trusting = open_trusting()
    with pytest.raises((Damaged, Refused)):
        trusting.thin("run@1", drop="optim.*")
    for one in (trusting, open_trusting()):
        with pytest.raises((Damaged, Refused)):
            one.read("run@1", keys=["model.*", "note"])


@pytest.mark.parametrize("name", [*KNOWN, "health"])
def test_bits_flipped_under_correct_hashes_do_not_change_loaded_values(
    tmp_path: Path, store: Store, open_trusting: Callable[[], Store], name: str, full: bool
) -> None:
    data, dice = sections(manifest_of(store, "run@1"))[name][1], random.Random(name)
    whole, refused = manifest_of(store, "run@1"), 0
    for _ in range(20 if full else 10):
        bent = bytearray(data)
        for _ in range(dice.choice((1, 1, 3))):
            bent[dice.randrange(len(bent))] ^= 1 << dice.randrange(8)
        put_instead(store, "run@1", {name: bytes(bent)})
        try:
            assert same_state(open_trusting().read("run@1"), GOOD)
        except (Damaged, InvalidInput):
            refused += 1
        put_instead(store, "run@1", {one: was for one, (_, was) in sections(whole).items()})
    assert refused or name not in {INDEX, CELLS, OBJECTS}
    assert same_state(open_trusting().read("run@1"), GOOD)


def test_a_verified_manifest_is_not_used_for_a_different_id(store: Store, open_trusting: Callable[[], Store]) -> None:
    store.save(EVIL, run="run", step=2, attachments={"a.txt": b"evil"})
    trusting = open_trusting()
    assert trusting.get("run@2").tensors  # the tensors' descriptions, which are not secret, are now in memory
    commit = store.get("run@2").commit
    record = msgspec.structs.replace(commit.committed, manifest=store.get("run@1").id)
    store.repository.storage.replace(commit_key(commit.txid), records.encode(record))
    with pytest.raises((Damaged, Refused, InvalidInput)):
        trusting.read_attachment("run@2", "a.txt")
