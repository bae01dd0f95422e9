"""The choice of a base: few links, few bytes, full cells at different times, and manifests as the only input."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.plan.bases import MAX_DELTAS, choose_base

PLAIN = 1 << 20
KEY = PLAIN * 2 // 3
Size = Callable[[int], int]


def one_step_of_rl(distance: int) -> int:
    """The bytes of a delta between two versions, as measured: 0.57 % of them, 7.7 % for 64 steps."""
    return round(0.0057 * PLAIN * math.pow(distance, 0.63))


@dataclass
class Run:
    """Saves of one row. Each version has its base (None for a full cell) and its stored bytes."""

    size: Size = one_step_of_rl
    place: str = "layers.0.weight 0"
    versions: list[tuple[int | None, int]] = field(default_factory=lambda: [(None, KEY)])

    def chain(self, version: int) -> list[int]:
        """The versions that a read of this one decodes, without the full cell, newest first."""
        found = []
        while (base := self.versions[version][0]) is not None:
            found.append(version)
            version = base
        return found

    def deltas(self, version: int) -> list[int]:
        return [self.versions[one][1] for one in self.chain(version)]

    def save(self) -> None:
        parent = len(self.versions) - 1
        left = choose_base(self.deltas(parent), PLAIN, self.place)
        if left is None:
            self.versions.append((None, KEY))
            return
        chain = self.chain(parent)
        base = chain[left] if left < len(chain) else self.versions[chain[-1]][0] if chain else parent
        assert base is not None
        self.versions.append((base, self.size(parent + 1 - base)))

    def after(self, saves: int) -> Run:
        for _ in range(saves - 1):
            self.save()
        return self

    def own(self) -> list[int]:
        """The versions that are stored in full."""
        return [version for version, (base, _) in enumerate(self.versions) if base is None]


@settings(max_examples=max(60, settings().max_examples))  # hypothesis seldom draws the longest chain
@given(st.lists(st.integers(1, PLAIN), max_size=20), st.text(max_size=30))
def test_a_base_is_chosen_from_the_chain_so_that_few_links_remain(deltas: list[int], place: str) -> None:
    left = choose_base(deltas, PLAIN, place)
    if left is None:
        assert sum(deltas) > PLAIN / 8
    else:
        assert 0 <= left <= len(deltas)
        assert len(deltas) - left < MAX_DELTAS
        assert sum(deltas) < PLAIN / 4


@given(st.lists(st.integers(1, PLAIN // 200), max_size=MAX_DELTAS - 1))
def test_the_parent_is_the_base_while_links_are_left(deltas: list[int]) -> None:
    assert choose_base(deltas, PLAIN, "any") == 0


def test_cells_changed_in_small_steps_get_a_new_base_together() -> None:
    assert choose_base([100, 100, 100, 9000], PLAIN, "any") == 3
    assert choose_base([100, 5000, 7000, 9000], PLAIN, "any") == 1
    assert choose_base([9000, 100, 100, 100], PLAIN, "any") == 4  # all of it: a delta to the full cell


def test_an_overlong_chain_from_a_different_writer_is_shortened() -> None:
    assert choose_base([1000 * 2**i for i in range(7)], PLAIN, "any") == 4


def test_a_delta_hardly_smaller_than_a_full_cell_does_not_become_a_base() -> None:
    assert Run(lambda _: PLAIN // 2).after(9).own() == [0, 2, 4, 6, 8]


def test_64_saves_of_a_slow_training_need_little_more_space_than_one_full_state() -> None:
    run = Run().after(64)
    stored = [nbytes for _, nbytes in run.versions]
    assert run.own() == [0]
    assert sum(stored) / 64 < 0.022 * PLAIN
    assert max(len(run.deltas(version)) for version in range(64)) == MAX_DELTAS


def test_the_last_8_versions_need_little_more_space_than_one_full_state() -> None:
    run = Run().after(400)
    for newest in range(8, 400):
        needed = {one for version in range(newest - 7, newest + 1) for one in run.chain(version)}
        roots = {max(key for key in run.own() if key <= version) for version in range(newest - 7, newest + 1)}
        assert sum(run.versions[one][1] for one in needed) <= 0.6 * PLAIN
        assert len(roots) <= 2


@given(st.integers(2, 60), st.floats(0.001, 0.05), st.floats(0, 1))
def test_a_load_reads_at_most_one_delta_beyond_the_limit(saves: int, first: float, growth: float) -> None:
    run = Run(lambda distance: min(KEY, round(first * PLAIN * distance**growth))).after(saves)
    for version in range(saves):
        *older, _ = run.deltas(version)[::-1] or [0]
        assert sum(older) <= PLAIN * 5 / 24


def test_rows_with_similar_changes_are_stored_in_full_by_different_saves() -> None:
    rows = [Run(place=f"layers.{i}.weight {lo}").after(400) for i in range(20) for lo in (0, 1 << 24)]
    renewed = Counter(key for row in rows for key in row.own()[1:])
    assert len(renewed) > 20
    assert max(renewed.values()) <= len(rows) / 4


def test_every_rank_and_run_makes_the_same_decision() -> None:
    assert Run().after(300).versions == Run().after(300).versions
