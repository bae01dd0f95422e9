"""How a store grew: what each checkpoint added and why, and which layers changed when; from manifests alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from casckpt.base.groups import grouped
from casckpt.base.sizes import format_size
from casckpt.contents import blobs, manifests
from casckpt.errors import CasckptError
from casckpt.format.manifest import Manifest
from casckpt.history.commits import Commit, list_commits
from casckpt.plan.difference import difference
from casckpt.plan.layers import group, summed
from casckpt.repository.repository import Repository
from casckpt.upkeep.blob_use import BlobUse

_NAMED = 3  # branches of a state that a reason names


@dataclass(frozen=True, slots=True)
class Added:
    """One visible checkpoint. ``bytes_added``: of blobs that no earlier live one names; so much it takes today.

    ``why``: in words. ``changed``: bytes that changed since the one before it of its run, by key; None for the first,
    for those that were not looked at, and for those that cannot be read.
    """

    commit: Commit
    bytes_added: int
    why: str
    changed: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class History:
    """``added``: all visible checkpoints, the oldest first. ``damaged``: blobs that are marked as damaged.

    ``damaged_records``: keys of records that cannot be read.
    """

    added: Sequence[Added]
    damaged: Sequence[str]
    damaged_records: Sequence[str]


@dataclass(frozen=True, slots=True)
class Heat:
    """Of one run: the share of each layer's bytes that changed, 0 to 1. ``shares[row][column]``, None where unknown.

    Rows are ``layers``, columns ``steps``.
    """

    layers: Sequence[str]
    steps: Sequence[int]
    shares: Sequence[Sequence[float | None]]


def history(repo: Repository, runs: Collection[str], looked_at: int = 48) -> History:
    """Tell. Of each of ``runs`` the manifests of the newest ``looked_at`` checkpoints are compared.

    What cannot be read keeps nothing else from being told. Raises `StorageError`.
    """
    commits = list_commits(repo)
    before: dict[str, tuple[Commit, Manifest]] = {}
    wanted = _newest([commit for commit in commits.current() if commit.run in runs], looked_at)
    added, fresh = [], BlobUse(repo, commits.live()).bytes_new()
    for commit in commits.visible():
        changed = _changed(repo, commit, before) if commit.txid in wanted else None
        added.append(Added(commit, fresh.get(commit.txid, 0), _why(commit, changed), changed))
    damaged = sorted(blob for _, blob in blobs.damaged_marks(repo))
    return History(added, damaged, list(commits.damaged))


def _newest(current: Sequence[Commit], most: int) -> set[str]:
    """Give those to look into, and the one before them."""
    by_run = grouped(current, lambda commit: commit.run)
    return {commit.txid for found in by_run.values() for commit in found[-most - 1 :]}


def _changed(repo: Repository, commit: Commit, before: dict[str, tuple[Commit, Manifest]]) -> dict[str, int] | None:
    try:
        manifest = manifests.get(repo, commit)
        manifest.ready(objects=())
        older = before.get(commit.run)
        found = None if older is None else difference(older[1], manifest)
    except CasckptError:
        return None
    before[commit.run] = (commit, manifest)
    if found is None:
        return None
    sizes = {key: entry.nbytes for key, entry in manifest.tensors.items()}
    return {one.key: one.bytes for one in found.changes} | {key: sizes[key] for key in found.added}


def _why(commit: Commit, changed: Mapping[str, int] | None) -> str:
    record = commit.committed
    if record.dropped is not None:
        return f"thinned: {record.dropped.entries} tensors are left out, by {record.dropped.rule}"
    coded = f"; {format_size(record.bytes_coded)} of it are stored as {format_size(record.bytes_frames)} of frames"
    return _cause(record.bytes_reused, changed) + (coded if record.bytes_coded else "")


def _cause(reused: int, changed: Mapping[str, int] | None) -> str:
    if changed is None:
        return f"{format_size(reused)} of it were there already" if reused else "all of it was new"
    if not any(changed.values()):
        return "nothing changed"
    branches: dict[str, int] = {}
    for key, nbytes in changed.items():
        branch = key.partition(".")[0]
        branches[branch] = branches.get(branch, 0) + nbytes
    largest = sorted(branches.items(), key=lambda one: -one[1])
    said = ", ".join(f"{branch} {format_size(nbytes)}" for branch, nbytes in largest[:_NAMED])
    return f"changed: {said}" + (f", and {len(largest) - _NAMED} more" if len(largest) > _NAMED else "")


def heat(repo: Repository, added: Sequence[Added]) -> Heat | None:
    """Give the heat map of a run, of its checkpoints that were compared; None where there is nothing to show."""
    columns = [one for one in added if one.changed is not None]
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
    return Heat(layers, [one.commit.step for one in columns], rows)


def _row(name: str, nbytes: int, columns: Sequence[Added], groups: Mapping[str, str]) -> Iterator[float | None]:
    for one in columns:
        changed = summed(one.changed or {}, groups).get(name, 0)
        yield min(changed / nbytes, 1.0)
