"""A save that pickles something says so once."""

from __future__ import annotations

import enum
from typing import NamedTuple

import pytest
import torch

import casckpt


class Kind(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    one: int
    other: int


def test_what_is_stored_as_a_pickle_is_named_once(store: casckpt.Store, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(3), "cfg": {"kind": Kind.ONE, "plain": 1}, "pair": Pair(1, 2)}
    for step in range(3):
        store.save(state, run="a", step=step, allow_pickle=True)
    (said,) = caplog.messages
    assert "stored as pickles: 'cfg.kind', 'pair'. " in said
    assert store.url in said
    caplog.clear()
    store.save(state | {"more": Kind.ONE}, run="a", step=3, allow_pickle=True)
    assert "stored as pickles: 'more'. " in caplog.messages[0]
    caplog.clear()
    store.save({str(number): Kind.ONE for number in range(10)}, run="b", step=1, allow_pickle=True)
    assert "'6', '7' and 2 more" in caplog.messages[0]


def test_a_save_that_pickles_nothing_says_nothing(store: casckpt.Store, caplog: pytest.LogCaptureFixture) -> None:
    store.save({"w": torch.ones(3), "n": (1, "a")}, step=1, allow_pickle=True)
    assert not caplog.messages
