"""A host reads each record from the store once, a process decodes it once, and listings remain correct."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import casckpt
from casckpt.errors import Damaged, NotFound, Unsupported
from casckpt.format import records
from casckpt.format.keys import commit_key
from casckpt.format.names import TxId
from casckpt.format.records import Began
from casckpt.history import commits, tags, transactions
from casckpt.history.commits import forget, list_commits
from casckpt.history.leases import hold
from casckpt.repository.processes import this_process
from casckpt.repository.reading import check_requirements, fetch_record
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject
from casckpt.storage.memory import MemoryStore
from casckpt.upkeep.repair.repair import repair
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import keys, snapshot
from tests.support.repositories import commit_bare, manifest_id, meanwhile, memory, repository

Decoded = list[str]


@contextmanager
def decodings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoded]:
    """The keys of the records that are decoded inside the block."""
    seen: Decoded = []
    decode = records.decode

    def counting(data: bytes, kind: Any, key: str) -> Any:
        seen.append(key)
        return decode(data, kind, key)

    with monkeypatch.context() as patch:
        patch.setattr(records, "decode", counting)
        yield seen


def test_a_save_decodes_only_new_records(store: casckpt.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(4)}
    store.save(state, step=0)
    for step in range(200):
        commit_bare(store.repository, "other", step)
    store.save(state, step=1)
    with decodings(monkeypatch) as seen:
        store.save(state, step=2)
    assert [key for key in seen if key.startswith("commits/")] == [commit_key(store.get("default@1").commit.txid)]


def test_a_different_process_reads_the_catalogue_and_then_only_new_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = memory()
    first = repository(tmp_path, inner)
    for step in range(20):
        commit_bare(first, step=step)
    list_commits(first)
    storage = FaultyStore(inner)
    other = repository(tmp_path, storage)
    assert len(list_commits(other).live()) == 20
    assert storage.keys("get") == ["casckpt.json"]
    made = commit_bare(first, step=20)
    with decodings(monkeypatch) as seen:
        assert len(list_commits(other).live()) == 21
    assert seen == [commit_key(made.txid)]


def test_records_that_were_added_to_a_log_are_detected(tmp_path: Path) -> None:
    repo, other = repository(tmp_path, storage := memory()), repository(tmp_path, storage, seed=2)
    made = commit_bare(repo)
    assert [commit.last for commit in list_commits(repo).live()] == ["committed"]
    forget(other, made)
    assert [commit.last for commit in list_commits(repo).live()] == ["forgotten"]


def test_a_record_with_a_different_size_is_reread(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    made = commit_bare(repo)
    list_commits(repo)
    repo.storage.replace(commit_key(made.txid), b"torn")
    assert isinstance(list_commits(repo).damaged[made.txid], Damaged)
    assert isinstance(list_commits(repo).damaged[made.txid], Damaged)  # a damaged record is never cached


def test_a_fresh_read_detects_that_a_known_record_was_corrupted(tmp_path: Path) -> None:
    class Silent(MemoryStore):
        """Storage whose listings do not show that content has changed, as on a disk with a flipped bit."""

        def list(self, prefix: str, **known: Any) -> Iterator[ListedObject]:
            return (ListedObject(entry.key, entry.size) for entry in super().list(prefix, **known))

    repo = repository(tmp_path, Silent(uuid4().hex))
    made = commit_bare(repo)
    list_commits(repo)
    data = repo.storage.get(commit_key(made.txid), limit=1 << 20)
    repo.storage.replace(commit_key(made.txid), data.replace(b"run", b"ruN"))
    assert made.txid in list_commits(repo).commits
    assert made.txid in list_commits(repo, anew=True).damaged


def demand(repo: Repository) -> None:
    repo.change_settings(requires=["rewrites"])


def join(repo: Repository) -> object:
    txid = repo.new_txid("run", 1)
    began = Began(txid=txid, run="run", step=1, time=1, process=this_process(), manifest=manifest_id("x"))
    return transactions.join(repo, began)


WRITES: dict[str, Callable[[Repository], object]] = {
    "begin": lambda repo: transactions.begin(repo, "run", 1),
    "join": join,
    "restore": lambda repo: commits.restore(repo, list_commits(repo).live()[0]),
    "tag": lambda repo: tags.set_tag(repo, "other", list_commits(repo).live()[0]),
    "hold": lambda repo: hold(repo, "other", list_commits(repo).live()[0], 60),
    "untag": lambda repo: tags.delete_tag(repo, "best"),
    "settings": lambda repo: repo.change_settings(min_age_seconds=5),
    "repair": repair,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_version_that_does_not_know_a_requirement_does_not_write_to_the_store(
    repo: Repository, write: Callable[[Repository], object]
) -> None:
    tags.set_tag(repo, "best", commit_bare(repo))
    check_requirements(repo)
    demand(repo)
    before = snapshot(repo)
    with pytest.raises(Unsupported, match=r"know rewrites .* upgrade casckpt"):
        write(repo)
    new = snapshot(repo).keys() - before.keys()
    assert {key.partition("/")[0] for key in new} <= {"commits"}, "a transaction that was refused is revoked"
    assert len(list_commits(repo).visible()) == 1
    assert tags.tags(repo).keys() == {"best"}


def test_a_transaction_begun_while_a_requirement_is_set_is_rejected(repo: Repository, faults: FaultyStore) -> None:
    """The transaction checks requirements after it is open. A process that sets a requirement waits for open
    transactions."""
    faults.inject(call_first("put", meanwhile(lambda: demand(repo)), key="transactions/*"))
    with pytest.raises(Unsupported):
        transactions.begin(repo, "run", 1)
    assert keys(repo, "transactions/") == set()


def test_a_host_reads_the_settings_only_once(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
    repo.change_settings(min_age_seconds=5)
    reads = faults.count("get", "settings/*")
    for _ in range(3):
        check_requirements(repo)
    check_requirements(repository(tmp_path, faults))
    assert faults.count("get", "settings/*") == reads + 1


def test_unreadable_settings_are_treated_as_an_unknown_requirement(repo: Repository) -> None:
    demand(repo)
    (key,) = keys(repo, "settings/")
    repo.storage.replace(key, b"torn")
    with pytest.raises(Damaged, match="Restore the file"):
        check_requirements(repo)


def test_changes_of_other_settings_keep_the_requirements(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    demand(repo)
    monkeypatch.setattr(records, "KNOWN_REQUIREMENTS", frozenset({"rewrites"}))
    repo.change_settings(min_age_seconds=5)
    assert repo.settings.requires == ["rewrites"]
    transactions.begin(repo, "run", 1).abort("who knows it may write")


def test_a_returned_error_does_not_keep_the_variables_of_the_callers(tmp_path: Path) -> None:
    """Python 3.13 can reach the frames of all callers from its traceback, or from that of its context."""
    error = fetch_record(repository(tmp_path), commit_key(TxId("1")))
    assert isinstance(error, NotFound)
    assert error.__traceback__ is None
    assert error.__context__ is None
