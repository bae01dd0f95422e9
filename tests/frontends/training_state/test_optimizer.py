"""The table of optimizers in docs/train_state.md, row by row. Rows of missing packages are skipped."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

import casckpt
from casckpt.errors import InvalidInput, Mismatch
from casckpt.frontends.trainer import Checkpointer, TrainState
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from casckpt.frontends.training_state.optimizer import StateKind
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import small
from tests.support.training import Network, everything, identical

PAGE = Path(__file__).parents[3] / "docs" / "train_state.md"

AS_IT_IS = "with default arguments"
ON_ONE = "with default arguments, on a single process"
PICKLED = "with `allow_pickle=True`"
OWNED = "with `owners=`"
SHARDED = "with default arguments, on any number of ranks; refused with `overlap_with_ddp=True`"
AS_OBJECT = "refused before step 1: leave `optim` out, and pass `TrainState(optim=optim)`"
REFUSED = "refused, even in a `TrainState`, because the keys of its state are tuples or non-integer numbers"

Make = Callable[[Any, nn.Module], Optimizer]


@dataclass(frozen=True)
class Row:
    """The optimizers of one package, and what the table says about them.

    ``make``: creates one from a class and a model.
    """

    names: str
    package: str
    version: str
    module: str
    outcome: str = AS_IT_IS
    make: Mapping[str, Make] = field(default_factory=dict)

    def of(self, name: str, model: nn.Module) -> Optimizer:
        """Create an optimizer for a model, in training mode."""
        kind = getattr(pytest.importorskip(self.module, exc_type=ImportError), name, None)
        if kind is None:
            pytest.skip(f"no {name} in this version of {self.package}")
        made = self.make.get(name, self.make.get("", by_default))(kind, model)
        getattr(made, "train", bool)()
        return made


def by_default(kind: Any, model: nn.Module, **options: Any) -> Optimizer:
    made: Optimizer = kind(model.parameters(), lr=0.01, **options)
    return made


def of_matrices(kind: Any, model: nn.Module) -> Optimizer:
    made: Optimizer = kind([one for one in model.parameters() if one.ndim == 2], lr=0.01)
    return made


def in_two_groups(kind: Any, model: nn.Module, matrices: dict[str, Any], others: dict[str, Any]) -> Optimizer:
    two = [one for one in model.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if one.ndim != 2]
    made: Optimizer = kind([{"params": two, "lr": 0.01, **matrices}, {"params": rest, "lr": 0.01, **others}])
    return made


def around(inner: Any, kind: Any, model: nn.Module) -> Optimizer:
    made: Optimizer = kind(inner(model.parameters(), lr=0.01))
    return made


def layer_wise(kind: Any, model: nn.Module) -> Optimizer:
    """Create one optimizer per parameter, which steps in a hook of the parameter, as Transformers does."""
    layers: dict[Any, Optimizer] = {one: optim.AdamW([one], lr=0.01) for one in model.parameters()}
    made: Optimizer = kind(optimizer_dict=layers)

    def step(parameter: torch.Tensor) -> None:
        layers[parameter].step()
        layers[parameter].zero_grad()

    for parameter in layers:
        parameter.register_post_accumulate_grad_hook(step)
    return made


galore = partial(
    in_two_groups, matrices={"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}, others={}
)
apollo = partial(
    in_two_groups, others={},
    matrices={
        "rank": 4, "proj": "random", "scale_type": "channel", "scale": 1.0, "update_proj_gap": 2, "proj_type": "std"
    },
)  # fmt: skip
muon_and_adam = partial(in_two_groups, matrices={"use_muon": True}, others={"use_muon": False})

ROWS = [
    Row(
        "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam",
        "torch", "2.13.0", "torch.optim", make={"Muon": of_matrices},
    ),
    Row("ZeroRedundancyOptimizer", "torch", "2.13.0", "torch.distributed.optim", SHARDED),
    Row(
        "SingleDeviceMuon SingleDeviceMuonWithAuxAdam", "muon_optimizer", "0.1.0", "muon",
        make={"SingleDeviceMuon": of_matrices, "": muon_and_adam},
    ),
    Row(
        "Muon MuonWithAuxAdam", "muon_optimizer", "0.1.0", "muon", OWNED, {"Muon": of_matrices, "": muon_and_adam},
    ),
    Row(
        "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree ScheduleFreeWrapper", "schedulefree", "1.4.1",
        "schedulefree", make={"ScheduleFreeWrapper": partial(around, optim.SGD)},
    ),
    Row("GaLoreAdamW", "galore_torch", "1.0", "galore_torch", PICKLED, {"": galore}),
    Row("APOLLOAdamW", "apollo_torch", "1.0.3", "apollo_torch", PICKLED, {"": apollo}),
    Row(
        "LayerWiseDummyOptimizer", "transformers", "5.23.0", "transformers.trainer_pt_utils", make={"": layer_wise}
    ),
    Row(
        "SOAP Shampoo GaLore APOLLO Lion Prodigy ADOPT Adan StableAdamW SPlus Kron", "pytorch_optimizer", "4.1.0",
        "pytorch_optimizer", make={"Kron": partial(by_default, balance_prob=0.0)},  # otherwise, it draws from numpy
    ),
    Row("ScalableShampoo Conda SCION", "pytorch_optimizer", "4.1.0", "pytorch_optimizer", PICKLED),
    Row(
        "Ranger21 SPAM StableSPAM", "pytorch_optimizer", "4.1.0", "pytorch_optimizer", AS_OBJECT,
        {"Ranger21": partial(by_default, num_iterations=10)},
    ),
    Row(
        "AggMo Lookahead Magma", "pytorch_optimizer", "4.1.0", "pytorch_optimizer", REFUSED,
        {"Lookahead": partial(around, optim.SGD)},
    ),
    Row("Shampoo Lamb AdaBelief RAdam Yogi", "torch_optimizer", "0.3.0", "torch_optimizer"),
    Row("Lion", "lion_pytorch", "0.2.5", "lion_pytorch"),
    Row("Prodigy", "prodigyopt", "1.1.2", "prodigyopt"),
    Row(
        "Adam_mini", "adam_mini", "1.1.1", "adam_mini",
        make={"": lambda kind, model: kind(model.named_parameters(), lr=0.01, dim=64, n_heads=4, verbose=False)},
    ),
    Row(
        "Adam8bit AdamW8bit Lion8bit RMSprop8bit AdEMAMix8bit PagedAdamW8bit AdamW32bit", "bitsandbytes", "0.50.2",
        "bitsandbytes.optim", ON_ONE,
    ),
    Row("AdamW8bit AdamW4bit AdamWFp8", "torchao", "0.18.0", "torchao.optim"),
    Row("AdamW SOAP Muon SFAdamW", "heavyball", "3.2.1", "heavyball", AS_OBJECT),
]  # fmt: skip

CASES = [
    pytest.param(row, name, id=f"{row.package} {name}")
    for row in ROWS
    if row.outcome not in (SHARDED, OWNED, REFUSED)
    for name in row.names.split()
]


def network(seed: int, sides: tuple[int, int, int] = (80, 64, 72)) -> nn.Module:
    """Return matrices of more than 4096 elements, because 8-bit optimizers use 8 bits only above this size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(sides[0], sides[1]), nn.Tanh(), nn.Linear(sides[1], sides[2]))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    is_sparse, takes_closure = isinstance(optimizer, optim.SparseAdam), isinstance(optimizer, optim.LBFGS)
    for number in steps:
        torch.manual_seed(number)  # some optimizers draw random numbers
        x = torch.randn(7, 80)

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(x).square().mean()
            value.backward()  # type: ignore[no-untyped-call]  # torch's own
            return value

        if is_sparse:
            loss()
            for one in model.parameters():
                one.grad = None if one.grad is None else one.grad.to_sparse()
            optimizer.step()
        elif takes_closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def all_of(model: nn.Module, optimizer: Any) -> Any:
    """Return every parameter, and everything that the optimizer keeps."""
    layers = getattr(optimizer, "optimizer_dict", None)
    optims = [optimizer] if layers is None else list(layers.values())
    state = [{str(key): value for key, value in one.state.items() if isinstance(key, str)} for one in optims]
    kept = [[one.state.get(parameter) for group in one.param_groups for parameter in group["params"]] for one in optims]
    left = ("params", "__class__")  # the latter records the class in heavyball
    groups = [
        [{key: group[key] for key in sorted(group.keys() - left)} for group in one.param_groups] for one in optims
    ]
    return bare([dict(model.named_parameters()), state, kept, groups])


def bare(value: Any) -> Any:
    """Convert a value to tensors and plain data, including wrappers and objects of other packages."""
    if isinstance(value, torch.Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        return [type(value).__name__, *(getattr(value, name) for name in names)] if names else value
    if isinstance(value, Mapping):
        return {key: bare(child) for key, child in value.items()}
    if isinstance(value, list | tuple | deque):
        return [bare(child) for child in value]
    is_object = hasattr(value, "__dict__") and not isinstance(value, type | Enum)
    return bare(vars(value)) if is_object else value


@pytest.mark.filterwarnings("ignore")  # warnings of other packages
@pytest.mark.parametrize(("row", "name"), CASES)
def test_an_optimizer_resumes_bit_for_bit(monkeypatch: pytest.MonkeyPatch, row: Row, name: str) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao would compile for a minute
    model, store = network(1), small()
    optimizer = row.of(name, model)
    options: Any = {"allow_pickle": True} if row.outcome == PICKLED else {}
    if row.outcome == AS_OBJECT:
        with pytest.raises(InvalidInput, match="in a TrainState"):
            save_model_and_optim_state(store, model, optimizer, run="r", step=0)
    train(model, optimizer, range(3))
    if row.outcome == PICKLED:
        with pytest.raises(InvalidInput, match="allow_pickle=True"):
            save_model_and_optim_state(store, model, optimizer, run="r", step=3)
    resumed = [in_a_loop(store, row, name, (model, optimizer), options)]
    if row.outcome != AS_OBJECT:
        save_model_and_optim_state(store, model, optimizer, run="r", step=3, **options)
        fresh = network(2)
        resumed.append((fresh, row.of(name, fresh)))
        load_model_and_optim_state(store, "r@3", *resumed[-1], **options)
    train(model, optimizer, range(3, 6))
    for other in resumed:
        train(*other, range(3, 6))
        assert identical(all_of(*other), all_of(model, optimizer))


@pytest.mark.filterwarnings("ignore")  # warnings of the package
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
def test_torchao_loads_the_state_of_torch_but_not_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch, name: str, steps: int
) -> None:
    kind = getattr(pytest.importorskip("torchao.optim", reason="needs torchao"), name)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    makes: list[Any] = [lambda model: optim.AdamW(model.parameters(), lr=0.01), partial(by_default, kind)]
    for save_as, load_as in (makes, makes[::-1]):
        model, store, other = network(1), small(), network(2)
        optimizer, loaded = save_as(model), load_as(other)
        train(model, optimizer, range(3))
        train(other, loaded, range(steps))
        save_model_and_optim_state(store, model, optimizer, run="r", step=3)
        if load_as is makes[0]:
            with pytest.raises(Mismatch, match="to_dense"):
                load_model_and_optim_state(store, "r@3", other, loaded)
            continue
        load_model_and_optim_state(store, "r@3", other, loaded)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            saved, found = optimizer.state[one], loaded.state[two]
            assert all(type(value) is torch.Tensor and torch.equal(value, saved[key]) for key, value in found.items())
        assert loaded.param_groups[0]["lr"] == pytest.approx(0.01)
        train(other, loaded, range(3, 6))
        train(model, optimizer, range(3, 6))
        torch.testing.assert_close([*other.parameters()], [*model.parameters()])


def test_a_learning_rate_that_is_a_tensor_is_filled_with_a_saved_number(store: casckpt.Store) -> None:
    model = network(1)
    trained = optim.AdamW(model.parameters(), lr=0.25)
    train(model, trained, range(1))
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    rate = torch.tensor(0.5)
    other = optim.AdamW(model.parameters(), lr=rate)
    load_model_and_optim_state(store, "a@1", model, other)
    assert other.param_groups[0]["lr"] is rate
    assert rate == 0.25


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("rates", [(0.25, 0.125), (0.25, 0.25)])
def test_groups_that_share_a_learning_rate_get_their_own_values(
    store: casckpt.Store, kind: Callable[[float], Any], rates: tuple[float, float]
) -> None:
    model = network(1)
    parts = [[one for one in model.parameters() if (one.ndim == 2) == is_matrix] for is_matrix in (True, False)]
    trained = optim.AdamW([{"params": part, "lr": kind(rate)} for part, rate in zip(parts, rates, strict=True)])
    train(model, trained, range(1))
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    rate = torch.tensor(0.5)
    other = optim.AdamW([{"params": part} for part in parts], lr=rate)  # torch does not copy the tensor for each group
    load_model_and_optim_state(store, "a@1", model, other)
    loaded = [group["lr"] for group in other.param_groups]
    assert [float(one) for one in loaded] == list(rates)
    assert all(type(one) is torch.Tensor for one in loaded)
    assert [one is rate for one in loaded] == [True, rates[0] == rates[1]]


@pytest.mark.filterwarnings("ignore")  # warnings of the package
@pytest.mark.parametrize("name", ["AggMo", "Lookahead", "Magma"])
def test_values_that_a_checkpoint_cannot_store_are_rejected(name: str) -> None:
    row = next(row for row in ROWS if row.outcome == REFUSED)
    model, store = network(1), small()
    optimizer = row.of(name, model)
    train(model, optimizer, range(2))
    for contents in ((model, optimizer), (model, None, TrainState(optim=optimizer))):
        with pytest.raises(InvalidInput), Checkpointer(store, run="r") as checkpointer:
            checkpointer.save(2, *contents)
    assert not store.repository.exists() or not store.checkpoints()


def in_a_loop(
    store: casckpt.Store, row: Row, name: str, trained: tuple[nn.Module, Optimizer], options: Any
) -> tuple[nn.Module, Optimizer]:
    """Return a new model and optimizer that have resumed from a checkpoint that a `Checkpointer` saved."""

    def contents(model: nn.Module, optimizer: Optimizer) -> Any:
        return (model, None, TrainState(optim=optimizer)) if row.outcome == AS_OBJECT else (model, optimizer)

    with Checkpointer(store, run="loop", **options) as checkpointer:
        checkpointer.save(3, *contents(*trained))
    fresh = network(3)
    other = row.of(name, fresh)
    with Checkpointer(store, run="loop", **options) as checkpointer:
        assert checkpointer.resume(*contents(fresh, other)) is not None
    return fresh, other


class Noted(optim.SGD):
    """An optimizer with its own entry in addition to state and groups."""

    def __init__(self, params: Any, note: int) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.note = note

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"note": self.note}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.note = state_dict.pop("note")
        super().load_state_dict(state_dict)


def test_an_optimizer_with_additional_state_is_saved_as_an_object() -> None:
    model, store = network(1), small()
    noted = Noted(model.parameters(), 7)
    with pytest.raises(InvalidInput, match=r"contains \['note'\].* in a TrainState, or save its state_dict"):
        Checkpointer(store, run="r").save(0, model, noted)
    train(model, noted, range(2))
    Checkpointer(store, run="r").save(2, model, None, TrainState(optim=noted))
    store.save({"model": model.state_dict(), "optim": noted.state_dict()}, run="by-dict", step=2)
    fresh = network(2)
    again, other = Noted(fresh.parameters(), 0), Noted(fresh.parameters(), 0)
    assert Checkpointer(store, run="r").resume(fresh, None, TrainState(optim=again)) is not None
    other.load_state_dict(store.read("by-dict@2")["optim"])
    for one in (again, other):
        assert identical(all_of(fresh, one), all_of(model, noted))
        assert one.note == 7


def test_tensors_composed_of_tensors_are_stored_if_pickles_are_allowed() -> None:
    model, store = nn.Linear(3, 2), small()
    make: Any = TwoTensor
    codes = make(torch.arange(6.0).view(2, 3), torch.ones(2, 3))
    optimizer, other = (optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    optimizer.state[model.weight] = {"codes": codes, "nested": {"codes": codes}}
    with pytest.raises(
        InvalidInput, match=r"optim\.state\.weight\.codes': a TwoTensor consists of .*allow_pickle=True"
    ):
        save_model_and_optim_state(store, model, optimizer, run="r", step=1)
    save_model_and_optim_state(store, model, optimizer, run="r", step=1, allow_pickle=True)
    load_model_and_optim_state(store, "r@1", model, other, allow_pickle=True)
    assert identical(all_of(model, other), all_of(model, optimizer))
    assert type(other.state[model.weight]["nested"]["codes"]) is TwoTensor


def test_the_table_of_optimizers_has_a_row_for_each_expected_optimizer() -> None:
    text = PAGE.read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        assert f"| {names} | {row.package} {row.version} | {row.outcome} |" in lines
    versions = [line for line in lines if any(f" | {row.package} " in line for row in ROWS)]
    assert len(versions) == len(ROWS)


def test_the_table_contains_every_torch_optimizer() -> None:
    kinds = [kind for kind in vars(optim).values() if inspect.isclass(kind) and issubclass(kind, Optimizer)]
    assert {kind.__name__ for kind in kinds} - {"Optimizer"} <= set(ROWS[0].names.split())


# several ranks


def zero(model: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses torch.jit.script here
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optim.AdamW, **options)


def zero_resumed(rank: int, size: int, path: Path) -> Any:
    model = DistributedDataParallel(network(1))
    optimizer = zero(model, lr=0.01)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.005  # as a scheduler does, with no step since then
    save_model_and_optim_state(path, model, optimizer, run="r", step=3)
    fresh = DistributedDataParallel(network(2))
    other = zero(fresh, lr=0.5)
    load_model_and_optim_state(path, "r@3", fresh, other)
    assert other.param_groups[0]["lr"] == 0.005
    train(model, optimizer, range(3, 6))
    train(fresh, other, range(3, 6))
    assert identical(all_of(fresh, other.optim), all_of(model, optimizer.optim))
    overlapping = outcome_of(
        lambda: save_model_and_optim_state(path, fresh, zero(fresh, lr=0.1, overlap_with_ddp=True), run="r", step=4)
    )
    return {name: one.detach() for name, one in model.module.named_parameters()}, str(overlapping)


def test_the_zero_redundancy_optimizer_resumes_with_and_without_its_parts(store_path: Path, ranks: Pool) -> None:
    found, overlapping = ranks.run(2, zero_resumed, store_path)[0]
    assert "create it without overlap_with_ddp" in overlapping
    alone = network(3)
    whole = optim.AdamW(alone.parameters(), lr=0.5)
    load_model_and_optim_state(store_path, "r@3", alone, whole)
    train(alone, whole, range(3, 6))
    assert identical({name: one.detach() for name, one in alone.named_parameters()}, found)


def owners_of(model: nn.Module, optimizer: Optimizer, size: int) -> Callable[[str], int | None]:
    """The function from docs/train_state.md."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optim.state.{names[parameter]}.momentum_buffer": number % size
        for group in optimizer.param_groups
        if group.get("use_muon", True)
        for number, parameter in enumerate(group["params"])
    }.get


square = partial(network, sides=(80, 80, 80))  # gloo gathers only tensors of equal shape


def muon_resumed(rank: int, size: int, path: Path, name: str) -> str:
    row = next(row for row in ROWS if row.outcome == OWNED)
    store, model, resumed = casckpt.open(path), square(1), square(2)
    optimizer = row.of(name, model)
    train(model, optimizer, range(2))
    saved = model, optimizer
    for step in (2, 4):
        owners = owners_of(*saved, size)
        save_model_and_optim_state(store, *saved, run=name, step=step, owners=owners)
        resumed = square(step)
        saved = resumed, row.of(name, resumed)
        load_model_and_optim_state(store, f"{name}@{step}", *saved)
        train(model, optimizer, range(step, step + 2))
        train(*saved, range(step, step + 2))
        assert identical(maintained(*saved, owners, rank), maintained(model, optimizer, owners, rank))
    return str(outcome_of(lambda: save_model_and_optim_state(store, *saved, run=name, step=6, check_replicas="raise")))


def maintained(model: nn.Module, optimizer: Optimizer, owners: Callable[[str], int | None], rank: int) -> Any:
    """Return the parameters, and the state that this rank maintains."""
    state = {
        f"{name}.{what}": value
        for name, parameter in model.named_parameters()
        for what, value in optimizer.state.get(parameter, {}).items()
        if owners(f"optim.state.{name}.{what}") in (None, rank)
    }
    return dict(model.named_parameters()), state


@pytest.mark.parametrize("name", ["Muon", "MuonWithAuxAdam"])
def test_muon_resumes_with_the_momentum_of_the_ranks_that_own_it(store_path: Path, ranks: Pool, name: str) -> None:
    pytest.importorskip("muon")
    for refused in ranks.run(2, muon_resumed, store_path, name):
        assert "owners=" in refused


def test_saves_and_loads_call_the_hooks_of_an_optimizer(store: casckpt.Store) -> None:
    seen: list[str] = []
    model = Network(1)
    trained = optim.AdamW(model.parameters())
    trained.register_state_dict_post_hook(lambda optimizer, state: seen.append("save"))
    trained.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("before"))
    trained.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    save_model_and_optim_state(store, model, trained, run="a", step=1)
    load_model_and_optim_state(store, "a@1", model, trained)
    assert seen == ["save", "before", "after"]


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}],
    "SGD": [{}, {"momentum": 0.9}],
}
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    f"{name} {options or ''}".strip(): partial(kind, lr=0.1, **options)  # type: ignore[call-arg]  # all of them accept it
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    for options in OPTIONS.get(name, [{}])
}


def made(kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    """Return a model with one matrix, which every kind of optimizer accepts, and an optimizer."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
    return model, KINDS[kind](model.parameters())


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.grad = gradient.to_sparse() if isinstance(optimizer, optim.SparseAdam) else gradient
    optimizer.step(lambda: next(model.parameters()).square().sum())  # type: ignore[arg-type,return-value]  # LBFGS takes a closure


def stepped_on(model: nn.Module, optimizer: Optimizer) -> str | None:
    """Return the error of one more step, if any.

    In torch 2.11, Adagrad cannot continue from SGD, which has no state.
    """
    try:
        step(model, optimizer, 3)
    except KeyError as error:
        return str(error)
    return None


def torchs_own(saved: Optimizer, model: nn.Module, optimizer: Optimizer, kind: str) -> tuple[nn.Module, Optimizer]:
    """Return a copy of the model, and an optimizer of this kind that loads the saved state with torch's own
    functions."""
    other, alike = made(kind, 0)
    other.load_state_dict(model.state_dict())
    state = copy.deepcopy(saved.state_dict())
    state["param_groups"] = [{**optimizer.state_dict()["param_groups"][0], **state["param_groups"][0]}]
    alike.load_state_dict(state)
    return other, alike


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[casckpt.Store, Optimizer]]:
    """Return, for each kind, a store with the state after one step, and the optimizer that took the step."""
    found = {}
    for kind in KINDS:
        store = small()
        model, optimizer = made(kind, 1)
        step(model, optimizer, 1)
        save_model_and_optim_state(store, model, optimizer, run="a", step=1)
        found[kind] = store, optimizer
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stepped", "strict"),
    [
        pytest.param(True, True, id="stepped-strict"),
        pytest.param(False, False, id="fresh-not strict"),
        pytest.param(True, False, id="stepped-not strict", marks=pytest.mark.soak),
        pytest.param(False, True, id="fresh-strict", marks=pytest.mark.soak),
    ],
)
def test_state_of_any_kind_loads_into_every_other_kind_or_is_rejected(
    trained: dict[str, tuple[casckpt.Store, Optimizer]], strict: bool, stepped: bool, full: bool
) -> None:
    serves = set()
    for (row, of), (column, kind) in product(enumerate(KINDS), repeat=2):
        if not full and of != kind and (row + column) % 3:
            continue
        store, saved = trained[of]
        model, optimizer = made(kind, 2)
        if stepped:
            step(model, optimizer, 2)
        before = everything(model, optimizer)
        try:
            load_model_and_optim_state(store, "a@1", model, optimizer, strict=strict)
        except Mismatch:
            assert identical(everything(model, optimizer), before), (of, kind)
            step(model, optimizer, 3)
            continue
        serves.add((of, kind))
        expected = torchs_own(saved, model, optimizer, kind)
        assert stepped_on(*expected) == stepped_on(model, optimizer), (of, kind)
        assert identical(everything(model, optimizer), everything(*expected)), (of, kind)
    assert {(kind, kind) for kind in KINDS} <= serves
    assert not strict or all(_family(of) == _family(kind) for of, kind in serves), serves


def _family(kind: str) -> str:
    """Return the family of kinds that keep the same state."""
    name = kind.partition(" ")[0]
    return "Adam" if name in ("AdamW", "RAdam", "SparseAdam") else name


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_kinds_matches_the_state_that_torch_creates(kind: str) -> None:
    """This test fails if a version of torch keeps more or less state."""
    model, optimizer = made(kind, 1)
    step(model, optimizer, 1)
    known = StateKind.of(optimizer)
    assert known is not None
    for state in optimizer.state.values():
        assert known.needs(optimizer.param_groups[0]) <= state.keys() <= known.keeps()


class More(optim.SGD):
    """A user's optimizer, which keeps more state than its base class."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
        return super().step(closure)


class Slow(optim.Adam):
    """A user's optimizer that steps like Adam and also keeps a copy."""

    def note(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()


@pytest.mark.parametrize("make", [More, Slow])
def test_a_user_defined_optimizer_can_have_any_state(make: Callable[..., Any]) -> None:
    store, model = small(), made("SGD", 1)[0]
    optimizer = make(model.parameters(), lr=0.1)
    step(model, optimizer, 1)
    if make is Slow:
        optimizer.note()
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    fresh = made("SGD", 2)[0]
    other = make(fresh.parameters(), lr=0.5)
    load_model_and_optim_state(store, "a@1", fresh, other)
    assert identical(other.state_dict(), optimizer.state_dict())


def own(name: str, module: str, *kept: str) -> Callable[..., Any]:
    """Return a user's optimizer ``module.name``. It keeps the state ``kept`` for each parameter."""

    def take_step(self: Any, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update({what: torch.ones_like(parameter) for what in kept})
        return None if closure is None else closure()

    take_step.__qualname__, take_step.__module__ = f"{name}.step", module
    return type(name, (Optimizer,), {"step": take_step, "__module__": module})


@pytest.mark.parametrize("module", ["__main__", "mine.torch.optim.adam", "torch.optimizers", "torch_optim.adam"])
@pytest.mark.parametrize("kept", [("Adam", "ema"), ("SGD", "step", "exp_avg", "exp_avg_sq"), ("Muon", "sum", "step")])
def test_a_user_defined_optimizer_with_the_name_of_one_of_torchs_can_have_any_state(
    kept: tuple[str, ...], module: str
) -> None:
    store, kind, (model, _) = small(), own(kept[0], module, *kept[1:]), made("SGD", 1)
    optimizer = kind(model.parameters(), {"lr": 0.1})
    optimizer.step()
    Checkpointer(store, run="a").save(1, model, optimizer)
    fresh = made("SGD", 2)[0]
    other = kind(fresh.parameters(), {"lr": 0.5})
    Checkpointer(store, run="a").resume(fresh, other)
    assert identical(other.state_dict(), optimizer.state_dict())
    assert other.state


def test_a_subclass_of_a_torch_optimizer_must_have_the_state_of_its_base_class() -> None:
    store = small()
    model, optimizer = made("Adamax", 1)
    step(model, optimizer, 1)
    save_model_and_optim_state(store, model, optimizer, run="a", step=1)
    fresh = made("Adamax", 2)[0]
    other = Slow(fresh.parameters())
    before = everything(fresh, other)
    with pytest.raises(Mismatch, match="lacks 'exp_avg_sq'"):
        load_model_and_optim_state(store, "a@1", fresh, other)
    assert identical(everything(fresh, other), before)
