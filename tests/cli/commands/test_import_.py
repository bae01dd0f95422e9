from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import casckpt
from tests.cli.conftest import AsJson, Run


def test_an_import_reports_values_that_it_did_not_translate(store_path: Path, tmp_path: Path, run: Run) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    torch.save({"optimizer": torch.optim.SGD([weight]).state_dict()}, tmp_path / "ckpt.pt")
    result = run("import", store_path, tmp_path / "ckpt.pt", "--step", 1, "--json")
    assert "identifies its parameters by number" in json.loads(result.stdout)["notes"][0]
    assert "identifies its parameters by number" in result.stderr
    run("import", store_path, tmp_path / "ckpt.pt", "--step", 2, "--as-is")


@pytest.mark.parametrize("text", [None, "", "{}", '["a", 1]', '"ab"'])
def test_parameter_names_are_a_json_list(store_path: Path, tmp_path: Path, run: Run, text: str | None) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    if text is not None:
        (tmp_path / "names.json").write_text(text)
    names = ("--parameter-names", tmp_path / "names.json")
    refused = run("import", store_path, tmp_path / "x.pt", "--step", 1, *names, status=2).stderr
    assert "names.json is not a file with a JSON list of names" in refused


def test_the_error_for_a_file_of_the_wrong_kind_names_its_actual_kind(
    store_path: Path, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert "import the file itself" in run("import", store_path, tmp_path, "--step", 0, status=1).stderr
    assert "no file" in run("import", store_path, tmp_path / "absent", "--step", 0, status=3).stderr
    assert "'' does not name a file" in run("import", store_path, "", "--step", 0, status=1).stderr
    too_long = run("import", store_path, "x" * 300, "--step", 0, status=1).stderr
    assert "cannot read xxx" in too_long  # as for any error of the operating system
    assert "too long" in too_long
    assert not store_path.exists()


def test_an_imported_checkpoint_names_its_file(store_path: Path, tmp_path: Path, run: Run, as_json: AsJson) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    run("import", store_path, tmp_path / "w.pt", "--step", 1)
    origin = {"path": str(tmp_path / "w.pt")}
    for rows in (as_json("list", store_path), [as_json("show", store_path, "default@1")]):
        assert rows[0]["lineage"] == {"imported_from": origin}
    assert f"lineage  imported from {tmp_path / 'w.pt'}" in run("show", store_path, "default@1").stdout


@pytest.fixture
def saved(store: casckpt.Store) -> casckpt.Store:
    for step in range(3):
        store.save(
            {"model": {"w": torch.full((3,), float(step)), "n": torch.tensor(step)}, "optimizer": {"m": torch.ones(2)}},
            run="a",
            step=step,
        )
    return store


def test_merge_saves_a_mean(run: Run, as_json: AsJson, saved: casckpt.Store) -> None:
    result = run("merge", saved.url, "a@0..2", "--run", "m", "--step", "1")
    assert result.stdout.startswith("saved m@1 (")
    assert "not combined, but taken from a@2: 'model.n'" in result.stderr
    assert saved.read("m@1")["model"]["w"].tolist() == [1.0] * 3
    found = as_json("merge", saved.url, "a@0", "a@1", "--run", "m", "--step", "2", "--keys", "model.w")
    assert (found["run"], found["step"], found["notes"]) == ("m", 2, [])
    assert saved.read("m@2")["model"]["w"].tolist() == [0.5] * 3


def test_options_of_merge(run: Run, saved: casckpt.Store) -> None:
    for step, (options, want) in enumerate(
        [
            (["--weights", "1,-1/2,.5"], 0.5),
            (["--weights=-1,0,2"], 4.0),
            (["--ema", "0.5"], 1.25),
            (["--dtype", "bfloat16", "--keep", "optimizer.*"], 1.0),
        ]
    ):
        run("merge", saved.url, "a@..", "--run", "m", "--step", str(step), *options)
        assert saved.read(f"m@{step}")["model"]["w"].tolist() == [want] * 3
    assert saved.read("m@3")["optimizer"]["m"].tolist() == [1.0, 1.0]
    run("merge", saved.url, "a@1", "--run", "m", "--step", "0", status=5)
    run("merge", saved.url, "a@1", "--run", "m", "--step", "0", "--overwrite")
    assert saved.read("m@0")["model"]["w"].tolist() == [1.0] * 3


def test_a_watch_prints_each_checkpoint_that_it_stores(store_path: Path, tmp_path: Path, run: Run) -> None:
    options = ["--format", "files", "--run", "r", "--watch", "--once", "--settle", 0]
    watch = ["import", store_path, tmp_path / "out", *options]
    assert "there is no checkpoint in" in run(*watch).stderr
    for step in (1, 2):
        folder = tmp_path / "out" / f"step_{step}"
        folder.mkdir(parents=True)
        torch.save({"w": torch.ones(3)}, folder / "model.pt")
    done = run(*watch, "--layout", "step_{step}/model.pt", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["step"], one["path"], one["files"]) for one in rows] == [
        (step, str(tmp_path / "out" / f"step_{step}" / "model.pt"), 1) for step in (1, 2)
    ]
    (tmp_path / "out" / "step_3").mkdir()
    (tmp_path / "out" / "step_3" / "model.pt").symlink_to("/dev/null")
    assert "is not stored" in run(*watch, "--layout", "step_{step}/model.pt", status=1).stderr
    (tmp_path / "out" / "step_3" / "model.pt").unlink()
    (tmp_path / "out" / "step_3" / "model.pt").write_text("3")
    assert run(*watch, "--layout", "step_{step}/model.pt").stdout.startswith("saved r@3 (")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--watch"], "--watch applies to --format files"),
        (["--follow-links", "--step", "1"], "--follow-links applies to --format files"),
        (["--format", "files", "--as-is", "--step", "1"], "--as-is does not apply to --format files"),
        (["--format", "files", "--watch", "--step", "0"], "--step does not apply to --watch"),
        (["--format", "files", "--watch", "--overwrite"], "--overwrite does not apply to --watch"),
        (["--format", "files", "--settle", "0", "--step", "1"], "--settle applies to --watch"),
        (["--layout", "generic", "--step", "1"], "--layout applies to --watch"),
        (["--once", "--step", "1"], "--once applies to --watch"),
        (["--format", "files", "--watch", "--layout", "deepsped"], "layout='deepsped' is not valid"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    store_path: Path, tmp_path: Path, run: Run, options: list[str], refusal: str
) -> None:
    assert refusal in run("import", store_path, tmp_path, *options, status=1).stderr
    assert "--step" in run("import", store_path, tmp_path, "--format", "files", status=2).stderr
