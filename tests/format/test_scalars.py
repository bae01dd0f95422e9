"""Values without dimensions become Python numbers; the error for a tensor without a value gives advice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import InvalidInput
from casckpt.format.scalars import python_value


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (torch.tensor(0.5, requires_grad=True), 0.5), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(3), 3), (torch.tensor(True), True), (np.float32(0.5), 0.5), (np.array(2), 2), (np.str_("a"), "a"),
        ("a", "a"), ([1], [1]), (None, None),
    ],
)  # fmt: skip
def test_a_value_without_dimensions_becomes_a_python_number(value: Any, want: Any) -> None:
    found = python_value(value, "x")
    assert found == want
    assert type(found) is type(want)


def test_a_tensor_with_dimensions_is_returned_unchanged() -> None:
    tensor = torch.ones(1)
    assert python_value(tensor, "x") is tensor


class Distributed:
    """What the class of torch's DTensor shows."""

    shape = ()

    def full_tensor(self) -> None:
        """A collective."""


@pytest.mark.parametrize(
    ("value", "advice"), [(torch.ones((), device="meta"), "give a number"), (Distributed(), "its full_tensor()")]
)
def test_the_error_for_a_tensor_without_a_value_names_it(value: Any, advice: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        python_value(value, "metric 'loss'")
    assert str(caught.value).startswith("metric 'loss' is a ")
    assert advice in str(caught.value)
