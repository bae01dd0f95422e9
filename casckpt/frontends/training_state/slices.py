"""Optimizer state that each rank keeps for its own slice of a parameter, at positions that casckpt does not know.

Such state is stored below ``ranks.<rank>`` of the optimizer, with the ``places`` of the rank's parameters. Only the
same ranks can load it. Plain state of a DTensor that is equal on all ranks is stored once, and listed in ``plain``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from casckpt.base.digest import hex_digest
from casckpt.base.text import warn_once
from casckpt.errors import Mismatch
from casckpt.frontends.training_state.optimizer import tensors_below
from casckpt.frontends.training_state.stored import STEP_NAMES, StoredTraining
from casckpt.ranks.ranks import Ranks
from casckpt.saving.replicas import digest_of
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.shards import check_storable, local_tensor
from casckpt.tensors.values import Shard

log = logging.getLogger("casckpt")

PLAIN, RANKS = "plain", "ranks"
"""The keys of an optimizer that are stored only if its state is as this module describes."""


class Beside(NamedTuple):
    """Plain tensors in the state of a parameter. ``names``: their names if the parameter is a DTensor.

    ``is_slice``: whether one of them has the shape of this rank's part.
    """

    digest: str
    is_slice: bool
    names: tuple[str, ...]


Table: TypeAlias = dict[tuple[str, Any], Beside]
"""Plain state by the parameter's name and the key in its state."""
Apart: TypeAlias = tuple[set[tuple[str, Any]], list[str]]
"""The state that each rank stores for itself, and the names of all other plain state of DTensors."""


def is_sharded(parameter: Any) -> bool:
    """Return whether this rank has only a part of ``parameter``, or may have all of a DTensor that others lack."""
    if isinstance(parameter, Shard):
        return parameter.data.numel() != prod(parameter.global_shape)
    dims = zip(parameter.placements, parameter.device_mesh.shape, strict=True) if is_dtensor(parameter) else ()
    return any(size > 1 and not placement.is_replicate() for placement, size in dims)


@dataclass(frozen=True)
class NamedState:
    """The optimizer state that a rank saves. ``key``: the optimizer's key. ``model``: the state of its model."""

    key: str
    state: dict[str, Any]
    model: Mapping[str, Any]


def table_of(optimizer: NamedState, *, several: bool) -> Table:
    """Return the state whose elements casckpt cannot place in a parameter.

    ``several``: whether there are several ranks, which may also keep slices of a parameter that none of them shards.
    Raises InvalidInput for a tensor that cannot be stored.
    """
    table: Table = {}
    for name, entries in optimizer.state.get("state", {}).items():
        parameter = optimizer.model.get(name)
        cut = is_sharded(parameter)
        if isinstance(entries, Mapping) and parameter is not None and (cut or several):
            for element, value in entries.items():
                scalars = cut and element not in STEP_NAMES
                found = [
                    (at, one)
                    for at, one in tensors_below(value, "")
                    if not is_dtensor(one) and (one.shape or scalars) and (cut or one.shape != parameter.shape)
                ]
                for at, one in found:
                    check_storable(f"{optimizer.key}.state.{name}.{element}{at}", one)
                if found:
                    table[name, element] = _beside(f"{name}.{element}", found, parameter, cut=cut)
    return table


def _beside(name: str, found: Sequence[tuple[str, torch.Tensor]], parameter: Any, *, cut: bool) -> Beside:
    text = repr([(at, one.shape, one.dtype, digest_of(one)) for at, one in found])
    if not is_dtensor(parameter):
        return Beside(hex_digest(text.encode()), False, ())
    here = parameter.to_local()
    cut = cut and here.shape != parameter.shape
    is_slice = cut and any(one.shape == here.shape and one.numel() > 1 for _, one in found)
    return Beside(hex_digest(text.encode()), is_slice, tuple(f"{name}{at}" for at, one in found if one.shape))


def decide(tables: Iterable[Table]) -> Apart:
    """Decide about the state in the tables of all ranks: a slice, or different values, are stored for each rank."""
    first: Table = {}
    own = set[tuple[str, Any]]()
    for at, beside in (pair for table in tables for pair in table.items()):
        if first.setdefault(at, beside).digest != beside.digest or beside.is_slice:
            own.add(at)
    return own, [name for at, beside in first.items() if at not in own for name in beside.names]


def store_apart(optimizer: NamedState, own: set[tuple[str, Any]], ranks: Ranks) -> None:
    """Move the state ``own`` of an optimizer to this rank's key."""
    saved, names = optimizer.state["state"], {name for name, _ in own}
    state = {
        name: {key: saved[name][key] for key in saved[name] if (name, key) in own} for name in saved.keys() & names
    }
    kept = {name: {key: saved[name][key] for key in saved[name] if (name, key) not in own} for name in state}
    optimizer.state["state"] = {**saved, **kept}
    places = _places({name: optimizer.model[name] for name in state}, ranks.size)
    optimizer.state[RANKS] = {ranks.rank: {"places": places, "state": state}}
    if ranks.rank == 0:
        warn_once(
            log,
            "%s: each rank stores its own %s, because casckpt cannot tell which elements of the parameter this state "
            "belongs to. Only the same number of ranks with the same sharding can load this optimizer",
            optimizer.key, ".".join(map(str, min(own, key=str))),
        )  # fmt: skip


def _places(parameters: Mapping[str, Any], size: int) -> list[Any]:
    """Return a description of this rank's part of each parameter, as one list, which is stored as one object."""

    def place(name: str) -> str:
        return " + ".join(str(piece.region) for piece in local_tensor(name, parameters[name]).pieces)

    return [size, *([name, place(name)] for name in sorted(parameters))]


def check_places(stored: StoredTraining, at: str, parameters: Mapping[str, Any], ranks: Ranks) -> bool:
    """Return whether the checkpoint has state that each rank stores for itself, in the optimizer at ``at``.

    ``parameters``: this rank's parameters by saved name. Raises Mismatch unless this rank has the same part of each.
    """
    saved, key = [str(rank) for rank in stored.below(f"{at}.{RANKS}")], f"{at}.{RANKS}.{ranks.rank}.places"
    if str(ranks.rank) in saved:
        size, *pairs = stored.value(key, allow_pickle=False)
        mine = {name: parameters[name] for name, _ in pairs if name in parameters}
        if [size, *(pair for pair in pairs if pair[0] in mine)] == _places(mine, ranks.size):
            return True
    if saved:
        raise refused(stored, at)
    return False


def refused(stored: StoredTraining, at: str) -> Mismatch:
    """Return the error for a load on other ranks, or in whole."""
    count = len(stored.below(f"{at}.{RANKS}"))
    return Mismatch(
        f"{at!r} in {stored.where} has state that each of {count} ranks keeps for its own part of a parameter "
        f"(`casckpt show --tensors` lists it below {at}.{RANKS}). casckpt cannot divide it differently. Load it on the "
        "same number of ranks with the same sharding, or load the model alone (optim=None; in a dict, leave the "
        "optimizer out)",
        key=at,
    )
