"""The command line with buckets: doctor and init on safe and unsafe servers, and secrets, which are never printed."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from casckpt.cli.main import cli
from tests.cli.conftest import AsJson, Run
from tests.support.commands import arguments, checks
from tests.support.servers import SECRET, Server


def test_a_bucket_with_a_mistyped_name_is_not_created(safe: Server, as_json: AsJson, run: Run) -> None:
    """SeaweedFS creates a bucket for any put."""
    found = checks(safe, "no-such-bucket", as_json, status=1)
    assert "create it first" in found["write"]["found"]
    assert "create it first" in run("init", "s3://no-such-bucket/store", *arguments(safe), status=3).stderr
    assert "no-such-bucket" not in {bucket["Name"] for bucket in safe.client.list_buckets()["Buckets"]}


def test_every_command_works_on_a_bucket(safe: Server, run: Run, as_json: AsJson, saved: Path, tmp_path: Path) -> None:
    """This runs every command that people use."""
    url, options = f"s3://{safe.new_bucket()}/team/store", arguments(safe)
    run("init", url, *options)
    model = tmp_path / "model.safetensors"
    run("export", saved, "a@1", model)
    run("import", url, model, "--run", "sft", "--step", 1, *options)
    run("import", url, model, "--run", "sft", "--step", 2, *options)
    assert [(one["run"], one["step"]) for one in as_json("list", url, *options)] == [("sft", 1), ("sft", 2)]
    assert as_json("stats", url, *options)["blobs"] == 1
    run("tag", url, "best", "sft@1", *options)
    run("verify", url, *options)
    run("forget", url, "sft@2", *options)
    assert as_json("gc", url, *options)["waiting"][0]["reason"] == "young"
    assert len(as_json("gc", url, "--min-age", 0, *options)["purged"]) == 1
    run("export", url, "tag:best", tmp_path / "again.safetensors", *options)
    assert (tmp_path / "again.safetensors").read_bytes() == model.read_bytes()
    run("import", url, model, "--run", "sft", "--step", 1, *options, status=5)


def test_secrets_never_appear_in_the_output(moto_server: Server) -> None:
    bucket, options = moto_server.new_bucket(), arguments(moto_server)
    for url in (f"s3://{bucket}/store", "s3://no-such-bucket/store"):
        for command in (["init", url], ["list", url, "--debug"], ["doctor", url], ["gc", url, "-vv"]):
            assert SECRET not in CliRunner().invoke(cli, [*command, *options]).output
    for wrong in (SECRET, json.dumps({"secret": SECRET})):
        result = CliRunner().invoke(cli, ["list", f"s3://{bucket}/store", "--storage-option", wrong])
        assert result.exit_code == 2
        assert SECRET not in result.output
