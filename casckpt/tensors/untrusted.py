"""Readers for pickles of other programs that run no code and do not exhaust memory."""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, ClassVar, Final

import torch

from casckpt.base.text import in_one_line
from casckpt.errors import CasckptError, Refused

MISREAD: Final[tuple[type[Exception], ...]] = (
    pickle.PickleError, struct.error, ArithmeticError, AssertionError, AttributeError, BufferError, EOFError,
    ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError, Warning,
)  # fmt: skip
"""The errors of unpicklers, including torch's restricted one, for unusable bytes.

Warning is included: torch warns about an unexpected protocol, and some users turn warnings into errors.
"""

_KEY_PARTS: Final = 64
_MORE_VALUES, _MOST_VALUES, _MORE_BYTES = 1 << 20, 1 << 26, 4 << 30


@contextmanager
def misread(refusal: Callable[[str], CasckptError]) -> Iterator[None]:
    """Turn the errors of a reader of foreign bytes into ``refusal(why)``. Wrap only the reader in it."""
    try:
        yield
    except CasckptError:  # some are OSErrors or ValueErrors too
        raise
    except MISREAD as error:
        raise refusal(in_one_line(error)[:300]) from error


_AS_PYTHON: Final[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)


_KEYS: Final = {
    pickle.SETITEM: slice(-2, -1), pickle.SETITEMS: slice(None, None, 2),
    pickle.ADDITEMS: slice(None), pickle.FROZENSET: slice(None),
}  # fmt: skip
"""Opcodes that put keys into a dict or values into a set, and the place of these on the stack."""


def _checking_keys(code: int, keys: slice) -> Callable[[BoundedUnpickler], None]:
    """Return the implementation of opcode ``code``, preceded by a check of its keys."""

    def run(unpickler: BoundedUnpickler) -> None:
        unpickler.check_keys(unpickler.stack[keys])
        _AS_PYTHON[code](unpickler)

    return run


class BoundedUnpickler(pickle._Unpickler):
    """Resolves only the given names. ``anything``: resolves every name, which can run code.

    It is the unpickler in Python, whose memo is a dict. The one in C allocates 8 bytes for each number up to the
    largest one, so that nine bytes can cost 32 GiB. A pickle may set attributes only of instances of the dataclasses
    among the names. (Attributes of a class would apply to all its instances.) Raises one of `MISREAD` for unusable
    bytes.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_AS_PYTHON)

    def __init__(
        self, data: bytes, names: Mapping[tuple[str, str], Any] | None = None, *, anything: bool = False
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._anything = names or {}, anything
        self._built = frozenset(
            value for value in self._names.values() if isinstance(value, type) and is_dataclass(value)
        )

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a name of a pickle. Raises UnpicklingError for an unknown one."""
        value = self._names.get((module, name))
        if value is None and not self._anything:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name) if value is None else value

    def _build(self) -> None:
        if not self._anything and type(self.stack[-2]) not in self._built:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-2]).__name__}")
        _AS_PYTHON[pickle.BUILD[0]](self)

    def _bytearray(self) -> None:
        if not self._anything:  # it is allocated before its bytes are read
            raise pickle.UnpicklingError("it holds a bytearray")
        _AS_PYTHON[pickle.BYTEARRAY8[0]](self)

    def check_keys(self, keys: Sequence[Any]) -> None:
        """Refuse keys with many parts: nested tuples may take forever to hash, or overflow the stack."""
        for key in keys:
            waiting, seen = ([] if type(key) is str else [key]), 0
            while waiting:
                item = waiting.pop()
                seen += 1
                if isinstance(item, tuple | frozenset):
                    waiting.extend(item)
                elif type(item) in self._built:
                    waiting.extend(vars(item).values())
                if seen > _KEY_PARTS or len(waiting) > _KEY_PARTS:
                    raise pickle.UnpicklingError(f"it has a key of more than {_KEY_PARTS} parts")

    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.BYTEARRAY8[0]] = _bytearray
    dispatch.update({code[0]: _checking_keys(code[0], keys) for code, keys in _KEYS.items()})


def check_expansion(value: Any, nbytes: int, where: str) -> None:
    """Raise Refused for a value that would be far larger than the ``nbytes`` of its file if it were written out.

    A list that holds another one twice, which holds a third one twice, and so on, is small in memory but very long to
    walk. So is a list that holds itself, or a tensor whose elements share memory. Raises Refused also for a mapping or
    a tensor with attributes that hide its methods.
    """
    most, room = min(_MOST_VALUES, _MORE_VALUES + 4 * nbytes), _MORE_BYTES + 16 * nbytes
    waiting, seen = [value], 0
    while waiting:
        item = waiting.pop()
        seen += 1
        if isinstance(item, torch.Tensor):
            _check_methods(item, where)
            room -= item.numel() * item.element_size()
        elif isinstance(item, Mapping):
            _check_methods(item, where)
            waiting.extend((*item.values(), getattr(item, "_metadata", None)))
        elif isinstance(item, list | tuple | set | frozenset):
            waiting.extend(item)
        if seen > most or room < 0:
            raise Refused(
                f"{where} holds itself, or one thing very many times: written out, it would be far larger than the file"
            )


def _check_methods(item: torch.Tensor | Mapping[Any, Any], where: str) -> None:
    if not isinstance(item, torch.Tensor | OrderedDict):
        return  # other types have no attributes
    hidden = [name for name in vars(item) if hasattr(type(item), name)]
    if hidden:
        raise Refused(f"{where} is damaged or hostile: in it stands another {type(item).__name__}.{hidden[0]}")
