"""Exports to folders of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import casckpt
from casckpt.errors import Conflict, Damaged, InvalidInput
from casckpt.frontends.dcp import (
    StorageWriter,
    casckpt_to_dcp,
    casckpt_to_torch_save,
    dcp_to_casckpt,
    exporting,
    items,
)
from tests.support.dcp import load, save, zeros
from tests.support.progress_calls import ProgressCalls
from tests.support.together import numbers
from tests.support.torch_folders import example, stringed
from tests.support.torch_versions import needs_torch
from tests.support.training import identical

Store = casckpt.Store


def stock(path: Path, state: Any) -> Path:
    save(state, FileSystemWriter(path))
    return path


def test_an_export_splits_tensors_into_few_boxes_of_whole_rows() -> None:
    def rows(shape: tuple[int, ...], most: int) -> list[tuple[int, int]]:
        return [(box.offset[0], box.shape[0]) for box in exporting.split(shape, 4, most)]

    assert rows((7, 2, 3), 72) == [(0, 3), (3, 3), (6, 1)]  # a row has 24 bytes
    assert rows((3, 2, 3), 72) == [(0, 3)]
    assert rows((2, 2, 3), 23) == [(0, 1), (1, 1)]
    assert rows((0, 9), 1) == [(0, 0)]
    assert [box.shape for box in exporting.split((), 8, 1)] == [()]


def test_a_dcp_folder_is_imported_and_exported(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "WINDOW_BYTES", 50_000)
    monkeypatch.setattr(exporting, "WINDOW_BYTES", 50_000)  # the largest tensor becomes three chunks
    monkeypatch.setattr(exporting, "FILE_BYTES", 60_000)
    state = example()
    done = ProgressCalls()
    folder = stock(tmp_path / "in", state)
    (folder / "config.json").write_text("{}")
    found = dcp_to_casckpt(folder, store, run="a", step=3, metadata={"x": 1}, progress=done)
    assert (found.run, found.step, found.metadata) == ("a", 3, {"x": 1})
    assert identical(store.read("a@3"), stringed(state))
    assert done.done >= 120_000
    assert store.read_attachment(found, "config.json") == b"{}"
    store.save(state, run="native", step=1)
    for ref in ("a@3", "native@1"):
        out = tmp_path / ref
        casckpt_to_dcp(store, ref, out)
        back = load({key: zeros(value) for key, value in stringed(state).items()}, FileSystemReader(out))
        assert identical(back, stringed(state))
        assert len(list(out.glob("*.distcp"))) >= 2
    assert dcp_to_casckpt(folder, store, run="b", step=1).stats.bytes_written == 0
    again = dcp_to_casckpt(tmp_path / "a@3", store, run="b", step=2)
    assert identical(store.read(again), stringed(state))
    assert store.attachments(again) == {"config.json": 2}


def test_an_export_is_complete_or_absent(store: Store, tmp_path: Path) -> None:
    store.save({"a": numbers("a", 3000)}, step=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(Conflict):
        casckpt_to_dcp(store, "default@1", tmp_path / "full")
    casckpt_to_dcp(store, "default@1", tmp_path / "full", force=True)
    assert {path.name for path in (tmp_path / "full").iterdir()} == {"x", ".metadata", "__0_0.distcp"}
    for blob in Path(store.url).glob("objects/*/*.safetensors"):
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes()[:5000])
    for call in (casckpt_to_dcp, casckpt_to_torch_save):
        with pytest.raises(Damaged):
            call(store, "default@1", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "store"}


@needs_torch("2.9", "use_collectives")
def test_per_rank_values_are_not_exported_as_whole_tensors(store: Store, tmp_path: Path) -> None:
    from tests.support.chunks import half

    save({"a": half()}, StorageWriter(store, run="x", step=1), use_collectives=False)
    with pytest.raises(InvalidInput, match="cannot export the complete state"):
        casckpt_to_dcp(store, "x/rank-0@1", tmp_path / "out")
