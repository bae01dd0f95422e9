from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.cli.commands.verify import needed
from tests.cli.conftest import AsJson, Run
from tests.support.commands import arguments, checks, damage
from tests.support.servers import Server


def test_verify_finds_and_counts_damage(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    sound = as_json("verify", saved)
    assert sound["damaged"] == []
    assert sound["checked_blobs"] == as_json("stats", saved)["blobs"]
    assert sound["checked_bytes"] == as_json("stats", saved)["bytes_blobs"]
    blob = damage(saved)
    assert as_json("verify", saved, "--quick")["damaged"] == []
    found = as_json("verify", saved, status=4)
    (one,) = found["damaged"]
    assert one["blob"] == blob
    assert "shared" in one["keys"]
    assert set(one["checkpoints"]) == {checkpoint.id for checkpoint in store.checkpoints()}
    assert [(its["run"], its["step"]) for its in one["needed_by"]] == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    text = run("verify", saved, status=4).stdout
    assert blob in text
    named = [f"{one.run}@{one.step} ({one.id[:12]})" for one in store.checkpoints()]
    assert f"  needed by {', '.join(named)}: own, shared" in text
    assert text.splitlines()[-1] == "1 damaged: run `casckpt repair`"


def test_verify_names_only_a_few_of_many_affected_checkpoints() -> None:
    needed_by = [{"id": "f" * 64, "run": "a", "step": step} for step in range(2000)]
    shown = ", ".join(f"a@{step} (ffffffffffff)" for step in range(5))
    assert needed({"keys": ["w"], "needed_by": needed_by}) == (
        f"needed by {shown}, ... and 1995 more (--json lists all): w"
    )


def test_the_parts_of_verify_cover_everything(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    for step in range(8):
        store.save({"w": torch.full((300,), step)}, run="c", step=step)
    found = [as_json("verify", saved, "--part", f"{number}/3") for number in (1, 2, 3)]
    assert sum(one["checked_blobs"] for one in found) == found[0]["blobs"] == as_json("stats", saved)["blobs"]
    assert "the checked data is well" in run("verify", saved, "--quick", "--part", "2/3").stdout
    for wrong in ("0/3", "4/3", "1", "a/b", "1/0"):
        assert "with K from 1 to N" in run("verify", saved, "--part", wrong, status=2).stderr


@pytest.mark.parametrize("parts", [("runs",), ("commits",), ("runs", "commits")])
def test_verify_does_not_advise_to_give_up_checkpoints_whose_records_are_lost(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run, parts: tuple[str, ...]
) -> None:
    """It names a way that brings them back."""
    tmp_path = saved.parent
    ids = {one.id for one in store.checkpoints()}
    run("copy", saved, tmp_path / "mirror")
    for part in parts:
        shutil.rmtree(saved / part)
    for more in ((), ("--quick",), ("--cache-dir", tmp_path / "host")):
        assert "give" not in run("verify", saved, *more, status=4).output
    told = run("verify", saved, status=4).output
    assert ("the next gc announces it" in told) is ("commits" not in parts)
    assert ("`casckpt copy MIRROR STORE`" in told) is ("commits" in parts)
    run("gc", saved) if parts == ("runs",) else run("copy", tmp_path / "mirror", saved)
    assert as_json("verify", saved)["records"] == []
    assert {one.id for one in casckpt.open(saved).checkpoints()} == ids


def test_verify_advises_only_what_the_damaged_records_need(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.tag("best", "a@1")
    shutil.rmtree(saved / "tags")
    told = run("verify", saved, status=4).output
    assert "set the tags again" in told
    assert "give" not in told
    record = saved / "commits" / store.get("a@1").commit.txid
    record.chmod(0o600)
    record.write_bytes(b"not a record")
    assert f"--give-up {record.name}`" in run("verify", saved, status=4).output


def test_known_damage_is_reported_again(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("status", saved)["damaged"] == []
    blob = damage(saved)
    run("verify", saved, status=4)
    assert [blob in one["key"] for one in as_json("status", saved, status=4)["damaged"]] == [True]
    assert [one["blob"] for one in as_json("verify", saved, "--quick", status=4)["damaged"]] == [blob]
    run("forget", saved, "a@1..3", "b@1")
    run("gc", saved, "--min-age", "0")
    assert as_json("status", saved)["damaged"] == []


def test_verify_checks_only_the_selected_checkpoints(saved: Path, as_json: AsJson, run: Run) -> None:
    assert as_json("verify", saved, "b@1")["checked_checkpoints"] == 1
    as_json("verify", saved, "c@1", status=3)


def test_doctor_accepts_safe_storage(safe: Server, run: Run) -> None:
    bucket = safe.new_bucket()
    result = run("doctor", f"s3://{bucket}/store", *arguments(safe))
    assert "NOT OK" not in result.stdout
    assert "ok      create-only" in result.stdout
    assert result.stdout.endswith("all is well\n")
    assert safe.client.list_objects_v2(Bucket=bucket).get("Contents", []) == []


def test_doctor_and_init_reject_a_server_that_ignores_conditional_puts(
    rclone_server: Server, run: Run, as_json: AsJson
) -> None:
    bucket = rclone_server.new_bucket()
    found = checks(rclone_server, bucket, as_json, status=1)
    assert [name for name, check in found.items() if check["ok"] is False] == ["create-only"]
    assert "a second create replaced the first one" in found["create-only"]["found"]
    result = run("init", f"s3://{bucket}/store", *arguments(rclone_server), status=1)
    assert "a second create replaced the first one" in result.stderr
    assert "--single-writer" in result.stderr
    assert rclone_server.client.list_objects_v2(Bucket=bucket).get("Contents", []) == []
    run("init", f"s3://{bucket}/store", "--single-writer", *arguments(rclone_server))
    run("gc", f"s3://{bucket}/store", "--single-writer", *arguments(rclone_server))


def test_doctor_explains_the_settings_of_a_bucket(moto_server: Server, as_json: AsJson) -> None:
    bucket, client = moto_server.new_bucket(), moto_server.client
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for _ in range(3):
        client.put_object(Bucket=bucket, Key="store/a", Body=b"12345")
    expires = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "sto"}, "Expiration": {"Days": 30}}
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [expires]})
    found = checks(moto_server, bucket, as_json, status=1)
    assert "2 old versions in this store use 10 bytes" in found["versions"]["found"]
    assert "NoncurrentVersionExpiration" in found["versions"]["advice"]
    assert found["lifecycle"]["ok"] is False
    assert "'old'" in found["lifecycle"]["found"]
    harmless = expires | {"Filter": {"Prefix": "elsewhere/"}}
    cleans = {"ID": "v", "Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [harmless, cleans]})
    found = checks(moto_server, bucket, as_json)
    assert found["versions"]["ok"]
    assert found["lifecycle"]["ok"]


def test_doctor_checks_a_folder_without_changing_it(run: Run, tmp_path: Path) -> None:
    """doctor leaves the folder as it was: an absent folder stays absent."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new/folder/store"):
        assert "all is well" in run("doctor", tmp_path / name).stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_repair_recovers_bytes_from_a_second_store(saved: Path, tmp_path: Path, as_json: AsJson, run: Run) -> None:
    other = casckpt.open(tmp_path / "other")
    other.save({"shared": torch.arange(5000.0), "own": torch.full((1000,), 1.0), "lr": 0.1}, run="a", step=1)
    blob = damage(saved)
    as_json("verify", saved, status=4)
    lost = as_json("repair", saved, status=4)
    assert [one["blob"] for one in lost["lost"]] == [blob]
    assert "--from" in run("repair", saved, status=4).stdout.splitlines()[-1]
    assert as_json("repair", saved, "--from", tmp_path / "other")["blobs"] == [blob]
    as_json("verify", saved)


def test_repair_reports_that_it_does_not_repair_records(saved: Path, as_json: AsJson, run: Run) -> None:
    record = saved / "commits" / casckpt.open(saved).get("a@2").commit.txid
    record.chmod(0o644)
    os.truncate(record, 100)
    assert [one["key"] for one in as_json("repair", saved, status=4)["records"]] == [f"commits/{record.name}"]
    said = run("repair", saved, status=4).output
    assert f"not repaired: record commits/{record.name}: " in said
    assert "restore the files from a backup of the store's files" in said


def test_repairing_from_a_missing_store_raises_not_found(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    assert as_json("repair", saved, "--from", tmp_path / "nope", status=3)["error"]["kind"] == "not-found"
