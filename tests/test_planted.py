"""The bugs that tools/mutants plants have a place to be planted, and tests to be noticed by."""

from __future__ import annotations

import pytest

from planted import PLANTED, Planted
from tests.test_packaging import ROOT


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: str(planted.name))
def test_a_planted_bug_has_its_place(planted: Planted) -> None:
    text = (ROOT / planted.file).read_text()
    assert text.count(planted.before) == 1
    for name in planted.tests.split():
        assert (ROOT / name).is_file()


def test_names_are_told_apart() -> None:
    assert len({one.name for one in PLANTED}) == len(PLANTED)
