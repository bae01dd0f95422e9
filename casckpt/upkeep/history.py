"""The growth of a store: how many bytes each checkpoint added, why, and which layers changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from casckpt.base.groups import grouped
from casckpt.base.units import format_size
from casckpt.contents import blobs, manifests
from casckpt.errors import CasckptError
from casckpt.format.manifest import Manifest
from casckpt.history.commits import Commit, list_commits
from casckpt.plan.difference import difference
from casckpt.repository.repository import Repository
from casckpt.upkeep.blob_use import BlobUse

MOST: Final = 40
"""The maximum number of groups that a report shows."""


def layer_of(key: str, width: int = 1) -> str:
    """Return a key's group: the key up to its first number ("model.layers.3"), or without its last element.

    ``width``: the number of layers in one group ("model.layers.0-3").
    """
    elements = key.split(".")
    for place, element in enumerate(elements):
        if element.isdecimal() and place:
            return ".".join((*elements[:place], _span(int(element), width)))
    return ".".join(elements[:-1] or elements)


def _span(number: int, width: int) -> str:
    first = number - number % width
    return f"{first}-{first + width - 1}" if width > 1 else str(number)


def group(keys: Iterable[str], most: int = MOST) -> dict[str, str]:
    """Return the group of each key, in key order, with at most ``most`` groups in total.

    If there are more layers, neighboring layers share a group. If there are still too many groups, keys with the same
    first two elements share a group, and if necessary, keys with the same first element. As a last resort, the last
    groups are combined into "...".
    """
    keys, groups = list(keys), dict[str, str]()
    for width in (1, 2, 4, 8, 16, 32, 64):
        groups = {key: layer_of(key, width) for key in keys}
        if len(set(groups.values())) <= most:
            return groups
    for elements in (2, 1):
        groups = {key: ".".join(key.split(".")[:elements]) for key in keys}
        if len(set(groups.values())) <= most:
            return groups
    kept = list(dict.fromkeys(groups.values()))[: most - 1]
    return {key: name if name in kept else "..." for key, name in groups.items()}


def summed(nbytes: Mapping[str, int], groups: Mapping[str, str]) -> dict[str, int]:
    """Sum the bytes of the keys by group. Skip keys that have no group."""
    total: dict[str, int] = {}
    for key, size in nbytes.items():
        if key in groups:
            total[groups[key]] = total.get(groups[key], 0) + size
    return total


_NAMED = 3  # state branches named in a reason


@dataclass(frozen=True, slots=True)
class Added:
    """The growth at one visible checkpoint.

    ``bytes_added``: size of the blobs that no earlier live checkpoint names. ``why``: the cause, in words.
    ``changed``: how many bytes changed since the previous checkpoint of the run, by key. It is None for the first
    checkpoint of a run, and for checkpoints that were not compared or cannot be read.
    """

    commit: Commit
    bytes_added: int
    why: str
    changed: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class History:
    """The growth of a store. ``added``: all visible checkpoints, oldest first. ``damaged``: marked blobs.

    ``damaged_records``: keys of records that cannot be read.
    """

    added: Sequence[Added]
    damaged: Sequence[str]
    damaged_records: Sequence[str]


@dataclass(frozen=True, slots=True)
class Heat:
    """The share of each layer's bytes that changed at each step of a run.

    ``shares[row][column]``: a share from 0 to 1, or None if unknown. The rows are ``layers``, and the columns are
    ``steps``.
    """

    layers: Sequence[str]
    steps: Sequence[int]
    shares: Sequence[Sequence[float | None]]


def history(repo: Repository, runs: Collection[str], looked_at: int = 48) -> History:
    """Return how many bytes each visible checkpoint added.

    Compares the newest ``looked_at`` checkpoints of each run in ``runs``. Skips checkpoints that cannot be read. Raises
    `StorageError`.
    """
    commits = list_commits(repo)
    before: dict[str, Manifest] = {}
    wanted = _newest([commit for commit in commits.current() if commit.run in runs], looked_at)
    added, fresh = [], BlobUse(repo, commits.placed()).bytes_new()
    for commit in commits.visible():
        changed = _changed(repo, commit, before) if commit.txid in wanted else None
        added.append(Added(commit, fresh.get(commit.places.txid, 0), _why(commit, changed), changed))
    damaged = sorted(blob for _, blob in blobs.damaged_marks(repo))
    return History(added, damaged, list(commits.damaged))


def _newest(current: Sequence[Commit], most: int) -> set[str]:
    """Return each run's newest ``most`` transactions, plus the transaction before them."""
    by_run = grouped(current, lambda commit: commit.run)
    return {commit.txid for of_run in by_run.values() for commit in of_run[-most - 1 :]}


def _changed(repo: Repository, commit: Commit, before: dict[str, Manifest]) -> dict[str, int] | None:
    try:
        manifest = manifests.get_with_extents(repo, commit)
        older = before.get(commit.run)
        changes = None if older is None else difference(older, manifest)
    except CasckptError:
        return None
    before[commit.run] = manifest
    if changes is None:
        return None
    sizes = {key: entry.nbytes for key, entry in manifest.tensors.items()}
    return {change.key: change.bytes for change in changes.changes} | {key: sizes[key] for key in changes.added}


def _why(commit: Commit, changed: Mapping[str, int] | None) -> str:
    record = commit.committed
    if record.dropped is not None:
        return f"thinned: {record.dropped.entries} tensors were dropped by {record.dropped.rule}"
    coded = f"; {format_size(record.bytes_coded)} are stored as {format_size(record.bytes_frames)} of frames"
    return _cause(record.bytes_reused, changed) + (coded if record.bytes_coded else "")


def _cause(reused: int, changed: Mapping[str, int] | None) -> str:
    if changed is None:
        return f"{format_size(reused)} of it was already stored" if reused else "all of it was new"
    if not changed:
        return "nothing changed"
    branches: dict[str, int] = {}
    for key, nbytes in changed.items():
        branch = key.partition(".")[0]
        branches[branch] = branches.get(branch, 0) + nbytes
    largest = sorted(branches.items(), key=lambda branch: -branch[1])
    named = ", ".join(f"{branch} {format_size(nbytes)}" for branch, nbytes in largest[:_NAMED])
    return f"changed: {named}" + (f", and {len(largest) - _NAMED} more" if len(largest) > _NAMED else "")


def heat(repo: Repository, added: Sequence[Added]) -> Heat | None:
    """Return the heat map of a run's compared checkpoints, or None if no checkpoint was compared."""
    columns = [column for column in added if column.changed is not None]
    if not columns:
        return None
    try:
        tensors = manifests.get(repo, columns[-1].commit).tensors
    except CasckptError:
        return None
    groups = group(tensors)
    sizes = summed({key: entry.nbytes for key, entry in tensors.items()}, groups)
    layers = [name for name, nbytes in sizes.items() if nbytes]
    rows = [list(_row(name, sizes[name], columns, groups)) for name in layers]
    return Heat(layers, [column.commit.step for column in columns], rows)


def _row(name: str, nbytes: int, columns: Sequence[Added], groups: Mapping[str, str]) -> Iterator[float | None]:
    for column in columns:
        changed = summed(column.changed or {}, groups).get(name, 0)
        yield min(changed / nbytes, 1.0)
