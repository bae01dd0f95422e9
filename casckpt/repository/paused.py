"""The state of a gc that ran out of time, kept on this host until the next gc goes on from there.

What makes it safe to use, however old it is: the names of objects are never used twice, and what had not been purged
when the candidates were made stays a root. Both hold for this very store only, so one that is a copy of another, or
was put back from one, must not use the state of that: its URL is compared, and so is all that had ended.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

from casckpt.format.keys import blob_key, manifest_key, parse_object
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.repository.commits import CommitList
from casckpt.repository.marking import Candidates
from casckpt.repository.repository import Repository
from casckpt.repository.stock import BLOB

NOTE = "gc-paused"


@dataclass(frozen=True)
class Paused:
    """``waits``: the transactions that stood in the way."""

    candidates: Candidates
    waits: frozenset[TxId]


def keep(repo: Repository, paused: Paused) -> None:
    """For the next gc on this host."""
    columns: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for key, size in paused.candidates.sizes.items():
        name = parse_object(key)
        if name is not None:
            columns[name.uploader].append((name.kind, name.hash, size))
    state = {
        "url": repo.storage.url,
        "candidates": columns,
        "ended": sorted(paused.candidates.ended),
        "waits": sorted(paused.waits),
    }
    repo.catalogue.set_note(NOTE, json.dumps(state, separators=(",", ":")).encode())


def drop(repo: Repository) -> None:
    """There is nothing to go on with."""
    repo.catalogue.set_note(NOTE, None)


def take_up(repo: Repository, commits: CommitList) -> Paused | None:
    """What a gc on this host left for this store, None if nothing. ``commits``: as they are now."""
    data = repo.catalogue.note(NOTE)
    state = json.loads(data) if data else {}
    if state.get("url") != repo.storage.url:
        return None
    ended = frozenset(TxId(txid) for txid in state["ended"])
    if not all(_has_ended(commits, txid) for txid in ended):
        return None
    sizes = {
        _key(TxId(uploader), kind, digest): size
        for uploader, rows in state["candidates"].items()
        for kind, digest, size in rows
    }
    return Paused(Candidates(sizes, ended), frozenset(TxId(txid) for txid in state["waits"]))


def _has_ended(commits: CommitList, txid: TxId) -> bool:
    commit = commits.commits.get(txid)
    return commit is not None and not commit.live


def _key(uploader: TxId, kind: str, digest: str) -> str:
    return blob_key(uploader, BlobHash(digest)) if kind == BLOB else manifest_key(uploader, ManifestId(digest))
