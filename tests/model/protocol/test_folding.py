"""Folded history: nothing that is over comes back, no data is lost, and no process lies, however long it slept."""

from __future__ import annotations

import pytest

from tests.model.protocol.blobs import TIDY, WHOLE
from tests.model.protocol.checks import check_dies, check_holds
from tests.model.protocol.folding import FOLDED, FOUND, HONEST, LARGE, MUTANTS, OVER, SAFE, model

DIES = {
    "folds_open": ("a save", HONEST),
    "folds_slots": ("a rewrite that slept", HONEST),
    "folds_with_objects": ("a gc that resumes", WHOLE),
    "deletes_first": ("a save", WHOLE),
    "no_places": ("a late put", TIDY),
    "leaves_late": ("a save", FOLDED),
    "no_reread": ("a rewrite", HONEST),
    "believes_its_put": ("a save", HONEST),
    "looks_once": ("a copy", HONEST),
    "knows_late": ("a save of what is late", WHOLE),
    "ended_first": ("a reader", OVER),
    "says_lost": ("a reader", FOUND),
    "erases_all": ("erased, a reader by key", OVER),
    "erases_hidden": ("erased, a restore", HONEST),
    "erases_nothing": ("erased, a restore", FOLDED),
    "erases_with_manifests": ("erased, a gc that resumes", WHOLE),
    "clock_first": ("erased, a reader by key", OVER),
}


@pytest.mark.parametrize("start", SAFE)
def test_history_that_is_folded_stays_over(start: str) -> None:
    check_holds(model(start=start), ("creates ended/0", "DELETES commits") if start != "a save of what is late" else ())


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", LARGE)
def test_history_that_is_folded_stays_over_in_larger_models(start: str) -> None:
    check_holds(model(start=start), ("creates ended/0", "DELETES commits"), limit=8_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    start, broken = DIES[mutant]
    check_dies(model(mutant, start=start), broken.says)
