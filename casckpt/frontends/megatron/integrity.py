"""Who writes what, checked before anything is written: of all ranks' sharded values together, gathered on rank 0.

Every element of a global tensor must be in just one main replica, and every shard of an object must have just one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from casckpt.checkpoint.ranks import everyone, open_ranks
from casckpt.format.regions import Region, Shape, normalise
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors
from casckpt.frontends.megatron.kinds import is_sharded_object, is_sharded_tensor
from casckpt.frontends.megatron.mapping import is_main_replica
from casckpt.frontends.megatron.nesting import map_reduce, nested_values
from casckpt.plan.coverage import holes_and_overlaps
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.foreign import flat_range, megatron_region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorClaim:
    """What a rank says of a part of a tensor that it holds.

    ``form``: what all parts of one key have in common. ``filled``: it has data.
    """

    key: str
    shape: Shape
    region: Region
    form: tuple[tuple[str, Any], ...]
    main: bool
    filled: bool


@dataclass(frozen=True, slots=True)
class ObjectClaim:
    """What a rank says of a shard of an object that it holds."""

    key: str
    shape: Shape
    offset: Shape
    main: bool


Claim: TypeAlias = TensorClaim | ObjectClaim
Claims: TypeAlias = Sequence[Claim]


def claims_of(sharded: Iterable[Any]) -> list[Claim]:
    """Of the sharded values of this rank. Raises CheckpointingException for what lies outside of its global shape."""
    with checkpointing_errors():
        return [_claim(value) for value in sharded]


def _claim(value: Any) -> Claim:
    main = is_main_replica(value.replica_id)
    if is_sharded_object(value):
        return ObjectClaim(value.key, tuple(value.global_shape), tuple(value.global_offset), main)
    if not is_sharded_tensor(value):
        kind = type(value).__name__
        raise CheckpointingException(
            f"{value.key!r}: a {kind} is neither a ShardedTensor nor a ShardedObject; build factories first",
            key=value.key,
        )
    regular, flat = value.axis_fragmentations is not None, flat_range(value) is not None
    form = [("global shape", tuple(value.global_shape)), ("dtype", dtype_name(value.dtype)), ("regular grid", regular)]
    form += [("local shape", tuple(value.local_shape))] if regular else []
    return TensorClaim(
        value.key,
        tuple(value.global_shape),
        megatron_region(value),
        (*form, ("flattened", flat)),
        main,
        filled=value.data is not None,
    )


def validate_sharding_integrity(sharded_tensors: Any, process_group: ProcessGroup | None = None) -> None:
    """Check the sharded values of all ranks together; every rank of ``process_group`` (None: all) makes the call.

    ``sharded_tensors``: those of this rank, in a list or a state dict. Raises CheckpointingException, naming key, ranks
    and region, on every rank alike.
    """
    ranks = open_ranks(process_group)
    values = nested_values(sharded_tensors if isinstance(sharded_tensors, dict) else list(sharded_tensors))

    def check(gathered: list[list[Claim]]) -> list[None]:
        check_claims(gathered)
        return everyone(None, ranks.size)

    ranks.exchange(lambda: claims_of(values), check)


def check_claims(gathered: Sequence[Claims]) -> None:
    """Check the claims of all ranks. Raises CheckpointingException, naming key, ranks and region."""
    held = [(rank, claim) for rank, claims in enumerate(gathered) for claim in claims]
    for key, holders in map_reduce(held, lambda one: one[1].key).items():
        tensors = [(rank, claim) for rank, claim in holders if isinstance(claim, TensorClaim)]
        objects = [(rank, claim) for rank, claim in holders if isinstance(claim, ObjectClaim)]
        if tensors and objects:
            raise CheckpointingException(
                f"{key!r} is a tensor on rank {tensors[0][0]} and an object on rank {objects[0][0]}; rename one",
                key=key,
            )
        _check_tensor(tensors) if tensors else _check_object(objects)


def _check_tensor(holders: Sequence[tuple[int, TensorClaim]]) -> None:
    first, one = holders[0]
    for rank, other in holders:
        for (name, mine), (_, theirs) in zip(one.form, other.form, strict=False):
            if mine != theirs:
                raise CheckpointingException(
                    f"{one.key!r}: {name} is {mine} on rank {first}, but {theirs} on rank {rank}; all parts of "
                    "a tensor must agree",
                    key=one.key,
                    rank=rank,
                )
    mains = [(rank, claim.region) for rank, claim in holders if claim.main and claim.region.numel]
    empty = not prod(one.shape)
    if empty and not any(claim.main for _, claim in holders):
        raise _nobody(one.key, "it", [rank for rank, _ in holders])
    _check_cover(one.key, one.shape, mains, sorted({rank for rank, _ in holders}))


def _check_cover(key: str, shape: Shape, mains: Sequence[tuple[int, Region]], holders: Sequence[int]) -> None:
    holes, overlaps = holes_and_overlaps(shape, [region for _, region in mains])
    if overlaps:
        (rank, region), (other, theirs) = (mains[i] for i in overlaps[0])
        raise CheckpointingException(
            f"{key!r}: {region} of rank {rank} and {theirs} of rank {other} have elements in common, and both are main "
            "replicas; give all but one of them another replica_id",
            key=key,
            rank=other,
        )
    if holes:
        raise _nobody(key, " and ".join(map(str, holes)), holders)


def _nobody(key: str, what: str, holders: Sequence[int]) -> CheckpointingException:
    return CheckpointingException(
        f"{key!r}: no rank has a main replica of {what} (ranks that hold parts of it: {_some(holders)}); give one rank "
        "replica_id 0",
        key=key,
    )


def _check_object(holders: Sequence[tuple[int, ObjectClaim]]) -> None:
    """Every shard of an object has one main replica."""
    _check_object_shape(holders)
    one = holders[0][1]
    mains = map_reduce([one for one in holders if one[1].main], lambda one: one[1].offset, lambda one: one[0])
    for offset, ranks in mains.items():
        if len(ranks) > 1:
            raise CheckpointingException(
                f"{one.key!r}: the object at {offset} of {one.shape} has main replicas on rank {ranks[0]} and on rank "
                f"{ranks[1]}; give all but one of them another replica_id",
                key=one.key,
                rank=ranks[1],
            )
    missing = [at for at in product(*map(range, one.shape)) if at not in mains]
    if missing:
        raise _nobody(one.key, f"the objects at {_some(missing)} of {one.shape}", [rank for rank, _ in holders])


def _check_object_shape(holders: Sequence[tuple[int, ObjectClaim]]) -> None:
    first, one = holders[0]
    for rank, other in holders:
        inside = len(other.offset) == len(other.shape) and all(
            0 <= at < extent for at, extent in zip(other.offset, other.shape, strict=True)
        )
        if other.shape != one.shape or not inside:
            raise CheckpointingException(
                f"{one.key!r}: the object at {other.offset} of {other.shape} on rank {rank} is none of the {one.shape} "
                f"that rank {first} has; global_offset counts shards, from 0",
                key=one.key,
                rank=rank,
            )


def _some(items: Sequence[Any]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more


def main_regions(gathered: Sequence[Claims]) -> set[tuple[str, Region]]:
    """(key, region) of all main replicas."""
    claims = [claim for claims in gathered for claim in claims if isinstance(claim, TensorClaim) and claim.main]
    return {(claim.key, normalise(claim.region, claim.shape)) for claim in claims}
