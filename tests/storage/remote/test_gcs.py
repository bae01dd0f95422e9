"""Google Cloud Storage through gcsfs: the same guarantees, tested against an emulator that supports conditions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from aiohttp import ClientTimeout

import casckpt
from casckpt.errors import Unsupported
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


class ZonalBuckets:
    """Stands in for the API that describes buckets."""

    def __init__(self, absent: type[Exception]) -> None:
        self._absent = absent

    async def get_storage_layout(self, **_: Any) -> Any:
        return SimpleNamespace(location_type="zone", hierarchical_namespace=SimpleNamespace(enabled=True))

    async def get_folder(self, *_: Any, **__: Any) -> Any:
        raise self._absent("no such folder")

    async def list_folders(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        async def none() -> AsyncIterator[Any]:
            for folder in list[Any]():
                yield folder

        return none()


class Writer:
    """Stands in for the stream that writes an object.

    As the service does, it replaces objects unless it is given a generation.
    """

    endpoint = ""

    def __init__(self, client: Any, bucket_name: str, object_name: str, generation: int | None, **_: Any) -> None:
        condition = {} if generation is None else {"ifGenerationMatch": generation}
        query = urlencode({"uploadType": "media", "name": object_name, **condition})
        self._url = f"{self.endpoint}/upload/storage/v1/b/{bucket_name}/o?{query}"
        self._data = bytearray()

    async def open(self) -> None:
        """Do nothing."""

    async def append(self, data: bytes) -> None:
        self._data += data

    async def close(self, *, finalize_on_close: bool) -> None:
        urlopen(Request(self._url, bytes(self._data), {"Content-Type": "application/octet-stream"})).close()


def test_zonal_buckets_are_refused_because_gcsfs_replaces_objects_there(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended, utils = import_module("gcsfs.extended_gcsfs"), import_module("gcsfs.zb_hns_utils")
    registry: Any = import_module("fsspec.registry")  # fsspec has a mapping of the same name

    async def control_plane(_: Any) -> ZonalBuckets:
        return ZonalBuckets(extended.api_exceptions.NotFound)

    fs = extended.ExtendedGcsFileSystem
    monkeypatch.setitem(registry._registry, "gs", fs)
    monkeypatch.setattr(fs, "_get_control_plane_client", control_plane)
    monkeypatch.setattr(utils, "AsyncAppendableObjectWriter", Writer)
    monkeypatch.setattr(Writer, "endpoint", cloud.options["endpoint_url"])
    url = f"gs://{cloud.new_bucket()}/store"
    store = casckpt.open(url, storage_options=cloud.options, cache_dir=tmp_path)
    with pytest.raises(Unsupported, match="a second create replaced the first one without an error"):
        store.save({"a": 1}, step=0)
    (finding,) = store.repository.storage.examine()  # type: ignore[attr-defined]  # it is remote
    assert (finding.ok, finding.found.partition(":")[0]) == (False, "the bucket is zonal")
