"""A load reports the parts of a checkpoint that it did not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from casckpt.errors import InvalidInput
from casckpt.loading.unread import EVERYTHING, also_unread, on_all, warn_unread
from casckpt.tensors.values import PerRank
from tests.loading.test_template import trained
from tests.support.logs import warnings_in
from tests.support.saves import new_run, small
from tests.support.training import Network

REF = "default@1"


def test_a_load_searches_for_unread_per_rank_values_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, looked = small(), list[str]()
    store.save({"seen": PerRank({f"k{number}": number for number in range(50)})}, step=1)

    def is_generator(key: str) -> bool:
        looked.append(key)
        return False

    monkeypatch.setattr("casckpt.loading.template.is_generator", is_generator)
    store.load({"seen": PerRank({"k3": None})}, REF)
    assert len(looked) <= 100  # once before and once after the load, instead of once for each value


def test_unread_subtrees_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    store, run = small(), new_run()
    rest = {"optim": optimizer.state_dict(), "train": {0: {"epoch": 3, "rng": {"seed": 1}}}, "epoch": 3}
    store.save({"model": model.state_dict(), **rest}, run=run, step=1)
    for _ in range(2):
        loaded = store.load({"model": Network(2).state_dict()}, f"{run}@1")
        assert loaded.unread_subtrees == ("optim", "train")
        assert "epoch" in loaded.unread_keys
    assert len(warnings_in(caplog)) == 1
    assert f"did not read 'optim', 'train' of {run}@1" in warnings_in(caplog)[0]
    assert 'unread="ignore"' in warnings_in(caplog)[0]
    part = {"model": Network(2).state_dict(), "train": {0: {"epoch": 0}}}
    assert store.load(part, f"{run}@1", unread="ignore").unread_subtrees == ("optim", "train.0.rng")
    assert len(warnings_in(caplog)) == 1


def test_leaves_that_a_container_drops_are_logged_as_unread(caplog: pytest.LogCaptureFixture) -> None:
    store, run = small(), new_run()
    saved = {"counts": {"a": 1, "b": 2}, "deep": {"k": {"p": 1, "q": torch.ones(1)}}, "ints": {1: "x", 2: "y"}}
    store.save({**saved, "epoch": 1, "lr": 0.5}, run=run, step=1)
    state: dict[str, Any] = {"counts": {"a": 0}, "deep": {"k": {"p": 0}}, "ints": {1: ""}}
    loaded = store.load(state, f"{run}@1")
    assert set(loaded.unread_keys) == {"counts.b", "deep.k.q", "ints.2", "epoch", "lr"}
    assert loaded.unread_subtrees == ()
    assert "did not read 'counts.b', 'deep.k.q', 'ints.2' of" in " ".join(warnings_in(caplog))
    store.load({**state, "epoch": 0}, f"{run}@1")
    assert "'ints.2', 'lr' of" in warnings_in(caplog)[-1]
    store.load({**state, "epoch": 0, "lr": 0, "counts": {"b": 0}}, f"{run}@1", unread="ignore")
    assert len(warnings_in(caplog)) == 2


def test_nothing_is_logged_if_only_an_epoch_is_unread(caplog: pytest.LogCaptureFixture) -> None:
    store, run = small(), new_run()
    store.save({"model": {"a": torch.ones(2), "none": {}}, "epoch": 1}, run=run, step=1)
    loaded = store.load({"model": {"a": torch.zeros(2)}}, f"{run}@1")
    assert (loaded.unread_keys, loaded.unread_subtrees, warnings_in(caplog)) == (("epoch",), (), [])


def test_unread_accepts_only_warn_or_ignore() -> None:
    store = small()
    store.save({"w": torch.ones(2)}, step=1)
    with pytest.raises(InvalidInput, match=r"unread=.* pass .warn. or .ignore."):
        store.load({"w": torch.ones(2)}, "default@1", unread=False)  # type: ignore[arg-type]


def test_a_key_read_by_any_rank_is_not_unread() -> None:
    asked = ("optim", "model.a", "model.b.c")
    assert also_unread(asked, ("optim", "model.b")) == [True, False, True]
    assert also_unread(asked, (EVERYTHING, "optim")) == [True, True, True]
    assert on_all(asked, [[True, True, True], [True, False, True]]) == ("optim", "model.b.c")


def test_many_unread_subtrees_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    warn_unread(new_run(), 1, [f"t{number}" for number in range(9)], "say so")
    assert warnings_in(caplog)[0].endswith("'t4' and 4 more of " + warnings_in(caplog)[0].split(" of ")[-1])
