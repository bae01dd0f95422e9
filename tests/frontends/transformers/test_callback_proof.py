"""`CasCheckpointCallback(prove=True)`: compares the model and the optimizer before the first step of a resume."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
pytest.importorskip("accelerate", reason="needs casckpt[transformers]")

from casckpt.errors import Mismatch
from casckpt.frontends.training_state.proof import Proof
from casckpt.frontends.transformers import CasCheckpointCallback
from casckpt.store.store import Store
from tests.frontends.transformers.test_callback import Losses, restored_folder, tiny, trainer
from tests.frontends.transformers.test_mixin_proof import Sick
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import small, small_folder
from tests.support.torchrun import as_accelerate_hears

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers and Accelerate, about devices and tokenizers

RNG = {"transformers.rng.rng_state.pth": "files of the trainer, which are not compared"}


class Plain(torch.nn.Module):
    """A model that is not one of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: Any = torch.nn.Embedding(40000, 3)

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
        logits = self.embed(input_ids).mean(1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = small()
    trainer(tmp_path_factory.mktemp("out"), tiny(), CasCheckpointCallback(store, run="sft"), most=2).train()
    return store


def resumed(
    store: Any, folder: Path, *callbacks: Any, learner: Any = None, act: Callable[[Path], Any] = bool, **options: Any
) -> Proof | None:
    """Restore the folder of step 2, let ``act`` change it, resume for a step, and return the proof."""
    path = restored_folder(store, "sft@2", folder)
    act(path)
    callback = CasCheckpointCallback(store, run="sft", prove=True)
    learner = tiny() if learner is None else learner
    trainer(folder, learner, *callbacks, callback, most=3, **options).train(resume_from_checkpoint=str(path))
    return callback.proof


def test_a_right_resume_is_proved(saved: Store, tmp_path: Path) -> None:
    proof = resumed(saved, tmp_path)
    assert proof is not None
    assert proof.unproved == RNG
    assert proof.bytes == sum(entry.bytes for entry in saved.get("sft@2").tensors.values())


@pytest.mark.parametrize(("make", "options"), [(Plain, {}), (tiny, {"save_only_model": True})])
def test_other_right_resumes_are_proved(tmp_path: Path, make: Callable[[], Any], options: dict[str, Any]) -> None:
    store = small()
    trainer(tmp_path / "first", make(), CasCheckpointCallback(store, run="sft"), most=2, **options).train()
    proof = resumed(store, tmp_path, learner=make(), **options)
    assert proof is not None
    assert set(proof.unproved) <= set(RNG)
    assert proof.proved > 0


class Frozen(torch.nn.Module):
    """A model whose frozen layer has the given name."""

    _keys_to_ignore_on_save = None  # Trainer reads it to warn about missing keys

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.head = name, torch.nn.Linear(3, 3)
        self.add_module(name, torch.nn.Embedding(40000, 3).requires_grad_(False))

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
        logits = self.head(getattr(self, self.name)(input_ids).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_frozen_layer_with_a_different_name_is_found(tmp_path: Path) -> None:
    """`Trainer` leaves it as it was initialized, with a warning."""
    store = small()
    trainer(tmp_path / "first", Frozen("old"), CasCheckpointCallback(store, run="sft"), most=2).train()
    with pytest.raises(Mismatch, match=r"model\.new\.weight"):
        resumed(store, tmp_path, learner=Frozen("new"))


def moment(model: Any, optimizer: Any) -> torch.Tensor:
    found: torch.Tensor = optimizer.state[model.classifier.weight]["exp_avg"]
    return found


WRONG: dict[str, tuple[Callable[[Any, Any, Any], object], str]] = {
    "a layer is initialized again": (lambda model, *_: model.classifier.reset_parameters(), "model.classifier.weight"),
    "the embeddings are replaced by zeros": (
        lambda model, *_: model.bert.embeddings.word_embeddings.weight.zero_(),
        "model.bert.embeddings.word_embeddings.weight",
    ),
    "the model has a different dtype": (lambda model, *_: model.to(torch.bfloat16), "model.classifier.weight"),
    "the optimizer has no state": (lambda _, optimizer, __: optimizer.state.clear(), "optim.state.classifier.weight"),
    "a moment of the optimizer is reset": (
        lambda model, optimizer, _: moment(model, optimizer).zero_(), "optim.state.classifier.weight.exp_avg"
    ),
    "the learning rate is set by hand": (
        lambda _, optimizer, __: optimizer.param_groups[0].update(lr=1.0), "optim.param_groups"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_callback_changed_before_the_first_step_is_found(saved: Store, tmp_path: Path, name: str) -> None:
    act, key = WRONG[name]
    losses = Losses()
    with pytest.raises(Mismatch, match="after the resume") as caught:
        resumed(saved, tmp_path, Sick(act, "on_epoch_begin"), losses)
    assert any(found.startswith(key) for found in caught.value.keys), caught.value.keys
    assert losses.found == {}


def test_a_folder_without_its_optimizer_is_found(saved: Store, tmp_path: Path) -> None:
    """`Trainer` then starts with a new optimizer, without a warning."""
    with pytest.raises(Mismatch, match=r"optim\.state\.bert\."):
        resumed(saved, tmp_path, act=lambda folder: (folder / "optimizer.pt").unlink())


def test_a_resume_from_a_step_that_is_not_in_the_run_is_not_proved(
    saved: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = restored_folder(saved, "sft@2", tmp_path)
    callback = CasCheckpointCallback(small(), run="sft", prove=True)
    with caplog.at_level(logging.WARNING, logger="casckpt"):
        trainer(tmp_path, tiny(), callback, most=3).train(resume_from_checkpoint=str(path))
    assert callback.proof is None
    assert "the resume is not proved: " in caplog.text


def on_ranks(rank: int, size: int, folder: Path) -> Any:
    with as_accelerate_hears(rank, size):
        hub.logging.set_verbosity_error()
        saving = CasCheckpointCallback(folder / "store", run="sft")
        trainer(folder / "out", tiny(), saving, most=2, ddp_backend="gloo").train()
        outcomes, path = [], str(folder / "out" / "checkpoint-2")
        for act in (lambda *_: None, WRONG["a layer is initialized again"][0]):
            callback = CasCheckpointCallback(folder / "store", run="sft", prove=True)
            options = {"ddp_backend": "gloo", "save_strategy": "no"}
            learning = trainer(folder / "out", tiny(), Sick(act), callback, most=3, **options)
            outcome = outcome_of(partial(learning.train, resume_from_checkpoint=path))
            outcomes.append((callback.proof is not None, type(outcome).__name__))
        return outcomes


def test_rank_0_compares_and_all_ranks_raise_its_error(tmp_path: Path, ranks: Pool) -> None:
    small_folder(tmp_path / "store")
    right, wrong = (True, "TrainOutput"), (False, "Mismatch")
    assert ranks.run(2, on_ranks, tmp_path) == [[right, wrong], [(False, right[1]), wrong]]
