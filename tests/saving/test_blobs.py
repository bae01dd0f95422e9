"""Blobs are safetensors files that any reader can open. Their names are the hash of their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file

from casckpt.contents import manifests
from casckpt.format.blob import DATA_OFFSET, RECORD_BYTES, decode_header
from casckpt.format.dtypes import DTYPES
from casckpt.format.names import BlobHash
from casckpt.format.proof import as_leaves
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.checkpoints import is_blob
from tests.support.saves import BLOB, CELL, blob_keys, cells, data_of, same_state, small_folder
from tests.support.tensors import NAMES, bytes_of, raw

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return small_folder(tmp_path / "store")


def files(store: Store) -> list[Path]:
    return [Path(store.url) / key for key in blob_keys(store)]


def _header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8 : 8 + length])
    return found


def test_every_safetensors_reader_opens_every_blob(store: Store) -> None:
    store.save({name: raw(name, (500, 3)) for name in NAMES} | {"w": cells(50)}, step=1)
    assert len(files(store)) > 3
    seen = set()
    for path in files(store):
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no mapping
                tensor = opened.get_tensor(key)
                assert tensor.dim() == 1
                assert tensor.is_contiguous()
                seen.add(opened.get_slice(key).get_dtype())
        assert all(tensor.numel() for tensor in load_file(path).values())
    assert seen == {stored for _, stored in DTYPES.values()}


def test_the_name_of_a_blob_is_the_hash_of_its_proof(store: Store) -> None:
    store.save({"w": cells(30), "h": cells(60).half()}, step=1)
    for path in files(store):
        assert is_blob(BlobHash(path.stem), path.read_bytes())


def large(folder: Path) -> Store:
    """A store with blobs of several MiB."""
    store = Store(Repository(LocalStore(folder)))
    store.create(cell_bytes=256 << 10, blob_bytes=8 << 20)
    return store


def branches_of_blobs(store: Store, ref: str) -> dict[str, set[str]]:
    """Return the branches of the state that have cells in each blob."""
    manifest = manifests.get(store.repository, store.get(ref).commit)
    found: dict[str, set[str]] = {}
    for entry in manifest.entries:
        for number in {extent.blob for extent in manifest.extents(entry).extents}:
            branch = entry.key.partition(".")[0] if entry.kind != "attachment" else ""
            found.setdefault(manifest.blob(number).hash, set()).add(branch)
    return found


MIB = 256  # the number of cells


def test_each_branch_of_a_state_has_its_own_blobs(tmp_path: Path) -> None:
    """Small branches share one blob of at most 1 MiB."""
    store, step = large(tmp_path / "store"), torch.arange(10)
    state = {
        "model": {f"w{i}": cells(3.3 * MIB) for i in range(4)},
        "small": {"a": cells(0.3 * MIB)},
        "optim": {f"w{i}": {"m": cells(MIB), "step": step + i} for i in range(4)} | {"groups": bytes(9000)},
        "rest": {"b": cells(0.3 * MIB).half(), "c": step + 100},
    }
    attachment = bytes(300 << 10)
    store.save(state, step=1, attachments={"a": attachment})
    found = branches_of_blobs(store, "default@1")
    assert sorted(map(sorted, found.values())) == [["", "rest", "small"], ["model"], ["model"], ["optim"]]
    assert same_state(store.read("default@1"), state)
    assert store.read_attachment("default@1", "a") == attachment
    assert store.save(state, step=2, attachments={"a": attachment}).stats.bytes_written == 0


@pytest.mark.parametrize(("count", "blobs"), [(16, 16), (17, 5)])
def test_many_small_branches_share_blobs(tmp_path: Path, count: int, blobs: int) -> None:
    store = large(tmp_path / "store")
    store.save({f"layer{i}": {"w": cells(2 * MIB)} for i in range(count)}, step=1, threads=1)
    assert len(branches_of_blobs(store, "default@1")) == blobs


def test_a_small_state_is_stored_in_one_blob(tmp_path: Path) -> None:
    store = large(tmp_path / "store")
    store.save({"model": {"w": cells(0.6 * MIB)}, "optim": {"m": cells(0.3 * MIB), "s": torch.arange(9)}}, step=1)
    assert len(files(store)) == 1


def test_padding_never_makes_a_blob_too_large(tmp_path: Path) -> None:
    """Without padding, the size of fifteen such cells is just below the maximum size of a blob."""
    store = Store(Repository(LocalStore(tmp_path / "store")))
    store.create(cell_bytes=128 << 10, blob_bytes=1 << 20)
    state = {f"m.{i}": torch.full((69_633,), i, dtype=torch.uint8) for i in range(40)}
    store.save(state, step=1, threads=1)
    assert max(data_of(store, key) for key in blob_keys(store)) <= 1 << 20
    assert len(blob_keys(store)) == 3
    assert same_state(store.read("default@1"), state)
    assert not store.verify().is_damaged


def test_large_cells_are_leaves_and_begin_at_page_boundaries(tmp_path: Path) -> None:
    store = large(tmp_path / "store")
    counts = (3.3, 0.01, 1.001, 0.26, 2, 0.3)  # cells of 256 KiB
    state = {f"m.w{i}": cells(64 * count) for i, count in enumerate(counts)} | {"m.i": torch.arange(9)}
    ckpt = store.save(state, step=1)
    manifest = manifests.get(store.repository, ckpt.commit)
    (path,) = files(store)
    proof = path.read_bytes()[DATA_OFFSET + data_of(store, blob_keys(store)[0]) :]
    leaves = {leaf.offset: leaf for leaf in as_leaves(proof)}
    leaves_wanted = [
        cell for key in state for cell in manifest.extents(manifest.tensors[key]).stored_cells() if cell.nbytes >= 65536
    ]
    assert len(leaves_wanted) == 4 + 1 + 1 + 2 + 1
    for cell in leaves_wanted:
        assert cell.offset % 4096 == 0
        assert leaves[cell.offset][1:] == (cell.nbytes, cell.digest)
    assert all(len(manifest.extents(manifest.tensors[key]).extents) == 1 for key in state), "tensors lie together"
    assert same_state(store.read("default@1"), state)


def test_data_starts_at_a_block_boundary_without_holes_and_with_the_largest_elements_first(store: Store) -> None:
    store.save({f"{i}.{name}": raw(name, (7 + i,)) for i in range(30) for name in NAMES}, step=1)
    for path in files(store):
        data = path.read_bytes()
        assert int.from_bytes(data[:8], "little") + 8 == DATA_OFFSET
        assert path.stat().st_size > DATA_OFFSET
        end, last = 0, 16
        header = _header(path)
        assert list(header)[-1] == "proof"
        proof = header.pop("proof")["data_offsets"]
        for entry in header.values():
            size = {stored: size for size, stored in DTYPES.values() if stored != "U8"} | {"U8": 1}
            assert entry["data_offsets"][0] == end
            end = entry["data_offsets"][1]
            assert size[entry["dtype"]] <= last
            last = size[entry["dtype"]]
            assert entry["data_offsets"][0] % last == 0
        assert proof == [end, len(data) - DATA_OFFSET]
        assert decode_header(data, len(data))


def test_blobs_do_not_contain_names_steps_or_times(store: Store) -> None:
    weight = cells(3)
    store.save({"secret_name": weight}, run="hidden_run", step=123456, metadata={"note": "hidden_note"})
    (path,) = files(store)
    data = path.read_bytes()
    assert b"secret_name" not in data
    assert b"hidden" not in data
    assert data[DATA_OFFSET : -2 * RECORD_BYTES] == bytes_of(weight)


def test_equal_cells_produce_equal_blobs(store: Store, tmp_path: Path) -> None:
    state = {"b": cells(5), "a": torch.arange(100), "c": cells(3).bfloat16()}
    store.save(state, step=1)
    other = small_folder(tmp_path / "other")
    other.save(dict(reversed(state.items())), run="x", step=7, threads=1)
    assert {path.name for path in files(store)} == {path.name for path in files(other)}


def test_blobs_are_filled_up_to_their_maximum_size(store: Store) -> None:
    """All blobs are at least three quarters full, except for the last blob of each worker."""
    state = {f"w{i}": cells(3.3) for i in range(60)}
    store.save(state, step=1, threads=1)
    sizes = sorted(data_of(store, key) for key in blob_keys(store))
    assert all(BLOB * 3 // 4 <= size <= BLOB for size in sizes[1:])
    assert sum(sizes) == sum(tensor.nbytes for tensor in state.values())


def test_every_byte_is_at_the_offset_in_the_manifest(store: Store) -> None:
    state = {"w": cells(40.3), "i": torch.arange(3000), "h": cells(7).half()}
    ckpt = store.save(state, step=1)
    manifest = manifests.get(store.repository, ckpt.commit)
    for key, tensor in state.items():
        found = b""
        for cell in manifest.extents(manifest.tensors[key]).stored_cells():
            ref = manifest.blob(cell.blob)
            path = Path(store.url) / "objects" / ref.uploader / f"{ref.hash}.safetensors"
            part = path.read_bytes()[cell.offset : cell.offset + cell.nbytes]
            assert blake3(part).digest() == cell.digest
            assert cell.nbytes <= CELL
            found += part
        assert found == bytes_of(tensor)


def test_files_of_a_store_are_read_only(store: Store) -> None:
    store.save({"w": cells(3)}, step=1)
    assert all(path.stat().st_mode & 0o222 == 0 for path in Path(store.url).rglob("[!.]*/*") if path.is_file())
