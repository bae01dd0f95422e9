"""Loads under a lease: they read all that they were promised, whatever rewrites, trims and purges do meanwhile."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.loads import MUTANTS, READ, model
from tests.model.protocol.places import FORGOTTEN, RESTORED, Back

SAFE: Setups = {
    "thinned": {},
    "thinned, undone": {"acts": (Back,)},
    "undone, thinned again": {"thinned": True, "acts": (Back,)},
    "repacked, thinned": {"does": ("thinner", "repacker")},
    "repacked, forgotten": {"does": ("repacker",), "acts": (FORGOTTEN,)},
    "thinned, forgotten, restored": {"acts": (FORGOTTEN, RESTORED)},
    "thinned, a lease that ends": {"until": 2, "renewals": 1},
    "forgotten, a lease that ends": {"does": (), "acts": (FORGOTTEN,), "until": 2, "renewals": 1},
    "undone, trims that land late": {"thinned": True, "acts": (Back,), "lost": True},
}
LARGE: Setups = {
    "all of it": {"does": ("thinner", "repacker"), "acts": (Back, FORGOTTEN), "until": 1, "renewals": 1, "lost": True},
    "thinned twice": {"does": ("thinner", "thinner 2", "repacker"), "acts": (Back, Back), "times": 3},
    "a lease that ends, undone": {"thinned": True, "acts": (Back,), "until": 3, "renewals": 2},
}
DIES = {
    "no_lease": "thinned",
    "no_look": "thinned",
    "promises_more": "undone, thinned again",
    "no_follow": "repacked, thinned",
    "current_only": "repacked, thinned",
    "leases_free": "thinned",
    "leases_first": "thinned",
    "later_number": "undone, thinned again",
    "clock_last": "thinned, a lease that ends",
    "late_renewal": "thinned, a lease that ends",
    "grants_older": "thinned, a lease that ends",
    "first_generation": "undone, thinned again",
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_load_reads_what_it_was_promised(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("DELETES objects", "DELETES leases"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_load_reads_what_it_was_promised_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("DELETES objects", "DELETES leases"), limit=6_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_a_load(mutant: str) -> None:
    check_dies(model(mutant, **SAFE[DIES[mutant]]), READ.says)
