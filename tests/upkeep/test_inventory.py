"""The contents of a store are known without listing it again, and always match a listing."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from casckpt.contents import manifests
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, list_commits, trim
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep import inventory as stock
from casckpt.upkeep.gc.forgetting import forget
from casckpt.upkeep.inventory import Inventory, Sums, list_unguarded, sums_of
from casckpt.upkeep.sizes import Sizes, StoreStats
from tests.support.faulty import FaultyStore
from tests.support.gcs import collect
from tests.support.repositories import blob_hash, memory, put_blob, repository, save
from tests.support.rewrites import move


def taken(repo: Repository, as_purged: Iterable[Commit] = ()) -> Inventory:
    return list_unguarded(repo, list_commits(repo), as_purged={commit.txid for commit in as_purged})


def listed(repo: Repository) -> dict[str, int]:
    return {entry.key: entry.size for entry in repo.storage.list("objects/")}


def named(repo: Repository) -> set[str]:
    """Return the keys of all objects that live commits name."""
    live = list_commits(repo).live()
    keys = {manifest_key(one.txid, one.id) for one in live}
    return keys | {blob_key(owner, name) for one in live for owner, name, _ in manifests.blobs_of(repo, one)}


def reused(repo: Repository, commit: Commit) -> list[BlobRef]:
    return [BlobRef(name, size, owner) for owner, name, size in manifests.blobs_of(repo, commit)]


def listings(repo: Repository, tmp_path: Path) -> list[str]:
    """Return the listings below objects/ that a new process on this host makes for its inventory."""
    watched = FaultyStore(repo.storage)
    taken(repository(tmp_path, watched))
    return sorted(call.key for call in watched.calls if call.method == "list" and call.key.startswith("objects/"))


@pytest.mark.parametrize("seed", range(12))
def test_the_inventory_always_matches_a_listing(seed: int, tmp_path: Path) -> None:
    """Two hosts save, fail, forget and collect, and sometimes list. The inventory never hides garbage from gc."""
    draw, storage = random.Random(seed), memory()
    hosts = [repository(tmp_path / name, storage, seed=number) for number, name in enumerate("ab")]

    def save_some(repo: Repository) -> None:
        live = list_commits(repo).live()
        known = reused(repo, draw.choice(live)) if live else []
        texts = [f"{draw.random()}" for _ in range(draw.randrange(3))]
        save(repo, step=draw.randrange(10**6), texts=texts, reused=draw.sample(known, draw.randint(0, len(known))))

    def fail(repo: Repository) -> None:
        put_blob(repo, repo.new_txid("run", 0), f"{draw.random()}")

    def forget_one(repo: Repository) -> None:
        visible = list_commits(repo).visible()
        if visible:
            forget(repo, [draw.choice(visible)])

    def clean(repo: Repository) -> None:
        policy = Policy(keep_last=draw.randint(1, 4)) if draw.random() < 0.5 else None
        collect(repo, policy, dry_run=draw.random() < 0.2)

    for _ in range(40):
        draw.choice([save_some, save_some, fail, forget_one, clean])(draw.choice(hosts))
        for repo in draw.sample(hosts, draw.randint(0, 2)):
            found, there = taken(repo), listed(repo)
            assert found.total() == sums_of(there.items())
            assert {key: there[key] for key in found.sizes} == found.sizes
            assert there.keys() - named(repo) <= found.sizes.keys()


def test_the_inventory_lists_each_folder_only_once(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    first = save(repo, texts=["a", "b"])
    save(repo, step=1, texts=["c"], reused=reused(repo, first))
    assert len(listings(repo, tmp_path)) == 2
    assert listings(repo, tmp_path) == []
    third = save(repo, step=2)
    assert listings(repo, tmp_path) == [f"objects/{third.txid}/"]
    assert listings(repo, tmp_path) == []


def test_after_a_purge_a_remaining_commit_becomes_the_guard(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    first = save(repo, texts=["a", "b"])
    save(repo, step=1, texts=["c"], reused=reused(repo, first)[:1])
    forget(repo, [first])
    collect(repo)
    assert taken(repo).total() == sums_of(listed(repo).items()) == Sums(2, 2, 1, *taken_manifest_bytes(repo))
    assert listings(repo, tmp_path) == []


def taken_manifest_bytes(repo: Repository) -> Sequence[int]:
    return [size for key, size in listed(repo).items() if key.endswith("manifest")]


def test_the_folder_of_trimmed_places_has_no_guard(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    commit = save(repo, texts=["a"])
    moved = move(repo, commit)
    assert not taken(repo).sizes
    trim(repo, moved)
    assert taken(repo).sizes.keys() == {key for key in listed(repo) if commit.txid in key}


def test_folders_with_unnamed_objects_are_listed_every_time(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    first = save(repo, texts=["a"])
    owner = first.txid
    leftover = blob_key(owner, blob_hash("no longer named"))
    repo.storage.put(leftover, b"no longer named")
    repo.storage.put("objects/note", b"somebody's")
    for _ in range(2):
        found = taken(repo)
        assert leftover in found.sizes
        assert list(found.foreign) == ["objects/note"]
        assert found.guarded == {}
        assert listings(repo, tmp_path) == [f"objects/{owner}/"]
    assert collect(repo).deleted_blobs == 1
    taken(repo)
    assert listings(repo, tmp_path) == []


def test_foreign_files_beside_blobs_are_reported_every_time(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    strange = f"objects/{save(repo, texts=['a']).txid}/readme"
    repo.storage.put(strange, b"somebody's")
    for _ in range(2):
        assert list(taken(repo).foreign) == [strange]


def test_folders_with_missing_objects_are_listed_every_time(tmp_path: Path) -> None:
    """The missing object may be restored later."""
    repo = repository(tmp_path)
    first = save(repo, texts=["a", "b"])
    key = blob_key(first.txid, blob_hash("a"))
    repo.storage.delete(key)
    assert taken(repo).total().blobs == 1
    repo.storage.put(key, b"a")
    assert taken(repo).total().blobs == 2


def test_commits_that_are_about_to_be_purged_are_not_guards(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    first, second = save(repo, texts=["a"]), save(repo, step=1, texts=["b"])
    assert taken(repo).sizes == {}
    found = taken(repo, as_purged=[first])
    assert {key.split("/")[1] for key in found.sizes} == {first.txid}
    assert set(found.guarded) == {second.txid}
    assert taken(repo).sizes == {}
    assert listings(repo, tmp_path) == []  # the commit is live, so it still guards its folder


def stats(repo: Repository) -> StoreStats:
    return Sizes(repo, list_commits(repo)).stats()


def test_without_a_catalogue_all_folders_are_listed(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    save(repo, texts=["a"])
    before = stats(repo)
    assert before == stats(repo)
    repo.catalogue.reindex()
    assert len(listings(repo, tmp_path)) == 1
    assert stats(repo) == before


def test_a_manifest_in_a_guarded_folder_is_known(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    first = save(repo, texts=["a"])
    key = manifest_key(first.txid, first.id)
    assert taken(repo).has_manifest(key)
    assert not taken(repo).has_manifest(key.replace(first.txid, repo.new_txid("run", 9)))
    assert not stock.Inventory().has_manifest(key)
