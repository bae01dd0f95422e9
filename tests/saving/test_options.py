"""The arguments of a save: valid values, and the cases in which a setting applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.base.names import MAX_STEP
from casckpt.errors import InvalidInput
from casckpt.store.opening import open as open_store
from casckpt.store.store import Store
from tests.saving.test_encoder import check, links, versions
from tests.support.ids import named
from tests.support.saves import CELL, small, small_folder, steps

STATE = {"w": torch.arange(6.0), "x": [1]}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"healthy": 1}, "healthy=1 is not valid"),
        ({"run": "latest"}, "run 'latest' means the newest checkpoint of all runs"),
        ({"healthy": "no"}, "healthy='no' is not valid"),
        ({"lineage": 3}, "a int instead of a dict"),
        ({"lineage": {"replicas": []}}, "cannot hold 'replicas': pass plain data under the names resumed_from"),
        ({"lineage": {"resumed_from": {1, 2}}}, r"lineage\['resumed_from'\]"),
    ],
)
def test_invalid_options_of_a_save_are_rejected(arguments: dict[str, Any], error: str) -> None:
    store = small()
    with pytest.raises(InvalidInput, match=error):
        store.save(STATE, step=1, **arguments)
    with pytest.raises(InvalidInput, match=error):
        store.save_async(STATE, step=1, **arguments)
    assert steps(store) == []


def test_metrics_and_metadata_that_cannot_be_stored_do_not_cost_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    store = small()
    given: Any = {
        "metrics": {"loss": torch.ones(1), "ok": True, "wer": None, "val": {"loss": 1.0}},
        "metadata": {"lr": 0.1, "model": object()},
    }
    saved, _ = (store.save(STATE, run="labels", step=step, **given) for step in (1, 2))
    assert (saved.metrics, saved.metadata) == ({"loss": 1.0, "ok": 1}, {"lr": 0.1})
    assert store.save_async(STATE, run="labels", step=3, metrics=3).result().metrics == {}  # type: ignore[arg-type]
    left = [record.getMessage().partition(" leaves out ")[2] for record in caplog.records]
    starts = (
        "what JSON cannot represent: \"metadata['model']\" (put", "the metrics: 'val', 'wer' (a checkpoint has",
        "the metrics: '(a int instead of a dict)' (",
    )  # fmt: skip
    assert all(line.startswith(start) for line, start in zip(left, starts, strict=True)), left


@pytest.mark.parametrize(
    "arguments",
    [
        {"run": "../up"}, {"run": ""}, {"run": "a@b"}, {"run": None}, {"step": -1}, {"step": 1.0}, {"step": True},
        {"step": MAX_STEP + 1}, {"step": "1"}, {"threads": 0},
    ],
    ids=named,
)  # fmt: skip
def test_invalid_arguments_are_rejected_before_anything_is_created(arguments: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    with pytest.raises(InvalidInput, match=r"not usable|not a usable|not valid|not a valid|not known"):
        store.save(STATE, **({"step": 1} | arguments))
    assert not (tmp_path / "store").exists()


NUMEL = 40 * CELL // 2  # elements of 2 bytes


def weights(seed: int = 0, numel: int = NUMEL, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return small() if request.param == "memory" else small_folder(tmp_path / "store")


def test_the_setting_applies_if_the_argument_is_omitted(store: Store) -> None:
    store.change_settings(compress="auto")
    states = versions(4)
    for step, state in enumerate(states):
        store.save(state, step=step, compress="off" if step == 2 else None)
    assert [max(links(store, f"default@{step}")) for step in range(4)] == [0, 1, 0, 1]
    check(store, states)


def test_a_setting_of_a_later_version_counts_as_off(store: Store) -> None:
    store.repository.change_settings(compress="later")
    for step, state in enumerate(versions(2)):
        store.save(state, step=step)
    assert [max(links(store, f"default@{step}")) for step in range(2)] == [0, 0]


@pytest.mark.parametrize("given", ["zstd", "", True, 1])
def test_an_unknown_compress_value_is_rejected(store: Store, given: Any) -> None:
    with pytest.raises(InvalidInput, match="auto"):
        store.save({"w": weights()}, step=0, compress=given)
    assert not store.checkpoints()
