"""Readers for other programs' pickles that do not run code, or end the process."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, ClassVar, Final

from casckpt.base.text import in_one_line
from casckpt.errors import CasckptError

MISREAD: Final[tuple[type[Exception], ...]] = (
    pickle.PickleError, struct.error, ArithmeticError, AssertionError, AttributeError, BufferError, EOFError,
    ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError, Warning,
)  # fmt: skip
"""The errors that unpicklers, including torch's restricted unpickler, raise for invalid bytes.

Warning is included because torch warns about an unexpected protocol, and some users turn warnings into errors.
"""

_KEY_PARTS: Final = 64


@contextmanager
def misread(refusal: Callable[[str], CasckptError]) -> Iterator[None]:
    """Turn the errors of a reader of foreign bytes into ``refusal(why)``. Wrap only the reader in this."""
    try:
        yield
    except CasckptError:  # some of these are also OSErrors or ValueErrors
        raise
    except MISREAD as error:
        raise refusal(in_one_line(error)[:300]) from error


_AS_PYTHON: Final[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)


_KEYS: Final = {
    pickle.SETITEM: slice(-2, -1), pickle.SETITEMS: slice(None, None, 2),
    pickle.ADDITEMS: slice(None), pickle.FROZENSET: slice(None),
}  # fmt: skip
"""The opcodes that put keys into a dict or values into a set, and the position of these on the stack."""


def _checking_keys(code: int, keys: slice) -> Callable[[BoundedUnpickler], None]:
    """Return an implementation of opcode ``code`` that checks its keys first."""

    def run(unpickler: BoundedUnpickler) -> None:
        unpickler.check_keys(unpickler.stack[keys])
        _AS_PYTHON[code](unpickler)

    return run


class BoundedUnpickler(pickle._Unpickler):
    """An unpickler that resolves only the given names.

    If ``anything`` is set, it resolves all names, which can run code. It is based on the Python unpickler, whose memo
    is a dict. The C unpickler allocates 8 bytes for each memo index up to the largest one, so nine bytes can cost 32
    GiB. Of the given names, a pickle may set attributes only on instances of dataclasses. (Attributes of a class would
    apply to all its instances.) Raises one of `MISREAD` for invalid bytes.
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
        """Resolve a name in a pickle. Raises UnpicklingError for an unknown name."""
        value = self._names.get((module, name))
        if value is None and not self._anything:
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return super().find_class(module, name) if value is None else value

    def get_extension(self, code: int) -> None:
        """Refuse a number that a program has registered for a name: it may stand for anything."""
        if not self._anything:
            raise pickle.UnpicklingError(f"it contains the extension {code}")
        super().get_extension(code)  # type: ignore[misc] # of pickle._Unpickler

    def _build(self) -> None:
        if not self._anything and type(self.stack[-2]) not in self._built:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-2]).__name__}")
        _AS_PYTHON[pickle.BUILD[0]](self)

    def check_keys(self, keys: Sequence[Any]) -> None:
        """Reject keys with many parts, because nested tuples may take forever to hash or overflow the stack."""
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
                    raise pickle.UnpicklingError(f"it contains a key with more than {_KEY_PARTS} parts")

    dispatch[pickle.BUILD[0]] = _build
    dispatch.update({code[0]: _checking_keys(code[0], keys) for code, keys in _KEYS.items()})
