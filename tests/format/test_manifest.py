"""Manifests come back as they were; any other bytes are Damaged or Refused, and nothing else ever happens."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Damaged, InvalidInput, Refused
from casckpt.format.columns import pack
from casckpt.format.digest import cell_digest, hex_digest
from casckpt.format.manifest import (
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_KEY_CHARACTERS,
    PART,
    TENSOR,
    Attachment,
    BlobRef,
    BlobUploaders,
    Manifest,
    ManifestBody,
    ObjectEntry,
    StreamEntry,
    decode,
    encode,
    encode_metadata,
    packed_blobs,
    packed_entry,
)
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.regions import Region, full_box
from casckpt.format.tree import Container, Leaf, decode_tree, encode_tree
from tests.support.geometry import table_of
from tests.support.ids import named

UPLOADERS = [TxId(f"20260102T030405000000Z-{n:016x}-{n:016x}-{n}") for n in range(2)]
BLOBS = [BlobRef(BlobHash(f"{n:064x}"), 4096 + 5000 * n, UPLOADERS[n % 2], worn=n == 2) for n in range(3)]


def body(**fields: Any) -> tuple[ManifestBody, BlobUploaders]:
    """A manifest of one tensor of two cells, a part, an object and an attachment."""
    shape = (300,)
    cells = [Region(full_box(shape), 0, 256), Region(full_box(shape), 256, 300)]
    table = table_of(shape, 4096 // 16, cells, itemsize=16, per_blob=1)
    stored, places = packed_blobs([BLOBS[1], BLOBS[2], BLOBS[0]])
    raw, _ = encode_metadata({"loss": 1.5})
    values: dict[str, Any] = {
        "format": 1,
        "casckpt": "0",
        "torch": "2",
        "run": "sft",
        "step": 7,
        "created_at": 1,
        "parent": "ab" * 32,
        "world_size": 1,
        "cell_bytes": 4096,
        "metadata": raw,
        "blobs": stored,
        "entries": [
            packed_entry(TENSOR, "w", "complex128", table),
            packed_entry(PART, "o", "uint8", table_of((0,), 4096, [])),
        ],
        "objects": [ObjectEntry("o", None, b"\x01", 1)],
        "attachments": [Attachment("a.txt", b"hello")],
        "tree": encode_tree(Container("dict", (("w", Leaf("tensor")), ("o", Leaf("object"))))),
    }
    return ManifestBody(**(values | fields)), places


def data() -> tuple[ManifestId, bytes]:
    return encode(*body())


def _through(want: ManifestBody, places: BlobUploaders) -> Manifest:
    found, raw = encode(want, places)
    return decode(raw, found)


def _use(manifest: Manifest) -> None:
    """Look at all of it, as gc, load, diff and show do. Raises Refused at most."""
    for entry in manifest.body.entries:
        table = manifest.extents(entry)
        places = list(table.stored_cells())
        assert all(place.offset + place.nbytes <= int(manifest.blob_sizes[place.blob]) for place in places)
        assert entry.nbytes >= 0
    for ref in manifest.blobs:
        assert len(ref.hash) == 64
        assert 0 <= ref.size <= MAX_BLOB_BYTES
    assert isinstance(manifest.metadata, dict)
    assert isinstance(manifest.tensors, dict)
    assert manifest.places().uploaders
    decode_tree(manifest.body.tree)


def test_a_manifest_comes_back() -> None:
    (found, raw), (want, places) = data(), body()
    manifest = decode(raw, found)
    assert manifest.id == found == hex_digest(msgspec.msgpack.encode(want))
    assert manifest.body == want
    assert manifest.places() == places
    assert list(manifest.blobs) == [BLOBS[1], BLOBS[2], BLOBS[0]]
    assert manifest.metadata == {"loss": 1.5}
    assert list(manifest.tensors) == ["w"]
    assert manifest.tensors["w"].nbytes == 4800
    _use(manifest)


def test_the_id_is_of_the_body_alone() -> None:
    want, _ = body()
    moved = BlobUploaders(uploaders=[UPLOADERS[0]], index=pack([0, 0, 0]))
    found, raw = encode(want, moved)
    assert found == data()[0]
    assert raw != data()[1]
    assert {ref.uploader for ref in decode(raw, found).blobs} == {UPLOADERS[0]}


def test_a_later_version_says_so() -> None:
    found, raw = data()
    with pytest.raises(Refused, match="later version"):
        decode(raw[:7] + b"\x02" + raw[8:], found)


def test_another_manifest_under_this_name_is_damaged() -> None:
    raw = data()[1]
    with pytest.raises(Damaged) as caught:
        decode(raw, ManifestId("0" * 64))
    assert caught.value.checkpoints == ("0" * 64,)


@given(st.data())
def test_any_change_is_noticed(data_: st.DataObject) -> None:
    found, good = data()
    raw = bytearray(good)
    kind = data_.draw(st.sampled_from(["flip", "cut", "grow", "other"]))
    if kind == "flip":
        raw[data_.draw(st.integers(0, len(raw) - 1))] ^= data_.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[data_.draw(st.integers(0, len(raw) - 1)) :]
    elif kind == "grow":
        raw += data_.draw(st.binary(min_size=1, max_size=50))
    else:
        raw = bytearray(data_.draw(st.binary(max_size=200)))
    with pytest.raises((Damaged, Refused)):
        decode(bytes(raw), found)


def _forged(head: bytes, tail: bytes) -> tuple[ManifestId, bytes]:
    """What somebody makes who knows how: everything has its right hash."""
    return ManifestId(hex_digest(head)), MAGIC + len(head).to_bytes(8, "little") + head + tail + cell_digest(tail)


def _try(head: bytes, tail: bytes) -> None:
    found, raw = _forged(head, tail)
    with suppress(Refused):
        _use(decode(raw, found))


@given(st.data())
def test_forged_bytes_are_refused_or_harmless(data_: st.DataObject) -> None:
    want, places = body()
    parts = [bytearray(msgspec.msgpack.encode(want)), bytearray(msgspec.msgpack.encode(places))]
    part = parts[data_.draw(st.integers(0, 1))]
    for _ in range(data_.draw(st.integers(1, 4))):
        part[data_.draw(st.integers(0, len(part) - 1))] = data_.draw(st.integers(0, 255))
    _try(bytes(parts[0]), bytes(parts[1]))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_forged_fields_are_refused_or_harmless(data_: st.DataObject) -> None:
    want, places = body()
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(want))
    table = msgspec.msgpack.decode(msgspec.msgpack.encode(places))
    place, name = data_.draw(st.sampled_from([(fields, name) for name in fields] + [(table, name) for name in table]))
    inner = place[name]
    while isinstance(inner, list) and inner and data_.draw(st.booleans()):
        place, name = inner, data_.draw(st.integers(0, len(inner) - 1))
        inner = inner[name]
    place[name] = data_.draw(values)
    _try(msgspec.msgpack.encode(fields), msgspec.msgpack.encode(table))


@pytest.mark.parametrize(
    "fields",
    [
        {"run": "../x"},
        {"run": ""},
        {"step": -1},
        {"step": 2**63},
        {"parent": "AB" * 32},
        {"cell_bytes": 0},
        {"cell_bytes": 4097},
        {"cell_bytes": 2 << 30},
        {"entries": [StreamEntry("tensor", "w", 0, None, "float7", (1,), msgspec.Raw(b"\xc0"))]},
        {"entries": [StreamEntry("blob", "w", 0, None, "uint8", (1,), msgspec.Raw(b"\xc0"))]},
        {"entries": [StreamEntry("tensor", "w", 0, None, "uint8", (-1,), msgspec.Raw(b"\xc0"))]},
        {"entries": [StreamEntry("tensor", "w", 0, None, "uint8", (2**63,), msgspec.Raw(b"\xc0"))]},
        {
            "entries": [
                StreamEntry("tensor", "w" * (MAX_KEY_CHARACTERS + 1), 0, None, "uint8", (1,), msgspec.Raw(b"\xc0"))
            ]
        },
        {"entries": [StreamEntry("attachment", "../up", 0, None, "uint8", (1,), msgspec.Raw(b"\xc0"))]},
        {"attachments": [Attachment("a/../../up", b"x")]},
        {"attachments": [Attachment("/etc/passwd", b"x")]},
        {"blobs": msgspec.structs.replace(body()[0].blobs, hashes=b"")},
        {"blobs": msgspec.structs.replace(body()[0].blobs, sizes=pack([4096, 4096, MAX_BLOB_BYTES + 1]))},
    ],
    ids=named,
)
def test_fields_outside_the_limits_are_refused(fields: dict[str, Any]) -> None:
    want, places = body(**fields)
    with pytest.raises(Refused, match="is not usable"):
        _through(want, places)


@pytest.mark.parametrize(
    "places",
    [
        BlobUploaders(uploaders=["../../etc"], index=pack([0, 0, 0])),
        BlobUploaders(uploaders=[], index=pack([0, 0, 0])),
        BlobUploaders(uploaders=[UPLOADERS[0]], index=pack([0, 0, 1])),
        BlobUploaders(uploaders=[UPLOADERS[0]], index=pack([0, 0])),
    ],
    ids=named,
)
def test_places_outside_the_store_are_refused(places: BlobUploaders) -> None:
    found, raw = encode(body()[0], places)
    with pytest.raises(Refused, match="is not usable"):
        decode(raw, found)


def test_extents_that_are_no_table_are_refused_with_their_key() -> None:
    for raw in (b"\xc0", b"\x90", msgspec.msgpack.encode([b""] * 7), b"\xd9"):
        entry = StreamEntry(TENSOR, "w", 0, None, "uint8", (4,), msgspec.Raw(raw))
        want, places = body(entries=[entry])
        head = msgspec.msgpack.encode(want)
        found, data_ = _forged(head, msgspec.msgpack.encode(places))
        with pytest.raises(Refused):
            _use(decode(data_, found))


def test_metadata_that_is_none_is_refused() -> None:
    want, places = body(metadata=msgspec.Raw(b"\x91\xa1\xff"))
    found, raw = encode(want, places)
    with pytest.raises(Refused, match="metadata"):
        _ = decode(raw, found).metadata


def test_deep_nests_are_refused() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    head = msgspec.msgpack.encode(body()[0])
    for forged in (head.replace(b"\xa4loss", b"\xa4loss" + deep), head[:-1] + deep):
        _try(forged, msgspec.msgpack.encode(body()[1]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_metadata_comes_back(metadata: dict[str, Any]) -> None:
    raw, short = encode_metadata(metadata)
    want, places = body(metadata=raw)
    assert _through(want, places).metadata == metadata
    assert short is None or short == metadata


def test_metadata_that_json_cannot_hold_stands_in_the_manifest_alone() -> None:
    for value in (math.nan, math.inf, "x" * (64 << 10)):
        raw, short = encode_metadata({"v": value})
        assert short is None
        assert repr(msgspec.msgpack.decode(raw)["v"]) == repr(value)
    assert encode_metadata({"t": (1, 2)})[1] == {"t": [1, 2]}


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"a": b"x"}, "metadata['a'] is a bytes"),
        ({"a": [1, {"b": object()}]}, "metadata['a'][1]['b'] is a object"),
        ({"a": 2**63}, "metadata['a'] is a int"),
        ({1: 2}, "metadata has the key 1;"),
        ({"a": {None: 2}}, "metadata['a'] has the key None;"),
        ([1], "not a list"),
        ("text", "not a str"),
        ({"a": "\ud800"}, "surrogate"),
    ],
    ids=named,
)
def test_metadata_that_no_json_can_hold_is_refused(metadata: Any, names: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_metadata(metadata)
    assert names in str(caught.value)


def test_metadata_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInput, match="levels deep"):
        encode_metadata({"a": loop})
