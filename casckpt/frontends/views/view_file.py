"""The views in an attached `HUB_FILE`, which may come from an untrusted source."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from casckpt.base.names import is_attachment_name
from casckpt.errors import InvalidInput
from casckpt.format.views import ViewFile, decode
from casckpt.frontends.views.view import Rules

_MOST_VIEWS: Final = 1000
_SIMPLE: Final = re.compile(r"(?s:[^\\\[\](){}|*+?^$.]|\\[^0-9A-Za-z]|\(\\d\+\)(?!\\?\d|\()){0,1000}")
r"""An expression of letters, escaped characters, and numbers, (\d+), that end where the digits end.

`re` matches such an expression in time proportional to the length of a name. Others may take years.
"""
_MOST_CHARACTERS: Final = 1000  # of a replacement, because each reference in it may expand to a long number


class HubView(NamedTuple):
    """One model or adapter in a folder. ``stem``: the path with which the names of its files begin."""

    stem: str
    rules: Rules


class HubNames(NamedTuple):
    """What a model's libraries specify for its files. ``views``: empty if the names are those of the checkpoint.

    ``notes``: messages for the user. ``tied``: pairs of names that the config ties, but that had separate tensors.
    """

    views: tuple[HubView, ...] = ()
    notes: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()


def read_hub_names(text: bytes, where: str) -> HubNames:
    """Parse an attached `HUB_FILE`. Raises InvalidInput, which names ``where``, for an invalid file."""
    advice = "export with --strip-prefix or --rename, which do not use the file"
    found = decode(text, where, advice)
    folders = {stem.rpartition("/")[0] for stem in found.views}
    is_valid = len(found.views) == len(folders) <= _MOST_VIEWS and all(map(is_attachment_name, found.views))
    if not is_valid or not all(map(_is_simple, found.views.values())):
        raise InvalidInput(f"{where} is not valid; {advice}")
    roots = tuple(HubView(stem, _rules(view)) for stem, view in found.views.items())
    return HubNames(roots, tuple(found.notes), tuple(found.tied.items()))


def _is_simple(view: ViewFile) -> bool:
    """Return whether expressions match, and names expand, in little time and memory."""
    rename = view.rename or {}
    names = [*rename.values(), *(name for parts in view.split.values() for name in parts)]
    return all(map(_SIMPLE.fullmatch, [*rename, *view.split])) and all(len(name) <= _MOST_CHARACTERS for name in names)


def _rules(view: ViewFile) -> Rules:
    return Rules(view.keys, view.strip_prefix, view.rename, view.model, view.split)
