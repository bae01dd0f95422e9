"""Reuse across the ranks of a save: the parent, the shares and the plan, and the few bytes that ranks exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import casckpt
from casckpt.contents import blobs, manifests
from casckpt.format.keys import manifest_key, parse_object
from casckpt.format.sections.head import decode_head
from casckpt.history.commits import Commit, forget
from casckpt.ranks.ranks import open_ranks
from casckpt.repository.repository import Repository, microseconds
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.copies import copy
from tests.support.far import FarStore
from tests.support.gcs import collect
from tests.support.ranks import Pool
from tests.support.repositories import memory, repository
from tests.support.rewrites import move
from tests.support.saves import CELL, content, flip, small_folder
from tests.support.together import emptied, line, numbers, same_parts, spread, watched


def save_rows(rank: int, size: int, path: Path, step: int, count: int) -> Any:
    tensors = {f"big{i}": numbers(f"big{i}", 128, 256) for i in range(count)}
    tensors |= {f"small{i}": numbers(f"small{i}", 4 + 4 * (i % 7), 3) for i in range(3 * count)}
    store = casckpt.open(path)
    ckpt = store.save({"model": spread(tensors, line(size), [Shard(0)])}, run="a", step=step)
    return ckpt.stats.bytes_written, ckpt.stats.bytes_total


def test_saving_a_resharded_state_writes_nothing_on_fewer_ranks_and_little_on_more_ranks(
    ranks: Pool, path: Path
) -> None:
    """The state is split by rows, and goes from 4 ranks to 2, to 1, and back to 4."""
    written = [ranks.run(size, save_rows, path, step, 16)[0][0] for step, size in enumerate((4, 2, 1, 4, 4))]
    total = ranks.run(1, save_rows, path, 9, 16)[0][1]
    assert total <= written[0] <= 1.1 * total
    assert written[1:3] == [0, 0]
    assert written[3] <= 0.05 * total
    assert written[4] == 0


@pytest.mark.parametrize("section", ["objects", "cells"])
def test_a_damaged_parent_manifest_prevents_reuse_but_not_the_save(ranks: Pool, path: Path, section: str) -> None:
    ranks.run(2, save_rows, path, 1, 4)
    store = casckpt.open(path)
    commit = store.save({"model": store.read("a@1")["model"], "text": "x" * 500}, run="a", step=2).commit
    key = manifest_key(commit.txid, commit.id)
    flip(store, key, decode_head(content(store, key))[section].offset)
    ranks.run(2, save_rows, path, 3, 4)
    assert not casckpt.open(path).verify("a@3").is_damaged


def save_uneven(rank: int, size: int, path: Path, step: int) -> Any:
    tensors = {f"w{i}": numbers(f"w{i}", 997 + 2 * i, 50) for i in range(8)}
    stats = casckpt.open(path).save(spread(tensors, line(size), [Shard(0)]), run="a", step=step).stats
    return stats.bytes_written, stats.bytes_total


def test_only_cells_split_by_new_boundaries_are_written(ranks: Pool, path: Path) -> None:
    """997 rows are split at 250, 500 and 750 on 4 ranks, and at 499 on 2. One cell of each tensor becomes two."""
    (first, total), *_ = ranks.run(4, save_uneven, path, 1)
    (second, _), *_ = ranks.run(2, save_uneven, path, 2)
    assert first >= total
    headers = 2 * 4096
    assert 0 < second <= 8 * CELL + headers


def save_columns(rank: int, size: int, path: Path, step: int, dim: int) -> int:
    tensors = {f"w{i}": numbers(f"w{i}", 96, 96) for i in range(6)}
    return casckpt.open(path).save(spread(tensors, line(size), [Shard(dim)]), run="a", step=step).stats.bytes_written


def test_columns_are_also_reused_on_fewer_ranks(ranks: Pool, path: Path) -> None:
    assert ranks.run(4, save_columns, path, 1, 1)[0] > 0
    assert ranks.run(2, save_columns, path, 2, 1)[0] == 0
    assert ranks.run(1, save_columns, path, 3, 1)[0] == 0


def reading(rank: int, size: int, path: Path, step: int) -> list[str]:
    """Return the reads of a save by a new process."""
    store, storage = watched(path)
    store.repository.cache_dir = Path(f"no catalogue {rank}")
    store.save(spread({"w": numbers("w", 80, 80)}, line(size), [Shard(0)]), run="a", step=step)
    return storage.reads()


def test_only_rank_0_reads_the_parent_and_it_does_so_once(ranks: Pool, path: Path) -> None:
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
    """Save a changing state, with ranks that remember their last save, or with new ranks each time."""
    full = {f"w{i}": numbers(f"w{i}", 64, 100) for i in range(5)}
    state: dict[str, Any] = spread(full, line(size), [Shard(0)]) | spread({"r": numbers("r", 70, 90)}, line(size))
    store, told = casckpt.open(path), []
    for step in range(7):
        if forgets:
            store = casckpt.open(path)
        if step == 2:
            state["w1"].to_local()[:2].add_(1)
        if step == 3:
            state["r"].to_local()[5].mul_(2)
        if step == 4:  # most of the blob's data, so the next save abandons the rest of it
            for key in ("w0", "w1", "w2"):
                state[key].to_local().mul_(3)
        ckpt = store.save(state, run="a", step=step, threads=1)
        stats = ckpt.stats
        told.append((stats.bytes_written, stats.blobs_written, stats.blobs_reused, extents(store, ckpt)))
    return told


def extents(store: Store, ckpt: casckpt.Checkpoint) -> Any:
    """Return the locations of all cells of a checkpoint, without their transactions."""
    manifest = manifests.get(store.repository, ckpt.commit)
    found = []
    for entry in manifest.entries:
        cells = manifest.extents(entry).stored_cells()
        found += [(entry.key, one.region, manifest.blob(one.blob).hash, one.offset, one.digest) for one in cells]
    return found


def test_a_remembered_reuse_offer_equals_one_that_was_sent(ranks: Pool, tmp_path: Path) -> None:
    for name in ("one", "other"):
        small_folder(tmp_path / name)
    remembered = ranks.run(3, with_memory, tmp_path / "one", forgets=False)
    told = ranks.run(3, with_memory, tmp_path / "other", forgets=True)
    assert remembered == told
    assert [step[0] > 0 for step in told[0]] == [True, False, True, True, True, True, False]


def beside_another_job(rank: int, size: int, path: Path) -> Any:
    """Between two saves of these ranks, a different process saves a different state in the same run."""
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


def test_a_parent_from_a_different_job_replaces_the_remembered_offer(ranks: Pool, path: Path) -> None:
    found = ranks.run(2, beside_another_job, path)
    assert found[0] == found[1]
    written, parent = found[0]
    store = casckpt.open(path)
    assert parent == store.get("a@100").id
    assert written[0][0] > 0
    assert written[1][0] == 0
    for step, name in enumerate(("first", "second", "first", "second")):
        assert torch.equal(store.read(f"a@{step}")["w"], numbers(name, 60, 100))


def beside_a_copy_that_came_back(rank: int, size: int, path: Path) -> Any:
    """The newest checkpoint is purged, and copied back from a mirror. It has the same id, but different locations."""
    store = Store(Repository(FarStore(LocalStore(path)), path.parent / "cache"))
    mirror = repository(path.parent / "mirror", LocalStore(path.parent / "mirror/store"), clock=microseconds)
    state = spread({"w": numbers("w", 60, 100)}, line(size), [Shard(0)])
    newest = store.save(state, run="a", step=0)
    if rank == 0:
        copy(store.repository, mirror)
        store.forget(newest)
        store.gc(min_age=0)
        copy(mirror, store.repository, "a@0")
    dist.barrier()
    with patch.object(blobs, "_SAMPLE", 0):  # blobs that this process has already seen are not checked again
        saved = store.save(state, run="a", step=1)
    return newest.id, store.get("a@0").id, saved.stats.bytes_written


def test_a_parent_that_was_purged_and_recopied_is_a_new_parent(ranks: Pool, path: Path) -> None:
    (old, came_back, written), _ = ranks.run(2, beside_a_copy_that_came_back, path)
    assert old == came_back
    assert written == 0, "what came back is reused"
    store = casckpt.open(path)
    assert not store.verify().is_damaged
    assert torch.equal(store.read("a@1")["w"], numbers("w", 60, 100))


def beside_a_rewrite(rank: int, size: int, path: Path, change: str) -> Any:
    """The newest checkpoint is rewritten or restored, and its old blobs are deleted. Its id does not change."""
    store = casckpt.open(path)
    state = spread({"w": numbers("w", 60, 100)}, line(size), [Shard(0)])
    newest = store.save(state, run="a", step=0)
    if rank == 0:
        other = repository(path.parent / "other", LocalStore(path), clock=microseconds)
        CHANGES[change](other, newest.commit)
        collect(other)
    dist.barrier()
    stats = store.save(state, run="a", step=1).stats
    return stats.bytes_written, stats.blobs_reused


def bring_back_encoded(repo: Repository, newest: Commit) -> None:
    """It is purged, and then copied back from a mirror into other blobs."""
    mirror = Repository(memory())
    copy(repo, mirror)
    forget(repo, newest)
    collect(repo)
    assert len(copy(mirror, repo, "a@0", compress="always").copied) == 1


CHANGES: dict[str, Callable[[Repository, Commit], object]] = {
    "moved": move,
    "brought back": bring_back_encoded,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_rewritten_parent_is_reused_at_its_new_location(ranks: Pool, path: Path, change: str) -> None:
    found = ranks.run(2, beside_a_rewrite, path, change)
    assert found[0] == found[1]
    assert (found[0][0], found[0][1] > 0) == (0, True)
    store = casckpt.open(path)
    assert not store.verify().is_damaged
    assert [ckpt.step for ckpt in store.checkpoints()] == [0, 1]
    assert store.get("a@latest").step == 1
    assert torch.equal(store.read("a@1")["w"], numbers("w", 60, 100))


def counting(rank: int, size: int, path: Path) -> list[int]:
    """Count the exchanges of five saves: three of the same state, and then two with an additional key."""
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


def test_ranks_exchange_few_bytes_in_a_save(ranks: Pool, path: Path) -> None:
    for found in ranks.run(4, counting, path):
        first, steady, again, changed, after = found
        assert steady == again == after <= 3
        assert first == changed == steady + 1


def two_runs(rank: int, size: int, path: Path) -> list[int]:
    """The run "a" is saved in the layout that the run "b" used last."""
    mesh = line(size)
    small: dict[str, Any] = spread({f"w{i}": numbers(f"w{i}", 60, 100) for i in range(4)}, mesh)
    large = spread({"a": numbers("a", 200, 100)}, mesh) | small
    store = casckpt.open(path)
    saves = [("a", large), ("b", small), ("a", small)]
    return [store.save(state, run=run, step=step).stats.bytes_written for step, (run, state) in enumerate(saves)]


def test_cells_of_a_different_rank_are_reused_after_shares_change(ranks: Pool, path: Path) -> None:
    for first, other, again in ranks.run(3, two_runs, path):
        assert first > 0
        assert (other, again) == (0, 0)


def alternating(rank: int, size: int, path: Path) -> None:
    """States of two layouts alternate. Ranks 0 and 1 also alternate in holding them."""
    store = casckpt.open(path)
    small: dict[str, Any] = spread({"w": numbers("w", 60, 100)}, line(size))
    large = small | {"more": numbers("more", 10), f"of {rank}": numbers(f"of {rank}", 40)}
    states = [small, large, small if rank == 0 else large, large if rank == 0 else small, small, small]
    for step, state in enumerate(states):
        store.save(state, run="a", step=step)
        target = emptied(state)
        store.load(target, f"a@{step}")
        assert same_parts(target, state)


def test_alternating_layouts_are_reused(ranks: Pool, path: Path) -> None:
    ranks.run(3, alternating, path)
    store = casckpt.open(path)
    assert len(store.read("a@1")) == 5
    assert set(store.read("a@2")) == {"w", "more", "of 1", "of 2"}
    assert set(store.read("a@3")) == {"w", "more", "of 0"}


def save_frozen(rank: int, size: int, path: Path, forgets: bool) -> Any:
    """A backbone is declared unchanged, in shards and as replicas. The head next to it changes."""
    mesh = line(size)
    backbone = {f"b{i}": numbers(f"b{i}", 80, 90) for i in range(3)}
    head = spread({"h": numbers("h", 50, 40)}, mesh, [Shard(1)])
    state = {"backbone": spread(backbone, mesh, [Shard(0)]) | spread({"r": backbone["b0"]}, mesh), "head": head}
    store, written = casckpt.open(path), []
    for step in range(4):
        if forgets:
            store = casckpt.open(path)
        head["h"].to_local().fill_(step)
        frozen = ["backbone.*"] if step else None
        written.append(store.save(state, run="a", step=step, frozen=frozen).stats.bytes_written)
        target = emptied(state)
        store.load(target, f"a@{step}")
        assert same_parts(target, state)
    return written


@pytest.mark.parametrize("forgets", [False, True])
def test_frozen_tensors_are_not_rewritten(ranks: Pool, path: Path, forgets: bool) -> None:
    for first, *later in ranks.run(3, save_frozen, path, forgets):
        assert first > 3 * 80 * 90 * 4
        assert all(0 < nbytes <= 50 * 40 * 4 + 3 * 4096 for nbytes in later)
