"""Hosts that share a store without tensors and change its runs at random."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from casckpt.base.units import time_of
from casckpt.errors import Conflict
from casckpt.format.keys import make_txid
from casckpt.format.names import TxId
from casckpt.history import commits as log
from casckpt.history.announcements import announce
from casckpt.history.commits import Commit, list_commits
from casckpt.history.following import greatest, look_at_all
from casckpt.history.transactions import Transaction, begin
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.upkeep.gc.recovery import settle
from tests.support.faulty import Call, FaultyStore
from tests.support.repositories import START, Ticks, commit_bare, committed, half_rewrite, repository, rewrite_bare

RUNS = ["a", "b/c"]
AHEAD = 600  # seconds
LATER = {"forget": log.forget, "restore": log.restore, "purge": log.purge}
CHANGES = ["begin", "save", "save", "copy", "end", "give up", "forget", "forget", "restore", "purge"]
CHANGES += ["rewrite", "rewrite", "half a rewrite"]


def saved(repo: Repository, run: str, step: int) -> Transaction:
    """Begin a save as the leader of a save does."""
    known = look_at_all(repo, run)
    latest = greatest(repo, known, run)
    return begin(repo, run, step, after=[latest] if latest else [], seen=known.head)


def finish(repo: Repository, save: Transaction) -> Commit:
    return save.commit(committed(repo, save.began.run, save.began.step, txid=save.txid))


def old_txid(draw: random.Random, run: str, step: int) -> TxId:
    """Return a transaction ID that a copy would keep."""
    when = time_of(START) - timedelta(minutes=draw.randrange(1000))
    return make_txid(when, draw.randbytes(8), run, step)


class Hosts:
    """Hosts with different clocks. They save, copy, forget and list.

    One of them clears its in-memory caches between listings.
    """

    def __init__(self, folder: Path, storage: ObjectStore, draw: random.Random) -> None:
        self.folder, self.storage, self.draw = folder, storage, draw
        self.hosts = [
            repository(folder / f"host {n}", storage, seed=n, clock=Ticks(START + n * AHEAD * 10**6)) for n in range(2)
        ]
        self.open: list[tuple[Repository, Transaction]] = []

    def fresh(self) -> Repository:
        seed = self.draw.randrange(1 << 30)
        return repository(self.folder / f"new {seed}", self.storage, seed=seed)

    def another_process(self) -> Repository:
        return repository(self.folder / "host 0", self.storage, seed=self.draw.randrange(1 << 30))

    def act(self, what: str) -> None:
        repo, run = self.draw.choice(self.hosts), self.draw.choice(RUNS)
        if what == "begin":
            self.open.append((repo, saved(repo, run, self.draw.randrange(3))))
        elif what == "save":
            finish(repo, saved(repo, run, self.draw.randrange(3)))
        elif what == "copy":
            step = self.draw.randrange(3)
            commit_bare(repo, run, step, txid=old_txid(self.draw, run, step))
        elif what == "end" and self.open:
            finish(*self.open.pop(self.draw.randrange(len(self.open))))
        elif what == "give up" and self.open:
            self.open.pop(self.draw.randrange(len(self.open)))[1].abort("given up")
        elif what == "undo" and (old := [old for one in list_commits(repo).visible() for old in one.old]):
            with suppress(Conflict):
                log.restore(repo, self.draw.choice(old))
            settle(repo, 0, [])
        elif what in ("rewrite", "half a rewrite") and (seen := list_commits(repo).visible()):
            base = self.draw.choice(seen)
            (rewrite_bare if what == "rewrite" else half_rewrite)(repo, base)
        elif what in LATER and (live := list_commits(repo).live()):
            try:
                LATER[what](repo, self.draw.choice(live))
            except Conflict:
                return

    def announce(self) -> None:
        """Announce the upcoming commit of a save in progress."""
        if self.open:
            repo, save = self.draw.choice(self.open)
            announce(repo, [(save.txid, 0)])

    def close(self) -> None:
        for _, save in self.open:
            save.leave()


class Meddled(FaultyStore):
    """Storage that sometimes runs a different action before a call."""

    def __init__(self, inner: ObjectStore, hosts: Hosts) -> None:
        super().__init__(inner)
        self.hosts, self.is_on = hosts, False
        self.seen: list[TxId] = []

    def _hit(self, call: Call) -> list[object]:  # type: ignore[override]  # there are no faults
        if self.is_on and self.hosts.draw.random() < 0.4:
            self.hosts.act(self.hosts.draw.choice(["begin", "save", "copy", "end", "end", "rewrite", "undo"]))
        return []
