"""Rewrites that replace commits: exactly one commit of an ID is visible, despite rewriters, users, gcs and
late puts."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.logs import RESTORED
from tests.model.protocol.rewrites import LATEST, LISTED, LOADED, MUTANTS, ONE, SETTLED, TIDY, model

SAFE: Setups = {
    "two rewrites at once": {"rewriters": (("V",), ("W",)), "toggles": 0, "puts": 2, "loads": True},
    "forgotten and restored": {"toggles": 2},
    "two users": {"users": 2},
    "a second rewrite, undone": {"rewriters": (("V", "W"),), "allowed": (RESTORED,), "puts": 3, "loads": True},
    "answers that are lost": {"lost": True},
    "a listing beside a second rewrite": {
        "rewriters": (("V", "W"),),
        "allowed": (RESTORED,),
        "lists_too": True,
        "puts": 1,
        "mortal": False,
    },
    "listings that take their time": {"torn": True, "allowed": (RESTORED,), "loads": True},
}
LARGE: Setups = {
    "all at once, torn": {"torn": True, "rewriters": (("V", "W"),), "allowed": (RESTORED,), "loads": True},
    "listings beside a second rewrite, torn": {
        "torn": True,
        "rewriters": (("V", "W"),),
        "allowed": (RESTORED,),
        "lists_too": True,
    },
    "two rewrites, forgotten, torn": {"torn": True, "rewriters": (("V",), ("W",))},
    "two, one of them twice": {"rewriters": (("V", "W"), ("P",))},
    "two rewrites, lost answers": {"rewriters": (("V",), ("W",)), "toggles": 2, "lost": True},
}
DIES = {
    "committed_is_visible": ("two rewrites at once", ONE),
    "any_number": ("two rewrites at once", ONE),
    "own_link_only": ("a second rewrite, undone", ONE),
    "restored_does_not_undo": ("forgotten and restored", ONE),
    "forgets_unsettled": ("two rewrites at once", SETTLED),
    "gives_up_unsettled": ("answers that are lost", SETTLED),
    "rewrites_forgotten": ("forgotten and restored", SETTLED),
    "follows_only_replaced": ("a second rewrite, undone", LOADED),
    "looks_once": ("two rewrites at once", LOADED),
    "believes_listings": ("a listing beside a second rewrite", LISTED),
    "collects_once": ("a listing beside a second rewrite", LISTED),
    "trusts_the_listing": ("listings that take their time", LOADED),
    "leaves_holes": ("listings that take their time", LOADED),
    "latest_by_txid": ("two rewrites at once", LATEST),
    "no_kept": ("two rewrites at once", TIDY),
    "purges_visible_base": ("two rewrites at once", SETTLED),
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_checkpoint_is_visible_exactly_once_until_it_is_forgotten(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("= Replaced", "= purged", "= kept"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_checkpoint_is_visible_exactly_once_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("= Replaced", "= purged", "= kept"), limit=4_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    setup, says = DIES[mutant]
    check_dies(model(mutant, **SAFE[setup]), says)
