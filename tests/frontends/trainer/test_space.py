"""A disk that other programs fill: saves make room and try again, or say before the first step what is missing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from casckpt.errors import InvalidInput, StorageError
from casckpt.frontends.trainer import Checkpointer, CheckpointEvent
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, fail_before
from tests.support.full_disks import check_scene
from tests.support.ranks import outcome_of
from tests.support.repositories import memory
from tests.support.saves import CELL, cells, small, steps
from tests.support.small_disk import SmallDisk

if TYPE_CHECKING:
    from tests.support.ranks import Pool

STATE = 16 * CELL
OVERHEAD = 4 * CELL  # of a checkpoint: its manifest, and the headers of its blobs


def disk_for(states: float) -> tuple[SmallDisk, Store]:
    """Return a disk with room for so many states, and a store on it."""
    disk = SmallDisk(memory(near=False), int(states * (STATE + OVERHEAD)))
    return disk, small(disk)


def saved(checkpointer: Checkpointer, step: int, how: str = "save", **options: Any) -> None:
    """Save a state of which nothing is stored yet, and wait."""
    getattr(checkpointer, how)(step, {"w": cells(16)}, **options)
    checkpointer.wait()


def gc_ended(checkpointer: Checkpointer) -> None:
    checkpointer.wait()
    checkpointer._janitor.close()


# a full disk


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_save_on_a_full_disk_frees_what_the_rules_do_not_keep_and_is_tried_again(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk, store = disk_for(3)
    plain = Checkpointer(store, run="sft")  # does not remove anything
    for step in (1, 2, 3):
        saved(plain, step)
    seen = list[CheckpointEvent]()
    with Checkpointer(store, run="sft", max_checkpoints=2, gc=True, on_event=seen.append) as checkpointer:
        checkpointer.resume({"w": cells(16)})
        saved(checkpointer, 4, how)
    assert disk.refused > 0
    assert [step for _, step in steps(store)] == [3, 4]
    assert [(event.kind, event.step) for event in seen] == [
        ("resumed", 3), ("forgotten", 1), ("saved", 4), ("forgotten", 2),
    ]  # fmt: skip
    assert "a save of run sft met a full disk; gc freed" in caplog.text


def test_a_full_disk_does_not_shorten_the_minimum_age_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    _, store = disk_for(3)
    plain = Checkpointer(store, run="sft")
    for step in (1, 2, 3):
        saved(plain, step)
    store.change_settings(min_age="7d")
    with Checkpointer(store, run="sft", max_checkpoints=2, gc=True) as checkpointer:
        checkpointer.resume({"w": cells(16)})
        with pytest.raises(StorageError, match="disk is full"):
            saved(checkpointer, 4)
    assert "min_age keeps what is forgotten for 7d" in caplog.text
    assert steps(store) == [("sft", 2), ("sft", 3)]
    assert store.restore(store.checkpoints(forgotten=True)[0]).step == 1


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_without_room_the_error_stays_and_nothing_that_the_rules_keep_is_removed(how: str) -> None:
    disk, store = disk_for(2)
    with Checkpointer(store, run="sft", max_checkpoints=2, gc=True) as checkpointer:
        for step in (1, 2):
            saved(checkpointer, step)
        for _ in range(3):
            refused = disk.refused
            with pytest.raises(StorageError, match="the disk is full") as raised:
                saved(checkpointer, 3, how)
            assert raised.value.full
            assert disk.refused > refused + 1  # tried twice, but not more often
            assert [step for _, step in steps(store)] == [1, 2]
        gc_ended(checkpointer)
        assert store.stats().bytes_freed_now == 0
        disk.bytes *= 2
        saved(checkpointer, 3, how)
    assert [step for _, step in steps(store)] == [2, 3]


@pytest.mark.parametrize("chosen", [{}, {"max_checkpoints": 1}, {"gc": True}])
def test_without_rules_or_gc_nothing_is_removed_and_the_error_says_what_would_help(chosen: dict[str, Any]) -> None:
    disk, store = disk_for(2)
    with Checkpointer(store, run="sft", **chosen) as checkpointer:
        for step in (1, 2):
            saved(checkpointer, step)
        before = steps(store)
        with pytest.raises(StorageError, match=r"the disk is full\. With gc=True and a rule such as"):
            saved(checkpointer, 3)
    assert steps(store) == before
    assert disk.refused > 0


def test_a_gc_without_rules_frees_what_failed_saves_left() -> None:
    disk, store = disk_for(2)
    with Checkpointer(store, run="sft", gc=True) as checkpointer:
        saved(checkpointer, 1)
        other = Checkpointer(store, run="other")
        saved(other, 1)
        store.forget_now(store.get("other@1"))
        saved(checkpointer, 2)
    assert disk.refused > 0
    assert steps(store) == [("sft", 1), ("sft", 2)]


def test_other_errors_are_not_tried_again() -> None:
    storage = FaultyStore(memory())
    with Checkpointer(small(storage), run="sft", max_checkpoints=1, gc=True) as checkpointer:
        storage.inject(fail_before("put", key="objects/*.safetensors"))
        with pytest.raises(StorageError, match="injected"):
            saved(checkpointer, 1)
        saved(checkpointer, 1)


@pytest.mark.parametrize("key", ["transactions/*", "objects/*.safetensors", "objects/*.manifest", "commits/*"])
def test_a_full_disk_at_any_put_leaves_one_checkpoint_of_the_step(key: str) -> None:
    storage = FaultyStore(memory())
    with Checkpointer(small(storage), run="sft", max_checkpoints=2, gc=True) as checkpointer:
        saved(checkpointer, 1)
        gc_ended(checkpointer)
        storage.inject(fail_before("put", key=key, error=StorageError("full", full=True)))
        saved(checkpointer, 2)
        saved(checkpointer, 3)
    assert [step for _, step in steps(checkpointer.store)] == [2, 3]


def test_a_checkpoint_that_the_training_went_back_to_stays_until_it_has_saved() -> None:
    disk, store = disk_for(4)
    with Checkpointer(store, run="sft") as plain:
        for step in (10, 20, 30, 40):
            saved(plain, step)
    with Checkpointer(store, run="sft", max_checkpoints=2, gc=True) as checkpointer:
        checkpointer.load("sft@20", {"w": cells(16)})
        disk.foreign = disk.bytes
        with pytest.raises(StorageError, match="the disk is full"):
            saved(checkpointer, 50)
        assert [step for _, step in steps(store)] == [20, 30, 40]
        disk.foreign = 0
        saved(checkpointer, 50)
    assert [step for _, step in steps(store)] == [40, 50]


@settings(max_examples=settings().max_examples // 3)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 4)), max_size=12))
def test_nothing_is_lost_and_the_next_save_with_room_succeeds(plan: list[tuple[bool, float]]) -> None:
    disk, store = disk_for(3.5)
    kept = list[int]()
    with Checkpointer(store, run="sft", max_checkpoints=2, gc=True) as checkpointer:
        for step, (in_background, foreign) in enumerate(plan):
            disk.foreign = int(foreign * STATE)
            how = "save_async" if in_background else "save"
            error = outcome_of(partial(saved, checkpointer, step, how))
            kept = [*kept, step][-2:] if error is None else kept
            assert error is None or (error.full and disk.bytes_free() < STATE + OVERHEAD)
            assert [step for _, step in steps(store)][-2:] == kept
            disk.foreign = 0
            saved(checkpointer, step + 100 * (step + 1))
            kept = [*kept, step + 100 * (step + 1)][-2:]
            assert [step for _, step in steps(store)] == kept


def meets_a_full_disk(rank: int, size: int, path: Path, times: int) -> Any:
    storage = FaultyStore(LocalStore(path))
    checkpointer = Checkpointer(Store(Repository(storage)), run="sft", max_checkpoints=1, gc=True)
    state = {f"own{rank}": cells(8, seed=9 + rank)}
    found = []
    for number, how in enumerate(("save", "save_async", "save")):
        if rank == 1:
            storage.inject(
                fail_before("put", key="objects/*.safetensors", times=times, error=StorageError("full", full=True))
            )
        state = {key: value + 1 for key, value in state.items()}
        try:
            getattr(checkpointer, how)(number, state)
            checkpointer.wait()
            found.append("saved")
        except StorageError as error:
            found.append(f"full: {error.full}, rank {error.rank if rank != 1 else 1}")
        if rank == 1:
            storage.heal()
    checkpointer.close()
    return found


@pytest.mark.parametrize(("times", "outcome"), [(1, "saved"), (999, "full: True, rank 1")])
def test_if_one_rank_meets_a_full_disk_all_try_again_or_raise_the_same_error(
    times: int, outcome: str, store_path: Path, ranks: Pool
) -> None:
    found = ranks.run(3, meets_a_full_disk, store_path, times)
    assert found == [[outcome] * 3] * 3
    assert [step for _, step in steps(open_store(store_path))] == ([2] if outcome == "saved" else [])


def meets_two_errors(rank: int, size: int, path: Path, full: int) -> tuple[str, int, int]:
    """Let ranks 1 and 2 fail in the same exchange, but only ``full`` because of a full disk."""
    storage = FaultyStore(LocalStore(path))
    with Checkpointer(Store(Repository(storage)), run="sft", max_checkpoints=1, gc=True) as checkpointer:
        if rank:
            error = StorageError("the disk is full", full=True) if rank == full else StorageError("broken")
            storage.inject(fail_before("put", key="objects/*.safetensors", error=error))
        found = outcome_of(lambda: checkpointer.save(1, {f"own{rank}": cells(8, seed=rank)}))
        puts = storage.count("put", "objects/*.safetensors")
        later = checkpointer.save(2, {f"own{rank}": cells(8, seed=9 + rank)})
        return (str(found) if isinstance(found, Exception) else "saved"), puts, later.step


@pytest.mark.parametrize(("full", "told"), [(1, ["saved"] * 3), (2, ["rank 1: broken", "broken", "the disk is full"])])
def test_ranks_agree_if_another_one_has_an_error_of_its_own(
    full: int, told: list[str], store_path: Path, ranks: Pool
) -> None:
    """The first failure decides, which is the same on all ranks."""
    texts, puts, later = zip(*ranks.run(3, meets_two_errors, store_path, full), strict=True)
    assert list(texts) == told
    assert puts == ((2, 2, 2) if told[0] == "saved" else (1, 1, 1))
    assert later == (2, 2, 2)


LONG = [
    "tmpfs bytes", "ext4 bytes", "ext4 inodes", "ext4 quota", "ext4 reserved", "ext4 user quota", "xfs bytes",
    "xfs quota", "xfs user quota",
]  # fmt: skip


@pytest.mark.parametrize("where", [None, *(pytest.param(one, marks=pytest.mark.soak) for one in LONG)])
def test_a_training_on_a_disk_that_others_fill_at_times_needs_no_person(
    where: str | None, seed: int, disk_path: Path
) -> None:
    moments, values = (50, 5 << 20) if where else (5, 1 << 19)
    kind, _, lack = (where or "tmpfs bytes").partition(" ")
    check_scene("full_disk_loops", kind, lack, f"{moments}", f"{values}", f"{seed}", disk_path)


# min_free


def test_min_free_does_not_refuse_a_small_save_because_the_first_one_was_large() -> None:
    """A frozen base is stored once, but until a second save, nothing shows that."""
    _, store = disk_for(1.6)
    base = cells(15)
    with Checkpointer(store, run="lora", max_checkpoints=2, gc=True, min_free=CELL) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"base": base, "lora": cells(1)})
    assert steps(store) == [("lora", 1), ("lora", 2)]


def test_an_invalid_min_free_is_named() -> None:
    for value in ("20 apples", True):
        with pytest.raises(InvalidInput, match=f"min_free: '{value}' is not"):
            Checkpointer(small(memory()), run="a", min_free=value)


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_save_that_would_go_below_min_free_frees_first(how: str) -> None:
    disk, store = disk_for(9)
    plain = Checkpointer(store, run="sft")
    for step in (1, 2, 3):
        saved(plain, step)
    least = disk.bytes - 3 * (STATE + OVERHEAD)
    with Checkpointer(store, run="sft", max_checkpoints=1, gc=True, min_free=least) as checkpointer:
        checkpointer.resume({"w": cells(16)})
        saved(checkpointer, 4, how)
        gc_ended(checkpointer)
        assert disk.refused == 0
        assert disk.bytes_free() >= least
        assert [step for _, step in steps(store)] == [4]
        disk.foreign = disk.bytes // 2
        with pytest.raises(StorageError, match=r"KiB more are needed for a save of up to .* min_free=") as raised:
            saved(checkpointer, 5, how)
    assert raised.value.full
    assert [step for _, step in steps(store)] == [4]
    assert store.transactions() == []


def test_the_first_save_counts_with_the_size_of_the_state() -> None:
    disk, store = disk_for(3)
    checkpointer = Checkpointer(store, run="sft", min_free=disk.bytes - STATE + CELL)
    with pytest.raises(StorageError, match="min_free"):
        saved(checkpointer, 1)
    saved(Checkpointer(store, run="sft", min_free=disk.bytes - STATE - CELL), 1)


def test_min_free_is_a_size() -> None:
    with pytest.raises(InvalidInput, match="'20 cows' is not a size"):
        Checkpointer(small(), run="sft", min_free="20 cows")
    saved(Checkpointer(small(), run="sft", min_free="1TB"), 1)  # this storage does not know its room


# before the first step


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "for its next saves" in record.message]


def test_a_state_that_does_not_fit_is_reported_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    _, store = disk_for(1)
    checkpointer = Checkpointer(store, run="sft", save_interval=9)
    model = nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters())
    assert checkpointer.resume(model, optimizer) is None
    assert warnings_of(caplog) == []  # the optimizer has no state yet
    model(torch.zeros(128)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        checkpointer.save_if_due(step, model, optimizer)
    (text,) = warnings_of(caplog)
    assert text.endswith(
        "has 80.0 KiB free, but run sft needs 193.5 KiB for its next saves (1 of up to 193.5 KiB). Free some space "
        "before a save fails"
    )


def test_tied_weights_count_once(caplog: pytest.LogCaptureFixture) -> None:
    _, store = disk_for(1)
    shared = cells(16)
    Checkpointer(store, run="sft").check({"in": shared, "out": shared})
    assert warnings_of(caplog) == []
    Checkpointer(store, run="sft").check({"in": shared, "out": shared + 1})
    assert len(warnings_of(caplog)) == 1


@dataclass(frozen=True)
class Past:
    """A run: what a fixed part and each save take up, how many are kept, what was saved, and what is to come."""

    fixed: int
    changes: int
    most: int | None
    before: int
    after: int


PASTS = st.builds(
    Past, st.integers(0, 12), st.integers(1, 6), st.none() | st.integers(1, 5), st.integers(0, 4), st.integers(1, 6)
)


@settings(max_examples=settings().max_examples // 3)
@given(past=PASTS, room=st.integers(1, 60))
@example(past=Past(fixed=0, changes=6, most=None, before=3, after=1), room=10)  # for one save, but not for two
@example(past=Past(fixed=0, changes=6, most=3, before=2, after=4), room=17)  # for four, of which three stay
def test_no_run_that_fits_is_warned(past: Past, room: int) -> None:
    """A training of ``after`` more saves that all succeed was not warned, and neither was one whose state fits."""
    disk, store = disk_for(99)
    fixed, told = cells(past.fixed), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("casckpt.frontends.trainer.space")
    rules: dict[str, Any] = {"max_checkpoints": past.most, "gc": past.most is not None, "save_interval": 1}

    def state() -> dict[str, Any]:
        return {"fixed": fixed, "changes": cells(past.changes)}

    with Checkpointer(store, run="sft", **rules) as first:
        for step in range(1, past.before + 1):
            first.save(step, state())
    disk.bytes = disk.used + room * CELL
    logger.addHandler(handler)
    try:
        last = past.before + past.after
        with Checkpointer(store, run="sft", last_step=last, **rules) as second:
            second.resume(state())
            was_warned = bool(told)
            for step in range(past.before + 1, last + 1):
                second.save(step, state())
                gc_ended(second)
    except StorageError:
        return
    finally:
        logger.removeHandler(handler)
    assert not was_warned


def test_a_resumed_run_is_warned_if_its_rules_keep_more_than_fits(caplog: pytest.LogCaptureFixture) -> None:
    disk, store = disk_for(99)
    rules: dict[str, Any] = {"run": "sft", "max_checkpoints": 5, "gc": True}
    with Checkpointer(store, **rules) as first:
        for step in (1, 2):
            saved(first, step)
    disk.bytes = disk.used + 3 * STATE
    with Checkpointer(store, **rules) as second:
        second.resume({"w": cells(16)})
    (text,) = warnings_of(caplog)
    assert "for its next saves (4 of up to" in text
    caplog.clear()
    with Checkpointer(store, **(rules | {"max_checkpoints": 2})) as third:
        third.resume({"w": cells(16)})
    assert warnings_of(caplog) == []


def test_what_a_gc_frees_counts_as_room(caplog: pytest.LogCaptureFixture) -> None:
    disk, store = disk_for(99)
    with Checkpointer(store, run="sft") as first, Checkpointer(store, run="old") as old:
        for step in (1, 2):
            saved(first, step)
            saved(old, step)
    disk.bytes = disk.used + STATE // 2
    rules: dict[str, Any] = {"run": "sft", "max_checkpoints": 2, "gc": True}
    Checkpointer(store, **rules).resume({"w": cells(16)})
    assert len(warnings_of(caplog)) == 1
    caplog.clear()
    store.forget_now(*store.checkpoints("old"))
    Checkpointer(store, **rules).resume({"w": cells(16)})
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("least", [None, "100KiB"])
def test_one_warning_says_what_is_missing_even_if_the_state_grows(
    least: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    _, store = disk_for(1 if least is None else 2)  # 80 and 160 KiB
    checkpointer = Checkpointer(store, run="sft", min_free=least)
    for factor in (1.5, 2):
        checkpointer.check({"w": cells(16 * factor)})
    (text,) = warnings_of(caplog)
    need = "80.0 KiB free, but run sft needs 96.0" if least is None else "160.0 KiB free, but run sft needs 196.0"
    assert f"{need} KiB for its next saves (1 of up to 96.0 KiB)" in text


# what is told


def test_each_event_and_log_line_of_a_save_has_the_free_bytes(caplog: pytest.LogCaptureFixture) -> None:
    disk, store = disk_for(1.5)
    seen = list[CheckpointEvent]()
    with (
        caplog.at_level(logging.INFO, "casckpt.frontends.trainer.checkpointer"),
        Checkpointer(store, run="sft", on_event=seen.append) as checkpointer,
    ):
        saved(checkpointer, 1)
        assert checkpointer.summary is not None
        assert checkpointer.summary.bytes_free == disk.bytes_free() == seen[0].figures["bytes_free"]
        with pytest.raises(StorageError):
            saved(checkpointer, 2)
    assert [event.kind for event in seen] == ["saved", "failed"]
    assert seen[1].as_dict()["bytes_free"] > 0
    assert " MiB reused, " in caplog.text
    assert " KiB free" in caplog.text
