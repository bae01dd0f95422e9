"""Saves of several ranks: who writes what, once; what is refused; what fails on one of them fails on all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import casckpt
from casckpt.checkpoint.ranks import open_ranks
from casckpt.checkpoint.store import Store
from casckpt.errors import CasckptError, Conflict, InvalidInput, RankFailed, Revoked, StorageError
from casckpt.format.keys import parse_object
from casckpt.repository import manifests, transactions
from casckpt.repository.commits import list_commits
from tests.support.faulty import Call, call_first, fail_before
from tests.support.ranks import outcome_of, tell, wait_for
from tests.support.saves import BLOB, CELL, blob_keys, content, same_state, small_folder
from tests.support.together import (
    emptied,
    impatient,
    killing,
    line,
    numbers,
    same_parts,
    spread,
    visible,
    watched,
)

if TYPE_CHECKING:
    from tests.support.ranks import Pool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with small cells and blobs."""
    small_folder(tmp_path / "store")
    return tmp_path / "store"


def stored_bytes(path: Path) -> int:
    store = casckpt.open(path)
    return sum(len(content(store, key)) for key in blob_keys(store))


# who writes what


def save_replicas(rank: int, size: int, path: Path) -> Any:
    store, storage = watched(path)
    tensors = {f"w{i}": numbers(f"w{i}", 100 + i, 97) for i in range(12)} | {"big": numbers("big", 700, 512)}
    ckpt = store.save({"model": spread(tensors, line(size))}, run="a", step=1)
    assert same_state(store.read("a@1"), {"model": tensors})
    return storage.blob_bytes, ckpt.stats, ckpt.id


def test_replicas_are_stored_once_and_each_rank_writes_its_share(ranks: Pool, path: Path) -> None:
    found = ranks.run(4, save_replicas, path)
    stats = found[0][1]
    written = [nbytes for nbytes, _, _ in found]
    assert sum(written) == stats.bytes_written == stored_bytes(path)
    assert stats.bytes_total <= sum(written) < stats.bytes_total * 1.1
    for nbytes in written:
        assert abs(nbytes - sum(written) / 4) <= BLOB
    assert all(found[0][1:] == one[1:] for one in found)


class Normed(nn.Module):
    """A layer, and statistics of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3000)
        self.norm = nn.BatchNorm1d(3000)


def save_ddp(rank: int, size: int, path: Path, keep_vars: bool) -> Any:
    """Ranks see other inputs, so their statistics differ; parameters are alike."""
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(Normed())
    with torch.no_grad():
        model.module.norm.running_mean.fill_(rank)
        model.module.norm.running_var.copy_(numbers(f"of {rank}", 3000))
    store, storage = watched(path)
    state = model.module.state_dict(keep_vars=keep_vars)
    store.save(state, run="a", step=1)
    return storage.blob_bytes, {key: value.detach() for key, value in state.items()}


@pytest.mark.parametrize("keep_vars", [False, True])
def test_statistics_that_differ_are_those_of_one_rank_whole(ranks: Pool, path: Path, keep_vars: bool) -> None:
    found = ranks.run(4, save_ddp, path, keep_vars)
    assert not torch.equal(found[0][1]["norm.running_var"], found[1][1]["norm.running_var"])
    stored = casckpt.open(path).read("a@1")
    assert list(stored) == list(found[0][1])
    assert all(torch.equal(stored[key], found[0][1][key]) for key in stored)
    others = [nbytes for nbytes, _ in found[1:]]
    parameters = 4 * (8 * 3000 + 3 * 3000)
    if keep_vars:  # parameters are replicas: shared out
        assert all(nbytes > parameters / 4 for nbytes in others)
    else:  # detached, they are plain tensors: nobody can know that they are alike
        assert others == [0, 0, 0]


def save_some_keys(rank: int, size: int, path: Path) -> Any:
    state: dict[str, Any] = {"everywhere": numbers("e", 50), f"only {rank}": numbers(f"o{rank}", 20 + rank)}
    if rank >= 2:
        state |= {"upper": torch.full((30,), float(rank)), "said": f"by {rank}", "nest": {str(rank): rank, "x": [rank]}}
    store = casckpt.open(path)
    ckpt = store.save(state, run="a", step=1, attachments={"note": str(rank).encode()})
    return ckpt.id, store.read_attachment(ckpt, "note"), store.load(emptied(state), ckpt).unread_keys


def test_keys_that_some_ranks_have(ranks: Pool, path: Path) -> None:
    found = ranks.run(4, save_some_keys, path)
    assert len({id for id, _, _ in found}) == 1
    assert {note for _, note, _ in found} == {b"0"}
    state = casckpt.open(path).read("a@1")
    for rank in range(4):
        assert torch.equal(state[f"only {rank}"], numbers(f"o{rank}", 20 + rank))
        assert f"only {(rank + 1) % 4}" in found[rank][2]
    assert torch.equal(state["upper"], torch.full((30,), 2.0))
    assert state["said"] == "by 2"
    assert state["nest"] == {"2": 2, "x": [2], "3": 3}
    assert torch.equal(state["everywhere"], numbers("e", 50))


def save_per_rank(rank: int, size: int, path: Path) -> None:
    value = {"rank": rank, "rng": torch.full((3000 + rank,), rank), "data": bytes([rank]) * (5000 + rank)}
    casckpt.open(path).save({"mine": casckpt.PerRank(value), "step": 3}, run="a", step=1)


def load_per_rank(rank: int, size: int, path: Path) -> Any:
    known = min(rank, 2) if rank < 3 else 0
    template = {
        "mine": casckpt.PerRank({"rank": None, "rng": torch.zeros(3000 + known, dtype=torch.int64), "data": b""})
    }
    casckpt.open(path).load(template, "a@1")
    return template["mine"].value


def test_each_rank_has_a_value_of_its_own_and_new_ones_get_that_of_rank_0(ranks: Pool, path: Path) -> None:
    ranks.run(3, save_per_rank, path)
    for rank, found in enumerate(ranks.run(4, load_per_rank, path)):
        whose = rank if rank < 3 else 0
        assert found["rank"] == whose
        assert torch.equal(found["rng"], torch.full((3000 + whose,), whose))
        assert found["data"] == bytes([whose]) * (5000 + whose)


def save_in_halves(rank: int, size: int, path: Path) -> Any:
    """Two groups at the same time, each with a run of its own, and a mesh of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, mine = rank // 2, rank % 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "inner"))["inner"]
    full = {"w": numbers(f"half {half}", 64, 64)}
    state = {"model": spread(full, mesh, [Shard(0)]), "half": half, "me": casckpt.PerRank(mine)}
    store = casckpt.open(path)
    ckpts = [store.save(state, run=f"half{half}", step=step, process_group=halves[half]) for step in (1, 2)]
    assert ckpts[1].stats.blobs_written == 0
    target = emptied(state) | {"me": casckpt.PerRank(None)}
    store.load(target, f"half{half}@2", process_group=halves[half])
    assert same_parts(target, state)
    assert (target["half"], target["me"].value) == (half, mine)
    both = {f"w{i}": numbers(f"half {i}", 64, 64) for i in range(2)}
    for i in range(2):
        whole = {"model": spread({"w": both[f"w{i}"]}, line(4), [Shard(1)])}
        empty = emptied(whole)
        store.load(empty, f"half{i}@2")
        assert same_parts(empty, whole)
    return ckpts[1].id


def test_groups_save_side_by_side_and_all_load(ranks: Pool, path: Path) -> None:
    ids = ranks.run(4, save_in_halves, path)
    assert ids[0] == ids[1] != ids[2] == ids[3]


FLAT = [(0, 0), (0, 333), (333, 334), (334, 1000)]


def flat_state(rank: int) -> dict[str, Any]:
    whole = numbers("flat", 10, 100)
    lo, hi = FLAT[rank]
    some = [(0, 10), (40, 60)] if rank == 1 else [(10, 40), (60, 1000)] if rank == 3 else []
    flat = whole.reshape(-1)
    chunks = [
        casckpt.Shard(whole[a:b, c:d], (10, 100), offset=(a, c))
        for number, (a, b, c, d) in enumerate([(0, 3, 0, 70), (3, 10, 0, 70), (0, 10, 70, 71), (0, 10, 71, 100)])
        if number % 3 == rank
    ]
    boxed = numbers("boxed", 6, 8)
    return {
        "flat": casckpt.Shard(flat[lo:hi], (10, 100), flat=(lo, hi)),
        "ranges": casckpt.Shard(torch.cat([flat[:0], *(flat[a:b] for a, b in some)]), (10, 100), flat=some),
        "inside": casckpt.Shard(
            boxed[2:4].reshape(-1)[rank * 4 : rank * 4 + 4], (6, 8), (2, 0), (2, 8), (rank * 4, rank * 4 + 4)
        ),
        "chunks": chunks,
    } | ({"rest": 1} if rank == 2 else {})


def save_flat(rank: int, size: int, path: Path) -> Any:
    state = flat_state(rank)
    if not state["chunks"]:
        del state["chunks"]
    if rank == 3:
        boxed = numbers("boxed", 6, 8)
        inside = state.pop("inside")
        around = [casckpt.Shard(boxed[:2], (6, 8), (0, 0)), casckpt.Shard(boxed[4:], (6, 8), (4, 0))]
        state["inside"] = [inside, *around]
    store = casckpt.open(path)
    store.save(state, run="a", step=1)
    empty = emptied(state)
    store.load(empty, "a@1")
    assert same_parts(empty, state)
    return store.save(state, run="a", step=2).stats.blobs_written


def test_flat_and_uneven_shards_and_several_chunks(ranks: Pool, path: Path) -> None:
    assert ranks.run(4, save_flat, path) == [0] * 4
    stored = casckpt.open(path).read("a@2")
    for key, value in stored.items():
        if key != "rest":
            assert torch.equal(value, numbers("boxed", 6, 8) if key == "inside" else numbers("flat", 10, 100)), key


# what is refused


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
    "hole": [r"not whole", r"no rank holds .*8.*10"],
    "overlap": [r"overlap", r"ranks \[0, 1\]"],
    "shape": [r"\[4\] on rank 0", r"\[5\] on rank 2"],
    "dtype": [r"float32 .* on rank 0", r"float64 .* on rank 2"],
    "kind": [r"tensor on one rank and something else on another"],
    "per rank": [r"per rank on one of them only"],
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
def test_what_does_not_fit_together_is_refused_by_all(ranks: Pool, path: Path, kind: str) -> None:
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
    "odd", [{"step": 2}, {"run": "b"}, {"dedup": "run"}, {"step": -1}, {"run": "/"}, {"threads": 0}]
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
def test_replicas_that_differ_are_found_when_asked_for(
    ranks: Pool, path: Path, plain: bool, who: int, named: str
) -> None:
    for error in ranks.run(4, save_checked, path, who, plain):
        assert isinstance(error, InvalidInput)
        assert f"'b' differs between ranks {named}" in str(error)
        assert error.key == "b"
    assert visible(path) == [("good", 1), ("unchecked", 3)]


# what is known already


def save_rows(rank: int, size: int, path: Path, step: int, count: int) -> Any:
    tensors = {f"big{i}": numbers(f"big{i}", 128, 256) for i in range(count)}
    tensors |= {f"small{i}": numbers(f"small{i}", 4 + 4 * (i % 7), 3) for i in range(3 * count)}
    store = casckpt.open(path)
    ckpt = store.save({"model": spread(tensors, line(size), [Shard(0)])}, run="a", step=step)
    return ckpt.stats.bytes_written, ckpt.stats.bytes_total


def test_fewer_ranks_write_nothing_and_more_ranks_little(ranks: Pool, path: Path) -> None:
    """By rows, from 4 ranks, 2, 1, and 4 again."""
    written = [ranks.run(size, save_rows, path, step, 16)[0][0] for step, size in enumerate((4, 2, 1, 4, 4))]
    total = ranks.run(1, save_rows, path, 9, 16)[0][1]
    assert total <= written[0] <= 1.1 * total
    assert written[1:3] == [0, 0]
    assert written[3] <= 0.05 * total
    assert written[4] == 0


def save_uneven(rank: int, size: int, path: Path, step: int) -> Any:
    tensors = {f"w{i}": numbers(f"w{i}", 997 + 2 * i, 50) for i in range(8)}
    stats = casckpt.open(path).save(spread(tensors, line(size), [Shard(0)]), run="a", step=step).stats
    return stats.bytes_written, stats.bytes_total


def test_where_new_boundaries_cut_cells_only_those_are_written(ranks: Pool, path: Path) -> None:
    """997 rows over 4 ranks are cut at 250, 500, 750; over 2 at 499: one cell of each tensor becomes two."""
    (first, total), *_ = ranks.run(4, save_uneven, path, 1)
    (second, _), *_ = ranks.run(2, save_uneven, path, 2)
    assert first >= total
    headers = 2 * 4096
    assert 0 < second <= 8 * CELL + headers


def save_columns(rank: int, size: int, path: Path, step: int, dim: int) -> int:
    tensors = {f"w{i}": numbers(f"w{i}", 96, 96) for i in range(6)}
    return casckpt.open(path).save(spread(tensors, line(size), [Shard(dim)]), run="a", step=step).stats.bytes_written


def test_columns_share_with_fewer_ranks_too(ranks: Pool, path: Path) -> None:
    assert ranks.run(4, save_columns, path, 1, 1)[0] > 0
    assert ranks.run(2, save_columns, path, 2, 1)[0] == 0
    assert ranks.run(1, save_columns, path, 3, 1)[0] == 0


def reading(rank: int, size: int, path: Path, step: int) -> list[str]:
    """A save by a process that knows nothing yet: what it reads."""
    store, storage = watched(path)
    store.repository.cache_dir = Path(f"no catalogue {rank}")
    store.save(spread({"w": numbers("w", 80, 80)}, line(size), [Shard(0)]), run="a", step=step)
    return storage.reads()


def test_the_parent_is_read_once_by_rank_0_alone(ranks: Pool, path: Path) -> None:
    ranks.run(4, reading, path, 1)
    found = ranks.run(4, reading, path, 2)
    read = [[key for key in keys if (name := parse_object(key)) and name.kind == "manifest"] for keys in found]
    assert list(map(len, read)) == [1, 0, 0, 0]
    assert found[1:] == [[], [], []]


def loading(rank: int, size: int, path: Path) -> list[str]:
    store, storage = watched(path)
    store.repository.cache_dir = Path(f"no catalogue {rank}")
    state = spread({"w": torch.zeros(80, 80)}, line(size), [Shard(1)])
    store.load(state, "a@latest")
    assert same_parts(state, spread({"w": numbers("w", 80, 80)}, line(size), [Shard(1)]))
    return storage.reads()


def test_a_load_reads_the_manifest_once(ranks: Pool, path: Path) -> None:
    ranks.run(4, reading, path, 1)
    found = ranks.run(2, loading, path)
    assert sum(parse_object(key) is not None for key in found[0]) == 1
    assert found[1] == []


def with_memory(rank: int, size: int, path: Path, forgets: bool) -> Any:
    """Saves of a state that changes, by ranks that remember their last one, or that know nothing each time."""
    full = {f"w{i}": numbers(f"w{i}", 64, 100) for i in range(5)}
    state: dict[str, Any] = spread(full, line(size), [Shard(0)]) | spread({"r": numbers("r", 70, 90)}, line(size))
    store, told = casckpt.open(path), []
    for step in range(5):
        if forgets:
            store = casckpt.open(path)
        if step == 2:
            state["w1"].to_local()[:2].add_(1)
        if step == 3:
            state["r"].to_local()[5].mul_(2)
        ckpt = store.save(state, run="a", step=step, threads=1)
        stats = ckpt.stats
        told.append((stats.bytes_written, stats.blobs_written, stats.blobs_reused, extents(store, ckpt)))
    return told


def extents(store: Store, ckpt: casckpt.Checkpoint) -> Any:
    """Where every cell of a checkpoint lies, without the names of transactions."""
    manifest = manifests.get(store.repository, ckpt.commit)
    found = []
    for entry in manifest.body.entries:
        table = manifest.extents(entry)
        for row in range(len(table)):
            found += [(entry.key, p.region, manifest.blob(p.blob).hash, p.offset, p.digest) for p in table.places(row)]
    return found


def test_what_a_rank_remembers_is_what_it_would_be_told(ranks: Pool, tmp_path: Path) -> None:
    for name in ("one", "other"):
        small_folder(tmp_path / name)
    remembered = ranks.run(3, with_memory, tmp_path / "one", forgets=False)
    told = ranks.run(3, with_memory, tmp_path / "other", forgets=True)
    assert remembered == told
    assert [step[0] > 0 for step in told[0]] == [True, False, True, True, False]


def beside_another_job(rank: int, size: int, path: Path) -> Any:
    """Between two saves of these ranks, another process saves under the same run, something else."""
    store = casckpt.open(path)
    first, second = ({"w": numbers(name, 60, 100)} for name in ("first", "second"))
    written = []
    for step, full in enumerate((first, second, first, second)):
        ckpt = store.save(spread(full, line(size), [Shard(0)]), run="a", step=step)
        written.append((ckpt.stats.bytes_written, ckpt.id))
        if step == 0 and rank == 1:
            casckpt.open(path).save(second, run="a", step=100, no_dist=True)
        dist.barrier()
    return written, manifests.get(store.repository, store.get("a@1").commit).body.parent


def test_a_parent_of_another_job_is_used_in_place_of_what_is_remembered(ranks: Pool, path: Path) -> None:
    found = ranks.run(2, beside_another_job, path)
    assert found[0] == found[1]
    written, parent = found[0]
    store = casckpt.open(path)
    assert parent == store.get("a@100").id
    assert written[0][0] > 0
    assert written[1][0] == 0
    for step, name in enumerate(("first", "second", "first", "second")):
        assert torch.equal(store.read(f"a@{step}")["w"], numbers(name, 60, 100))


def counting(rank: int, size: int, path: Path) -> list[int]:
    """How many exchanges saves take: the first, the same again twice, with one key more, the same again."""
    store, ranks = casckpt.open(path), open_ranks()
    state: dict[str, Any] = spread({"w": numbers("w", 60, 100)}, line(size), [Shard(0)])
    found = []
    for step in range(5):
        if step == 3:
            state["more"] = torch.zeros(3)
        before = ranks.exchanges
        store.save(state, run="a", step=step)
        found.append(ranks.exchanges - before)
    return found


def test_a_save_talks_little(ranks: Pool, path: Path) -> None:
    for found in ranks.run(4, counting, path):
        first, steady, again, changed, after = found
        assert steady == again == after <= 3
        assert first == changed == steady + 1


def alternating(rank: int, size: int, path: Path) -> None:
    """States of two layouts in turn, which ranks 0 and 1 know by turns."""
    store = casckpt.open(path)
    small: dict[str, Any] = spread({"w": numbers("w", 60, 100)}, line(size))
    large = small | {"more": numbers("more", 10), f"of {rank}": numbers(f"of {rank}", 40)}
    states = [small, large, small if rank == 0 else large, large if rank == 0 else small, small, small]
    for step, state in enumerate(states):
        store.save(state, run="a", step=step)
        target = emptied(state)
        store.load(target, f"a@{step}")
        assert same_parts(target, state)


def test_layouts_that_change_by_turns(ranks: Pool, path: Path) -> None:
    ranks.run(3, alternating, path)
    store = casckpt.open(path)
    assert len(store.read("a@1")) == 5
    assert set(store.read("a@2")) == {"w", "more", "of 1", "of 2"}
    assert set(store.read("a@3")) == {"w", "more", "of 0"}


# what fails


def save_existing(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    one, other = ({"w": numbers(name, 60, 40)} for name in ("one", "other"))
    first = store.save(spread(one, line(size), [Shard(0)]), run="a", step=1)
    error = outcome_of(lambda: store.save(spread(other, line(size), [Shard(0)]), run="a", step=1))
    again = store.save(spread(other, line(size), [Shard(0)]), run="a", step=1, overwrite=True)
    return error, first.id, again.id


def test_an_existing_step_is_a_conflict_on_all_ranks_unless_it_is_to_be_replaced(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_existing, path)
    for error, first, _ in found:
        assert isinstance(error, Conflict)
        assert not isinstance(error, Revoked)
        assert error.checkpoints == (first,)
        assert "a@1 exists" in str(error)
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
    ("list", "commits/", 0),
    ("settle", "objects/*", 3),
    ("put", "objects/*.manifest", 0),
    ("put", "commits/*", 0),
]


@pytest.mark.parametrize(("method", "key", "who"), FAULTS)
def test_a_storage_that_fails_one_rank_fails_all(ranks: Pool, path: Path, method: str, key: str, who: int) -> None:
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
    """The storage fails between the new plan and its being told."""
    store, storage = watched(path)
    store.save({"x": torch.zeros(3)}, run="a", step=1)
    storage.inject(fail_before("list", key="damaged/*"))
    state = spread({"w": numbers("w", 60, 400)}, line(size))
    error = outcome_of(lambda: store.save(state, run="a", step=2))
    ckpt = store.save(state, run="a", step=2)
    return error, ckpt.stats.bytes_written, storage.blob_bytes


def test_a_plan_that_was_not_told_is_made_again(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_after_a_failed_plan, path)
    assert all(isinstance(error, StorageError) for error, _, _ in found)
    assert torch.equal(casckpt.open(path).read("a@2")["w"], numbers("w", 60, 400))
    assert all(own < 0.5 * total for _, total, own in found)


def save_revoked(rank: int, size: int, path: Path, who: int, times: int) -> Any:
    """A gc gives up on the save whenever ``who`` begins to upload a blob, so many times."""

    def revoke(_: Call) -> None:
        repo = casckpt.open(path).repository
        for one in transactions.open_transactions(repo, list_commits(repo).commits):
            transactions.revoke(repo, one.txid, "a test takes it for dead")

    hook = call_first("put", revoke, key="objects/*.safetensors", times=times)
    store, storage = watched(path, *([hook] if rank == who else []))
    state = spread({"w": numbers("w", 64, 64)}, line(size), [Shard(0)])
    found = outcome_of(lambda: store.save(state, run="a", step=1))
    put = [name.uploader for key in storage.keys("put") if (name := parse_object(key))]
    return found if isinstance(found, Exception) else found.id, put


@pytest.mark.parametrize("who", [0, 2])
def test_a_save_that_was_given_up_on_is_made_again_from_nothing(ranks: Pool, path: Path, who: int) -> None:
    found = ranks.run(3, save_revoked, path, who, 1)
    store = casckpt.open(path)
    (only,) = store.checkpoints()
    assert {id for id, _ in found} == {only.id}
    assert torch.equal(store.read(only)["w"], numbers("w", 64, 64))
    uploaders = {uploader for _, mine in found for uploader in mine}
    assert len(uploaders) == 2
    assert all({ref.uploader} == {only.commit.txid} for ref in manifests.get(store.repository, only.commit).blobs)


def test_a_save_that_is_given_up_on_again_fails_on_all(ranks: Pool, path: Path) -> None:
    for error, _ in ranks.run(2, save_revoked, path, 1, 100):
        assert isinstance(error, Revoked)
    assert visible(path) == []


# who dies

DEATHS = [
    ("put", "transactions/*", 0),
    ("list", "commits/", 0),
    ("put", "objects/*.safetensors", 0),
    ("put", "objects/*.safetensors", 2),
    ("size", "objects/*", 3),
    ("settle", "objects/*", 1),
    ("put", "objects/*.manifest", 0),
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
def test_a_rank_that_is_killed_is_named_and_nothing_shows(
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


def save_stalled(rank: int, size: int, path: Path) -> Any:
    """Rank 2 stalls in its upload until the others have given up, and then goes on as if nothing was."""

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


def test_a_rank_that_stalls_is_named_and_the_next_save_works(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_stalled, path, timeout=5)
    for error, seen, _ in found:
        assert isinstance(error, RankFailed)
        assert error.rank == 2
        assert "did not answer in time" in str(error)
        assert seen == []
    assert visible(path) == [("a", 2)]
    assert torch.equal(casckpt.open(path).read("a@2")["w"], numbers("w", 60, 400))


# in the background


def save_behind(rank: int, size: int, path: Path) -> Any:
    store = casckpt.open(path)
    state = spread({"w": numbers("w", 64, 100, dtype=torch.int32)}, line(size), [Shard(0)])
    futures = []
    for step in range(3):
        futures.append(store.save_async(state, run="a", step=step))
        state["w"].to_local().add_(1)
    front = store.save({"x": torch.full((9,), float(rank))}, run="b", step=0)
    bad = store.save_async({"x": casckpt.Shard(torch.zeros(1), (5,), flat=(rank, rank + 1))}, run="c", step=0)
    return [future.result().id for future in futures], front.id, outcome_of(bad.result)


def test_saves_in_the_background_beside_one_in_the_foreground(ranks: Pool, path: Path) -> None:
    found = ranks.run(3, save_behind, path)
    assert all(one[:2] == found[0][:2] for one in found)
    assert all(isinstance(error, CasckptError) for _, _, error in found)
    store = casckpt.open(path)
    for step in range(3):
        assert torch.equal(store.read(f"a@{step}")["w"], numbers("w", 64, 100, dtype=torch.int32) + step)
    assert "c@0" not in store


# loads


def load_bad(rank: int, size: int, path: Path, kind: str) -> Any:
    store = casckpt.open(path)
    full = {"w": numbers("w", 40, 30), "v": numbers("v", 40)}
    store.save(spread(full, line(size), [Shard(0)]), run="a", step=1)
    target: dict[str, Any] = emptied(spread(full, line(size), [Shard(0)]))
    if rank == 1:
        if kind == "key":
            target["missing"] = torch.zeros(3)
        if kind == "shape":
            target["v"] = torch.zeros(41)
        if kind == "dtype":
            target["v"] = torch.zeros(40, dtype=torch.float64)
    ref = "a@7" if kind == "ref" else "a@1"
    error = outcome_of(lambda: store.load(target, ref))
    untouched = all(not one.to_local().any() for one in target.values() if hasattr(one, "to_local"))
    good = emptied(spread(full, line(size)))
    store.load(good, "a@1")
    return error, untouched, same_parts(good, spread(full, line(size)))


@pytest.mark.parametrize("kind", ["key", "shape", "dtype", "ref"])
def test_what_one_rank_cannot_load_changes_nothing_on_any(ranks: Pool, path: Path, kind: str) -> None:
    for rank, (error, untouched, good) in enumerate(ranks.run(3, load_bad, path, kind)):
        assert isinstance(error, CasckptError)
        assert not isinstance(error, RankFailed)
        assert untouched
        assert good
        if kind != "ref" and rank != 1:
            assert "rank 1: " in str(error)
            assert error.rank == 1


def load_damaged(rank: int, size: int, path: Path) -> Any:
    """One blob is cut short: only the rank that needs it sees that."""
    store = casckpt.open(path)
    target = emptied(spread({"w": numbers("w", 60, 400)}, line(size), [Shard(0)]))
    return outcome_of(lambda: store.load(target, "a@1"))


def save_one(rank: int, size: int, path: Path) -> None:
    casckpt.open(path).save(spread({"w": numbers("w", 60, 400)}, line(size), [Shard(0)]), run="a", step=1)


def test_damage_that_one_rank_meets_is_raised_by_all(ranks: Pool, path: Path) -> None:
    ranks.run(3, save_one, path)
    store = casckpt.open(path)
    key = blob_keys(store)[0]
    (path / key).chmod(0o600)
    (path / key).write_bytes(content(store, key)[:-CELL])
    errors: Sequence[Any] = ranks.run(3, load_damaged, path)
    assert all(type(error) is type(errors[0]) for error in errors)
    assert all(error.kind == "damaged" and error.key == "w" for error in errors)
    assert len({error.rank for error in errors if error.rank is not None}) == 1
    assert all(one.blob == other.blob for one, other in pairwise(errors))
