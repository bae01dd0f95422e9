"""Signed checkpoints can be loaded from any store, and all others are rejected."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import casckpt
from casckpt.contents.signatures import message
from casckpt.errors import CasckptError, Damaged, InvalidInput, NotFound, Refused, StorageError, Unsigned
from casckpt.format import records
from casckpt.format.keys import commit_key, manifest_key, signature_key
from casckpt.format.names import ManifestId
from casckpt.frontends import megatron
from casckpt.frontends.dcp import StorageReader
from casckpt.frontends.follow import Follower
from casckpt.history.commits import forget, purge
from casckpt.repository.signing_keys import private_key
from casckpt.store.store import Store
from tests.support.dcp import load
from tests.support.faulty import FaultyStore, fail_before
from tests.support.forging import gone_to, passed_off
from tests.support.ranks import Pool
from tests.support.repositories import memory
from tests.support.rewrites import move
from tests.support.saves import cells, same_state, small, small_folder
from tests.support.signing import Pair, pair

PACKAGE = Path(casckpt.__file__).parent


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": cells(5, seed=step)}, "optim": {"m": cells(300, seed=step + 50)}, "step": step}


@pytest.fixture
def alice(tmp_path: Path) -> Pair:
    return pair(tmp_path / "keys")


@pytest.fixture
def bob(tmp_path: Path) -> Pair:
    return pair(tmp_path / "keys", "bob", ssh=True)


@pytest.fixture
def store(tmp_path: Path, alice: Pair) -> Store:
    """A store with run@1 and run@2, which are signed, and run@3, which is not."""
    made = small_folder(tmp_path / "store")
    for step in (1, 2, 3):
        made.save(state(step), run="run", step=step, metadata={"n": step}, attachments={"a.txt": b"x"})
    made.sign("run@1..2", key=alice.private)
    return made


@pytest.fixture
def trusting(tmp_path: Path, store: Store, alice: Pair) -> Callable[[], Store]:
    """Reopen the store, trusting Alice's signatures, without this host's cache."""

    def call(url: str | None = None) -> Store:
        cache = tmp_path / "caches" / os.urandom(4).hex()
        return casckpt.open(url or store.url, cache_dir=cache, require_signature=alice.public)

    return call


def spoil(store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
    held = store.repository.storage.get(key, limit=1 << 30)
    store.repository.storage.replace(key, change(held))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def place(store: Store, ref: str, key: Pair) -> str:
    return signature_key(ManifestId(store.get(ref).id), key.name)


# loads


def test_only_signed_checkpoints_are_loaded(tmp_path: Path, trusting: Callable[[], Store]) -> None:
    store = trusting()
    loaded = state(0)
    with store.lease("run@1") as leased:
        held = store.load(loaded, leased)
    assert same_state(loaded, state(1))
    assert same_state(store.read("run@2"), state(2))
    store.update(loaded, "run@2", held=held)
    assert same_state(loaded, state(2))
    assert store.read_attachment("run@2", "a.txt") == b"x"
    store.export("run@2", tmp_path / "out")
    for refused in (
        lambda: store.load(loaded, "run@3"),
        lambda: store.load(loaded, store.get("run@3")),
        lambda: store.update(loaded, "run@3", held=held),
        lambda: store.read("run@3"),
        lambda: store.read_attachment("run@3", "a.txt"),
        lambda: store.pre_download("run@3"),
        lambda: store.export("run@3", tmp_path / "no"),
        lambda: store.export("run@3", tmp_path / "no.pt"),
        lambda: store.export("run@3", tmp_path / "no", format="dcp"),
    ):
        with pytest.raises(Unsigned, match=r"run@3.*casckpt sign") as caught:
            refused()
        assert caught.value.checkpoints == (store.get("run@3").id,)
    assert same_state(loaded, state(2))
    assert not list(tmp_path.glob("no*"))


def test_every_loading_front_end_requires_signatures(trusting: Callable[[], Store]) -> None:
    store, model = trusting(), torch.nn.Linear(2, 2)
    with pytest.raises(Unsigned):
        casckpt.load_model_and_optim_state(store, "run@3", model)
    with pytest.raises(CheckpointException, match="run@3"):
        load({"step": 0}, StorageReader(store, "run@3"))
    with pytest.raises(CasckptError, match="no valid signature"):
        megatron.load_common_state_dict(casckpt.at(store, run="run", step=3))
    with pytest.raises(Unsigned):
        casckpt.Checkpointer(store, run="run").resume(model)


def test_front_ends_read_manifests_through_the_signature_check() -> None:
    """Data that was not checked may be hostile. For example, notes may contain pickles."""
    named = [path for path in (PACKAGE / "frontends").rglob("*.py") if "manifests.get(" in path.read_text()]
    assert named == []


def outcome(rank: int, size: int, url: str, key: Path, ref: str) -> str | bool:
    loaded = state(0)
    try:
        casckpt.open(url, require_signature=key).load(loaded, ref)
    except CasckptError as error:
        assert same_state(loaded, state(0))
        return error.kind
    return same_state(loaded, state(1))


def test_either_all_ranks_load_a_signed_checkpoint_or_none_does(ranks: Pool, store: Store, alice: Pair) -> None:
    assert ranks.run(2, outcome, store.url, alice.public, "run@1") == [True, True]
    assert ranks.run(2, outcome, store.url, alice.public, "run@3") == ["unsigned", "unsigned"]


def test_verify_false_is_rejected_if_signatures_are_required(trusting: Callable[[], Store]) -> None:
    loaded = state(0)
    with pytest.raises(InvalidInput, match="verify=False"):
        trusting().load(loaded, "run@1", verify=False)
    with pytest.raises(InvalidInput, match="verify=False"):
        trusting().read("run@1", verify=False)
    assert same_state(loaded, state(0))


def test_signatures_are_written_before_the_commit(tmp_path: Path, alice: Pair) -> None:
    store = casckpt.open(tmp_path / "store", sign_with=alice.private, require_signature=alice.public)
    copy = pickle.loads(pickle.dumps(store))
    for one, step in ((store, 1), (copy, 2)):
        made = one.save(state(step), run="run", step=step)
        assert same_state(store.read(made), state(step))
    told = [one.checkpoint.step for one in Follower(store, "run", tmp_path / "to").follow(once=True)]
    assert told == [2]
    assert repr(alice.private.read_bytes()) not in repr(store.repository)
    assert "signer" not in repr(store.repository)


def test_a_save_that_cannot_be_signed_is_not_committed(alice: Pair) -> None:
    storage = FaultyStore(memory())
    store = small(storage)
    store.repository.signer = private_key(alice.private).private_bytes_raw()
    made = store.save(state(1), run="run", step=1)
    puts = storage.keys("put")
    assert puts.index(place(store, "run@1", alice)) < puts.index(commit_key(made.commit.txid))
    storage.inject(fail_before("put", key="signatures/*"))
    with pytest.raises(StorageError):
        store.save(state(2), run="run", step=2)
    assert [one.step for one in store.checkpoints()] == [1]


def test_a_follower_skips_unsigned_checkpoints(
    tmp_path: Path, store: Store, trusting: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotFound, match=r"cannot follow any checkpoint of run 'run' in"):
        list(Follower(trusting(), "run", tmp_path / "to").follow(once=True))
    assert "run@3" in caplog.text
    assert not (tmp_path / "to" / "current").exists()


# later changes


def test_signatures_remain_valid_after_repair_rewrites_thinning_and_copies(
    tmp_path: Path, store: Store, alice: Pair, trusting: Callable[..., Store]
) -> None:
    store.thin("run@1", drop="optim.*")
    move(store.repository, store.get("run@2").commit)
    store.copy_to(tmp_path / "copy")
    twin = casckpt.open(tmp_path / "copy")
    twin.thin("run@2", drop="optim.*")
    twin.gc(min_age=0)
    store.gc(min_age=0)
    for url in (store.url, twin.url):
        for step in (1, 2):
            loaded = {"model": {"w": torch.zeros_like(cells(5))}}
            trusting(url).load(loaded, f"run@{step}", unread="ignore")
            assert same_state(loaded["model"], state(step)["model"])
    blob = next((Path(store.url) / "objects").rglob("*.safetensors"))
    blob.chmod(0o600)
    blob.write_bytes(flipped(blob.read_bytes()))
    store.verify()
    store.repair(twin)
    assert same_state(trusting().read("run@2", keys=["model.*"])["model"], state(2)["model"])


def test_gc_deletes_a_signature_with_its_checkpoint(store: Store, alice: Pair) -> None:
    keys = {step: place(store, f"run@{step}", alice) for step in (1, 2)}
    store.forget("run@1")
    store.gc()
    assert (Path(store.url) / keys[1]).exists()
    store.gc(min_age=0)
    assert not (Path(store.url) / keys[1]).exists()
    assert (Path(store.url) / keys[2]).exists()


def test_one_of_several_keys_is_sufficient_and_a_bad_signature_is_replaced(
    store: Store, alice: Pair, bob: Pair, trusting: Callable[[], Store]
) -> None:
    assert [one.step for one in store.sign("run@3", key=bob.private)] == [3]
    either = casckpt.open(store.url, require_signature=[alice.public, bob.public])
    assert all(either.read(f"run@{step}")["step"] == step for step in (1, 2, 3))
    spoil(store, place(store, "run@1", alice), flipped)
    store.sign("run@1", key=alice.private)
    assert trusting().read("run@1")["step"] == 1


# rejected checkpoints


def bad_signature(store: Store, alice: Pair, bob: Pair) -> None:
    spoil(store, place(store, "run@2", alice), flipped)


def cut_short(store: Store, alice: Pair, bob: Pair) -> None:
    spoil(store, place(store, "run@2", alice), lambda data: data[:-1])


def too_long(store: Store, alice: Pair, bob: Pair) -> None:
    spoil(store, place(store, "run@2", alice), lambda data: data * 20000)


def of_another_key(store: Store, alice: Pair, bob: Pair) -> None:
    store.sign("run@2", key=bob.private)
    theirs = store.repository.storage.get(place(store, "run@2", bob), limit=100)
    spoil(store, place(store, "run@2", alice), lambda _: theirs)


def of_another_checkpoint(store: Store, alice: Pair, bob: Pair) -> None:
    theirs = store.repository.storage.get(place(store, "run@1", alice), limit=100)
    spoil(store, place(store, "run@2", alice), lambda _: theirs)


def another_manifest(store: Store, alice: Pair, bob: Pair) -> None:
    gone_to(store, "run@2", "run@3", manifest=store.get("run@2").id)


def a_record_that_names_another_signed_one(store: Store, alice: Pair, bob: Pair) -> None:
    gone_to(store, "run@2", "run@1")


def a_record_that_names_another_signed_one_which_lies_elsewhere(store: Store, alice: Pair, bob: Pair) -> None:
    gone_to(store, "run@2", "run@1")
    record = store.get("run@2").commit.committed
    store.repository.storage.delete(manifest_key(record.txid, record.manifest))


def the_record_of_another_signed_one(store: Store, alice: Pair, bob: Pair) -> None:
    passed_off(store, "run@2", "run@1")


def a_record_that_names_one_that_is_not_signed(store: Store, alice: Pair, bob: Pair) -> None:
    gone_to(store, "run@2", "run@3")


def another_cell(store: Store, alice: Pair, bob: Pair) -> None:
    for blob in (Path(store.url) / "objects").rglob("*.safetensors"):
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes().replace(state(2)["model"]["w"].numpy().tobytes()[:64], bytes(64)))


ATTACKS: dict[Callable[[Store, Pair, Pair], None], type[CasckptError]] = {
    bad_signature: Unsigned, cut_short: Unsigned, too_long: Unsigned, of_another_key: Unsigned,
    of_another_checkpoint: Unsigned, another_manifest: Damaged, a_record_that_names_another_signed_one: Refused,
    a_record_that_names_another_signed_one_which_lies_elsewhere: Damaged,
    the_record_of_another_signed_one: NotFound,
    a_record_that_names_one_that_is_not_signed: Unsigned, another_cell: Damaged,
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_tampered_stores_are_rejected(
    store: Store, alice: Pair, bob: Pair, trusting: Callable[[], Store], attack: Callable[[Store, Pair, Pair], None]
) -> None:
    first = store.get("run@1").id
    attack(store, alice, bob)
    with pytest.raises(ATTACKS[attack]):
        trusting().load(state(0), "run@2")
    with pytest.raises(ATTACKS[attack]):
        trusting().read("run@2")
    for ref in ("run@1", first):
        assert same_state(trusting().read(ref), state(1))


def test_a_handle_from_a_forged_record_does_not_load_a_different_checkpoint(
    store: Store, trusting: Callable[[], Store]
) -> None:
    gone_to(store, "run@2", "run@1")
    reader = trusting()
    found = reader.get("run@2")
    forged = casckpt.open(store.url).get("run@2").commit
    purge(store.repository, forget(store.repository, forged))
    with pytest.raises(Refused, match="name the same id: one of them is wrong"):
        reader.load(state(0), found)


def test_a_checkpoint_found_by_id_is_verified_even_if_its_record_is_replaced(
    store: Store, alice: Pair, trusting: Callable[[], Store]
) -> None:
    first = store.get("run@2").id
    # This one is also signed, so an attacker could pass it off as the first.
    store.save(state(5), run="run", step=2, overwrite=True)
    store.sign("run@2", key=alice.private)
    reader = trusting()
    found = reader.get(first)
    passed_off(store, first, "run@2")
    for again in (reader, trusting()):
        with pytest.raises(NotFound, match=first):
            again.read(found)


def test_metadata_comes_from_the_signed_manifest_not_the_record(store: Store, trusting: Callable[[], Store]) -> None:
    record = store.get("run@2").commit.committed
    store.repository.storage.replace(
        commit_key(record.txid), records.encode(records.changed(record, metadata={"n": "evil"}))
    )
    assert trusting().get("run@2").metadata == {"n": 2}
    with pytest.raises(Unsigned, match="run@3"):
        _ = trusting().get("run@3").metadata


def test_a_manifest_that_contradicts_its_record_is_not_signed(store: Store, alice: Pair) -> None:
    gone_to(store, "run@3", "run@1")
    with pytest.raises(Refused, match="its commit record does not match its manifest"):
        casckpt.open(store.url).sign("run@3", key=alice.private)


def test_signatures_are_verified_with_openssl_as_documented(tmp_path: Path, store: Store, alice: Pair) -> None:
    held, signed = store.get("run@1"), tmp_path / "signed"
    signed.write_bytes(message(ManifestId(held.id)))
    signature = Path(store.url) / place(store, "run@1", alice)
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", alice.public, "-rawin", "-in", signed, "-sigfile"]
    done = subprocess.run([*map(str, command), str(signature)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "Signature Verified Successfully")
