"""common.pt: the types that torch's restricted unpickler accepts, and the state of the process afterwards."""

from __future__ import annotations

import enum
import io
import threading
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.serialization import add_safe_globals, get_safe_globals, safe_globals

from casckpt.frontends.megatron import CheckpointingException, common
from casckpt.tensors.objects import write_archive


class Color(enum.Enum):
    """Not plain data."""

    RED = 1


ARGS = {"args": Namespace(lr=0.1), "iteration": 3}


@pytest.fixture
def registered() -> Iterator[None]:
    """Register `Color`, as in a process that has imported Megatron-core."""
    before = Namespace in get_safe_globals()
    add_safe_globals([Namespace])
    yield
    if not before:
        with safe_globals([Namespace]):
            pass


@pytest.mark.usefixtures("registered")
def test_globals_registered_by_the_user_remain_registered() -> None:
    assert common.read(write_archive(ARGS), "a@1", allow_pickle=False) == ARGS
    assert Namespace in get_safe_globals()
    assert torch.load(io.BytesIO(write_archive(ARGS)), weights_only=True) == ARGS


def test_globals_registered_for_a_load_are_removed() -> None:
    before = get_safe_globals()
    assert common.read(write_archive(ARGS), "a@1", allow_pickle=False) == ARGS
    with pytest.raises(CheckpointingException, match="needs to be unpickled"):
        common.read(write_archive({"odd": Color.RED}), "a@1", allow_pickle=False)
    assert set(get_safe_globals()) == set(before)


def test_a_thread_does_not_remove_globals_that_another_thread_needs() -> None:
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(40):
                common.read(write_archive(ARGS), "a@1", allow_pickle=False)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test is to see it
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.usefixtures("registered")
def test_the_error_names_the_classes_to_register() -> None:
    data = write_archive({**ARGS, "color": Color.RED})
    name = f"{Color.__module__}.Color"
    assert common.classes_to_register(data) == [name]
    dtype: Any = (torch.uint8, "torch.uint8")  # as torchao registers some
    with safe_globals([Color, dtype]):
        assert common.classes_to_register(data) == [name]
    assert common.classes_to_register(write_archive(ARGS)) == []
