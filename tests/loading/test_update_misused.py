"""Unusual updates: different models, stores and memory, unusual tensors, simultaneous updates, and thinned
versions."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.errors import CasckptError, Mismatch, MissingKey, NotFound
from casckpt.store.store import Store
from casckpt.tensors.dtypes import torch_dtype
from tests.loading.test_update import held_at, ref
from tests.support.reads import blob_bytes
from tests.support.saves import CELL, cells, same_state, small, small_folder, trained
from tests.support.tensors import NAMES, raw, same
from tests.support.together import emptied
from tests.support.versions import changed, saved, states, versions


def run(store: Store, count: int = 6) -> list[dict[str, Any]]:
    found = [{"w": trained(12, step), "b": cells(2, seed=step)} for step in range(count)]
    for step, state in enumerate(found):
        store.save(state, step=step, compress="always")
    return found


@pytest.mark.parametrize("wrong", ["another model", "another shape", "another dtype", "a key too many", "plain data"])
def test_a_state_that_does_not_match_is_left_unchanged(wrong: str) -> None:
    store = saved(small(), states())
    state, held = held_at(store, 0)
    before = state["m"]["w"].clone()
    match wrong:
        case "another model":
            state = {"layer": before, "head": torch.zeros(3)}
        case "another shape":
            state["m"]["odd"] = torch.zeros(41, 255, dtype=torch.int32)
        case "another dtype":
            state["m"]["odd"] = state["m"]["odd"].float()
        case "a key too many":
            state["m"]["more"] = torch.zeros(3)
        case _:
            state["m"]["odd"] = 3
    frames = held.frames
    with pytest.raises((Mismatch, MissingKey)):
        store.update(state, ref(1), held=held)
    assert same(state["layer"] if "layer" in state else state["m"]["w"], before)
    assert held.frames is frames


def test_the_held_version_can_belong_to_a_different_store() -> None:
    """The other store has the same versions, different versions of the same names, different cells, or is deleted."""
    store, twin, other, coarse = small(), small(), small(), small(cell_bytes=2 * CELL)
    found = run(store)
    run(twin)
    run(coarse)
    for step in range(3):
        other.save({"w": trained(12, 7, seed=9), "b": cells(2)}, step=step)
    for origin in (twin, coarse, other):
        mine = emptied(found[0])
        held = origin.load(mine, ref(2))
        held = store.update(mine, ref(4), held=held)
        assert same_state(mine, found[4])
        store.update(mine, ref(1), held=held)
        assert same_state(mine, found[1])


def test_a_copy_of_the_store_shares_kept_tables() -> None:
    """Frames are identified by content, not by location."""
    store, twin = small(), small()
    found = run(store, 12)
    run(twin, 12)
    mine = emptied(found[0])
    held = twin.load(mine, ref(0))
    for step in range(1, 11):
        held = twin.update(mine, ref(step), held=held)
    with blob_bytes(store) as read:
        store.update(mine, ref(11), held=held)
    assert same_state(mine, found[11])
    assert sum(read) < 4 * CELL


def test_an_update_with_check_repairs_unrelated_memory() -> None:
    store = small()
    found = run(store)
    for content in (emptied(found[0]), {"w": trained(12, 3, seed=5), "b": cells(2)}):
        store.update(content, ref(3), held=store.get(ref(2)), check=True)
        assert same_state(content, found[3])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_and_unusual_shapes_are_updated(name: str) -> None:
    dtype = torch_dtype(name)
    shapes = [(), (1,), (0,), (3, 0, 5), (4099,), (1, 64, 65)]
    first = {f"t{number}": raw(name, shape, number) for number, shape in enumerate(shapes)}
    second = {key: changed(one, 3) if one.numel() else one for key, one in first.items()}
    made = [first, second, second | {"t4": changed(second["t4"], 5)}]
    store = small()
    for step, state in enumerate(made):
        store.save(state, step=step, compress="always")
    mine = {key: torch.empty_like(one) for key, one in first.items()}
    held = None
    for step in (0, 1, 2, 0, 2, 1):
        held = store.update(mine, ref(step), held=held, check=step == 1)
        assert same_state(mine, made[step])
    assert mine["t0"].dtype == dtype


def test_an_empty_state_and_a_state_without_tensors_are_updated() -> None:
    store = small()
    for step in range(2):
        store.save({"n": step, "e": {}, "t": torch.arange(step, step + 3)}, step=step)
    states: list[dict[str, Any]] = [{}, {"n": 0}, {"e": {}}]
    for state in states:
        held = store.load(state, ref(0), unread="ignore")
        store.update(state, ref(1), held=held, unread="ignore")
        assert state.get("n", 1) == 1


def test_several_updates_can_start_from_the_same_held_version() -> None:
    store = small()
    found = run(store, 8)
    first = emptied(found[0])
    held = store.load(first, ref(0))
    for step in range(1, 5):
        held = store.update(first, ref(step), held=held)
    mine = [{key: one.clone() for key, one in first.items()} for _ in range(6)]
    to = (7, 2, 5, 0, 4, 6)
    with ThreadPoolExecutor(len(to)) as pool:
        done = list(pool.map(lambda state, step: store.update(state, ref(step), held=held), mine, to))
    for state, step, one in zip(mine, to, done, strict=True):
        assert one.step == step
        assert same_state(state, found[step])


def test_an_update_from_a_missing_store_is_an_error(tmp_path: Path) -> None:
    store = saved(small_folder(tmp_path / "store"), states())
    state, held = held_at(store, 0)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(CasckptError):
        store.update(state, ref(1), held=held)
    again = saved(small_folder(tmp_path / "store"), states())
    again.update(state, ref(2), held=held)
    assert same_state(state, states()[2])


# keys that the load omitted


def test_keys_that_the_load_did_not_fill_are_read() -> None:
    """The template or the checkpoint lacked these keys, or their shapes differed."""
    store = small()
    still = {"model": cells(3, seed=1), "optim": cells(4, seed=2), "head": cells(1, seed=3)}
    store.save(still | {"n": 1}, step=1)
    store.save(still | {"n": 2}, step=2)
    state: dict[str, Any] = emptied({key: still[key] for key in ("model", "head")})
    state["head"] = torch.zeros(7)
    held = store.load(state, ref(1), unread="ignore", ignore_mismatched=["head"])
    assert (held.unread_keys, held.mismatched_keys) == (("optim", "n"), ("head",))
    state |= {"optim": torch.zeros_like(still["optim"]), "head": torch.zeros_like(still["head"])}
    held = store.update(state, ref(2), held=held, unread="ignore")
    assert same_state(state, {key: still[key] for key in state})
    with blob_bytes(store) as read:
        store.update(state, ref(1), held=held, unread="ignore")
    assert not read


DROP = ["optim*"]


def trained_store() -> tuple[Store, list[dict[str, torch.Tensor]]]:
    """Return a store in which one cell of the optimizer never changes."""
    store = small()
    found = [
        {"model": trained(6, step), "optim.m": cells(3, seed=8), "optim.v": cells(3, seed=step)} for step in (0, 1)
    ]
    for step, state in enumerate(found):
        store.save(state, step=step, compress="auto")
    return store, found


def test_an_update_from_a_version_that_was_thinned_reads_dropped_entries() -> None:
    store, found = trained_store()
    mine = emptied(found[0])
    held = store.load(mine, ref(0))
    store.thin(ref(0), drop=DROP)
    store.gc(min_age=0, wait=0)
    with blob_bytes(store) as read:
        held = store.update(mine, ref(1), held=held)
    assert same_state(mine, found[1])
    assert sum(read) <= 6 * CELL + 2 * CELL  # the optimizer, and the changes of the model
    with pytest.raises(MissingKey, match="thinned"):
        store.update(mine, ref(0), held=held)
    assert same_state(mine, found[1])
    back = store.update(mine, ref(0), held=held, strict=False)
    assert set(back.missing_keys) == {"optim.m", "optim.v"}
    assert same_state(mine["model"], found[0]["model"])


def test_an_update_from_a_thinned_version_reads_missing_entries() -> None:
    """The new manifest names the optimizer again, but the load never read it."""
    store, found = trained_store()
    store.thin(ref(0), drop=DROP)
    mine = emptied(found[0])
    held = store.load(mine, ref(0), strict=False)
    store.restore(ref(0), whole=True)
    store.update(mine, ref(1), held=held)
    assert same_state(mine, found[1])


# concurrently with a gc, and without a lease


def test_deleting_a_checkpoint_during_an_update_raises_not_found(tmp_path: Path, full: bool) -> None:
    """Two readers follow a run in which a gc keeps only the newest checkpoint."""
    store, last = small_folder(tmp_path / "store"), 24 if full else 10
    tensor = torch.randn(48, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = [{"w": one} for one in versions(tensor, last + 1)]
    store.save(found[0], step=0, compress="auto")
    over: list[bool] = []

    def reads() -> set[int]:
        mine, held, seen = emptied(found[0]), None, set[int]()
        reader = Store(type(store.repository)(store.repository.storage))
        while not over or last not in seen:
            try:
                held = reader.update(mine, "default@latest", held=held)
            except NotFound:
                held = None
                continue
            assert same_state(mine, found[held.step])
            seen.add(held.step)
        return seen

    def collects() -> None:
        collector = Store(type(store.repository)(store.repository.storage))
        while not over:
            collector.gc(keep_last=1, min_age=0, wait=0)

    with ThreadPoolExecutor() as pool:
        readers, collector = [pool.submit(reads) for _ in range(2)], pool.submit(collects)
        try:
            for step in range(1, last + 1):
                store.save(found[step], step=step, compress="auto")
        finally:
            over.append(True)
        collector.result()
        assert all(last in reader.result() for reader in readers)
