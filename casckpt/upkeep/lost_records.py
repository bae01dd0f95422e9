"""Saves whose records are lost: their manifests lie under objects/, and neither commits/ nor transactions/ knows them.

A manifest is put while its transaction is open, and the file of that goes only once there is a record in commits/,
which stays for ever. So a manifest without either shows that records are missing: ``commits/`` was moved away or not
mounted, or the store was copied in part. Nobody knows what its checkpoint needs.
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
    "Put commits/ back, from a copy of the store or by mounting it; or, where the store was copied while they ran, "
    "give these saves up, one by one: `casckpt transactions STORE --give-up TXID`"
)
_NAMED_AT_MOST = 3


def lost_records(repo: Repository, keys: Iterable[str], ended: Container[TxId] = ()) -> list[TxId]:
    """Find the transactions whose manifest is among ``keys``, which were listed before, and whose record is not there.

    ``ended``: those that have one. Lists transactions/ and commits/ where there is any doubt. Raises `StorageError`.
    """
    names = (parse_object(key) for key in keys)
    doubtful = {name.uploader for name in names if name is not None and name.kind == "manifest"}
    doubtful = {txid for txid in doubtful if txid not in ended}
    if not doubtful:
        return []
    listed = (parse_log(entry.key) for entry in repo.storage.list(TRANSACTIONS, known=parse_log))
    saving = {name[0] for name in listed if name is not None}
    return sorted(doubtful - saving - list_names(repo))  # in this order: a save that ends is in one of the two


def check_recorded(repo: Repository, keys: Iterable[str], ended: Container[TxId]) -> None:
    """Raise `Damaged` where a gc would delete a manifest whose record is lost. The arguments are `lost_records`'s."""
    lost = lost_records(repo, keys, ended)
    if lost:
        named = ", ".join(commit_key(txid) for txid in lost[:_NAMED_AT_MOST])
        more = f" and {len(lost) - _NAMED_AT_MOST} more" if lost[_NAMED_AT_MOST:] else ""
        raise Damaged(
            f"gc deletes nothing, because records are missing from {repo.storage.url}: {named}{more}; there are "
            f"manifests under objects/ that nothing else knows of. {ADVICE}",
            key=commit_key(lost[0]),
        )
