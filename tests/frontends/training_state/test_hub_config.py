"""The files and names that a model's library needs to load its exports."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import importlib
import json
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")

from casckpt.base.names import HUB_FILE
from casckpt.frontends.convert import import_safetensors
from casckpt.frontends.trainer import CheckpointerConfig
from casckpt.frontends.training_state import hub_files, save_model_and_optim_state
from casckpt.store.store import Store
from tests.support.hub import check_loads, export, gpt2, llama, mixtral
from tests.support.ranks import Pool
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers and PEFT

CODE = {
    "sizes.py": "WIDTH = 4\n",
    "mine.py": """
        import torch
        from transformers import PretrainedConfig, PreTrainedModel
        from .sizes import WIDTH

        class MyConfig(PretrainedConfig):
            model_type = "mine"

        class MyModel(PreTrainedModel):
            config_class = MyConfig

            def __init__(self, config):
                super().__init__(config)
                self.layer = torch.nn.Linear(WIDTH, WIDTH)
                self.post_init()

            def forward(self, x):
                return self.layer(x)
    """,
}


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of a custom class that is registered for `AutoModel`."""
    package = tmp_path / "code" / "mypackage"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in CODE.items():
        (package / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(package.parent)
    module = importlib.import_module("mypackage.mine")
    module.MyConfig.register_for_auto_class()
    module.MyModel.register_for_auto_class("AutoModel")
    yield module.MyModel(module.MyConfig())
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
        del sys.modules[name]


def test_the_code_of_a_custom_class_is_exported_and_loads(custom: Any, tmp_path: Path, store: Store) -> None:
    before = custom.config.to_dict()
    save_model_and_optim_state(store, custom, run="a", step=1)
    assert custom.config.to_dict() == before
    export(store.url, "a@1", tmp_path / "out")
    assert (tmp_path / "out" / "sizes.py").read_text() == CODE["sizes.py"]
    found = hub.AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    x = torch.ones(2, 4)
    assert torch.equal(found(x), custom(x))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MyModel"]


def test_the_code_of_a_sharded_custom_class_is_saved(custom: Any) -> None:
    kind = type(custom)
    custom.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})  # as fully_shard does
    files = hub_files(custom)
    assert {"mine.py", "sizes.py"} <= files.keys()
    config = json.loads(files["config.json"])
    assert (config["architectures"], config["auto_map"]["AutoModel"]) == (["MyModel"], "mine.MyModel")


def test_a_checkpointer_saves_the_code_once(custom: Any, store: Store) -> None:
    with CheckpointerConfig(run="a").build(store) as checkpointer:
        checkpointer.save(1, custom)
        checkpointer.save(2, custom)
    assert {"mine.py", "sizes.py", "config.json"} <= store.attachments("a@2").keys()


def test_a_save_succeeds_even_if_custom_code_cannot_be_read(
    custom: Any, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    Path(sys.modules["mypackage.sizes"].__file__ or "").unlink()
    save_model_and_optim_state(store, custom, run="a", step=1)
    assert "the config of the MyModel was not saved" in caplog.text


def test_the_files_of_a_processor_are_saved_with_its_model() -> None:
    class Processor:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "chat_template.jinja").write_text("{{ messages }}")

    files = hub_files(llama(), Processor())
    assert files["chat_template.jinja"] == b"{{ messages }}"
    assert {"config.json", "generation_config.json"} <= files.keys()


def test_a_model_whose_names_do_not_change_has_no_names_file() -> None:
    assert HUB_FILE not in hub_files(llama()).keys() | hub_files({"model": gpt2()}).keys()
    assert hub_files(torch.nn.Linear(2, 2)) == {}
    assert hub_files([llama(), llama()]) == {}


def test_fused_experts_are_exported_under_the_names_that_save_pretrained_writes(tmp_path: Path, store: Store) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "expected")
    save_model_and_optim_state(store, model, run="a", step=1)
    export(store.url, "a@1", tmp_path / "out")
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "out"))
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in found
    assert identical(expected, found)
    assert HUB_FILE not in {path.name for path in (tmp_path / "out").iterdir()}
    check_loads(tmp_path / "out", model)


def test_selected_keys_and_other_names_apply_to_fused_experts(tmp_path: Path, store: Store) -> None:
    save_model_and_optim_state(store, mixtral(), run="a", step=1)
    export(store.url, "a@1", tmp_path / "some", "--format", "hf", "--keys", "*experts.down_proj")
    assert len(load_file(tmp_path / "some" / "model.safetensors")) == 6
    assert not (tmp_path / "some" / "config.json").exists()
    export(store.url, "a@1", tmp_path / "own", "--format", "hf", "--strip-prefix", "model")
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "own" / "model.safetensors")


def test_names_of_tensors_that_are_not_slices_are_unchanged_and_reported(tmp_path: Path, store: Store) -> None:
    config = hub.NomicBertConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=1, vocab_size=32
    )
    model = hub.NomicBertModel(config)
    save_model_and_optim_state(store, model, run="a", step=1)
    found = export(store.url, "a@1", tmp_path / "out")
    (note,) = found["notes"]
    assert "Wqkv.weight is not a part of one tensor" in note
    check_loads(tmp_path / "out", model)


# adapters


def lora(base: Any, adapter: str = "default", **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(base, config, adapter_name=adapter)


def test_an_adapter_is_exported_under_the_names_of_peft(tmp_path: Path, store: Store) -> None:
    model = lora(llama().float(), modules_to_save=["lm_head"], use_dora=True)
    model.save_pretrained(tmp_path / "expected")
    save_model_and_optim_state(store, model, torch.optim.AdamW(model.parameters()), run="a", step=1)
    found = export(store.url, "a@1", tmp_path / "out")
    assert (found["format"], found["notes"]) == ("hf", [])
    expected, written = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("expected", "out"))
    assert identical(expected, written)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("expected", "out")]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]
    check_adapter(tmp_path / "out", model)


def check_adapter(folder: Path, model: Any) -> None:
    """Check that PEFT loads a folder on the base weights of ``model``, with the same outputs."""
    peft = importlib.import_module("peft")
    words = torch.arange(6).view(1, 6)
    with torch.no_grad():
        expected = model.eval()(input_ids=words).logits
        found = peft.PeftModel.from_pretrained(llama().float(), folder).eval()
        assert torch.equal(found(input_ids=words).logits, expected)


def test_several_adapters_have_their_own_folders(tmp_path: Path, store: Store) -> None:
    model = lora(llama().float())
    model.add_adapter("other", type(model.peft_config["default"])(r=3, target_modules=["o_proj"]))
    model.save_pretrained(tmp_path / "expected")
    save_model_and_optim_state(store, model, run="a", step=1)
    export(store.url, "a@1", tmp_path / "out")
    for name in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        assert identical(load_file(tmp_path / "expected" / name), load_file(tmp_path / "out" / name))
    assert (tmp_path / "out" / "other" / "adapter_config.json").is_file()
    found = export(store.url, "a@1", tmp_path / "one.safetensors", "--format", "hf", status=1)
    assert "several models" in str(found)


def test_a_model_with_its_own_adapter_is_exported_as_an_adapter(tmp_path: Path, store: Store) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = llama().float()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "expected")
    save_model_and_optim_state(store, model, run="a", step=1)
    export(store.url, "a@1", tmp_path / "out")
    expected, written = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("expected", "out"))
    assert identical(expected, written)


def test_resized_embeddings_are_part_of_an_adapter(tmp_path: Path, store: Store) -> None:
    base = llama().float()
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(101)
    model = lora(base)
    model.save_pretrained(tmp_path / "expected")
    save_model_and_optim_state(store, model, run="a", step=1)
    export(store.url, "a@1", tmp_path / "out")
    expected, written = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("expected", "out"))
    assert "base_model.model.model.embed_tokens.weight" in written
    assert identical(expected, written)


def test_an_adapter_keeps_its_names_beside_the_files_of_an_import(tmp_path: Path, store: Store) -> None:
    model = lora(llama().float())
    model.save_pretrained(tmp_path / "expected")
    made = import_safetensors(store, tmp_path / "expected", run="adapter", step=0)
    files = {name: store.read_attachment(made, name) for name in store.attachments(made)}
    assert HUB_FILE in files
    save_model_and_optim_state(store, model, run="a", step=1, attachments=files)
    for ref in ("adapter@0", "a@1"):
        export(store.url, ref, tmp_path / ref)
        expected, written = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("expected", ref))
        assert identical(expected, written)


@pytest.mark.parametrize("base", ["/moved/model", "./runs/base/1", "a/b/c", "C:\\base"])
def test_a_base_model_that_has_moved_is_ignored(store: Store, base: str) -> None:
    model = lora(llama().float())
    model.peft_config["default"].base_model_name_or_path = base
    save_model_and_optim_state(store, model, run="a", step=1)
    assert store.attachments("a@1").keys() == {"adapter_config.json", HUB_FILE}


def test_an_adapter_whose_name_cannot_be_a_folder_name_is_saved_without_its_config(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    save_model_and_optim_state(store, peft.get_peft_model(llama().float(), config, "/abs"), run="a", step=1)
    assert not store.attachments("a@1")
    assert "cannot be the name of a folder" in caplog.text


def test_a_computed_adapter_is_saved_without_its_config(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    save_model_and_optim_state(store, peft.get_peft_model(llama().float(), config), run="a", step=1)
    assert not store.attachments("a@1")
    assert "is not a part of one tensor" in caplog.text


# Diffusers


def test_a_diffusers_model_is_exported_under_its_names(tmp_path: Path, store: Store) -> None:
    diffusers: Any = pytest.importorskip("diffusers", reason="needs diffusers")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    model = diffusers.UNet2DModel(sample_size=8, norm_num_groups=2, layers_per_block=1, **blocks)
    save_model_and_optim_state(store, model, run="a", step=1)
    export(store.url, "a@1", tmp_path / "out", "--max-shard-size", "20KB")
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    found = diffusers.UNet2DModel.from_pretrained(tmp_path / "out")
    assert identical(dict(found.state_dict()), dict(model.state_dict()))


def test_an_export_reports_an_output_head_only_if_it_differs_from_the_embeddings(tmp_path: Path, store: Store) -> None:
    model = gpt2()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    save_model_and_optim_state(store, model, run="a", step=1)
    (note,) = export(store.url, "a@1", tmp_path / "out")["notes"]
    assert "ties 'model.lm_head.weight' to the input embeddings, but the values differ" in note
    save_model_and_optim_state(store, gpt2(), run="a", step=2)
    assert export(store.url, "a@2", tmp_path / "tied")["notes"] == []


def sharded(rank: int, size: int, path: Path) -> None:
    """Save a sharded adapter and a replicated one."""
    warnings.simplefilter("ignore")  # of Transformers and PEFT
    ways: list[Any] = [fully_shard, DistributedDataParallel]
    for step, shard in enumerate(ways):
        save_model_and_optim_state(path, shard(lora(llama().float())), run="a", step=step)


def test_a_sharded_and_a_replicated_adapter_are_exported(tmp_path: Path, ranks: Pool) -> None:
    lora(llama().float()).save_pretrained(tmp_path / "expected")
    ranks.run(2, sharded, tmp_path / "store")
    names = load_file(tmp_path / "expected" / "adapter_model.safetensors").keys()
    for step in (0, 1):
        export(tmp_path / "store", f"a@{step}", tmp_path / str(step))
        assert load_file(tmp_path / str(step) / "adapter_model.safetensors").keys() == names
