"""Detects lost records: manifests under objects/ without a record in commits/ or transactions/.

A save puts its manifest while its transaction is open. casckpt removes the transaction's file only after a record is
in commits/, and never removes that record. Therefore, if a manifest has neither, records are missing: ``commits/`` was
moved or is not mounted, or only a part of the store was copied. It is then unknown which blobs the checkpoint needs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from casckpt.errors import Damaged
from casckpt.format.keys import commit_key, parse_log, parse_object
from casckpt.format.names import TxId
from casckpt.history.commits import list_names
from casckpt.history.transactions import PREFIX as TRANSACTIONS
from casckpt.repository.repository import Repository

ADVICE = (
    "Restore commits/ from a copy of the store, or mount it. If the store was copied while these saves ran, give "
    "up each of them: `casckpt transactions STORE --give-up TXID`"
)
_NAMED_AT_MOST = 3


def lost_records(repo: Repository, keys: Iterable[str], ended: Container[TxId] = ()) -> list[TxId]:
    """Return the transactions that have a manifest among the listed ``keys`` but do not have a record.

    ``ended``: transactions that have a record. Lists transactions/ and commits/ only if a different transaction has a
    manifest. Raises `StorageError`.
    """
    names = (parse_object(key) for key in keys)
    doubtful = {name.uploader for name in names if name is not None and name.kind == "manifest"}
    doubtful = {txid for txid in doubtful if txid not in ended}
    if not doubtful:
        return []
    listed = (parse_log(entry.key) for entry in repo.storage.list(TRANSACTIONS, known=parse_log))
    saving = {name[0] for name in listed if name is not None}
    return sorted(doubtful - saving - list_names(repo))  # a save that ends in between is in one listing


def check_recorded(repo: Repository, keys: Iterable[str], ended: Container[TxId]) -> None:
    """Raise `Damaged` if gc would delete a manifest whose record is lost.

    Accepts the arguments of `lost_records`.
    """
    lost = lost_records(repo, keys, ended)
    if lost:
        shown = ", ".join(commit_key(txid) for txid in lost[:_NAMED_AT_MOST])
        more = f" and {len(lost) - _NAMED_AT_MOST} more" if lost[_NAMED_AT_MOST:] else ""
        raise Damaged(
            f"gc deletes nothing, because records are missing from {repo.storage.url}: {shown}{more}. "
            f"Manifests under objects/ have no record in commits/ or transactions/. {ADVICE}",
            key=commit_key(lost[0]),
        )
