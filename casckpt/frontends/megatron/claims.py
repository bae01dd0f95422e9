"""Claims: the parts of sharded values that each rank holds. Claims determine which rank writes each element.

A save is rejected unless exactly one main replica holds each element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from casckpt.base.text import listed
from casckpt.format.regions import Region, Shape, holes_and_overlaps, normalise
from casckpt.frontends.megatron.errors import CheckpointingException, checkpointing_errors, refused
from casckpt.frontends.megatron.kinds import is_sharded_object, is_sharded_tensor
from casckpt.frontends.megatron.mapping import is_main_replica
from casckpt.frontends.megatron.nesting import map_reduce, nested_values
from casckpt.ranks.ranks import everyone, open_ranks
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.foreign import flat_range, megatron_region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class TensorClaim:
    """A part of a tensor that a rank holds.

    ``form``: properties that all parts of one key must share. ``main``: whether the part is a main replica.
    ``filled``: whether it has data.
    """

    key: str
    shape: Shape
    region: Region
    form: tuple[tuple[str, Any], ...]
    main: bool
    filled: bool


@dataclass(frozen=True, slots=True)
class ObjectClaim:
    """A shard of an object that a rank holds."""

    key: str
    shape: Shape
    offset: Shape
    main: bool


Claim: TypeAlias = TensorClaim | ObjectClaim
Claims: TypeAlias = Sequence[Claim]


def claims_of(sharded: Iterable[Any]) -> list[Claim]:
    """Return the claims for this rank's sharded values.

    Raises CheckpointingException for a part outside its global shape.
    """
    with checkpointing_errors():
        return [_claim(value) for value in sharded]


def _claim(value: Any) -> Claim:
    main = is_main_replica(value.replica_id)
    if is_sharded_object(value):
        return ObjectClaim(value.key, tuple(value.global_shape), tuple(value.global_offset), main)
    if not is_sharded_tensor(value):
        kind = type(value).__name__
        raise refused(value.key, f"a {kind} is neither a ShardedTensor nor a ShardedObject; build factories first")
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
    """Check the sharded values of all ranks together. Every rank of ``process_group`` (None: all ranks) makes the call.

    ``sharded_tensors``: the values of this rank, in a list or a state dict. Raises the same CheckpointingException on
    every rank. The exception names the key, the ranks and the region.
    """
    ranks = open_ranks(process_group)
    values = nested_values(sharded_tensors if isinstance(sharded_tensors, dict) else list(sharded_tensors))

    def check(gathered: list[list[Claim]]) -> list[None]:
        check_claims(gathered)
        return everyone(None, ranks.size)

    ranks.exchange(lambda: claims_of(values), check)


def check_claims(gathered: Sequence[Claims]) -> None:
    """Check the claims of all ranks. Raises CheckpointingException, naming the key, the ranks and the region."""
    held = [(rank, claim) for rank, claims in enumerate(gathered) for claim in claims]
    for key, holders in map_reduce(held, lambda holder: holder[1].key).items():
        tensors = [(rank, claim) for rank, claim in holders if isinstance(claim, TensorClaim)]
        objects = [(rank, claim) for rank, claim in holders if isinstance(claim, ObjectClaim)]
        if tensors and objects:
            raise CheckpointingException(
                f"{key!r} is a tensor on rank {tensors[0][0]} and an object on rank {objects[0][0]}; rename one",
                key=key,
            )
        _check_tensor(tensors) if tensors else _check_object(objects)


def _check_tensor(holders: Sequence[tuple[int, TensorClaim]]) -> None:
    first_rank, first = holders[0]
    for rank, claim in holders:
        for (name, value), (_, other) in zip(first.form, claim.form, strict=False):
            if value != other:
                differ = f"{name} is {value} on rank {first_rank}, but {other} on rank {rank}"
                raise refused(first.key, f"{differ}; all parts of a tensor must agree", rank)
    if not prod(first.shape) and not any(claim.main for _, claim in holders):
        raise _without_main(first.key, "it", [rank for rank, _ in holders])
    mains = [(rank, claim.region) for rank, claim in holders if claim.main and claim.region.numel]
    _check_cover(first.key, first.shape, mains, sorted({rank for rank, _ in holders}))


def _check_cover(key: str, shape: Shape, mains: Sequence[tuple[int, Region]], holders: Sequence[int]) -> None:
    holes, overlaps = holes_and_overlaps(shape, [region for _, region in mains])
    if overlaps:
        (rank, region), (other, theirs) = (mains[i] for i in overlaps[0])
        common = f"{region} of rank {rank} and {theirs} of rank {other} overlap"
        raise refused(
            key, f"{common}, and both are main replicas; use a different replica_id for all but one of them", other
        )
    if holes:
        raise _without_main(key, " and ".join(map(str, holes)), holders)


def _without_main(key: str, what: str, holders: Sequence[int]) -> CheckpointingException:
    lacking = f"no rank has a main replica of {what} (ranks that hold parts of it: {listed(holders)})"
    return refused(key, f"{lacking}; use replica_id 0 on one rank")


def _check_object(holders: Sequence[tuple[int, ObjectClaim]]) -> None:
    """Check that every shard of an object has exactly one main replica."""
    _check_object_shape(holders)
    first = holders[0][1]
    mains = map_reduce(
        [holder for holder in holders if holder[1].main], lambda main: main[1].offset, lambda main: main[0]
    )
    for offset, ranks in mains.items():
        if len(ranks) > 1:
            both = f"the object at {offset} of {first.shape} has main replicas on ranks {ranks[0]} and {ranks[1]}"
            raise refused(first.key, f"{both}; use a different replica_id for all but one of them", ranks[1])
    missing = [at for at in product(*map(range, first.shape)) if at not in mains]
    if missing:
        raise _without_main(
            first.key, f"the objects at {listed(missing)} of {first.shape}", [rank for rank, _ in holders]
        )


def _check_object_shape(holders: Sequence[tuple[int, ObjectClaim]]) -> None:
    first_rank, first = holders[0]
    for rank, claim in holders:
        inside = len(claim.offset) == len(claim.shape) and all(
            0 <= at < extent for at, extent in zip(claim.offset, claim.shape, strict=True)
        )
        if claim.shape != first.shape or not inside:
            odd = f"the object at {claim.offset} of {claim.shape} on rank {rank} does not fit the shape {first.shape}"
            raise refused(first.key, f"{odd} on rank {first_rank}; global_offset counts shards from 0", rank)


def main_regions(gathered: Sequence[Claims]) -> set[tuple[str, Region]]:
    """Return the (key, region) of each tensor's main replicas."""
    claims = [claim for claims in gathered for claim in claims if isinstance(claim, TensorClaim) and claim.main]
    return {(claim.key, normalise(claim.region, claim.shape)) for claim in claims}
