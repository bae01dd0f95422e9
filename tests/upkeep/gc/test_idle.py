"""``drop_idle`` forgets idle runs, and spares those that somebody holds or that a visible checkpoint names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casckpt.contents import manifests
from casckpt.errors import InvalidInput
from casckpt.format import plain
from casckpt.format.keys import transaction_key
from casckpt.history import commits, tags
from casckpt.history.commits import Commit, list_commits
from casckpt.history.leases import take
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.gc import GcResult, collect
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import begin_elsewhere, steps, ticking
from tests.support.repositories import Ticks, commit_draft, draft, meanwhile, memory, repository, save
from tests.support.timed import TimedStore

DAY, NO_RULES = 24 * 3600.0, Policy()
Hold = Callable[[Repository, list[Commit]], object]


@pytest.fixture
def faults() -> TimedStore:
    return TimedStore(memory(), Ticks())


@pytest.fixture
def repo(tmp_path: Path, faults: TimedStore) -> Repository:
    """A store whose run "old" has been silent for 100 days, and whose settings give 7 days to undo."""
    made = repository(tmp_path, faults, clock=faults.clock)
    first = save(made, "old", 0, texts=["0"])
    commit_draft(made, made.new_txid("old", 1), draft([], "old", 1), parent=first.id)
    made.change_settings(min_age_seconds=7 * DAY)
    ticking(made)(100 * DAY)
    return made


def drop(repo: Repository, policy: Policy = NO_RULES, **options: Any) -> GcResult:
    given: dict[str, Any] = {"drop_idle": 90 * DAY, "wait": 0.0, "sleep": ticking(repo)} | options
    return collect(repo, policy, **given)


def restored(repo: Repository, old: list[Commit]) -> None:
    commits.restore(repo, commits.forget(repo, old[0]))


def child(repo: Repository, run: str = "other", notes: dict[str, bytes] | None = None, **fields: Any) -> Commit:
    return commit_draft(repo, repo.new_txid(run, 1), draft([], run, 1, notes=notes or {}), **fields)


def in_a_long_lineage(repo: Repository, old: list[Commit]) -> None:
    child(repo, notes={"merged_from": plain.encode([{"id": old[0].id}])}, lineage={"merged_from": None})


HOLDS: dict[str, Hold] = {
    "a tag": lambda repo, old: tags.set_tag(repo, "best", old[0]),
    "a lease": lambda repo, old: take(repo, old[0], seconds=60),
    "a save in progress": lambda repo, old: begin_elsewhere(repo, "old"),
    "a new save": lambda repo, old: save(repo, "old", 2),
    "a new save that was forgotten": lambda repo, old: commits.forget(repo, save(repo, "old", 2)),
    "a restore": restored,
    "a parent": lambda repo, old: child(repo, parent=old[0].id),
    "a lineage with the id": lambda repo, old: child(repo, lineage={"resumed_from": {"id": old[0].id}}),
    "a lineage with the run": lambda repo, old: child(repo, lineage={"merged_from": [{"run": "old"}]}),
    "a long lineage": in_a_long_lineage,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_an_idle_run_is_spared_if_somebody_holds_or_names_it(repo: Repository, hold: Hold) -> None:
    hold(repo, list_commits(repo).visible())
    visible = list_commits(repo).visible()
    assert drop(repo).forgotten == ()
    assert list_commits(repo).visible() == visible


def test_other_runs_and_forgotten_checkpoints_do_not_hold_an_idle_run(repo: Repository) -> None:
    old = list_commits(repo).visible()
    tags.set_tag(repo, "best", save(repo, "other", 1))
    begin_elsewhere(repo, "other", 2)
    commits.forget(repo, child(repo, "third", parent=old[0].id))
    assert steps(drop(repo).forgotten) == [0, 1]


@pytest.mark.parametrize(("rule", "gone"), [(Policy(), ["old@0", "old@1"]), (Policy(keep_last=1), ["new@0"])])
def test_runs_that_are_not_idle_follow_the_other_rules(repo: Repository, rule: Policy, gone: list[str]) -> None:
    for step in range(2):
        save(repo, "new", step)
    result = drop(repo, rule)
    assert {f"{one.run}@{one.step}" for one in result.forgotten} == {"old@0", "old@1", *gone}
    assert {ref.partition("@")[0] for ref in result.kept} == {"new"}


def test_drop_idle_applies_only_to_the_chosen_runs(repo: Repository) -> None:
    assert drop(repo, run=["new*", "olds"]).forgotten == ()
    assert steps(drop(repo, run=["new*", "ol?"]).forgotten) == [0, 1]


def test_a_dropped_run_can_be_restored_for_a_week_even_if_it_is_ephemeral(repo: Repository) -> None:
    repo.change_settings(min_age_ephemeral_seconds=0.0)
    commit_draft(repo, repo.new_txid("brief", 5), draft([], "brief", 5), ephemeral=True)
    ticking(repo)(91 * DAY)
    first = drop(repo)
    assert steps(first.forgotten) == [0, 1, 5]
    assert first.purged == ()
    ticking(repo)(7 * DAY - 60)
    assert drop(repo).purged == ()
    (brief,) = (one for one in list_commits(repo).live() if one.run == "brief")
    manifests.get(repo, commits.restore(repo, brief))
    ticking(repo)(120)
    assert steps(drop(repo).purged) == [0, 1]
    assert [one.run for one in list_commits(repo).visible()] == ["brief"]


@pytest.mark.parametrize(
    ("settings", "options", "why"),
    [
        (
            {"min_age_seconds": None},
            {},
            "give users at least 7 days to undo it: `casckpt settings STORE --set min_age=7d`",
        ),
        ({"min_age_seconds": 6 * DAY}, {}, "at least 7 days"),
        ({"min_age_seconds": 6 * DAY}, {"min_age": 8 * DAY}, "at least 7 days"),
        ({"min_age_seconds": None}, {"min_age": 6 * DAY}, "min_age"),
        ({}, {"drop_idle": 90.0}, "drop-idle forgets whole runs: pass at least one day"),
    ],
)
def test_drop_idle_is_refused_without_a_week_to_undo(
    repo: Repository, settings: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    repo.change_settings(**settings)
    with pytest.raises(InvalidInput, match=why):
        drop(repo, **options)
    assert len(list_commits(repo).visible()) == 2


def test_a_save_that_ends_while_gc_makes_its_listings_is_noticed(repo: Repository, faults: FaultyStore) -> None:
    txid = begin_elsewhere(repo, "old")

    def ends() -> None:
        commit_draft(repo, txid, draft([], "old", 7))
        repo.storage.delete(transaction_key(txid))

    faults.inject(call_first("list", meanwhile(ends), key="transactions/*"))
    assert drop(repo).forgotten == ()
    assert len(list_commits(repo).visible()) == 3
