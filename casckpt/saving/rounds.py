"""A save by one process of a state that is computed round by round, and that may name cells of other checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from casckpt.base.progress import Progress
from casckpt.contents import blobs
from casckpt.errors import Revoked
from casckpt.format.extents import ExtentTable, renumbered
from casckpt.format.sections.blobs import BlobRef
from casckpt.format.sections.index import Name
from casckpt.format.sections.tables import Extents, Streams
from casckpt.history.commits import Commit, just_committed
from casckpt.plan.reuse import ReusableCells
from casckpt.repository.repository import Repository
from casckpt.saving.leader import GroupMemory, Leader
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared
from casckpt.saving.rank_part import write_part
from casckpt.saving.reuse_offer import reusable_cells, with_commit
from casckpt.saving.save import log_retry
from casckpt.saving.shares import Share, joined


@dataclass(frozen=True)
class Rounds:
    """What a save stores. ``stored``: the dtype and the cells of each stream that the save names without data.

    Their blobs have the numbers in `ReusableCells`. ``rounds``: all other cells. They are computed when iterated.
    """

    stored: Mapping[Name, tuple[str, ExtentTable]]
    rounds: Iterable[Prepared]


@dataclass(frozen=True)
class ComputedState:
    """A state to save. ``source``: the commit whose cells it may name, besides those that any save may reuse.

    ``plan``: returns what to store, given the cells that may be named. It may be called several times. ``notes``: see
    `casckpt.format.manifest.Draft`.
    """

    streams: Streams
    tree: bytes
    source: Commit | None
    plan: Callable[[ReusableCells], Rounds]
    notes: Mapping[str, bytes] = field(default_factory=dict)


def save_in_rounds(repo: Repository, state: ComputedState, options: SaveOptions, progress: Progress) -> Commit:
    """Store and commit a state. If gc revokes the save, this retries it once, without reuse."""
    try:
        return _attempt(repo, state, options, progress, reuse=True)
    except Revoked:
        log_retry(options)
        return _attempt(repo, state, options, progress, reuse=False)


def _attempt(
    repo: Repository, state: ComputedState, options: SaveOptions, progress: Progress, *, reuse: bool
) -> Commit:
    leader = Leader(repo, 1, GroupMemory(), options, reuse=reuse)
    with leader.aborting():
        txid = leader.start()
        offer = leader.reuse_offer(state.streams)
        offer = with_commit(repo, offer, state.source) if reuse and state.source is not None else offer
        known = reusable_cells(repo, options.run, offer)
        planned = blobs.store(repo, txid, partial(state.plan, known), partial(_reused, known), known.exclude)
        part = write_part(repo, txid, offer, planned.rounds, options, known=known, progress=progress)
        part = replace(part, share=joined([part.share, _share(planned, known)]))
        record, _ = leader.conclude([part], state.streams, state.tree, state.notes)
    return just_committed(record)


def _blobs(planned: Rounds) -> set[int]:
    """Return the numbers of the blobs with the cells that are named without data, and with their bases."""
    return {link.blob for _, table in planned.stored.values() for extent in table.extents for link in extent.chain}


def _reused(known: ReusableCells, planned: Rounds) -> Iterator[BlobRef]:
    return (known.blobs[number] for number in sorted(_blobs(planned)))


def _share(planned: Rounds, known: ReusableCells) -> Share:
    numbers = {blob: number for number, blob in enumerate(sorted(_blobs(planned)))}
    tables = {name: (dtype, renumbered(table, numbers)) for name, (dtype, table) in planned.stored.items()}
    return Share(Extents.of(tables), [known.blobs[blob] for blob in numbers])
