"""Bytes are read from and written to any tensor exactly, for any layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.regions import Box, Region, Shape, full_box
from casckpt.tensors import memory as module
from casckpt.tensors.memory import (
    WIDE,
    BufferMemory,
    Destination,
    TensorMemory,
    as_bits,
    copy_addresses,
    copy_bytes,
    narrow,
    tensor_bytes,
)
from tests.support.geometry import elements, full_shapes, regions
from tests.support.tensors import COMPLEX, LAYOUTS, NAMES, bytes_of, conjugated, dtype_of, raw, same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def out(memory: TensorMemory | BufferMemory, lo: int, hi: int) -> bytes:
    if lo == hi:
        return b""  # cells are never empty
    buffer = bytearray((hi - lo) * memory.itemsize)
    memory.copy_out(lo, hi, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_read_from_every_dtype_and_layout(name: str) -> None:
    for layout, make in LAYOUTS.items():
        tensor = make(name, 1)
        memory, want = TensorMemory(tensor), bytes_of(tensor)
        count, size = tensor.numel(), tensor.element_size()
        assert memory.itemsize == size
        for lo, hi in ((0, count), (count // 3, count // 2), (count // 2, count)):
            if lo < hi:
                assert out(memory, lo, hi) == want[lo * size : hi * size], layout
                view = memory.view(lo, hi)
                assert (view is not None) == tensor.is_contiguous(), layout
                assert view is None or bytes(view) == want[lo * size : hi * size], layout


@pytest.mark.parametrize("name", COMPLEX)
def test_bytes_are_read_from_conjugated_and_negated_views(name: str) -> None:
    for tensor in conjugated(name).values():
        memory = TensorMemory(tensor)
        assert out(memory, 0, tensor.numel()) == bytes_of(tensor)
        assert out(memory, 2, 7) == bytes_of(tensor)[2 * memory.itemsize : 7 * memory.itemsize]


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_can_begin_at_any_address(name: str) -> None:
    """Values that are stored as bytes may begin at any byte of a blob, where torch's 16-byte copies would crash."""
    source, target = raw(name, (9, 8)).t(), raw(name, (9, 8), 2).t()
    nbytes = len(bytes_of(source))
    buffer = memoryview(bytearray(nbytes + 1))[1:]
    TensorMemory(source).copy_out(0, 72, buffer)
    assert bytes(buffer) == bytes_of(source)
    region = Region(full_box((8, 9)), 0, 72)
    Destination(region, target, dtype_of(name)).copy_in(region, buffer)
    assert same(target, source)


@given(full_shapes, st.data())
def test_any_range_of_a_permuted_tensor_is_read(shape: Shape, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = raw("int32", shape).permute(order)
    lo = data.draw(st.integers(0, tensor.numel()))
    hi = data.draw(st.integers(lo, tensor.numel()))
    assert out(TensorMemory(tensor), lo, hi) == bytes_of(tensor)[4 * lo : 4 * hi]


def test_bytes_of_parameters_and_tensors_with_a_graph_are_read() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    for tensor in (parameter, parameter.t(), parameter * 2, (parameter * 2).t()):
        assert out(TensorMemory(tensor), 0, 12) == bytes_of(tensor)


def test_a_contiguous_tensor_is_viewed_without_a_copy() -> None:
    tensor = torch.zeros(10, dtype=torch.int16)
    view = tensor_bytes(tensor)
    assert view is not None
    view[2:4] = b"\x05\x00"
    assert tensor.tolist() == [0, 5, *[0] * 8]
    assert tensor_bytes(tensor[::2]) is None
    empty = tensor_bytes(torch.zeros(0, 3))
    assert empty is not None
    assert empty.nbytes == 0


def test_a_buffer_is_converted_to_bytes() -> None:
    memory = BufferMemory(np.arange(10, dtype=np.uint16).data)
    assert bytes(memory.view(2, 6)) == b"\x01\x00\x02\x00"
    assert out(memory, 2, 6) == b"\x01\x00\x02\x00"


@pytest.mark.parametrize("size", [0, 1, (1 << 14) - 1, 1 << 14, 1 << 16])
def test_bytes_are_copied_between_buffers(size: int) -> None:
    source, target = np.random.default_rng(size).bytes(size), bytearray(size)
    copy_bytes(memoryview(target), memoryview(source))
    assert target == source


@pytest.mark.parametrize("name", NAMES)
def test_a_view_of_the_bits_preserves_every_bit(name: str) -> None:
    tensor = raw(name, (3, 4)).t()
    assert bytes_of(as_bits(tensor)) == bytes_of(tensor)


def test_narrow_selects_the_correct_elements_of_a_tensor() -> None:
    tensor = torch.arange(60).view(3, 4, 5)
    assert torch.equal(narrow(tensor, Box((1, 0, 2), (2, 4, 3))), tensor[1:3, :, 2:5])


def _filled(destination: Destination, source: bytes, shape: Shape, size: int, parts: list[Region]) -> None:
    """Fill a destination with the elements of ``parts`` of a tensor with these bytes."""
    for part in parts:
        if not part.numel:
            continue  # cells are never empty
        data = b"".join(source[i * size : (i + 1) * size] for i in elements(part, shape))
        destination.copy_in(part, memoryview(bytearray(data)))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_written_into_every_dtype_and_layout(name: str) -> None:
    for layout in ("contiguous", "strided", "transposed", "scalar"):
        target, source = LAYOUTS[layout](name, 1), LAYOUTS[layout](name, 2)
        shape = tuple(target.shape)
        region = Region(full_box(shape), 0, target.numel())
        destination = Destination(region, target, dtype_of(name))
        half = target.numel() // 2
        parts = [Region(region.box, 0, half), Region(region.box, half, target.numel())]
        _filled(destination, bytes_of(source), shape, target.element_size(), parts)
        assert same(target, source), layout
        assert (destination.view(0, target.numel()) is not None) == target.is_contiguous(), layout


@given(full_shapes, st.data())
def test_any_region_is_copied_from_any_region(shape: Shape, data: st.DataObject) -> None:
    """The copy writes the requested elements and no others."""
    wanted, part = data.draw(regions(shape)), data.draw(regions(shape))
    source = np.arange(1, int(np.prod(shape)) + 1, dtype=np.int32)
    held = torch.zeros(wanted.numel, dtype=torch.int32)
    target = held.view(wanted.box.shape) if wanted.is_whole else held
    _filled(Destination(wanted, target, torch.int32), source.tobytes(), shape, 4, [part])
    inside = set(elements(part, shape))
    assert held.tolist() == [i + 1 if i in inside else 0 for i in elements(wanted, shape)]


@given(full_shapes, st.data())
def test_a_permuted_destination_is_filled(shape: Shape, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    stored = tuple(shape[dim] for dim in order)
    target = torch.zeros(shape, dtype=torch.int32).permute(order)
    source = np.arange(target.numel(), dtype=np.int32)
    whole = Region(full_box(stored), 0, target.numel())
    cut = data.draw(st.integers(0, target.numel()))
    parts = [Region(whole.box, 0, cut), Region(whole.box, cut, target.numel())]
    _filled(Destination(whole, target, torch.int32), source.tobytes(), stored, 4, parts)
    assert target.reshape(-1).tolist() == source.tolist()


def test_a_destination_with_a_conjugate_bit_is_filled() -> None:
    source = torch.randn(3, 4, dtype=torch.complex64)
    for target in (
        torch.zeros(3, 4, dtype=torch.complex64).conj(),
        torch.zeros(4, 3, dtype=torch.complex64).t().conj(),
    ):
        region = Region(full_box((3, 4)), 0, 12)
        destination = Destination(region, target, torch.complex64)
        assert destination.view(0, 12) is None
        _filled(destination, bytes_of(source), (3, 4), 8, [region])
        assert same(target, source)


def test_a_copy_into_a_different_dtype_converts_the_values() -> None:
    region = Region(full_box((5,)), 0, 5)
    target = torch.zeros(5, dtype=torch.float64)
    destination = Destination(region, target, torch.bfloat16)
    source = torch.tensor([1.5, -2.0, 0.0, 3.25, 100.0], dtype=torch.bfloat16)
    assert destination.view(0, 5) is None
    _filled(destination, bytes_of(source), (5,), 2, [region])
    assert target.tolist() == source.tolist()


def test_ranges_of_all_sizes_are_copied_between_addresses() -> None:
    sizes = np.array([1, WIDE - 1, 7, WIDE, 4 * WIDE - 1, 7, WIDE, WIDE - 1])
    source, target = torch.randint(256, (int(sizes.sum()),), dtype=torch.uint8), torch.zeros(1 << 18, dtype=torch.uint8)
    starts = np.cumsum(sizes) - sizes
    places = np.cumsum(np.append(0, sizes[:-1] + 3))
    copy_addresses(target.data_ptr() + places, source.data_ptr() + starts, sizes)
    for place, start, size in zip(places.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        assert torch.equal(target[place : place + size], source[start : start + size])
    assert not target[places[:-1] + sizes[:-1]].any()


def test_small_ranges_may_be_as_far_apart_as_addresses_are() -> None:
    """On Arm, a program's heap and its maps may be at both ends of an address space of 48 bits."""
    assert len(np.asarray(module._HostMemory(1 << 16, (1 << 48) - (1 << 16), WIDE - 1)))
