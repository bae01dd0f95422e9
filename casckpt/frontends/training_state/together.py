"""The messages between the ranks of a save or load of training state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from casckpt.checkpoint.agreement import check_same, named
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.ranks import Ranks, everyone
from casckpt.checkpoint.saving.replicas import digest_of
from casckpt.errors import InvalidInput
from casckpt.format.digest import hex_digest
from casckpt.format.manifest import Manifest
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.groups import merged
from casckpt.frontends.training_state.optimizer import tensors_below
from casckpt.frontends.training_state.stored import StoredGroups, StoredTraining
from casckpt.repository import manifests
from casckpt.repository.commits import Commit
from casckpt.store.store import Store
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.shards import check_storable
from casckpt.tensors.values import Shard


def make_state(ranks: Ranks, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """This rank's state, in which ``optim.param_groups``, if there are any, are those of all ranks.

    What goes wrong in the making is raised on all of them. Raises InvalidInput, too, where ranks have other values of
    an optimizer's state that is no shard of anything, for a parameter that is sharded.
    """
    made: list[dict[str, Any]] = []

    def groups() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = made[0].get("optim", {}).get("param_groups", [])
        return found

    def digest() -> tuple[str, dict[str, bytes]]:
        made.append(make())
        beside = _beside_shards(made[0]) if ranks.size > 1 else {}
        return hex_digest(repr([group["params"] for group in groups()]).encode()), beside

    def compare(found: Sequence[tuple[str, Mapping[str, bytes]]]) -> Sequence[bool]:
        _check_alike([beside for _, beside in found])
        return everyone(len({text for text, _ in found}) > 1, ranks.size)

    differ = ranks.exchange(digest, compare)
    if differ:
        every = ranks.exchange(groups, lambda found: everyone(merged(found), ranks.size))
        made[0]["optim"] = {**made[0].get("optim", {"state": {}}), "param_groups": every}
    return made[0]


def _beside_shards(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Digests of the tensors of an optimizer's state that are whole here, though their parameter is sharded, by key."""
    model, digests = state.get("model", {}), dict[str, bytes]()
    for name, entries in state.get("optim", {}).get("state", {}).items():
        if _is_sharded(model.get(name)):
            for key, value in tensors_below(entries, f"optim.state.{name}"):
                if not is_dtensor(value) and value.numel() > 1:
                    check_storable(key, value)
                    digests[key] = digest_of(value)
    return digests


def _is_sharded(parameter: Any) -> bool:
    if isinstance(parameter, Shard):
        return parameter.data.numel() != prod(parameter.global_shape)
    return is_dtensor(parameter) and parameter.to_local().numel() != parameter.numel()


def _check_alike(found: Sequence[Mapping[str, bytes]]) -> None:
    first: dict[str, tuple[int, bytes]] = {}
    for rank, digests in enumerate(found):
        for key, digest in digests.items():
            other, wanted = first.setdefault(key, (rank, digest))
            if digest != wanted:
                raise InvalidInput(
                    f"{key!r} differs between ranks {other} and {rank}, and its parameter is sharded: it may belong to "
                    "the shard of each rank, but does not say to which elements. Save it with Store.save, as "
                    "casckpt.Shard or casckpt.PerRank, or remove it from the optimizer's state",
                    key=key,
                    rank=rank,
                )


def find(
    ranks: Ranks,
    store: AnyStore,
    ref: str | Checkpoint,
    *,
    optimizer: Callable[[], bool],
    required: bool,
    allow_pickle: bool,
) -> tuple[StoredTraining, StoredGroups | None]:
    """The checkpoint that ``ref`` names, and its optimizer's groups if any rank wants an ``optimizer``; rank 0 reads.

    ``optimizer``: called once, where what it raises reaches all ranks. ``required``: there must be one. Raises Conflict
    if ranks name different checkpoints, NotFound, MissingKey, Mismatch, Damaged, StorageError; on all ranks.
    """
    opened: list[Store] = []

    def hello() -> tuple[str, bool]:
        opened.append(as_store(store))
        return named(ref), optimizer()

    def look(told: Sequence[tuple[str, bool]]) -> Sequence[tuple[Commit, Manifest, StoredGroups | None]]:
        check_same([text for text, _ in told])
        stored = StoredTraining.read(opened[0], ref)
        reads = any(wanted for _, wanted in told) and (required or stored.has_optimizer)
        groups = stored.groups(allow_pickle=allow_pickle) if reads else None
        return everyone((stored.commit, stored.manifest, groups), ranks.size)

    commit, manifest, groups = ranks.exchange(hello, look)
    if ranks.rank != 0:
        manifests.adopt(opened[0].repository, commit, manifest)
    return StoredTraining(opened[0], commit, manifest), groups


def on_no_rank(found: Sequence[Sequence[str]]) -> list[str]:
    """Of the names that each rank does not have, those that none has."""
    first, *others = [dict.fromkeys(names) for names in found]
    return [name for name in first if all(name in other for other in others)]
