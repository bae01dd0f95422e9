"""`CasTrainerMixin` with TRL's SFTTrainer, with and without adapters of PEFT."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
trl: Any = pytest.importorskip("trl", reason="needs trl and datasets, which are too large for the dev extra")
peft: Any = pytest.importorskip("peft", reason="needs trl and datasets, which are too large for the dev extra")
datasets: Any = pytest.importorskip("datasets", reason="needs trl and datasets, which are too large for the dev extra")

from casckpt.frontends.transformers import CasTrainerMixin
from casckpt.store.store import Store
from tests.frontends.transformers.test_callback import MODEL, Losses
from tests.frontends.transformers.test_mixin import Crash, Stops, crash
from tests.support.hub import check_loads, export
from tests.support.saves import steps
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries, about each other


class MyTrainer(CasTrainerMixin, trl.SFTTrainer):  # type: ignore[misc] # trl has no types
    pass


@pytest.fixture(autouse=True)
def _own_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep datasets from hashing the trainer's functions, because it would pickle everything that they refer to."""
    monkeypatch.setattr(datasets.fingerprint.Hasher, "hash", classmethod(lambda cls, value: os.urandom(8).hex()))


def trainer(store: Any, folder: Path, *callbacks: Any, adapters: bool) -> Any:
    tokenizer = hub.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.eos_token = tokenizer.sep_token
    hub.set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = [{"text": f"rain falls on the {word} hills"} for word in "abcdefghijkl"]
    settings = {
        "output_dir": folder, "max_steps": 6, "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "per_device_train_batch_size": 2, "disable_tqdm": True, "seed": 3, "bf16": False,
    }  # fmt: skip
    return MyTrainer(
        model=hub.LlamaForCausalLM(hub.LlamaConfig(**sizes, vocab_size=len(tokenizer))),
        args=trl.SFTConfig(**settings), train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapters else None,
        callbacks=list(callbacks), store=store, run="sft",
    )  # fmt: skip


@pytest.mark.parametrize("adapters", [False, True])
def test_a_crashed_fine_tuning_run_resumes_with_identical_losses(tmp_path: Path, store: Store, adapters: bool) -> None:
    losses, again = Losses(), Losses()
    whole = trainer(tmp_path / "whole", tmp_path / "out", losses, adapters=adapters)
    whole.train()
    crashing = trainer(store, tmp_path / "out", Stops(5, crash), adapters=adapters)
    with pytest.raises(Crash):
        crashing.train(resume_from_checkpoint=True)
    resumed = trainer(store, tmp_path / "out", again, adapters=adapters)
    resumed.train(resume_from_checkpoint=True)
    assert again.found == {step: losses.found[step] for step in (5, 6)}
    assert identical(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    assert [step for _, step in steps(store)] == [2, 4, 6]
    later = [one.stats.bytes_written for one in store.checkpoints("sft")][1:]
    trained = sum(one.nbytes for one in resumed.model.parameters() if one.requires_grad)
    assert all(size <= 1.02 * 3 * trained + (64 << 10) for size in later)  # frozen weights are stored once
    assert "tokenizer.json" in store.attachments("sft@6")
    if not adapters:
        export(store.url, "sft@6", tmp_path / "model")
        check_loads(tmp_path / "model", resumed.model)
