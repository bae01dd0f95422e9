from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from click.testing import CliRunner

import casckpt
from casckpt.cli.main import cli
from tests.cli.conftest import AsJson, Run
from tests.support.stored_folder import described

BRIEF = {"id", "run", "step"}


# both directions


def test_import_and_export_produce_the_same_file(store_path: Path, tmp_path: Path, as_json: AsJson) -> None:
    source, out = tmp_path / "m.safetensors", tmp_path / "o.safetensors"
    safetensors.torch.save_file({"a": torch.randn(100), "b": torch.ones(3).bfloat16()}, source)
    made = as_json("import", store_path, source, "--run", "base", "--step", 0)
    assert {*BRIEF, "stats"} <= set(made)
    assert made["stats"]["bytes_written"] > 0
    assert as_json("import", store_path, source, "--run", "base", "--step", 1)["stats"]["bytes_written"] == 0
    assert as_json("import", store_path, source, "--run", "base", "--step", 1, status=5)["error"]["kind"] == "conflict"
    as_json("import", store_path, source, "--run", "base", "--step", 1, "--overwrite")
    found = as_json("export", store_path, "base@1", out, "--format", "safetensors")
    assert (found["files"], found["tensors"]) == ([str(out)], 2)
    assert out.read_bytes() == source.read_bytes()
    assert as_json("export", store_path, "base@1", out, status=5)["error"]["kind"] == "conflict"
    as_json("export", store_path, "base@1", out, "--force", "--keys", "a")
    assert list(safetensors.torch.load_file(out)) == ["a"]
    as_json("export", store_path, "base@1", out, "--force", "--metadata", "base=x=y", "--metadata", "n=3")
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"base": "x=y", "n": "3"}


def test_an_export_reports_the_keys_that_it_omits(saved: Path, tmp_path: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("export", saved, "a@1", tmp_path / "out", "--max-shard-size", "10KB")["left_out"] == ["lr"]
    assert len(list((tmp_path / "out").glob("model-0000?-of-00002.safetensors"))) == 2
    assert (
        "not have the form REGEX=NAME" in run("export", saved, "a@1", tmp_path / "x", "--rename", "w", status=2).stderr
    )
    assert "omitted: lr\n" in run("export", saved, "a@1", tmp_path / "again").stdout


def test_torch_files_and_folders_are_imported_and_exported(
    store_path: Path, tmp_path: Path, run: Run, as_json: AsJson
) -> None:
    torch.save({"a": torch.ones(2), "n": 3}, tmp_path / "in.pt")
    made = as_json("import", store_path, tmp_path / "in.pt", "--step", 0)
    assert (made["kind"], made["step"], made["files"]) == ("torch", 0, [str(tmp_path / "in.pt")])
    found = as_json("export", store_path, "default@0", tmp_path / "out", "--format", "dcp")
    assert (found["format"], found["tensors"], found["left_out"]) == ("dcp", 1, [])
    assert sorted(Path(name).name for name in found["files"]) == [".metadata", "__0_0.distcp"]
    (tmp_path / "out" / "mine").touch()
    again = as_json("export", store_path, "default@0", tmp_path / "out", "--format", "dcp", "--force")
    assert again["files"] == found["files"]
    assert as_json("import", store_path, tmp_path / "out", "--step", 1)["kind"] == "dcp"
    found = as_json("export", store_path, "default@1", tmp_path / "out.pt", "--format", "torch")
    assert found["files"] == [str(tmp_path / "out.pt")]
    assert torch.load(tmp_path / "out.pt")["n"] == 3
    run("export", store_path, "default@1", tmp_path / "out.pt", "--format", "torch", status=5)
    for kind, option, given in (
        ("dcp", "--keys", "a"),
        ("torch", "--max-shard-size", "1GB"),
        ("torch", "--metadata", "a=b"),
    ):
        told = run("export", store_path, "default@1", tmp_path / "x", "--format", kind, option, given, status=1)
        assert f"{option} applies to hf and safetensors" in told.stderr
    assert not (tmp_path / "x").exists()
    torch.save({"f": len}, tmp_path / "odd.pt")
    refused = run("import", store_path, tmp_path / "odd.pt", "--step", 2, status=1).stderr
    assert "--allow-pickle" in refused
    assert "contains len), so reading" in refused
    run("import", store_path, tmp_path / "odd.pt", "--step", 2, "--allow-pickle")


# the place of the store


def test_an_export_reports_values_that_the_format_cannot_represent(tmp_path: Path, as_json: AsJson, run: Run) -> None:
    store = casckpt.open(tmp_path / "s")
    store.save({"a": 1}, step=0, attachments={".metadata": b"x", "note": b"y"})
    found = as_json("export", tmp_path / "s", "latest", tmp_path / "out.pt", "--format", "torch")
    assert (found["attachments"], found["skipped"]) == ([], [".metadata", "note"])
    said = run("export", tmp_path / "s", "latest", tmp_path / "again.pt", "--format", "torch").stdout
    assert "files omitted: .metadata, note" in said
    refused = run("export", tmp_path / "s", "latest", tmp_path / "out", "--format", "dcp", status=1).stderr
    assert "--no-attachments" in refused.splitlines()[-1]
    found = as_json("export", tmp_path / "s", "latest", tmp_path / "out", "--format", "dcp", "--no-attachments")
    assert (found["attachments"], found["skipped"]) == ([], [".metadata", "note"])


def test_an_export_reports_why_it_omits_a_config(tmp_path: Path, run: Run) -> None:
    state = {"model": {"w": torch.ones(2), "v": torch.ones(1)}, "optim": {"m": torch.ones(2)}}
    casckpt.open(tmp_path / "s").save(state, step=0, attachments={"config.json": b"{}"})

    def said(out: str, *options: str) -> str:
        return run("export", tmp_path / "s", "latest", tmp_path / out, *options).stdout

    assert "part of a model: from_pretrained would initialize the rest" in said("part", "--keys", "model.w")
    assert "these are not the model's own names" in said("all", "--format", "safetensors")
    unwanted = said("unwanted", "--no-attachments")
    assert "copy the model's config.json into it" in unwanted
    assert "part of a model" not in unwanted
    assert "no names" not in said("neither", "--format", "safetensors", "--no-attachments"), "it is not why"


# files of other programs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    (root / "empty").mkdir(parents=True)
    torch.save({"w": torch.arange(30_000.0)}, root / "w.pt")
    (root / "odd\n[name]").write_text("text")
    (root / "link").symlink_to("w.pt")
    return root


def test_the_files_of_another_program_come_back_and_the_output_names_what_is_moved(
    store_path: Path, folder: Path, tmp_path: Path, run: Run, as_json: AsJson
) -> None:
    out = tmp_path / "out"
    made = as_json("import", store_path, folder, "--format", "files", "--run", "r", "--step", 5)
    assert {*BRIEF, "stats"} <= set(made)
    assert made["files"] == 2
    assert made["bytes"] == sum(path.stat().st_size for path in (folder / "w.pt", folder / "odd\n[name]"))
    found = as_json("export", store_path, "r@latest", out)
    assert (found["format"], found["bytes"], found["left_out"], found["notes"]) == ("files", made["bytes"], [], [])
    assert described(out) == described(folder)
    assert as_json("export", store_path, "r@latest", out, status=5)["error"]["kind"] == "conflict"
    (out / "mine\x1b[2J").touch()
    said = run("export", store_path, "r@5", out, "--format", "files", "--force").stdout
    assert "now in out.before" in said
    assert "\x1b" not in said
    assert (tmp_path / "out.before" / "mine\x1b[2J").exists()
    assert as_json("import", store_path, folder, "--format", "files", "--run", "r", "--step", 5, status=5)
    for option in (("--keys", "w"), ("--strip-prefix", "a"), ("--metadata", "a=b"), ("--max-shard-size", "1MB")):
        run("export", store_path, "r@5", tmp_path / "other", *option, status=1)
    run("export", store_path, "r@5", "s3://bucket/folder", status=1)
    run("export", store_path, "r@5", "", status=1)
    run("import", store_path, "", "--format", "files", "--step", 6, status=1)
    run("import", store_path, tmp_path / "absent", "--format", "files", "--step", 6, status=3)


def test_with_if_any_nothing_is_written_if_there_is_no_checkpoint(  # noqa: PLR0917 - fixtures
    store: casckpt.Store, store_path: Path, folder: Path, tmp_path: Path, run: Run, as_json: AsJson
) -> None:
    out = tmp_path / "out"
    command = ("export", store_path, "r@latest", out, "--format", "files")
    assert "nothing to export: " in run(*command, "--if-any").stdout
    assert not store_path.exists()
    assert not out.exists()
    run(*command, status=3)
    first = store.import_files(folder, run="other", step=1)
    assert "reason" in as_json(*command, "--if-any")
    out.mkdir()
    (out / "mine").touch()
    assert as_json(*command, "--if-any", "--force").keys() == {"reason"}
    assert [path.name for path in out.iterdir()] == ["mine"]
    run("export", store_path, "other@1", out, "--if-any", status=5)  # other errors remain errors
    run("export", store_path, "other@1", tmp_path / "new", "--if-any")
    assert described(tmp_path / "new") == described(folder)
    store.save({"w": torch.ones(1)}, run="other", step=2)
    run("export", store_path, "other@2", tmp_path / "x", "--if-any", "--format", "files", status=1)
    store.forget(first)
    store.gc(min_age=0)
    gone = as_json("export", store_path, first.id, tmp_path / "y", "--if-any", status=3)
    assert gone["error"]["kind"] == "gone"
    (store_path / "casckpt.json").chmod(0o600)
    (store_path / "casckpt.json").write_text("damaged")
    damaged = CliRunner().invoke(cli, [*map(str, command), "--if-any"])
    assert damaged.exit_code not in {0, 3}
