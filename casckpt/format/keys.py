"""Builds the keys of a store, and matches keys against strict patterns before they are used.

::

    casckpt.json                              settings/<N>
    objects/<uploader>/<blake3>.safetensors   objects/<txid>/<id>.manifest
    transactions/<txid>[.N]                   commits/<txid>[.N]
    commits/ended/<N>
    tags/<name>/<N>                           leases/<16 hex digits>/<N>
    damaged/<uploader>/<blake3>/<N>           signatures/<id>/<key id>
    runs/<run hash>/<six digits>/<three digits>
    ran/<N>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from casckpt.base.digest import hex_digest
from casckpt.base.names import TXID, is_txid, run_hash
from casckpt.errors import InvalidInput, Refused
from casckpt.format.names import BlobHash, ManifestId, TxId

MARKER = "casckpt.json"
MAX_NUMBER = 999_999_999
"""The maximum number of a record, a generation or an announcement."""

_HEX64 = r"[0-9a-f]{64}"
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_TAG = r"[a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9_-])?"  # not a dot at the end, which SMB drops
_LEASE = r"[0-9a-f]{16}"
_HEX64_RE = re.compile(_HEX64)
_TAG_RE = re.compile(_TAG)
_LEASE_RE = re.compile(f"lease-({_LEASE})")
_LOG_RE = re.compile(rf"(?:commits|transactions)/({TXID})(?:\.([1-9]\d{{0,8}}))?")
_OBJECT_RE = re.compile(rf"objects/({TXID})/({_HEX64})\.(safetensors|manifest)")
_TAG_KEY_RE = re.compile(rf"(?:tags/(?!lease-{_LEASE}/)({_TAG})|leases/({_LEASE}))/({_NUMBER})")
_DAMAGED_RE = re.compile(rf"damaged/({TXID})/({_HEX64})/({_NUMBER})")
_SIGNATURE_RE = re.compile(rf"signatures/({_HEX64})/({_HEX64})")
_NUMBERED_RE = re.compile(rf"(?:settings|ran|commits/ended)/({_NUMBER})")
_ANNOUNCEMENT_RE = re.compile(r"runs/([0-9a-f]{16})/([0-9]{6})/([0-9]{3})")
_TIME = "%Y%m%dT%H%M%S%f"


def make_txid(time: datetime, entropy: bytes, run: str, step: int) -> TxId:
    """Make a new txid. ``time`` is a timezone-aware datetime, and ``entropy`` is 8 random bytes."""
    stamp = time.astimezone(UTC).strftime(_TIME)
    return TxId(f"{stamp}Z-{entropy.hex()}-{run_hash(run)}-{step}")


@dataclass(frozen=True, slots=True)
class TxName:
    """The parts of a txid: its time, the hash of its run, and its step."""

    time: datetime
    run_hash: str
    step: int


def parse_txid(txid: TxId) -> TxName:
    """Parse a txid. Raises `Refused`."""
    time, _, run, step = check_txid(txid).split("-")
    # not `strptime`: it takes a lock, and a child forked in the meantime would wait for it forever
    return TxName(datetime.fromisoformat(f"{time[:15]}.{time[15:]}"), run, int(step))


def copied_txid(txid: TxId, attempt: int) -> TxId:
    """Return the txid for a copy of ``txid`` in a second store. For ``attempt`` 0, it is the same txid.

    The txids of later attempts sort directly after it. All copiers compute the same txids.
    """
    if attempt == 0:
        return check_txid(txid)
    began, (_, _, run, step) = parse_txid(txid), txid.split("-")
    stamp = (began.time + timedelta(microseconds=attempt)).strftime(_TIME)
    return TxId(f"{stamp}Z-{hex_digest(f'{txid} {attempt}'.encode())[:16]}-{run}-{step}")


def later_than(time: datetime, others: list[TxId]) -> datetime:
    """Return ``time``, or one microsecond after the latest of ``others`` if that is later.

    A new txid then sorts after them.
    """
    latest = max((parse_txid(other).time for other in others), default=time)
    return max(time, latest + timedelta(microseconds=1)) if others else time


def check_txid(text: str) -> TxId:
    """Return ``text`` as a txid. Raises `Refused` if it is not a txid."""
    if not is_txid(text):
        raise Refused(f"not a transaction id: {text[:120]!r}")
    return TxId(text)


def check_hash(text: str) -> str:
    """Return ``text`` if it is 64 lower-case hex digits. Otherwise, raise `Refused`."""
    if not _HEX64_RE.fullmatch(text):
        raise Refused(f"not a BLAKE3 hash: {text[:120]!r}")
    return text


def check_tag(name: str) -> str:
    """Return ``name`` if it is a valid name of a tag or a lease. Otherwise, raise `InvalidInput`."""
    if type(name) is not str or not _TAG_RE.fullmatch(name):
        raise InvalidInput(
            f"tag {name!r} is not a valid name: use up to 100 of a-z 0-9 . _ -, starting with a letter or digit, and "
            "not ending with a dot"
        )
    return name


def is_lease(name: str) -> bool:
    """Return whether ``name`` is the name of a lease, which no tag may have: lease-0123456789abcdef, for example."""
    return _LEASE_RE.fullmatch(name) is not None


def blob_key(uploader: TxId, blob: BlobHash) -> str:
    """Return the key of a blob."""
    return f"objects/{uploader}/{blob}.safetensors"


def manifest_key(txid: TxId, manifest: ManifestId) -> str:
    """Return the key of a manifest."""
    return f"objects/{txid}/{manifest}.manifest"


def uploader_folder(uploader: TxId) -> str:
    """Return the folder that holds everything that a transaction uploads."""
    return f"objects/{uploader}"


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The parts of a key under objects/. ``kind``: "safetensors" or "manifest"."""

    uploader: TxId
    hash: str
    kind: str


def parse_object(key: str) -> ObjectName | None:
    """Parse a key under objects/. Returns None for all other keys."""
    match = _OBJECT_RE.fullmatch(key)
    return ObjectName(TxId(match[1]), match[2], match[3]) if match else None


def commit_key(txid: TxId, number: int = 0) -> str:
    """Return the key of record ``number`` in a transaction's log under commits/. The key of record 0 has no suffix."""
    return f"commits/{txid}.{number}" if number else f"commits/{txid}"


def transaction_key(txid: TxId, number: int = 0) -> str:
    """Return the key of an open transaction (number 0) or of one of its signs of life."""
    return f"transactions/{txid}.{number}" if number else f"transactions/{txid}"


def parse_log(key: str) -> tuple[TxId, int] | None:
    """Parse (txid, number) from a key under commits/ or transactions/. Returns None for all other keys."""
    match = _LOG_RE.fullmatch(key)
    return (TxId(match[1]), int(match[2] or 0)) if match else None


def ended_key(number: int) -> str:
    """Return the key of a list of logs that are over."""
    return f"commits/ended/{number}"


def tag_folder(name: str) -> str:
    """Return the folder that holds the generations of a tag or a lease."""
    lease = _LEASE_RE.fullmatch(name)
    return f"leases/{lease[1]}" if lease else f"tags/{name}"


def tag_key(name: str, number: int) -> str:
    """Return the key of a generation of a tag or a lease."""
    return f"{tag_folder(name)}/{number}"


def parse_tag(key: str) -> tuple[str, int] | None:
    """Parse (name, generation) from a key under tags/ or leases/. Returns None for all other keys."""
    match = _TAG_KEY_RE.fullmatch(key)
    return (match[1] or f"lease-{match[2]}", int(match[3])) if match else None


def damaged_key(uploader: TxId, blob: BlobHash, number: int) -> str:
    """Return the key of a blob's mark."""
    return f"damaged/{uploader}/{blob}/{number}"


def parse_damaged(key: str) -> tuple[TxId, BlobHash, int] | None:
    """Parse (uploader, blob, number) from a key under damaged/. Returns None for all other keys."""
    match = _DAMAGED_RE.fullmatch(key)
    return (TxId(match[1]), BlobHash(match[2]), int(match[3])) if match else None


def settings_key(number: int) -> str:
    """Return the key of a generation of the settings."""
    return f"settings/{number}"


def parse_numbered(key: str) -> int | None:
    """Parse the number from a key under settings/, ran/ or commits/ended/. Returns None for all other keys."""
    match = _NUMBERED_RE.fullmatch(key)
    return int(match[1]) if match else None


def ran_key(number: int) -> str:
    """Return the key of a note about a gc."""
    return f"ran/{number}"


def announcement_key(run: str, number: int) -> str:
    """Return the key of an announcement. ``run`` is the run's hash. The highest number sorts first.

    A folder holds 1,000 announcements.
    """
    digits = f"{MAX_NUMBER - number:09}"
    return f"{run_folder(run)}/{digits[:6]}/{digits[6:]}"


def run_folder(run: str) -> str:
    """Return the folder that holds the announcements of the run with this hash."""
    return f"runs/{run}"


def parse_announcement(key: str) -> tuple[str, int] | None:
    """Parse (run hash, number) from a key under runs/. Returns None for all other keys."""
    match = _ANNOUNCEMENT_RE.fullmatch(key)
    return (match[1], MAX_NUMBER - int(match[2] + match[3])) if match else None


def signature_key(id: ManifestId, key: str) -> str:
    """Return the key of a checkpoint's signature. ``key`` is the hash of the signer's public key."""
    return f"signatures/{id}/{key}"


def parse_signature(key: str) -> ManifestId | None:
    """Parse the id from a key of the form signatures/<id>/<key id>. Returns None for all other keys."""
    match = _SIGNATURE_RE.fullmatch(key)
    return ManifestId(match[1]) if match else None
