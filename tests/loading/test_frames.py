"""Loads of cells that are stored as frames, from and into any layout, and from damaged stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

import casckpt
from casckpt.errors import Damaged, StorageError
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import encode_planes
from casckpt.format.extents import MAX_LINKS, StoredCell
from casckpt.format.keys import blob_key
from casckpt.frontends.dcp import StorageReader
from casckpt.history.commits import list_commits
from casckpt.loading import planned_reads as items
from casckpt.loading import transfer
from casckpt.loading import transfer as coded
from casckpt.repository.blob_cache import FOLDER
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support import dcp
from tests.support.coded import Stored, chain, code
from tests.support.far import far
from tests.support.faulty import FaultyStore, call_first, corrupt, fail_before
from tests.support.gcs import collect
from tests.support.ids import half_of
from tests.support.progress_calls import ProgressCalls
from tests.support.repositories import again, meanwhile, objects_of
from tests.support.rewrites import move
from tests.support.saves import CELL, content, counted, flip, overwrite, reopened, same_state, small, small_folder
from tests.support.servers import Server
from tests.support.tensors import NAMES, same
from tests.support.versions import STEPS, changed, saved, smooth, states, versions

SLICED = ("bool", "uint8", "bfloat16", "float32", "float64", "complex64", "complex128")


def links(store: Store, ref: str, key: str) -> list[StoredCell]:
    """Return the first cell of a tensor, and its bases."""
    cells = Stored(store, ref).cells()
    return list(next(cell for (name, region), cell in cells.items() if name[1] == key and not region.lo).chain)


def key_of(store: Store, ref: str, cell: StoredCell) -> str:
    blob = Stored(store, ref).refs[cell.blob]
    return blob_key(blob.uploader, blob.hash)


# results


@pytest.mark.parametrize(("planes", "threads", "verify"), half_of([False, True], [1, 4], [False, True]))
def test_each_version_of_a_chain_loads_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planes: bool, threads: int, verify: bool
) -> None:
    """The first attempt to decode succeeds."""
    monkeypatch.delattr(transfer, "decode_again")
    found = states()
    for made in (small_folder(tmp_path), small(far())):
        store = saved(made, found, planes=planes)
        assert len(links(store, "latest", "m.w")) == STEPS
        for step, state in enumerate(found):
            told = ProgressCalls()
            got = reopened(store).read(f"default@{step}", threads=threads, verify=verify, progress=told)
            assert same_state(got, state)
            assert told.done == told.total


def test_checkpoints_with_deltas_load_from_a_bucket(moto_server: Server, tmp_path: Path) -> None:
    url, found = f"s3://{moto_server.new_place()}/store", states()
    store = casckpt.open(url, storage_options=moto_server.options, cache_dir=tmp_path / "one")
    store.create(cell_bytes=CELL, blob_bytes=16 * CELL)
    saved(store, found)
    other = casckpt.open(url, storage_options=moto_server.options, cache_dir=tmp_path / "other")
    for _ in range(2):
        assert same_state(other.read("latest"), found[-1])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", NAMES)
def test_frames_of_every_dtype_are_loaded_exactly(name: str) -> None:
    found = versions(smooth((7, 1111), name), 3)
    store = saved(small(), [{"w": one} for one in found], planes=True)
    for verify in (True, False):
        assert same(store.read("latest", verify=verify)["w"], found[-1])


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[slice, slice]]:
    """Draw a shape, and a part of it."""
    shape = draw(st.integers(1, 60)), draw(st.integers(1, 300))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
    return shape, (slice(starts[0], ends[0]), slice(starts[1], ends[1]))


@given(st.sampled_from(SLICED), boxes(), st.integers(1, 4), st.booleans(), st.booleans())
def test_any_part_of_a_delta_checkpoint_loads(
    name: str, box: tuple[tuple[int, int], tuple[slice, slice]], count: int, planes: bool, verify: bool
) -> None:
    shape, part = box
    found = versions(smooth(shape, name), count)
    store = saved(small(), [{"w": one} for one in found], planes=planes)
    target = torch.zeros_like(found[0][part].contiguous())
    store.load({"w": casckpt.Shard(target, shape, offset=(part[0].start, part[1].start))}, "latest", verify=verify)
    assert same(target, found[-1][part])
    turned = torch.zeros_like(found[0].t().contiguous()).t()
    store.load({"w": turned}, "latest", verify=verify)
    assert same(turned, found[-1])


def test_the_longest_allowed_chain_is_loaded_exactly() -> None:
    found = [{"w": one} for one in versions(smooth((10, 1024)), MAX_LINKS + 1)]
    store = saved(small(), found)
    assert len(links(store, "latest", "w")) == MAX_LINKS + 1
    assert same_state(store.read("latest"), found[-1])


def test_a_cell_that_two_keys_share_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved(small(), states())
    decoded: list[Any] = []
    real = coded.Lot.decode

    def noted(self: coded.Lot, item: items.PlannedRead, root: memoryview, into: memoryview) -> None:
        decoded.append(item.unit[:3])
        real(self, item, root, into)

    monkeypatch.setattr(coded.Lot, "decode", noted)
    store.read("latest", keys=["m.w", "m.tied"])
    assert len(decoded) == len(set(decoded)) >= 90 * 1024 // CELL


def test_a_base_is_loaded_together_with_the_frames_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors that used to be equal share a base. A third tensor still equals this base."""
    before = smooth((32, 256))
    states = [{"a": before, "b": before.clone(), "c": before.clone()}]
    states.append({"a": changed(before, 1), "b": changed(before, 2), "c": before})
    store = saved(small(), states)
    for lot in (0, 8 << 20):
        monkeypatch.setattr(items, "_FRAME_BYTES", lot)
        assert same_state(store.read("latest"), states[1])


def test_a_template_with_tied_memory_loads_from_frames() -> None:
    store = saved(small(), states())
    shared = torch.zeros(90, 256, dtype=torch.int32)
    store.load({"m": {"w": shared, "tied": shared}}, "latest", unread="ignore")
    assert torch.equal(shared, states()[-1]["m"]["w"])


# reads


def test_a_remote_load_of_frames_needs_few_requests() -> None:
    """Adjacent cells, frames and bases are read together, and no byte is read twice."""
    storage = far()
    store = saved(small(storage), states())
    cells = [cell for (name, _), cell in Stored(store, "latest").cells().items() if name[1].startswith("m.")]
    ranges = {(one.blob, one.offset, one.stored) for cell in cells for one in cell.chain}
    runs = ranges - {(blob, at + nbytes, other) for blob, at, nbytes in ranges for _, _, other in ranges}
    store.read("latest", keys=[])
    with counted(store) as found:
        store.get("latest")
    before = storage.reads_of_blobs()
    with counted(store) as io:
        store.read("latest", keys=["m.*"])
    assert storage.reads_of_blobs() - before == len(runs)
    assert io.bytes_read - found.bytes_read == sum(nbytes for _, _, nbytes in ranges)


def test_a_prefetch_fetches_everything_that_a_load_needs(tmp_path: Path) -> None:
    storage = far()
    saved(small(storage), states())
    near = Store(Repository(storage, tmp_path))
    template = {"m": {"w": torch.zeros(90, 256, dtype=torch.int32)}}
    near.pre_download("latest", template)
    before = storage.reads_of_blobs()
    near.load(template, "latest", unread="ignore")
    assert storage.reads_of_blobs() == before
    assert torch.equal(template["m"]["w"], states()[-1]["m"]["w"])


@pytest.mark.parametrize("most", [0, 3000, 8 << 20])
@pytest.mark.parametrize("threads", [1, 4])
def test_only_the_frames_of_the_current_batch_are_in_memory(
    monkeypatch: pytest.MonkeyPatch, most: int, threads: int
) -> None:
    store = saved(small(), states())
    monkeypatch.setattr(items, "_FRAME_BYTES", most)
    made: list[coded.Lot] = []
    real = coded.Lot.fetch
    held: list[int] = []

    def noted(self: coded.Lot, read: Callable[[Any], memoryview]) -> bool:
        made.append(self)
        fetched = real(self, read)
        held.append(sum(one.nbytes for one in self._held.values()))
        return fetched

    monkeypatch.setattr(coded.Lot, "fetch", noted)
    assert same_state(store.read("latest", threads=threads), states()[-1])
    largest = max(sum(one.stored for one in list(cell.chain)[:-1]) for cell in Stored(store, "latest").cells().values())
    assert 0 < max(held) <= max(most, largest)
    assert not any(lot._held for lot in made)


def test_only_a_load_with_verification_computes_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved(small(), states())
    hashed: list[int] = []
    real = cell_digest

    def noted(data: memoryview) -> bytes:
        hashed.append(data.nbytes)
        return real(data)

    monkeypatch.setattr(transfer, "cell_digest", noted)
    store.read("latest", verify=False)
    assert not hashed
    store.read("latest", keys=["m.w"])
    assert sum(hashed) == 90 * 1024


# damage


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def store(faults: FaultyStore, objects: dict[str, bytes]) -> Store:
    """Each version of ``m`` is encoded against the previous one. The first version has no base.

    ``same`` is stored raw.
    """
    faults.inner = again(objects, near=False)
    return Store(Repository(faults))


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """Return the keys of the objects in that store."""
    found = states()
    store = small()
    for step, state in enumerate(found):
        store.save(state, step=step)
    code(store, "default@0", keys=lambda key: key.startswith("m."), encode=lambda *given: encode_planes(*given[:2]))
    chain(store, [f"default@{step}" for step in range(STEPS)])
    collect(store.repository)
    return objects_of(store.repository.storage)


def hit(store: Store, ref: str, link: int, harm: Callable[[Store, str, int], None]) -> str:
    """Damage one link of the first cell of ``m.odd``. Return the blob that holds it."""
    cell = links(store, ref, "m.odd")[link]
    key = key_of(store, ref, cell)
    harm(store, key, cell.offset + cell.stored // 2)
    return key.split("/")[2].split(".")[0]


def gone(store: Store, key: str, _: int) -> None:
    store.repository.storage.delete(key)


def short(store: Store, key: str, at: int) -> None:
    overwrite(store, key, content(store, key)[:at])


@pytest.mark.parametrize("harm", [flip, gone, short])
@pytest.mark.parametrize("link", range(STEPS))
def test_a_damage_error_names_the_blob_and_all_its_checkpoints(
    store: Store, harm: Callable[[Store, str, int], None], link: int, threads: int
) -> None:
    blob, step = hit(store, "latest", link, harm), STEPS - 1 - link
    ids = {commit.step: commit.id for commit in list_commits(store.repository).visible()}
    for later in range(step, STEPS):
        with pytest.raises(Damaged, match=r"casckpt repair") as raised:
            reopened(store).read(f"default@{later}", threads=threads, keys=["m.odd"])
        assert raised.value.blob == blob
        assert raised.value.key == "m.odd"
        assert set(raised.value.checkpoints) == {ids[one] for one in range(step, STEPS)}
        if harm is flip:
            assert ("a base of a cell" in str(raised.value)) == (later > step)
    for earlier in range(step):
        assert same_state(reopened(store).read(f"default@{earlier}"), states()[earlier])
    assert same_state(reopened(store).read("latest", keys=["same"]), {"same": states()[0]["same"]})


def test_an_unverified_load_raises_an_error_for_a_frame_that_cannot_be_decoded(store: Store, threads: int) -> None:
    cell = links(store, "latest", "m.odd")[1]
    flip(store, key_of(store, "latest", cell), cell.offset + 3)  # a byte that must be 0
    with pytest.raises(Damaged, match="a base of a cell"):
        store.read("latest", verify=False, threads=threads)


@pytest.mark.parametrize("link", range(STEPS))
@pytest.mark.parametrize("verify", [True, False])
def test_an_unreadable_base_raises_a_storage_error(
    store: Store, faults: FaultyStore, link: int, verify: bool, threads: int
) -> None:
    key = key_of(store, "latest", links(store, "latest", "m.odd")[link])
    faults.inject(fail_before("read_into", key=key, times=1000))
    with pytest.raises(StorageError, match="injected"):
        store.read("latest", verify=verify, threads=threads)
    faults.heal()
    assert same_state(store.read("latest", threads=threads), states()[-1])


def test_a_misread_cell_is_reread(store: Store, faults: FaultyStore, threads: int) -> None:
    key = key_of(store, "latest", links(store, "latest", "m.odd")[0])
    faults.inject(corrupt("read_into", key=key))
    assert same_state(store.read("latest", threads=threads), states()[-1])


def test_the_error_mentions_a_second_writer_if_a_reread_returns_correct_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "cell_digest", lambda data: bytes(32))
    with pytest.raises(Damaged, match=r"second read.*m\.odd"):
        store.read("latest", keys=["m.odd"])


@pytest.mark.parametrize("spoilt", range(STEPS))
def test_a_cell_damaged_in_the_cache_is_read_from_the_store(tmp_path: Path, spoilt: int, threads: int) -> None:
    storage = far()
    store = saved(small(storage), states(), planes=True)
    near = Store(Repository(storage, tmp_path))
    near.pre_download("latest")
    cell = links(store, "latest", "m.odd")[spoilt]
    name = key_of(store, "latest", cell).split("/")[2]
    path = next(path for path in (tmp_path / FOLDER).iterdir() if path.name.startswith(name[:64]))
    data = bytearray(path.read_bytes())
    data[cell.offset + cell.stored // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    assert same_state(near.read("latest", threads=threads), states()[-1])
    assert not path.exists()


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("verify", [True, False])
def test_a_load_continues_from_the_new_location_of_a_rewritten_checkpoint(
    store: Store, faults: FaultyStore, at: int, verify: bool, threads: int
) -> None:
    def moved() -> None:
        repo = Repository(faults.inner)
        for commit in list_commits(repo).visible():
            move(repo, commit)
        collect(repo)

    faults.inject(call_first("read_into", meanwhile(moved), key="objects/*.safetensors", at=at))
    assert same_state(store.read("latest", verify=verify, threads=threads), states()[-1])


# other readers


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = small_folder(tmp_path_factory.mktemp("store"))
    for step, state in enumerate(states()):
        store.save({"model": state["m"]}, step=step, attachments={"a.bin": LONG})
    chain(store, [f"default@{step}" for step in range(STEPS)])
    return store


LONG = bytes(range(256)) * 1000
LAST = {f"model.{key}": value for key, value in states()[-1]["m"].items()}


def test_a_long_attachment_is_read_back_unchanged(exported: Store) -> None:
    assert exported.read_attachment("latest", "a.bin") == LONG


def test_an_exported_safetensors_file_has_the_saved_values(exported: Store, tmp_path: Path) -> None:
    casckpt.export(exported, "latest", tmp_path / "all.safetensors")
    assert same_state(dict(sorted(load_file(tmp_path / "all.safetensors").items())), dict(sorted(LAST.items())))


def test_an_exported_torch_file_has_the_saved_values(exported: Store, tmp_path: Path) -> None:
    casckpt.export(exported, "latest", tmp_path / "all.pt")
    assert same_state(torch.load(tmp_path / "all.pt"), {"model": states()[-1]["m"]})


def test_an_exported_dcp_folder_has_the_saved_values(exported: Store, tmp_path: Path) -> None:
    casckpt.export(exported, "latest", tmp_path / "all", format="dcp")
    assert same_state(dcp.load(dcp.zeros(LAST), FileSystemReader(tmp_path / "all")), LAST)


def test_the_dcp_reader_reads_the_saved_values(exported: Store) -> None:
    assert same_state(dcp.load(dcp.zeros(LAST), StorageReader(exported.url, "latest")), LAST)
