"""The commit and gc protocol, explored exhaustively: it never loses data, but every small change to it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.commit_gc_model import MUTANTS, OWN_MUTANTS, Model
from tests.model.state import Setup, Verdict

SAFE = {
    "all details": Setup(contents=2, toggles=2, pages=True, reads=True),
    "a gc that runs twice": Setup(contents=2, toggles=2, runs=2),
    "a gc that resumes": Setup(contents=2, toggles=2, runs=2, resume=True),
    "two gcs": Setup(toggles=2, gcs=2),
    "two writers": Setup(toggles=2, writers=2),
    "two writers, pages": Setup(writers=2, pages=True),
    "two writers and a purger": Setup(writers=2, purger=True),
    "a retry": Setup(toggles=2, runs=2, retry=True),
    "a retry, all details": Setup(contents=2, toggles=1, runs=2, retry=True, resume=True, pages=True, reads=True),
    "late duplicates": Setup(contents=2, runs=2, duplicates=True),
    "a resumed gc and two writers": Setup(writers=2, purger=True, resume=True, runs=2, late_start=True),
    "two that copy in one transaction": Setup(writers=2, toggles=2, shared=True, retry=True),
    "saves that read logs": Setup(contents=2, toggles=2, logs=True, purger=True),
    "saves that read logs, a gc that resumes": Setup(toggles=2, runs=2, resume=True, logs=True, purger=True),
    "two that read logs, a gc that resumes": Setup(writers=2, runs=2, resume=True, logs=True, late_start=True),
    "unreadable roots": Setup(writers=2, gcs=2, reads=True, late_start=True),
}
LARGE = {
    "two that read logs, a gc that resumes": Setup(writers=2, toggles=1, runs=2, resume=True, logs=True),
    "two writers, two gcs": Setup(writers=2, gcs=2),
    "two writers, two gcs, two toggles": Setup(writers=2, gcs=2, toggles=2),
    "three writers": Setup(writers=3, toggles=2),
    "two gcs that resume": Setup(gcs=2, toggles=2, runs=2, resume=True, contents=2),
    "two writers, all details": Setup(writers=2, contents=2, pages=True, reads=True),
    "two writers that retry": Setup(writers=2, toggles=2, retry=True, runs=2),
    "two writers, late duplicates": Setup(writers=2, duplicates=True, runs=2),
    "two that copy, all details": Setup(writers=2, contents=2, shared=True, pages=True, reads=True),
    "two that copy, a gc that resumes": Setup(writers=2, toggles=2, runs=2, resume=True, shared=True, retry=True),
    "two gcs, pages": Setup(gcs=2, toggles=2, pages=True, reads=True, contents=2),
}
PLAIN = Setup(contents=2, toggles=2)
RETRY = Setup(toggles=2, runs=2, retry=True)
NEEDS = {
    "roots_without_purged_since": Setup(writers=2, purger=True, late_start=True),
    "retry_keeps_known": RETRY,
    "retry_keeps_uploads": RETRY,
    "open_before_commits": Setup(purger=True),
    "resume_without_waiting": Setup(runs=2, resume=True),
    "resume_with_new_purged": Setup(writers=2, purger=True, resume=True, runs=2, late_start=True),
    "trusts_announcements": Setup(contents=2, toggles=2, logs=True),
    "reads_logs_early": Setup(contents=2, toggles=2, logs=True),
    "unreadable_root_ignored": Setup(writers=2, gcs=2, reads=True, late_start=True),
}


def check(setup: Setup, **options: bool) -> Verdict:
    return Model(setup).check(**options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(setup, id=name, marks=[pytest.mark.soak] * (name in {"unreadable roots", "a retry, all details"}))
        for name, setup in SAFE.items()
    ],
)
def test_no_committed_data_is_lost(setup: Setup) -> None:
    verdict = check(setup)
    assert verdict.outcome == "SAFE", "\n".join(verdict.trace)
    folders = {name.split("/")[0] for name in verdict.deleted}
    assert "w0" in folders, "no upload of a transaction that failed, or was purged, is ever deleted"
    assert setup.late_start or "M0" in folders, "what is purged is never deleted"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE.values(), ids=LARGE.keys())
def test_no_committed_data_is_lost_in_larger_models(setup: Setup) -> None:
    verdict = Model(setup).check(limit=12_000_000)
    assert verdict.outcome == "SAFE", "\n".join(verdict.trace)


@pytest.mark.sweep
@pytest.mark.parametrize("mutant", [*MUTANTS, *OWN_MUTANTS])
def test_every_change_to_the_protocol_loses_data(mutant: str) -> None:
    verdict = check(replace(NEEDS.get(mutant, PLAIN), mutant=mutant), deep=mutant == "unreadable_root_ignored")
    assert verdict.outcome == "UNSAFE", f"{mutant}: {(MUTANTS | OWN_MUTANTS)[mutant]}, and nobody notices"
    assert "lacks" in verdict.trace[-1]
    assert any(" DELETES " in step for step in verdict.trace)


@pytest.mark.parametrize(
    "setup", {NEEDS.get(mutant, PLAIN) for mutant in (*MUTANTS, *OWN_MUTANTS)} - set(SAFE.values())
)
def test_the_unchanged_model_does_not_lose_data(setup: Setup) -> None:
    """The models that detect the mutants pass if the protocol is unchanged."""
    assert check(setup).outcome == "SAFE"


@pytest.mark.parametrize(
    "mutant", ["resume_without_waiting", "resume_with_new_purged", "trusts_announcements", "reads_logs_early"]
)
def test_every_change_loses_data_if_saves_run_during_a_resumed_gc(mutant: str) -> None:
    """This uses a small model in place of the larger soak model."""
    assert check(replace(SAFE["two that read logs, a gc that resumes"], mutant=mutant)).outcome == "UNSAFE"


def test_a_process_lists_commits_after_joining_a_transaction() -> None:
    verdict = check(Setup(writers=2, toggles=2, shared=True, retry=True, mutant="list_first"))
    assert verdict.outcome == "UNSAFE"


def test_a_gc_that_never_deletes_does_not_pass() -> None:
    assert check(replace(PLAIN, mutant="never_deletes")).outcome == "VACUOUS"


def test_a_truncated_exploration_does_not_pass() -> None:
    assert Model(PLAIN).check(limit=100).outcome == "LIMIT"
