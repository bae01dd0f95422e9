"""Readers, and writers that can only add files: they can do their work, and forbidden actions fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch

import casckpt
from casckpt.errors import StorageError
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.buckets import state
from tests.support.faulty import FaultyStore, fail_before
from tests.support.proxy import Proxy, Seen
from tests.support.saves import CELL, same_state, steps
from tests.support.servers import Server
from tests.support.signing import pair

PAGE = Path(__file__).resolve().parents[2] / "docs" / "remote.md"
PLACE = ("my-bucket", "team/ckpts")
"""The bucket and prefix on the page."""

_ASKING = {
    "versions": "ListBucketVersions", "versioning": "GetBucketVersioning", "lifecycle": "GetLifecycleConfiguration",
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


FOREVER = 1 << 30
Role = Callable[[str], Store]
"""A function that opens the store as a certain user."""


def folder(tmp_path: Path) -> Role:
    """Yield a folder in which writers cannot remove or replace files, and readers cannot create files."""

    def call(role: str) -> Store:
        refused = {"keeper": (), "writer": ("delete", "replace"), "reader": ("delete", "replace", "put")}[role]
        error = StorageError("permission denied")
        faults = [fail_before(method, times=FOREVER, error=error) for method in refused]
        return Store(Repository(FaultyStore(LocalStore(tmp_path / "store"), faults), tmp_path / f"cache of {role}"))

    return call


@pytest.fixture(params=["folder", "moto_server", pytest.param("seaweed_server", marks=pytest.mark.soak)])
def role(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Role]:
    if request.param == "folder":
        yield folder(tmp_path)
        return
    server: Server = request.getfixturevalue(request.param)
    bucket, found = server.new_bucket(), dict[str, Proxy]()

    def call(name: str) -> Store:
        if name not in found:
            found[name] = Proxy(server.endpoint)
            found[name].__enter__()
            found[name].allow(policies(bucket, "team/ckpts")[name].allows)
        options = server.options | {"endpoint_url": found[name].endpoint}
        cache = tmp_path / f"cache of {name}"
        return casckpt.open(f"s3://{bucket}/team/ckpts", storage_options=options, cache_dir=cache)

    yield call
    for proxy in found.values():
        proxy.__exit__(None, None, None)


def optimizer(step: int) -> dict[str, Any]:
    return {"optim": {"m": torch.full((300 * CELL // 4,), float(step))}}


def test_writers_need_no_delete_permission_if_a_different_process_cleans_up(role: Role, tmp_path: Path) -> None:
    writer, keeper, alice = role("writer"), role("keeper"), pair(tmp_path / "keys")
    keeper.create(cell_bytes=CELL, blob_bytes=64 << 10)
    for step in range(5):
        writer.save({**state(step), **optimizer(step)}, run="run", step=step, metrics={"loss": 1.0})
    writer.save(state(9), run="run", step=4, overwrite=True)
    writer.save_async(state(5), run="run", step=5).result()
    writer.tag("best", "run@1")
    writer.tag("best", "run@2")
    writer.sign("run@1..2", key=alice.private)
    (gone,) = writer.forget("run@3")
    writer.restore(gone)
    writer.forget("run@0", "run@3")
    writer.thin("run@1", drop="optim.*")
    with writer.lease("run@5") as held:
        writer.update(loaded := state(0), held, held=None)
        assert same_state(loaded, state(5))
    writer.untag("best")
    source = casckpt.open(tmp_path / "elsewhere")
    source.save(state(7), run="copied", step=7)
    source.copy_to(writer)
    writer.save(state(8), run="mirrored", step=8)
    for refused in (
        lambda: writer.gc(min_age=0),
        lambda: writer.repository.storage.delete("casckpt.json"),
    ):
        with pytest.raises(StorageError, match="denied"):
            refused()
    assert ("run", 3) not in steps(writer)
    keeper.gc(min_age=0)
    assert not writer.verify().is_damaged
    assert steps(keeper) == [*(("run", step) for step in (1, 2, 4, 5)), ("copied", 7), ("mirrored", 8)]
    assert same_state(writer.read("run@4"), state(9))
    assert list(keeper.repository.storage.list("transactions/")) == []
    writer.save(state(10), run="run", step=10)
    assert same_state(keeper.read("run@latest"), state(10))


def test_a_reader_loads_without_changing_anything(role: Role, tmp_path: Path) -> None:
    keeper, reader = role("keeper"), role("reader")
    keeper.create(cell_bytes=CELL, blob_bytes=64 << 10)
    keeper.save({"model": state(1)}, run="run", step=1)
    before = {entry.key: entry.size for entry in keeper.repository.storage.list("")}
    assert same_state(reader.read("run@latest"), {"model": state(1)})
    reader.update(loaded := {"model": state(0)}, "run@1", held=None)
    assert same_state(loaded, {"model": state(1)})
    reader.export("run@1", tmp_path / "out", format="safetensors")
    assert next(reader.watch("run", after="start", timeout=0)).checkpoint.step == 1
    assert not reader.verify().is_damaged
    for refused in (
        lambda: reader.save(state(2), run="run", step=2),
        lambda: reader.tag("mine", "run@1"),
        lambda: reader.forget("run@1"),
        lambda: reader.lease("run@1").__enter__(),
    ):
        with pytest.raises(StorageError, match="denied"):
            refused()
    assert {entry.key: entry.size for entry in keeper.repository.storage.list("")} == before


def test_deleted_objects_in_a_versioned_bucket_can_be_recovered(moto_server: Server, tmp_path: Path) -> None:
    """A user with all permissions deletes everything in the store. Removing the delete markers restores it
    unchanged."""
    client, bucket = moto_server.client, "locked"
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    client.put_object_lock_configuration(
        Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    store = casckpt.open(f"s3://{bucket}/ckpts", storage_options=moto_server.options, cache_dir=tmp_path / "cache")
    for step in range(3):
        store.save(state(step), run="run", step=step)
    store.forget("run@0")
    store.gc(min_age=0)
    assert steps(store) == [("run", 1), ("run", 2)]
    for entry in list(store.repository.storage.list("")):
        client.delete_object(Bucket=bucket, Key=f"ckpts/{entry.key}")
    fresh = casckpt.open(store.url, storage_options=moto_server.options, cache_dir=tmp_path / "fresh")
    assert not fresh.repository.exists()
    for marker in client.list_object_versions(Bucket=bucket)["DeleteMarkers"]:
        client.delete_object(Bucket=bucket, Key=marker["Key"], VersionId=marker["VersionId"])
    assert steps(fresh) == [("run", 1), ("run", 2)]
    assert not fresh.verify().is_damaged
    assert same_state(fresh.read("run@2"), state(2))
    fresh.gc(min_age=0)
    fresh.save(state(3), run="run", step=3)
    assert same_state(fresh.read("run@latest"), state(3))
