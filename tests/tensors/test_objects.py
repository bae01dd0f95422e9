"""Objects are plain data. casckpt writes and reads a pickle only with the user's permission."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from casckpt.errors import InvalidInput, Refused
from casckpt.format import plain
from casckpt.format.plain import Tagged
from casckpt.tensors.objects import (
    TORCH_EXTENSIONS,
    decode_object,
    encode_object,
    is_only_torchs,
    refuse_pickle,
    write_archive,
)
from tests.support.exact import same
from tests.support.ids import named


class Thing:
    """An object that can be pickled and is not plain data."""

    def __init__(self, size: int) -> None:
        self.data = b"x" * size


class Parts:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def spill(self, view: memoryview) -> int:
        self.parts.append(bytes(view))
        return len(self.parts) - 1

    def load(self, number: int) -> bytes:
        return self.parts[number]


def test_plain_data_is_not_pickled_even_if_allowed() -> None:
    parts = Parts()
    value = {"dtype": torch.bfloat16, "long": b"x" * 5000}
    for allow_pickle in (False, True):
        data, pickled = encode_object("a", value, allow_pickle, parts.spill)
        assert not pickled
        assert decode_object("a", data, pickled, False, parts.load) == value
    assert len(parts.parts) == 2


def test_the_error_for_a_value_that_is_not_plain_data_names_its_position() -> None:
    with pytest.raises(InvalidInput, match=r"train\.state\['thing'\]\[0\]: a value of type .*Thing") as caught:
        encode_object("train.state", {"thing": [Thing(1)]}, False)
    assert caught.value.key == "train.state"


def test_pickles_must_be_allowed_for_writing_and_reading() -> None:
    parts = Parts()
    data, pickled = encode_object("a", [b"y" * 5000, Thing(6000)], True, parts.spill)
    assert pickled
    assert len(parts.parts) == 1  # the pickle, without remains of the attempt as plain data
    assert len(data) < 100
    with pytest.raises(InvalidInput, match="pass allow_pickle=True"):
        decode_object("a", data, pickled, False, parts.load)
    first, thing = decode_object("a", data, pickled, True, parts.load)
    assert (first, thing.data) == (b"y" * 5000, b"x" * 6000)


def test_a_value_that_cannot_be_pickled_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="is not plain data, and it cannot be pickled") as caught:
        encode_object("hook", lambda: 0, True)
    assert caught.value.key == "hook"


@pytest.mark.parametrize("payload", [1, b"", b"\x80\x05cno.such.module\nx\n.", b"\x80\x05", b"garbage"])
def test_an_invalid_pickle_is_rejected(payload: Any) -> None:
    with pytest.raises(Refused, match="key 'a'"):
        decode_object("a", plain.encode(payload), True, True)


def test_the_error_for_invalid_bytes_names_the_key() -> None:
    with pytest.raises(Refused, match="key 'a'") as caught:
        decode_object("a", b"\xc1", False, False)
    assert caught.value.key == "a"


def test_data_of_a_later_version_is_rejected() -> None:
    data = plain.encode(Thing(1), extensions=[plain.extension("later", Thing, lambda thing: 1, Thing)])
    with pytest.raises(Refused, match="does not know plain data of kind 'later'"):
        decode_object("a", data, False, False)


def test_the_check_of_an_archive_with_a_changed_byte_never_raises_an_error() -> None:
    """For example, zipfile does not raise BadZipFile if the archive requires a later version of zip."""
    archive = write_archive([1])
    assert is_only_torchs(archive)
    found = {is_only_torchs(archive[:at] + b"\xff" + archive[at + 1 :]) for at in range(len(archive))}
    assert found == {True, False}


def test_a_pickle_with_external_bytes_is_rejected_without_reading_it() -> None:
    """Only a reader that may unpickle reads these bytes. torch's restricted unpickler does not use them."""
    harmless = plain.encode(write_archive({"x": torch.ones(2)}))
    refuse_pickle("a", harmless, 0)
    for data, parts in ((harmless, 1), (plain.encode(b"\x80\x02N."), 0)):
        with pytest.raises(InvalidInput, match=r"a is stored as a pickle.*allow_pickle=True"):
            refuse_pickle("a", data, parts)


VALUES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex32,
    torch.Size([2, 0, 3]),
    torch.Size([]),
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
]


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_a_value_decodes_exactly(value: Any) -> None:
    data = plain.encode({"x": [value]}, extensions=TORCH_EXTENSIONS)
    assert same(plain.decode(data, extensions=TORCH_EXTENSIONS), {"x": [value]})


def test_no_torch_type_uses_a_tag_of_plain_data_itself() -> None:
    assert all(codec.tag.startswith("torch.") for codec in TORCH_EXTENSIONS)


def test_every_torch_dtype_decodes_to_itself() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    data = plain.encode(dtypes, extensions=TORCH_EXTENSIONS)
    assert plain.decode(data, extensions=TORCH_EXTENSIONS) == dtypes


def test_torch_types_are_displayed_without_importing_torch() -> None:
    data = plain.encode(VALUES[:1] + VALUES[3:4], extensions=TORCH_EXTENSIONS)
    assert plain.decode(data) == [Tagged("torch.dtype", "bfloat16"), Tagged("torch.Size", (2, 0, 3))]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.Generator(), r"a torch.Generator cannot be stored as plain data; store its get_state\(\)"),
        ({torch.zeros(1)}, "a tensor cannot be stored"),
        ([torch.nn.Parameter(torch.zeros(1))], "a parameter cannot be stored"),
        (torch.nn.Linear(1, 1), r"store its state_dict\(\)$"),
    ],
)
def test_errors_for_rejected_values_give_advice(value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plain.encode(value, extensions=TORCH_EXTENSIONS)


@pytest.mark.parametrize(
    "wire",
    [
        ["torch.dtype", "Tensor"],
        ["torch.dtype", 1],
        ["torch.dtype"],
        ["torch.Size", ["tuple", -1]],
        ["torch.Size", ["tuple", 2**63]],
        ["torch.Size", 3],
        ["torch.device", "cpu"],
        ["torch.device", ["tuple", "no such", None]],
        ["torch.device", ["tuple", 3, None]],
        ["torch.device", ["tuple", "cuda", 0, 1]],
        ["torch.device", ["tuple", "cuda", -1]],
        ["torch.device", ["tuple", "cuda", 128]],
        ["torch.device", ["tuple", "cuda", True]],
        ["torch.device", ["tuple", "cuda", 10**6]],
        ["torch.Generator", 1],
        ["torch.Tensor", 1],
    ],
    ids=named,
)
def test_hostile_payloads_of_torch_types_are_rejected(wire: Any) -> None:
    with pytest.raises(Refused):
        plain.decode(msgspec.msgpack.encode(wire), extensions=TORCH_EXTENSIONS)
