"""Fills a mapping of a template with the entries of a mapping that was saved as one object."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final

from casckpt.errors import InvalidInput, Mismatch

_ATOMS: Final = frozenset((NoneType, bool, int, float, str, bytes))


@dataclass(frozen=True)
class Entries:
    """A template mapping, ``target``, and the saved mapping, which ``decode`` returns.

    ``key``: the key of the mapping in the template. ``name``: its key in the checkpoint. ``rename``: the load's
    ``rename``. ``lacking``: the flat keys that only the template has. ``unread``: the flat keys that only the
    checkpoint has.
    """

    key: str
    name: str
    target: Mapping[Any, Any]
    decode: Callable[[], Any]
    rename: Callable[[str], str]
    lacking: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def compare(self, key: str, name: str, target: Any, saved: Any) -> None:
        """Compare the entries of ``key`` in the template and ``name`` in the checkpoint.

        Raises Mismatch, InvalidInput.
        """
        if not (isinstance(saved, Mapping) and isinstance(target, Mapping)):
            here, there = type(target).__name__, type(saved).__name__
            raise Mismatch(f"{key!r} is a {here} here, but a {there} in the checkpoint (key {name!r})", key=key)
        if not isinstance(target, MutableMapping):
            raise InvalidInput(f"{key!r}: a {type(target).__qualname__} cannot be modified; pass a dict", key=key)
        for element, value in target.items():
            here, there = f"{key}.{element}", f"{name}.{element}"
            if (renamed := self.rename(here)) not in (here, there):
                raise no_entry(here, renamed, self.key, self.name)
            if element not in saved:
                self.lacking.append(here)
                continue
            one = saved[element]
            if _is_filled(value) or (isinstance(one, dict) and value is not None and not isinstance(value, Mapping)):
                self.compare(here, there, value, one)
        self.unread.extend(f"{name}.{element}" for element in saved if element not in target)


def no_entry(key: str, renamed: str, mapping: str, name: str) -> InvalidInput:
    """Return the error for a ``rename`` that maps a key in ``mapping`` to an entry of the single object ``name``."""
    return InvalidInput(
        f"rename returns {renamed!r} for {key!r}, but {name!r} is a single object in the checkpoint, and its "
        f"entries keep their names. Map the whole mapping, with rename={{{re.escape(mapping)!r}: {name!r}}}, or read "
        f"the entries with store.read(ref, keys=[{name!r}])",
        key=key,
    )


def fill_entries(target: Any, saved: Any) -> None:
    """Set the entries of ``target`` to the values in ``saved``."""
    nested = {element for element, value in target.items() if _is_filled(value)}
    for element in nested & saved.keys():
        fill_entries(target[element], saved[element])
    target.update({element: saved[element] for element in target if element in saved and element not in nested})


def _is_filled(value: Any) -> bool:
    if type(value) in _ATOMS:  # the usual case
        return False
    return isinstance(value, Mapping) and len(value) > 0 and not isinstance(value, Counter | defaultdict)
