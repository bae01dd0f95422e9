"""Damaged and hostile inputs of importers cause errors that name the file. No code runs, and nothing is committed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

import casckpt
from casckpt.errors import InvalidInput, NotFound, Refused
from casckpt.format.tree import OBJECT, Node, encode_tree
from casckpt.frontends.convert import import_any, import_olmo, import_olmo_trainer, look_at
from casckpt.frontends.dcp import (
    PickleFreeSavePlanner,
    StorageReader,
    StorageWriter,
    casckpt_to_dcp,
    casckpt_to_torch_save,
    dcp_to_casckpt,
    torch_save_to_casckpt,
)
from casckpt.saving import prepare
from tests.support.dcp import causes, failure, load, save
from tests.support.fuzz import KINDS, Bender, Canary, sung

ROOT = Path(__file__).parents[2]


SURROGATE = "a\ud800"


# every importer, with altered bytes


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # torch warns about protocols and deprecated types
@pytest.mark.parametrize("kind", KINDS)
def test_altered_inputs_load_or_raise_a_casckpt_error(tmp_path: Path, kind: str, full: bool) -> None:
    count = 40 if full else 15
    assert sum(Bender(kind, tmp_path, 0).outcomes(count).values()) == count


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_importing_thousands_of_altered_files_uses_at_most_four_gib(kind: str, seed: int) -> None:
    command = [sys.executable, "-m", "tests.support.fuzz", kind, "2000", str(seed)]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert sum(json.loads(found).values()) == 2000


@pytest.mark.parametrize("kind", ["dcp", "torch-zip", "torch-legacy", "olmo", "olmo-trainer"])
def test_functions_named_in_a_pickle_are_not_called(store: casckpt.Store, tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path, Canary())
    sung.clear()
    if kind == "olmo-trainer":
        import_any(store, look_at(path), step=1)  # without the surrounding state
    else:
        with pytest.raises(InvalidInput, match=r"sing.*--allow-pickle|--allow-pickle.*sing"):
            import_any(store, look_at(path), step=1)
    assert sung == []
    import_any(store, look_at(path), step=2, allow_pickle=True)
    assert kind == "olmo-trainer" or "run" in sung


# torch.save files


def legacy(state: Any) -> bytes:
    path = Path("legacy.pt")
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def looped() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"\x80\x02R.", lambda: b"\x80\x02", lambda: b"\x80\x02N.", lambda: b"PK\x03\x04",
        lambda: legacy({"a": torch.ones(2)})[:-9], lambda: legacy({"a": torch.ones(2)}).replace(b"storage", b"storagX"),
        lambda: legacy({"a": looped()}),
    ],
)  # fmt: skip
def test_errors_for_invalid_files_name_the_file(
    store: casckpt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(make())
    with pytest.raises((Refused, InvalidInput), match=r"x\.pt"):
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1)
    assert not Path(store.url).exists()


# DCP folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that DCP wrote."""
    save({"a": torch.ones(4, 2), "b": {"c": 1}}, FileSystemWriter(tmp_path / "in"))
    return tmp_path / "in"


def test_an_import_does_not_commit_a_damaged_value(store: casckpt.Store, folder: Path) -> None:
    """If an import kept the damaged bytes, reads could not decode them."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    place = found.storage_data[MetadataIndex("b.c")]
    data = bytearray((folder / place.relative_path).read_bytes())
    for at in (0, place.length // 3):
        bad = bytearray(data)
        bad[place.offset + at : place.offset + at + 60] = b"?" * 60
        (folder / place.relative_path).write_bytes(bad)
        with pytest.raises(InvalidInput, match=r"'b\.c' \(1 of 1 values\)") as caught:
            dcp_to_casckpt(folder, store, step=1)
        assert caught.value.keys == ("b.c",)
    assert not Path(store.url).exists()


def test_an_import_of_a_folder_with_a_pipe_fails_immediately(store: casckpt.Store, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(NotFound, match="pipe"):
        dcp_to_casckpt(folder, store, step=1)


# OLMo-core folders


@pytest.mark.parametrize(
    "text",
    [
        "[]", "null", "[" * 100_000, '{"tensors": {"a": 1}}', '{"tensors": {"a": {"shape": [1e999]}}}',
        '{"tensors": {"layer.0": {"shape": [2, 3], "shard_spec_per_file": {"rank_0.safetensors": 7}}}}',
        '{"tensors": {"layer.0": {"shape": [2, 3], "flattened_offsets_per_file": {"rank_0.safetensors": 7}}}}',
    ],
)  # fmt: skip
def test_imports_of_files_with_invalid_descriptions_raise_an_error(
    store: casckpt.Store, tmp_path: Path, text: str
) -> None:
    (tmp_path / "in").mkdir()
    folder = KINDS["olmo"](tmp_path / "in", None)
    (folder / "model/metadata.json").write_text(text)
    with pytest.raises(Refused, match=r"metadata\.json"):
        import_olmo(folder, store, step=1)


def test_the_error_for_a_damaged_train_state_names_the_file(store: casckpt.Store, tmp_path: Path) -> None:
    KINDS["olmo-trainer"](tmp_path, None)
    for data in (b"", b"PK\x03\x04", b"\x80\x02R."):
        (tmp_path / "train/rank0.pt").write_bytes(data)
        with pytest.raises(Refused, match=r"train/rank0\.pt .*damaged"):
            import_olmo_trainer(tmp_path, store, step=1)


# keys that are not valid strings


def test_the_error_for_a_lone_surrogate_names_the_key(store: casckpt.Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"key 'a\\ud800'"):
        store.save({SURROGATE: torch.ones(2)}, step=1)
    for data in (b"short", bytes(10_000)):
        with pytest.raises(InvalidInput, match=r"attachment name 'a\\ud800'"):
            store.save({"a": 1}, step=1, attachments={SURROGATE: data})
    torch.save({SURROGATE: torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(InvalidInput, match=r"key 'a\\ud800'"):
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1)
    assert store.checkpoints() == [] if Path(store.url).exists() else True


@pytest.mark.parametrize("state", [{SURROGATE: torch.ones(2)}, {SURROGATE: 1}, {"a\0": 1}])
@pytest.mark.parametrize("planner", [None, PickleFreeSavePlanner()])
def test_dcp_saves_and_imports_reject_an_invalid_key(
    store: casckpt.Store, tmp_path: Path, state: dict[str, Any], planner: Any
) -> None:
    error = failure(lambda: save(state, StorageWriter(store, step=1), planner=planner))
    assert isinstance(causes(error)[0], InvalidInput)
    save(state, FileSystemWriter(tmp_path / "in"))
    with pytest.raises(InvalidInput, match="key"):
        dcp_to_casckpt(tmp_path / "in", store, step=1)


def test_the_dcp_front_end_reports_invalid_names_and_ids(store: casckpt.Store, folder: Path) -> None:
    error = failure(lambda: save({"a": 1}, StorageWriter(store, step=1, attachments={SURROGATE: b""})))
    assert "attachment name" in str(causes(error)[0])
    assert not StorageWriter.validate_checkpoint_id(6)  # type: ignore[arg-type] # that is the point
    for call in (StorageWriter(store).reset, StorageReader(store).reset):
        with pytest.raises(InvalidInput, match="checkpoint_id=6 is neither a string"):
            call(6)  # type: ignore[arg-type] # that is the point
    assert not StorageWriter.validate_checkpoint_id(6)  # type: ignore[arg-type] # that is the point
    (folder / os.fsdecode(b"\xff.json")).write_text("{}")
    (folder / "back\\slash").write_text("{}")
    (folder / "good.json").write_text("{}")
    assert list(store.attachments(dcp_to_casckpt(folder, store, step=1))) == ["good.json"]


# a tree that names missing entries


def test_an_export_of_an_incomplete_tree_is_rejected(
    store: casckpt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(node: Node) -> bytes:
        assert isinstance(node, dict)
        return encode_tree(node | {"gone": OBJECT})

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "encode_tree", more)
        store.save({"a": torch.ones(2), "b": 1}, step=1)
    for call in (casckpt_to_torch_save, casckpt_to_dcp):
        with pytest.raises(Refused, match="names 'gone' in its tree"):
            call(store, "default@1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    error = failure(lambda: load({"a": torch.zeros(2)}, StorageReader(store, "default@1")))
    assert "names 'gone' in its tree" in str(causes(error)[0])
