"""Tags combined with rules that forget and thin: tagged checkpoints survive even if any process is killed."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.tagged import KEPT, MUTANTS, QUIET, SEEN, STAYS, model

SAFE: Setups = {
    "forgotten by a rule": {"settles": False, "mortal": False},
    "thinned": {"takes": ("thinner",), "settles": False, "mortal": False},
    "forgotten by a rule, killed": {"gcs": 1, "torn": True},
    "thinned, killed": {"takes": ("thinner",), "gcs": 1, "torn": True},
    "thinned, and forgotten": {"takes": ("thinner", "ruler")},
    "by a person, and a rule": {"takes": ("ruler", "person"), "gcs": 1, "repeats": 2},
    "by a person, tagged": {"takes": ("person",), "is_tagged": True, "gcs": 1},
}
LARGE: Setups = {
    "all of it": {"takes": ("thinner", "ruler", "person"), "gcs": 1, "repeats": 2},
    "all of it, torn": {"takes": ("thinner", "ruler"), "gcs": 2, "torn": True},
}
RECORDED: Setups = {
    "recorded": {"takes": ("ruler",), "records": True, "settles": False, "mortal": False},
    "recorded, and deleted": {"takes": ("ruler", "person"), "records": True, "is_tagged": True, "gcs": 1},
    "left out": {"takes": ("ruler",), "records": True, "lost": True, "tags": False, "settles": False},
}
DIES = {
    "looks_once": ("forgotten by a rule", SEEN),
    "thins_and_goes": ("thinned", SEEN),
    "believes_its_tag": ("forgotten by a rule", SEEN),
    "takes_what_is_thin": ("thinned", SEEN),
    "leaves_forgotten": ("forgotten by a rule, killed", SEEN),
    "leaves_thin": ("thinned, killed", SEEN),
    "tags_first": ("by a person, tagged", STAYS),
    "later_number": ("by a person, and a rule", STAYS),
    "records_first": ("recorded", QUIET),
    "tags_before_records": ("recorded", QUIET),
    "lists_once": ("recorded, and deleted", QUIET),
    "cleans_all": ("recorded, and deleted", QUIET),
    "ignores_records": ("left out", KEPT),
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_tagged_checkpoint_is_never_lost(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("= restored",))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_tagged_checkpoint_is_never_lost_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("= restored",), limit=10_000_000)


@pytest.mark.parametrize("setup", RECORDED)
def test_a_gc_detects_that_tags_are_missing_only_if_they_were_lost(setup: str) -> None:
    check_holds(model(**RECORDED[setup]), ("lists commits",))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    setup, says = DIES[mutant]
    check_dies(model(mutant, **{**SAFE, **RECORDED}[setup]), says)
