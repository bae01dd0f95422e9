"""How one checkpoint is copied into a different store: from damaged sources, and by failing, killed and concurrent
copies."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from casckpt.base.progress import Progress
from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve
from casckpt.errors import CasckptError, Conflict, Damaged, Refused, StorageError
from casckpt.format import records
from casckpt.format.keys import MARKER, blob_key, copied_txid, manifest_key, transaction_key
from casckpt.format.names import TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.history import commits, transactions
from casckpt.history.commits import Commit, forget, list_commits, purge
from casckpt.history.tags import set_tag
from casckpt.plan.retention import Policy, Rotation
from casckpt.repository.processes import this_process
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.upkeep.copies.copy import execute, plan_copy
from casckpt.upkeep.copies.replication import BlobLocations, replicate
from casckpt.upkeep.doctor import examine
from casckpt.upkeep.gc import gc
from casckpt.upkeep.gc.forgetting import rotate
from casckpt.upkeep.repair.verify import verify
from casckpt.upkeep.sizes import Sizes
from casckpt.upkeep.thin import execute as execute_thinning
from casckpt.upkeep.thin import plan_thin
from tests.support.checkpoints import array, flip, only_blob, read_arrays, save_parts
from tests.support.copies import ONE_BY_ONE, blob_puts, chain, check_clean, contents, copy, elsewhere
from tests.support.dying import WAYS, Dying
from tests.support.dying import Killed as Died
from tests.support.far import FarStore
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.forging import taken_apart
from tests.support.gcs import collect, keys, run_gc
from tests.support.repositories import (
    again,
    blob_hash,
    commit_bare,
    committed_encoded,
    meanwhile,
    memory,
    objects_of,
    repository,
    save,
)

# damaged or hostile sources


def spoil(repo: Repository, key: str, how: str) -> None:
    if how == "gone":
        repo.storage.delete(key)
    elif how == "short":
        repo.storage.replace(key, repo.storage.get(key, limit=1 << 20)[:-100])
    else:
        flip(repo, key, 5000 if how == "flipped" else 20)


@pytest.mark.parametrize("how", ["flipped", "header", "gone", "short"])
def test_a_damaged_blob_is_named_and_the_checkpoint_stays_invisible(
    source: Repository, target: Repository, how: str
) -> None:
    blob = only_blob(source, resolve(source, "run@2"))
    whole = source.storage.get(blob, limit=1 << 20)
    spoil(source, blob, how)
    result = copy(source, target)
    assert [one.step for one in result.copied] == [0, 1]
    assert [(one.commit.step, one.error.kind) for one in result.failed] == [(2, "damaged"), (3, "damaged")]
    with pytest.raises(Damaged, match="one of 2 checkpoints that were not copied") as raised:
        result.raise_failure()
    assert (raised.value.blob, raised.value.keys) == (blob.split("/")[2].split(".")[0], ("t2",))
    assert sorted(contents(target)) == ["run@0", "run@1"]
    check_clean(target)
    source.storage.replace(blob, whole)
    assert len(copy(source, target).copied) == 2
    check_clean(target)


def test_a_damaged_manifest_is_named(source: Repository, target: Repository) -> None:
    commit = resolve(source, "run@2")
    flip(source, manifest_key(commit.txid, commit.id), 40)
    result = copy(replace(source), target)
    assert [(one.commit.step, one.error.kind) for one in result.failed] == [(2, "damaged")]
    check_clean(target)


def commit_same(repo: Repository, commit: Commit, run: str, step: int, txid: TxId) -> Commit:
    """Recommit the manifest of ``commit`` under this run and step."""
    data = repo.storage.get(manifest_key(commit.txid, commit.id), limit=1 << 20)
    repo.storage.put(manifest_key(txid, commit.id), data)
    names = ("manifest", "head", "manifest_bytes", "created_at", "parent")
    return commit_bare(repo, run, step, txid=txid, **{name: getattr(commit.committed, name) for name in names})


def test_a_commit_that_contradicts_its_manifest_is_rejected(source: Repository, target: Repository) -> None:
    commit = resolve(source, "run@2")
    for run, step in (("other", 2), ("run", 9)):
        made = commit_same(source, commit, run, step, source.new_txid(run, step))
        with pytest.raises(Refused, match="does not match its manifest"):
            copy(source, target, made).raise_failure()
    assert not list_commits(target).commits


def test_a_copy_with_a_transaction_id_of_a_different_run_or_from_the_future_is_rejected(
    source: Repository, target: Repository
) -> None:
    commit = resolve(source, "run@2")
    ahead = TxId(f"2999{commit.txid[4:]}")
    other = source.new_txid("other", 2)
    for txid, why in ((ahead, "in the future"), (other, "belongs to a different run or step")):
        made = commit_same(source, commit, "run", 2, txid)
        with pytest.raises(Refused, match=why):
            copy(source, target, made).raise_failure()
    assert not list_commits(target).commits


def test_unknown_encodings_are_copied_and_prevent_only_loads(source: Repository, target: Repository) -> None:
    """The extents are invalid, or have a form that a later version introduced. Loads from any store reject them."""
    manifest = manifests.get(source, resolve(source, "run@0"))
    parts = taken_apart(manifest)
    parts.index["step"] = 9
    parts.pieces["cells"][0] = b"\x63 of later"
    hostile = parts.put_together()
    txid = source.new_txid("run", 9)
    source.storage.put(manifest_key(txid, hostile.id), hostile.data)
    body = manifest.body
    fields = {"created_at": body.created_at, "parent": body.parent}
    commits.commit(source, committed_encoded(source, txid, hostile, "run", 9, **fields))
    copy(source, target, resolve(source, "run@9")).raise_failure()
    for repo in (source, target):
        found = manifests.get(repo, resolve(repo, "run@9"))
        with pytest.raises(Refused, match="upgrade casckpt"):
            found.extents(found.entries[0])


def test_a_copy_from_a_store_of_a_later_version_is_rejected(source: Repository, target: Repository) -> None:
    data = source.storage.get(MARKER, limit=1 << 20).replace(b'"format": 1', b'"format": 2')
    source.storage.replace(MARKER, data)
    with pytest.raises(Refused, match="Upgrade casckpt"):
        copy(replace(source), target)
    assert not target.exists()
    target.create()
    target.storage.replace(MARKER, data)
    with pytest.raises(Refused, match="Upgrade casckpt"):
        copy(source, replace(target))


def test_copying_a_checkpoint_that_is_purged_meanwhile_raises_gone(tmp_path: Path, target: Repository) -> None:
    inner = memory()
    owner = chain(repository(tmp_path, inner))

    def purge() -> None:
        commits.forget(owner, resolve(owner, "run@0"))
        commits.forget(owner, resolve(owner, "run@1"))
        commits.forget(owner, resolve(owner, "run@2"))
        commits.forget(owner, resolve(owner, "run@3"))
        assert collect(owner).deleted_blobs == 4

    hook = call_first("open", meanwhile(purge), key="objects/*")
    source = repository(tmp_path, FaultyStore(inner, [hook]), seed=8)
    result = copy(source, target)
    assert result.copied == ()
    assert {one.error.kind for one in result.failed} == {"gone"}
    assert "purged" in str(result.failed[0].error)
    check_clean(target)


# copies that fail or are killed


class Killed(BaseException):
    """Ends the simulated process."""


def test_a_copy_killed_at_any_call_is_resumed(tmp_path: Path, source: Repository) -> None:
    """No blob is uploaded twice, because the transaction remembers the blobs that it uploaded."""
    for kind in (fail_before, fail_after):
        for at in range(1, 200):
            inner = memory()
            faulty = FaultyStore(inner, [kind(method, at=at, error=_killed()) for method in ("put",)])
            first = elsewhere(tmp_path / f"{kind.__name__}{at}", faulty)
            try:
                execute(source, first, plan_copy(source, first, ["run@3"]), jobs=1)
            except Killed:
                ended = False
            else:
                ended = True
            visible = {(one.run, one.step) for one in list_commits(first).visible()} if first.exists() else set()
            assert visible <= {("run", 3)}
            faulty.heal()
            second = elsewhere(tmp_path / f"{kind.__name__}{at}", faulty, seed=at)
            copy(source, second, "run@3", jobs=1)
            stored = [key for key in blob_puts(faulty) if key in {entry.key for entry in inner.list("objects/")}]
            assert len(set(stored)) == 4
            assert len(stored) - len(set(stored)) <= 1  # the blob whose upload was interrupted
            assert contents(second)["run@3"] == contents(source)["run@3"]
            check_clean(second)
            if ended:
                break
        else:
            pytest.fail("the copy never came to its end")


def _killed() -> Exception:
    return Killed()  # type: ignore[return-value]  # raised like one


@pytest.mark.parametrize("method", ["put", "list", "size", "get", "settle"])
def test_a_copy_into_a_failing_target_stays_invisible_and_succeeds_later(
    tmp_path: Path, source: Repository, method: str
) -> None:
    for kind in (fail_before, fail_after):
        for at in range(1, 60):
            faulty = FaultyStore(memory(), [kind(method, at=at)])
            target = elsewhere(tmp_path / f"{kind.__name__}{at}", faulty)
            try:
                result = execute(source, target, plan_copy(source, target, ["run@3"]), jobs=1)
            except StorageError:
                ended = False
            else:
                ended = not result.failed
            hit = faulty.count(method) >= at
            faulty.heal()
            copy(source, target, "run@3", jobs=1).raise_failure()
            assert contents(target)["run@3"] == contents(source)["run@3"]
            check_clean(target)
            if ended and not hit:
                break
        else:
            pytest.fail("the copy never came to its end")


def test_a_revoked_copy_starts_over(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()

    def revoke() -> None:
        commit = resolve(source, "run@3")
        assert transactions.revoke(other, commit.txid, "test")
        collect(other, wait=0.0)

    storage = FaultyStore(inner, [call_first("put", meanwhile(revoke), key="*.manifest")])
    target = elsewhere(tmp_path, storage)
    result = copy(source, target, "run@3", jobs=1)
    assert result.copied[0].txid == copied_txid(resolve(source, "run@3").txid, 1)
    assert contents(target)["run@3"] == contents(source)["run@3"]
    check_clean(target)


def test_a_copy_that_is_revoked_repeatedly_gives_up(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()

    def revoke() -> None:
        for one in transactions.open_transactions(other, commits.list_names(other)):
            transactions.revoke(other, one.txid, "test")

    storage = FaultyStore(inner, [call_first("put", meanwhile(revoke), key="*.manifest", times=99)])
    with pytest.raises(Conflict, match="revoked 4 times"):
        copy(source, elsewhere(tmp_path, storage), "run@3").raise_failure()
    assert not list_commits(other).visible()
    check_clean(other)


def test_a_reused_blob_that_is_missing_is_marked_and_copied(source: Repository, target: Repository) -> None:
    copy(source, target, "run@2")
    gone = manifests.get(target, resolve(target, "run@2")).blob(0)
    target.storage.delete(blob_key(gone.uploader, gone.hash))
    result = copy(source, target, "run@3")
    assert result.blobs == 2
    assert read_arrays(target, resolve(target, "run@3")) == read_arrays(source, resolve(source, "run@3"))
    assert any(entry.key.startswith("damaged/") for entry in target.storage.list(""))


# concurrent copies


def test_two_processes_share_a_copy_and_one_of_them_commits(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    storage = FaultyStore(inner)
    other = elsewhere(tmp_path, storage, seed=9)

    def join_in() -> None:
        copy(source, other, "run@3", jobs=1)

    first = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", meanwhile(join_in), key="*.manifest")]))
    result = copy(source, first, "run@3", jobs=1)
    assert blob_puts(storage) == []  # the first process had uploaded them all
    assert [one.txid for one in result.copied] == [resolve(source, "run@3").txid]
    assert len(list_commits(first).visible()) == 1
    check_clean(first)


def test_a_process_skips_blobs_that_another_one_has_uploaded(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)

    def join_in() -> None:
        copy(source, other, "run@3", jobs=1)

    storage = FaultyStore(inner, [call_first("put", meanwhile(join_in), key="*.safetensors")])
    first = elsewhere(tmp_path, storage)
    assert copy(source, first, "run@3", jobs=1).blobs == len(blob_puts(storage)) == 1
    check_clean(first)


def test_a_joined_transaction_outlives_the_process_that_began_it(tmp_path: Path, source: Repository) -> None:
    target = elsewhere(tmp_path)
    target.create()
    commit = resolve(source, "run@3")
    dead = msgspec.structs.replace(this_process(), started=1)
    began = records.Began(
        txid=commit.txid, run="run", step=3, time=1, process=dead, manifest=commit.id, places=commit.txid
    )
    target.put_record(transaction_key(commit.txid), began)
    (one,) = transactions.open_transactions(target, set())
    assert transactions.has_died(target, one)
    joined = transactions.join(target, msgspec.structs.replace(began, time=2))
    assert joined is not None
    (one,) = transactions.open_transactions(target, set())
    assert not transactions.has_died(target, one)
    joined.leave()
    assert transactions.join(target, msgspec.structs.replace(began, manifest=None)) is None
    assert transactions.join(target, msgspec.structs.replace(began, manifest=resolve(source, "run@1").id)) is None
    assert transactions.join(target, msgspec.structs.replace(began, places=copied_txid(commit.txid, 1))) is None


def test_a_copy_does_not_change_a_save_with_the_same_txid(tmp_path: Path, source: Repository) -> None:
    """Such a save exists if a folder is copied while jobs save into it."""
    target = elsewhere(tmp_path)
    target.create()
    commit = resolve(source, "run@3")
    process = this_process()
    began = records.Began(txid=commit.txid, run="run", step=3, time=1, process=process)
    target.put_record(transaction_key(commit.txid), began)
    assert copy(source, target, "run@3").copied[0].txid == copied_txid(commit.txid, 1)
    assert [one.txid for one in transactions.open_transactions(target, commits.list_names(target))] == [commit.txid]


def test_a_copy_into_a_manually_copied_store_writes_nothing(tmp_path: Path) -> None:
    source = chain(repository(tmp_path, LocalStore(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(copy(source, elsewhere(tmp_path, LocalStore(tmp_path / "b"))).present) == 4


def test_replicate_returns_a_commit_made_by_a_different_process(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()
    commit = resolve(source, "run@0")
    hook = meanwhile(lambda: replicate(source, other, commit, ONE_BY_ONE))
    target = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", hook, key="commits/*")]))
    assert replicate(source, target, commit, ONE_BY_ONE).id == commit.id
    assert len(list_commits(target).commits) == 1
    check_clean(target)


Hook = Callable[[], None]


@pytest.mark.parametrize("error", [CasckptError, KeyboardInterrupt])
def test_a_failed_copy_leaves_its_transaction_for_the_next_copy(
    tmp_path: Path, source: Repository, error: type[BaseException]
) -> None:
    target = elsewhere(tmp_path)

    def stop(done: int, total: int | None) -> None:
        if done:
            raise error("enough")

    with pytest.raises(error, match="enough"):
        copy(source, target, "run@3", progress=Progress(stop))
    assert [one.step for one in _open(target)] == [3]
    copy(source, target, "run@3").raise_failure()
    assert _open(target) == []


def _open(repo: Repository) -> list[records.Began]:
    found = transactions.open_transactions(repo, commits.list_names(repo))
    return [one.began for one in found if one.began is not None]


def test_policies_in_the_destination_use_the_original_save_times(source: Repository, target: Repository) -> None:
    copy(source, target)
    plan = gc.plan_gc(target, Policy(keep_last=1), min_age=0.0)
    assert [one.step for one in plan.forget] == [0, 1, 2]


def test_blob_names_are_durable_before_the_record(tmp_path: Path, source: Repository) -> None:
    storage = FaultyStore(memory())
    copy(source, elsewhere(tmp_path, storage), "run@3")
    calls = [(call.method, call.key) for call in storage.calls]
    settled = max(i for i, (method, key) in enumerate(calls) if method == "settle" and key.startswith("objects/"))
    last_blob = max(i for i, (method, key) in enumerate(calls) if method == "put" and key.endswith(".safetensors"))
    record = next(i for i, (method, key) in enumerate(calls) if method == "put" and key.startswith("commits/"))
    assert last_blob < settled < record


def test_a_leftover_manifest_with_missing_blobs_is_not_committed(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    copy(source, elsewhere(tmp_path, inner), "run@2")
    first = elsewhere(tmp_path / "first", FaultyStore(inner, [fail_before("put", key="commits/*", error=_killed())]))
    with pytest.raises(Killed):
        copy(source, first, "run@3")  # the leftover manifest names blobs of run@2
    second = elsewhere(tmp_path / "second", inner, seed=5)
    reused = manifests.get(second, resolve(second, "run@2")).blob(0)
    inner.delete(blob_key(reused.uploader, reused.hash))
    result = copy(source, second, "run@3")
    assert isinstance(result.failed[0].error, Damaged)
    assert [one.step for one in list_commits(second).visible()] == [2]


@pytest.mark.parametrize(("method", "key"), [("get", "*.manifest"), ("size", "*.safetensors")])
def test_a_leftover_manifest_deleted_by_gc_is_recopied(
    tmp_path: Path, source: Repository, method: str, key: str
) -> None:
    """Two processes share a transaction.

    One has written the manifest; then gc revokes the transaction. The other has not noticed, and finds the manifest or
    the blobs missing. This does not count as damage.
    """
    inner = memory()
    first = elsewhere(tmp_path / "first", FaultyStore(inner, [fail_before("put", key="commits/*", error=_killed())]))
    with pytest.raises(Killed):
        copy(source, first, "run@3", jobs=1)
    txid = resolve(source, "run@3").txid

    def give_up() -> None:
        assert transactions.revoke(first, txid, "test")
        collect(elsewhere(tmp_path / "gc", inner), wait=0.0)

    hook = call_first(method, meanwhile(give_up), key=key)
    second = elsewhere(tmp_path / "second", FaultyStore(inner, [hook]), seed=5)
    result = copy(source, second, "run@3", jobs=1)
    result.raise_failure()
    assert [one.txid for one in result.copied] == [copied_txid(txid, 1)]
    assert contents(second)["run@3"] == contents(source)["run@3"]
    check_clean(second)


# copies of other places


OPTIM = {"optim.a": array(8), "optim.b": array(9)}


def in_parts(repo: Repository) -> Commit:
    """Save a checkpoint whose entries have their own blobs."""
    return save_parts(repo, {"w": array(1)}, *({key: data} for key, data in OPTIM.items()))


def thin(repo: Repository, drop: str, where: str = "run@0") -> Commit:
    (made,) = execute_thinning(repo, plan_thin(repo, [where], drop=drop))
    return made


def trim(repo: Repository, commit: Commit) -> Commit:
    """Trim the old places, and delete their blobs."""
    done = commits.trim(repo, commit)
    collect(repo, wait=0.0)
    return done


def test_copies_of_different_places_do_not_share_a_transaction(tmp_path: Path, repo: Repository) -> None:
    whole = in_parts(repo)
    inner = memory()
    first = elsewhere(tmp_path / "first", FaultyStore(inner, [fail_before("put", key="commits/*", error=_killed())]))
    with pytest.raises(Killed):
        copy(repo, first)
    thin(repo, "optim.*")
    target = elsewhere(tmp_path / "next", inner, seed=5)
    (copied,) = copy(repo, target).copied
    assert (copied.txid, copied.dropped is None) == (copied_txid(whole.txid, 1), False)
    assert replicate(repo, target, whole, ONE_BY_ONE).txid == whole.txid, "which continues the first copy"
    assert [one.dropped is None for one in list_commits(target).visible()] == [False, True]
    for ref in ("run@0", "run@latest", "latest", whole.id):
        assert resolve(target, ref).dropped is None, ref
        assert resolve(target, ref, list_commits(target)).dropped is None, ref
    done = run_gc(target, Policy(keep_last=1), min_age=0.0)
    assert [(one.txid, one.dropped is None) for one in done.forgotten] == [(copied.txid, False)]
    assert read_arrays(target, resolve(target, "run@0")) == read_arrays(repo, whole)
    check_clean(target)


def test_a_thinned_copy_becomes_complete_in_its_own_log(repo: Repository, target: Repository) -> None:
    whole = in_parts(repo)
    target.create()
    made = thin(repo, "optim.*")
    copied = replicate(repo, target, made, ONE_BY_ONE)
    assert replicate(repo, target, made, ONE_BY_ONE) == copied, "it is there"
    full = replicate(repo, target, whole, ONE_BY_ONE)
    assert (full.txid, full.dropped, full.committed.blobs_written) == (copied.txid, None, len(OPTIM))
    assert replicate(repo, target, made, ONE_BY_ONE) == full, "it has all of its entries"
    assert read_arrays(target, full) == read_arrays(repo, whole)
    assert list_commits(target).commits.keys() == {whole.txid}
    check_clean(target)


def test_a_copy_with_other_entries_gets_a_log_of_its_own(repo: Repository, target: Repository) -> None:
    in_parts(repo)
    target.create()
    one = replicate(repo, target, thin(repo, "optim.a"), ONE_BY_ONE)
    commits.restore(repo, resolve(repo, "run@0").old[0])
    other = replicate(repo, target, thin(repo, "optim.b"), ONE_BY_ONE)
    assert (one.txid, other.txid) == (list_commits(repo).live()[0].txid, copied_txid(one.txid, 1))
    lacking = [commit.dropped.patterns for commit in list_commits(target).visible() if commit.dropped]
    assert lacking == [{"optim.a"}, {"optim.b"}]
    rules = Policy(keep_last=1)
    assert not run_gc(target, rules, min_age=0.0).forgotten, "each of them has an entry that the other lacks"
    assert not rotate(target, "run", Rotation(max_checkpoints=1))
    whole = resolve(repo, "run@0").old[0]
    assert replicate(repo, target, whole, ONE_BY_ONE).txid == one.txid
    assert resolve(target, "run@0").dropped is None, "although the other one is later"
    assert [commit.txid for commit in run_gc(target, rules, min_age=0.0).forgotten] == [other.txid]
    check_clean(target)


@pytest.mark.parametrize("tagged", [False, True])
def test_copies_with_different_entries_are_forgotten_together(
    repo: Repository, target: Repository, tagged: bool
) -> None:
    in_parts(repo)
    target.create()
    one = replicate(repo, target, thin(repo, "optim.a"), ONE_BY_ONE)
    commits.restore(repo, resolve(repo, "run@0").old[0])
    other = replicate(repo, target, thin(repo, "optim.b"), ONE_BY_ONE)
    if tagged:
        set_tag(target, "best", other)
    save(target, step=1)
    gone = rotate(target, "run", Rotation(max_checkpoints=1))
    assert [commit.txid for commit in gone] == ([] if tagged else [one.txid, other.txid])


def test_a_copy_that_was_forgotten_and_thinned_is_completed_if_named(repo: Repository, target: Repository) -> None:
    whole = in_parts(repo)
    copy(repo, target)
    trim(target, thin(target, "optim.*"))
    commits.forget(target, resolve(target, "run@0"))
    assert copy(repo, target).left == (whole,)
    (full,) = copy(repo, target, "run@0").copied
    assert (full.txid, full.visible, full.dropped) == (whole.txid, True, None)
    check_clean(target)


@pytest.mark.parametrize("at", ["*.manifest", "*.safetensors"])
def test_a_copy_of_places_that_are_trimmed_meanwhile_continues_with_the_current_ones(
    tmp_path: Path, target: Repository, at: str
) -> None:
    inner = memory()
    owner = repository(tmp_path, inner)
    whole = in_parts(owner)
    target.create()
    hook = meanwhile(lambda: trim(owner, thin(owner, "optim.*")))
    method = "get" if at == "*.manifest" else "open"
    source = repository(tmp_path / "next", FaultyStore(inner, [call_first(method, hook, key=at)]), seed=8)
    copied = replicate(source, target, whole, ONE_BY_ONE)
    assert (copied.live, copied.dropped is None) == (True, False)
    assert len(read_arrays(target, copied, but=OPTIM)) == 1
    check_clean(target)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_completes_a_thinned_one_survives_a_kill_at_any_call(
    tmp_path: Path, repo: Repository, way: str
) -> None:
    whole = in_parts(repo)
    first = elsewhere(tmp_path)
    copy(repo, first)
    trim(first, thin(first, "optim.*"))
    objects, at, ended = objects_of(first.storage), 0, False
    while not ended:
        at += 1
        storage = again(objects)
        dying = Dying(storage, at, way)
        with suppress(Died, CasckptError):
            copy(repo, elsewhere(tmp_path / f"{at}", dying, seed=3), jobs=1)
        ended = dying.changes < at
        target = elsewhere(tmp_path / f"next {at}", storage, seed=4)
        (now,) = list_commits(target).visible()
        lacking = () if now.dropped is None else OPTIM
        assert read_arrays(target, now, but=lacking).items() <= read_arrays(repo, whole).items()
        copy(repo, target).raise_failure()
        assert read_arrays(target, resolve(target, "run@0")) == read_arrays(repo, whole)
        check_clean(target)
    assert at > 5


def test_a_change_in_the_target_makes_a_copy_that_completes_a_thinned_one_fail(
    tmp_path: Path, repo: Repository
) -> None:
    whole = in_parts(repo)
    inner = memory()
    other = elsewhere(tmp_path / "other", inner, seed=5)
    copy(repo, other)
    thin(other, "optim.*")
    hook = meanwhile(lambda: commits.forget(other, resolve(other, "run@0")))
    target = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", hook, key="*.manifest")]))
    with pytest.raises(Conflict, match="not rewritten: another process changed it"):
        copy(repo, target).raise_failure()
    assert [one.last for one in list_commits(other).live()] == ["forgotten"]
    (full,) = copy(repo, target, whole.id).copied
    assert full.dropped is None
    check_clean(target)


A = blob_hash("a")
WANTED = {A: BlobRef(A, 1, TxId("in another store, at which nobody looks"))}


def found(places: BlobLocations, repo: Repository) -> str | None:
    ref = places.locate(list_commits(repo), WANTED).get(A)
    return None if ref is None else ref.uploader


def test_only_live_commits_provide_blob_locations_for_a_copy(repo: Repository) -> None:
    places = BlobLocations(repo, {A})
    assert found(places, repo) is None
    commit = save(repo, texts=["a", "b"])
    assert found(places, repo) == commit.txid
    purge(repo, forget(repo, commit))
    assert found(places, repo) is None


@pytest.mark.parametrize("worse", [0, 1])
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda repo, commit: purge(repo, forget(repo, commit)), id="purged"),
        pytest.param(lambda repo, commit: blobs.mark_damaged(repo, commit.txid, A, "for a test"), id="damaged"),
    ],
)
def test_a_copy_prefers_undamaged_blob_locations_in_live_commits(
    repo: Repository, harm: Callable[[Repository, Commit], object], worse: int
) -> None:
    both = [save(repo, step=step, texts=["a"]) for step in (0, 1)]
    places = BlobLocations(repo, {A})
    assert found(places, repo) in {one.txid for one in both}
    harm(repo, both[worse])
    assert found(places, repo) == both[1 - worse].txid


def test_a_blob_of_a_different_size_is_a_different_blob(repo: Repository) -> None:
    commit = save(repo, texts=["a"])
    assert BlobLocations(repo, {A}).locate(list_commits(repo), {A: BlobRef(A, 2, commit.txid)}) == {}


def test_copying_many_checkpoints_reads_each_target_manifest_once(
    repo: Repository, target: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = chain(repo, 8)
    looked = Counter[str]()
    learn = manifests.learn

    def counted(where: Repository, commits: list[Commit]) -> list[Commit]:
        if where is target:
            looked.update(commit.txid for commit in commits)
        return learn(where, commits)

    plan = plan_copy(source, target)
    monkeypatch.setattr(manifests, "learn", counted)
    assert len(execute(source, target, plan).copied) == 8
    assert set(looked.values()) == {1}


KEYS = ("a" * 64, "b" * 64)


def sign(repo: Repository, *numbers: int) -> list[str]:
    """Add two signatures to each of several checkpoints."""
    live = list_commits(repo).live()
    found = [f"signatures/{live[number].id}/{key}" for number in numbers for key in KEYS]
    for key in found:
        repo.storage.put(key, key.encode())
    return found


def signatures(repo: Repository) -> set[str]:
    return keys(repo, "signatures/")


def test_a_copy_copies_signatures_before_its_commit(tmp_path: Path, source: Repository) -> None:
    signed = sign(source, 1, 3)
    storage = FaultyStore(memory())
    target = elsewhere(tmp_path, storage)
    copy(source, target, "run@1")
    assert signatures(target) == {*signed[:2]}
    puts = storage.keys("put")
    commit = next(key for key in puts if key.startswith("commits/"))
    assert puts.index(commit) > max(map(puts.index, signed[:2]))
    assert storage.get(signed[0], limit=1 << 20) == signed[0].encode()
    copy(source, target)
    assert signatures(target) == {*signed}


def test_a_signature_added_later_is_copied_by_the_next_copy(tmp_path: Path, source: Repository) -> None:
    target = elsewhere(tmp_path)
    copy(source, target)
    signed = sign(source, 2)
    copy(source, target)
    assert signatures(target) == {*signed}
    copy(source, target)


def test_an_unreadable_signature_does_not_stop_a_copy(
    tmp_path: Path, source: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    large, small = sign(source, 1)
    source.storage.replace(large, bytes((1 << 20) + 1))
    target = elsewhere(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(copy(source, target).copied) == 4
    assert large in caplog.text
    assert signatures(target) == {small}


def test_two_simultaneous_copies_of_signatures_succeed(tmp_path: Path, source: Repository) -> None:
    signed = sign(source, 1)
    storage = FaultyStore(memory())
    target = elsewhere(tmp_path, storage)
    target.create()
    storage.inner.put(signed[0], signed[0].encode())
    storage.inject(fail_before("list", key="nothing"))
    copy(source, target)
    assert signatures(target) == {*signed}


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_gc_deletes_signatures_of_purged_checkpoints_without_errors(tmp_path: Path, where: str) -> None:
    storage = memory() if where == "memory" else LocalStore(tmp_path / "store")
    repo = chain(repository(tmp_path, storage))
    signed = sign(repo, 0, 1)
    forget(repo, list_commits(repo).live()[0])
    result = run_gc(repo)
    assert ([one.step for one in result.purged], result.foreign) == ([0], ())
    assert signatures(repo) == {*signed[2:]}
    assert all(finding.ok is not False for finding in examine(repo))
    assert not verify(repo).is_damaged
    sizes = Sizes(repo, list_commits(repo))
    assert sizes.stats().checkpoints == 3
    assert not sizes.usage().unreadable


@pytest.mark.parametrize("near", [True, False])
def test_a_copy_into_a_full_mirror_ends_in_a_folder_and_can_be_continued_in_a_bucket(
    tmp_path: Path, near: bool
) -> None:
    """In a folder, gc of the mirror need not wait for it. In a bucket, nothing would remove what it has uploaded."""
    repo = repository(tmp_path / "source")
    storage = FaultyStore(memory()) if near else FarStore(memory())
    target = repository(tmp_path / "mirror", storage)
    storage.inject(fail_before("put", key="objects/*.manifest", error=StorageError("full", full=True)))
    commit = save_parts(repo, {"w": array(1)})
    with pytest.raises(StorageError, match="full"):
        replicate(repo, target, commit, replace(ONE_BY_ONE, for_mirror=True))
    assert bool(transactions.open_transactions(target, set())) is not near
    replicate(repo, target, commit, replace(ONE_BY_ONE, for_mirror=True))
    assert len(blob_puts(storage)) == (2 if near else 1)
