"""Manifests are decoded as they were encoded. For all other bytes, decoding raises Damaged or Refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import Damaged, InvalidInput, Refused
from casckpt.format.digest import cell_digest
from casckpt.format.extents import build
from casckpt.format.manifest import FRONT, Attachment, Draft, Encoded, Manifest, ObjectEntry, decode, encode, placed
from casckpt.format.metrics import encode_metadata
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.regions import Region, full_box
from casckpt.format.sections.blobs import MAX_BLOB_BYTES, BlobRef, encode_blobs
from casckpt.format.sections.columns import pack
from casckpt.format.sections.head import COPIED, HEAD_BYTES, INDEX, KNOWN, NEEDED, Section, assemble, decode_head
from casckpt.format.sections.head import _encode as encode_head
from casckpt.format.sections.index import MAX_KEY_CHARACTERS, PART, TENSOR
from casckpt.format.sections.pieces import cut
from casckpt.format.sections.tables import Extents, encode_cells
from casckpt.format.tree import decode_tree, encode_tree
from tests.support.geometry import table_of
from tests.support.ids import named
from tests.support.ranks import outcome_of
from tests.support.repositories import draft

UPLOADERS = [TxId(f"20260102T030405000000Z-{n:016x}-{n:016x}-{n}") for n in range(2)]
BLOBS = [BlobRef(BlobHash(f"{n:064x}"), 4096 + 5000 * n, UPLOADERS[n % 2], worn=n == 2) for n in (1, 2, 0)]


def drawn(**fields: Any) -> Draft:
    """Return a manifest with a tensor of two cells, a small tensor, a part, an object and an attachment."""
    shape = (300,)
    cells = [Region(full_box(shape), 0, 256), Region(full_box(shape), 256, 300)]
    one = table_of((5,), 2048, [Region(full_box((5,)), 0, 5)])
    streams = {
        (TENSOR, "w", 0, None): ("complex128", table_of(shape, 4096 // 16, cells, itemsize=16, per_blob=1)),
        (TENSOR, "b", 0, 3): ("bfloat16", one),
        (PART, "o", 0, None): ("uint8", table_of((0,), 4096, [])),
    }
    tree = encode_tree({"w": 0, "b": 0, "o": 1})
    values: dict[str, Any] = {
        "run": "sft",
        "step": 7,
        "created_at": 1,
        "parent": "ab" * 32,
        "cell_bytes": 4096,
        "metadata": encode_metadata({"loss": 1.5})[0],
        "streams": streams,
        "objects": [ObjectEntry("o", None, b"\x01", 1), ObjectEntry("p", 2, b"pickle", 0, True)],
        "attachments": [Attachment("a.txt", b"hello")],
        "tree": tree,
        "notes": {"dcp": b"note"},
    }
    return draft(BLOBS, **(values | fields))


def data() -> tuple[ManifestId, bytes]:
    made = encode(drawn())
    return made.id, made.data


def _use(manifest: Manifest) -> None:
    """Read the whole manifest, as load, diff and show do. This raises only Refused or Damaged."""
    for entry in manifest.entries:
        table = manifest.extents(entry)
        places = list(table.stored_cells())
        assert all(place.offset + place.nbytes <= manifest.blob_sizes[place.blob] for place in places)
        assert entry.nbytes >= 0
    for one in manifest.objects:
        manifest.data(one)
    for short in manifest.body.attachments:
        manifest.data(short)
    for ref in manifest.blobs:
        assert len(ref.hash) == 64
        assert 0 <= ref.size <= MAX_BLOB_BYTES
    assert isinstance(manifest.metadata, dict)
    assert isinstance(manifest.tensors, dict)
    assert isinstance(manifest.faults(), list)
    assert manifest.nbytes > 0
    decode_tree(manifest.body.tree)


def test_a_manifest_decodes_as_encoded() -> None:
    made = encode(drawn())
    manifest = decode(made.data, made.id, made.head)
    body = manifest.body
    assert manifest.id == made.id == decode_head(made.data)["index"].digest.hex()
    assert (body.run, body.step, body.created_at, body.parent) == ("sft", 7, 1, "ab" * 32)
    assert (body.cell_bytes, body.notes, manifest.metadata) == (4096, {"dcp": b"note"}, {"loss": 1.5})
    assert list(manifest.blobs) == BLOBS
    assert [entry.name for entry in manifest.entries] == list(drawn().streams)
    assert [(entry.dtype, entry.shape, entry.nbytes) for entry in manifest.entries] == [
        ("complex128", (300,), 4800), ("bfloat16", (5,), 10), ("uint8", (0,), 0),
    ]  # fmt: skip
    assert list(manifest.tensors) == ["w", "b"]
    for entry, (_, table) in zip(manifest.entries, drawn().streams.values(), strict=True):
        assert list(manifest.extents(entry).stored_cells()) == list(table.stored_cells())
    assert [(one.key, one.rank, one.parts, one.pickled) for one in body.objects] == [
        ("o", None, 1, False), ("p", 2, 0, True),
    ]  # fmt: skip
    assert [manifest.data(one) for one in body.objects] == [b"\x01", b"pickle"]
    (attached,) = body.attachments
    assert (attached.key, manifest.size(attached), manifest.data(attached)) == ("a.txt", 5, b"hello")
    assert manifest.faults() == []
    assert manifest.encoded() == made.data
    _use(manifest)


def test_the_id_depends_on_content_and_not_on_locations() -> None:
    """The test changes blobs, offsets and uploaders."""
    moved = {
        name: (
            dtype,
            table_of(table.shape, table.cell, [c.region for c in table.stored_cells()], itemsize=table.itemsize),
        )
        for name, (dtype, table) in drawn().streams.items()
    }
    refs = [BlobRef(BlobHash("f" * 64), 1 << 20, UPLOADERS[0])]
    one, other = encode(drawn()), encode(draft_with(refs, moved))
    assert one.id == other.id
    assert one.head != other.head
    assert decode(other.data, one.id).extents(decode(other.data, one.id).entries[0]).extents[0].blob == 0
    fields: dict[str, Any]
    for fields in ({"step": 8}, {"tree": b""}, {"objects": []}, {"parent": None}, {"notes": {}}):
        assert encode(drawn(**fields)).id != one.id


def draft_with(refs: Sequence[BlobRef], streams: Any) -> Draft:
    return Draft(
        **{name: getattr(drawn(), name) for name in Draft.__struct_fields__}
        | {"blobs": refs, "streams": Extents.of(streams)}
    )


class Ranged:
    """A manifest of which only the front has been read."""

    def __init__(self, made: Encoded) -> None:
        self.data, self.reads = made.data, 0
        head = decode_head(made.data)
        front = {name: made.data[head[name].offset : head[name].end] for name in FRONT}
        self.manifest = Manifest(head, front, self.read).check()

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads += 1
        return [self.data[offset : offset + length] for offset, length in ranges]


def test_a_manifest_read_by_ranges_equals_one_read_as_a_whole() -> None:
    made = encode(drawn())
    whole, ranged = decode(made.data, made.id), Ranged(made)
    for entry in whole.entries:
        found = ranged.manifest.extents(entry)
        assert list(found.stored_cells()) == list(whole.extents(entry).stored_cells())
    assert ranged.reads == 2  # cells and rows: one read fetches a small section
    again = Ranged(made)
    again.manifest.ready()
    assert again.reads == 3
    _use(again.manifest)
    assert again.reads == 3
    assert again.manifest.encoded() == made.data


@pytest.mark.parametrize("ranged", [True, False])
def test_a_manifest_can_be_sent_to_a_different_rank(ranged: bool) -> None:
    made = encode(drawn())
    source = Ranged(made)
    told = pickle.loads(pickle.dumps(source.manifest if ranged else decode(made.data, made.id)))
    assert told.id == made.id
    if ranged:
        with pytest.raises(Refused, match="was not attached"):
            told.extents(told.entries[0])
        told.attach(source.read)
    _use(told)
    assert told.encoded() == made.data


def test_a_manifest_with_an_unknown_section_can_be_sent_to_a_different_rank() -> None:
    made, parts, end = encode(drawn()), [], HEAD_BYTES
    for one in made.decoded_head.sections:
        parts.append((one, made.data[one.offset : one.end]))
        if one.name == INDEX:
            parts.append((Section("later", 0, 0, 5, cell_digest(b"bytes")), b"bytes"))
    sections = []
    for one, part in parts:
        sections.append(one._replace(offset=end))
        end += len(part)
    head = encode_head(sections)
    source = Ranged(Encoded(head, b"".join((head.data, *(part for _, part in parts)))))
    told = pickle.loads(pickle.dumps(source.manifest))
    told.attach(source.read)
    _use(told)
    assert told.encoded() == source.data


def test_a_different_manifest_under_the_same_name_is_reported_as_damage() -> None:
    raw = data()[1]
    with pytest.raises(Damaged, match="a different checkpoint") as caught:
        decode(raw, ManifestId("0" * 64))
    assert caught.value.checkpoints == ("0" * 64,)
    with pytest.raises(Damaged, match="a different manifest"):
        decode(raw, data()[0], "0" * 64)


@given(st.data())
def test_any_change_to_a_manifest_is_detected(data_: st.DataObject) -> None:
    made = encode(drawn())
    raw = bytearray(made.data)
    kind = data_.draw(st.sampled_from(["flip", "cut", "grow", "other"]))
    if kind == "flip":
        raw[data_.draw(st.integers(0, len(raw) - 1))] ^= data_.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[data_.draw(st.integers(0, len(raw) - 1)) :]
    elif kind == "grow":
        raw += data_.draw(st.binary(min_size=1, max_size=50))
    else:
        raw = bytearray(data_.draw(st.binary(max_size=200)))
    try:
        found = decode(bytes(raw), made.id, made.head)
    except Damaged:
        return
    assert len(found.faults()) == 1
    with pytest.raises(Damaged):
        found.encoded()


@pytest.mark.parametrize(
    ("name", "where", "hit"),
    [
        ("objects", 0, "'o'"),
        ("objects", 3, "'p'"),
        ("objects", -1, "'a.txt'"),
        ("cells", 40, "'w'"),
        ("cells", -1, "'b'"),
        ("rows", 3, "'w'"),
        ("rows", -1, "'b'"),
    ],
)
def test_a_flipped_byte_damages_only_its_part(name: str, where: int, hit: str) -> None:
    made = encode(drawn())
    section, raw = decode_head(made.data)[name], bytearray(made.data)
    raw[section.offset + where if where >= 0 else section.end + where] ^= 1
    found = decode(raw, made.id, made.head)
    assert found.faults() == [f"its section {name!r} does not match its hash, which affects {hit}"]
    calls: list[Callable[[], object]] = [partial(found.extents, entry) for entry in found.entries]
    calls += [partial(found.data, one) for one in found.objects]
    calls += [partial(found.data, one) for one in found.body.attachments]
    errors = [caught for call in calls if (caught := outcome_of(call)) is not None and isinstance(caught, Damaged)]
    assert len(errors) == 1
    assert hit in str(errors[0])
    assert errors[0].checkpoints == (made.id,)


@pytest.mark.parametrize("name", FRONT)
def test_the_error_for_a_flipped_byte_in_the_head_names_its_section(name: str) -> None:
    made = encode(drawn())
    raw = bytearray(made.data)
    raw[decode_head(made.data)[name].offset + 5] ^= 1
    with pytest.raises(Damaged, match=f"section '{name}' does not match its hash"):
        decode(raw, made.id, made.head)


def forged(**parts: bytes) -> Encoded:
    """Return a forgery with correct hashes."""
    made = encode(drawn())
    head = decode_head(made.data)
    sections = {name: made.data[head[name].offset : head[name].end] for name in KNOWN} | parts
    return Encoded(*assemble(sections.items()))


def _try(made: Encoded) -> None:
    with suppress(Refused, Damaged):
        _use(decode(made.data, made.id, made.head))


def part(name: str) -> bytes:
    made = encode(drawn())
    section = decode_head(made.data)[name]
    return made.data[section.offset : section.end]


@given(st.data())
def test_forged_bytes_are_rejected_or_harmless(data_: st.DataObject) -> None:
    name = data_.draw(st.sampled_from(FRONT))
    raw = bytearray(part(name))
    for _ in range(data_.draw(st.integers(1, 4))):
        raw[data_.draw(st.integers(0, len(raw) - 1))] = data_.draw(st.integers(0, 255))
    _try(forged(**{name: bytes(raw)}))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.lists(st.integers(0, 2**62), max_size=4).map(pack),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_forged_fields_are_rejected_or_harmless(data_: st.DataObject) -> None:
    name = data_.draw(st.sampled_from(FRONT))
    fields = msgspec.msgpack.decode(part(name))
    place, field = fields, data_.draw(st.sampled_from(list(fields)))
    inner = place[field]
    while isinstance(inner, list | dict) and inner and data_.draw(st.booleans()):
        place = inner
        field = data_.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
        inner = inner[field]
    place[field] = data_.draw(values)
    _try(forged(**{name: msgspec.msgpack.encode(fields)}))


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> Encoded:
    fields = msgspec.msgpack.decode(part(name))
    change(fields)
    return forged(**{name: msgspec.msgpack.encode(fields)})


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], object]:
    def change(fields: dict[str, Any]) -> None:
        for name in path[:-1]:
            fields = fields[name]
        fields[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("run", to="../x"),
        _set("run", to=""),
        _set("step", to=-1),
        _set("step", to=2**63),
        _set("parent", to="AB" * 32),
        _set("cell_bytes", to=0),
        _set("cell_bytes", to=4097),
        _set("cell_bytes", to=2 << 30),
        _set("entries", "dtypes", to=[["float32", 8], ["bfloat16", 2], ["uint8", 1]]),
        _set("entries", "dtypes", to=[["new", 0], ["bfloat16", 2], ["uint8", 1]]),
        _set("entries", "dtypes", to=[["new", 2**40], ["bfloat16", 2], ["uint8", 1]]),
        _set("entries", "dtypes", to=[["complex128", 16]]),
        _set("entries", "kinds", to=["tensor"]),
        _set("entries", "kinds", to=["part", "part"]),
        _set("entries", "kinds", to=["attachment", "part"]),
        _set("entries", "keys", to=["w" * (MAX_KEY_CHARACTERS + 1), "b", "o"]),
        _set("entries", "keys", to=["w"]),
        _set("entries", "rank", to=pack([0, 0])),
        _set("entries", "dimensions", to=pack([1, 1, 65])),
        _set("entries", "dimensions", to=pack([2**62, 2**62, 3])),
        _set("entries", "shape", to=pack([2**62, 2**62, 2**62])),
        _set("entries", "shape", to=pack([300, 5])),
        _set("objects", "rank", to=pack([0])),
        _set("objects", "parts", to=b""),
        _set("objects", "keys", to=["o" * (MAX_KEY_CHARACTERS + 1), "p"]),
        _set("attachments", to=["a/../../up"]),
        _set("attachments", to=["/etc/passwd"]),
        _set("attachments", to=[]),
        _set("metadata", to=[1]),
    ],
    ids=named,
)
def test_manifest_fields_outside_the_limits_are_rejected(change: Callable[[dict[str, Any]], object]) -> None:
    made = changed("index", change)
    with pytest.raises(Refused, match="is invalid"):
        _use(decode(made.data, made.id, made.head))


@pytest.mark.parametrize(
    "change",
    [
        _set("uploaders", to=["../../etc"] * 2),
        _set("uploaders", to=[]),
        _set("index", to=pack([0, 0, 2])),
        _set("index", to=pack([0, 0])),
        _set("hashes", to=b""),
        _set("sizes", to=pack([4096, 4096, MAX_BLOB_BYTES + 1])),
        _set("sizes", to=b"\x03"),
        _set("worn", to="x"),
    ],
    ids=named,
)
def test_manifests_that_name_blobs_outside_the_store_are_rejected(change: Callable[[dict[str, Any]], object]) -> None:
    made = changed("blobs", change)
    with pytest.raises(Refused, match="is invalid"):
        decode(made.data, made.id, made.head)


def test_an_unknown_dtype_kind_or_encoding_affects_only_the_loads_that_need_it() -> None:
    """A dtype, a kind or a form of a later version prevents only loads of its own entry."""
    made = changed("index", _set("entries", "dtypes", to=[["float3", 16], ["bfloat16", 2], ["uint8", 1]]))
    found = decode(made.data, made.id, made.head)
    assert (found.entries[0].dtype, found.entries[0].nbytes) == ("float3", 4800)
    assert len(found.extents(found.entries[0]).extents) == 2  # gc, copies and verify need no more
    made = changed("index", _set("entries", "kinds", to=["tensor", "riddle"]))
    found = decode(made.data, made.id, made.head)
    assert [entry.kind for entry in found.entries] == ["tensor", "tensor", "riddle"]
    assert list(found.tensors) == ["w", "b"]


def test_unknown_fields_of_a_manifest_are_ignored() -> None:
    for name in FRONT:
        made = changed(name, _set("of later", to=[1, {"x": b"y"}]))
        _use(decode(made.data, made.id, made.head))


def test_an_unknown_required_section_prevents_a_load() -> None:
    made = encode(drawn())
    head = decode_head(made.data)
    parts = [(name, made.data[head[name].offset : head[name].end]) for name in KNOWN]
    for flags, stops in ((NEEDED, True), (0, False)):
        found, raw = assemble(parts, [(Section("secret", flags, 0, 0, b""), b"bytes")])
        if stops:
            with pytest.raises(Refused, match="'secret'"):
                decode(raw, made.id, found.digest)
        else:
            _use(decode(raw, made.id, found.digest))
            broken = decode(raw[:-1] + b"!", made.id, found.digest)
            assert broken.faults() == ["its section 'secret' does not match its hash"]


def test_the_error_for_malformed_extents_names_the_key() -> None:
    tables = [encode_cells(table) for _, table in drawn().streams.values()]
    for bad in (b"\xc0", b"\1\x90", b"\1" + msgspec.msgpack.encode([[], [], b""]), b"\1\xd9"):
        table, section = cut([bad, *tables[1:]])
        fields = msgspec.msgpack.decode(part("index"))
        fields["cells"] = [table.lengths, table.each, table.hashes]
        made = forged(index=msgspec.msgpack.encode(fields), cells=section)
        found = decode(made.data, made.id, made.head)
        with pytest.raises(Refused, match="key 'w'"):
            found.extents(found.entries[0])
        found.extents(found.entries[1])


def test_malformed_metadata_is_rejected() -> None:
    made = encode(drawn(metadata=msgspec.Raw(b"\x91\xa1\xff")))
    with pytest.raises(Refused, match="metadata"):
        _ = decode(made.data, made.id).metadata


def test_deeply_nested_fields_of_a_manifest_are_rejected() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    index = part("index")
    for bad in (index.replace(b"\xa4loss", b"\xa4loss" + deep), index[:-1] + deep):
        _try(forged(index=bad))


def section(data: bytes, name: str) -> bytes:
    found = decode_head(data)[name]
    return data[found.offset : found.end]


def test_the_manifest_of_a_copy_has_its_own_blob_locations() -> None:
    made = encode(drawn())
    refs = [replace(ref, uploader=UPLOADERS[0]) for ref in BLOBS]
    copy = placed(decode(made.data, made.id), encode_blobs(refs))
    assert copy.id == made.id
    assert copy.head != made.head
    same = [name for name in KNOWN if section(copy.data, name) == section(made.data, name)]
    assert same == [name for name in KNOWN if name != "blobs"]
    assert list(decode(copy.data, made.id, copy.head).blobs) == refs
    assert placed(decode(copy.data, made.id), encode_blobs(BLOBS)) == made


def test_moved_cells_keep_their_digests() -> None:
    made = encode(drawn())
    before = decode(made.data, made.id)
    table = before.extents(before.entries[0])
    cells = [cell._replace(blob=3, offset=4096 + cell.offset + 64 * n) for n, cell in enumerate(table.stored_cells())]
    refs = [*BLOBS, BlobRef(BlobHash("f" * 64), 1 << 20, UPLOADERS[1])]
    moved = placed(before, encode_blobs(refs), {0: build(table.shape, table.itemsize, table.cell, cells)})
    assert moved.id == made.id
    after = decode(moved.data, made.id, moved.head)
    assert list(after.extents(after.entries[0]).stored_cells()) == cells
    for old, new in zip(before.entries[1:], after.entries[1:], strict=True):
        assert list(before.extents(old).stored_cells()) == list(after.extents(new).stored_cells())
    for name in ("index", "objects", "cells"):
        assert section(moved.data, name) == section(made.data, name)


def test_the_flag_of_an_unknown_section_decides_whether_it_is_copied() -> None:
    made = encode(drawn())
    parts = [(name, section(made.data, name)) for name in KNOWN]
    extra = [(Section("taken", COPIED, 0, 0, b""), b"one"), (Section("left", 0, 0, 0, b""), b"two")]
    head, data = assemble(parts, extra)
    copy = placed(decode(data, made.id, head.digest), encode_blobs(BLOBS))
    assert [one.name for one in decode_head(copy.data).sections] == [*KNOWN, "taken"]
    assert section(copy.data, "taken") == b"one"


@pytest.mark.parametrize("name", ["objects", "cells", "rows"])
def test_damaged_sections_are_not_copied(name: str) -> None:
    made = encode(drawn())
    raw = bytearray(made.data)
    raw[decode_head(made.data)[name].offset] ^= 1
    with pytest.raises(Damaged, match=f"'{name}'"):
        placed(decode(raw, made.id), encode_blobs(BLOBS))


def test_a_manifest_that_readers_would_reject_is_not_encoded() -> None:
    table = drawn().streams[("tensor", "b", 0, 3)][1]
    for fields in (
        {"run": "../x"},
        {"streams": {("tensor", "k" * (MAX_KEY_CHARACTERS + 1), 0, None): ("int8", table)}},
    ):
        with pytest.raises(InvalidInput):
            encode(drawn(**fields))
    with pytest.raises(Refused):
        encode(drawn(streams={("tensor", "k", 0, None): ("int9000", table)}))
