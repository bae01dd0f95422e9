"""The settings are a floor under the minimum age, also for a while after they were lowered.

There, ages count by the storage's clock: nothing that a writer puts makes gc delete what was visible more recently.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import Damaged, InvalidInput, StorageError
from casckpt.format.keys import commit_key, manifest_key, settings_key, transaction_key
from casckpt.format.records import Back, Forgotten, Kept, Purged, Restored, Trimmed
from casckpt.history import commits
from casckpt.history.commits import Commit, list_commits
from casckpt.history.transactions import revoke
from casckpt.plan.retention import Policy
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.gc.ages import AT_ONCE, ages_of, min_age_of
from casckpt.upkeep.gc.gc import execute, plan_gc, with_room
from casckpt.upkeep.gc.purge import forget_and_purge, plan_of
from tests.support.far import far
from tests.support.faulty import fail_before
from tests.support.gcs import LAST, begin_elsewhere, run_gc, steps, ticking
from tests.support.repositories import Ticks, blob_hash, commit_draft, draft, memory, put_blob, repository, save
from tests.support.rewrites import move
from tests.support.timed import TimedStore

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


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("data", [b"not a record", None])
def test_settings_that_cannot_be_read_or_are_missing_may_be_a_floor(
    repo: Repository, number: int, data: bytes | None
) -> None:
    repo.change_settings(min_age_seconds=100.0)
    repo.change_settings(min_age_seconds=10.0)
    key = settings_key(number)
    if data is None:
        repo.storage.delete(key)
    else:
        repo.storage.replace(key, data)
    fresh = repository(Path(repo.cache_dir or "") / "fresh", repo.storage, clock=repo.clock)
    if number == 0 or data is not None:
        with pytest.raises(Damaged, match=rf"{key} may have a min_age, and cannot be read: .*Restore it from a copy"):
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


# the storage's clock


class World:
    """A store with a floor of 100 seconds, run@0 and run@1, and a writer that can put any record."""

    def __init__(self, folder: Path, *, near: bool = True) -> None:
        self.clock = Ticks(step=1)
        self.storage = TimedStore(memory() if near else far(), self.clock)
        self.repo = repository(folder, self.storage, clock=self.clock)
        self.commit = save(self.repo, step=0, texts=["old"])
        save(self.repo, step=1, texts=["new"])
        self.number, self.moved = 0, ""

    def put(self, *kinds: str) -> None:
        """Put records at the next numbers of the log, each with a time long ago. "gap" leaves a number free."""
        for kind in kinds:
            self.number += 1
            if kind != "gap":
                self.fill(kind, self.number)

    def fill(self, kind: str, number: int) -> None:
        txid = self.commit.txid
        record: Any
        if kind == "rewritten":
            rewrite = move(self.repo, list_commits(self.repo).commits[txid])
            self.moved = rewrite.places.txid
            return
        if kind == "back":
            record = Back(txid=txid, time=5, who="w", to=txid)
        elif kind == "kept":
            record = Kept(txid=txid, time=5)
        else:
            kinds = {"forgotten": Forgotten, "restored": Restored, "purged": Purged, "trimmed": Trimmed}
            record = kinds[kind](txid=txid, time=5, who="w")
        self.repo.put_record(commit_key(txid, number), record)

    def left(self, **options: Any) -> set[str]:
        """Run gc, and return the uploaders of the blobs of run@0 that remain."""
        run_gc(self.repo, **{"min_age": None} | options)
        return {entry.key.split("/")[1] for entry in self.storage.list("objects/") if blob_hash("old") in entry.key}


PLAYS: dict[str, tuple[list[list[str]], int]] = {  # records, with 60 seconds after each part; then the age of the bytes
    "a forgotten record with a time of its own choice": ([["forgotten"]], 60),
    "a purge of a visible checkpoint": ([["purged"]], 60),
    "a purge of a visible checkpoint later in its log": ([["forgotten", "restored"], ["purged"]], 60),
    "a purge right after forgotten": ([["forgotten"], ["purged"]], 120),
    "a purge after forgotten and more": ([["forgotten"], ["kept", "purged"]], 60),
    "a purge after a gap, in which it may have been restored": ([["forgotten"], ["gap", "purged"]], 60),
    "a purge after forgotten behind a gap": ([["gap", "forgotten"], ["purged"]], 60),
    "a purge right after a repeated forgotten": ([["forgotten"], ["forgotten"], ["purged"]], 120),
}


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("play", PLAYS)
def test_bytes_stay_until_what_hid_them_is_old_enough(tmp_path: Path, play: str, near: bool) -> None:
    parts, age = PLAYS[play]
    world = World(tmp_path, near=near)
    world.repo.change_settings(min_age_seconds=age + 10.0)
    ticking(world.repo)(1000)
    for part in parts:
        world.put(*part)
        ticking(world.repo)(60)
    assert run_gc(world.repo, min_age=None, dry_run=True).deleted_blobs == 0
    assert world.left() == world.left() == {world.commit.txid}
    ticking(world.repo)(9)
    assert world.left() == {world.commit.txid}
    ticking(world.repo)(2)
    assert run_gc(world.repo, min_age=None, dry_run=True).deleted_blobs == 1
    assert world.left() == set()


def test_a_checkpoint_that_is_purged_after_the_plan_is_young(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    plan = plan_gc(world.repo)
    world.put("purged")
    assert execute(world.repo, plan).deleted_blobs == 0


def test_a_record_counts_only_since_all_before_it_exist(tmp_path: Path) -> None:
    """Whoever reads a log by its keys stops at a gap, and finds the checkpoint visible."""
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    world.put("gap", "forgotten")
    ticking(world.repo)(1000)
    world.fill("kept", 1)
    assert world.left() == {world.commit.txid}
    ticking(world.repo)(101)
    assert world.left() == set()


def test_gc_trims_by_the_time_of_the_rewrite(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    ticking(world.repo)(1000)
    world.put("rewritten")
    assert run_gc(world.repo, min_age=None).purged == ()
    ticking(world.repo)(101)
    assert world.left() == {world.moved}


def test_an_age_of_0_compares_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0, min_age_ephemeral_seconds=0.0)
    made = list[Commit]()
    for step in range(2):
        txid = world.repo.new_txid("short", step)
        refs = [put_blob(world.repo, txid, str(step))]
        made.append(commit_draft(world.repo, txid, draft(refs, "short", step), ephemeral=True))
    txid = made[0].txid
    commits.forget(world.repo, made[0])
    world.storage.times[commit_key(txid, 1)] = world.clock.now + 7200 * 10**6
    result = run_gc(world.repo, min_age=None)
    assert ([one.txid for one in result.purged], result.deleted_blobs) == ([txid], 1)


def test_an_ephemeral_checkpoint_of_a_forgotten_run_waits_as_long_as_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0, min_age_ephemeral_seconds=0.0)
    txid = world.repo.new_txid("short", 0)
    refs = [put_blob(world.repo, txid, "0")]
    commits.forget(world.repo, commit_draft(world.repo, txid, draft(refs, "short", 0), ephemeral=True))
    assert run_gc(world.repo, min_age=None).purged == ()
    ticking(world.repo)(101)
    assert [one.txid for one in run_gc(world.repo, min_age=None).purged] == [txid]


def test_an_estimate_asks_for_no_manifests(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    world.put("forgotten")
    listed = list_commits(world.repo)
    calls = len(world.storage.calls)
    assert [one.step for one in plan_of(world.repo, listed, Policy()).young] == [0]
    assert "size" not in [call.method for call in world.storage.calls[calls:]]


@pytest.mark.parametrize("back", [False, True])
def test_trimmed_places_stay_until_what_replaced_them_is_old_enough(tmp_path: Path, back: bool) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    world.put("rewritten")
    ticking(world.repo)(90)
    world.put(*(["back"] if back else []), "trimmed")
    both = {world.commit.txid, world.moved}
    assert world.left() == both
    ticking(world.repo)(11)  # since the rewrite, 101 seconds
    assert world.left() == (both if back else {world.moved})
    ticking(world.repo)(90)
    assert world.left() == {world.commit.txid if back else world.moved}


def test_a_new_trimmed_record_does_not_count_from_an_older_change(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    world.put("rewritten", "kept")
    ticking(world.repo)(101)
    world.put("trimmed")
    assert world.left() == {world.commit.txid, world.moved}


@pytest.mark.parametrize(
    ("near", "setting", "min_age", "by_storage"),
    [
        (True, None, 50.0, False),
        (True, None, None, False),
        (False, None, None, False),
        (False, None, 50.0, True),
        (False, None, 0.0, False),
        (True, 50.0, None, True),
        (False, 50.0, 60.0, True),
        (True, 0.0, 50.0, False),
    ],
)
def test_the_storage_clock_counts_with_a_floor_and_in_buckets_with_an_age(
    tmp_path: Path, near: bool, setting: float | None, min_age: float | None, by_storage: bool
) -> None:
    world = World(tmp_path, near=near)
    world.repo.change_settings(min_age_seconds=setting, min_age_ephemeral_seconds=setting)
    world.put("purged")
    puts = world.storage.count("put")
    assert world.left(min_age=min_age) == ({world.commit.txid} if by_storage else set())
    assert world.storage.count("put", "probes/*") == by_storage
    assert world.storage.count("put") == puts + 1 + by_storage  # the note about the gc
    assert list(world.storage.list("probes/")) == []


def test_a_purged_checkpoint_without_a_manifest_stops_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    world.put("purged")
    assert world.left() == {world.commit.txid}
    world.storage.delete(manifest_key(world.commit.txid, world.commit.id))
    assert world.left() == set()


def test_a_gc_that_goes_on_keeps_what_is_young_for_it(tmp_path: Path) -> None:
    """An earlier gc chose the candidates by a lower age, and had to wait for a save."""
    world = World(tmp_path)
    open_save = begin_elsewhere(world.repo)
    world.put("forgotten", "purged")
    assert world.left(min_age=0.0, wait=0.0) == {world.commit.txid}
    revoke(world.repo, open_save, "it ended")
    world.storage.delete(transaction_key(open_save))
    world.repo.change_settings(min_age_seconds=100.0)
    assert world.left() == {world.commit.txid}
    ticking(world.repo)(101)
    assert world.left() == set()


def test_a_gc_on_a_full_disk_keeps_what_is_young(tmp_path: Path) -> None:
    """Without room for an object that shows the time, the newest record does. A gc that makes room waits, too."""
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    world.put("purged")
    ticking(world.repo)(1000)
    world.storage.inject(fail_before("put", key="probes/*", times=99, error=StorageError("no room", full=True)))
    assert world.left() == {world.commit.txid}
    calls = iter([StorageError("no room", full=True)])

    def act() -> None:
        for error in calls:
            raise error

    with_room(world.repo, act)
    assert world.left() == {world.commit.txid}
    world.storage.heal()
    assert world.left() == set()


def test_a_time_in_the_future_waits_and_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    world.put("forgotten")
    key = commit_key(world.commit.txid, 1)
    world.storage.times[key] = world.clock.now + 7200 * 10**6
    assert world.left() == {world.commit.txid}
    assert f"1 records, such as {key}, are in the future" in caplog.text
    ticking(world.repo)(7301)
    assert world.left() == set()


def test_without_times_of_the_storage_a_host_counts_from_when_it_first_saw_a_record(repo: Repository) -> None:
    repo.change_settings(min_age_seconds=100.0)
    commits.forget(repo, list_commits(repo).visible()[0])
    ticking(repo)(1000)
    assert run_gc(repo, min_age=None).purged == ()
    ticking(repo)(90)
    assert run_gc(repo, min_age=None).purged == ()
    ticking(repo)(20)
    assert steps(run_gc(repo, min_age=None).purged) == [0]


def test_a_lower_value_counts_by_the_storage_clock(tmp_path: Path) -> None:
    """A host whose clock is slow lowers the setting, and one whose clock is fast runs gc."""
    world = World(tmp_path)
    world.repo.change_settings(min_age_seconds=100.0)
    there = world.clock
    world.repo.clock = Ticks(there.now - 1000 * 10**6)
    world.repo.change_settings(min_age_seconds=10.0)
    world.repo.clock = Ticks(there.now + 1000 * 10**6)
    assert min_age_of(world.repo, None).usual == 10.0
    assert ages_of(world.repo).usual == 100.0
    there.advance(101)
    assert ages_of(world.repo).usual == 10.0


def test_in_a_folder_the_modification_time_of_the_record_counts(tmp_path: Path) -> None:
    repo = repository(tmp_path, LocalStore(tmp_path / "store"))
    old, _ = (save(repo, step=step, texts=[str(step)]) for step in range(2))
    repo.change_settings(min_age_seconds=7 * 86400.0)
    repo.put_record(commit_key(old.txid, 1), Forgotten(txid=old.txid, time=5, who="w"))
    assert run_gc(repo, min_age=None).purged == ()
    before = time.time() - 8 * 86400
    for number in range(2):
        os.utime(tmp_path / "store" / commit_key(old.txid, number), (before, before))
    assert steps(run_gc(repo, min_age=None).purged) == [0]
