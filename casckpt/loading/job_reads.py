"""Shares the reads of a job's hosts: a blob that several hosts need is read from a remote store only once.

Each rank tells rank 0 which blobs it needs (`Needs`). Rank 0 decides which rank reads which blob (`deals`). That rank
reads the blob in pieces and passes them on to one rank of each other host, over a separate gloo group. All of these
ranks write the pieces to the files that the ranks of a host share (`casckpt.repository.host_reads`).

Nothing depends on what other hosts send. If a piece does not arrive, the ranks of the host read it from the store.
Each rank verifies the cells that it reads. The share of a dead host is not dealt out again, because the load fails
anyway: that host cannot finish it.

The group is separate because a timeout closes all connections of a gloo group, and the exchanges must still name the
rank that failed. All ranks of a host take part, because one process cannot read as fast as all of them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from threading import Event, Thread
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from casckpt.base.groups import grouped
from casckpt.base.parallel import in_parallel
from casckpt.errors import CasckptError
from casckpt.format.manifest import Manifest
from casckpt.format.sections.columns import Ints
from casckpt.loading.blob_readers import BlobReader
from casckpt.ranks.ranks import GroupRanks, Ranks, everyone
from casckpt.repository.host_reads import PATIENCE, HostReads
from casckpt.repository.repository import Repository
from casckpt.storage.base import BLOCK, ShortObject

WAIT_SHARE = 0.6  # of the timeout: after `Ranks.pass_on` gives up, and before rank 0 gives up on a rank that waits
MEETING = PATIENCE / 2  # seconds that a rank waits until all others connect
HOSTS = 64  # the most hosts that pass blobs to each other; more hosts form several groups
_EIGHTHS = 8
_SMALL = 1 << 20  # bytes; if a rank needs any part of a smaller blob, it needs the blob
_PIECE, _LEAST_PIECE, _RECEIVED = 4 << 20, 1 << 20, 64 << 20  # bytes; the last is what a rank receives at once
_PIECES = 128  # if a rank reads fewer, they are smaller, so that passing on begins early
_WAITING = 2  # pieces in memory for each thread that reads
_REQUESTS = 16

Up = TypeVar("Up")
Down = TypeVar("Down")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needs:
    """The blobs that a rank needs. ``room``: how many bytes may arrive at its host.

    ``parts``: for each blob, a byte with a bit for each eighth of which the rank needs at least half. ``held``: for
    each blob, whether the host's cache has it. Both are compressed. ``manifest``: the digest of the
    head of the manifest that numbers the blobs. A rank that cannot read the manifest of rank 0 uses that of a rewrite.
    """

    host: str
    manifest: str
    room: int
    parts: bytes
    held: bytes

    @classmethod
    def of(
        cls, repo: Repository, manifest: Manifest, ranges: Sequence[tuple[int, int, int]], reads: HostReads
    ) -> Needs | None:
        """Return what a rank needs that reads ``ranges`` (blob, offset, bytes), or None if it reads alone."""
        room = 0 if repo.fills_cache else reads.room(sum(nbytes for _, _, nbytes in ranges))
        if not room:
            return None
        sizes = np.array(manifest.blob_sizes, np.int64)
        rows = np.array(ranges, np.int64).reshape(-1, 3)
        blob, start, end = rows[:, 0], rows[:, 1], rows[:, 1] + rows[:, 2]
        parts = np.zeros((len(sizes), _EIGHTHS), bool)
        for part in range(_EIGHTHS):
            lo, hi = sizes * part // _EIGHTHS, sizes * (part + 1) // _EIGHTHS
            inside = np.maximum(np.minimum(end, hi[blob]) - np.maximum(start, lo[blob]), 0)
            parts[:, part] = 2 * np.bincount(blob, inside, len(sizes)) >= hi - lo
        wanted = np.bincount(blob, minlength=len(sizes)) > 0
        parts[sizes < _SMALL] = wanted[sizes < _SMALL, None]
        held = np.zeros(len(sizes), bool)
        if repo.blob_cache.is_there:
            held[wanted] = [repo.blob_cache.touch(manifest.blob(number)) for number in np.flatnonzero(wanted).tolist()]
        columns = (zlib.compress(np.packbits(one, axis=1).tobytes()) for one in (parts, held[:, None]))
        return cls(repo.host, manifest.head.digest, room, *columns)


class Pass(NamedTuple):
    """A blob that the rank ``sender`` reads and passes on to the ranks ``receivers``, each on a different host."""

    blob: int
    sender: int
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Deal:
    """What is passed on from and to a host with these ``ranks``. ``piece``: bytes."""

    ranks: Sequence[int]
    piece: int
    passes: Sequence[Pass] = ()

    @property
    def bringers(self) -> dict[int, tuple[int, int]]:
        """For each blob, the rank of this host that brings it, and the rank that reads it from the store."""
        here = frozenset(self.ranks)
        return {
            one.blob: (next(rank for rank in (one.sender, *one.receivers) if rank in here), one.sender)
            for one in self.passes
        }


@dataclass
class _Host:
    ranks: Sequence[int]
    room: int
    needs: Ints  # whether it needs each blob
    held: Ints
    load: int = 0


def deals(needs: Sequence[Needs | None], manifest: str, sizes: Sequence[int]) -> list[Deal | None]:
    """Decide, on rank 0, which host reads each blob that several hosts need. Return None for all if there is none.

    A host that has the blob passes it on. Otherwise, the reads are balanced by bytes. Ranks with a different
    ``manifest`` than rank 0 read alone. This function is pure.
    """
    known = {rank: need for rank, need in enumerate(needs) if need and need.manifest == manifest}
    ranks_of = grouped(known, lambda rank: known[rank].host)
    hosts = [_host(ranks, [known[rank] for rank in ranks]) for ranks in ranks_of.values()]
    groups = (hosts[at : at + HOSTS] for at in range(0, len(hosts), HOSTS))
    passes = [dealt for some in groups if len(some) > 1 for dealt in _deal(some, sizes)]
    if not passes:
        return [None] * len(needs)
    each = sum(sizes[dealt.blob] for dealt in passes) // len(needs)
    piece = min(_PIECE, max(_LEAST_PIECE, min(_RECEIVED // len(hosts), each // _PIECES)))
    piece -= piece % BLOCK  # a piece is whole blocks, because `HostReads.put` marks whole blocks as written
    answers: list[Deal | None] = [Deal((), piece)] * len(needs)
    for host in hosts:
        here = frozenset(host.ranks)
        answer = Deal(host.ranks, piece, [p for p in passes if p.sender in here or not here.isdisjoint(p.receivers)])
        for rank in host.ranks:
            answers[rank] = answer
    return answers


def _host(ranks: Sequence[int], needs: Sequence[Needs]) -> _Host:
    parts, held = (
        np.bitwise_or.reduce([np.frombuffer(zlib.decompress(data), np.uint8) for data in columns])
        for columns in ([one.parts for one in needs], [one.held for one in needs])
    )
    return _Host(ranks, min(one.room for one in needs), parts == 0xFF, held != 0)


def _deal(hosts: Sequence[_Host], sizes: Sequence[int]) -> Iterator[Pass]:
    same: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal tuples are sent once
    count = 0
    for blob in np.flatnonzero(np.sum([host.needs for host in hosts], axis=0) > 1).tolist():
        size = sizes[blob]
        holders = [host for host in hosts if host.held[blob]]
        takers = [host for host in hosts if host.needs[blob] and not host.held[blob] and host.room >= size]
        if not takers:
            continue
        sender = min(holders or takers, key=lambda host: host.load)
        turn = count // len(hosts)  # the ranks of each host take turns, with the same ranks of other hosts
        receivers = tuple(host.ranks[turn % len(host.ranks)] for host in takers if host is not sender)
        if receivers:
            count, sender.load = count + 1, sender.load + size
            for host in takers:
                host.room -= size
            yield Pass(blob, sender.ranks[turn % len(sender.ranks)], same.setdefault(receivers, receivers))


class _Piece(NamedTuple):
    blob: int
    slot: BlobReader
    receivers: tuple[int, ...]
    start: int
    stop: int


@dataclass
class JobReads:
    """The blobs that this rank's host passes on and receives. ``ranks``: a group for these bytes only.

    ``has_failed``: whether a connection to another host has failed. The group can then no longer be used.
    """

    deal: Deal
    ranks: GroupRanks
    alive: Callable[[], None]
    has_failed: bool = False
    _stop: Event = field(default_factory=Event)

    @contextmanager
    def passing(self, repo: Repository, manifest: Manifest, reads: HostReads) -> Iterator[None]:
        """Pass blobs on, and receive others, while this rank reads. At the end, wait until all of them have passed."""
        me, passes = self.ranks.rank, self.deal.passes
        leaving = [one for one in passes if one.sender == me]
        arriving = grouped((one for one in passes if me in one.receivers), lambda one: one.sender)
        reads.expect(self.deal.bringers, len(self.deal.ranks), self.alive)
        calls: list[Callable[[], None]] = [partial(self._send, repo, manifest, reads, leaving)] if leaving else []
        calls += [partial(self._receive, manifest, reads, sender, some) for sender, some in arriving.items()]
        threads = [Thread(target=self._attempt, args=(call,), name="casckpt-pass", daemon=True) for call in calls]
        with reads.bringing() if calls else nullcontext():
            for thread in threads:
                thread.start()
            try:
                yield
            except BaseException:
                self._stop.set()
                raise
            finally:
                for thread in threads:
                    thread.join()

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the ranks of this host read the rest from the store
            self._stop.set()
            if not self.has_failed:  # one of several threads logs this
                self.has_failed = True
                log.warning("this host reads from the store what has not arrived from other hosts (%s)", str(error))
            self.ranks.drop()

    def _send(self, repo: Repository, manifest: Manifest, reads: HostReads, passes: Sequence[Pass]) -> None:
        """Read blobs and pass them on. If a read fails, send each receiver a piece that says so, and then stop."""
        pieces: list[_Piece] = []
        for one in passes:
            slot = BlobReader(repo, manifest.blob(one.blob), shared=True, keep=False)
            ranges = list(self._ranges(slot.ref.size))
            slot.left = len(ranges)
            pieces += [_Piece(one.blob, slot, one.receivers, *part) for part in ranges]

        def read(piece: _Piece) -> memoryview:
            data = np.empty(piece.stop - piece.start + 1, np.uint8).data
            is_right = not self._stop.is_set() and self._has_read(piece, data[:-1], reads)
            data[-1] = is_right  # the receivers check it
            if not is_right:
                reads.release(piece.blob, piece.start, piece.stop - piece.start)
            piece.slot.done()
            return data

        stopped: set[int] = set()
        threads = min(_REQUESTS, repo.storage.traits.parallel)
        try:
            with closing(in_parallel(threads, read, pieces, name="pass", waiting=_WAITING)) as found:
                for piece, data in zip(pieces, found, strict=True):
                    receivers = [rank for rank in piece.receivers if rank not in stopped]
                    self._exchange([(_tensor(data), rank) for rank in receivers], [])
                    if not data[-1]:
                        stopped.update(receivers)
        finally:
            _release(reads, ((piece.blob, piece.slot.ref.size) for piece in pieces))
            for piece in pieces:
                piece.slot.close()

    def _has_read(self, piece: _Piece, data: memoryview, reads: HostReads) -> bool:
        """Read a piece, and let the ranks of this host read it. Return False if the store fails."""
        try:
            reader = piece.slot.reader()
            reader.read_into(piece.start, [data])
        except (CasckptError, ShortObject):  # the ranks that need these bytes raise it
            self._stop.set()
            return False
        if piece.slot.is_cached:  # all ranks of this host find it there
            reads.release(piece.blob, piece.start, data.nbytes)
        else:
            reads.put(piece.blob, piece.slot.ref.size, piece.start, data)
        return True

    def _receive(self, manifest: Manifest, reads: HostReads, sender: int, passes: Sequence[Pass]) -> None:
        """Receive blobs until all have arrived, or the sender stops."""
        buffer = memoryview(bytearray(self.deal.piece + 1))
        sizes = {one.blob: manifest.blob(one.blob).size for one in passes}
        try:
            for blob, size in sizes.items():
                for start, stop in self._ranges(size):
                    piece = buffer[: stop - start + 1]
                    self._exchange([], [(_tensor(piece), sender)])
                    if not piece[-1]:
                        return
                    reads.put(blob, size, start, piece[:-1])
        finally:
            _release(reads, sizes.items())

    def _exchange(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> None:
        self.ranks.pass_on(sends, receives, PATIENCE / 2)  # before those who wait give up
        self.alive()

    def _ranges(self, size: int) -> Iterator[tuple[int, int]]:
        piece = self.deal.piece
        return ((start, min(start + piece, size)) for start in range(0, size, piece))


def passing(
    job: JobReads | None, repo: Repository, manifest: Manifest, reads: HostReads | None
) -> AbstractContextManager[None]:
    """Return the context of `JobReads.passing`, or an empty context if this rank does not share its reads."""
    return nullcontext() if job is None or reads is None else job.passing(repo, manifest, reads)


def run_together(
    ranks: Ranks, deal: Deal | None, run: Callable[[JobReads | None], Up], finish: Callable[[Sequence[Up]], Down]
) -> Down:
    """Run the reads on every rank, and return the result of ``finish`` on rank 0.

    After any failure of the connections between hosts, drop them on all ranks.
    """
    job = JobReads(deal, ranks.beside(), ranks.alive) if deal is not None and isinstance(ranks, GroupRanks) else None
    has_failed = True

    def call() -> tuple[Up, bool]:
        return run(job), job is not None and job.has_failed

    @wraps(finish)  # ranks compare its name to check that they are at the same point
    def decide(done: Sequence[tuple[Up, bool]]) -> Sequence[tuple[Down, bool]]:
        return everyone((finish([up for up, _ in done]), any(failed for _, failed in done)), ranks.size)

    try:
        answer, has_failed = ranks.exchange(call, decide)
    finally:
        if job is not None and has_failed:
            job.ranks.drop()
    return answer


def _release(reads: HostReads, blobs: Iterable[tuple[int, int]]) -> None:
    """Let the ranks of this host read the rest of blobs (number, size) from the store."""
    for blob, size in blobs:
        reads.release(blob, 0, size)


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
