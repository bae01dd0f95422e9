"""The hosts of a job read each blob of a remote store once. Each imitated host has its own folder for memory."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from casckpt.base.parallel import in_parallel
from casckpt.contents import manifests
from casckpt.errors import Conflict, Gone, InvalidInput, RankFailed, StorageError
from casckpt.format.manifest import Manifest
from casckpt.format.names import TxId
from casckpt.frontends import megatron
from casckpt.frontends.dcp import StorageReader
from casckpt.frontends.dcp import reader as reader_module
from casckpt.frontends.training_state import save_model_and_optim_state, unshard_model_state, unshard_optim_state
from casckpt.history.commits import Commit
from casckpt.loading import job_reads
from casckpt.loading.job_reads import JobReads
from casckpt.ranks import ranks as ranks_module
from casckpt.ranks.ranks import GroupRanks, open_ranks
from casckpt.repository import host_reads as module
from casckpt.repository.blob_cache import PARTS, Unusable
from casckpt.repository.host_reads import HostReads
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.store.test_share_reads import (
    blob_ranges,
    check_update,
    equal,
    every,
    fill,
    opened,
    save,
    save_change,
    state,
    updated,
)
from tests.support import gpt
from tests.support.bucket_reads import ReadBucket, ReadRange, bucket, nbytes, union
from tests.support.dcp import load as by_torch
from tests.support.faulty import fail_before
from tests.support.gpt import Topology, differences
from tests.support.logs import logged
from tests.support.megatron_core import core, own_state, theirs
from tests.support.ranks import Pool, outcome_of, tell, wait_for
from tests.support.rewrites import move
from tests.support.saves import cells, small
from tests.support.tally import tally
from tests.support.together import cut, impatient
from tests.support.training import identical

SHORT = 4.0  # seconds until the others give up on a stopped rank


@dataclass(frozen=True)
class Place:
    """A store in ``folder``, and ``hosts`` hosts, whose memory is in ``memory``."""

    folder: Path
    memory: Path
    hosts: int = 2

    def open(self, rank: int, **options: Any) -> Store:
        """Open the store as a rank. Neighboring ranks are on different hosts."""
        here = self.memory / str(rank % self.hosts)
        here.mkdir(exist_ok=True)
        return opened(self.folder, here, **options)

    @property
    def left(self) -> list[Path]:
        """Return the files that the ranks of all hosts share."""
        return list(self.memory.glob(f"*/*/{PARTS}/*/*"))


def load(rank: int, size: int, place: Place, layout: str = "replicas", **options: Any) -> list[ReadRange]:
    store = place.open(rank, **options)
    return fill(store, layout, size, lambda filled: store.load(filled, "latest"))


@pytest.fixture
def empty(tmp_path: Path) -> Place:
    (tmp_path / "memory").mkdir()
    return Place(tmp_path / "store", tmp_path / "memory")


@pytest.fixture
def place(ranks: Pool, empty: Place) -> Place:
    ranks.run(2, save, empty.folder, "mixed")
    return empty


# what is read


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2), (3, 3), (5, 2)])
def test_the_hosts_of_a_job_read_each_byte_once(ranks: Pool, place: Place, size: int, hosts: int) -> None:
    place = replace(place, hosts=hosts)
    found = ranks.run(size, load, place)
    alone = every(ranks.run(size, load, place, share_reads="off"))
    assert nbytes(every(found)) == union(every(found)) < 1.1 * union(alone)  # blobs also have headers
    assert nbytes(alone) == size * union(alone)
    by_host = [nbytes(every(found[host::hosts])) for host in range(hosts)]
    assert max(by_host) - min(by_host) <= 1 << 17  # two blobs
    assert place.left == []


def cut_within_hosts(size: int) -> dict[str, torch.Tensor]:
    """Return a state that is sharded over the ranks of a host, and the same on both hosts."""
    mesh = init_device_mesh("cpu", (size // 2, 2))
    return {f"w{n}": cut(cells(24, seed=n).reshape(-1, 256), mesh, [Shard(0), Replicate()]) for n in range(6)}


def load_sharded(rank: int, size: int, place: Place) -> list[ReadRange]:
    store, expected = place.open(rank), cut_within_hosts(size)
    filled = {key: torch.zeros_like(value) for key, value in expected.items()}
    store.load(filled, "latest")
    assert equal(filled, expected)
    return blob_ranges(store)


def test_ranks_that_need_parts_of_a_blob_share_it_if_their_hosts_need_all_of_it(ranks: Pool, place: Place) -> None:
    found = every(ranks.run(4, load_sharded, place))
    assert nbytes(found) == union(found)


def connected(call: Callable[[], object]) -> list[str]:
    """Return the purposes of the groups that are connected during a call."""
    connect, found = GroupRanks.connect, list[str]()

    def noted(group: GroupRanks, *args: Any) -> None:
        found.append(group.purpose)
        connect(group, *args)

    with patch.object(GroupRanks, "connect", noted):
        call()
    return found


def load_twice(rank: int, size: int, place: Place, layout: str, **options: Any) -> list[str]:
    return connected(lambda: [load(rank, size, place, layout, **options) for _ in range(2)])


def test_the_ranks_form_a_second_group_only_if_hosts_pass_on_bytes(ranks: Pool, empty: Place, tmp_path: Path) -> None:
    ranks.run(2, save, empty.folder, "rows")
    job = (load_twice, empty)
    assert ranks.run(2, *job, "replicas") == [["main", "main 0 bytes"]] * 2
    assert ranks.run(2, *job, "rows") == [["main"]] * 2
    assert ranks.run(2, *job, "replicas", share_reads="off") == [["main"]] * 2
    assert ranks.run(2, *job, "replicas", cache_bytes=1 << 12) == [["main"]] * 2
    assert ranks.run(2, *job, "replicas", cache_dir=tmp_path / "disk") == [["main"]] * 2


def some_alone(rank: int, size: int, place: Place) -> list[ReadRange]:
    return load(rank, size, place, share_reads="off" if rank == 1 else "auto")


def test_a_rank_that_reads_alone_does_not_keep_others_from_sharing(ranks: Pool, place: Place) -> None:
    found = ranks.run(4, some_alone, place)
    others = every([found[0], found[2], found[3]])
    assert nbytes(others) == union(others)
    assert nbytes(found[1]) == union(found[1]) > 0
    assert place.left == []


def save_and_load(rank: int, size: int, place: Place) -> list[ReadRange]:
    """Save parts of a state on two hosts that keep what they save in memory, and then load all of it on both."""
    store = place.open(rank, cache_saves=True)
    store.create(cell_bytes=1 << 12, blob_bytes=1 << 16)
    store.save(state("rows", size), step=1)
    return load(rank, size, place, cache_saves=True)


def test_a_host_that_has_a_blob_in_memory_passes_it_on(ranks: Pool, empty: Place) -> None:
    assert ranks.run(2, save_and_load, empty) == [[], []]


def update(rank: int, size: int, place: Place) -> list[ReadRange]:
    return updated(place.open(rank), size)


def test_updates_on_several_hosts_share_their_reads(ranks: Pool, place: Place) -> None:
    ranks.run(2, save_change, place.folder)
    check_update(every(ranks.run(4, update, place)))
    assert place.left == []


def from_folder(rank: int, size: int, place: Place, **options: Any) -> list[ReadRange]:
    with patch.object(ReadBucket, "traits", property(lambda bucket: replace(bucket.inner.traits, parallel=4))):
        return load(rank, size, place, **options)


def test_the_hosts_of_a_job_read_each_byte_of_a_folder_once_if_they_share_its_reads(ranks: Pool, place: Place) -> None:
    found = every(ranks.run(4, from_folder, place, share_reads="on"))
    assert nbytes(found) == union(found)
    found = every(ranks.run(4, from_folder, place))
    assert nbytes(found) == 4 * union(found)


# front ends


def by_dcp(rank: int, size: int, place: Place, layout: str = "replicas", **options: Any) -> list[ReadRange]:
    reader = StorageReader(store := place.open(rank), "latest")
    return fill(store, layout, size, lambda filled: by_torch(filled, reader, **options))


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2), (3, 3)])
def test_dcp_loads_of_all_ranks_read_each_byte_once(ranks: Pool, place: Place, size: int, hosts: int) -> None:
    found = every(ranks.run(size, by_dcp, replace(place, hosts=hosts)))
    assert nbytes(found) == union(found)
    assert place.left == []


def by_dcp_on_some(rank: int, size: int, place: Place) -> tuple[list[ReadRange], list[str]]:
    """Load with DCP on all ranks but the last. Return what was read, and which groups were connected."""
    group, found = torch.distributed.new_group(list(range(size - 1))), list[ReadRange]()
    if rank == size - 1:
        return [], []
    groups = connected(lambda: found.extend(by_dcp(rank, size, place, process_group=group)))
    return found, groups


def test_a_dcp_load_of_some_ranks_shares_reads_within_each_host(ranks: Pool, place: Place) -> None:
    found = ranks.run(5, by_dcp_on_some, place, timeout=SHORT)
    assert [groups for _, groups in found] == [[]] * 5
    ranges = every([ranges for ranges, _ in found])
    assert nbytes(ranges) == 2 * union(ranges)
    assert place.left == []


def by_dcp_twice(rank: int, size: int, place: Place, layout: str) -> list[str]:
    return connected(lambda: [by_dcp(rank, size, place, layout) for _ in range(2)])


def test_ranks_connect_for_a_dcp_load_only_if_hosts_pass_on_bytes(ranks: Pool, empty: Place) -> None:
    ranks.run(2, save, empty.folder, "rows")
    assert ranks.run(2, by_dcp_twice, empty, "rows") == [[], []]
    found = ranks.run(2, by_dcp_twice, empty, "replicas")
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


def patience(rank: int, size: int, place: Place) -> float:
    """Return how long a rank waits for another one in a DCP load, in seconds."""
    ended, found = HostReads.end, list[float]()

    def end(reads: HostReads) -> None:
        found.append(reads.patience)
        ended(reads)

    with patch.object(HostReads, "end", end):
        by_dcp(rank, size, place)
    return max(found)


def test_no_wait_of_a_dcp_load_outlasts_the_timeout(ranks: Pool, place: Place) -> None:
    assert max(ranks.run(2, patience, place, timeout=SHORT)) < SHORT


def by_one_reader(rank: int, size: int, place: Place) -> tuple[list[str], list[str]]:
    """Load twice with the same reader. Return which groups were connected, and the warnings."""
    reader = StorageReader(store := place.open(rank), "latest")
    with logged() as warnings:
        groups = connected(
            lambda: [fill(store, "replicas", size, lambda filled: by_torch(filled, reader)) for _ in range(2)]
        )
    return groups, warnings


def test_a_dcp_reader_can_be_used_for_several_loads(ranks: Pool, place: Place) -> None:
    (groups, warnings), other = ranks.run(2, by_one_reader, place)
    assert (groups, warnings) == other
    assert len(set(groups)) == 2  # a group with the name of an earlier one may fail to connect
    assert warnings == []


class Refusing(DefaultLoadPlanner):
    """A planner that fails when the first tensor is read."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise InvalidInput("a test")


class RefusingEarly(DefaultLoadPlanner):
    """A planner that fails before anything is read."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        raise InvalidInput("a test")


def refused(rank: int, size: int, place: Place, failing: type[DefaultLoadPlanner] = Refusing) -> Any:
    """Load with DCP while the planner of rank 1 fails. Return the warnings, and the ranks that are named."""
    vars(reader_module)["MEETING"] = 1.0
    planner = failing() if rank == 1 else None
    filled = {key: torch.zeros_like(value) for key, value in state("replicas", size).items()}
    with logged() as warnings, pytest.raises(CheckpointException) as error:
        by_torch(filled, StorageReader(place.open(rank), "latest"), planner=planner)
    return warnings, list(error.value.failures)


def test_a_dcp_load_that_fails_on_one_rank_fails_on_all_ranks_without_a_wait(ranks: Pool, place: Place) -> None:
    assert ranks.run(4, refused, place) == [([], [1])] * 4


def test_a_dcp_load_names_a_rank_that_fails_before_it_connects(ranks: Pool, place: Place) -> None:
    found = ranks.run(2, refused, place, RefusingEarly, timeout=20.0)
    assert [named for _, named in found] == [[1], [1]]


def unsharded(rank: int, size: int, place: Place, what: str, **options: Any) -> list[ReadRange]:
    """Unshard a model or its optimizer. Return what was read."""
    store, (model, optimizer) = place.open(rank, **options), trained()
    if what == "model":
        assert identical(unshard_model_state(store, "latest"), model.state_dict())
    else:
        assert identical(unshard_optim_state(store, "latest")["state"], optimizer.state_dict()["state"])
    return blob_ranges(store)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_ranks_that_unshard_read_each_byte_once(ranks: Pool, empty: Place) -> None:
    store = small(bucket(empty.folder)[1])
    save_model_and_optim_state(store, *trained(), run="default", step=1)
    for what in ("model", "optimizer"):
        found = every(ranks.run(4, unsharded, empty, what))
        assert nbytes(found) == union(found) > 0
        assert empty.left == []
        alone = every(ranks.run(4, unsharded, empty, what, share_reads="off"))
        assert nbytes(alone) == 4 * union(alone)


def exchanges(rank: int, size: int, place: Place, **options: Any) -> int:
    before = open_ranks().exchanges
    unshard_model_state(place.open(rank, **options), "latest")
    return open_ranks().exchanges - before


def test_unsharding_needs_no_more_messages_if_ranks_do_not_share_reads(ranks: Pool, empty: Place) -> None:
    save_model_and_optim_state(small(bucket(empty.folder)[1]), trained()[0], run="default", step=1)
    assert ranks.run(2, exchanges, empty, share_reads="off") == [2, 2]
    assert ranks.run(2, exchanges, empty) == [4, 4]


def apart(rank: int, size: int, place: Place, share_reads: str) -> Any:
    """Unshard while each rank uses a different store."""
    store = replace(place, folder=place.folder / str(rank)).open(rank, share_reads=share_reads)
    return outcome_of(lambda: unshard_model_state(store, "latest"))


@pytest.mark.parametrize("share_reads", ["on", "off"])
def test_ranks_that_unshard_from_different_stores_are_told_so(ranks: Pool, empty: Place, share_reads: str) -> None:
    for rank in range(2):
        store = small(bucket(empty.folder / str(rank))[1])
        save_model_and_optim_state(store, trained()[0], run="default", step=1)
    for error in ranks.run(2, apart, empty, share_reads):
        assert isinstance(error, Conflict)
        assert "all ranks must share one store" in str(error)


def by_megatron(rank: int, size: int, place: Place, topology: Topology) -> tuple[list[ReadRange], list[Any]]:
    """Load with the real Megatron-core. Return what was read, and the values that differ."""
    core()
    store = place.open(rank)
    template = theirs(gpt.emptied(own_state(rank, topology)))
    found = core().load(template, f"{place.folder}/iter_1", sharded_strategy=megatron.CasLoadShardedStrategy(store))
    return blob_ranges(store), differences(found, {**gpt.expected(own_state(rank, topology)), "content_metadata": None})


def saved_by_megatron(rank: int, size: int, place: Place, topology: Topology) -> None:
    core()
    folder = Path(f"{place.folder}/iter_1")
    folder.mkdir(parents=True, exist_ok=True)
    strategy = megatron.CasSaveShardedStrategy(place.open(rank), run="gpt")
    core().save(theirs(own_state(rank, topology)), str(folder), sharded_strategy=strategy)


def test_megatron_loads_of_several_hosts_read_each_byte_once(ranks: Pool, empty: Place) -> None:
    ranks.run(2, saved_by_megatron, empty, Topology(tp=2))
    for topology in (Topology(dp=2), Topology(tp=2)):
        found = ranks.run(2, by_megatron, empty, topology)
        assert [differing for _, differing in found] == [[], []]
        ranges = every([ranges for ranges, _ in found])
        assert nbytes(ranges) == union(ranges) > 0


# harm


Harm = Callable[[], Any]


def flip_sent() -> Any:
    """Flip a bit of each byte of what is sent."""

    def exchange(job: JobReads, sends: list[Any], receives: list[Any]) -> None:
        for data, _ in sends:
            data[:-1].bitwise_xor_(1)
        exchanged(job, sends, receives)

    exchanged = JobReads._exchange
    return patch.object(JobReads, "_exchange", exchange)


def flip_written() -> Any:
    """Flip a bit of each byte in the files that the ranks of the host share."""

    def put(reads: HostReads, number: int, size: int, offset: int, data: memoryview) -> None:
        written(reads, number, size, offset, memoryview(bytes(byte ^ 1 for byte in data)))

    written = HostReads.put
    return patch.object(HostReads, "put", put)


def evict() -> Any:
    """Remove each file as soon as something has arrived."""

    def put(reads: HostReads, number: int, *args: Any) -> None:
        written(reads, number, *args)
        reads.path(number).unlink(missing_ok=True)

    written = HostReads.put
    return patch.object(HostReads, "put", put)


def full_disk() -> Any:
    """Let no write succeed."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return patch.object(module, "write_all", full)


def no_gate() -> Any:
    """Let the rank that receives fail to create the file with the locks."""
    return patch.object(module, "_lock", side_effect=Unusable("a test"))


def broken_connection() -> Any:
    """Let the first message fail."""
    return patch.object(JobReads, "_exchange", side_effect=RankFailed("a test", rank=0, lost="late"))


def harmed(rank: int, size: int, place: Place, harm: Harm) -> tuple[list[ReadRange], list[str]]:
    """Load while rank 1 does harm. Return what this rank read, and its warnings."""
    module.PATIENCE = 1.0
    with logged() as warnings, harm() if rank == 1 else nullcontext():
        return load(rank, size, place), warnings


@pytest.mark.parametrize(
    ("harm", "warning"),
    [
        (flip_sent, "bytes that rank 1 passed on are wrong"),
        (flip_written, "bytes that rank 0 passed on are wrong"),
        (evict, None),
        (full_disk, "No space left on device"),
        (no_gate, "a test"),
    ],
)
def test_harm_to_what_is_passed_on_costs_only_reads(ranks: Pool, place: Place, harm: Harm, warning: str | None) -> None:
    found = ranks.run(4, harmed, place, harm)
    warnings = [text for _, texts in found for text in texts]
    assert any(warning in text for text in warnings) if warning else warnings == []
    assert not any("has not brought" in text for text in warnings)
    ranges = every([ranges for ranges, _ in found])
    assert nbytes(ranges) > union(ranges)
    assert place.left == []


def after_a_failure(rank: int, size: int, place: Place) -> list[ReadRange]:
    """Load while the connections between hosts fail, and then load again. Rank 2 reads alone and does not notice."""
    module.PATIENCE = 1.0 if rank == 0 else 30.0
    options: dict[str, Any] = {"share_reads": "off"} if rank == 2 else {}
    with logged() as warnings, broken_connection() if rank == 1 else nullcontext():
        load(rank, size, place, **options)
    assert rank == 0 or not any("has not brought" in text for text in warnings)
    return load(rank, size, place, **options)


def test_after_a_broken_connection_the_next_load_shares_its_reads(ranks: Pool, place: Place) -> None:
    found = every(ranks.run(3, after_a_failure, place, timeout=SHORT)[:2])
    assert nbytes(found) == union(found)


def failing(rank: int, size: int, place: Place, who: int, last: int, *, verify: bool = True) -> Any:
    """Load while the reads of one rank fail, until its read number ``last``."""
    store = place.open(rank)
    if rank == who:
        faults = [fail_before("read_into", key="*.safetensors", at=at) for at in range(1, last + 1)]
        store.repository.storage.inject(*faults)  # type: ignore[attr-defined]  # it is a ReadBucket
    return outcome_of(lambda: fill(store, "replicas", size, lambda filled: store.load(filled, "latest", verify=verify)))


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_of_the_store_on_one_host_is_raised_on_all_ranks(ranks: Pool, place: Place, who: int) -> None:
    for rank, error in enumerate(ranks.run(3, failing, replace(place, hosts=3), who, 1000)):
        assert isinstance(error, StorageError)
        assert rank == who or error.__dict__["rank"] == who


def test_a_failed_read_is_not_passed_on_as_bytes(ranks: Pool, place: Place) -> None:
    for last in (1, 4):
        for found in ranks.run(2, failing, place, 1, last, verify=False):
            assert isinstance(found, list | StorageError), found


def slow_store(rank: int, size: int, place: Place, who: int, *, verify: bool) -> list[str]:
    """Load while one read of rank ``who`` fails, with pieces of any size. Return the warnings."""
    job_reads._LEAST_PIECE = job_reads._PIECE = 10_000
    store = place.open(rank)
    if rank == who:
        store.repository.storage.inject(fail_before("read_into", key="*.safetensors", at=3))  # type: ignore[attr-defined]  # it is a ReadBucket
    with logged() as warnings:
        fill(store, "replicas", size, lambda filled: store.load(filled, "latest", verify=verify))
    return warnings


@pytest.mark.parametrize("verify", [False, True])
def test_a_block_of_which_only_a_part_has_arrived_is_not_used(ranks: Pool, place: Place, verify: bool) -> None:
    for who in (0, 1):
        assert ranks.run(4, slow_store, place, who, verify=verify) == [[]] * 4


def by_rewrite(rank: int, size: int, place: Place, first: TxId, *, verify: bool) -> None:
    """Load while rank 1 cannot read the manifest of the places ``first``, and uses that of older ones."""

    def get(repo: Repository, commit: Commit) -> Manifest:
        if rank == 1 and commit.places.txid == first:
            raise Gone("a test")
        return read(repo, commit)

    read, store = manifests.get, place.open(rank)
    with patch.object(manifests, "get", get):
        fill(store, "replicas", size, lambda filled: store.load(filled, "latest", verify=verify))


@pytest.mark.parametrize("verify", [True, False])
def test_ranks_with_different_manifests_do_not_pass_on_blobs(ranks: Pool, place: Place, verify: bool) -> None:
    store = bucket(place.folder)[0]
    move(store.repository, store.get("latest").commit)
    ranks.run(2, by_rewrite, place, store.get("latest").commit.places.txid, verify=verify)
    assert place.left == []


def at_once(rank: int, size: int, place: Place) -> None:
    """Load the same checkpoint in two threads, each with its own process group."""
    groups, expected = [torch.distributed.new_group(list(range(size))) for _ in range(2)], state("replicas", size)

    def loads(number: int) -> None:
        for _ in range(3):
            filled = {key: torch.zeros_like(value) for key, value in expected.items()}
            place.open(rank).load(filled, "latest", process_group=groups[number])
            assert equal(filled, expected)

    for _ in in_parallel(2, loads, range(2), name="test"):
        pass


def test_two_loads_at_once_do_not_wait_for_each_other(ranks: Pool, place: Place) -> None:
    ranks.run(4, at_once, place)
    assert place.left == []


# ranks that die or stop


class Strike(NamedTuple):
    """One of ``size`` ranks, ``who``, receives a signal at its message number ``at`` to another host."""

    size: int
    who: int
    at: int
    sends: signal.Signals = signal.SIGKILL


STRIKES = [Strike(2, 1, 1), Strike(2, 0, 5), Strike(3, 1, 4), Strike(4, 1, 2)]
"""The strikes of the default run."""


def struck(rank: int, size: int, place: Place, strike: Strike) -> Any:
    """Load while a rank is struck.

    The other ranks kill a stopped rank when all of them have failed. Return whether they have failed, and how.
    """
    impatient()
    ranks_module.MARGIN = timedelta(seconds=1)
    who, at, sends = strike[1:]
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    count = 0

    def counted(job: JobReads, *args: Any) -> None:
        nonlocal count
        count += 1
        if rank == who and count == at:
            tally(f"{sends.name} at a message to another host")
            os.kill(os.getpid(), sends)
        passed(job, *args)

    passed = JobReads._exchange
    with patch.object(JobReads, "_exchange", counted):
        found = outcome_of(lambda: load(rank, size, place))
    if count < at and rank == who:
        return "not struck"
    if isinstance(found, RankFailed):
        tell(f"failed {rank}")
        for other in range(size):
            if other != who:
                wait_for(f"failed {other}")
        with suppress(ProcessLookupError):
            os.kill(int(Path(f"pid-{who}").read_text()), signal.SIGKILL)
        return found.rank
    return "loaded" if isinstance(found, list) else found


def check_struck(ranks: Pool, place: Place, strike: Strike) -> bool:
    """Strike one rank, and check that all others name it. Return False if it has fewer messages."""
    size, who = strike[:2]
    outcomes = ranks.outcomes(size, struck, replace(place, hosts=2 if size == 4 else size), strike, timeout=SHORT)
    others = [outcome.value for rank, outcome in enumerate(outcomes) if rank != who]
    if outcomes[who].value == "not struck":
        assert others == ["loaded"] * (size - 1)
        return False
    assert others == [who] * (size - 1), (strike, outcomes)
    return True


@pytest.mark.parametrize("sends", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.timeout(3600)
def test_a_rank_that_dies_or_stops_at_a_message_is_named(
    ranks: Pool, place: Place, sends: signal.Signals, full: bool
) -> None:
    for strike in STRIKES:
        assert check_struck(ranks, place, strike._replace(sends=sends))
    for size, who in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 3)) if full else ():
        at = 1
        while check_struck(ranks, place, Strike(size, who, at, sends)):
            at += 1
        assert at > 3
