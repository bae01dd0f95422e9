"""Saves on several ranks that fail on one rank, and therefore on all. Nothing is visible, and the next save works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import casckpt
from casckpt.contents import manifests
from casckpt.errors import Conflict, InvalidInput, RankFailed, Revoked, StorageError
from casckpt.format.keys import parse_object
from casckpt.history import transactions
from casckpt.history.commits import list_names
from tests.support.faulty import Call, call_first, fail_before
from tests.support.ranks import Pool, outcome_of, tell, wait_for
from tests.support.together import emptied, impatient, killing, line, numbers, same_parts, spread, visible, watched

pytestmark = pytest.mark.kill


# refused saves


def in_stores_of_their_own(rank: int, size: int, url: str) -> Any:
    store = casckpt.open(url.format(rank=rank))
    store.save({"n": rank}, step=0, no_dist=True)
    state = spread({"w": numbers("w", 400, 400)}, line(size), [Shard(0)])
    return str(outcome_of(lambda: store.save(state, run="b", step=1))), len(store.checkpoints("b"))


@pytest.mark.parametrize("url", ["memory://own", "{path}/{{rank}}"])
def test_ranks_with_different_stores_are_rejected(ranks: Pool, tmp_path: Path, url: str) -> None:
    """Otherwise, the committing rank would refer to objects that no other rank can find."""
    for told, saved in ranks.run(2, in_stores_of_their_own, url.format(path=tmp_path)):
        assert "all ranks must share one store" in told
        assert saved == 0


def flat_range(lo: int, count: int) -> casckpt.Shard:
    return casckpt.Shard(torch.zeros(count), (10,), flat=(lo, lo + count))


BAD: dict[str, Callable[[int], Any]] = {
    "hole": lambda rank: flat_range(rank * 2, 2),
    "overlap": lambda rank: flat_range(min(rank * 3, 6), 4),
    "shape": lambda rank: torch.zeros(4 + (rank == 2)),
    "dtype": lambda rank: torch.zeros(4, dtype=torch.float64 if rank == 2 else torch.float32),
    "kind": lambda rank: "text" if rank == 2 else torch.zeros(4),
    "per rank": lambda rank: casckpt.PerRank(torch.zeros(4)) if rank == 2 else torch.zeros(4),
    "nested": lambda rank: {"x": torch.zeros(4)} if rank == 2 else torch.zeros(4),
    "meta": lambda rank: torch.zeros(4, device="meta" if rank == 2 else "cpu"),
}


def bad_state(rank: int, kind: str) -> dict[str, Any]:
    fine = {"fine": numbers("fine", 40)}
    if kind == "spelt":
        return fine | ({"layer": {"w": torch.zeros(4)}} if rank == 2 else {"layer.w": torch.zeros(4)})
    return fine | {"layer": {"w": BAD[kind](rank)}}


REFUSED = {
    "hole": [r"incomplete", r"no rank holds .*8.*10"],
    "overlap": [r"overlap", r"ranks \[0, 1\]"],
    "shape": [r"\[4\] on rank 0", r"\[5\] on rank 2"],
    "dtype": [r"float32 .* on rank 0", r"float64 .* on rank 2"],
    "kind": [r"tensor on one rank and something else on another"],
    "per rank": [r"per rank on only one of them"],
    "nested": [],
    "spelt": [],
    "meta": ["meta tensor"],
}


def save_bad(rank: int, size: int, path: Path, kind: str) -> Any:
    store = casckpt.open(path)
    error = outcome_of(lambda: store.save(bad_state(rank, kind), run="bad", step=1))
    good = {"w": numbers("good", 100, 30)}
    store.save(spread(good, line(size), [Shard(0)]), run="good", step=1)
    return error


@pytest.mark.parametrize("kind", REFUSED)
def test_contradictory_states_are_rejected_on_all_ranks(ranks: Pool, path: Path, kind: str) -> None:
    for rank, error in enumerate(ranks.run(4, save_bad, path, kind)):
        assert isinstance(error, InvalidInput)
        assert "layer.w" in str(error)
        for pattern in REFUSED[kind]:
            assert re.search(pattern, str(error)), (rank, str(error))
    assert visible(path) == [("good", 1)]


def save_other_arguments(rank: int, size: int, path: Path, **odd: Any) -> Any:
    store = casckpt.open(path)
    arguments: dict[str, Any] = {"run": "a", "step": 1} | (odd if rank == 2 else {})
    error = outcome_of(lambda: store.save({"x": torch.zeros(3)}, **arguments))
    store.save({"x": torch.zeros(3)}, run="good", step=1)
    return error


@pytest.mark.parametrize(
    "odd", [{"step": 2}, {"run": "b"}, {"check_replicas": "raise"}, {"step": -1}, {"run": "/"}, {"threads": 0}]
)
def test_all_ranks_must_make_the_same_call(ranks: Pool, path: Path, odd: dict[str, Any]) -> None:
    for error in ranks.run(4, save_other_arguments, path, **odd):
        assert isinstance(error, InvalidInput)
    assert visible(path) == [("good", 1)]


def save_checked(rank: int, size: int, path: Path, who: int, plain: bool) -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    full = {"a": numbers("a", 50, 40), "b": numbers("b", 30, 20)}
    state: dict[str, Any] = dict(full) if plain else spread(full, mesh, [Replicate(), Shard(0)])
    store = casckpt.open(path)
    store.save(state, run="good", step=1, check_replicas=True)
    if rank == who:
        (state["b"] if plain else state["b"].to_local())[-1, -1] += 1
    error = outcome_of(lambda: store.save(state, run="bad", step=2, check_replicas=True))
    assert store.save(state, run="unchecked", step=3).stats.bytes_total == sum(4 * one.numel() for one in full.values())
    return error


@pytest.mark.parametrize(
    ("plain", "who", "named"), [(True, 2, "0 and 2"), (False, 2, "0 and 2"), (False, 1, "1 and 3")]
)
def test_differing_replicas_are_found_if_requested(ranks: Pool, path: Path, plain: bool, who: int, named: str) -> None:
    for error in ranks.run(4, save_checked, path, who, plain):
        assert isinstance(error, InvalidInput)
        assert f"'b' differs between ranks {named}" in str(error)
        assert error.key == "b"
    assert visible(path) == [("good", 1), ("unchecked", 3)]


# failing saves


def save_existing(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    one, other = ({"w": numbers(name, 60, 40)} for name in ("one", "other"))
    first = store.save(spread(one, line(size), [Shard(0)]), run="a", step=1)
    error = outcome_of(lambda: store.save(spread(other, line(size), [Shard(0)]), run="a", step=1))
    again = store.save(spread(other, line(size), [Shard(0)]), run="a", step=1, overwrite=True)
    return error, first.id, again.id


def test_an_existing_step_is_a_conflict_on_all_ranks_without_overwrite(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_existing, path)
    for error, first, _ in found:
        assert isinstance(error, Conflict)
        assert not isinstance(error, Revoked)
        assert error.checkpoints == (first,)
        assert "a@1 already exists" in str(error)
    store = casckpt.open(path)
    (only,) = store.checkpoints()
    assert {again for _, _, again in found} == {only.id}
    assert torch.equal(store.read(only)["w"], numbers("other", 60, 40))


def save_with_a_fault(rank: int, size: int, path: Path, who: int, at: tuple[str, str]) -> Any:
    method, key = at
    faults = [fail_before(method, key=key, times=1000)] if rank == who else []
    store, storage = watched(path, *faults)
    state = spread({f"w{i}": numbers(f"w{i}", 60, 400) for i in range(4)}, line(size), [Shard(0)])
    error = outcome_of(lambda: store.save(state, run="a", step=1))
    dist.barrier()
    seen = visible(path)
    storage.heal()
    store.save(state, run="a", step=1)
    return error, seen


FAULTS = [("put", "objects/*.safetensors", who) for who in range(4)] + [
    ("put", "transactions/*", 0),
    ("list", "runs/*", 0),
    ("settle", "objects/*", 3),
    ("put", "objects/*.manifest", 0),
    ("put", "runs/*", 0),
    ("put", "commits/*", 0),
]


@pytest.mark.parametrize(("method", "key", "who"), FAULTS)
def test_a_storage_failure_on_one_rank_fails_all_ranks(
    ranks: Pool, path: Path, method: str, key: str, who: int
) -> None:
    for rank, (error, seen) in enumerate(ranks.run(4, save_with_a_fault, path, who, (method, key))):
        assert isinstance(error, StorageError)
        assert seen == []
        if rank != who:
            assert str(error).startswith(f"rank {who}: ")
            assert error.rank == who
    store = casckpt.open(path)
    assert visible(path) == [("a", 1)]
    assert torch.equal(store.read("a@1")["w3"], numbers("w3", 60, 400))


def save_after_a_failed_plan(rank: int, size: int, path: Path) -> Any:
    """The storage fails after the new plan is made, and before it is sent."""
    store, storage = watched(path)
    store.save({"x": torch.zeros(3)}, run="a", step=1)
    storage.inject(fail_before("list", key="damaged/*"))
    state = spread({"w": numbers("w", 60, 400)}, line(size))
    error = outcome_of(lambda: store.save(state, run="a", step=2))
    ckpt = store.save(state, run="a", step=2)
    return error, ckpt.stats.bytes_written, storage.blob_bytes


def test_a_plan_that_was_not_sent_is_computed_again(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_after_a_failed_plan, path)
    assert all(isinstance(error, StorageError) for error, _, _ in found)
    assert torch.equal(casckpt.open(path).read("a@2")["w"], numbers("w", 60, 400))
    assert all(own < 0.5 * total for _, total, own in found)


def save_revoked(rank: int, size: int, path: Path, who: int, times: int) -> Any:
    """A gc revokes the save whenever ``who`` begins to upload a blob, up to a given number of times."""

    def revoke(_: Call) -> None:
        repo = casckpt.open(path).repository
        for one in transactions.open_transactions(repo, list_names(repo)):
            transactions.revoke(repo, one.txid, "a test takes it for dead")

    hook = call_first("put", revoke, key="objects/*.safetensors", times=times)
    store, storage = watched(path, *([hook] if rank == who else []))
    state = spread({"w": numbers("w", 64, 64)}, line(size), [Shard(0)])
    found = outcome_of(lambda: store.save(state, run="a", step=1))
    put = [name.uploader for key in storage.keys("put") if (name := parse_object(key))]
    return found if isinstance(found, Exception) else found.id, put


@pytest.mark.parametrize("who", [0, 2])
def test_a_revoked_save_is_retried_without_reuse(ranks: Pool, path: Path, who: int) -> None:
    found = ranks.run(3, save_revoked, path, who, 1)
    store = casckpt.open(path)
    (only,) = store.checkpoints()
    assert {id for id, _ in found} == {only.id}
    assert torch.equal(store.read(only)["w"], numbers("w", 64, 64))
    uploaders = {uploader for _, mine in found for uploader in mine}
    assert len(uploaders) == 2
    assert all({ref.uploader} == {only.commit.txid} for ref in manifests.get(store.repository, only.commit).blobs)


def test_a_save_that_is_revoked_twice_fails_on_all_ranks(ranks: Pool, path: Path) -> None:
    for error, _ in ranks.run(2, save_revoked, path, 1, 100):
        assert isinstance(error, Revoked)
    assert visible(path) == []


# dying ranks

DEATHS = [
    ("put", "transactions/*", 0),
    pytest.param("get", "runs/*", 0, marks=pytest.mark.soak),
    pytest.param("put", "objects/*.safetensors", 0, marks=pytest.mark.soak),
    ("put", "objects/*.safetensors", 2),
    pytest.param("size", "objects/*", 3, marks=pytest.mark.soak),
    ("settle", "objects/*", 1),
    pytest.param("put", "objects/*.manifest", 0, marks=pytest.mark.soak),
    ("put", "runs/*", 0),
    ("put", "commits/*", 0),
]


def save_killed(rank: int, size: int, path: Path, who: int, at: tuple[str, str]) -> Any:
    method, key = at
    impatient()
    store, storage = watched(path)
    kept = {"k": numbers("k", 60, 400)}
    store.save(spread(kept, line(size), [Shard(0)]), run="a", step=1)
    if rank == who:
        storage.inject(call_first(method, killing, key=key))
    state = spread(kept | {"w": numbers("w", 60, 400)}, line(size), [Shard(0)])
    error = outcome_of(lambda: store.save(state, run="a", step=2))
    return error, outcome_of(lambda: store.save(state, run="a", step=3))


def save_after(rank: int, size: int, path: Path) -> None:
    store = casckpt.open(path)
    state = spread({"k": numbers("k", 60, 400), "w": numbers("w", 60, 400)}, line(size), [Shard(0)])
    store.save(state, run="a", step=2)
    target = emptied(state)
    store.load(target, "a@latest")
    assert same_parts(target, state)


@pytest.mark.parametrize(("method", "key", "who"), DEATHS)
def test_an_error_names_a_killed_rank_and_nothing_becomes_visible(
    ranks: Pool, path: Path, method: str, key: str, who: int
) -> None:
    outcomes = ranks.outcomes(4, save_killed, path, who, (method, key))
    for rank, outcome in enumerate(outcomes):
        if rank == who:
            assert outcome.died == -9
            continue
        assert outcome.ok, outcome.text
        for error in outcome.value:
            assert isinstance(error, RankFailed)
            assert error.rank == who
            assert f"rank {who} died" in str(error)
    assert visible(path) == [("a", 1)]
    casckpt.open(path).gc()
    ranks.run(3, save_after, path)
    assert visible(path) == [("a", 1), ("a", 2)]


def save_killed_late(rank: int, size: int, path: Path) -> Any:
    """Rank 0 dies after it has committed, and before it can tell the other ranks."""
    impatient()
    hook = call_first("delete", killing, key="transactions/*")
    store, _ = watched(path, *([hook] if rank == 0 else []))
    return outcome_of(lambda: store.save(spread({"w": numbers("w", 60, 400)}, line(size), [Shard(0)]), run="a", step=1))


def test_the_error_after_rank_0_dies_at_commit_advises_to_check_the_list(ranks: Pool, path: Path) -> None:
    outcomes = ranks.outcomes(3, save_killed_late, path)
    assert [outcome.died for outcome in outcomes] == [-9, None, None]
    for outcome in outcomes[1:]:
        assert isinstance(outcome.value, RankFailed)
        assert outcome.value.rank == 0
        assert "the call may already have committed" in str(outcome.value)
    assert visible(path) == [("a", 1)]
    assert torch.equal(casckpt.open(path).read("a@1")["w"], numbers("w", 60, 400))


def save_stalled(rank: int, size: int, path: Path) -> Any:
    """Rank 2 stalls in its upload until the others have given up. Then it continues as if nothing had happened."""

    def stall(_: Call) -> None:
        for other in (0, 1):
            wait_for(f"given up {other}")

    store, _ = watched(path, *([call_first("put", stall, key="objects/*.safetensors")] if rank == 2 else []))
    state = spread({"w": numbers("w", 60, 400)}, line(size), [Shard(0)])
    error = outcome_of(lambda: store.save(state, run="a", step=1))
    seen = visible(path)
    tell(f"given up {rank}")
    again = store.save(state, run="a", step=2)
    return error, seen, again.id


def test_an_error_names_a_stalled_rank_and_the_next_save_succeeds(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_stalled, path, timeout=5)
    for error, seen, _ in found:
        assert isinstance(error, RankFailed)
        assert error.rank == 2
        assert "did not answer in time" in str(error)
        assert seen == []
    assert visible(path) == [("a", 2)]
    assert torch.equal(casckpt.open(path).read("a@2")["w"], numbers("w", 60, 400))
