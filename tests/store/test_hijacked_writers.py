"""Random plays: whatever a writer with the permissions in docs/remote.md puts, gc deletes nothing too early."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, StorageError
from casckpt.format import records
from casckpt.format.keys import blob_key, commit_key, ended_key, manifest_key, settings_key, transaction_key
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.history.announcements import announce
from casckpt.history.commits import Commit, list_commits
from casckpt.history.folding import OF_PLACES
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists
from casckpt.store.store import Store
from casckpt.upkeep.gc import recovery
from tests.store.test_least_rights import FOREVER, policies
from tests.support.far import far
from tests.support.faulty import FaultyStore, fail_before
from tests.support.proxy import Proxy
from tests.support.repositories import Ticks, put_manifest_of
from tests.support.saves import CELL, cells
from tests.support.servers import Server
from tests.support.timed import TimedStore

HOUR = 3600
AGE = 7 * 24 * HOUR
DENIED = ("settings/*", "commits/ended/*")

Places = tuple[TxId, ManifestId, str]
"""A transaction, an id, and the head of the manifest there."""
Open = Callable[[str], Store]
"""Opens the store as a keeper or a writer, by a host name that begins with the role."""


@pytest.fixture
def in_memory(tmp_path: Path) -> Open:
    bucket = far()

    def call(name: str) -> Store:
        error, faults = StorageError("permission denied"), []
        if name.startswith("writer"):
            denied = [("delete", "*"), ("replace", "*"), *(("put", key) for key in DENIED)]
            faults = [fail_before(method, key=key, times=FOREVER, error=error) for method, key in denied]
        return Store(Repository(FaultyStore(bucket, faults), tmp_path / name))

    return call


@pytest.fixture
def in_bucket(tmp_path: Path, moto_server: Server) -> Iterator[Open]:
    bucket, found = moto_server.new_bucket(), dict[str, Proxy]()

    def call(name: str) -> Store:
        role = name.partition(" ")[0]
        if role not in found:
            found[role] = Proxy(moto_server.endpoint)
            found[role].__enter__()
            found[role].allow(policies(bucket, "team/ckpts")[role].allows)
        options = moto_server.options | {"endpoint_url": found[role].endpoint}
        return casckpt.open(f"s3://{bucket}/team/ckpts", storage_options=options, cache_dir=tmp_path / name)

    yield call
    for proxy in found.values():
        proxy.__exit__(None, None, None)


class Play:
    """A store with two keepers, whose gcs have different ages, and a writer that saves, and puts what it likes."""

    def __init__(self, open_as: Open, seed: int) -> None:
        self.draw = random.Random(seed)
        self.clock = Ticks(time.time_ns() // 1000)
        self.keepers = [open_as("keeper 1"), open_as("keeper 2")]
        self.storage = TimedStore(self.keepers[0].repository.storage, self.clock)
        for keeper in self.keepers:
            keeper.repository.storage = self.storage
            keeper.repository.clock = self.clock
        self.keepers[0].create(cell_bytes=CELL, blob_bytes=64 << 10)
        self.by_setting = self.draw.random() < 0.5
        if self.by_setting:
            self.keepers[0].change_settings(min_age="7d", min_age_ephemeral="7d")
        self.writer = open_as("writer")
        self.step = self.deleted = 0
        self.objects: dict[Places, frozenset[str]] = {}  # of each places that were ever visible
        self.seen: dict[Places, int] = {}  # when they were visible for the last time
        self.log: list[str] = []
        for _ in range(3):
            self.save()

    def run(self, acts: int) -> None:
        for _ in range(acts):
            act = self.draw.choice(
                [self.save, self.work, self.attack, self.attack, self.attack, self.wait, self.gc, self.gc]
            )
            try:
                act()
            except CasckptError as error:
                self.log.append(f"  {act.__name__}: {type(error).__name__} {str(error)[:200]}")
                with suppress(CasckptError):
                    self.gives_up(error)
            self.look()

    def look(self) -> None:
        """Note what is visible, and check that everything that was so less than the minimum age ago is there."""
        self.storage.look()
        there = {entry.key for entry in self.storage.list("objects/")}
        for commit in list_commits(self.keepers[0].repository).visible():
            name = commit.places.txid, commit.id, commit.committed.head
            if name not in self.objects and (keys := self.named(commit)) <= there:
                self.objects[name] = keys
            if name in self.objects and self.objects[name] <= there:  # otherwise, it is forged
                self.seen[name] = self.clock.now
        for name, last in self.seen.items():
            if self.clock.now - last < AGE * 10**6 and not self.objects[name] <= there:
                gone = self.objects[name] - there
                raise AssertionError("\n".join([f"{name} lost {gone} after {self.clock.now - last}", *self.log]))

    def named(self, commit: Commit) -> frozenset[str]:
        key = manifest_key(commit.places.txid, commit.id)
        try:
            blobs = manifests.stored_blobs(self.keepers[0].repository, commit).names()
        except CasckptError:
            return frozenset({"nowhere"})
        return frozenset({key, *(blob_key(uploader, blob) for uploader, blob, _ in blobs)})

    def wait(self) -> None:
        hours = self.draw.choice([0, 1, 30, 80, 167, 169, 400])
        self.log.append(f"{hours} hours pass")
        self.clock.advance(hours * HOUR)

    def gc(self) -> None:
        number = self.draw.randrange(2)
        age = ["7d", "9d"][number]
        options: dict[str, Any] = {} if self.by_setting and number == 0 else {"min_age": age}
        if self.draw.random() < 0.4:
            options["keep_last"] = 1
        self.log.append(f"keeper {number}: {options}")
        done = self.keepers[number].gc(wait=0, revoke_after=self.draw.choice([0, "1h"]), **options)
        self.log.append(f"  forgot {done.forgotten}, purged {done.purged}, deleted {done.deleted_blobs}")
        self.deleted += done.deleted_blobs

    def gives_up(self, error: CasckptError) -> None:
        """Do what gc advises if something makes it stop."""
        if isinstance(error, Damaged) and error.key and error.key.startswith("commits/"):
            self.log.append(f"  gives up {error.key}")
            self.keepers[0].give_up(error.key.partition("/")[2])
        elif isinstance(error, Damaged) and error.checkpoints:
            self.log.append(f"  forgets {error.checkpoints}")
            self.keepers[0].forget(*error.checkpoints, tagged=True)

    # an honest writer

    def save(self) -> None:
        self.step += 1
        run = self.draw.choice("ab")
        state = {"kept": cells(2, seed=1), "new": cells(2, seed=self.step), "optim": {"m": cells(2, seed=-self.step)}}
        self.log.append(f"saves {run}@{self.step}")
        self.writer.save(state, run=run, step=self.step)

    def work(self) -> None:
        every = self.writer.checkpoints(forgotten=True)
        if not every:
            return
        one = self.draw.choice(every)
        what = self.draw.choice(["forget", "restore", "thin", "tag", "untag"])
        self.log.append(f"{what} {one.commit!r}")
        if what == "forget":
            self.writer.forget(one)
        elif what == "restore":
            self.writer.restore(one)
        elif what == "thin":
            self.writer.thin(one, drop="optim.*", tagged=True)
        elif what == "tag":
            self.writer.tag("best", one)
        else:
            self.writer.untag("best")

    # one that was hijacked

    def attack(self) -> None:
        repo, draw = self.writer.repository, self.draw
        every = [one for one in list_commits(repo).commits.values() if one.last != "revoked"]
        if not every:
            return
        victim, other = draw.choice(every), draw.choice(every)
        number = victim.number + draw.choice([1] * 15 + [2])
        if draw.random() < 0.1:
            number = draw.randrange(1, victim.number + 2)
        when = draw.choice([5, self.clock.now, self.clock.now + 10**15])
        what = draw.choice([*ATTACKS])
        self.log.append(f"{what} on {victim!r} {victim.txid} at {number}, other {other.txid}")
        for key, record in ATTACKS[what](self, victim, other, number, when):
            data = record if isinstance(record, bytes) else records.encode(record)
            with suppress(AlreadyExists):
                repo.storage.put(key, data)

    def anywhere(self, victim: Commit, other: Commit) -> TxId:
        """Return a txid under which the writer claims that something is."""
        places = [one.txid for commit in (victim, other) for one in (*commit.existing, *commit.ended)]
        txid = self.draw.choice([self.writer.repository.new_txid(victim.run, victim.step), *places])
        if self.draw.random() < 0.6:
            with suppress(CasckptError, AlreadyExists):
                put_manifest_of(self.writer.repository, victim, txid)
        return txid


Put = Iterator[tuple[str, Any]]
Attack = Callable[[Play, Commit, Commit, int, int], Put]


def state_record(kind: Any) -> Attack:
    def puts(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
        yield commit_key(victim.txid, number), kind(txid=victim.txid, time=when, who="w")

    return puts


def hides_and_ends(*kinds: Any) -> Attack:
    def puts(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
        for more, kind in enumerate(kinds):
            yield commit_key(victim.txid, number + more), kind(txid=victim.txid, time=when, who="w")

    return puts


def kept(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    yield commit_key(victim.txid, number), records.Kept(txid=victim.txid, time=when)


def rewrites(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    by = play.anywhere(victim, other)
    fields = {name: getattr(play.draw.choice([victim, other]).committed, name) for name in OF_PLACES}
    yield (
        commit_key(victim.txid, number),
        records.Rewritten(txid=victim.txid, time=when, who="w", by=by, **fields),
    )
    if play.draw.random() < 0.5:
        yield commit_key(victim.txid, number + 1), records.Trimmed(txid=victim.txid, time=when, who="w")


def back(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    to = play.draw.choice([one.txid for one in (*victim.existing, *victim.ended)])
    yield commit_key(victim.txid, number), records.Back(txid=victim.txid, time=when, who="w", to=to)


def commits_a_twin(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    txid = play.anywhere(victim, other)
    yield commit_key(txid), records.changed(victim.committed, txid=txid, time=when)


def revokes(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    txid = play.anywhere(victim, other)
    yield commit_key(txid), records.RevokedRecord(txid=txid, time=when, reason="")


def pretends_to_save(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    txid = play.draw.choice([play.anywhere(victim, other), victim.txid])
    dead = records.changed(this_process(), pid=4_000_000, started=1)
    slot = play.draw.choice([None, (victim.txid, number)])
    began = records.Began(txid=txid, run=victim.run, step=victim.step, time=when, process=dead, slot=slot)
    yield transaction_key(txid), began


def announces(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    announce(play.writer.repository, [(play.anywhere(victim, other), play.draw.choice([0, number]))])
    yield from ()


def leaves_junk(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    name = BlobHash(play.draw.randbytes(32).hex())
    yield blob_key(play.anywhere(victim, other), name), b"junk"


def tags(play: Play, victim: Commit, other: Commit, number: int, when: int) -> Put:
    yield (
        commit_key(victim.txid, number),
        records.TaggedRecord(txid=victim.txid, time=when, name="best", generation=play.draw.randrange(3)),
    )


ATTACKS: dict[str, Attack] = {
    "forgotten": state_record(records.Forgotten),
    "purged": state_record(records.Purged),
    "restored": state_record(records.Restored),
    "trimmed": state_record(records.Trimmed),
    "forgotten, purged": hides_and_ends(records.Forgotten, records.Purged),
    "restored, purged": hides_and_ends(records.Restored, records.Purged),
    "kept": kept, "rewritten": rewrites, "back": back, "committed": commits_a_twin, "revoked": revokes,
    "began": pretends_to_save, "announced": announces, "junk": leaves_junk, "tagged": tags,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gc delete the logs of what is over, even if they are few."""
    monkeypatch.setattr(recovery, "FEWEST", 1)
    torch.manual_seed(0)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_that_a_writer_puts_deletes_what_is_too_young(in_memory: Open, seed: int) -> None:
    play = Play(in_memory, seed)
    play.run(80)
    assert any(" deleted " in one for one in play.log)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_nothing_that_a_writer_puts_in_a_bucket_deletes_what_is_too_young(in_bucket: Open, seed: int) -> None:
    Play(in_bucket, seed).run(10)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(200))
def test_nothing_too_young_is_deleted_in_many_plays(in_bucket: Open, seed: int, number: int) -> None:
    Play(in_bucket, seed).run(10)


def check_settings_and_logs(play: Play) -> None:
    for key in (settings_key(7), ended_key(0)):
        with pytest.raises(StorageError, match="denied"):
            play.writer.repository.storage.put(key, b"{}")
    with pytest.raises(StorageError, match="denied"):
        play.writer.change_settings(min_age=0)


def test_a_writer_cannot_change_settings_or_end_logs(in_memory: Open) -> None:
    check_settings_and_logs(Play(in_memory, 0))


def test_a_writer_of_a_bucket_cannot_change_settings_or_end_logs(in_bucket: Open) -> None:
    check_settings_and_logs(Play(in_bucket, 0))
