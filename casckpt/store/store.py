"""Defines `Store`, the checkpoints in a folder or bucket.

Each method imports what it calls, so this module does not need torch.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from casckpt.base.names import LATEST, Runs, check_keywords, is_reference
from casckpt.base.progress import Progress, Shown
from casckpt.base.text import check_outside
from casckpt.base.units import Duration, optional_seconds, seconds_of
from casckpt.contents import refs
from casckpt.contents.checkpoint import Arrival, Checkpoint
from casckpt.errors import InvalidInput, NotFound
from casckpt.format.names import TxId
from casckpt.format.records import Marker
from casckpt.history import commits as commit_log
from casckpt.history import tags
from casckpt.history.leases import hold
from casckpt.loading.options import LoadArguments, LoadOptions, MatchArguments, ReadArguments, UpdateArguments
from casckpt.plan.retention import KeepRules, Policy, Rotation, Thinning
from casckpt.repository.repository import Repository, open_repository
from casckpt.repository.signing_keys import KeyFile, private_key
from casckpt.saving.options import SaveArguments, SaveOptions
from casckpt.storage import open_storage
from casckpt.storage.base import Finding
from casckpt.storage.forking import PerProcess
from casckpt.store import exports, objects, reading
from casckpt.store.exports import Exported, ExportOptions, ImportFilesArguments, MergeOptions
from casckpt.store.listing import Listing, list_store
from casckpt.store.reading import lease, plain, resolve
from casckpt.store.types import SettingChanges, StoreSettings, change_settings, settings_from

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from torch.distributed import ProcessGroup

    from casckpt.loading.comparison import Comparison
    from casckpt.plan.difference import Difference
    from casckpt.saving.saver import State
    from casckpt.store.types import CopyResult, GcResult, Mode, StoreUsage
    from casckpt.upkeep.copies.mirror import Mirror
    from casckpt.upkeep.copies.mirrored import MirrorLag
    from casckpt.upkeep.gc.forgetting import RestoreResult
    from casckpt.upkeep.gc.gc import Tell
    from casckpt.upkeep.repair.repair import RepairResult
    from casckpt.upkeep.repair.verify import VerifyResult
    from casckpt.upkeep.saves import SaveInProgress
    from casckpt.upkeep.sizes import Sizes, StoreStats
    from casckpt.upkeep.status import StoreStatus
    from casckpt.upkeep.thin import ThinResult

log = logging.getLogger(__name__)


class Store:
    """Checkpoints of any number of runs in one folder or bucket. `casckpt.open` returns it. Thread-safe."""

    def __init__(self, repository: Repository, mirror: Repository | None = None) -> None:
        if not isinstance(repository, Repository):
            raise InvalidInput(
                f"casckpt.Store cannot be called directly: open the store with casckpt.open({repository!r})"
            )
        self.repository = repository
        self._saver = PerProcess(partial(objects.saver_of, repository))  # a forked child lacks its threads
        self._mirror: Mirror | None = None
        if mirror is not None:
            from casckpt.upkeep.copies.mirror import Mirror

            repository.mirror = mirror.storage
            self._mirror = Mirror(repository, mirror)
            weakref.finalize(self, self._mirror.stop)

    def __reduce__(self) -> tuple[type[Self], tuple[Repository, Repository | None]]:
        return type(self), (self.repository, None if self._mirror is None else self._mirror.target)

    @property
    def url(self) -> str:
        """The URL of the store, without credentials."""
        return self.repository.storage.url

    def __repr__(self) -> str:
        return f"casckpt.open({self.url!r})"

    # saving and loading

    def save(self, state: State, *, run: str = "default", step: int, **options: Unpack[SaveArguments]) -> Checkpoint:
        """Save ``state``, a nested mapping of tensors, plain data and objects. Return once it is durable and visible.

        Every rank calls this method with its own state: shards (DTensor, `casckpt.Shard`), replicas, and keys that only
        it has.

        - ``state``: also a function that returns the state; its errors then reach all ranks. Objects are modules,
          optimizers (stored under the parameter names of the module that owns the parameters) and others, whose
          state_dict every rank calls, in sorted key order.
        - ``metadata``: JSON-serializable values for listings; paths become strings. What cannot be stored is left out
          with a warning.
        - ``metrics``: up to 64 numbers by name, or tensors with one element. The same holds for what cannot be stored.
        - ``healthy``: whether training should continue from this checkpoint (True or False).
        - ``health``: count NaN and infinities, and find the largest values, in changed cells; the parent has the rest.
          If any rank finds NaN, the checkpoint is unhealthy, unless you passed ``healthy``.
        - ``attachments``: files by name, from rank 0.
        - ``overwrite``: after the commit, forget earlier checkpoints with this run and step.
        - ``ephemeral``: retention may count the checkpoint separately, and gc purges it sooner.
        - ``frozen``: patterns on flat keys, or a function of a key: tensors that you promise not to have changed since
          the run's last checkpoint. Only a sample of their cells is compared; the manifest records this.
        - ``compress``: store differences from the previous version if they are smaller: "auto" for bfloat16 and
          float16, and for other dtypes if the storage is slow; "always" for all floats, and encode new ones; "off"
          never. Default: the store's setting, or else "off". Needs host memory for a copy of those tensors.
        - ``check_replicas``: compare values that several ranks hold: "sample" refuses a parameter or its optimizer
          state of which a tenth or more differs in this process's first save, and otherwise warns and saves the lowest
          rank's value; "raise" compares all bytes and refuses any difference; "off" saves the lowest rank's value.
        - ``owners``: a function from a flat key to the only rank that saves that leaf, or None. A load gives the value
          to each rank that asks for it.
        - ``lineage``: where the state came from (see `Checkpoint.lineage`).
        - ``allow_pickle``: pickle leaves that are neither tensors nor plain data.
        - ``threads``: the number of threads that copy, hash, and write (default: 2 to 8, by the number of cores).
        - ``progress``: called with the number of finished bytes and the total.
        - ``space``: looks after the room on the disk (`casckpt.saving.options.Space`). A `Checkpointer` sets it.
        - ``process_group``: its ranks save together (default: all ranks, if torch.distributed is initialized).
          ``no_dist``: this process saves alone.

        Raises, on every rank, Conflict if the step exists, InvalidInput (with key and rank) for values that cannot be
        stored, StorageError, or RankFailed. After an error, the checkpoint is not visible.
        """
        check_keywords("Store.save", options, SaveArguments)
        return self._saver.get().save(state, SaveOptions(run=run, step=step, **options))

    def save_async(
        self, state: State, *, run: str = "default", step: int, **options: Unpack[SaveArguments]
    ) -> Future[Checkpoint]:
        """Copy ``state`` and save the copy in the background. You may change ``state`` once the call returns.

        A store's saves run one after the other and share the memory of one copy. If the copy of any rank does not fit
        into ``staging_bytes`` (see `casckpt.open`), the call saves ``state`` itself, and returns when the save has
        ended. ``options``: as for `save`.

        First creates the store if it does not exist. Raises, on every rank and before it copies, `save`'s errors for
        arguments and values that cannot be stored, and for a path that cannot be a store. The future raises later
        errors. If nobody queries it, the next call raises its error.
        """
        check_keywords("Store.save_async", options, SaveArguments)
        return self._saver.get().save_async(state, SaveOptions(run=run, step=step, **options))

    def check(self, state: State, *, run: str = "default", **options: Unpack[SaveArguments]) -> int:
        """Raise, on every rank, the InvalidInput that `save` would raise. Writes nothing. Every rank must call this.

        Return, on rank 0, the size of the state in bytes: that of a save that can reuse nothing.

        Also checks, as far as possible, whether a store can be at the path. Raises NotFound if there is no such bucket.
        """
        check_keywords("Store.check", options, SaveArguments)
        return self._saver.get().check(state, SaveOptions(run=run, step=0, **options))

    def warm_up(self, state: State, *, process_group: ProcessGroup | None = None, no_dist: bool = False) -> None:
        """Prepare for `save_async` of a similar state: allocate the memory for its copy, and connect the ranks.

        Without this call, the first `save_async` does so. Every rank must make the call. Raises InvalidInput.
        """
        options = SaveOptions(step=0, allow_pickle=True, process_group=process_group, no_dist=no_dist)
        self._saver.get().warm_up(state, options)

    def load(self, state: Any, ref: str | Checkpoint, **options: Unpack[LoadArguments]) -> Checkpoint:
        """Fill the tensors in ``state`` in place, and replace its other leaves. Return the checkpoint.

        Every rank calls this method with its own shards, regardless of the ranks and shards that saved the checkpoint.
        Objects are loaded whole: modules and optimizers first, then others, and random number generators last. A new
        optimizer's empty state_dict receives new tensors, which you pass to `load_state_dict`; casckpt logs this at
        level INFO. Keys that ``state`` does not have are skipped: ``unread_subtrees`` lists whole containers that no
        rank read, and a log entry per run these, single keys, and other ranks' values. If no tensor would be filled, or
        more than a tenth have different names in the checkpoint, MissingKey shows the ``rename`` that would fill them,
        even without ``strict``. If fewer do, the log says how many.

        - ``strict`` (default): the checkpoint must have every key of ``state``. If False, missing keys keep their
          values and are listed in ``missing_keys``. A tensor that shares memory with a loaded one does not count as
          missing.
        - ``ignore_mismatched``: fnmatch patterns. Matching keys keep their values if the checkpoint lacks them or has a
          different shape, dtype or kind; ``mismatched_keys`` lists them.
        - ``rename``: from a key of ``state`` to a key of the checkpoint: a function, or a dict from regular
          expressions, which must match the whole key, to replacements. An optimizer object is renamed along with its
          module.
        - ``unread``: "ignore" turns off the log of unread keys, and the MissingKey about names.
        - ``cast``: convert dtypes.
        - ``verify`` (default): compare every cell with its digest.
        - ``allow_pickle``: unpickle values that were stored as pickles.
        - ``threads``, ``progress``, ``process_group``, ``no_dist``: as for `save`.

        Raises, before anything changes, NotFound, MissingKey, Mismatch, InvalidInput, or Conflict (ranks pass different
        references or stores); during the read, Damaged (with key, blob and checkpoints), Gone (gc purged the
        checkpoint, which a lease prevents) or StorageError. After these, the contents of ``state`` are undefined.
        """
        check_keywords("Store.load", options, LoadArguments)
        loaded = self._load(state, ref, LoadOptions(**options))
        if options.get("unread", "warn") == "warn":
            objects.log_bare_optimizers(state, loaded.missing_keys)
        return loaded

    def update(
        self, state: Any, ref: str | Checkpoint, *, held: Checkpoint | None, **options: Unpack[UpdateArguments]
    ) -> Checkpoint:
        """Load into ``state``, which holds ``held`` from a `load` or `update`. Only differences are read.

        A changed cell is computed from the cell in memory if the frames between the versions are smaller than the cell
        with its bases, and compared with its digest. Otherwise, or if they do not match, it is read, as are tensors
        that ``cast`` converts, and cells of which ``state`` holds only a part.

        - ``held``: what this rank's load returned. You must not have changed the values that it filled. Others
          (``missing_keys``, ``mismatched_keys``, ``unread_keys``) are read, and all cells if it was purged or is None.
          Its frames move to the result, in host memory, for the next update.
        - ``check``: also hash the cells in memory, and read those that do not match; ``state`` may then have any
          contents.
        - All else, the result and the errors: as for `load`. After an error during the read, load, or update with
          ``check``.
        """
        check_keywords("Store.update", options, UpdateArguments)
        if held is not None and not isinstance(held, Checkpoint):
            raise InvalidInput(f"held={held!r:.80} is not valid: pass what load or update returned, or None")
        return self._load(state, ref, LoadOptions(updates=True, held=held, **options))

    def _load(self, state: Any, ref: str | Checkpoint, given: LoadOptions) -> Checkpoint:
        return reading.load(self.repository, self, state, ref, given)

    def read(
        self,
        ref: str | Checkpoint,
        *,
        keys: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        mapped: bool = False,
        **options: Unpack[ReadArguments],
    ) -> Any:
        """Return the state in its saved nested form, in new tensors on ``device``.

        - ``keys``: patterns on flat keys.
        - ``mapped``: map the files of a store in a folder, so that the processes of a host share one copy. This open
          store verifies each byte when it first maps it. Tensors below 64 KiB, encoded cells, and stores that are not
          in a folder are read into memory. Changes do not reach the store. If another program truncates a mapped file,
          the kernel ends the process.
        - ``verify``, ``allow_pickle``, ``threads``, ``progress``: as for `load`.
        """
        check_keywords("Store.read", options, ReadArguments)
        return reading.read(self.repository, ref, keys, device, LoadOptions(mapped=mapped, **options))

    def pre_download(
        self,
        ref: str | Checkpoint,
        state: Any = None,
        *,
        threads: int | None = None,
        progress: Shown | None = None,
        **match: Unpack[MatchArguments],
    ) -> int:
        """Fetch a checkpoint into this host's cache for later loads. Return the number of fetched bytes.

        ``state``: fetch only what this rank's load into ``state`` needs; it does not change. ``rename``, ``strict``,
        ``ignore_mismatched``: as for `load`. Each rank makes its own call, and what several ranks of a host need is
        fetched once. Each blob is verified. ``progress`` counts cached bytes. Raises NotFound, Damaged (with the blob),
        StorageError, or InvalidInput if the cache is too small.
        """
        check_keywords("Store.pre_download", match, MatchArguments)
        shown = Progress(progress)
        return reading.pre_download(self.repository, ref, state, threads=threads, progress=shown, match=match)

    def export(self, ref: str | Checkpoint, path: str | os.PathLike[str], **options: Unpack[ExportOptions]) -> Exported:
        """Export a checkpoint as a folder for from_pretrained, safetensors, DCP or torch.save. See `casckpt.export`."""
        return exports.exporter()(self, ref, path, **options)

    def import_files(
        self, path: str | os.PathLike[str], *, step: int, **options: Unpack[ImportFilesArguments]
    ) -> Checkpoint:
        """Store a folder or file of another program as it is, each tensor in it only once.

        See `casckpt.frontends.files.importing.import_files`. ``export`` with ``format="files"`` gives it back.
        """
        return exports.importer()(self, path, step=step, **options)

    def merge(self, *named: str | Checkpoint, run: str, step: int, **options: Unpack[MergeOptions]) -> Checkpoint:
        """Save a linear combination of checkpoints, such as their mean, as a new checkpoint. Memory use is bounded.

        - ``named``: checkpoints or ranges of steps, in the order in which they are added.
        - ``weights``: a number for each (default: the mean), also negative. A checkpoint with the weight 0 is not read.
        - ``ema``: the decay of a moving average, average * decay + value * (1 - decay), from the first checkpoint on.
        - ``keys``: fnmatch patterns for what to merge (default: all except optimizers and other training state).
        - ``keep``: patterns for what to take from the last checkpoint, such as ``["optimizer.*"]``.
        - ``dtype``: that of the result (default: that of the last checkpoint).
        - ``metadata``: that of the result. All else is that of the last checkpoint; a warning names what differs.

        If the weights sum to exactly 1, what is equal in all checkpoints is neither read nor stored again. Raises
        MissingKey or Mismatch for keys and shapes that differ, Mismatch for tensors that consist of other tensors, such
        as quantized ones, if they differ, and the errors of `save` and `load`.
        """
        check_keywords("Store.merge", options, MergeOptions)
        commits = refs.resolve_many(self.repository, map(plain, named))
        chosen = [Checkpoint(self.repository, commit) for commit in commits]
        return exports.merger()(self, chosen, run=run, step=step, **options)

    # looking

    def create(self, **sizes: int) -> bool:
        """Create the store now, with these ``cell_bytes`` and ``blob_bytes``. Return False if it already exists."""
        return self.repository.create(**sizes)

    def exists(self) -> bool:
        """Return whether the store exists. The first save or `create` creates it. Raises StorageError."""
        return self.repository.exists()

    @property
    def marker(self) -> Marker:
        """The store's constant properties: its id, format and sizes. Raises NotFound if there is no store."""
        return self.repository.marker

    def listing(self) -> Listing:
        """Return a snapshot of all checkpoints and tags, including forgotten and damaged ones.

        Raises NotFound if there is no store, and StorageError.
        """
        return list_store(self.repository)

    def get(self, ref: str | Checkpoint) -> Checkpoint:
        """Return the checkpoint that ``ref`` names. Raises NotFound and InvalidInput.

        A reference is an id (or its first 6 or more hex digits), RUN@STEP, RUN@latest, latest, or tag:NAME.
        """
        return Checkpoint(self.repository, resolve(self.repository, ref))

    def __contains__(self, ref: str | Checkpoint) -> bool:
        try:
            resolve(self.repository, ref)
        except NotFound:  # the caller's checkpoint may have been purged
            return False
        return True

    def checkpoints(self, run: str | None = None, *, forgotten: bool = False) -> list[Checkpoint]:
        """Return all checkpoints (of ``run``), oldest first. ``forgotten``: include forgotten and replaced ones."""
        found = commit_log.list_commits(self.repository)
        chosen = found.placed() if forgotten else found.current()
        return [Checkpoint(self.repository, commit) for commit in chosen if run is None or commit.run == run]

    def runs(self) -> list[str]:
        """Return the sorted names of all runs with a visible checkpoint. Raises NotFound if there is no store."""
        return sorted({commit.run for commit in commit_log.list_commits(self.repository).current()})

    def watch(
        self,
        run: str,
        *,
        after: str | int | Checkpoint | None = None,
        latest_only: bool = False,
        timeout: Duration | None = None,
        poll: Duration = "1s",
    ) -> Iterator[Arrival]:
        """Yield each new checkpoint of ``run`` once, after its commit, in the order in which they were announced.

        Rewritten and restored checkpoints are not yielded a second time. A checkpoint may be purged before you load it.
        The store and the run do not have to exist yet. If the storage fails, the watch logs a warning and retries.

        - ``after``: None: checkpoints that are committed after this call; "start": all; a step or another reference:
          those that were announced after that checkpoint, which may be forgotten or purged.
        - ``latest_only``: of several new checkpoints, yield only the one saved last, and skip late ones.
        - ``timeout``: end after this time without a new checkpoint.
        - ``poll``: the interval of its one small request (at least 0.1s).

        Raises InvalidInput and NotFound. The iterator raises Damaged, Refused, and StorageError if the storage still
        fails when the watch ends.
        """
        return reading.watch(self.repository, run, after, latest_only=latest_only, poll=poll, timeout=timeout)

    def diff(self, old: str | Checkpoint, new: str | Checkpoint) -> Difference:
        """Return which tensors were added, removed, changed and unchanged. Reads only the manifests."""
        return reading.diff(self.repository, old, new)

    def compare(
        self,
        state: Mapping[Any, Any],
        ref: str | Checkpoint,
        *,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> Comparison:
        """Return the tensors of a live ``state`` that differ from a checkpoint in any bit, with ranks and positions.

        Every rank of ``process_group`` calls this with its own shards, in any topology (``no_dist``: alone). Each
        hashes all its values, including replicas, and reads only cells that differ or cross a shard boundary.
        Non-tensor leaves, and keys that exist only in the checkpoint, are ignored. Raises NotFound, Damaged, MissingKey
        for thinned tensors, InvalidInput, and StorageError.
        """
        return reading.compare(self.repository, state, ref, process_group, no_dist=no_dist)

    def stats(self) -> StoreStats:
        """Return the number of checkpoints and blobs, and their sizes in bytes."""
        return self.sizes().stats()

    def status(self) -> StoreStatus:
        """Return what the person who runs the store should know: the last gc, open saves, damage, mirror lag, sizes.

        Finds all damage at which a gc would stop, blobs that are missing or have a wrong size, and marked ones. Reads
        no blobs, and writes nothing. Raises NotFound if there is no store, and StorageError.
        """
        from casckpt.upkeep.status import status

        return status(self.repository)

    def report(self) -> StoreUsage:
        """Return how many bytes each run shares and does not share, and how many no checkpoint needs."""
        return self.sizes().usage()

    def sizes(self) -> Sizes:
        """Return the parts of `stats`, `report` and the forecast, all from one listing.

        Each part is computed when you ask for it. Raises NotFound and StorageError.
        """
        from casckpt.upkeep.sizes import Sizes

        return Sizes(self.repository, commit_log.list_commits(self.repository))

    def attachments(self, ref: str | Checkpoint) -> dict[str, int]:
        """Return the attachments' names, and their sizes in bytes."""
        return reading.attachments(self.repository, ref)

    def read_attachment(self, ref: str | Checkpoint, name: str) -> bytes:
        """Return the contents of an attachment. Raises NotFound."""
        return reading.read_attachment(self.repository, ref, name)

    # keeping and removing

    def tag(self, name: str, ref: str | Checkpoint, *, expires: Duration | None = None) -> None:
        """Set the tag ``name`` on a checkpoint, so that policies keep it. Restore the checkpoint if it is forgotten.

        ``expires``: the tag's lifetime ("12h", a timedelta). An expiring tag on a forgotten checkpoint raises NotFound
        instead of restoring it. Raises Gone if the checkpoint was purged, and Conflict if that is happening now.
        """
        if isinstance(ref, str) and is_reference(name) and not is_reference(ref):
            raise InvalidInput(f"the tag name comes first, and then the checkpoint: call tag({ref!r}, {name!r})")
        repo, commit = self.repository, resolve(self.repository, ref)
        if isinstance(ref, str) and ref == f"{commit.run}@{LATEST}" and (running := refs.saved_soon(repo, commit.run)):
            log.warning("tag %s is on %s, the newest that is saved%s", name, commit, running)
        if expires is None:
            tags.set_tag(repo, name, commit)
        else:
            hold(repo, name, commit, seconds_of(expires, "expires"), listed=commit_log.list_commits(repo))

    @contextmanager
    def lease(self, ref: str | Checkpoint, *, expires: Duration = "1h") -> Iterator[Checkpoint]:
        """Hold a checkpoint inside a with block: gc keeps all its objects, even if it is forgotten in the meantime.

        A lease has a unique name, and expires ``expires`` from now. A thread renews it until the block ends.
        If the process is killed, the lease expires. casckpt logs and retries a failed renewal, and logs a lost lease
        as an error. Raises NotFound if the checkpoint is not visible.
        """
        with lease(self.repository, ref, seconds_of(expires, "expires")) as held:
            yield Checkpoint(self.repository, held.commit)

    def tags(self) -> dict[str, Checkpoint]:
        """Return all tags and their checkpoints, except tags whose records are damaged."""
        listing = self.listing()
        for name in listing.damaged_tags:
            log.warning("cannot read the record of tag %s: set the tag again, or delete it", name)
        return {name: tag.checkpoint for name, tag in listing.tags.items()}

    def untag(self, name: str) -> None:
        """Remove a tag. Raises NotFound."""
        tags.delete_tag(self.repository, name)

    def sign(
        self, *named: str | Checkpoint, key: KeyFile | Ed25519PrivateKey, password: bytes | None = None
    ) -> list[Checkpoint]:
        """Sign checkpoints or ranges of steps by storing a signature of each id. Copies include the signatures.

        ``key``: a file with an Ed25519 key from OpenSSL or ssh-keygen, or a key object of the cryptography package.
        ``password``: the file's. Sign what this process has just saved: that id was computed from memory. For others,
        `verify` proves the content that the id names, but not where it came from. Raises NotFound, InvalidInput,
        Damaged, StorageError, and Unsupported without the cryptography package.
        """
        from casckpt.contents.signatures import sign

        signer = private_key(key, password) if isinstance(key, str | os.PathLike) else key
        chosen = refs.resolve_many(self.repository, map(plain, named))
        for commit in chosen:
            sign(self.repository, commit, signer)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def forget(self, *refs: str | Checkpoint, tagged: bool = False, dry_run: bool = False) -> list[Checkpoint]:
        """Hide checkpoints, or ranges of steps, until you restore them or gc purges them.

        ``tagged``: allow tagged checkpoints, and delete their tags. Expiring tags remain, and gc respects them.
        Without ``tagged``, a tagged checkpoint raises Conflict, and no checkpoint is forgotten. ``dry_run``: only
        return the checkpoints. Raises NotFound, InvalidInput, and Conflict.
        """
        from casckpt.upkeep.gc.forgetting import forget_chosen

        chosen = forget_chosen(self.repository, map(plain, refs), tagged=tagged, dry_run=dry_run)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def forget_now(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Forget and purge checkpoints without gc, and return the forgotten ones. The next gc frees the space.

        Checkpoints that are tagged or not yet safe in the mirror are not forgotten. If the store has a minimum age, gc
        purges the forgotten checkpoints instead. Raises StorageError.
        """
        from casckpt.upkeep.gc.gc import with_room
        from casckpt.upkeep.gc.purge import forget_and_purge

        chosen = refs.resolve_many(self.repository, map(plain, checkpoints))
        forgotten = with_room(self.repository, partial(forget_and_purge, self.repository, chosen))
        return [Checkpoint(self.repository, commit) for commit in forgotten]

    def rotate(self, run: str, rotation: Rotation, among: Container[str] | None = None) -> list[Checkpoint]:
        """Forget and purge the checkpoints of ``run`` that ``rotation`` does not keep, as `forget_now` does.

        ``among``: the ids that may go and count. Only one process may call this. Raises StorageError, Damaged, Refused.
        """
        from casckpt.upkeep.gc.forgetting import rotate

        return [Checkpoint(self.repository, commit) for commit in rotate(self.repository, run, rotation, among)]

    def thin_now(self, run: str, rule: Thinning | None, among: Container[str] | None = None) -> list[Checkpoint]:
        """Thin the checkpoints of ``run`` by ``rule``, and trim their old places as `forget_now` purges.

        ``among``: as for `rotate`. Skips damaged checkpoints. Raises the same errors as `rotate`.
        """
        from casckpt.upkeep.gc.forgetting import thin

        return [Checkpoint(self.repository, commit) for commit in thin(self.repository, run, rule, among)]

    def thin(
        self,
        *refs: str | Checkpoint,
        drop: str | Sequence[str],
        run: str | None = None,
        tagged: bool = False,
        dry_run: bool = False,
        **keep: Unpack[KeepRules],
    ) -> ThinResult:
        """Drop tensors, such as optimizer state, from checkpoints. Keep the other tensors and the id.

        No bytes move. gc later trims the old places and frees the space. Until then, `restore` can bring all tensors
        back (`checkpoints` with ``forgotten`` lists the old places).

        - ``refs``: checkpoints or ranges of steps. Without them, ``keep_last=2`` or another `gc` rule says which
          checkpoints stay whole, in addition to the newest of each run and tagged ones.
        - ``drop``: fnmatch patterns on the flat keys of tensors.
        - ``run``: only this run, or the runs that match this pattern.
        - ``tagged``: also thin tagged checkpoints.

        Raises InvalidInput, NotFound, MissingKey if no pattern matches, Conflict if one of ``refs`` is tagged, and
        StorageError. If a checkpoint is damaged, the others are thinned before its error is raised.
        """
        from casckpt.upkeep.gc.gc import with_room
        from casckpt.upkeep.thin import thin_chosen

        check_keywords("Store.thin", keep, KeepRules)
        chosen, rule = list(map(plain, refs)), Policy(**keep)
        options: dict[str, Any] = {"drop": drop, "run": run, "tagged": tagged, "dry_run": dry_run}
        return with_room(self.repository, partial(thin_chosen, self.repository, chosen, rule, **options))

    def restore(self, ref: str | Checkpoint, *, whole: bool = False) -> Checkpoint:
        """Make a forgotten checkpoint visible again.

        Raises Conflict if it was purged, or if a different checkpoint of its run and step is visible. ``ref``: an id, a
        `Checkpoint`, or RUN@STEP if only one checkpoint was forgotten there. A checkpoint that `checkpoints` shows as
        ``replaced`` returns to these old places if gc has not trimmed them. ``whole``: bring back the tensors that
        `thin` dropped. Raises NotFound if gc has purged them.
        """
        if refs.is_range(ref):
            raise InvalidInput(f"{ref!r} does not name a single checkpoint: use restore_many for ranges")
        result = self.restore_many(ref, whole=whole)
        (commit,) = (*result.restored, *result.visible)
        return Checkpoint(self.repository, commit)

    def restore_many(
        self, *named: str | Checkpoint, whole: bool = False, dry_run: bool = False, check: bool = True
    ) -> RestoreResult:
        """Restore checkpoints, or all forgotten checkpoints in ranges of steps, as `restore` does.

        A range skips steps that have a visible checkpoint. If one of the named checkpoints cannot be restored, none
        are. ``whole``: for a range, restore its thinned checkpoints. ``dry_run``: only return the checkpoints.
        ``check``: raise the errors of individual checkpoints after the others are restored. Without ``check``, the
        result lists them as ``failed``. Raises NotFound, InvalidInput, Conflict, and StorageError.
        """
        from casckpt.upkeep.gc.forgetting import restore_chosen

        return restore_chosen(self.repository, map(plain, named), whole=whole, dry_run=dry_run, check=check)

    def gc(
        self,
        *,
        run: Runs = None,
        min_age: Duration | None = None,
        wait: Duration = "60s",
        revoke_after: Duration | None = None,
        dry_run: bool = False,
        progress: Shown | None = None,
        tell: Tell | None = None,
        **keep: Unpack[KeepRules],
    ) -> GcResult:
        """Forget checkpoints by rules, purge forgotten ones, and delete unneeded files. Safe to run at any time.

        - ``keep_last``, ``keep_every`` (step % N == 0), ``keep_within``, ``keep_daily``, ``keep_weekly``,
          ``keep_monthly``, ``keep_best`` ("loss:3", "acc:max:1"): each run keeps what any rule keeps, its newest
          checkpoint, its newest one that is not unhealthy, and tagged ones. Without a rule, gc does not forget any.
        - ``run``: only this run, or only runs whose names match an fnmatch pattern, or one of several.
        - ``min_age``: time between forgetting and purging, in which `restore` brings a checkpoint back (default: the
          store's setting, or else 24 h, and 15 minutes for ephemeral checkpoints). Not less than the setting.
        - ``wait``: total time to wait for saves in progress. The next gc continues where this one stopped.
        - ``revoke_after``: time without a sign of life after which gc revokes a save (default: the store's setting, or
          1 h).
        - ``progress``: called with the number of deleted objects and the total.
        - ``tell``: called with the saves that gc is waiting for.

        A duration is a timedelta or a string with a unit ("7d", "90s"); 0 does not need a unit. Raises Damaged if a
        live checkpoint cannot be read; gc then neither forgets nor deletes anything. Raises InvalidInput (for example
        for a metric that no checkpoint has), and StorageError. Every error, even an interrupt, has a `GcResult` as
        ``done``, with the changes before the error or, with ``dry_run``, the plan.
        """
        from casckpt.upkeep.gc.gc import collect

        check_keywords("Store.gc", keep, KeepRules)
        return collect(
            self.repository, Policy(**keep), run=run, dry_run=dry_run,
            min_age=optional_seconds(min_age, "min-age"),
            wait=seconds_of(wait, "wait"),
            revoke_after=optional_seconds(revoke_after, "revoke-after"),
            progress=Progress(progress), tell=tell or (lambda waiting: None),
        )  # fmt: skip

    @property
    def settings(self) -> StoreSettings:
        """The store's settings, read on each access. Raises NotFound if there is no store."""
        return settings_from(self.repository.settings)

    def change_settings(self, **changes: Unpack[SettingChanges]) -> StoreSettings:
        """Change settings for all later users of the store. None unsets a setting.

        `StoreSettings` lists the names. A duration is a timedelta or a string with a unit ("7d", "90s"). Raises
        InvalidInput with the name of the setting, NotFound if there is no store, and StorageError.
        """
        if (mirror := changes.get("mirror")) is not None:
            changes["mirror"] = url = repository_of(mirror, None).storage.url
            check_outside(self.url, url)
        return change_settings(self.repository, changes)

    def transactions(self) -> list[SaveInProgress]:
        """Return the saves in progress, oldest first. Raises NotFound if there is no store."""
        from casckpt.upkeep.saves import saves_in_progress

        return saves_in_progress(self.repository)

    def revoke(self, txid: str) -> None:
        """End a save in progress, so that it never becomes visible. Raises NotFound, and Conflict if it has ended."""
        from casckpt.upkeep.saves import revoke_save

        revoke_save(self.repository, TxId(txid))

    def give_up(self, txid: str) -> None:
        """End a transaction whose lost or unreadable record blocks every gc. Raises NotFound and Conflict."""
        from casckpt.upkeep.saves import give_up

        give_up(self.repository, TxId(txid))

    # checking and copying

    def doctor(self) -> Iterator[Finding]:
        """Check whether the storage is safe for a store, and yield each finding. The store does not have to exist."""
        from casckpt.upkeep.doctor import examine

        return examine(self.repository)

    def reindex(self) -> int:
        """Rebuild this host's catalogue of the store. Return how many checkpoints are in it. Raises StorageError."""
        from casckpt.contents.manifests import reindex

        return reindex(self.repository)

    def verify(
        self,
        *refs: str | Checkpoint,
        mode: Mode = "full",
        part: tuple[int, int] = (0, 1),
        decode: bool = False,
        progress: Shown | None = None,
    ) -> VerifyResult:
        """Check all objects of live checkpoints, or of ``refs``. Record damaged blobs in the store.

        ``mode``: "full" reads every blob and checks its hash, and "exists" checks presence and size. ``part``:
        (K, N) checks the K-th of N parts of the blobs, so N calls with K from 0 to N - 1 check all. ``decode``: also
        decode encoded cells and check their digests. ``progress``: called with the number of bytes read so far and the
        total. The result lists the damage. Raises NotFound, InvalidInput, and StorageError.
        """
        from casckpt.upkeep.repair.verify import verify

        chosen, shown = [plain(ref) for ref in refs] or None, Progress(progress)
        return verify(self.repository, refs=chosen, mode=mode, part=part, decode=decode, progress=shown)

    def repair(self, *sources: Store | str | os.PathLike[str], progress: Shown | None = None) -> RepairResult:
        """Restore missing and damaged manifests and blobs. Damaged blobs are those that `verify` or a save has marked.

        Each comes from an intact copy in this store, in this host's cache, or in ``sources``, which casckpt only reads.
        ``progress``: called with the number of restored bytes. The result lists what could not be repaired. Raises
        NotFound and StorageError.
        """
        from casckpt.upkeep.repair.repair import repair

        others = [repository_of(one, self.repository.cache_dir) for one in sources]
        return repair(self.repository, sources=others, progress=Progress(progress))

    def copy_to(
        self,
        target: Store | str | os.PathLike[str],
        *refs: str | Checkpoint,
        run: str | None = None,
        tags: bool | None = None,
        jobs: int | None = None,
        compress: Literal["off", "always"] | None = None,
        dry_run: bool = False,
        check: bool = True,
        progress: Shown | None = None,
    ) -> CopyResult:
        """Copy checkpoints or ranges of steps (default: all visible checkpoints) to a different store.

        Only bytes that ``target`` lacks are transferred. Copies keep their ids, times and order. Each is verified, and
        becomes visible when it is complete and durable. A missing ``target`` is created with this store's sizes.

        - ``refs``: what to copy. Forgotten checkpoints in ``target`` remain forgotten unless you name them.
        - ``run``: copy only this run, or the runs that match this pattern.
        - ``tags``: also set the tags. By default, a copy of the whole store sets those that ``target`` lacks.
        - ``jobs``: how many files to copy in parallel.
        - ``compress``: "always" encodes floats, except in checkpoints with encoded cells; "off" and None change
          nothing.
        - ``check``: raise errors at the end; otherwise, the result lists them as ``failed``.
        - ``progress``: called with the bytes so far.

        Raises NotFound, StorageError, Damaged, Gone, Refused, and Conflict for a different checkpoint at a step.
        """
        from casckpt.upkeep.copies import copy as copying

        source, other = self.repository, repository_of(target, self.repository.cache_dir)
        tags = bool(tags) if refs or run is not None else tags
        plan = copying.plan_copy(source, other, map(plain, refs), run=run, compress=compress)
        if dry_run:
            return copying.preview(source, other, plan, with_tags=tags)
        result = copying.execute(source, other, plan, with_tags=tags, jobs=jobs, progress=Progress(progress))
        if check:
            result.raise_failure()
        return result

    def mirror_lag(self) -> MirrorLag:
        """Return the mirror's lag: the number of pending checkpoints and bytes, and the age of the oldest checkpoint.

        Raises StorageError, and InvalidInput if the store was opened without a mirror.
        """
        return self._its_mirror().lag()

    def wait_for_mirror(self, timeout: float | None = None) -> None:
        """Wait until all current commits are safe in the mirror, for example before a program ends.

        If the program ends earlier, copying continues the next time that the store is opened with its mirror. If
        copying has failed, this method tries once more and then raises the error (StorageError, Damaged, ...). Raises
        StorageError after ``timeout`` seconds.
        """
        self._its_mirror().wait(timeout)

    def _its_mirror(self) -> Mirror:
        if self._mirror is None:
            raise InvalidInput(f"{self.url} was opened without a mirror: use casckpt.open(..., mirror=URL)")
        return self._mirror


def repository_of(store: Store | str | os.PathLike[str], cache_dir: Path | None) -> Repository:
    """Return the repository of an open store, path or URL. Raises InvalidInput or Unsupported for an invalid URL."""
    return store.repository if isinstance(store, Store) else open_repository(open_storage(store), cache_dir)
