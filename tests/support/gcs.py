"""Runs gc on repositories without tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from casckpt.format.keys import transaction_key
from casckpt.format.names import TxId
from casckpt.format.records import Began, Committed, Process
from casckpt.history.commits import Commit
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.storage.base import Traits
from casckpt.storage.memory import MemoryStore
from casckpt.upkeep.gc.gc import GcResult, execute, plan_gc, preview
from tests.support.repositories import Ticks, commit_draft, committed_draft, draft, put_blob

LAST = Policy(keep_last=1)


def keys(repo: Repository, prefix: str = "objects/") -> set[str]:
    """Return the keys below ``prefix``."""
    return {entry.key for entry in repo.storage.list(prefix)}


def snapshot(repo: Repository) -> dict[str, int]:
    """Return all keys with their sizes, without the note about the last gc."""
    return {entry.key: entry.size for entry in repo.storage.list("") if not entry.key.startswith("ran/")}


def ticking(repo: Repository) -> Callable[[float], None]:
    """Return a sleep function that advances the repository's clock."""
    clock = repo.clock
    assert isinstance(clock, Ticks)
    return clock.advance


def collect(
    repo: Repository,
    policy: Policy | None = None,
    *,
    run: str | None = None,
    min_age: float | None = 0.0,
    dry_run: bool = False,
    **options: Any,
) -> GcResult:
    """Run a complete gc. It purges immediately unless ``min_age`` is passed (None: use the store's setting)."""
    plan = plan_gc(repo, policy, run=run, min_age=min_age)
    return preview(repo, plan) if dry_run else execute(repo, plan, **options)


def run_gc(repo: Repository, policy: Policy | None = None, **options: Any) -> GcResult:
    """Run a gc whose sleeps advance the clock."""
    return collect(repo, policy, **{"sleep": ticking(repo)} | options)


def steps(found: Sequence[Commit]) -> list[int]:
    """Return the step of each commit, in the given order."""
    return [commit.step for commit in found]


def begin_elsewhere(repo: Repository, run: str = "other", step: int = 7, **process: Any) -> TxId:
    """Begin a transaction on behalf of an unknown process, or of ``process``."""
    txid = repo.new_txid(run, step)
    fields: dict[str, Any] = {"host": "gpu7", "boot_id": "b", "pid": 4711, "pid_namespace": "n", "started": 1} | process
    who = Process(**fields)
    repo.put_record(transaction_key(txid), Began(txid=txid, run=run, step=step, time=repo.clock(), process=who))
    return txid


def sign(repo: Repository, txid: TxId, number: int) -> None:
    """Write a heartbeat."""
    repo.storage.put(transaction_key(txid, number), b"alive")


def commit_of(repo: Repository, txid: TxId, texts: Sequence[str]) -> None:
    """Commit a save that uploaded ``texts`` under ``txid``."""
    refs = [put_blob(repo, txid, text) for text in texts]
    commit_draft(repo, txid, draft(refs, "other", 7))


class RemoteStore(MemoryStore):
    """Storage that reports itself as remote."""

    exclusive: bool | None = True

    @property
    def traits(self) -> Traits:
        return Traits(remote=True, read_gap=1 << 20, parallel=4, exclusive=self.exclusive)


def bare_commit(repo: Repository, txid: TxId) -> Committed:
    return committed_draft(repo, txid, draft([], "other", 7))
