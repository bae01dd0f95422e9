"""A running load continues at the new locations if its checkpoint is rewritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.contents import manifests
from casckpt.history.commits import list_commits, restore
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.thin import execute, plan_thin
from tests.loading.conftest import elsewhere, state, zeros
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect
from tests.support.ranks import Pool
from tests.support.repositories import meanwhile
from tests.support.rewrites import move
from tests.support.saves import BLOB, CELL, same_state, small_folder


def rewritten(repo: Repository) -> None:
    """The checkpoint is rewritten, and its old blobs are deleted."""
    move(repo, list_commits(repo).visible()[0])
    collect(repo)


def rewritten_twice(repo: Repository) -> None:
    """The checkpoint is rewritten a second time, and the blobs of the first rewrite are deleted."""
    rewritten(repo)
    rewritten(repo)


def undone(repo: Repository) -> None:
    """The rewrite that a load reads is undone, and its bytes are deleted."""
    (commit,) = list_commits(repo).visible()
    restore(repo, commit.old[0])
    collect(repo)


CHANGES: dict[str, Callable[[Repository], None]] = {
    "rewritten": rewritten,
    "rewritten twice": rewritten_twice,
    "undone": undone,
}


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest, remote_store: Store) -> Callable[[], None]:
    if request.param == "undone":
        move(elsewhere(remote_store), remote_store.get("default@1").commit)
    return lambda: CHANGES[request.param](elsewhere(remote_store))


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("verify", [True, False])
def test_a_load_continues_from_the_new_location_of_a_rewritten_checkpoint(
    remote_store: Store, faults: FaultyStore, change: Callable[[], None], at: int, verify: bool
) -> None:
    faults.inject(call_first("read_into", meanwhile(change), key="objects/*.safetensors", at=at))
    told, target = [], zeros()
    loaded = remote_store.load(
        target, "default@1", verify=verify, progress=lambda done, total: told.append((done, total))
    )
    assert same_state(target, state())
    assert same_state(remote_store.read(loaded), state())
    assert not verify or told[-1][0] == told[-1][1]


def test_a_load_continues_at_old_places_with_entries_that_the_current_ones_lack(
    remote_store: Store, faults: FaultyStore
) -> None:
    """Until gc trims them, the places from before a thinning are there."""

    def change() -> None:
        repo = elsewhere(remote_store)
        rewritten(repo)
        execute(repo, plan_thin(repo, ["default@1"], drop="w5"))

    faults.inject(call_first("read_into", meanwhile(change), key="objects/*.safetensors"))
    target = zeros()
    remote_store.load(target, "default@1")
    assert same_state(target, state())
    assert remote_store.get("default@1").commit.dropped is not None


@pytest.mark.parametrize("threads", [1, 4])
def test_values_that_were_read_before_a_rewrite_are_kept(
    remote_store: Store, faults: FaultyStore, threads: int
) -> None:
    reads = 2 * BLOB // CELL
    faults.inject(call_first("read_into", meanwhile(lambda: rewritten(elsewhere(remote_store))), at=4))
    before = remote_store.get("default@1")
    data = remote_store.read(before, threads=threads)
    assert same_state(data, state())
    old = [key for key in faults.keys("read_into") if before.commit.txid in key]
    new = [key for key in faults.keys("read_into") if before.commit.txid not in key]
    assert old
    assert new
    faults.calls.clear()
    remote_store.read("default@1", threads=threads)
    assert len(new) < len(faults.keys("read_into")) < reads


def test_a_load_continues_if_its_manifest_is_deleted_before_it_is_read(
    remote_store: Store, faults: FaultyStore
) -> None:
    for method in ("load", "read"):
        faults.inject(
            call_first("get", meanwhile(lambda: rewritten(elsewhere(remote_store))), key="objects/*.manifest")
        )
        user = Store(Repository(faults))
        target = zeros()
        if method == "load":
            user.load(target, "default@1")
        else:
            target = user.read("default@1")
        assert same_state(target, state())
        faults.heal()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_load_continues_if_a_large_manifest_is_deleted_while_it_is_read(
    remote_store: Store, faults: FaultyStore, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "WHOLE_BYTES", 0)
    change = meanwhile(lambda: rewritten(elsewhere(remote_store)))
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


def test_each_rank_continues_independently_after_a_rewrite(ranks: Pool, tmp_path: Path) -> None:
    small_folder(tmp_path / "store").save(state(), step=1)
    assert ranks.run(3, load_while_it_moves, tmp_path / "store") == [True] * 3
