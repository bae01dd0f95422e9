"""gc during a training run."""

from __future__ import annotations

import pytest
from torch import nn

from casckpt.frontends.trainer import Checkpointer
from tests.support.saves import small, steps


def test_gc_runs_after_a_save_if_requested() -> None:
    store, model = small(), nn.Linear(50, 50)
    with Checkpointer(store, run="sft", max_checkpoints=1, gc=True) as checkpointer:
        for step in range(4):
            model.weight.data.fill_(step)
            checkpointer.save(step, model)
    found = store.stats()
    # the bias did not change, so it remains in the blob of the first save
    assert (found.checkpoints, found.blobs) == (
        1,
        2,
    )


def test_a_checkpointer_with_gc_frees_space(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    with caplog.at_level("WARNING"), Checkpointer(store, run="sft", max_checkpoints=1, gc=True) as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step, nn.Linear(30, 30))
    assert (store.stats().blobs, caplog.messages) == (1, [])


def test_a_checkpointer_respects_the_minimum_age_of_the_store() -> None:
    store = small()
    store.create()
    store.repository.change_settings(min_age_seconds=3600.0)
    checkpointer = Checkpointer(store, run="sft", max_checkpoints=1)
    for step in range(1, 4):
        checkpointer.save(step, nn.Linear(2, 2))
    assert store.stats().forgotten == 2
    store.restore(store.checkpoints(forgotten=True)[0])
    assert [step for _, step in steps(store)] == [1, 3]
