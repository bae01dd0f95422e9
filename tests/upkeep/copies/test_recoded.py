"""Copies into blobs of a different size, and repacking in place: killed, concurrent, undone, and followed by saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from casckpt.contents import manifests
from casckpt.contents.refs import resolve
from casckpt.errors import CasckptError, Conflict, Damaged, InvalidInput
from casckpt.format.encodings.frames import encode_planes
from casckpt.format.names import ManifestId
from casckpt.history import commits
from casckpt.history.commits import list_commits
from casckpt.history.tags import set_tag
from casckpt.repository.repository import Repository
from casckpt.storage.base import ObjectStore
from casckpt.store.store import Store
from casckpt.upkeep import repack as recoding
from casckpt.upkeep.copies.copy import CopyResult, plan_copy
from casckpt.upkeep.repair.verify import verify
from tests.support.announced import undecided
from tests.support.checkpoints import array, flip, only_blob, read_arrays, save_arrays
from tests.support.copies import chain, check_clean, contents, copy, elsewhere
from tests.support.dying import WAYS, Dying, Killed
from tests.support.faulty import FaultyStore, call_first
from tests.support.gcs import collect, snapshot
from tests.support.repositories import meanwhile, memory, repository
from tests.support.saves import blob_keys, cells, data_of, same_state, small, trained

LARGE = 1 << 20


def recode(source: Repository, target: Repository, *refs: str, **options: object) -> CopyResult:
    return copy(source, target, *refs, **{"blob_bytes": LARGE, "jobs": 1} | options)


def sizes(repo: Repository) -> dict[int, int]:
    """Return the number of blobs of each step."""
    return {one.step: len(manifests.blob_list(repo, one)) for one in list_commits(repo).visible()}


def odd_state() -> dict[str, Any]:
    """Return a state with various dtypes and shapes, small and large cells, equal and tied tensors, objects and
    buffers."""
    raw = cells(40, seed=1)
    tied = cells(2.5, seed=2)
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool)
    return {
        "model": {f"{kind}": (raw[:700] * 10).to(kind).reshape(70, 10).t() for kind in kinds},
        "tied": {"a": tied, "b": tied, "part": tied[: len(tied) // 2]},
        "large": raw,
        "packed": raw[:400].to(torch.float8_e4m3fn),
        "empty": torch.zeros(3, 0),
        "scalar": torch.tensor(1.5),
        "many": [torch.full((n % 7,), float(n)) for n in range(150)],
        "object": {"bytes": b"z" * 70_000, "numbers": [1, 2.5, None]},
    }


@pytest.mark.parametrize("blob_bytes", [4096, 32 << 10, 1 << 20])
@pytest.mark.parametrize("where", ["elsewhere", "in place"])
def test_a_repacked_checkpoint_keeps_its_id_and_content(where: str, blob_bytes: int) -> None:
    source = small()
    files = {"short.txt": b"a" * 10, "long.bin": bytes(range(256)) * 300}
    for step in range(3):
        source.save(odd_state() | {"own": cells(3, seed=step)}, run="a", step=step, attachments=files)
    source.tag("best", "a@1")
    before = [(one.id, one.step, one.commit.committed.created_at) for one in source.checkpoints()]
    target = source if where == "in place" else Store(Repository(memory(near=False)))
    done = source.copy_to(target, tags=where == "elsewhere", blob_bytes=blob_bytes)
    assert [(one.id, one.step, one.commit.committed.created_at) for one in target.checkpoints()] == before
    for step in range(3):
        assert same_state(target.read(f"a@{step}"), odd_state() | {"own": cells(3, seed=step)})
    assert target.read_attachment("tag:best", "long.bin") == files["long.bin"]
    assert target.get("tag:best").id == target.get("a@1").id
    assert target.get("latest").step == 2
    assert not target.verify().is_damaged
    if where == "elsewhere":
        assert all(data_of(target, key) <= max(blob_bytes, 4096) for key in blob_keys(target))
        assert target.repository.marker.blob_bytes == blob_bytes
    again = source.copy_to(target, blob_bytes=blob_bytes)
    assert (list(again.copied), len(again.present)) == ([], 3)
    assert len(done.copied) == 3 or blob_bytes < 1 << 20
    later = target.save(odd_state() | {"own": cells(3, seed=2)}, run="a", step=3, attachments=files)
    assert later.stats.bytes_written == 0
    target.gc(min_age=0)
    assert not target.verify().is_damaged


def test_many_small_blobs_are_merged_into_one(source: Repository, target: Repository) -> None:
    assert recode(source, target, "run@3").blobs == 1
    assert sizes(target) == {3: 1}
    assert contents(target) == {"run@3": contents(source)["run@3"]}
    check_clean(target)


def test_repacking_in_place_starts_with_the_newest_checkpoint_and_shares_its_blobs(source: Repository) -> None:
    before = contents(source)
    plan = plan_copy(source, source, blob_bytes=LARGE)
    assert [one.step for one in plan.missing] == [3, 2, 1]
    assert [one.step for one in plan.present] == [0]
    result = recode(source, source)
    assert ([one.step for one in result.copied], result.blobs) == ([3, 2, 1], 1)
    assert (sizes(source), contents(source)) == ({0: 1, 1: 1, 2: 1, 3: 1}, before)
    assert [one.committed.parent for one in list_commits(source).visible()] == [None] * 4
    assert recode(source, source).copied == ()
    check_clean(source)
    assert contents(source) == before


def test_small_blobs_that_a_newer_checkpoint_uses_remain_shared(source: Repository) -> None:
    save_arrays(source, {"t0": array(0), "own": array(9)}, step=4, reuse=resolve(source, "run@0"))
    recode(source, source)
    found = snapshot(source)
    assert recode(source, source).copied == ()
    assert snapshot(source) == found
    sharing = [set(manifests.blob_list(source, one).names()) for one in list_commits(source).visible()]
    assert set.intersection(*sharing[1:])  # the first checkpoint had a single blob


def test_a_dry_run_in_place_writes_nothing(source: Repository) -> None:
    before = snapshot(source)
    plan = plan_copy(source, source, ["run@2"], blob_bytes=LARGE)
    assert [one.step for one in plan.missing] == [2]
    assert plan.nbytes == sum(manifests.get(source, resolve(source, "run@2")).blob_sizes)
    assert snapshot(source) == before


def test_invalid_repacking_options_are_rejected(source: Repository, target: Repository) -> None:
    with pytest.raises(InvalidInput, match="or a blob size"):
        copy(source, source)
    for blob_bytes in (0, 4095, (1 << 30) + 1):
        with pytest.raises(InvalidInput, match="from 4KiB to 1GiB"):
            recode(source, target, blob_bytes=blob_bytes)
    assert not target.exists()


@pytest.mark.parametrize("where", ["elsewhere", "in place"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_damage_in_the_source_is_reported_and_nothing_changes(
    source: Repository, target: Repository, where: str, how: str
) -> None:
    blob = only_blob(source, resolve(source, "run@2"))
    if how == "gone":
        source.storage.delete(blob)
    else:
        flip(source, blob, 5000)
    into = source if where == "in place" else target
    visible = [one.txid for one in list_commits(source).visible()]
    result = recode(source, into, "run@2")
    (failed,) = result.failed
    assert isinstance(failed.error, Damaged)
    assert (failed.error.blob, failed.error.keys) == (blob.split("/")[2].split(".")[0], ("t2",))
    assert [one.txid for one in list_commits(into).visible()] == (visible if into is source else [])
    if into is target:
        check_clean(target)


def test_a_damaged_manifest_does_not_stop_repacking_of_other_checkpoints(source: Repository) -> None:
    commit = resolve(source, "run@2")
    flip(source, f"objects/{commit.txid}/{commit.id}.manifest", 40)
    result = recode(Repository(source.storage, source.cache_dir), source)
    assert [one.commit.step for one in result.failed] == [2]
    assert [one.step for one in result.copied] == [3, 1]


# killed at any call, or left without its response


class Start:
    """A store with run@1 in several blobs, one of which it shares with run@0, and its successor run@2.

    The store can be recreated.
    """

    def __init__(self, folder: Path) -> None:
        repo = chain(repository(folder / "first", memory()), 3)
        self.id = resolve(repo, "run@1").id
        set_tag(repo, "best", resolve(repo, "run@1"))
        self.arrays = contents(repo)
        self.objects = {entry.key: repo.storage.get(entry.key, limit=1 << 24) for entry in repo.storage.list("")}

    def again(self) -> ObjectStore:
        storage = memory()
        for key, data in self.objects.items():
            storage.put(key, data)
        return storage


def check_now(repo: Repository, id: ManifestId, arrays: dict[str, bytes]) -> None:
    """Check the invariants of a store that is being repacked in place."""
    (visible,) = (one for one in list_commits(repo).visible() if one.id == id)
    assert resolve(repo, "run@1") == resolve(repo, id) == resolve(repo, "tag:best") == visible
    assert resolve(repo, "run@latest").step == 2
    assert read_arrays(repo, visible) == arrays


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_repacking_in_place_survives_a_kill_at_any_call(tmp_path: Path, way: str) -> None:
    start = Start(tmp_path)
    at, ended = 0, False
    while not ended:
        at += 1
        folder, storage = tmp_path / f"{at}", start.again()
        dying = Dying(storage, at, way)
        with suppress(Killed, CasckptError):
            repo = repository(folder / "cut off", dying, seed=3)
            recode(repo, repo, "run@1")
        ended = dying.changes < at
        repo = repository(folder / "next", storage, seed=4)
        check_now(repo, start.id, start.arrays["run@1"])
        recode(repo, repo).raise_failure()
        check_now(repo, start.id, start.arrays["run@1"])
        for _ in range(3):
            collect(repo, wait=0.0, revoke_after=0.0)
            check_now(repo, start.id, start.arrays["run@1"])
        assert (sizes(repo)[1], contents(repo)) == (1, start.arrays)
        assert not verify(repo).is_damaged
        listed = list_commits(repo)
        assert listed.live() == listed.visible()
        assert (undecided(repo), list(storage.list("transactions/"))) == ([], [])
        assert contents(repository(folder / "new", storage, seed=5)) == start.arrays
    assert at > 5


@pytest.mark.sweep
@pytest.mark.parametrize("next_one", ["recoded", "as it is"])
@pytest.mark.parametrize("way", WAYS)
def test_a_repacking_copy_killed_at_any_call_is_resumed(
    tmp_path: Path, source: Repository, way: str, next_one: str
) -> None:
    at, ended = 0, False
    while not ended:
        at += 1
        storage = memory()
        dying = Dying(storage, at, way)
        with suppress(Killed, CasckptError):
            recode(source, elsewhere(tmp_path / f"{at}", dying, seed=3), "run@3")
        ended = dying.changes < at
        target = elsewhere(tmp_path / f"next {at}", storage, seed=4)
        if target.exists():
            assert contents(target) in ({}, {"run@3": contents(source)["run@3"]})
        copy(source, target, "run@3", blob_bytes=LARGE if next_one == "recoded" else None).raise_failure()
        (commit,) = list_commits(target).visible()
        assert commit.id == resolve(source, "run@3").id
        assert contents(target) == {"run@3": contents(source)["run@3"]}
        check_clean(target)
        assert contents(target) == {"run@3": contents(source)["run@3"]}
    assert at > 6


# concurrent processes


@pytest.mark.parametrize("other", ["recoded", "as it is", "of another size"])
@pytest.mark.parametrize("where", ["*.safetensors", "*.manifest", "commits/*"])
def test_simultaneous_repacking_copies_create_a_single_commit(
    tmp_path: Path, source: Repository, other: str, where: str
) -> None:
    inner = memory()
    blob_bytes = {"recoded": LARGE, "as it is": None, "of another size": 8192}[other]

    def another() -> None:
        copy(source, elsewhere(tmp_path / "other", inner, seed=9), "run@3", blob_bytes=blob_bytes).raise_failure()

    first = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", meanwhile(another), key=where)]))
    assert len(recode(source, first, "run@3").copied) == 1
    assert len(list_commits(first).live()) == 1
    assert contents(first) == {"run@3": contents(source)["run@3"]}
    check_clean(first)
    assert contents(first) == {"run@3": contents(source)["run@3"]}


CHANGES: dict[str, Callable[[Repository], object]] = {
    "forgotten": lambda repo: commits.forget(repo, resolve(repo, "run@3")),
    "packed by another": lambda repo: recode(repo, repo, "run@3"),
    "forgotten and restored": lambda repo: commits.restore(repo, commits.forget(repo, resolve(repo, "run@3"))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["objects/*", "commits/*", "commits/*.1"])
def test_a_change_to_a_checkpoint_made_during_repacking_takes_precedence(
    tmp_path: Path, change: str, where: str
) -> None:
    inner = memory()
    arrays = contents(chain(repository(tmp_path / "other", inner, seed=5)))
    other = repository(tmp_path / "other", inner, seed=6)
    repo = repository(
        tmp_path, FaultyStore(inner, [call_first("put", meanwhile(lambda: CHANGES[change](other)), key=where)]), seed=7
    )
    result = recode(repo, repo, "run@3")
    assert [type(one.error) for one in result.failed] == [Conflict]
    found = contents(repository(tmp_path / "new", inner, seed=8))
    assert found == {name: data for name, data in arrays.items() if change != "forgotten" or name != "run@3"}
    for _ in range(2):
        collect(other, wait=0.0, revoke_after=0.0)
    assert contents(other) == found
    assert list_commits(other).live() == list_commits(other).visible()
    check_clean(other)


def test_a_running_load_continues_from_the_new_location() -> None:
    faults = FaultyStore(memory(near=False))
    store = small(faults)
    state = {f"w{n}": cells(15, seed=n) for n in range(6)}
    store.save(state, step=1)
    other = Repository(faults.inner)

    def change() -> None:
        assert len(recode(other, other).copied) == 1
        collect(other)

    faults.inject(call_first("read_into", meanwhile(change), key="objects/*.safetensors", at=3))
    assert same_state(store.read("default@1"), state)
    assert len(blob_keys(store)) == 1


def test_a_restore_undoes_repacking(source: Repository) -> None:
    before, old = contents(source), resolve(source, "run@3")
    recode(source, source, "run@3")
    assert resolve(source, "run@3").places != old.places
    commits.restore(source, old)
    assert (resolve(source, "run@3").places, contents(source)) == (old.places, before)
    check_clean(source)
    assert contents(source) == before


def test_repacking_frees_the_space_of_worn_blobs(tmp_path: Path) -> None:
    """The run still uses small parts of old blobs."""
    store = small(blob_bytes=LARGE)
    first = {f"w{n}": cells(10, seed=n) for n in range(10)}
    store.save(first, run="a", step=0)
    last = {f"w{n}": cells(10, seed=n if n < 1 else 100 + n) for n in range(10)}
    store.save(last, run="a", step=1)
    assert store.copy_to(store, "a@1", blob_bytes=4096, dry_run=True).copied == ()  # step 0 uses all of these blobs
    store.forget("a@0")
    store.gc(min_age=0)
    before = sum(data_of(store, key) for key in blob_keys(store))
    assert len(store.copy_to(store, blob_bytes=4096).copied) == 1
    store.gc(min_age=0)
    assert sum(data_of(store, key) for key in blob_keys(store)) < 0.6 * before
    assert same_state(store.read("a@1"), last)
    assert not store.verify().is_damaged


# encoded


def floats() -> dict[str, Any]:
    """Return floats that are worth encoding, floats that are not, and other dtypes."""
    raw = cells(40, seed=5)
    noise = torch.randint(0, 255, (8 * 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    kinds = {str(kind): raw[: 12 * 1024].to(kind) for kind in (torch.bfloat16, torch.float16, torch.float64)}
    more = {"master": raw, "complex": raw[:8192].to(torch.complex64), "noise": noise.view(torch.bfloat16)}
    return kinds | more | odd_state()


def encoded(store: Store, target: Store, *refs: str, **options: Any) -> CopyResult:
    return store.copy_to(target, *refs, compress="always", **options)


@pytest.mark.parametrize("options", [{}, {"blob_bytes": LARGE}, {"blob_bytes": 8192, "jobs": 1}])
def test_repacking_encodes_floats_and_preserves_values(options: dict[str, Any]) -> None:
    store, target = small(), small()
    for step in range(3):
        store.save(floats() | {"n": torch.full((3000,), step / 7).bfloat16()}, step=step, metadata={"step": step})
    result = encoded(store, target, **options)
    assert len(result.copied) == 3
    for mine, other in zip(store.checkpoints(), target.checkpoints(), strict=True):
        assert (mine.id, mine.metadata, mine.created_at) == (other.id, other.metadata, other.created_at)
        assert same_state(target.read(other), store.read(mine))
        stats = other.stats
        assert 0 < stats.bytes_frames < 0.9 * stats.bytes_coded
        assert stats.bytes_deltas == 0
    first, *later = (one.stats for one in target.checkpoints())
    headers = 4096 * first.blobs_written
    assert first.bytes_written - headers < 0.9 * store.get("default@0").stats.bytes_written
    assert all(one.bytes_written < first.bytes_written / 10 for one in later), "what was encoded before is reused"
    found = target.verify(decode=True)
    assert found.decoded_bytes
    assert not found.is_damaged
    again = encoded(store, target)
    assert (len(again.copied), len(again.present)) == (0, 3)
    target.save(floats(), step=3)
    assert same_state(target.read("default@3"), floats())


def test_frames_are_repacked_unchanged() -> None:
    store, target, other = small(), small(), small()
    for step in range(3):
        store.save({"w": trained(20, step)}, step=step, compress="auto" if step else "off")
    encoded(store, target)
    store.copy_to(other)
    told = [one.stats.bytes_deltas for one in store.checkpoints()]
    assert [one.stats.bytes_deltas for one in target.checkpoints()] == told
    assert target.get("default@0").stats.bytes_frames > 0 == other.get("default@0").stats.bytes_frames
    assert not target.verify(decode=True).is_damaged
    assert [same_state(target.read(f"default@{step}"), {"w": trained(20, step)}) for step in range(3)] == [True] * 3


def test_a_frame_that_decodes_to_different_bytes_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    store, target = small(), small()
    store.save({"w": trained(20, 0)}, step=0)

    def wrong(plain: memoryview, width: int) -> bytes | None:
        return encode_planes(memoryview(bytes(plain[2:]) + b"xx"), width)

    with patch.object(recoding, "encode_planes", wrong):
        encoded(store, target)
    assert "an encoded cell decodes to something else" in caplog.text
    assert target.get("default@0").stats.bytes_coded == 0
    assert same_state(target.read("default@0"), {"w": trained(20, 0)})


def test_an_interrupted_encoding_copy_is_complete_or_absent() -> None:
    store, at, ended = small(), 0, False
    store.save({"w": trained(20, 0), "m": cells(20)}, step=0)
    while not ended:
        at += 1
        storage = memory()
        small(storage)
        dying = Dying(storage, at, WAYS[at % len(WAYS)])
        with suppress(Killed, CasckptError):
            encoded(store, Store(Repository(dying)), jobs=1)
        ended = dying.changes < at
        encoded(store, Store(Repository(storage)), jobs=1)
        found = Store(Repository(storage))
        assert found.get("default@0").stats.bytes_frames > 0
        assert not found.verify(decode=True).is_damaged
        assert same_state(found.read("default@0"), store.read("default@0"))


def test_unsupported_encoding_options_are_rejected() -> None:
    store, target = small(), small()
    store.save({"w": trained(20, 0)}, step=0)
    with pytest.raises(InvalidInput, match="in place"):
        encoded(store, store, blob_bytes=LARGE)
    with pytest.raises(InvalidInput, match="always"):
        store.copy_to(target, compress="auto")  # type: ignore[arg-type]  # wrong on purpose
