"""Records are decoded as they were encoded. A torn record raises Damaged, and one with invalid content raises
Refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.digest import hex_digest
from casckpt.errors import CasckptError, Damaged, Refused
from casckpt.format import records
from casckpt.format.metrics import MAX_METADATA_BYTES
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.records import (
    Announced,
    Back,
    Began,
    Committed,
    DamageRecord,
    Dropped,
    FirstRecord,
    Forgotten,
    Kept,
    LaterRecord,
    LeaseRecord,
    Process,
    Purged,
    Ran,
    Record,
    Restored,
    RevokedRecord,
    Rewritten,
    Settings,
    SignOfLife,
    TaggedRecord,
    TagRecord,
    Trimmed,
    changed,
    decode,
    decode_marker,
    encode,
    encode_marker,
)
from tests.support.ids import named
from tests.support.repositories import MARKER

TXID = TxId("20260102T030405000000Z-00000000000000ab-00000000000000cd-7")
OTHER = TxId("20260102T030406000000Z-00000000000000ef-00000000000000cd-7")
HASH = "0123456789abcdef" * 4
COMMITTED = Committed(
    txid=TXID,
    run="sft",
    step=7,
    time=1,
    manifest=ManifestId(HASH),
    head=HASH,
    manifest_bytes=5000,
    created_at=1,
    store="s",
    who="ann@node3",
    bytes_total=10,
    metadata={"loss": 1.5},
    healthy=False,
    metrics={"loss": 0.25, "tokens": 12, "grad": "nan"},
    lineage={"resumed_from": {"run": "sft", "step": 3}},
)
EXAMPLES: list[Record] = [
    Settings(created_at=1, min_age_seconds=2.5, requires=["rewrites"]),
    Began(
        txid=TXID,
        run="a/b",
        step=0,
        time=1,
        process=Process(host="h", boot_id="b", pid=1, pid_namespace="n", started=3),
        slot=(TXID, 3),
    ),
    SignOfLife(txid=TXID, time=2),
    COMMITTED,
    RevokedRecord(txid=TXID, time=1, reason="dead"),
    Forgotten(txid=TXID, time=1, who="ann@node3"),
    Restored(txid=TXID, time=1, who="ann@node3"),
    Purged(txid=TXID, time=1, who="ann@node3"),
    Rewritten(
        txid=TXID,
        time=1,
        who="ann@node3",
        by=OTHER,
        head=HASH,
        manifest_bytes=5000,
        dropped=Dropped(entries=2, bytes=64, rule="--drop 'optim.*'"),
    ),
    Back(txid=TXID, time=1, who="ann@node3", to=OTHER),
    Trimmed(txid=TXID, time=1, who="ann@node3"),
    TaggedRecord(txid=TXID, time=1, name="best", generation=0),
    Kept(txid=TXID, time=1),
    Announced(time=1, announced=[(TXID, 0), (TXID, 2)], seen=-1),
    Ran(time=1, who="ann@node3", waiting=2, refused=0, opened=1),
    TagRecord(name="best", time=1, unique="u", txid=TXID, manifest=ManifestId(HASH), who="ann@node3:1"),
    TagRecord(name="eval", time=1, unique="u", txid=TXID, manifest=ManifestId(HASH), expires=2, who="h:1"),
    LeaseRecord(time=1, expires=2, txid=TXID, manifest=ManifestId(HASH), who="h:1"),
    LeaseRecord(time=1, expires=2, who="h:1"),
    DamageRecord(uploader=TXID, blob=BlobHash(HASH), state="damaged", time=1, why="x", unique="u"),
]


def forged(line: bytes) -> bytes:
    """Return a line with a correct checksum."""
    return line + b"\n" + hex_digest(line).encode() + b"\n"


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_decodes_as_encoded(record: Record) -> None:
    data = encode(record)
    found: Record = decode(data, type(record), "key")
    assert found == record
    assert data.count(b"\n") == 2
    assert msgspec.json.decode(data.split(b"\n")[0])


@pytest.mark.parametrize("record", EXAMPLES[3:13], ids=lambda record: type(record).__name__)
def test_log_records_are_decoded_by_type(record: Record) -> None:
    kind = FirstRecord if isinstance(record, Committed | RevokedRecord) else LaterRecord
    assert type(decode(encode(record), kind, "key")) is type(record)


@given(st.data())
def test_any_changed_byte_in_a_record_is_reported_as_damage(data: st.DataObject) -> None:
    good = encode(COMMITTED)
    raw = bytearray(good)
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    with pytest.raises(Damaged) as caught:
        decode(bytes(raw), FirstRecord, "commits/x")
    assert caught.value.key == "commits/x"


@given(st.data())
def test_forged_lines_are_rejected_or_decode_to_valid_records(data: st.DataObject) -> None:
    line = bytearray(msgspec.json.encode(COMMITTED))
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(
            st.sampled_from([*b'"{}[]:,0-9eu\\\xff\n', data.draw(st.integers(0, 255))])
        )
    try:
        found: Record = decode(forged(bytes(line)), FirstRecord, "key")
    except (Damaged, Refused):
        return
    assert decode(encode(found), FirstRecord, "key") == found


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../up"},
        {"run": 3},
        {"step": -1},
        {"step": 2**63},
        {"step": True},
        {"manifest": HASH.upper()},
        {"manifest": HASH + "0"},
        {"txid": None},
        {"type": "unheard-of"},
        {"parent": "0"},
        {"metadata": [1]},
        {"lineage": ["sft@1"]},
        {"time": -1},
        {"created_at": 253_402_300_800_000_000},  # the year 10000, which is not a valid date
        {"metrics": {f"m{n}": n for n in range(65)}},
        {"metrics": {"loss": "0.3"}},
        {"metrics": {"loss": True}},
        {"metrics": {"": 1}},
        {"metrics": {"x" * 101: 1}},
        {"metrics": {"a\nb": 1}},
        {"metrics": [1]},
        {"healthy": 1},
    ],
    ids=named,
)
def test_fields_that_become_parts_of_keys_are_validated(change: dict[str, Any]) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(COMMITTED)) | change
    with pytest.raises(Refused, match="A later version of casckpt"):
        decode(forged(msgspec.json.encode(fields)), FirstRecord, "key")


def test_unknown_fields_of_a_record_are_ignored() -> None:
    fields = msgspec.json.decode(msgspec.json.encode(COMMITTED)) | {"new": [1, 2]}
    assert decode(forged(msgspec.json.encode(fields)), FirstRecord, "key") == COMMITTED


def test_a_deeply_nested_record_is_rejected() -> None:
    line = b'{"type":"committed","metadata":' + b'{"a":' * 100_000
    with pytest.raises(Refused):
        decode(forged(line), FirstRecord, "key")
    with pytest.raises(Damaged):
        decode_marker(b'{"x":' * 100_000)


def test_a_record_with_an_invalid_name_cannot_be_created() -> None:
    with pytest.raises(CasckptError):
        Forgotten(txid=TxId("../x"), time=1, who="ann@node3")


@pytest.mark.parametrize("other", [OTHER[:-1] + "8", OTHER.replace("cd-7", "ce-7")])
def test_a_rewrite_of_another_run_or_step_is_rejected(other: str) -> None:
    record = next(record for record in EXAMPLES if isinstance(record, Rewritten))
    with pytest.raises(Refused, match="impossible"):
        changed(record, by=TxId(other))


@pytest.mark.parametrize(("name", "generation"), [("be/st", 0), ("best", -1), ("Best", 0)])
def test_a_record_of_an_impossible_tag_is_rejected(name: str, generation: int) -> None:
    with pytest.raises(Refused):
        TaggedRecord(txid=TXID, time=1, name=name, generation=generation)


def test_the_marker_decodes_as_encoded() -> None:
    assert decode_marker(encode_marker(MARKER)) == MARKER
    assert msgspec.json.decode(encode_marker(MARKER)) == msgspec.structs.asdict(MARKER)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 2}, "Upgrade casckpt"),
        ({"features": ["history-2", "encrypted"]}, "encrypted"),
        ({"features": []}, "from before the first release of casckpt: read it with the version that wrote it"),
        ({"hash": "sha256"}, "the hash 'sha256'"),
        ({"format": 0}, "limits"),
        ({"cell_bytes": 0}, "limits"),
        ({"cell_bytes": 4100}, "limits"),
        ({"cell_bytes": 64 << 20}, "limits"),
        ({"blob_bytes": (1 << 30) + 1}, "limits"),
    ],
    ids=named,
)
def test_a_marker_outside_the_limits_is_rejected(change: dict[str, Any], error: str) -> None:
    with pytest.raises(Refused, match=error):
        decode_marker(encode_marker(changed(MARKER, **change)))


def test_a_later_version_with_more_features_reads_earlier_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KNOWN_FEATURES", records.KNOWN_FEATURES | {"encrypted"})
    assert decode_marker(encode_marker(MARKER)) == MARKER


@given(st.binary(max_size=60))
def test_bytes_that_are_not_a_valid_marker_are_rejected(data: bytes) -> None:
    with pytest.raises((Damaged, Refused)):
        decode_marker(data)


def test_the_size_of_metadata_in_a_record_is_limited() -> None:
    assert MAX_METADATA_BYTES < records.MAX_RECORD_BYTES
