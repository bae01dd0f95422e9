"""The exchanges between ranks during a save or load of training state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from casckpt.base.digest import hex_digest
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, Mismatch
from casckpt.format.manifest import Manifest
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.groups import merged
from casckpt.frontends.training_state.optimizer import tensors_below
from casckpt.frontends.training_state.stored import MODEL, OPTIM, StoredGroups, StoredTraining
from casckpt.loading.options import Rename
from casckpt.ranks.agreement import StoreIdentity, check_same, named
from casckpt.ranks.messages import WithObjects
from casckpt.ranks.ranks import Ranks, everyone, exchange_keeping
from casckpt.saving.replicas import digest_of
from casckpt.store.store import Store
from casckpt.store.types import Commit
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.shards import check_storable
from casckpt.tensors.values import OfObjects, Shard


@dataclass(frozen=True)
class NamedState:
    """The optimizer state that a rank saves. ``key``: the optimizer's key. ``model``: the state of its model."""

    key: str
    state: dict[str, Any]
    model: Mapping[str, Any]


Groups: TypeAlias = dict[str, StoredGroups | None]
"""The saved groups of each optimizer by key; None for an optimizer that the checkpoint lacks."""
Made: TypeAlias = tuple[dict[str, Any], Sequence[NamedState]]
"""The state that a rank saves, and the optimizer states in it."""


def made_by_name(state: dict[str, Any]) -> Made:
    """Return ``state``, and the optimizer state in it if there is one."""
    optimizer = state.get(OPTIM)
    if not isinstance(optimizer, Mapping) or "param_groups" not in optimizer:
        return state, ()
    state[OPTIM] = dict(optimizer)
    return state, (NamedState(OPTIM, state[OPTIM], state.get(MODEL, {})),)


def make_state(ranks: Ranks, make: Callable[[], Made], objects: Sequence[str] = ()) -> dict[str, Any]:
    """Return this rank's state. The ``param_groups`` of each optimizer are merged across all ranks.

    ``make``: a function that returns the state. Its errors are raised on all ranks. ``objects``: the keys of the
    objects in the state. The sequence is complete when ``make`` returns. Raises InvalidInput if whole state of a
    sharded parameter differs across ranks, or if ranks have different kinds of optimizers at one key.
    """

    def digest() -> tuple[Made, WithObjects]:
        made = make()
        _, named = made
        groups = {optimizer.key: optimizer.state["param_groups"] for optimizer in named}
        texts = {key: repr([(sorted(group), group["params"]) for group in several]) for key, several in groups.items()}
        digests = {key: hex_digest(text.encode()) for key, text in texts.items()}
        return made, WithObjects((digests, _beside_shards(named, ranks.size)), objects)

    def compare(_: Made, messages: Sequence[WithObjects]) -> Sequence[set[str]]:
        _check_alike([message.value[1] for message in messages])
        distinct = {pair for message in messages for pair in message.value[0].items()}
        keys = [key for key, _ in distinct]
        return everyone({key for key in keys if keys.count(key) > 1}, ranks.size)

    def merge(groups_of_ranks: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        for key in differ:
            _check_one_kind(key, {rank: groups[key] for rank, groups in enumerate(groups_of_ranks) if key in groups})
        of_ranks = {key: [groups[key] for groups in groups_of_ranks if key in groups] for key in differ}
        return everyone({key: merged(groups) for key, groups in of_ranks.items()}, ranks.size)

    (state, optimizers), differ = exchange_keeping(ranks, digest, compare)
    if differ:
        mine = {one.key: one.state for one in optimizers if one.key in differ}
        every = ranks.exchange(lambda: {key: own["param_groups"] for key, own in mine.items()}, merge)
        for key, own in mine.items():
            own["param_groups"] = every[key]
    return OfObjects(state)


def _beside_shards(named: Sequence[NamedState], size: int) -> dict[str, bytes]:
    """Return the digests of unsharded optimizer state that belongs to sharded parameters, by key."""
    digests = dict[str, bytes]()
    for one in named if size > 1 else ():
        states = one.state.get("state", {}).items()
        of_shards = {name: entries for name, entries in states if is_sharded(one.model.get(name))}
        for key, value in tensors_below(of_shards, f"{one.key}.state"):
            if not is_dtensor(value) and value.numel() > 1:
                check_storable(key, value)
                digests[key] = digest_of(value)
    return digests


def is_sharded(parameter: Any) -> bool:
    """Return whether this rank has only a part of ``parameter``."""
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
                    f"{key!r} differs between ranks {other} and {rank}, and its parameter is sharded. It may belong "
                    "to each rank's shard, but casckpt cannot tell which elements it belongs to. Move it from the "
                    "optimizer's state to the train_state of a Checkpointer, which resumes it on the same ranks",
                    key=key,
                    rank=rank,
                )


def _check_one_kind(key: str, groups_of: Mapping[int, StoredGroups]) -> None:
    """Raise InvalidInput if a parameter has different optimizer options on two ranks."""
    first: dict[str, tuple[int, frozenset[str]]] = {}
    for rank, group in ((rank, group) for rank, groups in groups_of.items() for group in groups):
        mine = frozenset(group)
        for name in group["params"]:
            other, options = first.setdefault(name, (rank, mine))
            if options - mine and mine - options:
                raise InvalidInput(
                    f"{key!r} is a different kind of optimizer on rank {rank} than on rank {other}: for {name!r} it "
                    f"has {listed(sorted(mine - options))} there, but {listed(sorted(options - mine))} on rank "
                    f"{other}. Create the same optimizer on all ranks",
                    key=key,
                    rank=rank,
                )


def find(
    ranks: Ranks,
    store: AnyStore,
    ref: str | Checkpoint,
    *,
    optimizers: Callable[[], Collection[str]],
    required: bool,
    allow_pickle: bool,
    lenient: bool = False,
    rename: Rename = None,
) -> tuple[StoredTraining, Groups]:
    """Return the checkpoint ``ref``, and the groups of the optimizers that any rank requests. Rank 0 reads them.

    ``optimizers``: a function that returns their keys. Its errors are raised on all ranks. ``required``: raise
    MissingKey for a missing optimizer; otherwise, its groups are None. ``lenient``: also return None for an optimizer
    that was saved by number. ``rename``: see `StoredTraining.optimizer_at`. Raises Conflict if the ranks name
    different checkpoints, NotFound, MissingKey, Mismatch, Damaged and StorageError, on all ranks.
    """

    def hello() -> tuple[Store, tuple[str, list[str]]]:
        return as_store(store), (named(ref), list(optimizers()))

    def read(
        opened: Store, asked: Sequence[tuple[str, list[str]]]
    ) -> Sequence[tuple[Commit, Manifest, Groups, bool, StoreIdentity]]:
        check_same([text for text, _ in asked])
        stored = StoredTraining.read(opened, ref)
        groups: Groups = {}
        keys = sorted({key for _, wanted in asked for key in wanted})
        places = {key: stored.optimizer_at(key, rename) for key in keys}
        values = stored.read_groups(places.values(), allow_pickle=allow_pickle)
        for key, at in places.items():
            groups[key] = None
            with suppress(*([Mismatch] if lenient else [])):
                if required or f"{at}.param_groups" in values:
                    groups[key] = stored.groups(at, values)
        shares, home = opened.repository.shares, StoreIdentity.of(opened.repository)
        return everyone((stored.commit, stored.contents.manifest, groups, shares, home), ranks.size)

    opened, (commit, manifest, groups, shares, home) = exchange_keeping(ranks, hello, read)
    contents = Contents(manifest, extensions=TORCH_EXTENSIONS)
    if ranks.rank != 0:
        contents.adopt(opened.repository, commit)
    return StoredTraining(opened, commit, contents, shares=shares, home=home), groups


def on_no_rank(found: Sequence[Sequence[str]]) -> list[str]:
    """Return the names that are in all lists. Each list has the names that one rank lacks."""
    first, *others = [dict.fromkeys(names) for names in found]
    return [name for name in first if all(name in other for other in others)]
