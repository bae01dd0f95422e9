"""Exports of attachments, and exports to paths that are not valid file names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput, StorageError
from casckpt.frontends.convert import casckpt_to_dcp, casckpt_to_torch_save, export_safetensors

LONG = "config-" + "x" * 250


EXPORTERS: dict[str, Callable[..., object]] = {"hf": export_safetensors, "dcp": casckpt_to_dcp}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("hf", [LONG]),
        ("hf", ["folder/" + "é" * 128]),
        ("hf", ["MODEL.safetensors/x"]),
        ("dcp", [".metadata"]),
        ("dcp", [".metadata/x"]),
        ("dcp", ["__0_0.distcp"]),
        ("dcp", [LONG]),
    ],
)
def test_the_error_for_an_attachment_with_an_invalid_name_suggests_a_solution(
    kind: str, names: list[str], store: casckpt.Store, tmp_path: Path
) -> None:
    export, out = EXPORTERS[kind], tmp_path / "out"
    store.save({"a": torch.ones(2)}, step=0, attachments=dict.fromkeys([*names, "config.json"], b"{}"))
    with pytest.raises(InvalidInput, match=r"attachments=False \(--no-attachments\)") as caught:
        export(store, "latest", out)
    assert repr(names[-1]) in str(caught.value)
    assert "config.json" not in str(caught.value)
    assert not out.exists()
    export(store, "latest", out, attachments=False)
    assert not (out / "config.json").exists()
    assert len(list(out.iterdir())) == (1 if kind == "hf" else 2)
    assert store.read_attachment("latest", names[-1]) == b"{}"


def test_files_with_the_longest_names_are_exported(store: casckpt.Store, tmp_path: Path) -> None:
    names = ["x" * 255, "folder/" + "é" * 127 + "a", ".metadata.json"]
    store.save({"a": torch.ones(2)}, step=0, attachments=dict.fromkeys(names, b"{}"))
    for kind, export in EXPORTERS.items():
        export(store, "latest", tmp_path / kind)
        assert all((tmp_path / kind / name).read_bytes() == b"{}" for name in names)


@pytest.mark.parametrize("export", [export_safetensors, casckpt_to_dcp, casckpt_to_torch_save])
@pytest.mark.parametrize("name", ["y" * 300, "y" * 300 + ".safetensors", "y" * 300 + "/out"])
def test_a_target_with_an_invalid_name_is_rejected(
    export: Callable[..., object], name: str, store: casckpt.Store, tmp_path: Path
) -> None:
    store.save({"a": torch.ones(2)}, step=0)
    with pytest.raises(StorageError, match="cannot be written: File name too long"):
        export(store, "latest", tmp_path / name)
    assert list(tmp_path.glob("*y*")) == []
