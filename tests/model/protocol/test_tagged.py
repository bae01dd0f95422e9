"""Tags combined with rules that forget and thin: tagged checkpoints survive even if any process is killed."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.tagged import MUTANTS, SEEN, STAYS, model

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
DIES = {
    "looks_once": ("forgotten by a rule", SEEN),
    "thins_and_goes": ("thinned", SEEN),
    "believes_its_tag": ("forgotten by a rule", SEEN),
    "takes_what_is_thin": ("thinned", SEEN),
    "leaves_forgotten": ("forgotten by a rule, killed", SEEN),
    "leaves_thin": ("thinned, killed", SEEN),
    "tags_first": ("by a person, tagged", STAYS),
    "later_number": ("by a person, and a rule", STAYS),
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_tagged_checkpoint_is_never_lost(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("= restored",))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_tagged_checkpoint_is_never_lost_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("= restored",), limit=10_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    setup, says = DIES[mutant]
    check_dies(model(mutant, **SAFE[setup]), says)
