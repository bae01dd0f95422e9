"""Commits, tags and references are compared with a model (a dict) while users and gcs act in any order."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from casckpt.contents import refs
from casckpt.errors import CasckptError, Conflict, NotFound, Revoked
from casckpt.format.names import ManifestId, TxId
from casckpt.format.records import Committed
from casckpt.history import commits as log
from casckpt.history import tags
from casckpt.history.commits import Commit, list_commits
from casckpt.history.transactions import revoke
from casckpt.repository.repository import Repository
from tests.support.repositories import commit_bare, committed, manifest_id, memory, repository

RUNS = st.sampled_from(["a", "a/b", "latest"])
STEPS = st.integers(0, 2)
TAGS = st.sampled_from(["best", "base"])


@dataclass
class Known:
    """The model of one transaction."""

    txid: TxId
    run: str
    step: int
    manifest: ManifestId
    state: str

    @property
    def live(self) -> bool:
        return self.state not in ("revoked", "purged")

    @property
    def visible(self) -> bool:
        return self.state in ("committed", "restored")


class RecordsModel(RuleBasedStateMachine):
    """``model``: transactions in the order in which they began. ``tagged``: the target of each tag."""

    known = Bundle("known")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.storage = memory()
        self.repo: Repository = repository(self.folder, self.storage)
        self.watcher: Repository = repository(self.folder / "watcher", self.storage)
        self.model: dict[TxId, Known] = {}
        self.tagged: dict[str, TxId] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- actions of people and gcs

    @rule(target=known, run=RUNS, step=STEPS, copied=st.booleans())
    def commit(self, run: str, step: int, copied: bool) -> TxId:
        first = next((one.manifest for one in self.model.values() if one.live), None) if copied else None
        manifest = first or manifest_id(f"{len(self.model)}")
        txid = self.repo.new_txid(run, step, after=self.model)
        commit_bare(self.repo, run, step, manifest=manifest, txid=txid)
        self.model[txid] = Known(txid, run, step, manifest, "committed")
        return txid

    @rule(target=known, run=RUNS, step=STEPS, late=st.booleans())
    def revoke_one(self, run: str, step: int, late: bool) -> TxId:
        record = committed(self.repo, run, step, txid=self.repo.new_txid(run, step, after=self.model))
        assert revoke(self.repo, record.txid, "x")
        if late:
            with pytest.raises(Revoked):
                log.commit(self.repo, record)
        self.model[record.txid] = Known(record.txid, run, step, record.manifest, "revoked")
        return record.txid

    @rule(txid=known)
    def revoke_too_late(self, txid: TxId) -> None:
        assert not revoke(self.repo, txid, "too late")

    @rule(txid=known)
    def forget(self, txid: TxId) -> None:
        one = self.model[txid]
        self.change(txid, log.forget, "forgotten", one.live)

    @rule(txid=known)
    def restore(self, txid: TxId) -> None:
        one = self.model[txid]
        twin = any(self.is_twin(one, other) for other in self.model.values())
        self.change(txid, log.restore, "restored", one.visible or (one.live and not twin))

    @rule(txid=known)
    def purge(self, txid: TxId) -> None:
        self.change(txid, log.purge, "purged", self.model[txid].state in ("forgotten", "purged"))

    @rule(target=known, run=RUNS, step=STEPS)
    def overwrite(self, run: str, step: int) -> object:
        old = [commit for commit in list_commits(self.repo).visible() if (commit.run, commit.step) == (run, step)]
        txid = self.commit(run, step, copied=False)
        for commit in old:
            log.forget(self.repo, commit)
            self.model[commit.txid].state = "forgotten"
        return multiple(txid)

    @rule(name=TAGS, txid=known)
    def tag(self, name: str, txid: TxId) -> None:
        one = self.model[txid]
        twin = any(self.is_twin(one, other) for other in self.model.values())
        commit = list_commits(self.repo).commits[txid]
        if one.visible or (one.live and not twin):
            tags.set_tag(self.repo, name, commit)
            self.tagged[name] = txid
            one.state = one.state if one.visible else "restored"
        else:
            with pytest.raises(Conflict):
                tags.set_tag(self.repo, name, commit)

    @rule(name=TAGS)
    def delete_tag(self, name: str) -> None:
        if name in self.tagged:
            tags.delete_tag(self.repo, name)
            del self.tagged[name]
        else:
            with pytest.raises(NotFound):
                tags.delete_tag(self.repo, name)

    @rule(new_host=st.booleans())
    def another_process(self, new_host: bool) -> None:
        if new_host:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        clock, entropy = self.repo.clock, self.repo.entropy
        self.repo = repository(self.folder, self.storage, clock=clock, entropy=entropy)

    # ---- invariants

    @invariant()
    def the_listing_is_the_model(self) -> None:
        found = list_commits(self.repo)
        states = {txid: (c.last if c.last != "restored" else "visible") for txid, c in found.commits.items()}
        wanted = {one.txid: one.state if one.state != "restored" else "visible" for one in self.model.values()}
        assert states == wanted
        assert found.damaged == {}
        assert [c.txid for c in found.live()] == [one.txid for one in self.model.values() if one.live]
        assert sorted(c.txid for c in (*found.current(), *found.superseded())) == [c.txid for c in found.visible()]
        assert {txid for txid, _ in log.list_names(self.repo)} == set(self.model)
        assert log.list_names(self.repo) == found.names

    @rule()
    def one_who_looks_now_and_then_sees_what_a_first_look_sees(self) -> None:
        fresh = repository(self.folder / "fresh", self.storage)
        assert list_commits(self.watcher) == list_commits(fresh) == list_commits(self.watcher, anew=True)

    @invariant()
    def references_name_what_the_model_says(self) -> None:
        found = list_commits(self.repo)
        visible = [one for one in self.model.values() if one.visible]
        self.check("latest", visible, found)
        for run in ("a", "a/b", "latest"):
            self.check(f"{run}@latest", [one for one in visible if one.run == run], found)
            for step in range(3):
                self.check(f"{run}@{step}", [one for one in visible if (one.run, one.step) == (run, step)], found)
        for manifest in {one.manifest for one in self.model.values()}:
            same = [one for one in self.model.values() if one.manifest == manifest and one.live]
            self.check(manifest, [one for one in same if one.visible] or same, found)

    @invariant()
    def tags_name_what_the_model_says(self) -> None:
        """A tag names the commit that it was set on, or another one of the same checkpoint while that one is not
        visible."""
        found = list_commits(self.repo)
        assert {name: tag.txid for name, tag in tags.tags(self.repo, listed=found).items()} == self.tagged
        assert self.tagged.keys() <= found.recorded_tags.keys()
        for name, txid in self.tagged.items():
            one = self.model[txid]
            twins = [other for other in self.model.values() if other.manifest == one.manifest and other.visible]
            self.check(f"tag:{name}", [one] if one.visible else twins, found)

    @invariant()
    def records_say_what_was_written(self) -> None:
        for commit in list_commits(self.repo).commits.values():
            if isinstance(commit.first, Committed):
                one = self.model[commit.txid]
                assert (commit.run, commit.step, commit.id) == (one.run, one.step, one.manifest)

    def check(self, ref: str, candidates: list[Known], found: log.CommitList) -> None:
        """Check that ``ref`` names the last of ``candidates``, or nothing if there are none."""
        if candidates:
            assert refs.resolve(self.repo, ref, found).txid == candidates[-1].txid
        else:
            with pytest.raises(NotFound):
                refs.resolve(self.repo, ref, found)

    def change(self, txid: TxId, act: object, state: str, allowed: bool) -> None:
        assert callable(act)
        one = self.model[txid]
        commit: Commit = list_commits(self.repo).commits[txid]
        if not allowed:
            with pytest.raises(CasckptError) as caught:
                act(self.repo, commit)
            assert isinstance(caught.value, Conflict)
            return
        now = act(self.repo, commit)
        if not (state == "restored" and one.visible):
            one.state = state
        assert now == list_commits(self.repo).commits[txid]

    def is_twin(self, one: Known, other: Known) -> bool:
        same = (one.run, one.step) == (other.run, other.step)
        return same and one.txid != other.txid and other.visible


TestRecordsModel = RecordsModel.TestCase
TestRecordsModel.settings = settings(max_examples=-(-settings().max_examples // 3))
