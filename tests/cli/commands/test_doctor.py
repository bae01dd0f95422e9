from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import AsJson, Run
from tests.support.bucket_commands import arguments, checks
from tests.support.servers import Server


def test_doctor_passes_a_safe_storage(safe: Server, run: Run) -> None:
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


def test_doctor_explains_the_settings_of_a_bucket(moto_server: Server, as_json: AsJson) -> None:
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


def test_doctor_checks_a_folder(run: Run, tmp_path: Path) -> None:
    """It goes as it came: what was not there is not there afterwards, and what was is."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new/folder/store"):
        assert "all is well" in run("doctor", tmp_path / name).stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
