"""Mirrors that are asked by key: what a rule hides or ends was whole there, and in the end everything is copied."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.mirrors import COPIED, FITS, FULLER, HAD, MUTANTS, model
from tests.model.protocol.places import FORGOTTEN, PURGED, RESTORED, REVOKED, TRIMMED, Back

PURGES, TRIMS = (FORGOTTEN, PURGED), (TRIMMED, FORGOTTEN, PURGED)
SAFE: Setups = {
    "forgotten, restored, purged there": {"acts": PURGES, "users": (FORGOTTEN, RESTORED), "there": PURGES},
    "thinned and undone, thinned there": {"acts": TRIMS, "users": ("e", Back), "there": ("e", TRIMMED)},
    "thinned before, undone, purged there": {
        "acts": (TRIMMED,),
        "users": (Back, "e"),
        "there": PURGES,
        "start": ("ef", "e"),
    },
    "thinned copies suffice": {"acts": TRIMS, "users": ("e",), "there": ("e", TRIMMED), "thinned": True},
    "thinned copies suffice, undone": {"acts": PURGES, "users": ("e", Back), "thinned": True},
    "thinned otherwise": {"acts": (TRIMMED,), "users": (Back, "eg"), "start": ("efg", "ef"), "thinned": True},
    "revoked there": {"acts": (FORGOTTEN,), "users": ("e",), "there": (REVOKED,)},
    "two passes": {"acts": (FORGOTTEN,), "users": ("e",), "passes": 2},
    "folded there": {"acts": PURGES, "there": (*PURGES, "fold")},
    "folded there, made fuller here": {"acts": PURGES, "users": ("ef",), "there": (*PURGES, "fold"), "start": ("e",)},
    "an older snapshot of the mirror": {"acts": PURGES, "accident": "snapshot"},
    "a power cut of the mirror": {"acts": PURGES, "accident": "power"},
}
LARGE: Setups = {
    "two passes, forgotten, purged there": {
        "acts": TRIMS,
        "users": (FORGOTTEN, RESTORED),
        "there": PURGES,
        "passes": 2,
        "start": ("ef", "e"),
    },
    "two passes, thinned here and there": {
        "acts": TRIMS,
        "users": ("e", Back, "e"),
        "there": ("e", TRIMMED),
        "passes": 2,
    },
    "two passes, revoked there": {
        "acts": PURGES,
        "users": ("e", Back),
        "there": (REVOKED, "e"),
        "passes": 2,
        "thinned": True,
    },
}
DIES = {
    "ever": ("forgotten, restored, purged there", HAD),
    "ask_first": ("forgotten, restored, purged there", HAD),
    "any_entries": ("thinned and undone, thinned there", HAD),
    "thin_is_enough": ("thinned copies suffice, undone", HAD),
    "stops_at_open": ("thinned copies suffice", COPIED),
    "stops_at_revoked": ("revoked there", COPIED),
    "copies_current": ("thinned before, undone, purged there", COPIED),
    "forgets_unasked": ("forgotten, restored, purged there", HAD),
    "purges_unasked": ("forgotten, restored, purged there", HAD),
    "trims_unasked": ("thinned and undone, thinned there", HAD),
    "later_number": ("forgotten, restored, purged there", HAD),
    "remembers": ("an older snapshot of the mirror", HAD),
    "no_settle": ("a power cut of the mirror", HAD),
    "settles_last": ("a power cut of the mirror", HAD),
    "joins_by_id": ("thinned copies suffice", FITS),
    "folded_is_safe": ("folded there, made fuller here", HAD),
    "folded_is_free": ("folded there, made fuller here", COPIED),
    "replaces_fuller": ("thinned otherwise", FULLER),
}


@pytest.mark.parametrize("setup", SAFE)
def test_what_a_rule_deletes_was_whole_in_the_mirror(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("creates mirror/0/0", "gc creates commits"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_what_a_rule_deletes_was_whole_in_the_mirror_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("creates mirror/0/0", "gc creates commits"), limit=6_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    setup, broken = DIES[mutant]
    check_dies(model(mutant, **SAFE[setup]), broken.says)
