"""Requirements in the settings: a version that does not support them may read but does not write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.errors import Damaged, Unsupported
from casckpt.format import records
from casckpt.format.records import Began
from casckpt.history import commits, tags, transactions
from casckpt.history.commits import list_commits
from casckpt.history.leases import hold
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.upkeep.repair.repair import repair
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import keys, snapshot
from tests.support.repositories import commit_bare, manifest_id, meanwhile, repository


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
def test_a_version_that_does_not_know_a_requirement_does_not_write(
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
    """The transaction checks once it is open. A writer of the requirement waits for open transactions."""
    faults.inject(call_first("put", meanwhile(lambda: demand(repo)), key="transactions/*"))
    with pytest.raises(Unsupported):
        transactions.begin(repo, "run", 1)
    assert keys(repo, "transactions/") == set()


def test_settings_are_read_once(tmp_path: Path, repo: Repository, faults: FaultyStore) -> None:
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


def test_other_settings_changes_keep_requirements(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    demand(repo)
    monkeypatch.setattr(records, "KNOWN_REQUIREMENTS", frozenset({"rewrites"}))
    repo.change_settings(min_age_seconds=5)
    assert repo.settings.requires == ["rewrites"]
    transactions.begin(repo, "run", 1).abort("who knows it may write")
