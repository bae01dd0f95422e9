"""Advice about values, metadata and rules."""

from __future__ import annotations

import dataclasses
import io
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import TZPATH, ZoneInfo

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput
from casckpt.plan.retention import thinning_of
from tests.support.hints import Messages, follows

Store = casckpt.Store


@dataclasses.dataclass
class Settings:
    width: int = 3


class Pair(NamedTuple):
    one: int
    other: int


class Scheduler:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


def refused(store: Store, messages: Messages, value: object) -> Any:
    """Return the error for a value. With the permission that it names, casckpt stores the value."""
    with messages.error(InvalidInput) as advice:
        store.save({"x": value}, run="a", step=1)
    store.save({"x": value}, run="pickled", step=1, **advice.argument("allow_pickle"))
    assert store.read("pickled@1", allow_pickle=True)["x"].__class__ is value.__class__
    return advice


@follows("format/plain.py:_Encoder._refusal", "or pass allow_pickle=True")
@follows("format/plain.py:_unfit", "store dataclasses.asdict() of it")
def test_a_dataclass_can_be_stored_as_a_dict(store: Store, messages: Messages) -> None:
    refused(store, messages, Settings()).says("store dataclasses.asdict() of it")
    store.save({"x": dataclasses.asdict(Settings())}, run="a", step=1)
    assert store.read("a@1") == {"x": {"width": 3}}


@follows("format/plain.py:_unfit", "store tuple() or ._asdict() of it")
def test_a_named_tuple_can_be_stored_as_its_values(store: Store, messages: Messages) -> None:
    refused(store, messages, Pair(1, 2)).says("store tuple() or ._asdict() of it")
    store.save({"x": tuple(Pair(1, 2)), "y": Pair(1, 2)._asdict()}, run="a", step=1)
    assert store.read("a@1") == {"x": (1, 2), "y": {"one": 1, "other": 2}}


@follows("format/plain.py:_unfit", "store its state_dict()")
def test_an_object_can_be_stored_as_its_state_dict(store: Store, messages: Messages) -> None:
    with messages.error(InvalidInput) as advice:
        store.save({"x": deque([Scheduler()])}, run="a", step=1)
    advice.says("store its state_dict()")
    assert "allow_pickle" not in advice.message  # the copy in a pickle would not belong to the program's optimizer
    store.save({"x": deque([Scheduler().state_dict()])}, run="a", step=1)
    assert store.read("a@1") == {"x": deque([{"step": 0}])}


@follows("format/plain_codecs.py:_split_zone", "use ZoneInfo(key)")
def test_a_time_zone_can_be_stored_as_its_name(store: Store, messages: Messages) -> None:
    nameless = ZoneInfo.from_file(io.BytesIO(zone_file().read_bytes()))
    with messages.error(InvalidInput) as advice:
        store.save({"zone": nameless}, run="a", step=1)
    advice.says("use ZoneInfo(key)")
    store.save({"zone": ZoneInfo("UTC")}, run="a", step=1)
    assert store.read("a@1") == {"zone": ZoneInfo("UTC")}


def zone_file() -> Path:
    """Return the time zone file of this machine, or of the package tzdata."""
    for folder in TZPATH:
        if Path(folder, "UTC").is_file():
            return Path(folder, "UTC")
    tzdata = pytest.importorskip("tzdata.zoneinfo")
    return Path(tzdata.__file__).with_name("UTC")


# rules


@follows("plan/retention.py:thinning_of", "also pass keep_last=1 or a different rule")
def test_a_thinning_rule_names_the_checkpoints_to_keep_complete(saved: Store, messages: Messages) -> None:
    rule: dict[str, Any] = {"drop": ["b"]}
    saved.save({"w": torch.ones(2), "b": torch.ones(1)}, run="a", step=2)
    with messages.error(InvalidInput) as advice:
        thinning_of(rule)
    thinned = saved.thin_now("a", thinning_of(rule | advice.argument("keep_last")))
    assert [one.step for one in thinned] == [1]


@follows("plan/retention.py:runs_without", "save with metrics={...}, or omit this rule")
def test_the_best_checkpoints_can_be_kept_by_a_metric_that_was_saved(store: Store, messages: Messages) -> None:
    store.save({"x": 1}, run="a", step=1)
    store.save({"x": 2}, run="a", step=2)
    with messages.error(InvalidInput) as advice:
        store.gc(keep_best="loss:1")
    advice.says("save with metrics={...}")
    for step in (3, 4, 5):
        store.save({"x": step}, run="a", step=step, metrics={"loss": step})
    assert [one.step for one in store.gc(keep_best="loss:1").forgotten] == [1, 2, 4]
    advice.says("omit this rule")
    assert store.gc().forgotten == ()
