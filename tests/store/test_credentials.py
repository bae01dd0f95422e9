"""Credentials that expire or lack permissions: errors name what is missing, and no checkpoint is partly visible."""

from __future__ import annotations

from pathlib import Path

import pytest

import casckpt
from casckpt.errors import StorageError
from casckpt.history.commits import list_commits
from casckpt.storage.remote.patience import Backoff
from tests.support import servers
from tests.support.buckets import impatient, state
from tests.support.proxy import Proxy
from tests.support.ranks import outcome_of
from tests.support.saves import same_state, steps
from tests.support.servers import Server

CODES = ["ExpiredToken", "InvalidAccessKeyId", "AccessDenied"]


@pytest.mark.parametrize("code", CODES)
def test_a_save_survives_expiring_credentials(code: str, moto_server: Server, tmp_path: Path, full: bool) -> None:
    """They expire after any request.

    No checkpoint is partly visible, the error names the cause, and a save with new credentials succeeds. By default,
    each error code is used after every sixth request, so that together they cover every second request.
    """
    bucket = moto_server.new_bucket()
    first, stride = (0, 1) if full else (2 * CODES.index(code), 2 * len(CODES))
    says = {"ExpiredToken": "have expired", "AccessDenied": "s3:PutObject"}
    with Proxy(moto_server.endpoint) as proxy:
        store = impatient(moto_server, proxy, bucket, tmp_path, Backoff())
        store.save(state(0), step=0)
        failed = 0
        for step in range(1, 40):
            proxy.refuse(code, after=first + (step - 1) * stride)
            saved = outcome_of(lambda step=step: store.save(state(step), step=step))  # type: ignore[misc]  # bound now
            proxy.calm()
            if not isinstance(saved, StorageError):
                break
            failed += 1
            for save in store.transactions():  # could not write their end; every later save would check them
                store.revoke(save.txid)
            assert says.get(code, "does not know this access key") in str(saved)
            assert servers.SECRET not in f"{saved} {saved.__cause__!r} {store.repository.storage!r}"
            assert steps(store) == [("default", 0)]
        assert failed * stride > 5
        assert steps(store) == [("default", 0), ("default", step)]
        store.gc(min_age=0, wait=0, revoke_after=0)
        assert not store.verify().is_damaged
        assert same_state(store.read("default@latest"), state(step))


def test_readers_need_only_read_permission(moto_server: Server, tmp_path: Path) -> None:
    """Reads do not write anything. The error of a save names the missing permission."""
    bucket = moto_server.new_bucket()
    with Proxy(moto_server.endpoint) as proxy:
        mine = impatient(moto_server, proxy, bucket, tmp_path / "mine", Backoff())
        for step in (1, 2):
            mine.save(state(step), step=step)
        url, options = f"s3://{bucket}/store", moto_server.options | {"endpoint_url": proxy.endpoint}
        proxy.refuse("AccessDenied", "PUT", "POST", "DELETE")
        before = len(proxy.seen)
        store = casckpt.open(url, storage_options=options, cache_dir=tmp_path / "theirs")
        assert steps(store) == [("default", 1), ("default", 2)]
        assert same_state(store.read("default@1"), state(1))
        assert not store.verify().is_damaged
        assert store.stats().checkpoints == 2
        assert store.diff("default@1", "default@2").changes
        assert {one.method for one in proxy.seen[before:]} <= {"GET", "HEAD"}
        with pytest.raises(StorageError, match=r"cannot write s3://.*access denied.*s3:PutObject"):
            store.save(state(3), step=3)
        assert len(list_commits(mine.repository).commits) == 2
