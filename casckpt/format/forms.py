"""Forms: canonical JSON that describes a stored wrapper, which is a tensor that consists of other tensors.

Equal forms have equal texts, so that equal states have equal ids. A form is only compared or passed to a registered
function. No class is ever looked up by a name from a form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, TypeAlias

from casckpt.errors import InvalidInput, Refused

MAX_CHARACTERS: Final = 1 << 16
MAX_LEVELS: Final = 32
_SHOWN: Final = 80  # characters of a value in a message

Form: TypeAlias = dict[str, Any]
"""The fields of a form. docs/format.md lists them."""


def encode_form(form: Form) -> str:
    """Encode a form. Raises InvalidInput if it is not JSON, or exceeds the limits."""
    try:
        text = _dumped(form)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"cannot be stored as JSON: {error}") from error
    if len(text) > MAX_CHARACTERS or _levels(text) > MAX_LEVELS:
        raise InvalidInput(f"has more than {MAX_CHARACTERS} characters or {MAX_LEVELS} levels of JSON")
    return text


def decode_form(text: str) -> Form:
    """Decode a form. Raises Refused for anything that `encode_form` does not return."""
    if type(text) is not str or len(text) > MAX_CHARACTERS or _levels(text) > MAX_LEVELS:
        raise Refused("the tree of a checkpoint is invalid: the form of a wrapper is too long or too deep")
    try:
        form: Form = json.loads(text)
        is_canonical = type(form) is dict and _dumped(form) == text
    except (ValueError, RecursionError) as error:
        raise Refused("the tree of a checkpoint is invalid: the form of a wrapper is not JSON") from error
    if not is_canonical:
        raise Refused("the tree of a checkpoint is invalid: the form of a wrapper is not canonical JSON")
    return form


def check_form(text: str) -> None:
    """Raise Refused for a form that is invalid or lacks a field that every form has."""
    form = decode_form(text)
    shape, cut = form.get("shape"), form.get("cut", {})
    is_typed = isinstance(shape, list) and isinstance(cut, dict) and isinstance(form.get("dtype"), str)
    numbers = [*(shape or ()), *cut.values()] if is_typed else [-1]
    if not are_sizes(numbers):
        raise Refused("the tree of a checkpoint is invalid: the form of a wrapper has no valid shape, dtype or cut")


def are_sizes(numbers: Iterable[Any]) -> bool:
    """Return whether a shape or a cut may have these numbers."""
    return all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


def _dumped(form: Form) -> str:
    return json.dumps(form, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _levels(text: str) -> int:
    """Return an upper bound of the nesting depth."""
    return max(accumulate((character in "[{") - (character in "]}") for character in text), default=0)


def differences(here: Any, there: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two forms differ, with both values. A field that one side lacks is equal to null."""
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for name in sorted({*here, *there}):
            yield from differences(here.get(name), there.get(name), f"{path}.{name}" if path else name)
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for index, pair in enumerate(zip(here, there, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif type(here) is not type(there) or here != there:
        yield f"{path[:_SHOWN]} is {_shown(here)} here, but {_shown(there)}"


def _shown(value: Any) -> str:
    while isinstance(value, dict) and "_data" in value:
        value = value["_data"]
    return json.dumps(value)[:_SHOWN]
