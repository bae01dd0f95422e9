"""``casckpt sign``, and commands that require a signature."""

from __future__ import annotations

from pathlib import Path

import pytest

import casckpt
from tests.cli.conftest import AsJson, Run
from tests.support.signing import Pair, pair


@pytest.fixture
def alice(tmp_path: Path) -> Pair:
    return pair(tmp_path / "keys")


def test_a_signed_checkpoint_can_be_verified_exported_and_followed(
    saved: Path, alice: Pair, tmp_path: Path, run: Run, as_json: AsJson
) -> None:
    signed = as_json("sign", saved, "a@1..2", "--key", alice.private)
    ids = [casckpt.open(saved).get(f"a@{step}").id for step in (1, 2)]
    assert [(one["run"], one["step"], one["id"]) for one in signed] == [("a", 1, ids[0]), ("a", 2, ids[1])]
    wanted = ("--require-signature", alice.public)
    assert [as_json("show", saved, ref)["signers"] for ref in ("a@1", "a@3")] == [[alice.name], []]
    assert f"{alice.name[:12]}; not checked here" in run("show", saved, "a@1").stdout
    assert as_json("verify", saved, "a@1", *wanted)["unsigned"] == []
    found = run("verify", saved, *wanted, status=1).stdout
    assert "not signed: a@3" in found
    assert "2 checkpoints not signed: if you trust them, run `casckpt sign`" in found
    run("export", saved, "a@2", tmp_path / "out", "--format", "safetensors", *wanted)
    assert "unsigned" in run("export", saved, "a@3", tmp_path / "no", *wanted, "--json", status=1).stdout
    assert not (tmp_path / "no").exists()
    assert run("follow", saved, "a", "--to", tmp_path / "to", "--once", *wanted, status=3).stdout == ""


def test_sign_asks_for_a_password(saved: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from casckpt.cli.main import cli

    made = pair(tmp_path, password=b"open")
    command = ["sign", str(saved), "a@1", "--key", str(made.private), "--password"]
    assert "signed a@1" in CliRunner().invoke(cli, command, input="open\n").stdout
    assert CliRunner().invoke(cli, command, input="shut\n").exit_code == 1
