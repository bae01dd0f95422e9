"""Saved and loaded values do not depend on torch's modes in the calling program."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import casckpt
from casckpt.errors import InvalidInput
from casckpt.ranks.ranks import open_ranks
from tests.support.ranks import Pool
from tests.support.saves import same_state, small

FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_strided", "scalar_tensor"}
PACKAGE = Path(casckpt.__file__).parent


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "default_device": lambda: default_device("meta"),
    "default_dtype": lambda: default_dtype(torch.bfloat16),
}


def state(factor: float) -> dict[str, Any]:
    return {
        "w": torch.arange(300_000, dtype=torch.float32) * factor,
        "t": torch.arange(600, dtype=torch.float32).reshape(20, 30).t() * factor,
        "c": (torch.ones(4, dtype=torch.complex64) * factor).conj(),
        "p": torch.nn.Parameter(torch.ones(7, dtype=torch.float32) * factor),
        "e": torch.empty(0, dtype=torch.float32),
        "n": 3,
    }


def wide(factor: float) -> dict[str, Any]:
    """Return the same values in different dtypes, so that torch has to convert them."""
    found = state(factor)
    return {key: value.to(torch.float64) if key in "wt" else value for key, value in found.items()}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", MODES)
def test_saves_and_loads_have_the_same_result_in_every_mode(name: str, threads: int) -> None:
    store, mode = small(), MODES[name]
    one, two, here, cast = state(1), state(2), state(0), wide(0)
    with mode():
        store.save(one, step=1, threads=threads)
        future = store.save_async(two, step=2, threads=threads)
        store.load(here, "default@1", threads=threads)
        store.load(cast, "default@1", threads=threads, cast=True)
        read = store.read(future.result(), threads=threads)
    assert same_state(read, two)
    assert same_state(here, one)
    assert same_state(cast, wide(1))
    store.save_async(one, step=3).result()  # into memory that was allocated in that mode
    assert same_state(store.read("default@3"), one)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("template", [state, wide])
def test_inference_mode_tensors_are_filled_by_any_thread(
    template: Callable[[float], dict[str, Any]], threads: int
) -> None:
    store = small()
    store.save(state(1), step=1)
    with torch.inference_mode():
        here, there = template(0), template(0)
        store.load(here, "default@1", threads=threads, cast=True)
    store.load(there, "default@1", threads=threads, cast=True)
    for found in (here, there):
        assert same_state(found, template(1))


@pytest.mark.parametrize("cast", [False, True])
def test_inference_mode_tensors_are_updated(cast: bool) -> None:
    store = small()
    one, two = state(1), state(2)
    store.save(one, step=1, compress="always")
    store.save(two, step=2, compress="always")
    with torch.inference_mode():
        here = (wide if cast else state)(0)
    held = store.load(here, "default@1", cast=cast)
    store.update(here, "default@2", held=held, cast=cast)
    assert same_state(here, (wide if cast else state)(2))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_the_error_explains_a_failed_allocation_by_torch() -> None:
    store, here = small(), {"w": torch.zeros(5)}
    store.save({"w": torch.ones(5)}, step=1)

    with FakeTensorMode(allow_non_fake_inputs=True):
        store.load(here, "default@1")  # `here` has memory
        with pytest.raises(InvalidInput, match="FakeTensorMode"):
            store.read("default@1")
    assert torch.equal(here["w"], torch.ones(5))


def exchange_long_messages(rank: int, size: int) -> Any:
    with default_device("meta"):
        return open_ranks().exchange(lambda: bytes([rank]) * 100_000, lambda values: [len(v) for v in values])


def test_exchanges_work_with_any_default_device(ranks: Pool) -> None:
    assert ranks.run(2, exchange_long_messages) == [100_000] * 2


def test_every_call_that_creates_a_tensor_names_its_device() -> None:
    """Otherwise, the caller's default device applies, such as a GPU after ``torch.set_default_device("cuda")``."""
    found = {path.relative_to(PACKAGE).as_posix(): without_a_device(path) for path in PACKAGE.rglob("*.py")}
    assert {path: calls for path, calls in found.items() if calls} == {}


def without_a_device(path: Path) -> list[str]:
    """Return the calls in a module that create a tensor without specifying a device."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = [node for node in calls if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch"]
    return [
        ast.unparse(node)
        for node in made
        if isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        and all(keyword.arg != "device" for keyword in node.keywords)
    ]  # fmt: skip
