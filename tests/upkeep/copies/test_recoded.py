"""Copies that encode: killed, concurrent, and followed by saves."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from casckpt.contents import manifests
from casckpt.contents.refs import resolve
from casckpt.errors import CasckptError, Damaged, InvalidInput
from casckpt.format.encodings.frames import encode_planes
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep import repack as recoding
from casckpt.upkeep.copies.copy import CopyResult
from tests.support.checkpoints import flip, only_blob
from tests.support.copies import check_clean, contents, copy, elsewhere
from tests.support.dying import WAYS, Dying, Killed
from tests.support.faulty import FaultyStore, call_first
from tests.support.repositories import meanwhile, memory
from tests.support.saves import BLOB, blob_keys, cells, data_of, same_state, small, trained

LARGE = 1 << 20


def recode(source: Repository, target: Repository, *refs: str, **options: object) -> CopyResult:
    return copy(source, target, *refs, **{"compress": "always", "jobs": 1} | options)


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
def test_a_repacked_checkpoint_keeps_its_id_and_content(blob_bytes: int) -> None:
    source = small()
    files = {"short.txt": b"a" * 10, "long.bin": bytes(range(256)) * 300}
    for step in range(3):
        source.save(odd_state() | {"own": cells(3, seed=step)}, run="a", step=step, attachments=files)
    source.tag("best", "a@1")
    before = [(one.id, one.step, one.commit.committed.created_at) for one in source.checkpoints()]
    target = small(blob_bytes=blob_bytes)
    done = encoded(source, target, tags=True)
    assert [(one.id, one.step, one.commit.committed.created_at) for one in target.checkpoints()] == before
    for step in range(3):
        assert same_state(target.read(f"a@{step}"), odd_state() | {"own": cells(3, seed=step)})
    assert target.read_attachment("tag:best", "long.bin") == files["long.bin"]
    assert target.get("tag:best").id == target.get("a@1").id
    assert target.get("latest").step == 2
    assert not target.verify().is_damaged
    assert all(data_of(target, key) <= blob_bytes for key in blob_keys(target))
    again = encoded(source, target)
    assert (list(again.copied), len(again.present), len(done.copied)) == ([], 3, 3)
    later = target.save(odd_state() | {"own": cells(3, seed=2)}, run="a", step=3, attachments=files)
    assert later.stats.bytes_written == 0
    target.gc(min_age=0)
    assert not target.verify().is_damaged


def test_many_small_blobs_are_merged_into_one(source: Repository, target: Repository) -> None:
    assert recode(source, target, "run@3").blobs == 1
    assert sizes(target) == {3: 1}
    assert contents(target) == {"run@3": contents(source)["run@3"]}
    check_clean(target)


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_damage_in_the_source_is_reported_and_nothing_is_copied(
    source: Repository, target: Repository, how: str
) -> None:
    blob = only_blob(source, resolve(source, "run@2"))
    if how == "gone":
        source.storage.delete(blob)
    else:
        flip(source, blob, 5000)
    result = recode(source, target, "run@2")
    (failed,) = result.failed
    assert isinstance(failed.error, Damaged)
    assert (failed.error.blob, failed.error.keys) == (blob.split("/")[2].split(".")[0], ("t2",))
    assert list_commits(target).visible() == []
    check_clean(target)


def test_a_damaged_manifest_does_not_stop_copies_of_other_checkpoints(source: Repository, target: Repository) -> None:
    commit = resolve(source, "run@2")
    flip(source, f"objects/{commit.txid}/{commit.id}.manifest", 40)
    result = recode(Repository(source.storage, source.cache_dir), target)
    assert [one.commit.step for one in result.failed] == [2]
    assert [one.step for one in result.copied] == [0, 1, 3]


# killed at any call, or left without its response


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
        copy(source, target, "run@3", compress="always" if next_one == "recoded" else None).raise_failure()
        (commit,) = list_commits(target).visible()
        assert commit.id == resolve(source, "run@3").id
        assert contents(target) == {"run@3": contents(source)["run@3"]}
        check_clean(target)
        assert contents(target) == {"run@3": contents(source)["run@3"]}
    assert at > 6


# concurrent processes


@pytest.mark.parametrize("other", ["recoded", "as it is"])
@pytest.mark.parametrize("where", ["*.safetensors", "*.manifest", "commits/*"])
def test_simultaneous_repacking_copies_create_a_single_commit(
    tmp_path: Path, source: Repository, other: str, where: str
) -> None:
    inner = memory()
    compress = "always" if other == "recoded" else None

    def another() -> None:
        copy(source, elsewhere(tmp_path / "other", inner, seed=9), "run@3", compress=compress).raise_failure()

    first = elsewhere(tmp_path, FaultyStore(inner, [call_first("put", meanwhile(another), key=where)]))
    assert len(recode(source, first, "run@3").copied) == 1
    assert len(list_commits(first).live()) == 1
    assert contents(first) == {"run@3": contents(source)["run@3"]}
    check_clean(first)
    assert contents(first) == {"run@3": contents(source)["run@3"]}


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


@pytest.mark.parametrize(("blob_bytes", "jobs"), [(BLOB, None), (LARGE, None), (8192, 1)])
def test_repacking_encodes_floats_and_preserves_values(blob_bytes: int, jobs: int | None) -> None:
    store, target = small(), small(blob_bytes=blob_bytes)
    for step in range(3):
        store.save(floats() | {"n": torch.full((3000,), step / 7).bfloat16()}, step=step, metadata={"step": step})
    result = encoded(store, target, jobs=jobs)
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
    with pytest.raises(InvalidInput, match="inside the store's own folder"):
        encoded(store, store)
    with pytest.raises(InvalidInput, match="always"):
        store.copy_to(target, compress="auto")  # type: ignore[arg-type]  # wrong on purpose
