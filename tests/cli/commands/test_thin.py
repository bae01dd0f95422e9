from __future__ import annotations

from pathlib import Path
from typing import Any

import casckpt
from tests.cli.conftest import AsJson, Run


def named(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['run']}@{row['step']}" for row in rows]


def test_restore_undoes_thin(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    key = next(iter(store.get("a@1").tensors))
    planned = as_json("thin", saved, "a@1", "--drop", key, "--dry-run")
    assert (planned["dry_run"], planned["entries"], named(planned["thinned"])) == (True, 1, ["a@1"])
    assert as_json("show", saved, "a@1")["dropped"] is None
    text = run("thin", saved, "--drop", key, "--keep-last", 2).stdout
    assert "thinned a@1" in text
    assert "freed by a gc after" in text
    assert [bool(row["dropped"]) for row in as_json("list", saved)] == [True, False, False, False]
    assert " thin" in run("list", saved).stdout
    assert f"by --drop {key}" in run("show", saved, "a@1").stdout
    assert named(as_json("restore", saved, "--whole", "a@1")["restored"]) == ["a@1"]
    assert as_json("show", saved, "a@1")["dropped"] is None
    assert as_json("thin", saved, "a@1", "--drop", "nothing", status=3)["error"]["kind"] == "missing-key"
    assert "give either the checkpoints to thin" in as_json("thin", saved, "--drop", key, status=1)["error"]["message"]
