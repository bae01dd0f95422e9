"""Which files differ is known exactly, also of small files that share cells."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from casckpt.frontends.files.comparing import file_changes
from tests.support.saves import small_folder


def test_files_that_differ_are_named_exactly(tmp_path: Path) -> None:
    store, run = small_folder(tmp_path / "store"), tmp_path / "run"
    run.mkdir()
    for number in range(9):
        (run / f"{number}.json").write_text(str(number))
    (run / "link").symlink_to("1.json")
    for name in ("model", "same"):
        save_file({"w": torch.ones(200, 200)}, run / f"{name}.safetensors")
    before = store.import_files(run, step=1)
    assert file_changes(before, before) == ([], [], [])
    (run / "0.json").unlink()  # all that follows begins elsewhere in the pack
    (run / "3.json").write_text("x")
    (run / "4.json").chmod(0o600)
    (run / "new").touch()
    (run / "link").unlink()
    (run / "link").symlink_to("2.json")
    save_file({"w": torch.zeros(200, 200)}, run / "model.safetensors")
    changed = file_changes(before, store.import_files(run, step=2))
    assert changed == (["new"], ["0.json"], ["", "3.json", "4.json", "link", "model.safetensors"][1:])
