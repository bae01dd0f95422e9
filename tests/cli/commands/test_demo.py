from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import AsJson, Run, named


def test_the_demo_runs_and_prints_its_steps(tmp_path: Path, as_json: AsJson, run: Run) -> None:
    shown = as_json("demo", tmp_path / "store")
    results = {step["command"] or "load": step["result"] for step in shown["steps"]}
    assert results["load"] is True
    assert results["verify"]["damaged"] == []
    assert named(results["list"]) == ["demo@30"]
    assert named(as_json("list", tmp_path / "store")) == ["demo@30"]
    for gone in as_json("list", tmp_path / "store", "--all")[:2]:  # what the demo forgets can be restored
        as_json("restore", tmp_path / "store", gone["id"])
    assert named(as_json("list", tmp_path / "store")) == ["demo@10", "demo@20", "demo@30"]
    assert as_json("demo", tmp_path / "store", status=5)["error"]["kind"] == "conflict"
    text = run("demo").stdout
    assert "every bit is identical" in text
    folder = next(line.split()[3] for line in text.splitlines() if line.startswith("$ casckpt list"))
    assert not Path(folder).exists()
