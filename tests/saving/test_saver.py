"""Background saves: they save the state at the time of the call, in order, and their futures hold their errors."""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import Conflict, InvalidInput, StorageError
from casckpt.store.store import Store
from casckpt.tensors import staging
from casckpt.tensors.memory import copy_bytes
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.ranks import outcome_of
from tests.support.repositories import memory
from tests.support.saves import cells, same_state, small, steps
from tests.support.tensors import LAYOUTS, NAMES

SECONDS = 60  # a hung save fails the test


class Held:
    """A storage whose next put of a blob waits until it is released."""

    def __init__(self) -> None:
        self.faulty = FaultyStore(memory())
        self.store = small(self.faulty)
        self.reached, self.go = threading.Event(), threading.Event()
        self.faulty.inject(call_first("put", self._wait, key="objects/*.safetensors"))

    def _wait(self, _: Call) -> None:
        self.reached.set()
        assert self.go.wait(SECONDS)


def test_metrics_can_change_after_the_call_returns() -> None:
    """A loop refills the same dict at each step."""
    held = Held()
    metrics: dict[str, Any] = {"loss": 1.0}
    metadata: dict[str, Any] = {"data": {"epoch": 1}}
    future = held.store.save_async({"w": cells(1)}, step=1, metrics=metrics, metadata=metadata)
    assert held.reached.wait(SECONDS)
    metrics["loss"] = metadata["data"]["epoch"] = 2
    held.go.set()
    ckpt = future.result(SECONDS)
    assert (ckpt.metrics, ckpt.metadata) == ({"loss": 1.0}, {"data": {"epoch": 1}})


def test_a_loss_tensor_is_saved_without_its_graph() -> None:
    store, weight = small(), torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    graph = weakref.ref(loss)
    figures: dict[str, Any] = {"loss": loss, "lr": np.float32(0.5)}
    future = store.save_async({"w": cells(1)}, step=1, metrics=figures, metadata=figures | {"data": Path("a/b")})
    figures.clear()
    del loss
    assert graph() is None
    ckpt = future.result(SECONDS)
    assert ckpt.metrics == {"loss": 3.0, "lr": 0.5}
    assert ckpt.metadata == {"loss": 3.0, "lr": 0.5, "data": "a/b"}


def test_the_state_can_change_after_the_call_returns() -> None:
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


def test_a_background_save_does_not_keep_the_state_alive() -> None:
    held = Held()
    state = {"w": cells(5), "p": torch.nn.Parameter(cells(1 / 4)), "t": cells(4).view(64, -1).t()}
    originals = [weakref.ref(data) for data in state.values()]
    future = held.store.save_async(state, step=1)
    assert held.reached.wait(SECONDS)
    state.clear()
    alive = [ref() is not None for ref in originals]
    held.go.set()
    future.result(SECONDS)
    assert not any(alive)


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


def test_conjugated_views_are_copied_by_value() -> None:
    store = small()
    data = torch.randn(4, 5, dtype=torch.complex64)
    state = {"conj": data.conj(), "neg": data.conj().imag, "t": data.t().conj()}
    want = {key: tensor.resolve_conj().resolve_neg().clone() for key, tensor in state.items()}
    future = store.save_async(state, step=1)
    data.zero_()
    future.result(SECONDS)
    assert same_state(store.read("default@1"), want)


def test_a_second_save_waits_for_the_first() -> None:
    held = Held()
    weight = cells(2)
    first = held.store.save_async({"w": weight}, step=0)
    assert held.reached.wait(SECONDS)
    later: list[int] = []

    def save() -> None:
        future = held.store.save_async({"w": weight}, step=1)
        assert first.done()
        later.append(future.result(SECONDS).step)

    second = threading.Thread(target=save)
    second.start()
    assert not first.done()
    assert steps(held.store) == []
    held.go.set()
    second.join(SECONDS)
    assert later == [1]
    assert steps(held.store) == [("default", 0), ("default", 1)]


def test_a_future_raises_its_error_and_the_next_save_succeeds() -> None:
    held = Held()
    held.go.set()
    held.faulty.inject(fail_before("put", key="objects/*.manifest"))
    first = held.store.save_async({"w": cells(1)}, step=1)
    with pytest.raises(StorageError, match="injected"):
        first.result(SECONDS)
    assert steps(held.store) == []
    second = held.store.save_async({"w": cells(1)}, step=1)
    assert second.result(SECONDS).step == 1
    third = held.store.save_async({"w": cells(1)}, step=1)
    with pytest.raises(Conflict, match="default@1 already exists"):
        third.result(SECONDS)
    assert steps(held.store) == [("default", 1)]


def test_the_next_call_raises_an_unretrieved_failure_once() -> None:
    held = Held()
    held.go.set()
    held.faulty.inject(fail_before("put", key="objects/*.manifest"))
    held.store.save_async({"w": cells(1)}, step=1)
    held.store.warm_up({"w": cells(1)})
    with pytest.raises(StorageError, match="injected"):
        held.store.save_async({"w": cells(1)}, step=2)
    assert steps(held.store) == []
    assert held.store.save_async({"w": cells(1)}, step=2).result(SECONDS).step == 2


def test_the_next_call_does_not_raise_an_awaited_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for the future may not have woken up yet when the next call checks it."""
    held = Held()
    held.faulty.inject(fail_before("put", key="objects/*.manifest"))
    future = held.store.save_async({"w": cells(1)}, step=1)
    waiting, wake = threading.Event(), threading.Event()
    result, errors = Future.result, []

    def slow(self: Future[Any], timeout: float | None = None) -> Any:
        if self is future:  # a bucket client waits for its own futures
            waiting.set()
            assert wake.wait(SECONDS)
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", slow)

    def watch() -> None:
        try:
            future.result()
        except StorageError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    assert waiting.wait(SECONDS)
    held.go.set()
    second = held.store.save_async({"w": cells(1)}, step=2)
    wake.set()
    thread.join(SECONDS)
    assert len(errors) == 1
    assert second.exception(SECONDS) is None


def test_the_calling_thread_saves_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call does not wait for a thread that never started."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = small()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert store.save_async({"w": cells(1)}, step=1).done()
        assert isinstance(store.save_async({"w": cells(1)}, step=1).exception(), Conflict)
    assert store.save_async({"w": cells(1)}, step=3).result(SECONDS).step == 3
    assert steps(store) == [("default", 1), ("default", 3)]


def test_a_background_save_cannot_be_cancelled() -> None:
    held = Held()
    future = held.store.save_async({"w": cells(1)}, step=1)
    assert not future.cancel()
    held.go.set()
    assert future.result(SECONDS).step == 1


@pytest.mark.in_memory
def test_a_hundred_saves_use_one_copy_and_leave_no_thread_behind() -> None:
    store = small()
    weight = cells(4)
    store.warm_up({"w": weight, "v": weight})
    background = store._saver.get().background
    memory, threads = background.staging._arena.data_ptr(), threading.active_count() + 1  # plus the thread of a save
    for step in range(100):
        weight += 1
        store.save_async({"w": weight, "v": weight}, step=step).result(SECONDS)
    assert background.staging._arena.data_ptr() == memory
    assert weight.nbytes <= background.staging.nbytes < 1.1 * weight.nbytes  # a tensor that occurs twice is copied once
    assert threading.active_count() <= threads
    assert torch.equal(store.read("default@99")["w"], weight)


@pytest.mark.parametrize(
    ("state", "arguments"),
    [
        ({"w": torch.zeros(2, device="meta")}, {}),
        ({"w": object()}, {}),
        ([1], {}),
        ({}, {"step": -1}),
        ({}, {"run": ""}),
        ({}, {"attachments": {"../x": b""}}),
    ],
    ids=["meta", "object", "list", "step", "run", "attachment"],
)
def test_an_invalid_state_is_rejected_before_anything_is_copied(state: Any, arguments: dict[str, Any]) -> None:
    store = small()
    with pytest.raises(InvalidInput):
        store.save_async(state, **({"step": 1} | arguments))
    assert staged(store) == 0
    assert store.save_async({"w": cells(1)}, step=1).result(SECONDS).step == 1


def test_a_background_save_can_run_concurrently_with_a_foreground_save() -> None:
    held = Held()
    future = held.store.save_async({"w": cells(3)}, run="a", step=1)
    assert held.reached.wait(SECONDS)
    held.store.save({"w": cells(3)}, run="b", step=1)
    assert steps(held.store) == [("b", 1)]
    held.go.set()
    future.result(SECONDS)
    assert sorted(steps(held.store)) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("name", ["loop", "x" * 300])
def test_a_background_save_raises_immediately_if_its_path_can_never_be_a_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    store = casckpt.open(tmp_path / name)
    with pytest.raises(StorageError, match="cannot look at"):
        store.save_async({"w": torch.ones(3)}, step=1)
    with pytest.raises(StorageError, match="cannot look at"):
        store.check({"w": torch.ones(3)})


# the memory for copies


def limited(nbytes: int, storage: FaultyStore | None = None) -> Store:
    store = small(storage)
    store.repository.staging_bytes = nbytes
    return store


def waiting(go: threading.Event) -> Callable[[Call], None]:
    def wait(_: Call) -> None:
        assert go.wait(SECONDS)

    return wait


def staged(store: Store) -> int:
    return store._saver.get().background.staging.nbytes


def test_a_state_whose_copy_does_not_fit_is_saved_before_the_call_returns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "casckpt")
    store, weight = limited(cells(4).nbytes - 1), cells(4)  # one tensor that is larger than the limit
    for step in (1, 2):
        weight += 1
        future = store.save_async({"w": weight}, step=step)
        assert future.done()
        assert torch.equal(store.read(f"default@{step}")["w"], weight)
    assert staged(store) == 0
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"staging_bytes={weight.nbytes} or more" in warning
    assert len([record for record in caplog.records if "ran in the foreground for" in record.message]) == 2


def test_a_signal_handler_cannot_save_in_the_middle_of_a_foreground_save() -> None:
    storage, errors = FaultyStore(memory()), list[Any]()
    store = limited(0, storage)

    def handle(*_: object) -> None:
        errors.append(outcome_of(lambda: store.save_async({"w": cells(1)}, step=2)))
        errors.append(outcome_of(lambda: store.warm_up({"w": cells(1)})))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        storage.inject(call_first("put", lambda _: signal.raise_signal(signal.SIGUSR1), key="*.manifest"))
        assert store.save_async({"w": cells(1)}, step=1).done()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [type(error) for error in errors] == [Conflict] * 2
    assert store.save_async({"w": cells(1)}, step=3).result(SECONDS).step == 3
    assert steps(store) == [("default", 1), ("default", 3)]


def test_tensors_that_share_memory_need_room_for_one_copy() -> None:
    weight, storage = cells(4), FaultyStore(memory())
    store, go = limited(weight.nbytes, storage), threading.Event()
    storage.inject(call_first("put", waiting(go), key="objects/*"))
    future = store.save_async({"w": weight, "v": weight}, step=1)
    assert not future.done()
    go.set()
    assert future.result(SECONDS).step == 1
    assert staged(store) == weight.nbytes


def test_the_memory_is_freed_if_the_next_copy_does_not_fit() -> None:
    store = limited(cells(4).nbytes)
    store.save_async({"w": cells(3)}, step=1).result(SECONDS)
    assert store.save_async({"w": cells(5)}, step=2).done()
    assert staged(store) == 0


def test_warm_up_does_not_exceed_the_limit() -> None:
    store = limited(cells(4).nbytes)
    store.warm_up({"w": cells(5)})
    assert staged(store) == 0
    store.warm_up({"w": cells(4)})
    assert staged(store) == cells(4).nbytes


def test_an_exception_of_a_signal_handler_in_the_copy_comes_out_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def ring(*_: object) -> None:
        raise TimeoutError("the time is up")

    store = small()
    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "copy", ring)
        with pytest.raises(TimeoutError):
            store.save_async({"w": cells(1)}, step=1)
    assert store.save_async({"w": cells(1)}, step=1).result(SECONDS).step == 1


def test_ctrl_c_ends_a_save_in_the_foreground() -> None:
    def interrupt(_: Call) -> None:
        raise KeyboardInterrupt

    storage = FaultyStore(memory())
    store = limited(0, storage)
    storage.inject(call_first("put", interrupt, key="objects/*.manifest"))
    with pytest.raises(KeyboardInterrupt):
        store.save_async({"w": cells(1)}, step=1)
    assert steps(store) == []
    assert store.save_async({"w": cells(1)}, step=1).result(SECONDS).step == 1


def test_the_copy_keeps_to_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = copy_bytes

    def noted(target: memoryview, source: memoryview) -> None:
        copied.append(threading.get_ident())
        copy(target, source)

    monkeypatch.setattr(staging, "copy_bytes", noted)
    monkeypatch.setattr(staging, "_PIECE", 1 << 10)
    state = {"w": torch.randn(1 << 20)}
    saved = small(memory()).save_async(state, step=1, threads=1).result(SECONDS)
    assert set(copied) == {threading.get_ident()}
    assert len(copied) == state["w"].nbytes >> 10
    assert saved.step == 1
