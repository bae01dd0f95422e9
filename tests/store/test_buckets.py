"""Checkpoints in a bucket: concurrent writers, failing networks and servers, and the number of requests in a load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import casckpt
from casckpt.contents.watching import Watcher
from casckpt.errors import Conflict, StorageError
from casckpt.format.keys import commit_key, settings_key, tag_key
from casckpt.format.names import TxId
from casckpt.format.records import Committed, Record, Settings, TagRecord
from casckpt.history.commits import list_commits
from casckpt.loading import planned_reads as items
from casckpt.plan.reads import Batch, plan_batches
from casckpt.repository.repository import Repository
from casckpt.storage.remote.patience import Backoff
from casckpt.storage.remote.store import RemoteStore
from casckpt.storage.remote.urls import RemoteLocation
from casckpt.store.store import Store
from tests.support import servers
from tests.support.buckets import impatient, state
from tests.support.faulty import Call, FaultyStore, call_first
from tests.support.proxy import Proxy, Trouble
from tests.support.ranks import Pool, outcome_of, tell, wait_for
from tests.support.repositories import manifest_id
from tests.support.saves import CELL, cells, same_state, steps
from tests.support.servers import Server

RACERS, SAVERS, SAVES = 3, 2, 2
NEW = 100  # cells per save: its first blobs wait long for the commit, so the test would notice if gc deleted them
MIB = 1 << 20


@pytest.fixture(params=[pytest.param("straight", marks=pytest.mark.soak), "in trouble"])
def endpoint(request: pytest.FixtureRequest, seaweed_server: Server) -> Iterator[str]:
    """The address of a real server, either direct or through a network that loses one in ten requests."""
    if request.param == "straight":
        yield seaweed_server.endpoint
        return
    with Proxy(seaweed_server.endpoint) as proxy:
        proxy.chaos(seed=1, share=0.1)
        yield proxy.endpoint


@pytest.fixture
def place(seaweed_server: Server, endpoint: str) -> RemoteLocation:
    """A new location for a store."""
    return RemoteLocation(
        "s3", f"{seaweed_server.new_place()}/store", {**seaweed_server.options, "endpoint_url": endpoint}
    )


def opened(place: RemoteLocation, cache: Path) -> Store:
    """Open the store as each host does, with small cells and blobs."""
    store = Store(Repository(RemoteStore(place), cache))
    store.create(cell_bytes=CELL, blob_bytes=64 << 10)
    return store


# races


def records_of(rank: int, txid: TxId) -> dict[str, Record]:
    """Return one record of each kind that only one writer may create, as this rank would write it."""
    commit = Committed(
        txid=txid, run="r", step=1, time=rank, manifest=manifest_id(str(rank)), created_at=rank,
        bytes_total=rank, head=manifest_id("head"), manifest_bytes=1, store="s", who="ann@node3",
    )  # fmt: skip
    tag = TagRecord(name="best", time=rank, unique=str(rank), txid=txid, who="ann@node3:1")
    return {
        commit_key(txid): commit,
        tag_key("best", 0): tag,
        settings_key(7): Settings(created_at=rank, min_age_seconds=float(rank)),
    }


def race(rank: int, _: int, place: RemoteLocation, cache: Path, txid: TxId) -> list[bool]:
    """Try to create each record, as all other ranks do. Return the records that this rank created."""
    repo, won = opened(place, cache / str(rank)).repository, []
    for key, record in records_of(rank, txid).items():
        dist.barrier()
        won.append(not isinstance(outcome_of(partial(repo.put_record, key, record)), Conflict))
    return won


def test_exactly_one_of_several_creators_of_a_record_succeeds(
    ranks: Pool, place: RemoteLocation, tmp_path: Path
) -> None:
    repo = opened(place, tmp_path / "mine").repository
    txid = repo.new_txid("r", 1)
    found = ranks.run(RACERS, race, place, tmp_path, txid)
    for number, key in enumerate(records_of(0, txid)):
        won = [wins[number] for wins in found]
        assert won.count(True) == 1, key
        record = records_of(won.index(True), txid)[key]
        assert repo.get_record(key, type(record)) == record


def save_one_step(rank: int, size: int, place: RemoteLocation, cache: Path) -> Any:
    """Save the same run and step as all other ranks. Return the visible checkpoints."""
    store = opened(place, cache / str(rank))
    dist.barrier()
    mine = outcome_of(lambda: store.save({"w": cells(2, seed=rank)}, run="r", step=1, no_dist=True).id)
    dist.barrier()
    return mine, store.get("r@1").id


def test_hosts_that_save_a_step_agree_on_the_winner(ranks: Pool, place: RemoteLocation, tmp_path: Path) -> None:
    found = ranks.run(RACERS, save_one_step, place, tmp_path)
    assert len({answer for _, answer in found}) == 1
    assert any(isinstance(mine, str) for mine, _ in found)
    assert all(isinstance(mine, str | Conflict) for mine, _ in found)
    store = opened(place, tmp_path / "mine")
    assert not store.verify().is_damaged
    rank = next(rank for rank, (mine, answer) in enumerate(found) if mine == answer)
    assert same_state(store.read("r@1"), {"w": cells(2, seed=rank)})


# writers during a gc


def training(rank: int, step: int) -> dict[str, Any]:
    """Return a state with one value that all runs share, one that stays the same within a run, and one that is new."""
    return {"base": cells(20, seed=1), "own": cells(10, seed=100 + rank), "new": cells(NEW, seed=1000 * rank + step)}


def save_or_collect(rank: int, size: int, place: RemoteLocation, folder: Path) -> int:
    """Save all steps. On the last rank, collect garbage until the other ranks are done."""
    store = opened(place, folder / str(rank))
    done = [folder / f"done-{number}" for number in range(size - 1)]
    if rank < size - 1:
        wait_for("collecting")
        try:
            for step in range(SAVES):
                store.save(training(rank, step), run=f"run-{rank}", step=step, no_dist=True)
                # kept at least until the next save
                assert same_state(store.read(f"run-{rank}@{step}"), training(rank, step))
        finally:
            done[rank].touch()
        return 0
    deleted = 0
    while True:
        last = all(path.exists() for path in done)
        deleted += store.gc(keep_last=1, min_age=0, wait=0 if not last else "60s").deleted_blobs
        tell("collecting")
        if last:
            return deleted


def test_processes_save_during_repeated_gcs(ranks: Pool, place: RemoteLocation, tmp_path: Path) -> None:
    *_, deleted = ranks.run(SAVERS + 1, save_or_collect, place, tmp_path)
    store = opened(place, tmp_path / "mine")
    assert sorted(steps(store)) == [(f"run-{rank}", SAVES - 1) for rank in range(SAVERS)]
    result = store.verify()
    assert (result.is_damaged, result.failed) == (False, ())
    for rank in range(SAVERS):
        assert same_state(store.read(f"run-{rank}@latest"), training(rank, SAVES - 1))
    assert deleted > 0


HELD = {"new": cells(40, seed=9)}


class Held:
    """A save on a separate host that pauses before its commit until `go` is called."""

    def __init__(self, place: RemoteLocation, cache: Path) -> None:
        self._reached, self._free = threading.Event(), threading.Event()
        storage = FaultyStore(RemoteStore(place), [call_first("put", self._stop, key="commits/*")])
        store = Store(Repository(storage, cache))
        self._pool = ThreadPoolExecutor(1)
        self._saved = self._pool.submit(lambda: store.save(HELD, run="held", step=1))
        assert self._reached.wait(60)

    def _stop(self, _: Call) -> None:
        self._reached.set()
        if not self._free.wait(60):
            raise StorageError("the test let the save wait for ever")

    def go(self) -> None:
        """Let the save commit, and wait until it has finished."""
        self._free.set()
        self._saved.result(60)
        self._pool.shutdown()


def with_garbage(place: RemoteLocation, cache: Path) -> Store:
    """Return a store with garbage, so that gc has to wait."""
    store = opened(place, cache)
    for step in range(2):
        store.save({"new": cells(2, seed=step)}, run="r", step=step)
    store.forget("r@0")
    return store


def test_gc_waits_for_a_save_that_has_uploaded_blobs(place: RemoteLocation, tmp_path: Path) -> None:
    collector = with_garbage(place, tmp_path / "gc")
    held = Held(place, tmp_path / "save")
    result = collector.gc(min_age=0, wait=0)
    held.go()
    assert [one.reason for one in result.waiting] == ["transaction"]
    assert result.deleted_blobs == 0
    assert same_state(opened(place, tmp_path / "other").read("held@1"), HELD)
    assert collector.gc(min_age=0).deleted_blobs == 1


def test_gc_keeps_checkpoints_committed_while_it_runs(place: RemoteLocation, tmp_path: Path) -> None:
    """The save commits between the gc's listing of commits and its listing of transactions."""
    with_garbage(place, tmp_path / "gc")
    held = Held(place, tmp_path / "save")
    storage = FaultyStore(RemoteStore(place), [call_first("list", lambda _: held.go(), key="transactions/")])
    result = Store(Repository(storage, tmp_path / "gc")).gc(min_age=0, wait=0)
    assert (result.deleted_blobs, result.waiting) == (1, ())
    assert same_state(opened(place, tmp_path / "other").read("held@1"), HELD)


# a server that dies


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A real server that the test kills."""
    (tmp_path / "server").mkdir()
    with servers.running(servers.seaweed(tmp_path / "server")) as server:
        yield server


def test_a_server_killed_during_a_save_does_not_leave_a_partial_checkpoint(
    mortal: Server, tmp_path: Path, full: bool
) -> None:
    bucket, seen = mortal.new_bucket(), set()
    with Proxy(mortal.endpoint) as proxy:
        store = impatient(mortal, proxy, bucket, tmp_path / "cache", Backoff(attempts=3, first=0.01))
        store.save(state(0), step=0)
        # the server can list before it can read again, so a check after a restart must retry for a few seconds
        patient = impatient(mortal, proxy, bucket, tmp_path / "cache", Backoff())
        for step, number in enumerate((2, 9, 12, 15) if full else (9,), start=1):
            proxy.at(number, mortal.kill)
            saved = outcome_of(lambda step=step: store.save(state(step), step=step))  # type: ignore[misc]  # bound now
            seen.add(type(saved))
            assert isinstance(saved, StorageError | casckpt.Checkpoint)
            mortal.kill()  # in case the save needed fewer requests
            proxy.calm()
            mortal.start_again()
            visible = ("default", step) in steps(patient)
            assert visible or isinstance(saved, StorageError)
            for _, there in steps(patient):
                assert same_state(patient.read(f"default@{there}"), state(there))
            assert not patient.verify().is_damaged
        patient.save(state(9), step=9)
        assert same_state(patient.read("default@latest"), state(9))
        result = patient.gc(min_age=0, wait=0, revoke_after=0)
        assert not patient.verify().is_damaged
        assert not patient.gc(min_age=0, wait=0, revoke_after=0).waiting
    assert StorageError in seen
    assert result.kept_blobs > 0


def test_a_save_survives_a_restart_of_the_server(mortal: Server, tmp_path: Path, full: bool) -> None:
    bucket = mortal.new_bucket()

    def die_and_rise() -> None:
        mortal.kill()
        keeper.submit(mortal.start_again)

    # the server dies with the thread that started it, so that thread must stay alive
    with ThreadPoolExecutor(1) as keeper, Proxy(mortal.endpoint) as proxy:
        store = impatient(mortal, proxy, bucket, tmp_path / "cache", Backoff(attempts=12))
        store.save(state(0), step=0)
        for step, number in enumerate((8, 14) if full else (8,), start=1):
            proxy.at(number, die_and_rise)
            store.save(state(step), step=step)
            assert same_state(store.read(f"default@{step}"), state(step))
        assert not list_commits(store.repository).damaged
        assert not store.verify().is_damaged


# the requests of a load


@pytest.mark.parametrize("verify", [True, False])
def test_loading_an_eighth_of_a_checkpoint_reads_an_eighth_of_its_bytes(
    verify: bool, request: pytest.FixtureRequest, tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test counts bytes and requests. With --full, it loads 1 GiB from a real server."""
    server: Server = request.getfixturevalue("seaweed_server" if full else "moto_server")
    count, rows = (16, 1032) if full else (4, 120)  # tensors; rows of 64 KiB, 16 of which make up a cell
    url = f"s3://{server.new_place()}/store"
    weights = {f"layer.{n}": torch.arange(rows * 16384).reshape(rows, 16384).float() + n for n in range(count)}
    small = {f"layer.bias.{n}": torch.full((300,), float(n)) for n in range(count)}
    casckpt.open(url, storage_options=server.options, cache_dir=tmp_path / "a").save(weights | small, step=0)
    part = rows // 8
    wanted: dict[str, Any] = {
        key: casckpt.Shard(torch.empty(part, *value.shape[1:]), value.shape, offset=(3 * part, 0))
        for key, value in weights.items()
    } | {key: torch.empty_like(value) for key, value in small.items()}
    nbytes = count * (part * 65536 + 1200)
    planned: list[Batch[Any]] = []

    def noted(*arguments: Any, **options: Any) -> list[Batch[Any]]:
        planned.extend(plan_batches(*arguments, **options))
        return planned

    monkeypatch.setattr(items, "plan_batches", noted)
    with Proxy(server.endpoint) as proxy:
        through = server.options | {"endpoint_url": proxy.endpoint}
        store = casckpt.open(url, storage_options=through, cache_dir=tmp_path / "b")
        store.get("latest")  # the records that name the checkpoint are small
        before = len(proxy.seen)
        store.load(wanted, "latest", verify=verify)
        gets = [one for one in proxy.seen[before:] if one.path.endswith(".safetensors")]
    for key, value in weights.items():
        assert torch.equal(wanted[key].data, value[3 * part : 4 * part])
    assert all(torch.equal(wanted[key], value) for key, value in small.items())
    assert {one.method for one in gets} == {"GET"}
    ranges = [(one.range or "").removeprefix("bytes=") for one in gets]
    assert sorted(ranges) == sorted(f"{batch.offset}-{batch.offset + batch.nbytes - 1}" for batch in planned)
    assert len({one.path for one in gets}) == len({batch.blob for batch in planned})
    moved = sum(batch.nbytes for batch in planned)
    assert moved <= 1.05 * nbytes + (2 * MIB * count if verify else 0)
    # the minimum: pieces of 8 MiB, plus one if a range continues in a different blob
    assert len(gets) <= count * (-(-part * 65536 // (8 * MIB)) + 1) + len({batch.blob for batch in planned})


def test_saves_and_loads_need_few_requests(moto_server: Server, tmp_path: Path) -> None:
    """The numbers are exact, so the test detects any additional request."""
    url = f"s3://{moto_server.new_place()}/store"
    with Proxy(moto_server.endpoint) as proxy:
        options = moto_server.options | {"endpoint_url": proxy.endpoint}
        store = casckpt.open(url, storage_options=options, cache_dir=tmp_path)
        for step in (0, 1):
            store.save({"w": torch.full((MIB,), float(step))}, step=step)
        before = len(proxy.seen)
        store.save({"w": torch.full((MIB,), 2.0)}, step=2)
        mine = proxy.seen[before:]
        puts = [one.path.split("/store/")[1].split("/")[0] for one in mine if one.method == "PUT"]
        assert puts == ["transactions", "objects", "objects", "runs", "commits"]
        assert len(mine) <= 14
        before = len(proxy.seen)
        store.load({"w": torch.empty(MIB)}, "default@2")
        gets = ["GET"] * 5  # the last and the next announcement; the commit's record, and the next; a range
        assert [one.method for one in proxy.seen[before:]] == gets


def test_a_watch_needs_few_requests(moto_server: Server, tmp_path: Path) -> None:
    url = f"s3://{moto_server.new_place()}/store"
    writer = casckpt.open(url, storage_options=moto_server.options, cache_dir=tmp_path / "a")
    writer.save({"w": torch.zeros(3)}, step=0)
    with Proxy(moto_server.endpoint) as proxy:
        options = moto_server.options | {"endpoint_url": proxy.endpoint}
        store = casckpt.open(url, storage_options=options, cache_dir=tmp_path / "b")
        watcher = Watcher(store.repository, "default", latest_only=False)
        before = len(proxy.seen)
        assert [watcher.next() for _ in range(3)] == [None] * 3
        assert [one.method for one in proxy.seen[before:]] == ["HEAD"] * 3
        writer.save({"w": torch.ones(3)}, step=1)
        before = len(proxy.seen)
        told = watcher.next()
        assert told is not None
        assert told.commit.step == 1
        # the next announcement; the last known one, the new one, and the next (two at once); its log
        assert [one.method for one in proxy.seen[before:]] == ["HEAD", *["GET"] * 6]


@pytest.mark.parametrize("trouble", list(Trouble))
def test_saves_and_loads_succeed_with_faults_in_every_request(
    trouble: Trouble, moto_server: Server, tmp_path: Path
) -> None:
    bucket = moto_server.new_bucket()
    with Proxy(moto_server.endpoint) as proxy:
        nap = Backoff(attempts=5, sleep=lambda seconds: None)
        store = impatient(moto_server, proxy, bucket, tmp_path / "cache", nap)
        for path in ("commits/*", "transactions/*", "*.safetensors", "*.manifest", "/"):
            for method in ("PUT", "GET", "HEAD", "DELETE"):
                proxy.plan(trouble, method=method, path=path, times=2)
        store.save(state(1), step=1)
        assert same_state(store.read("default@1"), state(1))
        assert not store.verify().is_damaged
        assert steps(store) == [("default", 1)]
