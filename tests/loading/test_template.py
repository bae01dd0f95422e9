"""Loads report omitted state, mismatched templates, tied weights, and new heads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import casckpt
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from tests.support.logs import warnings_in
from tests.support.ranks import Pool
from tests.support.renames import rename_in
from tests.support.saves import new_run, same_state, small, small_folder
from tests.support.tensors import same
from tests.support.training import Network, identical, train


def trained() -> tuple[Network, torch.optim.Optimizer]:
    model = Network(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


# the state of a fresh optimizer


def test_the_state_dict_of_a_fresh_optimizer_is_filled(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    store, run = small(), new_run()
    store.save(state_of(model, optimizer), run=run, step=1)
    again = Network(2)
    fresh = torch.optim.AdamW(again.parameters(), lr=0.5)
    template = state_of(again, fresh)
    loaded = store.load(template, f"{run}@1")
    fresh.load_state_dict(template["optim"])
    assert identical(fresh.state_dict(), optimizer.state_dict())
    assert (loaded.unread_keys, loaded.unread_subtrees, warnings_in(caplog)) == ((), (), [])
    train(model, optimizer, range(3, 6))
    train(again, fresh, range(3, 6))
    assert identical(state_of(again, fresh), state_of(model, optimizer))


def test_optimizer_templates_can_be_at_the_top_level_in_lists_or_renamed() -> None:
    _, optimizer = trained()
    saved = optimizer.state_dict()
    store = small()
    store.save(saved, step=1)
    store.save({"optims": [saved]}, step=2)
    fresh = torch.optim.AdamW(Network(1).parameters())
    top = fresh.state_dict()
    store.load(top, "default@1")
    assert same_state(top, saved)
    listed = {"optims": [fresh.state_dict()]}
    store.load(listed, "default@2")
    assert same_state(listed["optims"][0], saved)
    renamed = {"opt": fresh.state_dict()}
    store.load(renamed, "default@2", rename={r"opt\.(.*)": r"optims.0.\1"})
    assert same_state(renamed["opt"], saved)


def test_an_optimizer_saved_before_its_first_step_loads_empty() -> None:
    store = small()
    fresh = torch.optim.AdamW(Network(1).parameters(), lr=0.125)
    store.save({"optim": fresh.state_dict()}, step=1)
    template = {"optim": torch.optim.AdamW(Network(1).parameters()).state_dict()}
    store.load(template, "default@1")
    assert template["optim"]["state"] == {}
    assert template["optim"]["param_groups"][0]["lr"] == 0.125


@pytest.mark.parametrize("key", ["model", "optim.state", "cfg"])
def test_any_other_empty_mapping_raises_a_mismatch_with_advice(key: str) -> None:
    store = small()
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": torch.ones(2)}}, "cfg": {"a": 1}}
    store.save(state, step=1)
    template: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "optim": {"state": {"w": torch.zeros(2)}}, "cfg": {}}
    template["cfg"] = {"a": 0}
    first, _, last = key.partition(".")
    holder = template[first] if last else template
    holder[last or first] = {}
    untouched = copy.deepcopy(template)
    with pytest.raises(Mismatch, match=rf"'{key}' is an empty mapping .*None in its place.*strict=False") as caught:
        store.load(template, "default@1")
    assert caught.value.key == key
    assert same_state(template, untouched)
    loaded = store.load(template, "default@1", strict=False)
    assert holder[last or first] == {}
    assert loaded.unread_subtrees == (first if last else key,)
    holder[last or first] = None
    store.load(template, "default@1")
    assert same_state(template, state)


def load_on_ranks(rank: int, size: int, path: Path) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store, wrong = casckpt.open(path), []
    fresh = torch.optim.AdamW(Network(1).parameters())
    whole = {"optim": fresh.state_dict()}
    store.load(whole, "a@1")
    if not same_state(whole, {"optim": store.read("a@1")["optim"]}):
        wrong.append("a rank did not get all of the optimizer's state")
    mesh = init_device_mesh("cpu", (size,))
    sharded = {"model": {"head.weight": distribute_tensor(torch.zeros(3, 5), mesh, [Shard(0)])}}
    for template, error in (
        ({**sharded, "optim": fresh.state_dict()}, "load_model_and_optim_state"),
        ({"model": {}}, "'model' is an empty mapping"),
    ):
        try:
            store.load(template, "a@1")
            wrong.append(f"no error with {error}")
        except Mismatch as mismatch:
            wrong += [] if error in str(mismatch) else [str(mismatch)]
    parts: dict[str, Any] = {"model": {"head.weight": torch.zeros(3, 5)} if rank == 1 else {}}
    loaded = store.load(parts, "a@1")  # entries that one rank lacks, and another rank has
    if loaded.unread_subtrees != ("optim",):
        wrong.append(f"unread: {loaded.unread_subtrees}")
    return wrong


def test_all_ranks_interpret_a_template_in_the_same_way(tmp_path: Path, ranks: Pool) -> None:
    small_folder(tmp_path).save(state_of(*trained()), run="a", step=1)
    assert ranks.run(2, load_on_ranks, tmp_path) == [[], []]


# unread keys


def test_a_load_that_would_fill_nothing_raises_an_error_unless_allowed(caplog: pytest.LogCaptureFixture) -> None:
    store, run = small(), new_run()
    store.save({"w": torch.ones(2)}, run=run, step=1)
    state = {"module.w": torch.zeros(2)}
    with pytest.raises(MissingKey, match="fill 0 of 1 tensors") as caught:
        store.load(state, f"{run}@1", strict=False)
    loaded = store.load(state, f"{run}@1", strict=False, unread="ignore")
    assert (loaded.missing_keys, loaded.unread_keys, loaded.unread_subtrees) == (("module.w",), ("w",), ())
    assert warnings_in(caplog) == []
    assert not state["module.w"].any()
    store.load(state, f"{run}@1", rename=rename_in(str(caught.value)))
    assert state["module.w"].eq(1).all()


def test_an_error_for_missing_keys_shows_the_rename_that_loads_them() -> None:
    store = small()
    store.save({"model": {"body.w": torch.ones(2), "head.w": torch.ones(3)}}, step=1)
    state = {"model": {"body.w": torch.zeros(2), "net.head.w": torch.zeros(3)}}
    with pytest.raises(MissingKey, match=r"lacks 'model\.net\.head\.w'") as caught:
        store.load(state, "default@1")
    store.load(state, "default@1", rename=rename_in(str(caught.value)))
    assert all(value.eq(1).all() for value in state["model"].values())


# mismatches


@pytest.mark.parametrize("strict", [False, True])
def test_one_error_names_all_mismatched_keys(strict: bool) -> None:
    store = small()
    store.save({"m": {"a": torch.ones(2), "b": torch.ones(2, 3), "c": torch.ones(4), "old": torch.ones(1)}}, step=1)
    template = {"m": {"a": torch.zeros(5), "b": torch.zeros(3, 2), "c": torch.zeros(4), "new": torch.zeros(1)}}
    with pytest.raises(Mismatch, match="2 keys do not fit default@1") as caught:
        store.load(template, "default@1", strict=strict)
    error = caught.value
    assert (error.keys, vars(error)["missing"]) == (("m.a", "m.b"), ("m.new",))
    assert vars(error)["unexpected"] == ("m.old",)
    for part in ("'m.a' has shape [5] here, but [2]", "'m.b' has", "template has 'm.new'", "checkpoint has 'm.old'"):
        assert part in str(error)
    assert "ignore_mismatched=" in str(error)
    assert not template["m"]["c"].any()


def test_a_new_head_is_left_unchanged() -> None:
    store = small()
    store.save({"body": {"w": torch.ones(2)}, "head": {"w": torch.ones(3), "b": torch.ones(3)}}, step=1)
    head = {"w": torch.full((5,), 7.0), "b": torch.full((5,), 8.0), "scale": torch.full((1,), 9.0)}
    template = {"body": {"w": torch.zeros(2)}, "head": head}
    with pytest.raises(Mismatch, match=r"head\.w"):
        store.load(template, "default@1")
    loaded = store.load(template, "default@1", ignore_mismatched=["head.*"])
    assert template["body"]["w"].eq(1).all()
    assert [float(value[0]) for value in head.values()] == [7, 8, 9]
    assert loaded.mismatched_keys == ("head.w", "head.b")
    assert loaded.missing_keys == ("head.scale",)
    assert loaded.unread_keys == ()
    with pytest.raises(MissingKey, match=r"body\.new"):
        store.load({"body": {"new": torch.zeros(1)}}, "default@1", ignore_mismatched="head.*")
    fits = {"head": {"w": torch.zeros(3)}}
    store.load(fits, "default@1", ignore_mismatched=["head.*"], unread="ignore")
    assert fits["head"]["w"].eq(1).all()  # fitting keys are loaded
    with pytest.raises(InvalidInput, match="ignore_mismatched"):
        store.load(fits, "default@1", ignore_mismatched=[3])  # type: ignore[list-item]


def test_a_missing_key_is_allowed_if_it_shares_memory_with_a_loaded_key() -> None:
    store = small()
    saved = torch.arange(6.0).view(2, 3)
    store.save({"emb": saved, "empty": torch.ones(0)}, step=1)
    tied = torch.zeros(2, 3)
    for template in ({"emb": tied, "head": tied}, {"head": tied.detach(), "emb": tied}):
        tied.zero_()
        loaded = store.load(template, "default@1")
        assert loaded.missing_keys == ()
        assert same(tied, saved)
    sparse = torch.eye(2).to_sparse()
    assert store.load({"emb": tied, "s": sparse}, "default@1", strict=False).missing_keys == ("s",)
    base = torch.zeros(4, 3)
    nothing = torch.zeros(0)
    for emb, head in ((base[:2], base[2:]), (base[:2], base[:1]), (base[:2], base[:2].T), (base[:2], nothing)):
        with pytest.raises(MissingKey, match="head"):
            store.load({"emb": emb, "head": head}, "default@1")
