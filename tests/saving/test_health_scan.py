from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.contents.checkpoint import TensorHealth
from casckpt.format.dtypes import DTYPES
from casckpt.format.sections.health import CellHealth
from casckpt.saving import health_scan as looking
from casckpt.saving.health_scan import has_health, health_of
from tests.saving.test_health import expected
from tests.support.saves import CELL, cells, small, trained
from tests.support.tensors import NAMES

PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


NUMBERS = sorted(filter(has_health, DTYPES))


# one cell


@pytest.mark.parametrize("dtype", [name for name in NUMBERS if name in NAMES])
@given(raw=st.binary(min_size=16, max_size=160).map(lambda raw: raw[: len(raw) // 16 * 16]), small=st.booleans())
def test_health_of_a_cell_matches_torch(dtype: str, raw: bytes, small: bool) -> None:
    data = bytearray(byte // 3 for byte in raw) if small else bytearray(raw)  # a few NaNs, or many
    values = torch.frombuffer(data, dtype=getattr(torch, PARTS.get(dtype, dtype)))
    wide = values.to(torch.float32).double() if dtype.startswith("float8") else values
    found = health_of(dtype, memoryview(data))
    if values.dtype == torch.uint64:  # torch rounds differently from Python
        assert found == CellHealth(0, 0, float(max(values.tolist())))
    else:
        assert TensorHealth(*found) == expected([wide])


def test_tensors_without_numbers_are_not_scanned() -> None:
    assert {*DTYPES} - {*NUMBERS} == {
        "bool", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    }  # fmt: skip


# one save


def state() -> dict[str, torch.Tensor]:
    return {"big": cells(5, 1), "half": trained(3, 2), "count": torch.arange(-7, 3), "mask": torch.tensor([True])}


def wanted(tensors: dict[str, torch.Tensor]) -> dict[str, TensorHealth]:
    return {key: expected([tensor]) for key, tensor in tensors.items() if tensor.dtype != torch.bool}


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each scanned cell."""
    found: list[int] = []

    def counting(dtype: str, data: memoryview) -> CellHealth:
        found.append(len(data))
        return health_of(dtype, data)

    monkeypatch.setattr(looking, "health_of", counting)
    return found


def test_only_changed_cells_are_scanned(looked: list[int]) -> None:
    store, tensors = small(), state()
    store.save(tensors, step=1, health=True)
    assert len(looked) == 5 + 3 + 1
    looked.clear()
    store.save(tensors, step=2, health=True)
    assert not looked
    tensors["big"][0] = 9e9
    saved = store.save(tensors, step=3, health=True)
    assert looked == [CELL]
    assert saved.health == wanted(tensors)


def test_all_cells_are_scanned_once_if_the_parent_has_no_health(looked: list[int]) -> None:
    store, tensors = small(), state()
    store.save(tensors, step=1)
    saved = store.save(tensors, step=2, health=True)
    assert (saved.stats.blobs_written, len(looked), saved.health) == (0, 9, wanted(tensors))
    looked.clear()
    assert store.save(tensors, step=3, health=True).health == wanted(tensors)
    assert not looked
