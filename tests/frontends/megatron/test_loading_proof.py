"""`megatron.prove`: compares the live state with the checkpoint that was loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.errors import Mismatch, NotFound
from casckpt.frontends import megatron
from casckpt.frontends.training_state.proof import Proof
from tests.frontends.megatron.test_core_model import gpt as core_gpt
from tests.frontends.megatron.test_core_model import parallel, state_of, with_steps
from tests.frontends.megatron.test_core_model import saved as core_saved
from tests.support import gpt
from tests.support.gpt import Topology, saved
from tests.support.megatron_core import core
from tests.support.ranks import Pool, outcome_of

SAVED = Topology(tp=2, pp=2, cut=0.3)
PADDED = {"embedding.weight", "optimizer.state.exp_avg.embedding.weight", "optimizer.state.exp_avg_sq.embedding.weight"}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory, ranks: Pool) -> str:
    place = f"{tmp_path_factory.mktemp('gpt')}#gpt@7"
    ranks.run(SAVED.size, saved, place, SAVED)
    return place


def proved(rank: int, size: int, where: str, topology: Topology) -> Any:
    proof = megatron.prove(gpt.state(topology.at(rank)), where)
    return dict(proof.unproved), proof.proved


@pytest.mark.parametrize("topology", [SAVED, Topology(tp=2, dp=2), Topology(pp=4)], ids=str)
def test_a_right_resume_in_any_configuration_is_proved(where: str, topology: Topology, ranks: Pool) -> None:
    padded = PADDED if topology.tp == 1 else set()
    for unproved, number in ranks.run(topology.size, proved, where, topology):
        assert unproved == dict.fromkeys(padded, "stored with a different shape, so it was not compared")
        assert number > 10


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a weight differs": (lambda state: state["model"]["layers.0.norm"].data.add_(1), "layers.norm"),
    "a fused weight differs": (lambda state: state["model"]["layers.1.fc1"].data[3].zero_(), "layers.fc1"),
    "a moment is reset": (
        lambda state: state["optimizer"]["state"]["exp_avg"]["layers.2.attention"].data.zero_(),
        "optimizer.state.exp_avg.layers.attention",
    ),
    "a flat moment is reset": (
        lambda state: state["optimizer"]["flat"]["layers.2.attention"][0].data.zero_(),
        "optimizer.state.exp_avg_sq.layers.attention",
    ),
    "an object differs": (
        lambda state: state["model"]["layers.1._extra_state"].data.update(layer=9), "layers._extra_state/shard_1_4"
    ),
    "the learning rate differs": (
        lambda state: state["optimizer"]["param_groups"][1].update(lr=9.0), "optimizer.param_groups"
    ),
    "a common tensor differs": (lambda state: state["optimizer"]["common_step"].zero_(), "optimizer.common_step"),
    "the iteration differs": (lambda state: state.update(iteration=0), "iteration"),
    "the optimizer is gone": (lambda state: state.pop("optimizer"), "optimizer.state.exp_avg.layers.norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_way_to_resume_wrongly_is_found(where: str, name: str) -> None:
    act, key = WRONG[name]
    state = gpt.state(Topology().at(0))
    act(state)
    with pytest.raises(Mismatch, match="after the resume") as caught:
        megatron.prove(state, where)
    assert isinstance(caught.value, megatron.CheckpointingException)
    assert any(found.startswith(key) for found in caught.value.keys), caught.value.keys


def test_an_added_value_does_not_excuse_missing_ones(where: str) -> None:
    state = gpt.state(Topology().at(0)) | {"counter": 1}
    del state["optimizer"]
    with pytest.raises(Mismatch, match="after the resume") as caught:
        megatron.prove(state, where)
    assert {"counter", "optimizer.state.exp_avg.layers.norm"} <= {*caught.value.keys}


def test_a_tensor_may_have_a_different_shape_only_if_a_load_accepts_it(where: str) -> None:
    state = gpt.state(Topology().at(0))
    state["model"]["embedding.weight"].allow_shape_mismatch = False
    with pytest.raises(Mismatch, match=r"embedding\.weight"):
        megatron.prove(state, where)


def a_replica_differs(rank: int, size: int, where: str) -> str:
    state = gpt.state(Topology(tp=2, dp=2).at(rank))
    if rank == 3:
        state["model"]["layers.0.norm"].data.add_(1)
    return str(outcome_of(lambda: megatron.prove(state, where)))


def test_a_replica_that_differs_is_found(where: str, ranks: Pool) -> None:
    assert all("'layers.norm'" in found for found in ranks.run(4, a_replica_differs, where))


def test_values_that_may_differ_are_listed(where: str) -> None:
    with pytest.raises(Mismatch, match="iteration"):
        megatron.prove(gpt.state(Topology().at(0)) | {"iteration": 8}, where)
    proof = megatron.prove(gpt.state(Topology().at(0)) | {"iteration": 8}, where, excused={"iteration": "counted on"})
    assert proof.unproved["iteration"] == "counted on"


def test_a_folder_that_names_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="was not saved with CasSaveShardedStrategy"):
        megatron.prove({}, tmp_path)


def moments(optimizer: Any) -> list[torch.Tensor]:
    (inner,) = optimizer.chained_optimizers
    return [state["exp_avg"] for state in inner.optimizer.state.values()]


SICK: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "nothing": (lambda model, optimizer: None, ""),
    "a weight is initialized again": (
        lambda model, _: model.module.output_layer.weight.fill_(1), "output_layer.weight"
    ),
    "one element of a norm differs": (
        lambda model, _: model.module.decoder.final_layernorm.weight[0].add_(1), "decoder.final_layernorm.weight"
    ),
    "the moments are reset": (
        lambda _, optimizer: [one.zero_() for one in moments(optimizer)], "optimizer.state.exp_avg"
    ),
    "a fused weight differs": (
        lambda model, _: model.module.decoder.layers[1].mlp.linear_fc1.weight.mul_(2),
        "decoder.layers.mlp.linear_fc1.weight",
    ),
    "the embedding is not loaded": (
        lambda model, _: model.module.embedding.word_embeddings.weight.normal_(), "embedding.word_embeddings.weight"
    ),
}  # fmt: skip


def core_resumed(rank: int, size: int, path: Path) -> list[Any]:
    found = []
    with parallel(1):
        model, optimizer = core_gpt(1, True, seed=7)
        for act, _ in SICK.values():
            template = state_of(model, optimizer, loading=True)
            loaded = core().load(template, str(path / "iter_1"), megatron.CasLoadShardedStrategy())
            model.module.load_state_dict(loaded["model"])
            with with_steps(optimizer):
                optimizer.load_state_dict(loaded["optimizer"])
            with torch.no_grad():
                act(model, optimizer)
            outcome = outcome_of(lambda: megatron.prove(state_of(model, optimizer), path / "iter_1"))
            found.append(dict(outcome.unproved) if isinstance(outcome, Proof) else str(outcome))
    return found


def test_a_megatron_core_model_and_its_optimizer_are_compared(tmp_path: Path, ranks: Pool) -> None:
    ranks.run(2, core_saved, tmp_path, tp=2, distributed=True, step=1)
    for right, *wrong in ranks.run(2, core_resumed, tmp_path):
        assert right == {"common.pt": "a file of Megatron-core, which is not compared"}
        for (_, key), error in zip([*SICK.values()][1:], wrong, strict=True):
            assert "after the resume" in error
            assert f"'{key}" in error
