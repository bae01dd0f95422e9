"""The messages between the ranks of a save or load of training state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from casckpt.base.digest import hex_digest
from casckpt.base.text import listed
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, Mismatch
from casckpt.format.manifest import Manifest
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.groups import merged
from casckpt.frontends.training_state.optimizer import tensors_below
from casckpt.frontends.training_state.stored import MODEL, OPTIM, StoredGroups, StoredTraining
from casckpt.history.commits import Commit
from casckpt.loading.arguments import Rename
from casckpt.ranks.agreement import check_same, named
from casckpt.ranks.messages import WithObjects
from casckpt.ranks.ranks import Ranks, everyone
from casckpt.saving.replicas import digest_of
from casckpt.store.store import Store
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.shards import check_storable
from casckpt.tensors.state import OfObjects
from casckpt.tensors.values import Shard


@dataclass(frozen=True)
class NamedState:
    """What a rank saves of an optimizer, by the names of its model. ``key``: of the optimizer. ``model``: its state."""

    key: str
    state: dict[str, Any]
    model: Mapping[str, Any]


Groups: TypeAlias = dict[str, StoredGroups | None]
"""Those of each optimizer by its key; None where there are none."""
Made: TypeAlias = tuple[dict[str, Any], Sequence[NamedState]]
"""What a rank saves, and the states of optimizers in it."""


def made_by_name(state: dict[str, Any]) -> Made:
    """``state``, whose optimizer, if it has one, is by the names of its model."""
    optimizer = state.get(OPTIM)
    if not isinstance(optimizer, Mapping) or "param_groups" not in optimizer:
        return state, ()
    state[OPTIM] = dict(optimizer)
    return state, (NamedState(OPTIM, state[OPTIM], state.get(MODEL, {})),)


def make_state(ranks: Ranks, make: Callable[[], Made], objects: Sequence[str] = ()) -> dict[str, Any]:
    """This rank's state, in which the ``param_groups`` of each optimizer are those of all ranks that have it.

    ``objects``: keys of the whole objects that it is made of, known once ``make`` was called. What goes wrong in
    the making is raised on all of them. Raises InvalidInput, too, where ranks have other values of an optimizer's
    state that is no shard of anything, for a parameter that is sharded.
    """
    made: list[Made] = []

    def digest() -> WithObjects:
        made.append(make())
        named = made[0][1]
        groups = {one.key: one.state["param_groups"] for one in named}
        texts = {key: repr([(sorted(group), group["params"]) for group in several]) for key, several in groups.items()}
        digests = {key: hex_digest(text.encode()) for key, text in texts.items()}
        return WithObjects((digests, _beside_shards(named, ranks.size)), objects)

    def compare(found: Sequence[WithObjects]) -> Sequence[set[str]]:
        _check_alike([one.value[1] for one in found])
        distinct = {pair for one in found for pair in one.value[0].items()}
        keys = [key for key, _ in distinct]
        return everyone({key for key in keys if keys.count(key) > 1}, ranks.size)

    def merge(found: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        for key in differ:
            _check_one_kind(key, {rank: one[key] for rank, one in enumerate(found) if key in one})
        return everyone({key: merged([one[key] for one in found if key in one]) for key in differ}, ranks.size)

    differ = ranks.exchange(digest, compare)
    if differ:
        mine = {one.key: one.state for one in made[0][1] if one.key in differ}
        every = ranks.exchange(lambda: {key: state["param_groups"] for key, state in mine.items()}, merge)
        for key, state in mine.items():
            state["param_groups"] = every[key]
    return OfObjects(made[0][0])


def _beside_shards(named: Sequence[NamedState], size: int) -> dict[str, bytes]:
    """Digests of the tensors of an optimizer's state that are whole here, though their parameter is sharded, by key."""
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
    """Tell whether this rank has only a part of it."""
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


def _check_one_kind(key: str, groups_of: Mapping[int, StoredGroups]) -> None:
    """Raise InvalidInput for a parameter of which two ranks have optimizers with other options each."""
    first: dict[str, tuple[int, frozenset[str]]] = {}
    for rank, group in ((rank, group) for rank, groups in groups_of.items() for group in groups):
        mine = frozenset(group)
        for name in group["params"]:
            other, options = first.setdefault(name, (rank, mine))
            if options - mine and mine - options:
                raise InvalidInput(
                    f"{key!r} is another kind of optimizer on rank {rank} than on rank {other}: for {name!r} it has "
                    f"{listed(sorted(mine - options))}, and rank {other} {listed(sorted(options - mine))}. Make the "
                    "same optimizer on all ranks",
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
    """The checkpoint that ``ref`` names, and the groups of the ``optimizers``, keys, that any rank wants; rank 0 reads.

    ``optimizers``: called once, where what it raises reaches all ranks. ``required``: they must be there; else those
    that are not are None. ``lenient``: so are those that were saved by number. ``rename``: see
    `StoredTraining.optimizer_at`. Raises Conflict if ranks name different checkpoints, NotFound, MissingKey, Mismatch,
    Damaged, StorageError; on all ranks.
    """
    opened: list[Store] = []

    def hello() -> tuple[str, list[str]]:
        opened.append(as_store(store))
        return named(ref), list(optimizers())

    def look(told: Sequence[tuple[str, list[str]]]) -> Sequence[tuple[Commit, Manifest, Groups]]:
        check_same([text for text, _ in told])
        stored = StoredTraining.read(opened[0], ref)
        groups: Groups = {}
        for key in sorted({key for _, wanted in told for key in wanted}):
            at = stored.optimizer_at(key, rename)
            is_read = required or stored.has_optimizer(at)
            try:
                groups[key] = stored.groups(at, allow_pickle=allow_pickle) if is_read else None
            except Mismatch:
                if not lenient:
                    raise
                groups[key] = None
        return everyone((stored.commit, stored.manifest, groups), ranks.size)

    commit, manifest, groups = ranks.exchange(hello, look)
    if ranks.rank != 0:
        manifests.adopt(opened[0].repository, commit, manifest)
    return StoredTraining(opened[0], commit, manifest), groups


def on_no_rank(found: Sequence[Sequence[str]]) -> list[str]:
    """Of the names that each rank does not have, those that none has."""
    first, *others = [dict.fromkeys(names) for names in found]
    return [name for name in first if all(name in other for other in others)]
