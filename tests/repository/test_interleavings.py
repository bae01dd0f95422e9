"""Writers, gcs and a user at once, over one storage, in any order of their calls: nothing that lives is ever lost.

The code is the real one; only the order of the storage calls is drawn. What lives is looked at after every call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casckpt.errors import Conflict, Revoked
from casckpt.format.keys import blob_key, manifest_key, parse_object
from casckpt.format.manifest import BlobRef
from casckpt.plan.retention import Policy
from casckpt.repository import commits, gc, manifests, tags, transactions
from casckpt.repository.commits import CommitList, list_commits
from casckpt.repository.repository import Repository
from casckpt.repository.transactions import Transaction
from casckpt.repository.waiting import Waited
from tests.support import repositories as support
from tests.support.repositories import Ticks, memory, put_blob, repository, save
from tests.support.stage import Stage

ROUNDS = 40
GC_WAIT = 0.5  # seconds of the clock of the stage: two or three looks


class Play:
    """One run: a store with some history, and actors that go on from there."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.inner = memory()
        self.stage = Stage(self.inner)
        self.clock = Ticks()
        self.folder = folder
        self.watcher = repository(folder / "watcher", self.inner, clock=self.clock, seed=seed)
        for step in range(2):
            save(self.watcher, step=step, texts=[f"old {step}", f"base {step}"])
        commits.forget(self.watcher, list_commits(self.watcher).live()[0])
        self.deleted = 0

    def repo(self, name: str, cache: str = "") -> Repository:
        """An actor's own view. Gcs of one host share a ``cache``."""
        seed = self.draw.randrange(1 << 30)
        return repository(self.folder / (cache or name), self.stage.store(name), clock=self.clock, seed=seed)

    def writer(self, name: str, program: Callable[[Play, Repository, str], None] | None = None) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: (program or write)(self, repo, name))

    def gc(self, name: str, *, revoke_after: float = 0.0, runs: int = 2) -> None:
        repo = self.repo(name, "host of the gcs")

        def nap(seconds: float) -> None:
            self.clock.advance(seconds)
            self.stage.stop(name, "sleep")

        def run() -> None:
            for _ in range(runs):
                policy = Policy(keep_last=1) if self.draw.random() < 0.5 else None
                try:
                    result = gc.execute(
                        repo, gc.plan_gc(repo, policy), wait=GC_WAIT, revoke_after=revoke_after, sleep=nap
                    )
                except Conflict:
                    continue  # disturbed again and again
                self.deleted += result.deleted_blobs

        self.stage.add(name, run)

    def user(self, name: str) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: toggle(self, repo))

    def choices(self) -> Callable[[list[str]], str]:
        """Mostly the same actor goes on; now and then another."""
        current = ""

        def choose(waiting: list[str]) -> str:
            nonlocal current
            if current not in waiting or self.draw.random() < 0.2:
                current = self.draw.choice(waiting)
            return current

        return choose

    def look(self) -> None:
        """What must hold at any time."""
        there = {entry.key for entry in self.inner.list("objects/")}
        for key in named(self.watcher, list_commits(self.watcher)):
            if key not in there:
                raise Lost(f"{key} is gone, and a live commit names it:\n" + "\n".join(map(str, self.stage.log)))

    def run(self) -> None:
        self.stage.run(self.choices(), self.look)

    def clean_up(self) -> None:
        """In the end a gc that is left alone deletes all that nothing needs."""
        result = gc.collect(self.watcher, wait=0.0, revoke_after=0.0)
        assert result.waiting == ()
        there = {entry.key for entry in self.inner.list("objects/")}
        assert there == set(named(self.watcher, list_commits(self.watcher)))
        assert list(self.inner.list("transactions/")) == []


class Lost(AssertionError):
    """A live commit lacks something."""


def named(repo: Repository, found: CommitList) -> Iterator[str]:
    for commit in found.live():
        yield manifest_key(commit.committed.uploader, commit.id)
        for uploader, blob, _ in manifests.blobs_of(repo, commit):
            yield blob_key(uploader, blob)


# what actors do


def write(play: Play, repo: Repository, name: str) -> None:
    """A save, by the protocol: what is known comes from commits that were listed after it began; one retry."""
    for attempt in range(2):
        transaction = transactions.begin(repo, "run", play.draw.randrange(2, 5))
        known = draw_known(play, repo) if attempt == 0 else []
        try:
            finish(repo, transaction, [f"{name} {attempt}"], known)
        except Revoked:
            transaction.close()
            continue
        return


def draw_known(play: Play, repo: Repository) -> list[BlobRef]:
    """Some blobs of some live checkpoint."""
    live = list_commits(repo).live()
    if not live:
        return []
    try:
        refs = list(manifests.get(repo, play.draw.choice(live)).blobs)
    except Conflict:
        return []
    return play.draw.sample(refs, play.draw.randint(0, len(refs)))


def finish(repo: Repository, transaction: Transaction, texts: list[str], known: list[BlobRef]) -> None:
    refs = [put_blob(repo, transaction.txid, text) for text in texts]
    began = transaction.began
    found = manifests.put(repo, began.txid, *support.body([*refs, *known], began.run, began.step))
    commits.commit(repo, support.committed(repo, began.run, began.step, manifest=found, txid=began.txid))
    transaction.close()


def toggle(play: Play, repo: Repository) -> None:
    """Forget, restore and tag whatever is there."""
    for _ in range(4):
        live = list_commits(repo).live()
        if not live:
            return
        commit = play.draw.choice(live)
        try:
            if commit.visible and play.draw.random() < 0.7:
                commits.forget(repo, commit)
            elif play.draw.random() < 0.5:
                commits.restore(repo, commit)
            else:
                tags.set_tag(repo, "best", commit)
        except Conflict:
            continue


# plays


def two_writers_and_a_gc(play: Play) -> None:
    play.writer("w0")
    play.writer("w1")
    play.gc("g0")
    play.user("user")


def two_gcs(play: Play) -> None:
    play.writer("w0")
    play.gc("g0")
    play.gc("g1")
    play.user("user")


def patient_gcs(play: Play) -> None:
    """They run out of time, and go on from what they, or each other, left."""
    play.writer("w0")
    play.writer("w1")
    play.gc("g0", revoke_after=1e9, runs=3)
    play.gc("g1", revoke_after=1e9, runs=2)


PLAYS = [two_writers_and_a_gc, two_gcs, patient_gcs]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cast", PLAYS)
def test_nothing_that_lives_is_lost_and_the_rest_goes(
    tmp_path: Path, seed: int, full: bool, cast: Callable[[Play], None]
) -> None:
    deleted = 0
    for round_ in range(ROUNDS * (20 if full else 1)):
        play = Play(tmp_path / str(round_), seed + round_)
        cast(play)
        play.run()
        tags_left = tags.tags(play.watcher)
        for name in tags_left:
            tags.delete_tag(play.watcher, name)
        play.clean_up()
        deleted += play.deleted
    assert deleted, "no gc that ran beside others ever deleted anything"


def test_writers_that_are_killed_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    for round_ in range(ROUNDS // 2):
        play = Play(tmp_path / str(round_), seed + round_)
        play.writer("w0")
        play.gc("g0")
        calls = play.draw.randrange(1, 12)
        choose = play.choices()

        def choose_until_killed(
            waiting: list[str], play: Play = play, calls: int = calls, choose: Callable[[list[str]], str] = choose
        ) -> str:
            dead = sum(name == "w0" for name, _ in play.stage.log) >= calls
            return choose([name for name in waiting if name != "w0" or not dead] or waiting)

        play.stage.run(choose_until_killed, play.look, killed=frozenset({"w0"}))
        play.clean_up()


# the plays see what they are there to see


def lists_first(play: Play, repo: Repository, name: str) -> None:
    known = draw_known(play, repo)
    transaction = transactions.begin(repo, "run", 9)
    try:
        finish(repo, transaction, [name], known)
    except Revoked:
        transaction.close()


def uploads_first(play: Play, repo: Repository, name: str) -> None:
    early = put_blob(repo, repo.new_txid("run", 9), name)
    transaction = transactions.begin(repo, "run", 9)
    try:
        finish(repo, transaction, [], [early])
    except Revoked:
        transaction.close()


def reuses_orphans(play: Play, repo: Repository, name: str) -> None:
    transaction = transactions.begin(repo, "run", 9)
    entries = [(entry, parse_object(entry.key)) for entry in repo.storage.list("objects/")]
    found = [BlobRef(n.hash, e.size, n.uploader) for e, n in entries if n and n.kind == "safetensors"]  # type: ignore[arg-type]  # blobs have one
    try:
        finish(repo, transaction, [], found)
    except Revoked:
        transaction.close()


def is_lost(tmp_path: Path, seed: int, cast: Callable[[Play], None]) -> bool:
    for round_ in range(1000):
        play = Play(tmp_path / str(round_), seed + round_)
        cast(play)
        try:
            play.run()
        except Lost:
            return True
    return False


@pytest.mark.parametrize("program", [lists_first, uploads_first, reuses_orphans])
def test_a_writer_that_breaks_the_protocol_loses_data(
    tmp_path: Path, seed: int, program: Callable[[Play, Repository, str], None]
) -> None:
    def cast(play: Play) -> None:
        play.writer("w0", program)
        play.gc("g0")
        play.user("user")

    assert is_lost(tmp_path, seed, cast)


def no_waiting(repo: object, waits: object, patience: object, tell: object) -> Waited:
    return Waited()


def no_roots(repo: object, found: object, listed: object) -> None:
    """What was committed since the candidates were made is no root."""


@pytest.mark.parametrize(("name", "broken"), [("wait_until_closed", no_waiting), ("spare_roots", no_roots)])
def test_a_gc_that_breaks_the_protocol_loses_data(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(gc, name, broken)
    assert is_lost(tmp_path, seed, two_writers_and_a_gc)
