"""Repacked cells are stored in different blobs, and the checkpoint remains identical, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.contents import blobs, manifests
from casckpt.contents.refs import resolve
from casckpt.errors import Refused, Revoked, StorageError
from casckpt.format.blob import order
from casckpt.format.blob_writer import buffer_bytes
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Encoded
from casckpt.format.sections.tables import ROW
from casckpt.history import transactions
from casckpt.history.commits import Commit, forget, list_commits
from casckpt.repository.fetching import BlobDamaged
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.copy import CopyResult
from casckpt.upkeep.repack import Recoding, cells_of, packed
from casckpt.upkeep.repair.frames import locate
from tests.support.checkpoints import CELL, array, read_arrays, save_arrays
from tests.support.copies import check_clean, contents, copy, elsewhere
from tests.support.faulty import FaultyStore, corrupt, fail_before
from tests.support.forging import taken_apart
from tests.support.repositories import memory, repository

DTYPES = ("float32", "float64", "uint8", "complex64", "int16", "bool")
ARRAYS = st.dictionaries(
    st.from_regex(r"[ab](\.[xyz]){0,2}", fullmatch=True),
    st.builds(array, st.integers(0, 9), st.sampled_from([0, 1 / 256, 0.5, 1, 2.5, 17, 40]), st.sampled_from(DTYPES)),
    max_size=6,
)


def recoding(
    source: Repository, target: Repository, commit: Commit, *, blob_bytes: int = 1 << 20, jobs: int = 4
) -> Recoding:
    """Repack everything in a new transaction."""
    target.create(cell_bytes=CELL, blob_bytes=blob_bytes)
    transaction = transactions.begin(target, commit.run, commit.step, after=[commit.txid])
    transaction.leave()
    return Recoding(source, target, manifests.get(source, commit), transaction.txid, list_commits(target), jobs)


def content(repo: Repository, made: Encoded) -> dict[str, bytes]:
    """Return the bytes of every tensor."""
    manifest, found = made.manifest(), {}
    for entry in manifest.entries:
        cells = manifest.extents(entry).stored_cells()
        found[entry.key] = b"".join(bytes(locate(repo, manifest, cell).read()) for cell in cells)
    return found


def stored(arrays: dict[str, npt.NDArray[np.generic]]) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in arrays.items()}


@given(ARRAYS, ARRAYS, st.sampled_from([CELL, 5 * CELL, 1 << 20]), st.integers(1, 3))
def test_a_checkpoint_is_identical_in_blobs_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, npt.NDArray[np.generic]],
    second: dict[str, npt.NDArray[np.generic]],
    blob_bytes: int,
    jobs: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source, target = repository(folder / "source"), elsewhere(folder)
    base = save_arrays(source, first)
    last = save_arrays(source, first | second, step=1, reuse=base)
    made = recoding(source, target, last, blob_bytes=blob_bytes, jobs=jobs)
    done = made.run()
    assert done.id == last.id
    assert content(target, done) == stored(first | second)
    sizes = list(done.manifest().blob_sizes)
    assert all(size <= buffer_bytes(max(blob_bytes, CELL)) for size in sizes)


@given(ARRAYS, st.sampled_from([1, 2 * CELL, 1 << 20]))
def test_repacking_lays_out_cells_as_a_save_does(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, npt.NDArray[np.generic]], blob_bytes: int
) -> None:
    repo = repository(tmp_path_factory.mktemp("any"))
    manifest = manifests.get(repo, save_arrays(repo, arrays, cell=32 * CELL))
    found = cells_of(manifest)
    digests = {cell.digest for entry in manifest.entries for cell in manifest.extents(entry).stored_cells()}
    assert len(found) == len(digests)
    assert {cell.digest for cell in found} == digests
    ranks = [order(cell.dtype) for cell in found]
    assert ranks == sorted(ranks)
    lots = packed(found, blob_bytes)
    assert sorted(cell.digest for lot in lots for cell in lot) == sorted(digests)
    room = max([blob_bytes, *(cell.nbytes for cell in found)])
    assert all(0 < sum(cell.nbytes for cell in lot) <= room for lot in lots)


def encoded(source: Repository, target: Repository, *refs: str, **options: object) -> CopyResult:
    """Return a copy of the source that encodes. No cell of these arrays becomes smaller."""
    return copy(source, target, *refs, **{"compress": "always", "jobs": 1} | options)


def test_cells_that_the_target_already_has_are_reused_and_not_read(tmp_path: Path, source: Repository) -> None:
    """They may be in the source's own blobs or in repacked ones, or belong to a different run of the source."""
    save_arrays(source, {"t0": array(0), "own": array(9)}, "other", reuse=resolve(source, "run@0"))
    reads = FaultyStore(source.storage)
    user = Repository(reads, tmp_path / "cache")
    for options in ({"compress": None}, {}):
        target = elsewhere(tmp_path)
        encoded(source, target, "run@2", **options)
        reads.calls.clear()
        result = encoded(user, target, "run@3", "other@0")
        assert [one.error for one in result.failed] == []
        assert [one.committed.blobs_reused > 0 for one in result.copied] == [True, True]
        assert result.blobs == 2
        assert len(reads.keys("read_into")) == 2
        assert contents(target) == {name: contents(source)[name] for name in ("run@2", "run@3", "other@0")}
        check_clean(target)


def test_marked_blobs_of_the_target_are_not_reused(source: Repository, target: Repository) -> None:
    encoded(source, target, "run@1")
    (ref,) = manifests.get(target, resolve(target, "run@1")).blobs
    blobs.mark_damaged(target, ref.uploader, ref.hash, "test")
    (made,) = encoded(source, target, "run@2").copied
    assert (made.committed.blobs_written, made.committed.blobs_reused) == (1, 0)


def test_cells_are_moved_out_of_worn_blobs(tmp_path: Path, target: Repository) -> None:
    source, arrays = repository(tmp_path), {f"t{n}": array(n) for n in range(4)}
    last = save_arrays(source, arrays)
    for step in (1, 2):
        arrays = {"t0": arrays["t0"]} | {f"own{n}": array(9 + n, 4) for n in range(step)}
        last = save_arrays(source, arrays, step=step, reuse=last)
    encoded(source, target, "run@0")
    encoded(source, target, "run@1")
    first, second = (manifests.get(target, resolve(target, f"run@{step}")) for step in (0, 1))
    assert [(ref.uploader, ref.worn) for ref in second.blobs if ref.worn] == [(next(first.blobs).uploader, True)]
    forget(target, resolve(target, "run@0"))
    encoded(source, target, "run@2")
    third = manifests.get(target, resolve(target, "run@2"))
    assert {ref.hash for ref in third.blobs} & {ref.hash for ref in second.blobs if not ref.worn}
    assert not {ref.hash for ref in third.blobs} & {ref.hash for ref in first.blobs}
    assert read_arrays(target, resolve(target, "run@2")) == read_arrays(source, last)


def test_blob_names_are_durable_before_the_record(tmp_path: Path, source: Repository) -> None:
    storage = FaultyStore(memory())
    encoded(source, elsewhere(tmp_path, storage), "run@3").raise_failure()
    calls = [(call.method, call.key) for call in storage.calls]
    settled = max(i for i, (method, key) in enumerate(calls) if method == "settle" and key.startswith("objects/"))
    last_blob = max(i for i, (method, key) in enumerate(calls) if method == "put" and key.endswith(".safetensors"))
    record = next(i for i, (method, key) in enumerate(calls) if method == "put" and key.startswith("commits/"))
    assert last_blob < settled < record


def test_blobs_missing_from_the_target_are_marked_and_not_reused(source: Repository, target: Repository) -> None:
    encoded(source, target, "run@1")
    (ref,) = manifests.get(target, resolve(target, "run@1")).blobs
    target.storage.delete(blob_key(ref.uploader, ref.hash))
    result = encoded(source, target, "run@2")
    assert (result.blobs, len(blobs.damaged_marks(target))) == (2, 1)
    assert encoded(source, target, "run@3").blobs == 1
    for step in (2, 3):
        commit = resolve(target, f"run@{step}")
        assert read_arrays(target, commit) == read_arrays(source, resolve(source, commit.id))


def test_a_reused_blob_that_is_missing_after_a_revocation_is_an_error(source: Repository, target: Repository) -> None:
    encoded(source, target, "run@1")
    made = recoding(source, target, resolve(source, "run@2"))
    (ref,) = manifests.get(target, resolve(target, "run@1")).blobs
    target.storage.delete(blob_key(ref.uploader, ref.hash))
    transactions.revoke(target, made.uploader, "test")
    with pytest.raises(Revoked, match="assumed that this save was dead"):
        made.run()
    assert not blobs.damaged_marks(target)


@pytest.mark.parametrize("times", [1, 99])
def test_bytes_damaged_in_transfer_are_reread(tmp_path: Path, source: Repository, times: int) -> None:
    storage = FaultyStore(source.storage, [corrupt("read_into", key="*.safetensors", times=times)])
    made = recoding(Repository(storage, tmp_path / "user"), elsewhere(tmp_path), resolve(source, "run@0"))
    if times == 1:
        assert content(made.target, made.run()) == contents(source)["run@0"]
    else:
        with pytest.raises(BlobDamaged, match="its bytes 4096 to 8192 are not what was written"):
            made.run()


def test_cells_in_unknown_encodings_are_not_repacked(source: Repository, target: Repository) -> None:
    manifest = manifests.get(source, resolve(source, "run@0"))
    parts = taken_apart(manifest)
    parts.pieces["cells"][0] = b"\x63 of later"
    later = parts.put_together().manifest()
    with pytest.raises(Refused, match="upgrade casckpt"):
        replace(recoding(source, target, resolve(source, "run@0")), manifest=later).run()
    assert not list(target.storage.list("objects/"))


def test_spans_with_different_cell_sizes_are_rejected_before_they_are_laid_out(
    source: Repository, target: Repository
) -> None:
    """A row must be in one span. A hostile writer may have divided a span, so that adjacent cells cannot form one
    row."""
    manifest = manifests.get(source, resolve(source, "run@0"))
    parts, half = taken_apart(manifest), CELL // 4
    digests = parts.pieces["cells"][0][1:]
    parts.pieces["cells"][0] = b"\1" + msgspec.msgpack.encode(([], [(0, 0, half), (0, half, 2 * half)], digests))
    (row,) = ROW.iter_unpack(parts.pieces["rows"][0][1:])
    parts.pieces["rows"][0] = b"\0" + ROW.pack(1, row[1], row[2]) + ROW.pack(1, row[1], row[2] + CELL)
    cut = parts.put_together().manifest()
    assert len(cut.extents(cut.entries[0]).extents) == 2
    with pytest.raises(Refused, match="has cells from two spans"):
        replace(recoding(source, target, resolve(source, "run@0")), manifest=cut).run()


def test_repacking_does_not_restore_thinned_entries(source: Repository, target: Repository) -> None:
    parts = taken_apart(manifests.get(source, resolve(source, "run@1")))
    parts.pieces["rows"][0] = b""
    made = replace(recoding(source, target, resolve(source, "run@1")), manifest=parts.put_together().manifest()).run()
    manifest = made.manifest()
    assert [len(rows) > 0 for rows in manifest.raw_rows()] == [False, True]
    assert len(manifest.blob_list) == 1


def test_repacking_keeps_branches_in_separate_blobs(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    older = save_arrays(repo, {"a.x": array(1, 300), "b.x": array(2, 300)})
    commit = save_arrays(repo, {"a.x": array(1, 300), "b.x": array(3, 300)}, step=1, reuse=older)
    manifest = manifests.get(repo, commit)
    lots = packed(cells_of(manifest), 1 << 30)
    assert [{cell.branch for cell in lot} for lot in lots] == [{0}, {1}]


def test_a_storage_error_during_repacking_is_raised(tmp_path: Path, source: Repository) -> None:
    for method, key in (("read_into", "*.safetensors"), ("open", "*.safetensors")):
        user = Repository(FaultyStore(source.storage, [fail_before(method, key=key)]), tmp_path / "user")
        with pytest.raises(StorageError):
            recoding(user, elsewhere(tmp_path), resolve(source, "run@0")).run()
