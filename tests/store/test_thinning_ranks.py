"""Thinned checkpoints of many ranks: nearly all dropped bytes are freed, and all other entries are unchanged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import casckpt
from casckpt.saving.options import SaveOptions
from casckpt.store.store import Store
from tests.support.ranks import Pool
from tests.support.saves import hashes
from tests.support.simulated import Simulated

DROP, FEATURES, STEPS = "optim.*", 700, 20
WEIGHTS = 1 << 20  # per rank: 2 MB of bfloat16


def thin_all(store: Store, tags: dict[str, str]) -> None:
    """Thin all checkpoints except the two newest, including tagged ones, and check the result."""
    before = {one.step: one.id for one in store.checkpoints()}
    signed = [f"signatures/{id}/{'a' * 64}" for id in before.values()]
    for key in signed:
        store.repository.storage.put(key, b"mine")
    weights = {step: hashes(store, id, "model.*") for step, id in before.items()}
    for name, ref in tags.items():
        store.tag(name, ref)
    dropped = store.thin(drop=DROP, keep_last=2, tagged=True).nbytes
    freed = store.gc(min_age=0).deleted_bytes
    assert freed >= 0.95 * dropped > 0
    assert {one.step: one.id for one in store.checkpoints()} == before
    assert {name: f"{one.run}@{one.step}" for name, one in store.tags().items()} == tags
    assert {entry.key for entry in store.repository.storage.list("signatures/")} == {*signed}
    assert {step: hashes(store, id, "model.*") for step, id in before.items()} == weights
    assert [bool(one.dropped) for one in store.checkpoints()] == [True] * (len(before) - 2) + [False] * 2
    assert not store.verify().is_damaged


# simulated ranks


def shard_of(rank: int, size: int, step: int) -> dict[str, Any]:
    """Return the rows of one rank: weights of which a quarter changed, and two moments that changed completely."""

    def rows(seed: int) -> casckpt.Shard:
        drawn = torch.randn(1024, WEIGHTS // 1024, generator=torch.Generator().manual_seed(seed)).bfloat16()
        return casckpt.Shard(drawn, (1024 * size, WEIGHTS // 1024), (1024 * rank, 0))

    weights = rows(rank)
    weights.data[:256] += step
    moments = [rows((step * size + rank) * 2 + number + size) for number in range(2)]
    return {"model": {"w": weights}, "optim": {"exp_avg": moments[0], "exp_avg_sq": moments[1]}}


def test_thinning_works_for_checkpoints_of_many_ranks(tmp_path: Path, full: bool) -> None:
    size = 64 if full else 8
    store = casckpt.open(tmp_path)
    ranks = Simulated(store.repository, size)
    for step in range(4):
        ranks.save(partial(shard_of, size=size, step=step), SaveOptions(run="r", step=step))
    thin_all(store, {"best": "r@1"})
    last = ranks.save(partial(shard_of, size=size, step=3), SaveOptions(run="r", step=9)).committed
    assert (last.bytes_written, last.blobs_written) == (0, 0)


# FSDP2


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(FEATURES, FEATURES)
    fully_shard(model)  # in place
    return model, torch.optim.AdamW(model.parameters())


def train(rank: int, size: int, path: Path) -> None:
    torch.manual_seed(0)
    model, optim = sharded()
    checkpointer = casckpt.Checkpointer(casckpt.open(path), run="sft")
    for step in range(STEPS):
        model(torch.full((4, FEATURES), float(step))).square().mean().backward()
        optim.step()
        optim.zero_grad()
        checkpointer.save(step, model, optim)


def train_on(rank: int, size: int, path: Path) -> tuple[bool, int]:
    """Load the weights from an early checkpoint and everything from the newest. Save the result."""
    model, optim = sharded()
    checkpointer = casckpt.Checkpointer(casckpt.open(path), run="sft")
    checkpointer.load("sft@3", model)
    early = checkpointer.store.compare({"model": model.state_dict()}, "sft@3").is_same
    checkpointer.resume(model, optim)
    return early, checkpointer.save(STEPS, model, optim).stats.bytes_written


@pytest.mark.filterwarnings("ignore")
def test_thinning_works_for_training_on_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, train, tmp_path / "store")
    thin_all(casckpt.open(tmp_path / "store"), {"best": "sft@5"})
    for early, written in ranks.run(2, train_on, tmp_path / "store"):
        assert early
        assert written < 0.01 * 3 * 4 * FEATURES**2
