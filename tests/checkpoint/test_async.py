"""Saves in the background: of the state as it was, in order, with their errors in their futures."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import Conflict, InvalidInput, StorageError
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.repositories import memory
from tests.support.saves import cells, same_state, small, steps
from tests.support.tensors import LAYOUTS, NAMES

SECONDS = 60  # a hung save fails the test


class Held:
    """A storage whose next put of a blob waits until it is let go."""

    def __init__(self) -> None:
        self.faulty = FaultyStore(memory())
        self.store = small(self.faulty)
        self.reached, self.go = threading.Event(), threading.Event()
        self.faulty.inject(call_first("put", self._wait, key="objects/*.safetensors"))

    def _wait(self, _: Call) -> None:
        self.reached.set()
        assert self.go.wait(SECONDS)


def test_the_state_may_change_once_the_call_returned() -> None:
    held = Held()
    weight, array, items = cells(5), np.arange(5000.0), [1, 2]
    state: dict[str, Any] = {
        "w": weight, "t": weight.view(64, -1).t(), "a": array, "bytes": bytearray(b"x" * 5000).decode().encode(),
        "items": items, "n": torch.tensor(3), "nested": OrderedDict([("p", torch.nn.Parameter(torch.ones(3)))]),
    }  # fmt: skip
    want = {
        "w": weight.clone(), "t": weight.view(64, -1).t().clone(), "a": array.copy(), "bytes": b"x" * 5000,
        "items": [1, 2], "n": torch.tensor(3), "nested": OrderedDict([("p", torch.ones(3))]),
    }  # fmt: skip
    future = held.store.save_async(state, step=1)
    assert held.reached.wait(SECONDS)
    weight.zero_()
    array[:] = 0
    items.append(3)
    state["n"].fill_(9)
    state["nested"]["p"].data.zero_()
    state.clear()
    held.go.set()
    ckpt = future.result(SECONDS)
    assert (ckpt.run, ckpt.step) == ("default", 1)
    assert same_state(held.store.read("default@1"), want)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_and_layout_is_copied() -> None:
    held = Held()
    state = {name: {layout: make(name, 1) for layout, make in LAYOUTS.items()} for name in NAMES}
    want = {name: {layout: make(name, 1) for layout, make in LAYOUTS.items()} for name in NAMES}
    future = held.store.save_async(state, step=1)
    assert held.reached.wait(SECONDS)
    for group in state.values():
        for layout, tensor in group.items():
            if layout != "empty":
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()
    held.go.set()
    future.result(SECONDS)
    assert same_state(held.store.read("default@1"), want)


def test_conjugated_views_are_copied_as_what_they_show() -> None:
    store = small()
    data = torch.randn(4, 5, dtype=torch.complex64)
    state = {"conj": data.conj(), "neg": data.conj().imag, "t": data.t().conj()}
    want = {key: tensor.resolve_conj().resolve_neg().clone() for key, tensor in state.items()}
    future = store.save_async(state, step=1)
    data.zero_()
    future.result(SECONDS)
    assert same_state(store.read("default@1"), want)


def test_saves_run_one_after_the_other_in_order() -> None:
    held = Held()
    futures = [held.store.save_async({"n": torch.tensor(step), "w": cells(2)}, step=step) for step in range(5)]
    assert held.reached.wait(SECONDS)
    assert not any(future.done() for future in futures)
    assert steps(held.store) == []
    held.go.set()
    assert [future.result(SECONDS).step for future in futures] == list(range(5))
    assert steps(held.store) == [("default", step) for step in range(5)]
    assert int(held.store.read("default@latest")["n"]) == 4


def test_what_fails_shows_in_its_future_and_the_next_save_works() -> None:
    held = Held()
    held.faulty.inject(fail_before("put", key="objects/*.manifest"))
    first = held.store.save_async({"w": cells(1)}, step=1)
    second = held.store.save_async({"w": cells(1)}, step=2)
    third = held.store.save_async({"w": cells(1)}, step=2)
    held.go.set()
    with pytest.raises(StorageError, match="injected"):
        first.result(SECONDS)
    assert second.result(SECONDS).step == 2
    with pytest.raises(Conflict, match="default@2 exists already"):
        third.result(SECONDS)
    assert steps(held.store) == [("default", 2)]


@pytest.mark.parametrize(
    ("state", "arguments"),
    [
        ({"w": torch.zeros(2, device="meta")}, {}),
        ({"w": object()}, {}),
        ([1], {}),
        ({}, {"step": -1}),
        ({}, {"run": ""}),
        ({}, {"metadata": {"x": object()}}),
        ({}, {"attachments": {"../x": b""}}),
    ],
    ids=["meta", "object", "list", "step", "run", "metadata", "attachment"],
)
def test_what_cannot_be_saved_shows_in_the_future_too(state: Any, arguments: dict[str, Any]) -> None:
    store = small()
    future = store.save_async(state, **({"step": 1} | arguments))
    with pytest.raises(InvalidInput):
        future.result(SECONDS)
    assert store.save_async({"w": cells(1)}, step=1).result(SECONDS).step == 1


def test_a_background_save_and_one_in_the_foreground() -> None:
    held = Held()
    future = held.store.save_async({"w": cells(3)}, run="a", step=1)
    assert held.reached.wait(SECONDS)
    held.store.save({"w": cells(3)}, run="b", step=1)
    assert steps(held.store) == [("b", 1)]
    held.go.set()
    future.result(SECONDS)
    assert sorted(steps(held.store)) == [("a", 1), ("b", 1)]
