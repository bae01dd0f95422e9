"""`CasTrainerMixin(prove=True)`: compares the live state with the checkpoint before the first step of a resume."""

# ruff: noqa: E402 - skip before importing optional packages

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

hub: Any = pytest.importorskip("transformers", reason="needs casckpt[transformers]")
pytest.importorskip("accelerate", reason="needs casckpt[transformers]")

from casckpt.errors import Mismatch
from casckpt.frontends.training_state.proof import Proof
from casckpt.frontends.transformers import mixin
from casckpt.store.store import Store
from tests.frontends.transformers.test_callback import Losses
from tests.frontends.transformers.test_mixin import trainer
from tests.support.ranks import Pool
from tests.support.saves import small, small_folder
from tests.support.torchrun import as_accelerate_hears

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers and Accelerate, about devices and tokenizers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a run that stopped at step 4, in the middle of an epoch."""
    store, folder = small(), tmp_path_factory.mktemp("out")
    trainer(store, folder, max_steps=4).train()
    return store


class Sick(hub.TrainerCallback):  # type: ignore[misc] # transformers has no types
    """A callback that changes the state after it was loaded. ``at``: the name of its event."""

    def __init__(self, act: Callable[[Any, Any, Any], object], at: str = "on_train_begin") -> None:
        def event(*arguments: Any, **named: Any) -> None:
            with torch.no_grad():
                act(named["model"], named["optimizer"].optimizer, named["lr_scheduler"])

        setattr(self, at, event)


def moment(model: Any, optimizer: Any) -> torch.Tensor:
    found: torch.Tensor = optimizer.state[model.lm_head.weight]["exp_avg"]
    return found


WRONG: dict[str, tuple[Callable[[Any, Any, Any], object], str]] = {
    "a layer is initialized again": (lambda model, *_: model.lm_head.reset_parameters(), "model.lm_head.weight"),
    "the embeddings are replaced by zeros": (
        lambda model, *_: model.model.embed_tokens.weight.zero_(), "model.model.embed_tokens.weight"
    ),
    "the model has a different dtype": (lambda model, *_: model.to(torch.bfloat16), "model.lm_head.weight"),
    "the optimizer has no state": (lambda _, optimizer, __: optimizer.state.clear(), "optim.state.lm_head.weight"),
    "a moment of the optimizer is reset": (
        lambda model, optimizer, _: moment(model, optimizer).zero_(), "optim.state.lm_head.weight.exp_avg"
    ),
    "the learning rate is set by hand": (
        lambda _, optimizer, __: optimizer.param_groups[0].update(lr=1.0), "optim.param_groups"
    ),
    "the scheduler starts again": (lambda *given: setattr(given[2], "last_epoch", 0), "train.0.scheduler.last_epoch"),
}  # fmt: skip


@pytest.mark.parametrize("at", ["on_train_begin", "on_epoch_begin"])
@pytest.mark.parametrize("name", WRONG)
def test_what_a_callback_changed_before_the_first_step_is_found(
    saved: Store, tmp_path: Path, name: str, at: str
) -> None:
    act, key = WRONG[name]
    losses = Losses()
    with pytest.raises(Mismatch, match="after the resume") as caught:
        trainer(saved, tmp_path, losses, Sick(act, at), prove=True).train(resume_from_checkpoint="sft@4")
    assert any(found.startswith(key) for found in caught.value.keys), caught.value.keys
    assert losses.found == {}


def test_random_generators_that_were_not_restored_are_found(
    saved: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixin, "restore_rng", lambda state: None)
    with pytest.raises(Mismatch, match=r"train\.0\.rng\.torch"):
        trainer(saved, tmp_path, prove=True).train(resume_from_checkpoint="sft@4")


def proved(store: Any, folder: Path, **options: Any) -> Proof:
    """Train until the run is interrupted, resume, and return the proof of the resume."""
    trainer(store, folder, **options).train()
    training = trainer(store, folder, prove=True, **{**options, "max_steps": 8})
    training.train(resume_from_checkpoint=True)
    assert training.state.global_step == 8
    assert isinstance(training.proof, Proof)
    return training.proof


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 4},  # in the middle of an epoch
        {"max_steps": 6},  # at the end of an epoch
        {"max_steps": 4, "ignore_data_skip": True},
        {"max_steps": 4, "gradient_accumulation_steps": 2},
        {"max_steps": 4, "optim": "sgd"},
    ],
    ids=str,
)
def test_a_resume_that_restores_everything_is_proved(tmp_path: Path, options: dict[str, Any]) -> None:
    store = small()
    proof = proved(store, tmp_path, **options)
    assert proof.unproved == {}
    found = store.get(f"sft@{options['max_steps']}")
    assert proof.bytes == sum(entry.bytes for entry in found.tensors.values())


def test_a_checkpoint_with_only_the_model_is_proved(tmp_path: Path) -> None:
    proof = proved(small(), tmp_path, max_steps=4, save_only_model=True)
    assert proof.proved > 0
    assert proof.unproved == {}


def on_ranks(rank: int, size: int, folder: Path) -> Any:
    with as_accelerate_hears(rank, size):
        hub.logging.set_verbosity_error()
        proof = proved(folder / "store", folder / f"out{rank}", max_steps=4, ddp_backend="gloo")
        return dict(proof.unproved)


def test_a_resume_on_several_ranks_is_proved(tmp_path: Path, ranks: Pool) -> None:
    small_folder(tmp_path / "store")
    assert ranks.run(2, on_ranks, tmp_path) == [{}, {}]
