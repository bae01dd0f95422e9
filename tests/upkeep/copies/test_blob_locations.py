"""Blob locations that are remembered between copies: names from manifests are cached; liveness is always rechecked."""

from __future__ import annotations

from collections import Counter

import pytest

from casckpt.contents import blobs, manifests
from casckpt.format.names import TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, forget, list_commits, purge
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.blob_locations import BlobLocations
from casckpt.upkeep.copies.copy import execute, plan_copy
from tests.support.copies import chain
from tests.support.repositories import blob_hash, save

A = blob_hash("a")
WANTED = {A: BlobRef(A, 1, TxId("in another store, at which nobody looks"))}


def found(places: BlobLocations, repo: Repository) -> str | None:
    ref = places.locate(list_commits(repo), WANTED).get(A)
    return None if ref is None else ref.uploader


def test_only_live_commits_provide_locations(repo: Repository) -> None:
    places = BlobLocations(repo, {A})
    assert found(places, repo) is None
    commit = save(repo, texts=["a", "b"])
    assert found(places, repo) == commit.txid
    purge(repo, forget(repo, commit))
    assert found(places, repo) is None


@pytest.mark.parametrize("purged", [0, 1])
def test_a_location_in_a_live_commit_is_preferred(repo: Repository, purged: int) -> None:
    both = [save(repo, step=step, texts=["a"]) for step in (0, 1)]
    places = BlobLocations(repo, {A})
    assert found(places, repo) in {one.txid for one in both}
    purge(repo, forget(repo, both[purged]))
    assert found(places, repo) == both[1 - purged].txid


@pytest.mark.parametrize("marked", [0, 1])
def test_an_undamaged_location_is_preferred(repo: Repository, marked: int) -> None:
    both = [save(repo, step=step, texts=["a"]) for step in (0, 1)]
    places = BlobLocations(repo, {A})
    assert found(places, repo)
    blobs.mark_damaged(repo, both[marked].txid, A, "for a test")
    assert found(places, repo) == both[1 - marked].txid


def test_a_blob_of_a_different_size_is_a_different_blob(repo: Repository) -> None:
    commit = save(repo, texts=["a"])
    assert BlobLocations(repo, {A}).locate(list_commits(repo), {A: BlobRef(A, 2, commit.txid)}) == {}


def test_copying_many_checkpoints_reads_each_target_manifest_once(
    repo: Repository, target: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = chain(repo, 8)
    looked = Counter[str]()
    learn = manifests.learn

    def counted(where: Repository, commits: list[Commit]) -> list[Commit]:
        if where is target:
            looked.update(commit.txid for commit in commits)
        return learn(where, commits)

    plan = plan_copy(source, target)
    monkeypatch.setattr(manifests, "learn", counted)
    assert len(execute(source, target, plan).copied) == 8
    assert set(looked.values()) == {1}
