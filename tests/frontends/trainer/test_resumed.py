"""A resume restores or reports everything that it receives. No optimizer state is lost silently."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from casckpt.errors import InvalidInput, Mismatch, MissingKey, NotFound
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state import load_model_and_optim_state, unshard_model_state, unshard_optim_state
from casckpt.store.store import Store
from tests.support.ranks import Pool
from tests.support.saves import small, small_folder
from tests.support.training import identical, made, trained

_RUNS = itertools.count()
Save = Callable[[Store, str], Any]


def new_run() -> str:
    """Return a new run, because casckpt logs each message once per run."""
    return f"resumed{next(_RUNS)}"


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def weights_alone(store: Store, run: str) -> Any:
    return store.save({"model": trained()[0].state_dict()}, run=run, step=5)


def bare_weights(store: Store, run: str) -> Any:
    return store.save(dict(trained()[0].state_dict()), run=run, step=5)


def optimizer_elsewhere(store: Store, run: str) -> Any:
    """Save a checkpoint with the optimizer at a different key, as an import of a torch.save file does."""
    model, optimizer = trained()
    return store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run=run, step=5)


def optimizer_by_number(store: Store, run: str) -> Any:
    model, optimizer = trained()
    return store.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, run=run, step=5)


def optimizer_without_groups(store: Store, run: str) -> Any:
    return store.save({"model": trained()[0].state_dict(), "optim": {"lr": 1.0}}, run=run, step=5)


ODD: list[Save] = [
    weights_alone, bare_weights, optimizer_elsewhere, optimizer_by_number, optimizer_without_groups,
]  # fmt: skip


@pytest.mark.parametrize("save", ODD)
def test_the_error_for_an_invalid_saved_optimizer_explains_the_problem(
    save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    store, run, (model, optimizer) = small(), new_run(), made(1)
    saved = save(store, run)
    before = model.state_dict()["head.weight"].clone()
    checkpointer = Checkpointer(store, run=run)
    with pytest.raises((NotFound, Mismatch), match=r"optimizer|param_groups"):
        checkpointer.resume(model, optimizer)
    assert torch.equal(model.state_dict()["head.weight"], before)
    assert checkpointer.resume(model, optimizer, missing="warn") == saved
    assert identical(dict(model.state_dict()), dict(trained()[0].state_dict()))
    assert not optimizer.state
    assert "has no optimizer that can be loaded" in told(caplog)
    with pytest.raises((NotFound, Mismatch), match=r"optimizer|param_groups"):
        checkpointer.load(f"{run}@5", model, optimizer, load_optim_state=True)


def test_the_error_for_a_missing_part_lists_the_keys_of_the_checkpoint() -> None:
    store, run, (model, optimizer) = small(), new_run(), made(1)
    optimizer_elsewhere(store, run)
    with pytest.raises(NotFound, match=r"has no optimizer .* it has 'model', 'optimizer'.*missing=\"warn\""):
        Checkpointer(store, run=run).resume(model, optimizer)


def test_a_load_logs_an_optimizer_that_the_checkpoint_lacks(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), made(1)
    optimizer_elsewhere(store, run)
    Checkpointer(store, run=run).load(f"{run}@5", model, optimizer)
    assert "has no optimizer that can be loaded (it has 'model', 'optimizer')" in told(caplog)
    assert f"did not read 'optimizer' of {run}@5" in told(caplog)
    caplog.clear()
    Checkpointer(store, run=run).load(f"{run}@5", model, optimizer, load_optim_state=False, unread="ignore")
    assert not told(caplog)


def test_the_error_for_an_invalid_train_state_explains_the_problem(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer = Checkpointer(store, run=run)
    saved = checkpointer.save(5, model, optimizer)
    state = TrainState(rng=False, epoch=7)
    with pytest.raises(NotFound, match="has no train state"):
        checkpointer.resume(model, optimizer, state)
    assert checkpointer.resume(model, optimizer, state, missing="warn") == saved
    assert state["epoch"] == 7
    assert "has no train state" in told(caplog)


def test_missing_parts_of_a_train_state_are_raised_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer = Checkpointer(store, run=run)
    checkpointer.save(5, model, optimizer, TrainState(rng=False, epoch=3))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    state = TrainState(schedule=schedule, epoch=0)
    with pytest.raises(MissingKey, match=r"'schedule'.*rng=False"):
        checkpointer.resume(model, optimizer, state)
    assert state["epoch"] == 0
    checkpointer.resume(model, optimizer, state, missing="warn")
    assert (state["epoch"], state["schedule"]) == (3, schedule)
    assert "left: 'train.schedule', 'train.rng' (not in the checkpoint" in told(caplog)


def test_a_resume_logs_saved_parts_that_were_not_passed(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer = Checkpointer(store, run=run)
    checkpointer.save(5, model, optimizer, TrainState(epoch=3))
    found = checkpointer.resume(model)
    assert found is not None
    assert found.unread_subtrees == ("optim", "train")
    assert "left: 'optim', 'train' (in the checkpoint, but not passed to resume" in told(caplog)
    caplog.clear()
    checkpointer.load(f"{run}@5", model, load_optim_state=False, load_trainer_state=False)
    checkpointer.load(f"{run}@5", model, optimizer)
    assert checkpointer.resume(model, unread="ignore") == found
    assert checkpointer.resume(model, optimizer, TrainState(epoch=0)) == found
    assert not told(caplog)


def test_parts_that_are_skipped_on_request_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    Checkpointer(store, run=run).save(5, model, optimizer, TrainState(epoch=3))
    unshard_model_state(store, f"{run}@5")
    unshard_optim_state(store, f"{run}@5")
    assert not told(caplog)
    loaded = load_model_and_optim_state(store, f"{run}@5", model)
    assert loaded.unread_subtrees == ("optim", "train")
    assert f"did not read 'train' of {run}@5" in told(caplog)  # the call does not pass an optimizer
    caplog.clear()
    load_model_and_optim_state(store, f"{run}@5", model, optimizer, unread="ignore")
    assert not told(caplog)


def test_missing_accepts_only_raise_or_warn() -> None:
    with pytest.raises(InvalidInput, match="missing='error' is not valid"):
        Checkpointer(small(), run="sft").resume(nn.Linear(2, 2), missing="error")  # type: ignore[arg-type]


class Module:
    """A train module that defines its own state."""

    def __init__(self) -> None:
        self.state = {"model": {"w": torch.zeros(2)}, "optim": {"m": torch.zeros(2)}}

    def state_dict_to_save(self) -> dict[str, Any]:
        return self.state

    def state_dict_to_load(self, metadata: Any, *, optim: bool = True) -> dict[str, Any]:
        return self.state if optim else {"model": self.state["model"]}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = set(state)


def test_a_train_module_resumes_with_its_optimizer() -> None:
    store, module = small(), Module()
    store.save({"model": {"w": torch.ones(2)}}, run="sft", step=1)
    with pytest.raises(MissingKey, match=r"optim\.m"):
        Checkpointer(store, run="sft").resume(module)
    Checkpointer(store, run="sft").resume(module, missing="warn")
    assert module.loaded == {"model"}


# matching state


def layers(*names: str, rows: int = 6) -> nn.ModuleDict:
    torch.manual_seed(len(names) + rows)
    return nn.ModuleDict({name: nn.Embedding(rows, 3) if name == "words" else nn.Linear(3, 3) for name in names})


def adam(model: nn.ModuleDict, *names: str) -> optim.AdamW:
    """Return AdamW with a parameter group for each of the named layers."""
    return optim.AdamW([{"params": model[name].parameters(), "lr": 0.1 + at} for at, name in enumerate(names)])


def weight(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_parameter(f"{name}.weight")


def saved_layers(store: Store, run: str, model: nn.ModuleDict, optimizer: optim.Optimizer) -> nn.ModuleDict:
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    Checkpointer(store, run=run).save(5, model, optimizer, TrainState(rng=False, epoch=3, old=1))
    return model


def test_a_resume_restores_all_parts_that_match(caplog: pytest.LogCaptureFixture) -> None:
    store, run, model = small(), new_run(), layers("words", "low", "body", "head", "gone")
    saved_layers(store, run, model, adam(model, "words", "low", "head", "gone"))
    # body was unfrozen, low frozen, gone removed, new added, and the vocabulary enlarged
    other = layers("words", "low", "body", "head", "new", rows=8)
    words, new = weight(other, "words").clone(), weight(other, "new").clone()
    optimizer, state = adam(other, "words", "head", "body", "new"), TrainState(rng=False, epoch=0, late=2)
    for options in ({}, {"missing": "warn", "strict": True}):
        with pytest.raises((MissingKey, Mismatch)):
            Checkpointer(store, run=run).resume(other, optimizer, state, **options)  # type: ignore[arg-type]
    checkpointer = Checkpointer(store, run=run)
    found = checkpointer.resume(other, optimizer, state, missing="warn")
    assert all(torch.equal(weight(other, name), weight(model, name)) for name in ("low", "body", "head"))
    assert torch.equal(weight(other, "words"), words)
    assert torch.equal(weight(other, "new"), new)
    assert set(optimizer.state) == set(other["head"].parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 2.1, 2.1, 3.1]  # head's was 1.1
    assert (state["epoch"], state["late"]) == (3, 2)
    assert checkpointer.resumed is not None
    assert checkpointer.resumed.checkpoint == found
    assert checkpointer.resumed.restored == ("model", "optim", "train")
    left = checkpointer.resumed.left
    there = [f"{place}.new.{what}" for place in ("model", "optim.state") for what in ("weight", "bias")]
    assert {key for key, why in left.items() if why.startswith("not in the checkpoint")} == {
        *there, "optim.state.body.weight", "optim.state.body.bias", "optim.state.words.weight", "train.late",
    }  # fmt: skip
    assert {key for key, why in left.items() if why.startswith("only in the checkpoint")} >= {
        "model.gone.weight", "model.gone.bias", "optim.state.gone.weight", "optim.state.low.bias", "train.old",
    }  # fmt: skip
    assert "load into the old size, then resize" in left["model.words.weight"]
    assert told(caplog).count("resumed model") == 1
    assert str(checkpointer.resumed).partition("\n  replaced:")[0] in told(caplog)


def test_a_vocabulary_can_be_loaded_and_then_resized(caplog: pytest.LogCaptureFixture) -> None:
    store, run, model = small(), new_run(), layers("words", "head")
    saved_layers(store, run, model, adam(model, "head"))
    other = layers("words", "head")
    Checkpointer(store, run=run).resume(other, adam(other, "head"), missing="warn", unread="ignore")
    wider = nn.Embedding(8, 3)
    with torch.no_grad():
        wider.weight[:6] = weight(other, "words")
    assert torch.equal(wider.weight[:6], weight(model, "words"))
    assert not told(caplog)  # everything that the call requests is in the checkpoint


def test_a_tensor_with_a_different_dtype_is_not_skipped() -> None:
    store, run, model = small(), new_run(), layers("head")
    saved_layers(store, run, model, adam(model, "head"))
    with pytest.raises(Mismatch, match="pass cast=True"):
        Checkpointer(store, run=run).resume(layers("head").bfloat16(), missing="warn")


@pytest.mark.parametrize("how", ["resume", "load"])
def test_a_resume_that_keeps_options_preserves_a_new_learning_rate(how: str, caplog: pytest.LogCaptureFixture) -> None:
    store, run, model = small(), new_run(), layers("head")
    saved_layers(store, run, model, adam(model, "head"))
    other = layers("head")
    optimizer = optim.AdamW(other.parameters(), lr=0.5, weight_decay=0.0)
    checkpointer = Checkpointer(store, run=run)
    if how == "load":
        checkpointer.load(f"{run}@5", other, optimizer, options="keep")
    else:
        checkpointer.resume(other, optimizer, TrainState(rng=False, epoch=0, old=0), options="keep")
        assert checkpointer.resumed is not None
        assert "the learning rate" in checkpointer.resumed.left["optim.param_groups"]
    assert not told(caplog)  # as requested
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.0)
    assert float(optimizer.state[weight(other, "head")]["step"]) == 1
    checkpointer.load(f"{run}@5", other, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.1, 0.01)


def resumed_with(
    store: Store, given: dict[str, Any], saved: dict[str, Any], schedule: Callable[[optim.Optimizer], Any] | None = None
) -> Checkpointer:
    """Resume into a new optimizer with the options ``given``.

    The saved one had different options and had taken two steps.
    """

    def made_with(options: dict[str, Any]) -> tuple[nn.Module, optim.Optimizer, TrainState]:
        model = layers("head")
        optimizer = optim.AdamW(model.parameters(), **deepcopy(options))  # a scheduler changes tensors in place
        return model, optimizer, TrainState(rng=False, schedule=schedule(optimizer) if schedule else 0)

    checkpointer, (model, optimizer, state) = Checkpointer(store, run=new_run()), made_with(saved)
    for _ in range(2):
        optimizer.step()
        if schedule:
            state["schedule"].step()
    checkpointer.save(2, model, optimizer, state)
    assert checkpointer.resume(*made_with(given)) is not None
    return checkpointer


def warmup(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: (epoch + 1) / 10)


def cycle(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)


def cosine(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


@pytest.mark.parametrize(
    ("given", "saved", "schedule", "replaced"),
    [
        ({"lr": 0.1}, {"lr": 0.3}, warmup, {"initial_lr": (0.1, 0.3)}),
        ({"lr": 0.3}, {"lr": 0.1}, warmup, {"initial_lr": (0.3, 0.1)}),
        ({"lr": torch.tensor(0.1)}, {"lr": 0.3}, cosine, {"initial_lr": (0.1, 0.3)}),
    ],
)  # fmt: skip
def test_a_resume_logs_the_learning_rates_that_it_replaces(
    given: dict[str, Any], saved: dict[str, Any], schedule: Any, replaced: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = resumed_with(small(), given, saved, schedule)
    want = {f"optim.param_groups.0.{name}": values for name, values in replaced.items()}
    assert checkpointer.resumed is not None
    assert checkpointer.resumed.replaced == want
    (line,) = told(caplog).splitlines()
    assert line.startswith("replaced: 'optim.param_groups.0' (")
    assert all(
        f"{name}={one} was given, but the checkpoint has {other}" in line for name, (one, other) in replaced.items()
    )
    assert 'options="keep" keeps what was given, and refuses' in line


@pytest.mark.parametrize("schedule", [None, warmup, cycle, cosine])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_an_ordinary_restart_does_not_log_learning_rates(
    schedule: Any, rate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = resumed_with(small(), {"lr": rate}, {"lr": rate}, schedule)
    assert checkpointer.resumed is not None
    assert not checkpointer.resumed.replaced
    assert not told(caplog)


def test_the_rate_of_a_scheduler_that_is_not_in_the_train_state_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    checkpointer, model = Checkpointer(small(), run=new_run()), layers("head")
    saved, given = (optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedule, _ = warmup(saved), warmup(given)
    saved.step()
    schedule.step()
    checkpointer.save(1, model, saved)
    checkpointer.resume(model, given)
    assert checkpointer.resumed is not None
    assert not checkpointer.resumed.replaced
    assert not told(caplog)


@pytest.mark.parametrize("given", [0.3, torch.tensor(0.05)])
def test_a_resume_without_a_scheduler_does_not_warn_that_it_replaced_a_learning_rate(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = resumed_with(small(), {"lr": given}, {"lr": 0.1})
    assert checkpointer.resumed is not None
    assert checkpointer.resumed.replaced == {"optim.param_groups.0.lr": (round(float(given), 6), 0.1)}
    assert not told(caplog)


def test_the_learning_rates_of_all_optimizers_are_logged_by_key() -> None:
    store, run, models = small(), new_run(), {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}

    def resumed(rate: float) -> Checkpointer:
        first, second = (optim.SGD(model.parameters(), lr=rate) for model in models.values())
        checkpointer = Checkpointer(store, run=run)
        if checkpointer.resume(models | {"sgd": first}, [second], missing="warn") is None:
            checkpointer.save(1, models | {"sgd": first}, second)
        return checkpointer

    resumed(0.5)
    found = resumed(0.1).resumed
    assert found is not None
    assert found.replaced == {"sgd.param_groups.0.lr": (0.1, 0.5), "optim.param_groups.0.lr": (0.1, 0.5)}


def test_invalid_group_options_are_rejected() -> None:
    store, (model, optimizer) = small(), trained()
    Checkpointer(store, run="sft").save(1, model, optimizer)
    with pytest.raises(InvalidInput, match="options='saved' is not valid"):
        Checkpointer(store, run="sft").resume(model, optimizer, options="saved")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="sets the state of its optimizer itself"):
        Checkpointer(store, run="sft").resume(Module(), options="keep")


def test_a_complete_resume_logs_a_single_line(caplog: pytest.LogCaptureFixture) -> None:
    store, (model, optimizer) = small(), trained()
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.save(1, model, optimizer)
    with caplog.at_level(logging.INFO, "casckpt"):
        checkpointer.resume(model, optimizer)
    assert checkpointer.resumed is not None
    assert not checkpointer.resumed.left
    assert f"resumed model, optim from sft@1 of {store.url}" in [record.getMessage() for record in caplog.records]


def of_stages(rank: int, size: int, path: Path) -> Any:
    """Resume stages, one per rank. The last has an unsaved layer, and no rank has the saved layer "gone"."""
    store = small_folder(path)
    stage = layers(f"stage{rank}", *(["new"] if rank == size - 1 else []))
    if rank == 0:
        whole = layers("stage0", "stage1", "gone")
        store.save({"model": whole.state_dict()}, run="sft", step=1, no_dist=True)
    checkpointer = Checkpointer(store, run="sft")
    checkpointer.resume(stage, missing="warn")
    assert checkpointer.resumed is not None
    return sorted(checkpointer.resumed.left)


def test_a_resume_logs_the_keys_that_all_ranks_skipped(store_path: Path, ranks: Pool) -> None:
    small_folder(store_path)
    left = sorted(f"model.{name}.{what}" for name in ("new", "gone") for what in ("weight", "bias"))
    assert ranks.run(2, of_stages, store_path) == [left] * 2


def test_the_optimizers_of_several_models_are_required_unless_missing_is_warn(caplog: pytest.LogCaptureFixture) -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer, ema = Checkpointer(store, run=run), nn.Linear(2, 2)
    checkpointer.save(1, {"model": model, "ema": ema}, optimizer, {"epoch": 1})
    fresh, its = made(seed=1)
    state = checkpointer.load(f"{run}@1", {"model": fresh, "ema": nn.Linear(2, 2)}, its, load_optim_state=False)
    assert (state, its.state) == ({"epoch": 1}, {})
    assert checkpointer.load(f"{run}@1", {"model": fresh, "ema": ema, "optim": its}, load_trainer_state=False) is None
    assert identical(its.state_dict(), optimizer.state_dict())
    checkpointer.save(2, {"model": model, "ema": ema})
    for models, beside in (({"model": fresh}, its), ({"model": fresh, "optim": its}, None)):
        with pytest.raises((NotFound, MissingKey), match="optimizer"):
            checkpointer.resume(models, beside, unread="ignore")
        assert checkpointer.resume(models, beside, unread="ignore", missing="warn") is not None
        assert "has no optimizer that can be loaded" in told(caplog)
        caplog.clear()
    with pytest.raises(InvalidInput, match="pass only one of them"):
        checkpointer.save(3, {"model": model, "optim": optimizer}, optimizer)


def test_the_state_dict_of_an_optimizer_is_rejected_before_it_is_saved() -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    checkpointer, bare = Checkpointer(store, run=run), model.state_dict()
    saves: list[tuple[Any, Any]] = [
        ({"model": bare}, optimizer.state_dict()), ({"model": model, "adam": optimizer.state_dict()}, None),
        (bare, optimizer.state_dict()), (model, optimizer.state_dict()),
    ]  # fmt: skip
    for models, beside in saves:
        for call in (checkpointer.check, partial(checkpointer.save, 1)):
            with pytest.raises(InvalidInput, match="an optimizer"):
                call(models, beside)
    checkpointer.save(1, {"model": model}, optimizer)  # as the message advises
    assert checkpointer.resume({"model": model}, optimizer) is not None


def test_a_resume_applies_a_rename_to_changed_names() -> None:
    store, run, (model, optimizer) = small(), new_run(), trained()
    Checkpointer(store, run=run).save(1, model, optimizer)
    inner, _ = made(1)
    outer = nn.ModuleDict({"body": inner})
    adam = optim.AdamW(outer.parameters())
    Checkpointer(store, run=run).resume(outer, adam, rename={r"model\.body\.(.*)": r"model.\1"})
    assert all(torch.equal(one, other) for one, other in zip(inner.parameters(), model.parameters(), strict=True))
    assert len(adam.state) == len(optimizer.state)


def scaled(enabled: bool) -> dict[str, Any]:
    return {"scalers": [torch.amp.GradScaler("cpu", enabled=enabled)], "epoch": 0}


@pytest.mark.parametrize(("before", "now"), [(False, True), (True, False), (False, False)])
def test_a_scaler_that_was_off_stays_as_it_is(before: bool, now: bool, caplog: pytest.LogCaptureFixture) -> None:
    run, (model, optimizer) = new_run(), trained()
    checkpointer = Checkpointer(small(), run=run)
    checkpointer.save(1, model, optimizer, scaled(before) | {"epoch": 3})
    checkpointer.resume(model, optimizer, state := scaled(now), prove=now)
    assert state["epoch"] == 3
    assert state["scalers"][0].get_scale() == (65536.0 if now else 1.0)
    assert checkpointer.resumed is not None
    is_named = (before, now) == (False, True)
    assert ("train.scalers" in checkpointer.resumed.left) == is_named
    assert told(caplog).count("stays as it is: the checkpoint has an empty state for it") == is_named
    assert len(told(caplog).splitlines()) == is_named


class Broken:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("broken")


def test_the_error_of_an_object_says_what_is_loaded_by_then() -> None:
    run, (model, optimizer) = new_run(), trained()
    checkpointer, state = Checkpointer(small(), run=run), TrainState(rng=False, first=1, broken=Broken(), last=2)
    checkpointer.save(1, model, optimizer, state)
    with pytest.raises(RuntimeError, match="broken") as caught:
        checkpointer.resume(model, optimizer, state)
    notes = "\n".join(caught.value.__notes__)
    assert "raised in load_state_dict of 'broken'" in notes
    assert "parts of the train state that are loaded by then: 'first'" in notes
    assert "loaded by then: 'model', 'optim'" in notes


def losses(checkpointer: Checkpointer, steps: int, *, keeps: bool) -> list[float]:
    """Train as nanoGPT does: draw the next batch before the save. ``keeps``: in the train state."""
    torch.manual_seed(0)
    model, found = nn.Linear(3, 1), list[float]()
    optimizer, train = optim.SGD(model.parameters(), lr=0.1), TrainState()
    batch = torch.randn(4, 3)
    if keeps:
        train["batch"] = batch
    last = checkpointer.resume(model, optimizer, train)
    if last:
        batch = train["batch"] if keeps else torch.randn(4, 3)
    for step in range(last.step + 1 if last else 1, steps + 1):
        loss = model(batch).square().mean()
        batch = torch.randn(4, 3)
        if keeps:
            train["batch"] = batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
        checkpointer.save(step, model, optimizer, train)
    return found


@pytest.mark.parametrize("keeps", [True, False])
def test_a_batch_that_was_drawn_before_the_save_is_used_again_only_if_the_train_state_holds_it(keeps: bool) -> None:
    store = small()
    whole = losses(Checkpointer(store, run="whole"), 4, keeps=keeps)
    losses(Checkpointer(store, run="stopped"), 2, keeps=keeps)
    again = losses(Checkpointer(store, run="stopped"), 4, keeps=keeps)
    assert (again == whole[2:]) is keeps


@pytest.mark.parametrize("how", ["resume", "load"])
def test_a_part_of_the_train_state_that_is_the_model_is_refused_if_it_has_another_value(how: str) -> None:
    """As with an early stopping whose best weights begin as ``model.state_dict()``."""

    def made() -> tuple[nn.Linear, dict[str, Any]]:
        model = nn.Linear(2, 2)
        return model, {"best": {"weights": [model.state_dict()]}}

    def load(model: nn.Module, state: dict[str, Any]) -> object:
        loader = Checkpointer(store, run="a")
        return loader.resume(model, None, state) if how == "resume" else loader.load("a@latest", model, None, state)

    store, (model, state) = small(), made()
    Checkpointer(store, run="a").save(1, model, None, state)
    load(*made())  # the values are equal
    last = {name: value.clone() for name, value in model.state_dict().items()}
    Checkpointer(store, run="a").save(2, model, None, {"best": {"weights": [nn.Linear(2, 2).state_dict()]}})
    fresh, own = made()
    with pytest.raises(Mismatch, match=r"is a tensor of the model, .* pass a copy") as raised:
        load(fresh, own)
    assert raised.value.key == "train.best.weights.0.weight"
    assert identical(dict(fresh.state_dict()), last)
    load(fresh, deepcopy(own))  # as advised
    assert identical(dict(fresh.state_dict()), last)
