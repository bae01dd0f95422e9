"""Samples of tensors: the same bytes whatever their strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casckpt.tensors.sampling import RUN, sampled


def bytes_of(data: torch.Tensor) -> bytes:
    return bytes(data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())


BASE = torch.arange(240, dtype=torch.float32).reshape(12, 20)
FORMS = {
    "as it is": BASE,
    "transposed": BASE.t(),
    "with gaps": BASE[:, ::2],
    "inside another": BASE[3:, :],
    "halves at an odd place": torch.arange(101, dtype=torch.float16)[1:],
    "conjugate": torch.randn(30, dtype=torch.complex64).conj(),
    "negative": torch.randn(30, dtype=torch.complex64).conj().imag,
    "bytes": torch.arange(200, dtype=torch.uint8),
}


@pytest.mark.parametrize("form", FORMS)
def test_runs_are_those_of_the_row_major_order(form: str) -> None:
    data = FORMS[form]
    size, nbytes = data.element_size(), data.numel() * data.element_size()
    last = nbytes - RUN
    starts = np.array([[0, last // 2 // size * size, last, size]])
    (found,) = sampled([data], starts, np.array([nbytes]))
    assert found.tobytes() == b"".join(bytes_of(data)[start : start + RUN] for start in starts[0])


def test_small_tensors_are_filled_up_with_zeros_and_empty_ones_are_zero() -> None:
    tensors = [torch.tensor(3, dtype=torch.int64), torch.tensor([1.5, 2.5]), torch.zeros(0), torch.ones(4)]
    nbytes = np.array([data.nbytes for data in tensors])
    found = sampled(tensors, np.zeros((4, 2), np.int64), nbytes)
    for data, row in zip(tensors, found, strict=True):
        assert row.tobytes() == bytes_of(data).ljust(RUN, b"\0") * 2 if data.numel() else not row.any()


def test_many_tensors_at_a_time_keep_their_order() -> None:
    tensors = [torch.full((100,), float(i)) if i % 3 else torch.full((10, 20), float(i))[:, ::2] for i in range(50)]
    found = sampled(tensors, np.zeros((50, 1), np.int64), np.full(50, 400))
    assert found.view(np.float32)[:, 0].tolist() == list(range(50))
