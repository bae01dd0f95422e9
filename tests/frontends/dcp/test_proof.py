"""`StorageReader.prove`: compares the live state with the checkpoint that `dcp.load` loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from casckpt.errors import InvalidInput, Mismatch
from casckpt.frontends.dcp import StorageReader, StorageWriter
from casckpt.frontends.training_state.proof import Proof
from casckpt.store.store import Store
from tests.support.dcp import load, save
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import small, small_folder
from tests.support.torch_versions import needs_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class World:
    """A model and its optimizer after some steps, a scheduler, and the number of the step.

    ``flat``: whether the optimizer's state dict has one level, which joins the names of parameters and options.
    """

    def __init__(self, seed: int, flat: bool = False, mesh: Any = None) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 1)
        self.step = 0
        for _ in range(seed):
            self.model(torch.ones(2, 4)).sum().backward()
            self.optim.step()
            self.schedule.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim, options=self.options)
        return {"model": model, "optim": optim, "schedule": self.schedule, "step": self.step}

    def set(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"],
            options=self.options,
        )  # fmt: skip
        self.step = state["step"]


def resumed(store: Any, world: World, sick: Callable[[World], object] = lambda _: None, **options: Any) -> Proof:
    """Load into a training, let ``sick`` change it, and prove the resume."""
    reader = StorageReader(store, "default@3", **options)
    world.set(load(world.state(), reader))
    with torch.no_grad():
        sick(world)
    return reader.prove(world.state(), world.model)


@pytest.fixture(scope="module", params=[False, True], ids=["nested", "flat"])
def saved(request: pytest.FixtureRequest) -> tuple[Store, bool]:
    store = small()
    save(World(3, request.param).state(), StorageWriter(store, step=3))
    return store, request.param


def test_a_resume_that_sets_everything_is_proved(saved: tuple[Store, bool]) -> None:
    store, flat = saved
    proof = resumed(store, World(2, flat))
    assert proof.unproved == {}
    assert proof.bytes == sum(entry.bytes for entry in store.get("default@3").tensors.values())


def moment(world: World) -> torch.Tensor:
    found: torch.Tensor = world.optim.state[world.model[1].weight]["exp_avg"]
    return found


WRONG: dict[str, tuple[Callable[[World], object], str]] = {
    "a layer is initialized again": (lambda world: world.model[1].reset_parameters(), "model.1.weight"),
    "one element of a bias differs": (lambda world: world.model[0].bias[2].add_(1e-6), "model.0.bias"),
    "the model has a different dtype": (lambda world: world.model.to(torch.bfloat16), "model.0.weight"),
    "the optimizer has no state": (lambda world: world.optim.state.clear(), "optim.state.0.weight."),
    "a moment of the optimizer is reset": (lambda world: moment(world).zero_(), "optim.state.1.weight.exp_avg"),
    "the learning rate is set by hand": (
        lambda world: world.optim.param_groups[0].update(lr=9.0),
        "optim.param_groups",
    ),
    "the scheduler starts again": (lambda world: setattr(world.schedule, "last_epoch", 0), "schedule.last_epoch"),
    "the step is not restored": (lambda world: setattr(world, "step", 0), "step"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_way_to_resume_wrongly_is_found(saved: tuple[Store, bool], name: str) -> None:
    act, key = WRONG[name]
    with pytest.raises(Mismatch, match="after the resume") as caught:
        resumed(saved[0], World(2, saved[1]), act, cast=False)
    assert any(found.startswith(key) for found in caught.value.keys), caught.value.keys


def test_a_state_that_was_loaded_but_not_set_is_found(saved: tuple[Store, bool]) -> None:
    """`get_state_dict` may return copies, so a load alone changes nothing."""
    world, reader = World(2, saved[1]), StorageReader(saved[0], "default@3")
    load({"model": {key: value.clone() for key, value in world.model.state_dict().items()}}, reader)
    with pytest.raises(Mismatch, match=r"model\.0\.weight") as caught:
        reader.prove(world.state(), world.model)
    assert all(key.startswith("model.") for key in caught.value.keys)


def test_keys_that_the_load_did_not_read_or_fill_are_listed() -> None:
    store, world = small(), World(3)
    model = {**world.model.state_dict(), "old": torch.ones(1)}
    save({"model": model, "beside": torch.ones(1), "note": "x"}, StorageWriter(store, step=3))
    reader, live = StorageReader(store, "default@3"), World(2).model
    state = {"model": live.state_dict(), "new": torch.ones(1), "fresh": 1}
    load(state, reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    proof = reader.prove(state, live)
    not_there, not_read = "not in the checkpoint, left unchanged", "not read by the load"
    assert proof.unproved == {
        "new": not_there, "fresh": not_there, "model.old": not_read, "beside": not_read, "note": not_read
    }  # fmt: skip
    assert proof.proved == 4
    with pytest.raises(Mismatch, match=r"model\.0\.bias"):
        reader.prove({"model": dict(list(state["model"].items())[::2])}, live)


@pytest.mark.parametrize("there", [["w", "w2"], ["w2"]])
def test_a_key_that_the_load_left_out_excuses_no_other_key(there: list[str]) -> None:
    """Either the checkpoint or the loaded state lacks ``w``."""
    store, every = small(), {"w": 1.0, "w2": 2.0, "w2_mean": 3.0}
    model = {key: torch.full((2,), value) for key, value in every.items()}
    save({"model": {key: model[key] for key in (*there, "w2_mean")}}, StorageWriter(store, step=3))
    reader = StorageReader(store, "default@3")
    live = {"model": {key: model[key].clone() for key in model if key not in there or key != "w"}}
    load(live, reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert list(reader.prove({"model": model}).unproved) == ([] if "w" in there else ["model.w"])
    with pytest.raises(Mismatch, match="after the resume") as caught:
        reader.prove({"model": {**model, "w": model["w2"], "w2": model["w"]}})
    assert caught.value.keys == ("model.w2",)


def test_a_list_that_dcp_stores_as_one_value_is_compared() -> None:
    store = small()
    save({"list": [1, {"a": 2}], "empty": {}}, StorageWriter(store, step=3))
    reader = StorageReader(store, "default@3")
    load({"list": [0, {"a": 0}]}, reader)
    assert reader.prove({"list": [1, {"a": 2}], "empty": {}}).unproved == {}
    for wrong in ([1, {"a": 3}], [1, {"b": 2}], [1], [0, 1]):
        with pytest.raises(Mismatch, match="list"):
            reader.prove({"list": wrong})


def test_only_tensors_that_the_load_converted_may_have_a_different_dtype(saved: tuple[Store, bool]) -> None:
    world, reader = World(2, saved[1]), StorageReader(saved[0], "default@3")
    world.model.to(torch.bfloat16)
    load({"model": world.model.state_dict()}, reader)
    proof = reader.prove({"model": world.model.state_dict()}, world.model)
    converted = {key for key, why in proof.unproved.items() if "converted by the cast" in why}
    assert converted == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}
    with pytest.raises(Mismatch, match=r"'model\.0\.bias'.*dtype"):
        resumed(saved[0], World(2, saved[1]), lambda world: world.model.to(torch.bfloat16))


class Unknown:
    """An object that a save without pickles rejects."""


STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another name": ({"model": {"w": torch.ones(2)}}, {"module": {"w": torch.ones(2)}}),
    "a part named train": ({"train": {"1": {"w": torch.ones(2)}}}, {"train": {"1": {"w": torch.zeros(2)}}}),
    "a part named train that is gone": ({"train": {"1": {"w": torch.ones(2)}}}, {"train": {}}),
    "an item that cannot be encoded": ({"list": [torch.ones(2), 1]}, {"list": [Unknown(), 1]}),
    "the state of another optimizer": (
        {"optimizer": {"state.w.exp_avg": torch.ones(2), "param_groups.w.eps": 1.0}},
        {"optimizer": {"state.w.momentum": torch.ones(2), "param_groups.w.nesterov": False}},
    ),
    "groups that are no groups": ({"optim": {"param_groups": [1, 2]}}, {"optim": {"param_groups": [1, 3]}}),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_compared_under_its_exact_names(name: str) -> None:
    right, wrong = STATES[name]
    store = small()
    save(right, StorageWriter(store, step=3))
    reader = StorageReader(store, "default@3")
    load(right, reader)
    assert reader.prove(right).unproved == {}
    with pytest.raises(Mismatch, match="after the resume"):
        reader.prove(wrong)


def test_a_proof_without_a_finished_load_is_refused(saved: tuple[Store, bool]) -> None:
    reader = StorageReader(saved[0], "default@3")
    with pytest.raises(InvalidInput, match=r"call dcp\.load"):
        reader.prove({})
    reader.read_metadata()
    with pytest.raises(InvalidInput, match=r"call dcp\.load"):
        reader.prove({})


class Broken:
    """A part of a state whose state_dict fails."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful`."""


def a_rank_fails(rank: int, size: int, folder: Path) -> Any:
    state = {"w": torch.ones(2)}
    save(state, StorageWriter(folder / "store", step=3))
    reader = StorageReader(folder / "store", "default@3")
    load(state, reader)
    parts = {"part": Broken()} if rank == 1 else {}
    return str(outcome_of(lambda: reader.prove(state | parts)))


def test_all_ranks_raise_the_error_of_a_state_dict(tmp_path: Path, ranks: Pool) -> None:
    small_folder(tmp_path / "store")
    assert all("no state" in error for error in ranks.run(2, a_rank_fails, tmp_path))


def alone(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    state = {"own": rank, "w": distribute_tensor(torch.ones(5), mesh, [Shard(0)])}
    save(state, StorageWriter(folder / "store", run="alone", step=3), use_collectives=False)
    reader = StorageReader(folder / "store", "alone@3")
    load(state, reader)
    wrong = outcome_of(lambda: reader.prove(state | {"own": 7}))
    return sorted(reader.prove(state).unproved), type(wrong).__name__


@needs_torch("2.9", "use_collectives")
def test_shards_that_a_rank_saved_alone_are_listed(tmp_path: Path, ranks: Pool) -> None:
    small_folder(tmp_path / "store")
    names = [["w", "w@0"], ["w", "w@3"]]
    assert ranks.run(2, alone, tmp_path) == [(keys, "Mismatch") for keys in names]


def on_ranks(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    world = World(3, mesh=mesh)
    save(world.state(), StorageWriter(folder / "store", step=3))
    right = resumed(folder / "store", World(2, mesh=mesh))

    def sick(world: World) -> None:
        if rank == 1:
            moment(world).to_local().add_(1)  # type: ignore[attr-defined]  # a DTensor

    wrong = outcome_of(lambda: resumed(folder / "store", World(2, mesh=mesh), sick))
    return dict(right.unproved), right.proved > 10, wrong


def test_each_rank_compares_its_shards(tmp_path: Path, ranks: Pool) -> None:
    small_folder(tmp_path / "store")
    for unproved, is_proved, wrong in ranks.run(2, on_ranks, tmp_path):
        assert (unproved, is_proved) == ({}, True)
        assert "optim.state.1.weight.exp_avg" in str(wrong)
