"""A model and its optimizer are saved under one kind of parallelism and loaded bit for bit under every other."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import casckpt
from casckpt.frontends.training_state import (
    load_model_and_optim_state,
    save_model_and_optim_state,
    unshard_model_state,
    unshard_optim_state,
)
from tests.support.parallel import TOPOLOGIES, Everything, build, everything, step
from tests.support.ranks import Pool

SIZES = sorted({size for size, _ in TOPOLOGIES.values()})
WITH_FULL = {
    "ddp", "fsdp2 on 2", "fsdp2 on 4", "tp", "tp on 4", "fsdp1", "fsdp1 nested", "fsdp1 SHARD_GRAD_OP",
    "fsdp1 NO_SHARD", "fsdp1 HYBRID_SHARD", "fsdp1 mixed precision",
}  # fmt: skip
"""Topologies that differ from others only in the number of ranks, in when they gather, or in what others combine.

`test_flat.py` loads what those of FSDP1 save, and `test_ranks.py` what ddp saves.
"""


def of_size(size: int, names: Collection[str]) -> list[str]:
    return [name for name in names if TOPOLOGIES[name][0] == size]


def run_of(topology: str) -> str:
    return topology.replace(" ", "-").replace("+", "and")


def saved(rank: int, size: int, path: Path, topologies: Sequence[str], seed: int) -> dict[str, Everything]:
    """Train and save under each topology. Return the saved values according to torch."""
    found = {}
    for topology in topologies:
        model, trained = build(topology, seed)
        step(model, trained, range(2))
        before = everything(model, trained)
        save_model_and_optim_state(path, model, trained, run=run_of(topology), step=2)
        assert everything(model, trained).differences(before) == []
        found[topology] = before
    return found if rank == 0 else {}


def loaded(
    rank: int, size: int, path: Path, pairs: Mapping[str, Sequence[str]], seed: int, *, both: bool
) -> dict[tuple[str, str, str], Everything]:
    """Load into a new optimizer, into one that was used, or into both. Return the resulting values according to
    torch."""
    found = {}
    store = casckpt.open(path)
    for number, (topology, origins) in enumerate(pairs.items()):
        wanted = ("used", "fresh") if both else (("used", "fresh")[number % 2],)
        kinds = {"used": build(topology, seed + 2, shape_seed=seed)} if "used" in wanted else {}
        for origin in origins:
            if "fresh" in wanted:
                kinds["fresh"] = build(topology, seed + 1, shape_seed=seed)
            if "used" in wanted:
                step(*kinds["used"], [5])
            for kind, (model, other) in kinds.items():
                other.param_groups[0]["lr"] = 7.0
                done = load_model_and_optim_state(store, f"{run_of(origin)}@2", model, other)
                assert (done.missing_keys, done.unread_keys) == ((), ())
                found[origin, topology, kind] = everything(model, other)
            if both and origin == origins[-1]:
                fresh, used = kinds["fresh"], kinds["used"]
                step(*fresh, [2])
                step(*used, [2])
                assert everything(*fresh).differences(everything(*used)) == []  # nothing remains of the earlier state
    return found if rank == 0 else {}


def test_any_topology_can_load_checkpoints_of_every_other_topology(
    store_path: Path, ranks: Pool, seed: int, full: bool
) -> None:
    seed %= 1000
    expected: dict[str, Everything] = {}
    origins = pairs_of(seed, full=full)
    for size in SIZES:
        expected |= ranks.run(size, saved, store_path, of_size(size, origins), seed)[0]
    for topology in origins:
        check_without_a_model(store_path, topology, expected[topology])
    for size in SIZES:
        pairs = {name: origins[name] for name in of_size(size, origins)}
        found = ranks.run(size, loaded, store_path, pairs, seed, both=full)[0]
        assert len(found) == (2 if full else 1) * sum(map(len, pairs.values()))
        for (origin, *how), one in found.items():
            assert one.differences(expected[origin]) == [], (origin, how, seed)


def pairs_of(seed: int, *, full: bool) -> dict[str, list[str]]:
    """Return the topologies whose checkpoints each topology loads: one each by default, and all with ``full``."""
    if full:
        return {name: list(TOPOLOGIES) for name in TOPOLOGIES}
    names = [name for name in TOPOLOGIES if name not in WITH_FULL]
    random.Random(seed).shuffle(names)
    return {name: [other] for name, other in zip(names, names[1:] + names[:1], strict=True)}


def check_without_a_model(path: Path, topology: str, expected: Everything) -> None:
    optimizer = unshard_optim_state(path, f"{run_of(topology)}@2", by_name=True)
    groups = [dict(sorted(group.items())) for group in optimizer["param_groups"]]
    found = Everything(unshard_model_state(path, f"{run_of(topology)}@2"), optimizer["state"], groups)
    assert found.differences(expected) == [], topology
