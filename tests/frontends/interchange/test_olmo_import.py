"""Imports of OLMo-core folders."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import casckpt
from casckpt.errors import NotFound, Refused
from casckpt.frontends.convert import import_any, import_olmo, import_olmo_trainer, look_at
from tests.support.dcp import Colour, stock
from tests.support.together import numbers
from tests.support.training import identical

Store = casckpt.Store


def olmo(path: Path) -> dict[str, torch.Tensor]:
    """Write a folder as release 0.1.0 does on two ranks, with parameter groups. Return its weights."""
    full = {"up": numbers("up", 6, 4), "down": numbers("down", 5)}
    moments = {f"state.{key}.__exp_avg": value * 2 for key, value in full.items()}
    groups = {"_param_names": ["up", "down"], "params": [0, 1], "lr": 0.5, "betas": (0.9, 0.99)}
    packed = torch.frombuffer(bytearray(pickle.dumps(groups)), dtype=torch.uint8)
    optim = moments | {"param_group0": packed, "state_keys": packed[:3], "num_param_groups": torch.tensor(1)}
    _olmo_part(path / "model", full)
    _olmo_part(path / "optim", optim)
    return full


def _olmo_part(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    described = {}
    for key, value in tensors.items():
        flat, cut = value.reshape(-1), value.numel() // 3
        specs: dict[str, Any]
        if key == "up":  # columns, as a DTensor
            specs = {f"rank_{r}.safetensors": {"local_shape": [6, 2], "global_offset": [0, 2 * r]} for r in (0, 1)}
            for rank in (0, 1):
                files[rank][key] = value[:, 2 * rank : 2 * rank + 2].reshape(-1).clone()
        elif key == "state.down.__exp_avg":  # only on one rank, because the other rank's optimizer never had it
            specs = {"rank_0.safetensors": {"flattened_offsets": [[0, 0]]},
                     "rank_1.safetensors": {"flattened_offsets": [[0, value.numel()]]}}  # fmt: skip
            files[1][key] = flat.clone()
        elif value.dim() and "state" in key and "param" not in key and "keys" not in key:  # flat, as with FSDP
            specs = {"rank_0.safetensors": {"flattened_offsets": [[0, cut], [2 * cut, value.numel()]]},
                     "rank_1.safetensors": {"flattened_offsets": [[cut, 2 * cut]]}}  # fmt: skip
            files[0][key] = torch.cat([flat[:cut], flat[2 * cut :]])
            files[1][key] = flat[cut : 2 * cut].clone()
        else:  # replicas: every rank writes them
            specs = {f"rank_{r}.safetensors": {"flattened_offsets": [[0, value.numel()]]} for r in (0, 1)}
            for rank in (0, 1):
                files[rank][key] = flat.clone()
        described[key] = {"shape": list(value.shape), "is_sharded": True, "dtype": "x", "shard_spec_per_file": specs}
    (path / "metadata.json").write_text(json.dumps({"tensors": described}))
    for rank, held in enumerate(files):
        save_file(held, path / f"rank_{rank}.safetensors")


def test_an_olmo_core_folder_is_imported(store: Store, tmp_path: Path) -> None:
    full = olmo(tmp_path / "in")
    import_olmo(tmp_path / "in", store, run="o", step=1)
    found = store.read("o@1")
    assert identical(found["model"], full)
    assert identical(found["optim"]["state"], {key: {"exp_avg": value * 2} for key, value in full.items()})
    assert found["optim"]["param_groups"] == [{"params": ["up", "down"], "lr": 0.5, "betas": (0.9, 0.99)}]
    assert look_at(tmp_path / "in").kind == "olmo"
    import_any(store, look_at(tmp_path / "in" / "model"), run="part", step=1)
    assert identical(store.read("part@1"), full)


def test_an_incomplete_olmo_core_folder_is_rejected(store: Store, tmp_path: Path) -> None:
    olmo(tmp_path / "in")
    (tmp_path / "in/model/rank_1.safetensors").unlink()
    with pytest.raises(NotFound, match=r"rank_1.safetensors"):
        import_olmo(tmp_path / "in", store, step=1)
    metadata = tmp_path / "in/model/metadata.json"
    metadata.write_text(metadata.read_text().replace("rank_1.safetensors", "../../x"))
    with pytest.raises(Refused):
        import_olmo(tmp_path / "in", store, step=1)
    metadata.write_text("{}")
    with pytest.raises(Refused, match="was not written by OLMo-core"):
        import_olmo(tmp_path / "in", store, step=1)


def test_a_folder_from_the_later_olmo_trainer_is_imported(store: Store, tmp_path: Path) -> None:
    state = {"model": {"w": numbers("w", 9)}, "optim": {"state.w.step": torch.tensor(1.0)}}
    folder = tmp_path / "step10"
    stock(folder / "model_and_optim", state)
    (folder / "train").mkdir()
    torch.save({"step": 10, "rng": torch.ones(3)}, folder / "train/rank0.pt")
    torch.save({"c": Colour.RED}, folder / "train/rank1.pt")
    (folder / ".metadata.json").write_text('{"version": "v2"}')
    assert look_at(folder).kind == "olmo-trainer"
    import_olmo_trainer(folder, store, run="o", step=10)
    found = store.read("o@10")
    assert identical({key: found[key] for key in state}, state)
    assert list(found["train"]) == [0]
    assert identical(found["train"][0], {"step": 10, "rng": torch.ones(3)})
    assert store.attachments("o@10") == {".metadata.json": 17}
    import_olmo_trainer(folder, store, run="o", step=11, allow_pickle=True)
    assert store.read("o@11", allow_pickle=True)["train"][1] == {"c": Colour.RED}
