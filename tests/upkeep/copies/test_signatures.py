"""Signatures are copied before the commit that they belong to, and gc deletes them with their checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from casckpt.history.commits import forget, list_commits
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.doctor import examine
from casckpt.upkeep.repair.verify import verify
from casckpt.upkeep.usage import measure, usage
from tests.support.copies import chain, copy, elsewhere
from tests.support.faulty import FaultyStore, fail_before
from tests.support.gcs import keys, run_gc
from tests.support.repositories import memory, repository

KEYS = ("a" * 64, "b" * 64)


def sign(repo: Repository, *numbers: int) -> list[str]:
    """Add two signatures to each of several checkpoints."""
    live = list_commits(repo).live()
    found = [f"signatures/{live[number].id}/{key}" for number in numbers for key in KEYS]
    for key in found:
        repo.storage.put(key, key.encode())
    return found


def signatures(repo: Repository) -> set[str]:
    return keys(repo, "signatures/")


def test_a_copy_copies_signatures_before_its_commit(tmp_path: Path, source: Repository) -> None:
    signed = sign(source, 1, 3)
    storage = FaultyStore(memory())
    target = elsewhere(tmp_path, storage)
    copy(source, target, "run@1")
    assert signatures(target) == {*signed[:2]}
    puts = storage.keys("put")
    commit = next(key for key in puts if key.startswith("commits/"))
    assert puts.index(commit) > max(map(puts.index, signed[:2]))
    assert storage.get(signed[0], limit=1 << 20) == signed[0].encode()
    copy(source, target)
    assert signatures(target) == {*signed}


def test_a_signature_added_later_is_copied_by_the_next_copy(tmp_path: Path, source: Repository) -> None:
    target = elsewhere(tmp_path)
    copy(source, target)
    signed = sign(source, 2)
    copy(source, target)
    assert signatures(target) == {*signed}
    copy(source, target)


def test_an_unreadable_signature_does_not_stop_a_copy(
    tmp_path: Path, source: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    large, small = sign(source, 1)
    source.storage.replace(large, bytes((1 << 20) + 1))
    target = elsewhere(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(copy(source, target).copied) == 4
    assert large in caplog.text
    assert signatures(target) == {small}


def test_two_simultaneous_copies_of_signatures_succeed(tmp_path: Path, source: Repository) -> None:
    signed = sign(source, 1)
    storage = FaultyStore(memory())
    target = elsewhere(tmp_path, storage)
    target.create()
    storage.inner.put(signed[0], signed[0].encode())
    storage.inject(fail_before("list", key="nothing"))
    copy(source, target)
    assert signatures(target) == {*signed}


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_gc_deletes_signatures_of_purged_checkpoints_without_errors(tmp_path: Path, where: str) -> None:
    storage = memory() if where == "memory" else LocalStore(tmp_path / "store")
    repo = chain(repository(tmp_path, storage))
    signed = sign(repo, 0, 1)
    forget(repo, list_commits(repo).live()[0])
    result = run_gc(repo)
    assert ([one.step for one in result.purged], result.foreign) == ([0], ())
    assert signatures(repo) == {*signed[2:]}
    assert all(finding.ok is not False for finding in examine(repo))
    assert not verify(repo).is_damaged
    assert measure(repo).checkpoints == 3
    assert not usage(repo).unreadable
