"""`Store`, through which a program uses a folder or bucket of checkpoints.

Importing this module needs neither torch nor numpy: each method imports the packages that it calls.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from casckpt.base.names import check_keywords, is_reference
from casckpt.base.progress import Progress, Shown
from casckpt.base.units import Duration, seconds_of
from casckpt.contents import refs
from casckpt.contents.checkpoint import Arrival, Checkpoint, html_of
from casckpt.errors import InvalidInput, NotFound
from casckpt.format.names import TxId
from casckpt.format.records import Marker
from casckpt.history import commits as commit_log
from casckpt.history import tags
from casckpt.history.leases import hold
from casckpt.loading.options import LoadArguments, LoadOptions, MatchArguments, ReadArguments, UpdateArguments
from casckpt.plan.retention import KeepRules, Policy, Rotation, Thinning, thinning_of
from casckpt.repository.opening import open_repository
from casckpt.repository.repository import Repository
from casckpt.repository.signing_keys import KeyFile, private_key
from casckpt.saving.options import SaveArguments, SaveOptions, WhenBusy
from casckpt.storage.base import Finding
from casckpt.storage.forking import PerProcess
from casckpt.store import exports, objects, reading
from casckpt.store.exports import Exported, ExportOptions
from casckpt.store.listing import Listing, list_store
from casckpt.store.reading import lease, plain, resolve
from casckpt.store.settings import SettingChanges, StoreSettings, change_settings, settings_from

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from torch.distributed import ProcessGroup

    from casckpt.loading.comparison import Comparison
    from casckpt.plan.difference import Difference
    from casckpt.saving.saver import Saver, State
    from casckpt.upkeep.copies.copy import CopyResult
    from casckpt.upkeep.copies.mirror import Mirror
    from casckpt.upkeep.copies.mirror_notes import MirrorLag
    from casckpt.upkeep.footprint import Footprint
    from casckpt.upkeep.gc.forgetting import RestoreResult
    from casckpt.upkeep.gc.gc import GcResult, Tell
    from casckpt.upkeep.history import Added, Heat, History
    from casckpt.upkeep.repair.repair import RepairResult
    from casckpt.upkeep.repair.verify import Mode, VerifyResult
    from casckpt.upkeep.saves import SaveInProgress
    from casckpt.upkeep.thin import ThinResult
    from casckpt.upkeep.usage import StoreStats, StoreUsage

WAIT: Duration = "60s"  # wait of a gc for saves in progress

log = logging.getLogger(__name__)


class Store:
    """Checkpoints of any number of runs in one folder or bucket. `casckpt.open` makes it. Thread-safe."""

    def __init__(self, repository: Repository, mirror: Repository | None = None) -> None:
        if not isinstance(repository, Repository):
            raise InvalidInput(f"a store is opened with casckpt.open({repository!r}), not made with casckpt.Store")
        self.repository = repository
        self._saver = PerProcess(partial(_new_saver, repository))  # a forked child lacks the threads of its parent
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

    @property
    def is_remote(self) -> bool:
        """Whether the store is in a bucket or on a server, where requests are slow."""
        return self.repository.storage.traits.remote

    def __repr__(self) -> str:
        return f"casckpt.open({self.url!r})"

    def _repr_html_(self) -> str:
        return html_of(self.url, self.checkpoints() if self.exists() else [])

    # saving and loading

    def save(self, state: State, *, run: str = "default", step: int, **options: Unpack[SaveArguments]) -> Checkpoint:
        """Save ``state``, a nested mapping of tensors, plain data and objects. Return when it is durable and visible.

        Objects are modules, optimizers and other values with a state_dict. Optimizers are stored under the names of the
        module in ``state`` that has their parameters. Every rank calls state_dict of other objects, in the sorted order
        of keys. ``state`` may be a function that returns the state. Then its errors reach all ranks. Every rank of
        ``process_group`` (default: all, where torch.distributed is initialised) makes the call with its own state:
        shards (DTensor, `casckpt.Shard`), replicas, and keys that only it has. ``no_dist``: this process saves alone.

        ``metadata``: JSON-able values for listings; a path is stored as text. ``metrics``: up to 64 numbers by name.
        Both take scalars of numpy, and tensors without dimensions on any device, such as a loss. ``healthy``: True or
        False, whether a training should continue from this checkpoint. ``health``: count NaN and infinities, and find
        the largest value, of each tensor. This reads changed cells, and takes the rest from the parent. If a rank finds
        NaN and you gave no ``healthy``, the checkpoint is unhealthy. ``attachments``: files by name, from rank 0.
        ``overwrite``: after the commit, forget earlier checkpoints with this run and step. ``ephemeral``: retention may
        count the checkpoint separately, and gc purges it sooner. ``frozen``: tensors that did not change since the last
        checkpoint of the run, as patterns on flat keys or a function of a key. This is your promise: casckpt compares a
        sample of their cells only, and the manifest says so. ``dedup``: "store": reuse cells of the whole store; "run":
        of this run only. ``compress``: store the difference of a tensor to the previous one if that is smaller. "auto":
        of bfloat16 and float16, and of other dtypes if the storage is slow; "always": of all floats, and encode new
        ones; "off". Default: the setting of the store, else "off". It needs host memory for a copy of those tensors.
        ``check_replicas``: compare values that several ranks hold whole. "sample" (default): compare samples. Refuse a
        parameter, or its optimizer state, if a tenth or more differs when this process first saves it; otherwise warn,
        and save the value of the lowest rank. "raise": compare all bytes and refuse any difference. "off": save the
        value of the lowest rank. ``owners``: a function from a flat key to the only rank that maintains and saves that
        leaf, or None if all ranks hold the same value. A load gives it to each rank that asks for it. ``allow_pickle``:
        pickle leaves that are neither tensors nor plain data. ``threads``: to hash and write (default: 2 to 8, by the
        number of cores). ``progress``: called with the finished bytes and the total.

        Raises Conflict if the step exists, InvalidInput (with key and rank) for values that cannot be stored,
        StorageError, RankFailed, on every rank. After an error, the checkpoint is not visible.
        """
        check_keywords("Store.save", options, SaveArguments)
        return self._saver.get().save(state, SaveOptions(run=run, step=step, **options))

    def save_async(
        self,
        state: State,
        *,
        run: str = "default",
        step: int,
        when_busy: WhenBusy = "wait",
        **options: Unpack[SaveArguments],
    ) -> Future[Checkpoint]:
        """Copy ``state`` and save it in the background. You may change it after the call.

        Saves of one store run one after the other, and use the memory of one copy. If a save is running, the call waits
        for its end (``when_busy="wait"``), or raises Conflict on every rank if one runs on any rank ("refuse").

        Before it copies, raises the errors of `save` for arguments and for values that cannot be stored, on every rank.
        The future raises later errors. If no code asks the future, the next call raises the error once.
        """
        check_keywords("Store.save_async", options, SaveArguments)
        return self._saver.get().save_async(state, SaveOptions(run=run, step=step, **options), when_busy)

    def check(self, state: State, *, run: str = "default", **options: Unpack[SaveArguments]) -> None:
        """Raise the errors that `save` would raise before it writes. Write nothing.

        Every rank makes the call, and each raises the same InvalidInput.
        """
        check_keywords("Store.check", options, SaveArguments)
        self._saver.get().check(state, SaveOptions(run=run, step=0, **options))

    def warm_up(self, state: State, *, process_group: ProcessGroup | None = None, no_dist: bool = False) -> None:
        """Prepare for `save_async` of a similar state: allocate the memory for its copy, and connect the ranks.

        Otherwise the first `save_async` does this. Every rank makes the call. Raises InvalidInput as `save` does.
        """
        options = SaveOptions(step=0, allow_pickle=True, process_group=process_group, no_dist=no_dist)
        self._saver.get().warm_up(state, options)

    def load(self, state: Any, ref: str | Checkpoint, **options: Unpack[LoadArguments]) -> Checkpoint:
        """Fill the tensors of ``state`` in place, and replace its other leaves. Skip keys that ``state`` lacks.

        Objects are loaded whole: modules and optimizers first, then the others, random generators last. The empty
        state_dict of a fresh optimizer receives new tensors, for your call of `load_state_dict`; casckpt warns if no
        variable holds that dict. ``strict`` (default): the checkpoint must have every key of ``state``. If it is False,
        missing keys keep their values, and the result has them in ``missing_keys``. A tensor that shares memory with a
        loaded one is not missing. ``ignore_mismatched``: fnmatch patterns of keys of ``state`` that keep their values
        if the checkpoint lacks them or has another shape, dtype or kind (``mismatched_keys``).

        If no tensor would be filled, or if more than a tenth of the tensors have other names in the checkpoint, the
        load raises MissingKey with the ``rename`` that fills them, even without ``strict``. If fewer do, the log has
        their number. ``unread_subtrees`` has the whole containers that no rank read. The log names them once for each
        run, with single unread keys, and with values of other ranks that no rank read. ``unread``: "ignore" turns this
        off. ``rename``: from a key of ``state`` to a key of the checkpoint, as a function, or as a dict from regular
        expression (on the whole key) to replacement. The state of an optimizer object follows the names of its module.
        ``cast``: convert dtypes. ``verify`` (default): compare every cell with its digest. ``allow_pickle``: unpickle
        values that were stored as pickles. ``threads``, ``progress``: as for `save`. ``lease``: rank 0 holds a lease
        during the load. Every rank of ``process_group`` makes the call with its own shards, whatever ranks and shards
        the checkpoint was saved from. ``no_dist``: this process loads alone.

        Raises before anything changes: Conflict if ranks name different references or stores, NotFound, MissingKey,
        Mismatch, InvalidInput. During the read, raises Damaged (with key, blob and checkpoints), Gone (gc purged the
        checkpoint, which a lease prevents) or StorageError. After these errors the contents of ``state`` are undefined.
        """
        is_held = sys.getrefcount(state) > objects.UNHELD
        check_keywords("Store.load", options, LoadArguments)
        loaded = self._load(state, ref, LoadOptions(**options))
        if options.get("unread", "warn") == "warn":
            objects.log_bare_optimizers(state, loaded.missing_keys, is_held=is_held)
        return loaded

    def update(
        self, state: Any, ref: str | Checkpoint, *, held: Checkpoint | None, **options: Unpack[UpdateArguments]
    ) -> Checkpoint:
        """Load into ``state``, which holds the checkpoint ``held`` from a `load` or `update`.

        Read only differing cells. Cells that are equal in both checkpoints stay. A changed cell is computed from the
        cell in memory, with the frames between both versions, if these are smaller than the cell with its bases.
        Otherwise casckpt reads it. casckpt compares the result with the digest, and reads the whole cell if it is
        wrong. It also reads tensors that ``cast`` converts, and cells that ``state`` holds only in part. You must not
        have changed the values that the load of ``held`` filled. Other values (``missing_keys``, ``mismatched_keys``,
        ``unread_keys``) are read. ``check``: also hash the cells in memory, and read the wrong ones. Then ``state`` may
        have any contents. If ``held`` was purged, or is None, all cells are read. Each rank gives its own ``held``. The
        result keeps the decoded frames in host memory for the next update, and ``held`` drops them.

        Other arguments, other leaves, the result and the errors are as in `load`. All bytes that are read are verified.
        After an error during the read, a load or an update with ``check`` fills ``state`` again.
        """
        check_keywords("Store.update", options, UpdateArguments)
        if held is not None and not isinstance(held, Checkpoint):
            raise InvalidInput(f"held={held!r:.80} is not usable; give what load or update returned, or None")
        return self._load(state, ref, LoadOptions(updates=True, held=held, **options))

    def _load(self, state: Any, ref: str | Checkpoint, given: LoadOptions) -> Checkpoint:
        return reading.load(self.repository, self, state, ref, given)

    def read(
        self,
        ref: str | Checkpoint,
        *,
        keys: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        **options: Unpack[ReadArguments],
    ) -> Any:
        """Return the state with its saved nesting, in new tensors on ``device``.

        ``keys``: patterns on flat keys. ``verify``, ``allow_pickle``, ``threads``, ``progress``: as for `load`.
        """
        check_keywords("Store.read", options, ReadArguments)
        return reading.read(self.repository, ref, keys, device, LoadOptions(**options))

    def pre_download(
        self,
        ref: str | Checkpoint,
        state: Any = None,
        *,
        threads: int | None = None,
        progress: Shown | None = None,
        **match: Unpack[MatchArguments],
    ) -> int:
        """Fetch a checkpoint into the cache of this host, for later loads. Return the number of fetched bytes.

        ``state``: fetch only the bytes for a load into it, which are the part of this rank. It does not change.
        ``rename``, ``strict``, ``ignore_mismatched``: as for `load`. Each rank makes its own call. If several ranks of
        a host need the same bytes, one fetches them. Each blob is verified. ``progress`` counts cached bytes.

        Raises NotFound, Damaged (with the blob), StorageError, InvalidInput for a cache that is too small.
        """
        check_keywords("Store.pre_download", match, MatchArguments)
        shown = Progress(progress)
        return reading.pre_download(self.repository, ref, state, threads=threads, progress=shown, match=match)

    def export(self, ref: str | Checkpoint, path: str | os.PathLike[str], **options: Unpack[ExportOptions]) -> Exported:
        """Write a checkpoint for other programs: a folder for ``from_pretrained``, safetensors, DCP or torch.save.

        See `casckpt.export`.
        """
        return exports.exporter()(self, ref, path, **options)

    # looking

    def create(self, **sizes: int) -> bool:
        """Create the store now, with your ``cell_bytes`` and ``blob_bytes``. Return False if it exists already."""
        return self.repository.create(**sizes)

    def exists(self) -> bool:
        """Return whether the store exists. The first save or `create` creates it. Raises StorageError."""
        return self.repository.exists()

    @property
    def marker(self) -> Marker:
        """The constant properties of the store: its id, format and sizes. Raises NotFound if there is no store."""
        return self.repository.marker

    def listing(self) -> Listing:
        """Return all checkpoints and tags at one instant, including forgotten and damaged ones.

        Raises NotFound if there is no store, StorageError.
        """
        return list_store(self.repository)

    def get(self, ref: str | Checkpoint) -> Checkpoint:
        """Return the checkpoint that ``ref`` names. Raises NotFound, InvalidInput.

        A reference is an id (or its first 6 or more hex digits), RUN@STEP, RUN@latest, latest, or tag:NAME.
        """
        return Checkpoint(self.repository, resolve(self.repository, ref))

    def __contains__(self, ref: str | Checkpoint) -> bool:
        try:
            resolve(self.repository, ref)
        except NotFound:  # the checkpoint of the caller may have been purged
            return False
        return True

    def checkpoints(self, run: str | None = None, *, forgotten: bool = False) -> list[Checkpoint]:
        """Return all checkpoints, or those of one run, oldest first.

        ``forgotten``: include forgotten checkpoints, and the old commits of rewrites.
        """
        found = commit_log.list_commits(self.repository)
        chosen = found.standing() if forgotten else found.current()
        return [Checkpoint(self.repository, commit) for commit in chosen if run is None or commit.run == run]

    def runs(self) -> list[str]:
        """Return the names of all runs that have a visible checkpoint, sorted. Raises NotFound if there is no store."""
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
        """Yield each new checkpoint of ``run`` once, after its commit, in the order of announcements.

        ``after``: None for checkpoints that are committed after this call; "start" for all checkpoints; a step or
        another reference to a checkpoint of the run, which may be forgotten or purged, for checkpoints announced after
        it. ``latest_only``: of several new checkpoints, yield only the last saved one, and skip late ones. Rewritten
        and restored checkpoints are not yielded again.

        The watch makes a small request every ``poll`` (0.1s or more), and more for new checkpoints. It ends after
        ``timeout`` without a new checkpoint. The store and the run need not exist yet. If the storage fails, the watch
        warns and retries. A checkpoint may be gone before you load it.

        Raises InvalidInput, NotFound. The iteration raises StorageError if the storage still fails at its end, Damaged,
        Refused.
        """
        return reading.watch(self.repository, run, after, latest_only=latest_only, poll=poll, timeout=timeout)

    def diff(self, old: str | Checkpoint, new: str | Checkpoint) -> Difference:
        """Return the tensors that were added, removed, changed and unchanged. Reads only the manifests."""
        return reading.diff(self.repository, old, new)

    def digests(
        self, ref: str | Checkpoint, *, keys: Sequence[str] | None = None, progress: Shown | None = None
    ) -> dict[str, str]:
        """Return the BLAKE3 hash of each tensor's bytes in row-major order, as 64 hex digits, by key.

        Ranks and shards do not matter. If each rank has its own value, the lowest rank's counts. ``keys``: patterns.
        casckpt reads and verifies the bytes that this host's catalogue does not know. ``progress`` counts them. Thinned
        tensors are left out. Raises MissingKey for a pattern that matches nothing, Damaged, StorageError.
        """
        from casckpt.loading.digests import digests_of

        return digests_of(self.repository, resolve(self.repository, ref), keys, Progress(progress))

    def compare(
        self,
        state: Mapping[Any, Any],
        ref: str | Checkpoint,
        *,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> Comparison:
        """Return the tensors of a live ``state`` that differ from a checkpoint in any bit, with ranks and places.

        Every rank of ``process_group`` makes the call with its own shards, in any topology. ``no_dist``: this process
        compares alone. Each rank hashes all its values, including replicas, and reads only cells that differ or cross
        its shards. The state does not change. Leaves other than tensors, and keys that only the checkpoint has, are
        ignored. Raises NotFound, Damaged, MissingKey for thinned tensors, InvalidInput, StorageError.
        """
        return reading.compare(self.repository, state, ref, process_group, no_dist=no_dist)

    def stats(self) -> StoreStats:
        """Return the numbers of checkpoints and blobs, and their bytes."""
        from casckpt.upkeep.usage import measure

        return measure(self.repository)

    def report(self) -> StoreUsage:
        """Return the bytes of each run, shared or not, and the bytes in blobs that no checkpoint needs."""
        from casckpt.upkeep.usage import usage

        return usage(self.repository)

    def history(self, runs: Collection[str]) -> History:
        """Return the bytes that each visible checkpoint added, with reasons, oldest first, and the known damage.

        Compares the newest manifests of ``runs``. Raises NotFound, StorageError.
        """
        from casckpt.upkeep.history import history

        return history(self.repository, runs)

    def heat(self, added: Sequence[Added]) -> Heat | None:
        """Return the changes of each layer at the checkpoints of a run in a `history`. None if none was compared."""
        from casckpt.upkeep.history import heat

        return heat(self.repository, added)

    def footprint(self, run: str | None = None, *, branches: bool = False, **keep: Unpack[KeepRules]) -> Footprint:
        """Return the bytes that each checkpoint and tag uses, in all and alone.

        Forgotten checkpoints have the time of their earliest purge. ``run``: only of this run. ``branches``: also by
        the first element of the keys, with the part that only deltas need. This reads manifests that are new to this
        host. ``keep_last=2`` and the other rules of `gc`: the bytes that each of them would free as the only rule.
        Raises InvalidInput, NotFound, Damaged, StorageError.
        """
        from casckpt.upkeep.footprint import footprint

        check_keywords("Store.footprint", keep, KeepRules)
        return footprint(self.repository, run=run, branches=branches, policy=Policy(**keep))

    def attachments(self, ref: str | Checkpoint) -> dict[str, int]:
        """Return the names of the attachments, and their sizes in bytes."""
        return reading.attachments(self.repository, ref)

    def read_attachment(self, ref: str | Checkpoint, name: str) -> bytes:
        """Return the contents of an attachment. Raises NotFound."""
        return reading.read_attachment(self.repository, ref, name)

    # keeping and removing

    def tag(self, name: str, ref: str | Checkpoint, *, expires: Duration | None = None) -> None:
        """Set the tag ``name`` on a checkpoint, so that every policy keeps it. Restore it if it is forgotten.

        ``expires``: the lifetime of the tag ("12h", a timedelta). Such a tag does not restore, and raises NotFound for
        a forgotten checkpoint. Raises Gone if it was purged, Conflict if another process is purging it.
        """
        if isinstance(ref, str) and is_reference(name) and not is_reference(ref):
            raise InvalidInput(f"the name of a tag comes first, then the checkpoint: tag({ref!r}, {name!r})")
        if expires is None:
            tags.set_tag(self.repository, name, resolve(self.repository, ref))
        else:
            hold(self.repository, name, resolve(self.repository, ref), seconds_of(expires, "expires"))

    @contextmanager
    def lease(self, ref: str | Checkpoint, *, expires: Duration = "1h") -> Iterator[Checkpoint]:
        """Hold a checkpoint for a block: gc keeps all its objects, even if it is forgotten meanwhile.

        A lease is a tag with a name of its own that ends ``expires`` from now. A thread renews it until the block ends.
        After a kill it expires. casckpt logs and retries a failed renewal, and logs a lost lease as an error. Raises
        NotFound if the checkpoint is not visible.
        """
        with lease(self.repository, ref, seconds_of(expires, "expires")) as held:
            yield Checkpoint(self.repository, held.commit)

    def tags(self) -> dict[str, Checkpoint]:
        """Return all tags and their checkpoints, without tags whose records are damaged."""
        listing = self.listing()
        for name in listing.damaged_tags:
            log.warning("the record of tag %s cannot be read: set the tag again, or delete it", name)
        return {name: tag.checkpoint for name, tag in listing.tags.items()}

    def untag(self, name: str) -> None:
        """Remove a tag. Raises NotFound."""
        tags.delete_tag(self.repository, name)

    def sign(
        self, *named: str | Checkpoint, key: KeyFile | Ed25519PrivateKey, password: bytes | None = None
    ) -> list[Checkpoint]:
        """Sign checkpoints or ranges of steps: store a signature of each id. Copies include the signatures.

        ``key``: a file with an Ed25519 key as OpenSSL or ssh-keygen writes it, or a key of the package cryptography.
        ``password``: of the file. Sign the result of a save of this process, because its id was computed from your
        memory. For another checkpoint, `verify` shows that the store has the content of the id, but not its origin.
        Raises NotFound, InvalidInput, Damaged, StorageError; Unsupported without that package.
        """
        from casckpt.contents.signatures import sign

        signer = private_key(key, password) if isinstance(key, str | os.PathLike) else key
        chosen = refs.resolve_many(self.repository, map(plain, named))
        for commit in chosen:
            sign(self.repository, commit, signer)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def forget(self, *refs: str | Checkpoint, tagged: bool = False, dry_run: bool = False) -> list[Checkpoint]:
        """Hide checkpoints or ranges of steps until you restore them or gc purges them.

        ``tagged``: allow tagged checkpoints, and delete their tags. Expiring tags stay, and gc respects them. Without
        it, a tagged checkpoint raises Conflict, and no checkpoint is forgotten. ``dry_run``: only return the
        checkpoints. Raises NotFound, InvalidInput, Conflict.
        """
        from casckpt.upkeep.gc.forgetting import forget, plan_forget

        chosen = plan_forget(self.repository, map(plain, refs), tagged=tagged)
        if not dry_run:
            chosen = forget(self.repository, chosen)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def forget_now(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Forget and purge checkpoints without gc, and return the forgotten ones. The next gc frees the space.

        Tagged checkpoints, and those that are not yet safe in the mirror, stay. If the store has a minimum age, gc
        purges. Raises StorageError.
        """
        from casckpt.upkeep.gc.purge import forget_and_purge

        forgotten = forget_and_purge(self.repository, [one.commit for one in checkpoints])
        return [Checkpoint(self.repository, commit) for commit in forgotten]

    def rotate(self, run: str, rotation: Rotation) -> list[Checkpoint]:
        """Forget and purge the checkpoints of ``run`` that ``rotation`` does not keep, as `forget_now` does.

        One process makes the call. Raises Damaged or Refused if a tag cannot be read, StorageError.
        """
        from casckpt.upkeep.gc.rotation import rotate

        return [Checkpoint(self.repository, commit) for commit in rotate(self.repository, run, rotation)]

    def thin_now(self, run: str, rule: Thinning | None) -> list[Checkpoint]:
        """Thin the checkpoints of ``run`` by ``rule``, and purge their old commits as `forget_now` does.

        Skips damaged checkpoints. Raises the errors of `rotate`.
        """
        from casckpt.upkeep.gc.rotation import thin

        return [Checkpoint(self.repository, commit) for commit in thin(self.repository, run, rule)]

    def thin(
        self,
        *refs: str | Checkpoint,
        drop: str | Sequence[str],
        run: str | None = None,
        tagged: bool = False,
        dry_run: bool = False,
        **keep: Unpack[KeepRules],
    ) -> ThinResult:
        """Drop tensors, such as those of an optimizer, from checkpoints. Keep the other tensors and the id.

        ``drop``: fnmatch patterns on flat keys of tensors. ``refs``: checkpoints or ranges of steps. Without them: all
        checkpoints, or those of ``run``, except those that ``keep_last=2`` or another rule of `gc` keeps whole, the
        newest of a run, and tagged ones unless ``tagged``. Thinning moves no tensor bytes. gc purges the old commits
        and frees the space. Until then `restore` of these (`checkpoints` with ``forgotten``) brings all tensors back.

        Raises InvalidInput, NotFound, MissingKey if no pattern matches, Conflict if one of ``refs`` is tagged,
        StorageError. If a damaged checkpoint cannot be thinned, the others are, and then its error is raised.
        """
        from casckpt.upkeep.gc.purge import check_metrics
        from casckpt.upkeep.thin import check, plan_thin, thin

        check_keywords("Store.thin", keep, KeepRules)
        policy = Policy(**keep)
        check_metrics(self.repository, policy, run)
        plan = plan_thin(self.repository, map(plain, refs), drop=drop, keep=policy, run=run, tagged=tagged)
        result = thin(self.repository, plan, dry_run=dry_run)
        check(plan)
        return result

    def restore(self, ref: str | Checkpoint, *, whole: bool = False) -> Checkpoint:
        """Make a forgotten checkpoint visible again. Raises Conflict if it was purged, or if a twin of it is visible.

        ``ref``: an id, a `Checkpoint`, or RUN@STEP unless several were forgotten there. A checkpoint that `checkpoints`
        shows as ``replaced`` takes the place of its rewrite, while it lives. ``whole``: bring back the tensors that
        `thin` dropped. Raises NotFound if gc has purged them.
        """
        if refs.is_range(ref):
            raise InvalidInput(f"{ref!r} does not name one checkpoint; restore_many takes ranges")
        (restored,) = self.restore_many(ref, whole=whole).restored
        return Checkpoint(self.repository, restored)

    def restore_many(
        self, *named: str | Checkpoint, whole: bool = False, dry_run: bool = False, check: bool = True
    ) -> RestoreResult:
        """Restore checkpoints, or the forgotten ones of ranges of steps, as `restore` does.

        A range skips steps at which a checkpoint is visible. If one checkpoint cannot be restored, none is. ``whole``:
        of a range, the thinned checkpoints. ``dry_run``: only return the checkpoints. ``check``: raise the errors of
        single checkpoints once the others are restored; without it, ``failed`` of the result has them. Raises NotFound,
        InvalidInput, Conflict, StorageError.
        """
        from casckpt.upkeep.gc.forgetting import RestoreResult, plan_restore, restore

        plan = plan_restore(self.repository, map(plain, named), whole=whole)
        if dry_run:
            return RestoreResult(plan.chosen, dry_run=True)
        result = restore(self.repository, plan)
        if check:
            result.raise_failure()
        return result

    def gc(
        self,
        *,
        thin: Mapping[str, Any] | None = None,
        run: str | None = None,
        min_age: Duration | None = None,
        wait: Duration = WAIT,
        revoke_after: Duration | None = None,
        dry_run: bool = False,
        progress: Shown | None = None,
        tell: Tell | None = None,
        **keep: Unpack[KeepRules],
    ) -> GcResult:
        """Forget checkpoints by a policy, purge forgotten ones, and delete unneeded objects. Safe at any time.

        ``keep_last``, ``keep_every`` (step % N == 0), ``keep_within``, ``keep_daily``, ``keep_weekly``,
        ``keep_monthly``, ``keep_best`` ("loss:3", "acc:max:1"): the policy. In each run, it keeps every checkpoint that
        any rule keeps (see `Policy`). Without a rule gc forgets nothing. The newest of a run, the newest that is not
        unhealthy, and tagged checkpoints always stay. ``thin``: tensors to drop from the other checkpoints, as
        ``{"drop": ["optim.*"], "keep_last": 2}``. ``run``: only this run.

        Durations are a timedelta or text with a unit ("7d", "90s"); 0 needs none. ``min_age``: time between forgetting
        and purge. Until then `restore` brings a checkpoint back (default: the setting of the store, else 24 h, and 15
        minutes for ephemeral ones). ``wait``: total time to wait for saves in progress. The next gc continues from
        there. ``revoke_after``: time without a sign of life after which gc revokes a save (default: the setting of the
        store, else 1 h). ``progress``: called with the number of deleted objects and the total. ``tell``: called with
        the saves that gc waits for.

        Raises Damaged if a live checkpoint cannot be read. Then gc forgets and deletes nothing. Raises InvalidInput,
        also for a metric that no checkpoint has; MissingKey if ``thin`` matches no key of the chosen checkpoints;
        StorageError. Every error, even an interrupt, has a `GcResult` as ``done``, with the checkpoints that were
        forgotten, purged, restored and thinned before the error, or with ``dry_run`` with the plan.
        """
        from casckpt.upkeep.gc.gc import collect

        check_keywords("Store.gc", keep, KeepRules)
        return collect(
            self.repository,
            Policy(**keep),
            thin=thinning_of(thin),
            run=run,
            min_age=_optional(min_age, "min-age"),
            dry_run=dry_run,
            wait=seconds_of(wait, "wait"),
            revoke_after=_optional(revoke_after, "revoke-after"),
            progress=Progress(progress),
            tell=tell or (lambda waiting: None),
        )

    @property
    def settings(self) -> StoreSettings:
        """The settings of the store, read each time. Raises NotFound if there is no store."""
        return settings_from(self.repository.settings)

    def change_settings(self, **changes: Unpack[SettingChanges]) -> StoreSettings:
        """Change settings for all later users of the store. None unsets one.

        Durations are a timedelta or text with a unit ("7d", "90s"). `StoreSettings` has the names. Raises InvalidInput,
        which names the setting; NotFound where there is no store; StorageError.
        """
        if (mirror := changes.get("mirror")) is not None:
            changes["mirror"] = repository_of(mirror, None).storage.url
        return change_settings(self.repository, changes)

    def transactions(self) -> list[SaveInProgress]:
        """Return the saves in progress, oldest first. Raises NotFound if there is no store."""
        from casckpt.upkeep.saves import saves_in_progress

        return saves_in_progress(self.repository)

    def revoke(self, txid: str) -> None:
        """End a save in progress, so that it never becomes visible. Raises NotFound, Conflict if it has ended."""
        from casckpt.upkeep.saves import revoke_save

        revoke_save(self.repository, TxId(txid))

    def give_up(self, txid: str) -> None:
        """End a transaction whose record is lost or unreadable, which stops every gc. Raises NotFound, Conflict."""
        from casckpt.upkeep.saves import give_up

        give_up(self.repository, TxId(txid))

    # checking and copying

    def doctor(self) -> Iterator[Finding]:
        """Check whether the storage is safe for a store, and yield each finding. Needs no store there."""
        from casckpt.upkeep.doctor import examine

        return examine(self.repository)

    def reindex(self) -> int:
        """Rebuild this host's catalogue of the store. Return the number of checkpoints in it. Raises StorageError."""
        from casckpt.contents.manifests import reindex

        return reindex(self.repository)

    def verify(
        self,
        *refs: str | Checkpoint,
        mode: Mode = "full",
        sample: float = 1.0,
        decode: bool = False,
        progress: Shown | None = None,
    ) -> VerifyResult:
        """Check all objects of live checkpoints, or of ``refs``. Mark damaged blobs in the store.

        ``mode``: "full" reads every blob and compares its hash, "exists" checks presence and size. ``sample``: the
        fraction of the blobs to check, drawn at random. ``decode``: also decode encoded cells and compare them.
        ``progress`` is called with the bytes read so far and in all. The result lists the damage. Raises NotFound,
        InvalidInput, StorageError.
        """
        from casckpt.upkeep.repair.verify import verify

        chosen, shown = [plain(ref) for ref in refs] or None, Progress(progress)
        return verify(self.repository, refs=chosen, mode=mode, sample=sample, decode=decode, progress=shown)

    def repair(self, *sources: Store | str | os.PathLike[str], progress: Shown | None = None) -> RepairResult:
        """Restore missing blobs, and blobs that `verify` or a save found damaged.

        The bytes come from other copies in this store or in ``sources``. casckpt only reads ``sources``. ``progress``
        is called with the bytes put back. The result lists what cannot be repaired. Raises NotFound, StorageError.
        """
        from casckpt.upkeep.repair.repair import repair

        others = [repository_of(one, self.repository.cache_dir) for one in sources]
        return repair(self.repository, sources=others, progress=Progress(progress))

    def copy_to(
        self,
        target: Store | str | os.PathLike[str],
        *refs: str | Checkpoint,
        run: str | None = None,
        tags: bool = False,
        jobs: int | None = None,
        part: tuple[int, int] = (0, 1),
        blob_bytes: int | None = None,
        compress: Literal["off", "always"] | None = None,
        dry_run: bool = False,
        check: bool = True,
        progress: Shown | None = None,
    ) -> CopyResult:
        """Copy the checkpoints of ``refs`` (ranges of steps too), or all visible ones, into another store.

        Transfers only the bytes that ``target`` lacks. Copies keep ids, times and order. Each copy is verified during
        the transfer, and becomes visible in ``target`` when it is complete and durable. If ``target`` does not exist,
        it is created with the cell and blob size of this store. Forgotten checkpoints of ``target`` stay forgotten,
        unless you name them. ``run``: only of this run. ``tags``: also set the tags there. ``jobs``: number of files to
        copy at once. ``part``: (rank, number of ranks), if several processes share the work. ``blob_bytes``: repack
        into blobs of this size (deltas keep their blobs); then ``target`` may be this store, whose small and worn blobs
        are packed together. ``compress``: "always" encodes floats, except in checkpoints that already have encoded
        cells; "off" and None change no encoding. ``check``: raise the errors after all other checkpoints are copied.
        Without it, the result has them as ``failed``. ``progress``: called with the bytes that ``target`` has so far.

        Raises Damaged (with blob and keys), Gone, Refused, or Conflict if ``target`` has another checkpoint of the run
        and step. Such a checkpoint is not visible there, and all others are copied. NotFound, StorageError.
        """
        from casckpt.upkeep.copies import copy as copying

        if compress not in {None, "off", "always"}:
            raise InvalidInput(f"compress={compress!r} is not usable in a copy; give 'always' or 'off'")
        source, other = self.repository, repository_of(target, self.repository.cache_dir)
        packs = compress == "always"
        plan = copying.plan_copy(source, other, map(plain, refs), run=run, blob_bytes=blob_bytes, compress=packs)
        if dry_run:
            return copying.preview(source, other, plan)
        shown = Progress(progress)
        result = copying.execute(source, other, plan, with_tags=tags, jobs=jobs, part=part, progress=shown)
        if check:
            result.raise_failure()
        return result

    def mirror_lag(self) -> MirrorLag:
        """Return the lag of the mirror: pending checkpoints and bytes, and the age of the oldest.

        Raises InvalidInput for a store that was opened without a mirror, StorageError.
        """
        return self._its_mirror().lag()

    def wait_for_mirror(self, timeout: float | None = None) -> None:
        """Wait until all present commits are safe in the mirror, for example before a program ends.

        If the program ends earlier, the next opening of the store with its mirror continues. After one more attempt,
        raises the error of the copy (StorageError, Damaged, ...). Raises StorageError after ``timeout`` seconds.
        """
        self._its_mirror().wait(timeout)

    def _its_mirror(self) -> Mirror:
        if self._mirror is None:
            raise InvalidInput(f"{self.url} was opened without a mirror: give casckpt.open(..., mirror=URL)")
        return self._mirror


def _new_saver(repository: Repository) -> Saver:
    from casckpt.saving.saver import Saver

    return Saver(repository, objects.without_objects)


def _optional(duration: Duration | None, what: str) -> float | None:
    return None if duration is None else seconds_of(duration, what)


def repository_of(store: Store | str | os.PathLike[str], cache_dir: Path | None) -> Repository:
    """Return the repository of an open store, or of a path or URL. Raises InvalidInput or Unsupported for a bad URL."""
    return store.repository if isinstance(store, Store) else open_repository(store, cache_dir=cache_dir)
