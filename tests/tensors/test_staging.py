"""Copies for background saves are exact, and reuse memory."""

from __future__ import annotations

import sys

import pytest
import torch

from casckpt.tensors import staging
from casckpt.tensors.staging import Staging
from tests.support.forks import forked
from tests.support.saves import same_state
from tests.support.tensors import LAYOUTS, NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_copies_have_the_same_bits_and_do_not_share_memory(name: str) -> None:
    given = [make(name, 1) for make in LAYOUTS.values()]
    for data, copy in zip(given, Staging().copy(given), strict=True):
        assert (copy.dtype, copy.shape) == (data.dtype, data.shape)
        assert copy.is_contiguous()
        assert same_state({"x": copy}, {"x": data})
        if data.numel():
            assert copy.untyped_storage().data_ptr() != data.untyped_storage().data_ptr()


def test_staging_memory_is_reused_and_grows_if_needed() -> None:
    staging = Staging()
    (first,) = staging.copy([torch.ones(1000)])
    (second,) = staging.copy([torch.zeros(900)])
    assert first.data_ptr() == second.data_ptr()
    large = torch.randn(5000)
    assert torch.equal(staging.copy([large])[0], large)
    assert staging.nbytes == -(-large.nbytes // 64) * 64


def test_a_copy_uses_the_memory_that_was_reserved_for_it() -> None:
    staging = Staging()
    state = [torch.randn(100), torch.randn(7, 3).t(), torch.empty(0), torch.tensor(1)]
    staging.reserve(state)
    before = staging.nbytes
    assert [copy.tolist() for copy in staging.copy(state)] == [data.tolist() for data in state]
    assert staging.nbytes == before


def test_a_tensor_passed_twice_is_copied_once() -> None:
    data = torch.randn(64)
    one, two, other = Staging().copy([data, data, data.view(8, 8)])
    assert one is two
    assert other.data_ptr() != one.data_ptr()
    assert torch.equal(other.view(-1), data)


def test_an_empty_state_does_not_use_memory() -> None:
    staging = Staging()
    assert staging.copy([]) == []
    assert staging.copy([torch.empty(0, 3)])[0].shape == (0, 3)
    assert staging.nbytes == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other kernels cannot exclude memory from forks")
def test_a_forked_child_does_not_keep_the_memory_of_a_copy() -> None:
    """Otherwise, the next copy would need new pages while a data loader worker lives."""
    (copy,) = Staging().copy([torch.ones(1000)])

    def check() -> None:
        assert not copy.any()

    with forked(check):
        pass
    assert copy.all()


def test_memory_that_is_released_is_needed_again() -> None:
    staging, data = Staging(), torch.ones(16)
    assert staging.lacks([data, data]) == 64
    staging.reserve([data])
    assert staging.lacks([data]) == 0
    assert staging.lacks([data, torch.ones(17)]) == 64 + 128
    staging.release()
    assert (staging.nbytes, staging.lacks([data])) == (0, 64)


def test_large_tensors_are_copied_in_pieces_beside_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PIECE", 96)
    given = [torch.randn(n) for n in (1, 24, 25, 1000, 0, 7)]
    assert all(map(torch.equal, Staging().copy(given), given))
