"""`from_pretrained` loads any step of a training run from an export, a server and a follower."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
pytest.importorskip("accelerate", reason="needs casckpt[transformers]")
pytest.importorskip("uvicorn", reason="needs casckpt[serve]")

from huggingface_hub import snapshot_download

from casckpt.frontends.follow import CURRENT, Follower
from casckpt.frontends.transformers import CasCheckpointCallback, CasTrainerMixin, restore_checkpoint
from casckpt.store.store import Store
from tests.frontends.transformers.test_mixin import MyTrainer, examples, model, trainer
from tests.support.hub import export
from tests.support.serving import serving

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers, Accelerate, PEFT and TRL, about devices

WORDS = torch.arange(8).view(1, 8)


def logits(learner: Any) -> torch.Tensor:
    was_training = learner.training
    with torch.no_grad():
        found: torch.Tensor = learner.eval()(input_ids=WORDS).logits
    learner.train(was_training)
    return found


class Notes(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
    """A callback that notes the logits of each saved step."""

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found[state.global_step] = logits(kwargs["model"])


def lora() -> Any:
    peft: Any = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model(), config)


def with_adapter(folder: Path) -> Any:
    peft: Any = pytest.importorskip("peft", reason="needs peft")
    return peft.PeftModel.from_pretrained(model(), folder)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    "llama": (model, hub.AutoModelForCausalLM.from_pretrained),
    "mixtral": (lambda: model("mixtral"), hub.AutoModelForCausalLM.from_pretrained),
    "lora": (lora, with_adapter),
}
"""How to make a model, and how to load it from a folder."""


def check_folders(store: Store, folder: Path, expected: dict[int, torch.Tensor], load: Callable[[Path], Any]) -> None:
    """Load every step of the run "sft" through an export and a server, and the newest one through a follower."""
    assert len(expected) > 1
    with serving(store) as served:
        for step, found in expected.items():
            export(store.url, f"sft@{step}", folder / f"export{step}")
            path = snapshot_download("sft", revision=str(step), endpoint=served.endpoint, cache_dir=folder / "cache")
            for place in (folder / f"export{step}", Path(path)):
                assert torch.equal(logits(load(place)), found)
    list(Follower(store, "sft", folder / "followed").follow(once=True))
    assert torch.equal(logits(load(folder / "followed" / CURRENT)), expected[max(expected)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_loads_from_an_export_a_server_and_a_follower(tmp_path: Path, store: Store, kind: str) -> None:
    make, load = KINDS[kind]
    notes = Notes()
    trainer(store, tmp_path / "out", notes, learner=make(), max_steps=4).train()
    check_folders(store, tmp_path, notes.found, load)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_the_callback_loads(tmp_path: Path, store: Store, kind: str) -> None:
    make, load = KINDS[kind]
    notes, callback = Notes(), CasCheckpointCallback(store, run="sft")
    arguments = hub.TrainingArguments(
        output_dir=tmp_path / "out", max_steps=4, save_steps=2, per_device_train_batch_size=4, report_to="none",
        use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    hub.Trainer(model=make(), args=arguments, train_dataset=examples(), callbacks=[notes, callback]).train()
    check_folders(store, tmp_path, notes.found, load)
    written = restore_checkpoint(store, "sft@4", tmp_path / "again")
    assert sorted(path.name for path in Path(written or "").iterdir()) == sorted(
        path.name for path in (tmp_path / "out" / "checkpoint-4").iterdir()
    )


def test_every_step_of_a_fine_tuning_run_with_peft_loads_and_resumes(tmp_path: Path, store: Store) -> None:
    trl: Any = pytest.importorskip("trl", reason="needs trl, which is too large for the dev extra")
    datasets: Any = pytest.importorskip("datasets", reason="needs datasets, which is too large for the dev extra")
    peft: Any = pytest.importorskip("peft", reason="needs peft")
    from tests.frontends.transformers.test_callback import MODEL

    class MyTrainer(CasTrainerMixin, trl.SFTTrainer):  # type: ignore[misc] # trl has no types
        pass

    tokenizer = hub.AutoTokenizer.from_pretrained(MODEL)
    table = import_module("datasets.table").InMemoryTable.from_pydict(
        {"input_ids": [row["input_ids"].tolist() for row in examples()]}
    )
    rows = datasets.Dataset(table, fingerprint="rows")

    def train(notes: Notes, most: int) -> None:
        arguments = trl.SFTConfig(
            output_dir=tmp_path / "out", max_steps=most, save_steps=2, per_device_train_batch_size=4, report_to=[],
            use_cpu=True, disable_tqdm=True, learning_rate=1e-3, bf16=False, max_length=8,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        training: Any = MyTrainer(
            model=model(), args=arguments, train_dataset=rows, processing_class=tokenizer,
            peft_config=config, callbacks=[notes], store=store, run="sft",
        )  # fmt: skip
        training.train(resume_from_checkpoint=True)

    first, second = Notes(), Notes()
    train(first, 4)
    train(second, 6)
    assert sorted(second.found) == [6]
    check_folders(store, tmp_path, first.found | second.found, with_adapter)


def test_the_mixin_attaches_the_same_files_to_every_step(tmp_path: Path, store: Store) -> None:
    trainer(store, tmp_path / "out", learner=model("mixtral"), kind=MyTrainer, max_steps=4).train()
    first, second = (store.get(f"sft@{step}") for step in (2, 4))
    names = store.attachments(first)
    assert names.keys() == store.attachments(second).keys()
    for name in names.keys() - {"trainer_state.json"}:
        assert store.read_attachment(first, name) == store.read_attachment(second, name)
