from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.format import dtypes
from casckpt.frontends.interchange.safetensors.files import (
    NAMES,
    TensorHeader,
    encode_header,
    encode_index,
    order,
    read_header,
    read_index,
)


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_casckpt_writes_the_same_header_as_the_library(tmp_path: Path) -> None:
    state = {"b": torch.ones(3, dtype=torch.bool), "w": torch.zeros(2, 3), "é": torch.zeros(()), "n": torch.zeros(0, 4)}
    safetensors.torch.save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    written = (tmp_path / "a.safetensors").read_bytes()
    found = read_header(tmp_path / "a.safetensors")
    assert {(one.key, one.dtype, one.shape) for one in found.tensors} == {
        ("b", "bool", (3,)), ("w", "float32", (2, 3)), ("é", "float32", ()), ("n", "float32", (0, 4))
    }  # fmt: skip
    assert found.metadata == {"format": "pt"}
    assert encode_header(found.tensors, found.metadata) == found.head == written[: len(found.head)]


def test_every_dtype_has_a_distinct_position_in_the_file_order() -> None:
    assert {-order(TensorHeader("w", name, (2,), 2))[0] for name in NAMES} == set(range(len(NAMES)))


@pytest.mark.parametrize("name", sorted(name for name in NAMES if hasattr(torch, name)))
def test_the_library_reads_every_dtype(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    bits = torch.arange(16, dtype=torch.uint8).view(2, 8)
    tensor = bits % 2 == 0 if name == "bool" else bits.view(dtype)
    one = TensorHeader("x", name, tuple(tensor.shape), 16)
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_header([one], {}) + (tensor.view(torch.uint8).numpy().tobytes()))
    loaded = safetensors.torch.load_file(path)["x"]
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
    assert read_header(path).tensors == (one,)


@pytest.mark.parametrize("name", sorted(set(dtypes.DTYPES) - set(NAMES)))
def test_the_error_for_an_unsupported_dtype_names_the_key(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"'layer.x' is {name}, which") as caught:
        encode_header([TensorHeader("layer.x", name, (1,), dtypes.itemsize(name))], {})
    assert caught.value.key == "layer.x"


def test_a_tensor_cannot_have_the_reserved_metadata_key() -> None:
    with pytest.raises(InvalidInput, match="__metadata__"):
        encode_header([TensorHeader("__metadata__", "float32", (1,), 4)], {})


@given(st.lists(st.tuples(st.text(min_size=1), st.lists(st.integers(0, 3), max_size=3)), unique_by=lambda one: one[0]))
def test_tensors_with_any_keys_and_shapes_can_be_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, given: list[Any]
) -> None:
    tensors = []
    for key, shape in given:
        count = int(torch.tensor(shape).prod()) if shape else 1
        if key != "__metadata__" and not any("\ud800" <= character <= "\udfff" for character in key):
            tensors.append(TensorHeader(key, "int16", tuple(shape), 2 * count))
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    head = encode_header(tensors, {})
    path.write_bytes(head + bytes(sum(one.nbytes for one in tensors)))
    found = read_header(path)
    assert len(head) % 8 == 0
    assert sorted(found.tensors, key=lambda one: one.key) == sorted(tensors, key=lambda one: one.key)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{nonsense", b""),
        (b"[]", b""),
        (b'{"a":1}', b""),
        ({"a": entry(offsets=(0, 7))}, bytes(7)),
        ({"a": entry(offsets=(1, 9))}, bytes(9)),
        ({"a": entry(offsets=(0, 8))}, bytes(7)),
        ({"a": entry(offsets=(0, 8))}, bytes(9)),
        ({"a": entry(offsets=(8, 0))}, bytes(8)),
        ({"a": entry(), "b": entry()}, bytes(8)),
        ({"a": entry(shape=(-2,))}, bytes(8)),
        ({"a": entry(shape=(2.0,))}, bytes(8)),
        ({"a": entry(shape=(True, 2))}, bytes(8)),
        ({"a": entry(shape=[1] * 100)}, bytes(8)),
        ({"a": entry(shape=(2**62, 2**62, 0), offsets=(0, 0))}, b""),
        ({"a": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, bytes(1)),
        ({"a": entry() | {"more": 1}}, bytes(8)),
        ({"a": {"dtype": "F32"}}, bytes(8)),
        ({"__metadata__": {"a": 1}}, b""),
        ({"__metadata__": []}, b""),
        ({"__metadata__": {"a": "\ud800"}}, b""),
        ({"\ud800": entry()}, bytes(8)),
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            b"",
        ),
        (b"{" + b'"a":{' * 5000, b""),
    ],
)
def test_an_invalid_header_is_rejected(tmp_path: Path, header: Any, data: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_header(write(tmp_path / "a.safetensors", header, data))


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="'a' has dtype 'F6_E2M3'"):
        read_header(write(tmp_path / "a.safetensors", {"a": entry("F6_E2M3")}, bytes(8)))


def test_errors_for_other_files_name_their_format(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "new.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "text").write_text("weights, honestly")
    (tmp_path / "short").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "empty").touch()
    for name, kind, match in (
        ("new.pt", Unsupported, "torch.save writes"),
        ("old.pt", Unsupported, "a pickle"),
        ("a.gguf", Unsupported, "GGUF"),
        ("text", InvalidInput, "not a safetensors file"),
        ("short", InvalidInput, "truncated"),
        ("empty", InvalidInput, "not a safetensors file"),
        ("absent", NotFound, "there is no file"),
    ):
        with pytest.raises(kind, match=match):
            read_header(tmp_path / name)


def test_an_index_decodes_as_encoded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(encode_index({"b": "2.safetensors", "a": "1.safetensors", "c": "1.safetensors"}, 12))
    assert set(read_index(path).values()) == {"1.safetensors", "2.safetensors"}
    assert json.loads(path.read_text())["metadata"] == {"total_size": 12}


@pytest.mark.parametrize(
    "name",
    [
        "../1.safetensors", "/1.safetensors", "a/1.safetensors", "..\\1.safetensors", "C:1.safetensors", "1.bin", "",
        ".safetensors", "a\n.safetensors", "a\0.safetensors", f"{'a' * 300}.safetensors", 7, None, ["1.safetensors"],
    ],
)  # fmt: skip
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": name}}))
    with pytest.raises(InvalidInput, match=r"lists 'b' in .* do not trust"):
        read_index(path)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000]
)
def test_an_invalid_index_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(InvalidInput):
        read_index(path)
