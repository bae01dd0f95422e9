"""Defines `Repository`, a store without support for tensors (marker, settings, records, caches), and opens one."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import platformdirs

from casckpt.base.digest import hex_digest
from casckpt.base.lazy import cached_property
from casckpt.base.names import check_run, check_step, similar
from casckpt.base.units import time_of
from casckpt.errors import CasckptError, Conflict, Damaged, InvalidInput, NotFound, Refused, StorageError
from casckpt.format import keys, records
from casckpt.format.names import BlobHash, ManifestId, TxId
from casckpt.format.records import Marker, Record, Settings
from casckpt.repository.blob_cache import BlobCache, in_memory
from casckpt.repository.caches import ManifestCache, RecordCache, RunCaches
from casckpt.repository.catalogue import Catalogue, recall, remember
from casckpt.repository.exclusive import check_listed, require_exclusive, require_lasting
from casckpt.repository.processes import who
from casckpt.repository.signing_keys import PublicKey
from casckpt.storage.base import AlreadyExists, ListedObject, ObjectStore
from casckpt.storage.local.store import mount_point

if TYPE_CHECKING:
    from casckpt.repository.host_reads import HostReads

Clock: TypeAlias = Callable[[], int]
"""Microseconds since the epoch, UTC."""
Entropy: TypeAlias = Callable[[int], bytes]
"""A function that returns the given number of random bytes."""
ShareReads: TypeAlias = Literal["auto", "on", "off"]
"""Whether bytes that several ranks of a host or several hosts need are read only once.

"auto": if the store is remote. "on": also if it is a folder, which may be on a network file system.
"""


log = logging.getLogger(__name__)

_OF_PROCESS = frozenset({
    "found_signed", "listeners", "manifests", "records", "seen_blobs", "verified_extents", "runs", "_catalogue",
    "blob_cache", "memory",
})  # fmt: skip
"""The attributes of a `Repository` that an unpickled copy begins without."""


def microseconds() -> int:
    """Return this host's time in microseconds since the epoch, UTC."""
    return time.time_ns() // 1000


@dataclass
class Repository:
    """An open store without support for tensors. Opening it does not create anything; the marker is read on first use.

    ``cache_dir``: the cache folder, or None for the user's cache folder. ``cache_bytes``: see
    `casckpt.repository.blob_cache`. ``share_reads``: see `ShareReads`. ``cache_saves``: whether saves add their blobs
    to the blob cache. ``staging_bytes``: see `casckpt.saving.staging_budget`. ``single_writer``: the caller promises to
    be the only writer, which allows storage that does not refuse to create an existing key. ``mirror``: the mirror's
    storage, whose URL is written to the settings before the first save. ``trusted``: public keys; only checkpoints
    signed with one of them are loaded (None: all). ``found_signed``: ids whose signatures have been verified.
    ``signer``: the private key that signs each save. ``user``: the name in `who`, or None for that of the system.
    ``may_create``: see `casckpt.open`. ``listeners``: called
    after each commit of this process. ``seen_blobs``: blobs that this process has seen in the store.
    ``verified_extents``: the extents that `casckpt.loading.mapped` has verified. ``last_commit``: the key of this
    process's last commit. ``runs``: announcements by run hash. Thread-safe, picklable, and usable in forked children.
    """

    storage: ObjectStore
    cache_dir: Path | None = None
    clock: Clock = microseconds
    entropy: Entropy = os.urandom
    single_writer: bool = False
    mirror: ObjectStore | None = None
    cache_bytes: int | None = None
    share_reads: ShareReads = "auto"
    cache_saves: bool = False
    staging_bytes: int | None = None
    trusted: frozenset[PublicKey] | None = None
    signer: bytes | None = field(default=None, repr=False)
    may_create: bool | None = None
    user: str | None = None
    found_signed: set[ManifestId] = field(default_factory=set, init=False, repr=False, compare=False)
    listeners: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False, compare=False)
    manifests: ManifestCache = field(default_factory=ManifestCache, init=False, repr=False, compare=False)
    records: RecordCache = field(default_factory=RecordCache, init=False, repr=False, compare=False)
    seen_blobs: set[tuple[TxId, BlobHash]] = field(default_factory=set, init=False, repr=False, compare=False)
    verified_extents: set[Hashable] = field(default_factory=set, init=False, repr=False, compare=False)
    last_commit: str | None = field(default=None, init=False, repr=False, compare=False)
    runs: RunCaches = field(default_factory=RunCaches, init=False, repr=False, compare=False)
    _marker: Marker | None = field(default=None, init=False, repr=False, compare=False)
    _warned: bool = field(default=False, init=False, repr=False, compare=False)
    _creates_checked: bool = field(default=False, init=False, repr=False, compare=False)
    _declared: bool = field(default=False, init=False, repr=False, compare=False)
    _catalogue: Catalogue | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**vars(Repository(state["storage"])), **state})

    @property
    def marker(self) -> Marker:
        """The contents of casckpt.json, read once. Raises `NotFound`, `Damaged`, `Refused`, and `StorageError`."""
        marker = self._marker
        if marker is None:
            marker = self._marker = self._read_marker()
        return marker

    def _read_marker(self) -> Marker:
        try:
            data = self.storage.get(keys.MARKER, limit=records.MAX_RECORD_BYTES)
        except NotFound as error:
            with suppress(StorageError):
                self.check_lost()
            near = self.similar()
            meant = f" (did you mean {' or '.join(near)}?)" if near else ""
            message = f"there is no store at {self.storage.url}{meant}: create it with a save or `casckpt init`"
            raise NotFound(message, key=keys.MARKER) from error
        try:
            marker = records.decode_marker(data)
        except Damaged as error:
            message = f"{error}: restore the file from a copy of the store at {self.storage.url}"
            raise Damaged(message, key=keys.MARKER) from error
        if not records.STORE_ID.fullmatch(marker.store_id):
            raise Refused(f"casckpt.json at {self.storage.url} contains an invalid store id", key=keys.MARKER)
        remember(self._cache_folder, self.storage)
        return marker

    def similar(self) -> list[str]:
        """Return the stores in folders whose path has a similar name in place of its first missing folder."""
        path = getattr(self.storage, "path", None)
        with suppress(OSError):
            if isinstance(path, Path):
                first = next((one for one in (*path.parents[::-1], path) if not one.exists()), path)
                near = similar(first.name, os.listdir(first.parent))
                named = [first.parent / name / path.relative_to(first) for name in near]
                return [str(one) for one in named if (one / keys.MARKER).is_file()]
        return []

    def is_there(self) -> bool:
        """Return whether the store exists. If not, raise `NotFound` if there must not be a new store here.

        That is the case if ``may_create`` is False or, unless it is True, if a store was here, on a mount that is
        missing now. If only the store is gone, this logs one warning. Raises `StorageError`.
        """
        return self.exists() or self._is_free()

    def allow_create(self, allowed: bool | None) -> None:
        """Set ``may_create``, unless ``allowed`` is None. Raises `InvalidInput` for anything but a bool."""
        if allowed is not None and not isinstance(allowed, bool):
            raise InvalidInput(f"create={allowed!r:.40} is not valid: pass True, False or None")
        self.may_create = self.may_create if allowed is None else allowed

    def _is_free(self) -> Literal[False]:
        url, was_at = self.storage.url, recall(self._cache_folder, self.storage)
        if self.may_create is False:
            raise NotFound(
                f"there is no store at {url}, and create=False or {CREATE_VARIABLE}=0 requires one: check the path and "
                "its mounts. To start a new store, leave this out"
            )
        if was_at and was_at[1] and self.may_create is None and mount_point(was_at[1]) != was_at[1]:
            raise NotFound(
                f"the store at {url} is gone, because nothing is mounted at {was_at[1]} now: mount it, and try "
                f"again. To start a new store on the disk below, set {CREATE_VARIABLE}=1 once (or pass create=True)"
            )
        if (was_at or self._marker) and not self._warned:
            self._warned = True
            log.warning("the store at %s is gone, with its checkpoints: was it deleted? A save creates a new one", url)
        return False

    def check_lost(self) -> None:
        """Raise `Damaged` if a store has lost its marker.

        The marker is always put before the first record in commits/.
        """
        is_store = any(keys.parse_log(entry.key) for entry in self.storage.list("commits/"))
        if is_store and self.storage.size(keys.MARKER) is None:  # recheck: it may have been created in the meantime
            message = (
                f"casckpt.json is missing from {self.storage.url}, although commits/ has records of a store. A new "
                "file might permanently set different sizes: restore the file from a copy of the store, or take "
                "that of its mirror, and set its store_id to the `store` of a record in commits/"
            )
            raise Damaged(message, key=keys.MARKER)

    def exists(self) -> bool:
        """Return whether the store exists. Raises `StorageError`."""
        return self._marker is not None or self.storage.size(keys.MARKER) is not None

    def check_exists(self) -> None:
        """Raise `NotFound` if there is no store, and the errors of `marker`."""
        _ = self.marker

    def fresh(self) -> Repository:
        """Return the same store with empty in-memory caches, so that it reads from the storage."""
        return replace(self)

    def create(self, *, cell_bytes: int = 1 << 20, blob_bytes: int = 32 << 20) -> bool:
        """Create the store if there is none. Return whether this call created it.

        ``cell_bytes``, ``blob_bytes``: as in `Marker`. This always queries the storage, because the store that this
        process knows may have been deleted. An existing store keeps its sizes. Raises `Damaged` if the store has lost
        its marker, `InvalidInput`, `StorageError`, the errors of `marker`, and `Unsupported` for storage that cannot
        create keys exclusively, or deletes objects by age.
        """
        marker = Marker(
            format=records.FORMAT_VERSION,
            store_id=uuid.UUID(bytes=self.entropy(16), version=4).hex,
            created_at=self.clock(),
            features=sorted(records.KNOWN_FEATURES),
            hash=records.HASH,
            cell_bytes=cell_bytes,
            blob_bytes=blob_bytes,
        )
        data = records.encode_marker(marker)
        records.decode_marker(data)  # rejects sizes outside the limits before anything is written
        if self.storage.size(keys.MARKER) is not None:
            self._know(self._read_marker())
            return False
        self._is_free()
        self.check_lost()  # its listing also detects a missing bucket, which some servers would create on a put
        probed = self._check_creates(new=True)
        require_lasting(self.storage)
        made = self._put_once(keys.MARKER, data, self.storage.put)
        self._know(marker if made else self._read_marker())
        if made:
            remember(self._cache_folder, self.storage)
            self.storage.prepare()
            log.info("created a new store at %s", self.storage.url)
        if probed:
            self.change_settings(exclusive_create=True)
        return made

    def _know(self, marker: Marker) -> None:
        if self._marker is None or self._marker.store_id != marker.store_id:
            self.look_again()
        self._marker = marker

    def forget_all(self, *, keep_marker: bool) -> None:
        """Drop all caches of the store in this process and on this host, because the store was restored or replaced."""
        marker = self.marker
        self.catalogue.reindex()
        self.records, self.manifests = RecordCache(), ManifestCache()
        self.seen_blobs.clear()
        self.look_again()
        if keep_marker:
            self._marker = marker

    def look_again(self) -> None:
        """Drop all caches of this process, because a different store was at the URL before."""
        self._marker, self._declared, self._catalogue, self.last_commit = None, False, None, None
        self.runs = RunCaches()

    def _check_creates(self, *, new: bool) -> bool:
        """Refuse storage that cannot create keys exclusively. Check once per process.

        Return whether this call probed it. ``new``: whether the settings lack the result of an earlier probe.
        """
        in_doubt = self.storage.traits.exclusive is None and not self.single_writer
        known = self.settings.exclusive_create if in_doubt and not new else None
        require_exclusive(self.storage, self.clock, self.entropy, known, single_writer=self.single_writer)
        self._creates_checked = True
        return in_doubt and known is None

    def declare_mirror(self) -> None:
        """Write the mirror's URL to the settings if this store was opened with a mirror. Raises `StorageError`."""
        if self.mirror is not None and not self._declared:
            if self.settings.mirror != self.mirror.url:
                self.change_settings(mirror=self.mirror.url)
            self._declared = True

    def note_creates(self, *, exclusive: bool) -> None:
        """Write a probe's result to the settings for this process and all later ones. Raises `StorageError`."""
        self._creates_checked = True
        self.change_settings(exclusive_create=exclusive)
        self._creates_checked = exclusive

    @property
    def settings(self) -> Settings:
        """The newest generation in settings/, or unset fields if there is none. Reads the storage on each access."""
        return self.newest_settings()[1]

    def change_settings(self, **fields: Any) -> Settings:  # fields of `Settings`, which is decoded to check them
        """Write the next generation with ``fields`` changed.

        Raises `InvalidInput`, `Unsupported`, and `StorageError`.
        """
        unknown = sorted(set(fields) - set(Settings.__struct_fields__) | {"created_at"} & set(fields))
        if unknown:
            raise InvalidInput(f"unknown settings: {', '.join(unknown)}; see `casckpt settings --help`")
        while True:
            number, old = self.newest_settings()
            records.check_requirements(old, self.storage.url)
            new = records.changed(old, **fields, created_at=self.clock())
            try:
                records.decode(records.encode(new), Settings, "settings")
            except Refused as error:
                raise InvalidInput(f"settings {fields} are not valid: {error}") from error
            key = keys.settings_key(number + 1)
            try:
                self.put_record(key, new)
            except Conflict:  # another process has just changed the settings: reread them, and apply this change again
                check_listed(self.storage, key)
                continue
            return new

    def newest_settings(self) -> tuple[int, Settings]:
        """Return the number of the newest settings, or -1 if there are none, and the settings.

        Raises `Damaged`, `Refused`, and `StorageError`.
        """
        self.check_exists()
        newest = max(self.numbered("settings/"), default=-1)
        if newest < 0:
            return -1, Settings(created_at=self.marker.created_at)
        try:
            return newest, self.get_record(keys.settings_key(newest), Settings)
        except (Damaged, Refused) as error:
            message = f"{error}. Restore the file from a copy of the store, or delete it to use the previous settings"
            raise type(error)(message, key=error.key) from error

    def numbered(self, folder: str) -> dict[int, ListedObject]:
        """List the records in a folder of numbered records ("settings/"), by number. Raises `StorageError`."""
        listed = self.storage.list(folder, known=keys.parse_numbered)
        return {number: entry for entry in listed if (number := keys.parse_numbered(entry.key)) is not None}

    @property
    def catalogue(self) -> Catalogue:
        """The local database with the contents of this store's immutable objects."""
        catalogue = self._catalogue
        if catalogue is None:
            # the URL is part of the name because a copy of the store has the same id but diverges from the original
            name = f"{self.marker.store_id}-{hex_digest(os.fsencode(self.storage.url))[:16]}"
            catalogue = self._catalogue = Catalogue(self._cache_folder / name / "catalogue.sqlite")
        return catalogue

    @cached_property
    def blob_cache(self) -> BlobCache:
        """The cache of whole blobs on this host. Raises `InvalidInput` for an invalid size.

        The cache is in ``cache_dir``, or in this host's memory if saves fill it and no ``cache_dir`` was passed.
        """
        if self.cache_saves and self.cache_dir is None:
            return self.memory
        return BlobCache(self._cache_folder, self.cache_bytes)

    @property
    def fills_cache(self) -> bool:
        """Whether loads put blobs into the cache. True if the cache folder was passed and the store is remote."""
        return self.cache_dir is not None and self.storage.traits.remote

    @cached_property
    def memory(self) -> BlobCache:
        """The cache in this host's memory, which only this user can access."""
        return in_memory(self.cache_bytes)

    @property
    def who(self) -> str:
        """Who writes records, as user@host."""
        return who(self.user)

    @property
    def host(self) -> str:
        """A name that is equal only for ranks that share this host's memory. Containers may have equal host names."""
        name = gethostname()
        with suppress(OSError):
            memory = self.memory.root.parent.stat()
            name += f" {memory.st_dev} {memory.st_ino}"
        return name

    @property
    def shares(self) -> bool:
        """Whether this process shares the reads of its loads with other ranks."""
        return self.share_reads == "on" or (self.share_reads == "auto" and self.storage.traits.remote)

    def host_reads(
        self, manifest: str, load_id: str, rank: int, sharing: int, patience: float = inf
    ) -> HostReads | None:
        """Return the reads that this rank shares with other ranks, or None if it reads alone.

        ``manifest``: the digest of the manifest's head. ``load_id``: the same unique name on all ranks. ``sharing``:
        how many ranks of this host share reads, or 0 if no other rank does. ``patience``: see `HostReads`.
        """
        if not sharing or not self.shares:
            return None
        from casckpt.repository.host_reads import HostReads  # slow to import

        # the URL is part of the name because unverified bytes must come from this store
        folder = hex_digest(os.fsencode(f"{manifest} {self.storage.url}"))[:32]
        return HostReads(self.memory, folder, f"{load_id}-{rank}", sharing, patience)

    @property
    def _cache_folder(self) -> Path:
        return self.cache_dir or default_cache_folder()

    def new_txid(self, run: str, step: int, after: Iterable[TxId] = ()) -> TxId:
        """Make a transaction id that sorts after all ids in ``after``, regardless of their hosts' clocks.

        Raises `InvalidInput` for an invalid run or step.
        """
        check_run(run)
        check_step(step)
        latest = max(after, default=None)  # ids sort by time
        try:
            begun = keys.later_than(time_of(self.clock()), [latest] if latest else [])
        except OverflowError as error:
            raise Refused(f"transaction id {latest} has the latest possible time; no id can come after it") from error
        return keys.make_txid(begun, self.entropy(8), run, step)

    def put_record(self, key: str, record: Record) -> None:
        """Create ``key``.

        An existing record with the same bytes counts as success, because the response to an earlier put may have been
        lost. Raises `Conflict` if ``key`` has a different record, `InvalidInput` if the new record is too large,
        `StorageError`, and `Unsupported` for storage that cannot create keys exclusively.
        """
        if not self._creates_checked and self._check_creates(new=False):
            self.change_settings(exclusive_create=True)
        data = records.encode(record)
        if len(data) > records.MAX_RECORD_BYTES:
            raise InvalidInput(f"the record for {key} is larger than {records.MAX_RECORD_BYTES} bytes", key=key)
        if not self._put_once(key, data, self.put_small if records.frees(record) else self.storage.put):
            raise Conflict(f"{key} already exists: another process created it first", key=key)

    def _put_once(self, key: str, data: bytes, put: Callable[[str, bytes], None]) -> bool:
        """Put ``data`` and return whether ``key`` now has it. Returns False if ``key`` has different data."""
        try:
            put(key, data)
        except AlreadyExists:
            return self._read_back(key) == data
        except StorageError:
            stored = self._read_back(key)
            if stored is None:
                raise
            if stored == data:
                self.settle(key)
            return stored == data
        return True

    def put_small(self, key: str, data: bytes) -> None:
        """Put bytes that let gc free space, also on a full disk. Raises the errors of `ObjectStore.put`."""
        try:
            self.storage.put(key, data)
        except StorageError as error:
            if not error.full or not self.storage.put_prepared(key, data):
                raise

    def settle(self, key: str) -> None:
        """Make the name of an existing record durable, because another process's put may not have finished.

        Raises `StorageError`, after which a power failure may remove the record.
        """
        self.storage.settle(key.rpartition("/")[0])

    def _read_back(self, key: str) -> bytes | None:
        try:
            return self.storage.get(key, limit=records.MAX_RECORD_BYTES)
        except CasckptError:
            return None

    def get_record(self, key: str, kind: Any) -> Any:
        """Read the record under ``key``.

        Its type is ``kind``, a struct from `casckpt.format.records` or a union of them. Raises `NotFound`, `Damaged`,
        `Refused`, and `StorageError`.
        """
        return records.decode(self.storage.get(key, limit=records.MAX_RECORD_BYTES), kind, key)


def default_cache_folder() -> Path:
    """Return the user's cache folder; a temporary one of this process for a user without a home, as in a container."""
    try:
        return platformdirs.user_cache_path("casckpt")
    except RuntimeError:
        return Path(_without_home().name)


@cache
def _without_home() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="casckpt-")


CACHE_VARIABLE = "CASCKPT_CACHE_DIR"
CREATE_VARIABLE = "CASCKPT_CREATE"
USER_VARIABLE = "CASCKPT_USER"
_MAX_USER = 100  # characters


def open_repository(
    storage: ObjectStore, cache_dir: str | os.PathLike[str] | None = None, create: bool | None = None
) -> Repository:
    """Return the repository in ``storage``, without creating or reading anything.

    If ``cache_dir`` or ``create`` is None, the environment variables that `CACHE_VARIABLE` and `CREATE_VARIABLE` name
    set them, both for programs and for the command line. `USER_VARIABLE` names the user. Raises `InvalidInput` for an
    invalid variable.
    """
    user = os.environ.get(USER_VARIABLE) or None
    if user is not None and not (len(user) <= _MAX_USER and user.isprintable()):
        raise InvalidInput(
            f"{USER_VARIABLE}={user!r:.120} is not valid: set it to a name of up to {_MAX_USER} printable characters"
        )
    allowed = os.environ.get(CREATE_VARIABLE) or None
    if allowed not in (None, "0", "1"):
        raise InvalidInput(f"{CREATE_VARIABLE}={allowed!r} is not valid: 0 requires a store, and 1 allows a new one")
    folder = cache_dir if cache_dir is not None else os.environ.get(CACHE_VARIABLE) or None
    opened = Repository(
        storage,
        None if folder is None else Path(folder).expanduser().absolute(),
        may_create=None if allowed is None else allowed == "1",
        user=user,
    )
    opened.allow_create(create)
    return opened
