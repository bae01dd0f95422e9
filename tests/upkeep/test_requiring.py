"""A demand is set for all who write later, and its setter waits for those that began before."""

from __future__ import annotations

import pytest

from casckpt.errors import InvalidInput
from casckpt.format import records
from casckpt.repository import transactions
from casckpt.repository.repository import Repository
from casckpt.upkeep.requiring import require
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import begin_elsewhere, ticking
from tests.support.repositories import commit_bare, committed, meanwhile


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KNOWN_REQUIREMENTS", frozenset({"one", "two"}))


def test_who_demands_waits_for_open_transactions(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    waited = require(repo, "one", wait=5, revoke_after=60, sleep=ticking(repo))
    assert [one.txid for one in waited.still] == [txid]
    assert repo.settings.requires == ["one"]
    commit_bare(repo, "other", 7, txid=txid)
    later = transactions.begin(repo, "run", 1)  # which knows it
    waited = require(repo, "two", wait=5, revoke_after=1 << 20, sleep=ticking(repo))
    assert [one.txid for one in waited.still] == [later.txid]
    later.commit(committed(repo, "run", 1, txid=later.txid))
    assert require(repo, "two", wait=5, revoke_after=60, sleep=ticking(repo)).still == []
    assert repo.settings.requires == ["one", "two"]
    assert repo.newest_settings()[0] == 1, "what is demanded already is not written again"


def test_two_that_demand_at_once_both_do(repo: Repository, faults: FaultyStore) -> None:
    other = meanwhile(lambda: require(repo, "two", wait=0, revoke_after=60))
    faults.inject(call_first("put", other, key="settings/*"))
    require(repo, "one", wait=0, revoke_after=60)
    assert repo.settings.requires == ["one", "two"]


def test_what_this_version_does_not_know_cannot_be_demanded(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="'three'"):
        require(repo, "three", wait=0, revoke_after=60)
    assert repo.newest_settings()[0] == -1
