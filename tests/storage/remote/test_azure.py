"""Azure storage through adlfs: the same guarantees, tested against Azurite where it is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from casckpt.errors import StorageError
from casckpt.storage import open_storage
from tests.storage.remote.cloud_contract import CloudContract
from tests.support import clouds
from tests.support.clouds import Cloud

pytest.importorskip("adlfs")
if shutil.which("azurite-blob") is None:
    pytest.skip("azurite-blob is not on the PATH: npm install --global azurite", allow_module_level=True)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with clouds.azure(tmp_path_factory.mktemp("azure")) as cloud:
        yield cloud


class TestAzure(CloudContract):
    """The contract on Azurite."""


def test_wrong_credentials_are_reported(cloud: Cloud) -> None:
    wrong = cloud.options["connection_string"].replace("AccountKey=Y2", "AccountKey=Y3")
    storage = open_storage(f"az://{cloud.new_bucket()}/store", {"connection_string": wrong})
    for act in (lambda: storage.put("a", b"1"), lambda: storage.size("a"), lambda: list(storage.list(""))):
        with pytest.raises(StorageError, match="check the credentials") as caught:
            act()
        assert "AccountKey" not in str(caught.value)
