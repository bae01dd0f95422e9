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


def weights_of(count: int, **more: Any) -> list[Fraction]:
    """Return the weights, after a check that the terms, applied one by one, amount to them."""
    terms = terms_of(count, **more)
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
    weights = [term.weight for term in terms_of(count)]
    assert weights == [Fraction(1, count)] * count
    assert sum(weights) == 1


def test_a_decay_applies_to_each_checkpoint() -> None:
    assert weights_of(3, ema=0.9) == [Fraction(81, 100), Fraction(9, 100), Fraction(1, 10)]
    assert weights_of(1, ema="0.5") == [1]


def test_given_weights_are_decimal_numbers_or_fractions() -> None:
    weights = weights_of(3, weights=[0.1, "0.2", "7/10"])
    assert weights == [Fraction(1, 10), Fraction(1, 5), Fraction(7, 10)]
    assert sum(weights) == 1
    assert weights_of(2, weights=[2, -1.5]) == [2, Fraction(-3, 2)]


@pytest.mark.parametrize(
    ("count", "arguments", "why"),
    [
        (2, {"weights": [1]}, "there are 1 weights for 2 checkpoints"),
        (2, {"weights": [0, 0.0]}, "all weights are 0"),
        (1, {"weights": [float("nan")]}, "weights: nan is not a finite number"),
        (1, {"weights": ["1/0"]}, "'1/0' is not a finite number"),
        (1, {"weights": ["1e400"]}, "weights: '1e400' is not a finite number"),
        (2, {"weights": "12"}, "weights='12' is not valid: pass a list"),
        (2, {"weights": [1, 2], "ema": 0.9}, "exclude each other"),
        (2, {"ema": 1}, "pass a decay between 0 and 1"),
        (2, {"ema": 0}, "pass a decay between 0 and 1"),
    ],
)
def test_invalid_weights_are_refused(count: int, arguments: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        weights_of(count, **arguments)
