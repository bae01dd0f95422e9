"""Differences of elements, modulo 2 to the power of their bits: they add up, and each can be undone.

They are **zigzag**: 0, -1, 1, -2, 2, ... are 0, 1, 2, 3, 4, ..., so that those near 0 have zeros in their top bytes.
"""

from __future__ import annotations

import numpy as np

from casckpt.format.encodings.scratch import Unsigned, scratch


def zigzag(elements: Unsigned, base: Unsigned, out: Unsigned) -> None:
    """Write the differences of ``elements`` to ``base``; ``out`` is none of them."""
    np.subtract(elements, base, out=out)
    signs = scratch("other", out.nbytes).view(f"i{out.itemsize}")
    np.right_shift(out.view(signs.dtype), 8 * out.itemsize - 1, out=signs)
    np.left_shift(out, 1, out=out)
    np.bitwise_xor(out, signs.view(out.dtype), out=out)


def unzigzag(differences: Unsigned) -> None:
    """Make numbers of zigzag differences, in place."""
    signs = scratch("other", differences.nbytes).view(differences.dtype)
    np.bitwise_and(differences, 1, out=signs)
    np.negative(signs, out=signs)
    np.right_shift(differences, 1, out=differences)
    np.bitwise_xor(differences, signs, out=differences)
