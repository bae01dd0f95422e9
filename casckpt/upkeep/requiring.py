"""Demands on whoever writes to a store (`casckpt.repository.requirements`): who sets one waits for those before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from casckpt.errors import Conflict, InvalidInput
from casckpt.format import records
from casckpt.format.keys import settings_key
from casckpt.repository.commits import list_names
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.repository.transactions import OpenTransaction, open_transactions
from casckpt.upkeep.gc.waiting import Limits, Sleep, Waited, wait_until_closed


def require(
    repo: Repository,
    name: str,
    *,
    wait: float,
    revoke_after: float,
    tell: Callable[[Sequence[OpenTransaction]], None] = lambda still: None,
    sleep: Sleep = time.sleep,
) -> Waited:
    """Demand that whoever writes knows ``name``; then wait until the transactions have ended that were open before.

    Where some are ``still`` open in what is returned, writers may be at work that never saw the demand: call again.
    ``wait``, ``revoke_after``: seconds, as of a gc. Raises `InvalidInput` for a name that this version does not know,
    `StorageError`.
    """
    if name not in records.KNOWN_REQUIREMENTS:
        raise InvalidInput(f"there is nothing named {name!r} that writers could be required to know; upgrade casckpt")
    check_requirements(repo)
    while True:
        number, old = repo.newest_settings()
        if name in old.requires:
            break
        new = records.changed(old, requires=sorted({*old.requires, name}), created_at=repo.clock())
        try:
            repo.put_record(settings_key(number + 1), new)
        except Conflict:
            continue  # somebody else changed the settings just now
        break
    waits = [one.txid for one in open_transactions(repo, list_names(repo))]
    return wait_until_closed(repo, waits, Limits(wait, revoke_after, sleep), tell)
