"""Advice about the folders and files of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.errors import Conflict, InvalidInput
from casckpt.frontends.files.listing import Found
from casckpt.frontends.files.watching import watch_files
from tests.hints.conftest import Run
from tests.support.hints import Messages, follows
from tests.support.stored_folder import described

Store = casckpt.Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    root.mkdir()
    torch.save({"w": torch.ones(3)}, root / "w.pt")
    return root


@follows("cli/commands/import_.py:command", "--format files")
@follows("frontends/files/listing.py:_followed", "pass follow_links=True (--follow-links) to store what it leads to")
def test_links_that_lead_out_can_be_followed_as_advised(
    store: Store, folder: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (folder / "link").symlink_to("../blob")
    command = ("import", store.url, folder, "--step", 1)
    option = messages.text(run(*command, "--format", "files", status=1).output).says("--follow-links")
    advice = messages.text(run(*command, option, status=1).output)
    run(*command, option, *advice.says("--format files").split())
    run("export", store.url, "default@1", tmp_path / "out")
    assert (tmp_path / "out" / "link").read_bytes() == b"weights"
    assert not (tmp_path / "out" / "link").is_symlink()


@pytest.mark.parametrize("options", [("--as-is",), ("--allow-pickle",), ("--parameter-names", "names.json")])
def test_an_option_that_changes_values_applies_to_other_formats(
    store: Store, folder: Path, tmp_path: Path, run: Run, options: tuple[str, ...]
) -> None:
    (tmp_path / "names.json").write_text('["w"]')
    given = [tmp_path / word if word.endswith(".json") else word for word in options]
    command = ("import", store.url, folder / "w.pt", "--step", 1, *given)
    assert f"{options[0]} does not apply" in run(*command, "--format", "files", status=1).output
    run(*command)
    assert torch.equal(store.read("default@1")["w"], torch.ones(3))


@follows("cli/commands/import_.py:command", "Missing option '--step'")
def test_an_import_takes_a_step_as_advised(store: Store, folder: Path, messages: Messages, run: Run) -> None:
    command = ("import", store.url, folder, "--format", "files")
    run(*command, messages.text(run(*command, status=2).output).says("--step"), 3)
    assert store.get("default@3").metadata["folder"]["files"] == 1


@follows("contents/contents.py:Contents.check_loads", "import these without --format files")
def test_the_tensors_in_stored_files_are_loaded_as_advised(
    store: Store, folder: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    store.import_files(folder, step=1)
    with messages.error(InvalidInput) as advice:
        store.read("default@1")
    _, name, *options = advice.says("casckpt export --format files").split()
    run(name, store.url, "default@1", tmp_path / "out", *options)
    assert described(tmp_path / "out") == described(folder)
    run("import", store.url, tmp_path / "out" / "w.pt", "--run", "tensors", "--step", 1)
    assert torch.equal(store.read("tensors@1")["w"], torch.ones(3))


@follows("frontends/files/exporting.py:_Job.__init__", "does not hold a folder of another program")
def test_a_checkpoint_without_files_is_exported_in_another_format(
    saved: Store, folder: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    command = ("export", saved.url, "a@1", tmp_path / "out")
    advice = messages.text(run(*command, "--format", "files", status=1).output)
    advice.says("choose a different format")
    run(*command, "--format", "safetensors")
    assert (tmp_path / "out" / "model.safetensors").exists()
    _, name, *options = advice.says("casckpt import --format files").split()
    run(name, saved.url, folder, *options, "--run", "files", "--step", 1)
    run("export", saved.url, "files@1", tmp_path / "back", "--format", "files")
    assert described(tmp_path / "back") == described(folder)


@follows("frontends/files/listing.py:changed", "import it once the program has finished it")
def test_a_folder_is_imported_once_its_program_has_finished(
    store: Store, folder: Path, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create()
    read = Found.read_into

    def and_write(self: Found, offset: int, buffer: memoryview) -> None:
        read(self, offset, buffer)
        (folder / "more").write_text("more")

    with monkeypatch.context() as patch, messages.error(Conflict) as advice:
        patch.setattr(Found, "read_into", and_write)
        store.import_files(folder, step=1)
    advice.says("import it once the program has finished it")
    assert store.import_files(folder, step=1).metadata["folder"]["files"] == 2


@follows("frontends/files/watching.py:_Watch._is_complete", "if it is right, import it with --step")
@follows("frontends/files/watching.py:_Watch._is_complete", "to store it all the same, import it with --step")
def test_a_checkpoint_that_seems_incomplete_is_imported_as_advised(
    store: Store, tmp_path: Path, messages: Messages, caplog: pytest.LogCaptureFixture, run: Run
) -> None:
    for step, names in ((1, ("a", "b", "trainer_state.json")), (2, ("a", "trainer_state.json"))):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        for name in names:
            (tmp_path / "out" / f"checkpoint-{step}" / name).write_text("{}")
    with messages.error(InvalidInput) as advice:
        list(watch_files(store, tmp_path / "out", run="r", settle=0, once=True))
    assert store.get("r@latest").step == 1
    option = advice.says("--step")
    folder = tmp_path / "out" / "checkpoint-2"
    run("import", store.url, folder, "--format", "files", "--run", "r", option, 2)
    assert list(watch_files(store, tmp_path / "out", run="r", settle=0, once=True)) == []
    store.forget("r@1")
    store.gc(min_age=0)
    caplog.clear()
    assert list(watch_files(store, tmp_path / "out", run="r", settle=0, once=True)) == []
    option = messages.text(caplog.text).says("--step")
    run("import", store.url, tmp_path / "out" / "checkpoint-1", "--format", "files", "--run", "r", option, 1)
