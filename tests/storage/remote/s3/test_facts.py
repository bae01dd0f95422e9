"""What `casckpt doctor` reports about a bucket, even if the server denies some requests."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from casckpt.storage.remote.s3.facts import _PAGES, examine


class Bucket:
    """A server.

    It has a response for some operations, answers 404 to all others, and records the arguments it receives.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[tuple[str, dict[str, Any]]]()

    def __call__(self, operation: str, **given: Any) -> Any:
        self.asked.append((operation, given))
        found = self.answers.get(operation, 404)
        found = found.pop(0) if isinstance(found, list) else found
        if isinstance(found, int):
            meta = {"HTTPStatusCode": found, "HTTPHeaders": {}}
            raise ClientError({"Error": {"Code": f"E{found}"}, "ResponseMetadata": meta}, operation)
        return found


def told(name: str, **answers: Any) -> tuple[bool | None, str]:
    (found,) = (one for one in examine(Bucket(**answers), "store/") if one.name == name)
    return found.ok, found.found


RULES = "get_bucket_lifecycle_configuration"


def rule(start: str = "", status: str = "Enabled", **more: Any) -> dict[str, Any]:
    return {"Rules": [{"ID": "r", "Status": status, "Filter": {"Prefix": start}, **more}]}


def test_old_versions_are_counted_across_all_pages() -> None:
    pages: list[Any] = [
        {"Versions": [{"IsLatest": True, "Size": 5}, {"IsLatest": False, "Size": 3}], "IsTruncated": True,
         "NextKeyMarker": "k", "NextVersionIdMarker": "v"},
        {"Versions": [{"IsLatest": False, "Size": 4}]},
    ]  # fmt: skip
    bucket = Bucket(get_bucket_versioning={"Status": "Enabled"}, list_object_versions=pages)
    (found,) = (one for one in examine(bucket, "store/") if one.name == "versions")
    assert (found.ok, found.found) == (None, "2 old versions in this store use 7 bytes")
    listed = [given for operation, given in bucket.asked if operation == "list_object_versions"]
    assert listed == [{"Prefix": "store/"}, {"Prefix": "store/", "KeyMarker": "k", "VersionIdMarker": "v"}]
    pages.append({})
    assert told("versions", get_bucket_versioning={"Status": "Enabled"}, list_object_versions=pages)[0] is True
    assert told("versions", get_bucket_versioning={}) == (
        True,
        "the bucket does not keep old versions, so gc frees space immediately",
    )
    endless = {"Versions": [{"IsLatest": False, "Size": 2}], "IsTruncated": True, "NextKeyMarker": "k",
               "NextVersionIdMarker": "v"}  # fmt: skip
    found_of = {"get_bucket_versioning": {"Status": "Suspended"}, "list_object_versions": endless}
    assert told("versions", **found_of)[1] == f"at least {_PAGES} old versions in this store use {2 * _PAGES} bytes"
    for expires, ok in (
        (rule(NoncurrentVersionExpiration={}), True),
        (rule("x/", NoncurrentVersionExpiration={}), None),
    ):
        assert told("versions", **found_of, **{RULES: expires})[0] is ok


@pytest.mark.parametrize(
    ("rules", "ok"),
    [
        (404, True), (403, None), (rule(Expiration={"Days": 3}), False),
        (rule("store", Expiration={"Date": "x"}), False),
        (rule("store/objects/", Expiration={"Days": 3}), False), (rule("other/", Expiration={"Days": 3}), True),
        (rule(Expiration={"ExpiredObjectDeleteMarker": True}), True),
        (rule(status="Disabled", Expiration={"Days": 3}), True),
        (rule(Transitions=[{"StorageClass": "STANDARD_IA"}, {"StorageClass": "GLACIER"}]), False),
        (rule(Transitions=[{"StorageClass": "STANDARD_IA"}]), True),
        (rule(Filter={"Tag": {"Key": "a"}}, Expiration={"Days": 3}), True),
        (rule(Filter={"And": {"Prefix": "store/", "Tags": [1]}}, Expiration={"Days": 3}), True),
        (rule(Filter={"And": {"Prefix": "other/"}}, Expiration={"Days": 3}), True),
        (rule(Filter={}, Prefix="other/", Expiration={"Days": 3}), True),
    ],
)  # fmt: skip
def test_lifecycle_rules_that_affect_the_store_are_reported(rules: Any, ok: bool | None) -> None:
    assert told("lifecycle", **{RULES: rules})[0] is ok
