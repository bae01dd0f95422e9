"""The messages between the ranks of a save or load of training state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from casckpt.checkpoint.agreement import check_same, named
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.ranks import Ranks, everyone
from casckpt.format.digest import hex_digest
from casckpt.format.manifest import Manifest
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.buffers import differing, say
from casckpt.frontends.training_state.buffers import digests as buffer_digests
from casckpt.frontends.training_state.groups import merged
from casckpt.frontends.training_state.stored import StoredGroups, StoredTraining
from casckpt.repository import manifests
from casckpt.repository.commits import Commit
from casckpt.store.store import Store


@dataclass(frozen=True)
class _Parts:
    """What a rank has of what is compared: the groups of its optimizer, and digests of its buffers."""

    groups: list[dict[str, Any]]
    buffers: dict[str, bytes]

    def digests(self) -> tuple[str, str]:
        """Of the names in the groups, and of the buffers."""
        names = [group["params"] for group in self.groups]
        return hex_digest(repr(names).encode()), hex_digest(repr(sorted(self.buffers.items())).encode())


_TOLD: WeakSet[Ranks] = WeakSet()
"""Those that were told that their buffers differ; the same on each of them."""


def make_state(ranks: Ranks, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """This rank's state, in which ``optim.param_groups``, if there are any, are those of all ranks.

    What goes wrong in the making is raised on all of them. Buffers that differ are told of in the log, once.
    """
    made: list[tuple[dict[str, Any], _Parts]] = []

    def digests() -> tuple[str, str]:
        state = make()
        compared = ranks.size > 1 and ranks not in _TOLD
        buffers = buffer_digests(state.get("model")) if compared else {}
        made.append((state, _Parts(state.get("optim", {}).get("param_groups", []), buffers)))
        return made[0][1].digests()

    def merge(found: Sequence[_Parts]) -> Sequence[tuple[list[dict[str, Any]], bool]]:
        names = differing([parts.buffers for parts in found])
        if names:
            say(names)
        return everyone((merged([parts.groups for parts in found]), bool(names)), ranks.size)

    differ = ranks.exchange(digests, lambda found: everyone(_differ(found), ranks.size))
    state, parts = made[0]
    if any(differ):
        groups, told = ranks.exchange(lambda: parts, merge)
        if told:
            _TOLD.add(ranks)
        if differ[0]:
            state["optim"] = {**state.get("optim", {"state": {}}), "param_groups": groups}
    return state


def _differ(found: Sequence[tuple[str, str]]) -> tuple[bool, bool]:
    groups, buffers = ({digests[which] for digests in found} for which in (0, 1))
    return len(groups) > 1, len(buffers) > 1


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
