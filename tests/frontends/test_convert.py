"""Imports and exports preserve every bit, and a failed one leaves nothing behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import casckpt
from casckpt.errors import Conflict, NotFound
from casckpt.frontends.convert import (
    DetectedFormat,
    ImportSources,
    dcp_to_casckpt,
    export_safetensors,
    import_any,
    import_olmo,
    import_olmo_trainer,
    import_safetensors,
    looked_at,
    torch_save_to_casckpt,
)
from tests.support.safetensors_files import contents, file_of, hugging_face, same, tensors, unpacked

pytestmark = pytest.mark.usefixtures("temporaries")


# one file


def test_an_imported_file_is_exported_byte_for_byte(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    state = tensors(seed)
    source = file_of(tmp_path / "in", state, made_by="a test")
    made = import_safetensors(store, source, run="base", step=0)
    assert same(store.read(made), state)
    assert made.metadata == {"safetensors": {"made_by": "a test"}}
    found = export_safetensors(store, "base@0", tmp_path / "out" / "m.safetensors")
    assert found.files == (tmp_path / "out" / "m.safetensors",)
    assert (found.tensors, found.left_out) == (len(state), ())
    assert found.files[0].read_bytes() == source.read_bytes()


def test_reimporting_a_file_does_not_write_blobs(store: casckpt.Store, tmp_path: Path, seed: int) -> None:
    source = file_of(tmp_path / "in", tensors(seed))
    assert import_safetensors(store, source, run="base", step=0).stats.bytes_written > 0
    again = import_safetensors(store, source, run="base", step=1)
    assert (again.stats.bytes_written, again.stats.blobs_written) == (0, 0)
    with pytest.raises(Conflict, match="base@1 already exists"):
        import_safetensors(store, source, run="base", step=1)
    import_safetensors(store, source, run="base", step=1, overwrite=True)
    assert [(one.run, one.step) for one in store.checkpoints()] == [("base", 0), ("base", 1)]


def test_a_path_is_accepted_as_a_store(store_path: Path, tmp_path: Path) -> None:
    source = file_of(tmp_path / "in", {"a": torch.ones(3)})
    import_safetensors(store_path, source, step=4)
    out = export_safetensors(store_path, "default@4", tmp_path / "o.safetensors").files[0]
    assert same(safetensors.torch.load_file(out), {"a": torch.ones(3)})


# folders


def test_a_folder_is_exported_with_its_attachments(
    store: casckpt.Store, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = tensors(seed)
    folder = hugging_face(tmp_path / "hf", state)
    with caplog.at_level(logging.WARNING, "casckpt"):
        made = import_safetensors(store, folder, run="hf", step=0)
    assert "left out: pytorch_model.bin" in caplog.text
    assert "left out: pytorch_model.bin" in made.notes
    assert same(store.read(made), state)
    assert set(store.attachments(made)) == {"config.json", "vocab.txt", "1_Pooling/config.json"}
    found = export_safetensors(store, made, tmp_path / "out")
    given = unpacked(contents(folder))
    left_out = ("pytorch_model.bin", ".cache/secret")
    assert unpacked(contents(tmp_path / "out")) == {name: given[name] for name in given if name not in left_out}
    assert set(found.files) == {path for path in (tmp_path / "out").rglob("*") if path.is_file()}


# existing files and failures


def test_a_missing_store_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no store"):
        export_safetensors(tmp_path / "store", "latest", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# plans


@pytest.mark.parametrize(
    "importer", [import_safetensors, torch_save_to_casckpt, dcp_to_casckpt, import_olmo, import_olmo_trainer]
)
@pytest.mark.parametrize("keyword", ["ephemeral", "allow_pickel", "no_dist"])
def test_an_unknown_keyword_of_an_import_is_rejected_before_anything_is_read(
    store: casckpt.Store, tmp_path: Path, importer: Any, keyword: str
) -> None:
    first = (store, tmp_path / "none") if importer is import_safetensors else (tmp_path / "none", store)
    with pytest.raises(TypeError, match=rf"^{importer.__name__}\(\) got an unexpected keyword argument '{keyword}'$"):
        importer(*first, step=1, **{keyword: True})
    with pytest.raises(TypeError, match=rf"^{importer.__name__}\(\) missing .*'step'$"):
        importer(*first)


def test_an_import_from_a_url_names_the_url_without_its_password() -> None:
    found = DetectedFormat("dcp", "ftp://me:secret@host/run/step-5?token=x", ImportSources((), {}))
    assert found.origin == {"path": "ftp://host/run/step-5"}
    bucket = DetectedFormat("dcp", "abfs://container@account.dfs.core.windows.net/x", ImportSources((), {}))
    assert bucket.origin == {"path": "abfs://container@account.dfs.core.windows.net/x"}


def test_a_file_that_is_fetched_from_a_url_is_named_by_the_url(store: casckpt.Store) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs casckpt[remote]")
    data = safetensors.torch.save({"w": torch.ones(3)})
    fsspec.filesystem("memory").pipe("/lineage/w.safetensors", data)
    with looked_at("memory://lineage/w.safetensors") as found:
        made = import_any(store, found, step=1)
    assert made.lineage == {"imported_from": {"path": "memory://lineage/w.safetensors"}}
