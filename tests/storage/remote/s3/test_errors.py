"""Rejected requests: credentials are looked up again, and errors name the setting to change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import ClientError, FlexibleChecksumError

from casckpt.errors import StorageError, Unsupported
from casckpt.storage.remote.patience import Backoff, Patience
from casckpt.storage.remote.s3.client import BoundedSession, S3Client
from casckpt.storage.remote.s3.errors import explain
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from tests.support.servers import Server

Refuses = Callable[[Any], "tuple[int, str, str] | None"]


class _Body:
    """A response body as aiohttp represents it."""

    def __init__(self, code: str, message: str) -> None:
        self._data = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()

    async def read(self) -> bytes:
        return self._data


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Refuses], None]:
    """Make the server reject some requests. The argument specifies which requests, and how."""
    real = AIOHTTPSession.send

    def set_up(refuses: Refuses) -> None:
        async def send(self: Any, request: Any) -> Any:
            refusal = refuses(request)
            if refusal is None:
                return await real(self, request)
            status, *said = refusal
            return AioAWSResponse(request.url, status, {}, _Body(*said))

        monkeypatch.setattr(BoundedSession, "send", send)

    return set_up


def store_of(server: Server, **options: Any) -> RemoteStore:
    """Return a new store without retries that uses only credentials from the environment."""
    options = {name: value for name, value in server.options.items() if name not in ("key", "secret")} | options
    return RemoteStore(RemoteLocation("s3", f"{server.new_place()}/store", options), backoff=Backoff(attempts=1))


class Expiring:
    """A server that knows one access key. When it rejects a different key, ``renewed`` appears in the environment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str, renewed: str = "NEW") -> None:
        self._monkeypatch, self._code, self._renewed = monkeypatch, code, renewed
        self.refused = 0
        self._set("OLD")

    def _set(self, key: str) -> None:
        self._monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        self._monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    def __call__(self, request: Any) -> tuple[int, str, str] | None:
        signed = request.headers.get("Authorization", b"")
        if "Credential=NEW/" in (signed.decode() if isinstance(signed, bytes) else signed):
            return None
        self.refused += 1
        self._set(self._renewed)
        return 400, self._code, "The provided token has expired."


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
def test_expired_credentials_are_looked_up_again(
    code: str, moto_server: Server, refusing: Callable[[Refuses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expiring = Expiring(monkeypatch, code)
    storage = store_of(moto_server)
    refusing(expiring)
    storage.put("a", b"data")
    assert expiring.refused == 1
    assert storage.get("a", limit=9) == b"data"
    assert storage.size("a") == 4
    assert expiring.refused == 1


def test_the_size_is_found_after_credentials_expire_in_a_head_request(
    moto_server: Server, refusing: Callable[[Refuses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expiring = Expiring(monkeypatch, "ExpiredToken")
    storage = store_of(moto_server)
    storage.put("a", b"data")
    refusing(expiring)
    assert storage.size("a") == 4


def test_threads_whose_credentials_expire_together_share_a_session(
    moto_server: Server, refusing: Callable[[Refuses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expiring, made = Expiring(monkeypatch, "ExpiredToken"), []
    storage = store_of(moto_server)
    refusing(expiring)
    client = storage._clients.get()
    assert isinstance(client, S3Client)
    real = client._fs.set_session

    async def counted(*, refresh: bool = False) -> Any:
        if refresh:
            made.append(refresh)
        return await real(refresh=refresh)

    monkeypatch.setattr(client._fs, "set_session", counted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: storage.put(f"a{number}", b"data"), range(8)))
    assert len(made) == 1


def test_credentials_that_remain_invalid_in_a_new_session_raise_an_error(
    moto_server: Server, refusing: Callable[[Refuses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expiring = Expiring(monkeypatch, "ExpiredToken", renewed="OLDER")
    storage = store_of(moto_server)
    refusing(expiring)
    with pytest.raises(StorageError, match="the credentials have expired: provide different ones"):
        storage.put("a", b"data")
    assert expiring.refused == 2


def test_passed_credentials_are_not_looked_up_again(
    moto_server: Server, refusing: Callable[[Refuses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expiring = Expiring(monkeypatch, "ExpiredToken")
    storage = store_of(moto_server, key="OLD", secret="secret")
    refusing(expiring)
    with pytest.raises(StorageError, match="the credentials have expired: provide different ones"):
        storage.put("a", b"data")
    assert expiring.refused == 1


# checksums


def knows_no_checksums(request: Any) -> tuple[int, str, str] | None:
    """Act as a server that predates the checksums of S3 clients."""
    if any(
        name.lower().startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer")) for name in request.headers
    ):
        return 400, "InvalidArgument", "Unsupported header 'x-amz-sdk-checksum-algorithm'"
    return None


def test_the_settings_named_by_the_error_help_with_servers_without_checksums(
    moto_server: Server, refusing: Callable[[Refuses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(knows_no_checksums)
    with pytest.raises(StorageError) as caught:
        store_of(moto_server, **_KEYS).put("a", b"data")
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        assert name in str(caught.value)
        assert f"AWS_{name.upper()}" in str(caught.value)
    options = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    store_of(moto_server, **_KEYS, config_kwargs=options).put("a", b"data")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    store_of(moto_server, **_KEYS).put("a", b"data")


_KEYS = {"key": "key", "secret": "secret"}


def answer(status: int, code: str, message: str = "") -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "PutObject",
    )


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (answer(400, "XAmzContentSHA256Mismatch"), True),
        (answer(400, "InvalidRequest", "x-amz-content-sha256 must be UNSIGNED-PAYLOAD"), False),
        (answer(501, "NotImplemented", "Transfer-Encoding: aws-chunked is not implemented"), False),
        (answer(401, "Unauthorized"), False),
        (answer(411, "MissingContentLength", "You must provide the Content-Length HTTP header."), False),
        (FlexibleChecksumError(error_msg="Expected checksum x did not match calculated checksum y"), True),
    ],
)
def test_errors_about_checksums_name_the_settings_to_change(error: Exception, *, again: bool) -> None:
    found = explain(error)
    assert "AWS_REQUEST_CHECKSUM_CALCULATION" in found.why
    assert "conditional puts" not in found.why
    assert found.again == again


@pytest.mark.parametrize(
    ("status", "code", "full"),
    [
        (507, "InsufficientStorage", True),
        (507, "XMinioStorageFull", True),
        (400, "XMinioAdminBucketQuotaExceeded", True),
        (403, "QuotaExceeded", True),
        (403, "AccessDenied", False),
        (503, "SlowDown", False),
    ],
)
def test_a_full_server_and_a_used_up_quota_are_recognised(status: int, code: str, full: bool) -> None:
    found = explain(answer(status, code))
    assert found.full is full
    assert ("raise the quota" in found.why) is full
    assert not (full and found.again)


def test_a_denied_encryption_key_is_named() -> None:
    message = "User: x is not authorized to perform: kms:GenerateDataKey on this resource"
    assert "need kms:GenerateDataKey and kms:Decrypt" in explain(answer(403, "AccessDenied", message)).why
    assert "kms" not in explain(answer(403, "AccessDenied", "Access Denied")).why


def test_an_unspecific_error_names_both_features_that_may_be_missing() -> None:
    found = explain(answer(501, "NotImplemented", "A header you provided implies functionality that is not there"))
    assert "single_writer" in found.unpromised
    assert "AWS_REQUEST_CHECKSUM_CALCULATION" in found.why
    assert "checksum" not in explain(answer(403, "AccessDenied", "Access Denied")).why


class Refusing:
    """A location and its client, which a server without conditional puts refuses."""

    url, failures, patience, explain = "s3://bucket/store", (ClientError,), Patience(), staticmethod(explain)

    def __call__(self) -> Any:
        return self

    def renew(self, error: Exception, began: float) -> bool:
        return False

    def size(self, key: str) -> int:
        raise answer(501, "NotImplemented")


@pytest.mark.parametrize("single", [True, False])
def test_a_promise_that_was_given_is_not_advised(single: bool) -> None:
    with pytest.raises(Unsupported, match="AWS_REQUEST_CHECKSUM_CALCULATION") as caught:
        RemoteStore(Refusing(), single_writer=single).size("key")
    assert ("single_writer" in str(caught.value)) is not single


def test_a_denied_request_shows_what_the_server_says() -> None:
    for code, message in (("AccessDenied", "Object is WORM protected"), ("InvalidObjectState", "in GLACIER")):
        why = explain(answer(403, code, message)).why
        assert why.endswith(f"s3:DeleteObject (the server answers 403 {code} {message})")
