"""`CasTrainerMixin`: training runs of tiny models that are killed, resumed, sharded and exported."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
pytest.importorskip("accelerate", reason="needs casckpt[transformers]")
from accelerate.state import GradientState

import casckpt
from casckpt.errors import InvalidInput, Mismatch, NotFound, Unsupported
from casckpt.frontends.transformers import CasCheckpointCallback, CasTrainerMixin
from casckpt.store.store import Store
from tests.frontends.test_accelerate import as_on_gpus
from tests.frontends.transformers.test_callback import MODEL, Losses
from tests.support.hub import check_loads, export
from tests.support.ranks import Pool, die
from tests.support.saves import copied, steps
from tests.support.torch_versions import needs_torch
from tests.support.torchrun import as_accelerate_hears
from tests.support.training import identical

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore"),  # Transformers and Accelerate, about devices and tokenizers
]

STEPS = 6


class MyTrainer(CasTrainerMixin, hub.Trainer):  # type: ignore[misc] # transformers has no types
    pass


class Stops(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
    """A callback that calls a function at the end of a step."""

    def __init__(self, step: int, call: Any) -> None:
        self.step, self.call = step, call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.call()


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def model(kind: str = "llama", dropout: float = 0.1) -> Any:
    hub.set_seed(3)
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 32, "attention_dropout": dropout,
    }  # fmt: skip
    if kind == "mixtral":
        return hub.MixtralForCausalLM(hub.MixtralConfig(**sizes, num_local_experts=3))
    return hub.LlamaForCausalLM(hub.LlamaConfig(**sizes))


def examples(count: int = 24) -> list[dict[str, torch.Tensor]]:
    rows = [(torch.arange(8) * (number + 3)) % 32 for number in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(
    store: Any, folder: Path, *callbacks: Any, learner: Any = None, kind: type = MyTrainer, **options: Any
) -> Any:
    names = {"run", "async_save", "signals", "settings", "prove"}
    mixin = {name: options.pop(name) for name in names.intersection(options)}
    settings = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 4, "save_strategy": "steps",
        "save_steps": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 5,
        "learning_rate": 1e-3,
    }  # fmt: skip
    return kind(
        model=model() if learner is None else learner, args=hub.TrainingArguments(**(settings | options)),
        train_dataset=examples(), eval_dataset=examples(4), callbacks=list(callbacks), store=store,
        **({"run": "sft"} | mixin),
    )  # fmt: skip


def plain(folder: Path, *callbacks: Any) -> None:
    """Train two steps with a plain `Trainer`, which saves a folder."""
    arguments = hub.TrainingArguments(
        output_dir=folder, max_steps=2, save_steps=2, logging_steps=1, per_device_train_batch_size=4,
        report_to="none", use_cpu=True, seed=5, learning_rate=1e-3, disable_tqdm=True,
    )  # fmt: skip
    hub.Trainer(model=model(), args=arguments, train_dataset=examples(), callbacks=list(callbacks)).train()


BEST: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], Any]:
    """The losses and the model of an uninterrupted training run."""
    losses, folder = Losses(), tmp_path_factory.mktemp("whole")
    training = trainer(folder / "whole", folder / "out", losses)
    training.train()
    return losses.found, training.model


def test_training_resumes_after_a_crash_with_identical_losses(
    tmp_path: Path, store: Store, whole: tuple[dict[int, float], Any]
) -> None:
    losses, trained = whole
    before, after = Losses(), Losses()
    with pytest.raises(Crash):
        trainer(store, tmp_path / "out", before, Stops(5, crash)).train(resume_from_checkpoint=True)
    training = trainer(store, tmp_path / "out", after)
    training.train(resume_from_checkpoint=True)
    assert sorted(after.found) == [5, 6]
    assert before.found | after.found == losses
    assert identical(training.model.state_dict(), trained.state_dict())
    assert not [*(tmp_path / "out").glob("checkpoint*")]


def test_a_copy_of_a_trainer_continues_its_run(tmp_path: Path, store: Store) -> None:
    GradientState._reset_state()  # Accelerate has one for all: an earlier training leaves there what cannot be pickled
    training = trainer(store, tmp_path / "out", settings={"gc": True}, save_total_limit=1)
    training.checkpointer.save(0, training.model)
    training.checkpointer.close()
    copies = copied(training)  # before its training, because a plain `Trainer` cannot be pickled afterward, either
    training.train()
    for other in copies:
        assert other.checkpointer.config == training.checkpointer.config
        assert other.train(resume_from_checkpoint=True).global_step == STEPS
        assert identical(other.model.state_dict(), training.model.state_dict())


def test_a_push_to_the_hub_has_the_model(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trainer(store, tmp_path / "out")
    training.hub_model_id = "me/mine"
    monkeypatch.setattr(training, "create_model_card", lambda **_: None)
    monkeypatch.setattr(training, "_finish_current_push", crash)  # right before it uploads the folder
    with pytest.raises(Crash):
        training.push_to_hub()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors"} <= names


def test_a_checkpoint_has_the_training_arguments_as_a_file(tmp_path: Path, store: Store) -> None:
    training = trainer(store, tmp_path / "out", learning_rate=0.25)
    training.train()
    kept = store.read_attachment(store.get("sft@2"), "training_args.bin")
    found = torch.load(io.BytesIO(kept), weights_only=False)
    assert (type(found), found.learning_rate) == (type(training.args), 0.25)
    store.export("sft@2", tmp_path / "export")
    assert not (tmp_path / "export" / "training_args.bin").exists()


@pytest.mark.parametrize("async_save", [True, False])
def test_the_memory_of_background_saves_is_prepared_before_the_first_one(
    tmp_path: Path, store: Store, async_save: bool
) -> None:
    memory = list[int]()
    noting = Stops(2, lambda: memory.append(store._saver.get().background.staging.nbytes))
    trainer(store, tmp_path / "out", noting, async_save=async_save, max_steps=3, save_steps=3).train()
    assert (memory[0] > 0) is async_save


def test_training_resumes_from_a_reference(tmp_path: Path, store: Store) -> None:
    losses = Losses()
    trainer(store, tmp_path / "out", losses).train()
    again = Losses()
    rolled_back = trainer(store, tmp_path / "out", again, settings={"overwrite": True})
    rolled_back.train(resume_from_checkpoint="sft@2")
    assert again.found == {step: loss for step, loss in losses.found.items() if step > 2}
    with pytest.raises(NotFound, match="has no step 3"):
        trainer(store, tmp_path / "out").train(resume_from_checkpoint="sft@3")


def test_resuming_an_empty_run_warns_about_the_folder_of_a_plain_trainer(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    plain(tmp_path / "out")
    folder = str(tmp_path / "out" / "checkpoint-2")
    trainer(store, tmp_path / "out", max_steps=1).train(resume_from_checkpoint=True)
    assert f"pass resume_from_checkpoint={folder!r}" in caplog.text
    again = Losses()
    training = trainer(store, tmp_path / "out", again)
    training.train(resume_from_checkpoint=folder)
    assert sorted(again.found) == [3, 4, 5, 6]


def test_the_best_model_is_kept_and_loaded_at_the_end(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    values = iter([3.0, 1.0, 2.0, 1.5, 1.5, 1.5])

    class Measured(MyTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            found: dict[str, float] = super().evaluate(*args, **kwargs)
            self.state.log_history[-1]["eval_loss"] = found["eval_loss"] = next(values)
            return found

    limits = BEST | {"max_steps": 8, "save_total_limit": 1}
    with pytest.raises(Crash):
        trainer(store, tmp_path / "out", Stops(7, crash), kind=Measured, **limits).train()
    assert [step for _, step in steps(store)] == [4, 6]
    training = trainer(store, tmp_path / "out", kind=Measured, **limits)
    training.train(resume_from_checkpoint=True)
    assert [step for _, step in steps(store)] == [4, 8]
    assert training.state.best_model_checkpoint == "sft@4"
    found = {"model": {name: torch.zeros_like(value) for name, value in training.model.state_dict().items()}}
    store.load(found, "sft@4", unread="ignore")
    assert identical(training.model.state_dict(), found["model"])
    assert store.get("sft@4").metrics["eval_loss"] == 1.0
    assert "later steps" not in caplog.text  # this load is no resume
    training.train(resume_from_checkpoint="sft@4")
    assert caplog.text.count("sft@4 was loaded, but run sft already has later steps") == 1


STEPPED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 4}
BY_EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1}


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.9, 0.8, 0.7, 0.6], STEPPED | {"save_total_limit": 2}, ("sft@1", [1, 3, 4])),
        ([0.6, 0.7, 0.5, 0.4], STEPPED | {"save_total_limit": 1}, ("sft@2", [2, 4])),
        ([0.9, 0.7, 0.5], BY_EPOCH, ("sft@6", [2, 4, 6, 8, 10, 12, 14, 16, 18])),
        ([0.9, 0.7, 0.5], BY_EPOCH | {"save_total_limit": 2}, ("sft@6", [6, 16, 18])),
        ([0.9, 0.95, 0.5], BY_EPOCH | {"save_total_limit": 1, "save_steps": 4}, ("sft@12", [12, 18])),
        ([0.9, 0.7, 0.5], BY_EPOCH | {"save_total_limit": 1, "save_steps": 4}, ("None", [18])),
    ],
)
def test_the_best_checkpoint_is_kept_and_named_as_trainer_does(
    tmp_path: Path, store: Store, values: list[float], options: dict[str, Any], expected: tuple[str, list[int]]
) -> None:
    """Without ``load_best_model_at_end``, and also if a step is saved before its evaluation, or is not saved."""

    class Measured(MyTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {**super().evaluate(*args, **kwargs), "eval_accuracy": values.pop(0)}

    values, (best, kept) = [*values], expected
    training = trainer(store, tmp_path / "out", kind=Measured, metric_for_best_model="accuracy", **options)
    training.train()
    assert str(training.state.best_model_checkpoint) == best
    assert [step for _, step in steps(store)] == kept
    state = json.loads(store.read_attachment(store.get("sft@latest"), "trainer_state.json"))
    assert str(state["best_model_checkpoint"]) == best


def test_files_that_other_classes_write_and_the_mixin_does_not_are_named(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    class Writes(hub.Trainer):  # type: ignore[misc] # transformers has no types
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            """Write a projector."""

    class Both(CasTrainerMixin, Writes):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            """Is called, because it is before the mixin."""

    trainer(store, tmp_path / "out", kind=Both)
    (said,) = [one for one in caplog.messages if "does not contain what" in one]
    assert "Writes._save writes" in said
    assert "in _save_checkpoint" in said
    caplog.clear()
    trainer(store, tmp_path / "out")
    assert "does not contain what" not in caplog.text


def test_a_save_limit_without_evaluations_keeps_the_newest_checkpoints(tmp_path: Path, store: Store) -> None:
    trainer(store, tmp_path / "out", save_total_limit=1).train()
    assert [step for _, step in steps(store)] == [6]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_signal_saves_the_current_step_and_exits(
    tmp_path: Path, store: Store, is_async: bool, whole: tuple[dict[int, float], Any]
) -> None:
    losses, _ = whole
    before, after = Losses(), Losses()
    stop = Stops(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as exited:
        trainer(store, tmp_path / "out", before, stop, async_save=is_async).train()
    assert exited.value.code == 143
    assert [step for _, step in steps(store)] == [2, 3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    trainer(store, tmp_path / "out", after).train(resume_from_checkpoint=True)
    assert {**before.found, **after.found} == losses


def test_training_in_a_different_thread_ignores_signals(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: trainer(store, tmp_path / "out", max_steps=2).train()).result()
    assert [step for _, step in steps(store)] == [2]
    assert "does not run in the main thread" in caplog.text


def test_arguments_that_are_rejected_are_not_changed(tmp_path: Path, store: Store) -> None:
    arguments = hub.TrainingArguments(
        output_dir=tmp_path / "out", report_to="none", use_cpu=True, eval_strategy="steps", eval_steps=1
    )
    with pytest.raises(ValueError, match="eval_dataset"):
        MyTrainer(model(), args=arguments, train_dataset=examples(), store=store, run="a")
    assert arguments.save_only_model is False


def test_files_that_a_trainer_writes_and_reads_are_saved_and_restored(tmp_path: Path, store: Store) -> None:
    class Writes(hub.Trainer):  # type: ignore[misc] # transformers has no types
        read: list[str]

        def _save_checkpoint(self, learner: Any, trial: Any) -> None:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True)
            (folder / "before.json").write_text("1")
            super()._save_checkpoint(learner, trial)
            (folder / "after.json").write_text(str(self.state.global_step))

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                self.read = [Path(checkpoint, name).read_text() for name in ("before.json", "after.json")]

    class Both(CasTrainerMixin, Writes):
        pass

    trainer(store, tmp_path / "out", kind=Both, max_steps=4).train()
    training = trainer(store, tmp_path / "out", kind=Both)
    training.train(resume_from_checkpoint=True)
    assert training.read == ["1", "4"]


def test_a_save_writes_the_state_once_and_its_export_loads(tmp_path: Path, store: Store) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 1024}
    learner = hub.LlamaForCausalLM(hub.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    training = trainer(store, tmp_path / "out", learner=learner)
    training.train()
    state = 3 * sum(value.nbytes for value in learner.parameters())  # the weights and two moments
    for saved in store.checkpoints("sft"):
        assert saved.stats.bytes_written <= 1.02 * state
    export(store.url, "sft@latest", tmp_path / "model")
    check_loads(tmp_path / "model", learner)


def test_a_tokenizer_is_saved_with_the_model(tmp_path: Path, store: Store) -> None:
    training = trainer(store, tmp_path / "out", max_steps=2)
    training.processing_class = hub.AutoTokenizer.from_pretrained(MODEL)
    training.train()
    export(store.url, "sft@2", tmp_path / "model")
    assert hub.AutoTokenizer.from_pretrained(tmp_path / "model")("rain falls")["input_ids"]


def test_only_the_model_is_saved_if_the_optimizer_is_excluded(tmp_path: Path, store: Store) -> None:
    trainer(store, tmp_path / "out", save_only_model=True, max_steps=2).train()
    assert {key.split(".")[0] for key in store.get("sft@2").tensors} == {"model"}
    with pytest.raises(NotFound, match="has no optimizer"):
        trainer(store, tmp_path / "out").train(resume_from_checkpoint=True)
    trainer(store, tmp_path / "out", save_only_model=True).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_the_callback_is_rejected_with_advice(tmp_path: Path, store: Store) -> None:
    plain(tmp_path / "out", CasCheckpointCallback(store, run="sft"))
    with pytest.raises(Mismatch, match=r"sft@2 was not saved by a CasTrainerMixin.* restore_checkpoint"):
        trainer(store, tmp_path / "other").train(resume_from_checkpoint=True)


def test_a_resume_with_a_different_batch_size_is_logged(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(store, tmp_path / "out", max_steps=2).train()
    trainer(store, tmp_path / "out", max_steps=3, per_device_train_batch_size=2).train(resume_from_checkpoint=True)
    assert "sft@2 was saved with 4 examples in each step, but this run uses 2" in caplog.text


def test_the_error_of_the_last_save_is_raised(tmp_path: Path, store: Store) -> None:
    training = trainer(store, tmp_path / "out", max_steps=2, settings={"overwrite": False})
    store.save({"a": torch.zeros(1)}, run="sft", step=2)
    with pytest.raises(casckpt.errors.Conflict, match="sft@2"):
        training.train()


def test_the_mixin_leaves_the_room_that_others_need(tmp_path: Path, store: Store) -> None:
    training = trainer(store, tmp_path / "out", max_steps=2, settings={"min_free": "999TB"})
    with pytest.raises(casckpt.errors.StorageError, match="leaves min_free='999TB'"):
        training.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_on_each_node": True}, "save_on_each_node"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"settings": {"save_interval": 3}}, "save_interval has no effect"),
        ({"settings": {"keep": 2}, "save_total_limit": 2}, "keep and max_checkpoints cannot be combined"),
        ({"settings": {"keep": 2}} | BEST, "pass save_total_limit alone"),
        ({"settings": {"ephemeral_cooldown": 2}}, "ephemeral_cooldown has no effect"),
        ({"settings": {"min_free": "20 apples"}}, "'20 apples' is not a size"),
    ],
)
def test_arguments_that_cannot_work_are_rejected(
    tmp_path: Path, store: Store, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=message):
        trainer(store, tmp_path / "out", **options)


def test_a_hyperparameter_search_and_an_additional_callback_are_rejected(tmp_path: Path, store: Store) -> None:
    with pytest.raises(Unsupported, match="does not work with CasCheckpointCallback"):
        trainer(store, tmp_path / "out", CasCheckpointCallback(store, run="sft"))
    with pytest.raises(Unsupported, match="each trial in a separate run"):
        trainer(store, tmp_path / "out").train(trial={"learning_rate": 1})


# sharded models


@contextmanager
def accepts_cpus() -> Iterator[None]:
    """Stub: Accelerate allows tensor parallelism only on GPUs. All other code is real."""
    from accelerate.parallelism_config import ParallelismConfig

    with patch.object(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None):
        yield


def sharded(
    rank: int,
    size: int,
    folder: Path,
    kind: str,
    *,
    most: int,
    dies: int | None = None,
    resume: bool = True,
    tensor_parallel: int = 1,
) -> Any:
    """Train a model that `from_pretrained` shards over the ranks. Return losses, weights, and the evaluation before."""
    with as_accelerate_hears(rank, size), accepts_cpus():
        hub.logging.set_verbosity_error()
        configs: Any = import_module("transformers.distributed")

        torch.set_default_dtype(torch.float64)  # a sum over another number of ranks rounds in another order
        try:
            options: dict[str, Any] = {"dtype": torch.float64}
            if kind == "mixtral":
                options["experts_implementation"] = "eager"  # the others have no float64
            if size > 1:
                options["distributed_config"] = configs.DistributedConfig(
                    fsdp_size=size // tensor_parallel, tp_size=tensor_parallel
                )
            learner = type(model(kind)).from_pretrained(folder / kind, **options)
            assert any(isinstance(one, DTensor) for one in learner.parameters()) == (size > 1)
            losses, before = Losses(), list[Any]()
            training = trainer(
                folder / "store", folder / f"out{size}", losses, learner=learner, run=kind, max_steps=most,
                per_device_train_batch_size=12 * tensor_parallel // size,
            )  # fmt: skip
            if dies is not None:
                training.add_callback(Stops(dies, die))

            class Begins(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
                def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                    before.append((full(training.model), training.evaluate()["eval_loss"]))

            training.add_callback(Begins())
            training.train(resume_from_checkpoint=resume)
            return losses.found, full(training.model), *before[0]
        finally:
            torch.set_default_dtype(torch.float32)


def full(learner: Any) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in learner.state_dict().items()
    }


@needs_torch("2.8", "what Transformers needs for FSDP2")
@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.soak)])
def test_sharded_training_that_was_killed_resumes_on_any_number_of_ranks(
    tmp_path: Path, ranks: Pool, kind: str, seed: int, full: bool
) -> None:
    """The ranks are killed after a random step, perhaps while they save. With --full, at least 20 steps follow."""
    most = 26 if full else 8
    model(kind, dropout=0.0).save_pretrained(tmp_path / kind)
    whole = ranks.run(2, sharded, tmp_path, kind, most=most, resume=False)
    expected, weights = whole[0][:2]
    shutil.rmtree(tmp_path / "store")
    died = ranks.outcomes(2, sharded, tmp_path, kind, most=most, dies=random.Random(seed).randint(5, 7))
    assert all(outcome.died is not None for outcome in died)
    last = steps(casckpt.open(tmp_path / "store"))[-1][1]
    shutil.copytree(tmp_path / "store", tmp_path / "saved")
    outcomes = {}
    others = (3, 1) if full else (3,)  # the next test resumes on one rank
    for size in (2, *others):
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "saved", tmp_path / "store")
        outcomes[size] = ranks.run(size, sharded, tmp_path, kind, most=most)
    same = outcomes[2][0]
    assert same[0] == {step: loss for step, loss in expected.items() if step > last}
    assert identical(same[1], weights)
    for size in others:
        losses, _, begun, evaluated = outcomes[size][0]
        assert identical(begun, same[2])
        assert evaluated == pytest.approx(same[3], rel=1e-6)  # the loss is float32
        assert losses == pytest.approx(same[0], rel=1e-5)
    store = casckpt.open(tmp_path / "store")
    export(store.url, f"{kind}@latest", tmp_path / "model")
    check_loads(tmp_path / "model", type(model(kind)).from_pretrained(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == kind


@needs_torch("2.8", "what Transformers needs for tensor parallelism with FSDP2")
def test_tensor_parallel_training_resumes_with_fsdp_and_on_one_rank(tmp_path: Path, ranks: Pool) -> None:
    model("llama", dropout=0.0).save_pretrained(tmp_path / "llama")
    losses, weights, *_ = ranks.run(2, sharded, tmp_path, "llama", most=2, resume=False, tensor_parallel=2)[0]
    resumed = ranks.run(2, sharded, tmp_path, "llama", most=4, tensor_parallel=2)[0]
    assert sorted(losses) == [1, 2]
    assert identical(resumed[2], weights)
    for size in (2, 1):
        later = ranks.run(size, sharded, tmp_path, "llama", most=6)[0]
        assert identical(later[2], resumed[1])
        resumed = later


class OnGpus(MyTrainer):
    """Stub: its Accelerator shards the model with FSDP2, which it does only on GPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        as_on_gpus(self.accelerator, "LlamaDecoderLayer")
        self.is_fsdp_enabled = True


def sharded_by_accelerate(rank: int, size: int, folder: Path, *callbacks: Any) -> Any:
    """Train a model that Accelerate shards. Return the losses and the weights at the start and at the end."""
    with as_accelerate_hears(rank, size):
        hub.logging.set_verbosity_error()
        losses, before = Losses(), list[Any]()
        training = trainer(
            folder / "store", folder / f"out{rank}", losses, *callbacks, kind=OnGpus, save_total_limit=1, **BEST
        )

        class Begins(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                before.append(full(training.model))

        training.add_callback(Begins())
        with suppress(Crash):
            training.train(resume_from_checkpoint=True)
        assert all(isinstance(one, DTensor) for one in training.model.parameters())
        return losses.found, before[0], full(training.model)


def test_a_training_run_that_accelerate_shards_resumes(tmp_path: Path, ranks: Pool) -> None:
    losses, _, end = ranks.run(2, sharded_by_accelerate, tmp_path / "whole")[0]
    first, *_ = ranks.run(2, sharded_by_accelerate, tmp_path, Stops(5, crash))[0]
    shutil.copytree(tmp_path / "store", tmp_path / "again" / "store")
    second, begun, last = ranks.run(2, sharded_by_accelerate, tmp_path)[0]
    assert sorted(second) == [5, 6]
    assert first | second == losses
    assert identical(last, end)
    assert identical(ranks.run(3, sharded_by_accelerate, tmp_path / "again")[0][1], begun)


def replicated(rank: int, size: int, folder: Path, stops: int | None) -> Any:
    """Train under DDP. Rank 1 gets a signal after the step ``stops``. Return the losses, or the exit status."""
    with as_accelerate_hears(rank, size):
        hub.logging.set_verbosity_error()
        losses = Losses()
        training = trainer(folder / "store", folder / f"out{rank}", losses, ddp_backend="gloo")
        if rank == 1 and stops is not None:
            training.add_callback(Stops(stops, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        try:
            training.train(resume_from_checkpoint=True)
        except SystemExit as error:
            return error.code
        return losses.found


def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step(tmp_path: Path, ranks: Pool) -> None:
    whole = ranks.run(2, replicated, tmp_path / "whole", None)
    assert ranks.run(2, replicated, tmp_path, 3) == [143, 143]
    # the signal comes after the question of step 3, or before it
    stopped = max(step for _, step in steps(casckpt.open(tmp_path / "store")))
    assert stopped in (3, 4)
    for losses, all_losses in zip(ranks.run(2, replicated, tmp_path, None), whole, strict=True):
        assert losses == {step: loss for step, loss in all_losses.items() if step > stopped}
