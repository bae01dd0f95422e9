"""Two gcs of different ages beside a writer that puts any record: neither deletes what is too young for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.protocol.ages import MUTANTS, TOO_YOUNG, model
from tests.model.protocol.checks import check_dies, check_holds
from tests.model.protocol.places import FORGOTTEN, RESTORED

SMALL: list[dict[str, Any]] = [{"puts": 1}, {"gcs": ("gc 1",)}]
LARGE: list[dict[str, Any]] = [{"until": 3}, {"gcs": ("gc 1",), "puts": 3}, {"gcs": ("gc 2",), "puts": 3}]
DIES: dict[str, dict[str, Any]] = {
    "other_age": SMALL[0],
    "by_forgotten": {"before": (FORGOTTEN, RESTORED), "puts": 1},
    "own_time": SMALL[1],
    "ignores_gaps": SMALL[1],
}


@pytest.mark.parametrize("setup", SMALL)
def test_nothing_that_was_visible_more_recently_than_its_age_is_deleted(setup: dict[str, Any]) -> None:
    check_holds(model(**setup), ("DELETES objects/b", "DELETES objects/m"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_nothing_too_young_is_deleted_in_larger_models(setup: dict[str, Any]) -> None:
    check_holds(model(**setup), ("DELETES objects/b", "finds 2 taken"), limit=8_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    check_dies(model(mutant, **DIES.get(mutant, {"gcs": ("gc 1",), "puts": 1})), TOO_YOUNG.says)
