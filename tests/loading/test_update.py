"""Updates from any loaded version to any other version have the same result as a load, and read few bytes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import casckpt
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Damaged, Gone, InvalidInput, Mismatch, NotFound, StorageError
from casckpt.store.store import Store
from tests.support.coded import Stored
from tests.support.far import far
from tests.support.faulty import FaultyStore, corrupt, fail_before
from tests.support.ids import half_of
from tests.support.progress_calls import ProgressCalls
from tests.support.ranks import Pool
from tests.support.reads import blob_bytes
from tests.support.routes import find_route
from tests.support.saves import CELL, reopened, same_state, small, small_folder
from tests.support.tensors import is_noticed, same
from tests.support.together import emptied
from tests.support.versions import STEPS, changed, saved, smooth, states, versions


def ref(step: int) -> str:
    return f"default@{step}"


def held_at(store: Store, step: int) -> tuple[dict[str, Any], Checkpoint]:
    state = emptied(states(1)[0])
    return state, store.load(state, ref(step))


def frames(store: Store, one: int, other: int, key: str | None = None) -> int:
    """Return the size of the frames between two versions, of one tensor or of all tensors."""
    mine, theirs = (Stored(store, ref(step)).cells() for step in (one, other))
    both = [place for place in theirs if place in mine and key in (None, place[0][1])]
    routes = [find_route(mine[place], theirs[place]) for place in both]
    return sum(route.cost() for route in routes if route is not None)


# results


@pytest.mark.parametrize(("threads", "check", "planes"), half_of([1, 4], [False, True], [False, True]))
def test_any_version_can_be_updated_to_any_other(tmp_path: Path, threads: int, check: bool, planes: bool) -> None:
    found = states()
    for made in (small_folder(tmp_path), small(far())):
        store = reopened(saved(made, found, planes=planes))
        state, held = held_at(store, 0)
        for step in (1, 2, 3, 3, 0, 2, 1, 3, 1, 0):
            told = ProgressCalls()
            held = store.update(state, ref(step), held=held, threads=threads, check=check, progress=told)
            assert (held.step, held) == (step, store.get(ref(step)))
            assert same_state(state, found[step])
            assert told.done == told.total


@pytest.mark.parametrize("compress", ["off", "auto", "always"])
def test_an_update_follows_a_run_during_saves(compress: Any) -> None:
    store = small()
    draw = random.Random(1)
    tensor = torch.randn(60, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found = [{"w": one, "still": torch.arange(5000)} for one in versions(tensor, 14)]
    for step, one in enumerate(found):
        store.save(one, step=step, compress=compress)
    state: dict[str, Any] = emptied(found[0])
    held = None
    for step in (*range(14), 4, 9, 0, 13, *draw.sample(range(14), 14)):
        held = store.update(state, ref(step), held=held)
        assert same_state(state, found[step])


@st.composite
def destinations(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[slice, slice]]]:
    """Draw a shape, and disjoint parts of it."""
    rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 300))
    cuts = sorted({0, rows, *draw(st.lists(st.integers(1, max(1, rows - 1)), max_size=2))})
    left = draw(st.integers(0, columns - 1))
    return (rows, columns), [(slice(a, b), slice(left, columns)) for a, b in pairwise(cuts) if a < b <= rows]


@given(destinations(), st.tuples(*[st.integers(0, STEPS - 1)] * 2), st.tuples(*[st.booleans()] * 3))
def test_an_update_fills_any_part_of_a_tensor_in_any_memory_layout(
    box: tuple[tuple[int, int], list[tuple[slice, slice]]], order: tuple[int, ...], flags: tuple[bool, ...]
) -> None:
    (before, after), (planes, check, cast) = order, flags
    shape, parts = box
    found = versions(smooth(shape), STEPS)
    store = saved(small(), [{"w": one} for one in found], planes=planes)
    dtype = torch.int64 if cast else torch.int32
    targets = [torch.zeros_like(found[0][part].contiguous(), dtype=dtype) for part in parts]
    pairs = list(zip(targets, parts, strict=True))
    shards = [casckpt.Shard(one, shape, offset=(part[0].start, part[1].start)) for one, part in pairs]
    turned = {"w": torch.zeros(shape[::-1], dtype=dtype).t()}
    wide = {"w": torch.zeros(shape[0], 2 * shape[1] + 1, dtype=dtype)[:, ::2][:, : shape[1]]}
    for state in ({"w": shards}, turned, wide):
        held = store.load(state, ref(before), cast=cast)
        store.update(state, ref(after), held=held, check=check, cast=cast)
    for target, part in pairs:
        assert same(target, found[after][part].to(dtype))
    for one in (turned, wide):
        assert same(one["w"], found[after].to(dtype))


def test_an_update_changes_tied_weights_only_once() -> None:
    store, found = saved(small(), states()), states()
    shared = torch.zeros(90, 256, dtype=torch.int32)
    state = {"m": {"w": shared, "tied": shared}}
    held = store.load(state, ref(0), unread="ignore")
    for before, step in pairwise((0, 2, 3, 0)):
        with blob_bytes(store) as read:
            held = store.update(state, ref(step), held=held, unread="ignore")
        assert torch.equal(shared, found[step]["m"]["w"])
        assert sum(read) <= frames(store, before, step, "m.w") + CELL // 2  # one tensor is too small for a frame


def test_an_update_handles_keys_that_were_added_removed_or_reshaped() -> None:
    store = small()
    old = {"a": smooth((30, 256)), "shape": smooth((64, 64)), "dtype": smooth((64, 64)), "gone": smooth((9, 256))}
    new = {"a": changed(old["a"], 1), "shape": smooth((64, 65)), "dtype": smooth((64, 64)).view(torch.float32)}
    new["new"] = smooth((20, 256))
    store.save(old, step=0)
    store.save(new, step=1)
    state = {"a": torch.zeros_like(old["a"]), "new": torch.zeros_like(new["new"])}
    held = store.load(state, ref(0), strict=False, unread="ignore")
    state |= {"shape": torch.zeros_like(new["shape"]), "dtype": torch.zeros_like(new["dtype"])}
    store.update(state, ref(1), held=held)
    assert same_state(state, {key: new[key] for key in state})


def test_an_update_with_rename_reads_only_frames(tmp_path: Path) -> None:
    found = states()
    store = saved(small_folder(tmp_path), found)
    state = {"w": torch.zeros(90, 256, dtype=torch.int32)}
    rename = {"w": "m.w"}
    held = store.load(state, ref(1), rename=rename, unread="ignore")
    with blob_bytes(store) as read:
        store.update(state, ref(2), held=held, rename=rename, unread="ignore")
    assert torch.equal(state["w"], found[2]["m"]["w"])
    assert sum(read) <= 1.1 * frames(store, 1, 2)


def test_an_autograd_graph_with_values_from_before_an_update_is_rejected() -> None:
    store = saved(small(), states())
    tensor = torch.zeros(90, 256)
    state = {"m": {"w": tensor}}
    store.save({"m": {"w": torch.ones(90, 256)}}, step=11)
    store.save({"m": {"w": torch.zeros(90, 256)}}, step=12)
    held = store.load(state, ref(11))
    assert is_noticed(tensor, lambda: store.update(state, ref(12), held=held))
    assert is_noticed(tensor, lambda: store.update(state, ref(12), held=store.get(ref(12))))


# reads


@pytest.mark.parametrize("place", ["memory", "folder", "far"])
def test_an_update_reads_only_differences(tmp_path: Path, place: str) -> None:
    made = small_folder(tmp_path) if place == "folder" else small(far() if place == "far" else None)
    store = saved(made, states())
    state, held = held_at(store, 0)
    at = 0
    for step in (1, 2, 3, 0, 3, 3):
        most = 1.1 * frames(store, at, step) + 9000 + (24 << 10)  # an object is recreated, and gaps are bridged
        with blob_bytes(store) as read:
            held = store.update(state, ref(step), held=held)
        assert sum(read) <= most
        assert same_state(state, states()[step])
        at = step


def test_an_update_does_not_read_equal_tensors() -> None:
    store = small()
    state = {"a": smooth((90, 256)), "b": smooth((9, 256))}
    held = store.save(state, step=0)
    store.save(state | {"b": changed(state["b"], 1)}, step=1)
    mine = {key: one.clone() for key, one in state.items()}
    with blob_bytes(store) as read:
        held = store.update(mine, ref(1), held=held)
    assert 0 < sum(read) <= mine["b"].nbytes
    with blob_bytes(store) as read:
        store.update(mine, ref(1), held=held)
    assert not read


# damage and failures


@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_update_with_check_repairs_changed_memory(step: int) -> None:
    """Without check, only the cells that differ between the versions are correct. With check, all cells are."""
    found = states()
    store = saved(small(), found)
    for check in (False, True):
        state, held = held_at(store, 1)
        for tensor in (state["m"]["w"], state["m"]["odd"], state["same"]):
            tensor.view(-1)[::100] += 1
        store.update(state, ref(step), held=held, check=check)
        assert same_state(state, found[step]) == check
        if step != 1:
            assert torch.equal(state["m"]["w"], found[step]["m"]["w"])


def test_an_update_with_check_hashes_the_held_memory_instead_of_reading_cells() -> None:
    store = saved(small(), states())
    state, held = held_at(store, 1)
    del state["o"]
    with blob_bytes(store) as read:
        store.update(state, ref(1), held=held, check=True, unread="ignore")
    assert not read
    state["same"].view(-1)[7] ^= 1
    with blob_bytes(store) as read:
        store.update(state, ref(1), held=held, check=True, unread="ignore")
    assert sum(read) == CELL


def test_an_update_works_around_missing_blobs(tmp_path: Path) -> None:
    """Blobs are removed one by one. The update reads whole cells, or raises the error of a load."""
    found = states()
    store = saved(small_folder(tmp_path), found)
    later, earlier = (set(map(_name, Stored(store, ref(step)).refs)) for step in (3, 1))
    for name in later | earlier:
        for before, after in ((1, 3), (3, 1)):
            state, held = held_at(store, before)
            hidden = next((tmp_path / "objects").rglob(f"{name}.safetensors"))
            hidden.rename(tmp_path / "hidden")
            try:
                if name in (later if after == 3 else earlier):
                    _update_or_fail(store, state, held, after, found)
                else:
                    store.update(state, ref(after), held=held)
                    assert same_state(state, found[after])
            finally:
                (tmp_path / "hidden").rename(hidden)
            store.update(state, ref(after), held=held, check=True)
            assert same_state(state, found[after])


def _update_or_fail(store: Store, state: Any, held: Checkpoint, step: int, found: list[Any]) -> None:
    told = None
    try:
        store.update(state, ref(step), held=held)
    except Damaged as error:
        told = str(error)
    assert same_state(state, found[step]) if told is None else "load all of them, or update" in told


def _name(blob: Any) -> str:
    name: str = blob.hash
    return name


def test_an_update_works_around_damaged_frames() -> None:
    found = states()
    faulty = FaultyStore(far().inner)
    store = saved(small(faulty), found)
    for fault in (corrupt("read_into", key="*.safetensors", times=2), fail_before("read_into", times=2)):
        state, held = held_at(store, 1)
        faulty.inject(fault)
        try:
            store.update(state, ref(3), held=held)
        except (Damaged, StorageError):
            faulty.heal()
            store.update(state, ref(3), held=held, check=True)
        faulty.heal()
        assert same_state(state, found[3])


def test_an_update_from_a_purged_version_reads_everything() -> None:
    found = states()
    store = saved(small(), found)
    state, held = held_at(store, 0)
    store.forget(ref(0))
    store.update(state, ref(1), held=held)
    store.gc(min_age=0, wait=0)
    later = reopened(store)
    gone = Checkpoint(later.repository, held.commit)
    later.update(state, ref(2), held=gone)
    assert same_state(state, found[2])
    with pytest.raises(Gone):
        later.update(state, gone, held=later.get(ref(2)))
    with pytest.raises(NotFound):
        later.update(state, ref(0), held=later.get(ref(2)))
    assert same_state(state, found[2])


def test_contradictory_arguments_are_rejected() -> None:
    store = saved(small(), states())
    state, held = held_at(store, 0)
    wrong: Any
    for wrong in ("default@0", 3):
        with pytest.raises(InvalidInput, match="held="):
            store.update(state, ref(1), held=wrong)
    with pytest.raises(TypeError, match=r"Store\.update"):
        store.update(state, ref(1), held=held, verify=False)  # type: ignore[call-arg]
    before = state["m"]["w"].clone()
    state["m"]["odd"] = torch.zeros(3)
    with pytest.raises(Mismatch):
        store.update(state, ref(1), held=held)
    assert torch.equal(state["m"]["w"], before)


# several ranks


def _updated_together(rank: int, size: int, path: str, check: bool) -> list[bool]:
    store = casckpt.open(path)
    whole = [one["m"]["w"] for one in states(6)]
    rows = len(whole[0]) // size
    part = torch.zeros(rows, 256, dtype=torch.int32)
    state = {"m": {"w": casckpt.Shard(part, whole[0].shape, offset=(rank * rows, 0))}}
    held: Checkpoint | None = store.load(state, ref(0), unread="ignore")
    if check and not rank:
        held = None  # as after a restart
    right = []
    for step in (1, 2, 5, 3, 0, 4):
        held = store.update(state, ref(step), held=held, check=check, unread="ignore")
        right.append(held.step == step and torch.equal(part, whole[step][rank * rows :][:rows]))
    return right


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", [False, True])
def test_several_ranks_can_update_together(ranks: Pool, tmp_path: Path, size: int, check: bool) -> None:
    saved(small_folder(tmp_path), states(6))
    assert all(map(all, ranks.run(size, _updated_together, str(tmp_path), check)))


def _update_differently(rank: int, size: int, path: str) -> str:
    store = casckpt.open(path)
    state = {"m": {"w": torch.zeros(90, 256, dtype=torch.int32)}}
    held = store.load(state, ref(0), unread="ignore")
    try:
        store.update(state, ref(1 + rank), held=held)
    except CasckptError as error:
        return error.kind
    return ""


def test_ranks_that_request_different_versions_are_rejected(ranks: Pool, tmp_path: Path) -> None:
    saved(small_folder(tmp_path), states())
    assert ranks.run(2, _update_differently, str(tmp_path)) == ["conflict", "conflict"]
