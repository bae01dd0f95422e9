"""Random states saved under any topology load under any other topology, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import casckpt
from casckpt.contents import manifests
from casckpt.store.store import Store
from tests.support.parallel import TOPOLOGIES, Stack
from tests.support.ranks import Pool
from tests.support.saves import small_folder
from tests.support.tensors import same
from tests.support.together import emptied, parts
from tests.support.worlds import World, reference

CHAINS = 16  # each with two worlds that save and one that loads
FULL_CHAINS = 320
SAVERS = 2  # one after the other, in one run
AGAIN = 100  # the same state is saved again after this many steps


def save_in(rank: int, size: int, path: Path, world: World, at: tuple[int, int]) -> Any:
    seed, step = at
    store = casckpt.open(path)
    state = world.state(rank, reference(seed, step))
    first = store.save(state, run="a", step=step)
    again = store.save(state, run="a", step=step + AGAIN)
    worn = any(ref.worn for ref in manifests.get(store.repository, first.commit).blobs)
    return first.id, again.stats.blobs_written, worn


def load_in(rank: int, size: int, path: Path, world: World, seed: int) -> list[str]:
    """Load each step. Return the differences."""
    store, wrong = casckpt.open(path), []
    for step in range(SAVERS):
        expected = world.state(rank, reference(seed, step))
        found = emptied(expected)
        store.load(found, f"a@{step}")
        for group in expected:
            for key, leaf in expected[group].items():
                pairs = zip(parts(leaf), parts(found[group][key]), strict=True)
                if not all(same(one.contiguous(), other.contiguous()) for one, other in pairs):
                    wrong.append(f"step {step}, {group}.{key}: {leaf}")
    return wrong


def check_whole(store: Store, seed: int, step: int) -> None:
    tensors = reference(seed, step)
    found = store.read(f"a@{step}")
    assert {f"{group}.{key}" for group in found for key in found[group]} == set(tensors)
    for key, full in tensors.items():
        group, name = key.split(".")
        assert same(found[group][name], full), key


def chains(seed: int, count: int) -> list[tuple[int, list[World], World]]:
    """Yield (seed of the state, worlds that save one after the other, world that loads)."""
    draw = random.Random(seed)
    return [
        (draw.randrange(1 << 20), [World.drawn(draw) for _ in range(SAVERS)], World.drawn(draw)) for _ in range(count)
    ]


@pytest.mark.parametrize("number", range(CHAINS))
def test_any_number_of_ranks_can_load_checkpoints_saved_by_any_other(
    ranks: Pool, tmp_path: Path, seed: int, full: bool, number: int
) -> None:
    for lap, (state, savers, loader) in enumerate(chains(seed, FULL_CHAINS // CHAINS if full else 1)):
        print(f"--- {number}.{lap}: state {state}, saved by {savers}, loaded by {loader}")  # noqa: T201 - shown if it fails
        path = tmp_path / str(lap)
        store = small_folder(path)
        for step, saver in enumerate(savers):
            found = ranks.run(saver.size, save_in, path, saver, (state, step))
            assert len(set(found)) == 1
            _, written, worn = found[0]
            assert worn or not written
            check_whole(store, state, step)
        wrong = ranks.run(loader.size, load_in, path, loader, state)
        assert wrong == [[]] * loader.size


# wrapped torch models, through the module's state_dict

NAMES = [name for name in TOPOLOGIES if not name.startswith("fsdp1")]  # FSDP1's state_dict is not sharded by default


def model_state(topology: str, seed: int, shapes: int) -> Any:
    state = TOPOLOGIES[topology][1](Stack(seed, shapes)).state_dict()
    return {key.removeprefix("module."): value for key, value in state.items()}


def save_models(rank: int, size: int, path: Path, seed: int) -> None:
    store = casckpt.open(path)
    for name in NAMES:
        if TOPOLOGIES[name][0] == size:
            store.save({"model": model_state(name, seed, seed)}, run=run_of(name), step=1)


def load_models(rank: int, size: int, path: Path, seed: int, count: int) -> list[tuple[str, str]]:
    """Return the pairs of names with an incorrect result.

    ``count``: how many others each one loads (those that follow in the list).
    """
    store, wrong = casckpt.open(path), []
    for name in NAMES:
        if TOPOLOGIES[name][0] != size:
            continue
        expected = parts(model_state(name, seed, seed))
        for number in range(NAMES.index(name) + 1, NAMES.index(name) + 1 + count):
            origin = NAMES[number % len(NAMES)]
            state = {"model": model_state(name, seed + 1, seed)}
            done = store.load(state, f"{run_of(origin)}@1")
            if done.unread_keys or not all(map(torch.equal, parts(state), expected)):
                wrong.append((origin, name))
    return wrong


def run_of(topology: str) -> str:
    return topology.replace(" ", "-").replace("+", "and")


def test_every_kind_of_parallel_model_can_load_checkpoints_of_the_others(
    ranks: Pool, tmp_path: Path, seed: int, full: bool
) -> None:
    """By default, each kind loads checkpoints of two others."""
    small_folder(tmp_path / "store")
    sizes = sorted({TOPOLOGIES[name][0] for name in NAMES})
    for size in sizes:
        ranks.run(size, save_models, tmp_path / "store", seed % 1000)
    for size in sizes:
        assert ranks.run(size, load_models, tmp_path / "store", seed % 1000, len(NAMES) if full else 2) == [[]] * size
