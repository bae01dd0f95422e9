"""Plain data: values without tensors, as tagged msgpack. It does not use pickle, and restores values exactly.

None, bool, float, str, bytes and 64-bit ints use msgpack's own types. Everything else is an array whose first item is
a tag: ``["list", item, ...]``, ``["dict", key, value, key, value, ...]``, ``["complex", real, imaginary]``. msgpack
maps and extension types are not used. Long buffers are passed to ``spill`` and replaced with ``["part", number,
bytes]``. The same input always produces the same bytes: dicts keep their order, and sets are sorted by their encoded
items.

Types, order, NaN payloads and lone surrogates are preserved. Object identity is not: if a value contains the same
object twice, it is restored as two objects. The types are defined in `casckpt.format.plain_codecs` and
`casckpt.format.plain_numpy`, and `extension` adds more. Classes are never looked up by a name from the data.
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
"""The maximum nesting depth of containers."""
SPILL_FROM = 4096
"""The size in bytes of the smallest buffer that becomes a part."""
_PART = "part"

Spill: TypeAlias = Callable[[memoryview], int]
"""Receives a flat buffer of bytes that is valid only during the call, and returns a new number."""
Load: TypeAlias = Callable[[int], bytes | bytearray | memoryview]
"""Returns the buffer with this number."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A decoded value with an unknown tag, for display. ``payload`` is its only child, or a tuple of its children."""

    tag: str
    payload: Any


def encode(
    value: Any,
    *,
    extensions: Sequence[Codec] = (),
    spill: Spill | None = None,
    spill_from: int = SPILL_FROM,
    where: str = "value",
) -> bytes:
    """Encode a plain value.

    If ``spill`` is given, it receives the buffers of ``spill_from`` bytes or more, except those inside a set, which
    does not have a stable order. ``where`` names the value in error messages. Raises InvalidInput for a value that is
    not plain, contains itself or is nested more than MAX_DEPTH levels deep. The error names the position inside the
    value.
    """
    codecs = _BY_TYPE | {kind: codec for codec in extensions for kind in codec.types}
    encoder = _Encoder(codecs, spill, spill_from, where)
    try:
        return msgspec.msgpack.encode(encoder.pack(value))
    except RecursionError as error:
        raise InvalidInput(f"{where}: it is nested too deeply to be stored here", key=where) from error


def decode(
    data: bytes | bytearray | memoryview,
    *,
    extensions: Sequence[Codec] = (),
    load: Load | None = None,
    strict: bool = False,
) -> Any:
    """Decode the output of `encode`. Raises Refused for any other bytes, and any error that ``load`` raises.

    A value with an unknown tag becomes a `Tagged` or, with ``strict``, raises Refused.
    """
    codecs = _BY_TAG | {codec.tag: codec for codec in extensions}
    try:
        return _Decoder(codecs, load, strict).unpack(msgspec.msgpack.decode(data), 0)
    except RecursionError as error:
        raise Refused("plain data is invalid: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"plain data is invalid: {error}") from error


def extension(tag: str, kind: type, to_plain: Callable[[Any], Any], from_plain: Callable[[Any], Any]) -> Codec:
    """Return the codec of a type that a higher layer adds, under a tag that plain data itself does not use.

    ``from_plain`` receives unchecked data. It raises ValueError or TypeError if this data is invalid.
    """

    def join(children: list[Any]) -> Any:
        (payload,) = children
        return from_plain(payload)

    return Codec(tag, (kind,), lambda value: [to_plain(value)], join)


_BY_TYPE = {kind: codec for codec in (*STANDARD, *NUMPY) for kind in codec.types}
_BY_TAG = {codec.tag: codec for codec in (*STANDARD, *NUMPY)}


class _Encoder:
    """A single call to `encode`.

    ``trail``: the containers around the current value, each with the index of the current child.
    """

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
        """Convert a value to a form that msgpack can encode."""
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
            kind = type(child)
            if (kind is str and child.isascii()) or (kind is int and 0 <= child < 1 << 63):  # as most keys and leaves
                packed.append(child)
                continue
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
            raise InvalidInput(
                f"{self._place()[:200]}...: it is nested more than {MAX_DEPTH} levels deep", key=self.where
            )
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
        # a copy from a pickle would not be connected to the other objects of the program
        pickled = "" if "state_dict" in unfit.hint else ", or pass allow_pickle=True"
        message = f"{self._place()}: {unfit.what} cannot be stored as plain data; {unfit.hint}{pickled}"
        return InvalidInput(message, key=self.where)


def _text(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # has lone surrogates, as file names that are not UTF-8 do
            return ["str", value.encode("utf-8", "surrogatepass")]
    return value


def _unfit(value: Any) -> Unfit:
    """Explain why a value whose type is not in the table is rejected."""
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
    """A single call to `decode`."""

    def __init__(self, codecs: dict[str, Codec], load: Load | None, strict: bool) -> None:
        self.codecs = codecs
        self.load = load
        self.strict = strict
        self.loaded: set[int] = set()

    def unpack(self, wire: Any, depth: int) -> Any:
        """Convert a decoded msgpack value to the original value."""
        kind = type(wire)
        if kind in _ATOMS:
            return wire
        if kind is not list or not wire or type(wire[0]) is not str:
            raise Refused(f"plain data is invalid: it contains a {kind.__name__} without a tag")
        tag = wire[0]
        if tag == _PART:
            return self._part(wire)
        if depth >= MAX_DEPTH:
            raise Refused(f"plain data is invalid: it is nested more than {MAX_DEPTH} levels deep")
        children = [self.unpack(child, depth + 1) for child in wire[1:]]
        codec = self.codecs.get(tag)
        if codec is None:
            return self._unknown(tag, children)
        try:
            return codec.join(children)
        except JOIN_ERRORS as error:
            raise Refused(f"plain data is invalid: {tag!r}: {error}") from error

    def _part(self, wire: list[Any]) -> bytes:
        numbers = wire[1:]
        if len(numbers) != 2 or any(type(n) is not int or n < 0 for n in numbers) or numbers[0] in self.loaded:
            raise Refused("plain data is invalid: it names a part twice, or a part is malformed")
        number, size = numbers
        if self.load is None:
            raise Refused(
                f"plain data cannot be decoded on its own: its part {number} ({size} bytes) is stored elsewhere"
            )
        self.loaded.add(number)  # otherwise, a few bytes could load a large part many times
        data = bytes(self.load(number))
        if len(data) != size:
            raise Refused(f"plain data is invalid: part {number} has {len(data)} bytes instead of {size}")
        return data

    def _unknown(self, tag: str, children: list[Any]) -> Tagged:
        if self.strict:
            raise Refused(f"this version of casckpt does not know plain data of kind {tag[:40]!r}; upgrade casckpt")
        return Tagged(tag, children[0] if len(children) == 1 else tuple(children))


_ATOMS = frozenset((NoneType, bool, int, float, str, bytes))
