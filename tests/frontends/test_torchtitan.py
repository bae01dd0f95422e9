"""torchtitan: its optimizers and schedulers train on several ranks, and its checkpoint manager saves to a store."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchtitan", reason="needs casckpt[torchtitan]")

import casckpt
from casckpt.errors import InvalidInput, Mismatch, NotFound, Unsigned, Unsupported
from tests.support.ranks import Pool, comes_last, outcome_of
from tests.support.saves import small_folder
from tests.support.signing import pair
from tests.support.training import identical

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan warns about the missing GPU


class Block(nn.Module):
    """A part of a model. Its layers have the same names as in the whole model."""

    def __init__(self, *names: str, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.norm = nn.LayerNorm(width) if "1" in names else None
        self.register_buffer(f"tokens_{min(names)}", torch.tensor(1 << 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(nn.functional.dropout(layer(x), 0.1))
        return x if self.norm is None else self.norm(x)


class Loop:
    """The calls that torchtitan's trainer makes to a manager, and the trainer's state."""

    def __init__(self, rank: int, size: int, path: Path, **settings: Any) -> None:
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

        from casckpt.frontends.torchtitan import CasCheckpointManager

        torch.manual_seed(0)
        self.width = settings.pop("width", 12)
        self.parts = [Block("0", "1", width=self.width), Block("2", width=self.width)]
        mesh = init_device_mesh("cpu", (size,))
        for part in self.parts:
            fully_shard(part, mesh=mesh)
        groups = [
            ParamGroupConfig(pattern=r"bias|norm", optimizer_name="Adam", optimizer_kwargs={"lr": 0.01}),
            ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.02}),
        ]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
            model_parts=self.parts
        )
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=50
        )
        self.step, self.at = 0, rank
        torch.manual_seed(10 + rank)
        config = CasCheckpointManager.Config(
            enable=True, store=str(path), run=settings.pop("run", "titan"), interval=2, **settings
        )
        self.manager = config.build(
            dataloader=self, model_parts=self.parts, optimizers=self.optimizers, lr_schedulers=self.schedulers,
            states={"train_state": self}, sd_adapter=None, base_folder=str(path),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.at = state["step"], state["at"]

    def train(self, until: int, last: int | None = None) -> dict[int, str]:
        """Train, and return the exact losses of this rank."""
        losses = {}
        while self.step < until:
            self.step += 1
            self.at += 2
            x = torch.full((3, self.width), self.at / 100)
            loss = self.parts[1](self.parts[0](x)).square().mean()
            self.optimizers.zero_grad()
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            losses[self.step] = float(loss.detach()).hex()
            self.manager.save(self.step, last_step=self.step == last)
        return losses

    def load(self, step: int = -1) -> bool:
        with warnings.catch_warnings():  # torch warns about a call of torchtitan's scheduler
            warnings.simplefilter("ignore")
            found: bool = self.manager.load(step)
        return found

    def weights(self) -> dict[str, Any]:
        found = {name: value for part in self.parts for name, value in part.state_dict().items()}
        return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in found.items()}


def whole(rank: int, size: int, path: Path, width: int = 12) -> Any:
    loop = Loop(rank, size, path, run="whole", width=width)
    assert not loop.load()
    return loop.train(8), loop.weights()


def broken_off(rank: int, size: int, path: Path, width: int = 12) -> Any:
    loop = Loop(rank, size, path, keep_latest_k=2, enable_first_step_checkpoint=True, width=width, health=True)
    loop.load()
    losses = loop.train(5)
    loop.manager.maybe_wait_for_saving()
    assert loop.manager.save_future is None
    return losses  # the manager is never closed


def resumed(rank: int, size: int, path: Path, width: int = 12) -> Any:
    loop = Loop(rank, size, path, keep_latest_k=2, width=width)
    assert loop.load()
    found = loop.step
    losses = loop.train(8, last=8)
    loop.manager.close()
    return found, losses, loop.weights()


def test_interrupted_training_resumes_bit_for_bit(store_path: Path, ranks: Pool) -> None:
    expected = ranks.run(2, whole, store_path)
    first = ranks.run(2, broken_off, store_path)
    store = casckpt.open(store_path)
    assert [one.step for one in store.checkpoints("titan")] == [2, 4]
    assert all(one.health for one in store.checkpoints("titan"))
    second = ranks.run(2, resumed, store_path)
    for rank in range(2):
        losses, weights = expected[rank]
        step, more, found = second[rank]
        assert step == 4
        assert {**first[rank], **more} == losses
        assert identical(found, weights)
    assert [one.step for one in store.checkpoints("titan")] == [6, 8]
    assert set(store.read("titan@8")) == {"model"}  # the last save holds only the model
    assert identical(dict(store.read("titan@8")["model"]), expected[0][1])
    assert set(store.read("titan@6")) == {"model", "optim", "train"}


@pytest.mark.soak  # by default, those of Transformers and Lightning, because stores compress for all front ends
def test_training_with_compression_resumes_bit_for_bit(store_path: Path, ranks: Pool) -> None:
    store = small_folder(store_path)
    expected = ranks.run(2, whole, store_path.with_name("plain"), 96)
    store.change_settings(compress="always")
    ranks.run(2, broken_off, store_path, 96)
    second = ranks.run(2, resumed, store_path, 96)
    assert all(identical(second[rank][2], expected[rank][1]) for rank in range(2))
    assert all(0 < one.stats.bytes_frames < one.stats.bytes_coded for one in store.checkpoints())
    assert not store.verify(decode=True).is_damaged


def loads(rank: int, size: int, path: Path) -> Any:
    found = []
    for settings in (
        {"run": "new", "initial_load_ref": "whole@8"},
        {"run": "new", "initial_load_ref": "whole@8", "initial_load_model_only": False},
        {"run": "whole", "exclude_from_loading": ["train_state", "dataloader", "optimizer"]},
    ):
        loop = Loop(rank, size, path, **settings)
        assert loop.load()
        states = sum(len(one.state) for one in loop.optimizers)
        found.append((loop.step, states > 0, next(iter(loop.schedulers)).last_epoch))
    loop = Loop(rank, size, path, run="whole", load_only=True)
    with pytest.raises(NotFound, match="whole has no step 7"):
        loop.load(7)
    assert loop.load(6)
    loop.train(8, last=8)
    return found, loop.step


def test_a_new_run_can_start_from_a_model_or_a_checkpoint(store_path: Path, ranks: Pool) -> None:
    ranks.run(2, whole, store_path)
    found = ranks.run(3, loads, store_path)  # on more ranks
    assert found == [([(0, False, 0), (8, True, 8), (0, False, 8)], 8)] * 3
    assert [one.step for one in casckpt.open(store_path).checkpoints("whole")] == [2, 4, 6, 8]


def refuses(rank: int, size: int, path: Path) -> None:
    for settings, kind in (
        ({"initial_load_path": "/somewhere"}, Unsupported),
        ({"exclude_from_loading": ["dataloder"]}, InvalidInput),
        ({"create_seed_checkpoint": True}, Unsupported),
        ({"min_free": "20 apples"}, InvalidInput),
    ):
        with pytest.raises(kind):
            Loop(rank, size, path, **settings)
    loop = Loop(rank, size, path, last_save_model_only=True, export_dtype="bfloat16")
    loop.train(1, last=1)
    with pytest.raises(NotFound, match="has no optimizer"):  # a final save of weights alone cannot resume
        loop.load()
    begun = {"run": "next", "initial_load_ref": "titan@1", "initial_load_model_only": True}
    with pytest.raises(Mismatch, match="pass cast=True"):
        Loop(rank, size, path, **begun).load()
    assert Loop(rank, size, path, cast=True, **begun).load()
    with patch.object(loop.manager.checkpointer, "close") as close:
        loop.manager.close()
    close.assert_called_once()


def lacks_room(rank: int, size: int, path: Path) -> str:
    loop = Loop(rank, size, path, min_free="999TB")
    return str(outcome_of(lambda: (loop.train(2), loop.manager.maybe_wait_for_saving())))


def test_the_manager_leaves_the_room_that_others_need(store_path: Path, ranks: Pool) -> None:
    (said,) = ranks.run(1, lacks_room, store_path)
    assert "leaves min_free='999TB'" in said


def signs_and_demands(rank: int, size: int, path: Path, private: str, public: str) -> None:
    signed = Loop(rank, size, path, sign_with=private, require_signature=(public,), mirror=f"{path}.away")
    signed.train(2)
    signed.manager.maybe_wait_for_saving()
    signed.manager.checkpointer.store.wait_for_mirror()
    assert signed.load()
    unsigned = Loop(rank, size, path)
    assert unsigned.load()
    unsigned.train(4, last=4)
    with pytest.raises(Unsigned, match="titan@4"):
        signed.load()


def test_torchtitan_checkpoints_are_signed_and_mirrored(store_path: Path, ranks: Pool, tmp_path: Path) -> None:
    keys = pair(tmp_path / "keys")
    ranks.run(2, signs_and_demands, store_path, str(keys.private), str(keys.public))
    assert [one.step for one in casckpt.open(f"{store_path}.away", require_signature=keys.public).checkpoints()] == [2]


def test_settings_that_do_not_apply_to_a_store_are_rejected(store_path: Path, ranks: Pool) -> None:
    ranks.run(1, refuses, store_path)
    tensors = casckpt.open(store_path).get("titan@1").tensors.values()
    assert {one.dtype for one in tensors} == {"bfloat16", "int64"}  # an integer buffer is not converted


class Refused:
    """A part of the train state that, from a given step on, cannot be saved on the last rank."""

    def __init__(self, loop: Loop, step: int, name: str, rank: int, size: int) -> None:
        self.loop, self.step, self.place = loop, step, (name, rank, size, size - 1)

    def state_dict(self) -> dict[str, Any]:
        is_bad = self.loop.step >= self.step and comes_last(*self.place)
        return {"refused": object() if is_bad else 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def hears(rank: int, size: int, path: Path) -> Any:
    found = []
    for step, load_only in ((0, False), (1, False), (0, True)):
        loop = Loop(rank, size, path, load_only=load_only)
        loop.manager.states["refused"] = Refused(loop, step, f"{step} {load_only}", rank, size)
        error = outcome_of(loop.load)
        error = outcome_of(lambda: loop.train(1)) if error is False else error  # noqa: B023 - called at once
        found.append((loop.step, type(error).__name__))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_an_invalid_state_is_reported_at_the_first_step(store_path: Path, ranks: Pool, size: int) -> None:
    expected = [(0, "InvalidInput"), (1, "InvalidInput"), (1, "dict")]
    assert ranks.run(size, hears, store_path) == [expected] * size


def keeps(rank: int, size: int, path: Path) -> Any:
    first = Loop(rank, size, path)
    first.train(2)
    first.manager.close()
    loop = Loop(rank, size, path, options="keep")
    for optimizer in loop.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.125
    assert loop.load()
    return loop.step, {group["lr"] for optimizer in loop.optimizers for group in optimizer.param_groups}


def test_torchtitan_preserves_a_new_learning_rate_on_a_resume(store_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, keeps, store_path) == [(2, {0.125})] * 2


class SickLoop(Loop):
    """A loop whose trainer state, which a load sets last, changes other state, as user code may do."""

    sick: Any = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.sick is not None:
            with torch.no_grad():
                self.sick(self)


def first_optimizer(loop: Loop) -> Any:
    return next(iter(loop.optimizers))


def shift_on_rank_1(loop: Any) -> None:
    if torch.distributed.get_rank() == 1:
        loop.parts[1].layers["2"].weight.to_local().add_(1)


WRONG: dict[str, tuple[Any, str]] = {
    "one rank changes its shard": (shift_on_rank_1, "model.layers.2.weight"),
    "a buffer is reset": (lambda loop: loop.parts[0].tokens_0.zero_(), "model.tokens_0"),
    "the optimizer has no state": (lambda loop: first_optimizer(loop).state.clear(), "optim.state.layers.0.bias.step"),
    "the learning rate is set by hand": (
        lambda loop: first_optimizer(loop).param_groups[0].update(lr=7.0), "optim.param_groups"
    ),
    "the position of a rank is lost": (lambda loop: setattr(loop, "at", -1), "train.1.train_state.at"),
    "a random number is drawn": (None, "train.1.rng.torch"),
}  # fmt: skip


def proves(rank: int, size: int, path: Path) -> Any:
    first = SickLoop(rank, size, path)
    first.train(2)
    first.manager.close()
    found: dict[str, Any] = {}
    for name, (sick, _) in WRONG.items():
        loop = SickLoop(rank, size, path, prove=True)
        loop.sick = sick
        with patch("casckpt.frontends.training_state.train_state.restore_rng") if sick is None else nullcontext():
            error = outcome_of(loop.load)
        found[name] = sorted(error.keys) if isinstance(error, Mismatch) else error
        assert loop.manager.proof is None
    return found


def test_a_wrong_resume_of_torchtitan_is_found_on_all_ranks(store_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, proves, store_path)
    assert first == second
    assert all(key in first[name] for name, (_, key) in WRONG.items()), first


def proved(rank: int, size: int, path: Path) -> Any:
    first = Loop(rank, size, path)
    first.train(2)
    first.manager.close()
    found = []
    for settings in (
        {"run": "titan"},
        {"run": "titan", "options": "keep"},
        {"run": "titan", "exclude_from_loading": ["lr_scheduler", "optimizer"]},
        {"run": "new", "initial_load_ref": "titan@2"},
    ):
        loop = Loop(rank, size, path, prove=True, **settings)
        assert loop.load()
        found.append({key.split(".")[0] for key in loop.manager.proof.unproved})
        assert loop.manager.proof.proved > 8
    return found


def test_a_right_resume_of_torchtitan_is_proved(store_path: Path, ranks: Pool) -> None:
    expected = [set(), {"optim"}, {"optim", "train"}, {"optim", "train"}]
    assert ranks.run(2, proved, store_path) == [expected] * 2
