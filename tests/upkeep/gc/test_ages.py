"""The settings are a floor under the minimum age, also for a while after they were lowered."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.errors import Damaged, InvalidInput
from casckpt.format.keys import manifest_key
from casckpt.history import commits
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.ages import AT_ONCE, min_age_of
from casckpt.upkeep.gc.purge import forget_and_purge
from tests.support.gcs import LAST, run_gc, steps, ticking
from tests.support.repositories import repository, save

USUAL, SHORT = "min_age_seconds", "min_age_ephemeral_seconds"


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    """A store with run@0 to run@2."""
    made = repository(tmp_path)
    for step in range(3):
        save(made, step=step, texts=[str(step)])
    return made


@pytest.mark.parametrize(
    ("settings", "wanted", "refuses"),
    [
        ({}, 0.0, ""),
        ({USUAL: 60.0}, 0.0, r"min-age: 0 is less than the store's setting min_age \(1m\)"),
        ({USUAL: 60.0}, 60.0, ""),
        ({USUAL: 60.0}, 61.0, ""),
        ({SHORT: 60.0}, 59.0, r"59s .* min_age_ephemeral \(1m\)"),
        ({USUAL: 30.0, SHORT: 60.0}, 45.0, r"min_age_ephemeral \(1m\)"),
        ({USUAL: 60.0, SHORT: 30.0}, 45.0, r"min_age \(1m\)"),
        ({USUAL: 0.0}, 0.0, ""),
    ],
)
def test_an_option_may_only_raise_the_setting(
    repo: Repository, settings: dict[str, float], wanted: float, refuses: str
) -> None:
    repo.change_settings(**settings)
    if not refuses:
        found = min_age_of(repo, wanted)
        assert (found.usual, found.ephemeral) == (wanted, wanted)
        return
    for dry_run in (True, False):
        with pytest.raises(InvalidInput, match=refuses):
            run_gc(repo, LAST, min_age=wanted, dry_run=dry_run)
    assert steps(list_commits(repo).visible()) == [0, 1, 2]


HISTORIES = [  # values, each with the seconds until the next one; what counts then
    ([(100.0, 50), (10.0, 99)], 100.0),
    ([(100.0, 50), (10.0, 101)], 10.0),
    ([(100.0, 50), (None, 99)], 100.0),
    ([(100.0, 50), (None, 101)], None),
    ([(10.0, 5), (100.0, 0)], 100.0),
    ([(100.0, 0), (50.0, 60), (10.0, 30)], 100.0),  # both earlier values still count
    ([(100.0, 0), (50.0, 60), (10.0, 45)], 50.0),
    ([(100.0, 0), (50.0, 60), (10.0, 60)], 10.0),
    ([(100.0, 500), (100.0, 0), (10.0, 99)], 100.0),  # a change of anything else is no lower value
]


@pytest.mark.parametrize(("values", "counts"), HISTORIES)
@pytest.mark.parametrize("name", [USUAL, SHORT])
def test_a_lower_value_counts_once_it_is_as_old_as_the_one_before(
    repo: Repository, values: list[tuple[float | None, float]], counts: float | None, name: str
) -> None:
    for value, seconds in values:
        repo.change_settings(**{name: value})
        ticking(repo)(seconds)
    for reader in (repo, repository(Path(repo.cache_dir or "") / "fresh", repo.storage, clock=repo.clock)):
        found, at_once = min_age_of(reader, None), min_age_of(reader, None, AT_ONCE)
        usual = name == USUAL
        default = (24 * 3600.0 if usual else 900.0) if values[-1][0] is None else 0.0
        assert (found.usual if usual else found.ephemeral) == max(default, counts or 0.0)
        assert (at_once.usual if usual else at_once.ephemeral) == (counts or 0.0)
        if counts is not None:
            with pytest.raises(InvalidInput):
                min_age_of(reader, counts - 1)
        min_age_of(reader, counts or 0.0)


def test_an_unreadable_earlier_value_does_not_count_but_the_newest_must_be_readable(repo: Repository) -> None:
    repo.change_settings(min_age_seconds=100.0)
    repo.change_settings(min_age_seconds=10.0)
    first, newest = sorted(entry.key for entry in repo.storage.list("settings/"))[-2:]
    fresh = repository(Path(repo.cache_dir or "") / "fresh", repo.storage, clock=repo.clock)
    repo.storage.replace(first, b"not a record")
    assert min_age_of(fresh, None).usual == 10.0
    fresh.storage.replace(newest, b"not a record")
    with pytest.raises(Damaged, match="settings"):
        min_age_of(fresh, None)


def test_rotation_only_forgets_until_a_lower_value_counts(repo: Repository) -> None:
    repo.change_settings(min_age_seconds=100.0)
    repo.change_settings(min_age_seconds=None)
    first, second, _ = list_commits(repo).visible()
    forget_and_purge(repo, [first])
    assert list_commits(repo).commits[first.txid].last == "forgotten"
    ticking(repo)(100)
    forget_and_purge(repo, [second])
    assert list_commits(repo).commits[second.txid].last == "purged"


@pytest.mark.parametrize("floor", [None, 100.0])
def test_a_forgotten_checkpoint_without_a_manifest_does_not_stop_a_gc_that_may_not_purge_it(
    repo: Repository, floor: float | None
) -> None:
    repo.change_settings(min_age_seconds=floor)
    lost, other, _ = list_commits(repo).visible()
    repo.storage.delete(manifest_key(lost.txid, lost.id))
    for commit in (lost, other):
        commits.forget(repo, commit)
    if floor is None:
        with pytest.raises(Damaged, match="cannot read the manifests"):
            run_gc(repo, min_age=None)
        return
    assert steps(run_gc(repo, min_age=None, dry_run=True).purged) == [0]
    result = run_gc(repo, min_age=None)
    assert (steps(result.purged), result.deleted_blobs) == ([0], 1)
    assert [(one.reason, one.step) for one in result.waiting] == [("young", 1)]
