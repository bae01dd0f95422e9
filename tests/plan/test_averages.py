"""The weights of averages are exact, and follow the definition of each average."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from casckpt.errors import InvalidInput
from casckpt.plan.averages import moving_average, terms_of

DECAYS = some.fractions(0, 1, max_denominator=1000)
VALUES = some.integers(-1000, 1000).map(Fraction)


def weights_of(*given: Any, **more: Any) -> list[Fraction]:
    """Return the weights, after a check that the terms, applied one by one, amount to them."""
    terms = terms_of(*given, **more)
    for number, wanted in enumerate(terms):
        total = Fraction(0)
        for place, term in enumerate(terms):
            total = term.decay * total + term.share * (place == number)
        assert total * terms[-1].weight / terms[-1].share == wanted.weight
    return [term.weight for term in terms]


@given(some.lists(some.tuples(VALUES, DECAYS), min_size=1, max_size=20))
def test_a_moving_average_has_the_weights_of_its_recurrence(rows: list[tuple[Fraction, Fraction]]) -> None:
    average = rows[0][0]
    for value, decay in rows[1:]:
        average = decay * average + (1 - decay) * value
    weights = [term.weight for term in moving_average([decay for _, decay in rows[1:]])]
    assert sum(weight * value for weight, (value, _) in zip(weights, rows, strict=True)) == average
    assert sum(weights) == 1


@given(some.integers(1, 300))
def test_the_weights_of_a_mean_are_equal_and_sum_to_exactly_1(count: int) -> None:
    weights = [term.weight for term in terms_of(range(count))]
    assert weights == [Fraction(1, count)] * count
    assert sum(weights) == 1


@given(some.lists(some.integers(1, 1000), min_size=1, max_size=20), some.integers(1, 1000))
def test_a_half_life_halves_what_came_before_in_that_many_steps(gaps: list[int], life: int) -> None:
    steps = [sum(gaps[:number]) for number in range(len(gaps) + 1)]
    weights = weights_of(steps, half_life=life)
    assert sum(weights) == 1
    assert float(weights[0]) == pytest.approx(0.5 ** (steps[-1] / life))
    assert weights_of([0, life], half_life=life) == [Fraction(1, 2)] * 2


def test_a_tiny_half_life_leaves_the_last_checkpoint() -> None:
    assert weights_of([1, 2**62], half_life="1e-320") == [0, 1]


def test_a_decay_applies_to_each_checkpoint() -> None:
    assert weights_of([5, 3, 9], ema=0.9) == [Fraction(81, 100), Fraction(9, 100), Fraction(1, 10)]
    assert weights_of([7], ema="0.5") == [1]


def test_given_weights_are_decimal_numbers_or_fractions() -> None:
    weights = weights_of([1, 2, 3], weights=[0.1, "0.2", "7/10"])
    assert weights == [Fraction(1, 10), Fraction(1, 5), Fraction(7, 10)]
    assert sum(weights) == 1
    assert weights_of([1, 2], weights=[2, -1.5]) == [2, Fraction(-3, 2)]


@pytest.mark.parametrize(
    ("steps", "arguments", "why"),
    [
        ([1, 2], {"weights": [1]}, "there are 1 weights for 2 checkpoints"),
        ([1, 2], {"weights": [0, 0.0]}, "all weights are 0"),
        ([1], {"weights": [float("nan")]}, "weights: nan is not a finite number"),
        ([1], {"weights": ["1/0"]}, "'1/0' is not a finite number"),
        ([1], {"weights": ["1e400"]}, "weights: '1e400' is not a finite number"),
        ([1, 2], {"weights": "12"}, "weights='12' is not valid: pass a list"),
        ([1, 2], {"weights": [1, 2], "ema": 0.9}, "exclude each other"),
        ([1, 2], {"ema": 1}, "pass a decay between 0 and 1"),
        ([1, 2], {"ema": 0}, "pass a decay between 0 and 1"),
        ([1, 2], {"half_life": 0}, "pass a positive number of steps"),
        ([2, 2], {"half_life": 5}, "in the order of their steps"),
    ],
)
def test_invalid_weights_are_refused(steps: list[int], arguments: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        weights_of(steps, **arguments)
