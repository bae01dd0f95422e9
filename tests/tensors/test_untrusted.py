"""A hostile pickle cannot run code, end the process, or reach values outside."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from casckpt.errors import Damaged, Refused
from casckpt.tensors.untrusted import MISREAD, BoundedUnpickler, misread
from tests.support.fuzz import Canary, sung

HERE = __name__


@dataclass(eq=True, frozen=True)
class Known:
    name: Any = ""


NAMES = {(HERE, "Known"): Known, ("torch", "Size"): torch.Size}


def load(data: bytes, **options: Any) -> Any:
    return BoundedUnpickler(data, NAMES, **options).load()


def test_pickles_of_known_types_are_read_without_running_code() -> None:
    value = {"a": [Known("x"), torch.Size([2, 3])], Known("y"): {1, 2}, (1, "b"): None, frozenset([3]): b"z" * 300}
    for protocol in range(6):
        assert load(pickle.dumps({"a": 1, "b": [1.5, None]}, protocol)) == {"a": 1, "b": [1.5, None]}
    for protocol in (4, 5):
        assert load(pickle.dumps(value, protocol)) == value
    sung.clear()
    for protocol in range(6):
        with pytest.raises(pickle.UnpicklingError, match=r"it contains tests\.support\.fuzz\.sing"):
            load(pickle.dumps([Canary()], protocol))
    assert sung == []
    assert load(pickle.dumps([Canary()]), anything=True) == ["run"]


def nested(depth: int) -> bytes:
    return b"\x80\x02}" + b")" + b"\x85" * depth + b"Ns."


def doubled(depth: int) -> bytes:
    return b"\x80\x02}" + b")" + b"2\x86" * depth + b"Ns."


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"N", b"\x80\x02R.", b"\x80\x02b.", b"s.", b"u.", b"\x90.", b"\x91.", b"\xff.",
        b"\x80\x05\x96" + b"\xff" * 6 + b"\0\0.",  # a bytearray of 256 TiB
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
        b"\x80\x04\x8e" + b"\xff" * 6 + b"\0\0.",
        nested(200_000), doubled(100),  # their hash overflows the stack, or takes forever
        b"\x80\x04\x8f(" + b")" + b"2\x86" * 100 + b"\x90.", b"(" + b")" + b"2\x86" * 100 + b"\x91.",
        b"\x80\x02}(" + b")" + b"2\x86" * 100 + b"Nu.",
        f"\x80\x02c{HERE}\nKnown\nN}}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xs\x86b.".encode("latin-1"),  # a class state
    ],
)  # fmt: skip
def test_a_hostile_pickle_fails_immediately(data: bytes) -> None:
    with pytest.raises(MISREAD):
        load(data)
    assert Known().name == ""


def test_a_large_memo_index_does_not_allocate_memory() -> None:
    assert load(b"\x80\x02Nr\xff\xff\xff\x7f.") is None  # 16 GiB, for the unpickler in C


def test_reader_errors_are_converted_to_an_error_that_names_the_source() -> None:
    for error in (IndexError(), AssertionError("x"), MemoryError(), RecursionError("deep"), OverflowError("far")):
        with pytest.raises(Refused, match=rf"the file: {type(error).__name__}") as caught, misread(_refused):
            raise error
        assert caught.value.__cause__ is error
    with pytest.raises(Damaged), misread(_refused):
        raise Damaged("ours")
    with pytest.raises(KeyboardInterrupt), misread(_refused):
        raise KeyboardInterrupt


def _refused(why: str) -> Refused:
    return Refused(f"the file: {why}")
