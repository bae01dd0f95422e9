"""Each storage call of a save fails once, before or after it takes effect.

The save succeeds or fails completely.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.contents import blobs
from casckpt.errors import CasckptError, Conflict, Revoked, StorageError
from casckpt.format.keys import parse_log, uploader_folder
from casckpt.format.names import TxId
from casckpt.history import commits, transactions
from casckpt.storage.base import ObjectStore
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import Call, Fault, FaultyStore, call_first, fail_after, fail_before
from tests.support.repositories import memory
from tests.support.saves import CELL, cells, reopened, same_state, small, steps

KINDS = {"before": fail_before, "after": fail_after}


def states() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return three states. The second reuses some blobs of the first and adds its own; the third reuses blobs
    of both."""
    first = {"kept": cells(20, seed=1), "changed": cells(20, seed=2), "o": b"x" * 5000}
    second = first | {"changed": cells(20, seed=3), "new": cells(20, seed=4)}
    return first, second, second | {"changed": cells(20, seed=5)}


def prepared(inner: ObjectStore) -> tuple[FaultyStore, Store]:
    """Return a store with default@1."""
    faulty = FaultyStore(inner)
    store = small(faulty)
    store.save(states()[0], step=1)
    return faulty, store


def calls_of_a_save() -> list[tuple[str, int]]:
    """Return every call of the second save: its method, and its number among the calls of that method."""
    faulty, store = prepared(memory())
    first = len(faulty.calls)
    store.save(states()[1], step=2, threads=1)
    seen: dict[str, int] = {}
    found = []
    for call in faulty.calls[first:]:
        seen[call.method] = seen.get(call.method, 0) + 1
        found.append((call.method, seen[call.method]))
    return found


def check_after(store: Store, failed: bool) -> None:
    """Check that a failed save is invisible, that a successful one is complete, and that the next save succeeds."""
    first, second, third = states()
    for look in (store, reopened(store)):
        assert steps(look) == [("default", 1)] + [("default", 2)] * (not failed)
        assert ("default@2" in look) != failed
        assert same_state(look.read("default@1"), first)
    if failed:
        store.save(second, step=2)
    assert same_state(reopened(store).read("default@2"), second)
    store.save(third, step=3)
    assert same_state(reopened(store).read("default@3"), third)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_survives_or_reports_any_failing_call(kind: str) -> None:
    calls = calls_of_a_save()
    assert {method for method, _ in calls} >= {"put", "settle", "get", "size", "list", "delete"}
    outcomes = set()
    for method, at in calls:
        faulty, store = prepared(memory())
        faulty.inject(KINDS[kind](method, at=at))
        failed = True
        with suppress(StorageError):
            store.save(states()[1], step=2, threads=1)
            failed = False
        faulty.heal()
        check_after(store, failed)
        outcomes.add(failed)
    assert outcomes == {False, True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["transactions/*", "objects/*.safetensors", "objects/*.manifest", "commits/*"])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_repeatedly_failing_put_fails_the_save(where: str, key: str, kind: str, tmp_path: Path) -> None:
    faulty, store = prepared(memory() if where == "memory" else LocalStore(tmp_path / "store"))
    faulty.inject(KINDS[kind]("put", key=key, times=1000))
    failed = False
    try:
        store.save(states()[1], step=2)
    except StorageError:
        failed = True
    faulty.heal()
    assert failed or kind == "after"  # the save continues if the bytes exist
    check_after(store, failed)


def test_a_commit_whose_response_was_lost_is_found_even_if_the_check_fails() -> None:
    faulty, store = prepared(memory())
    faulty.inject(fail_after("put", key="commits/*-2"), fail_before("get", key="commits/*-2"))
    store.save(states()[1], step=2)
    faulty.heal()
    check_after(store, failed=False)


@pytest.mark.parametrize("kind", KINDS)
def test_storage_that_fails_permanently_at_the_commit_raises_an_error(kind: str) -> None:
    """The result is unknown, so the save fails. Later readers see all of the checkpoint or nothing."""
    faulty, store = prepared(memory())
    gone = [fail_before(method, times=1000) for method in ("put", "get", "list", "size", "delete")]
    faulty.inject(
        KINDS[kind]("put", key="commits/*-2"), call_first("put", lambda _: faulty.inject(*gone), key="commits/*-2")
    )
    with pytest.raises(StorageError):
        store.save(states()[1], step=2)
    faulty.heal()
    check_after(store, failed=kind == "before")


@pytest.mark.parametrize("error", [MemoryError("test"), RuntimeError("test")])
@pytest.mark.parametrize(
    ("method", "key"), [("put", "objects/*.safetensors"), ("put", "objects/*.manifest"), ("settle", "*")]
)
def test_other_errors_end_a_save_and_leave_nothing_behind(method: str, key: str, error: Exception) -> None:
    faulty, store = prepared(memory())
    faulty.inject(fail_before(method, key=key, error=error))
    with pytest.raises(type(error), match="test"):
        store.save(states()[1], step=2)
    faulty.heal()
    assert not transactions.open_transactions(store.repository, commits.list_names(store.repository))
    check_after(store, failed=True)


def test_an_interrupt_ends_the_transaction() -> None:
    faulty, store = prepared(memory())

    def interrupt(_: Call) -> None:
        raise KeyboardInterrupt

    faulty.inject(call_first("put", interrupt, key="objects/*.manifest"))
    with pytest.raises(KeyboardInterrupt):
        store.save(states()[1], step=2)
    faulty.heal()
    assert not transactions.open_transactions(store.repository, commits.list_names(store.repository))
    check_after(store, failed=True)


# loads


@pytest.mark.parametrize("fault", [fail_before("open", at=2), fail_before("read_into", at=2), fail_after("read_into")])
def test_a_failed_load_can_be_retried(fault: Fault) -> None:
    faulty, store = prepared(memory())
    template = {"kept": torch.zeros(20 * CELL // 4), "changed": torch.zeros(20 * CELL // 4), "o": None}
    faulty.inject(fault)
    with pytest.raises(StorageError):
        store.load(template, "default@1")
    assert template["o"] is None
    faulty.heal()
    store.load(template, "default@1")
    assert same_state(template, states()[0])


@pytest.mark.parametrize("method", ["list", "get"])
def test_a_storage_error_during_a_lookup_is_raised(method: str) -> None:
    faulty, store = prepared(memory())
    ref = store.get("default@1").id if method == "list" else "default@1"
    again = reopened(store)
    faulty.inject(fail_before(method))
    with pytest.raises(StorageError):
        again.read(ref)
    assert same_state(again.read(ref), states()[0])


# revoked by gc during the save


def revoker(store: Store, faulty: FaultyStore, *, purge: bool = False) -> Callable[[Call], None]:
    """Act as a gc that considers the save dead: revoke it and delete its blobs."""

    def revoke(_: Call) -> None:
        names = [parse_log(key) for key in faulty.keys("put") if key.startswith("transactions/")]
        txid = TxId(names[-1][0]) if names[-1] else TxId("")
        assert transactions.revoke(store.repository, txid, "a test")
        for entry in list(faulty.inner.list(uploader_folder(txid) + "/")):
            faulty.inner.delete(entry.key)
        if purge:
            for one in commits.list_commits(store.repository).live():
                commits.purge(store.repository, commits.forget(store.repository, one))
                for entry in list(faulty.inner.list(uploader_folder(one.txid) + "/")):
                    faulty.inner.delete(entry.key)

    return revoke


@pytest.mark.parametrize(
    ("method", "key"),
    [("put", "objects/*.safetensors"), ("put", "objects/*.manifest"), ("settle", "objects/*"), ("put", "commits/*")],
)
def test_a_revoked_save_is_retried_without_reuse(method: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    faulty, store = prepared(memory())
    faulty.inject(call_first(method, revoker(store, faulty), key=key))
    ckpt = store.save(states()[1], step=2)
    faulty.heal()
    assert "gc assumed that the save of default@2 was dead" in caplog.text
    assert ckpt.stats.blobs_reused == 0
    assert ckpt.stats.bytes_written > 60 * CELL
    assert {ref.uploader for ref in _refs(store, "default@2")} == {ckpt.commit.txid}
    check_after(store, failed=False)


def test_a_save_revoked_while_its_reused_blobs_are_deleted_is_retried() -> None:
    """The missing blobs do not count as damage, so casckpt does not mark them."""
    faulty, store = prepared(memory())
    faulty.inject(call_first("size", revoker(store, faulty, purge=True), key="objects/*"))
    ckpt = store.save(states()[1], step=2)
    faulty.heal()
    assert ckpt.stats.blobs_reused == 0
    assert not blobs.damaged_marks(store.repository)
    assert steps(store) == [("default", 2)]
    assert same_state(store.read("default@2"), states()[1])


def test_a_save_that_is_revoked_twice_raises_an_error() -> None:
    faulty, store = prepared(memory())
    faulty.inject(call_first("put", revoker(store, faulty), key="objects/*.manifest", times=2))
    with pytest.raises(Revoked, match="save again") as caught:
        store.save(states()[1], step=2)
    assert isinstance(caught.value, Conflict)
    faulty.heal()
    check_after(store, failed=True)


def _refs(store: Store, ref: str) -> list[Any]:
    from casckpt.contents import manifests

    return list(manifests.get(store.repository, store.get(ref).commit).blobs)


def test_repeatedly_lost_responses_fail_the_save() -> None:
    """If a blob exists with a different size, the server has stored it incorrectly."""
    faulty, store = prepared(memory())

    def spoil(call: Call) -> None:
        faulty.inner.put(call.key, b"torn")

    faulty.inject(call_first("put", spoil, key="objects/*.safetensors"))
    with pytest.raises(StorageError, match="save again"):
        store.save(states()[1], step=2)
    faulty.heal()
    check_after(store, failed=True)


def test_every_save_error_is_a_casckpt_error() -> None:
    faulty, store = prepared(memory())
    for method in ("put", "list", "size"):
        faulty.inject(fail_before(method, times=1000))
        with pytest.raises(CasckptError, match="injected fault"):
            store.save(states()[1], step=2)
        faulty.heal()
    check_after(store, failed=True)
