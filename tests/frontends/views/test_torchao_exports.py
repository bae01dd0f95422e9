"""Folders with torchao's weights come back from an import. Models with such weights are not exported as models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.interchange.safetensors.importing import import_safetensors
from tests.support.safetensors_files import contents, served, unpacked
from tests.support.saves import small
from tests.support.wrappers import scaled

torchao: Any = pytest.importorskip("torchao.quantization", reason="needs torchao")
pytestmark = pytest.mark.filterwarnings("ignore")


def llama(folder: Path, seed: int, config: str = "Int8WeightOnlyConfig") -> Any:
    """Return a quantized Llama with random weights."""
    transformers: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
    torch.manual_seed(seed)
    made = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    transformers.LlamaForCausalLM(made).save_pretrained(folder)
    chosen = transformers.TorchAoConfig(getattr(torchao, config)())
    return transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=chosen)


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.arange(8)[None]).logits
    return found


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_quantized_model_is_exported_by_its_library(tmp_path: Path, config: str) -> None:
    model, other = llama(tmp_path / "plain", 1, config), llama(tmp_path / "other", 2, config)
    store = small()
    casckpt.save_model_and_optim_state(store, model, run="r", step=1)
    with pytest.raises(InvalidInput, match="Load the checkpoint into a model with such weights, and call its save_pr"):
        store.export("r@1", tmp_path / "out")
    store.load({"model": other}, "r@1")
    other.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_an_imported_folder_is_exported_with_the_same_tensors(tmp_path: Path, config: str) -> None:
    model, other = llama(tmp_path / "plain", 1, config), llama(tmp_path / "other", 2, config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    store = small()
    saved = import_safetensors(store, tmp_path / "theirs", run="imported", step=1)
    assert "model.layers.0.self_attn.q_proj._weight_qdata" in saved.tensors
    assert store.export("imported@1", tmp_path / "back").notes == ()
    assert unpacked(contents(tmp_path / "back")) == unpacked(contents(tmp_path / "theirs"))
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "back")), logits(model))
    with pytest.raises(MissingKey):
        store.load(dict(other.state_dict()), "imported@1")
    (note,) = saved.notes
    assert "call from_pretrained on the folder, and save that model" in note
    casckpt.save_model_and_optim_state(store, type(model).from_pretrained(tmp_path / "theirs"), run="r", step=1)
    casckpt.load_model_and_optim_state(store, "r@1", other)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("kind", ["Int8Tensor", "Scaled"])
def test_a_model_with_wrappers_is_not_exported_as_one(tmp_path: Path, kind: str) -> None:
    weight: torch.Tensor = scaled(1, 4, 4)
    if kind == "Int8Tensor":
        linear = nn.Linear(64, 64, bias=False)
        torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
        weight = linear.weight
    store = small()
    store.save({"model": {"a.w": weight, "b": torch.ones(2)}}, run="r", step=1, attachments={"config.json": b"{}"})
    with pytest.raises(InvalidInput, match=r"'model\.a\.w' consists of other tensors"):
        store.export("r@1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    store.export("r@1", tmp_path / "part", format="hf", keys=["model.b"])
    found = store.export("r@1", tmp_path / "plain", format="safetensors")
    assert "the files have only the inner tensors" in found.notes[0]
    assert contents(tmp_path / "plain") == served(store, "r@1")
