"""Parses the URLs and storage_options of remote storage, without creating or reading anything."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from casckpt.errors import CasckptError, InvalidInput, StorageError, Unsupported
from casckpt.storage.remote.client import Client
from casckpt.storage.remote.patience import Patience
from casckpt.storage.remote.store import RemoteStore

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_NEEDS = {
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
}  # fmt: skip
_EXTRAS = {"gcsfs": "gcs", "adlfs": "azure", "s3fs": "s3"}
_SHORTEST = {"s3": 3, "gs": 3, "gcs": 3}  # minimum length of a bucket name


@dataclass(frozen=True)
class RemoteLocation:
    """The URL and the options of a remote store. ``options`` may contain secrets, so they are never shown."""

    scheme: str
    rest: str
    options: Mapping[str, Any] = field(repr=False)

    @property
    def url(self) -> str:
        """The URL without a trailing slash."""
        return f"{self.scheme}://{self.rest}"

    def __call__(self) -> Client:
        """Make a client for this process. Raises `Unsupported` if its package is missing or refuses the options."""
        try:
            return self._client()
        except CasckptError:
            raise  # some of these are also ValueErrors or OSErrors
        except ImportError as error:
            raise Unsupported(_missing(self.scheme)) from error
        except OSError as error:
            raise StorageError(f"{self.url} cannot be opened: {error}; check the network and try again") from error
        except (TypeError, ValueError, KeyError) as error:
            names = ", ".join(sorted(self.options)) or "none"
            raise InvalidInput(f"{self.url} cannot be opened with the storage_options {names}: {error}") from None

    def _client(self) -> Client:
        patience, options = Patience.of(self.options)
        if self.scheme != "s3":
            from casckpt.storage.remote.fsspec_client import FsspecClient

            return FsspecClient(self.url, options, patience)
        from casckpt.storage.remote.s3.client import S3Client

        bucket, _, prefix = self.rest.partition("/")
        return S3Client(bucket, prefix and f"{prefix}/", options, patience)


def open_remote(scheme: str, rest: str, options: Mapping[str, Any], *, single_writer: bool = False) -> RemoteStore:
    """Open the store at ``scheme://rest``. Raises `InvalidInput`, and `Unsupported` if a package is missing."""
    rest = rest.rstrip("/")
    host, *parts = rest.split("/")
    if "@" in host:
        raise InvalidInput(f"a {scheme}:// URL must not contain credentials: pass them in storage_options")
    if scheme in ("http", "https"):
        raise Unsupported(
            f"casckpt cannot open a store on a web server ({scheme}://{host[:200]}): copy the store's folder to this "
            "machine, or mount it, and open that folder"
        )
    if any(character in rest for character in "?#\\") or "::" in rest:
        raise InvalidInput(
            f"the {scheme}:// URL of a store must not have a query or fragment: pass {scheme}://bucket/prefix"
        )
    if not rest.isprintable():
        raise InvalidInput(f"{rest[:200]!r} contains invisible characters: correct the {scheme}:// URL")
    if host and len(host) < _SHORTEST.get(scheme, 0):
        raise InvalidInput(
            f"{scheme}://{rest[:200]}: the bucket name {host!r} is too short, because it must have at least "
            f"{_SHORTEST[scheme]} characters: correct the URL"
        )
    if any(part in ("", ".", "..") for part in parts) or not _BUCKET.fullmatch(host.partition(":")[0]):
        raise InvalidInput(f"{scheme}://{rest[:200]} does not name a store: pass {scheme}://bucket/prefix")
    package = _NEEDS.get(scheme)
    if package and importlib.util.find_spec(package) is None:
        raise Unsupported(_missing(scheme))
    return RemoteStore(RemoteLocation(scheme, rest, dict(options)), single_writer=single_writer)


def is_known(scheme: str) -> bool:
    """Return whether fsspec supports URLs with this scheme."""
    from fsspec.registry import known_implementations, registry

    return scheme in registry or scheme in known_implementations


def _missing(scheme: str) -> str:
    package = _NEEDS.get(scheme)
    if package is None:
        return f"{scheme}:// URLs need an additional package: pip install the package that fsspec names for them"
    return f"{scheme}:// URLs need the package {package}: pip install 'casckpt[{_EXTRAS[package]}]'"
