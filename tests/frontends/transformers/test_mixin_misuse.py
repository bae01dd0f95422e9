"""`CasTrainerMixin` with wrong arguments, unusual training runs, and processes that die."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
pytest.importorskip("accelerate", reason="needs casckpt[transformers]")

import casckpt
from casckpt.errors import Conflict, InvalidInput, Mismatch, MissingKey, NotFound, RankFailed, StorageError
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.transformers import CasTrainerMixin
from casckpt.storage.local.folders import Folders
from casckpt.store.store import Store
from tests.frontends.transformers.test_callback import Losses
from tests.frontends.transformers.test_mixin import BEST, Crash, MyTrainer, Stops, crash, examples, model, trainer
from tests.support.faulty import FaultyStore, fail_before
from tests.support.ranks import Pool, die
from tests.support.repositories import memory
from tests.support.saves import small, steps
from tests.support.torchrun import as_accelerate_hears
from tests.support.training import identical

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore"),  # Transformers and Accelerate, about devices and tokenizers
]


class Rising(MyTrainer):
    """A trainer whose evaluation loss is the step, so that the first step is the best."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        found: dict[str, float] = super().evaluate(*args, **kwargs)
        self.state.log_history[-1]["eval_loss"] = found["eval_loss"] = float(self.state.global_step)
        return found


def test_a_training_run_without_saves_does_not_access_the_store(tmp_path: Path) -> None:
    training = trainer(tmp_path / "store", tmp_path / "out")
    assert training.evaluate()["eval_loss"] > 0
    training.predict(examples(2))
    trainer(tmp_path / "store", tmp_path / "out", save_strategy="no").train(resume_from_checkpoint=True)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"keeep": 2}}, "unexpected keyword argument 'keeep'"),
        ({"settings": {"run": "other"}}, "unexpected keyword argument 'run'"),
        ({"settings": {"keep": -1}}, "keep-last -1 is not valid"),
        ({"run": ""}, "run"),
        ({"run": "a@b"}, "run"),
        ({"signal_every": 0}, "every=0 is not valid"),
    ],
)
def test_wrong_arguments_raise_an_error_before_the_training_starts(
    tmp_path: Path, store: Store, options: Any, message: str
) -> None:
    mixin = {"store": store, "run": "sft"} | options
    arguments = hub.TrainingArguments(tmp_path / "out", report_to="none", use_cpu=True)
    with pytest.raises((InvalidInput, TypeError), match=message):
        MyTrainer(model(), args=arguments, train_dataset=examples(), **mixin)


def test_the_mixin_must_be_the_first_base_class() -> None:
    class Other(hub.Trainer):  # type: ignore[misc] # transformers has no types
        pass

    with pytest.raises(InvalidInput, match=r"write class Wrong\(CasTrainerMixin, Other\)"):

        class Wrong(Other, CasTrainerMixin):
            pass


@pytest.mark.parametrize("ref", ["other@7", "out/checkpoint-7", "/none/sft@7", "True", "", "no such id"])
def test_a_reference_that_does_not_exist_is_rejected(tmp_path: Path, store: Store, ref: str) -> None:
    trainer(store, tmp_path / "out", max_steps=2).train()
    text = f"there is no checkpoint of run 'other'|the folder {ref!r} does not exist; pass the path of an existing"
    with pytest.raises(NotFound, match=text):
        trainer(store, tmp_path / "out").train(resume_from_checkpoint=ref)


def test_a_checkpoint_of_a_different_run_continues_in_this_run(tmp_path: Path, store: Store) -> None:
    losses = Losses()
    trainer(tmp_path / "whole", tmp_path / "out", losses, **BEST).train()
    with pytest.raises(Crash):
        trainer(store, tmp_path / "out", Stops(5, crash), run="first", **BEST).train()
    found = Losses()
    training = trainer(store, tmp_path / "out", found, run="second", max_steps=6, **BEST)
    training.train(resume_from_checkpoint="first@4")
    assert found.found == {step: losses.found[step] for step in (5, 6)}
    assert sorted(steps(store)) == [("first", 2), ("first", 4), ("second", 6)]


def test_a_checkpoint_of_a_different_model_is_rejected(tmp_path: Path, store: Store) -> None:
    trainer(store, tmp_path / "out", max_steps=2).train()
    learner = model("mixtral")
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    with pytest.raises((Mismatch, MissingKey)):
        trainer(store, tmp_path / "out", learner=learner).train(resume_from_checkpoint=True)
    assert identical(dict(learner.state_dict()), before)


def test_a_checkpoint_of_a_custom_loop_is_rejected(tmp_path: Path, store: Store) -> None:
    learner = model()
    Checkpointer(store, run="sft").save(3, learner, torch.optim.AdamW(learner.parameters()))
    with pytest.raises(Mismatch, match="sft@3 was not saved by a CasTrainerMixin"):
        trainer(store, tmp_path / "out").train(resume_from_checkpoint=True)


def test_a_trainer_can_train_several_times_if_it_resumes(tmp_path: Path, store: Store) -> None:
    losses = Losses()
    training = trainer(store, tmp_path / "out", losses, Stops(3, crash))
    with pytest.raises(Crash):
        training.train()
    with pytest.raises(Conflict, match=r"call train\(resume_from_checkpoint=True\) first"):
        training.train()
    training.remove_callback(Stops)
    training.train(resume_from_checkpoint=True)
    assert sorted(losses.found) == [1, 2, 3, 4, 5, 6]
    training.args.max_steps = 8
    training.train(resume_from_checkpoint=True)
    assert [step for _, step in steps(store)] == [2, 4, 6, 8]
    training.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_resuming_a_finished_training_run_runs_no_further_step(tmp_path: Path, store: Store) -> None:
    done = trainer(store, tmp_path / "out", **BEST)
    done.train()
    losses = Losses()
    again = trainer(store, tmp_path / "out", losses, learner=model("llama", 0.0), **BEST)
    again.train(resume_from_checkpoint=True)
    assert losses.found == {}
    assert again.state.best_model_checkpoint == done.state.best_model_checkpoint
    assert identical(dict(again.model.state_dict()), dict(done.model.state_dict()))


def test_a_training_run_of_zero_epochs_writes_nothing(tmp_path: Path, store: Store) -> None:
    trainer(store, tmp_path / "out", max_steps=-1, num_train_epochs=0).train(resume_from_checkpoint=True)
    assert not store.exists()


def test_a_trainer_replaces_steps_of_another_only_with_overwrite(tmp_path: Path, store: Store) -> None:
    first = trainer(store, tmp_path / "5", seed=5)
    second = trainer(store, tmp_path / "6", seed=6, settings={"overwrite": True})
    first.train()
    second.train()
    assert [step for _, step in steps(store)] == [2, 4, 6]
    found = {"model": {name: torch.zeros_like(value) for name, value in second.model.state_dict().items()}}
    store.load(found, "sft@6", unread="ignore")
    assert identical(found["model"], dict(second.model.state_dict()))


def test_a_training_run_that_finds_its_own_batch_size_resumes_bit_for_bit(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(MyTrainer):
        def training_step(self, learner: Any, inputs: Any, *args: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(learner, inputs, *args)

    options: dict[str, Any] = {"kind": Full, "auto_find_batch_size": True}
    losses = Losses()
    trainer(tmp_path / "whole", tmp_path / "out", losses, **options).train()
    with pytest.raises(Crash):
        trainer(store, tmp_path / "out", Stops(5, crash), **options).train()
    again = Losses()
    trainer(store, tmp_path / "out", again, **options).train(resume_from_checkpoint=True)
    assert again.found == {step: losses.found[step] for step in (5, 6)}
    assert "examples in each step" not in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_attempts_with_too_large_batches_are_replaced(
    tmp_path: Path, store: Store, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(MyTrainer):
        def training_step(self, learner: Any, inputs: Any, *args: Any) -> Any:
            if len(inputs["input_ids"]) > 2 and self.state.global_step == 4:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(learner, inputs, *args)

    losses, again = Losses(), Losses()
    options: dict[str, Any] = {"kind": Late, "auto_find_batch_size": True, "async_save": is_async}
    trainer(tmp_path / "whole", tmp_path / "out", losses, **options, save_strategy="no").train()
    trainer(store, tmp_path / "out", again, **options).train()
    assert again.found == losses.found
    assert [one.step for one in store.checkpoints()] == [2, 4, 6]
    assert "CUDA" not in caplog.text


def test_a_training_run_that_accumulates_gradients_resumes_bit_for_bit(tmp_path: Path, store: Store) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "max_steps": 14}
    losses, again = Losses(), Losses()
    trainer(tmp_path / "whole", tmp_path / "out", losses, **options).train()
    with pytest.raises(Crash):
        trainer(store, tmp_path / "out", Stops(11, crash), **options).train()
    trainer(store, tmp_path / "out", again, **options).train(resume_from_checkpoint=True)
    assert again.found == {step: losses.found[step] for step in range(11, 15)}


def test_a_trainer_with_a_model_function_resumes(tmp_path: Path, store: Store) -> None:
    def create() -> Any:
        return model()

    def make(where: Any, *callbacks: Any) -> Any:
        training = trainer(where, tmp_path / "out", *callbacks)
        training.model_init, training.model = create, None
        return training

    losses, again = Losses(), Losses()
    make(tmp_path / "whole", losses).train()
    crashing = make(store, Stops(5, crash))
    with pytest.raises(Crash):
        crashing.train()
    make(store, again).train(resume_from_checkpoint=True)
    assert again.found == {step: losses.found[step] for step in (5, 6)}


def test_frozen_parameters_are_written_once(tmp_path: Path, store: Store) -> None:
    learner = hub.LlamaForCausalLM(
        hub.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=4096
        )
    )
    learner.requires_grad_(False)
    learner.model.norm.requires_grad_(True)
    trainer(store, tmp_path / "out", learner=learner).train()
    first, *later = [one.stats.bytes_written for one in store.checkpoints("sft")]
    assert first > 1 << 20
    assert all(size < 1 << 16 for size in later)
    fresh = hub.LlamaForCausalLM(learner.config)
    fresh.requires_grad_(False)
    fresh.model.norm.requires_grad_(True)
    trainer(store, tmp_path / "out", learner=fresh).train(resume_from_checkpoint=True)
    assert identical(dict(fresh.state_dict()), dict(learner.state_dict()))


def test_early_stopping_continues_with_its_count_after_a_crash(tmp_path: Path, store: Store) -> None:
    options = BEST | {
        "kind": Rising, "max_steps": 20, "restore_callback_states_from_checkpoint": True, "save_total_limit": 1
    }  # fmt: skip
    crashing = trainer(
        store, tmp_path / "out", hub.EarlyStoppingCallback(early_stopping_patience=3), Stops(5, crash), **options
    )
    with pytest.raises(Crash):
        crashing.train()
    training = trainer(store, tmp_path / "out", hub.EarlyStoppingCallback(early_stopping_patience=3), **options)
    training.train(resume_from_checkpoint=True)
    assert training.state.global_step == 8  # 4, 6 and 8 are worse than 2
    assert training.state.best_model_checkpoint == "sft@2"
    assert [step for _, step in steps(store)] == [2, 8]


def test_a_metric_that_is_not_a_number_is_saved(tmp_path: Path, store: Store) -> None:
    class Measured(MyTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            found: dict[str, float] = super().evaluate(*args, **kwargs)
            self.state.log_history[-1]["eval_loss"] = found["eval_loss"] = math.nan
            return found

    training = trainer(store, tmp_path / "out", kind=Measured, save_total_limit=1, **BEST)
    training.train()
    assert training.state.best_model_checkpoint is None
    assert steps(store)[-1] == ("sft", 6)


def test_a_training_run_logs_that_its_best_checkpoint_is_gone(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    training = trainer(store, tmp_path / "out", Stops(6, lambda: store.forget("sft@2")), kind=Rising, **BEST)
    training.train()
    assert "the best one is gone" in caplog.text
    found = {"model": {name: torch.zeros_like(value) for name, value in training.model.state_dict().items()}}
    store.load(found, "sft@6", unread="ignore")
    assert identical(found["model"], dict(training.model.state_dict()))


def test_the_scale_of_the_gradients_is_saved_and_loaded(tmp_path: Path, store: Store) -> None:
    def make(where: Any, *callbacks: Any) -> Any:
        training = trainer(where, tmp_path / "out", *callbacks)
        training.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return training

    losses, again = Losses(), Losses()
    make(tmp_path / "whole", losses).train()
    with pytest.raises(Crash):
        make(store, Stops(5, crash)).train()
    assert store.read("sft@4")["train"][0]["scaler"]["scale"] == 32.0
    training = make(store, again)
    training.train(resume_from_checkpoint=True)
    assert training.accelerator.scaler.get_scale() == 64.0
    assert again.found == {step: losses.found[step] for step in (5, 6)}


def test_nothing_is_written_to_the_output_folder(tmp_path: Path, store: Store) -> None:
    trainer(store, tmp_path / "out", save_total_limit=1, **BEST).train()
    assert [*(tmp_path / "out").iterdir()] == []


@pytest.mark.parametrize("resume", [True, None])
def test_a_path_that_cannot_be_a_store_raises_an_error_before_the_first_step(
    tmp_path: Path, resume: bool | None
) -> None:
    (tmp_path / "file").write_text("")
    training = trainer(tmp_path / "file" / "store", tmp_path / "out")
    with pytest.raises(InvalidInput, match="cannot be a store because it, or part of its path, is a file: use the"):
        training.train(resume_from_checkpoint=resume)
    assert training.state.global_step == 0


@pytest.mark.parametrize("resume", [True, None])
def test_a_dangling_link_raises_an_error_at_the_first_save(tmp_path: Path, resume: bool | None) -> None:
    (tmp_path / "store").symlink_to(tmp_path / "gone")
    training = trainer(tmp_path / "store", tmp_path / "out")
    with pytest.raises(InvalidInput, match="which does not exist: create that folder first"):
        training.train(resume_from_checkpoint=resume)
    assert training.state.global_step == 2
    (tmp_path / "gone").mkdir()
    training.train()
    assert steps(casckpt.open(tmp_path / "store"))


def test_a_store_that_the_user_may_not_create_raises_an_error_at_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    training = trainer(tmp_path / "store", tmp_path / "out")
    monkeypatch.setattr(Folders, "_create_root", refuse)
    with pytest.raises(StorageError, match="permission denied: check the owner and mode of the folder"):
        training.train()
    assert training.state.global_step == 2


def test_a_store_that_refuses_writes_raises_an_error_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An example is a read-only folder. Other storage errors may be temporary, so the training continues."""
    storage = FaultyStore(memory())
    store = small(storage)
    trainer(store, tmp_path / "out", max_steps=2).train()
    storage.inject(fail_before("put", times=1000, error=StorageError("read-only")))
    losses = Losses()
    with pytest.raises(StorageError, match="read-only"):
        trainer(store, tmp_path / "out", losses).train(resume_from_checkpoint=True)
    assert sorted(losses.found) == [3, 4, 5, 6]
    assert "the save of sft@4 failed" in caplog.text
    storage.heal()
    assert steps(store) == [("sft", 2)]


def fails(rank: int, size: int, folder: Path, how: str | None) -> Any:
    """Train under DDP. ``how``: what goes wrong on a rank at step 4."""
    with as_accelerate_hears(rank, size):
        hub.logging.set_verbosity_error()

        class Fails(MyTrainer):
            def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
                if self.state.global_step == 4 and rank == 0 and how == "error in a save":
                    raise Crash
                super()._save_optimizer_and_scheduler(output_dir)

        losses = Losses()
        training = trainer(folder / "store", folder / f"out{rank}", losses, kind=Fails, ddp_backend="gloo")
        if how == "death after a save" and rank == 1:
            training.add_callback(Saved(4, die))
        try:
            training.train(resume_from_checkpoint=True)
        except (Crash, RankFailed, RuntimeError) as error:
            return type(error).__name__, str(error)
        return losses.found


class Saved(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
    def __init__(self, step: int, call: Any) -> None:
        self.step, self.call = step, call

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.call()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, ranks: Pool) -> list[Any]:
    """The losses of all ranks if nothing fails."""
    return ranks.run(2, fails, tmp_path_factory.mktemp("whole"), None)


@pytest.mark.parametrize("how", ["error in a save", "death after a save"])
def test_no_rank_waits_for_a_rank_that_fails_at_a_save(
    tmp_path: Path, ranks: Pool, how: str, expected: list[Any]
) -> None:
    first, second = ranks.outcomes(2, fails, tmp_path, how)
    if how == "error in a save":
        assert first.value[0] == "Crash"
        assert second.value[0] == "RankFailed"
        assert "Crash" in second.value[1]
    else:
        assert "Connection" in first.value[1]
        assert second.died is not None
    last = steps(casckpt.open(tmp_path / "store"))[-1][1]
    assert last == 2 or (last == 4 and how == "death after a save")  # which may still be committed
    for losses, found in zip(expected, ranks.run(2, fails, tmp_path, None), strict=True):
        assert found == {step: loss for step, loss in losses.items() if step > last}
