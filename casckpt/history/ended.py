"""Lists of logs that are over, in commits/ended/: gc creates such a list, and then deletes the logs.

A line wins over every record of its log. Such records exist while gc deletes the log, and afterwards if a process that
slept for a month creates one. A reader reads the log first and the lists afterwards, because a list exists before the
first record of its logs is deleted. tests/model/protocol/folding.py explores the interleavings.

Readers of a single log spare the request if the transaction is young. gc does not delete the log of such a transaction,
but a list may name it, if an earlier version has erased its run. Its later records then say that it was purged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from casckpt.base.units import time_of
from casckpt.errors import CasckptError, Conflict, Refused
from casckpt.format.keys import ended_key, parse_numbered, parse_txid
from casckpt.format.names import TxId
from casckpt.format.records import Ended
from casckpt.history.folding import Commit, Over
from casckpt.repository.reading import read_records
from casckpt.repository.repository import Repository
from casckpt.storage.base import ListedObject

PREFIX = "commits/ended/"
A_DAY = 24 * 3600 * 10**6  # microseconds
MIN_AGE = 30 * A_DAY
"""How long ago a log must have ended, and its transaction begun, before gc replaces it with a line."""
TRUSTED = 20 * A_DAY
"""Readers look for the lines of transactions of this age. Their clocks may be this much less than `MIN_AGE` behind."""


class Lists(NamedTuple):
    """The lines of lists, by transaction, and the error of each list that cannot be read, by "ended/<N>"."""

    over: Mapping[TxId, Over]
    damaged: Mapping[TxId, CasckptError]


def read_lists(repo: Repository, listed: Iterable[ListedObject], *, anew: bool = False) -> Lists:
    """Read those of the ``listed`` objects that are lists. Each host reads each list once. Raises `StorageError`."""
    entries = [entry for entry in listed if parse_numbered(entry.key) is not None]
    over, damaged = dict[TxId, Over](), dict[TxId, CasckptError]()
    for key, record in read_records(repo, PREFIX, entries, lambda _: Ended, anew=anew).items() if entries else ():
        name = TxId(key.partition("/")[2])
        if isinstance(record, CasckptError):
            damaged[name] = record
        elif record.store != repo.marker.store_id:
            damaged[name] = Refused(f"{key} came from another store, whose files were put into this one", key=key)
        else:
            over |= {txid: Over(was_whole, places) for txid, was_whole, places in record.ended}
    return Lists(over, damaged)


def is_list(name: TxId) -> bool:
    """Return whether a name in `CommitList.damaged` is that of a list, not that of a transaction."""
    return name.startswith("ended/")


def find(repo: Repository, txid: TxId, *, young: bool = False) -> Over | None:
    """Return the line of a transaction, or None if there is none. Call this after reading its log or writing to it.

    Makes one LIST, but no request for a young transaction. ``young``: also look for the line of a young transaction,
    whose run an earlier version may have erased. Raises `StorageError`, and `Damaged` or `Refused` if a list cannot be
    read.
    """
    if not young and not is_older(repo, txid, TRUSTED):
        return None
    lists = read_lists(repo, repo.storage.list(PREFIX))
    if txid not in lists.over:
        for error in lists.damaged.values():
            raise error
    return lists.over.get(txid)


def is_older(repo: Repository, txid: TxId, age: int) -> bool:
    """Return whether a transaction began more than ``age`` microseconds ago, according to its name."""
    return parse_txid(txid).time < time_of(repo.clock() - age)


def write_list(repo: Repository, lines: Mapping[TxId, Over]) -> None:
    """Create a list. If two gcs list the same logs, this does no harm. Raises `StorageError`."""
    ended = [(txid, over.was_whole, list(over.places)) for txid, over in lines.items()]
    record = Ended(time=repo.clock(), store=repo.marker.store_id, ended=ended)
    numbers = [parse_numbered(entry.key) for entry in repo.storage.list(PREFIX)]
    number = 0
    while True:
        if number not in numbers:
            with suppress(Conflict):
                return repo.put_record(ended_key(number), record)
        number += 1


def line_of(commit: Commit) -> Over:
    """Return the line of a log."""
    every = (*commit.existing, *commit.ended)
    was_whole = any(places.record.dropped is None for places in every)
    return Over(was_whole, [places.txid for places in every if places.txid != commit.txid])
