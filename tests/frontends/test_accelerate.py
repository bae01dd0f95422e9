"""Real Accelerate training runs whose complete state is in a store, on one rank and on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="needs casckpt[transformers]")

import casckpt
from casckpt.base import text
from casckpt.errors import InvalidInput, StorageError, Unsupported
from casckpt.store.types import CheckReplicas
from tests.support.parallel import everything
from tests.support.ranks import Pool, comes_last, outcome_of
from tests.support.saves import copied, small_folder, steps
from tests.support.torchrun import as_accelerate_hears
from tests.support.training import identical


def as_on_gpus(accelerator: Any, layer: str = "Linear") -> None:
    """Stub: Accelerate uses FSDP2 only on GPUs, and DDP on CPUs. Everything else that it does is real.

    ``layer``: the class of the modules that are sharded separately.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[layer],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip


class Training:
    """A model with dropout, an optimizer, a scheduler and shuffled data, all prepared."""

    def __init__(self, path: Path, run: str = "sft", width: int = 10, *, fsdp2: bool = False) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        from casckpt.frontends.accelerate import AcceleratorCheckpointer

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.2), nn.Linear(width, 1))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = torch.randn(24, 8)
        data = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        if fsdp2:
            as_on_gpus(self.accelerator)
        self.checkpointer = AcceleratorCheckpointer(self.accelerator, path, run=run, max_checkpoints=2)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
        self.model, self.optim, self.data, self.schedule = self.accelerator.prepare(model, optim, data, schedule)
        assert all(isinstance(one, DTensor) == fsdp2 for one in self.model.parameters())
        torch.manual_seed(10 + self.accelerator.process_index)

    def train(self, epochs: range) -> list[str]:
        losses = []
        for epoch in epochs:
            for (x,) in self.data:
                loss = self.model(x).square().mean()
                self.accelerator.backward(loss)
                self.optim.step()
                self.schedule.step()
                self.optim.zero_grad()
                losses.append(float(loss.detach()).hex())
            self.checkpointer.save_async(epoch)
        self.checkpointer.close()
        return losses


def trained(rank: int, size: int, path: Path, epochs: range, run: str) -> list[str]:
    with as_accelerate_hears(rank, size):
        training = Training(path, run, 2000 if run.startswith("wide") else 10)
        last = training.checkpointer.resume()
        assert (last.step + 1 if last else 0) == epochs.start
        return training.train(epochs)


def test_a_copy_can_resume(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(range(2))
    for other in copied(training):
        last = other.checkpointer.resume(prove=True)
        assert last is not None
        assert last.step == 1


class Own:
    """An object with a state."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def bare(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(3)), torch.randn(2, 2, requires_grad=True)]


@pytest.mark.parametrize("models", [0, 1, 2])
def test_parameters_of_no_model_are_saved_with_their_optimizer_and_said_once(
    store: casckpt.Store, models: int, caplog: pytest.LogCaptureFixture
) -> None:
    from accelerate import Accelerator

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    def made(seed: int) -> tuple[AcceleratorCheckpointer, list[torch.Tensor], Any]:
        nets = [nn.Linear(2, 2) for _ in range(models)]
        own = bare(seed)
        tensors = [*own, *(one for net in nets for one in net.parameters())]
        optimizers = [torch.optim.AdamW(several, lr=0.1) for several in (tensors[:1], tensors[1:])]
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(*nets, *optimizers)
        return AcceleratorCheckpointer(accelerator, store, run="sft"), tensors, optimizers

    text.known.clear()
    saver, saved, optimizers = made(0)
    for optimizer in optimizers:
        for one in saved:
            one.grad = torch.ones_like(one)
        optimizer.step()
    saver.save(1)
    loader, found, fresh = made(1)
    loader.resume(prove=True)
    (said,) = (text for text in caplog.messages if "in no prepared model" in text)
    assert said.startswith("2 parameters of the optimizers, of the shapes [[3], [2, 2]]")
    assert identical(found, saved)
    assert identical([one.state_dict() for one in fresh], [one.state_dict() for one in optimizers])


def test_an_accelerator_without_a_model_saves_what_is_registered(store: casckpt.Store) -> None:
    from accelerate import Accelerator

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    def made() -> tuple[AcceleratorCheckpointer, Own]:
        accelerator, own = Accelerator(cpu=True), Own()
        checkpointer = AcceleratorCheckpointer(accelerator, store, run="sft")
        with pytest.raises(InvalidInput, match=r"not prepared anything yet; call accelerator\.prepare"):
            checkpointer.save(1)
        accelerator.register_for_checkpointing(own)
        return checkpointer, own

    saver, saved = made()
    saved.steps = 7
    saver.save(1)
    loader, found = made()
    loader.resume(prove=True)
    assert found.steps == 7


@pytest.mark.parametrize("size", [1, 2])
def test_training_resumes_bit_for_bit(store_path: Path, ranks: Pool, size: int) -> None:
    whole = ranks.run(size, trained, store_path, range(4), "whole")
    first = ranks.run(size, trained, store_path, range(2), "parts")
    second = ranks.run(size, trained, store_path, range(2, 4), "parts")
    assert [one + two for one, two in zip(first, second, strict=True)] == whole
    store = casckpt.open(store_path)
    assert [step for run, step in steps(store) if run == "parts"] == [2, 3]
    assert not store.diff("whole@3", "parts@3").changed
    # the names in the plain model
    assert set(store.read("parts@3")["model"]) == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


@pytest.mark.soak  # by default, those of Transformers and Lightning, because stores compress for all front ends
def test_training_with_compression_resumes_bit_for_bit(store_path: Path, ranks: Pool) -> None:
    whole = ranks.run(2, trained, store_path, range(4), "wide")
    smaller = store_path.with_name("smaller")
    store = small_folder(smaller)
    store.change_settings(compress="always")
    first, second = (ranks.run(2, trained, smaller, epochs, "wide") for epochs in (range(2), range(2, 4)))
    assert [one + two for one, two in zip(first, second, strict=True)] == whole
    assert all(0 < one.stats.bytes_frames < one.stats.bytes_coded for one in store.checkpoints())
    assert not store.verify(decode=True).is_damaged


def trained_with_fsdp2(rank: int, size: int, path: Path, epochs: range, run: str) -> list[str]:
    with as_accelerate_hears(rank, size):
        training = Training(path, run, fsdp2=True)
        training.checkpointer.resume()
        return training.train(epochs)


def whole_weights(rank: int, size: int, path: Path, ref: str, *, fsdp2: bool) -> Any:
    """Load a checkpoint. Return the weights and the moments, gathered by torch."""
    with as_accelerate_hears(rank, size):
        training = Training(path, fsdp2=fsdp2)
        training.checkpointer.load(ref)
        found = everything(training.model, training.optim.optimizer)
        return found.model, {name: own["exp_avg"] for name, own in found.state.items()}


def test_fsdp2_resumes_bit_for_bit_and_loads_on_any_number_of_ranks(store_path: Path, ranks: Pool) -> None:
    whole = ranks.run(2, trained_with_fsdp2, store_path, range(4), "whole")
    first = ranks.run(2, trained_with_fsdp2, store_path, range(2), "parts")
    second = ranks.run(2, trained_with_fsdp2, store_path, range(2, 4), "parts")
    assert [one + two for one, two in zip(first, second, strict=True)] == whole
    store = casckpt.open(store_path)
    assert not store.diff("whole@3", "parts@3").changed
    expected = dict(sorted(casckpt.unshard_model_state(store, "parts@3").items()))
    moments = casckpt.unshard_optim_state(store, "parts@3", by_name=True)["state"]
    for size, fsdp2 in ((3, True), (2, False), (1, False)):
        weights, averages = ranks.run(size, whole_weights, store_path, "parts@3", fsdp2=fsdp2)[0]
        assert identical(weights, expected)
        assert averages.keys() == moments.keys()
        assert all(identical(averages[name], own["exp_avg"]) for name, own in moments.items())


def sharded_gan(rank: int, size: int, path: Path, seed: int) -> Any:
    """Prepare two models with equal names under FSDP2. Train and save them, or load them. Return their weights."""
    from accelerate import Accelerator

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    with as_accelerate_hears(rank, size):
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True)
        as_on_gpus(accelerator)
        pairs = []
        for _ in range(2):
            net = nn.Linear(3, 5)
            pairs.append(accelerator.prepare(net, torch.optim.AdamW(net.parameters())))
        run = AcceleratorCheckpointer(accelerator, path, run="gan")
        if run.resume() is None:
            for number, (net, optim) in enumerate(pairs):
                accelerator.backward(net(torch.full((1, 3), 1.0 + number)).sum())
                optim.step()
            run.save(1)
        found = [everything(net, optim.optimizer) for net, optim in pairs]
        return [(one.model, {name: own["exp_avg"] for name, own in one.state.items()}) for one in found]


def test_sharded_models_with_equal_parameter_names_are_stored_separately(store_path: Path, ranks: Pool) -> None:
    saved = ranks.run(2, sharded_gan, store_path, 0)[0]
    assert set(casckpt.open(store_path).read("gan@1")) == {"model", "model_1", "optim", "optim_1", "train"}
    assert not identical(saved[0], saved[1])
    assert identical(ranks.run(3, sharded_gan, store_path, 1)[0], saved)


def drifting(rank: int, size: int, path: Path, last: int, check: CheckReplicas) -> Any:
    """Train with LocalSGD, which synchronizes every four steps. Save the last step, and load it."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    with as_accelerate_hears(rank, size):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        net = nn.Linear(3, 5)
        net, optim = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.5))
        run = AcceleratorCheckpointer(accelerator, path, run="local", check_replicas=check)
        with LocalSGD(accelerator, net, 4) as local:
            for _ in range(last):
                accelerator.backward(net(torch.full((1, 3), 1.0 - 2 * rank)).sum())
                optim.step()
                optim.zero_grad()
                local.step()
            mine = net.module.weight.detach().clone()
            error = outcome_of(lambda: run.save(last))
            if isinstance(error, InvalidInput):
                return mine, str(error)
            run.load(f"local@{last}")
            return mine, net.module.weight.detach().clone()


def test_models_that_drift_apart_are_saved_from_rank_0_on_request(store_path: Path, ranks: Pool) -> None:
    for _, error in ranks.run(2, drifting, store_path, 3, "sample"):
        assert "differ" in error
    (first, loaded_first), (second, loaded_second) = ranks.run(2, drifting, store_path, 3, "off")
    assert not torch.equal(first, second)
    assert identical([loaded_first, loaded_second], [first, first])


def test_each_rank_loads_its_own_model_if_it_was_saved_at_a_synchronization(store_path: Path, ranks: Pool) -> None:
    for mine, loaded_mine in ranks.run(2, drifting, store_path, 4, "off"):
        assert identical(loaded_mine, mine)


def test_close_warns_about_unsaved_steps(store: casckpt.Store, caplog: pytest.LogCaptureFixture) -> None:
    from accelerate import Accelerator

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    checkpointer = AcceleratorCheckpointer(accelerator, store, run="a", save_interval=2)
    assert checkpointer.save_if_due(1) is None
    checkpointer.close()
    assert "steps 1 to 1 of a are not in any checkpoint" in caplog.text


def test_the_checkpointer_leaves_the_room_that_others_need(store: casckpt.Store) -> None:
    from accelerate import Accelerator

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(StorageError, match="leaves min_free='999TB'"):
        AcceleratorCheckpointer(accelerator, store, run="a", min_free="999TB").save(1)
    with pytest.raises(InvalidInput, match="'20 apples' is not a size"):
        AcceleratorCheckpointer(accelerator, store, run="a", min_free="20 apples")


def loaded(rank: int, size: int, path: Path) -> Any:
    with as_accelerate_hears(rank, size):
        training = Training(path)
        training.checkpointer.load("parts@3")
        return training.schedule.get_last_lr()


def test_a_reference_loads_on_a_different_number_of_ranks(store_path: Path, ranks: Pool) -> None:
    ranks.run(1, trained, store_path, range(4), "parts")
    first, *others = ranks.run(3, loaded, store_path)
    assert first < [0.01]
    assert all(one == first for one in others)


def test_models_with_equal_parameter_names_are_stored_separately(store: casckpt.Store) -> None:
    from accelerate import Accelerator

    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    def made(seed: int) -> tuple[AcceleratorCheckpointer, list[Any]]:
        torch.manual_seed(seed)
        nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
        optims = [torch.optim.AdamW(net.parameters()) for net in reversed(nets)]
        accelerator = Accelerator(cpu=True)
        prepared = list(accelerator.prepare(*nets, *optims))
        return AcceleratorCheckpointer(accelerator, store, run="gan"), prepared

    def contents(prepared: list[Any]) -> list[Any]:
        return [one.state_dict() for one in prepared]

    saver, saved = made(0)
    for net, optim in zip(saved[:2], reversed(saved[2:]), strict=True):
        saver.accelerator.backward(net(torch.ones(1, 3)).sum())
        optim.step()
    saver.save(1)
    assert set(store.read("gan@1")) == {"model", "model_1", "optim", "optim_1", "train"}
    loader, fresh = made(1)
    assert loader.resume() is not None
    assert identical(contents(fresh), contents(saved))


class Data:
    """A prepared data loader. ``place``: the position of a stateful loader."""

    def __init__(self, place: Any, *, stateful: bool, generator: bool) -> None:
        self.iteration, self.place, self.use_stateful_dataloader = 0, place, stateful
        self.synchronized_generator = torch.Generator().manual_seed(1) if generator else None

    def state_dict(self) -> Any:
        assert self.use_stateful_dataloader
        return self.place

    def load_state_dict(self, state: Any) -> None:
        assert self.use_stateful_dataloader
        self.place = state


@pytest.mark.parametrize("generator", [True, False])
@pytest.mark.parametrize("stateful", [True, False])
def test_a_data_loader_resumes_at_its_position(stateful: bool, generator: bool) -> None:
    from casckpt.frontends.accelerate import _Loader

    data, again, fresh = (Data(place, stateful=stateful, generator=generator) for place in (7, 0, 0))
    data.iteration = 3
    if data.synchronized_generator is not None:
        data.synchronized_generator.manual_seed(5)
    state = _Loader(data).state_dict()
    _Loader(again).load_state_dict(state)
    assert (again.iteration, again.place) == (3, 7 if stateful else 0)
    if data.synchronized_generator is not None and again.synchronized_generator is not None:
        assert torch.equal(again.synchronized_generator.get_state(), data.synchronized_generator.get_state())
    _Loader(fresh).load_state_dict(state | {"inside": None})  # saved by a loader that does not track its position
    assert (fresh.iteration, fresh.place) == (3, 0)


class Refused:
    """A state that, on the last rank alone, cannot be saved from a given step on."""

    def __init__(self, rank: int, size: int, step: int) -> None:
        self.rank, self.size, self.step, self.now = rank, size, step, 0

    def state_dict(self) -> dict[str, Any]:
        is_bad = self.now >= self.step and comes_last(f"{self.step}", self.rank, self.size, self.size - 1)
        return {"x": object() if is_bad else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def hears(rank: int, size: int, path: Path) -> Any:
    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    found = []
    for step in (0, 1, 3):
        with as_accelerate_hears(rank, size):
            training, bad = Training(path, f"bad{step}"), Refused(rank, size, step)
            training.accelerator.register_for_checkpointing(bad)
            run = AcceleratorCheckpointer(training.accelerator, path, run=f"bad{step}", save_interval=2)
            error = outcome_of(run.resume)
            while not isinstance(error, Exception) and bad.now < 6:
                bad.now += 1
                training.accelerator.backward(training.model(torch.ones(4, 8)).square().mean())
                training.optim.step()
                error = outcome_of(lambda: run.save_if_due(bad.now))  # noqa: B023 - called immediately
            outcome_of(run.close)
            found.append((type(error).__name__, bad.now))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_an_invalid_state_raises_an_error_on_all_ranks_at_the_same_step(
    store_path: Path, ranks: Pool, size: int
) -> None:
    assert (
        ranks.run(size, hears, store_path) == [[("InvalidInput", 0), ("InvalidInput", 1), ("InvalidInput", 4)]] * size
    )


class Accumulating:
    """Four batches per optimizer step. ``steps``: the batches at which the optimizer stepped."""

    def __init__(self, path: Path, window: int = 4) -> None:
        from accelerate import Accelerator
        from accelerate.state import GradientState

        from casckpt.frontends.accelerate import AcceleratorCheckpointer

        GradientState._reset_state()  # of the previous program
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        model = nn.Linear(1, 1)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.arange(16.0).view(16, 1)))
        self.model, self.optim, self.data = self.accelerator.prepare(model, optim, data)
        self.checkpointer = AcceleratorCheckpointer(self.accelerator, path, run="a")

    def train(self, first: int, last: int) -> list[int]:
        steps = []
        for number, (x,) in enumerate(self.accelerator.skip_first_batches(self.data, first), first + 1):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                self.optim.step()
                self.optim.zero_grad()
            if self.accelerator.sync_gradients:
                steps.append(number)
            if number == last:
                break
        return steps


def test_an_interrupted_accumulation_resumes_as_with_save_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer steps at the same batches. The gradients before the save are lost, which is said."""
    whole = Accumulating(tmp_path / "store")
    assert whole.train(0, 6) == [4]
    whole.accelerator.save_state(str(tmp_path / "state"))
    for step in (6, 7):
        whole.checkpointer.save(step)
    said = "a@6 is in the middle of an accumulation: the gradients of 2 of 4 batches are not in the checkpoint"
    assert [said in one for one in caplog.messages].count(True) == 1
    theirs, ours = Accumulating(tmp_path / "store"), Accumulating(tmp_path / "store")
    theirs.accelerator.load_state(str(tmp_path / "state"))
    ours.checkpointer.resume(prove=True)
    resumed = ours.checkpointer.checkpointer.resumed
    assert resumed is not None
    assert resumed.proof is not None
    assert [*resumed.proof.unproved] == ["gradients"]
    assert caplog.text.count("of 2 of 4 batches") == 2
    assert ours.train(6, 16) == theirs.train(6, 16) == [8, 12, 16]
    assert identical(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))


def test_a_save_between_accumulations_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = Accumulating(tmp_path)
    whole.train(0, 8)
    whole.checkpointer.save(8)
    again = Accumulating(tmp_path)
    again.checkpointer.resume(prove=True)
    assert again.accelerator.step == 8
    resumed = again.checkpointer.checkpointer.resumed
    assert resumed is not None
    assert resumed.proof is not None
    assert not resumed.proof.unproved
    assert "accumulation" not in caplog.text


def save_hook(models: Any, weights: Any, folder: str) -> None:
    """A hook for `save_state`."""


def test_hooks_of_save_state_are_refused_by_name_unless_they_are_ignored(tmp_path: Path) -> None:
    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    def load_hook(models: Any, folder: str) -> None:
        """A hook for `load_state`."""

    training = Accumulating(tmp_path)
    checkpointer = training.checkpointer
    training.accelerator.register_save_state_pre_hook(save_hook)
    training.accelerator.register_load_state_pre_hook(load_hook)
    late: list[Callable[[], object]] = [
        lambda: checkpointer.save_if_due(1), lambda: checkpointer.save(1), lambda: checkpointer.save_async(1),
        checkpointer.check, checkpointer.resume,
        lambda: AcceleratorCheckpointer(training.accelerator, tmp_path, run="a"),
    ]  # fmt: skip
    for call in late:
        with pytest.raises(Unsupported, match=r"save_hook, .*load_hook.*register_for_checkpointing"):
            call()
    assert not casckpt.open(tmp_path).exists()
    ignoring = AcceleratorCheckpointer(training.accelerator, tmp_path, run="a", hooks="ignore")
    assert ignoring.resume() is None
    assert ignoring.save(1).step == 1


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_unsupported_distributed_types_are_rejected(store: casckpt.Store, kind: str) -> None:
    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    accelerator: Any = SimpleNamespace(distributed_type=SimpleNamespace(name=kind))
    with pytest.raises(Unsupported, match=f"{kind} models are not supported"):
        AcceleratorCheckpointer(accelerator, store, run="a")


def test_an_offloaded_model_is_rejected_and_can_be_restored(tmp_path: Path) -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    torch.manual_seed(0)
    model, store = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), casckpt.open(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(InvalidInput, match=r"Accelerate has offloaded .* without device_map") as caught:
        casckpt.save_model_and_optim_state(store, model, run="r", step=1)
    assert "accelerate.hooks.remove_hook_from_submodules(model)" in str(caught.value)
    with pytest.raises(InvalidInput, match=r"a meta tensor has no values.* without device_map"):
        store.save({"model": model.state_dict()}, run="r", step=1)
    remove_hook_from_submodules(model)
    casckpt.save_model_and_optim_state(store, model, run="r", step=1)
    found = casckpt.unshard_model_state(store, "r@1")
    assert all(torch.equal(found[name], value) for name, value in before.items())
    empty = nn.Linear(2, 2, device="meta")
    with pytest.raises(InvalidInput, match="a meta tensor has no values"):
        casckpt.save_model_and_optim_state(store, empty, run="r", step=2)
