"""Thinning, saves, copies, a mirror and gcs in any order: visible checkpoints have exactly the expected entries."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from casckpt.contents.refs import resolve
from casckpt.errors import CasckptError, NotFound
from casckpt.history.commits import forget, list_commits, restore
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies import mirror
from casckpt.upkeep.copies.mirror import Mirror
from casckpt.upkeep.repair.verify import verify
from casckpt.upkeep.thin import execute, plan_thin, whole_of
from tests.support.checkpoints import array, save_parts
from tests.support.copies import copy
from tests.support.gcs import collect
from tests.support.repositories import Ticks, memory, repository
from tests.upkeep.test_thin import OPTIM, check, weights

STEPS = st.integers(0, 3)
STORES = st.sampled_from(["here", "there", "other"])
DROPS = st.sampled_from([["optim.*"], ["optim.a"], ["optim.b", "optim.a"]])


class ThinModel(RuleBasedStateMachine):
    """``here`` has the mirror ``there``, and exchanges copies with ``other``. ``ids``: the saved checkpoints."""

    @initialize(thinned=st.booleans())
    def start(self, thinned: bool) -> None:
        self.folder, clock = Path(tempfile.mkdtemp()), Ticks()
        self.repos: dict[str, Repository] = {
            name: repository(self.folder / name, memory(), seed=seed, clock=clock)
            for seed, name in enumerate(("here", "there", "other"))
        }
        self.ids: dict[int, str] = {}
        self.kept_whole = not thinned
        for name in ("there", "other"):
            self.repos[name].create()
        self.save(0)
        self.repos["here"].change_settings(mirror=self.repos["there"].storage.url, mirror_thinned=thinned or None)

    def teardown(self) -> None:
        for repo in getattr(self, "repos", {}).values():
            collect(repo, wait=0.0)
            assert not verify(repo).is_damaged
            check(repo)
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(step=STEPS)
    def save(self, step: int) -> None:
        if step not in self.ids:
            optim = {name: array(100 + step + n) for n, name in enumerate(OPTIM)}
            self.ids[step] = save_parts(self.repos["here"], weights(step), optim, step=step).id

    @rule(store=STORES, step=STEPS, drop=DROPS)
    def thin(self, store: str, step: int, drop: list[str]) -> None:
        repo = self.repos[store]
        if self.is_there(repo, step) and not (store == "there" and self.kept_whole):
            execute(repo, plan_thin(repo, [f"run@{step}"], drop=drop))
            assert resolve(repo, f"run@{step}").dropped is not None

    @rule(store=STORES, step=STEPS)
    def restore(self, store: str, step: int) -> None:
        repo = self.repos[store]
        if self.is_there(repo, step):
            try:
                restore(repo, whole_of(resolve(repo, f"run@{step}")))
            except NotFound:
                return
            assert self.is_there(repo, step)

    @rule(back=st.booleans(), step=STEPS)
    def copy(self, back: bool, step: int) -> None:
        source, target = (self.repos[name] for name in (("other", "here") if back else ("here", "other")))
        if self.is_there(source, step):
            copy(source, target, f"run@{step}")
            assert self.is_there(target, step)

    @rule(step=STEPS)
    def forget(self, step: int) -> None:
        if self.is_there(self.repos["here"], step) and self.is_there(self.repos["other"], step):
            forget(self.repos["here"], resolve(self.repos["here"], f"run@{step}"))

    @rule()
    def mirror(self) -> None:
        here, there = self.repos["here"], self.repos["there"]
        error: CasckptError | None = Mirror(here, there)._catch_up(mirror._State())
        assert error is None
        for commit in list_commits(here).visible():
            assert self.is_there(there, commit.step)

    @rule(store=STORES)
    def gc(self, store: str) -> None:
        collect(self.repos[store], wait=0.0)

    @invariant()
    def what_is_visible_is_there(self) -> None:
        for repo in getattr(self, "repos", {}).values():
            check(repo)
            assert {one.step: one.id for one in list_commits(repo).current()}.items() <= self.ids.items()

    def is_there(self, repo: Repository, step: int) -> bool:
        return any(one.step == step for one in list_commits(repo).visible())


TestThinModel = ThinModel.TestCase
TestThinModel.settings = settings(max_examples=-(-settings().max_examples // 4), stateful_step_count=25)
