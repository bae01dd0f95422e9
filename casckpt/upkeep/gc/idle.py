"""Finds idle runs, of which ``gc --drop-idle`` forgets all checkpoints.

A run is idle if its last commit, and the last restore of a checkpoint that is visible, are long ago. A run is not
idle if a tag, a lease or a transaction belongs to it, or if a visible checkpoint of another run names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from casckpt.base.groups import grouped
from casckpt.base.names import run_hash
from casckpt.contents import manifests
from casckpt.errors import InvalidInput
from casckpt.format.keys import parse_txid
from casckpt.format.sections.index import lineage_of
from casckpt.history.commits import Commit, list_commits, names_in
from casckpt.history.tags import FOREIGN_CLOCKS, tags
from casckpt.history.transactions import PREFIX as TRANSACTIONS
from casckpt.repository.repository import Repository


def idle_runs(repo: Repository, seconds: float, *, undo: float) -> set[str]:
    """Return the runs that have been idle for ``seconds``.

    Forget only commits that were listed before this call, so that no later save is among them. ``undo``: the time to
    restore them, in seconds. Raises `InvalidInput` if a time is too short, `Damaged` or `Refused` if a tag or a lineage
    cannot be read, and `StorageError`.
    """
    if seconds < 86400 or undo < 7 * 86400:  # a day, and a week
        raise InvalidInput(
            "drop-idle forgets whole runs: pass at least one day, such as 90d, omit min-age, and give users at least 7 "
            "days to undo it: `casckpt settings STORE --set min_age=7d`"
        )
    opened = {parse_txid(txid).run_hash for txid, _ in names_in(repo, TRANSACTIONS)}
    listed = list_commits(repo)  # after transactions/: a save that ends in between is in at least one listing
    tagged = {tag.manifest for tag in tags(repo, slack=FOREIGN_CLOCKS, listed=listed).values()}
    naming: dict[str, set[str]] = defaultdict(set)
    for commit in listed.visible():
        for name in named_by(repo, commit):
            naming[name].add(commit.run)
    saved = (commit for commit in listed.commits.values() if commit.last != "revoked")
    since, idle = repo.clock() - round(1e6 * seconds), set[str]()
    for run, commits in grouped(saved, lambda commit: commit.run).items():
        names = {run, *(commit.id for commit in commits)}
        is_held = run_hash(run) in opened or not tagged.isdisjoint(names) or any(naming[one] - {run} for one in names)
        if not is_held and all(max(one.first.time, one.changed_at * one.visible) < since for one in commits):
            idle.add(run)
    return idle


def named_by(repo: Repository, commit: Commit) -> Iterator[str]:
    """Yield the parent of a checkpoint, and all texts in its lineage: ids, and names of runs."""
    lineage = commit.committed.lineage or {}
    if None in lineage.values():  # too large for the record
        lineage = lineage_of(manifests.get(repo, commit).body.notes)
    yield from _texts([commit.committed.parent, lineage])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
