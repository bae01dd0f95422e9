"""Damaged commit records are reported and never misread, and do not affect other commits."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from casckpt.base.digest import hex_digest
from casckpt.errors import Conflict, Damaged, NotFound, Refused
from casckpt.format import records
from casckpt.format.keys import commit_key
from casckpt.format.records import Forgotten, Restored
from casckpt.history.commits import forget, keep, list_commits, list_names, purge, purge_unreadable, refresh, restore
from casckpt.history.following import newest_reusable
from casckpt.repository.repository import Repository
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore, fail_before
from tests.support.repositories import commit_bare, repository


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return repository(tmp_path)


def flip(repo: Repository, key: str) -> None:
    data = bytearray(repo.storage.get(key, limit=1 << 20))
    data[len(data) // 3] ^= 1
    repo.storage.replace(key, bytes(data))


@pytest.mark.parametrize("damage", ["flip", "tear", "empty", "huge", "swap", "future"])
def test_a_damaged_first_record_is_reported_and_does_not_affect_others(repo: Repository, damage: str) -> None:
    good, bad = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    key = commit_key(bad.txid)
    data = repo.storage.get(key, limit=1 << 20)
    if damage == "flip":
        flip(repo, key)
    else:
        tag = data.replace(b'"committed"', b'"prophesied"')
        line = tag.partition(b"\n")[0]
        spoiled = {
            "tear": data[: len(data) // 2],
            "empty": b"",
            "huge": b" " * (records.MAX_RECORD_BYTES + 1),
            "swap": repo.storage.get(commit_key(good.txid), limit=1 << 20),
            "future": line + b"\n" + hex_digest(line).encode() + b"\n",
        }
        repo.storage.replace(key, spoiled[damage])
    found = list_commits(repo)
    assert found.commits.keys() == {good.txid}
    assert found.damaged.keys() == {bad.txid}
    assert isinstance(found.damaged[bad.txid], Damaged | Refused)
    assert list_names(repo) == {(good.txid, 0), (bad.txid, 0)}
    assert newest_reusable(repo, "a", anew=True) == good


def test_a_damaged_record_is_reread_after_its_repair(repo: Repository) -> None:
    first = commit_bare(repo)
    key = commit_key(first.txid)
    data = repo.storage.get(key, limit=1 << 20)
    flip(repo, key)
    assert list_commits(repo).damaged.keys() == {first.txid}
    repo.storage.replace(key, data)
    assert list_commits(repo).commits == {first.txid: first}


def test_a_damaged_record_makes_the_state_uncertain_until_a_purge(repo: Repository) -> None:
    forgotten = forget(repo, commit_bare(repo, "a", 1))
    flip(repo, commit_key(forgotten.txid, 1))
    found = list_commits(repo)
    assert found.damaged.keys() == {forgotten.txid}
    assert found.commits[forgotten.txid].last == "committed"
    assert newest_reusable(repo, "a", anew=True) is None  # no save reuses a checkpoint that may be purged
    again = forget(repo, found.commits[forgotten.txid])
    assert again.number == 2
    assert list_commits(repo).damaged.keys() == {forgotten.txid}
    assert list_commits(repo).commits[forgotten.txid] == again
    gone = purge(repo, again)
    assert list_commits(repo).damaged == {}
    assert list_commits(repo).commits[forgotten.txid] == gone


@pytest.mark.parametrize("gone", [False, True])
def test_a_kept_number_after_a_damaged_record_leaves_the_state_uncertain(repo: Repository, gone: bool) -> None:
    """The kept number does not show whether the checkpoint was purged or restored."""
    forgotten = forget(repo, commit_bare(repo, "a", 1))
    restored = restore(repo, forgotten)
    assert keep(repo, restored.txid, 3)
    if gone:
        repo.storage.delete(commit_key(restored.txid, 2))
    else:
        flip(repo, commit_key(restored.txid, 2))
    found = list_commits(Repository(repo.storage, repo.cache_dir and repo.cache_dir / "new"))
    assert found.damaged.keys() == {restored.txid}
    if not gone:
        assert newest_reusable(repo, "a", anew=True) is None
        with pytest.raises(Damaged):
            purge(repo, forgotten)


def test_kept_numbers_do_not_affect_an_old_commit(repo: Repository) -> None:
    forgotten = forget(repo, commit_bare(repo, "a", 1))
    assert keep(repo, forgotten.txid, 2)
    now = refresh(repo, forgotten)
    assert (now.last, now.number, now.changed_at) == ("forgotten", 2, forgotten.changed_at)
    assert keep(repo, forgotten.txid, 3)
    assert refresh(repo, now) == refresh(repo, forgotten) == list_commits(repo).commits[forgotten.txid]


def test_a_kept_number_does_not_hide_a_restore_that_the_listing_missed(tmp_path: Path) -> None:
    """Both records are written during the listing, which contains only the later one. If gc ignored the other, it
    would later purge a visible checkpoint."""

    class Late(MemoryStore):
        def list(self, prefix: str, **known):  # type: ignore[no-untyped-def]  # as its base
            return (entry for entry in super().list(prefix, **known) if not entry.key.endswith(".2"))

    storage = MemoryStore(uuid4().hex)
    repo = repository(tmp_path, storage)
    back = restore(repo, forget(repo, commit_bare(repo)))
    assert keep(repo, back.txid, 3)
    late = repository(tmp_path / "late", Late(storage.name))
    found = list_commits(late).commits[back.txid]
    assert (found.last, found.number, found.restored) == ("restored", 3, 2)
    with pytest.raises(Conflict, match="forget it first"):
        purge(late, found)


def test_a_record_after_a_damaged_record_takes_effect(repo: Repository) -> None:
    old = commit_bare(repo)
    forget(repo, old)
    flip(repo, commit_key(old.txid, 1))
    with pytest.raises(Damaged):
        refresh(repo, old)
    with pytest.raises(Damaged):
        forget(repo, old)


def test_a_purged_commit_that_is_briefly_unreadable_is_read_by_the_next_listing(tmp_path: Path) -> None:
    """A mirror would copy it again, since only these records show its purge."""
    faults = FaultyStore(MemoryStore(uuid4().hex))
    repo = repository(tmp_path, faults)
    purge(repo, forget(repo, commit_bare(repo)))
    looker = Repository(faults, tmp_path / "looker")
    faults.inject(fail_before("get", key="commits/*", error=NotFound("not yet")))
    assert not list_commits(looker).commits
    assert list_commits(looker) == list_commits(Repository(faults, tmp_path / "fresh"))
    assert len(list_commits(looker).commits) == 1


def test_a_log_that_lacks_its_first_record_counts_as_damaged(repo: Repository) -> None:
    first = commit_bare(repo)
    forget(repo, first)
    repo.storage.delete(commit_key(first.txid))
    found = list_commits(repo)
    assert found.commits == {}
    assert isinstance(found.damaged[first.txid], NotFound)


def test_a_record_that_the_listing_missed_is_read(tmp_path: Path) -> None:
    class Late(MemoryStore):
        """The listing begins before the first record exists, and ends after the second."""

        def list(self, prefix: str, **known):  # type: ignore[no-untyped-def]  # as its base
            return (entry for entry in super().list(prefix, **known) if entry.key.endswith(".1"))

    storage = MemoryStore(uuid4().hex)
    first = commit_bare(repository(tmp_path, storage))
    forget(repository(tmp_path, storage), first)
    assert list_commits(repository(tmp_path, Late(storage.name))).commits[first.txid].last == "forgotten"


def test_an_unreadable_transaction_can_be_ended(repo: Repository) -> None:
    first = forget(repo, commit_bare(repo))
    flip(repo, commit_key(first.txid))
    assert list_commits(repo).damaged.keys() == {first.txid}
    purge_unreadable(repo, first.txid)
    found = list_commits(repo)
    assert (found.commits, found.damaged) == ({}, {})
    assert (commit_key(first.txid, 2)) in {entry.key for entry in repo.storage.list("commits/")}


def test_a_purged_record_is_final_regardless_of_later_records(repo: Repository) -> None:
    purged = purge(repo, forget(repo, commit_bare(repo)))
    repo.put_record(commit_key(purged.txid, 3), Restored(txid=purged.txid, time=9, who="ann@node3"))
    assert not list_commits(repo).commits[purged.txid].live
    repo.storage.replace(commit_key(purged.txid, 3), b"torn")
    assert list_commits(repo).damaged == {}


def test_a_forgotten_record_must_name_its_own_transaction(repo: Repository) -> None:
    one, two = commit_bare(repo, "a", 1), commit_bare(repo, "a", 2)
    repo.put_record(commit_key(one.txid, 1), Forgotten(txid=two.txid, time=1, who="ann@node3"))
    found = list_commits(repo)
    assert isinstance(found.damaged[one.txid], Refused)
    assert found.commits[one.txid].visible
