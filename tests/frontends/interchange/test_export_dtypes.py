"""Exports in another floating-point dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import casckpt
from casckpt.cli.main import cli
from casckpt.errors import InvalidInput
from casckpt.frontends.interchange.safetensors.exporting import Base, export_safetensors
from casckpt.store.exports import CAST, Format

STATE = {
    "model": {
        "w": torch.randn(700, 70, dtype=torch.float64),
        "half": torch.randn(5).half(),
        "same": torch.randn(3).bfloat16(),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "count": torch.arange(7),
        "empty": torch.zeros(0, 3),
        "none": torch.tensor(2.5),
    },
    "epoch": 3,
}
CONFIG = {"torch_dtype": "float32", "text_config": {"dtype": "bfloat16", "size": 8}, "dtype": None}


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    made = casckpt.open(tmp_path / "store")
    made.create(cell_bytes=4096)
    made.save(STATE, run="r", step=1, attachments={"config.json": json.dumps(CONFIG).encode()})
    return made


def wanted(dtype: str) -> dict[str, torch.Tensor]:
    """Return the model as `Tensor.to` converts it."""
    return {
        name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
        for name, tensor in STATE["model"].items()  # type: ignore[attr-defined] # a dict
    }


def same(found: dict[str, Any], dtype: str) -> bool:
    """Return whether two states are equal, with their dtypes."""
    expected = wanted(dtype)
    return found.keys() == expected.keys() and all(
        one.dtype == found[name].dtype and torch.equal(one.view(torch.uint8), found[name].view(torch.uint8))
        if one.ndim
        else one == found[name]
        for name, one in expected.items()
    )


@pytest.mark.parametrize("dtype", CAST)
def test_floats_are_converted_in_every_format_with_files(store: casckpt.Store, tmp_path: Path, dtype: str) -> None:
    done = store.export("r@1", tmp_path / "hf", format="hf", dtype=dtype, max_shard_size=40_000)
    assert done.nbytes == sum(tensor.nbytes for tensor in wanted(dtype).values())
    shards = [load_file(path) for path in (tmp_path / "hf").glob("*.safetensors")]
    assert same({name: tensor for shard in shards for name, tensor in shard.items()}, dtype)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {"torch_dtype": dtype, "text_config": {"dtype": dtype, "size": 8}, "dtype": None}
    store.export("r@1", tmp_path / "one.safetensors", dtype=getattr(torch, dtype), strip_prefix="model")
    assert same(load_file(tmp_path / "one.safetensors"), dtype)
    store.export("r@1", tmp_path / "whole.pt", dtype=dtype)
    whole = torch.load(tmp_path / "whole.pt")
    assert whole["epoch"] == 3
    assert same(whole["model"], dtype)
    store.export("r@1", tmp_path / "part.pt", dtype=dtype, strip_prefix="model")
    assert same(torch.load(tmp_path / "part.pt"), dtype)


def test_the_same_dtype_gives_the_same_bytes(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"w": torch.randn(1000), "n": torch.arange(3)}, run="r", step=1)
    store.export("r@1", tmp_path / "a.safetensors")
    store.export("r@1", tmp_path / "b.safetensors", dtype="float32")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_values_that_would_become_infinite_are_refused_and_infinities_stay(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"w": torch.tensor([1.0, 1e6])}, run="r", step=1)
    store.save({"w": torch.tensor([float("inf"), float("nan")])}, run="r", step=2)
    for format in ("safetensors", "torch"):
        with pytest.raises(InvalidInput, match="'w' has values that are too large for float16: choose another dtype"):
            store.export("r@1", tmp_path / format, format=format, dtype="float16")
        assert not (tmp_path / format).exists()
    store.export("r@2", tmp_path / "two.safetensors", dtype="float16")
    assert load_file(tmp_path / "two.safetensors")["w"].isinf().tolist() == [True, False]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"torch_dtype": "torch.float64", "n": 1.10}', b'{"torch_dtype": "bfloat16", "n": 1.10}'),
        (b'{"dtype" :"float16",\r\n "name": "\\ud800"}', b'{"dtype" :"bfloat16",\r\n "name": "\\ud800"}'),
        (b'{"dtype": "int8", "kind": "float32"}', b'{"dtype": "int8", "kind": "float32"}'),
        (b'\xff{"a": [', b'\xff{"a": ['),
    ],
)
def test_nothing_but_the_dtype_of_a_config_changes(tmp_path: Path, before: bytes, after: bytes) -> None:
    store = casckpt.open(tmp_path / "store")
    store.save({"w": torch.ones(2)}, run="r", step=1, attachments={"config.json": before})
    store.export("r@1", tmp_path / "out", format="hf", dtype="bfloat16")
    assert (tmp_path / "out" / "config.json").read_bytes() == after


def test_the_steps_of_an_optimizer_stay_as_they_are(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    optim = {"state": {"w": {"step": torch.tensor(70001.0), "exp_avg": torch.ones(3), "steps": torch.tensor(70001.0)}}}
    store.save({"optim": optim}, run="r", step=1)
    store.export("r@1", tmp_path / "out.safetensors", dtype="bfloat16")
    store.export("r@1", tmp_path / "out.pt", dtype="bfloat16")
    flat = load_file(tmp_path / "out.safetensors")
    nested = torch.load(tmp_path / "out.pt")["optim"]["state"]["w"]
    for found in ({name.rpartition(".")[2]: one for name, one in flat.items()}, nested):
        assert [found[name].item() for name in ("step", "steps")] == [70001.0, 70144.0]
        assert found["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("held", [torch.float16, torch.float32])
def test_an_earlier_export_is_not_revised_into_another_dtype(tmp_path: Path, held: torch.dtype) -> None:
    store = casckpt.open(tmp_path / "store")
    for step in (1, 2):
        store.save({"w": torch.full((300, 30), step / 3, dtype=held)}, run="r", step=step)
    before = export_safetensors(store, "r@1", tmp_path / "before", dtype="bfloat16").checkpoint
    export_safetensors(store, "r@2", tmp_path / "after", dtype="bfloat16", base=Base(before, tmp_path / "before"))
    assert torch.equal(
        load_file(tmp_path / "after" / "model.safetensors")["w"],
        torch.full((300, 30), 2 / 3, dtype=held).bfloat16(),
    )


@pytest.mark.parametrize("format", ["dcp", "files"])
def test_formats_that_keep_their_dtypes_say_so(store: casckpt.Store, tmp_path: Path, format: Format) -> None:
    with pytest.raises(InvalidInput, match="--dtype applies to hf and safetensors and torch"):
        store.export("r@1", tmp_path / "out", format=format, dtype="float16")
    with pytest.raises(InvalidInput, match="dtype='int8' is not valid: pass one of float32, float16, bfloat16"):
        store.export("r@1", tmp_path / "out", dtype="int8")


def test_the_command_converts(store: casckpt.Store, tmp_path: Path) -> None:
    command = ["export", store.url, "r@1", str(tmp_path / "out"), "--format", "hf", "--dtype", "bfloat16"]
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert same(load_file(tmp_path / "out" / "model.safetensors"), "bfloat16")
