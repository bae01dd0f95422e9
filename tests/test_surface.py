"""What users and stores rely on is still there: tests/data/surface.json lists what was, at 0e24385 and 6ce87e2."""

from __future__ import annotations

import json

from tests.support.surface import surface
from tests.test_packaging import ROOT


def test_nothing_that_others_rely_on_is_missing() -> None:
    before, now = json.loads((ROOT / "tests" / "data" / "surface.json").read_text()), surface(ROOT)
    assert [f"{kind}: {name}" for kind, names in before.items() for name in names if name not in now[kind]] == []
