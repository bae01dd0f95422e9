"""What the person who runs a store should know: the last gc, open saves, damage, the mirror, bytes and tags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from casckpt.base.names import run_hash
from casckpt.base.units import time_of
from casckpt.errors import Damaged, Refused
from casckpt.format.keys import is_lease, parse_object
from casckpt.format.names import TxId
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.history.tags import list_tags, named_by
from casckpt.repository.repository import Repository
from casckpt.upkeep.copies.mirrored import ask
from casckpt.upkeep.gc.gc import RECORDS, last_gc
from casckpt.upkeep.repair.verify import DamagedRecord, known_damage
from casckpt.upkeep.saves import SaveInProgress, saves_in_progress


class LastGc(NamedTuple):
    """The last gc that finished, who ran it, and what it left.

    ``waiting``: checkpoints that wait to be purged. ``refused``: files that its user may not change. ``opened``: saves
    in progress for which it waited.
    """

    at: datetime
    who: str
    waiting: int
    refused: int
    opened: int


class TagAge(NamedTuple):
    """A tag, when it was set, and who set it. ``checkpoint``: None if the store lacks it."""

    name: str
    checkpoint: Commit | None
    set_at: datetime
    holder: str


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The state of a store at the time ``at``. ``gc``: None if no gc has finished.

    ``damaged``: all that `casckpt.upkeep.repair.verify.known_damage` finds. ``mirror``: the URL of the mirror, or None.
    ``mirror_problem``: why it cannot be asked, or "". ``unmirrored``: the checkpoints that are not safe there.
    ``unmirrored_since``: when the oldest of them was committed.

    ``bytes_on_disk``: all objects and records, as the disk allocates them, or their sizes in buckets. ``by_run`` and
    ``by_user`` divide it: a file counts for the save that wrote it, whose record names the user. "" has what no record
    of a save names. ``bytes_free``: None if unknown. ``oldest_tag``: the one that was set first.
    """

    at: datetime
    gc: LastGc | None
    saves: Sequence[SaveInProgress]
    damaged: Sequence[DamagedRecord]
    mirror: str | None
    mirror_problem: str
    unmirrored: Sequence[Commit]
    unmirrored_since: datetime | None
    bytes_on_disk: int
    bytes_free: int | None
    by_run: Mapping[str, int]
    by_user: Mapping[str, int]
    oldest_tag: TagAge | None


def status(repo: Repository) -> StoreStatus:
    """Return the state of the store. Reads no blobs, and writes nothing.

    Raises `NotFound` if there is no store, and `StorageError`.
    """
    listed = list_commits(repo, anew=not repo.storage.traits.remote)  # before the objects, as for a gc
    entries = [entry for folder in ("objects", *RECORDS) for entry in repo.storage.list(f"{folder}/")]
    objects = {entry.key: entry.size for entry in entries if parse_object(entry.key) is not None}
    ran, unread = None, list[DamagedRecord]()
    try:
        ran = last_gc(repo)
    except (Damaged, Refused) as error:
        unread.append(DamagedRecord("ran/", f"{error}. The next gc replaces it"))
    answer = ask(repo, listed.live() if (mirror := repo.settings.mirror) else (), many=True)
    unsafe = [commit.committed.time for commit in answer.unsafe]
    on_disk = {entry.key: entry.size if entry.allocated is None else entry.allocated for entry in entries}
    by_run, by_user = _shares(listed, on_disk)
    tags = (tag for name, tag in list_tags(repo, listed=listed).tags.items() if not is_lease(name))
    tag = min(tags, key=lambda tag: tag.time, default=None)
    return StoreStatus(
        at=time_of(repo.clock()),
        gc=LastGc(time_of(ran.time), ran.who, ran.waiting, ran.refused, ran.opened) if ran is not None else None,
        saves=saves_in_progress(repo),
        damaged=[*unread, *known_damage(repo, listed, objects)],
        mirror=mirror,
        mirror_problem=answer.problem,
        unmirrored=answer.unsafe,
        unmirrored_since=time_of(min(unsafe)) if unsafe else None,
        bytes_on_disk=sum(on_disk.values()),
        bytes_free=repo.storage.bytes_free(),
        by_run=by_run,
        by_user=by_user,
        oldest_tag=TagAge(tag.name, named_by(tag, listed), time_of(tag.time), tag.holder) if tag is not None else None,
    )


def _shares(listed: CommitList, on_disk: Mapping[str, int]) -> Iterable[dict[str, int]]:
    """Divide the bytes among runs, and among users. Return the largest first."""
    made = {one.txid: commit for commit in listed.commits.values() for one in (*commit.existing, *commit.ended)}
    names = {run_hash(commit.run): commit.run for commit in made.values()}
    runs, users = Counter[str](), Counter[str]()
    for key, nbytes in on_disk.items():
        parts = re.split("[/.-]", key)  # those of a txid, or only a run's hash
        runs[next((names[part] for part in parts if part in names), "")] += nbytes
        commit = made.get(TxId("-".join(parts[1:5])))
        users[commit.committed.who.rpartition("@")[0] if commit else ""] += nbytes
    return dict(runs.most_common()), dict(users.most_common())
