"""The subset of S3 policies that docs/remote.md uses, for a proxy that enforces them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tests.support.proxy import Seen

PAGE = Path(__file__).resolve().parents[2] / "docs" / "remote.md"
PLACE = ("my-bucket", "team/ckpts")
"""The bucket and prefix on the page."""

_ASKING = {
    "versions": "ListBucketVersions", "versioning": "GetBucketVersioning", "lifecycle": "GetLifecycleConfiguration",
    "object-lock": "GetBucketObjectLockConfiguration", "uploads": "ListBucketMultipartUploads",
    "delete": "DeleteObject",
}  # fmt: skip
_OF_OBJECTS = {"GET": "GetObject", "HEAD": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject"}


def policies(bucket: str, prefix: str) -> dict[str, Policy]:
    """Return the policies on the page for a different bucket and prefix, by the word that precedes each policy."""
    found = re.findall(r"^\*\*(\w+)\*\*: .*?^```json\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    here = [(name, text.replace(PLACE[0], bucket).replace(PLACE[1], prefix)) for name, text in found]
    return {name.lower(): Policy(json.loads(text)) for name, text in here}


class Policy:
    """The permissions of a client that has only this policy."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._statements = document["Statement"]

    def allows(self, request: Seen) -> bool:
        """Report whether at least one statement allows the request and none denies it."""
        said = [one["Effect"] for one in self._statements if _is_about(one, request)]
        return "Allow" in said and "Deny" not in said


def _is_about(statement: Mapping[str, Any], request: Seen) -> bool:
    action, resource = f"s3:{_action(request)}", f"arn:aws:s3:::{request.path.strip('/')}"
    of = any(fnmatchcase(action, one) for one in _several(statement["Action"]))
    on = any(fnmatchcase(resource, one) for one in _several(statement["Resource"]))
    return of and on and all(_holds(*one, request) for one in _conditions(statement))


def _action(request: Seen) -> str:
    asked = parse_qs(request.query, keep_blank_values=True)
    if "versionId" in asked:
        return f"{_OF_OBJECTS[request.method]}Version"
    if "/" in request.path.strip("/"):
        return _OF_OBJECTS[request.method]
    return next((name for word, name in _ASKING.items() if word in asked), "ListBucket")


def _conditions(statement: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    for kind, fields in statement.get("Condition", {}).items():
        yield from ((kind, field, _several(wanted)) for field, wanted in fields.items())


def _holds(kind: str, field: str, wanted: list[str], request: Seen) -> bool:
    prefix = parse_qs(request.query).get("prefix", [""])[0]
    values = {"s3:prefix": prefix, "s3:if-none-match": request.condition}
    value = values[field]
    if kind == "Null":
        return (value is None) == (wanted == ["true"])
    assert kind == "StringLike", kind
    return value is not None and any(fnmatchcase(value, one) for one in wanted)


def _several(one: str | list[str]) -> list[str]:
    return [one] if isinstance(one, str) else one
