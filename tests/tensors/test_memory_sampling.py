"""Samples of tensors have the same bytes for any strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casckpt.tensors.memory import RUN, sampled


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
def test_samples_of_a_tensor_are_taken_in_row_major_order(form: str) -> None:
    data = FORMS[form]
    size, count = data.element_size(), data.numel()
    last = count - RUN // size
    starts = np.array([[0, last // 2, last, 1]])
    (found,) = sampled([data], starts, np.array([count]), np.array([size]))
    assert found.tobytes() == b"".join(bytes_of(data)[start * size :][:RUN] for start in starts[0])


SHORT = [
    torch.tensor(3, dtype=torch.int64), torch.tensor([1.5, 2.5]), torch.zeros(0), torch.ones(4), torch.tensor(True),
    torch.tensor([1, 2, 3], dtype=torch.float16),
]  # fmt: skip


def test_the_sample_of_a_short_tensor_repeats_its_last_element() -> None:
    gaps = [torch.stack([data, data], -1)[..., 0] if data.dim() else data.conj() for data in SHORT]
    counts = np.array([data.numel() for data in SHORT])
    sizes = np.array([data.element_size() for data in SHORT])
    for tensors in (SHORT, gaps):
        found = sampled(tensors, np.zeros((len(SHORT), 2), np.int64), counts, sizes)
        for data, row in zip(SHORT, found, strict=True):
            one = bytes_of(data)
            filled = one + one[-data.element_size() :] * 16 if one else bytes(16)
            assert row.tobytes() == filled[:RUN] * 2


def test_samples_of_many_tensors_keep_the_order_of_the_tensors() -> None:
    tensors = [torch.full((100,), float(i)) if i % 3 else torch.full((10, 20), float(i))[:, ::2] for i in range(50)]
    found = sampled(tensors, np.zeros((50, 1), np.int64), np.full(50, 100), np.full(50, 4))
    assert found.view(np.float32)[:, 0].tolist() == list(range(50))
