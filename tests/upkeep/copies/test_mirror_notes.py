"""Notes about safe copies in a mirror: each is valid until the next restore of its checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from casckpt.format.names import TxId
from casckpt.history.commits import Commit, forget, purge, restore
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.mirror_notes import key_of_note, note, take_back, unmirrored
from tests.support.gcs import keys
from tests.support.repositories import commit_bare, repository

URL = "s3://away"


def safe(repo: Repository, commit: Commit) -> bool:
    return unmirrored(repo, [commit], URL) == []


def test_a_note_about_a_mirrored_checkpoint_is_valid_until_the_next_restore(repo: Repository) -> None:
    commit = commit_bare(repo)
    assert not safe(repo, commit)
    note(repo, commit, URL)
    assert safe(repo, commit)
    gone = forget(repo, commit)
    assert safe(repo, gone), "to be purged once the mirror has it"
    back = restore(repo, gone)
    assert not safe(repo, back)
    assert not safe(repo, forget(repo, back))
    note(repo, back, URL)
    again = forget(repo, back)
    assert safe(repo, again)
    assert safe(repo, purge(repo, again))
    assert [one.restored for one in (commit, gone, back, again, purge(repo, again))] == [0, 0, 2, 2, 2]


def test_a_note_about_a_checkpoint_from_before_its_restore_is_not_valid(repo: Repository) -> None:
    """The copying process has read the log, listed the mirror, and pauses before it writes the note."""
    gone = forget(repo, commit_bare(repo))
    back = restore(repo, gone)
    note(repo, gone, URL)
    assert not safe(repo, back)
    note(repo, back, URL)
    note(repo, gone, URL)
    assert safe(repo, back)


@pytest.mark.parametrize("restored", [False, True])
def test_a_note_about_a_mirror_can_be_withdrawn(repo: Repository, restored: bool) -> None:
    commit = commit_bare(repo)
    note(repo, commit, URL)
    if restored:
        commit = restore(repo, forget(repo, commit))
        note(repo, commit, URL)
    assert key_of_note(commit) in keys(repo, "mirrored/")
    take_back(repo, [commit])
    assert not safe(repo, commit)


def test_a_note_for_a_different_mirror_is_replaced(repo: Repository) -> None:
    commit = restore(repo, forget(repo, commit_bare(repo)))
    note(repo, commit, "s3://elsewhere")
    assert not safe(repo, commit)
    note(repo, commit, URL)
    assert safe(repo, commit)
    assert len(keys(repo, "mirrored/")) == 1


def test_a_note_about_a_copy_that_the_mirror_lacks_does_not_count(repo: Repository) -> None:
    noted, other, unknown = (commit_bare(repo, "a", step) for step in range(3))
    note(repo, noted, URL, noted)
    note(repo, other, URL, noted)
    note(repo, unknown, URL)
    asked: list[set[str]] = []

    def has(txids: Collection[TxId]) -> list[TxId]:
        asked.append({*txids})
        return []

    every = [noted, other, unknown]
    assert unmirrored(repo, every, URL) == []
    assert unmirrored(repo, every, URL, has=lambda txids: txids) == []
    assert unmirrored(repo, every, URL, has=has) == [noted, other]
    assert asked[0] == {noted.txid}


def test_a_note_that_another_host_replaced_is_read_again(tmp_path: Path, repo: Repository) -> None:
    commit, copy = commit_bare(repo, "a", 0), commit_bare(repo, "a", 1)
    note(repo, commit, URL, commit)
    assert safe(repo, commit)
    other = repository(tmp_path / "other", repo.storage, seed=2)
    take_back(other, [commit])
    note(other, commit, URL, copy)
    assert unmirrored(repo, [commit], URL, has={copy.txid}.intersection) == []
