"""Converts numpy arrays, scalars and random number generators to plain data.

Values are preserved exactly, including byte order, NaN payloads, NaT and structured dtypes. Memory order and the
aliasing of views are not preserved: an array is restored in C order. dtypes that contain object references are
rejected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from types import NoneType
from typing import Any

import numpy as np

from casckpt.format.plain_codecs import Buffer, Codec, Unfit, expect
from casckpt.format.regions import check_shape

_MANTISSA = int(np.finfo(np.longdouble).nmant)  # 80-bit, double-double and quad formats share a name
_DTYPE = re.compile(
    r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[SUV][1-9]\d{0,9}|[mM]8(\[([1-9]\d{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
    rf"|[<>][fc]\d\d/{_MANTISSA}"
)
_STRUCT = ("names", "formats", "offsets", "itemsize", "aligned")


# dtypes, in the forms that numpy.dtype accepts


def dtype_form(dtype: np.dtype[Any]) -> Any:
    """Convert a dtype to plain data. Raises `Unfit` for a dtype that cannot be restored exactly."""
    unfit = Unfit(f"a numpy array or scalar of dtype {str(dtype)[:60]}", "use a numeric, str, bytes or time dtype")
    if dtype.hasobject or dtype.metadata or not dtype.itemsize:
        raise unfit
    form = _form(dtype)
    try:
        same = dtype_of(form)
    except (TypeError, ValueError) as error:
        raise unfit from error
    if same != dtype or (dtype.kind == "V" and dtype.type is not np.void):
        raise unfit
    return form


def _form(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        return (_form(dtype.subdtype[0]), dtype.subdtype[1])
    if dtype.fields is not None:
        # a title is a third item of the field: it is lost here, and the caller detects this by comparison
        fields = [dtype.fields[name] for name in dtype.names or ()]
        columns = (list(dtype.names or ()), [_form(field[0]) for field in fields], [field[1] for field in fields])
        return dict(zip(_STRUCT, (*columns, dtype.itemsize, dtype.isalignedstruct), strict=True))
    is_long = dtype.type in (np.longdouble, np.clongdouble) and not _DTYPE.fullmatch(dtype.str)
    return f"{dtype.str}/{_MANTISSA}" if is_long else dtype.str


def dtype_of(form: Any, depth: int = 0) -> np.dtype[Any]:
    """Convert plain data back to a dtype. Raises TypeError or ValueError for invalid data."""
    if depth > 16:
        raise ValueError("its dtype is nested too deeply")
    if type(form) is tuple:
        base, shape = expect(form, (str, tuple, dict), tuple)
        return _made((dtype_of(base, depth + 1), _shape(shape)))
    if type(form) is dict:
        if tuple(form) != _STRUCT:
            raise ValueError("its dtype has invalid fields")
        names, formats, offsets, _, _ = expect([*form.values()], list, list, list, int, bool)
        expect([*names, *offsets], *[str] * len(names), *[int] * len(names))
        return _made(form | {"formats": [dtype_of(one, depth + 1) for one in formats]})
    if type(form) is not str or not _DTYPE.fullmatch(form):
        raise ValueError(f"unknown dtype {str(form)[:40]!r}")
    return _made(form.partition("/")[0])


def _made(spec: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(spec)
    except (KeyError, IndexError, OverflowError, MemoryError) as error:
        raise ValueError(f"it is not a dtype: {error}") from error
    if not dtype.itemsize or dtype.hasobject:
        raise ValueError("its dtype has no size, or contains objects")
    return dtype


def _shape(numbers: Sequence[Any]) -> tuple[int, ...]:
    return check_shape(tuple(expect(numbers, *[int] * len(numbers))))


# arrays and scalars


def _form_of(array: np.ndarray[Any, Any]) -> Any:
    form = dtype_form(array.dtype)
    try:
        _check_text(array.reshape(-1))
    except ValueError as error:
        raise Unfit(
            "a numpy array of strings with characters outside Unicode", "check whether it was ever filled"
        ) from error
    return form


def _split_array(array: np.ndarray[Any, Any]) -> list[Any]:
    form = _form_of(array)
    raw = np.asarray(array, order="C").reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    return [form, array.shape, Buffer(raw.data)]


def _join_array(children: list[Any]) -> np.ndarray[Any, Any]:
    form, numbers, data = expect(children, (str, tuple, dict), tuple, bytes)
    dtype, shape = dtype_of(form), _shape(numbers)
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(
            f"shape {list(shape)[:8]} with {dtype.itemsize} bytes per item does not match {len(data)} bytes"
        )
    array: np.ndarray[Any, Any] = np.empty(shape, dtype)
    if array.dtype != dtype or array.shape != shape:  # numpy moves the shape of an "array" dtype into the array's shape
        raise ValueError("its dtype cannot be that of an array")
    if len(data):
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        _check_text(array.reshape(-1))
    return array


def _check_text(array: np.ndarray[Any, Any]) -> None:
    """Raise ValueError for characters outside Unicode. numpy accepts them, but fails with a SystemError on reading."""
    if array.dtype.kind == "U" and array.size:
        characters = np.ascontiguousarray(array).view(array.dtype.str[0] + "u4")
        if int(characters.max()) > 0x10FFFF:
            raise ValueError("its strings have characters outside Unicode")
    for name in array.dtype.names or ():
        _check_text(array[name].reshape(-1))


def _split_scalar(scalar: np.generic) -> list[Any]:
    array = np.asarray(scalar)
    return [_form_of(array), array.tobytes()]


def _join_scalar(children: list[Any]) -> Any:
    form, data = expect(children, (str, tuple, dict), bytes)
    return _join_array([form, (), data])[()]


_SCALARS = tuple(sorted({*np.sctypeDict.values()} - {np.object_, np.str_, np.bytes_}, key=lambda kind: kind.__name__))


# random generators

_GENERATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
_POSITIONS = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": 2**32 - 1}


def _check_state(state: Any, template: Any, name: str = "") -> None:
    """Raise TypeError or ValueError unless ``state`` matches ``template``, because numpy would read out of bounds."""
    if type(state) is not type(template):
        raise TypeError(f"{name!r} of a generator's state is of type {type(state).__name__}")
    if isinstance(state, dict):
        if list(state) != list(template):
            raise ValueError("a generator's state has unexpected fields")
        for key, value in state.items():
            _check_state(value, template[key], key)
    elif isinstance(state, np.ndarray):
        if state.dtype != template.dtype or state.shape != template.shape:
            raise ValueError(f"{name!r} of a generator's state has the wrong shape or dtype")
    elif isinstance(state, int) and not 0 <= state <= _POSITIONS.get(name, 2**128 - 1):
        raise ValueError(f"{name!r} of a generator's state is outside its range")


def _check_entropy(entropy: Any) -> None:
    """Raise ValueError for entropy from which seeding would take a long time."""
    words = entropy if type(entropy) in (list, tuple) else [entropy]
    if len(words) > 1024 or not all(type(word) is int and 0 <= word < 2**1024 for word in words):
        raise ValueError("the entropy of a generator's seed is outside its range")


def _seed_of(generator: Any) -> dict[str, Any] | None:
    """Return the state from which a generator's `spawn` continues, or None if no SeedSequence can restore it."""
    seed = generator.seed_seq
    if type(seed) is not np.random.SeedSequence:
        return None
    state = dict(seed.state)
    if isinstance(state["entropy"], np.ndarray | np.integer):
        state["entropy"] = state["entropy"].tolist()
    try:
        _seed_from(state)
    except (TypeError, ValueError):
        return None
    return state


def _seed_from(state: dict[str, Any]) -> np.random.SeedSequence:
    fields = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
    if tuple(state) != fields:
        raise ValueError("the seed of a generator has unexpected fields")
    entropy, spawn_key, pool_size, spawned = (state[field] for field in fields)
    _check_entropy(entropy)
    _check_entropy(*expect([spawn_key], tuple))
    if type(pool_size) is not int or type(spawned) is not int or not (4 <= pool_size <= 64 and 0 <= spawned < 2**32):
        raise ValueError("the seed of a generator is outside its range")
    return np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned)


def _split_bits(bits: Any) -> list[Any]:
    return [bits.state, _seed_of(bits)]


def _join_bits(children: list[Any]) -> Any:
    state, seed = expect(children, dict, (dict, NoneType))
    generator = _GENERATORS[state["bit_generator"]](0 if seed is None else _seed_from(seed))
    _check_state(state, generator.state)
    generator.state = state
    return generator


def _split_generator(generator: np.random.Generator) -> list[Any]:
    bits = generator.bit_generator
    if type(bits).__name__ not in _GENERATORS:
        raise Unfit(f"a numpy Generator over {type(bits).__qualname__}", "use one of numpy's bit generators")
    return _split_bits(bits)


def _join_random_state(children: list[Any]) -> np.random.RandomState:
    (state,) = expect(children, dict)
    legacy = np.random.RandomState(_GENERATORS[state["bit_generator"]](0))
    _check_state(state, legacy.get_state(legacy=False))
    legacy.set_state(state)
    return legacy


NUMPY = (
    Codec("numpy.ndarray", (np.ndarray,), _split_array, _join_array),
    Codec("numpy.scalar", _SCALARS, _split_scalar, _join_scalar),
    # an array would drop trailing zeros
    Codec("numpy.str", (np.str_,), lambda value: [str(value)], lambda c: np.str_(*expect(c, str))),
    Codec("numpy.bytes", (np.bytes_,), lambda value: [bytes(value)], lambda c: np.bytes_(*expect(c, bytes))),
    Codec("numpy.BitGenerator", tuple(_GENERATORS.values()), _split_bits, _join_bits),
    Codec(
        "numpy.Generator",
        (np.random.Generator,),
        _split_generator,
        lambda children: np.random.Generator(_join_bits(children)),
    ),
    Codec(
        "numpy.RandomState",
        (np.random.RandomState,),
        lambda value: [value.get_state(legacy=False)],
        _join_random_state,
    ),
)
