"""Network storage fulfills the contract. It is tested against an S3 emulator and against a real server."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from casckpt.storage import open_storage
from casckpt.storage.base import ObjectStore
from tests.storage.contract import Peek, SharedContract, StorageContract
from tests.support.afresh import afresh
from tests.support.servers import Server


class S3Contract(SharedContract):
    """The contract in a bucket on ``server``, which a subclass provides."""

    @pytest.fixture
    def bucket(self, server: Server) -> str:
        return server.new_place()

    @pytest.fixture
    def storage(self, server: Server, bucket: str) -> ObjectStore:
        return open_storage(f"s3://{bucket}/deep/store", server.options)

    @pytest.fixture
    def peek(self, server: Server, bucket: str) -> Peek:
        return lambda key: server.look(bucket, f"deep/store/{key}")


@pytest.mark.soak  # the real server below covers the same
class TestMoto(S3Contract):
    @pytest.fixture
    def server(self, moto_server: Server) -> Server:
        return moto_server


class TestSeaweed(S3Contract):
    @pytest.fixture
    def server(self, seaweed_server: Server) -> Server:
        return seaweed_server


class TestSingleWriter(StorageContract):
    """A server that ignores the condition keeps all guarantees for a single writer, except those about races."""

    test_exactly_one_of_several_threads_creates_a_key: Callable[..., None] | None = None  # type: ignore[assignment]  # not promised

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


@pytest.mark.parametrize("make", [lambda: multiprocessing.get_context("fork"), afresh], ids=["fork", "afresh"])
def test_a_different_process_can_use_storage_that_was_pickled(make: Callable[[], Any], moto_server: Server) -> None:
    """A fork copies neither the client's thread nor its connections, so the child creates new ones."""
    storage = open_storage(f"s3://{moto_server.new_bucket()}/store", moto_server.options)
    storage.put("a", b"1")
    child = make().Process(target=_put_in_child, args=(storage, "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test needs threads
        child.start()
    child.join()
    assert child.exitcode == 0
    assert storage.get("b", limit=100) == b"from the child"
    assert storage.get("a", limit=100) == b"1"


def test_the_exit_of_a_forked_child_does_not_affect_its_parent(moto_server: Server) -> None:
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
