"""Erases a run: gc purges all of its checkpoints at once, and deletes the records that have its name, without delay.

No record asks another gc to do so. If this gc is killed, the user repeats it: it then finds less to do. What a gc must
not delete early still holds for other runs: the blobs that their checkpoints share stay.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from casckpt.base.names import check_run, run_hash
from casckpt.contents.refs import about_run
from casckpt.errors import Conflict, NotFound
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.tags import FOREIGN_CLOCKS, delete_tag, tags
from casckpt.history.transactions import open_transactions
from casckpt.repository.exclusive import new_name
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.mirrored import has_run
from casckpt.upkeep.gc.idle import named_by
from casckpt.upkeep.gc.purge import GcPlan
from casckpt.upkeep.inventory import list_objects


@dataclass(frozen=True)
class Erased:
    """What a gc left of the ``run`` that it erased.

    ``shared``: the run's blobs that other checkpoints need: their sizes, by key. ``named_by``: the checkpoints of other
    runs that name it, as their parent or in their lineage. ``finished``: whether nothing else is left. Otherwise, erase
    the run again, for example once the saves in progress have ended.
    """

    run: str
    shared: Mapping[str, int]
    named_by: tuple[Commit, ...]
    finished: bool


def check_erasable(repo: Repository, run: str, *, keep_in_mirror: bool) -> None:
    """Raise an error if a run cannot be erased now. Writes nothing.

    Raises `NotFound` if the store has nothing of it, and `Conflict` if a save of it is in progress or, unless
    ``keep_in_mirror``, if the mirror has it.
    """
    listed, mine = list_commits(repo), f"-{run_hash(check_run(run))}-"
    opened = [one.txid for one in open_transactions(repo, listed.names) if mine in one.txid]
    if opened:
        raise Conflict(f"run {run} has a save in progress: wait, or `casckpt transactions STORE --revoke {opened[0]}`")
    if not any(mine in txid for txid in (*listed.commits, *listed.over)):
        raise NotFound(about_run(repo, listed, run))
    if not keep_in_mirror and has_run(repo, run):
        raise Conflict(f"the mirror has run {run}: pass --keep-in-mirror (keep_in_mirror=True), and erase it there too")


def with_erased(plan: GcPlan, run: str) -> GcPlan:
    """Return ``plan``, so that it also purges all checkpoints of ``run``, whatever their age and tags."""
    names = ("forget", "purge", "waiting", "young", "restore")
    others: dict[str, Any] = {name: tuple(one for one in getattr(plan, name) if one.run != run) for name in names}
    others["forget"] += tuple(one for one in plan.listed.visible() if one.run == run)
    others["purge"] += tuple(one for one in plan.listed.placed() if one.run == run)
    kept = {ref: why for ref, why in plan.kept.items() if ref.rpartition("@")[0] != run}
    min_age = None if plan.min_age is None else replace(plan.min_age, erased=run)
    return replace(plan, **others, kept=kept, erase=run, min_age=min_age)


def let_go(repo: Repository, run: str) -> None:
    """Delete the tags of a run, and end its leases. First, check that this user may delete.

    Raises `Damaged` or `Refused` if a tag cannot be read, and `StorageError`.
    """
    repo.storage.delete(new_name(repo.clock, repo.entropy))  # there is no such object
    ids = {one.id for one in list_commits(repo).live() if one.run == run}
    for name, tag in tags(repo, slack=FOREIGN_CLOCKS).items():
        if tag.manifest in ids:
            delete_tag(repo, name)


def left_of(repo: Repository, plan: GcPlan, run: str, listed: CommitList, deleted: Container[str]) -> Erased:
    """Return what is left of a run that ``plan`` erases.

    ``listed``: a listing from after the gc. ``deleted``: the objects that it deleted or, in a preview, would delete.
    """
    every, mine = plan.listed.live(), f"-{run_hash(run)}-"  # a part of all txids of the run
    names = {run, *(one.id for one in every if one.run == run)}
    naming = tuple(one for one in every if one.run != run and not names.isdisjoint(named_by(repo, one)))
    left = {key: size for key, size in list_objects(repo).items() if mine in key and key not in deleted}
    is_gone = all(one.last == "revoked" or one.run != run for one in listed.commits.values())
    return Erased(run, left, naming, is_gone and not any(key.endswith(".manifest") for key in left))
