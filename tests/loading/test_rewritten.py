"""Running loads continue at the new locations of a checkpoint that is rewritten in the meantime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from casckpt.contents import manifests
from casckpt.history.commits import list_commits, restore
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect
from tests.support.repositories import meanwhile, memory
from tests.support.rewrites import move
from tests.support.saves import BLOB, CELL, cells, same_state, small, small_folder

if TYPE_CHECKING:
    from tests.support.ranks import Pool


KEYS = 6


def state() -> dict[str, Any]:
    """Several blobs, two equal tensors, a tensor without whole cells, and an object with a large buffer."""
    many = {f"w{n}": cells(15, seed=n) for n in range(KEYS)}
    return many | {"same": cells(15, seed=0), "odd": cells(2.5, seed=99), "plain": b"x" * 70_000}


def zeros() -> dict[str, Any]:
    return {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for key, one in state().items()}


@pytest.fixture
def faults() -> FaultyStore:
    return FaultyStore(memory(near=False))


@pytest.fixture
def store(faults: FaultyStore) -> Store:
    made = small(faults)
    made.save(state(), step=1)
    return made


def elsewhere(store: Store) -> Repository:
    """A different host."""
    storage = store.repository.storage
    assert isinstance(storage, FaultyStore)
    return Repository(storage.inner)


def rewritten(repo: Repository) -> None:
    """The checkpoint is rewritten, and its old blobs are deleted."""
    move(repo, list_commits(repo).visible()[0])
    collect(repo)


def rewritten_twice(repo: Repository) -> None:
    """It is rewritten a second time, and the blobs of the first rewrite are deleted."""
    rewritten(repo)
    rewritten(repo)


def undone(repo: Repository) -> None:
    """The rewrite that a load reads is undone, and its bytes are deleted."""
    old = next(one for one in list_commits(repo).live() if one.last == "replaced")
    restore(repo, old)
    for _ in range(2):
        collect(repo)


CHANGES: dict[str, Callable[[Repository], None]] = {
    "rewritten": rewritten,
    "rewritten twice": rewritten_twice,
    "undone": undone,
}


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest, store: Store) -> Callable[[], None]:
    if request.param == "undone":
        move(elsewhere(store), store.get("default@1").commit)
    return lambda: CHANGES[request.param](elsewhere(store))


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("verify", [True, False])
def test_a_load_continues_from_the_new_location_of_a_rewritten_checkpoint(
    store: Store, faults: FaultyStore, change: Callable[[], None], at: int, verify: bool
) -> None:
    faults.inject(call_first("read_into", meanwhile(change), key="objects/*.safetensors", at=at))
    told, target = [], zeros()
    loaded = store.load(target, "default@1", verify=verify, progress=lambda done, total: told.append((done, total)))
    assert same_state(target, state())
    assert same_state(store.read(loaded), state())
    assert not verify or told[-1][0] == told[-1][1]


@pytest.mark.parametrize("threads", [1, 4])
def test_values_read_before_a_rewrite_are_kept(store: Store, faults: FaultyStore, threads: int) -> None:
    reads = 2 * BLOB // CELL
    faults.inject(call_first("read_into", meanwhile(lambda: rewritten(elsewhere(store))), at=4))
    before = store.get("default@1")
    data = store.read(before, threads=threads)
    assert same_state(data, state())
    old = [key for key in faults.keys("read_into") if before.commit.txid in key]
    new = [key for key in faults.keys("read_into") if before.commit.txid not in key]
    assert old
    assert new
    faults.calls.clear()
    store.read("default@1", threads=threads)
    assert len(new) < len(faults.keys("read_into")) < reads


def test_a_load_follows_a_manifest_deleted_before_its_read(store: Store, faults: FaultyStore) -> None:
    for method in ("load", "read"):
        faults.inject(call_first("get", meanwhile(lambda: rewritten(elsewhere(store))), key="objects/*.manifest"))
        user = Store(Repository(faults))
        target = zeros()
        if method == "load":
            user.load(target, "default@1")
        else:
            target = user.read("default@1")
        assert same_state(target, state())
        faults.heal()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_load_follows_a_large_manifest_deleted_during_its_read(
    store: Store, faults: FaultyStore, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "WHOLE_BYTES", 0)
    change = meanwhile(lambda: rewritten(elsewhere(store)))
    faults.inject(call_first("read_into", change, key="objects/*.manifest", at=at))
    user = Store(Repository(faults))
    target = zeros()
    user.load(target, "default@1")
    assert same_state(target, state())


def load_while_it_moves(rank: int, size: int, path: Path) -> bool:
    """On rank 1, the checkpoint is rewritten and its old blobs are deleted before the first read."""
    storage = FaultyStore(small_folder(path).repository.storage)
    store = Store(Repository(storage))
    if rank == 1:
        storage.inject(call_first("read_into", meanwhile(lambda: rewritten(elsewhere(store))), key="objects/*"))
    target = zeros()
    store.load(target, "default@1")
    return same_state(target, state())


def test_each_rank_follows_a_rewrite_independently(ranks: Pool, tmp_path: Path) -> None:
    small_folder(tmp_path / "store").save(state(), step=1)
    assert ranks.run(3, load_while_it_moves, tmp_path / "store") == [True] * 3
