"""The recipe of a folder or file of another program: which bytes of which entries make up its files.

It is a note of the manifest (see "Folders of other programs" in docs/format.md). All of it is checked before any of it
is used, so that a program that creates the items in order, each of them anew, writes nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import dropwhile, islice
from typing import Any, Final, NamedTuple

from casckpt.errors import Refused
from casckpt.format import plain
from casckpt.format.sections.columns import pack, unpack
from casckpt.format.sections.index import TENSOR, Entry

NOTE: Final = "files"
"""The name of the note."""
MAX_PATH_BYTES, MAX_NAME_BYTES, MAX_MODE = 4095, 255, 0o777
_UP, _SAME = "..", ("", ".")


class ItemKind(IntEnum):
    """The kind of an item. A link is a symbolic link."""

    FOLDER, FILE, LINK = range(3)


class FilePiece(NamedTuple):
    """``length`` bytes of the entry with the number ``entry``, from the byte ``offset`` on."""

    entry: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Item:
    """A folder, a file, or a link.

    ``path``: its path below the root, which has the path "". ``mode``: its permission bits, 0 for a link. ``target``:
    the path that a link contains, which does not lead out of the root. ``pieces``: the bytes of a file, in order.
    """

    path: str
    kind: ItemKind
    mode: int
    target: str = ""
    pieces: tuple[FilePiece, ...] = ()


def decode_recipe(data: bytes, entries: Sequence[Entry]) -> list[Item]:
    """Decode the note of a manifest with these ``entries``. A folder comes before what it contains.

    Raises Refused for a recipe that breaks a rule, or that this version does not know.
    """
    fields = plain.decode(data, strict=True)
    if not isinstance(fields, dict):
        raise _refusal("it is not a dict")
    paths, targets = _texts(fields, "paths"), iter(_texts(fields, "targets"))
    kinds, modes, counts = (_column(fields, name) for name in ("kinds", "modes", "pieces"))
    if not len(paths) == len(kinds) == len(modes):
        raise _refusal("its columns differ in length")
    if max(kinds, default=0) > max(ItemKind):
        raise _refusal(f"this version does not know items of kind {max(kinds)}; upgrade casckpt")
    if (kinds.count(ItemKind.LINK), kinds.count(ItemKind.FILE)) != (len(fields["targets"]), len(counts)):
        raise _refusal("it does not have one target for each link, and one number of pieces for each file")
    _check_paths(paths, kinds)
    pieces, count_of = _pieces(_column(fields, "entries"), _column(fields, "lengths"), entries), iter(counts)
    made = []
    for path, kind, mode in zip(paths, map(ItemKind, kinds), modes, strict=True):
        if mode > (0 if kind == ItemKind.LINK else MAX_MODE):
            raise _refusal(f"{path!r} has the mode {mode:#o}")
        if kind == ItemKind.LINK:
            made.append(Item(path, kind, mode, target=_checked_target(path, next(targets))))
        else:
            count = next(count_of) if kind == ItemKind.FILE else 0
            made.append(Item(path, kind, mode, pieces=tuple(islice(pieces, count))))
            if len(made[-1].pieces) < count:
                raise _refusal("it has fewer pieces than its files")
    if next(pieces, None) is not None:  # this also runs the last check of `_pieces`
        raise _refusal("it has more pieces than its files")
    return made


def encode_recipe(items: Sequence[Item]) -> bytes:
    """Encode the note. A folder must come before what it contains, and the pieces of an entry follow each other."""
    pieces = [piece for item in items for piece in item.pieces]
    return plain.encode(
        {
            "paths": [item.path for item in items],
            "kinds": pack([item.kind for item in items]),
            "modes": pack([item.mode for item in items]),
            "targets": [item.target for item in items if item.kind == ItemKind.LINK],
            "pieces": pack([len(item.pieces) for item in items if item.kind == ItemKind.FILE]),
            "entries": pack([piece.entry for piece in pieces]),
            "lengths": pack([piece.length for piece in pieces]),
        }
    )


def stays_inside(path: str, target: str) -> bool:
    """Return whether the link ``path`` with this target cannot lead out of the root.

    As ``..`` comes only first, it leads through folders. A name may lead through another link, which stays inside too.
    """
    names = target.split("/")
    behind = list(dropwhile(lambda name: name in (*_SAME, _UP), names))
    ups = names[: len(names) - len(behind)].count(_UP)
    return bool(target) and target[0] != "/" and _UP not in behind and ups <= path.count("/")


def _refusal(what: str) -> Refused:
    return Refused(f"the recipe of a folder is not valid: {what}")


def _column(fields: Mapping[Any, Any], name: str) -> list[int]:
    column = fields.get(name)
    if type(column) is not bytes:
        raise _refusal(f"it has no column {name!r}")
    return unpack(column)


def _texts(fields: Mapping[Any, Any], name: str) -> list[str]:
    """Return strings that can be paths. Raise Refused for any others."""
    texts = fields.get(name)
    if type(texts) is not list or any(type(text) is not str for text in texts):
        raise _refusal(f"it has no list {name!r}")
    for text in texts:
        try:
            is_fit = "\0" not in text and len(text.encode()) <= MAX_PATH_BYTES
        except UnicodeEncodeError:
            is_fit = False
        if not is_fit:
            raise _refusal(f"{text[:80]!r} is not a path in UTF-8, or is too long")
    return texts


def _check_paths(paths: Sequence[str], kinds: Sequence[int]) -> None:
    """Check that the paths begin with the root, ascend, and are in folders that come before them."""
    if not paths or paths[0] or kinds[0] == ItemKind.LINK:
        raise _refusal("its first item is not the root, or is a link")
    folders, before = {"" for kind in kinds[:1] if kind == ItemKind.FOLDER}, ""
    for path, kind in islice(zip(paths, kinds, strict=True), 1, None):
        *_, name = names = path.split("/")
        if any(one in (*_SAME, _UP) for one in names) or len(name.encode()) > MAX_NAME_BYTES:
            raise _refusal(f"{path!r} is not a relative path without '..', or has a name that is too long")
        if path <= before:  # in the order of code points, which is that of the bytes in UTF-8
            raise _refusal(f"{path!r} is out of order, or occurs twice")
        if path.rpartition("/")[0] not in folders:
            raise _refusal(f"the folder of {path!r} is missing, or is no folder")
        if kind == ItemKind.FOLDER:
            folders.add(path)
        before = path


def _checked_target(path: str, target: str) -> str:
    """Return the target of a link. Raise Refused if it may lead out of the root."""
    if not stays_inside(path, target):
        raise _refusal(f"the link {path!r} leads to {target!r}, which may be outside its folder")
    return target


def _pieces(numbers: Sequence[int], lengths: Sequence[int], entries: Sequence[Entry]) -> Iterator[FilePiece]:
    """Yield the pieces of all files. Each begins where the previous one of its entry ends."""
    if len(numbers) != len(lengths):
        raise _refusal("its columns of pieces differ in length")
    ends = dict[int, int]()
    for number, length in zip(numbers, lengths, strict=True):
        if number >= len(entries) or entries[number].kind != TENSOR or entries[number].rank is not None or not length:
            raise _refusal("a piece is empty, or has no entry that is a tensor of all ranks")
        start = ends.get(number, 0)
        ends[number] = start + length
        yield FilePiece(number, start, length)
    for number, end in ends.items():
        if end != entries[number].nbytes:
            raise _refusal(f"it uses {end} bytes of {entries[number].key[:80]!r}, which has {entries[number].nbytes}")
