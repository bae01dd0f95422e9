"""The ranks of a host read each byte of a remote store once. After a restart, the host may still have what it
saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

import casckpt
from casckpt.errors import InvalidInput, RankFailed
from casckpt.frontends.dcp import StorageReader
from casckpt.ranks import ranks as ranks_module
from casckpt.repository import blob_cache as module
from casckpt.repository.blob_cache import FOLDER, PARTS
from casckpt.repository.host_reads import HostReads, _SharedReader
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.store.store import Store
from tests.support.bucket_reads import ReadRange, bucket, nbytes, union
from tests.support.coded import code
from tests.support.dcp import load as by_torch
from tests.support.proxy import Proxy
from tests.support.ranks import Pool, die, outcome_of, tell, wait_for
from tests.support.saves import CELL, cells, small
from tests.support.together import cut, impatient

if TYPE_CHECKING:
    from tests.support.servers import Server

LAYOUTS: dict[str, list[Placement]] = {"replicas": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)]}
ROWS = list(LAYOUTS.values())
SHORT = 4.0  # seconds until the others give up on a stopped rank


def state(layout: str, size: int) -> dict[str, Any]:
    """Return a state of several blobs, as one of ``size`` ranks holds it. "mixed": each tensor has another layout."""
    mesh = init_device_mesh("cpu", (size,))
    full = [cells(24, seed=n).reshape(-1, 256) for n in range(6)]
    kinds = ROWS if layout == "mixed" else [LAYOUTS[layout]]
    return {f"w{n}": cut(one, mesh, kinds[n % len(kinds)]) for n, one in enumerate(full)}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether this rank's parts are equal."""
    return all(torch.equal(one[key].to_local(), other[key].to_local()) for key in other)


def save(rank: int, size: int, folder: Path, layout: str) -> None:
    small(bucket(folder)[1]).save(state(layout, size), step=1)


def opened(folder: Path, memory: Path, **options: Any) -> Store:
    """Open the store as one rank does, with ``memory`` as this host's memory."""
    module.MEMORY = memory
    return bucket(folder, **options)[0]


def fill(store: Store, layout: str, size: int, load: Callable[[Any], object], **options: Any) -> list[ReadRange]:
    """Load a state, check it, and return the ranges of blobs that this rank read from the store."""
    expected = state(layout, size)
    filled = {key: torch.zeros_like(value) for key, value in expected.items()}
    load(filled)
    assert equal(filled, expected)
    return blob_ranges(store)


def blob_ranges(store: Store, begin: int = 0) -> list[ReadRange]:
    """Return the ranges of blobs that this rank read from the store, without the first ``begin`` reads."""
    ranges: list[ReadRange] = store.repository.storage.ranges  # type: ignore[attr-defined]  # it is a ReadBucket
    return [one for one in ranges[begin:] if one.key.endswith(".safetensors")]


def load(rank: int, size: int, folder: Path, memory: Path, layout: str, *, verify: bool = True, **options: Any) -> Any:
    store = opened(folder, memory, **options)
    return fill(store, layout, size, lambda filled: store.load(filled, "latest", verify=verify))


def by_dcp(rank: int, size: int, folder: Path, memory: Path, layout: str, **options: Any) -> list[ReadRange]:
    store = opened(folder, memory, **options)
    reader = StorageReader(store, "latest")
    return fill(store, layout, size, lambda filled: by_torch(filled, reader))


def every(ranges: list[list[ReadRange]]) -> list[ReadRange]:
    return [one for found in ranges for one in found]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(ranks: Pool, tmp_path: Path) -> Path:
    ranks.run(2, save, tmp_path / "store", "mixed")
    return tmp_path / "store"


def shared(memory: Path) -> list[Path]:
    """Return the files that ranks share."""
    return list(memory.glob(f"*/{PARTS}/*/*"))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_ranks_of_a_host_read_each_byte_once(
    ranks: Pool, tmp_path: Path, memory: Path, size: int, full: bool
) -> None:
    befores = ("mixed", "rows", "columns", "replicas") if full else ("mixed",)
    for before in befores:
        ranks.run(4, save, tmp_path / before, before)
        for layout in ("replicas", "rows", "columns", "mixed") if full or size == 4 else ("mixed",):
            job = (load, tmp_path / before, memory, layout)
            alone = every(ranks.run(size, *job, share_reads="off"))
            together = every(ranks.run(size, *job))
            assert nbytes(together) == union(together) == union(alone) < nbytes(alone) or layout == before == "rows"
            assert shared(memory) == []


def from_bucket(rank: int, size: int, place: RemoteLocation, memory: Path, layout: str) -> None:
    """Load from a bucket."""
    module.MEMORY = memory
    store = Store(Repository(RemoteStore(place)))
    expected = state(layout, size)
    filled = {key: torch.zeros_like(value) for key, value in expected.items()}
    store.load(filled, "latest")
    assert equal(filled, expected)


def to_bucket(rank: int, size: int, place: RemoteLocation) -> None:
    small(RemoteStore(place)).save(state("mixed", size), step=1)


def requested(proxy: Proxy) -> list[ReadRange]:
    """Return the ranges of blobs that were requested from the server."""
    found = []
    for one in proxy.seen:
        if one.method == "GET" and one.path.endswith(".safetensors") and one.range:
            start, end = one.range.removeprefix("bytes=").split("-")
            found.append(ReadRange(one.path, int(start), int(end) + 1))
    return found


@pytest.mark.parametrize("layout", ["replicas", "columns"])
def test_each_byte_of_a_bucket_is_requested_only_once(
    ranks: Pool, seaweed_server: Server, memory: Path, layout: str
) -> None:
    with Proxy(seaweed_server.endpoint) as proxy:
        options = {**seaweed_server.options, "endpoint_url": proxy.endpoint}
        place = RemoteLocation("s3", f"{seaweed_server.new_place()}/store", options)
        ranks.run(2, to_bucket, place)
        assert requested(proxy) == []
        ranks.run(4, from_bucket, place, memory, layout)
        found = requested(proxy)
        assert nbytes(found) == union(found) >= 6 * 24 * CELL


@pytest.mark.parametrize("verify", [True, False])
def test_unverified_loads_and_dcp_also_share_their_reads(ranks: Pool, folder: Path, memory: Path, verify: bool) -> None:
    found = ranks.run(2, load, folder, memory, "replicas", verify=verify)
    assert nbytes(every(found)) == union(every(found))
    found = ranks.run(2, by_dcp, folder, memory, "replicas")
    assert nbytes(every(found)) == union(every(found))
    assert shared(memory) == []


def update(rank: int, size: int, folder: Path, memory: Path) -> list[ReadRange]:
    return updated(opened(folder, memory), size)


def updated(store: Store, size: int) -> list[ReadRange]:
    """Load the first checkpoint and update it to the second. Return the ranges that the update read."""
    filled = {key: torch.zeros_like(value) for key, value in state("replicas", size).items()}
    held = store.load(filled, "default@1")
    begin = len(store.repository.storage.ranges)  # type: ignore[attr-defined]
    store.update(filled, "default@2", held=held)
    assert equal(filled, changed(size))
    return blob_ranges(store, begin)


def changed(size: int) -> dict[str, Any]:
    """Return the state of the second checkpoint: a tensor with other values, and one with a few other bits."""
    found = {key: value + (key == "w1") for key, value in state("replicas", size).items()}
    found["w2"].to_local().view(torch.int32)[::8].bitwise_xor_(1)
    return found


def save_change(rank: int, size: int, folder: Path) -> None:
    """Save the second checkpoint. The tensor with a few other bits is stored as frames."""
    store = bucket(folder)[0]
    store.save(changed(size), step=2)
    if rank == 0:
        code(store, "default@2", "default@1", keys=lambda key: key == "w2")


def check_update(ranges: list[ReadRange]) -> None:
    """Check that the ranks together read the changed tensor and the frames once."""
    assert 24 * CELL < nbytes(ranges) == union(ranges) < 36 * CELL


def test_updates_by_several_ranks_share_their_reads(ranks: Pool, folder: Path, memory: Path) -> None:
    ranks.run(2, save_change, folder)
    check_update(every(ranks.run(2, update, folder, memory)))


def test_folders_and_single_processes_do_not_share_reads(
    ranks: Pool, folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY", memory)
    assert casckpt.open(folder).repository.host_reads("", "", 0, 2) is None
    assert isinstance(casckpt.open(folder, share_reads="on").repository.host_reads("", "", 0, 2), HostReads)
    assert isinstance(bucket(folder)[0].repository.host_reads("", "", 0, 2), HostReads)
    assert bucket(folder)[0].repository.host_reads("", "", 0, 0) is None
    assert bucket(folder, share_reads="off")[0].repository.host_reads("", "", 0, 2) is None
    with pytest.raises(InvalidInput, match="share_reads='often' is not valid"):
        casckpt.open(folder, share_reads="often")  # type: ignore[arg-type]  # a wrong value on purpose


# harm


def harmed(rank: int, size: int, folder: Path, memory: Path, harm: Callable[[Path], object]) -> Any:
    """Load replicas. Rank 1 begins when rank 0 has read everything, and damages each shared file before reading it."""
    begun, ended = HostReads.reader, HostReads.end

    def reader(reads: HostReads, number: int, *args: Any) -> Reader:
        if rank:
            wait_for("read")
            harm(reads.path(number))
        return begun(reads, number, *args)

    def end(reads: HostReads) -> None:
        ended(reads)
        tell("read")

    with patch.object(HostReads, "reader", reader), patch.object(HostReads, "end", end):
        return load(rank, size, folder, memory, "replicas")


def flip(path: Path) -> None:
    """Flip a bit of each byte of the first cells."""
    with path.open("r+b") as file:
        data = file.read(1 << 14)
        file.seek(0)
        file.write(bytes(byte ^ 1 for byte in data))


def cut_off(path: Path) -> None:
    os.truncate(path, 5000)


@pytest.mark.parametrize("harm", [flip, cut_off, Path.unlink])
def test_damage_to_shared_bytes_never_reaches_a_tensor(
    ranks: Pool, folder: Path, memory: Path, harm: Callable[[Path], object]
) -> None:
    first, second = ranks.run(2, harmed, folder, memory, harm)
    assert union(second) == (union(first) if harm is Path.unlink else nbytes(second)) > 0


def killed(rank: int, size: int, folder: Path, memory: Path) -> Any:
    impatient()
    if rank == 1:
        HostReads.reader = lambda *_: die()  # type: ignore[assignment, method-assign]  # it dies anyway
    return outcome_of(lambda: load(rank, size, folder, memory, "replicas"))


def test_a_killed_rank_is_named_and_its_files_serve_the_next_load(ranks: Pool, folder: Path, memory: Path) -> None:
    found = ranks.outcomes(2, killed, folder, memory)
    assert isinstance(found[0].value, RankFailed)
    assert found[0].value.rank == 1
    assert shared(memory)
    ranks.run(2, load, folder, memory, "replicas")
    assert shared(memory) == []


def stopped(rank: int, size: int, folder: Path, memory: Path) -> Any:
    """Load while rank 1 is stopped in a shared read. Return the rank that the others name."""
    impatient()
    ranks_module.MARGIN = timedelta(seconds=1)
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    begun = HostReads.reader

    def reader(reads: HostReads, *args: Any) -> Reader:
        wait_for("stopped")
        return begun(reads, *args)

    def stop(*_: object) -> None:
        tell("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)

    with patch.object(_SharedReader, "_fill", stop) if rank == 1 else patch.object(HostReads, "reader", reader):
        found = outcome_of(lambda: load(rank, size, folder, memory, "replicas"))
    tell(f"failed {rank}")
    for other in {0, 2} - {rank}:
        wait_for(f"failed {other}")
    os.kill(int(Path("pid-1").read_text()), signal.SIGKILL)
    return found.rank if isinstance(found, RankFailed) else found


def test_a_rank_that_is_stopped_in_a_shared_read_is_named(ranks: Pool, folder: Path, memory: Path) -> None:
    found = ranks.outcomes(3, stopped, folder, memory, timeout=SHORT)
    assert [found[rank].value for rank in (0, 2)] == [1, 1]


def some_alone(rank: int, size: int, folder: Path, memory: Path, by: Callable[..., Any]) -> list[ReadRange]:
    found: list[ReadRange] = by(rank, size, folder, memory, "replicas", share_reads="off" if rank == 1 else "auto")
    return found


@pytest.mark.parametrize("by", [load, by_dcp])
def test_ranks_remove_what_they_share_even_if_one_of_them_reads_alone(
    ranks: Pool, folder: Path, memory: Path, by: Callable[..., Any]
) -> None:
    first, alone, last = ranks.run(3, some_alone, folder, memory, by)
    assert nbytes(first + last) == union(first + last) == nbytes(alone)
    assert shared(memory) == []
    first, alone = ranks.run(2, some_alone, folder, memory, by)
    assert nbytes(first) == nbytes(alone)
    assert shared(memory) == []


def test_ranks_do_not_share_reads_if_the_memory_is_too_small(ranks: Pool, folder: Path, memory: Path) -> None:
    found = every(ranks.run(2, load, folder, memory, "replicas", cache_bytes=1 << 19))
    assert nbytes(found) == 2 * union(found)


def in_container(rank: int, size: int, folder: Path, memory: Path) -> Any:
    (memory / str(rank)).mkdir()
    return load(rank, size, folder, memory / str(rank), "replicas")


def test_containers_with_the_same_host_name_do_not_wait_for_files_of_each_other(
    ranks: Pool, folder: Path, memory: Path
) -> None:
    found = ranks.run(2, in_container, folder, memory)
    assert nbytes(every(found)) == union(every(found))  # they pass on what they read, as hosts do
    assert 0 < union(found[0]) < union(every(found))


# saves


def save_and_load(rank: int, size: int, folder: Path, memory: Path, *, cache_dir: Path | None = None) -> list[str]:
    """Save twice, and load as a new process would. Return the keys of blobs that were read from the store."""
    one = opened(folder, memory, cache_saves=True, cache_dir=cache_dir)
    one.create(cell_bytes=1 << 12, blob_bytes=1 << 16)
    first = state("rows", size)
    one.save(first, step=1)
    first["w0"].to_local().add_(1)
    one.save(first, step=2)
    other = opened(folder, memory, cache_saves=True, cache_dir=cache_dir)
    filled = {key: torch.zeros_like(value) for key, value in first.items()}
    other.load(filled, "default@2")
    assert equal(filled, first)
    return [call.key for call in other.repository.storage.calls if call.method == "read_into"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("on_disk", [False, True])
def test_after_a_restart_a_host_does_not_read_the_blobs_that_it_saved_from_the_store(
    ranks: Pool, tmp_path: Path, memory: Path, on_disk: bool
) -> None:
    cache_dir = tmp_path / "disk" if on_disk else None
    found = ranks.run(2, save_and_load, tmp_path / "store", memory, cache_dir=cache_dir)
    assert not [key for keys in found for key in keys if key.endswith(".safetensors")]
    root = cache_dir or next(memory.iterdir())
    assert list((root / FOLDER).iterdir())


def test_saves_do_not_fill_the_cache_by_default(ranks: Pool, folder: Path, memory: Path) -> None:
    assert list(memory.iterdir()) == []
