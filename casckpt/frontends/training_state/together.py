"""The exchanges between ranks during a save or load of training state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from casckpt.base.digest import hex_digest
from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, Mismatch
from casckpt.format.manifest import Manifest
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.groups import merged
from casckpt.frontends.training_state.slices import PLAIN, Apart, NamedState, Table, decide, store_apart, table_of
from casckpt.frontends.training_state.stored import MODEL, OPTIM, StoredGroups, StoredTraining
from casckpt.loading.options import Rename
from casckpt.ranks.agreement import StoreIdentity, check_same, named
from casckpt.ranks.ranks import Ranks, everyone, exchange_keeping
from casckpt.store.store import Store
from casckpt.store.types import Commit
from casckpt.tensors.objects import TORCH_EXTENSIONS
from casckpt.tensors.values import OfObjects

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


def make_state(ranks: Ranks, make: Callable[[], Made]) -> dict[str, Any]:
    """Return this rank's state. The ``param_groups`` of each optimizer are merged across all ranks.

    ``make``: a function that returns the state. Its errors are raised on all ranks. Raises InvalidInput if ranks have
    different kinds of optimizers at one key.
    """

    def digest() -> tuple[tuple[Made, dict[str, Table]], dict[str, str]]:
        made = make()
        _, named = made
        several = ranks.size > 1
        tables = {one.key: table_of(one, several=several) for one in named}
        groups = {one.key: [(sorted(group), group["params"]) for group in one.state["param_groups"]] for one in named}
        digests = {key: hex_digest(repr((groups[key], tables[key])).encode()) for key in groups}
        return (made, tables), digests

    def compare(_: object, messages: Sequence[dict[str, str]]) -> Sequence[set[str]]:
        distinct = {pair for message in messages for pair in message.items()}
        keys = [key for key, _ in distinct]
        return everyone({key for key in keys if keys.count(key) > 1}, ranks.size)

    def merge(told: Sequence[dict[str, tuple[StoredGroups, Table]]]) -> Sequence[dict[str, tuple[StoredGroups, Apart]]]:
        found = {}
        for key in differ:
            of_ranks = {rank: by_key[key] for rank, by_key in enumerate(told) if key in by_key}
            groups = {rank: groups for rank, (groups, _) in of_ranks.items()}
            _check_one_kind(key, groups)
            found[key] = merged([*groups.values()]), decide(table for _, table in of_ranks.values())
        return everyone(found, ranks.size)

    ((state, optimizers), tables), differ = exchange_keeping(ranks, digest, compare)
    every = {one.key: (one.state["param_groups"], decide([tables[one.key]])) for one in optimizers}
    if differ:
        every |= ranks.exchange(lambda: {key: (every[key][0], tables[key]) for key in differ & every.keys()}, merge)
    for one in optimizers:
        groups, (own, plain) = every[one.key]
        one.state["param_groups"] = groups
        if plain:
            one.state[PLAIN] = plain
        if own:
            store_apart(one, own, ranks)
    return OfObjects(state)


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
