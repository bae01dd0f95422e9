"""Pickled values and mapping classes are reported once."""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

import casckpt
from tests.support.saves import small


class Kind(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    one: int
    other: int


def test_pickled_keys_are_logged_once(store: casckpt.Store, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_save_without_pickles_logs_nothing(store: casckpt.Store, caplog: pytest.LogCaptureFixture) -> None:
    store.save({"w": torch.ones(3), "n": (1, "a")}, step=1, allow_pickle=True)
    assert not caplog.messages


class Settings(dict[str, int]):
    """A subclass of dict."""


def test_the_loss_of_a_mapping_class_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    store, one = small(), torch.ones(2)
    tensors: defaultdict[str, Any] = defaultdict(dict, w=one)
    kept = {"a": {"x": 1}, "b": OrderedDict(y=one), "c": defaultdict(list, z=[1]), "d": tensors}
    store.save(kept, step=1)
    assert not caplog.records
    lost = {
        "a": {"s": Settings(x=1)}, "b": [UserDict(y=one)], "c": types.MappingProxyType({"z": 1}),
        "d": defaultdict(lambda: 0, w=1),
    }  # fmt: skip
    for step in (2, 3):
        store.save(kept | lost, step=step)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    for text, (place, kind) in zip(
        told,
        {"['a']['s']": "Settings", "['b'][0]": "UserDict", "['c']": "mappingproxy", "['d']": "defaultdict"}.items(),
        strict=True,
    ):
        assert f"state{place} is a {kind}, which is stored as a dict" in text
    assert type(store.read("latest")["a"]["s"]) is dict
    into = {"a": {"s": Settings(x=0)}}
    store.load(into, "latest", unread="ignore")
    assert into == {"a": {"s": Settings(x=1)}}
    assert type(into["a"]["s"]) is Settings
