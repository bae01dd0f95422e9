"""With the setting `compress`, each front end saves deltas, and every front end loads them exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import async_save

import casckpt
from casckpt.frontends import megatron
from casckpt.frontends.dcp import StorageReader, StorageWriter, items
from casckpt.frontends.dcp.session import WriterSession
from casckpt.frontends.interchange.safetensors.importing import import_safetensors
from casckpt.frontends.trainer import Checkpointer
from casckpt.saving.options import Compress, SaveOptions
from casckpt.store.store import Store
from tests.support import dcp
from tests.support.saves import reopened, same_state, small_folder, trained

STEPS = 4


def state(step: int) -> dict[str, Any]:
    return {f"layer{n}": trained(9, step, seed=n) for n in range(3)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = small_folder(tmp_path / "store")
    made.change_settings(compress="auto")
    return casckpt.open(made.url)


def check(store: Store, part: str = "") -> None:
    for step in range(STEPS):
        found = {key: torch.zeros_like(value) for key, value in state(step).items()}
        reopened(store).load({part: found} if part else found, f"default@{step}", unread="ignore")
        assert same_state(found, state(step))
        assert (store.get(f"default@{step}").commit.committed.bytes_deltas > 0) == (step > 0)
    assert not store.verify(decode=True).is_damaged


@pytest.mark.parametrize("window", [1, 256 << 20])
@pytest.mark.parametrize("anew", [False, True])
def test_dcp_saves_deltas(store: Store, monkeypatch: pytest.MonkeyPatch, window: int, anew: bool) -> None:
    monkeypatch.setattr(items, "WINDOW_BYTES", window)
    writer = StorageWriter(store)
    for step in range(STEPS):
        dcp.save(state(step), StorageWriter(store.url, step=step) if anew else writer, checkpoint_id=str(step))
        assert same_state(dcp.load(dcp.zeros(state(step)), StorageReader(store.url, f"default@{step}")), state(step))
    check(store)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_saves_deltas_in_the_background(store: Store) -> None:
    for step in range(STEPS):
        saving: Any = async_save(state(step), storage_writer=StorageWriter(store, step=step))
        saving.result()
    check(store)


def test_a_dcp_rank_without_an_option_follows_the_setting(store: Store) -> None:
    """This happens with cached plans."""
    store.save(state(0), step=0)
    session = WriterSession(store.repository, SaveOptions(step=1), rank=1, alone=False)
    assert session._offer(SavePlan([]))[1].compress == "auto"


def test_megatron_saves_deltas(store: Store) -> None:
    for step in range(STEPS):
        sharded = {key: megatron.ShardedTensor.from_rank_offsets(key, value) for key, value in state(step).items()}
        megatron.save(sharded, f"{store.url}#default@{step}", async_sharded_save=False)
    check(store)


def test_trainers_save_deltas(store: Store) -> None:
    model = nn.Module()
    for key, value in state(0).items():
        model.register_parameter(key, nn.Parameter(value))
    checkpointer = Checkpointer(store.url, run="default", compress="auto")
    for step in range(STEPS):
        with torch.no_grad():
            for key, value in state(step).items():
                getattr(model, key).copy_(value)
        checkpointer.save_async(step, model).result()
    checkpointer.close()
    check(store, "model")


def test_imports_and_exports_handle_deltas(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    save_file(state(0), tmp_path / "model.safetensors")
    import_safetensors(store, tmp_path / "model.safetensors", run="base", step=0, compress="always")
    committed = store.get("base@0").commit.committed
    assert 0 < committed.bytes_frames < committed.bytes_coded
    casckpt.export(store, "base@0", tmp_path / "again.safetensors")
    assert same_state(dict(sorted(load_file(tmp_path / "again.safetensors").items())), state(0))


@pytest.mark.parametrize("path", ["model.pt", "model.safetensors", "folder"])
def test_exports_of_delta_checkpoints_are_complete(store: Store, tmp_path: Path, path: str) -> None:
    for step in range(STEPS):
        store.save({"model": state(step)}, step=step)
    for step in (0, STEPS - 1):
        to = tmp_path / str(step) / path
        to.parent.mkdir()
        casckpt.export(reopened(store), f"default@{step}", to, format="dcp" if path == "folder" else None)
        assert same_state(_flat(to), {f"model.{key}": value for key, value in state(step).items()})


def _flat(path: Path) -> dict[str, Any]:
    """Return the content of an export, read by a reader for its format."""
    if path.suffix == ".safetensors":
        return dict(sorted(load_file(path).items()))
    if path.suffix == ".pt":
        return {f"model.{key}": value for key, value in torch.load(path)["model"].items()}
    found = {f"model.{key}": torch.zeros_like(value) for key, value in state(0).items()}
    dcp.load(found, FileSystemReader(path))
    return found


# states


def rounds(store: Store, made: Callable[[int], dict[str, Any]], **options: Any) -> None:
    for step in range(STEPS):
        store.save(made(step), step=step, compress="auto", **options)
    for step in range(STEPS):
        assert same_state(reopened(store).read(f"default@{step}"), made(step)), step
    assert not store.verify(decode=True).is_damaged


def test_cells_that_equal_those_of_another_dtype_and_key_are_encoded(store: Store) -> None:
    """Zeros of all dtypes share one cell. A later version is a delta against this cell, or equals an earlier
    version."""

    def made(step: int) -> dict[str, Any]:
        w = trained(8, step)
        bits = {"words": w.view(torch.int32), "half": w.view(torch.float16), "doubles": w.view(torch.float64)}
        zeros = {"a": torch.zeros(8 * 2048, dtype=torch.bfloat16), "b": torch.zeros(8 * 1024), "w": w}
        zeros["a"][step::1000] = step
        return bits | zeros | {"moved": trained(8, step - 1) if step else w, "c": zeros["a"].clone().view(-1, 64)}

    rounds(store, made)
    store.save({"words": trained(8, 1).view(torch.int32)}, run="other", step=0, compress="always")
    assert same_state(reopened(store).read("other@0"), {"words": trained(8, 1).view(torch.int32)})


@pytest.mark.parametrize("options", [{"frozen": ["layer0"]}, {"threads": 1}, {"threads": 4}])
def test_every_way_to_save_writes_deltas(store: Store, options: dict[str, Any]) -> None:
    rounds(store, lambda step: state(step) | {"layer0": trained(9, 0)}, **options)


def test_delta_checkpoints_can_be_shown_counted_compared_and_fetched(store: Store, tmp_path: Path) -> None:
    rounds(store, state)
    for step in range(STEPS):
        store.save(state(step + 1), step=step, compress="auto", overwrite=True)
    assert same_state(reopened(store).read("default@3"), state(4))
    off = small_folder(tmp_path / "off")
    for step in (2, 3):
        off.save(state(step + 1), step=step)
    assert store.get("default@3").tensors == off.get("default@3").tensors
    assert store.diff("default@0", "default@1") == off.diff("default@2", "default@3")


def test_compression_can_be_disabled_and_works_for_runs_that_branch_off(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    words: list[Compress] = ["auto", "auto", "off", "auto", "always", "auto"]
    for step, compress in enumerate(words):
        store.save(state(step), step=step, compress=compress)
    store.tag("best", "default@3")
    other = reopened(store)
    other.save(state(4), run="branch", step=4, compress="auto")
    other.save(state(5), run="branch", step=5, compress="auto")
    store.gc(keep_last=1, run="default", min_age=0)
    for ref, step in (("default@5", 5), ("tag:best", 3), ("branch@4", 4), ("branch@5", 5)):
        assert same_state(reopened(store).read(ref), state(step)), ref
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
