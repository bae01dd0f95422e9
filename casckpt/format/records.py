"""The records of a store: frozen structs and their encoding.

A record consists of two lines: its JSON, and the BLAKE3 hash of that line in hex. As a result, people can read it with
``head -1``, and a damaged record can be distinguished from one that a later version wrote.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.json import Decoder

from casckpt.base.digest import hex_digest
from casckpt.base.names import check_run, check_step
from casckpt.errors import Damaged, Refused, Unsupported
from casckpt.format.keys import MAX_NUMBER, check_hash, check_txid, parse_tag, parse_txid, tag_key
from casckpt.format.metrics import Stored, check_metrics
from casckpt.format.names import BlobHash, ManifestId, TxId

FORMAT_VERSION = 1
FINAL = "history-2"
"""The feature that every store of the final format has."""
KNOWN_FEATURES = frozenset({FINAL})
"""The names in `Marker.features` that this version knows. New stores have all of them, earlier ones need not."""
KNOWN_REQUIREMENTS: frozenset[str] = frozenset()
"""The names in `Settings.requires` that this version knows. There are none yet."""
HASH = "blake3"
MAX_RECORD_BYTES = 1 << 20
MAX_RULE = 1 << 16  # characters; only a hostile store can contain a longer rule
DEFAULT_CELL_BYTES = 1 << 20
_YEAR_10000 = 253_402_300_800 * 10**6
STORE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")  # because a cache folder is named after it


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base class of all records. Readers ignore unknown fields.

    A change that they must not ignore is declared as a feature in the marker.

    Times, and fields that become part of a key, are checked both on creation and on decoding.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check, value = _CHECKS.get(name), getattr(self, name)
            if check is not None and value is not None:
                check(value)


def _check_time(time: int) -> None:
    if not 0 <= time < _YEAR_10000:
        raise Refused(f"{time} microseconds since the epoch is not a date in the years 1970 to 9999")


def _check_store(id: str) -> None:
    if not STORE_ID.fullmatch(id):
        raise Refused(f"{id[:100]!r} is not a valid store id")


def _check_tagged(tagged: tuple[str, int]) -> None:
    if parse_tag(tag_key(*tagged)) is None:
        raise Refused(f"{tagged} is not a generation of a tag")


def _check_announced(announced: list[tuple[TxId, int]]) -> None:
    for txid, number in announced:
        check_txid(txid)
        if not 0 <= number <= MAX_NUMBER:
            raise Refused(f"{number} is not a valid record number")


_CHECKS: dict[str, Callable[[Any], object]] = {
    "announced": _check_announced,
    "slot": lambda record: _check_announced([record]),
    "ended": lambda lines: [check_txid(txid) for first, _, others in lines for txid in (first, *others)],
    "txid": check_txid,
    "places": check_txid,
    "to": check_txid,
    "by": check_txid,
    "copy": check_txid,
    "store": _check_store,
    "uploader": check_txid,
    "manifest": check_hash,
    "head": check_hash,
    "parent": check_hash,
    "blob": check_hash,
    "run": check_run,
    "step": check_step,
    "time": _check_time,
    "created_at": _check_time,
    "expires": _check_time,
    "metrics": check_metrics,
}


class Marker(Record, omit_defaults=False, frozen=True, kw_only=True):
    """casckpt.json. A reader that does not know all names in ``features`` must not use the store.

    Sizes are in bytes. ``hash``: the hash function for objects, cells and records.
    """

    format: int
    store_id: str
    created_at: int  # microseconds since the epoch, in UTC, like all times below
    features: list[str] = []  # none in stores from before the first release
    hash: str
    cell_bytes: int
    blob_bytes: int


class Settings(Record, frozen=True, kw_only=True):
    """settings/<N>: the settings. Fields that are None are omitted.

    ``requires``: the features that a writer must know.
    """

    created_at: int
    min_age_seconds: float | None = None
    min_age_ephemeral_seconds: float | None = None
    revoke_after_seconds: float | None = None
    exclusive_create: bool | None = None
    mirror: str | None = None  # URL: gc neither forgets nor purges checkpoints that are not recorded as safe there
    mirror_thinned: bool | None = (
        None  # whether the mirror thins what this store thins; otherwise, it keeps such checkpoints complete
    )
    requires: list[str] = []
    compress: str | None = None  # the default for saves


class Process(Record, frozen=True, kw_only=True):
    """The process that runs a transaction, with enough detail to determine on the same host whether it is dead."""

    host: str
    boot_id: str
    pid: int
    pid_namespace: str
    started: int  # clock ticks since boot, from /proc/<pid>/stat; 0 if there is no /proc


class Began(Record, tag="began", frozen=True, kw_only=True):
    """transactions/<txid>: a save in progress.

    ``manifest``, ``places``: for a copy from another store, the checkpoint's id, and the transaction of the places
    there. ``slot``: for a rewrite, the log and the number of the record with which it will commit.
    """

    txid: TxId
    run: str
    step: int
    time: int
    process: Process
    manifest: ManifestId | None = None
    places: TxId | None = None
    slot: tuple[TxId, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slot is not None:
            _check_same(self.txid, self.slot[0])


class SignOfLife(Record, tag="alive", frozen=True, kw_only=True):
    """transactions/<txid>.<N>. ``process``: the process that wrote it, if that process joined the transaction."""

    txid: TxId
    time: int
    process: Process | None = None


class Dropped(Record, frozen=True, kw_only=True):
    """What these places lack: the number of entries, their bytes in memory, and the rule that dropped them."""

    entries: int
    bytes: int
    rule: str

    @property
    def patterns(self) -> frozenset[str]:
        """The patterns of the rule. More patterns drop more entries."""
        try:
            return frozenset(word for word in shlex.split(self.rule[:MAX_RULE]) if word != "--drop")
        except ValueError:  # a foreign writer
            return frozenset([self.rule])


class Health(Record, frozen=True, kw_only=True):
    """Counts over all tensors: the NaN and infinite elements, and the first keys that have any."""

    nan: int
    inf: int
    keys: list[str] = []


class Committed(Record, tag="committed", frozen=True, kw_only=True):
    """commits/<txid>: the checkpoint ``manifest`` is visible under ``run`` and ``step``.

    The manifest is in the folder of ``txid``. It has ``manifest_bytes`` bytes, and begins with a head whose hash is
    ``head``, which proves the rest of it. ``bytes_total``: the size of all tensors in memory. ``bytes_coded``: the size
    in memory of their cells that are stored as frames. ``bytes_frames``: the size of these frames. ``bytes_deltas``:
    the size of the frames that have bases. ``metadata`` is None if it is too large for the record. In that case, the
    manifest contains it. ``healthy``: the value that the user passed. Without one, it is False if the save found NaN,
    and otherwise None. ``health``: what the save found, or None if it did not scan.
    ``lineage``: the notes of `casckpt.format.metrics.LINEAGE` in the manifest, or None if there are none. The values
    are None if they are too large for the record.

    ``dropped``: for a copy of a thinned checkpoint, what it lacks.
    """

    txid: TxId
    run: str
    step: int
    time: int
    manifest: ManifestId
    head: str
    manifest_bytes: int
    created_at: int  # the checkpoint's time, which differs from ``time`` in copies
    bytes_total: int
    bytes_written: int = 0
    bytes_reused: int = 0
    bytes_coded: int = 0
    bytes_frames: int = 0
    bytes_deltas: int = 0
    blobs_written: int = 0
    blobs_reused: int = 0
    seconds: float = 0.0
    tensors: int = 0
    ephemeral: bool = False
    parent: ManifestId | None = None
    metadata: dict[str, Any] | None = None
    healthy: bool | None = None
    health: Health | None = None
    metrics: dict[str, Stored] = {}
    lineage: dict[str, Any] | None = None
    dropped: Dropped | None = None
    store: str  # the id of the store in which it was committed
    who: str  # who committed it, as user@host


class RevokedRecord(Record, tag="revoked", frozen=True, kw_only=True):
    """commits/<txid>: the transaction was aborted, or gc revoked it."""

    txid: TxId
    time: int
    reason: str


class Forgotten(Record, tag="forgotten", frozen=True, kw_only=True):
    """commits/<txid>.<N>: the checkpoint is not visible until it is restored. It may be purged."""

    txid: TxId
    time: int
    who: str


class Restored(Record, tag="restored", frozen=True, kw_only=True):
    """commits/<txid>.<N>: the checkpoint is visible again."""

    txid: TxId
    time: int
    who: str


class Purged(Record, tag="purged", frozen=True, kw_only=True):
    """commits/<txid>.<N>: the checkpoint is permanently removed. gc may delete its bytes."""

    txid: TxId
    time: int
    who: str


class Rewritten(Record, tag="rewritten", frozen=True, kw_only=True):
    """commits/<txid>.<N>: the checkpoint has new places, with the manifest under ``by``.

    The other fields describe these places, as in `Committed`.
    """

    txid: TxId
    time: int
    who: str
    by: TxId
    head: str
    manifest_bytes: int
    bytes_written: int = 0
    bytes_reused: int = 0
    bytes_coded: int = 0
    bytes_frames: int = 0
    bytes_deltas: int = 0
    blobs_written: int = 0
    blobs_reused: int = 0
    seconds: float = 0.0
    dropped: Dropped | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_same(self.by, self.txid)


def _check_same(rewrite: TxId, of: TxId) -> None:
    """Raise `Refused` unless a rewrite has the run and step of its checkpoint."""
    one, other = parse_txid(rewrite), parse_txid(of)
    if (one.run_hash, one.step) != (other.run_hash, other.step):
        raise Refused(f"{rewrite} claims to be a rewrite of {of}, which is impossible")


class Back(Record, tag="back", frozen=True, kw_only=True):
    """commits/<txid>.<N>: the existing places ``to`` are the current ones again."""

    txid: TxId
    time: int
    who: str
    to: TxId


class Trimmed(Record, tag="trimmed", frozen=True, kw_only=True):
    """commits/<txid>.<N>: only the current places exist from now on. gc may delete the bytes of the others."""

    txid: TxId
    time: int
    who: str


class TaggedRecord(Record, tag="tagged", frozen=True, kw_only=True):
    """commits/<txid>.<N>: generation ``generation`` of tag ``name`` was set on the checkpoint."""

    txid: TxId
    time: int
    name: str
    generation: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tagged((self.name, self.generation))


class Kept(Record, tag="kept", frozen=True, kw_only=True):
    """commits/<txid>.<N>: has no effect. It occupies a number that a dead process may still write."""

    txid: TxId
    time: int


class Ended(Record, tag="ended", frozen=True, kw_only=True):
    """commits/ended/<N>: gc deletes the logs of these transactions, which no longer count.

    ``ended``: for each log, its transaction, whether it ever had places with every entry of its id, and the
    transactions of its other places. ``store``: the id of the store.
    """

    time: int
    store: str
    ended: list[tuple[TxId, bool, list[TxId]]]


class Announced(Record, tag="announced", frozen=True, kw_only=True):
    """runs/<run hash>/..: a writer is about to create these records in commits/, each given as (txid, number).

    ``seen`` is set by saves: their txid is later than all txids that were announced up to this number. -1 means none.
    """

    time: int
    announced: list[tuple[TxId, int]]
    seen: int | None = None


FirstRecord = Committed | RevokedRecord
LaterRecord = Forgotten | Restored | Purged | Rewritten | Back | Trimmed | TaggedRecord | Kept


class TagRecord(Record, tag="tag", frozen=True, kw_only=True):
    """tags/<name>/<N>: the tag names the checkpoint ``manifest``, with the commit ``txid``. None deletes the tag.

    ``unique`` distinguishes writers. ``expires``: when the tag expires, or None. ``who``: who wrote this generation, as
    user@host:pid.
    """

    name: str
    time: int
    unique: str
    txid: TxId | None = None
    manifest: ManifestId | None = None
    expires: int | None = None
    who: str


class LeaseRecord(Record, tag="lease", frozen=True, kw_only=True):
    """leases/<16 hex digits>/<N>: until ``expires``, the lease names the checkpoint ``manifest``.

    The fields without a value end the lease. Otherwise, they are those of a tag.
    """

    time: int
    expires: int
    who: str
    txid: TxId | None = None
    manifest: ManifestId | None = None


class DamageRecord(Record, tag="damage", frozen=True, kw_only=True):
    """damaged/<uploader>/<blob>/<N>: ``state`` is "damaged" or "repaired"."""

    uploader: TxId
    blob: BlobHash
    state: str
    time: int
    why: str
    unique: str


class Ran(Record, tag="ran", frozen=True, kw_only=True):
    """ran/<N>: a gc has finished.

    It left ``waiting`` checkpoints, ``refused`` files that its user may not change, and ``opened`` saves in progress.
    """

    time: int
    who: str
    waiting: int
    refused: int
    opened: int


DECODERS: Mapping[Any, Decoder[Any]] = {
    kind: Decoder(kind) for kind in (*Record.__subclasses__(), FirstRecord, LaterRecord)
}
"""The decoders by record kind. They are created at import, by a single thread.

In msgspec 0.22, a thread may use a struct's type information while a different thread is still building it, so two
threads that decode the first struct of a kind can crash the process. `tests/format/test_decoders.py` checks that every
type is decoded with such a decoder.
"""

R = TypeVar("R")
changed = msgspec.structs.replace
"""``changed(struct, field=value)`` returns a copy of a struct with new values in some fields."""


def frees(record: Record) -> bool:
    """Return whether a record ends something, so that gc can delete bytes, or begins to do so."""
    match record:
        case RevokedRecord() | Forgotten() | Purged() | Trimmed() | Kept() | Rewritten():
            return True
        case TagRecord() | LeaseRecord():
            return record.txid is None
    return isinstance(record, Began) and record.slot is not None


def encode(record: Record) -> bytes:
    """Encode a record."""
    line = msgspec.json.encode(record)
    return line + b"\n" + hex_digest(line).encode() + b"\n"


def decode(data: bytes, kind: type[R] | Any, key: str) -> R:
    """Decode a record of ``kind`` (a struct or a union of structs) from the bytes stored under ``key``.

    Raises `Damaged` if the bytes changed after they were written, and `Refused` if they are intact but not valid here.
    """
    line, _, check = data.partition(b"\n")
    if check != hex_digest(line).encode() + b"\n":
        raise Damaged(f"{key} is damaged: its checksum does not match its content", key=key)
    try:
        record: R = DECODERS[kind].decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused(
            f"cannot parse {key}: {error}. A later version of casckpt may have written it: upgrade casckpt"
        ) from error
    return record


def check_requirements(settings: Settings, url: str) -> None:
    """Raise `Unsupported` if writing to the store at ``url`` requires a feature that this version lacks."""
    unknown = sorted(set(settings.requires) - KNOWN_REQUIREMENTS)
    if unknown:
        raise Unsupported(
            f"only versions of casckpt that know {', '.join(unknown)[:200]} may write to {url}, and this version "
            "does not: upgrade casckpt. Reading still works"
        )


def encode_marker(marker: Marker) -> bytes:
    """Encode the marker as plain JSON that any tool can read."""
    return msgspec.json.format(msgspec.json.encode(marker), indent=2) + b"\n"


def decode_marker(data: bytes) -> Marker:
    """Decode the marker.

    Raises `Refused` for a store in a different format, and `Damaged` for anything that is not a marker.
    """
    try:
        marker: Marker = DECODERS[Marker].decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"casckpt.json is damaged: {error}") from error
    unknown = sorted(set(marker.features) - KNOWN_FEATURES)
    if marker.format > FORMAT_VERSION or unknown:
        raise Refused(
            f"this store has format {marker.format} with features {unknown}, but this version of casckpt reads "
            f"format {FORMAT_VERSION}. Upgrade casckpt to use the store"
        )
    if FINAL not in marker.features:
        raise Refused(
            "this store is in a format from before the first release of casckpt: read it with the version that wrote "
            "it, and save its checkpoints into a new store"
        )
    if marker.hash != HASH:
        raise Refused(
            f"this store uses the hash {marker.hash[:40]!r}, but this version of casckpt supports only {HASH}"
        )
    sizes_fit = 4096 <= marker.cell_bytes <= marker.blob_bytes <= 1 << 30 and marker.cell_bytes % 4096 == 0
    if marker.format < 1 or not sizes_fit:
        raise Refused(
            f"format {marker.format}, with cells of {marker.cell_bytes} and blobs of {marker.blob_bytes} bytes, is "
            f"outside the format's limits: the cell size is a multiple of 4 KiB, and the blob size is at least that "
            f"of a cell and at most 1 GiB"
        )
    return marker
