"""Tensors in GPU memory are saved and loaded like tensors in host memory. The tests use both if there is a GPU.

Otherwise, they use tensors in host memory that look like GPU tensors, whose bytes casckpt must not access directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import casckpt
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.frontends.trainer import TrainState
from casckpt.storage.buffers import AlignedBuffer, KeptBuffers
from casckpt.tensors import gpu, memory, staging
from casckpt.tensors.gpu import pin
from casckpt.tensors.memory import Destination, TensorMemory
from casckpt.tensors.staging import Staging
from tests.support.dcp import load, save
from tests.support.saves import cells, same_state, small_folder
from tests.support.tensors import COMPLEX, LAYOUTS, NAMES, conjugated
from tests.support.torch_versions import needs_torch
from tests.support.training import Network, identical

PRETENDED = "as if on a GPU"
DEVICES = ("cpu", PRETENDED, *(("cuda",) if torch.cuda.is_available() else ()))
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != PRETENDED:
        return str(request.param)
    for held in (TensorMemory, Destination):
        monkeypatch.setattr(held, "on_gpu", True)
    monkeypatch.setattr(memory, "tensor_bytes", lambda data: None)
    monkeypatch.setattr(memory, "_Arrays", memory._Tensors)
    monkeypatch.setattr(staging, "pin", lambda buffer: None)
    monkeypatch.setattr(staging, "on_gpu", lambda tensors: True)
    monkeypatch.setattr(gpu, "PINNED", KeptBuffers())
    return "cpu"


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    return small_folder(tmp_path / "store")


def moved(state: Any, device: str) -> Any:
    """Return a state on another device, with the same strides."""
    if isinstance(state, torch.Tensor):
        if state.is_conj() or state.is_neg() or not state.numel():
            return state.to(device)
        storage = torch.empty(0, dtype=torch.uint8).set_(state.untyped_storage()).to(device)
        flat = torch.empty(0, dtype=state.dtype, device=device).set_(storage.untyped_storage())
        return flat.as_strided(state.shape, state.stride(), state.storage_offset())
    return {key: moved(value, device) for key, value in state.items()}


def on_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        plain = state.resolve_conj().resolve_neg()
        return memory.as_bits(plain).cpu().view(plain.dtype)  # not every dtype can be copied
    return {key: on_host(one) for key, one in state.items()}


@contextmanager
def busy(device: str) -> Iterator[None]:
    """Use a stream that is not the default one, and delay its work."""
    if device == "cpu":
        yield
        return
    late: Any = torch.cuda
    with late.stream(late.Stream()):
        late._sleep(200_000_000)
        yield


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_and_layout_is_saved_and_loaded(store: casckpt.Store, device: str, name: str) -> None:
    layouts = {key: make(name, 1) for key, make in LAYOUTS.items()}
    given = layouts | (conjugated(name) if name in COMPLEX else {})
    state = moved(given, device)
    assert all(one.device.type == device for one in state.values())
    store.save(state, run="a", step=1)
    assert same_state(store.read("a@1"), given)
    assert same_state(on_host(store.read("a@1", device=device)), given)
    shared = ("expanded", "expanded scalar", "overlapping")  # whose elements share places
    target = moved({key: make(name, 2) for key, make in LAYOUTS.items() if key not in shared}, device)
    store.load(target, "a@1", strict=False)
    assert same_state(on_host(target), {key: given[key] for key in target})
    assert store.compare(state, "a@1").is_same


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_strided_tensors_in_many_cells_are_loaded(store: casckpt.Store, device: str, parts: int) -> None:
    whole = torch.randn(96, 3, 50)
    cut = [
        casckpt.Shard(
            one.to(device).transpose(0, 2).contiguous().transpose(0, 2),
            global_shape=whole.shape,
            offset=(at, 0, 0),
            shape=tuple(one.shape),
        )
        for at, one in zip(range(0, 96, 96 // parts), whole.chunk(parts), strict=True)
    ]
    for step, shard in enumerate(cut):
        store.save({"w": whole.to(device)}, run="a", step=step)
        into = torch.full_like(shard.data, 7)
        like = casckpt.Shard(into, global_shape=whole.shape, offset=shard.offset, shape=tuple(into.shape))
        store.load({"w": like}, f"a@{step}")
        assert torch.equal(into, shard.data)


def test_a_load_converts_dtypes(store: casckpt.Store, device: str) -> None:
    given = torch.randn(3, 5000)
    store.save({"w": given.bfloat16().to(device)}, run="a", step=1)
    for make in (torch.zeros(3, 5000, device=device), torch.zeros(5000, 3, device=device).t()):
        store.load({"w": make}, "a@1", cast=True)
        assert torch.equal(make.cpu(), given.bfloat16().float())


def test_a_background_save_stores_the_state_at_the_time_of_the_call(store: casckpt.Store, device: str) -> None:
    state = {"w": cells(5).to(device), "t": torch.randn(300, 70, device=device).t(), "o": torch.ones(3)}
    store.warm_up(state)
    for step in range(4):
        with busy(device):
            state["w"].view(torch.uint8).bitwise_xor_(step + 1)
            wanted = {key: one.clone() for key, one in state.items()}
            future = store.save_async(state, run="a", step=step)
            state["w"].view(torch.uint8).bitwise_not_()
            state["t"].add_(1)
        future.result()
        assert same_state(store.read(f"a@{step}"), on_host(wanted))


@pytest.mark.parametrize("state", [{}, {"e": torch.empty(3, 0)}, {"e": torch.empty(0), "n": 1}, {"s": torch.tensor(1)}])
def test_tiny_and_empty_tensors_are_saved_and_loaded(store: casckpt.Store, device: str, state: dict[str, Any]) -> None:
    there = {key: one.to(device) if isinstance(one, torch.Tensor) else one for key, one in state.items()}
    store.warm_up(there)
    store.save_async(there, run="a", step=1).result()
    store.save(there, run="a", step=2)
    for step in (1, 2):
        assert same_state(store.read(f"a@{step}"), state)
        store.load(there, f"a@{step}")


def test_saves_and_loads_wait_for_queued_work_on_streams(store: casckpt.Store, device: str) -> None:
    state, other = {"w": torch.zeros(500_000, device=device)}, torch.full((500_000,), 2.0, device=device)
    with busy(device):
        state["w"].add_(1)
        store.save(state, run="a", step=1)
    assert store.read("a@1")["w"].eq(1).all()
    with busy(device):
        state["w"].copy_(other)
        seen = state["w"].clone()
        store.load(state, "a@1")
        after = state["w"].clone()
    assert seen.cpu().eq(2).all()
    assert after.cpu().eq(1).all()
    with busy(device):
        state["w"].add_(1)
        assert not store.compare(state, "a@1").is_same


def test_an_update_changes_tensors_on_a_gpu(store: casckpt.Store, device: str) -> None:
    state = {"w": cells(6).to(device), "frozen": torch.randn(40, 30, device=device).t()}
    target = {key: torch.zeros_like(one) for key, one in state.items()}
    held = None
    for step in range(5):
        state["w"][step * 1000 : step * 1000 + 5] += 1
        store.save(state, run="a", step=step, compress="always")
        held = store.update(target, f"a@{step}", held=held)
        assert same_state(on_host(target), on_host(state))
    target["w"][5] += 1
    store.update(target, "a@1", held=held, check=True)
    assert same_state(on_host(target), store.read("a@1"))


def test_equal_bytes_are_stored_once_regardless_of_their_device(store: casckpt.Store, device: str) -> None:
    given = torch.randn(200_000)
    store.save({"w": given}, run="a", step=1)
    assert store.save({"w": given.to(device)}, run="b", step=1).stats.bytes_written == 0
    assert store.save({"w": given.to(device)}, run="b", step=2, frozen=["w"]).stats.bytes_written == 0


@pytest.mark.parametrize("fused", [False, True])
def test_training_continues_after_a_load_as_if_uninterrupted(store: casckpt.Store, device: str, fused: bool) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(Network(seed), nn.Dropout(0.5)).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
        optim.zero_grad()
        x = torch.randn(8, next(p for p in model.parameters() if p.dim() == 2).shape[1], device=device)
        model(x).square().sum().backward()
        optim.step()

    with casckpt.Checkpointer(store, run="a") as checkpointer:
        model, optim = made(0)
        step(model, optim)
        checkpointer.save(1, model, optim, TrainState())
        step(model, optim)
        other, again = made(1)
        assert checkpointer.resume(other, again, TrainState())
        step(other, again)
    assert identical(model.state_dict(), other.state_dict())
    assert identical(optim.state_dict(), again.state_dict())
    found = casckpt.unshard_model_state(store, "a@1", device=device)
    assert {one.device.type for one in found.values()} == {device}


@needs_torch("2.9", "no_dist of async_save")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_dcp_saves_and_loads_gpu_tensors(store: casckpt.Store, device: str, asynchronous: bool) -> None:
    state: Any = {"m": {"w": torch.randn(300, 200, device=device), "b": torch.randn(7, 9, device=device).t()}, "n": 3}
    wanted: Any = {"m": on_host(deepcopy(state["m"])), "n": 3}
    writer = StorageWriter(store, run="a", step=1)
    with busy(device):
        state["m"]["w"].add_(1)
        wanted["m"]["w"].add_(1)
        if asynchronous:
            future: Any = async_save(state, storage_writer=writer, no_dist=True)
            future.result()
        else:
            save(state, writer, no_dist=True)
    target: Any = {"m": {key: torch.zeros_like(one) for key, one in state["m"].items()}, "n": 0}
    load(target, StorageReader(store, "a@1"), no_dist=True)
    assert same_state({"m": on_host(target["m"]), "n": target["n"]}, wanted)


def test_memory_for_copies_has_the_required_size_and_is_freed(device: str) -> None:
    arena = Staging()
    for count in (1 << 20, (1 << 20) + 1, 5 << 20, 1000):
        given = torch.randn(count, device=device)
        (copy,) = arena.copy([given])
        assert torch.equal(copy, given.cpu())
        assert copy.is_pinned() is (device == "cuda")
        assert arena.nbytes <= (5 << 20) * 4
    given, plain = torch.randn(64, 33, device=device).t(), torch.ones(3)
    copies = arena.copy([given, plain])
    assert copies[0].is_contiguous()
    assert torch.equal(copies[0], given.cpu())
    assert copies[1].tolist() == [1, 1, 1]


def test_pinned_buffers_can_be_created_and_closed_repeatedly(device: str) -> None:
    for number in range(20):
        with AlignedBuffer((1 << 20) + number) as buffer:
            if device == "cuda":
                pin(buffer)
            data = torch.frombuffer(buffer.view, dtype=torch.uint8)
            assert data.is_pinned() is (device == "cuda")
            data.copy_(torch.ones(buffer.nbytes, dtype=torch.uint8, device=device))
            assert bool(data.all())
            del data
