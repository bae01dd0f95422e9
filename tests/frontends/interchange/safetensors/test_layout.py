"""Layouts: where everything will lie in files that are not there yet."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from casckpt.contents import manifests
from casckpt.frontends.convert import export_safetensors
from casckpt.frontends.interchange.safetensors.layout import INDEX, Layout, lay_out
from casckpt.frontends.views.view import Rules, view_of
from casckpt.store.store import Store

STATE = {
    "b": torch.arange(700.0), "a": torch.ones(3, dtype=torch.bool), "d": torch.arange(5), "c": torch.ones(9).half(),
    "e": torch.zeros(0, 3), "f.10": torch.ones(4), "f.2": torch.ones(6).bfloat16(),
}  # fmt: skip


def layout(store: Store, most: int | None = None) -> Layout:
    manifest = manifests.get(store.repository, store.get("latest").commit)
    return lay_out(view_of(manifest, Rules()).tensors, {"format": "pt"}, most)


def test_a_layout_tells_every_byte_before_it_is_written(store: Store, tmp_path: Path) -> None:
    store.save(STATE, step=0)
    planned = layout(store, 1000)
    assert len(planned.files) > 2
    export_safetensors(store, "latest", tmp_path / "out", max_shard_size=1000)
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(planned.names)
    assert (tmp_path / "out" / INDEX).read_bytes() == planned.index
    for file in planned.files:
        data = (tmp_path / "out" / file.name).read_bytes()
        assert (len(data), data[: len(file.head)]) == (file.nbytes, file.head)
        for one, start in zip(file.tensors, file.starts, strict=True):
            expected = STATE[one.name].view(torch.uint8).numpy().tobytes()
            assert data[start : start + one.entry.nbytes] == expected


def test_a_file_is_the_one_that_the_library_writes_in_whatever_order_a_state_is(store: Store, tmp_path: Path) -> None:
    safetensors.torch.save_file(STATE, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    for step, state in enumerate((STATE, dict(reversed(STATE.items())))):
        store.save(state, step=step)
        found = export_safetensors(store, f"default@{step}", tmp_path / f"{step}.safetensors")
        assert Path(found.files[0]).read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
