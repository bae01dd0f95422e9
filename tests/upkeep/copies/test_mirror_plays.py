"""A mirror, with concurrent rewrites, forgets and gcs in both stores. Calls run in any order, with kills at any call.

A live checkpoint may be noted as safe, or purged, only if it was complete in the mirror after its last save or restore
in the store. A note may outlive the purge of its checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import Conflict
from casckpt.history.commits import list_commits
from casckpt.history.folding import VOID, Holdings
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies import mirror
from casckpt.upkeep.copies.mirror import Mirror
from casckpt.upkeep.copies.mirror_notes import key_of_note, note
from casckpt.upkeep.gc import gc
from tests.support.checkpoints import array, save_parts
from tests.support.gcs import keys
from tests.support.repositories import memory, repository
from tests.upkeep.gc.play import Play, named, rewrite_some, thin_some

pytestmark = pytest.mark.sweep
ROUNDS = 4


class MirrorPlay(Play):
    """A play with a mirror. ``safe``: keys of notes that would have been true at some instant.

    ``thinned``: thin it too.
    """

    def __init__(self, folder: Path, seed: int, *, thinned: bool = False) -> None:
        super().__init__(folder, seed)
        self.away = memory()
        self.there = repository(folder / "away", self.away, clock=self.clock, seed=seed + 1)
        self.watcher.change_settings(mirror=self.away.url, mirror_thinned=thinned or None)
        self.thinned = thinned
        self.safe: set[str] = set()
        self.noted = 0

    def save(self, step: int) -> None:
        save_parts(self.watcher, {"a": array(step)}, {"optim.a": array(step + 10)}, step=step)

    def repo_there(self, name: str) -> Repository:
        storage = replace(self.stage, inner=self.away).store(name)
        return repository(self.folder / f"{name} away", storage, clock=self.clock, seed=self.draw.randrange(1 << 30))

    def mirror(self, name: str) -> None:
        one = Mirror(self.repo(name), self.repo_there(name))

        def act() -> None:
            for _ in range(2):
                one._catch_up(mirror._State())

        self.stage.add(name, act)

    def catch_up(self, patch: pytest.MonkeyPatch) -> None:
        """Run one more pass, with a check before each note. A copy may be forgotten after its thinned twin."""

        def noting(*noted: Any) -> None:
            self.see()
            note(*noted)

        with patch.context() as now:
            now.setattr(mirror, "note", noting)
            Mirror(self.watcher, self.there)._catch_up(mirror._State())

    def others(self) -> None:
        self.repairer("rewriter")
        self.thinner("thinner")
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

    def see(self) -> None:
        """Record the notes that are true at this instant."""
        here, there = list_commits(self.watcher), list_commits(self.there)
        assert set(named(self.there, there)) <= keys(self.there)
        visible, lives = Holdings(there.visible()), Holdings(there.live())
        self.safe |= {key_of_note(one) for one in here.live() if one in (lives if one.is_forgotten else visible)}

    def look(self) -> None:
        super().look()
        self.see()
        here = list_commits(self.watcher)
        noted = keys(self.watcher, "mirrored/") & {key_of_note(one) for one in here.live()}
        self.noted = max(self.noted, len(noted))
        assert noted <= self.safe, self.stage.log
        gone = [one for one in here.commits.values() if one.last == "purged" and one.standing != VOID]
        purged = {key_of_note(here.standin(one, loses=self.thinned)) for one in gone}
        assert purged <= self.safe, self.stage.log


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("is_killed", "thinned"), [(False, False), (True, False), (False, True)])
def test_a_note_implies_a_complete_checkpoint_in_the_mirror(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, full: bool, is_killed: bool, thinned: bool
) -> None:
    monkeypatch.setattr(mirror, "JOBS", 1)
    noted = 0
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
        play.catch_up(monkeypatch)
        play.look()
        listed = list_commits(play.watcher)
        behind = Holdings(list_commits(play.there).visible())
        assert all(one in behind or key_of_note(one) in play.safe for one in listed.visible())
        noted += play.noted
    assert noted


def test_a_copied_rewrite_replaces_nothing_in_the_mirror_and_keeps_its_order(tmp_path: Path) -> None:
    play = MirrorPlay(tmp_path, 1)
    rewrite_some(play, play.watcher)
    (made,) = (one for one in list_commits(play.watcher).visible() if one.replaces)
    Mirror(play.watcher, play.there)._catch_up(mirror._State())
    found = list_commits(play.there)
    (copy,) = found.visible()
    assert (copy.txid, copy.replaces, copy.origin, copy.standing) == (made.txid, None, made.origin, "stands")
