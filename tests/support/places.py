"""Storage services: which are safe, how they differ from S3 (`tests.support.quirks`), and how that is known.

tests/store/test_places.py runs a store on an imitation of each place that is called safe, and checks that a save is
refused on the others. docs/site/page_tables.py makes the table of docs/remote.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.request import Request, urlopen

from tests.support import quirks
from tests.support.proxy import Proxy
from tests.support.quirks import Quirk
from tests.support.servers import Server

_NUMBERS = count()
_NO_CHECKSUMS: Final = MappingProxyType(
    {
        "config_kwargs": {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
    }
)
_AWS = "https://docs.aws.amazon.com/AmazonS3/latest/userguide"
_REPLACES = "a second create replaced the first one without an error"


@dataclass(frozen=True)
class Place:
    """A service, or a bucket with certain settings.

    ``tested``: what the tests run on, if not on an imitation. ``source``: where the quirks are documented, if it is
    imitated. ``options``: the storage_options that it needs. ``unsafe``: the error of a save.
    """

    name: str
    tested: str = ""
    source: str = ""
    quirks: tuple[type[Quirk], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    unsafe: str = ""
    note: str = ""

    @property
    def row(self) -> str:
        """The row of the table."""
        safe = "**no**, refused" if self.unsafe else "yes"
        tested = self.tested or (f"[imitated]({self.source})" if self.source else "imitated")
        differs = [(quirk.__doc__ or "").strip() for quirk in self.quirks]
        if self.options:
            differs.append(f"set {', '.join(f'`{name}={value}`' for name, value in self.options.items())}")
        return f"| {self.name} | {safe} | {tested} | {'; '.join([*differs, *filter(None, [self.note])])} |"


REAL: Final = (
    Place("SeaweedFS 4.48", "all tests run on it", note="earlier versions let two conditional puts succeed"),
    Place("moto 5.2", "all tests run on it", note="a mock server that keeps nothing"),
    Place("fake-gcs-server 1.54 (`gs://`), Azurite 3.35 (`az://`)", "the storage tests run on these emulators"),
    Place("Ceph RGW 16", "tried once"),
    Place("rclone `serve s3` 1.75", "tests run on it", unsafe=_REPLACES, note="ignores the condition of a put"),
    Place("JuiceFS gateway 1.4", "tried once", unsafe=_REPLACES, note="ignores the condition of a put"),
    Place("Swift s3api 2.30", "tried once", unsafe="501", note="refuses puts with a condition (501)"),
    Place(
        "zonal bucket of Google (`gs://`)",
        "tests run gcsfs without the service",
        unsafe=_REPLACES,
        note="gcsfs ignores the condition of a put, and does not report failed writes",
    ),
)
"""Places that tests do not imitate."""
IMITATED: Final = (
    Place("Amazon S3", source=f"{_AWS}/conditional-writes.html"),
    Place(
        "Amazon S3 Express One Zone", source=f"{_AWS}/s3-express-differences.html",
        quirks=(quirks.ListsFolders, quirks.ListsInNoOrder, quirks.ListsFew, quirks.HasOwnEtags),
        note="its session credentials are not imitated",
    ),
    # The gateway "does not parse" frames, which may mean worse or better than here, and redirects only other clients.
    Place(
        "Hugging Face bucket, with `endpoint_url=https://s3.hf.co/NAMESPACE`",
        source="https://huggingface.co/docs/hub/storage-buckets-s3",
        quirks=(
            quirks.HasNamespace, quirks.DropsMetadata, quirks.StoresFrames, quirks.RedirectsReads,
            quirks.ListsOnlyV2,
        ),
        options=_NO_CHECKSUMS,
    ),
    # https://github.com/amd/gaia/pull/3029 describes the refusal.
    Place(
        "Cloudflare R2", source="https://developers.cloudflare.com/r2/api/s3/conditional-operations/",
        quirks=(quirks.RefusesFrames,), options=_NO_CHECKSUMS,
    ),
    Place(
        "CoreWeave", source="https://docs.coreweave.com/products/storage/object-storage/buckets/conditional-requests"
    ),
    Place("Scaleway", source="https://www.scaleway.com/en/docs/object-storage/api-cli/using-conditional-writes/"),
    Place("MinIO", source="https://github.com/minio/minio/issues/20346"),
    Place(
        "Google Cloud Storage through `s3://`", source="https://docs.cloud.google.com/storage/docs/request-preconditions",
        quirks=(quirks.IgnoresConditions,), unsafe=_REPLACES, note="use `gs://`",
    ),
    Place(
        "Alibaba OSS", source="https://github.com/tobi/walgit/issues/67", quirks=(quirks.RefusesConditions,),
        unsafe="the server does not support conditional puts",
    ),
    Place(
        "a server that checks before it writes", quirks=(quirks.LosesRaces,),
        unsafe="concurrent creates of one key succeeded",
    ),
    Place(
        "a server whose listings lag", quirks=(quirks.ListsLate,), unsafe="does not list .*, although it exists",
    ),
    Place(
        "a bucket that requires encryption", source=f"{_AWS}/UsingKMSEncryption.html",
        quirks=(quirks.RequiresEncryption, quirks.HasOwnEtags),
        options={"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}},
    ),
    Place("a bucket with versions", source=f"{_AWS}/Versioning.html", quirks=(quirks.KeepsVersions,)),
    Place(
        "a bucket with object lock", source=f"{_AWS}/object-lock.html", quirks=(quirks.LocksObjects,),
        note="gc frees no space until the lock ends",
    ),
    Place(
        "a bucket that expires objects", source=f"{_AWS}/object-lifecycle-mgmt.html", quirks=(quirks.ExpiresObjects,),
        unsafe="deletes this store's objects by age", note="refused if the credentials may read the rules",
    ),
)  # fmt: skip
"""Places that tests imitate from their documentation. No test has reached the real ones."""


@dataclass(frozen=True)
class Imitation:
    """A running imitation. ``url``: of a store in a new bucket. ``bucket``: its name on the server behind the proxy."""

    proxy: Proxy
    url: str
    options: Mapping[str, Any]


@contextmanager
def imitated(place: Place, server: Server, certificate: Path) -> Iterator[Imitation]:
    """Imitate a place in front of moto. ``certificate``: for quirks of https."""
    filters = [quirk() for quirk in place.quirks]
    bucket = f"imitation-{next(_NUMBERS)}{''.join(quirk.suffix for quirk in filters)}"
    headers = {name: value for quirk in filters for name, value in quirk.headers.items()}
    urlopen(Request(f"{server.endpoint}/{bucket}", b"", headers, method="PUT")).close()
    for quirk in filters:
        quirk.prepare(server.client, bucket)
    is_tls = any(quirk.needs_https for quirk in filters)
    with Proxy(server.endpoint, certificate if is_tls else None, filters) as proxy:
        endpoint = f"{proxy.endpoint}{''.join(quirk.path for quirk in filters)}"
        options = {**server.options, "endpoint_url": endpoint}
        if is_tls:
            options["client_kwargs"] = {"verify": str(certificate)}
        yield Imitation(proxy, f"s3://{bucket}/team/store", options)


def table() -> str:
    """Return the table of places."""
    lines = ["| place | safe for several writers | tested | differences from S3 |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(place.row for place in (*REAL, *IMITATED))])
