"""Expiring tags, and requirements for writers, prevent gc from forgetting and purging."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from casckpt.contents.refs import resolve
from casckpt.errors import Conflict, NotFound, Unsupported
from casckpt.format.keys import commit_key
from casckpt.format.names import TxId
from casckpt.format.records import Dropped, changed
from casckpt.history import commits, tags
from casckpt.history.commits import Commit, list_commits
from casckpt.history.leases import hold, renew, take
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc import forgetting
from casckpt.upkeep.gc.gc import execute, plan_gc
from casckpt.upkeep.gc.purge import GcPlan, forget_and_purge
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import LAST, begin_elsewhere, collect, keys, run_gc, snapshot, steps, ticking
from tests.support.repositories import (
    commit_bare,
    commit_draft,
    draft,
    half_rewrite,
    meanwhile,
    memory,
    put_blob,
    put_manifest_of,
    repository,
    save,
)
from tests.support.rewrites import move

HOUR = 3600.0


@pytest.fixture
def faults() -> FaultyStore:
    return FaultyStore(memory())


@pytest.fixture
def repo(tmp_path: Path, faults: FaultyStore) -> Repository:
    """A store with run@0 and run@1."""
    made = repository(tmp_path, faults)
    for step in range(2):
        save(made, step=step, texts=[str(step)])
    return made


def first(repo: Repository) -> Commit:
    return list_commits(repo).live()[0]


def in_its_place(repo: Repository) -> Commit:
    """Overwrite run@0 with a different checkpoint."""
    return commit_draft(repo, repo.new_txid("run", 0), draft([], "run", 0, created_at=repo.clock()))


def test_an_expiring_tag_protects_its_checkpoint_until_an_hour_after_its_end(repo: Repository) -> None:
    hold(repo, "eval", first(repo), HOUR)
    assert run_gc(repo, LAST).forgotten == ()
    gone = commits.forget(repo, first(repo))
    result = run_gc(repo)
    (waiting,) = result.waiting
    assert (waiting.reason, waiting.tags) == ("tagged", ("eval",))
    assert waiting.until is not None
    assert waiting.until.timestamp() == pytest.approx(repo.clock() / 1e6 + 2 * HOUR, abs=1)
    ticking(repo)(HOUR * 1.9)  # it has expired, but its holder's clock may be slow
    assert run_gc(repo).purged == ()
    ticking(repo)(HOUR * 0.2)
    assert [one.txid for one in run_gc(repo).purged] == [gone.txid]


def test_an_expiring_and_a_permanent_tag_together_protect_a_checkpoint_indefinitely(repo: Repository) -> None:
    hold(repo, "eval", first(repo), HOUR)
    tags.set_tag(repo, "best", first(repo))
    commits.forget(repo, first(repo))
    in_its_place(repo)  # so that it is not restored
    (waiting,) = run_gc(repo).waiting
    assert (waiting.tags, waiting.until) == (("best", "eval"), None)


def committed_again(repo: Repository, commit: Commit) -> Commit:
    """Commit the same checkpoint in a new transaction."""
    record = changed(commit.committed, txid=repo.new_txid(commit.run, commit.step))
    put_manifest_of(repo, commit, record.txid)
    commits.commit(repo, record)
    return commits.just_committed(record)


def test_a_tag_prevents_the_purge_of_every_commit_with_its_id(repo: Repository) -> None:
    """A tag that was set on one commit also protects the other commits of that checkpoint."""
    commit = first(repo)
    twin = committed_again(repo, commit)
    _, tagged = hold(repo, "eval", commit, HOUR)
    for one in (twin, tagged):
        commits.forget(repo, one)
    assert [one.reason for one in run_gc(repo).waiting] == ["tagged", "tagged"]
    tags.delete_tag(repo, "eval")
    assert {one.txid for one in run_gc(repo).purged} == {commit.txid, twin.txid}


def test_a_tag_set_on_a_twin_after_the_plan_prevents_the_purge(repo: Repository) -> None:
    commit = first(repo)
    twin = committed_again(repo, commit)
    plan = GcPlan((), (commits.forget(repo, commit),))
    _, tagged = hold(repo, "eval", twin, HOUR)
    commits.forget(repo, tagged)
    assert execute(repo, plan).purged == ()


def twin_of(repo: Repository, commit: Commit) -> Commit:
    """Commit the checkpoint again at different locations, as a copy does, and forget ``commit``."""
    twin = committed_again(repo, commit)
    commits.forget(repo, list_commits(repo).commits[commit.txid])
    return twin


def test_a_tag_does_not_prevent_the_purge_of_a_commit_if_a_twin_is_visible(repo: Repository) -> None:
    commit = first(repo)
    tag, _ = hold(repo, "eval", commit, HOUR)
    tags.set_tag(repo, "best", commit)
    twin = twin_of(repo, commit)
    assert [one.txid for one in plan_gc(repo, min_age=0.0).purge] == [commit.txid]
    assert [one.txid for one in run_gc(repo).purged] == [commit.txid]
    assert resolve(repo, "tag:best").txid == twin.txid
    tags.delete_tag(repo, "best")
    commits.forget(repo, twin)
    (waiting,) = run_gc(repo).waiting
    assert (waiting.txid, waiting.reason, waiting.tags) == (twin.txid, "tagged", (tag.name,))


def test_a_forgotten_twin_does_not_allow_a_purge(repo: Repository) -> None:
    commit = first(repo)
    hold(repo, "eval", commit, HOUR)
    commits.forget(repo, twin_of(repo, commit))
    result = run_gc(repo)
    assert (result.purged, [one.reason for one in result.waiting]) == ((), ["tagged", "tagged"])


@pytest.mark.parametrize("when", ["tags/", "commits/"])
def test_a_twin_forgotten_after_the_plan_does_not_allow_a_purge(
    repo: Repository, faults: FaultyStore, when: str
) -> None:
    """The twin was visible when gc made its plan, but not when tags or commits are listed again."""
    commit = first(repo)
    hold(repo, "eval", commit, HOUR)
    twin, plan = twin_of(repo, commit), plan_gc(repo, min_age=0.0)
    assert [one.txid for one in plan.purge] == [commit.txid]

    def forget(_: object) -> None:
        if faults.count("list", "tags/"):
            faults.heal()
            commits.forget(repo, twin)

    faults.calls.clear()
    faults.inject(call_first("list", forget, key=when, times=9))
    assert execute(repo, plan).purged == ()
    assert {one.txid for one in list_commits(repo).live()} >= {commit.txid, twin.txid}


# rewrites

THIN = Dropped(entries=1, bytes=4, rule="optimizer")


def old_places(repo: Repository) -> set[TxId]:
    return {one.places.txid for one in list_commits(repo).placed() if one.is_old_places}


def test_old_places_are_trimmed_after_the_minimum_age(repo: Repository) -> None:
    commit = first(repo)
    move(repo, commit)
    waiting, *_ = run_gc(repo, min_age=HOUR).waiting
    assert (waiting.reason, waiting.txid, waiting.replaced) == ("replaced", commit.txid, True)
    ticking(repo)(HOUR)
    result = run_gc(repo, min_age=HOUR)
    assert [(one.id, one.is_old_places) for one in result.purged] == [(commit.id, True)]
    assert (result.deleted_blobs, result.waiting) == (1, ())
    assert first(repo).visible
    assert old_places(repo) == set()
    assert run_gc(repo, min_age=HOUR).purged == ()


def test_the_age_of_old_places_begins_with_the_rewrite(repo: Repository) -> None:
    ticking(repo)(2 * HOUR)
    move(repo, first(repo))
    assert run_gc(repo, min_age=HOUR).purged == ()


def test_old_places_that_cannot_be_read_are_trimmed_immediately(repo: Repository) -> None:
    """Such places are useless, and gc could not delete anything while they exist."""
    commit = first(repo)
    move(repo, commit)
    repo.storage.delete(f"objects/{commit.txid}/{commit.id}.manifest")
    tags.set_tag(repo, "best", first(repo))
    assert [one.places.txid for one in run_gc(repo, min_age=HOUR).purged] == [commit.txid]


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_tag_keeps_old_places_only_if_it_was_set_on_more_entries(repo: Repository, is_forgotten: bool) -> None:
    hold(repo, "best", first(repo), HOUR)
    moved = move(repo, first(repo))
    assert steps(run_gc(repo).purged) == [0], "the current places have all entries"
    thin = move(repo, first(repo), dropped=THIN)
    again = move(repo, thin)
    assert again.dropped == THIN
    if is_forgotten:
        commits.forget(repo, again)
    result = run_gc(repo)
    assert result.purged == ()
    waiting = {one.txid for one in result.waiting}
    every = {moved.places.txid, thin.places.txid, again.places.txid}
    assert waiting == (every if is_forgotten else every - {again.places.txid})
    tags.delete_tag(repo, "best")
    assert {one.places.txid for one in run_gc(repo).purged} == waiting


def test_a_tag_set_on_thinned_places_does_not_keep_the_older_ones(repo: Repository) -> None:
    thin = move(repo, first(repo), dropped=THIN)
    tags.set_tag(repo, "best", thin)
    assert steps(run_gc(repo).purged) == [0]
    assert old_places(repo) == set()


def test_gc_does_not_trim_places_that_were_tagged_since_the_plan(repo: Repository) -> None:
    """The process that set the tag died before it brought them back."""
    whole = first(repo)
    move(repo, whole, dropped=THIN)
    plan = plan_gc(repo, min_age=0.0)
    assert [one.places for one in plan.purge] == [whole.places]
    tags.write_generation(repo, "best", 0, whole)
    assert execute(repo, plan).purged == ()
    assert whole.places in first(repo).existing


def test_a_preview_deletes_nothing_of_old_places(repo: Repository) -> None:
    commit = first(repo)
    put_blob(repo, commit.txid, "garbage")
    move(repo, commit)
    assert run_gc(repo, min_age=HOUR, dry_run=True).deleted_blobs == 1


def test_gc_does_not_trim_places_that_are_brought_back_first(repo: Repository, faults: FaultyStore) -> None:
    commit = first(repo)
    move(repo, commit)
    plan = plan_gc(repo, min_age=0.0)
    assert [one.places.txid for one in plan.purge] == [commit.txid]
    (old,) = first(repo).old
    faults.inject(call_first("put", meanwhile(lambda: commits.restore(repo, old)), key=f"commits/{commit.txid}.2"))
    assert execute(repo, plan).purged == ()
    assert (first(repo).places.txid, len(first(repo).existing)) == (commit.txid, 2)


def test_gc_ends_a_dead_rewrite_and_deletes_what_it_left(repo: Repository, faults: FaultyStore) -> None:
    commit = first(repo)
    record = half_rewrite(repo, commit)
    assert keys(repo, f"objects/{record.by}/")
    assert run_gc(repo, revoke_after=HOUR).waiting, "its rewriter may be alive"
    ticking(repo)(HOUR)
    result = run_gc(repo, revoke_after=HOUR)
    assert (result.revoked, result.purged) == ((record.by,), ())
    assert (keys(repo, f"objects/{record.by}/"), keys(repo, "transactions/")) == (set(), set())
    with pytest.raises(Conflict):
        repo.put_record(commit_key(commit.txid, 1), record)
    assert first(repo).places == commit.places


def test_gc_finds_that_a_silent_rewrite_had_committed(repo: Repository) -> None:
    commit = first(repo)
    record = half_rewrite(repo, commit)
    assert run_gc(repo, revoke_after=HOUR).waiting
    repo.put_record(commit_key(commit.txid, 1), record)
    ticking(repo)(HOUR)
    result = run_gc(repo, revoke_after=HOUR)
    assert (result.revoked, steps(result.purged)) == ((), [0])
    assert first(repo).places.txid == record.by
    assert keys(repo, "transactions/") == set()


def test_a_policy_uses_the_original_save_time_of_a_rewritten_checkpoint(repo: Repository) -> None:
    made = move(repo, first(repo))
    newest = list_commits(repo).current()[-1]
    assert newest.step == 1
    assert [one.txid for one in run_gc(repo, LAST).forgotten] == [made.txid]
    assert [one.txid for one in list_commits(repo).visible()] == [newest.txid]


def test_two_gcs_that_each_purge_a_twin_leave_one_commit(repo: Repository, faults: FaultyStore) -> None:
    """One gc is about to purge the commit because its twin is visible.

    Then the twin is forgotten, and a second gc runs.
    """
    commit = first(repo)
    hold(repo, "eval", commit, HOUR)
    purged: list[Commit] = []
    twin = twin_of(repo, commit)

    def other() -> None:
        commits.forget(repo, twin)
        purged.extend(run_gc(repo).purged)

    plan = plan_gc(repo, min_age=0.0)
    faults.inject(call_first("put", meanwhile(other), key=f"commits/{commit.txid}.2"))
    assert [one.txid for one in execute(repo, plan).purged] == [commit.txid]
    assert purged == []
    assert commit.id in {one.id for one in list_commits(repo).live()}


def test_two_gcs_that_each_forget_a_leased_twin_restore_one(repo: Repository, faults: FaultyStore) -> None:
    """Both twins are visible, as they are after a killed repair. A lease is granted before either is forgotten."""
    commit = first(repo)
    twin = committed_again(repo, commit)

    def other() -> None:
        faults.inject(
            call_first("put", meanwhile(lambda: hold(repo, "eval", commit, HOUR)), key=f"commits/{twin.txid}.1")
        )
        assert [one.txid for one in execute(repo, GcPlan((twin,), (twin,))).purged] == [twin.txid]

    faults.inject(call_first("put", meanwhile(other), key=f"commits/{commit.txid}.1"))
    assert execute(repo, GcPlan((commit,), (commit,))).purged == ()
    assert first(repo).txid == commit.txid
    assert first(repo).visible


def test_a_lease_granted_while_gc_forgets_protects_its_checkpoint(repo: Repository, faults: FaultyStore) -> None:
    """A lease does not keep it from being forgotten at this moment, but keeps its bytes."""
    commit, plan = first(repo), plan_gc(repo, LAST, min_age=0.0)
    faults.inject(call_first("put", meanwhile(lambda: take(repo, commit, HOUR)), key=f"commits/{commit.txid}.1"))
    result = execute(repo, plan)
    assert (steps(result.forgotten), result.purged) == ([0], ())
    assert first(repo).is_forgotten


def test_gc_undoes_its_own_forget_but_not_later_changes(repo: Repository, faults: FaultyStore) -> None:
    """The process that sets the tag restores the checkpoint before gc does. Then a user forgets it by name."""
    commit, plan = first(repo), plan_gc(repo, LAST, min_age=0.0)

    def tag_it(_: object) -> None:
        if first(repo).last == "forgotten":  # by gc, which is now listing tags
            faults.heal()
            tags.write_generation(repo, "best", 0, commit)
            faults.inject(call_first("list", meanwhile(restore_and_forget), key="commits/", at=2))

    def restore_and_forget() -> None:
        commits.restore(repo, first(repo))
        forgetting.forget(repo, [first(repo)])

    faults.inject(call_first("list", tag_it, key="tags/", times=9))
    execute(repo, plan)
    assert (first(repo).txid, first(repo).last, tags.tags(repo)) == (commit.txid, "forgotten", {})


def test_a_tag_set_while_gc_lists_tags_is_not_granted(repo: Repository, faults: FaultyStore) -> None:
    commit = first(repo)
    commits.forget(repo, commit)
    plan, refused = plan_gc(repo, min_age=0.0), []

    def attempt() -> None:
        with pytest.raises(NotFound) as caught:
            hold(repo, "eval", commit, HOUR)
        refused.append(caught.value)

    faults.inject(call_first("put", meanwhile(attempt), key=f"commits/{commit.txid}.2"))
    assert steps(execute(repo, plan).purged) == [0]
    assert len(refused) == 1


def test_a_purge_takes_effect_only_if_it_gets_the_next_log_number(repo: Repository, faults: FaultyStore) -> None:
    """The checkpoint was restored, leased and forgotten again after the tags were listed.

    The next number in its log is already taken, so gc purges nothing.
    """
    commit = first(repo)
    commits.forget(repo, commit)
    plan = plan_gc(repo, min_age=0.0)

    def back() -> None:
        hold(repo, "eval", commits.restore(repo, first(repo)), HOUR)
        commits.forget(repo, first(repo))

    faults.inject(call_first("put", meanwhile(back), key=f"commits/{commit.txid}.2"))
    assert execute(repo, plan).purged == ()
    assert first(repo).txid == commit.txid
    assert [one.reason for one in run_gc(repo).waiting] == ["tagged"]


@pytest.mark.parametrize("folder", ["tags/", "leases/"])
def test_gc_reads_the_clock_before_it_lists_tags(repo: Repository, faults: FaultyStore, folder: str) -> None:
    """A lease that is renewed during the listing may be missing from it, so the time before the listing is used."""
    commit = first(repo)
    _, commit = hold(repo, "eval", commit, HOUR) if folder == "tags/" else take(repo, commit, HOUR)
    plan = GcPlan((), (commits.forget(repo, commit),))
    ticking(repo)(2 * HOUR - 1)
    faults.inject(call_first("list", meanwhile(lambda: ticking(repo)(2)), key=folder))
    assert execute(repo, plan).purged == ()
    assert steps(execute(repo, plan).purged) == [0]


def test_rotation_keeps_a_checkpoint_that_is_tagged_after_rotation_read_it(repo: Repository) -> None:
    commit = first(repo)
    hold(repo, "eval", commit, HOUR)
    assert forget_and_purge(repo, [commit]) == []
    assert first(repo).visible


def test_rotation_keeps_leased_checkpoints(repo: Repository) -> None:
    take(repo, first(repo), HOUR)
    assert forget_and_purge(repo, [first(repo)]) == []
    assert first(repo).visible


def test_gc_deletes_leases_an_hour_after_they_expired(repo: Repository) -> None:
    renew(repo, *take(repo, first(repo), HOUR), HOUR)
    run_gc(repo)
    assert len(keys(repo, "leases/")) == 2
    ticking(repo)(2 * HOUR + 1)
    run_gc(repo)
    assert keys(repo, "leases/") == set()


# checkpoints that were tagged by a process that died before it had recorded this in their log


def left_forgotten(repo: Repository, faults: FaultyStore) -> Commit:
    """Return run@0, which gc forgot although a process had just tagged it. That process died."""
    commit, plan = first(repo), plan_gc(repo, LAST, min_age=0.0)
    set_best = meanwhile(lambda: tags.write_generation(repo, "best", 0, commit))
    faults.inject(call_first("put", set_best, key=f"commits/{commit.txid}.1"))
    execute(repo, plan)
    (forgotten,) = (one for one in list_commits(repo).live() if one.is_forgotten)
    assert forgotten.txid == commit.txid
    return forgotten


def test_the_next_gc_restores_tagged_checkpoints(repo: Repository, faults: FaultyStore) -> None:
    commit = left_forgotten(repo, faults)
    seen = collect(repo, dry_run=True)
    assert ([one.txid for one in seen.restored], seen.waiting) == ([commit.txid], ())
    result = run_gc(repo)
    assert ([one.txid for one in result.restored], result.purged, result.waiting) == ([commit.txid], (), ())
    assert resolve(repo, "tag:best").txid == commit.txid
    assert run_gc(repo, LAST).restored == ()
    assert steps(list_commits(repo).visible()) == [0, 1]


def test_a_checkpoint_forgotten_by_name_stays_forgotten(repo: Repository) -> None:
    tags.set_tag(repo, "best", first(repo))
    hold(repo, "eval", first(repo), HOUR)
    forgetting.forget(repo, [first(repo)])
    result = run_gc(repo)
    assert (result.restored, [one.reason for one in result.waiting]) == ((), ["tagged"])


def test_gc_does_not_restore_a_checkpoint_if_its_tag_was_deleted_since_the_plan(
    repo: Repository, faults: FaultyStore
) -> None:
    left_forgotten(repo, faults)
    plan = plan_gc(repo, min_age=0.0)
    assert steps(plan.restore) == [0]
    tags.delete_tag(repo, "best")
    assert execute(repo, plan).restored == ()
    assert not first(repo).visible


def test_a_restore_by_gc_takes_effect_only_if_it_gets_the_next_log_number(
    repo: Repository, faults: FaultyStore
) -> None:
    """A user restores, untags and forgets the checkpoint after gc has listed the tags. It remains forgotten."""
    left_forgotten(repo, faults)
    plan = plan_gc(repo, min_age=0.0)
    commit = first(repo)
    faults.calls.clear()

    def forget(_: object) -> None:
        if faults.count("list", "tags/"):
            faults.heal()
            commits.restore(repo, commit)
            forgetting.forget(repo, [first(repo)])

    faults.inject(call_first("list", forget, key="commits/", times=9))
    faults.inject(call_first("put", forget, key=f"commits/{commit.txid}.2"))
    assert execute(repo, plan).restored == ()
    assert (first(repo).last, tags.tags(repo)) == ("forgotten", {})


def test_gc_reads_logs_before_it_lists_tags(repo: Repository, faults: FaultyStore) -> None:
    """Otherwise, a checkpoint that is untagged and forgotten in between would look like one that gc forgot."""
    commit = first(repo)
    tags.set_tag(repo, "best", commit)
    faults.calls.clear()

    def forget(_: object) -> None:
        if faults.count("list", "tags/"):
            faults.heal()
            forgetting.forget(repo, [commit])

    faults.inject(call_first("list", forget, key="commits/", times=9))
    assert plan_gc(repo).restore == ()


def test_nothing_is_restored_if_a_different_checkpoint_is_visible_at_the_step(
    repo: Repository, faults: FaultyStore
) -> None:
    commit = left_forgotten(repo, faults)
    in_its_place(repo)
    result = run_gc(repo)
    assert (result.restored, [one.txid for one in result.waiting]) == ((), [commit.txid])


def test_an_overwritten_checkpoint_remains_forgotten_if_its_successor_is_forgotten(repo: Repository) -> None:
    """An overwrite does not remove tags. The overwritten checkpoint must not later become the newest of the run."""
    commit = first(repo)
    tags.set_tag(repo, "best", commit)
    other = in_its_place(repo)
    commits.forget(repo, list_commits(repo).commits[commit.txid])
    forgetting.forget(repo, [other])
    result = run_gc(repo)
    assert (result.restored, [one.txid for one in result.purged]) == ((), [other.txid])
    assert run_gc(repo).restored == ()
    assert [one.reason for one in run_gc(repo).waiting] == ["tagged"]
    assert steps(list_commits(repo).visible()) == [1]


def test_only_one_of_two_twins_is_restored(repo: Repository) -> None:
    commit = first(repo)
    twin = committed_again(repo, commit)
    tags.set_tag(repo, "best", commit)
    for one in list_commits(repo).live():
        if one.id == commit.id:
            commits.forget(repo, one)
    assert [one.txid for one in run_gc(repo).restored] == [twin.txid]
    assert [one.txid for one in list_commits(repo).visible() if one.step == 0] == [twin.txid]


def test_gc_limited_to_a_different_run_restores_nothing(repo: Repository, faults: FaultyStore) -> None:
    left_forgotten(repo, faults)
    assert run_gc(repo, run="other").restored == ()
    assert steps(run_gc(repo, run="run").restored) == [0]


# requirements for writers


def demand(repo: Repository) -> None:
    repo.change_settings(requires=["rewrites"])


def test_a_gc_with_an_unknown_requirement_does_nothing(repo: Repository) -> None:
    commits.forget(repo, first(repo))
    put_blob(repo, repo.new_txid("x", 1), "spare")
    demand(repo)
    before = snapshot(repo)
    with pytest.raises(Unsupported, match="rewrites"):
        run_gc(repo, LAST)
    assert snapshot(repo) == before
    with pytest.raises(Unsupported):
        forget_and_purge(repo, [first(repo)])
    assert snapshot(repo) == before


WHEN: dict[str, Callable[[str], tuple[str, str]]] = {
    "after it has purged": lambda txid: ("put", f"commits/{txid}.2"),
    "while it waits": lambda txid: ("list", "objects"),
}


@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN.keys())
def test_a_requirement_added_during_a_gc_stops_its_deletion(
    repo: Repository, faults: FaultyStore, when: Callable[[str], tuple[str, str]]
) -> None:
    commit = commits.forget(repo, first(repo))
    plan = plan_gc(repo, min_age=0.0)
    method, key = when(commit.txid)
    faults.inject(call_first(method, meanwhile(lambda: demand(repo)), key=key))
    before = keys(repo)
    with pytest.raises(Unsupported):
        execute(repo, plan)
    assert keys(repo) == before


def test_a_resumed_gc_checks_requirements_again(repo: Repository) -> None:
    put_blob(repo, repo.new_txid("x", 1), "spare")
    begin_elsewhere(repo)
    assert [one.reason for one in run_gc(repo, wait=0.0).waiting] == ["transaction"]
    demand(repo)
    before = snapshot(repo)
    with pytest.raises(Unsupported):
        run_gc(repo, revoke_after=0.0)
    assert snapshot(repo) == before


def test_the_best_checkpoints_are_selected_without_reading_manifests(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    made = repository(tmp_path, storage)
    for step in range(1000):
        commit_bare(made, "run", step, metrics={"loss": (step * 37) % 1000, "acc": step % 7})
    plan = plan_gc(repository(tmp_path / "new", storage, seed=2), Policy(keep_best=["loss:3", "acc:max:1"]))
    left = {one.step for one in list_commits(made).visible()} - {one.step for one in plan.forget}
    assert left == {0, 973, 946, 6, 999}
    assert not [key for method in ("get", "open") for key in storage.keys(method) if "objects/" in key]
