"""The terms of linear combinations, as exact fractions, so that the weights of an average sum to exactly 1. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, SupportsFloat, TypeAlias

from casckpt.errors import InvalidInput

Weight: TypeAlias = SupportsFloat | str
"""A number, which counts as the decimal number that Python prints, or a string such as "0.1" or "1/3"."""


class Term(NamedTuple):
    """How to add a checkpoint: total = decay * total + share * value. ``weight``: its weight in the result.

    The result is the total, times weight / share of the last term, which is not 1 only for a mean.
    """

    weight: Fraction
    share: Fraction
    decay: Fraction = Fraction(1)


def terms_of(count: int, weights: Sequence[Weight] | None = None, ema: Weight | None = None) -> list[Term]:
    """Return the terms of ``count`` checkpoints, from one argument at most. Without an argument, all weights are equal.

    ``ema``: see `moving_average`; each decay is this number. Raises InvalidInput.
    """
    if weights is not None and ema is not None:
        raise InvalidInput("weights and ema exclude each other: pass only one of them")
    if weights is not None:
        return [Term(weight, weight) for weight in _given(weights, count)]
    if ema is not None:
        decay = fraction(ema, "ema")
        if not 0 < decay < 1:
            raise InvalidInput(f"ema={ema} is not valid: pass a decay between 0 and 1, such as 0.99")
        return moving_average([decay] * (count - 1))
    return [Term(Fraction(1, count), Fraction(1))] * count


def _given(weights: Sequence[Weight], count: int) -> list[Fraction]:
    if isinstance(weights, str):
        raise InvalidInput(f"weights={weights!r:.40} is not valid: pass a list of numbers")
    exact = [fraction(weight, "weights") for weight in weights]
    if len(exact) != count:
        raise InvalidInput(f"there are {len(exact)} weights for {count} checkpoints: pass one for each")
    if not any(exact):
        raise InvalidInput("all weights are 0: pass at least one other weight")
    return exact


def moving_average(decays: Sequence[Fraction]) -> list[Term]:
    """Return the terms of an exponential moving average that begins with the first value.

    ``decays``: for each later value, the factor d in average = d * average + (1 - d) * value. The weights sum to 1.
    """
    made, weight = list[Term](), Fraction(1)
    for decay in reversed(decays):
        made.append(Term(weight * (1 - decay), 1 - decay, decay))
        weight *= decay
    return [Term(weight, Fraction(1)), *reversed(made)]


def fraction(number: Weight, name: str) -> Fraction:
    """Return a number as an exact fraction. ``name``: the argument, for the message. Raises InvalidInput."""
    try:
        made = Fraction(str(number))
        float(made)  # the weights are used as floats
        return made
    except (ArithmeticError, ValueError) as error:
        raise InvalidInput(
            f"{name}: {number!r:.40} is not a finite number; pass a number such as 0.5 or 1/3"
        ) from error
