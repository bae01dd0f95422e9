"""Checks the settings that matter to a store in a bucket: lifecycle rules and old versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from botocore.exceptions import ClientError

from casckpt.storage.base import Finding
from casckpt.storage.remote.s3.errors import status_of

Call: TypeAlias = Callable[..., Any]
"""Sends one request, given the operation's name and its arguments without the bucket."""

_PAGES = 10  # of 1,000 versions each: enough to show that there are many
_FROZEN = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_EXPIRE_OLD = "set a lifecycle rule with NoncurrentVersionExpiration and ExpiredObjectDeleteMarker"


def examine(call: Call, prefix: str) -> Iterator[Finding]:
    """Yield the facts for `casckpt doctor` without writing anything."""
    yield _ask("lifecycle", lambda: _lifecycle(call, prefix))
    yield _ask("versions", lambda: _versions(call, prefix))


def _ask(name: str, look: Callable[[], Finding]) -> Finding:
    """Call ``look``, and report a server error as an unknown fact."""
    try:
        return look()
    except ClientError as error:
        code = error.response["Error"].get("Code", status_of(error))
        return Finding(name, None, f"unknown: the server answers {code}")


def _versions(call: Call, prefix: str) -> Finding:
    if not call("get_bucket_versioning").get("Status"):
        return Finding("versions", True, "the bucket does not keep old versions, so gc frees space immediately")
    count, nbytes, more = _hidden(call, prefix)
    if not count:
        return Finding("versions", True, "the bucket keeps old versions, but this store has none")
    found = f"{'at least ' * more}{count} old versions in this store use {nbytes} bytes"
    if any("NoncurrentVersionExpiration" in rule for rule in _rules(call, prefix)):
        return Finding("versions", True, f"{found}; a lifecycle rule deletes them")
    return Finding("versions", None, found, f"grant gc s3:DeleteObjectVersion, or {_EXPIRE_OLD}")


def _hidden(call: Call, prefix: str) -> tuple[int, int, bool]:
    """Return the number of old versions, their total bytes, and whether there are more."""
    count = nbytes = 0
    at: Mapping[str, str] = {}
    for _ in range(_PAGES):
        page = call("list_object_versions", Prefix=prefix, **at)
        old = [version["Size"] for version in page.get("Versions", ()) if not version["IsLatest"]]
        count, nbytes = count + len(old), nbytes + sum(old)
        if not page.get("IsTruncated"):
            return count, nbytes, False
        at = {"KeyMarker": page["NextKeyMarker"], "VersionIdMarker": page["NextVersionIdMarker"]}
    return count, nbytes, True


def _lifecycle(call: Call, prefix: str) -> Finding:
    for rule in _rules(call, prefix):
        if {"Days", "Date"} & set(rule.get("Expiration", {})):
            part, harm = "Expiration", "deletes this store's objects by age, even if checkpoints need them"
        elif any(step.get("StorageClass") in _FROZEN for step in rule.get("Transitions", ())):
            part, harm = "Transition", "archives this store's objects, so loads can no longer read them"
        else:
            continue
        move = f", or put the store outside {_start(rule)}" if _start(rule) else ""
        advice = f"remove the rule's {part}, or limit the rule to a Prefix outside this store{move}"
        found = f"rule {rule.get('ID', 'without a name')!r} {harm}"
        return Finding("lifecycle", False, found, f"{advice}; gc deletes unneeded objects")
    return Finding("lifecycle", True, "no rule deletes or archives this store's objects")


def _rules(call: Call, prefix: str) -> list[Mapping[str, Any]]:
    """Return the enabled lifecycle rules that apply to this store's objects."""
    try:
        rules = call("get_bucket_lifecycle_configuration").get("Rules", ())
    except ClientError as error:
        if status_of(error) != 404:
            raise
        return []
    return [rule for rule in rules if rule.get("Status") == "Enabled" and _concerns(rule, prefix)]


def _concerns(rule: Mapping[str, Any], prefix: str) -> bool:
    chosen, start = rule.get("Filter", {}), _start(rule)
    tagged = "Tag" in chosen or "Tags" in chosen.get("And", {})  # casckpt does not set object tags
    return not tagged and (start.startswith(prefix) or prefix.startswith(start))


def _start(rule: Mapping[str, Any]) -> str:
    chosen = rule.get("Filter", {})
    start: str = rule.get("Prefix") or chosen.get("Prefix") or chosen.get("And", {}).get("Prefix") or ""
    return start
