"""The records of a store: frozen structs and their encoding.

A record is two lines of text: its JSON, and the BLAKE3 of that line in hex. So ``head -1`` shows it to people, and a
damaged record is distinguished from one of a later version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.json import Decoder

from casckpt.base.digest import hex_digest
from casckpt.base.names import check_run, check_step
from casckpt.errors import Damaged, Refused, Unsupported
from casckpt.format.keys import MAX_NUMBER, check_hash, check_txid, parse_txid
from casckpt.format.metrics import Stored, check_metrics
from casckpt.format.names import BlobHash, ManifestId, TxId

FORMAT_VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
KNOWN_REQUIREMENTS: frozenset[str] = frozenset()
"""Names in `Settings.requires` that this version knows: there are none yet."""
HASH = "blake3"
MAX_RECORD_BYTES = 1 << 20
DEFAULT_CELL_BYTES = 1 << 20
DEFAULT_BLOB_BYTES = 32 << 20
_YEAR_10000 = 253_402_300_800 * 10**6


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all records. Readers ignore unknown fields. A change that they must not ignore is a marker feature.

    Fields that become part of a key, and times, are checked on creation and on decoding.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check, value = _CHECKS.get(name), getattr(self, name)
            if check is not None and value is not None:
                check(value)


def _check_time(time: int) -> None:
    if not 0 <= time < _YEAR_10000:
        raise Refused(f"{time} microseconds since the epoch are no date of the years 1970 to 9999")


def _check_announced(announced: list[tuple[TxId, int]]) -> None:
    for txid, number in announced:
        check_txid(txid)
        if not 0 <= number <= MAX_NUMBER:
            raise Refused(f"{number} is not the number of a record")


_CHECKS: dict[str, Callable[[Any], object]] = {
    "announced": _check_announced,
    "replaces": lambda record: _check_announced([record]),
    "txid": check_txid,
    "origin": check_txid,
    "by": check_txid,
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
    """casckpt.json. ``features``: names a reader must know, else it must not touch the store. Sizes in bytes.

    ``hash``: of objects, cells and records.
    """

    format: int
    store_id: str
    created_at: int  # microseconds since the epoch, UTC; so are all times below
    features: list[str] = []
    hash: str = HASH
    cell_bytes: int = DEFAULT_CELL_BYTES
    blob_bytes: int = DEFAULT_BLOB_BYTES


class Settings(Record, frozen=True, kw_only=True):
    """settings/<N>: the settings. A field that is None is not set. ``requires``: features that a writer must know."""

    created_at: int
    min_age_seconds: float | None = None
    min_age_ephemeral_seconds: float | None = None
    revoke_after_seconds: float | None = None
    exclusive_create: bool | None = None
    mirror: str | None = None  # URL: gc neither forgets nor purges a checkpoint that is not noted as safe there
    mirror_thinned: bool | None = (
        None  # whether the mirror thins what this store thins; else it keeps such checkpoints whole
    )
    requires: list[str] = []
    compress: str | None = None  # for saves that do not choose


class Process(Record, frozen=True, kw_only=True):
    """The process that runs a transaction: enough to find out on the same host that it is dead."""

    host: str
    boot_id: str
    pid: int
    pid_namespace: str
    started: int  # clock ticks since boot, from /proc/<pid>/stat; 0 where there is no /proc


class Began(Record, tag="began", frozen=True, kw_only=True):
    """transactions/<txid>: a save in progress. ``manifest``: of the checkpoint of another store that it copies."""

    txid: TxId
    run: str
    step: int
    time: int
    process: Process
    manifest: ManifestId | None = None


class SignOfLife(Record, tag="alive", frozen=True, kw_only=True):
    """transactions/<txid>.<N>. ``process``: the process that gives it, if it joined the transaction."""

    txid: TxId
    time: int
    process: Process | None = None


class Dropped(Record, frozen=True, kw_only=True):
    """What a rewrite and all earlier ones left out: the number of entries, their bytes in memory, and the rule."""

    entries: int
    bytes: int
    rule: str


class Health(Record, frozen=True, kw_only=True):
    """Counts over all tensors: elements that are NaN or infinite, and the first keys with any."""

    nan: int
    inf: int
    keys: list[str] = []


class Committed(Record, tag="committed", frozen=True, kw_only=True):
    """commits/<txid>: the checkpoint ``manifest`` is visible under ``run`` and ``step``.

    The manifest lies in the folder of ``txid``. It has ``manifest_bytes``, and begins with a head that has the hash
    ``head``, which proves the rest of it. ``bytes_total``: of all tensors, as held in memory; ``bytes_coded``: of
    their cells that lie as frames; ``bytes_frames``, ``bytes_deltas``: of these frames, and of those with bases.
    ``metadata`` is None if it is too large for the record; then the manifest holds it. ``healthy``: the user's word;
    without it, False if the save found NaN, else None. ``health``: what the save found; None if it did not scan.

    ``replaces``: of a rewrite, the transaction that it replaces, and the number of its `replaced` record.
    ``origin``: the transaction of the first save, which defines the order; None for its own. ``dropped``: what it
    lacks of the first save.
    """

    txid: TxId
    run: str
    step: int
    time: int
    manifest: ManifestId
    head: str
    manifest_bytes: int
    created_at: int  # of the checkpoint; differs from ``time`` in copies
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
    replaces: tuple[TxId, int] | None = None
    origin: TxId | None = None
    dropped: Dropped | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for older in filter(None, (self.origin, self.replaces and self.replaces[0])):
            _check_older(older, self.txid)


def _check_older(older: TxId, txid: TxId) -> None:
    """Raise `Refused` unless ``older`` is of the same run and step as ``txid``, and older."""
    before, after = parse_txid(older), parse_txid(txid)
    if older >= txid or (before.run_hash, before.step) != (after.run_hash, after.step):
        raise Refused(f"{txid} says that it is a rewrite of {older}, which is not possible")


class RevokedRecord(Record, tag="revoked", frozen=True, kw_only=True):
    """commits/<txid>: the transaction aborted itself, or a gc revoked it."""

    txid: TxId
    time: int
    reason: str


class Forgotten(Record, tag="forgotten", frozen=True, kw_only=True):
    """commits/<txid>.<N>: no longer visible, until restored; may be purged."""

    txid: TxId
    time: int


class Restored(Record, tag="restored", frozen=True, kw_only=True):
    """commits/<txid>.<N>: visible again."""

    txid: TxId
    time: int


class Purged(Record, tag="purged", frozen=True, kw_only=True):
    """commits/<txid>.<N>: the checkpoint is final. gc may delete its bytes."""

    txid: TxId
    time: int


class Replaced(Record, tag="replaced", frozen=True, kw_only=True):
    """commits/<txid>.<N>: from now on the checkpoint is the commit ``by``, which names this record."""

    txid: TxId
    time: int
    by: TxId

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_older(self.txid, self.by)


class Kept(Record, tag="kept", frozen=True, kw_only=True):
    """commits/<txid>.<N>: no change. It takes a number that was announced and never written."""

    txid: TxId
    time: int


class Announced(Record, tag="announced", frozen=True, kw_only=True):
    """runs/<run hash>/..: a writer is about to create these records in commits/: (txid, number) of each.

    ``seen``: of a save. Its txid is later than all txids announced up to this number; -1 for none.
    """

    time: int
    announced: list[tuple[TxId, int]]
    seen: int | None = None


class Mirrored(Record, tag="mirrored", frozen=True, kw_only=True):
    """mirrored/<txid>[.N]: since record N of its log, the store at ``mirror`` (a URL) also had it."""

    txid: TxId
    time: int
    mirror: str


FirstRecord = Committed | RevokedRecord
LaterRecord = Forgotten | Restored | Purged | Kept | Replaced


class TagRecord(Record, tag="tag", frozen=True, kw_only=True):
    """tags/<name>/<N>: the tag names the checkpoint ``manifest``, set on the commit ``txid``; None deletes the tag.

    ``unique`` distinguishes writers. ``expires``: when it ends; None for never. ``holder``: its owner, for people.
    """

    name: str
    time: int
    unique: str
    txid: TxId | None = None
    manifest: ManifestId | None = None
    expires: int | None = None
    holder: str = ""


class DamageRecord(Record, tag="damage", frozen=True, kw_only=True):
    """damaged/<uploader>/<blob>/<N>: ``state`` is "damaged" or "repaired"."""

    uploader: TxId
    blob: BlobHash
    state: str
    time: int
    why: str
    unique: str


DECODERS: Mapping[Any, Decoder[Any]] = {
    kind: Decoder(kind) for kind in (*Record.__subclasses__(), FirstRecord, LaterRecord)
}
"""By kind. Made at import, by a single thread: in msgspec 0.22 a thread may use the type information of a struct while
another thread still builds it, so that two threads that decode the first struct of a kind can crash the process.
`tests/format/test_decoders.py` checks that every type is decoded with such a decoder."""

R = TypeVar("R")
changed = msgspec.structs.replace
"""``changed(struct, field=value)``: a copy of a struct with other values in some fields."""


def encode(record: Record) -> bytes:
    """Encode a record."""
    line = msgspec.json.encode(record)
    return line + b"\n" + hex_digest(line).encode() + b"\n"


def decode(data: bytes, kind: type[R] | Any, key: str) -> R:
    """Decode a record of ``kind`` (a struct or a union of structs) from the bytes under ``key``.

    Raises `Damaged` if the bytes changed since they were written, `Refused` if they are intact but not valid here.
    """
    line, _, check = data.partition(b"\n")
    if check != hex_digest(line).encode() + b"\n":
        raise Damaged(f"{key} is damaged: its checksum does not fit its content", key=key)
    try:
        record: R = DECODERS[kind].decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused(
            f"{key} is not understood: {error}. Another version of casckpt wrote it: a later one, then upgrade; or one "
            "from before this format, then read the store with that one, and save its checkpoints into a new store"
        ) from error
    return record


def check_requirements(settings: Settings, url: str) -> None:
    """Raise `Unsupported` if a writer to the store at ``url`` needs a feature that this version lacks."""
    unknown = sorted(set(settings.requires) - KNOWN_REQUIREMENTS)
    if unknown:
        raise Unsupported(
            f"{url} may be written only by versions of casckpt that know of {', '.join(unknown)[:200]}, and this one "
            "does not: upgrade casckpt. It can be read as ever"
        )


def encode_marker(marker: Marker) -> bytes:
    """Encode the marker as plain JSON, for any tool to read."""
    return msgspec.json.format(msgspec.json.encode(marker), indent=2) + b"\n"


def decode_marker(data: bytes) -> Marker:
    """Decode the marker. Raises `Refused` for a store of another format, `Damaged` for anything that is no marker."""
    try:
        marker: Marker = DECODERS[Marker].decode(data)
        named = msgspec.json.decode(data)  # of all fields, also of unknown ones
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"casckpt.json is damaged: {error}") from error
    if marker.format > FORMAT_VERSION or set(marker.features) - KNOWN_FEATURES:
        missing = sorted(set(marker.features) - KNOWN_FEATURES)
        raise Refused(
            f"this store has format {marker.format} with features {missing}; this casckpt reads format "
            f"{FORMAT_VERSION}. Upgrade casckpt to use the store"
        )
    if "hash" not in named:
        raise Refused(
            "this store was written before casckpt's format was the one of today: read it with the version that wrote "
            "it, and save its checkpoints into a new store"
        )
    if marker.hash != HASH:
        raise Refused(f"this store is made with the hash {marker.hash[:40]!r}, and this casckpt has {HASH} alone")
    sizes_fit = 4096 <= marker.cell_bytes <= marker.blob_bytes <= 1 << 30 and marker.cell_bytes % 4096 == 0
    if marker.format < 1 or not sizes_fit:
        raise Refused(
            f"format {marker.format}, cells of {marker.cell_bytes} and blobs of {marker.blob_bytes} bytes are outside "
            "the format's limits: cells have 4 KiB or more, in multiples of that, blobs a cell or more, up to 1 GiB"
        )
    return marker
