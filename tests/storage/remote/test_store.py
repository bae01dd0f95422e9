"""Storages over a network keep the contract: against an imitation of S3, and against a real server."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from casckpt.errors import CasckptError, StorageError
from casckpt.storage import open_storage
from casckpt.storage.base import ObjectStore
from casckpt.storage.remote.s3 import client as remotes3
from tests.storage.contract import Peek, SharedContract, StorageContract
from tests.support.servers import Server


class S3Contract(SharedContract):
    """The promises on a bucket of ``server``, which a subclass gives."""

    @pytest.fixture
    def bucket(self, server: Server) -> str:
        return server.new_place()

    @pytest.fixture
    def storage(self, server: Server, bucket: str) -> ObjectStore:
        return open_storage(f"s3://{bucket}/deep/store", server.options)

    @pytest.fixture
    def peek(self, server: Server, bucket: str) -> Peek:
        return lambda key: server.look(bucket, f"deep/store/{key}")


@pytest.mark.soak  # the real server below shows the same
class TestMoto(S3Contract):
    @pytest.fixture
    def server(self, moto_server: Server) -> Server:
        return moto_server


class TestSeaweed(S3Contract):
    @pytest.fixture
    def server(self, seaweed_server: Server) -> Server:
        return seaweed_server


class TestSingleWriter(StorageContract):
    """A server that ignores the condition keeps all promises to one writer, but those of a race."""

    test_threads_race_for_a_key: Callable[..., None] | None = None  # type: ignore[assignment]  # not promised

    @pytest.fixture
    def bucket(self, rclone_server: Server) -> str:
        return rclone_server.new_bucket()

    @pytest.fixture
    def storage(self, rclone_server: Server, bucket: str) -> ObjectStore:
        return open_storage(f"s3://{bucket}/store", rclone_server.options, single_writer=True)

    @pytest.fixture
    def peek(self, rclone_server: Server, bucket: str) -> Peek:
        return lambda key: rclone_server.look(bucket, f"store/{key}")


def _put_in_child(storage: ObjectStore, key: str) -> None:
    storage.put(key, b"from the child")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_uses_the_same_store(method: str, moto_server: Server) -> None:
    """A fork copies neither the thread nor the connections of the client, so the child makes its own."""
    storage = open_storage(f"s3://{moto_server.new_bucket()}/store", moto_server.options)
    storage.put("a", b"1")
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=_put_in_child, args=(storage, "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is the point
        child.start()
    child.join()
    assert child.exitcode == 0
    assert storage.get("b", limit=100) == b"from the child"
    assert storage.get("a", limit=100) == b"1"


def test_a_forked_child_that_ends_as_a_program_does_leaves_the_parent_alone(moto_server: Server) -> None:
    storage = open_storage(f"s3://{moto_server.new_bucket()}/store", moto_server.options)
    storage.put("a", b"1")
    code = (
        "import os, sys, warnings, json\n"
        "from casckpt.storage import open_storage\n"
        "storage = open_storage(sys.argv[1], json.loads(sys.argv[2]))\n"
        "assert storage.get('a', limit=1) == b'1'\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "pid = os.fork()\n"
        "storage.put('child' if pid == 0 else 'parent', b'2')\n"
        "if pid: sys.exit(os.waitpid(pid, 0)[1] != 0 or storage.size('child') != 1)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, storage.url, json.dumps(moto_server.options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_many_pages_are_listed(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes3, "PAGE", 7)
    bucket = moto_server.new_bucket()
    for number in range(21):
        moto_server.client.put_object(Bucket=bucket, Key=f"store/commits/{number}", Body=b"")
    moto_server.client.put_object(Bucket=bucket, Key="store/commits/", Body=b"")  # the "folder" of some browser
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    assert sorted(entry.key for entry in storage.list("commits/")) == sorted(f"commits/{n}" for n in range(21))


def test_a_listing_that_ends_early_is_an_error(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for the whole, what it leaves out would look as if it had never been."""
    monkeypatch.setattr(remotes3, "PAGE", 7)
    bucket = moto_server.new_bucket()
    for number in range(9):
        moto_server.client.put_object(Bucket=bucket, Key=f"store/commits/{number}", Body=b"")
    call = remotes3.S3Client.call

    def without_token(self: remotes3.S3Client, operation: str, **arguments: Any) -> Any:
        answer = call(self, operation, **arguments)
        return {name: value for name, value in answer.items() if name != "NextContinuationToken"}

    monkeypatch.setattr(remotes3.S3Client, "call", without_token)
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    with pytest.raises(StorageError, match=r"ends the listing of 'commits/' early"):
        list(storage.list("commits/"))


def test_a_bucket_that_is_not_there_is_not_empty(moto_server: Server) -> None:
    storage = open_storage("s3://nobody-made-this/store", moto_server.options)
    for look in (lambda: list(storage.list("commits/")), lambda: storage.list_folder("objects")):
        with pytest.raises(CasckptError, match="nobody-made-this"):
            look()


def test_a_delete_in_a_bucket_with_versions_frees_the_bytes(moto_server: Server) -> None:
    bucket, client = moto_server.new_bucket(), moto_server.client
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    storage = open_storage(f"s3://{bucket}/store", moto_server.options)
    storage.put("objects/a", b"1")
    storage.put("objects/ab", b"2")
    storage.delete("objects/a")
    left = client.list_object_versions(Bucket=bucket)
    assert [one["Key"] for one in left["Versions"]] == ["store/objects/ab"]
    assert "DeleteMarkers" not in left
    storage.put("objects/a", b"3")
    assert storage.get("objects/a", limit=1) == b"3"
