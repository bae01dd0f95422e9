"""Copies run concurrently with gcs, saves, users and each other, with calls in any order.

Live checkpoints are always complete.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.errors import Conflict, Gone
from casckpt.format.records import Committed
from casckpt.history import tags
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.replication import Work, replicate
from tests.support.checkpoints import array, read_arrays, save_arrays
from tests.support.gcs import collect
from tests.support.repositories import repository
from tests.upkeep.gc.play import Play, rewrite_some

pytestmark = pytest.mark.sweep
ROUNDS = 4
Cast = Callable[[Play, "Copier"], None]


class Copier:
    """An actor that copies a whole source, and repeats the copy if others destroy it.

    The actor r0 also encodes. The actor p0 rewrites checkpoints of the store itself.
    """

    def __init__(self, folder: Path) -> None:
        self.source = repository(folder / "source", seed=77)
        arrays, last = {}, None
        for step in range(3):
            arrays[f"t{step}"] = array(step, cells=1)
            last = save_arrays(self.source, arrays, "copied", step, reuse=last)
        self.commits = {commit.id: commit for commit in list_commits(self.source).live()}
        self.conflicts = 0

    def __call__(self, play: Play, repo: Repository, name: str) -> None:
        if name == "p0":
            rewrite_some(play, repo)
            return
        work = Work(jobs=1, compress=name == "r0")
        for commit in list_commits(self.source).live():
            try:
                replicate(self.source, repo, commit, work)
            except (Conflict, Gone):
                self.conflicts += 1  # revoked repeatedly

    def check(self, repo: Repository) -> None:
        """Check that all checkpoints were copied, even if a policy has since forgotten them."""
        found = [one.first for one in list_commits(repo).commits.values()]
        here = {one.manifest for one in found if isinstance(one, Committed)}
        assert {commit.id for commit in list_commits(self.source).live()} <= here
        for commit in list_commits(repo).live():
            if commit.run == "copied":
                assert read_arrays(repo, commit) == read_arrays(self.source, self.commits[commit.id])


def two_copies_and_a_patient_gc(play: Play, copier: Copier) -> None:
    play.writer("c0", copier)
    play.writer("c1", copier)
    play.gc("g0", revoke_after=1e9)


def two_copies_and_a_gc_that_gives_up_on_all(play: Play, copier: Copier) -> None:
    play.writer("c0", copier)
    play.writer("c1", copier)
    play.gc("g0", revoke_after=0.0, runs=3)


def a_copy_a_save_and_a_user(play: Play, copier: Copier) -> None:
    play.writer("c0", copier)
    play.writer("w0")
    play.user("user")
    play.gc("g0", revoke_after=1e9, runs=3)


def a_copy_one_that_encodes_and_a_patient_gc(play: Play, copier: Copier) -> None:
    play.writer("r0", copier)
    play.writer("c1", copier)
    play.gc("g0", revoke_after=1e9)


def a_copy_that_encodes_rewrites_and_a_user(play: Play, copier: Copier) -> None:
    play.writer("r0", copier)
    play.writer("p0", copier)
    play.user("user")
    play.gc("g0", revoke_after=0.0, runs=3)


CASTS = [
    two_copies_and_a_patient_gc,
    two_copies_and_a_gc_that_gives_up_on_all,
    a_copy_a_save_and_a_user,
    a_copy_one_that_encodes_and_a_patient_gc,
    a_copy_that_encodes_rewrites_and_a_user,
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cast", CASTS)
def test_copies_run_concurrently_with_saves_and_gcs(tmp_path: Path, seed: int, full: bool, cast: Cast) -> None:
    copied = 0
    for round_ in range(ROUNDS * (45 if full else 1)):
        play, copier = Play(tmp_path / str(round_), seed + round_), Copier(tmp_path / str(round_))
        cast(play, copier)
        play.run()
        copied += sum(commit.run == "copied" for commit in list_commits(play.watcher).live())
        if cast in (two_copies_and_a_patient_gc, a_copy_one_that_encodes_and_a_patient_gc):
            assert copier.conflicts == 0
            copier.check(play.watcher)
        for name in tags.tags(play.watcher):
            tags.delete_tag(play.watcher, name)
        play.clean_up()
    assert copied, "no copy ever came to its end"


def test_a_different_process_finishes_a_copy_killed_at_any_call(tmp_path: Path, seed: int) -> None:
    for round_ in range(ROUNDS):
        folder = tmp_path / str(round_)
        play, copier = Play(folder, seed + round_), Copier(folder)
        play.writer("c0", copier)
        play.writer("c1", copier)
        play.gc("g0", revoke_after=1e9, runs=1)
        calls = play.draw.randrange(1, 40)
        choose = play.choices()

        def choose_until_killed(
            waiting: list[str], play: Play = play, calls: int = calls, choose: Callable[[list[str]], str] = choose
        ) -> str:
            dead = sum(name == "c0" for name, _ in play.stage.log) >= calls
            return choose([name for name in waiting if name != "c0" or not dead] or waiting)

        play.stage.run(choose_until_killed, play.look, killed=frozenset({"c0"}))
        copier.check(play.watcher)
        assert collect(play.watcher, wait=0.0, revoke_after=0.0).waiting == ()
        copier.check(play.watcher)
        play.clean_up()
