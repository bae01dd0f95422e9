"""Google's storage through gcsfs: the same promises, against an imitation that knows conditions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage.cloud_contract import CloudContract
from tests.support import clouds
from tests.support.clouds import Cloud

pytest.importorskip("gcsfs")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with pytest.MonkeyPatch.context() as patch:
        # gcsfs would ask an interface that the imitation lacks what kind of bucket this is, for minutes
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        with clouds.google(tmp_path_factory.mktemp("gcs")) as cloud:
            yield cloud


class TestGcs(CloudContract):
    """On fake-gcs-server."""
