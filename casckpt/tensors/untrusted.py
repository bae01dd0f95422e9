"""Pickles of other programs, read without running code or exhausting memory, and all that a reader may raise."""

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
"""What unpickling, torch's restricted one too, raises for bytes that are not what they are taken for.

Warnings too: torch warns of a protocol that it does not expect, and for some users warnings are errors.
"""

_KEY_PARTS: Final = 64
_MORE_VALUES, _MOST_VALUES, _MORE_BYTES = 1 << 20, 1 << 26, 4 << 30


@contextmanager
def misread(refusal: Callable[[str], CasckptError]) -> Iterator[None]:
    """Turn what a reader of foreign bytes raises for unusable bytes into ``refusal(why)``; wrap nothing else in it."""
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
"""Opcodes that put keys into a dict, or values into a set, and where these are on the stack."""


def _checking_keys(code: int, keys: slice) -> Callable[[BoundedUnpickler], None]:
    """The opcode ``code``, after a look at its keys."""

    def run(unpickler: BoundedUnpickler) -> None:
        unpickler.check_keys(unpickler.stack[keys])
        _AS_PYTHON[code](unpickler)

    return run


class BoundedUnpickler(pickle._Unpickler):
    """Finds the names that it is given, and nothing else; ``anything``: whatever a pickle names, which runs code.

    The one of Python, whose memo is a dict: that of C takes 8 bytes for each number up to the largest one, which nine
    bytes can make 32 GiB. A pickle may set attributes of instances of the dataclasses among the names, and of nothing
    else: of a class they would be those of all its instances. Raises one of `MISREAD` for bytes of no use.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_AS_PYTHON)

    def __init__(
        self, data: bytes, names: Mapping[tuple[str, str], Any] | None = None, *, anything: bool = False
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._anything = names or {}, anything
        self._built = frozenset(
            found for found in self._names.values() if isinstance(found, type) and is_dataclass(found)
        )

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a name of a pickle. Raises UnpicklingError for an unknown one."""
        found = self._names.get((module, name))
        if found is None and not self._anything:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name) if found is None else found

    def _build(self) -> None:
        if not self._anything and type(self.stack[-2]) not in self._built:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-2]).__name__}")
        _AS_PYTHON[pickle.BUILD[0]](self)

    def _bytearray(self) -> None:
        if not self._anything:  # its memory is taken before its bytes are looked for
            raise pickle.UnpicklingError("it holds a bytearray")
        _AS_PYTHON[pickle.BYTEARRAY8[0]](self)

    def check_keys(self, keys: Sequence[Any]) -> None:
        """Check keys: nested tuples may take for ever to hash, or overflow the stack."""
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
    """Raise Refused for a value that ``nbytes`` of a file made far larger than that, if written out.

    A list that holds another one twice, which does the same, and so on, is small in memory, and endless for whoever
    walks it; so is one that holds itself, or a tensor whose elements are one and the same. Also for a mapping or a
    tensor that was given attributes in place of its methods.
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
        return  # the others cannot have any
    hidden = [name for name in vars(item) if hasattr(type(item), name)]
    if hidden:
        raise Refused(f"{where} is damaged or hostile: in it stands another {type(item).__name__}.{hidden[0]}")
