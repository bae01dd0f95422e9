"""Plain data: values without tensors as tagged msgpack. It needs no pickle, and values are restored exactly.

None, bool, float, text, bytes and ints of 64 bits are msgpack's own. Everything else is an array whose first item is a
tag: ``["list", item, ...]``, ``["dict", key, value, key, value, ...]``, ``["complex", real, imaginary]``. No msgpack
maps and no extension types. Long buffers go to ``spill`` and leave ``["part", number, bytes]`` in their place.
The same input gives the same bytes: dicts keep their order, sets are sorted by their encoded items.

Kept: types, order, NaN payloads, lone surrogates. Not kept: that two places held the same object. The types are in
`casckpt.format.plain_codecs` and `casckpt.format.plain_numpy`, and `Extension` adds more. No class is looked up by a
name from the data.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, TypeAlias

import msgspec

from casckpt.errors import InvalidInput, Refused
from casckpt.format.plain_codecs import JOIN_ERRORS, STANDARD, Buffer, Codec, Unfit, int_bytes
from casckpt.format.plain_numpy import NUMPY

MAX_DEPTH = 200
"""Containers within containers."""
SPILL_FROM = 4096
"""Bytes of the smallest buffer that becomes a part."""
_PART = "part"

Spill: TypeAlias = Callable[[memoryview], int]
"""Takes a flat buffer of bytes, valid during the call only, and returns a new number."""
Load: TypeAlias = Callable[[int], bytes | bytearray | memoryview]
"""Returns the buffer of a number."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A type that a higher layer adds. ``from_plain`` gets unchecked data: it raises ValueError or TypeError."""

    tag: str
    type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Tagged:
    """A decoded value with an unknown tag, for display. ``payload``: its only child, or a tuple of children."""

    tag: str
    payload: Any


def encode(
    value: Any,
    *,
    extensions: Sequence[Extension] = (),
    spill: Spill | None = None,
    spill_from: int = SPILL_FROM,
    where: str = "value",
) -> bytes:
    """Encode a plain value.

    Buffers of ``spill_from`` bytes or more go to ``spill`` if it is given (never those inside a set, which has no
    stable order). ``where`` names the value in errors. Raises InvalidInput, naming the place inside the
    value, for what is not plain, contains itself or is nested more than MAX_DEPTH deep.
    """
    encoder = _Encoder(_by_type(extensions), spill, spill_from, where)
    try:
        return msgspec.msgpack.encode(encoder.pack(value))
    except RecursionError as error:
        raise InvalidInput(f"{where}: it is nested too deep to be stored here", key=where) from error


def decode(
    data: bytes | bytearray | memoryview,
    *,
    extensions: Sequence[Extension] = (),
    load: Load | None = None,
    strict: bool = False,
) -> Any:
    """Decode what `encode` made. Raises Refused for any other bytes, and what ``load`` raises.

    A value with an unknown tag becomes a `Tagged`; with ``strict`` it raises Refused.
    """
    try:
        return _Decoder(_by_tag(extensions), load, strict).unpack(msgspec.msgpack.decode(data), 0)
    except RecursionError as error:
        raise Refused("plain data is not usable: it is nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"plain data is not usable: {error}") from error


def _extension_codec(extension: Extension) -> Codec:
    def join(children: list[Any]) -> Any:
        (payload,) = children
        return extension.from_plain(payload)

    return Codec(extension.tag, (extension.type,), lambda value: [extension.to_plain(value)], join)


def _codecs(extensions: Sequence[Extension]) -> Iterable[Codec]:
    added = [_extension_codec(extension) for extension in extensions]
    for codec in added:
        if codec.tag in _BY_TAG or codec.tag == _PART:
            raise InvalidInput(f"the tag {codec.tag!r} of an extension is taken by plain data itself")
    return added


_BY_TYPE = {kind: codec for codec in (*STANDARD, *NUMPY) for kind in codec.types}
_BY_TAG = {codec.tag: codec for codec in (*STANDARD, *NUMPY)}


def _by_type(extensions: Sequence[Extension]) -> dict[type, Codec]:
    return _BY_TYPE | {kind: codec for codec in _codecs(extensions) for kind in codec.types}


def _by_tag(extensions: Sequence[Extension]) -> dict[str, Codec]:
    return _BY_TAG | {codec.tag: codec for codec in _codecs(extensions)}


class _Encoder:
    """One call of `encode`. ``trail``: the containers around the current value, with the index of the child."""

    def __init__(self, codecs: dict[type, Codec], spill: Spill | None, spill_from: int, where: str) -> None:
        self.codecs = codecs
        self.spill = spill
        self.spill_from = spill_from
        self.where = where
        self.trail: list[tuple[Codec, Any]] = []
        self.indices: list[int] = []
        self.open: set[int] = set()
        self.sets = 0

    def pack(self, value: Any) -> Any:
        """Convert a value to one that msgpack can encode."""
        kind = type(value)
        if kind is NoneType or kind is bool or kind is float:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else ["int", self._buffer(memoryview(int_bytes(value)))]
        if kind is str:
            return _text(value)
        if kind is bytes:
            return self._buffer(memoryview(value))
        if kind is Buffer:
            return self._buffer(value.view)
        codec, children = self._enter(value)
        packed = []
        for index, child in enumerate(children):
            self.indices[-1] = index
            packed.append(self.pack(child))
        self._leave(codec, value)
        if codec.unordered:
            packed.sort(key=msgspec.msgpack.encode)
        return [codec.tag, *packed]

    def _enter(self, value: Any) -> tuple[Codec, Iterable[Any]]:
        codec = self.codecs.get(type(value))
        if codec is None:
            raise self._refusal(_unfit(value))
        if id(value) in self.open:
            raise InvalidInput(f"{self._place()}: it contains itself; break the cycle", key=self.where)
        if len(self.trail) >= MAX_DEPTH:
            raise InvalidInput(f"{self._place()[:200]}...: more than {MAX_DEPTH} levels deep", key=self.where)
        try:
            children = codec.split(value)
        except Unfit as unfit:
            raise self._refusal(unfit) from unfit
        self.open.add(id(value))
        self.trail.append((codec, value))
        self.indices.append(0)
        self.sets += codec.unordered
        return codec, children

    def _leave(self, codec: Codec, value: Any) -> None:
        self.open.remove(id(value))
        self.trail.pop()
        self.indices.pop()
        self.sets -= codec.unordered

    def _buffer(self, view: memoryview) -> Any:
        if self.spill is None or self.sets or view.nbytes < self.spill_from:
            return bytes(view)
        return [_PART, self.spill(view), view.nbytes]

    def _place(self) -> str:
        steps = (codec.step(value, index) for (codec, value), index in zip(self.trail, self.indices, strict=True))
        return self.where + "".join(steps)

    def _refusal(self, unfit: Unfit) -> InvalidInput:
        message = (
            f"{self._place()}: {unfit.what} cannot be stored as plain data; {unfit.hint}, or pass allow_pickle=True"
        )
        return InvalidInput(message, key=self.where)


def _text(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # lone surrogates, as file names that are not UTF-8 have them
            return ["str", value.encode("utf-8", "surrogatepass")]
    return value


def _unfit(value: Any) -> Unfit:
    """Explain why a value of a type that is not in the table is refused."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return Unfit("a function", "store its name")
    if isinstance(value, type):
        return Unfit(f"a class ({value.__module__}.{value.__qualname__})", "store its name")
    if isinstance(value, ModuleType):
        return Unfit("a module", "store its name")
    if isinstance(value, enum.Enum):
        return Unfit(f"an enum member ({name})", "store its value")
    if dataclasses.is_dataclass(value):
        return Unfit(f"a dataclass ({name})", "store dataclasses.asdict() of it")
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Unfit(f"a named tuple ({name})", "store tuple() or ._asdict() of it")
    if callable(getattr(kind, "state_dict", None)):
        return Unfit(f"a value of type {name}", "store its state_dict()")
    return Unfit(f"a value of type {name}")


class _Decoder:
    """One call of `decode`."""

    def __init__(self, codecs: dict[str, Codec], load: Load | None, strict: bool) -> None:
        self.codecs = codecs
        self.load = load
        self.strict = strict
        self.loaded: set[int] = set()

    def unpack(self, wire: Any, depth: int) -> Any:
        """Convert a decoded msgpack value to the value."""
        kind = type(wire)
        if kind in _ATOMS:
            return wire
        if kind is not list or not wire or type(wire[0]) is not str:
            raise Refused(f"plain data is not usable: a {kind.__name__} without a tag stands in it")
        tag = wire[0]
        if tag == _PART:
            return self._part(wire)
        if depth >= MAX_DEPTH:
            raise Refused(f"plain data is not usable: more than {MAX_DEPTH} levels deep")
        children = [self.unpack(child, depth + 1) for child in wire[1:]]
        codec = self.codecs.get(tag)
        if codec is None:
            return self._unknown(tag, children)
        try:
            return codec.join(children)
        except JOIN_ERRORS as error:
            raise Refused(f"plain data is not usable: {tag!r}: {error}") from error

    def _part(self, wire: list[Any]) -> bytes:
        numbers = wire[1:]
        if len(numbers) != 2 or any(type(n) is not int or n < 0 for n in numbers) or numbers[0] in self.loaded:
            raise Refused("plain data is not usable: it names a part twice, or none")
        number, size = numbers
        if self.load is None:
            raise Refused(f"plain data is not usable alone: part {number} of it ({size} bytes) lies elsewhere")
        self.loaded.add(number)  # else a few bytes could load a large part many times
        data = bytes(self.load(number))
        if len(data) != size:
            raise Refused(f"plain data is not usable: part {number} has {len(data)} bytes, not {size}")
        return data

    def _unknown(self, tag: str, children: list[Any]) -> Tagged:
        if self.strict:
            raise Refused(f"plain data of kind {tag[:40]!r} is not known to this version of casckpt; upgrade it")
        return Tagged(tag, children[0] if len(children) == 1 else tuple(children))


_ATOMS = frozenset((NoneType, bool, int, float, str, bytes))
