"""Names of runs, steps and attachments that are usable, and others."""

from __future__ import annotations

import numpy as np
import pytest

from casckpt.base.names import check_run, check_step
from casckpt.errors import InvalidInput


@pytest.mark.parametrize("run", ["a", "A-1/b.c_d", "x" * 200])
def test_a_usable_run_is_returned(run: str) -> None:
    assert check_run(run) == run


@pytest.mark.parametrize("run", ["", "/a", ".a", "a b", "a\n", "é", "x" * 201, "a@b", "٣", None, 3, b"a"])
def test_an_unusable_run_is_refused(run: str) -> None:
    with pytest.raises(InvalidInput, match="not a usable name"):
        check_run(run)


@pytest.mark.parametrize("step", [-1, 2**63, True, 1.0, "1", None])
def test_a_step_is_an_int_from_0_to_2_63(step: int) -> None:
    with pytest.raises(InvalidInput, match="not usable"):
        check_step(step)
    assert check_step(2**63 - 1) == 2**63 - 1
    assert type(check_step(np.uint64(7))) is int
