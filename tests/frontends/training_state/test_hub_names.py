"""The names that Transformers gives to the parts of fused tensors, and loads of parts with these names."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")

import casckpt
from casckpt.errors import Mismatch, Unsupported
from casckpt.frontends.convert import import_safetensors
from casckpt.frontends.training_state import load_model_and_optim_state, unshard_model_state
from casckpt.frontends.training_state.contents import save_model_and_optim_state
from casckpt.frontends.training_state.hub_names import globs, rules_of, saved_parts
from tests.support.hub import mixtral
from tests.support.ranks import Pool
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers

# names


def parts_of(convert: Callable[[dict[str, torch.Tensor]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the parts of a tensor "a" of shape [4, 6] and "b" of shape [6] that a conversion makes."""
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", lambda model, state: convert(state))
    return saved_parts(None, {"a": (4, 6), "b": (6,)})


def test_the_parts_of_fused_tensors_are_the_views_that_a_conversion_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parts_of(
        lambda state: {
            "rows": state["a"].chunk(2)[1].contiguous(),
            "one": state["a"].select(0, 2),
            "columns": state["a"].narrow(1, 1, 3).contiguous().clone(),
            "item": state["a"][3, 5:].squeeze(0),
            "b": [state["b"]][0],
        },
        monkeypatch,
    )
    assert found == {
        "a": {"rows": ((2, 4),), "one": (2,), "columns": ((0, 4), (1, 4)), "item": (3, 5)}, "b": {"b": ()}
    }  # fmt: skip


@pytest.mark.parametrize(
    "convert",
    [
        lambda a: a.transpose(0, 1),
        lambda a: a.reshape(6, 4),
        lambda a: a.flip(0),
        lambda a: torch.cat([a, a]),
        lambda a: a[::2],
        lambda a: a.add_(1),
        lambda a: a.unsqueeze(0),
        lambda a: a[:0],
        lambda a: a["b"],
    ],
)
def test_tensors_that_are_not_slices_are_rejected(convert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported):
        parts_of(lambda state: {"x": convert(state["a"])}, monkeypatch)


def test_with_an_older_transformers_a_save_keeps_the_names_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    assert saved_parts(None, {"a": (2,)}) == {"a": {"a": ()}}


def test_name_rules_have_groups_for_the_numbers_that_vary() -> None:
    names = [(f"layers.{n}.mlp.w", {f"h.{n}.e.{e}.w1": (e,) for e in range(2)}) for n in range(12)]
    parts: Any = dict(names) | {"layers.3.norm": {"h.3.norm": ()}, "head": {"head": ()}}
    assert rules_of(parts) == {
        "rename": {r"layers\.3\.norm": "h.3.norm"},
        "split": {r"layers\.(\d+)\.mlp\.w": {r"h.\g<1>.e.0.w1": (0,), r"h.\g<1>.e.1.w1": (1,)}},
    }


def test_names_that_no_common_rule_covers_are_listed() -> None:
    parts: Any = {f"a.{n}": {f"b.{2 * n}": ()} for n in range(3)}
    assert rules_of(parts) == {"rename": {rf"a\.{n}": f"b.{2 * n}" for n in range(3)}}
    assert rules_of({"a.1": {"a.1": ()}, "a.2": {"b.2": ()}}) == {"rename": {r"a\.2": "b.2"}}


def test_rules_that_would_change_each_other_are_rejected() -> None:
    with pytest.raises(Unsupported, match="no rule can express"):
        rules_of({"a": {"b": ()}, "b": {"c": (0,), "d": (1,)}})


def test_globs_for_some_names_do_not_match_any_other_name() -> None:
    names = ["h.0.a.w", "h.1.a.w", "h.0.b"]
    assert globs(names, [*names, "h.0.c.a.w"]) == ["h.*.b", "h.0.a.w", "h.1.a.w"]
    assert globs(names, names) == ["h.*.a.w", "h.*.b"]


# all mixtures of experts

EXPERTS = [
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "granitemoe", "hy_v3", "kimi_k25", "kimi_linear", "kolibri1",
    "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl",
    "mistral_large4", "mistral_large4_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "solar_open",
    "inkling2_text", "inkling_mm_model", "step3p7",
]  # fmt: skip
"""The types of models with fused experts whose default config can be made small by `SIZES`."""
NOTED = ("inkling2_text", "inkling_mm_model", "kimi_k25", "mistral_large4", "step3p7")
"""Those that save_pretrained permutes or joins."""
FEW = ("mixtral", "qwen3_moe", "deepseek_v3", "kimi_k25")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 8, "vocab_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "mamba_d_state": 4,
    "shared_expert_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8, "expert_ffn_hidden_size": 8,
    "ffn_hidden_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "depth": 2, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32, "num_layers": 2,
    "mlp_dim": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 16,
    "index_head_dim": 8, "index_n_heads": 2, "n_routed_experts": 8, "num_local_experts": 8, "num_experts": 8,
    "max_position_embeddings": 64, "moe_num_experts": 8, "hidden_dim": 32, "ssm_state_size": 4, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "n_groups": 2, "projection_dim": 32, "deepstack_visual_indexes": [0], "pos_emb_height": 4,
    "pos_emb_width": 4, "hc_mult": 2, "o_lora_rank": 8, "sliding_window": 8, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_topk": 2, "zero_expert_num": 2, "first_k_dense_replace": 1,
}  # fmt: skip

MORE: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2}, "jamba": {"layer_types": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]}, "qwen3_omni_moe_text": {},
}  # fmt: skip
"""More arguments for some types."""


def small(config: Any) -> dict[str, Any]:
    """Return arguments for a config, and for the configs in it, that describe a small model."""
    given = {name: getattr(config, name, None) for name in SIZES}
    found = {name: SIZES[name] for name, value in given.items() if type(value) in (int, list)}
    if getattr(config, "layer_types", None) and "num_hidden_layers" in found:
        found["layer_types"] = [*dict.fromkeys(config.layer_types), *config.layer_types][:3]
    if getattr(config, "mlp_layer_types", None) and "num_hidden_layers" in found:
        found["mlp_layer_types"] = [config.mlp_layer_types[0], *[config.mlp_layer_types[-1]] * 2]
    inside = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    return found | {name: small(one) for name, one in inside.items() if one is not None}


def class_and_config(kind: str) -> tuple[Any, Any]:
    """Return the class of a type of models, and the class of its config."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tasks = ("FOR_CAUSAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_", "")
    mappings: Any = [getattr(auto, f"MODEL_{task}MAPPING_NAMES") for task in tasks]
    name = next((mapping[kind] for mapping in mappings if kind in mapping), "Qwen3OmniMoeThinkerTextModel")
    return getattr(hub, name), CONFIG_MAPPING[kind]


def of_type(kind: str) -> Any:
    """Return a small model."""
    model, config = class_and_config(kind)
    arguments = small(config()) | MORE.get(kind, {})
    torch.manual_seed(1)
    return model(config(**{name: value for name, value in arguments.items() if value is not None}))


@pytest.mark.parametrize(
    "kind", [one if one in FEW else pytest.param(one, marks=pytest.mark.soak) for one in (*EXPERTS, *MORE)]
)
def test_all_fused_experts_have_the_names_and_bytes_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    model = of_type(kind)
    state = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if kind in NOTED:
        with pytest.raises(Unsupported, match="is not a part of one tensor"):
            saved_parts(model, shapes)
        return
    parts = saved_parts(model, shapes)
    rules_of(parts)  # checks that the rules have exactly this effect
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = {}
    for name, of in parts.items():
        for saved, index in of.items():
            found[saved] = state[name][tuple(one if isinstance(one, int) else slice(*one) for one in index)]
    tied = found.keys() - expected.keys()  # save_pretrained leaves out one of two tied names
    assert tied <= set(getattr(model, "all_tied_weights_keys", ()))
    assert identical(expected, {name: found[name].contiguous() for name in expected})
    assert re.search(r"experts\.\d+\.|experts\.[a-z]|input_linear", " ".join(found))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["dots3_note_text", "ernie4_5_vl_moe", "glm5_next"])
def test_models_without_a_small_config_have_the_names_of_save_pretrained(kind: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    model, config = class_and_config(kind)
    with torch.device("meta"):
        state = (made := model(config())).state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if kind == "ernie4_5_vl_moe":
        with pytest.raises(Unsupported, match="is not a part of one tensor"):
            saved_parts(made, shapes)
        return
    expected = {name: tuple(value.shape) for name, value in revert_weight_conversion(made, state).items()}
    found = {}
    for name, of in saved_parts(made, shapes).items():
        for saved, index in of.items():
            selected = state[name][tuple(one if isinstance(one, int) else slice(*one) for one in index)]
            found[saved] = tuple(selected.shape)
    assert found == expected


# loads


def imported(path: Path, model: Any) -> casckpt.Store:
    model.save_pretrained(path / "hub")
    store = casckpt.open(path / "store")
    import_safetensors(store, path / "hub", run="base", step=0)
    return store


def zeroed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_a_hub_folder_loads_into_fused_experts(tmp_path: Path) -> None:
    model = mixtral()
    store, target = imported(tmp_path, model), zeroed(mixtral())
    places = {name: value.data_ptr() for name, value in target.state_dict().items()}
    loaded = load_model_and_optim_state(store, "base@0", target)
    assert (loaded.missing_keys, loaded.unread_keys) == ((), ())
    assert identical(dict(target.state_dict()), dict(model.state_dict()))
    assert places == {name: value.data_ptr() for name, value in target.state_dict().items()}


def test_a_hub_folder_that_lacks_an_expert_is_rejected(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"]
    store = casckpt.open(tmp_path / "store")
    store.save(tensors, run="base", step=0)
    with pytest.raises(Mismatch, match=r"has .*experts\.0\.w2\.weight.* which this model lacks"):
        load_model_and_optim_state(store, "base@0", zeroed(mixtral()))


def shard_experts(model: Any, dim: int) -> Any:
    """Shard the fused experts along one dimension, as tensor and expert parallelism do."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        for name, value in [*layer.mlp.experts.named_parameters()]:
            sharded = distribute_tensor(value.detach(), mesh, [Shard(dim)])
            setattr(layer.mlp.experts, name, torch.nn.Parameter(sharded))
    return model


SHARDINGS: dict[str, Callable[[Any], Any]] = {
    "experts": lambda model: shard_experts(model, 0),
    "rows": lambda model: shard_experts(model, 1),
    "columns": lambda model: shard_experts(model, 2),
    "fsdp2": fully_shard,
    "fsdp1": lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
}


def load_sharded(rank: int, size: int, path: Path) -> None:
    for number, shard in enumerate(SHARDINGS.values()):
        model = shard(zeroed(mixtral()))
        loaded = load_model_and_optim_state(path / "store", "base@0", model)
        assert (loaded.missing_keys, loaded.unread_keys) == ((), ())
        save_model_and_optim_state(path / "store", model, run="sharded", step=number)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_hub_folder_loads_into_sharded_experts(tmp_path: Path, ranks: Pool, size: int) -> None:
    model = mixtral()
    store = imported(tmp_path, model)
    ranks.run(size, load_sharded, tmp_path)
    for number in range(len(SHARDINGS)):
        assert identical(unshard_model_state(store, f"sharded@{number}"), dict(model.state_dict()))
