"""Google Cloud Storage through gcsfs: the same guarantees, tested against an emulator that supports conditions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from aiohttp import ClientTimeout

from casckpt.storage.remote.urls import RemoteLocation
from tests.storage.remote.cloud_contract import CloudContract
from tests.support import clouds
from tests.support.clouds import Cloud

if find_spec("gcsfs") is None:
    pytest.skip("gcsfs is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with clouds.google(tmp_path_factory.mktemp("gcs")) as cloud:
        yield cloud


class TestGcs(CloudContract):
    """The contract on fake-gcs-server."""


def test_the_client_times_out_earlier_than_aiohttp() -> None:
    for options, seconds in ({}, 60), ({"requests_timeout": ClientTimeout(sock_read=7)}, 7):
        client: Any = RemoteLocation("gs", "bucket/store", {"token": "anon", **options})()
        assert client._fs.requests_timeout.sock_read == seconds
