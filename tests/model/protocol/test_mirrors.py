"""Mirrors: a checkpoint is noted as safe only if it was complete there, and every checkpoint is eventually noted."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.mirrors import MUTANTS, NOTED, PURGED_IS_SAFE, QUIET, model

SAFE: Setups = {
    "forgotten and restored": {"forgets": 2, "passes": 2, "puts": 1},
    "forgotten again": {"forgets": 3, "there": 2, "puts": 1},
    "damaged, repaired": {"rewrite": "ef", "damaged": True, "passes": 2, "there": 1},
    "thinned": {"rewrite": "e", "passes": 2, "there": 1, "puts": 1},
    "damaged, thinned": {"rewrite": "e", "damaged": True, "passes": 2, "there": 1, "puts": 1},
    "thinned there": {"rewrite": "ef", "thins": True, "there": 3, "puts": 0},
    "copied back": {"lost": True, "passes": 2, "puts": 0},
}
LARGE: Setups = {
    "two mirrors": {"rewrite": "ef", "mirrors": 2, "there": 2},
    "two mirrors, forgotten": {"mirrors": 2, "forgets": 2, "there": 2},
    "thinned here and there": {"rewrite": "e", "thins": True, "there": 3},
    "forgotten, restored, forgotten": {"forgets": 3, "passes": 2, "there": 2},
}
DIES = {
    "very_txid": ("copied back", NOTED),
    "any_commit": ("copied back", NOTED),
    "thin_is_enough": ("damaged, thinned", NOTED),
    "noted_first": ("forgotten and restored", NOTED),
    "copies_base": ("damaged, repaired", NOTED),
    "each_its_own_note": ("damaged, repaired", QUIET),
    "void_needs_note": ("damaged, repaired", QUIET),
    "notes_last": ("forgotten again", PURGED_IS_SAFE),
    "purges_unnoted": ("forgotten and restored", PURGED_IS_SAFE),
    "live_is_enough": ("forgotten and restored", NOTED),
    "noted_by_source": ("forgotten and restored", NOTED),
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_mirror_note_implies_a_complete_copy(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("creates mirrored/V" if "damaged" in setup else "creates mirrored/T",))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_mirror_note_implies_a_complete_copy_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("creates mirrored/T", "= purged"), limit=6_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    setup, broken = DIES[mutant]
    check_dies(model(mutant, **SAFE[setup]), broken.says)
