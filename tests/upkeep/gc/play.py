"""A simulated store with writers, gcs and a user, whose calls run in random order: their programs and invariants."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from casckpt.contents import manifests
from casckpt.errors import Conflict, Gone, NotFound, Revoked, StorageError
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.manifest import Encoded, placed
from casckpt.format.names import TxId
from casckpt.format.records import Rewritten, changed
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.head import BLOBS
from casckpt.history import commits, tags, transactions
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.following import newest_reusable
from casckpt.history.leases import renew, take
from casckpt.history.transactions import Transaction
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists
from casckpt.upkeep.gc import gc
from casckpt.upkeep.rewrite import rewrite, rewritten
from casckpt.upkeep.thin import execute, plan_thin
from tests.support import repositories as support
from tests.support.gcs import LAST, collect
from tests.support.repositories import Ticks, memory, put_blob, repository, save
from tests.upkeep.gc.stage import Stage, SteppedStore

ROUNDS = 10
GC_WAIT = 0.5  # seconds of the simulated clock: two or three polls
HOUR = 3600.0
CHANGES = {"put", "replace", "delete"}


class Play:
    """One simulated run: a store with some history, and the actors that use it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.inner = memory()
        self.stage = Stage(self.inner)
        self.clock = Ticks()
        self.folder = folder
        self.watcher = repository(folder / "watcher", self.inner, clock=self.clock, seed=seed)
        for step in range(2):
            self.save(step)
        commits.forget(self.watcher, list_commits(self.watcher).live()[0])
        self.deleted = 0
        self.held: dict[str, str] = {}  # IDs by lease holder
        self.never_gone: set[str] = set()  # IDs that are never forgotten

    def save(self, step: int) -> None:
        """Save the initial checkpoints."""
        save(self.watcher, step=step, texts=[f"old {step}", f"base {step}"])

    def repo(self, name: str, cache: str = "") -> Repository:
        """Return an actor's own view of the store. Gcs on the same host share a ``cache``."""
        seed = self.draw.randrange(1 << 30)
        return repository(self.folder / (cache or name), self.stage.store(name), clock=self.clock, seed=seed)

    def failing(self, name: str) -> None:
        seed = self.draw.randrange(1 << 30)
        disk, late = SmallDisk(self.stage, name), list[tuple[str, memoryview | bytes]]()
        disk.late = late
        repo = repository(self.folder / name, disk, clock=self.clock, seed=seed)
        self.stage.add(name, lambda: fail_often(self, repo, name))
        self.stage.add("net", lambda: deliver(self, self.stage.store("net"), late))

    def writer(self, name: str, program: Callable[[Play, Repository, str], None] | None = None) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: (program or write)(self, repo, name))

    def gc(self, name: str, *, revoke_after: float = 0.0, runs: int = 2, keeps_all: bool = False) -> None:
        repo = self.repo(name, "host of the gcs")

        def nap(seconds: float) -> None:
            self.clock.advance(seconds)
            self.stage.stop(name, "sleep")

        def run() -> None:
            for _ in range(runs):
                policy = Policy(keep_last=1) if self.draw.random() < 0.5 and not keeps_all else None
                try:
                    result = gc.execute(
                        repo, gc.plan_gc(repo, policy, min_age=0.0), wait=GC_WAIT, revoke_after=revoke_after, sleep=nap
                    )
                except Conflict:
                    continue  # other processes interfered repeatedly
                self.deleted += result.deleted_blobs

        self.stage.add(name, run)

    def user(self, name: str) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: toggle(self, repo))

    def holder(self, name: str) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: hold_on(self, repo, name))

    def repairer(self, name: str) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: rewrite_some(self, repo))

    def thinner(self, name: str) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: thin_some(self, repo))

    def undoer(self, name: str) -> None:
        repo = self.repo(name)
        self.stage.add(name, lambda: undo_some(self, repo))

    def choices(self, switches: float = 0.2, held_up: float = 0.0) -> Callable[[list[str]], str]:
        """Return a function that chooses the actor of the next call.

        ``switches``: the probability of a different actor. ``held_up``: the fraction of its changes before which an
        actor waits until all others are done or wait too. Its knowledge is then out of date, which is the usual cause
        of protocol errors.
        """
        current, held = "", set[str]()

        def choose(waiting: list[str]) -> str:
            nonlocal current
            while free := [name for name in waiting if name not in held]:
                if current not in free or self.draw.random() < switches:
                    current = self.draw.choice(free)
                if not (self.stage.at(current).split()[0] in CHANGES and self.draw.random() < held_up):
                    return current
                held.add(current)
            current = self.draw.choice(waiting)
            held.remove(current)
            return current

        return choose

    def has_changed(self) -> bool:
        """Report whether the last call may have changed something."""
        return not self.stage.log or self.stage.log[-1][1].split()[0] in CHANGES

    def look(self) -> None:
        """Check the invariants after each change."""
        if not self.has_changed():
            return
        there, listed = {entry.key for entry in self.inner.list("objects/")}, list_commits(self.watcher)
        for key in named(self.watcher, listed):
            if key not in there:
                raise Lost(f"{key} is gone, and a live commit names it:\n" + "\n".join(map(str, self.stage.log)))
        visible = listed.visible()
        if not self.never_gone <= {commit.id for commit in visible}:
            raise Lost(f"a checkpoint that nobody forgot is hidden: {visible}\n" + "\n".join(map(str, self.stage.log)))
        living = {commit.id for commit in listed.live()}
        for name, id in self.held.items():
            if id not in living:
                raise Lost(f"{id} was purged, and {name} holds it:\n" + "\n".join(map(str, self.stage.log)))

    def run(self, switches: float = 0.2, held_up: float = 0.0) -> None:
        self.stage.run(self.choices(switches, held_up), self.look)

    def clean_up(self) -> None:
        """Check that a final gc, running alone, deletes everything that is not needed."""
        result = collect(self.watcher, wait=0.0, revoke_after=0.0)
        assert result.waiting == ()
        there = {entry.key for entry in self.inner.list("objects/")}
        assert there == set(named(self.watcher, list_commits(self.watcher)))
        assert list(self.inner.list("transactions/")) == []


class Lost(AssertionError):
    """Raised if a live commit lacks a blob, or a leased checkpoint is no longer live."""


def named(repo: Repository, found: CommitList) -> Iterator[str]:
    for commit in found.placed():
        yield manifest_key(commit.places.txid, commit.id)
        for uploader, blob, _ in manifests.blobs_of(repo, commit):
            yield blob_key(uploader, blob)


def write(play: Play, repo: Repository, name: str) -> None:
    """Save according to the protocol: reuse only blobs that were read after the transaction began. Retry once."""
    draw = play.draw.choice([draw_known, draw_from_log])
    for attempt in range(2):
        transaction = transactions.begin(repo, "run", play.draw.randrange(2, 5))
        known = draw(play, repo) if attempt == 0 else []
        try:
            finish(repo, transaction, [f"{name} {attempt}"], known)
        except Revoked:
            transaction.close()
            continue
        return


class SmallDisk(SteppedStore):
    """Storage that may be full for records of its actor, until this actor deletes an object.

    ``loses``: what happens to the next record in commits/, which then gets no answer: "stored", "lost", or "late".
    """

    full, loses = False, ""
    late: list[tuple[str, memoryview | bytes]]

    def put(self, key: str, data: memoryview | bytes, *, settle: bool = True) -> None:
        if not key.startswith("commits/"):
            return super().put(key, data, settle=settle)
        fate, self.loses = self.loses, ""
        if fate == "late":
            self.late.append((key, data))
        elif fate == "stored" or not (fate or self.full):
            super().put(key, data, settle=settle)
        if fate or self.full:
            raise StorageError(f"{key}: no answer", full=self.full)
        return None

    def put_prepared(self, key: str, data: bytes) -> bool:
        raise StorageError(f"{key}: no file is left", full=True)

    def delete(self, key: str) -> None:
        super().delete(key)
        self.full = self.full and not key.startswith("objects/")


def fail_often(play: Play, repo: Repository, name: str) -> None:
    """Begin saves that fail before or during their commit, on a disk that may be full."""
    disk = repo.storage
    assert isinstance(disk, SmallDisk)
    for number in range(4):
        transaction = transactions.begin(repo, "run", play.draw.randrange(2, 5))
        txid, began = transaction.txid, transaction.began
        refs = [put_blob(repo, txid, f"{name} {number} {each}") for each in range(2)]
        record = support.committed_draft(repo, txid, support.draft(refs, began.run, began.step))
        disk.full, disk.loses = play.draw.random() < 0.7, play.draw.choice(["", "stored", "lost", "late", "late"])
        try:
            if not disk.loses:
                raise StorageError("an upload failed")
            transaction.commit(record)
        except (Revoked, StorageError) as error:
            transaction.abort(error)
        disk.full, disk.loses = False, ""


def deliver(play: Play, storage: SteppedStore, late: list[tuple[str, memoryview | bytes]]) -> None:
    """Store late records at some time."""
    for _ in range(40):
        play.stage.stop("net", "sleep")
        if late:
            with suppress(AlreadyExists):
                storage.put(*late.pop())


def draw_from_log(play: Play, repo: Repository) -> list[BlobRef]:
    """Return some blobs of the newest live checkpoint, which is found through the run's log."""
    newest = newest_reusable(repo, "run", anew=True)
    try:
        refs = [] if newest is None else list(manifests.get(repo, newest).blobs)
    except Gone:
        return []
    return play.draw.sample(refs, play.draw.randint(0, len(refs)))


def draw_known(play: Play, repo: Repository) -> list[BlobRef]:
    """Return some blobs of some live checkpoint."""
    live = list_commits(repo).placed()
    if not live:
        return []
    try:
        refs = list(manifests.get(repo, play.draw.choice(live)).blobs)
    except Gone:
        return []
    return play.draw.sample(refs, play.draw.randint(0, len(refs)))


def finish(repo: Repository, transaction: Transaction, texts: list[str], known: list[BlobRef]) -> None:
    refs = [put_blob(repo, transaction.txid, text) for text in texts]
    began = transaction.began
    support.commit_draft(repo, began.txid, support.draft([*refs, *known], began.run, began.step))
    transaction.close()


def rewrite_some(play: Play, repo: Repository) -> None:
    """Rewrite a checkpoint as a repack does."""
    for _ in range(3):
        visible = list_commits(repo).visible()
        if not visible:
            return
        commit = play.draw.choice(visible)
        try:
            manifest = manifests.get(repo, commit)
            made = placed(manifest, manifest.section(BLOBS))

            def save(txid: TxId, commit: Commit = commit, made: Encoded = made) -> Rewritten:
                return rewritten(repo, txid, commit, made)

            rewrite(repo, commit, save)
        except (Conflict, Gone):
            continue


def copy_again(repo: Repository) -> None:
    """Commit the newest checkpoint once more, as a copy back from another store does."""
    commit = list_commits(repo).visible()[-1]
    record = changed(commit.committed, txid=repo.new_txid(commit.run, commit.step))
    support.put_manifest_of(repo, commit, record.txid)
    commits.commit(repo, record)


def thin_some(play: Play, repo: Repository) -> None:
    """Remove the optimizer from some checkpoints."""
    for _ in range(3):
        visible = list_commits(repo).visible()
        with suppress(Conflict, NotFound):  # it is leased or gone
            some = play.draw.sample(visible, min(1, len(visible)))
            execute(repo, plan_thin(repo, some, drop=["optim.*"], keep=None if some else LAST, tagged=True))


def tag_some(play: Play, repo: Repository, name: str) -> None:
    """Tag visible checkpoints one after the other."""
    for number in range(2):
        visible = list_commits(repo).visible()
        with suppress(Conflict):  # it was purged or changed at the same time
            tags.set_tag(repo, f"{name}-{number}", play.draw.choice(visible))


def thin_untagged(play: Play, repo: Repository, name: str) -> None:
    """Remove the optimizer from untagged checkpoints."""
    for _ in range(2):
        with suppress(Conflict, NotFound):
            execute(repo, plan_thin(repo, [play.draw.choice(list_commits(repo).visible())], drop=["optim.*"]))


def undo_some(play: Play, repo: Repository) -> None:
    """Bring back older places."""
    for _ in range(4):
        old = [one for one in list_commits(repo).placed() if one.is_old_places]
        if old:
            with suppress(Conflict):
                commits.restore(repo, play.draw.choice(old))


def hold_on(play: Play, repo: Repository, name: str) -> None:
    """Take a lease, renew it, and end it."""
    for _ in range(3):
        live = list_commits(repo).live()
        if not live:
            return
        try:
            lease, commit = take(repo, play.draw.choice(live), HOUR)
        except (NotFound, Conflict):
            continue
        play.held[name] = commit.id
        list_commits(repo)
        lease, _ = renew(repo, lease, commit, HOUR)
        list_commits(repo)
        del play.held[name]
        tags.end_lease(repo, lease)


def toggle(play: Play, repo: Repository) -> None:
    """Forget, restore and tag random checkpoints."""
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
