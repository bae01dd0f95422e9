"""Differences between S3 and servers that call themselves compatible, each of them a filter for `Proxy`.

The docstring of a quirk completes the sentence "this server ...", also in the table of docs/remote.md.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from hashlib import sha256
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Request:
    """A request. A quirk may change it. ``target``: the path with the query, as sent."""

    method: str
    target: str
    headers: Message
    body: bytes

    @property
    def path(self) -> str:
        """The decoded path without the query."""
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> Mapping[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    @property
    def creates(self) -> bool:
        """Whether this is a put that must not replace an object."""
        return self.method == "PUT" and "If-None-Match" in self.headers

    @property
    def is_framed(self) -> bool:
        """Whether the body consists of frames that end with a checksum."""
        return "X-Amz-Trailer" in self.headers


@dataclass
class Answer:
    """The answer to a request."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    data: bytes

    def with_text(self, change: Callable[[str], str]) -> Answer:
        """Return the answer with a different body."""
        headers = [(name, value) for name, value in self.headers if name.lower() != "content-length"]
        return Answer(self.status, self.reason, headers, change(self.data.decode()).encode())


def refusal(status: int, code: str, message: str = "No.", **headers: str) -> Answer:
    """Return an error of S3."""
    data = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, code, [("Content-Type", "application/xml"), *headers.items()], data.encode())


class Quirk:
    """is Amazon S3."""

    headers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Headers of the request that creates a bucket."""
    suffix: ClassVar[str] = ""
    """The end of the names of buckets."""
    path: ClassVar[str] = ""
    """The path of the endpoint."""
    needs_https: ClassVar[bool] = False

    def prepare(self, client: Any, bucket: str) -> None:
        """Change a new bucket with a boto3 client."""

    def ask(self, request: Request) -> Answer | None:
        """Change the request, or answer it instead of the server."""
        return None

    def tell(self, request: Request, answer: Answer) -> Answer:
        """Return the answer for the client."""
        return answer


# puts


class IgnoresConditions(Quirk):
    """ignores the condition of a put"""

    def ask(self, request: Request) -> Answer | None:
        if request.creates:
            del request.headers["If-None-Match"]
        return None


class RefusesConditions(Quirk):
    """refuses puts with a condition (501)"""

    def ask(self, request: Request) -> Answer | None:
        message = "A header you provided implies functionality that is not implemented"
        return refusal(501, "NotImplemented", message) if request.creates else None


@dataclass
class LosesRaces(Quirk):
    """lets several concurrent creates of a key succeed"""

    _together: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    def ask(self, request: Request) -> Answer | None:
        if not request.creates or not request.path.endswith("-race"):
            return None
        try:
            self._together.wait(timeout=5)
        except threading.BrokenBarrierError:
            return None
        del request.headers["If-None-Match"]
        return None


class DropsMetadata(Quirk):
    """drops the metadata of objects"""

    def ask(self, request: Request) -> Answer | None:
        for name in [name for name in request.headers if name.lower().startswith("x-amz-meta-")]:
            del request.headers[name]
        return None


class StoresFrames(Quirk):
    """stores the checksum of an upload in the object, unless the client is told to send none"""

    needs_https = True

    def ask(self, request: Request) -> Answer | None:
        if request.is_framed:
            for name in [*request.headers]:
                if re.match(r"content-encoding|transfer-encoding|x-amz-(trailer|decoded|sdk|content)", name.lower()):
                    del request.headers[name]
            request.headers["Content-Length"] = str(len(request.body))
        return None


class RefusesFrames(Quirk):
    """refuses uploads with a checksum (401), unless the client is told to send none"""

    needs_https = True

    def ask(self, request: Request) -> Answer | None:
        return refusal(401, "Unauthorized") if request.is_framed else None


class RequiresEncryption(Quirk):
    """has a policy that denies puts without an encryption header"""

    def ask(self, request: Request) -> Answer | None:
        if request.method != "PUT" or "X-Amz-Server-Side-Encryption" in request.headers:
            return None
        return refusal(403, "AccessDenied", "not authorized, with an explicit deny in a resource-based policy")


class HasOwnEtags(Quirk):
    """has ETags that are not the hash of an object"""

    def tell(self, request: Request, answer: Answer) -> Answer:
        headers = [(name, _other(value) if name.lower() == "etag" else value) for name, value in answer.headers]
        answer = Answer(answer.status, answer.reason, headers, answer.data)
        return answer.with_text(_other) if _is_listing(request) else answer


def _other(text: str) -> str:
    """Return a text with other ETags."""
    return re.sub(r'(?<=[";])[0-9a-f]{32}(?=["&])', lambda found: sha256(found[0].encode()).hexdigest()[:32], text)


# listings and reads


def _is_listing(request: Request) -> bool:
    return request.method == "GET" and "list-type" in request.query


class ListsInNoOrder(Quirk):
    """lists objects in no order"""

    def tell(self, request: Request, answer: Answer) -> Answer:
        if not _is_listing(request):
            return answer
        return answer.with_text(lambda text: _mixed(_mixed(text, "Contents"), "CommonPrefixes"))


def _mixed(text: str, tag: str) -> str:
    entries = re.findall(rf"<{tag}>.*?</{tag}>", text, re.DOTALL)
    order = iter(sorted(entries, key=lambda entry: sha256(entry.encode()).digest()))
    return re.sub(rf"<{tag}>.*?</{tag}>", lambda _: next(order), text, flags=re.DOTALL)


class ListsFolders(Quirk):
    """lists only prefixes that end with a slash"""

    suffix = "--usw2-az1--x-s"

    def ask(self, request: Request) -> Answer | None:
        prefix = request.query.get("prefix", [""])[0]
        return refusal(400, "InvalidRequest") if _is_listing(request) and prefix and prefix[-1] != "/" else None


class ListsFew(Quirk):
    """returns listings in short pages, some of them empty"""

    def ask(self, request: Request) -> Answer | None:
        token = request.query.get("continuation-token")
        if _is_listing(request) and token is None:
            text = "<IsTruncated>true</IsTruncated><NextContinuationToken>first</NextContinuationToken>"
            data = f"<ListBucketResult>{text}</ListBucketResult>".encode()
            return Answer(200, "OK", [("Content-Type", "application/xml")], data)
        request.target = re.sub(r"&?continuation-token=first\b", "", request.target)
        request.target = re.sub(r"max-keys=\d+", "max-keys=3", request.target)
        return None


@dataclass
class ListsLate(Quirk):
    """lists new objects after a while"""

    _new: list[str] = field(default_factory=list)

    def tell(self, request: Request, answer: Answer) -> Answer:
        if request.method == "PUT" and answer.status == 200:
            self._new.append(f"<Key>{request.path.split('/', 2)[2]}</Key>")
        return answer.with_text(self._without_newest) if _is_listing(request) else answer

    def _without_newest(self, text: str) -> str:
        entries = re.findall(r"<Contents>.*?</Contents>", text, re.DOTALL)
        for entry in entries:
            if any(key in entry for key in self._new[-2:]):
                text = text.replace(entry, "")
        return text


class ListsOnlyV2(Quirk):
    """lists objects only with ListObjectsV2, and has no settings of buckets"""

    def ask(self, request: Request) -> Answer | None:
        settings = {"versioning", "versions", "object-lock", "lifecycle", "uploads"} & request.query.keys()
        old = request.path.count("/") == 1 and request.method == "GET" and "list-type" not in request.query
        return refusal(501, "NotImplemented") if settings or old else None


class RedirectsReads(Quirk):
    """redirects reads to signed URLs of another server"""

    def prepare(self, client: Any, bucket: str) -> None:
        self._client = client

    def ask(self, request: Request) -> Answer | None:
        bucket, _, key = request.path.removeprefix("/").partition("/")
        if request.method != "GET" or not key:
            return None
        url = self._client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})
        return Answer(302, "Found", [("Location", url)], b"")


class HasNamespace(Quirk):
    """has an endpoint with a path"""

    path = "/team"

    def ask(self, request: Request) -> Answer | None:
        if not request.target.startswith(f"{self.path}/"):
            return refusal(404, "NoSuchBucket")
        request.target = request.target.removeprefix(self.path)
        return None


# settings of buckets


class KeepsVersions(Quirk):
    """keeps old versions of objects"""

    def prepare(self, client: Any, bucket: str) -> None:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})


class LocksObjects(Quirk):
    """locks new objects for days"""

    headers = MappingProxyType({"x-amz-bucket-object-lock-enabled": "true"})

    def prepare(self, client: Any, bucket: str) -> None:
        rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 3}}
        lock = {"ObjectLockEnabled": "Enabled", "Rule": rule}
        client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=lock)


class ExpiresObjects(Quirk):
    """has a lifecycle rule that deletes objects by age"""

    def prepare(self, client: Any, bucket: str) -> None:
        rule = {"ID": "scratch", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
