"""Candidates of a gc: the objects that no live checkpoint names (steps 2, 3 and 6 of the protocol).

The order makes this safe: gc lists objects before commits. As a result, no object that a listed commit names can
become a candidate. See "How objects are deleted" in docs/format.md.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, Gone, Refused
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.names import TxId
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.ages import MinAge
from casckpt.upkeep.inventory import Inventory
from casckpt.upkeep.saves import about_unreadable, check_recorded

_NAMED_AT_MOST = 3

log = logging.getLogger(__name__)


class Unreadable(Exception):
    """Raised for a manifest that another gc deleted before this one could read it. The caller starts over."""


@dataclass(frozen=True)
class Candidates:
    """The objects that no live commit named when the commits were listed.

    ``sizes``: their sizes in bytes, by key; gc later removes the objects of roots from this dict. ``ended``: the
    transactions that were revoked, or whose places had ended, in that listing. All other places remain roots for this
    gc, even if they end later.
    """

    sizes: dict[str, int] = field(repr=False)
    ended: frozenset[TxId] = field(repr=False)


def commits_without_doubt(repo: Repository, *, anew: bool = False) -> CommitList:
    """List all commits. With ``anew``, also reread records that this host has read before.

    Raises `Damaged` if the state of a commit is unknown, because the commit may be live and may need any object.
    """
    listed = list_commits(repo, anew=anew)
    if listed.damaged:
        names = sorted(listed.damaged)
        more = f" and {len(names) - 1} more" if names[1:] else ""
        message = (
            f"gc deletes nothing, because it cannot read the records of transaction {names[0]}{more}: "
            f"{listed.damaged[names[0]]}. {about_unreadable(names[0])}"
        )
        raise Damaged(message, key=f"commits/{names[0]}")
    return listed


def candidates(
    repo: Repository, stock: Inventory, min_age: MinAge | None = None, *, as_purged: Container[TxId] = ()
) -> tuple[Candidates, CommitList]:
    """Perform step 3: list the commits after the listing ``stock``. Return the candidates, and the listing for step 4.

    ``min_age``: what ended too recently is no candidate. ``as_purged``: transactions whose places count as ended.
    Raises `Damaged` with all checkpoints whose manifests cannot be read, `Unreadable` if one of them was purged in the
    meantime, and `StorageError`.
    """
    commits = commits_without_doubt(repo)
    live = [commit for commit in commits.placed() if commit.places.txid not in as_purged]
    sizes = dict(stock.sizes)
    _spare_young(repo, sizes, commits, min_age)
    broken: list[tuple[Commit, CasckptError]] = []
    manifests.learn(repo, live if repo.storage.traits.remote else ())  # other storage: read one by one below
    for commit in live:
        try:
            _remove(sizes, _names_of_live(repo, commit, stock))
        except Gone as error:
            raise Unreadable(str(error)) from error
        except (Damaged, Refused) as error:
            broken.append((commit, error))
    if broken:
        raise _cannot_read(broken)
    return Candidates(sizes, commits.ended), commits


def spare_roots(repo: Repository, pending: Candidates, min_age: MinAge | None = None) -> None:
    """Do step 6: list the commits, and remove from ``pending`` the objects of places that had not ended in step 3.

    This includes places that have ended since then. ``min_age``: another gc may have chosen ``pending`` with a lower
    one. Raises `Unreadable` if a manifest cannot be read, `Damaged`
    if records are lost, and `StorageError`.
    """
    commits = commits_without_doubt(repo)
    _spare_young(repo, pending.sizes, commits, min_age)
    every = [(commit, places) for commit in commits.commits.values() for places in (*commit.existing, *commit.ended)]
    roots = [commit.at(places) for commit, places in every if places.txid not in pending.ended]
    manifests.learn(repo, roots)
    for commit in roots:
        try:
            _remove(pending.sizes, _names(repo, commit))
        except (Damaged, Refused) as error:
            raise Unreadable(str(error)) from error
    check_recorded(repo, pending.sizes, commits.recorded)


def _spare_young(repo: Repository, sizes: dict[str, int], commits: CommitList, min_age: MinAge | None) -> None:
    """Remove the objects of places that ended too recently, if their manifest exists. A missing one stops nothing."""
    young = [] if min_age is None else min_age.young(commits)
    for commit in manifests.learn(repo, [one for one in young if manifest_key(one.places.txid, one.id) in sizes]):
        log.info("%s was purged or replaced more recently than the minimum age: gc keeps its objects", commit)
        _remove(sizes, list(_names(repo, commit)))


def _remove(sizes: dict[str, int], keys: Iterable[str]) -> None:
    for key in keys:
        sizes.pop(key, None)


def _names(repo: Repository, commit: Commit) -> Iterator[str]:
    """Yield the keys of a commit's manifest and blobs, from the catalogue or the store."""
    yield manifest_key(commit.places.txid, commit.id)
    for uploader, blob, _ in manifests.blobs_of(repo, commit):
        yield blob_key(uploader, blob)


def _names_of_live(repo: Repository, commit: Commit, stock: Inventory) -> list[str]:
    """Return the same keys, and check the manifest: its list of blobs if reading is cheap, otherwise its existence.

    If all objects have a guard, there are no candidates, so this returns no keys.
    """
    key = manifest_key(commit.places.txid, commit.id)
    if repo.storage.traits.remote and (stock.has_manifest(key) or repo.storage.size(key) is not None):
        return list(_names(repo, commit)) if stock.sizes else []
    blobs = manifests.stored_blobs(repo, commit)
    if not stock.sizes:
        return []
    return [key, *(blob_key(uploader, name) for uploader, name, _ in blobs.names())]


def _cannot_read(broken: list[tuple[Commit, CasckptError]]) -> Damaged:
    lines = [str(error) for _, error in broken[:_NAMED_AT_MOST]]
    more = f" (and {len(broken) - _NAMED_AT_MOST} more)" if len(broken) > _NAMED_AT_MOST else ""
    return Damaged(
        f"gc deletes nothing, because it cannot read the manifests of these checkpoints{more}: {'; '.join(lines)}",
        checkpoints=tuple(commit.id for commit, _ in broken),
    )
