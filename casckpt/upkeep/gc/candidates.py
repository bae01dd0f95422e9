"""Candidates of a gc: the objects that no live checkpoint names (steps 2, 3 and 6 of the protocol).

The order is what keeps this safe: objects are listed before commits, so whatever a listed commit needs was either
listed or is not up for deletion; see "How objects are deleted" in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from casckpt.contents import manifests
from casckpt.errors import CasckptError, Damaged, Gone, Refused
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.names import TxId
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.repository.repository import Repository
from casckpt.upkeep.inventory import Inventory

_NAMED_AT_MOST = 3


class Unreadable(Exception):
    """A manifest went away while it was wanted: another gc is at work. Start again."""


@dataclass(frozen=True)
class Candidates:
    """What nothing live named when commits were listed: sizes in bytes by key, from which roots are taken away.

    ``ended``: the commits that were purged or revoked then. Whatever was committed beside them is a root for ever.
    """

    sizes: dict[str, int] = field(repr=False)
    ended: frozenset[TxId] = field(repr=False)


def commits_without_doubt(repo: Repository, *, anew: bool = False) -> CommitList:
    """List all commits; ``anew``: from their records, whatever this host knows of them.

    Raises `Damaged` if the state of one is not known: it may live, and nobody knows what it names.
    """
    found = list_commits(repo, anew=anew)
    if found.damaged:
        names = sorted(found.damaged)
        more = f" and {len(names) - 1} more" if names[1:] else ""
        message = (
            f"gc deletes nothing, because the records of transaction {names[0]}{more} cannot be read: "
            f"{found.damaged[names[0]]}. Put the file back from a copy of the store, or give the checkpoint up with "
            f"`casckpt transactions STORE --give-up {names[0]}`"
        )
        raise Damaged(message, key=f"commits/{names[0]}")
    return found


def candidates(
    repo: Repository, stock: Inventory, commits: CommitList, *, as_purged: Container[TxId] = ()
) -> Candidates:
    """Do steps 2 and 3; ``stock`` was taken before ``commits`` were listed. ``as_purged``: what counts as purged.

    Raises `Damaged` that names all checkpoints whose manifest cannot be read; `Unreadable` if one was purged meanwhile;
    `StorageError`.
    """
    live = [commit for commit in commits.live() if commit.txid not in as_purged]
    sizes = dict(stock.sizes)
    broken: list[tuple[Commit, CasckptError]] = []
    manifests.learn(repo, _trusted(repo, live))
    for commit in live:
        try:
            _take_away(sizes, _names_of_live(repo, commit, stock))
        except Gone as error:
            raise Unreadable(str(error)) from error
        except (Damaged, Refused) as error:
            broken.append((commit, error))
    if broken:
        raise _cannot_read(broken)
    ended = frozenset(txid for txid, commit in commits.commits.items() if not commit.live)
    return Candidates(sizes, ended)


def spare_roots(repo: Repository, found: Candidates, commits: CommitList) -> None:
    """Do step 6: take away what any commit names that had not ended when ``found`` was made, purged since or not.

    Raises `Unreadable` if a manifest cannot be read, `StorageError`.
    """
    roots = [commit for txid, commit in sorted(commits.commits.items()) if _is_root(commit, found.ended)]
    manifests.learn(repo, roots)
    for commit in roots:
        try:
            _take_away(found.sizes, _names(repo, commit))
        except (Damaged, Refused) as error:
            raise Unreadable(str(error)) from error


def _is_root(commit: Commit, ended: Container[TxId]) -> bool:
    return commit.live or (commit.txid not in ended and commit.last != "revoked")


def _take_away(sizes: dict[str, int], keys: Iterable[str]) -> None:
    for key in keys:
        sizes.pop(key, None)


def _names(repo: Repository, commit: Commit) -> Iterator[str]:
    """Return the keys of all that a commit names; the catalogue may know."""
    yield manifest_key(commit.txid, commit.id)
    for uploader, blob, _ in manifests.blobs_of(repo, commit):
        yield blob_key(uploader, blob)


def _names_of_live(repo: Repository, commit: Commit, stock: Inventory) -> list[str]:
    """Return the same, and look at the manifest: at its list of blobs where that is cheap, else presence is enough.

    Nothing where all is guarded: there is nothing to take the names away from.
    """
    key = manifest_key(commit.txid, commit.id)
    if repo.storage.traits.remote and (stock.has_manifest(key) or repo.storage.size(key) is not None):
        return list(_names(repo, commit)) if stock.sizes else []
    found = manifests.stored_blobs(repo, commit)
    if not stock.sizes:
        return []
    return [key, *(blob_key(uploader, name) for uploader, name, _ in found.names())]


def _trusted(repo: Repository, live: Iterable[Commit]) -> Iterable[Commit]:
    """Return those whose manifests are not read one by one, but many at once into the catalogue."""
    return live if repo.storage.traits.remote else ()


def _cannot_read(broken: list[tuple[Commit, CasckptError]]) -> Damaged:
    lines = [str(error) for _, error in broken[:_NAMED_AT_MOST]]
    more = f" (and {len(broken) - _NAMED_AT_MOST} more)" if len(broken) > _NAMED_AT_MOST else ""
    return Damaged(
        f"gc deletes nothing, because nobody knows what these checkpoints need{more}: {'; '.join(lines)}",
        checkpoints=tuple(commit.id for commit, _ in broken),
    )
