"""Copies between stores: only what is missing, verified, whole or not there, whatever fails, dies or runs beside."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from casckpt.errors import CasckptError, Conflict, Damaged, InvalidInput, NotFound, Refused, StorageError
from casckpt.format import manifest as format_manifest
from casckpt.format import records
from casckpt.format.digest import hex_digest
from casckpt.format.keys import MARKER, blob_key, copied_txid, manifest_key, parse_txid, transaction_key
from casckpt.format.names import ManifestId, TxId
from casckpt.plan.retention import Policy
from casckpt.repository import commits, gc, manifests, replicating, tags, transactions
from casckpt.repository.commits import Commit, list_commits
from casckpt.repository.copying import CopyResult, execute, plan_copy, preview
from casckpt.repository.processes import this_process
from casckpt.repository.refs import resolve
from casckpt.repository.replicating import Work, replicate
from casckpt.repository.repository import Repository
from casckpt.repository.verify import verify
from casckpt.storage.base import ObjectStore
from casckpt.storage.buffers import BufferPool
from casckpt.storage.local import LocalStore
from tests.support.checkpoints import CELL, array, content, flip, only_blob, read_arrays, save_arrays
from tests.support.faulty import FaultyStore, call_first, fail_after, fail_before
from tests.support.repositories import START, Ticks, commit_bare, meanwhile, memory, repository

ONE_BY_ONE = Work(jobs=1)
_HOURS = itertools.count(1)


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    """run@0 to run@3, each with a blob of its own and those of the ones before."""
    return chain(repository(tmp_path))


def chain(repo: Repository, count: int = 4) -> Repository:
    arrays, last = {}, None
    for step in range(count):
        arrays[f"t{step}"] = array(step)
        last = save_arrays(repo, arrays, step=step, reuse=last, bytes_total=2 * CELL * (step + 1), metadata={"n": step})
    return repo


@pytest.fixture
def target(tmp_path: Path) -> Repository:
    """Nothing is there yet."""
    return elsewhere(tmp_path)


def elsewhere(tmp_path: Path, storage: ObjectStore | None = None, seed: int = 2) -> Repository:
    clock = Ticks(START + next(_HOURS) * 3_600_000_000)
    return Repository(storage or memory(), tmp_path / "cache", clock=clock, entropy=random.Random(seed).randbytes)


def copy(source: Repository, target: Repository, *refs: str | Commit, **options: object) -> CopyResult:
    run = options.pop("run", None)
    return execute(source, target, plan_copy(source, target, refs, run=run), **options)  # type: ignore[arg-type]  # any of its arguments


def contents(repo: Repository) -> dict[str, dict[str, bytes]]:
    return {f"{one.run}@{one.step}": read_arrays(repo, one) for one in list_commits(repo).current()}


def blob_puts(storage: FaultyStore) -> list[str]:
    return [key for key in storage.keys("put") if key.endswith(".safetensors")]


def check_clean(repo: Repository) -> None:
    """A gc that is left alone leaves exactly what live checkpoints need, and verify is content."""
    assert gc.collect(repo, wait=0.0, revoke_after=0.0).waiting == ()
    named = {key for one in list_commits(repo).live() for key in _named(repo, one)}
    assert {entry.key for entry in repo.storage.list("objects/")} == named
    assert not list(repo.storage.list("transactions/"))
    assert not verify(repo).is_damaged


def _named(repo: Repository, commit: Commit) -> list[str]:
    refs = manifests.get(repo, commit).blobs
    return [manifest_key(commit.committed.uploader, commit.id), *(blob_key(ref.uploader, ref.hash) for ref in refs)]


# what a copy is


def test_a_copy_keeps_ids_times_order_and_content(source: Repository, target: Repository) -> None:
    result = copy(source, target)
    assert (len(result.copied), result.failed, result.made_store) == (4, (), True)
    assert contents(target) == contents(source)
    for one, other in zip(list_commits(source).current(), list_commits(target).current(), strict=True):
        kept = ("txid", "run", "step", "manifest", "created_at", "bytes_total", "metadata", "ephemeral", "parent")
        assert [getattr(one.committed, name) for name in kept] == [getattr(other.committed, name) for name in kept]
    assert [one.committed.blobs_written for one in result.copied] == [1, 1, 1, 1]
    assert [one.committed.blobs_reused for one in result.copied] == [0, 1, 2, 3]
    check_clean(target)


def test_a_store_that_a_copy_makes_has_the_sizes_of_the_source(tmp_path: Path, target: Repository) -> None:
    source = elsewhere(tmp_path, seed=3)
    source.create(cell_bytes=8192, blob_bytes=1 << 20)
    assert copy(source, target).made_store
    assert (target.marker.cell_bytes, target.marker.blob_bytes) == (8192, 1 << 20)
    assert target.marker.store_id != source.marker.store_id


def test_the_source_is_only_read(tmp_path: Path, target: Repository) -> None:
    storage = FaultyStore(memory())
    source = chain(repository(tmp_path, storage))
    tags.set_tag(source, "best", resolve(source, "run@1"))
    storage.calls.clear()
    copy(source, target, with_tags=True)
    assert {call.method for call in storage.calls} <= {"get", "list", "open", "read_into", "size"}


def test_large_blobs_share_a_bounded_memory(
    source: Repository, target: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    class Pool(BufferPool):
        def __init__(self, count: int, nbytes: int) -> None:
            made.append((count, nbytes))
            super().__init__(count, nbytes)

    monkeypatch.setattr(replicating, "BufferPool", Pool)
    monkeypatch.setattr(replicating, "_MEMORY", 30_000)
    copy(source, target, "run@3", jobs=8)
    assert made == [(30_000 // made[0][1], made[0][1])]
    assert 1 < made[0][0] < 4


def test_a_second_copy_puts_nothing(source: Repository, target: Repository) -> None:
    copy(source, target)
    target.storage.counts.puts = source.storage.counts.bytes_read = 0  # type: ignore[attr-defined]  # a storage that counts
    result = copy(source, target)
    assert (len(result.present), result.copied, result.nbytes) == (4, (), 0)
    assert target.storage.counts.puts == 0  # type: ignore[attr-defined]  # a storage that counts
    assert source.storage.counts.bytes_read == 0  # type: ignore[attr-defined]  # a storage that counts


def test_only_what_is_missing_is_read_and_put(tmp_path: Path, target: Repository) -> None:
    storage = FaultyStore(memory())
    source = chain(repository(tmp_path, storage))
    copy(source, target, "run@2")
    before = len(storage.calls)
    result = copy(source, target)
    opened = [call.key for call in storage.calls[before:] if call.method == "open"]
    assert opened == [only_blob(source, resolve(source, "run@3"))]
    assert (len(result.copied), result.blobs) == (3, 1)


def test_what_others_have_stored_under_other_names_is_reused(source: Repository, target: Repository) -> None:
    target.create()
    save_arrays(target, {"t0": array(0)}, "theirs")
    assert copy(source, target, "run@0").blobs == 0
    assert contents(target)["run@0"] == content({"t0": array(0)})


def test_the_latest_of_a_run_stays_it_when_an_older_one_comes(source: Repository, target: Repository) -> None:
    copy(source, target, "run@3")
    copy(source, target, "run@0")
    assert resolve(target, "run@latest").step == 3
    mine = target.new_txid("run", 4, after=[one.txid for one in list_commits(target).live()])
    assert parse_txid(mine).time > parse_txid(resolve(target, "run@3").txid).time


def test_names_ranges_and_runs_choose(source: Repository, target: Repository) -> None:
    save_arrays(source, {"o": array(9)}, "other", 7)
    assert [one.step for one in copy(source, target, "run@1..2").copied] == [1, 2]
    assert [one.run for one in copy(source, target, run="other").copied] == ["other"]
    with pytest.raises(NotFound, match="nobody"):
        copy(source, target, "nobody@1")


def test_a_dry_run_writes_nothing(source: Repository, target: Repository) -> None:
    plan = plan_copy(source, target)
    found = preview(source, target, plan).to_json()
    assert (len(found["copied"]), found["dry_run"], found["made_store"]) == (4, True, True)
    assert not target.exists()
    assert found["bytes_copied"] == copy(source, target).nbytes
    assert found["bytes_copied"] < plan.total  # shared blobs count for each that names them


def test_progress_adds_up(source: Repository, target: Repository) -> None:
    done: list[int] = []
    plan = plan_copy(source, target)
    execute(source, target, plan, progress=done.append)
    assert sum(done) == plan.total


def test_tags_come_along_when_they_are_asked_for(source: Repository, target: Repository) -> None:
    tags.set_tag(source, "best", resolve(source, "run@1"))
    tags.set_tag(source, "other", resolve(source, "run@2"))
    assert copy(source, target, "run@1").tags == ()
    assert copy(source, target, "run@1", with_tags=True).tags == ("best",)
    assert {name: tag.manifest for name, tag in tags.tags(target).items()} == {"best": resolve(source, "run@1").id}
    assert copy(source, target, "run@1", with_tags=True).tags == ()


def test_a_body_that_a_later_version_wrote_stays_to_the_byte(tmp_path: Path, target: Repository) -> None:
    source = repository(tmp_path)
    old = save_arrays(source, {"t": array(1)})
    key = manifest_key(old.committed.uploader, old.id)
    data = _with_field(source.storage.get(key, limit=1 << 20), "of the future")
    txid = source.new_txid("run", 0)
    id = ManifestId(hex_digest(data[16 : 16 + int.from_bytes(data[8:16], "little")]))
    source.storage.put(manifest_key(txid, id), data)
    made = commit_bare(source, "run", 0, manifest=id, txid=txid)
    commits.forget(source, old)
    assert copy(source, target).copied[0].id == made.id
    assert contents(target) == contents(source)


def _with_field(data: bytes, name: str) -> bytes:
    end = 16 + int.from_bytes(data[8:16], "little")
    body = msgspec.msgpack.encode(msgspec.msgpack.decode(data[16:end]) | {name: 1})
    return b"".join((data[:8], len(body).to_bytes(8, "little"), body, data[end:]))


# what the destination has its own mind about


def test_a_place_that_is_taken_is_a_conflict_and_the_others_are_copied(source: Repository, target: Repository) -> None:
    target.create()
    mine = save_arrays(target, {"mine": array(5)}, step=1)
    result = copy(source, target)
    assert [one.step for one in result.copied] == [0, 2, 3]
    with pytest.raises(Conflict, match=r"run@1 .* was not copied") as raised:
        result.raise_failure()
    assert set(raised.value.checkpoints) == {mine.id, resolve(source, "run@1").id}
    assert resolve(target, "run@1").id == mine.id
    check_clean(target)


def test_a_place_that_is_taken_at_the_last_moment(source: Repository, tmp_path: Path) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()
    hook = meanwhile(lambda: save_arrays(other, {"mine": array(5)}, step=1))
    target = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", hook, key="transactions/*")]))
    with pytest.raises(Conflict, match="another checkpoint"):
        copy(source, target, "run@1").raise_failure()
    check_clean(target)


def test_two_that_copy_the_same_tags_at_once(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    tags.set_tag(source, "best", resolve(source, "run@1"))

    def first() -> None:
        copy(source, elsewhere(tmp_path, inner, seed=9), with_tags=True)

    storage = FaultyStore(inner, [call_first("put", meanwhile(first), key="tags/*")])
    result = copy(source, elsewhere(tmp_path, storage), with_tags=True)
    assert result.tags == ("best",)
    assert {name: tag.generation for name, tag in tags.tags(elsewhere(tmp_path, inner)).items()} == {"best": 0}


def test_a_tag_that_another_moves_elsewhere_while_it_is_copied(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    tags.set_tag(source, "best", resolve(source, "run@1"))

    def other() -> None:
        target = elsewhere(tmp_path, inner, seed=9)
        tags.set_tag(target, "best", resolve(target, "run@2"))

    storage = FaultyStore(inner, [call_first("put", meanwhile(other), key="tags/*")])
    with pytest.raises(Conflict, match="moved by somebody else"):
        copy(source, elsewhere(tmp_path, storage), with_tags=True)


def test_what_the_destination_forgot_stays_so_unless_it_is_named(source: Repository, target: Repository) -> None:
    copy(source, target)
    commits.forget(target, resolve(target, "run@0"))
    gc.collect(target)
    commits.forget(target, resolve(target, "run@1"))
    result = copy(source, target)
    assert ([one.step for one in result.left], result.copied) == ([0, 1], ())
    result = copy(source, target, "run@0..1")
    assert ([one.step for one in result.copied], [one.step for one in result.restored]) == ([0], [1])
    assert contents(target) == contents(source)
    assert result.copied[0].txid == copied_txid(resolve(source, "run@0").txid, 1)
    check_clean(target)


def test_a_forgotten_one_is_copied_if_it_is_named(source: Repository, target: Repository) -> None:
    old = commits.forget(source, resolve(source, "run@0"))
    assert [one.step for one in copy(source, target).copied] == [1, 2, 3]
    assert [one.id for one in copy(source, target, old.id).copied] == [old.id]


def test_what_cannot_be_copied_is_refused(tmp_path: Path, source: Repository, target: Repository) -> None:
    with pytest.raises(InvalidInput, match="into itself"):
        copy(source, source)
    with pytest.raises(NotFound, match="no store"):
        copy(elsewhere(tmp_path), target)
    for options in ({"jobs": 0}, {"part": (2, 2)}):
        with pytest.raises(InvalidInput, match="usable"):
            copy(source, target, **options)
    assert not target.exists()


# sources that are damaged or hostile


def spoil(repo: Repository, key: str, how: str) -> None:
    if how == "gone":
        repo.storage.delete(key)
    elif how == "short":
        repo.storage.replace(key, repo.storage.get(key, limit=1 << 20)[:-100])
    else:
        flip(repo, key, 5000 if how == "flipped" else 20)


@pytest.mark.parametrize("how", ["flipped", "header", "gone", "short"])
def test_a_damaged_blob_is_named_and_nothing_of_it_is_visible(source: Repository, target: Repository, how: str) -> None:
    blob = only_blob(source, resolve(source, "run@2"))
    whole = source.storage.get(blob, limit=1 << 20)
    spoil(source, blob, how)
    result = copy(source, target)
    assert [one.step for one in result.copied] == [0, 1]
    assert [(one.commit.step, one.error.kind) for one in result.failed] == [(2, "damaged"), (3, "damaged")]
    with pytest.raises(Damaged, match="2 checkpoints were not copied") as raised:
        result.raise_failure()
    assert (raised.value.blob, raised.value.keys) == (blob.split("/")[2].split(".")[0], ("t2",))
    assert sorted(contents(target)) == ["run@0", "run@1"]
    check_clean(target)
    source.storage.replace(blob, whole)
    assert len(copy(source, target).copied) == 2
    check_clean(target)


def test_a_damaged_manifest_is_named(source: Repository, target: Repository) -> None:
    commit = resolve(source, "run@2")
    flip(source, manifest_key(commit.committed.uploader, commit.id), 40)
    result = copy(replace(source), target)
    assert [(one.commit.step, one.error.kind) for one in result.failed] == [(2, "damaged")]
    check_clean(target)


def test_a_commit_that_says_other_than_its_manifest_is_refused(source: Repository, target: Repository) -> None:
    commit = resolve(source, "run@2").committed
    for run, step in (("other", 2), ("run", 9)):
        made = commit_bare(source, run, step, manifest=commit.manifest, uploader=commit.uploader)
        with pytest.raises(Refused, match="not that of its manifest"):
            copy(source, target, made).raise_failure()
    assert not list_commits(target).commits


def test_an_id_of_another_run_or_of_the_future_is_refused(source: Repository, target: Repository) -> None:
    commit = resolve(source, "run@2").committed
    ahead = TxId(f"2999{commit.txid[4:]}")
    other = source.new_txid("other", 2)
    for txid, why in ((ahead, "in the future"), (other, "not that of its manifest")):
        made = commit_bare(source, "run", 2, manifest=commit.manifest, uploader=commit.uploader, txid=txid)
        with pytest.raises(Refused, match=why):
            copy(source, target, made).raise_failure()
    assert not list_commits(target).commits


def test_extents_that_lie_are_refused(source: Repository, target: Repository) -> None:
    commit = resolve(source, "run@0")
    body, places = (getattr(manifests.get(source, commit), name) for name in ("body", "places"))
    packed = msgspec.msgpack.decode(body.entries[0].extents)
    packed = [1, 77, *packed[2:]] if packed[0] == 1 else [*packed[:5], b"\x01\x4d\x4d", *packed[6:]]
    entry = msgspec.structs.replace(body.entries[0], extents=msgspec.Raw(msgspec.msgpack.encode(packed)))
    hostile = msgspec.structs.replace(body, entries=[entry], step=9)
    txid = source.new_txid("run", 9)
    id, data = format_manifest.encode(hostile, places())
    source.storage.put(manifest_key(txid, id), data)
    made = commit_bare(source, "run", 9, manifest=id, txid=txid)
    with pytest.raises(Refused, match="not usable"):
        copy(source, target, made).raise_failure()
    assert not list_commits(target).commits


def test_a_store_of_the_future_is_refused(source: Repository, target: Repository) -> None:
    data = source.storage.get(MARKER, limit=1 << 20).replace(b'"format": 1', b'"format": 2')
    source.storage.replace(MARKER, data)
    with pytest.raises(Refused, match="Upgrade casckpt"):
        copy(replace(source), target)
    assert not target.exists()
    target.create()
    target.storage.replace(MARKER, data)
    with pytest.raises(Refused, match="Upgrade casckpt"):
        copy(source, replace(target))


def test_a_checkpoint_that_is_purged_meanwhile_is_a_conflict(tmp_path: Path, target: Repository) -> None:
    inner = memory()
    owner = chain(repository(tmp_path, inner))

    def purge() -> None:
        commits.forget(owner, resolve(owner, "run@0"))
        commits.forget(owner, resolve(owner, "run@1"))
        commits.forget(owner, resolve(owner, "run@2"))
        commits.forget(owner, resolve(owner, "run@3"))
        assert gc.collect(owner).deleted_blobs == 4

    hook = call_first("open", meanwhile(purge), key="objects/*")
    source = repository(tmp_path, FaultyStore(inner, [hook]), seed=8)
    result = copy(source, target)
    assert result.copied == ()
    assert {one.error.kind for one in result.failed} == {"conflict"}
    assert "purged" in str(result.failed[0].error)
    check_clean(target)


# copies that fail and that are killed


class Killed(BaseException):
    """This process ends here: nothing of it runs any more."""


def test_a_copy_that_is_killed_anywhere_is_gone_on_with(tmp_path: Path, source: Repository) -> None:
    """And no blob is put twice: the first one's transaction keeps what it put."""
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
            assert len(stored) - len(set(stored)) <= 1  # that whose put was cut off
            assert contents(second)["run@3"] == contents(source)["run@3"]
            check_clean(second)
            if ended:
                break
        else:
            pytest.fail("the copy never came to its end")


def _killed() -> Exception:
    return Killed()  # type: ignore[return-value]  # raised like one


@pytest.mark.parametrize("method", ["put", "list", "size", "get", "settle"])
def test_a_target_that_fails_anywhere_shows_nothing_and_works_later(
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


def test_a_copy_that_was_revoked_begins_anew(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()

    def revoke() -> None:
        commit = resolve(source, "run@3")
        assert transactions.revoke(other, commit.txid, "test")
        gc.collect(other, wait=0.0)

    storage = FaultyStore(inner, [call_first("put", meanwhile(revoke), key="*.manifest")])
    target = elsewhere(tmp_path, storage)
    result = copy(source, target, "run@3", jobs=1)
    assert result.copied[0].txid == copied_txid(resolve(source, "run@3").txid, 1)
    assert contents(target)["run@3"] == contents(source)["run@3"]
    check_clean(target)


def test_a_copy_that_is_revoked_again_and_again_gives_up(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()

    def revoke() -> None:
        for one in transactions.open_transactions(other, commits.list_names(other)):
            transactions.revoke(other, one.txid, "test")

    storage = FaultyStore(inner, [call_first("put", meanwhile(revoke), key="*.manifest", times=99)])
    with pytest.raises(Conflict, match="given up on 4 times"):
        copy(source, elsewhere(tmp_path, storage), "run@3").raise_failure()
    assert not list_commits(other).visible()
    check_clean(other)


def test_a_blob_that_was_to_be_reused_and_is_gone_is_marked_and_copied(source: Repository, target: Repository) -> None:
    copy(source, target, "run@2")
    gone = manifests.get(target, resolve(target, "run@2")).blob(0)
    target.storage.delete(blob_key(gone.uploader, gone.hash))
    result = copy(source, target, "run@3")
    assert result.blobs == 2
    assert read_arrays(target, resolve(target, "run@3")) == read_arrays(source, resolve(source, "run@3"))
    assert any(entry.key.startswith("damaged/") for entry in target.storage.list(""))


# several at once


def test_two_that_copy_the_same_share_the_work_and_one_commits(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    storage = FaultyStore(inner)
    other = elsewhere(tmp_path, storage, seed=9)

    def join_in() -> None:
        copy(source, other, "run@3", jobs=1)

    first = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", meanwhile(join_in), key="*.manifest")]))
    result = copy(source, first, "run@3", jobs=1)
    assert blob_puts(storage) == []  # the first one had put them all
    assert [one.txid for one in result.copied] == [resolve(source, "run@3").txid]
    assert len(list_commits(first).visible()) == 1
    check_clean(first)


def test_processes_that_share_the_work_each_say_what_all_of_them_put(tmp_path: Path, source: Repository) -> None:
    inner, said = memory(), []
    other = elsewhere(tmp_path, inner, seed=5)

    def join_in() -> None:
        said.append(copy(source, other, "run@3", part=(1, 2), jobs=1))

    first = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", meanwhile(join_in), key="*.safetensors")]))
    said.append(copy(source, first, "run@3", part=(0, 2), jobs=1))
    sizes = [entry.size for entry in inner.list("objects/") if entry.key.endswith(".safetensors")]
    assert [(one.blobs, one.nbytes) for one in said] == [(len(sizes), sum(sizes))] * 2


@pytest.mark.parametrize("part", [(0, 3), (1, 3), (2, 3)])
def test_each_part_copies_all_if_the_others_never_come(
    tmp_path: Path, source: Repository, part: tuple[int, int]
) -> None:
    target = elsewhere(tmp_path)
    copy(source, target, part=part).raise_failure()
    assert contents(target) == contents(source)


def test_a_part_begins_with_its_own(tmp_path: Path) -> None:
    source = chain(repository(tmp_path), 6)
    wanted = [ref.hash for ref in manifests.get(source, resolve(source, "run@5")).blobs]
    for number in range(3):
        storage = FaultyStore(memory())
        copy(source, elsewhere(tmp_path / str(number), storage), "run@5", part=(number, 3), jobs=1)
        put = [key.split("/")[2].split(".")[0] for key in blob_puts(storage)]
        assert put[:2] == wanted[2 * number : 2 * number + 2]
        assert sorted(put) == sorted(wanted)


def test_a_joined_transaction_is_not_dead_though_who_began_it_is(tmp_path: Path, source: Repository) -> None:
    target = elsewhere(tmp_path)
    target.create()
    commit = resolve(source, "run@3")
    dead = msgspec.structs.replace(this_process(), started=1)
    began = records.Began(txid=commit.txid, run="run", step=3, time=1, process=dead, manifest=commit.id)
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


def test_a_save_that_has_the_id_of_a_copy_is_left_alone(tmp_path: Path, source: Repository) -> None:
    """As in a folder that was copied while jobs saved."""
    target = elsewhere(tmp_path)
    target.create()
    commit = resolve(source, "run@3")
    process = this_process()
    began = records.Began(txid=commit.txid, run="run", step=3, time=1, process=process)
    target.put_record(transaction_key(commit.txid), began)
    assert copy(source, target, "run@3").copied[0].txid == copied_txid(commit.txid, 1)
    assert [one.txid for one in transactions.open_transactions(target, commits.list_names(target))] == [commit.txid]


def test_a_copy_into_a_folder_that_was_copied_by_hand_finds_all_there(tmp_path: Path) -> None:
    source = chain(repository(tmp_path, LocalStore(tmp_path / "a")))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert len(copy(source, elsewhere(tmp_path, LocalStore(tmp_path / "b"))).present) == 4


def test_replicate_returns_what_another_has_committed_meanwhile(tmp_path: Path, source: Repository) -> None:
    inner = memory()
    other = elsewhere(tmp_path, inner, seed=5)
    other.create()
    commit = resolve(source, "run@0")
    hook = meanwhile(lambda: replicate(source, other, commit, ONE_BY_ONE))
    target = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", hook, key="commits/*")]))
    assert replicate(source, target, commit, ONE_BY_ONE).commit.id == commit.id
    assert len(list_commits(target).commits) == 1
    check_clean(target)


Hook = Callable[[], None]


@pytest.mark.parametrize("error", [CasckptError, KeyboardInterrupt])
def test_what_ends_a_copy_leaves_its_transaction_for_the_next(
    tmp_path: Path, source: Repository, error: type[BaseException]
) -> None:
    target = elsewhere(tmp_path)

    def stop(nbytes: int) -> None:
        if nbytes:
            raise error("enough")

    with pytest.raises(error, match="enough"):
        copy(source, target, "run@3", progress=stop)
    assert [one.step for one in _open(target)] == [3]
    copy(source, target, "run@3").raise_failure()
    assert _open(target) == []


def _open(repo: Repository) -> list[records.Began]:
    found = transactions.open_transactions(repo, commits.list_names(repo))
    return [one.began for one in found if one.began is not None]


def test_policies_of_the_destination_see_times_of_the_source(source: Repository, target: Repository) -> None:
    copy(source, target)
    plan = gc.plan_gc(target, Policy(keep_last=1))
    assert [one.step for one in plan.forget] == [0, 1, 2]
