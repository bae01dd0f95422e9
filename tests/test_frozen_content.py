"""The stores in tests/data hold everything that the format has: each kind of key, record, section, and frame.

The expected names come from the code, so a new one fails here until a store holds it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from struct import unpack_from
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.msgpack import decode

from casckpt.base.names import TXID
from casckpt.format import keys, manifest, records
from casckpt.format.dtypes import DTYPES, FLOATS, coded_width
from casckpt.format.encodings.frames import Form
from casckpt.format.encodings.parts import PartKind
from casckpt.format.metrics import LINEAGE
from casckpt.format.names import ManifestId
from casckpt.format.plain_codecs import STANDARD
from casckpt.format.plain_numpy import NUMPY
from casckpt.format.records import Record
from casckpt.format.sections import head, recipe
from casckpt.format.sections.blobs import BlobColumns
from casckpt.format.sections.health import HEALTH, HealthColumns
from casckpt.format.sections.index import (
    ATTACHMENT,
    PART,
    REPLICAS_NOTE,
    TENSOR,
    EntryColumns,
    ManifestBody,
    ObjectColumns,
)
from casckpt.format.sections.tables import CODED_ROWS, ROWS, SPANS, WHOLE
from casckpt.tensors.objects import TORCH_EXTENSIONS
from tests.support.frozen_store import DATA, STORES
from tests.support.plain_reader import Checkpoint as PlainCheckpoint
from tests.support.plain_reader import Store as PlainStore
from tests.support.plain_reader import cells_of, chains, pieces

T, H, R = "20260101T000000000000Z-0000000000000000-1111111111111111-1", "0" * 64, "0" * 16
SAMPLES: dict[str, list[Any]] = {
    "txid": [T], "uploader": [T], "blob": [H], "manifest": [H], "id": [H], "key": [H], "run": [R], "number": [0, 7],
    "name": ["name", f"lease-{R}"],
}  # fmt: skip
UNUSED = {("Settings", "requires")}
"""Fields that nothing can set yet."""


NEVER = {"torch.Tensor", "torch.Parameter", "torch.Generator"}
"""Tags of types that are refused."""


class Found(NamedTuple):
    """A manifest in one of the stores, and its sections."""

    store: Path
    manifest: manifest.Manifest
    sections: dict[str, bytes]


def files_of(store: Path) -> Iterator[tuple[str, Path]]:
    """Yield the keys and paths of the objects of a store."""
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.name != "expected.json":
            yield path.relative_to(store).as_posix(), path


OBJECTS = [(key, path) for name in STORES for key, path in files_of(DATA / name)]


@cache
def manifests() -> list[Found]:
    """Return all manifests."""
    found = []
    for key, path in OBJECTS:
        name = keys.parse_object(key)
        if name is not None and name.kind == "manifest":
            data = path.read_bytes()
            listed = head.decode_head(data[: head.HEAD_BYTES])
            sections = {one.name: data[one.offset : one.end] for one in listed.sections}
            found.append(Found(path.parents[2], manifest.decode(data, ManifestId(name.hash)), sections))
    return found


def shape(key: str) -> str:
    """Return a key with letters in place of ids, hashes and numbers, and "name" for that of a tag."""
    forms = ((TXID, "T"), (r"[0-9a-f]{64}", "H"), (r"\b[0-9a-f]{16}\b", "R"), (r"\b\d+\b", "N"))
    for form, letter in (("tags/[^/]+", "tags/name"), *forms):
        key = re.sub(form, letter, key)
    return key


def test_the_stores_have_keys_of_every_form_and_no_others() -> None:
    makers = [one for name, one in vars(keys).items() if name.endswith("_key") and not name.startswith("_")]
    made = {keys.MARKER}
    for maker in makers:
        arguments = [SAMPLES[name] for name in inspect.signature(maker).parameters]
        made |= {shape(maker(*some)) for some in itertools.product(*arguments)}
    assert {shape(key) for key, _ in OBJECTS} == made


def within(record: Record) -> Iterator[Record]:
    """Yield a record and the records in its fields."""
    yield record
    for name in record.__struct_fields__:
        if isinstance(value := getattr(record, name), Record):
            yield from within(value)


def read(key: str, path: Path) -> Record:
    """Read the record at a key."""
    data = path.read_bytes()
    if key == keys.MARKER:
        return records.decode_marker(data)
    tag = json.loads(data.partition(b"\n")[0]).get("type")
    tagged = {one.__struct_config__.tag: one for one in Record.__subclasses__() if one.__struct_config__.tag}
    record: Record = records.decode(data, tagged[tag] if tag else records.Settings, key)
    return record


def test_the_stores_have_every_record_with_every_field() -> None:
    found = set()
    for key, path in OBJECTS:
        if not key.startswith(("objects/", "signatures/")):
            for record in within(read(key, path)):
                line = msgspec.json.decode(msgspec.json.encode(record))  # without the fields that have their defaults
                found |= {(type(record).__name__, name) for name in line}
    every = {(kind.__name__, name) for kind in Record.__subclasses__() for name in kind.__struct_fields__}
    assert every - found == UNUSED


def test_the_stores_have_every_section_with_every_column() -> None:
    assert {name for one in manifests() for name in one.sections} == {*head.KNOWN, HEALTH}
    columns: dict[type, list[dict[str, Any]]] = {
        ManifestBody: [decode(one.sections[head.INDEX]) for one in manifests()],
        BlobColumns: [decode(one.sections[head.BLOBS]) for one in manifests()],
        HealthColumns: [decode(one.sections[HEALTH]) for one in manifests() if HEALTH in one.sections],
        manifest.PlacesSection: [decode(one.sections[head.PLACES]) for one in manifests()],
    }
    columns[EntryColumns] = [index["entries"] for index in columns[ManifestBody]]
    columns[ObjectColumns] = [index["objects"] for index in columns[ManifestBody]]
    for kind, found in columns.items():
        names = {one.encode_name for one in msgspec.structs.fields(kind)}
        assert {name for one in found for name, value in one.items() if len_of(value)} == names, kind
    notes = {name for one in manifests() for name in one.manifest.body.notes}
    assert notes == {*LINEAGE, REPLICAS_NOTE, recipe.NOTE}


def len_of(value: Any) -> bool:
    """Return whether a value is not empty. A column of no numbers has one byte."""
    return len(value) > 1 if isinstance(value, bytes) else value not in ([], {}, None)


def test_the_stores_have_entries_of_every_kind_and_dtype_and_every_kind_of_object() -> None:
    entries = [entry for one in manifests() for entry in one.manifest.entries]
    assert {entry.kind for entry in entries} == {TENSOR, PART, ATTACHMENT}
    assert {entry.dtype for entry in entries if entry.kind == TENSOR} == {*DTYPES}
    assert {entry.rank for entry in entries} == {None, 0, 1}
    assert {one.pickled for found in manifests() for one in found.manifest.objects} == {True, False}


def tags(item: Any) -> Iterator[str]:
    """Yield the tags in plain data."""
    if isinstance(item, list):
        yield item[0]
        for child in item[1:]:
            yield from tags(child)


def test_the_stores_have_every_kind_of_plain_data() -> None:
    found = set[str]()
    for one in manifests():
        found |= set(tags(decode(one.manifest.body.tree)))
        for value in one.manifest.objects:
            found |= set() if value.pickled else set(tags(decode(one.manifest.data(value))))
    known = {codec.tag for codec in (*STANDARD, *NUMPY)} | {one.tag for one in TORCH_EXTENSIONS}
    assert found == (known | {"part", "wrapper"}) - NEVER


def test_the_stores_have_every_form_of_cell_tables_and_of_rows() -> None:
    forms, has_thinned = {head.CELLS: set[bytes](), head.ROWS: set[bytes]()}, False
    for one in manifests():
        index, places = (decode(one.sections[name]) for name in (head.INDEX, head.PLACES))
        cells = pieces(index["cells"], one.sections[head.CELLS], "cells")
        rows = pieces(places["rows"], one.sections[head.ROWS], "rows")
        forms[head.CELLS] |= {piece[:1] for piece in cells}
        forms[head.ROWS] |= {piece[:1] for piece in rows}
        has_thinned |= any(before and not after for before, after in zip(cells, rows, strict=True))
    assert forms == {head.CELLS: {b"", WHOLE, SPANS}, head.ROWS: {b"", ROWS, CODED_ROWS}}
    assert has_thinned


class FrameForm(NamedTuple):
    """What the first bytes of a frame state, and the kinds of its parts."""

    form: int
    width: int
    rotated: int
    parts: frozenset[int]


@cache
def frames() -> tuple[list[FrameForm], set[int]]:
    """Return the forms of all frames, and the lengths of the chains of bases."""
    store, found, lengths = PlainStore(DATA / "frozen_store_coded"), list[FrameForm](), set[int]()
    for txid in store.visible().values():
        read = PlainCheckpoint(store.root, store.log(txid).record)
        for entry in filter(lambda one: one.rows, read.entries):
            for links in chains(entry, cells_of(entry, read.index["cell_bytes"])):
                lengths.add(len(links))
                found += [form_of(read, *link[:3]) for link in links if link[3]]
    return found, lengths


def form_of(read: PlainCheckpoint, blob: int, at: int, size: int) -> FrameForm:
    """Return the form of a frame."""
    data = (read.root / read.blobs[blob][0]).read_bytes()[at : at + size]
    form, width, rotated = data[:3]
    at, kinds = 16 if form == Form.SPARSE else 8, list[int]()
    while at < len(data):
        kind, length = unpack_from("<BI", data, at)
        kinds, at = [*kinds, kind], at + 5 + length
    return FrameForm(form, width, rotated, frozenset(kinds))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("form", {*Form} - {Form.RAW}),
        ("width", {coded_width(dtype) for dtype in FLOATS}),
        ("rotated", {0, 1}),
        ("parts", {*PartKind}),
    ],
)
def test_the_stores_have_every_form_of_frames_and_their_parts(name: str, known: set[int]) -> None:
    values = [getattr(frame, name) for frame in frames()[0]]
    assert {*itertools.chain(*values)} == known if name == "parts" else {*values} == known


def test_the_stores_have_chains_of_bases() -> None:
    assert frames()[1] == {1, 2, 3, 4, 5}
