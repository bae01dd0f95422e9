from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.cli.text import printable
from tests.cli.conftest import AsJson, Run, named

# reads


def test_a_store_cannot_send_control_characters_to_the_terminal(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.save({"evil\x1b[2J\n[red]key": torch.zeros(2)}, run="evil", step=1, metadata={"x": "\x1b[31m"})
    for command in ("show", "diff"):
        shown = run(command, saved, "evil@1", *(["a@1"] if command == "diff" else [])).stdout
        assert "\x1b" not in shown
        assert r"evil\x1b[2J\n[red]key" in shown.replace("\n", "")
    assert printable("a\tb\u202e\n") == r"a\tb\u202e\n"


# care for stores


def test_an_environment_variable_can_set_the_cache_folder(
    saved: Path, tmp_path: Path, as_json: AsJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASCKPT_CACHE_DIR", str(tmp_path / "there"))
    assert Path(as_json("reindex", saved)["path"]).is_relative_to(tmp_path / "there")


# the place of the store


@pytest.mark.parametrize("way", ["-s", "--store", "environment"])
def test_the_store_can_be_named_in_any_of_several_ways(
    saved: Path, as_json: AsJson, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    option = [] if way == "environment" else [way, saved]
    if way == "environment":
        monkeypatch.setenv("CASCKPT_STORE", str(saved))
    assert named(as_json("list", *option)) == ["a@1", "a@2", "a@3", "b@1"]
    assert as_json("show", "a@2", *option)["step"] == 2
    assert as_json("diff", *option, "a@1", "a@2")["changed"] == ["own"]
    assert as_json("verify", *option)["damaged"] == []
    assert named(as_json("copy", saved.parent / "copy", "a@1", *option)["copied"]) == ["a@1"]
    as_json("list", f"--store={saved}")


def test_naming_the_store_twice_is_a_usage_error(saved: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("list", saved, "-s", saved, status=2)
    monkeypatch.setenv("CASCKPT_STORE", str(saved))
    assert "CASCKPT_STORE already names the store" in run("list", saved, status=2).stderr
    said = run("show", status=2).stderr
    assert "Missing argument 'REF'" in said, "and not only where the store comes from"
    assert "CASCKPT_STORE already names the store" in said
    assert "no checkpoints" in run("list", "-s", _empty(saved.parent / "other")).stdout


def test_the_error_for_a_missing_store_argument_lists_all_ways_to_name_a_store(run: Run, as_json: AsJson) -> None:
    said = run("list", status=2).stderr
    assert "Missing argument 'STORE'" in said
    assert "-s or CASCKPT_STORE" in said
    assert "-s or" not in run("list", "s", "--limit", "0", status=2).stderr


def _empty(path: Path) -> Path:
    casckpt.open(path).create()
    return path


def test_verbose_logs_each_step(saved: Path, run: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    said = {
        ("gc", saved, "--keep-last", 1, "--min-age", 0): "2 live checkpoints, 3 objects that none of them needs",
        ("copy", saved, tmp_path / "copy"): "blobs to upload",
        ("verify", saved): "blobs to check",
        ("repair", saved): "0 blobs are damaged or missing; 0 manifests were restored",
        ("import", saved, tmp_path / "w.pt", "--step", 1): "as torch",
    }
    for command, line in said.items():
        told = run(*command, "-v").stderr
        assert line in told, told


def test_an_option_that_accepts_a_single_value_cannot_be_repeated(saved: Path, as_json: AsJson) -> None:
    for name in ("x", "y"):
        as_json("tag", saved, name, "a@1")
    error = as_json("tag", saved, "--delete", "x", "--delete=y", status=2)["error"]
    assert error["message"] == "--delete accepts a single value: pass it once"
    error = as_json("tag", "-s", saved, "--store", saved, status=2)["error"]
    assert error["message"].startswith("--store accepts a single value")
    assert [tag["name"] for tag in as_json("tag", saved, "-v", "-v", "--json")] == ["x", "y"]
