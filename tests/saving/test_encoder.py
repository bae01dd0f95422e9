"""Saves that store deltas: every version loads exactly, from any base, and after any failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import Shard

import casckpt
from casckpt.contents import manifests
from casckpt.errors import InvalidInput
from casckpt.format.blob import DATA_OFFSET
from casckpt.format.digest import cell_digest
from casckpt.format.encodings import frames
from casckpt.format.encodings.frames import decode, encode_delta
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.regions import full_box
from casckpt.plan.routes import MAX_DELTAS
from casckpt.repository.repository import Repository
from casckpt.saving import encoder as coding
from casckpt.saving.encoder import HeldCell, HeldFrame, forget_run
from casckpt.store.store import Store
from tests.support.far import far
from tests.support.held import held_bytes
from tests.support.ranks import Pool
from tests.support.saves import CELL, another_process, reopened, same_state, small, small_folder
from tests.support.tensors import bytes_of
from tests.support.together import line, spread

NUMEL = 40 * CELL // 2  # elements of 2 bytes


def weights(seed: int = 0, numel: int = NUMEL, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def stepped(tensor: torch.Tensor, step: int, share: float = 0.01) -> torch.Tensor:
    """Return the state after a training step: some elements change to an adjacent number."""
    bits = tensor.clone().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    generator = torch.Generator().manual_seed(step)
    at = torch.randperm(bits.numel(), generator=generator)[: max(1, int(share * bits.numel()))]
    bits.view(-1)[at] += 1
    return bits.view(tensor.dtype)


def versions(count: int, **more: Any) -> list[dict[str, Any]]:
    """Versions of a state in which only "w" changes, and "n" changes slightly."""
    state: dict[str, Any] = {"w": weights(), "still": weights(1), "n": torch.arange(5), **more}
    found = [state]
    for step in range(1, count):
        state = state | {"w": stepped(state["w"], step), "n": state["n"] + 1}
        found.append(state)
    return found


def links(store: Store, ref: str, key: str = "w") -> list[int]:
    """Return the number of bases of each cell of a tensor."""
    manifest = manifests.get(store.repository, store.get(ref).commit)
    entry = next(entry for entry in manifest.entries if entry.key == key)
    return [len(list(cell.chain)) - 1 for cell in manifest.extents(entry).stored_cells()]


def check(store: Store, states: list[dict[str, Any]]) -> None:
    """Check that each version loads unchanged from a newly opened store."""
    for step, state in enumerate(states):
        assert same_state(reopened(store).read(f"default@{step}"), state), step


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return small() if request.param == "memory" else small_folder(tmp_path / "store")


def test_each_version_stores_only_its_changes_and_loads_exactly(store: Store) -> None:
    states = versions(20)
    written = [store.save(state, step=step, compress="auto").stats.bytes_written for step, state in enumerate(states)]
    assert all(nbytes < written[0] / 8 for nbytes in written[1:])
    found = [max(links(store, f"default@{step}")) for step in range(20)]
    assert found[: MAX_DELTAS + 1] == list(range(MAX_DELTAS + 1))
    assert max(found) == MAX_DELTAS
    check(store, states)


def test_bytes_reused_counts_the_bytes_that_are_not_stored_again(store: Store) -> None:
    """The figure excludes cells that were saved as deltas."""
    states = versions(3, tied=weights(1))
    stats = [store.save(state, step=step, compress="auto").stats for step, state in enumerate(states)]
    still, n = states[0]["still"].nbytes, states[0]["n"].nbytes
    assert stats[0].bytes_reused == still, "of what is there twice"
    for one in stats[1:]:
        assert one.bytes_reused == 2 * still
        assert one.bytes_coded == one.bytes_total - 2 * still - n
        assert 0 < one.bytes_deltas == one.bytes_frames < one.bytes_written < one.bytes_coded / 8
    other = small()
    store.copy_to(other, "default@1")
    store.copy_to(other, "default@2")
    copied = other.get("default@2").stats
    assert copied.bytes_reused == 2 * still
    assert copied.bytes_written == stats[2].bytes_written


def test_cells_are_stored_raw_by_default(store: Store) -> None:
    for step, state in enumerate(versions(3)):
        store.save(state, step=step, compress="off" if step == 2 else None)
    assert [set(links(store, f"default@{step}")) for step in range(3)] == [{0}] * 3


def test_a_different_process_encodes_against_a_local_store(tmp_path: Path) -> None:
    states = versions(8)
    for step, state in enumerate(states):
        with another_process():
            casckpt.open(small_folder(tmp_path / "s").url).save(state, step=step, compress="auto")
    store = casckpt.open(tmp_path / "s")
    assert [max(links(store, f"default@{step}")) for step in range(5)] == [0, 1, 2, 3, 4]
    check(store, states)


def test_on_remote_storage_only_cells_in_memory_are_bases() -> None:
    storage, states = far(), versions(4)
    store = small(storage)
    for step, state in enumerate(states):
        if step == 2:  # a process that was restarted
            store = Store(Repository(storage))
            forget_run(store.repository, "default")
        before = storage.reads_of_blobs()
        store.save(state, step=step, compress="auto")
        assert storage.reads_of_blobs() == before, "nothing is read over the network in order to save"
    assert [max(links(store, f"default@{step}")) for step in range(4)] == [0, 1, 0, 1]
    check(store, states)


def test_cells_in_memory_are_bases_only_if_the_parent_has_them(store: Store) -> None:
    """Covers a rollback, a failed save, a save by a different process, and a save of a different run."""
    states = versions(9)
    for step in (0, 1, 2):
        store.save(states[step], step=step, compress="auto")
    store.forget("default@2")
    store.save(states[3], step=3, compress="auto")
    with pytest.raises(InvalidInput), patch.object(coding, "encode_delta", side_effect=InvalidInput("a fault")):
        store.save(states[4], step=4, compress="auto")
    store.save(states[4], step=4, compress="auto")
    with another_process():
        store.save(states[5], step=5, compress="auto")
    store.save(states[0], run="other", step=0, compress="auto")
    for step in (6, 7):
        store.save(states[step], step=step, compress="auto")
    store.save(states[8], step=7, compress="auto", overwrite=True)
    assert all(max(links(store, f"default@{step}")) for step in range(3, 8))
    for step in (0, 1, 3, 4, 5, 6):
        assert same_state(reopened(store).read(f"default@{step}"), states[step]), step
    assert same_state(reopened(store).read("default@7"), states[8])


@pytest.mark.parametrize("is_frame", [True, False])
def test_a_frame_that_decodes_to_different_bytes_is_not_stored(
    store: Store, caplog: pytest.LogCaptureFixture, is_frame: bool
) -> None:
    states = versions(3)

    def wrong(plain: memoryview, width: int, base: memoryview) -> bytes | None:
        if not is_frame:
            return b"none at all"
        other = bytearray(plain)
        other[-1] ^= 1
        return encode_delta(memoryview(other), width, base)

    store.save(states[0], step=0, compress="auto")
    with patch.object(coding, "encode_delta", wrong), caplog.at_level(logging.ERROR):
        store.save(states[1], step=1, compress="auto")
    assert "decodes to something else" in caplog.text
    assert set(links(store, "default@1")) == {0}
    store.save(states[2], step=2, compress="auto")
    assert max(links(store, "default@2")) == 1
    check(store, states)


@pytest.mark.parametrize(
    ("lost", "in_memory"),
    [(0, False), (-1, False), (0, True), (1, True), (-1, True)],
    ids=["newest", "first", "newest, in memory", "second, in memory", "first, in memory"],
)
def test_a_missing_cell_is_not_used_as_a_base(store: Store, lost: int, in_memory: bool) -> None:
    """``lost``: a blob in the chain from the newest version's frame to the first. ``in_memory``: here are its bytes."""
    states = versions(4)
    for step in range(3):
        store.save(states[step], step=step, compress="auto")
    manifest = manifests.get(store.repository, store.get("default@2").commit)
    entry = next(entry for entry in manifest.entries if entry.key == "w")
    cell = next(cell for cell in manifest.extents(entry).stored_cells() if cell.base is not None)
    ref = manifest.blob(list(cell.chain)[lost].blob)
    store.repository.storage.delete(blob_key(ref.uploader, ref.hash))
    with nullcontext() if in_memory else another_process():
        (store if in_memory else reopened(store)).save(states[3], step=3, compress="auto")
    assert same_state(reopened(store).read("default@3"), states[3])
    assert 0 in links(store, "default@3")


def test_equal_tied_and_strided_tensors_are_encoded(store: Store) -> None:
    w, matrix = weights(), weights(3).view(64, -1)
    for step in range(4):
        state = {"w": w, "again": w, "copy": w.clone(), "t": matrix.t(), "part": matrix[:, 5:77], "empty": w[:0]}
        before = len(store.checkpoints())
        store.save(state, step=step, compress="auto")
        assert len(store.checkpoints()) == before + 1
        assert same_state(reopened(store).read(f"default@{step}"), state)
        w, matrix = stepped(w, step), stepped(matrix, step)
    assert max(links(store, "default@3")) == 3
    assert max(links(store, "default@3", "t")) == 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_always_encodes_all_floats(store: Store, dtype: torch.dtype) -> None:
    first = weights(2, 9 * CELL).to(dtype)
    second = first.clone()
    second[7::1000] = 0
    states = [{"w": first, "x": 1}, {"w": second, "x": 2}]
    written = [store.save(state, step=step, compress="always").stats for step, state in enumerate(states)]
    check(store, states)
    if dtype.is_floating_point or dtype.is_complex:
        assert written[0].bytes_written < 0.95 * written[0].bytes_total
        assert written[1].bytes_written < 0.05 * written[1].bytes_total + 2 * DATA_OFFSET


def test_noise_is_stored_unencoded(store: Store) -> None:
    noise = [torch.randint(0, 255, (10 * CELL,), dtype=torch.uint8).view(torch.bfloat16) for _ in range(3)]
    for step, tensor in enumerate(noise):
        store.save({"w": tensor}, step=step, compress="always")
    assert set(links(store, "default@2")) == {0}
    check(store, [{"w": tensor} for tensor in noise])
    store = small()
    with patch.object(coding, "encode_planes", return_value=None) as tried:
        store.save({"w": noise[0]}, step=3, compress="always")
        assert tried.call_count == 8, "and then it was left"
        for step in range(4, 11):
            store.save({"w": noise[step % 3]}, step=step, compress="always")
        assert tried.call_count == 8, "and for some saves, too"
        store.save({"w": noise[2]}, step=11, compress="always")
        assert tried.call_count == 9, "which tries one"


def test_a_few_cells_of_noise_are_stored_raw_without_extra_memory(store: Store) -> None:
    draw, base = torch.Generator().manual_seed(0), torch.empty(0)
    with another_process(), patch.object(coding, "encode_delta", side_effect=encode_delta) as tried:
        for step in range(9):
            base = torch.randint(0, 1 << 16, (2 * CELL,), generator=draw, dtype=torch.int32).to(torch.int16)
            store.save({"w": base.view(torch.bfloat16)}, step=step, compress="auto")
            assert tried.call_count <= 4
        assert tried.call_count
        assert held_bytes() == 0
        for step in range(9, 13):
            store.save({"w": (base := stepped(base, step)).view(torch.bfloat16)}, step=step, compress="auto")
        assert max(links(store, "default@12")) > 0, "it is tried again"
        assert torch.equal(reopened(store).read("default@12")["w"].view(torch.int16), base)


def test_frozen_tensors_are_used_as_bases_only_if_their_bytes_match(store: Store) -> None:
    """If a tensor was declared frozen but changed between samples, it differs from the manifest."""
    states = versions(3)
    store.save(states[0], step=0, compress="auto")
    store.save(states[1], step=1, compress="auto", frozen=["w"])
    with another_process():
        store.save(states[2], step=2, compress="auto")
    assert same_state(reopened(store).read("default@2"), states[2])


def test_blobs_of_frames_are_never_worn(store: Store) -> None:
    """A new blob would need all of these cells unencoded."""
    states = versions(4)
    for step, state in enumerate(states):
        more = {f"x{n}": stepped(weights(50 + n, CELL), step) for n in range(30)} if step < 2 else {}
        store.save(state | more, step=step, compress="auto")
    assert store.get("default@3").stats.bytes_written < store.get("default@0").stats.bytes_written / 8
    manifest = manifests.get(store.repository, store.get("default@2").commit)
    cells = [c for e in manifest.entries if e.key == "w" for c in manifest.extents(e).stored_cells()]
    framed = {one.blob for cell in cells for one in cell.chain if one.frame is not None}
    assert framed
    assert not any(manifest.blob(number).worn for number in framed)


def first(call: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, except that ``then`` runs at the first call."""
    calls = iter([then])

    def called(*given: Any) -> Any:
        return next(calls, call)(*given)

    return called


def test_an_interrupted_save_does_not_provide_bases(store: Store) -> None:
    states = versions(3)
    store.save(states[0], step=0, compress="auto")

    def halfway(_: memoryview, into: memoryview, __: memoryview) -> None:
        into[: len(into) // 2] = bytes(len(into) // 2)
        raise KeyboardInterrupt

    with patch.object(frames, "decode", first(decode, halfway)), pytest.raises(KeyboardInterrupt):
        store.save(states[1], step=1, compress="auto", threads=1)
    for step in (1, 2):
        store.save(states[step], step=step, compress="auto")
    check(store, states)


def test_a_background_save_stores_the_same_bytes(store: Store) -> None:
    state = {"w": weights()}
    copies = []
    for step in range(4):
        copies.append({"w": state["w"].clone()})
        future = store.save_async(state, step=step, compress="auto")
        future.result()
        state["w"].copy_(stepped(state["w"], step))
    assert max(links(store, "default@3")) == 3
    check(store, copies)


def save_version(rank: int, size: int, url: str, step: int, spread_by: Callable[[int], Any]) -> int:
    state = {"w": versions(step + 1)[step]["w"].view(128, -1)}
    store = casckpt.open(url)
    return store.save(spread(state, line(size), [spread_by(0)]), step=step, compress="auto").stats.bytes_written


def test_deltas_continue_after_the_number_of_ranks_and_columns_changes(ranks: Pool, tmp_path: Path) -> None:
    """The state is saved by rows on 2 ranks and on 4, by columns on 2, and on 1. The result is always correct."""
    url = small_folder(tmp_path / "s").url
    written = [
        ranks.run(size, save_version, url, step, by)[0]
        for step, (size, by) in enumerate([(2, Shard), (2, Shard), (4, Shard), (1, Shard), (2, Shard)])
    ]
    assert all(nbytes < written[0] / 4 for nbytes in written[1:])
    store = casckpt.open(url)
    for step, state in enumerate(versions(5)):
        assert torch.equal(store.read(f"default@{step}")["w"], state["w"].view(128, -1))


def test_copies_keep_frames_unchanged(store: Store, tmp_path: Path) -> None:
    states = versions(6, big=weights(4))
    for step, state in enumerate(states):
        store.save(state, step=step, compress="auto")
    before = [links(store, f"default@{step}") for step in range(6)]
    other = casckpt.open(tmp_path / "other")
    store.copy_to(other)
    check(other, states)
    assert [links(other, f"default@{step}") for step in range(6)] == before
    found = other.verify(decode=True)
    assert found.decoded_bytes
    assert not found.damaged
    assert not found.manifests
    assert other.stats().bytes_blobs <= store.stats().bytes_blobs


def test_an_older_version_is_used_only_if_it_matches_its_manifest() -> None:
    """After a rollback, a run may reach the same version in a different way, in a different process."""
    first, second = (bytearray(bytes_of(one)) for one in (weights(numel=CELL), stepped(weights(numel=CELL), 1)))
    frame = encode_delta(memoryview(second), 2, memoryview(first))
    assert frame is not None
    was, now = (
        StoredCell(0, 0, CELL, full_box((CELL // 2,)), 0, CELL // 2, cell_digest(one)) for one in (first, second)
    )
    held = HeldCell(now.digest, second, (HeldFrame(frame, was.digest),))
    assert coding._older(held, [now]) is None
    assert coding._older(held, [was, was]) is None
    assert coding._older(held, [was]) == HeldCell(was.digest, first)
    assert held.plain == first, "in place"


def test_simultaneous_saves_of_a_run_do_not_share_kept_cells(store: Store) -> None:
    """The second save has the same parent. It begins and ends while the first save encodes a cell."""
    states, encode = versions(4), encode_delta
    store.save(states[0], step=0, compress="auto")
    other = states[0] | {"w": stepped(states[0]["w"], 77)}

    def beside(plain: memoryview, width: int, base: memoryview) -> bytes | None:
        store.save(other, step=10, compress="auto", threads=1)
        return encode(plain, width, base)

    with patch.object(coding, "encode_delta", first(encode, beside)):
        store.save(states[1], step=1, compress="auto", threads=1)
    for step in (2, 3):
        store.save(states[step], step=step, compress="auto")
    check(store, states)
    assert same_state(reopened(store).read("default@10"), other)
    assert max(links(store, "default@1")) == max(links(store, "default@10")) == 1
