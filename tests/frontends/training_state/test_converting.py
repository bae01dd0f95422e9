"""Modules that rename, drop or resize what they load end as after load_state_dict. All else is filled in place."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations
from torch.optim import Optimizer

import casckpt
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from tests.support.ranks import Pool, outcome_of
from tests.support.training import identical

Make = Callable[[], nn.Module]


class Renaming(nn.Module):
    """Has a new name for its weight, which is transposed under the old name."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}new"] = state.pop(f"{prefix}old").t()
        super()._load_from_state_dict(state, prefix, *rest)


class Turning(nn.Linear):
    """Transposes the weight of checkpoints that do not have the mark."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mark", torch.ones(1))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}mark" not in state:
            state[f"{prefix}mark"] = torch.ones(1)
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


class Bank(nn.Module):
    """Has a buffer that grows. Notes the version of what it loads."""

    _version = 2

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("bank", torch.randn(size, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.version = rest[0].get("version")
        self.bank = torch.zeros_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *rest)


class Versioned(nn.Linear):
    """Reads checkpoints without a bias only if they are of an older version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") is None:
            state.setdefault(f"{prefix}bias", torch.full((3,), 7.0))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Points(nn.Module):
    """Replaces its parameters in load_state_dict, as models of Gaussians do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.points = nn.ParameterDict({name: nn.Parameter(torch.randn(count, 2)) for name in ("means", "scales")})

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        for name in list(self.points):
            self.points[name] = nn.Parameter(torch.zeros_like(state_dict[f"points.{name}"]))
        return super().load_state_dict(state_dict, strict, assign)


class Root(nn.Sequential):
    """Overrides load_state_dict, but converts nothing."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(*args, **options)


class Listing(nn.Module):
    """Keeps a list of tensors, as metrics of torchmetrics do."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = [torch.tensor([value]) for value in values]
        self.scale = nn.Parameter(torch.randn(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}values"] = list(self.values)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.values = state.pop(f"{prefix}values")
        super()._load_from_state_dict(state, prefix, *rest)


class Hooked(nn.Sequential):
    """Renames, in a hook, what a module below it has; that module renames it once more."""

    def __init__(self) -> None:
        super().__init__(Renaming())
        own: Any = self  # torch has no types for these hooks
        own.register_load_state_dict_pre_hook(self.hook)

    @staticmethod
    def hook(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}0.oldest" in state:
            state[f"{prefix}0.old"] = state.pop(f"{prefix}0.oldest")


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def normed() -> Any:
    return nn.Sequential(nn.Linear(3, 3), parametrizations.weight_norm(nn.Linear(3, 4)))


def normed_before() -> dict[str, Any]:
    """Return the state_dict with the names of torch.nn.utils.weight_norm, which is deprecated."""
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    return {f"{name[:2]}{names.get(name[2:], name[2:])}": value for name, value in normed().state_dict().items()}


def observed(size: int = 0) -> nn.Module:
    observer = PerChannelMinMaxObserver()
    if size:
        observer(torch.randn(size, 3))
    return nn.Sequential(nn.Linear(2, 2), observer)


def lazy() -> Any:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


def initialized() -> Any:
    model = lazy()
    model(torch.randn(4, 2))
    return model


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Make]] = {
    "weight_norm": (normed_before, normed),
    "BatchNorm without counters": (
        lambda: without(nn.Sequential(nn.BatchNorm1d(3)).state_dict(), "0.num_batches_tracked"),
        lambda: nn.Sequential(nn.BatchNorm1d(3)),
    ),
    "a new name": (lambda: {"0.old": torch.randn(3, 3)}, lambda: nn.Sequential(Renaming())),
    "hooks of two modules": (lambda: {"0.oldest": torch.randn(3, 3)}, Hooked),
    "values in other places": (lambda: without(Turning().state_dict(), "mark"), Turning),
    "an older version": (lambda: without(Versioned(3, 3).state_dict(), "bias"), lambda: Versioned(3, 3)),
    "a buffer that grows": (lambda: nn.Sequential(Bank(5)).state_dict(), lambda: nn.Sequential(Bank())),
    "a buffer that shrinks": (lambda: Bank().state_dict(), lambda: Bank(5)),
    "observers": (lambda: observed(4).state_dict(), observed),
    "its own load_state_dict": (lambda: Points(5).state_dict(), lambda: Points(3)),
    "a longer list": (lambda: nn.Sequential(Listing(1, 2)).state_dict(), lambda: nn.Sequential(Listing(3))),
    "an empty list": (lambda: nn.Sequential(Listing()).state_dict(), lambda: nn.Sequential(Listing(3))),
    "a list of equal length": (lambda: nn.Sequential(Listing(1)).state_dict(), lambda: nn.Sequential(Listing(3))),
    "lazy modules": (lambda: initialized().state_dict(), lazy),
}


def compiled(model: Any) -> Any:
    """Return the compiled model, but no model with its own load_state_dict, because torch would not call it."""
    return model if isinstance(model, Points) else torch.compile(model, backend="eager")


def resumed(store: casckpt.Store, model: nn.Module, **options: Any) -> None:
    checkpointer = Checkpointer(store, run="a")
    checkpointer.resume(model, **options)
    assert checkpointer.resumed is not None
    assert not checkpointer.resumed.left


WAYS: dict[str, Callable[[casckpt.Store, nn.Module], Any]] = {
    "load": lambda store, model: load_model_and_optim_state(store, "a@1", model),
    "load, strict=False": lambda store, model: load_model_and_optim_state(store, "a@1", model, strict=False),
    "load of a compiled model": lambda store, model: load_model_and_optim_state(store, "a@1", compiled(model)),
    "load from the top": lambda store, model: load_model_and_optim_state(store, "top@1", model),
    "load of another key": lambda store, model: load_model_and_optim_state(
        store, "b@1", model, rename={r"model\.(.*)": r"nets.ema.\1"}
    ),
    "resume": resumed,
    'resume, missing="warn"': lambda store, model: resumed(store, model, missing="warn"),
    "store.load": lambda store, model: store.load({"model": model}, "a@1"),
    "store.update": lambda store, model: store.update({"model": model}, "a@1", held=None),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_modules_that_convert_end_as_after_load_state_dict(store: casckpt.Store, case: str, way: str) -> None:
    make_saved, make = CASES[case]
    torch.manual_seed(1)
    saved = make_saved()
    store.save({"model": saved}, run="a", step=1)
    store.save(saved, run="top", step=1)
    store.save({"nets": {"ema": saved}}, run="b", step=1)
    torch.manual_seed(2)
    theirs, mine = make(), make()
    theirs.load_state_dict(dict(saved))
    loaded = WAYS[way](store, mine)
    assert identical(dict(mine.state_dict()), dict(theirs.state_dict()))
    left = [] if loaded is None else (*loaded.missing_keys, *loaded.mismatched_keys, *loaded.unread_keys)
    assert not left


class Kelvin(nn.Module):
    """Since version 2, the value is in kelvins."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([20.0]))
        self._version = version

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (self._version or 0) > metadata.get("version", 0):
            state[f"{prefix}value"] = state[f"{prefix}value"] + 273
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize(
    "way", ["load", "load of a compiled model", "load from the top", "load of another key", "resume"]
)
def test_modules_convert_the_values_of_an_older_version_once(store: casckpt.Store, way: str) -> None:
    saved: Any = None
    fresh: Any = None
    for version, want in ((1, 293.0), (2, 20.0)):
        saved = nn.Sequential(nn.Linear(1, 1), Kelvin(version))
        store.save({"model": saved}, run="a", step=1, overwrite=True)
        store.save(saved.state_dict(), run="top", step=1, overwrite=True)
        store.save({"nets": {"ema": saved}}, run="b", step=1, overwrite=True)
        fresh = nn.Sequential(nn.Linear(1, 1), Kelvin(2))
        WAYS[way](store, fresh)
        assert fresh[1].value.item() == want
        assert identical(dict(fresh[0].state_dict()), dict(saved[0].state_dict()))
    store.save({"model": dict(saved.state_dict())}, run="unknown", step=1)  # such as an import without versions
    load_model_and_optim_state(store, "unknown@1", fresh)
    assert fresh[1].value.item() == 20


@pytest.mark.parametrize("part", [False, True], ids=["swapped modules", "a part of the saved model"])
def test_the_version_of_a_renamed_module_is_that_of_the_module_that_was_saved(
    store: casckpt.Store, *, part: bool
) -> None:
    save_model_and_optim_state(store, nn.Sequential(Kelvin(2), Kelvin(1)), run="a", step=1)
    fresh: Any = Kelvin(2) if part else nn.Sequential(Kelvin(2), Kelvin(2))
    names = {"model.value": "model.1.value", "model.0.value": "model.1.value", "model.1.value": "model.0.value"}
    load_model_and_optim_state(store, "a@1", fresh, rename=names, strict=False)
    assert [value.item() for value in fresh.parameters()] == ([293.0] if part else [293.0, 20.0])


class Noting(nn.Module):
    """Notes whether it receives its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.noted: list[bool] = []

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.noted += [state[f"{prefix}weight"].data_ptr() == self.weight.data_ptr()]
        super()._load_from_state_dict(state, prefix, *rest)


def sequence(*modules: nn.Module) -> Any:
    return nn.Sequential(*modules)


def test_only_modules_in_which_something_does_not_fit_receive_other_tensors(store: casckpt.Store) -> None:
    model, growing = sequence(Noting(), Bank(4)), sequence(Noting(), Bank())
    save_model_and_optim_state(store, model, run="a", step=1)
    addresses = [parameter.data_ptr() for parameter in growing.parameters()]
    load_model_and_optim_state(store, "a@1", growing)
    assert (growing[0].noted, growing[1].version) == ([True], 2)
    assert [parameter.data_ptr() for parameter in growing.parameters()] == addresses
    outside: Any = Hooked()
    outside.append(Noting())
    store.save({"0.oldest": torch.ones(3, 3), "1.weight": torch.ones(2)}, run="b", step=1)
    load_model_and_optim_state(store, "b@1", outside)
    assert outside[1].noted == [False]


HEAD = {"model.1.weight", "model.1.bias"}


def test_what_modules_do_not_convert_is_reported_exactly(
    store: casckpt.Store, caplog: pytest.LogCaptureFixture
) -> None:
    more: Any = Root(nn.Linear(3, 3), nn.Linear(3, 2))
    save_model_and_optim_state(store, more, run="more", step=1)
    save_model_and_optim_state(store, Root(more[0]), run="less", step=1)
    fresh: Any = Root(nn.Linear(3, 3), nn.Linear(3, 2))
    smaller: Any = Root(nn.Linear(3, 3))
    for run, model in (("less", fresh), ("more", smaller)):
        with pytest.raises(Mismatch, match=r"\"1\.weight\", \"1\.bias\""):
            load_model_and_optim_state(store, f"{run}@1", model)
        loaded = load_model_and_optim_state(store, f"{run}@1", model, strict=False)
        assert {*loaded.missing_keys, *loaded.unread_keys} == HEAD
        assert ({*loaded.missing_keys} == HEAD) is (run == "less")
        assert torch.equal(model[0].weight, more[0].weight)
        assert "'model.1.weight'" in caplog.records[-1].message
    loaded = load_model_and_optim_state(store, "less@1", fresh, ignore_mismatched=["1.*"])
    assert {*loaded.mismatched_keys} | {*loaded.missing_keys} == HEAD
    with pytest.raises(Mismatch, match=r"missing names: '1\.bias'"):
        load_model_and_optim_state(store, "less@1", fresh, ignore_mismatched=["1.weight"])


@pytest.mark.parametrize("make", [Root, nn.Sequential], ids=["with", "without"])
def test_a_shape_that_no_module_converts_is_a_mismatch(store: casckpt.Store, make: Callable[..., Any]) -> None:
    save_model_and_optim_state(store, make(nn.Linear(3, 3), nn.BatchNorm1d(3)), run="a", step=1)
    wide = make(nn.Linear(3, 3), nn.BatchNorm1d(4))
    with pytest.raises(Mismatch, match=r"1\.weight"):
        load_model_and_optim_state(store, "a@1", wide)
    loaded = load_model_and_optim_state(store, "a@1", wide, ignore_mismatched=["1.*"])
    assert "model.1.running_var" in loaded.mismatched_keys


def test_a_resume_that_may_leave_parts_leaves_a_shape_that_no_module_converts(
    store: casckpt.Store, caplog: pytest.LogCaptureFixture
) -> None:
    Checkpointer(store, run="a").save(1, Root(nn.Linear(2, 3), nn.Linear(3, 3)))
    fresh: Any = Root(nn.Linear(2, 3), nn.Linear(3, 4))
    before = fresh[1].weight.detach().clone()
    assert Checkpointer(store, run="a").resume(fresh, missing="warn")
    assert torch.equal(fresh[1].weight, before)
    assert "What fits is loaded by now" in caplog.text
    assert "1.weight" in caplog.text


def test_a_module_of_torch_that_does_not_fit_is_left_unchanged(store: casckpt.Store) -> None:
    """A BatchNorm may add its counter, but does not resize its buffers."""
    state = without(nn.Sequential(nn.BatchNorm1d(3)).state_dict(), "0.num_batches_tracked")
    store.save({"model": state}, run="a", step=1)
    wide = nn.Sequential(nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    with pytest.raises(Mismatch, match="shape"):
        load_model_and_optim_state(store, "a@1", wide)
    Checkpointer(store, run="a").resume(wide, missing="warn")
    assert identical(dict(wide.state_dict()), before)


class Configured(nn.Linear):
    """A module whose state_dict also has its configuration."""

    config: Any = None

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return super().state_dict(*args, **options) | {"config": self.config}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.config = state["config"]
        return super().load_state_dict({name: state[name] for name in ("weight", "bias")}, strict, assign)


@pytest.mark.parametrize("before", [None, {"other": 0}])
@pytest.mark.parametrize("config", [{}, {"a": 1, "b": {"c": []}}, {"w": torch.ones(2), "empty": {}}, [], [1], None, 3])
def test_a_state_dict_may_contain_any_plain_data(store: casckpt.Store, config: Any, before: Any) -> None:
    saved, fresh = Configured(2, 2), Configured(2, 2)
    saved.config, fresh.config = config, before
    Checkpointer(store, run="a").save(1, saved)
    assert Checkpointer(store, run="a").resume(fresh) is not None
    assert identical(fresh.state_dict(), saved.state_dict())


def test_a_second_name_of_a_tensor_and_parts_of_a_model_are_loaded_as_before(store: casckpt.Store) -> None:
    saved, tied = Root(nn.Linear(3, 3)), Root(nn.Linear(3, 3))
    save_model_and_optim_state(store, saved, run="a", step=1)
    tied.append(tied[0])
    load_model_and_optim_state(store, "a@1", tied)
    assert torch.equal(tied.state_dict()["1.weight"], saved.state_dict()["0.weight"])
    store.save({"model": without(nn.BatchNorm1d(3).state_dict(), "num_batches_tracked")}, run="b", step=1)
    with pytest.raises(MissingKey, match="num_batches_tracked"):
        load_model_and_optim_state(store, "b@1", [nn.BatchNorm1d(3), nn.Module()])


# optimizers


def trained(model: nn.Module, optims: list[Optimizer], steps: int) -> None:
    for _ in range(steps):
        sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        for one in optims:
            one.step()
            one.zero_grad()


def per_parameter(model: nn.Module) -> list[Optimizer]:
    return [optim.Adam([parameter], lr=0.1) for parameter in model.parameters()]


def at_once(model: nn.Module) -> list[Optimizer]:
    return [optim.Adam([{"params": [parameter]} for parameter in model.parameters()], lr=0.1)]


@pytest.mark.parametrize("missing", ["raise", "warn"])
@pytest.mark.parametrize("here", [3, 5])
@pytest.mark.parametrize("make", [per_parameter, at_once])
def test_optimizers_follow_the_parameters_that_a_load_replaces(
    store: casckpt.Store, make: Callable[[nn.Module], list[Optimizer]], here: int, missing: Any
) -> None:
    model = Points(5)
    optims = make(model)
    trained(model, optims, 2)
    Checkpointer(store, run="a").save(2, model, optims)
    fresh = Points(here)
    others = make(fresh)
    trained(fresh, others, 1)
    Checkpointer(store, run="a").resume(fresh, others, missing=missing, prove=True)
    assert {id(one) for optimizer in others for one in optimizer.state} == {id(one) for one in fresh.parameters()}
    trained(model, optims, 2)
    trained(fresh, others, 2)
    assert identical(dict(fresh.state_dict()), dict(model.state_dict()))


# lazy modules


def test_lazy_modules_without_shapes_are_refused_where_shapes_are_needed(store: casckpt.Store) -> None:
    model, fresh = initialized(), lazy()
    optimizer = optim.Adam(model.parameters())
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    with pytest.raises(InvalidInput, match=r"'0\.weight'.*run one forward pass first"):
        save_model_and_optim_state(store, fresh, run="b", step=1)
    with pytest.raises(InvalidInput, match=r"'0\.weight'.*run one forward pass first"):
        load_model_and_optim_state(store, "a@1", fresh, optim.Adam(fresh.parameters()))
    fresh(torch.randn(4, 2))
    load_model_and_optim_state(store, "a@1", fresh, optim.Adam(fresh.parameters()))
    assert identical(dict(fresh.state_dict()), dict(model.state_dict()))


# sharded models


def fully_sharded(*modules: nn.Module) -> nn.Module:
    model = nn.Sequential(*modules)
    for module in (*modules, model):
        fully_shard(module)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}


def sharded_loads(rank: int, size: int, path: Path) -> list[Any]:
    torch.manual_seed(rank)
    store, found = casckpt.open(path), list[Any]()
    for run, last in (("counters", nn.BatchNorm1d(3)), ("bank", Bank())):
        model = fully_sharded(nn.Linear(3, 3), last)
        load_model_and_optim_state(store, f"{run}@1", model)
        found.append(whole(model))
    model = fully_sharded(*normed())
    left = load_model_and_optim_state(store, "norm@1", model, strict=False)
    error = outcome_of(lambda: load_model_and_optim_state(store, "norm@1", model))
    rename = ast.literal_eval(str(error).rpartition("rename=")[2])
    load_model_and_optim_state(store, "norm@1", model, rename=rename)
    points: Any = Points(3)
    fully_shard(points)
    refused = outcome_of(lambda: load_model_and_optim_state(store, "points@1", points))
    return [*found, sorted(left.missing_keys), error, whole(model), refused]


def test_modules_convert_whole_tensors_beside_sharded_ones(store_path: Path, ranks: Pool) -> None:
    """Where a sharded tensor would be converted, the error names the hook, and the rename that it gives works."""
    store = casckpt.open(store_path)
    counters = without(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).state_dict(), "1.num_batches_tracked")
    bank = nn.Sequential(nn.Linear(3, 3), Bank(5)).state_dict()
    norm = normed_before()
    theirs = normed()
    theirs.load_state_dict(dict(norm))
    originals = [f"model.1.parametrizations.weight.original{number}" for number in (0, 1)]
    points = Points(5).state_dict()
    for run, state in (("counters", counters), ("bank", bank), ("norm", norm), ("points", points)):
        store.save({"model": state}, run=run, step=1)
    for counted, grown, missing, error, renamed, refused in ranks.run(2, sharded_loads, store_path):
        assert identical(without(counted, "1.num_batches_tracked"), dict(counters))
        assert counted["1.num_batches_tracked"] == 0
        assert identical(grown, dict(bank))
        assert missing == originals
        assert re.search(r"lacks '1.*original0'.* _weight_norm_compat_hook of a FSDPParametrizedLinear may", str(error))
        assert identical(renamed, dict(theirs.state_dict()))
        assert "load_state_dict of a FSDPPoints may convert" in str(refused)
