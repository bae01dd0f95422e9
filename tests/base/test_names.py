"""Valid and invalid names of runs, steps and attachments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.base.names import check_run, check_step
from casckpt.errors import InvalidInput
from tests.support.repositories import memory
from tests.support.saves import small


@pytest.mark.parametrize("run", ["a", "A-1/b.c_d", "x" * 200])
def test_a_valid_run_name_is_returned(run: str) -> None:
    assert check_run(run) == run


@pytest.mark.parametrize("run", ["", "/a", ".a", "a b", "a\n", "é", "x" * 201, "a@b", "٣", None, 3, b"a"])
def test_an_invalid_run_name_is_rejected(run: str) -> None:
    with pytest.raises(InvalidInput, match="not a valid name"):
        check_run(run)


@pytest.mark.parametrize("step", [-1, 2**63, True, 1.0, "1", None])
def test_a_step_is_a_nonnegative_64_bit_integer(step: int) -> None:
    with pytest.raises(InvalidInput, match="not valid"):
        check_step(step)
    assert check_step(2**63 - 1) == 2**63 - 1
    assert type(check_step(np.uint64(7))) is int


@pytest.fixture
def saved() -> casckpt.Store:
    store = small(memory())
    store.save({"w": torch.arange(3.0)}, step=1)
    return store


@pytest.mark.parametrize("name", ["save", "save_async", "load", "read", "pre_download"])
def test_the_error_for_a_misspelled_keyword_names_it(saved: casckpt.Store, name: str) -> None:
    given: dict[str, Any] = {"step": 2} if name.startswith("save") else {"ref": "default@1"}
    state: dict[str, Any] = {} if name == "read" else {"state": {}}
    with pytest.raises(TypeError, match=rf"^Store\.{name}\(\) got an unexpected keyword argument 'allow_pickel'$"):
        getattr(saved, name)(**state, **given, allow_pickel=True)
    assert [one.step for one in saved.checkpoints()] == [1]


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("read", "strict"),
        ("read", "rename"),
        ("read", "process_group"),
        ("load", "ranks"),
        ("load", "alive"),
        ("pre_download", "unread"),
        ("pre_download", "verify"),
    ],
)
@pytest.mark.parametrize("state", [{}, {"state": {}}], ids=["no state", "state"])
def test_a_keyword_that_belongs_to_a_different_call_is_rejected(
    saved: casckpt.Store, name: str, keyword: str, state: dict[str, Any]
) -> None:
    given = {"load": {"state": {}}, "read": {}, "pre_download": state}[name]
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        getattr(saved, name)(ref="default@1", **given, **{keyword: None})
