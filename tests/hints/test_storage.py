"""Advice about folders, buckets and other storages."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError

import casckpt
from casckpt.errors import InvalidInput, Refused, StorageError
from casckpt.storage.local import store as local_store
from casckpt.storage.local.spare import SIZE
from casckpt.storage.remote.patience import Backoff, Call, Patience
from casckpt.storage.remote.s3.errors import explain
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from tests.hints.conftest import Run
from tests.storage.remote.s3.test_client import CALLS
from tests.storage.remote.s3.test_direct import client_of
from tests.support.certificates import make_certificate
from tests.support.hints import Messages, follows
from tests.support.proxy import Proxy
from tests.support.quirks import Answer, Quirk, Request, refusal
from tests.support.servers import Server

ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@follows("storage/failures.py:", "free some space or raise the quota, and try again; `casckpt gc` can free more")
def test_gc_frees_space_on_a_full_disk_as_advised(
    saved: casckpt.Store, store_path: Path, messages: Messages, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = set(store_path.rglob("*.safetensors"))
    saved.save({"w": torch.ones(5)}, run="a", step=2)
    saved.forget("a@1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with messages.error(StorageError) as advice:
            casckpt.open(store_path).save({"w": torch.ones(9)}, run="a", step=3)  # has just deleted nothing
        run(*advice.command("gc"), store_path, "--min-age", "0", "--wait", "0")
    assert not any(path.exists() for path in first)
    advice.says("try again")
    saved.save({"w": torch.ones(9)}, run="a", step=3)
    assert torch.equal(saved.read("a@3")["w"], torch.ones(9))


def full(fd: int) -> None:
    """Fail for a blob. A record finds room in a prepared file."""
    if os.fstat(fd).st_size > SIZE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken(_: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@follows("storage/local/folders.py:misplaced", "(`cp -rL STORE NEW`), and use the copy")
@pytest.mark.parametrize("what", ["casckpt.json", "objects"])
def test_a_store_of_links_can_be_copied_and_used_as_advised(
    saved: casckpt.Store, store_path: Path, tmp_path: Path, messages: Messages, what: str
) -> None:
    (store_path / what).rename(tmp_path / "elsewhere")
    (store_path / what).symlink_to(tmp_path / "elsewhere")
    with messages.error(Refused) as advice:
        casckpt.open(store_path).load({"w": torch.zeros(6)}, "a@1", unread="ignore")
    subprocess.run([*advice.says("cp -rL").split(), store_path, tmp_path / "new"], check=True)
    new = casckpt.open(tmp_path / "new")
    assert not new.verify().is_damaged
    new.save({"w": torch.zeros(6)}, run="a", step=2)
    assert torch.equal(new.read("a@1")["w"], torch.arange(6.0))


@follows("storage/failures.py:", "check the kernel log, then run `casckpt verify`")
def test_a_store_can_be_verified_after_a_disk_error_as_advised(
    saved: casckpt.Store, store_path: Path, messages: Messages, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with messages.error(StorageError) as advice:
            saved.save({"w": torch.ones(9)}, run="a", step=3)
    assert "for 1 checkpoint" in run(*advice.command("verify"), store_path).output


@follows("storage/local/store.py:stale_listings", "Mount it with noac (or actimeo=0)")
def test_a_mount_with_the_suggested_option_has_reliable_listings(tmp_path: Path, messages: Messages) -> None:
    for option in ("noac", "actimeo=0"):
        table = tmp_path / "mounts"
        table.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n")
        advice = messages.text(local_store.stale_listings(tmp_path, table))
        table.write_text(f"server:/x {tmp_path} nfs4 rw,{advice.says(option)} 0 0\n")
        assert local_store.stale_listings(tmp_path, table) == ""


# remote storages


def bucket_of(server: Server, **options: Any) -> casckpt.Store:
    """Open a bucket. ``options`` replace those of the server, and None omits one."""
    given = {name: value for name, value in (server.options | options).items() if value is not None}
    return casckpt.open(f"s3://{server.new_bucket()}/store", storage_options=given)


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")


def make_public(client: Any, bucket: str) -> None:
    client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    for found in client.list_objects_v2(Bucket=bucket)["Contents"]:
        client.put_object_acl(Bucket=bucket, Key=found["Key"], ACL="public-read")


@pytest.mark.usefixtures("no_credentials")
@follows("storage/remote/s3/errors.py:explain", "no credentials were found: …, or anon=True for a public bucket")
@follows("storage/remote/s3/errors.py:", "provide different ones in storage_options (--storage-option) or in the usual")
def test_credentials_can_be_passed_in_any_of_the_suggested_ways(
    moto_server: Server, messages: Messages, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket_of(moto_server, key=None, secret=None)
    with messages.error(StorageError) as advice:
        store.save({"x": 1}, run="a", step=1)
    where, options = store.url, moto_server.options
    endpoint = {"endpoint_url": options["endpoint_url"]}
    advice.says("storage_options")
    casckpt.open(where, storage_options=options).save({"x": 1}, run="a", step=1)
    option = advice.says("--storage-option")
    given = [word for name, value in options.items() for word in (option, f"{name}={value}")]
    assert "a" in run("list", where, *given).output.split()
    advice.says("the usual AWS environment")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        assert casckpt.open(where, storage_options=endpoint).read("a@1") == {"x": 1}
    make_public(moto_server.client, where.split("/")[2])
    assert casckpt.open(where, storage_options=endpoint | advice.argument("anon")).read("a@1") == {"x": 1}


@follows("storage/remote/s3/errors.py:", "the bucket is in a different region: set that region with storage_options")
def test_the_suggested_option_sets_the_region_of_a_bucket(moto_server: Server, messages: Messages) -> None:
    answer = {"Error": {"Code": "PermanentRedirect"}, "ResponseMetadata": {"HTTPStatusCode": 301}}
    advice = messages.text(explain(ClientError(answer, "PutObject")).why)
    shown = advice.says("client_kwargs={'region_name': ...}").replace("...", "'eu-central-1'")
    store = bucket_of(moto_server, **eval(f"dict({shown})"))  # as a reader types it
    store.save({"x": 1}, run="a", step=1)
    storage = store.repository.storage
    assert isinstance(storage, RemoteStore)
    assert client_of(storage)._fs.s3.meta.region_name == "eu-central-1"


class InRegion(Quirk):
    """Redirects requests that are signed for another region, without naming its own."""

    def __init__(self, region: str) -> None:
        self.region = region

    def ask(self, request: Request) -> Answer | None:
        is_here = f"/{self.region}/s3/" in request.headers["Authorization"]
        return None if is_here else refusal(301, "PermanentRedirect", "Use the specified endpoint.")


@pytest.mark.parametrize("look", ["size", "get", "read", "list"])
@follows("storage/remote/s3/errors.py:", "the bucket is in a different region: set that region with storage_options")
def test_a_region_that_was_found_out_by_a_redirect_can_be_set_as_advised(
    look: str, moto_server: Server, messages: Messages
) -> None:
    """The response to a HEAD has no body, so another request finds out the reason."""
    bucket = moto_server.new_bucket()
    moto_server.client.put_object(Bucket=bucket, Key="store/a", Body=b"12345678")
    with Proxy(moto_server.endpoint, None, [InRegion("eu-central-1")]) as proxy:
        options = {**moto_server.options, "endpoint_url": proxy.endpoint}
        with messages.error(StorageError) as advice:
            CALLS[look](RemoteStore(RemoteLocation("s3", f"{bucket}/store", options)))
        shown = advice.says("client_kwargs={'region_name': ...}").replace("...", "'eu-central-1'")
        given = options | eval(f"dict({shown})")  # as a reader types it
        CALLS[look](RemoteStore(RemoteLocation("s3", f"{bucket}/store", given)))


@pytest.mark.usefixtures("no_credentials")
@follows("storage/remote/s3/errors.py:", "that its certificate is trusted (client_kwargs={'verify': 'ca.pem'})")
def test_the_suggested_option_makes_a_certificate_trusted(
    moto_server: Server, tmp_path: Path, messages: Messages
) -> None:
    certificate = make_certificate(tmp_path)
    with Proxy(moto_server.endpoint, certificate) as proxy:
        where = RemoteLocation("s3", "bucket/store", {**moto_server.options, "endpoint_url": proxy.endpoint})
        with messages.error(StorageError) as advice:
            RemoteStore(where, backoff=Backoff(attempts=1)).size("a")
        known = advice.argument("client_kwargs")
        known["client_kwargs"]["verify"] = str(certificate)
        store = bucket_of(moto_server, endpoint_url=proxy.endpoint, **known)
        store.save({"x": 1}, run="a", step=1)
        assert store.read("a@1") == {"x": 1}


@follows("storage/remote/s3/errors.py:", "or promise with single_writer (--single-writer) that no other process writes")
def test_a_server_without_conditional_puts_can_be_used_by_a_single_writer(
    rclone_server: Server, messages: Messages, run: Run
) -> None:
    answer = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
    advice = messages.text(explain(ClientError(answer, "PutObject")).unpromised)
    url, alone = f"s3://{rclone_server.new_bucket()}/store", {advice.says("single_writer"): True}
    store = casckpt.open(url, storage_options=rclone_server.options, **alone)  # type: ignore[arg-type]
    store.save({"x": 1}, run="a", step=1)
    assert store.read("a@1") == {"x": 1}
    given = [word for name, value in rclone_server.options.items() for word in ("--storage-option", f"{name}={value}")]
    run("tag", url, "best", "a@1", advice.says("--single-writer"), *given)


@follows("storage/remote/patience.py:Call.why", "no call waits longer than … s in total (… in storage_options)")
def test_the_suggested_option_sets_how_long_a_call_waits(messages: Messages) -> None:
    advice = messages.text(Call(Patience()).why)
    patience, rest = Patience.of({advice.says("call_timeout"): 500})
    assert (Call(patience).left, rest) == (500, {})
    casckpt.open("s3://bucket/store", storage_options={"call_timeout": 500})


@follows("storage/remote/urls.py:open_remote", "a …:// URL must not contain credentials: pass them in storage_options")
def test_credentials_can_be_passed_outside_the_url_as_advised(moto_server: Server, messages: Messages) -> None:
    bucket, options = moto_server.new_bucket(), moto_server.options
    with messages.error(InvalidInput) as advice:
        casckpt.open(f"s3://{options['key']}:{options['secret']}@{bucket}/store")
    given: Any = {advice.says("storage_options"): options}
    casckpt.open(f"s3://{bucket}/store", **given).save({"x": 1}, run="a", step=1)


@follows("storage/remote/files.py:RemoteFiles.check_free", "pass a different URL, or --force to overwrite it")
def test_the_force_option_lets_an_export_overwrite_a_url(
    saved: casckpt.Store, store_path: Path, messages: Messages, run: Run
) -> None:
    where = "memory://of-hints/model.safetensors"
    saved.export("a@1", where)
    advice = messages.text(run("export", store_path, "a@1", where, status=5).output)
    run("export", store_path, "a@1", where, advice.says("--force"))
    advice.says("pass a different URL")
    run("export", store_path, "a@1", "memory://of-hints/other.safetensors")
