"""Turns errors from S3 clients and servers into messages with advice."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import ConnectionError as Unreached
from botocore.parsers import ResponseParserError

from casckpt.base.text import in_one_line
from casckpt.errors import NotFound, StorageError, Unsupported
from casckpt.storage.failures import ROOM, is_full
from casckpt.storage.remote.client import ExplainedFailure

FAILURES: tuple[type[Exception], ...] = (ClientError, BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError)

T = TypeVar("T")
_LOST = (
    Unreached, HTTPClientError, IncompleteReadError, ResponseStreamingError, ResponseParserError, aiohttp.ClientError,
    OSError,
)  # fmt: skip
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_RANGE = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")
_BUSY = frozenset({408, 409, 429, 500, 502, 503, 504})
# NoSuchKey: some servers return it for concurrent conditional puts; reads handle it earlier
_BUSY_CODES = frozenset({"NoSuchKey", "RequestTimeout", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"})
_GIVE = "provide different ones in storage_options (--storage-option) or in the usual AWS environment"
WITHOUT_CHECKSUMS = (
    "if it does not know the checksums of newer S3 clients, set AWS_REQUEST_CHECKSUM_CALCULATION and "
    "AWS_RESPONSE_CHECKSUM_VALIDATION to when_required in the environment, or request_checksum_calculation and "
    "response_checksum_validation in the config_kwargs of storage_options"
)
_ADVICE = {
    "AccessDenied": "access denied: the credentials need s3:GetObject, s3:PutObject and s3:ListBucket here, and gc "
    "also needs s3:DeleteObject",
    "ExpiredToken": f"the credentials have expired: {_GIVE}",
    "InvalidAccessKeyId": f"the server does not know this access key: {_GIVE}",
    "InvalidToken": f"the session token is not valid: {_GIVE}",
    "SignatureDoesNotMatch": f"the secret key does not match the access key: {_GIVE}",
    "Unauthorized": f"the server does not accept these credentials: {_GIVE}; {WITHOUT_CHECKSUMS}",
    "RequestTimeTooSkewed": "this host's clock is too far off: set it, for example with NTP",
    "PermanentRedirect": "the bucket is in a different region: set that region with storage_options "
    "client_kwargs={'region_name': ...}",
    "EntityTooLarge": "the object is too large for one request: create a store with smaller blobs",
}
_ENDED = frozenset({
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
})  # fmt: skip
_CHECKSUM = re.compile(
    "MissingContentLength|checksum|trailer|aws-chunked|content-?md5|content-?sha-?256", re.IGNORECASE
)
_ENCRYPT = (
    "A policy denies the request. If it requires encryption, set "
    "s3_additional_kwargs={'ServerSideEncryption': 'aws:kms'} in storage_options, or the value that it requires"
)
_TLS = "check that the endpoint supports https and that its certificate is trusted (client_kwargs={'verify': 'ca.pem'})"
_NO_BUCKET = "there is no such bucket: create it first, or correct the URL or the endpoint_url"
_NO_CONDITION = (
    ". If the server does not support conditional puts, two jobs could both create the same key: use a different "
    "server, or promise with single_writer (--single-writer) that no other process writes"
)


def explain(error: Exception) -> ExplainedFailure:
    """Return the cause of one of `FAILURES`."""
    if isinstance(error, ClientError):
        return _explain_answer(error)
    if isinstance(error, _NO_CREDENTIALS):
        return ExplainedFailure(f"no credentials were found: {_GIVE}, or anon=True for a public bucket")
    if isinstance(error, SSLError):
        return ExplainedFailure(f"{in_one_line(error)}; {_TLS}", again=True)
    if isinstance(error, FlexibleChecksumError):
        return ExplainedFailure(f"{in_one_line(error)}; the response was damaged; {WITHOUT_CHECKSUMS}", again=True)
    if isinstance(error, _LOST):
        return ExplainedFailure(f"{in_one_line(error)}; check the network and the endpoint, and try again", again=True)
    return ExplainedFailure(f"{in_one_line(error)}; check the storage_options")


def _explain_answer(error: ClientError) -> ExplainedFailure:
    code, status = str(error.response["Error"].get("Code", "")), status_of(error)
    if code == "NoSuchBucket":
        return ExplainedFailure(_NO_BUCKET, kind=NotFound)
    text = f"{status} {code} {error.response['Error'].get('Message', '')}".strip()
    if _CHECKSUM.search(text):
        again = status in _BUSY or code in _BUSY_CODES
        return ExplainedFailure(f"the server answers {text}; {WITHOUT_CHECKSUMS}", again=again)
    if status == 501 or code == "NotImplemented":
        why = f"the server answers {text}; {WITHOUT_CHECKSUMS}"
        return ExplainedFailure(why, kind=Unsupported, unpromised=_NO_CONDITION)
    if is_full(error, status, code):
        return ExplainedFailure(f"the server answers {text}; {ROOM}", full=True)
    if status in _BUSY or code in _BUSY_CODES:
        return ExplainedFailure(f"the server answers {text}; try again later", again=True)
    if code in _ADVICE or status in (401, 403):
        advice = _ADVICE.get(code, _ADVICE["AccessDenied" if status == 403 else "Unauthorized"])
        if code not in _ADVICE or code == "AccessDenied":
            advice += f" (the server answers {text})"
        return ExplainedFailure(advice + _about_policy(text))
    kind = NotFound if status == 404 else StorageError
    return ExplainedFailure(f"the server answers {text}; check the bucket and the storage_options", kind=kind)


def _about_policy(text: str) -> str:
    """Return more advice for a request that the bucket's encryption key or policy denies."""
    if "kms:" in text:
        return ". They also need kms:GenerateDataKey and kms:Decrypt for the key that encrypts the bucket"
    return f". {_ENCRYPT}" if "explicit deny" in text else ""


async def as_failure(call: Awaitable[T]) -> T:
    """Await a call of the client. Convert errors in looking up credentials to `FAILURES`.

    The client raises a RuntimeError if new credentials have also expired, and a ValueError if a program that prints
    them is interrupted.
    """
    try:
        return await call
    except RuntimeError as error:
        if "refreshed credentials" not in str(error):
            raise
        raise ClientError({"Error": {"Code": "ExpiredToken"}}, "credentials") from error
    except json.JSONDecodeError as error:
        raise CredentialRetrievalError(provider="credential_process", error_msg="no JSON") from error


def is_about_credentials(error: Exception) -> bool:
    """Return whether the server says that the credentials are no longer valid, or the last lookup found none."""
    if not isinstance(error, ClientError):
        return isinstance(error, _NO_CREDENTIALS)
    return error.response["Error"].get("Code") in _ENDED or status_of(error) == 401


def status_of(error: ClientError) -> int:
    """Return the HTTP status of a response."""
    meta: Mapping[str, Any] = error.response.get("ResponseMetadata", {})
    return int(meta.get("HTTPStatusCode", 0))


def size_from(content_range: str | None) -> int | None:
    """Return the size of the whole object, given the Content-Range of a response."""
    match = _RANGE.fullmatch(content_range or "")
    return int(match[1]) if match else None
