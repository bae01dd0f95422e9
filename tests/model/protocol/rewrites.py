"""What gc may do with rewrites that replace a commit, for `leases`, which still uses `logs` instead of `places`."""

from __future__ import annotations

from tests.model.protocol.logs import FORGOTTEN, KEPT, PURGED, Logs, Replaced

Action = tuple[str, int, str]


def actions(now: Logs) -> list[Action]:
    """Return all actions that gc may perform on X, each with the number right after the record that allows it."""
    found = []
    for txid in now.live():
        state, number = now.state(txid), now.number(txid)
        replaces = now.get(txid)[0].replaces
        if state == FORGOTTEN or isinstance(state, Replaced):
            found.append((txid, number, PURGED))
        elif now.is_void(txid) and not now.stands(txid):
            found.append((txid, number, FORGOTTEN))
        elif not now.stands(txid) and len(now.get(replaces[0])) <= replaces[1]:
            found.append((*replaces, KEPT))
    return found
