"""The charts of equal stores are equal, and show the first and the last checkpoint."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib", reason="needs casckpt[report]")
from casckpt.frontends.report import page
from casckpt.frontends.report.charts import run_growth, thinned
from casckpt.store.store import Store

pytestmark = pytest.mark.process  # matplotlib lists the system's fonts


def test_sizes_that_are_close_together_have_distinct_axis_labels() -> None:
    drawn = run_growth("sft", [300, 400], [3_000_000, 3_000_000], [3_020_000, 3_020_000])
    assert {"2 MiB", "4 MiB"} <= set(re.findall(r">([\d.]+ [KM]iB)<", drawn))


def test_identical_stores_have_identical_charts(store: Store) -> None:
    charts = [re.findall(r"<svg.*?</svg>", page(store), re.DOTALL) for _ in range(2)]
    assert charts[0] == charts[1]


@pytest.mark.parametrize(("count", "most"), [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 5)])
def test_a_chart_with_fewer_points_includes_the_first_and_the_last(count: int, most: int) -> None:
    found = thinned(count, most)
    assert len(found) == min(count, most)
    assert found == sorted(set(found))
    assert not found or (found[0], found[-1]) == (0, count - 1)
