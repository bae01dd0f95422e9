"""The bytes of rewrites: gc never deletes live objects, and eventually deletes objects that only replaced
commits name."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.rewritten_bytes import MUTANTS, WHOLE, model

SAFE: Setups = {
    "a rewrite": {},
    "forgotten or restored": {"users": 1},
    "beside a save": {"saves": True},
    "beside a repair": {"repairs": True},
}
LARGE: Setups = {
    "beside a save, forgotten or restored": {"saves": True, "users": 1},
    "two gcs, forgotten or restored": {"gcs": 2, "users": 1},
    "beside a save, two gcs": {"saves": True, "gcs": 2, "puts": 1},
}
DIES = {
    "rows_of_id": "beside a save",
    "replaced_is_dead": "a rewrite",
    "unnamed_is_dead": "a rewrite",
    "lists_first": "forgotten or restored",
    "repair_moves_places": "beside a repair",
}
HAPPENS = ("DELETES objects/T/a", "DELETES objects/V/a", "= purged")


@pytest.mark.parametrize("setup", SAFE)
def test_no_live_blob_is_deleted(setup: str) -> None:
    check_holds(model(**SAFE[setup]), HAPPENS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_no_live_blob_is_deleted_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), HAPPENS, limit=6_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_loses_data(mutant: str) -> None:
    check_dies(model(mutant, **SAFE[DIES[mutant]]), WHOLE.says)
