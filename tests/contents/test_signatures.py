"""Signatures in a store: which ones gc deletes, and which ones it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.contents.signatures import list_signatures, remove_signatures, sign
from casckpt.format.keys import transaction_key
from casckpt.format.names import ManifestId
from casckpt.format.records import Began
from casckpt.history.commits import Commit, forget, list_commits
from casckpt.history.transactions import begin
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.repository.signing_keys import private_key
from tests.support.copies import chain, copy, elsewhere
from tests.support.gcs import run_gc
from tests.support.repositories import memory, repository
from tests.support.signing import pair


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return chain(repository(tmp_path, memory()))


@pytest.fixture
def first(repo: Repository, tmp_path: Path) -> Commit:
    """Return run@0, signed and forgotten."""
    commit = list_commits(repo).live()[0]
    sign(repo, commit, private_key(pair(tmp_path).private))
    forget(repo, commit)
    return commit


def ids(repo: Repository) -> set[ManifestId]:
    return set(list_signatures(repo).values())


def test_gc_keeps_signatures_until_the_purge(repo: Repository, first: Commit) -> None:
    remove_signatures(repo)
    assert ids(repo) == {first.id}
    run_gc(repo)
    assert ids(repo) == set()


def test_gc_keeps_a_signature_of_a_checkpoint_without_known_commits(repo: Repository, first: Commit) -> None:
    """A save or a copy stores the signature before it commits."""
    key = f"signatures/{'a' * 64}/{'b' * 64}"
    repo.storage.put(key, b"x")
    run_gc(repo)
    assert list_signatures(repo) == {key: "a" * 64}


def test_gc_keeps_the_signatures_of_a_copy_in_progress(tmp_path: Path, repo: Repository, first: Commit) -> None:
    """The destination has purged the checkpoint, and the copy commits it again."""
    target = elsewhere(tmp_path)
    copy(repo, target, first)
    forget(target, list_commits(target).live()[0])
    storage = target.storage
    run_gc(target)
    assert ids(target) == set()
    for key in list_signatures(repo):
        storage.put(key, repo.storage.get(key, limit=1 << 20))
    txid = target.new_txid(first.run, first.step)
    began = Began(
        txid=txid, run=first.run, step=first.step, time=target.clock(), process=this_process(), manifest=first.id
    )
    target.put_record(transaction_key(txid), began)
    remove_signatures(target)
    assert ids(target) == {first.id}
    target.storage.delete(transaction_key(txid))
    remove_signatures(target)
    assert ids(target) == set()


def test_gc_keeps_the_signature_of_a_checkpoint_that_was_purged_and_copied_back(
    tmp_path: Path, repo: Repository, first: Commit
) -> None:
    target = elsewhere(tmp_path)
    copy(repo, target, first)
    run_gc(repo)
    assert ids(repo) == set()
    copy(target, repo, list_commits(target).live()[0])
    run_gc(repo)
    assert {commit.last for commit in list_commits(repo).commits.values() if commit.id == first.id} >= {"purged"}
    assert ids(repo) == {first.id}


def test_gc_keeps_all_signatures_if_a_transaction_or_record_is_unreadable(repo: Repository, first: Commit) -> None:
    signed = {key: repo.storage.get(key, limit=1 << 20) for key in list_signatures(repo)}
    run_gc(repo)
    for key, data in signed.items():
        repo.storage.put(key, data)
    opened = begin(repo, "other", 1)
    where = f"transactions/{opened.txid}"
    repo.storage.replace(where, b"spoilt")
    remove_signatures(repo.fresh())
    assert ids(repo) == {first.id}
