"""A repository with a warm cache lists the same as a new one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import CasckptError, Damaged, NotFound, StorageError
from casckpt.format.keys import commit_key
from casckpt.format.names import TxId
from casckpt.history import commits as log
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.transactions import revoke
from casckpt.repository.repository import Repository
from casckpt.storage.memory import MemoryStore
from tests.support.faulty import FaultyStore, fail_before
from tests.support.repositories import commit_bare, half_rewrite, repository, rewrite_bare

TRANSACTIONS = 3
REWRITES: dict[str, Callable[[Repository, Commit], object]] = {"rewrite": rewrite_bare, "half a rewrite": half_rewrite}
BY_PEOPLE = [*REWRITES, "commit", "commit and purge", "revoke", "forget", "restore", "purge", "give up"]
CHANGES = [*BY_PEOPLE, "tear", "delete", "mend", "look", "look badly"]
ERRORS = [StorageError("no answer"), Damaged("torn on its way"), NotFound("not yet")]


class Others:
    """Changes that other processes and disks make to the records of a few transactions."""

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self.txids = [repo.new_txid("run", step) for step in range(TRANSACTIONS)]
        self.written: dict[str, bytes] = {}

    def do(self, change: str, txid: TxId) -> None:
        spoiled = [key for key in self.written if txid in key]
        if any(self.repo.storage.size(key) is None for key in spoiled) or (spoiled and change != "give up"):
            return  # no name occurs twice
        found = list_commits(self.repo, anew=True)
        changes = {"forget": log.forget, "restore": log.restore, "purge": log.purge}
        if change in changes and txid in found.commits:
            changes[change](self.repo, found.commits[txid])
        elif change in REWRITES and txid in found.commits and found.commits[txid].visible:
            REWRITES[change](self.repo, found.commits[txid])
        elif change == "commit":
            commit_bare(self.repo, txid=txid)
        elif change == "commit and purge":
            log.purge(self.repo, log.forget(self.repo, commit_bare(self.repo, txid=txid)))
        elif change == "revoke":
            revoke(self.repo, txid, "given up")
        elif change == "give up" and txid in found.damaged:
            log.purge_unreadable(self.repo, txid)

    def spoil(self, change: str, txid: TxId, number: int) -> None:
        key, storage = commit_key(txid, number), self.repo.storage
        if storage.size(key) is None and key not in self.written:
            return
        if key not in self.written:
            self.written[key] = bytes(storage.get(key, limit=1 << 20))
        storage.delete(key)
        if change == "tear":
            storage.put(key, self.written[key][:-2])
        elif change == "mend":
            storage.put(key, self.written.pop(key))


def said(found: CommitList) -> tuple[dict[TxId, Commit], dict[TxId, type]]:
    return dict(found.commits), {txid: type(error) for txid, error in found.damaged.items()}


@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 2 * TRANSACTIONS), st.integers(0, 2)), max_size=30))
def test_a_listing_from_a_warm_cache_equals_a_first_listing(changes: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, storage = Path(name), MemoryStore(uuid4().hex)
        others, faults = Others(repository(folder, storage)), FaultyStore(storage)
        held = repository(folder / "held", faults)
        for change, number, detail in changes:
            txid = others.txids[number % len(others.txids)]
            try:
                if change in ("look", "look badly"):
                    if change == "look badly":
                        faults.inject(fail_before("get", key=f"commits/{txid}*", error=ERRORS[detail]))
                    list_commits(held)
                elif change in ("tear", "delete", "mend"):
                    others.spoil(change, txid, detail)
                else:
                    others.do(change, txid)
            except CasckptError:
                pass  # a forbidden or unreadable change does not have an effect
            faults.heal()
        assert said(list_commits(held)) == said(list_commits(repository(folder / "fresh", storage)))
