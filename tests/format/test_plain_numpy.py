from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from casckpt.errors import Refused
from casckpt.format import plain
from tests.format.test_plain import back
from tests.support.exact import same
from tests.support.ids import named


def test_arrays_in_fortran_order_decode_with_their_values() -> None:
    array = np.asfortranarray(np.arange(24).reshape(2, 3, 4))[:, ::2]
    assert same(back(array), np.ascontiguousarray(array))


def test_decoded_numpy_arrays_are_writable() -> None:
    array = back(np.arange(3))
    array[0] = 9
    assert array.tolist() == [9, 1, 2]


BITS = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)


@pytest.mark.parametrize("bits", BITS)
def test_decoded_generators_continue_their_sequence(bits: Any) -> None:
    generator = np.random.Generator(bits([1, 2**100]))
    generator.spawn(2)
    generator.integers(3, size=5, dtype=np.uint32)
    other = back(generator)
    assert np.array_equal(other.integers(2**60, size=700), generator.integers(2**60, size=700))
    assert other.spawn(1)[0].random() == generator.spawn(1)[0].random()
    assert type(back(bits(3))) is bits
    assert same(back(bits(3)).state, bits(3).state)


@pytest.mark.parametrize("bits", BITS)
def test_a_decoded_random_state_continues_its_sequence(bits: Any) -> None:
    legacy = np.random.RandomState(bits(7))
    legacy.normal()  # leaves a cached second number
    other = back(legacy)
    assert type(other) is np.random.RandomState
    assert np.array_equal(other.normal(size=700), legacy.normal(size=700))


def test_a_decoded_generator_spawns_the_same_children() -> None:
    generator = np.random.default_rng(np.array([3, 4]))
    assert back(generator).spawn(1)[0].random() == generator.spawn(1)[0].random()


def titled(dtype: np.dtype[Any]) -> bool:
    """Report whether fields have titles, which are refused."""
    if dtype.subdtype is not None:
        return titled(dtype.subdtype[0])
    return any(len(field) > 2 or titled(field[0]) for field in (dtype.fields or {}).values())


STRUCTURED = hnp.array_dtypes(subtype_strategy=hnp.scalar_dtypes(), allow_subarrays=True)


@given(hnp.arrays(STRUCTURED.filter(lambda dtype: not titled(dtype)), hnp.array_shapes(max_dims=2, max_side=2)))
def test_any_structured_numpy_array_decodes_exactly(array: np.ndarray[Any, Any]) -> None:
    assert same(back(array), array)


def changed_state(bits: str, field: str, value: Any, *, legacy: bool = False) -> Any:
    kind = getattr(np.random, bits)
    state = np.random.RandomState(kind(1)).get_state(legacy=False) if legacy else kind(1).state
    inner = state if field in state else state["state"]
    inner[field] = value
    return state


@pytest.mark.parametrize(
    ("bits", "field", "value"),
    [
        ("MT19937", "pos", 625),
        ("MT19937", "pos", -1),
        ("MT19937", "pos", True),
        ("MT19937", "key", np.zeros(623, np.uint32)),
        ("MT19937", "key", np.zeros(624, np.float64)),
        ("MT19937", "bit_generator", "PCG64"),
        ("Philox", "buffer_pos", -1),
        ("Philox", "buffer_pos", 5),
        ("Philox", "counter", [1, 2, 3, 4]),
        ("PCG64", "state", 2**128),
        ("PCG64", "has_uint32", 2),
        ("SFC64", "uinteger", 2**32),
        ("SFC64", "more", 1),
    ],
)
def test_generator_states_that_make_numpy_read_out_of_bounds_are_rejected(bits: str, field: str, value: Any) -> None:
    state = changed_state(bits, field, value)
    wire = msgspec.msgpack.decode(plain.encode(state))
    for tag, children in (("numpy.Generator", [wire, None]), ("numpy.BitGenerator", [wire, None])):
        with pytest.raises(Refused):
            plain.decode(msgspec.msgpack.encode([tag, *children]))
    legacy = msgspec.msgpack.decode(plain.encode(changed_state(bits, field, value, legacy=True)))
    with pytest.raises(Refused):
        plain.decode(msgspec.msgpack.encode(["numpy.RandomState", legacy]))


@pytest.mark.parametrize(
    "change",
    [
        {"pool_size": 2**40},
        {"entropy": -1},
        {"entropy": "x"},
        {"spawn_key": range(10**12)},
        {"entropy": 2**5000},
        {"x": 1},
    ],
    ids=named,
)
def test_seeds_that_numpy_would_take_long_to_process_are_rejected(change: dict[str, Any]) -> None:
    seed = {**np.random.SeedSequence(1).state, **change}
    wire = [msgspec.msgpack.decode(plain.encode(item)) for item in (np.random.PCG64(1).state, seed)]
    with pytest.raises(Refused):
        plain.decode(msgspec.msgpack.encode(["numpy.Generator", *wire]))
