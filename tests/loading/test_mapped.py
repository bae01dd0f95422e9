"""Mapped reads return tensors in the page cache, which are verified once. What cannot be mapped is read into
memory."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import casckpt
from casckpt.errors import Damaged, InvalidInput, StorageError
from casckpt.loading import mapped
from casckpt.storage.base import ObjectStore
from casckpt.storage.local import reader
from casckpt.store.store import Store
from tests.support.afresh import afresh
from tests.support.far import far
from tests.support.forks import forked
from tests.support.gcs import collect
from tests.support.progress_calls import ProgressCalls
from tests.support.repositories import memory
from tests.support.rewrites import move
from tests.support.saves import blob_keys, content, counted, flip, overwrite, same_state, small, trained
from tests.support.tensors import NAMES, dtype_of, raw
from tests.support.wrappers import scaled

CELL, BLOB = 64 << 10, 256 << 10  # bytes; casckpt aligns cells of this size
REF = "default@1"
_MAP = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ +(\S+\.safetensors)( \(deleted\))?$", re.MULTILINE)

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list maps")


def cells(count: float, seed: int = 1) -> torch.Tensor:
    return torch.randn(int(count * CELL // 4), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    casckpt.open(tmp_path / "store").create(cell_bytes=CELL, blob_bytes=BLOB)
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Store:
    return casckpt.open(path)


def nbytes_mapped(tensor: torch.Tensor) -> int:
    """Return how many of a tensor's bytes are in private maps of blobs."""
    start, end, total = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0
    for low, high, mode, _, _ in _MAP.findall(Path("/proc/self/maps").read_text()):
        common = min(end, int(high, 16)) - max(start, int(low, 16))
        assert common <= 0 or mode == "rw-p"
        total += max(0, common)
    return total


def bytes_read(store: Store, call: Callable[[], Any]) -> int:
    """Return the number of bytes that a call reads from blobs."""
    with counted(store) as records:
        store.read(REF, keys=[])
    with counted(store) as io:
        call()
    return io.bytes_read - records.bytes_read


# values


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_mapped_read_returns_the_same_state_as_an_ordinary_read(store: Store) -> None:
    state = {
        "model": {name: raw(name, (3 * CELL // dtype_of(name).itemsize,)) for name in NAMES},
        "small": {name: raw(name, (5, 7)) for name in NAMES},
        "shapes": [torch.tensor(3.0), torch.empty(3, 0, 2), cells(4).view(8, 2, -1), cells(1.5).view(3, -1).t()],
        "values": {"epoch": 5, "large": random.Random(1).randbytes(3 * CELL), "text": "x"},
    }
    store.save(state, step=1)
    for _ in range(2):
        assert same_state(store.read(REF, mapped=True), store.read(REF))


def test_a_tensor_that_is_split_over_blobs_is_mapped_whole(store: Store) -> None:
    state = {"a": cells(1), "b": cells(11.5, 2), "c": cells(3, 3).bfloat16(), "d": cells(5, 4).double()}
    store.save(state, step=1)
    assert len(blob_keys(store)) > 4
    loaded = store.read(REF, mapped=True)
    assert same_state(loaded, state)
    assert {key: nbytes_mapped(one) for key, one in loaded.items()} == {key: one.nbytes for key, one in state.items()}


def test_unchanged_cells_are_mapped_from_the_blobs_of_earlier_checkpoints(store: Store) -> None:
    state = {"w": cells(12)}
    store.save(state, step=1)
    state["w"][5 * CELL // 4] += 1
    store.save(state, step=2)
    loaded = store.read("default@2", mapped=True)
    assert same_state(loaded, state)
    assert nbytes_mapped(loaded["w"]) == state["w"].nbytes


def test_tensors_that_are_adjacent_in_a_blob_share_a_map(store: Store, path: Path) -> None:
    state = {f"w{number}": cells(1, number) for number in (3, 0, 2, 1)}
    store.save(state, step=1)
    loaded = store.read(REF, mapped=True)
    assert same_state(loaded, state)
    assert Path("/proc/self/maps").read_text().count(f"{path}/objects") == len(blob_keys(store)) == 1


def test_patterns_select_the_mapped_tensors(store: Store) -> None:
    store.save({"a": cells(6), "b": cells(6, 2)}, step=1)
    assert bytes_read(store, lambda: store.read(REF, keys=["b"], mapped=True)) == 6 * CELL
    loaded = store.read(REF, keys=["b"], mapped=True)
    assert loaded.keys() == {"b"}
    assert torch.equal(loaded["b"], cells(6, 2))


def test_the_inner_tensors_of_a_wrapper_are_mapped(store: Store) -> None:
    weight = scaled(1, 512, 512)
    store.save({"w": weight}, step=1)
    tensors = store.read(REF, mapped=True)["w"].tensors
    assert torch.equal(tensors["codes"], weight.codes)
    assert torch.equal(tensors["table"], weight.table)
    assert nbytes_mapped(tensors["codes"]) == 512 * 512


def test_a_module_can_adopt_mapped_tensors(store: Store) -> None:
    saved, fresh = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
    store.save({"model": saved.state_dict()}, step=1)
    fresh.load_state_dict(store.read(REF, mapped=True)["model"], assign=True)
    assert nbytes_mapped(fresh.weight) == 256 << 10
    data = torch.randn(3, 256)
    assert torch.equal(fresh(data), saved(data))


# verification


def test_an_open_store_reads_and_hashes_mapped_bytes_once(store: Store, path: Path) -> None:
    state = {"a": cells(9), "b": cells(2, 2)}
    store.save(state, step=1)
    assert bytes_read(store, lambda: store.read(REF, keys=["b"], mapped=True)) == 2 * CELL
    assert bytes_read(store, lambda: store.read(REF, mapped=True)) == 9 * CELL
    assert bytes_read(store, lambda: store.read(REF, mapped=True)) == 0
    other = casckpt.open(path)
    other.read(REF, keys=[])
    assert bytes_read(other, lambda: other.read(REF, mapped=True, verify=False)) == 0
    assert bytes_read(other, lambda: other.read(REF, mapped=True)) == 11 * CELL


def test_a_store_with_too_many_verified_extents_forgets_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAX_VERIFIED", 2)
    state = {f"w{number}": cells(1, number) for number in range(5)}
    store.save(state, step=1)
    for _ in range(2):
        assert same_state(store.read(REF, mapped=True), state)
        assert 1 <= len(store.repository.verified_extents) <= 2


@pytest.mark.parametrize("seen", [False, True])
def test_a_mapped_read_reports_damage_as_an_ordinary_read_does(store: Store, seen: bool) -> None:
    store.save({"a": cells(1), "w": cells(3, 2)}, step=1)
    (key,) = blob_keys(store)
    if seen:
        store.read(REF, mapped=True)
    flip(store, key, content(store, key).index(cells(3, 2).numpy().tobytes()) + CELL + 5)
    for _ in range(2):
        with pytest.raises(Damaged, match="casckpt repair") as raised:
            store.read(REF, mapped=True)
        assert raised.value.key == "w"
    assert torch.equal(store.read(REF, keys=["a"], mapped=True)["a"], cells(1))
    assert not torch.equal(store.read(REF, mapped=True, verify=False)["w"], cells(3, 2))


def test_a_file_that_was_changed_in_place_is_verified_again(store: Store, path: Path) -> None:
    store.save({"w": cells(3)}, step=1)
    store.read(REF, mapped=True)
    file = path / blob_keys(store)[0]
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(5000)
        opened.write(b"damage")
    with pytest.raises(Damaged):
        store.read(REF, mapped=True)


def test_damaged_extents_are_read_from_the_blobs_of_a_different_commit(store: Store) -> None:
    store.save({"w": cells(6)}, step=1)
    old = set(blob_keys(store))
    move(store.repository, store.get(REF).commit)  # reads now use the new blobs
    new = sorted(set(blob_keys(store)) - old)
    flip(store, new[0], 5000)
    loaded = store.read(REF, mapped=True)["w"]
    assert torch.equal(loaded, cells(6))
    assert 0 < nbytes_mapped(loaded) < loaded.nbytes  # damaged extents are not mapped


@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_blob_is_reported_and_not_mapped(store: Store, verify: bool) -> None:
    store.save({"w": cells(3)}, step=1)
    (key,) = blob_keys(store)
    overwrite(store, key, content(store, key)[: 4096 + CELL])
    with pytest.raises(Damaged, match="ends after"):
        store.read(REF, mapped=True, verify=verify)


# what cannot be mapped


@pytest.mark.parametrize("verify", [True, False])
def test_a_mapped_read_maps_all_cells_except_encoded_ones(
    store: Store, caplog: pytest.LogCaptureFixture, verify: bool
) -> None:
    state = {"w": trained(4 * CELL / 4096, 0), "n": torch.arange(CELL)}
    store.save(state, step=1, compress="always")
    state["w"] = trained(4 * CELL / 4096, 1)
    store.save(state, step=2, compress="always")
    for ref, expected in (("default@2", state), (REF, {"w": trained(4 * CELL / 4096, 0), "n": state["n"]})):
        with caplog.at_level(logging.INFO, "casckpt"):
            loaded = store.read(ref, mapped=True, verify=verify)
        assert same_state(loaded, expected)
        assert nbytes_mapped(loaded["w"]) < nbytes_mapped(loaded["n"]) == state["n"].nbytes
    assert "256.0 KiB of default@2 cannot be mapped, and is read into memory" in caplog.text


def test_a_mapped_read_copies_cells_that_are_not_aligned(store: Store) -> None:
    state = {"a": cells(2.1), "b": cells(3.1, 2)}
    store.save(state, step=1)
    for tensor in state.values():
        tensor[-1] += 1
    store.save(state, step=2)  # the last cells, which are small, are now next to each other in a new blob
    loaded = store.read("default@2", mapped=True)
    assert same_state(loaded, state)
    assert nbytes_mapped(loaded["b"]) >= 3 * CELL
    assert nbytes_mapped(loaded["a"]) + nbytes_mapped(loaded["b"]) < sum(one.nbytes for one in state.values())


def test_columns_of_a_matrix_are_read_instead_of_mapped(store: Store) -> None:
    full = cells(8).view(256, -1)
    left, right = full[:, :256].contiguous(), full[:, 256:].contiguous()
    shape = tuple(full.shape)
    store.save({"w": [casckpt.Shard(left, shape, (0, 0)), casckpt.Shard(right, shape, (0, 256))]}, step=1)
    loaded = store.read(REF, mapped=True)["w"]
    assert torch.equal(loaded, full)
    assert nbytes_mapped(loaded) == 0


def test_shards_that_begin_within_a_page_are_read_instead_of_mapped(store: Store) -> None:
    full = cells(6)
    parts = [casckpt.Shard(full[lo:hi], tuple(full.shape), (lo,)) for lo, hi in ((0, 50_001), (50_001, len(full)))]
    store.save({"w": parts}, step=1)
    loaded = store.read(REF, mapped=True)["w"]
    assert torch.equal(loaded, full)
    assert 0 < nbytes_mapped(loaded) < full.nbytes


@pytest.mark.parametrize("make", [memory, far], ids=["memory", "remote"])
def test_tensors_in_other_kinds_of_storage_are_read_instead_of_mapped(make: Callable[[], ObjectStore]) -> None:
    store = small(make())
    state = {"w": cells(6), "n": 1}
    store.save(state, step=1)
    loaded = store.read(REF, mapped=True)
    assert same_state(loaded, state)
    assert nbytes_mapped(loaded["w"]) == 0


def test_a_mapped_read_refuses_devices_other_than_the_cpu(store: Store) -> None:
    store.save({"w": cells(2)}, step=1)
    with pytest.raises(InvalidInput, match="omit mapped=True"):
        store.read(REF, mapped=True, device="meta")


def test_a_failure_to_map_a_blob_raises_a_storage_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save({"w": cells(2)}, step=1)

    def too_many(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(reader, "_LIBC", SimpleNamespace(mmap=too_many))
    with pytest.raises(StorageError, match=r"cannot map .*\.safetensors: .* raise `sysctl vm.max_map_count`"):
        store.read(REF, mapped=True)


def test_a_mapped_read_uses_ordinary_memory_if_no_address_space_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.save({"w": cells(2)}, step=1)

    def full(_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mapped, "AlignedBuffer", full)
    with caplog.at_level(logging.INFO, "casckpt"):
        loaded = store.read(REF, mapped=True)["w"]
    assert "128.0 KiB of default@1 cannot be mapped" in caplog.text
    assert torch.equal(loaded, cells(2))
    assert nbytes_mapped(loaded) == 0


# lifetime


def test_writing_into_a_mapped_tensor_changes_neither_the_store_nor_other_tensors(store: Store) -> None:
    state = {"a": cells(3), "b": cells(3), "z": torch.zeros(3 * CELL), "y": torch.zeros(2 * CELL)}
    store.save(state, step=1)
    one, other = store.read(REF, mapped=True), store.read(REF, mapped=True)
    one["a"].fill_(7)
    one["z"].fill_(7)
    assert same_state({key: one[key] for key in "by"}, {key: state[key] for key in "by"})
    assert same_state(other, state)
    assert same_state(store.read(REF, mapped=True), state)
    assert not store.verify().is_damaged


def test_mapped_tensors_outlive_gc_and_the_store(path: Path) -> None:
    store, state = casckpt.open(path), {"w": cells(9)}
    store.save(state, step=1)
    store.save({"w": cells(1, 2)}, step=2)
    loaded = store.read(REF, mapped=True)
    store.forget_now(store.get(REF))
    collect(store.repository)
    assert len(blob_keys(store)) == 1
    del store
    assert same_state(loaded, state)
    assert nbytes_mapped(loaded["w"]) == 9 * CELL


def test_maps_keep_no_files_open_and_end_with_their_tensors(store: Store, path: Path) -> None:
    store.save({"w": cells(9), "x": cells(2, 2)}, step=1)
    store.read(REF, mapped=True)
    before = len(os.listdir("/proc/self/fd"))
    loaded = store.read(REF, mapped=True)
    assert len(os.listdir("/proc/self/fd")) == before
    kept = loaded["w"].view(3, -1)[1]
    del loaded
    assert torch.equal(kept, cells(9).view(3, -1)[1])
    del kept
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_progress_counts_mapped_and_read_bytes(store: Store) -> None:
    store.save({"w": cells(9), "x": torch.arange(10), "e": trained(10, 0)}, step=1, compress="always")
    calls = ProgressCalls()
    store.read(REF, mapped=True, progress=calls)
    assert (calls.done, calls.total) == (9 * CELL + 80 + trained(10, 0).nbytes, calls.done)


def test_threads_can_use_a_store_concurrently(store: Store) -> None:
    state = {f"w{number}": cells(3.5, number) for number in range(8)}
    store.save(state, step=1)
    with ThreadPoolExecutor(6) as pool:
        for loaded in pool.map(lambda _: store.read(REF, mapped=True), range(12)):
            assert same_state(loaded, state)


def test_a_forked_child_keeps_its_own_version_of_a_mapped_tensor(store: Store) -> None:
    state = {"w": cells(3)}
    store.save(state, step=1)
    loaded = store.read(REF, mapped=True)

    def child() -> None:
        loaded["w"].zero_()
        assert same_state(store.read(REF, mapped=True), state)

    with forked(child):
        pass
    assert same_state(loaded, state)


def test_a_process_is_killed_if_another_program_truncates_a_mapped_blob(path: Path, store: Store) -> None:
    store.save({"w": cells(3)}, step=1)
    file = path / blob_keys(store)[0]
    file.chmod(0o644)
    process = afresh().Process(target=_sum_of_truncated, args=(path, file))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGBUS


def _sum_of_truncated(path: Path, file: Path) -> None:
    loaded = casckpt.open(path).read(REF, mapped=True)
    os.truncate(file, 4096)
    loaded["w"].sum()
