"""Tags beside rules, thin, people and gc: a tag protects its checkpoint, whoever dies, and even if tags/ is lost."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.places import Tagged, X
from tests.model.protocol.tagged import MUTANTS, QUIET, SEEN, SET, STAYS, model

IS_TAGGED = {"start": (Tagged(0),), "tags": (X,)}
SAFE: Setups = {
    "forgotten by a rule": {"does": ("tagger", "ruler"), "gcs": 1},
    "thinned": {"does": ("tagger", "thinner"), "gcs": 1},
    "thinned, and forgotten": {"does": ("tagger", "thinner", "ruler"), "gcs": 1, "times": 1},
    "repacked, and forgotten": {"does": ("tagger", "repacker", "ruler"), "gcs": 1},
    "thinned, and repacked": {"does": ("tagger", "thinner", "repacker"), "gcs": 1},
    "answers that are lost": {"does": ("tagger", "thinner", "ruler"), "lost": True},
    "by a person, and a rule": {"does": ("tagger", "person", "ruler"), "gcs": 1},
    "by a person, tagged": {"does": ("person",), "gcs": 1, **IS_TAGGED},
    "by a person, tagged again": {"does": ("person", "ruler", "tagger"), "gcs": 1, **IS_TAGGED},
    "ended": {"does": ("ender", "cleaner", "ruler"), **IS_TAGGED},
    "ended, and set again": {"does": ("ender", "cleaner", "tagger", "ruler"), **IS_TAGGED},
    "lost": {"does": ("loser", "ruler", "thinner"), **IS_TAGGED},
    "lost while it is set": {"does": ("tagger", "loser", "ruler", "thinner")},
    "lost, and set again": {"does": ("tagger", "last_ruler"), "start": (Tagged(1),), "mortal": False},
}
LARGE: Setups = {
    "all of it": {"does": ("tagger", "thinner", "ruler", "person"), "gcs": 1},
    "two tags": {"does": ("tagger", "tagger", "thinner", "ruler", "ender"), "gcs": 1, "times": 1},
    "answers that are lost, a person": {"does": ("tagger", "thinner", "ruler", "person"), "lost": True, "gcs": 1},
}
DIES = {
    "tags_first": ("forgotten by a rule", SET),
    "thins_tags_first": ("thinned", SET),
    "later_number": ("forgotten by a rule", SET),
    "person_reads_last": ("by a person, and a rule", SET),
    "believes_its_tag": ("forgotten by a rule", SET),
    "reads_only": ("forgotten by a rule", SET),
    "takes_what_is_thin": ("thinned", SET),
    "records_first": ("forgotten by a rule", QUIET),
    "numbers_by_listing": ("lost, and set again", QUIET),
    "leaves_forgotten": ("forgotten by a rule", SEEN),
    "leaves_thin": ("thinned", SEEN),
    "gc_tags_first": ("by a person, and a rule", STAYS),
    "gc_later_number": ("by a person, and a rule", STAYS),
    "tags_before_records": ("forgotten by a rule", QUIET),
    "lists_once": ("ended", QUIET),
    "cleans_all": ("ended", QUIET),
    "ignores_records": ("lost", SET),
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_tag_protects_its_checkpoint(setup: str) -> None:
    does = SAFE[setup]["does"]
    happens = ("has set its tag",) if "tagger" in does else ()
    check_holds(model(**SAFE[setup]), (*happens, "LOSES tags") if "loser" in does else happens)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_tag_protects_its_checkpoint_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("has set its tag", "= restored"), limit=6_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    setup, says = DIES[mutant]
    check_dies(model(mutant, **SAFE[setup]), says.says)
