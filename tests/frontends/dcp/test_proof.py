"""Compares a live state with a checkpoint that DCP saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.errors import Mismatch
from casckpt.frontends.dcp import StorageWriter
from casckpt.frontends.training_state.proof import Proof, prove
from casckpt.store.store import Store
from tests.support.dcp import save
from tests.support.saves import small

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def proved(store: Store, state: dict[str, Any]) -> Proof:
    return prove(store, store.get("default@3"), state, None, excused={}, by_name=True, no_dist=True)


def test_a_list_that_dcp_stores_as_one_value_is_compared() -> None:
    store = small()
    save({"list": [1, {"a": 2}], "empty": {}}, StorageWriter(store, step=3))
    assert proved(store, {"list": [1, {"a": 2}], "empty": {}}).unproved == {}
    for wrong in ([1, {"a": 3}], [1, {"b": 2}], [1], [0, 1]):
        with pytest.raises(Mismatch, match="list"):
            proved(store, {"list": wrong, "empty": {}})


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
    assert proved(store, right).unproved == {}
    with pytest.raises(Mismatch, match="after the resume"):
        proved(store, wrong)


def test_a_store_compares_the_tensors_of_a_state_that_dcp_saved() -> None:
    store, state = small(), {"model": {"w": torch.ones(2)}, "step": 3}
    save(state, StorageWriter(store, step=3))
    assert store.compare(state, "default@3").is_same
    (differs,) = store.compare({"model": {"w": torch.zeros(2)}}, "default@3").differs
    assert (differs.key, differs.elements) == ("model.w", 2)
