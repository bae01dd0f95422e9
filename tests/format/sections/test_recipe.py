"""The recipe of a folder: it decodes to what was encoded, and a recipe that may do harm is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.errors import Refused
from casckpt.format import plain
from casckpt.format.sections.columns import pack, unpack
from casckpt.format.sections.index import ATTACHMENT, PART, TENSOR, Entry
from casckpt.format.sections.recipe import FilePiece, Item, ItemKind, decode_recipe, encode_recipe
from tests.support.stored_folder import columns_of

NAMES = ["a", "a.b", "b", "a b", "é", "名", "-", "\n", "\\", "A", "..a", "~", "x" * 255]


def entries_of(items: Sequence[Item]) -> list[Entry]:
    """Return entries of as many bytes as the items use."""
    sizes = dict[int, int]()
    for piece in (piece for item in items for piece in item.pieces):
        sizes[piece.entry] = sizes.get(piece.entry, 0) + piece.length
    return [
        Entry(TENSOR, f"e{number}", 0, None, "uint8", 1, (sizes.get(number, 0),), number)
        for number in range(max(sizes, default=-1) + 1)
    ]


@st.composite
def folders(draw: st.DrawFn) -> list[Item]:
    """Return the items of a folder or file."""
    kinds = {"": ItemKind.FILE if draw(st.integers(0, 9)) == 0 else ItemKind.FOLDER}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=12)):
        inside = sorted(path for path, kind in kinds.items() if kind == ItemKind.FOLDER)
        if inside:
            folder = draw(st.sampled_from(inside))
            kinds.setdefault(f"{folder}/{name}" if folder else name, draw(st.sampled_from(ItemKind)))
    ends, items = dict[int, int](), []
    for path, kind in sorted(kinds.items()):
        pieces, mode, target = list[FilePiece](), draw(st.integers(0, 0o777)) if kind != ItemKind.LINK else 0, ""
        if kind == ItemKind.LINK:
            ups = "../" * draw(st.integers(0, path.count("/")))
            target = ups + draw(st.sampled_from(["a", "./a/b", ".", "名", "a//"]))
        for number in draw(st.lists(st.integers(0, 3), max_size=3)) if kind == ItemKind.FILE else ():
            pieces.append(FilePiece(number, ends.get(number, 0), draw(st.integers(1, 9))))
            ends[number] = pieces[-1].offset + pieces[-1].length
        items.append(Item(path, kind, mode, target, tuple(pieces)))
    return items


@given(folders())
def test_a_recipe_decodes_to_the_items_that_were_encoded(items: list[Item]) -> None:
    assert decode_recipe(encode_recipe(items), entries_of(items)) == items


FOLDER = [
    Item("", ItemKind.FOLDER, 0o755),
    Item("a", ItemKind.FOLDER, 0o755),
    Item("a/f", ItemKind.FILE, 0o644, pieces=(FilePiece(0, 0, 5), FilePiece(1, 0, 7))),
    Item("a/l", ItemKind.LINK, 0, target="../g"),
    Item("g", ItemKind.FILE, 0o644, pieces=(FilePiece(0, 5, 3),)),
]
ENTRIES = entries_of(FOLDER)


def placed(path: str, kind: ItemKind = ItemKind.FILE) -> Callable[[dict[str, Any]], Any]:
    """Return a change that adds an item at the end."""

    def change(fields: dict[str, Any]) -> None:
        fields["paths"].append(path)
        fields["kinds"] = pack([*unpack(fields["kinds"]), kind])
        fields["modes"] = pack([*unpack(fields["modes"]), 0])
        fields["pieces"] = pack([*unpack(fields["pieces"]), *([0] if kind == ItemKind.FILE else [])])

    return change


def column(name: str, *values: int) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.update({name: pack(values)})


def link(target: str) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.update(targets=[target])


def paths(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.update(paths=list(names))


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an absolute path": placed("/h"),
    "a path with ..": placed("h/.."),
    "a path that is ..": paths("", "..", "../f", "../l", "g"),
    "a path with .": placed("h/./i"),
    "an empty name": placed("h//i"),
    "a slash at the end": placed("h/"),
    "a zero byte": placed("h\0"),
    "a lone surrogate": placed("h\ud800"),
    "a long name": placed("h" * 256),
    "a long name in bytes": placed("é" * 128),
    "a long path": placed("/".join(["h" * 200] * 21)),
    "no folder": placed("h/i"),
    "a file as a folder": placed("g/h"),
    "a link as a folder": paths("", "a", "a/f", "a/l", "a/l/g"),
    "a path that occurs twice": placed("g"),
    "the root twice": placed(""),
    "paths out of order": placed("c"),
    "no items": lambda fields: fields.update(
        paths=[], targets=[], **dict.fromkeys(("kinds", "modes", "pieces", "entries", "lengths"), pack([]))
    ),
    "no root": paths("0", "a", "a/f", "a/l", "g"),
    "a root that is a link": lambda fields: fields.update(kinds=pack([2, 0, 1, 1, 1]), pieces=pack([2, 0, 1])),
    "a kind that is not known": column("kinds", 0, 0, 1, 2, 3),
    "a mode with more bits": column("modes", 0o755, 0o755, 0o4755, 0, 0o644),
    "the mode of a link": column("modes", 0o755, 0o755, 0o644, 0o777, 0o644),
    "too few modes": column("modes", 0o755, 0o755),
    "an absolute target": link("/etc/passwd"),
    "a target outside": link("../../h"),
    "a target that leaves and comes back": link("../../root/g"),
    "a target through a name": link("../g/../../h"),
    "a target through a hidden name": link(".h/.."),
    "no target": link(""),
    "a target with a zero byte": link("../g\0"),
    "a long target": link("x/" * 2048),
    "too many targets": lambda fields: fields["targets"].append("g"),
    "too few targets": lambda fields: fields["targets"].clear(),
    "an entry that does not exist": column("entries", 0, 2, 0),
    "a part of an object": column("entries", 3, 1, 3),
    "an attachment": column("entries", 4, 1, 4),
    "the value of one rank": column("entries", 5, 1, 5),
    "an empty piece": column("lengths", 5, 0, 3),
    "more bytes than an entry has": column("lengths", 5, 7, 4),
    "fewer bytes than an entry has": column("lengths", 5, 7, 2),
    "too few lengths": column("lengths", 5, 7),
    "fewer pieces than files use": column("pieces", 2, 2),
    "countless pieces": column("pieces", 2, 1 << 62),
    "more pieces than files use": column("pieces", 1, 1),
    "too few numbers of pieces": column("pieces", 3),
    "a column that is a list": lambda fields: fields.update(kinds=[0, 0, 1, 2, 1]),
    "a column that is cut off": lambda fields: fields.update(entries=b"\x02\0"),
    "a column that is missing": lambda fields: fields.pop("lengths"),
    "paths that are missing": lambda fields: fields.pop("paths"),
    "a path that is no string": lambda fields: fields["paths"].append(b"h"),
    "targets in a tuple": lambda fields: fields.update(targets=("../g",)),
}
OTHERS = [
    Entry(PART, "object", 0, None, "uint8", 1, (8,), 3),
    Entry(ATTACHMENT, "file", 0, None, "uint8", 1, (8,), 4),
    Entry(TENSOR, "own", 0, 1, "uint8", 1, (8,), 5),
]


@pytest.mark.parametrize("what", HOSTILE)
def test_a_recipe_that_breaks_a_rule_is_refused(what: str) -> None:
    fields = columns_of(FOLDER)
    HOSTILE[what](fields)
    empty = Entry(TENSOR, "empty", 0, None, "uint8", 1, (0,), 2)
    entries = [*ENTRIES, empty, *OTHERS] if "entry that" not in what else ENTRIES
    with pytest.raises(Refused):
        decode_recipe(plain.encode(fields), entries)


@pytest.mark.parametrize("value", [None, 1, [], b"x", {1: 2}])
def test_a_note_that_is_no_recipe_is_refused(value: Any) -> None:
    with pytest.raises(Refused):
        decode_recipe(plain.encode(value), ENTRIES)


def test_fields_of_later_versions_are_ignored_and_single_files_have_the_root_as_path() -> None:
    assert decode_recipe(plain.encode(columns_of(FOLDER) | {"later": 1}), ENTRIES) == FOLDER
    only = [Item("", ItemKind.FILE, 0o600, pieces=(FilePiece(0, 0, 4),))]
    assert decode_recipe(encode_recipe(only), entries_of(only)) == only


@pytest.mark.parametrize("target", ["..", "../", "./..//a", "../a", "..a", "a/..b", "x" * 4095])
def test_a_link_that_stays_inside_is_kept_as_it_is(target: str) -> None:
    items = [*FOLDER[:3], Item("a/l", ItemKind.LINK, 0, target=target), FOLDER[4]]
    assert decode_recipe(encode_recipe(items), ENTRIES)[3].target == target


@settings(max_examples=2 * settings().max_examples)
@given(folders(), st.data())
def test_links_never_lead_out_of_the_folder(
    tmp_path_factory: pytest.TempPathFactory, items: list[Item], data: st.DataObject
) -> None:
    """Other targets than those of `folders`: the decoder decides."""
    parts = st.sampled_from(["..", ".", "", "a", "b", "é"])
    items = [
        replace(one, target="/".join(data.draw(st.lists(parts, max_size=5))))
        if one.kind == ItemKind.LINK
        else replace(one, mode=one.mode | 0o700, pieces=())
        for one in items
    ]
    try:
        found = decode_recipe(encode_recipe(items), [])
    except Refused:
        return
    out = tmp_path_factory.mktemp("links") / "inner" / "out"
    out.parent.mkdir()
    for item in found:
        if item.kind == ItemKind.LINK:
            (out / item.path).symlink_to(item.target)
        else:
            (out / item.path).mkdir() if item.kind == ItemKind.FOLDER else (out / item.path).touch()
    for item in found:
        with suppress(OSError, RuntimeError):  # it leads nowhere
            assert (out / item.path).resolve(strict=True).is_relative_to(out.resolve())
