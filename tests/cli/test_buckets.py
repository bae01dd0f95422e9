"""The command line on buckets: doctor and init on servers that are safe and on one that is not; secrets stay secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from casckpt.cli.main import cli
from tests.cli.conftest import AsJson, Run
from tests.support.servers import SECRET, Server


def arguments(server: Server) -> list[str]:
    """How a person gives storage_options."""
    return [word for name, value in server.options.items() for word in ("--storage-option", f"{name}={value}")]


@pytest.fixture(params=[pytest.param("moto_server", marks=pytest.mark.soak), "seaweed_server"])
def safe(request: pytest.FixtureRequest) -> Server:
    """A server that keeps all promises."""
    server: Server = request.getfixturevalue(request.param)
    return server


def checks(server: Server, bucket: str, as_json: AsJson, status: int = 0) -> dict[str, Any]:
    """What doctor finds, by name."""
    result = as_json("doctor", f"s3://{bucket}/store", *arguments(server), status=status)
    assert result["ok"] is (status == 0)
    return {check["name"]: check for check in result["checks"]}


def test_doctor_passes_where_it_is_safe(safe: Server, run: Run) -> None:
    bucket = safe.new_bucket()
    result = run("doctor", f"s3://{bucket}/store", *arguments(safe))
    assert "NOT OK" not in result.stdout
    assert "ok      create-only" in result.stdout
    assert result.stdout.endswith("all is well\n")
    assert safe.client.list_objects_v2(Bucket=bucket).get("Contents", []) == []


def test_doctor_and_init_refuse_a_server_that_ignores_the_condition(
    rclone_server: Server, run: Run, as_json: AsJson
) -> None:
    bucket = rclone_server.new_bucket()
    found = checks(rclone_server, bucket, as_json, status=1)
    assert [name for name, check in found.items() if check["ok"] is False] == ["create-only"]
    assert "a second create replace the first one" in found["create-only"]["found"]
    result = run("init", f"s3://{bucket}/store", *arguments(rclone_server), status=1)
    assert "a second create replace the first one" in result.stderr
    assert "--single-writer" in result.stderr
    assert rclone_server.client.list_objects_v2(Bucket=bucket).get("Contents", []) == []
    run("init", f"s3://{bucket}/store", "--single-writer", *arguments(rclone_server))
    run("gc", f"s3://{bucket}/store", "--single-writer", *arguments(rclone_server))


def test_doctor_tells_what_the_settings_of_a_bucket_mean(moto_server: Server, as_json: AsJson) -> None:
    bucket, client = moto_server.new_bucket(), moto_server.client
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for _ in range(3):
        client.put_object(Bucket=bucket, Key="store/a", Body=b"12345")
    client.create_multipart_upload(Bucket=bucket, Key="store/b")
    expires = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "sto"}, "Expiration": {"Days": 30}}
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [expires]})
    found = checks(moto_server, bucket, as_json, status=1)
    assert "2 old versions under this store hold 10 bytes" in found["versions"]["found"]
    assert "NoncurrentVersionExpiration" in found["versions"]["advice"]
    assert "1 unfinished" in found["multipart"]["found"]
    assert "AbortIncompleteMultipartUpload" in found["multipart"]["advice"]
    assert found["lifecycle"]["ok"] is False
    assert "'old'" in found["lifecycle"]["found"]
    harmless = expires | {"Filter": {"Prefix": "elsewhere/"}}
    cleans = {"ID": "v", "Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [harmless, cleans]})
    found = checks(moto_server, bucket, as_json)
    assert found["versions"]["ok"]
    assert found["lifecycle"]["ok"]


def test_a_slip_in_the_name_of_a_bucket_makes_none(safe: Server, as_json: AsJson, run: Run) -> None:
    """SeaweedFS makes a bucket for any put."""
    found = checks(safe, "no-such-bucket", as_json, status=1)
    assert "create it first" in found["write"]["found"]
    assert "create it first" in run("init", "s3://no-such-bucket/store", *arguments(safe), status=3).stderr
    assert "no-such-bucket" not in {bucket["Name"] for bucket in safe.client.list_buckets()["Buckets"]}


def test_doctor_on_a_folder(run: Run, tmp_path: Path) -> None:
    """It goes as it came: what was not there is not there afterwards, and what was is."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new/folder/store"):
        assert "all is well" in run("doctor", tmp_path / name).stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_day_with_a_bucket(safe: Server, run: Run, as_json: AsJson, saved: Path, tmp_path: Path) -> None:
    """Every command that a person uses, one after the other."""
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


def test_secrets_are_not_in_any_output(moto_server: Server) -> None:
    bucket, options = moto_server.new_bucket(), arguments(moto_server)
    for url in (f"s3://{bucket}/store", "s3://no-such-bucket/store"):
        for command in (["init", url], ["list", url, "--debug"], ["doctor", url], ["gc", url, "-vv"]):
            assert SECRET not in CliRunner().invoke(cli, [*command, *options]).output
    for wrong in (SECRET, json.dumps({"secret": SECRET})):
        result = CliRunner().invoke(cli, ["list", f"s3://{bucket}/store", "--storage-option", wrong])
        assert result.exit_code == 2
        assert SECRET not in result.output
