"""Tags and leases: once granted, they protect their checkpoint from being forgotten, thinned, repaired or purged."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.leases import HELD, MUTANTS, NEVER, model
from tests.model.protocol.logs import FORGOTTEN, RESTORED

LEASE = ((NEVER,),)
SAFE: Setups = {
    "forgotten": {"leases": LEASE},
    "forgotten again": {"leases": LEASE, "does": (FORGOTTEN, RESTORED, FORGOTTEN), "torn": True},
    "a tag": {"tag": True, "does": (FORGOTTEN, RESTORED, FORGOTTEN), "torn": True},
    "renewed": {"leases": ((0, 1),), "until": 2, "cleaners": 1, "torn": True},
    "one after the other": {"leases": ((0,), (2,)), "until": 1, "cleaners": 2},
    "ended, renewed late": {"leases": ((0, 1),), "until": 1, "cleaners": 2, "ended": True},
    "ended": {"leases": ((0, 0), (1,)), "until": 1, "cleaners": 1, "ended": True},
    "thinned": {"leases": LEASE, "does": (), "rewrite": ("e",)},
    "thinned, undone, thinned": {"leases": LEASE, "does": (RESTORED,), "rewrite": ("e", "f"), "records": 3},
    "a tag, thinned twice": {"tag": True, "does": (), "rewrite": ("ef", "e"), "records": 3},
    "repaired, undone": {"leases": LEASE, "does": (RESTORED, FORGOTTEN), "rewrite": ("ef",), "records": 3},
    "repaired, undone, torn": {"leases": LEASE, "does": (RESTORED, FORGOTTEN), "rewrite": ("ef",), "torn": True},
    "a tag, repaired, undone": {"tag": True, "does": (RESTORED, FORGOTTEN), "rewrite": ("ef",), "records": 3},
}
LARGE: Setups = {
    "repaired, then thinned": {"leases": LEASE, "does": (RESTORED, FORGOTTEN), "rewrite": ("ef", "e"), "records": 4},
    "renewed twice": {"leases": ((0, 1, 2),), "until": 3, "cleaners": 2, "torn": True, "records": 2},
    "ended, torn": {"leases": ((0, 1),), "until": 2, "cleaners": 2, "ended": True, "torn": True},
    "thinned, undone, torn": {
        "leases": LEASE,
        "does": (RESTORED, FORGOTTEN, RESTORED),
        "rewrite": ("e",),
        "records": 3,
        "torn": True,
    },
    "repaired, undone, torn": {
        "leases": LEASE,
        "tag": True,
        "does": (RESTORED, FORGOTTEN),
        "rewrite": ("ef",),
        "records": 3,
        "torn": True,
    },
}
DIES = {
    "tags_first": "forgotten",
    "purges_later_number": "forgotten again",
    "grants_forgotten": "forgotten",
    "log_first": "forgotten",
    "bars_own_txid": "repaired, undone",
    "replaced_is_free": "thinned",
    "adds_entries": "repaired, undone",
    "void_claims_less": "thinned, undone, thinned",
    "clock_last": "renewed",
    "clock_ahead": "renewed",
    "drops_old_generations": "renewed",
    "cleaner_clock_last": "renewed",
    "reuses_name": "one after the other",
    "drops_ended": "ended",
    "late_renewal": "renewed",
    "late_keeps_name": "ended, renewed late",
    "renewal_not_counted": "renewed",
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_granted_lease_protects_its_checkpoint(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("= purged", "has its tag" if "tag" in SAFE[setup] else "is granted"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_granted_lease_protects_its_checkpoint_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("= purged", "is granted"), limit=4_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_a_lease(mutant: str) -> None:
    check_dies(model(mutant, **SAFE[DIES[mutant]]), HELD.says)


def test_a_process_reads_the_log_after_it_sets_a_tag() -> None:
    check_dies(model("log_first", **SAFE["a tag"]), HELD.says)
