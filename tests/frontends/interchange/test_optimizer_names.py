"""A training resumes bit for bit from an imported torch.save file, or the import reports why it cannot."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import casckpt
from casckpt.errors import Mismatch
from casckpt.frontends.convert import import_any, look_at, torch_save_to_casckpt
from casckpt.frontends.interchange.optimizer_names import by_name
from casckpt.frontends.interchange.torch_files import laid_out
from casckpt.frontends.trainer import Checkpointer, TrainState
from tests.support.saves import small
from tests.support.training import Network, identical, train


def trained(seed: int = 1, **options: Any) -> tuple[Network, optim.Optimizer]:
    model = Network(seed)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, range(3))
    return model, optimizer


def fresh() -> tuple[Network, optim.Optimizer]:
    model = Network(2)
    return model, optim.AdamW(model.parameters(), lr=0.5)


def by_torch(path: Path, model: str, optimizer: str) -> tuple[Network, optim.Optimizer]:
    """Return the result of loading the file with plain torch."""
    saved = torch.load(path)
    made = fresh()
    made[0].load_state_dict(saved[model])
    made[1].load_state_dict(saved[optimizer])
    return made


@pytest.mark.parametrize(
    ("model_key", "optimizer_key"),
    [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict"), ("state_dict", "optim"), ("net", "opt")],
)
def test_training_resumes_bit_for_bit_from_an_import(tmp_path: Path, model_key: str, optimizer_key: str) -> None:
    model, optimizer = trained()
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    file = {model_key: model.state_dict(), optimizer_key: optimizer.state_dict(), "epoch": 3}
    torch.save({**file, "scheduler": schedule.state_dict()}, tmp_path / "ckpt.pt")
    store = small()
    made = torch_save_to_casckpt(tmp_path / "ckpt.pt", store, run="sft", step=3)
    assert made.notes == ()
    again, optim_again = fresh()
    other = optim.lr_scheduler.StepLR(optim_again, 7)
    state = TrainState(rng=False, scheduler=other, epoch=0)
    assert Checkpointer(store, run="sft").resume(again, optim_again, state) == made
    assert state["epoch"] == 3
    assert other.state_dict() == schedule.state_dict()
    plain, optim_plain = by_torch(tmp_path / "ckpt.pt", model_key, optimizer_key)
    for one, its in ((plain, optim_plain), (again, optim_again)):
        train(one, its, range(3, 6))
    assert identical(again.state_dict(), plain.state_dict())
    assert identical(optim_again.state_dict(), optim_plain.state_dict())


def test_optimizer_state_is_named_for_ddp_tied_and_frozen_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.frozen = nn.Linear(6, 7).requires_grad_(False)
            self.emb, self.body = nn.Embedding(9, 6), nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
            self.out = nn.Linear(6, 9, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.body(x).sum() + self.out(x).sum(-1)
            return found

    def make(seed: int) -> tuple[Tied, optim.Optimizer]:
        model = Tied(seed)
        wanted = [one for one in model.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in wanted if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in wanted if one.ndim < 2], "weight_decay": 0.0},
        ]
        return model, optim.SGD(groups, lr=0.1, momentum=0.9)

    model, optimizer = make(1)
    train(model, optimizer, range(2))
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": wrapped, "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    store = small()
    assert torch_save_to_casckpt(tmp_path / "ckpt.pt", store, run="sft", step=3).notes == ()
    again, optim_again = make(2)
    casckpt.load_model_and_optim_state(store, "sft@3", again, optim_again)
    assert identical(again.state_dict(), model.state_dict())
    assert identical(optim_again.state_dict(), optimizer.state_dict())


@pytest.mark.process  # Lightning imports matplotlib, which lists the system's fonts
def test_a_lightning_file_with_several_optimizers_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs casckpt[lightning]")
    from casckpt.frontends.lightning.io import from_state

    model = Network(1)
    both = [optim.AdamW(model.norm.parameters()), optim.SGD(model.head.parameters(), lr=0.1, momentum=0.5)]
    for optimizer in both:
        train(model, optimizer, range(2))
    states = [optimizer.state_dict() for optimizer in both]
    file = {
        "pytorch-lightning_version": "2.5",
        "state_dict": model.state_dict(),
        "optimizer_states": states,
        "epoch": 2,
    }
    torch.save(file, tmp_path / "last.ckpt")
    store = small()
    assert "several ways" in torch_save_to_casckpt(tmp_path / "last.ckpt", store, step=1).notes[0]  # or frozen.bias
    found = from_state(store.read("default@1"))  # every value is where Lightning expects it
    assert identical({name: found[name] for name in file}, file)
    names = ["norm.weight", "norm.bias", "head.weight"]
    for wrong in (names[::-1], names[:2], [*names[:2], names[0]]):
        with pytest.raises(Mismatch, match="parameter"):
            torch_save_to_casckpt(tmp_path / "last.ckpt", store, step=2, parameter_names=wrong)
    assert torch_save_to_casckpt(tmp_path / "last.ckpt", store, step=3, parameter_names=names).notes == ()
    again = Network(2)
    fresh_ones = [optim.AdamW(again.norm.parameters()), optim.SGD(again.head.parameters(), lr=0.5)]
    casckpt.load_model_and_optim_state(store, "default@3", again, fresh_ones, unread="ignore")
    assert identical([one.state_dict() for one in fresh_ones], states)
    found = from_state(store.read("default@3"))
    assert identical({name: found[name] for name in file}, file)
    del file["optimizer_states"]
    assert set(laid_out(file).state) == {"model", "lightning"}


def test_an_import_uses_the_names_that_were_passed_to_the_optimizer(tmp_path: Path) -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    model = Alike()
    groups = [{"params": list(model.b.parameters())}, {"params": list(model.a.parameters())}]
    plain = optim.Adam(groups)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    plain.step()
    with pytest.raises(Mismatch, match="several ways"):
        by_name([plain.state_dict()], model.state_dict())
    state = plain.state_dict()
    for group, names in zip(state["param_groups"], (["b.weight", "b.bias"], ["a.weight", "a.bias"]), strict=True):
        group["param_names"] = names
    named = by_name([state], model.state_dict())
    assert named["state"]["b.weight"] is state["state"][0]
    assert [group["params"] for group in named["param_groups"]] == [["b.weight", "b.bias"], ["a.weight", "a.bias"]]
    state["param_groups"][0]["param_names"] = ["b.bias", "b.weight"]
    with pytest.raises(Mismatch, match=r"'b\.bias', but the model does not have a parameter of that name and shape"):
        by_name([state], model.state_dict())


def test_parameters_are_matched_by_their_memory_their_kind_and_their_order() -> None:
    """Two parts of the same memory are two parameters. Two views of one part are one parameter.

    Each empty tensor is separate.
    """
    flat = torch.zeros(6)
    model = {
        "a": flat[:3], "b": flat[3:], "tied": flat[:3], "whole": flat, "none": torch.zeros(0), "no": torch.zeros(0),
        "phase": torch.zeros(2, dtype=torch.complex64), "count": torch.zeros(2, dtype=torch.int64),
        "norm.running_mean": torch.zeros(2),
    }  # fmt: skip
    own = ["a", "b", "whole", "none", "no", "phase"]
    # it has no state and therefore no shapes
    plain = optim.SGD([nn.Parameter(model[name].clone()) for name in own], lr=0.1)
    named = by_name([plain.state_dict()], model)
    assert (named["state"], named["param_groups"][0]["params"]) == ({}, own)
    fewer = optim.SGD([nn.Parameter(model[name].clone()) for name in own[1:]], lr=0.1)
    with pytest.raises(Mismatch, match="several ways"):
        by_name([fewer.state_dict()], model)


def test_an_average_in_a_file_is_a_second_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    average, averaged = Network(3), optim.swa_utils.AveragedModel(Network(4))
    wrapped = {f"module.{name}": value for name, value in average.state_dict().items()}
    part = {"head.weight": torch.ones(2)}
    more = {"state_dict_ema": average.state_dict(), "teacher": wrapped, "model_avg": averaged.state_dict()}
    rest = {"epoch": 3, "best": part, "scale": {"scale": 2.0}}
    torch.save(
        {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), **more, **rest}, tmp_path / "x.pt"
    )
    store = small()
    made = torch_save_to_casckpt(tmp_path / "x.pt", store, step=3)
    (note,) = made.notes
    assert note == (
        "the file has other models, 'state_dict_ema', 'teacher', 'model_avg', stored as 'ema', 'teacher', 'avg'; "
        "the rest is train state"
    )
    assert note in caplog.text
    fresh = {
        "model": Network(5),
        "ema": Network(6),
        "teacher": Network(7),
        "avg": optim.swa_utils.AveragedModel(Network(8)),
    }
    state = TrainState(rng=False, epoch=0)
    Checkpointer(store, run="default").resume(fresh, optim.AdamW(fresh["model"].parameters()), state)
    for name, want in (("model", model), ("ema", average), ("teacher", average), ("avg", averaged)):
        assert identical(fresh[name].state_dict(), want.state_dict())
    assert state["epoch"] == 3
    assert identical(store.read("default@3")["train"][0], rest)


def test_no_second_model_takes_the_place_of_another_part() -> None:
    model, optimizer = trained()
    keys = ("optim_model", "model_ema", "ema", "model_avg", "avg_state_dict", "optim", "train", "state_dict")
    file = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert set(laid_out(file).state) == {"model", "optim"}
    values = {key: Network(n).state_dict() for n, key in enumerate(keys)}
    found = dict(laid_out(file | values).state)
    rest = found.pop("train")[0]
    assert set(rest) == {"optim", "train"}
    assert set(found) == {"model", "optim", "optim_model", "model_ema", "ema", "avg", "avg_state_dict", "state_dict"}
    found["model_avg"] = found.pop("avg")
    assert all(identical((found | rest)[key], values[key]) for key in keys if key != "optim")


def test_only_a_prefix_of_all_names_counts_as_a_wrapper() -> None:
    model = {"module.w": torch.ones(2), "head.w": torch.ones(3)}
    optimizer = optim.SGD([nn.Parameter(value) for value in model.values()], lr=0.1).state_dict()
    laid = laid_out({"model": model, "optimizer": optimizer})
    assert laid.state["model"] is model
    assert laid.state["optim"]["param_groups"][0]["params"] == list(model)


def odd_files() -> dict[str, tuple[dict[str, Any], str]]:
    model, optimizer = trained()
    weights, state = model.state_dict(), optimizer.state_dict()
    few = {name: value for name, value in weights.items() if not name.startswith("head")}
    return {
        "no model": ({"optimizer": state, "epoch": 1}, "the file has no model's state_dict under model"),
        "an optimizer alone": (dict(state), "no model that could provide names"),
        "another model": ({"model": few, "optimizer": state}, "or match in several ways"),
        "more in it": ({"model": weights, "optimizer": {**state, "scaler": {}}}, "'scaler' in addition"),
        "state of nobody": (
            {"model": weights, "optimizer": {**state, "state": {**state["state"], 99: {"a": 1}}}},
            "state under 99",
        ),
    }


@pytest.mark.parametrize("name", odd_files())
def test_an_optimizer_without_matching_names_keeps_its_numbers_and_is_reported(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, why = odd_files()[name]
    torch.save(file, tmp_path / "ckpt.pt")
    store = small()
    made = torch_save_to_casckpt(tmp_path / "ckpt.pt", store, step=3)
    assert identical(store.read("default@3"), file)
    assert len(made.notes) == 1
    assert why in made.notes[0]
    what = "the optimizer" if name == "an optimizer alone" else "'optimizer'"
    assert made.notes[0].startswith(f"{what} identifies its parameters by number")
    assert [made.notes[0] in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        True
    ]


def test_optimizers_with_unusual_names_keep_their_numbers_and_are_reported(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"netG": model.state_dict(), "optimizerG": optimizer.state_dict()}, tmp_path / "gan.pth")
    (note,) = torch_save_to_casckpt(tmp_path / "gan.pth", small(), step=3).notes
    assert note.startswith("'optimizerG' identifies its parameters by number")
    assert "an optimizer is found under optimizer, optim" in note


def test_states_without_an_optimizer_are_unchanged() -> None:
    model, optimizer = trained()
    named = {"state": {}, "param_groups": [{"params": ["head.weight"], "lr": 0.1}]}
    for state in (
        dict(model.state_dict()),
        {"model": model.state_dict(), "epoch": 3},
        {"model": model.state_dict(), "optim": named},
        {"model": model.state_dict(), "optimizer": "AdamW"},
        {"model": model.state_dict(), "optimizers": {"a": optimizer.state_dict(), "b": 3}},
    ):
        laid = laid_out(state)
        assert laid.state is state
        assert laid.notes == ()


def test_an_import_with_as_is_preserves_numbered_optimizer_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    file = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    torch.save(file, tmp_path / "ckpt.pt")
    store = small()
    import_any(store, look_at(tmp_path / "ckpt.pt"), step=3, as_is=True)
    assert identical(store.read("default@3"), file)
