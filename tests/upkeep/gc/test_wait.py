"""gc waits for open saves, revokes dead ones, and continues where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from casckpt.contents import manifests
from casckpt.format.keys import blob_key, transaction_key
from casckpt.history import commits, transactions
from casckpt.history.commits import list_commits
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.gc import RESUME_NOTE, load_resume_state
from casckpt.upkeep.gc.purge import Deferred
from tests.support.gcs import LAST, bare_commit, begin_elsewhere, commit_of, keys, run_gc, sign, steps, ticking
from tests.support.repositories import blob_hash, commit_draft, draft, memory, put_blob, repository, save


def test_gc_waits_for_an_open_save_and_keeps_what_it_commits(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "slow")
    told: list[Sequence[Deferred]] = []
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            commit_of(repo, txid, ["slow"])

    result = run_gc(repo, sleep=nap, tell=told.append)
    assert len(naps) == 3
    assert [one.txid for one in told[0]] == [txid]
    assert (result.deleted_blobs, result.waiting, result.kept_blobs) == (0, (), 1)


def test_blobs_that_an_open_save_may_reuse_are_kept_even_if_purged(repo: Repository) -> None:
    old, _ = save(repo, step=0, texts=["base"]), save(repo, step=1, texts=["b"])
    txid = begin_elsewhere(repo)  # this save has listed commits, and will reuse all of step 0
    reused = list(manifests.get(repo, old).blobs)

    def end(seconds: float) -> None:
        from tests.support import repositories as support

        support.commit_draft(repo, txid, support.draft(reused, "other", 7))

    result = run_gc(repo, LAST, sleep=end)
    assert steps(result.purged) == [0]
    assert (result.deleted_blobs, result.deleted_manifests) == (0, 1)
    assert blob_key(old.txid, reused[0].hash) in keys(repo)


def test_blobs_committed_and_purged_during_the_wait_are_kept_by_this_gc(repo: Repository) -> None:
    """A process that this gc does not wait for may have begun to reuse these blobs."""
    first = begin_elsewhere(repo)
    put_blob(repo, first, "shared")

    def meanwhile(seconds: float) -> None:
        commit_of(repo, first, ["shared"])
        begin_elsewhere(repo, step=8)  # after gc listed open transactions; will list commits and reuse "shared"
        commits.purge(repo, commits.forget(repo, list_commits(repo).commits[first]))

    result = run_gc(repo, sleep=meanwhile)
    assert (result.deleted_blobs, result.waiting) == (0, ())
    assert blob_key(first, blob_hash("shared")) in keys(repo)


def test_gc_reports_a_timeout_and_the_next_gc_continues(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    naps: list[float] = []
    result = run_gc(repo, wait=60.0, sleep=naps.append)
    assert sum(naps) == pytest.approx(60)
    assert (result.deleted_blobs, result.kept_blobs) == (0, 1)
    assert [(one.reason, one.txid, one.host) for one in result.waiting] == [("transaction", txid, "gpu7")]
    left = load_resume_state(repo, list_commits(repo))
    assert left is not None
    assert left.waits == {txid}
    commits.commit(repo, bare_commit(repo, txid))
    later = begin_elsewhere(repo, step=8)  # began after the candidates were listed, so gc need not wait for it
    put_blob(repo, later, "later")
    result = run_gc(repo, wait=0.0)
    assert result.deleted_blobs == 1, "the next gc did not go on from where the first one stopped"
    assert [one.txid for one in result.waiting] == [later]
    transactions.revoke(repo, later, "enough")
    assert run_gc(repo).deleted_blobs == 1
    assert repo.catalogue.note(RESUME_NOTE) is None


def test_a_paused_gc_is_not_continued_in_a_copied_store(tmp_path: Path) -> None:
    one = repository(tmp_path)
    txid = begin_elsewhere(one)
    put_blob(one, txid, "half")
    run_gc(one, wait=0.0)
    other = memory()
    for entry in one.storage.list(""):
        other.put(entry.key, one.storage.get(entry.key, limit=1 << 20))
    copy = repository(tmp_path, other)
    assert copy.marker.store_id == one.marker.store_id
    assert load_resume_state(one, list_commits(one)) is not None
    assert load_resume_state(copy, list_commits(copy)) is None


def test_a_paused_gc_is_not_continued_if_a_purged_commit_is_live_again(repo: Repository) -> None:
    old, _ = save(repo, step=0, texts=["a"]), save(repo, step=1, texts=["b"])
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    assert run_gc(repo, LAST, wait=0.0).waiting
    assert load_resume_state(repo, list_commits(repo)) is not None
    for number in (1, 2):  # a backup of the folder was restored
        repo.storage.delete(f"commits/{old.txid}.{number}")
    assert load_resume_state(repo, list_commits(repo)) is None


def test_the_save_of_a_dead_process_on_this_host_is_revoked_immediately(repo: Repository) -> None:
    here = this_process()
    fields = {name: getattr(here, name) for name in here.__struct_fields__}
    txid = begin_elsewhere(repo, **fields | {"started": here.started + 1})
    put_blob(repo, txid, "half")
    result = run_gc(repo, wait=0.0)
    assert (result.revoked, result.deleted_blobs, result.waiting) == ((txid,), 1, ())
    assert list_commits(repo).commits[txid].last == "revoked"


def test_dead_transactions_are_revoked_even_if_nothing_is_deleted(repo: Repository) -> None:
    here = this_process()
    fields = {name: getattr(here, name) for name in here.__struct_fields__}
    txid = begin_elsewhere(repo, **fields | {"started": here.started + 1})
    alive = begin_elsewhere(repo)
    result = run_gc(repo)
    assert (result.revoked, result.waiting) == ((txid,), ())
    assert keys(repo, "transactions/") == {transaction_key(alive)}


def test_gc_waits_for_a_save_of_its_own_process(repo: Repository) -> None:
    transaction = transactions.begin(repo, "run", 1)
    put_blob(repo, transaction.txid, "half")
    result = run_gc(repo)
    assert [one.pid for one in result.waiting] == [this_process().pid]
    assert transaction.abort("enough")
    assert run_gc(repo).deleted_blobs == 1


def test_the_silence_of_a_save_is_measured_across_several_gcs(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    assert run_gc(repo, wait=60.0).revoked == ()
    ticking(repo)(3000)
    sign(repo, txid, 1)
    assert run_gc(repo, wait=60.0).revoked == ()
    ticking(repo)(3000)
    assert run_gc(repo, wait=60.0).revoked == (), "the sign of life was not counted"
    ticking(repo)(3600)
    result = run_gc(repo, wait=60.0)
    assert (result.revoked, result.deleted_blobs) == ((txid,), 1)


def test_revoke_after_can_be_an_option_or_a_setting(repo: Repository) -> None:
    txid = begin_elsewhere(repo)
    put_blob(repo, txid, "half")
    assert run_gc(repo, wait=60.0).revoked == ()
    repo.change_settings(revoke_after_seconds=90.0)
    assert run_gc(repo, wait=20.0).revoked == ()
    assert run_gc(repo, wait=20.0).revoked == (txid,)
    other = begin_elsewhere(repo)
    put_blob(repo, other, "half")
    assert run_gc(repo, revoke_after=0.0).revoked == (other,)


def test_gc_waits_for_an_unreadable_transaction(repo: Repository) -> None:
    txid = repo.new_txid("run", 3)
    repo.storage.put(transaction_key(txid), b"torn")
    put_blob(repo, txid, "half")
    result = run_gc(repo, wait=1.0)
    assert [(one.txid, one.step, one.host) for one in result.waiting] == [(txid, 3, None)]


def test_a_checkpoint_committed_and_forgotten_during_the_wait_is_kept(repo: Repository) -> None:
    """A restore may follow."""
    txid = begin_elsewhere(repo)
    ref = put_blob(repo, txid, "half")

    def end_and_forget(seconds: float) -> None:
        if repo.storage.size(f"commits/{txid}") is None:
            commit_draft(repo, txid, draft([ref], "other", 7))
            commits.forget(repo, list_commits(repo).commits[txid])

    assert run_gc(repo, sleep=end_and_forget, min_age=None).deleted_blobs == 0
    assert repo.storage.size(blob_key(txid, ref.hash)) == len("half")
