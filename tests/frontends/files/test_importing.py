"""Folders of other programs are stored as they are, and their tensors once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

import casckpt
from casckpt.contents import manifests
from casckpt.errors import Conflict, InvalidInput
from casckpt.format.sections.recipe import NOTE
from casckpt.frontends.files.listing import Found
from tests.support.stored_folder import described


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    return casckpt.open(tmp_path / "store", cache_dir=tmp_path / "cache")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with two large tensors, each in a different kind of file, and small files."""
    folder = tmp_path / "run"
    (folder / "empty").mkdir(parents=True)
    torch.manual_seed(0)
    save_file({"w": torch.randn(300, 100), "b": torch.randn(4)}, folder / "model.safetensors")
    torch.save({"exp_avg": torch.randn(400, 100).bfloat16(), "step": 3}, folder / "optimizer.pt")
    for number in range(20):
        (folder / f"{number}.json").write_text(str(number))
    return folder


def test_tensors_are_shared_with_other_steps_and_with_saves_of_the_training(store: casckpt.Store, run: Path) -> None:
    weights = torch.load(run / "optimizer.pt")
    store.save({"model": {"v": weights["exp_avg"]}}, run="other", step=1)
    first = store.import_files(run, run="files", step=2)
    assert first.stats.bytes_reused == 400 * 100 * 2
    (run / "0.json").write_text("more")
    second = store.import_files(run, run="files", step=3)
    assert second.stats.bytes_written < 8192
    manifest = manifests.get(store.repository, second.commit)
    assert NOTE in manifest.body.notes
    entries = manifest.entries
    assert [(one.key, one.dtype, one.shape) for one in entries] == [
        ("/0.json", "uint8", (33,)),
        ("model.safetensors", "uint8", (144,)),
        ("model.safetensors/w", "float32", (300, 100)),
        ("optimizer.pt", "uint8", (entries[3].nbytes,)),
        ("optimizer.pt/data/0", "bfloat16", (40000,)),
    ]


def test_a_stored_folder_comes_back_byte_for_byte(store: casckpt.Store, run: Path, tmp_path: Path) -> None:
    (run / "link").symlink_to("0.json")
    (run / "model.safetensors").chmod(0o640)
    (run / "empty").chmod(0o500)
    store.import_files(run, run="files", step=1)
    store.export("files@1", tmp_path / "back")
    assert described(tmp_path / "back") == described(run)


def test_a_folder_that_changes_while_it_is_read_is_not_stored(
    store: casckpt.Store, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create()
    read = Found.read_into

    def and_change(self: Found, offset: int, buffer: memoryview) -> None:
        read(self, offset, buffer)
        (run / "new").touch()

    monkeypatch.setattr(Found, "read_into", and_change)
    with pytest.raises(Conflict, match=r"'new'.*changed while it was read"):
        store.import_files(run, run="files", step=1)
    assert store.checkpoints() == []


def test_what_cannot_come_back_is_refused_by_name(store: casckpt.Store, run: Path) -> None:
    (run / "out").symlink_to(run.parent)
    with pytest.raises(InvalidInput, match=r"'out' is a link to .*--follow-links"):
        store.import_files(run, step=1)
    (run / "out").unlink()
    os.mkfifo(run / "pipe")
    with pytest.raises(InvalidInput, match="'pipe' is neither a file"):
        store.import_files(run, step=1)


@pytest.mark.parametrize("options", [{}, {"compress": "always"}], ids=str)
def test_each_byte_is_read_once_besides_headers(
    store: casckpt.Store, run: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    store.create(cell_bytes=4096, blob_bytes=65536)
    (run / "random.bin").write_bytes(os.urandom(300_000))
    total = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    reads, read = list[int](), Found.read_into

    def counting(self: Found, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        read(self, offset, buffer)

    monkeypatch.setattr(Found, "read_into", counting)
    for step in (1, 2):
        reads.clear()
        store.import_files(run, run="files", step=step, **options)
        assert total <= sum(reads) < total + 10_000
    (run / "random.bin").write_bytes(os.urandom(300_000))
    reads.clear()
    store.import_files(run, run="files", step=3, **options)
    assert total <= sum(reads) < total + 10_000


def stored_bytes(store: casckpt.Store) -> int:
    return sum(path.stat().st_size for path in Path(store.url).rglob("*") if path.is_file())


@pytest.mark.parametrize("compress", ["off", "always"])
def test_files_take_hardly_more_than_native_saves(tmp_path: Path, compress: Literal["off", "always"]) -> None:
    """Six versions: of adapters beside frozen weights, or, with ``compress``, of weights that all change a little."""
    files, native = (casckpt.open(tmp_path / name, cache_dir=tmp_path / "cache") for name in ("files", "native"))
    torch.manual_seed(0)
    frozen = {f"layer.{n}": torch.randn(512, 512) for n in range(8)}
    for step in range(6):
        adapter = {f"lora.{n}": torch.randn(512, 8) for n in range(8)}
        if compress == "always":
            frozen = {name: value + 1e-6 * torch.randn_like(value) for name, value in frozen.items()}
        moments = {name: value * 0.1 for name, value in adapter.items()}
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file(frozen | adapter, folder / "model.safetensors")
        torch.save(moments, folder / "optimizer.pt")
        files.import_files(folder, run="r", step=step, compress=compress)
        native.save({"model": frozen | adapter, "optim": moments}, run="r", step=step, compress=compress)
    assert stored_bytes(files) <= 1.1 * stored_bytes(native)
    assert stored_bytes(files) < sum(path.stat().st_size for path in tmp_path.glob("checkpoint-*/*")) * 0.7
