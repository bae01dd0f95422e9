"""What users and stores rely on is still there: tests/data/surface.json has what was there at 0e24385 and at 6ce87e2."""

from __future__ import annotations

import json

import pytest

from tests.support.surface import surface
from tests.test_packaging import ROOT

BEFORE = json.loads((ROOT / "tests" / "data" / "surface.json").read_text())


@pytest.mark.parametrize("kind", BEFORE)
def test_nothing_that_others_rely_on_is_missing(kind: str) -> None:
    assert sorted(set(BEFORE[kind]) - set(surface(ROOT)[kind])) == []
