"""Keys are built and parsed in one module, and other keys are refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.names import MAX_STEP, run_hash
from casckpt.errors import InvalidInput, Refused
from casckpt.format import keys
from casckpt.format.names import BlobHash, ManifestId, TxId

HASH = "0123456789abcdef" * 4
times = st.timedeltas(timedelta(), timedelta(days=7000 * 365)).map(datetime(2000, 1, 1, tzinfo=UTC).__add__)
txids = st.builds(
    keys.make_txid,
    times,
    st.binary(min_size=8, max_size=8),
    st.sampled_from(["a", "b/c"]),
    st.integers(0, MAX_STEP),
)
HOSTILE = [
    "", "/", ".", "..", "commits", "commits/", "commits/../x", "commits//x", "/commits/x", "commits/x\n",
    f"objects/../{HASH}.safetensors", f"objects/{HASH}/{HASH}.safetensors",
]  # fmt: skip


@given(times, st.binary(min_size=8, max_size=8), st.integers(0, MAX_STEP))
def test_a_transaction_id_contains_its_time_run_and_step(time: datetime, entropy: bytes, step: int) -> None:
    txid = keys.make_txid(time, entropy, "sft/lora", step)
    assert keys.parse_txid(txid) == keys.TxName(time, run_hash("sft/lora"), step)
    assert entropy.hex() in txid
    assert keys.check_txid(txid) == txid


@given(st.lists(txids, min_size=1, max_size=5), times)
def test_a_new_transaction_id_sorts_after_all_earlier_ones(others: list[TxId], time: datetime) -> None:
    txid = keys.make_txid(keys.later_than(time, others), bytes(8), "x", 0)
    assert all(txid > other for other in others)


def test_the_time_in_a_transaction_id_is_in_utc() -> None:
    here = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert keys.make_txid(here, bytes(8), "x", 0).startswith("20260101T000000000000Z-")
    assert keys.later_than(here, []) == here


@given(txids, st.integers(0, 999_999_999))
def test_keys_are_parsed_into_the_values_that_they_were_built_from(txid: TxId, number: int) -> None:
    assert keys.parse_log(keys.commit_key(txid, number)) == (txid, number)
    assert keys.parse_log(keys.transaction_key(txid, number)) == (txid, number)
    assert keys.parse_tag(keys.tag_key("best", number)) == ("best", number)
    assert keys.tag_key("lease-0123456789abcdef", number) == f"leases/0123456789abcdef/{number}"
    assert keys.parse_tag(f"leases/0123456789abcdef/{number}") == ("lease-0123456789abcdef", number)
    assert keys.parse_tag(f"tags/lease-0123456789abcdef/{number}") is None
    assert keys.parse_damaged(keys.damaged_key(txid, BlobHash(HASH), number)) == (txid, HASH, number)
    assert keys.parse_numbered(keys.settings_key(number)) == number
    assert keys.parse_numbered(keys.ran_key(number)) == number
    assert keys.parse_signature(f"signatures/{HASH}/{HASH[::-1]}") == HASH
    assert keys.parse_announcement(keys.announcement_key("0123456789abcdef", number)) == ("0123456789abcdef", number)
    assert keys.parse_object(keys.blob_key(txid, BlobHash(HASH))) == keys.ObjectName(txid, HASH, "safetensors")
    assert keys.parse_object(keys.manifest_key(txid, ManifestId(HASH))) == keys.ObjectName(txid, HASH, "manifest")
    assert keys.blob_key(txid, BlobHash(HASH)).startswith(keys.uploader_folder(txid) + "/")


@given(st.integers(0, 999_999_998))
def test_the_highest_announcement_sorts_first_and_each_folder_holds_a_thousand(number: int) -> None:
    one, other = (keys.announcement_key("0123456789abcdef", of) for of in (number, number + 1))
    assert other < one
    assert len(one) == len(other)
    assert (one.rpartition("/")[0] == other.rpartition("/")[0]) == (number % 1000 != 999)


def test_announcement_keys_have_the_documented_format() -> None:
    assert keys.announcement_key("0123456789abcdef", 0) == "runs/0123456789abcdef/999999/999"
    assert keys.announcement_key("0123456789abcdef", 1000) == "runs/0123456789abcdef/999998/999"
    for name in ("runs/0123456789abcdef/999999", "runs/0123456789abcdef/999999/9999", "runs/x/999999/999"):
        assert keys.parse_announcement(name) is None


@given(st.sampled_from(HOSTILE) | st.text(max_size=30))
def test_malformed_names_are_not_parsed_as_keys(name: str) -> None:
    for parse in (keys.parse_log, keys.parse_object, keys.parse_tag, keys.parse_damaged, keys.parse_numbered):
        assert parse(name) is None or name.startswith("settings/")
    assert keys.parse_signature(name) is None


@given(txids, st.sampled_from(["\n", " ", "/", "/..", ".x", ".01", "\u0660"]))
def test_a_key_with_an_additional_suffix_is_rejected(txid: TxId, tail: str) -> None:
    assert keys.parse_log(keys.commit_key(txid) + tail) is None
    assert keys.parse_object(keys.blob_key(txid, BlobHash(HASH)) + tail) is None
    assert keys.parse_signature(f"signatures/{HASH}/{HASH}{tail}") is None
    with pytest.raises(Refused):
        keys.check_txid(txid + tail)


@pytest.mark.parametrize(
    "time",
    [
        "20261301T000000", "20260132T000000", "20260101T240000", "20260101T006000", "20260230T000000",
        "20260229T000000", "21000229T000000", "20260431T000000", "00000101T000000",
    ],
)  # fmt: skip
def test_a_txid_without_a_date_is_rejected(time: str) -> None:
    txid = TxId(f"{time}000000Z-00000000000000ab-00000000000000cd-7")
    assert keys.parse_log(f"transactions/{txid}") is None
    with pytest.raises(Refused):
        keys.check_txid(txid)


def test_each_day_is_a_txid_with_its_date() -> None:
    for days in range((date(2101, 1, 1) - date(1999, 12, 31)).days):
        day = date(1999, 12, 31) + timedelta(days)
        assert keys.parse_txid(TxId(f"{day:%Y%m%d}T030405000000Z-{'0' * 16}-{'0' * 16}-7")).time.date() == day


@pytest.mark.parametrize("digits", ["٣" * 64, "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n"])
def test_strings_that_are_not_hashes_are_rejected(digits: str) -> None:
    with pytest.raises(Refused):
        keys.check_hash(digits)


@pytest.mark.parametrize("name", ["", "Best", "-x", ".x", "a/b", "x" * 101, "a\n", "a.", None])
def test_invalid_tag_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidInput, match="not a valid name"):
        keys.check_tag(name)
    assert keys.check_tag("best-2.0_x") == "best-2.0_x"


def test_the_keys_of_all_other_folders_are_as_documented() -> None:
    assert keys.commit_key(TxId("t")) == "commits/t"
    assert keys.transaction_key(TxId("t"), 3) == "transactions/t.3"
