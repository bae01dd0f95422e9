"""The wait of a gc for the transactions that were open when it looked (steps 4 and 5 of the protocol).

It ends when each of them is closed: committed, revoked by itself, or revoked here, because its process is provably dead
or because no new sign of life was seen for long enough. Signs are counted, and the time between two looks of this host
is measured; clocks of different hosts are never compared. Revoking is always safe: at worst a live save fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from casckpt.format import notes
from casckpt.format.names import TxId
from casckpt.history.commits import list_names
from casckpt.history.transactions import OpenTransaction, has_died, open_transactions, revoke
from casckpt.repository.repository import Repository

Sleep: TypeAlias = Callable[[float], None]

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two looks
SEEN_NOTE = "gc-signs-of-life"


@dataclass
class Limits:
    """How long a gc waits in all, and when it revokes; seconds."""

    wait: float
    revoke_after: float
    sleep: Sleep
    slept: float = 0.0
    pause: float = FIRST_PAUSE

    def is_over(self) -> bool:
        """Tell whether it has waited long enough."""
        return self.slept >= self.wait

    def rest(self) -> None:
        """Sleep until the next look. Counts what it sleeps, so that no clock makes it wait for ever."""
        seconds = min(self.pause, self.wait - self.slept)
        self.sleep(seconds)
        self.slept += seconds
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


@dataclass
class Waited:
    """``still``: transactions that are open yet. ``revoked``: those that this gc gave up on."""

    still: list[OpenTransaction] = field(default_factory=list)
    revoked: list[TxId] = field(default_factory=list)


def wait_until_closed(
    repo: Repository, waits: Iterable[TxId], patience: Limits, tell: Callable[[Sequence[OpenTransaction]], None]
) -> Waited:
    """Wait for ``waits``, in vain if ``still`` is not empty. ``tell`` is called with what is waited for, at each look.

    Raises `StorageError`.
    """
    wanted, result = set(waits), Waited()
    while True:
        closed = list_names(repo)
        wanted -= closed
        looked = {one.txid: one for one in open_transactions(repo, closed)}
        for txid in wanted - looked.keys():  # its file is gone, which does not close it
            looked[txid] = OpenTransaction(txid, None, 0)
        silent = _silence(repo, looked)
        result.still = []
        for txid in sorted(wanted):
            why = _why_dead(repo, looked[txid], silent[txid], patience.revoke_after)
            if not why:
                result.still.append(looked[txid])
            elif revoke(repo, txid, why):
                result.revoked.append(txid)
        if not result.still or patience.is_over():
            return result
        tell(result.still)
        patience.rest()


def _why_dead(repo: Repository, one: OpenTransaction, silent: float, revoke_after: float) -> str:
    if one.began is not None and has_died(repo, one):
        return f"process {one.began.process.pid} on {one.began.process.host} is dead"
    if silent >= revoke_after:
        return f"no sign of life for {silent:.0f} seconds"
    return ""


def _silence(repo: Repository, looked: dict[TxId, OpenTransaction]) -> dict[TxId, float]:
    """Return seconds since this host saw a new sign of life of each; remembered from one gc to the next."""
    before, now = _remembered(repo), repo.clock()
    seen = {}
    for txid, one in looked.items():
        signs, since = before.get(txid, (one.signs, now))
        seen[txid] = (signs, since) if signs == one.signs and since <= now else (one.signs, now)
    if seen != before:
        repo.catalogue.set_note(SEEN_NOTE, notes.encode(seen) if seen else None)
    return {txid: (now - since) / 1e6 for txid, (_, since) in seen.items()}


def _remembered(repo: Repository) -> dict[TxId, tuple[int, int]]:
    return notes.decode(repo.catalogue.note(SEEN_NOTE), notes.SIGNS_OF_LIFE) or {}
