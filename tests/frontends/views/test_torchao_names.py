"""An export of torchao's weights has the names and metadata that Transformers writes, and from_pretrained loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.interchange.safetensors.importing import import_safetensors
from casckpt.frontends.views.view import Rules, view_of
from tests.support.safetensors_files import contents
from tests.support.saves import small
from tests.support.wrappers import scaled

torchao: Any = pytest.importorskip("torchao.quantization", reason="needs torchao")
pytestmark = pytest.mark.filterwarnings("ignore")


def header(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    data = path.read_bytes()
    found = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found, found.pop("__metadata__")


def parsed(metadata: dict[str, str]) -> dict[str, Any]:
    found = {name: json.loads(text) for name, text in metadata.items() if name != "format"}
    for value in found.values():
        if isinstance(value, dict) and "_tensor_data_names" in value:
            value["_tensor_data_names"] = sorted(value["_tensor_data_names"])
    return found | {"tensor_names": sorted(found["tensor_names"])}


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_llama_is_exported_as_save_pretrained_writes_it(tmp_path: Path, config: str) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
    torch.manual_seed(1)
    made = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    transformers.LlamaForCausalLM(made).save_pretrained(tmp_path / "plain")
    chosen = transformers.TorchAoConfig(getattr(torchao, config)())
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=chosen)
    model.save_pretrained(tmp_path / "theirs")
    store = small()
    casckpt.save_model_and_optim_state(store, model, run="r", step=1)
    store.export("r@1", tmp_path / "ours", format="hf")
    (theirs, wanted), (ours, found) = (header(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert {key: (one["dtype"], one["shape"]) for key, one in ours.items()} == {
        key: (one["dtype"], one["shape"]) for key, one in theirs.items()
    }
    assert parsed(found) == parsed(wanted)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    import_safetensors(store, tmp_path / "theirs", run="imported", step=1)
    store.export("imported@1", tmp_path / "back", format="hf")
    back, original = (tmp_path / name / "model.safetensors" for name in ("back", "theirs"))
    assert header(back) == header(original)
    nbytes = sum(end - start for start, end in (one["data_offsets"] for one in theirs.values()))
    assert back.read_bytes()[-nbytes:] == original.read_bytes()[-nbytes:]


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
def test_an_imported_folder_is_exported_unchanged(tmp_path: Path, config: str) -> None:
    model, other = llama(tmp_path / "plain", 1, config), llama(tmp_path / "other", 2, config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    store = small()
    saved = import_safetensors(store, tmp_path / "theirs", run="imported", step=1)
    assert "model.layers.0.self_attn.q_proj._weight_qdata" in saved.tensors
    assert store.export("imported@1", tmp_path / "back").notes == ()
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")
    with pytest.raises(MissingKey):
        store.load(dict(other.state_dict()), "imported@1")
    (note,) = saved.notes
    assert "call from_pretrained on the folder, and save that model" in note
    casckpt.save_model_and_optim_state(store, type(model).from_pretrained(tmp_path / "theirs"), run="r", step=1)
    casckpt.load_model_and_optim_state(store, "r@1", other)
    assert torch.equal(logits(other), logits(model))


def quantized() -> Any:
    linear = nn.Linear(64, 64, bias=False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    return linear.weight


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"weight": quantized}, r"'model\.weight' would have the name 'weight\.\w+'"),
        ({"a": {"w": quantized, "w_2": quantized}}, r"torchao would read 'a\._w_2_\w+' as a part of"),
        ({"a": {"w": lambda: scaled(1, 4, 4)}}, r"Transformers cannot read 'model\.a\.w' \(Scaled\) from a file"),
    ],
    ids=["no dot", "ambiguous", "unknown"],
)
def test_names_and_kinds_that_torchao_cannot_read_are_refused(tmp_path: Path, state: Any, match: str) -> None:
    store = small()
    made = {key: {k: v() for k, v in one.items()} if isinstance(one, dict) else one() for key, one in state.items()}
    store.save({"model": made}, run="r", step=1)
    with pytest.raises(InvalidInput, match=match):
        store.export("r@1", tmp_path / "x", format="hf")
    store.export("r@1", tmp_path / "plain", format="safetensors")
    assert not (tmp_path / "x").exists()


def test_a_rename_or_a_split_inside_a_weight_is_refused() -> None:
    store = small()
    store.save({"model": {"a": {"w": quantized(), "b": torch.ones(4)}}}, run="r", step=1)
    contents = Contents.open(store.repository, store.get("r@1").commit)
    names = [tensor.name for tensor in view_of(contents, Rules(model=True)).tensors]
    assert names == ["a._w_qdata", "a._w_scale", "a._w_zero_point", "a.b"]
    renamed = view_of(contents, Rules(model=True, rename={r"a\.(.*)": r"x.\1"}))
    assert "x._w_qdata" in {tensor.name for tensor in renamed.tensors}
    assert set(renamed.metadata) == {"x.w", "x.b", "tensor_names"}
    with pytest.raises(InvalidInput, match="which torchao cannot read"):
        view_of(contents, Rules(model=True, rename={r"(.*)\.qdata": r"\1.data"}))
    with pytest.raises(InvalidInput, match="split does not apply to a checkpoint with torchao's weights"):
        view_of(contents, Rules(model=True, split={r"a\._w_qdata": {"x": [[0, 2]], "y": [[2, 4]]}}))
