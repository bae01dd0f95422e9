"""Storages over a network keep the contract: against an imitation of S3, and against a real server."""

from __future__ import annotations

import pytest

from casckpt.storage import open_storage
from casckpt.storage.base import ObjectStore
from tests.storage.contract import Peek, SharedContract
from tests.support.servers import Server


class S3Contract(SharedContract):
    """The promises on a bucket of ``server``, which a subclass gives."""

    @pytest.fixture
    def bucket(self, server: Server) -> str:
        return server.new_bucket()

    @pytest.fixture
    def storage(self, server: Server, bucket: str) -> ObjectStore:
        return open_storage(f"s3://{bucket}/deep/store", server.options)

    @pytest.fixture
    def peek(self, server: Server, bucket: str) -> Peek:
        return lambda key: server.look(bucket, f"deep/store/{key}")


class TestMoto(S3Contract):
    @pytest.fixture
    def server(self, moto_server: Server) -> Server:
        return moto_server


class TestSeaweed(S3Contract):
    @pytest.fixture
    def server(self, seaweed_server: Server) -> Server:
        return seaweed_server
