"""Merges: the results are those of torch, equal cells are shared, and what cannot be combined is named."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.contents.blobs import mark_damaged
from casckpt.errors import InvalidInput, Mismatch, MissingKey, StorageError
from casckpt.format.keys import blob_key
from casckpt.format.records import changed
from casckpt.format.regions import Box, Region
from casckpt.frontends import merging
from casckpt.ranks.ranks import open_ranks
from casckpt.saving.leader import GroupMemory
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import prepare
from casckpt.saving.save import save as save_on_ranks
from casckpt.store.store import Store
from casckpt.tensors.shards import Piece
from tests.support.faulty import FaultyStore, fail_before
from tests.support.reads import blob_bytes
from tests.support.repositories import memory
from tests.support.saves import CELL, cells, same_state, small, small_folder, trained
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]
FROZEN = torch.tensor([-0.0, 0.1, -float("inf"), 1e-30]).repeat(999)
FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")


def values(dtype: str, seed: int, count: int = 3 * CELL // 4 + 5) -> torch.Tensor:
    """Return values with NaN, infinities and both zeros."""
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    made = torch.randn(count, dtype=wide, generator=torch.Generator().manual_seed(seed))
    made[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=wide)
    return made.to(getattr(torch, dtype))


def combined(tensors: Sequence[torch.Tensor], weights: Sequence[float], into: torch.dtype) -> torch.Tensor:
    """Return what torch computes."""
    total = tensors[0].to(into) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total += tensor.to(into) * weight
    return total


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean that torch computes."""
    return combined(tensors, [1.0] * len(tensors), torch.float32) * (1 / len(tensors))


def save(store: Store, *states: Any, run: str = "a", **options: Any) -> list[str]:
    return [f"{run}@{store.save(state, run=run, step=step, **options).step}" for step, state in enumerate(states)]


@pytest.fixture
def store() -> Store:
    return small()


# values


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_result_equals_that_of_torch_bit_by_bit(store: Store, dtype: str) -> None:
    tensors, weights = [values(dtype, seed) for seed in range(3)], (0.3, -1.7, 1 / 3)
    refs = save(store, *({"w": tensor} for tensor in tensors))
    into = torch.float32 if "float8" in dtype else torch.promote_types(torch.float32, tensors[0].dtype)
    merged = store.merge(*refs, run="m", step=1, weights=weights)
    assert same_state(store.read(merged), {"w": combined(tensors, weights, into).to(tensors[0].dtype)})


@pytest.mark.parametrize("threshold", [1 << 10, 10 * CELL, 64 << 20])
def test_the_result_does_not_depend_on_windows(store: Store, monkeypatch: pytest.MonkeyPatch, threshold: int) -> None:
    states = [
        {"a": cells(7), "b": cells(3.3).bfloat16(), "t": cells(4).reshape(64, -1).t(), "s": torch.tensor(0.5 + n),
         "none": torch.empty(0, 3), **{f"n{i}": cells(0.01) for i in range(9)}}
        for n in range(3)
    ]  # fmt: skip
    refs = save(store, *states)
    monkeypatch.setattr(merging, "_WINDOW_BYTES", threshold)
    monkeypatch.setattr(merging, "_ROUND_BYTES", 2 * threshold)
    monkeypatch.setattr(merging, "_BLOCK", 100)
    merged = store.merge(*refs, run="m", step=1)
    want = {key: mean([state[key] for state in states]).to(value.dtype) for key, value in states[0].items()}
    assert same_state(store.read(merged), {key: value.contiguous() for key, value in want.items()})
    assert not store.verify().is_damaged


def test_weights_apply_in_the_order_of_the_references(store: Store) -> None:
    tensors = [torch.full((3,), number) for number in (1e30, -1e30, 1.0)]
    save(store, *({"w": tensor} for tensor in tensors))
    for order in ((0, 1, 2), (2, 0, 1)):
        refs = [f"a@{number}" for number in order]
        merged = store.merge(*refs, run="m", step=order[0], weights=[1, 1, 1])
        want = combined([tensors[number] for number in order], [1.0] * 3, torch.float32)
        assert same_state(store.read(merged), {"w": want})


def test_dtype_converts_floats_only(store: Store) -> None:
    refs = save(store, *({"w": values("float32", n), "c": values("complex64", n), "n": torch.ones(3).long()}
                         for n in range(2)))  # fmt: skip
    found = store.read(store.merge(*refs, run="m", step=1, dtype=torch.bfloat16))
    want = combined([values("float32", n) for n in range(2)], [0.5, 0.5], torch.float32).bfloat16()
    assert same_state(found["w"], want)
    assert (found["c"].dtype, found["n"].dtype) == (torch.complex64, torch.int64)


@pytest.mark.parametrize(("own", "given"), [(torch.float32, "float16"), (torch.float16, None)])
def test_a_merge_whose_values_are_too_large_for_its_dtype_is_refused(
    store: Store, own: torch.dtype, given: str | None
) -> None:
    """Regression: it stored infinite values. Those that a checkpoint has stay infinite."""
    state = {"big": torch.full((5,), 6e4, dtype=own), "w": torch.tensor([math.inf, 1]).to(own)}
    refs = save(store, state, state | {"w": torch.tensor([math.inf, 3]).to(own)})
    with pytest.raises(InvalidInput, match="'big' has values that are too large for float16"):
        store.merge(*refs, run="m", step=1, dtype=given, weights=[1, 1])
    found = store.read(store.merge(*refs, run="m", step=1, dtype=given))
    assert found["w"].tolist() == [math.inf, 2]


def test_a_merge_names_the_unhealthy_checkpoints_in_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for step, value in enumerate((1.0, math.nan)):
        store.save({"w": torch.tensor([value])}, run="a", step=step, health=True)
    store.merge("a@..", run="m", step=1)
    assert f"{store.get('a@1')} is marked unhealthy, and is part of this merge" in caplog.text
    assert str(store.get("a@0")) not in caplog.text


def test_versions_may_have_different_float_dtypes(store: Store) -> None:
    tensors = [cells(3.5).bfloat16(), cells(3.5), cells(3.5).bfloat16().half()]
    for step, tensor in enumerate(tensors):
        store.save({"w": tensor[:900], "x": cells(2, seed=step)}, run="a", step=step)
    found = store.read(store.merge("a@..", run="m", step=1))
    want = mean([tensor[:900] for tensor in tensors]).half()
    assert same_state(found["w"], want)


def test_a_tensor_stays_in_its_memory_if_the_dtype_of_another_changes(store: Store) -> None:
    """The second checkpoint is read as an update of the first, whose `b` it shares."""
    b = [cells(3)] * 2 + [cells(3)]
    refs = save(
        store, *({"a": cells(2).to(dtype), "b": b[n]} for n, dtype in enumerate((torch.half, *[torch.float] * 2)))
    )
    assert same_state(store.read(store.merge(*refs, run="m", step=1))["b"], mean(b))


def averaged(tensors: Sequence[torch.Tensor], decay: float) -> torch.Tensor:
    """Return the moving average that torch computes."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        value = tensor.float()
        total = torch.where(total == value, total, total * decay + value * (1 - decay))
    return total


def test_task_arithmetic_has_signed_weights(store: Store) -> None:
    tensors = [cells(2.5) for _ in range(4)]
    refs = save(store, *({"w": tensor} for tensor in tensors))
    found = store.read(store.merge(*refs, run="m", step=1, weights=[-1, 1, "1", 0]))
    assert same_state(found, {"w": combined(tensors[:3], [-1, 1, 1], torch.float32)})


def test_a_moving_average_is_computed_step_by_step(store: Store) -> None:
    """What equals the average so far does not change it, not even by a rounding error."""
    tensors = [torch.cat([cells(2.5), FROZEN, cells(0.1)]) for _ in range(4)]
    refs = save(store, *({"w": tensor, "b": tensor.bfloat16()} for tensor in tensors))
    for number, decay in enumerate((0.9, 0.5)):
        found = store.read(store.merge(*refs, run="m", step=number, ema=decay))
        want = {"w": averaged(tensors, decay), "b": averaged([one.bfloat16() for one in tensors], decay).bfloat16()}
        assert same_state(found, want)
        assert torch.equal(
            found["w"][tensors[0].numel() - FROZEN.numel() - cells(0.1).numel() :][: len(FROZEN)], FROZEN
        )


def test_weights_that_do_not_sum_to_1_are_noted(store: Store) -> None:
    refs = save(store, {"w": torch.ones(3)}, {"w": torch.ones(3)})
    scaled = store.merge(*refs, run="m", step=1, weights=[1, 1])
    assert scaled.notes == (f"the weights sum to 2, not to 1: '{refs[0]}', '{refs[1]}'",)
    for step, weights in ((2, [0.33, 0.67]), (3, [-1, 2]), (4, [1, -1])):
        assert store.merge(*refs, run="m", step=step, weights=weights).notes == ()


def save_in_boxes(store: Store, whole: torch.Tensor, parts: int, dim: int, step: int) -> None:
    """Save a tensor in boxes, as ranks do that hold shards of it."""
    made = prepare({"w": whole}, None, rank=0, allow_pickle=False)
    pieces, start = [], [0, 0]
    for part in whole.chunk(parts, dim):
        region = Region(Box(tuple(start), tuple(part.shape)), 0, part.numel())
        pieces.append(Piece(region, part))
        start[dim] += part.shape[dim]
    ranks, options = open_ranks(None, no_dist=True), SaveOptions(run="a", step=step).checked()
    held = replace(made, sources=[changed(made.sources[0], data=None, shards=pieces)])
    save_on_ranks(store.repository, ranks, GroupMemory(), lambda: held, options)


def test_shards_are_combined_whatever_their_layout(store: Store) -> None:
    whole = [cells(12, seed=seed).reshape(48, -1) for seed in range(3)]
    whole[2][:16], whole[1][:16] = whole[0][:16], whole[0][:16]
    store.save({"w": whole[0]}, run="a", step=0)
    save_in_boxes(store, whole[1], 2, 1, 1)
    save_in_boxes(store, whole[2], 3, 0, 2)
    for step, order in enumerate(([0, 1, 2], [2, 0, 1], [0, 2])):
        merged = store.merge(*(f"a@{number}" for number in order), run="m", step=step)
        want = mean([whole[number] for number in order])
        found = store.read(merged)["w"]
        assert same_state(found[16:], want[16:])
        torch.testing.assert_close(found, want)
    assert not store.verify().is_damaged


# what is shared


def test_equal_cells_are_neither_read_nor_stored(store: Store) -> None:
    backbone = cells(40)
    states = [{"model": {"backbone": backbone, "head": cells(3)}} for _ in range(4)]
    refs = save(store, *states)
    with blob_bytes(store) as read:
        merged = store.merge(*refs, run="m", step=1)
    assert sum(read) < 16 * CELL
    assert merged.stats.bytes_reused == backbone.nbytes
    assert merged.stats.bytes_written < 8 * CELL
    head = combined([state["model"]["head"] for state in states], [0.25] * 4, torch.float32)
    assert same_state(store.read(merged), {"model": {"backbone": backbone, "head": head}})


def test_equal_cells_are_computed_if_the_weights_do_not_sum_to_1(store: Store) -> None:
    same = cells(9)
    refs = save(store, {"w": same}, {"w": same})
    found = store.read(store.merge(*refs, run="m", step=1, weights=[1, 1]))
    assert same_state(found, {"w": same + same})
    found = store.read(store.merge(*refs, run="m", step=2, weights=[0.5, 0.5], dtype="float64"))
    assert same_state(found, {"w": same.double()})


def test_the_equal_results_of_tied_tensors_are_stored_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_WINDOW_BYTES", 4 * CELL)
    monkeypatch.setattr(merging, "_ROUND_BYTES", 4 * CELL)
    tied = [cells(20) for _ in range(2)]
    refs = save(store, *({"embedding": one, "head": one, "w": cells(9)} for one in tied))
    merged = store.merge(*refs, run="m", step=1)
    want = combined(tied, [0.5, 0.5], torch.float32)
    found = store.read(merged)
    assert same_state(found["embedding"], want)
    assert same_state(found["head"], want)
    assert merged.stats.bytes_written < 40 * CELL


def test_an_equal_cell_is_the_result_without_rounding(store: Store) -> None:
    same, other = values("float32", 1, 2 * CELL), cells(1)
    states = [{"w": torch.cat([same, other * number])} for number in range(3)]
    refs = save(store, *states)
    found = store.read(store.merge(*refs, run="m", step=1, weights=[0.1, 0.2, 0.7]))["w"]
    assert same_state(found[: 2 * CELL], same)


def test_a_moving_average_of_a_run_reads_no_cell_twice(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    weights, states = {f"w{number}": trained(30, 0, seed=number) for number in range(4)}, []
    for step in range(64):
        name = f"w{step % 4}"
        weights[name] = weights[name].clone()
        weights[name].view(torch.int16)[step * 31 :: 4001] += 1
        states.append(dict(weights))
    refs = save(store, *states, run="rl", compress="auto")
    stored = {}
    for ref in refs:
        manifest = manifests.get_with_extents(store.repository, store.get(ref).commit)
        for entry in manifest.entries:
            for cell in manifest.extents(entry).stored_cells():
                for link in cell.chain:
                    blob = manifest.blob(link.blob)
                    stored[blob.uploader, blob.hash, link.offset] = link.stored
    store = casckpt.open(store.url)
    with blob_bytes(store) as read:
        merged = store.merge("rl@..", run="m", step=1, ema=0.9)
    assert sum(read) <= 1.05 * sum(stored.values())
    want = {key: averaged([state[key] for state in states], 0.9).bfloat16() for key in sorted(weights)}
    assert same_state(store.read(merged), want)


@pytest.mark.parametrize("loss", ["missing", "damaged"])
def test_cells_whose_blobs_cannot_be_reused_are_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    store = small_folder(tmp_path / "store")
    real, lost = type(store.repository.storage).size, set[str]()
    monkeypatch.setattr(  # the bytes are there again when they are read
        type(store.repository.storage), "size", lambda storage, key: None if key in lost else real(storage, key)
    )
    same, attached = cells(30), bytes(range(256)) * 40
    refs = save(store, *({"w": same, "n": torch.arange(3000)} for _ in range(2)), attachments={"a.bin": attached})
    used = list(manifests.get(store.repository, store.get("a@1").commit).blobs)
    for blob in used:
        if loss == "damaged":
            mark_damaged(store.repository, blob.uploader, blob.hash, "a test")
        else:
            lost.add(blob_key(blob.uploader, blob.hash))
    merged = store.merge(*refs, run="m", step=1)
    assert not {*used} & {*manifests.get(store.repository, merged.commit).blobs}
    assert same_state(store.read(merged), {"w": same, "n": torch.arange(3000)})
    assert store.read_attachment(merged, "a.bin") == attached


def test_a_merge_does_not_need_memory_for_its_checkpoints(tmp_path: Path) -> None:
    done = run_script("tests.support.peak_merge", tmp_path, "200", cwd=ROOT)
    assert done.status == 0, done.told
    assert float(done.printed) < 250


# what is not combined


def test_other_values_come_from_the_last_checkpoint(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def state(number: int) -> dict[str, Any]:
        return {
            "model": {"w": torch.ones(3) * number, "count": torch.tensor(number), "on": torch.tensor([True]),
                      "extra": {"v": number}, "same": "x" * 9000, "rank": casckpt.PerRank(torch.ones(2) * number)},
            "optimizer": {"m": torch.ones(3)}, "step": number,
        }  # fmt: skip

    refs = save(store, state(1), state(3), metadata={"lr": 1}, attachments={"config.json": b"{}"})
    with caplog.at_level(logging.WARNING):
        merged = store.merge(*refs, run="m", step=1)
    want = {**state(3), "model": {**state(3)["model"], "w": torch.full((3,), 2.0), "rank": torch.ones(2) * 3}}
    del want["optimizer"]
    assert same_state(store.read(merged), want)
    differing = "'model.count', 'model.extra.v', 'model.rank', 'step'"
    assert merged.notes == (f"not combined, but taken from a@1: {differing}",)
    assert merged.notes[0] in caplog.text
    assert (merged.metadata, store.attachments(merged)) == ({"lr": 1}, {"config.json": 2})


def test_patterns_choose_what_is_merged_and_what_is_kept(store: Store) -> None:
    states = [{"model": {"a": cells(2), "b": cells(2)}, "optimizer": {"m": cells(2)}, "ema": cells(2)} for _ in "12"]
    refs = save(store, *states)
    found = store.read(store.merge(*refs, run="m", step=1, keys=["model.*", "optimizer.*"], keep=["optimizer.*"]))
    assert found.keys() == {"model", "optimizer"}
    assert same_state(found["optimizer"], states[1]["optimizer"])
    found = store.read(store.merge(*refs, run="m", step=2))
    assert found.keys() == {"model", "ema"}
    with pytest.raises(MissingKey, match="matches 'nothing'"):
        store.merge(*refs, run="m", step=3, keys=["nothing"])
    with pytest.raises(MissingKey, match="matches 'nothing'"):
        store.merge(*refs, run="m", step=3, keep=["nothing"])


@pytest.mark.parametrize(
    ("change", "error", "where"),
    [
        (lambda state: state.pop("x"), MissingKey, "a@1"),
        (lambda state: state.update(x=torch.ones(4)), Mismatch, "a@1"),
        (lambda state: state.update(x=3), MissingKey, "a@1"),
    ],
)
def test_what_a_checkpoint_lacks_is_an_error(
    store: Store, change: Callable[[dict[str, Any]], Any], error: type[Exception], where: str
) -> None:
    states = [{"w": torch.ones(2), "x": torch.ones(3)} for _ in range(3)]
    change(states[1])
    save(store, *states)
    for step, refs in enumerate((["a@0", "a@1", "a@2"], ["a@1", "a@2"])):
        with pytest.raises(error, match="'x'") as raised:
            store.merge(*refs, run="m", step=step)
        assert where in str(raised.value)
        assert same_state(store.read(store.merge(*refs, run="m", step=step, keys=["w"])), {"w": torch.ones(2)})


def test_the_last_checkpoint_may_lack_a_key(store: Store) -> None:
    save(store, {"w": torch.ones(2), "x": torch.ones(3)}, {"w": torch.ones(2)})
    with pytest.raises(MissingKey, match="a@1 does not hold 'x'"):
        store.merge("a@0", "a@1", run="m", step=1)


def test_what_was_thinned_is_missing(store: Store) -> None:
    save(store, *({"w": cells(2), "x": cells(2)} for _ in range(2)))
    store.thin("a@0", drop="x")
    with pytest.raises(MissingKey, match=r"a@0 does not hold 'x' \(it was thinned by"):
        store.merge("a@0", "a@1", run="m", step=1)


def test_wrappers_are_taken_only_if_they_are_equal(store: Store) -> None:
    sparse = [torch.eye(4).mul(number).to_sparse() for number in (1, 2)]
    refs = save(store, *({"w": torch.ones(2), "s": one} for one in sparse))
    with pytest.raises(Mismatch, match="'s' consists of other tensors"):
        store.merge(*refs, run="m", step=1)
    kept = store.read(store.merge(*refs, run="m", step=1, keep=["s"]))
    assert torch.equal(kept["s"].to_dense(), sparse[1].to_dense())
    refs = save(store, *({"w": torch.ones(2) * n, "s": sparse[0]} for n in (1, 3)), run="b")
    found = store.read(store.merge(*refs, run="m", step=2))
    assert torch.equal(found["s"].to_dense(), sparse[0].to_dense())
    assert same_state(found["w"], torch.ones(2) * 2)


def test_empty_containers_are_those_of_the_last_checkpoint(store: Store) -> None:
    kept: dict[str, Any] = {"w": torch.ones(2), "empty": {}, "nested": [{}, ()]}
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    refs = save(store, *(kept | {"optimizer": optimizer} for _ in range(2)))
    assert same_state(store.read(store.merge(*refs, run="m", step=1)), kept)
    whole = store.merge(*refs, run="m", step=2, keep=["optimizer.*"])
    assert same_state(store.read(whole), kept | {"optimizer": optimizer})
    some = store.merge(*refs, run="m", step=3, keys=["w", "nested*"])
    assert same_state(store.read(some), {"w": torch.ones(2), "nested": [{}, ()]})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "int8"}, "dtype='int8' is not valid"),
        ({"dtype": "complex64"}, "dtype='complex64' is not valid"),
        ({"weights": [1, 2, 3]}, "3 weights for 1 checkpoints"),
    ],
)
def test_invalid_arguments_are_refused(store: Store, options: dict[str, Any], why: str) -> None:
    refs = save(store, {"w": torch.ones(2)})
    with pytest.raises(InvalidInput, match=why):
        store.merge(*refs, run="m", step=1, **options)


def test_there_must_be_something_to_combine(store: Store) -> None:
    refs = save(store, {"n": torch.ones(2).long()})
    with pytest.raises(MissingKey, match="nothing to combine in a@0"):
        store.merge(*refs, run="m", step=1)
    with pytest.raises(InvalidInput, match="nothing to merge"):
        store.merge(run="m", step=1)
    with pytest.raises(TypeError, match="wights"):
        store.merge(*refs, run="m", step=1, wights=[1])  # type: ignore[call-arg] # wrong on purpose


# the checkpoint


def test_the_manifest_names_the_merged_checkpoints(store: Store) -> None:
    refs = save(store, *({"w": torch.ones(2)} for _ in range(3)))
    merged = store.merge(*refs, run="m", step=1, weights=[0.25, 0, "3/4"])
    assert store.get(merged).lineage["merged_from"] == [
        {"id": store.get(f"a@{step}").id, "run": "a", "step": step, "weight": weight}
        for step, weight in ((0, 0.25), (2, 0.75))
    ]


def test_progress_ends_at_its_total(store: Store) -> None:
    refs = save(store, *({"same": cells(9, seed=1), "w": cells(5)} for _ in range(2)))
    seen: list[tuple[int, int | None]] = []
    store.merge(*refs, run="m", step=1, dtype="bfloat16", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (7 * CELL, 7 * CELL)
    seen.clear()
    store.merge(*refs, run="m", step=2, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5 * CELL, 5 * CELL)


def test_a_merge_that_fails_at_any_call_leaves_nothing_visible() -> None:
    inner = memory(near=False)
    store = small(inner)
    refs = save(store, *({"same": cells(9, seed=1), "w": cells(5)} for _ in range(2)))
    faulty = FaultyStore(inner)
    small_one = Store(type(store.repository)(faulty))
    small_one.merge(*refs, run="m", step=0, weights=[1, 100])
    puts = faulty.count("put")
    assert puts > 3
    for at in range(1, puts + 1):
        broken = FaultyStore(inner, [fail_before("put", at=at, times=99)])
        with pytest.raises(StorageError):
            Store(type(store.repository)(broken)).merge(*refs, run="m", step=at, weights=[1, at])
        assert not [one.name for one in threading.enumerate() if one.name.startswith("casckpt-merge")]
        assert [one.step for one in store.checkpoints("m")] == [0]
    merged = store.merge(*refs, run="m", step=99, weights=[1, 100])
    assert same_state(store.read(merged), store.read("m@0"))
    assert not store.verify().is_damaged
