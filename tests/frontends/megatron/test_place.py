"""The ways to write a checkpoint's location."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.frontends.megatron import (
    CheckpointingException,
    ShardedTensor,
    check_is_distributed_checkpoint,
    load,
    load_plain_tensors,
    save,
)


def state() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}


@pytest.mark.parametrize("form", ["text", "path", "at a store", "at a path", "memory"])
def test_a_location_can_be_written_in_several_ways(tmp_path: Path, form: str) -> None:
    store = casckpt.open(tmp_path)
    where: Any = {
        "text": f"{tmp_path}#a/b@3",
        "path": tmp_path.parent / f"{tmp_path.name}#a/b@3",
        "at a store": casckpt.at(store, run="a/b", step=3),
        "at a path": casckpt.at(tmp_path, run="a/b", step=3),
        "memory": f"memory://{tmp_path.name}#a/b@3",
    }[form]
    save(state(), where)
    assert load_plain_tensors(where)["w"].tolist() == [0, 1, 2, 3]
    assert check_is_distributed_checkpoint(where)
    assert form == "memory" or "a/b@3" in store


def test_a_load_accepts_any_reference(tmp_path: Path) -> None:
    save(state(), f"{tmp_path}#a@3")
    casckpt.open(tmp_path).tag("best", "a@3")
    for ref in ("a@latest", "latest", "tag:best", casckpt.open(tmp_path).get("a@3").id[:12]):
        assert load(state(), f"{tmp_path}#{ref}")["w"].tolist() == [0, 1, 2, 3]


def test_a_relative_location_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        save(state(), "ckpts#a@3")
        assert sorted(os.listdir()) == ["ckpts"]


@pytest.mark.parametrize("where", ["folder", "#a@3", "store#", "store#a", "store#a@x", "store#a@latest", "store#@3"])
def test_invalid_locations_for_a_save_are_rejected(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointingException):
        save(state(), where)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [save, load])
def test_invalid_locations_are_rejected(tmp_path: Path, call: Any) -> None:
    for where in (casckpt.open(tmp_path), None, 5, b"store#a@1"):
        with pytest.raises(CheckpointingException, match=f"cannot be a {type(where).__name__}: pass STORE#RUN@STEP"):
            call(state(), where)
    assert not list(tmp_path.iterdir())
