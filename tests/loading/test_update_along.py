"""Updates along a run with deltas: each update reads only the bytes that the save wrote."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.contents.checkpoint import Checkpoint
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.loading.test_update import ref
from tests.support.coded import Stored
from tests.support.faulty import FaultyStore
from tests.support.ranks import Pool
from tests.support.reads import blob_bytes
from tests.support.saves import CELL, same_state, small, small_folder, trained
from tests.support.together import emptied

STEPS = 26
ROWS = 48  # elements per cell: 512, of which a step changes about 5


def state(step: int) -> dict[str, Any]:
    """In each step, all cells of one tensor change, some cells of a second one, and no cells of a third one."""
    part = trained(12, 0, seed=1)
    part[: 2048 * (step % 3)] += step
    return {"all": trained(12, step).reshape(ROWS, 512), "part": part, "still": trained(4, 0, seed=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared store with all steps. Tests only read it."""
    path = tmp_path_factory.mktemp("along") / "store"
    run(small_folder(path))
    return path


def run(store: Store, steps: int = STEPS) -> Store:
    for step in range(steps):
        store.save(state(step), step=step, compress="auto")
    return store


def deltas(store: Store, steps: int) -> list[int]:
    """Return the number of bytes of changed cells that each save wrote, except for the first save."""
    cells = [Stored(store, ref(step)).cells() for step in range(steps)]
    return [
        sum(cell.stored for place, cell in now.items() if cell.digest != before[place].digest)
        for before, now in pairwise(cells)
    ]


def kept(held: Checkpoint) -> int:
    return sum(len(data) for frames in held.frames.values() for data in frames.values())


def test_an_update_by_one_step_reads_what_its_save_wrote(folder: Path) -> None:
    store = casckpt.open(folder)
    found = emptied(state(0))
    held = store.load(found, ref(0))
    again = []
    for step, delta in enumerate(deltas(store, STEPS), start=1):
        with blob_bytes(store) as read:
            held = store.update(found, ref(step), held=held)
        assert same_state(found, state(step))
        again.append(sum(read) / delta)
    assert max(again) <= 1.1
    assert kept(held) <= 0.21 * sum(tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("check", [False, True])
def test_the_first_update_keeps_all_tables(folder: Path, check: bool) -> None:
    """The update also keeps them for cells that it has to read whole."""
    store = casckpt.open(folder)
    for step, delta in enumerate(deltas(store, STEPS)):
        found = emptied(state(0))
        held = store.update(found, ref(step), held=None)
        if check:
            found["all"].view(-1)[::512] += 1
            held = store.update(found, ref(step), held=held, check=True)
        with blob_bytes(store) as read:
            store.update(found, ref(step + 1), held=held)
        assert same_state(found, state(step + 1))
        assert sum(read) <= 1.1 * delta


def test_an_update_without_kept_tables_also_reads_undone_frames(folder: Path) -> None:
    """Examples are an update after a full load or in a different process. The result is correct."""
    store = casckpt.open(folder)
    found, more = emptied(state(0)), []
    held = store.load(found, ref(0))
    for step, delta in enumerate(deltas(store, STEPS), start=1):
        bare: Checkpoint = pickle.loads(pickle.dumps(held))
        assert (kept(bare), bare) == (0, held)
        with blob_bytes(store) as read:
            held = store.update(found, ref(step), held=bare)
        more.append(sum(read) / delta)
        assert same_state(found, state(step))
    assert max(more) > 1.5, "no save has gone back for its bases"


def test_only_the_newest_version_keeps_its_tables_after_an_update() -> None:
    store = run(small(), 6)
    found = emptied(state(0))
    held = [store.load(found, ref(0))]
    for step in (1, 2, 3, 3, 5, 2, 4):
        held.append(store.update(found, ref(step), held=held[-1]))
        assert same_state(found, state(step))
    assert [kept(one) for one in held[:-1]] == [0] * 7
    before = kept(held[-1])
    assert before > 0
    held.append(store.update(found, ref(4), held=held[-1]))
    assert (kept(held[-2]), kept(held[-1])) == (0, before), "what is equal is told by the same frames"


@pytest.mark.parametrize("check", [False, True])
def test_incorrect_kept_tables_are_harmless(check: bool) -> None:
    store = run(small(), 12)
    found = emptied(state(0))
    held = store.load(found, ref(0))
    for step in range(1, 12):
        held = store.update(found, ref(step), held=held, check=check)
        for frames in held.frames.values():
            for number, (link, data) in enumerate(frames.items()):
                frames[link] = data[: number * 7] if number % 2 else bytes(len(data))
        assert same_state(found, state(step))


def follow(rank: int, size: int, path: str, steps: Sequence[int]) -> list[bool]:
    """Report whether this rank's part equals a full load after each step."""
    store, rows = casckpt.open(path), ROWS // size
    part = torch.zeros(rows, 512, dtype=torch.bfloat16)
    mine = {
        "all": casckpt.Shard(part, (ROWS, 512), offset=(rank * rows, 0)),
        "part": torch.zeros(12 * 2048, dtype=torch.bfloat16), "still": torch.zeros(4 * 2048, dtype=torch.bfloat16),
    }  # fmt: skip
    held, right = None, []
    for step in steps:
        held = store.update(mine, ref(step), held=held)
        whole = emptied(state(0))
        store.load(whole, ref(step), no_dist=True)
        parts = {"all": part, "part": mine["part"], "still": mine["still"]}
        right.append(same_state(parts, whole | {"all": whole["all"][rank * rows :][:rows].contiguous()}))
    return right


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_many_updates_equal_loads_on_any_number_of_ranks(ranks: Pool, tmp_path: Path, size: int, full: bool) -> None:
    steps = 65 if full else 15
    store = run(small_folder(tmp_path), steps)
    assert all(map(all, ranks.run(size, follow, str(tmp_path), range(steps))))
    assert same_state(store.read(ref(steps - 1)), state(steps - 1))


@pytest.mark.parametrize(("first", "then"), [(5, 10), (10, 0), (15, 20), (24, 14), (14, 19)])
def test_an_update_over_several_steps_reads_a_full_cell_only_where_it_is_new(
    folder: Path, first: int, then: int
) -> None:
    """The update goes five steps forward or ten steps back. It reads a full cell only where a new one was stored."""
    store = casckpt.open(folder)
    mine, theirs = (Stored(store, ref(step)).cells() for step in (first, then))
    roots = [(list(mine[place].chain)[-1].digest, list(theirs[place].chain)[-1].digest) for place in theirs]
    new = sum(theirs[place].nbytes for place, (one, other) in zip(theirs, roots, strict=True) if one != other)
    found = emptied(state(0))
    held = store.load(found, ref(first))
    with blob_bytes(store) as read:
        store.update(found, ref(then), held=held)
    assert same_state(found, state(then))
    assert sum(read) < new + 8 * CELL


def test_an_update_after_a_watch_requests_only_new_data() -> None:
    """The number of requests does not depend on the length of the run.

    There is no listing, and no record of a different checkpoint is read.
    """
    faulty = FaultyStore(small().repository.storage)
    run(Store(Repository(faulty.inner)), 12)
    store, found = Store(Repository(faulty)), emptied(state(0))
    held = store.update(found, ref(7), held=None)
    for new in store.watch("default", after=8, timeout="0s"):
        before = len(faulty.calls)
        held = store.update(found, new.checkpoint, held=held)
        calls = faulty.calls[before:]
        assert same_state(found, state(held.step))
        assert not [call for call in calls if call.method == "list"]
        txid = new.checkpoint.commit.txid
        records = [call.key for call in calls if call.method == "get"]
        assert len(records) == 3, "its log, what may come behind, and its manifest"
        assert all(txid in key for key in records)
    assert held.step == 11
