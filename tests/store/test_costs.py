"""Exact costs of a save and a load: requests, fsyncs, and the bytes that are hashed, copied, written and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.format.digest import cell_digest, cell_digests
from casckpt.loading import transfer
from casckpt.repository.repository import Repository
from casckpt.saving import upload
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from casckpt.tensors.memory import Destination, TensorMemory, copy_addresses, copy_bytes
from tests.support.counting import count_io

CELL, CELLS = 4096, 100
W, B = CELL * CELLS, 40  # bytes of the two tensors


class Meter:
    """A small store that counts hashed and copied bytes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage = LocalStore(folder)
        self.counts = count_io(self.storage)
        self.store = Store(Repository(self.storage))
        self.store.create(cell_bytes=CELL, blob_bytes=1 << 20)
        self.hashed = self.copied = 0
        for module in (upload, transfer):
            monkeypatch.setattr(module, "cell_digest", self._digest)
        monkeypatch.setattr(upload, "cell_digests", self._digests)
        monkeypatch.setattr(upload, "copy_addresses", self._copy_addresses)
        monkeypatch.setattr(TensorMemory, "copy_out", self._copying(TensorMemory.copy_out))
        monkeypatch.setattr(Destination, "copy_in", self._copying(Destination.copy_in))
        monkeypatch.setattr(transfer, "copy_bytes", self._copying(copy_bytes))

    def _digest(self, data: Any) -> bytes:
        self.hashed += len(data)
        return cell_digest(data)

    def _digests(self, data: Any, spans: Any) -> bytes:
        ranges = list(spans)
        self.hashed += sum(hi - lo for lo, hi in ranges)
        return cell_digests(data, ranges)

    def _copy_addresses(self, targets: Any, sources: Any, nbytes: Any) -> None:
        self.copied += int(nbytes.sum())
        copy_addresses(targets, sources, nbytes)

    def _copying(self, call: Callable[..., None]) -> Callable[..., None]:
        def copy(*args: Any) -> None:
            self.copied += args[-1].nbytes
            call(*args)

        return copy

    def of(self, call: Callable[[], Any]) -> dict[str, int]:
        """Return the cost of one call."""
        before = asdict(self.counts)
        self.hashed = self.copied = 0
        call()
        counts = {name: value - before[name] for name, value in asdict(self.counts).items()}
        return counts | {"hashed": self.hashed, "copied": self.copied}


@pytest.fixture
def meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(tmp_path / "store", monkeypatch)


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(W // 4, dtype=torch.int32).view(CELLS, -1), "b": torch.arange(B // 4, dtype=torch.int32)}


def part(cost: dict[str, int], *names: str) -> tuple[int, ...]:
    return tuple(cost[name] for name in names)


def test_the_first_save_hashes_and_copies_each_byte_once(meter: Meter) -> None:
    cost = meter.of(lambda: meter.store.save(state(), step=0))
    assert part(cost, "hashed", "copied") == (W + B, W + B)
    # the transaction, one blob, the manifest, the announcement, the commit; the marker
    assert part(cost, "puts", "reads") == (5, 1)
    # eight of the fsyncs are for new folders; two listings are of announcements and commits
    assert part(cost, "fsyncs", "requests") == (17, 14)


def test_an_unchanged_save_does_not_copy_tensors_or_write_blobs(meter: Meter) -> None:
    meter.store.save(state(), step=0)
    cost = meter.of(lambda: meter.store.save(state(), step=1))
    assert part(cost, "hashed", "copied") == (W + B, 0)
    assert part(cost, "puts", "reads", "fsyncs", "requests") == (4, 4, 9, 12)


def test_a_changed_cell_is_rehashed_in_the_write_buffer(meter: Meter) -> None:
    data = state()
    meter.store.save(data, step=0)
    data["w"][7] += 1
    cost = meter.of(lambda: meter.store.save(data, step=1))
    assert part(cost, "hashed", "copied") == (W + B + CELL, CELL)
    assert meter.store.get("default@1").stats.bytes_written == CELL + 4096 + 72  # data, header, proof
    assert part(cost, "puts", "reads", "fsyncs", "requests") == (5, 4, 11, 14)


def test_all_cells_of_a_fully_changed_tensor_except_one_are_hashed_only_once(meter: Meter) -> None:
    data = state()
    meter.store.save(data, step=0)
    data["w"] += 1
    cost = meter.of(lambda: meter.store.save(data, step=1))
    assert part(cost, "hashed", "copied") == (W + B + CELL, W)


def test_changed_small_tensors_except_one_are_hashed_and_copied_only_once(meter: Meter) -> None:
    small = {f"w{n}": torch.full((B // 4,), n, dtype=torch.int32) for n in range(9)}
    meter.store.save({"model": small}, step=0)
    for value in small.values():
        value.add_(1000)
    cost = meter.of(lambda: meter.store.save({"model": small}, step=1))
    assert part(cost, "hashed", "copied") == (10 * B, 9 * B)
    small["w4"].add_(1)
    cost = meter.of(lambda: meter.store.save({"model": small}, step=2))
    assert part(cost, "hashed", "copied") == (10 * B, B), "the others are compared in place, like the first"


def test_a_save_hashes_only_samples_of_frozen_tensors(meter: Meter) -> None:
    meter.store.save(state(), step=0)
    cost = meter.of(lambda: meter.store.save(state(), step=1, frozen=["w"]))
    assert part(cost, "hashed", "copied") == (7 * CELL + B, 0)


def test_a_load_reads_and_hashes_each_byte_once_without_copying(meter: Meter) -> None:
    saved = meter.store.save(state(), step=0)
    looking = meter.of(lambda: meter.store.get(saved))["bytes_read"]  # the commit record
    assert 0 < looking < 1024
    target = {name: torch.zeros_like(data) for name, data in state().items()}
    cost = meter.of(lambda: meter.store.load(target, saved))
    assert part(cost, "hashed", "copied", "bytes_read") == (W + B, 0, W + B + looking)
    assert part(cost, "reads", "requests") == (3, 4)  # that record and the next number; opening and reading the blob
    cost = meter.of(lambda: meter.store.load(target, saved, verify=False))
    assert part(cost, "hashed", "copied", "bytes_read") == (0, 0, W + B + looking)


def test_loading_into_a_strided_destination_needs_one_copy(meter: Meter) -> None:
    saved = meter.store.save(state(), step=0)
    looking = meter.of(lambda: meter.store.get(saved))["bytes_read"]
    target = torch.zeros(W // 4 // CELLS, CELLS, dtype=torch.int32).t()
    cost = meter.of(lambda: meter.store.load({"w": target}, saved))
    assert part(cost, "hashed", "copied", "bytes_read") == (W, W, W + looking)
    assert torch.equal(target, state()["w"])


def test_a_second_read_makes_only_one_listing(meter: Meter) -> None:
    meter.store.save(state(), step=0)
    meter.store.checkpoints()
    cost = meter.of(meter.store.checkpoints)
    assert part(cost, "requests", "reads", "bytes_read") == (1, 0, 0)


@pytest.mark.parametrize("ref", ["default@latest", "default@0"])
def test_finding_a_checkpoint_needs_four_small_reads(meter: Meter, ref: str) -> None:
    """It reads the last announcement, the commit record, and the next free number of each of their logs."""
    meter.store.save(state(), step=0)
    cost = meter.of(lambda: meter.store.get(ref))
    assert part(cost, "requests", "reads") == (4, 4)
