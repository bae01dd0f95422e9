"""A fully parallel load: what several ranks want alike is read by one of them, and handed on to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from casckpt.checkpoint.ranks import Ranks
from casckpt.format.regions import Region, normalise
from casckpt.frontends.megatron.integrity import Claims, TensorClaim
from casckpt.tensors.dtensors import local_of
from casckpt.tensors.memory import note_write, tensor_bytes


@dataclass(frozen=True)
class Sharing:
    """One rank's part. A transfer is (which of its sharded values, the other rank).

    Any two ranks have their transfers in the same order.
    """

    sends: list[tuple[int, int]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)

    def is_read(self, number: int) -> bool:
        """Does this rank read this value itself?"""
        return all(received != number for received, _ in self.receives)


def plan_sharing(gathered: Sequence[Claims]) -> list[Sharing]:
    """Who reads what, for each rank; balanced by elements, the largest first. Pure."""
    wanted: dict[tuple[str, Region, object], dict[int, int]] = {}
    load = [0] * len(gathered)
    for rank, claims in enumerate(gathered):
        for number, claim in enumerate(claims):
            if isinstance(claim, TensorClaim) and claim.region.numel:
                name = (claim.key, normalise(claim.region, claim.shape), claim.form)
                if wanted.setdefault(name, {}).setdefault(rank, number) != number:
                    load[rank] += claim.region.numel  # the same once more: it reads that by itself
    sharings = [Sharing() for _ in gathered]
    for (_, region, _), holders in sorted(wanted.items(), key=lambda item: -item[0][1].numel):
        reader = min(holders, key=lambda rank: load[rank])
        load[reader] += region.numel
        for rank in sorted(holders.keys() - {reader}):
            sharings[reader].sends.append((holders[reader], rank))
            sharings[rank].receives.append((holders[rank], reader))
    return sharings


def hand_on(ranks: Ranks, sharing: Sharing, data: Sequence[torch.Tensor | None]) -> None:
    """Send and take what ``sharing`` says; every rank makes the call when all have read. ``data``: of each value.

    Raises RankFailed on every rank alike.
    """
    targets = [(_local(data[number]), rank) for number, rank in sharing.receives]
    taken = [(tensor if _is_plain(tensor) else _on_host(tensor), rank) for tensor, rank in targets]
    sources = {number: _local(data[number]) for number, _ in sharing.sends}
    sent = {n: tensor if _is_plain(tensor) else _on_host(tensor).copy_(tensor) for n, tensor in sources.items()}

    def swap() -> None:
        ranks.swap(
            [(_bytes(sent[number]), rank) for number, rank in sharing.sends],
            [(_bytes(tensor), rank) for tensor, rank in taken],
        )

    ranks.exchange(swap, lambda done: done)
    for (target, _), (tensor, _) in zip(targets, taken, strict=True):
        note_write(target)
        if tensor is not target:
            target.copy_(tensor)


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise TypeError("only tensors are handed on")
    return local_of(tensor).detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor_bytes(tensor) is not None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor on the CPU, which must outlive them."""
    return torch.frombuffer(tensor_bytes(tensor), dtype=torch.uint8)
