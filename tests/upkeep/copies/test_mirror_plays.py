"""A mirror, with concurrent rewrites, forgets and gcs in both stores. Calls run in any order, with kills at any call.

Entries may be purged or trimmed here only if a copy in the mirror has had them since they were last brought back here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from casckpt.errors import Conflict
from casckpt.format.keys import copied_txid
from casckpt.format.names import TxId
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.folding import Places
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies import mirror
from casckpt.upkeep.copies.mirror import Mirror
from casckpt.upkeep.copies.mirrored import unsafe_in
from casckpt.upkeep.gc import gc
from tests.support.checkpoints import array, save_parts
from tests.support.gcs import keys
from tests.support.repositories import memory, repository
from tests.upkeep.gc.play import Play, named, rewrite_some, thin_some

pytestmark = pytest.mark.sweep
ROUNDS = 4


class MirrorPlay(Play):
    """A play with a mirror. ``thinned``: thin it too.

    ``had``: for each checkpoint, its last restore, and the places that its copies have had since then.
    """

    def __init__(self, folder: Path, seed: int, *, thinned: bool = False) -> None:
        super().__init__(folder, seed)
        self.away = memory()
        self.there = repository(folder / "away", self.away, clock=self.clock, seed=seed + 1)
        self.watcher.change_settings(mirror=self.away.url, mirror_thinned=thinned or None)
        self.thinned = thinned
        self.had: dict[TxId, tuple[int, list[Places]]] = {}
        self.before: CommitList = list_commits(self.watcher)
        self.ended = 0

    def save(self, step: int) -> None:
        save_parts(self.watcher, {"a": array(step)}, {"optim.a": array(step + 10)}, step=step)

    def repo(self, name: str, cache: str = "") -> Repository:
        repo = super().repo(name, cache)
        repo.mirror = self.repo_there(name).storage
        return repo

    def repo_there(self, name: str) -> Repository:
        storage = replace(self.stage, inner=self.away).store(name)
        return repository(self.folder / f"{name} away", storage, clock=self.clock, seed=self.draw.randrange(1 << 30))

    def mirror(self, name: str) -> None:
        one = Mirror(self.repo(name), self.repo_there(name))

        def act() -> None:
            for _ in range(2):
                one._catch_up(mirror._State())

        self.stage.add(name, act)

    def others(self) -> None:
        self.repairer("rewriter")
        self.thinner("thinner")
        self.undoer("undoer")
        self.user("user")
        self.gc("gc", keeps_all=True)
        there = self.repo_there("gc there")

        def retire() -> None:
            for _ in range(2):
                try:
                    gc.execute(there, gc.plan_gc(there, Policy(keep_last=1), min_age=0.0), wait=0.0, revoke_after=0.0)
                except Conflict:
                    continue

        self.stage.add("gc there", retire)
        self.stage.add("rewriter there", lambda: rewrite_some(self, self.repo_there("rewriter there")))
        self.stage.add("thinner there", lambda: thin_some(self, self.repo_there("thinner there")))

    def look(self) -> None:
        if self.has_changed():
            self.check()

    def check(self) -> None:
        super().look()
        here, there = list_commits(self.watcher), list_commits(self.there)
        assert set(named(self.there, there)) <= keys(self.there)
        for txid, commit in here.commits.items():
            before = self.before.commits.get(txid, commit)
            if commit.ended != before.ended:
                self.check_ended(before, commit)
            if commit.existing:
                restored, had = self.had.get(txid, (-1, []))
                copies = [there.commits.get(copied_txid(txid, number)) for number in range(9)]
                now = [places for copy in copies if copy is not None for places in copy.existing]
                self.had[txid] = commit.restored, now if restored != commit.restored else [*had, *now]
        self.before = here

    def check_ended(self, before: Commit, now: Commit) -> None:
        needed = [before.current] if self.thinned else before.existing
        lost = [one for one in needed if one and not any(left.holds(one) for left in now.existing)]
        _, had = self.had[now.txid]
        assert all(any(copy.holds(one) for copy in had) for one in lost), self.stage.log
        self.ended += 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("is_killed", "thinned"), [(False, False), (True, False), (False, True)])
def test_only_entries_that_the_mirror_has_had_are_purged(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, full: bool, is_killed: bool, thinned: bool
) -> None:
    monkeypatch.setattr(mirror, "JOBS", 1)
    ended = 0
    for round_ in range(ROUNDS * (60 if full else 1)):
        play = MirrorPlay(tmp_path / str(round_), seed + round_, thinned=thinned)
        play.mirror("mirror")
        play.others()
        calls, choose = play.draw.randrange(1, 60), play.choices()

        def chosen(waiting: list[str], play: MirrorPlay = play, calls: int = calls, choose: object = choose) -> str:
            assert callable(choose)
            dead = is_killed and sum(name == "mirror" for name, _ in play.stage.log) >= calls
            return str(choose([name for name in waiting if name != "mirror" or not dead] or waiting))

        play.stage.run(chosen, play.look, killed=frozenset({"mirror"} if is_killed else ()))
        for _ in range(2):
            Mirror(play.watcher, play.there)._catch_up(mirror._State())
            play.check()
        listed, there = list_commits(play.watcher), list_commits(play.there)
        assert not unsafe_in(play.there, listed.live(), thinned=thinned, listed=there)
        assert not unsafe_in(play.there, listed.live(), thinned=thinned)
        play.clean_up()
        play.check()
        ended += play.ended
    assert ended
