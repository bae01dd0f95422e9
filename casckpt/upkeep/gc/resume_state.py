"""The state of a gc that ran out of time, kept on this host until the next gc goes on from there.

What makes it safe to use, however old it is: the names of objects are never used twice, and what had not been purged
when the candidates were made stays a root. Both hold for this very store only, so one that is a copy of another, or
was put back from one, must not use the state of that: its URL is compared, and so is all that had ended.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from casckpt.format import notes
from casckpt.format.keys import blob_key, manifest_key, parse_object
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.notes import PausedGc
from casckpt.history.commits import CommitList
from casckpt.repository.repository import Repository
from casckpt.upkeep.gc.candidates import Candidates
from casckpt.upkeep.inventory import BLOB

NOTE = "gc-paused"


@dataclass(frozen=True)
class Paused:
    """``waits``: the transactions that stood in the way."""

    candidates: Candidates
    waits: frozenset[TxId]


def keep(repo: Repository, paused: Paused) -> None:
    """Keep the state for the next gc on this host."""
    columns: dict[TxId, list[tuple[str, str, int]]] = defaultdict(list)
    for key, size in paused.candidates.sizes.items():
        name = parse_object(key)
        if name is not None:
            columns[name.uploader].append((name.kind, name.hash, size))
    state = PausedGc(repo.storage.url, columns, sorted(paused.candidates.ended), sorted(paused.waits))
    repo.catalogue.set_note(NOTE, notes.encode(state))


def drop(repo: Repository) -> None:
    """Drop what was kept: there is nothing to go on with."""
    repo.catalogue.set_note(NOTE, None)


def take_up(repo: Repository, commits: CommitList) -> Paused | None:
    """Return what a gc on this host left for this store, None if nothing. ``commits``: as they are now."""
    state = notes.decode(repo.catalogue.note(NOTE), notes.PAUSED_GC)
    if state is None or state.url != repo.storage.url:
        return None
    if not all(_has_ended(commits, txid) for txid in state.ended):
        return None
    sizes = {
        _key(uploader, kind, digest): size for uploader, rows in state.candidates.items() for kind, digest, size in rows
    }
    return Paused(Candidates(sizes, frozenset(state.ended)), frozenset(state.waits))


def _has_ended(commits: CommitList, txid: TxId) -> bool:
    commit = commits.commits.get(txid)
    return commit is not None and not commit.live


def _key(uploader: TxId, kind: str, digest: str) -> str:
    return blob_key(uploader, BlobHash(digest)) if kind == BLOB else manifest_key(uploader, ManifestId(digest))
