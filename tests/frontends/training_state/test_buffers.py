"""Buffers on several ranks: a save warns once if they differ."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import casckpt
from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer
from casckpt.ranks.ranks import open_ranks
from tests.support.ranks import Pool, outcome_of
from tests.support.training import Network

SAVES = 6


class Heard(logging.Handler):
    """Records the log messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def saves(rank: int, size: int, path: Path, wrap: str, differ: bool) -> tuple[list[list[str]], int]:
    """Save several times, first with equal buffers.

    Return the log of each save, and the number of exchanges of the last.
    """
    heard, found, store = Heard(), list[list[str]](), casckpt.open(path)
    logging.getLogger("casckpt").addHandler(heard)
    model: Any = Network(1)
    if wrap == "fully_shard":
        fully_shard(model)
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    checkpointer = Checkpointer(store, run="a")
    ranks = open_ranks()
    before = 0
    for step in range(SAVES):
        before = ranks.exchanges
        checkpointer.save(step, model)
        found.append(heard.texts.copy())
        heard.texts.clear()
        if differ:
            for buffer in model.buffers():
                buffer.add_(rank)
    logging.getLogger("casckpt").removeHandler(heard)
    exchanges = ranks.exchanges - before
    casckpt.load_model_and_optim_state(store, f"a@{SAVES - 1}", model)
    if differ:
        assert next(model.buffers()).unique().numel() == 1
    return found, exchanges


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fully_shard"])
def test_rank_0_warns_once_about_buffers_that_differ(tmp_path: Path, ranks: Pool, wrap: str) -> None:
    found = ranks.run(3, saves, tmp_path, wrap, True)
    (alike, (text,), *again), _ = found[0]
    assert [alike, *again] == [[]] * (SAVES - 1)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "counts"):
        assert repr(f"model.{name}") in text
    assert "scratch" not in text  # it is not persistent, so it is not saved
    assert "weight" not in text
    assert [logged for logged, _ in found[1:]] == [[[]] * SAVES] * 2


def test_a_save_does_not_need_an_exchange_for_equal_buffers(tmp_path: Path, ranks: Pool) -> None:
    differ = ranks.run(2, saves, tmp_path / "differ", "plain", True)
    alike = ranks.run(2, saves, tmp_path / "alike", "plain", False)
    assert [logged for logged, _ in alike] == [[[]] * SAVES] * 2
    assert {count for _, count in alike} == {count for _, count in differ}  # an earlier save warned about these


def stages(rank: int, size: int, path: Path) -> list[str]:
    """Save a model of which each rank has its own part. Both have one buffer, with equal values."""
    heard = Heard()
    logging.getLogger("casckpt").addHandler(heard)
    model = nn.Module()
    model.add_module(f"stage{rank}", nn.BatchNorm1d(3 + rank))
    model.register_buffer("shared", torch.arange(3))
    casckpt.save_model_and_optim_state(casckpt.open(path), model, run="a", step=1)
    logging.getLogger("casckpt").removeHandler(heard)
    return heard.texts


def test_buffers_that_only_one_rank_has_do_not_cause_a_warning(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, stages, tmp_path / "s") == [[], []]


def with_a_meta_buffer(rank: int, size: int, path: Path) -> tuple[str, str]:
    model = nn.Module()
    model.register_buffer("odd", torch.ones(3, device="meta" if rank else "cpu"))
    error = outcome_of(lambda: casckpt.save_model_and_optim_state(casckpt.open(path), model, run="a", step=1))
    return type(error).__name__, str(error)


def test_the_error_for_an_invalid_buffer_names_it(tmp_path: Path, ranks: Pool) -> None:
    for kind, text in ranks.run(2, with_a_meta_buffer, tmp_path / "s"):
        assert kind == InvalidInput.__name__
        assert "model.odd" in text
