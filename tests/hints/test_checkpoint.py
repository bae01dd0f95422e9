"""The advice in errors and log messages of saves and loads."""

from __future__ import annotations

import enum
import shutil
import warnings
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import config_from_args, parse_args
from torch.distributed.tensor import Shard, distribute_tensor

import casckpt
from casckpt.errors import Damaged, ForgottenWarning, InvalidInput, Mismatch, MissingKey
from casckpt.frontends.trainer import Checkpointer, SaveOnSignal
from casckpt.ranks import ranks as of_ranks
from casckpt.ranks import waiting
from tests.hints.conftest import Run, changed_blob
from tests.support.forks import forked
from tests.support.hints import Advice, Messages, follows
from tests.support.logs import logged
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import trained
from tests.support.torch_versions import needs_torch

Weights = dict[str, torch.Tensor]


def zeros(weights: Weights) -> Weights:
    return {key: torch.zeros_like(value) for key, value in weights.items()}


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@follows("contents/checkpoint.py:warn_if_forgotten", "call Store.restore to keep it")
def test_a_checkpoint_that_was_forgotten_before_a_read_can_be_restored_as_advised(
    saved: casckpt.Store, messages: Messages
) -> None:
    id = saved.get("a@1").id
    saved.forget("a@1")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", ForgottenWarning)
        saved.read(id)
    messages.text(heard[0].message).says("Store.restore")
    saved.restore(id)
    assert saved.get("a@1").id == id


@follows("loading/blob_readers.py:damaged_error", "Run `casckpt verify`, then `casckpt repair`, on the store")
def test_a_damaged_blob_can_be_repaired_as_advised(
    saved: casckpt.Store, tmp_path: Path, weights: Weights, messages: Messages, run: Run
) -> None:
    store_path = tmp_path / "store"
    shutil.copytree(store_path, tmp_path / "copy")
    changed_blob(store_path)
    with messages.error(Damaged) as advice:
        saved.load(zeros(weights), "a@1")
    run(*advice.command("verify"), store_path, status=4)
    said = Advice(run(*advice.command("repair"), store_path, status=4).output)
    run("repair", store_path, said.says("--from"), tmp_path / "copy")
    loaded = zeros(weights)
    saved.load(loaded, "a@1")
    assert equal(loaded, weights)


@follows("loading/transfer.py:decode_again", "run `casckpt verify --decode` to find out")
def test_verify_names_a_damaged_frame_as_advised(
    store: casckpt.Store, store_path: Path, messages: Messages, run: Run
) -> None:
    for step in (0, 1):
        store.save({"w": trained(8, step)}, run="a", step=step, compress="auto")
    damaged = changed_blob(store_path)
    with messages.error(Damaged) as advice:
        store.read("a@1")
    output = run(*advice.command("verify"), advice.says("--decode"), store_path, status=4).output
    assert damaged.path.stem in output


# loads


@follows("loading/fit.py:check_fit", "rename=")
@follows("loading/fit.py:rename_hint", "of them have different names there")
def test_the_suggested_rename_loads_weights_with_different_names(
    saved: casckpt.Store, weights: Weights, messages: Messages
) -> None:
    state = {"net": zeros(weights)}
    with messages.error(MissingKey) as advice:
        saved.load(state, "a@1", strict=False)
    saved.load(state, "a@1", **advice.argument("rename"))
    assert equal(state["net"], weights)


@follows("loading/fit.py:check_fit", 'unread="ignore" leaves them unchanged')
def test_the_suggested_option_leaves_unfilled_weights_unchanged(
    saved: casckpt.Store, weights: Weights, messages: Messages
) -> None:
    state = {"other": torch.ones(3)}
    with messages.error(MissingKey) as advice:
        saved.load(state, "a@1", strict=False)
    saved.load(state, "a@1", strict=False, **advice.argument("unread"))
    assert torch.equal(state["other"], torch.ones(3))


@follows("loading/fit.py:check_no_adapters", 'unread="ignore" leaves them out')
def test_a_checkpoint_with_adapters_can_be_loaded_without_them(
    store: casckpt.Store, weights: Weights, messages: Messages
) -> None:
    store.save(weights | {"w.lora_A.x.weight": torch.ones(2)}, run="a", step=1)
    state = zeros(weights) | {"new": torch.ones(1)}
    with messages.error(Mismatch) as advice:
        store.load(state, "a@1", strict=False)
    store.load(state, "a@1", strict=False, **advice.argument("unread"))
    assert torch.equal(state["w"], weights["w"])


class Adapted(nn.Module):
    """A layer named "0" after get_peft_model of PEFT, which the tests do not install."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = nn.Module()
        self.base_model.model.add_module("0", nn.Module())
        inner = self.base_model.model.get_submodule("0")
        inner.base_layer = layer
        for name in ("lora_A", "lora_B"):
            inner.add_module(name, nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)}))

    def merge_and_unload(self) -> nn.Module:
        inner: Any = self.base_model.model.get_submodule("0")  # type: ignore[union-attr]
        with torch.no_grad():
            inner.base_layer.weight += inner.lora_B.default.weight @ inner.lora_A.default.weight
        return nn.Sequential(inner.base_layer)


@follows("loading/fit.py:check_no_adapters", "peft.get_peft_model")
def test_a_model_with_adapters_loads_a_checkpoint_with_adapters(store: casckpt.Store, messages: Messages) -> None:
    adapted = Adapted(nn.Linear(2, 2))
    casckpt.save_model_and_optim_state(store, adapted, run="a", step=1)
    with messages.error(Mismatch) as advice:
        casckpt.load_model_and_optim_state(store, "a@1", nn.Sequential(nn.Linear(2, 2)))
    advice.says("get_peft_model")
    model = Adapted(nn.Linear(2, 2))
    casckpt.load_model_and_optim_state(store, "a@1", model)
    assert equal(model.state_dict(), adapted.state_dict())
    advice.says("merge_and_unload()")
    merged, loaded = adapted.merge_and_unload(), nn.Sequential(nn.Linear(2, 2))
    casckpt.save_model_and_optim_state(store, merged, run="a", step=2)
    casckpt.load_model_and_optim_state(store, "a@2", loaded)
    assert equal(loaded.state_dict(), merged.state_dict())


@follows("loading/fit.py:chosen", "has the names of this model twice")
def test_either_of_two_ambiguous_names_can_be_loaded(store: casckpt.Store, messages: Messages) -> None:
    at_top, below = nn.Linear(2, 1), nn.Linear(2, 1)
    store.save({**at_top.state_dict(), "model": below.state_dict()}, run="a", step=1)
    model = nn.Linear(2, 1)
    with messages.error(InvalidInput) as advice:
        casckpt.load_model_and_optim_state(store, "a@1", model, strict=False)
    casckpt.load_model_and_optim_state(store, "a@1", model, strict=False, **advice.argument("rename"))
    assert equal(model.state_dict(), at_top.state_dict())
    advice.says('store.load({"model": model.state_dict()}, ref)')
    store.load({"model": model.state_dict()}, "a@1")
    assert equal(model.state_dict(), below.state_dict())


@follows("loading/load.py:_warn", 'pass unread="ignore"')
def test_the_suggested_option_hides_unread_keys(store: casckpt.Store, messages: Messages) -> None:
    store.save({"optim": {"lr": 0.1, "step": 5}}, run="leaving-keys", step=1)
    with messages.log() as advice:
        store.load({"optim": {"lr": 0.0}}, "leaving-keys@1")
    state = {"optim": {"lr": 0.0}}
    with logged() as texts:
        store.load(state, "leaving-keys@1", **advice.argument("unread"))
    assert (state, texts) == ({"optim": {"lr": 0.1}}, [])


@follows("loading/options.py:check_used", "`casckpt show --tensors` lists its keys")
def test_a_pattern_without_a_match_can_be_corrected_from_the_output_of_show(
    saved: casckpt.Store, store_path: Path, messages: Messages, run: Run
) -> None:
    with messages.error(MissingKey) as advice:
        saved.read("a@1", keys=["weights"])
    shown = run(*advice.command("show"), store_path, "a@1").output
    assert "w" in shown.split()
    assert saved.read("a@1", keys=["w"]).keys() == {"w"}


@follows("loading/load_plan.py:LoadPlan._add_tensor", "ignore_mismatched= leaves it unchanged")
def test_the_suggested_option_leaves_a_tensor_with_a_different_shape_unchanged(
    saved: casckpt.Store, weights: Weights, messages: Messages
) -> None:
    state = zeros(weights) | {"w": torch.ones(7)}
    with messages.error(Mismatch) as advice:
        saved.load(state, "a@1")
    saved.load(state, "a@1", **{advice.says("ignore_mismatched"): ["w"]})  # type: ignore[arg-type]
    assert torch.equal(state["w"], torch.ones(7))
    assert torch.equal(state["b"], weights["b"])


@follows("tensors/dtypes.py:check_cast", "pass cast=True to …")
def test_the_suggested_option_converts_a_tensor_with_a_different_dtype(
    saved: casckpt.Store, weights: Weights, messages: Messages
) -> None:
    state = zeros(weights) | {"w": torch.zeros(6, dtype=torch.double)}
    with messages.error(Mismatch) as advice:
        saved.load(state, "a@1")
    saved.load(state, "a@1", **advice.argument("cast"))
    assert equal(state, weights | {"w": weights["w"].double()})


@follows("loading/template.py:Template._misfits", "ignore_mismatched= accepts patterns of keys")
def test_the_suggested_option_leaves_tensors_with_different_shapes_unchanged(
    saved: casckpt.Store, messages: Messages
) -> None:
    state = {"w": torch.ones(7), "b": torch.ones(1)}
    with messages.error(Mismatch) as advice:
        saved.load(state, "a@1")
    patterns: Any = {advice.says("ignore_mismatched"): ["*"]}
    with pytest.raises(MissingKey, match="has 'w', 'b' with a different shape or dtype") as caught:
        saved.load(state, "a@1", **patterns)
    saved.load(state, "a@1", **patterns, **Advice(str(caught.value)).argument("unread"))
    assert equal(state, {"w": torch.ones(7), "b": torch.ones(1)})


@follows("loading/template.py:Template._lacks", "Pass rename= to map them, or strict=False to leave them as they are")
def test_keys_that_a_checkpoint_lacks_can_be_left_unchanged_or_renamed(
    saved: casckpt.Store, weights: Weights, messages: Messages
) -> None:
    state = zeros(weights) | {"more": torch.ones(1)}
    with messages.error(MissingKey) as advice:
        saved.load(state, "a@1")
    saved.load(state, "a@1", **advice.argument("strict"))
    assert equal(state, weights | {"more": torch.ones(1)})

    nested = {"net": zeros(weights)}
    with messages.error(MissingKey) as advice:
        saved.load(nested, "a@1")
    saved.load(nested, "a@1", **advice.argument("rename"))
    assert equal(nested["net"], weights)


@follows("loading/template.py:Template._check_empty", "Put None in its place")
def test_an_empty_mapping_can_be_filled_or_left_unchanged_as_advised(
    store: casckpt.Store, weights: Weights, messages: Messages
) -> None:
    store.save({"w": weights, "n": 1}, run="a", step=1)
    with messages.error(Mismatch) as advice:
        store.load({"w": {}, "n": 0}, "a@1")
    advice.says("Put None in its place to load all of it")
    state: Any = {"w": None, "n": 0}
    store.load(state, "a@1")
    assert equal(state["w"], weights)
    state = {"w": {}, "n": 0}
    store.load(state, "a@1", **advice.argument("strict"))
    assert state == {"w": {}, "n": 1}


@follows("loading/update.py:update", "to repair them, load all of them, or update with check=True")
def test_a_state_that_a_failed_update_left_undefined_can_be_loaded_again(
    store: casckpt.Store, store_path: Path, messages: Messages
) -> None:
    store.save({"w": torch.arange(40000.0)}, run="a", step=1)
    state = {"w": torch.zeros(40000)}
    held = store.load(state, "a@1")
    store.save({"w": torch.arange(40000.0) + 1}, run="a", step=2)
    before = changed_blob(store_path)
    with messages.error(Damaged) as advice:
        store.update(state, "a@2", held=held)
    before.put_back()
    store.update(state, "a@2", held=held, **advice.argument("check"))
    assert torch.equal(state["w"], torch.arange(40000.0) + 1)
    advice.says("load all of them")
    state["w"].zero_()
    store.load(state, "a@2")
    assert torch.equal(state["w"], torch.arange(40000.0) + 1)


def fresh_and_sharded(rank: int, size: int, path: str) -> tuple[str, bool, bool]:
    store = casckpt.open(path)
    mesh = init_device_mesh("cpu", (size,))

    def made(value: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(4, 2, bias=False)
        whole = torch.full((2, 4), value)
        model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        return model, torch.optim.Adam(model.parameters())

    def average(optim: torch.optim.Optimizer) -> torch.Tensor:
        whole: torch.Tensor = optim.state_dict()["state"][0]["exp_avg"].full_tensor()
        return whole

    model, optim = made(1.0)
    model.weight.grad = torch.ones_like(model.weight)
    optim.step()
    casckpt.save_model_and_optim_state(store, model, optim, run="a", step=1)
    store.save({"model": model.state_dict(), "optim": optim.state_dict()}, run="b", step=1)
    fresh, new = made(0.0)
    error = outcome_of(lambda: store.load({"model": fresh.state_dict(), "optim": new.state_dict()}, "b@1"))
    casckpt.load_model_and_optim_state(store, "a@1", fresh, new)
    first = torch.equal(average(new), average(optim))
    fresh, new = made(0.0)
    casckpt.Checkpointer(store, run="a").load("a@1", fresh, new)
    return str(error), first, torch.equal(average(new), average(optim))


@follows("loading/template.py:Template._look_below", "use casckpt.load_model_and_optim_state or Checkpointer")
def test_a_new_sharded_optimizer_can_be_loaded_by_name(ranks: Pool, store_path: Path, messages: Messages) -> None:
    for message, first, second in ranks.run(2, fresh_and_sharded, str(store_path)):
        advice = messages.text(message)
        advice.says("casckpt.load_model_and_optim_state")
        advice.says("Checkpointer.load")
        assert (first, second) == (True, True)


# ranks


def outside(rank: int, size: int, path: str) -> str | None:
    store, group = casckpt.open(path), dist.new_group([1])
    if rank:
        store.save({"x": 1}, run="group", step=1, process_group=group)
        return None
    error = str(outcome_of(lambda: store.save({"x": 1}, run="alone", step=1, process_group=group)))
    store.save({"x": 1}, run="alone", step=1, **Advice(error).argument("no_dist"))
    return error


@follows("ranks/ranks.py:open_ranks", "call only on its ranks, or pass no_dist=True")
def test_a_rank_outside_the_process_group_can_save_alone_as_advised(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    message, _ = ranks.run(2, outside, str(store_path))
    messages.text(message).says("call only on its ranks")
    assert casckpt.open(store_path).runs() == ["alone", "group"]


def in_a_child(rank: int, size: int, path: str) -> str:
    store = casckpt.open(path)
    store.save({"x": 1}, run="a", step=1)
    heard = Path(path, "..", "heard")

    def child() -> None:
        error = str(outcome_of(lambda: store.load({"x": 0}, "a@1")))
        state = {"x": 0}
        store.load(state, "a@1", **Advice(error).argument("no_dist"))
        assert store.read("a@1") == state == {"x": 1}
        heard.write_text(error)

    with forked(child):
        pass
    return heard.read_text()


@follows("ranks/ranks.py:_refuse_inherited", "call Store.read, or pass no_dist=True")
def test_a_process_that_a_rank_forked_can_read_alone_as_advised(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    (message,) = ranks.run(1, in_a_child, str(store_path))
    messages.text(message).says("Store.read")


def grouped(rank: int, size: int, path: str) -> int:
    casckpt.open(path).save({"x": casckpt.PerRank(rank)}, run="a", step=1)
    return rank


@needs_torch("2.12", "--shutdown-timeout")
@follows("ranks/ranks.py:warn_of_torchrun", "was started with --shutdown-timeout (torch 2.12)")
def test_torchrun_waits_as_long_as_advised(
    saved: casckpt.Store, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enter() -> None:
        of_ranks.warn_of_torchrun.cache_clear()
        with SaveOnSignal(Checkpointer(saved, run="a")):
            pass
        of_ranks.warn_of_torchrun.cache_clear()

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with messages.log() as advice:
        enter()
    parse: Any = parse_args
    config, _, _ = config_from_args(parse([advice.says("--shutdown-timeout"), "500", "train.py"]))
    assert config.shutdown_timeout == 500
    monkeypatch.setenv(*advice.says("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600").split("="))
    config, _, _ = config_from_args(parse(["train.py"]))
    assert config.shutdown_timeout == 600
    with logged() as said:
        enter()
    assert said == []


@follows("ranks/ranks.py:_warn_of_others", "init_process_group first, or pass no_dist=True if this is intended")
def test_a_launched_process_can_join_a_process_group_or_work_alone_as_advised(
    saved: casckpt.Store, messages: Messages, ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_ranks._warn_of_others.cache_clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with messages.log() as advice:
        saved.save({"x": 1}, run="b", step=1)
    of_ranks._warn_of_others.cache_clear()
    with logged() as said:
        saved.save({"x": 1}, run="b", step=2, **advice.argument("no_dist"))
    of_ranks._warn_of_others.cache_clear()
    advice.says("torch.distributed.init_process_group")  # as in the workers of the pool
    ranks.run(2, grouped, str(tmp_path / "other"))
    assert said == []
    assert len(casckpt.open(tmp_path / "other").checkpoints()) == 1


def other_shapes(rank: int, size: int, path: str) -> str:
    store, value = casckpt.open(path), torch.full((rank + 1,), float(rank))
    error = str(outcome_of(lambda: store.save({"x": value}, run="a", step=1)))
    store.save({"x": casckpt.PerRank(value)}, run="a", step=1)
    state = {"x": casckpt.PerRank(torch.zeros(rank + 1))}
    store.load(state, "a@1")
    assert torch.equal(state["x"].value, value)
    return error


@follows("saving/layout.py:plan_writes", "or wrap it in casckpt.PerRank")
def test_values_whose_shapes_differ_across_ranks_can_be_saved_per_rank(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    for message in ranks.run(2, other_shapes, str(store_path)):
        messages.text(message).says("casckpt.PerRank")


def far_apart(rank: int, size: int, path: str) -> str:
    store, weight = casckpt.open(path), nn.Parameter(torch.full((64,), rank + 1.0))
    advice = Advice(str(outcome_of(lambda: store.save({"x": weight}, run="a", step=1))))
    advice.says("Use a different name on each rank")
    store.save({f"x.{rank}": weight}, run="names", step=1)
    advice.says("wrap such a value in casckpt.PerRank")
    store.save({"x": casckpt.PerRank(weight.detach())}, run="parts", step=1)
    advice.says("name the rank that maintains it with owners=")
    store.save({"x": weight}, run="owners", step=1, owners=lambda _: 1)
    store.save({"x": weight}, run="off", step=1, **advice.argument("check_replicas"))
    alike = {"x": torch.zeros(64)}
    store.load(alike, "off@1")
    assert torch.equal(alike["x"], torch.ones(64)), "all ranks load it, as the message says"
    mine = {"x": casckpt.PerRank(torch.zeros(64))}
    store.load(mine, "parts@1")
    assert torch.equal(mine["x"].value, weight)
    return advice.message


@follows("saving/replicas.py:", "With check_replicas='off', casckpt saves one rank's value, and all ranks load it")
def test_a_parameter_that_differs_across_ranks_can_be_saved_in_four_ways(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    for message in ranks.run(2, far_apart, str(store_path)):
        messages.text(message).says("PerRank")
    store = casckpt.open(store_path)
    assert {key: value[0].item() for key, value in store.read("names@1").items()} == {"x.0": 1.0, "x.1": 2.0}
    assert store.read("owners@1")["x"][0] == 2
    assert store.read("off@1")["x"][0] == 1


def near(rank: int, size: int, path: str) -> tuple[str, str]:
    store, weight = casckpt.open(path), torch.ones(64)
    weight += rank * 1e-5
    advice = Advice(str(outcome_of(lambda: store.save({"x": weight}, run="a", step=1, check_replicas="raise"))))
    with logged() as texts:
        store.save({"x": weight}, run="a", step=1, **advice.argument("check_replicas"))
    advice.says("Synchronize it before the save")
    dist.broadcast(weight, 0)
    store.save({"x": weight}, run="a", step=2, check_replicas="raise")
    again = torch.ones(64) + rank * 1e-5
    dist.broadcast(again, 0)
    with logged() as quiet:
        store.save({"y": again, "z": casckpt.PerRank(rank)}, run="b", step=1)
    assert quiet == []
    return advice.message, "".join(texts)


@follows("saving/replicas.py:find_odd", "or pass check_replicas='sample'")
@follows("saving/leader.py:", "Synchronize the values before the save")
def test_small_differences_across_ranks_are_synchronized_or_allowed(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    (message, logged), _ = ranks.run(2, near, str(store_path))
    messages.text(message).says("check_replicas='sample'")
    advice = messages.text(logged)
    advice.says("Synchronize the values before the save")
    advice.says("casckpt.PerRank")
    assert len(casckpt.open(store_path).checkpoints()) == 3


def alone_of_two(rank: int, size: int, path: str, given: dict[str, Any]) -> None:
    if rank == 0:
        casckpt.open(path).save({"x": 1}, run="a", step=1, **given)


@follows("ranks/waiting.py:late", "use Store.save or Store.load with no_dist=True")
def test_a_rank_that_does_not_need_to_wait_can_pass_no_dist(ranks: Pool, store_path: Path, messages: Messages) -> None:
    advice = messages.text(waiting.late([1], 30.0))
    ranks.run(2, alone_of_two, str(store_path), advice.argument("no_dist"))
    assert casckpt.open(store_path).read("a@1") == {"x": 1}


def otherwise(rank: int, size: int, path: str) -> str:
    store, state = casckpt.open(path), {"m": torch.zeros(2)}
    store.save(state, run="first", step=1)
    other = outcome_of(lambda: store.load(state, "first@1") if rank else store.save(state, run="a", step=1))
    advice = Advice(str(other))
    advice.says("pass each thread its own process_group=...")
    store.save(state, run="same", step=1)
    advice.says("pass each thread its own process_group=...")
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:  # in each rank's order
        both = [
            threads.submit(store.save, {"m": n}, run=f"thread{n}", step=1, process_group=groups[n])
            for n in ((0, 1) if rank else (1, 0))
        ]
        for saving in both:
            saving.result()
    return advice.message


@follows("ranks/messages.py:astray", "pass each thread its own process_group=...")
def test_ranks_can_make_the_same_calls_or_use_one_group_per_thread_as_advised(
    ranks: Pool, store_path: Path, messages: Messages
) -> None:
    for message in ranks.run(2, otherwise, str(store_path)):
        messages.text(message).says("in the same order. Make the calls in one thread")
    found = {one.run for one in casckpt.open(store_path).checkpoints()}
    assert found == {"first", "same", "thread0", "thread1"}


# saves


class Settings(UserDict[str, Any]):
    """A mapping type that is not a dict."""


@follows("saving/prepare.py:", "Store.read returns a dict, and a load into such an object fills it")
def test_a_load_can_fill_a_mapping_of_a_different_class_as_advised(store: casckpt.Store, messages: Messages) -> None:
    with messages.log() as advice:
        store.save({"more": Settings(lr=0.5)}, run="a", step=1)
    advice.says("Store.read returns a dict")
    assert store.read("a@1") == {"more": {"lr": 0.5}}
    advice.says("a load into such an object fills it")
    state = {"more": Settings(lr=0.0)}
    store.load(state, "a@1")
    assert state["more"] == Settings(lr=0.5)


@follows("history/transactions.py:begin_save", "save a different step or run, or overwrite it (overwrite=True")
def test_the_suggested_option_overwrites_an_existing_step(saved: casckpt.Store, messages: Messages) -> None:
    with messages.error() as advice:
        saved.save({"x": 2}, run="a", step=1)
    saved.save({"x": 2}, run="a", step=1, **advice.argument("overwrite"))
    assert saved.read("a@1") == {"x": 2}
    advice.says("save a different step or run")
    for run, step in (("a", 2), ("b", 1)):
        saved.save({"x": 3}, run=run, step=step)
        assert saved.read(f"{run}@{step}") == {"x": 3}


@follows("history/transactions.py:begin_save", "--overwrite")
def test_the_suggested_option_lets_an_import_overwrite_an_existing_step(
    saved: casckpt.Store, store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    command = ("import", store_path, tmp_path / "x.pt", "--run", "a", "--step", 1)
    said = messages.text(run(*command, status=5).output)
    run(*command, said.says("--overwrite"))
    assert torch.equal(saved.read("a@1")["x"], torch.ones(2))


class Kind(enum.IntEnum):
    ONE = 1


@follows("saving/leader.py:log_pickled", "a load needs allow_pickle=True")
def test_a_stored_pickle_can_be_loaded_with_allow_pickle(store: casckpt.Store, messages: Messages) -> None:
    with messages.log() as advice:
        store.save({"kind": Kind.ONE}, run="a", step=1, allow_pickle=True)
    state = {"kind": None}
    store.load(state, "a@1", **advice.argument("allow_pickle"))
    assert state == {"kind": Kind.ONE}
