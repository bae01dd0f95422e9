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
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from casckpt.base.durations import Duration, seconds_of
from casckpt.base.keywords import check_keywords
from casckpt.base.progress import Progress, Shown
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
from casckpt.repository.blob_cache import AT_ONCE as PREFETCHING
from casckpt.repository.opening import open_repository
from casckpt.repository.repository import Repository
from casckpt.repository.signing_keys import KeyFile, private_key
from casckpt.saving.options import SaveArguments, SaveOptions, WhenBusy, usable_compress
from casckpt.storage.base import Finding
from casckpt.storage.forking import PerProcess
from casckpt.store import exports, objects
from casckpt.store.exports import Exported, ExportOptions
from casckpt.store.listing import Listing, list_store
from casckpt.store.references import lease, plain, resolve, resolve_held, resolve_to_load
from casckpt.store.settings import SettingChanges, StoreSettings, check_names, duration_fields, settings_from

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from torch.distributed import ProcessGroup

    from casckpt.loading.comparison import Comparison
    from casckpt.plan.difference import Difference
    from casckpt.ranks.ranks import Ranks
    from casckpt.saving.saver import Saver, State
    from casckpt.upkeep.copies.copy import CopyResult
    from casckpt.upkeep.copies.mirror import Mirror
    from casckpt.upkeep.copies.mirror_notes import MirrorLag
    from casckpt.upkeep.footprint import Footprint
    from casckpt.upkeep.gc.gc import GcResult, Tell
    from casckpt.upkeep.gc.restoring import RestoreResult
    from casckpt.upkeep.history import Added, Heat, History
    from casckpt.upkeep.repair.repair import RepairResult
    from casckpt.upkeep.repair.verify import Mode, VerifyResult
    from casckpt.upkeep.saves import SaveInProgress
    from casckpt.upkeep.thin import ThinResult
    from casckpt.upkeep.usage import StoreStats, StoreUsage

WAIT: Duration = "60s"  # of a gc for saves in progress
_MOST_OFTEN = 0.1  # seconds between two polls of a watch

log = logging.getLogger(__name__)


class Store:
    """Checkpoints of any number of runs, in one folder or bucket. Made by `casckpt.open`; safe for use by threads."""

    def __init__(self, repository: Repository, mirror: Repository | None = None) -> None:
        if not isinstance(repository, Repository):
            raise InvalidInput(f"a store is opened with casckpt.open({repository!r}), not made with casckpt.Store")
        self.repository = repository
        self._saver = PerProcess(partial(_new_saver, repository))  # a forked child has no thread of the parent's
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
        """Where it is, without credentials."""
        return self.repository.storage.url

    @property
    def is_remote(self) -> bool:
        """Whether it lies in a bucket or on a server, where each request takes long."""
        return self.repository.storage.traits.remote

    def __repr__(self) -> str:
        return f"casckpt.open({self.url!r})"

    def _repr_html_(self) -> str:
        return html_of(self.url, self.checkpoints() if self.exists() else [])

    # saving and loading

    def save(self, state: State, *, run: str = "default", step: int, **options: Unpack[SaveArguments]) -> Checkpoint:
        """Save ``state``, a nested mapping of tensors, plain data and objects. Return once it is durable and visible.

        Objects are modules, stored by plain names; optimizers, by the names of the module in ``state`` that has their
        parameters; and anything else with a state_dict, which every rank calls in the sorted order of keys. ``state``
        may be a function that makes it. Then its errors reach all ranks.

        Every rank of ``process_group`` (default: all, where torch.distributed is initialised) makes the call with its
        own state: shards (DTensor, `casckpt.Shard`), replicas that it shares with others, keys that only it has.
        ``no_dist``: this process saves alone.

        ``metadata``: JSON-able, shown in listings; of paths the text. ``metrics``: up to 64 numbers by name, in the
        commit record. Both take scalars of numpy and tensors of no dimensions, on any device, such as a loss.
        ``healthy``: True or False, your word on whether a training should go on from it. ``health``: count NaN and
        infinities, and find the largest value, of each tensor, in the cells that changed; of the others the parent has
        told. Where any is NaN, on whichever rank, and you gave no word, the checkpoint is not healthy. ``attachments``:
        files by name that travel along (rank 0's count). ``overwrite``: commit, then forget what was saved under this
        run and step before. ``ephemeral``: retention may count it apart, and a gc purges it sooner. ``frozen``: tensors
        that did not change since the run's last checkpoint, as patterns on flat keys or a function of a key. It is the
        caller's promise: only a sample of their cells is looked at, and the manifest says so. ``dedup``: "store": reuse
        cells of the whole store; "run": of this run only. ``compress``: store what changed of a tensor instead of the
        tensor, where that is less: "auto": of bfloat16 and float16, and where the storage is slow encode others too;
        "always": of all floats, and encode what is new; "off". Default: what the store's settings say, else "off". It
        takes host memory for a copy of those tensors. ``check_replicas``: of what several ranks hold whole. "sample"
        (the default): compare samples, and refuse a parameter, or its optimizer's state, that differs by a tenth or
        more the first time that this process saves it; of what differs otherwise save the value of the lowest rank,
        with a warning. "raise": compare all, and refuse any difference. "off": compare nothing, and save the value of
        the lowest rank. ``owners``: from a flat key to the rank that alone maintains that leaf, and saves it; None for
        what all ranks that have it hold alike. A load gives it to each rank that asks for it. ``allow_pickle``: pickle
        the leaves that are neither tensors nor plain data. ``threads``: that hash and write (default: 2 to 8, as there
        are cores). ``progress``: called with the bytes that are done, and all that are to be.

        Raises Conflict if the step exists, InvalidInput (naming key and rank) for what cannot be stored, StorageError,
        RankFailed; on every rank alike. After an error nothing of the save is visible.
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
        """Like `save`, but returns once ``state`` has been copied; it may change from then on.

        Saves of one store run one after the other, and there is memory for one copy. While one runs, a second call
        waits for its end (``when_busy="wait"``), or raises Conflict on every rank if one runs on any ("refuse").

        It raises what `save` raises for its arguments and for what cannot be stored, on every rank alike, before
        anything is copied. The future raises what fails later. If nobody asks the future, the next call raises the
        error, once.
        """
        check_keywords("Store.save_async", options, SaveArguments)
        return self._saver.get().save_async(state, SaveOptions(run=run, step=step, **options), when_busy)

    def check(self, state: State, *, run: str = "default", **options: Unpack[SaveArguments]) -> None:
        """Raise what `save` would raise for this state and these options before it writes anything. Write nothing.

        Every rank makes the call. Raises InvalidInput, on every rank alike.
        """
        check_keywords("Store.check", options, SaveArguments)
        self._saver.get().check(state, SaveOptions(run=run, step=0, **options))

    def warm_up(self, state: State, *, process_group: ProcessGroup | None = None, no_dist: bool = False) -> None:
        """Prepare for `save_async` of such a state: allocate the memory for its copy, and connect the ranks.

        Without it the first call of `save_async` does that. Every rank makes the call. Raises InvalidInput as `save`.
        """
        options = SaveOptions(step=0, allow_pickle=True, process_group=process_group, no_dist=no_dist)
        self._saver.get().warm_up(state, options)

    def load(self, state: Any, ref: str | Checkpoint, **options: Unpack[LoadArguments]) -> Checkpoint:
        """Load into ``state``: its tensors are filled in place, its other leaves replaced. Keys it lacks are not read.

        Objects, as `save` takes them, are loaded as wholes: modules and optimizers, fresh ones too, then the others,
        random generators last. The empty ``state`` of a fresh optimizer's state_dict is filled, with new tensors;
        `load_state_dict` then hands them over; a warning tells where nobody has it to do so. ``strict`` (the default):
        every key of ``state`` must be in the checkpoint; else those that are not are left as they are and stand in
        ``missing_keys`` of what is returned. A tensor that shares its memory with one that is loaded is not missing.
        ``ignore_mismatched``: fnmatch patterns of keys of ``state`` that are left as they are where the checkpoint
        lacks them or holds another shape, dtype or kind (``mismatched_keys``).

        A load that would fill no tensor, or more than a tenth of whose tensors stand in the checkpoint under other
        names, raises MissingKey with the ``rename`` that fills them, whatever ``strict`` is. If fewer are left, the log
        says how many were filled. Whole containers of which no rank read anything are in ``unread_subtrees``, and told
        of in the log, once of a run, as are single keys of a container that was read, and values per rank that other
        ranks take, or none; ``unread``: "ignore" says that all this is meant ("warn" is the default). ``rename``: from
        a key of ``state`` to one of the checkpoint, a callable or a dict from regular expression (matched against the
        whole key) to replacement; the state of an optimizer among the objects goes with its module's names. ``cast``:
        convert dtypes. ``verify`` (unless False): compare every cell read with its digest. ``allow_pickle``: unpickle
        what only a pickle could hold. ``threads``, ``progress``: as for `save`. ``lease``: rank 0 holds the checkpoint
        meanwhile, as `lease` does. Every rank of ``process_group`` makes the call, with its own shards, whatever ranks
        and shards it was saved from; ``no_dist``: this process loads alone.

        Raises Conflict if ranks give different references, or stores; NotFound, MissingKey, Mismatch or InvalidInput;
        all before anything changes. Damaged (naming key, blob and checkpoints), Gone (a gc purged it meanwhile, which a
        lease prevents) or StorageError during the read, after which the contents of ``state`` are undefined.
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
        """Load into ``state``, which holds the checkpoint ``held`` from a `load` or `update`, and read what differs.

        A cell that is equal in both is left as it is. One that changed is made of what is there, by the frames that
        lead from one version to the other, forward or back, where these are less than the cell with its bases; else it
        is read. It is compared with its digest, and read whole where that does not fit. So is what cannot be compared:
        of tensors that ``cast`` converts, or of which ``state`` holds a part of a cell only. What came of the load of
        ``held`` must still be there; what that load did not fill (its ``missing_keys``, ``mismatched_keys`` and
        ``unread_keys``) is read. ``check``: hash what is held, too, and read what does not fit; then it may be
        anything. ``held`` may be forgotten since, or purged, and then all is read; None reads all. Each rank gives its
        own. What is returned keeps the frames that were decoded, in host memory, for the next update, and ``held`` no
        longer does.

        The other arguments, what is done for leaves that are no tensors, what is returned, and the errors are those of
        `load`; all that is read is verified. After an error during the read the contents of ``state`` are undefined,
        and a load of all of it, or an update with ``check``, mends it.
        """
        check_keywords("Store.update", options, UpdateArguments)
        if held is not None and not isinstance(held, Checkpoint):
            raise InvalidInput(f"held={held!r:.80} is not usable; give what load or update returned, or None")
        return self._load(state, ref, LoadOptions(updates=True, held=held, **options))

    def _load(self, state: Any, ref: str | Checkpoint, given: LoadOptions) -> Checkpoint:
        from casckpt.ranks.ranks import open_ranks
        from casckpt.tensors.state import holds_object

        ranks = open_ranks(given.process_group, no_dist=given.no_dist)
        load = partial(self._load_tensors, ranks)
        if not holds_object(state):
            return load(state, ref, given)
        loaded: Checkpoint = objects.home().load_objects(self, ranks, state, ref, given=given, load=load)
        return loaded

    def _load_tensors(self, ranks: Ranks, state: Any, ref: str | Checkpoint, given: LoadOptions) -> Checkpoint:
        from casckpt.loading.load import load_together

        with ExitStack() as held:
            find = partial(resolve_held, held=held) if given.lease else resolve_to_load
            loaded = load_together(
                self.repository, ranks, state, ref, given, resolve=partial(find, self.repository, ref)
            )
        return Checkpoint(
            self.repository, loaded.commit, missing_keys=loaded.missing, unread_keys=loaded.unread,
            mismatched_keys=loaded.mismatched, unread_subtrees=tuple(key for key in loaded.subtrees if key),
            frames=loaded.frames,
        )  # fmt: skip

    def read(
        self,
        ref: str | Checkpoint,
        *,
        keys: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        **options: Unpack[ReadArguments],
    ) -> Any:
        """Return the state, nested as it was saved, in new tensors on ``device``. ``keys``: patterns on flat keys.

        ``verify``, ``allow_pickle``, ``threads``, ``progress``: as for `load`.
        """
        from casckpt.loading.arguments import usable_device
        from casckpt.loading.load import read

        check_keywords("Store.read", options, ReadArguments)
        given, on = LoadOptions(**options), usable_device(device)
        return read(
            self.repository, resolve_to_load(self.repository, ref), keys=keys, device=on, options=given.checked()
        )

    def pre_download(
        self,
        ref: str | Checkpoint,
        state: Any = None,
        *,
        threads: int | None = None,
        progress: Shown | None = None,
        **match: Unpack[MatchArguments],
    ) -> int:
        """Fetch what a checkpoint needs into the cache of this host, where loads find it. Return the bytes fetched.

        With ``state``: only what a load into it needs, which is the part of this rank. It is not changed. ``rename``,
        ``strict``, ``ignore_mismatched``: as for `load`. Each rank calls it by itself. If several ranks of a host want
        the same, one of them fetches it. What is fetched is compared with its hash. ``progress`` is called with the
        bytes that are here.

        Raises NotFound, Damaged (naming the blob), InvalidInput if the cache may not hold so much (``cache_bytes`` of
        `open`), StorageError.
        """
        from casckpt.contents.prefetching import pre_download
        from casckpt.contents.signatures import get_trusted

        commit, shown = resolve_to_load(self.repository, ref), Progress(progress)
        manifest = get_trusted(self.repository, commit)
        wanted = list(manifest.blobs)
        if match or state is not None:
            from casckpt.loading.load import wanted_blobs

            check_keywords("Store.pre_download", match, MatchArguments)
            given = LoadOptions(cast=True, allow_pickle=True, threads=threads, **match)
            wanted = wanted if state is None else wanted_blobs(self.repository, manifest, state, given.checked())
        return pre_download(self.repository, commit, wanted, threads=threads or PREFETCHING, progress=shown)

    def export(self, ref: str | Checkpoint, path: str | os.PathLike[str], **options: Unpack[ExportOptions]) -> Exported:
        """Write a checkpoint for other programs: a folder for ``from_pretrained``, safetensors, DCP or torch.save.

        See `casckpt.export`.
        """
        return exports.exporter()(self, ref, path, **options)

    # looking

    def create(self, **sizes: int) -> bool:
        """Make the store now, with your own ``cell_bytes`` and ``blob_bytes``. Return False if it exists already."""
        return self.repository.create(**sizes)

    def exists(self) -> bool:
        """Return whether there is a store, which the first save or `create` makes. Raises StorageError."""
        return self.repository.exists()

    @property
    def marker(self) -> Marker:
        """What never changes of the store: its id, format and sizes. Raises NotFound if there is no store."""
        return self.repository.marker

    def listing(self) -> Listing:
        """Return all checkpoints and tags at one instant, with what the store has forgotten, and what is damaged.

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
        except NotFound:  # a checkpoint that is held may have been purged
            return False
        return True

    def checkpoints(self, run: str | None = None, *, forgotten: bool = False) -> list[Checkpoint]:
        """Return all checkpoints, oldest first, or those of one run. ``forgotten``: also those, and old places."""
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
        """Yield new checkpoints of ``run``, each once and never before its commit, in the order of their announcements.

        ``after``: None for what is committed once this has returned; "start" for all there are; a step or another
        reference to one of the run, even if it was forgotten or purged since, for those announced behind it.
        ``latest_only``: of several new ones only the one saved last, and none that is late. A rewritten or restored
        checkpoint does not come again.

        It asks every ``poll`` (0.1s or more): one small request, and more only for what is new. It ends once nothing
        new has come for ``timeout``. Neither the store nor the run has to exist yet. If the storage fails, it logs a
        warning and asks again. It holds nothing: a checkpoint may be gone before you load it.

        Raises InvalidInput, NotFound for a reference to nothing, StorageError. The iteration raises StorageError if the
        storage still fails at its end, and Damaged or Refused for a store that cannot be read.
        """
        from casckpt.contents import watching

        seconds, limit = seconds_of(poll, "poll"), _optional(timeout, "timeout")
        if seconds < _MOST_OFTEN:
            raise InvalidInput(f"poll: {poll!r} is too often; give 0.1s or more")
        behind = f"{run}@{after}" if isinstance(after, int) else None if after is None else plain(after)
        watcher = watching.Watcher(self.repository, run, behind, latest_only=latest_only)
        arrivals = watching.watch(watcher, poll=seconds, timeout=limit)
        return (Arrival(Checkpoint(self.repository, one.commit), one.late) for one in arrivals)

    def diff(self, old: str | Checkpoint, new: str | Checkpoint) -> Difference:
        """Return which tensors were added, removed, changed, and left as they were. It reads only the manifests."""
        from casckpt.contents import manifests
        from casckpt.plan.difference import difference

        before, after = (manifests.get(self.repository, resolve(self.repository, ref)) for ref in (old, new))
        for manifest in (before, after):
            manifest.ready(objects=())
        return difference(before, after)

    def digests(
        self, ref: str | Checkpoint, *, keys: Sequence[str] | None = None, progress: Shown | None = None
    ) -> dict[str, str]:
        """Return the BLAKE3 of each tensor's bytes in row-major order, 64 hex digits, by key. ``keys``: patterns.

        It does not depend on how the tensor was saved, by how many ranks, in which shards. Of a value that each rank
        has for itself, it is that of the lowest rank. What this host's catalogue does not know is read and verified,
        and ``progress`` counts that. What was thinned away by then is left out. Raises MissingKey for a pattern that
        matches nothing, Damaged, StorageError.
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
        """Return which tensors of a live ``state`` differ from a checkpoint in any bit, on which ranks, and where.

        Every rank of ``process_group`` makes the call with its own shards, whatever topology the checkpoint was saved
        under. ``no_dist``: this process alone. Each rank hashes everything that it holds, including replicas, and reads
        only what differs or lies across its shards. Nothing changes. It does not look at leaves other than tensors, or
        at what only the checkpoint has. Raises NotFound, Damaged, MissingKey for what was thinned away, InvalidInput,
        StorageError.
        """
        from casckpt.loading.comparison import compare_together
        from casckpt.ranks.ranks import open_ranks

        ranks = open_ranks(process_group, no_dist=no_dist)
        made: Any = objects.without_objects(ranks, state, SaveOptions(step=0))[0]
        return compare_together(self.repository, ranks, made, ref, lambda: resolve(self.repository, ref))

    def stats(self) -> StoreStats:
        """Return how many checkpoints and blobs there are, and their bytes."""
        from casckpt.upkeep.usage import measure

        return measure(self.repository)

    def report(self) -> StoreUsage:
        """Return where the bytes are: those of each run, shared or not, and those that no checkpoint needs."""
        from casckpt.upkeep.usage import usage

        return usage(self.repository)

    def history(self, runs: Collection[str]) -> History:
        """Return what each visible checkpoint added and why, oldest first, and the damage that is known.

        It compares the manifests of the newest checkpoints of ``runs``. Raises NotFound, StorageError.
        """
        from casckpt.upkeep.history import history

        return history(self.repository, runs)

    def heat(self, added: Sequence[Added]) -> Heat | None:
        """Return which layers changed when, for checkpoints of one run in a `history`; None if none was compared."""
        from casckpt.upkeep.history import heat

        return heat(self.repository, added)

    def footprint(self, run: str | None = None, *, branches: bool = False, **keep: Unpack[KeepRules]) -> Footprint:
        """Return what holds the bytes: each checkpoint and tag, used and alone, and what is forgotten until when.

        ``run``: only of this run. ``branches``: also by the first element of the keys, and what only deltas need of
        that; this reads the manifests that this host has not looked at yet. ``keep_last=2`` and the other rules of
        `gc`: what each of them would free if it were the only one. Raises InvalidInput, NotFound, Damaged,
        StorageError.
        """
        from casckpt.upkeep.footprint import footprint

        check_keywords("Store.footprint", keep, KeepRules)
        return footprint(self.repository, run=run, branches=branches, policy=Policy(**keep))

    def attachments(self, ref: str | Checkpoint) -> dict[str, int]:
        """Return the names of the attachments, and their sizes in bytes."""
        from casckpt.contents import manifests
        from casckpt.format.sections.index import ATTACHMENT

        manifest = manifests.get(self.repository, resolve(self.repository, ref))
        short = {one.key: manifest.size(one) for one in manifest.body.attachments}
        return short | {entry.key: entry.nbytes for entry in manifest.entries if entry.kind == ATTACHMENT}

    def read_attachment(self, ref: str | Checkpoint, name: str) -> bytes:
        """Return the contents of an attachment. Raises NotFound."""
        from casckpt.contents import manifests
        from casckpt.loading.load import read_attachment

        manifest = manifests.get(self.repository, resolve_to_load(self.repository, ref))
        return read_attachment(self.repository, manifest, name, LoadOptions())

    # keeping and removing

    def tag(self, name: str, ref: str | Checkpoint, *, expires: Duration | None = None) -> None:
        """Let ``name`` name a checkpoint; every policy keeps it from then on. A forgotten one is restored.

        ``expires``: for so long from now ("12h", a timedelta); then it ends by itself. Such a tag restores nothing.
        Raises Gone if the checkpoint was purged, Conflict if it is just now; with ``expires`` NotFound, also if it is
        forgotten.
        """
        if isinstance(ref, str) and refs.is_reference(name) and not refs.is_reference(ref):
            raise InvalidInput(f"the name of a tag comes first, then the checkpoint: tag({ref!r}, {name!r})")
        if expires is None:
            tags.set_tag(self.repository, name, resolve(self.repository, ref))
        else:
            hold(self.repository, name, resolve(self.repository, ref), seconds_of(expires, "expires"))

    @contextmanager
    def lease(self, ref: str | Checkpoint, *, expires: Duration = "1h") -> Iterator[Checkpoint]:
        """Hold a checkpoint for a block. Whatever is forgotten and collected meanwhile, what it needs stays.

        A lease is a tag with a name of its own that ends ``expires`` from now. A thread renews it until the block ends.
        After a kill it ends by itself. If a renewal fails, the log has a warning while it is tried again, and an error
        when the lease is lost. Raises NotFound if the checkpoint is not visible.
        """
        with lease(self.repository, ref, seconds_of(expires, "expires")) as held:
            yield Checkpoint(self.repository, held.commit)

    def tags(self) -> dict[str, Checkpoint]:
        """Return all tags and the checkpoints that they name, without those whose records are damaged."""
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
        """Sign checkpoints, or ranges of steps: put a signature of each one's id beside it, which copies take along.

        ``key``: a file with an Ed25519 key as OpenSSL or ssh-keygen writes it, or a key of the package cryptography.
        ``password``: of the file. Sign what a save of this process has returned, because its id was computed from your
        memory. For another checkpoint, `verify` says whether the store has what the id says, but not whose it is.

        Raises NotFound, InvalidInput, Damaged, StorageError; Unsupported without that package.
        """
        from casckpt.contents.signatures import sign

        signer = private_key(key, password) if isinstance(key, str | os.PathLike) else key
        chosen = refs.resolve_many(self.repository, map(plain, named))
        for commit in chosen:
            sign(self.repository, commit, signer)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def forget(self, *refs: str | Checkpoint, tagged: bool = False, dry_run: bool = False) -> list[Checkpoint]:
        """Make checkpoints, or ranges of steps, invisible, until they are restored, or purged by a gc.

        ``tagged``: also those that a tag names. The tags go, too, except those that expire, which a gc respects until
        then. Without it, a tagged one is a Conflict, and nothing is forgotten. ``dry_run``: only return which. Raises
        NotFound, InvalidInput, Conflict.
        """
        from casckpt.upkeep.gc.forgetting import forget, plan_forget

        chosen = plan_forget(self.repository, map(plain, refs), tagged=tagged)
        if not dry_run:
            chosen = forget(self.repository, chosen)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def forget_now(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Forget and purge checkpoints, with no gc in between; return what was forgotten. A gc frees the space.

        What is tagged, or not safe in the store's mirror yet, stays. If the store has a minimum age, a gc purges.
        Raises StorageError.
        """
        from casckpt.upkeep.gc.purge import forget_and_purge

        forgotten = forget_and_purge(self.repository, [one.commit for one in checkpoints])
        return [Checkpoint(self.repository, commit) for commit in forgotten]

    def rotate(self, run: str, rotation: Rotation) -> list[Checkpoint]:
        """Forget and purge what ``rotation`` does not keep of ``run``, as `forget_now` does. One process calls it.

        Raises Damaged or Refused if a tag cannot be read, StorageError.
        """
        from casckpt.upkeep.gc.rotation import rotate

        return [Checkpoint(self.repository, commit) for commit in rotate(self.repository, run, rotation)]

    def thin_now(self, run: str, rule: Thinning | None) -> list[Checkpoint]:
        """Thin the checkpoints of ``run`` by ``rule``, and purge their old places as `forget_now` does.

        Damaged checkpoints stay as they are. Raises as `rotate`.
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
        """Drop tensors, such as those of an optimizer, from checkpoints. All else stays, under the same id.

        ``drop``: fnmatch patterns on flat keys of tensors. ``refs``: checkpoints or ranges of steps. Without them: all
        checkpoints, or those of ``run``, except what ``keep_last=2`` or another rule of `gc` keeps whole; the newest
        of a run stays whole then, and so does what is tagged, unless ``tagged``. No byte of a tensor is moved. A gc
        that purges the old places frees the space. Until then `restore` of these (`checkpoints` with ``forgotten``)
        brings everything back.

        Raises InvalidInput, NotFound, MissingKey if nothing in what was chosen matches, Conflict if one of ``refs`` is
        tagged, StorageError. If one cannot be thinned because it is damaged, the others still are, and that is raised
        at the end.
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
        """Make a forgotten checkpoint visible again. Raises Conflict if it was purged, or beside a visible twin.

        ``ref``: an id, a `Checkpoint`, or RUN@STEP, unless several were forgotten there. A checkpoint that
        `checkpoints` shows as ``replaced`` comes back in place of what it was rewritten to, as long as it lives.
        ``whole``: bring back what `thin` dropped from a checkpoint. Raises NotFound once a gc has purged that.
        """
        if refs.is_range(ref):
            raise InvalidInput(f"{ref!r} does not name one checkpoint; restore_many takes ranges")
        (restored,) = self.restore_many(ref, whole=whole).restored
        return Checkpoint(self.repository, restored)

    def restore_many(
        self, *named: str | Checkpoint, whole: bool = False, dry_run: bool = False, check: bool = True
    ) -> RestoreResult:
        """Restore checkpoints, or what was forgotten of ranges of steps, as `restore` does each.

        A range passes by steps at which something is visible. All are looked at first: if one cannot be restored,
        nothing is. ``whole``: of a range, what was thinned. ``dry_run``: only return which. ``check``: raise what went
        wrong for some of them once the others are restored; without it, that is in ``failed`` of the result. Raises
        NotFound, InvalidInput, Conflict, StorageError.
        """
        from casckpt.upkeep.gc.restoring import RestoreResult, plan_restore, restore

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
        """Forget what a policy does not keep, purge what was forgotten, delete what nothing needs; safe at any time.

        ``keep_last``, ``keep_every`` (step % N == 0), ``keep_within``, ``keep_daily``, ``keep_weekly``,
        ``keep_monthly``, ``keep_best`` ("loss:3", "acc:max:1"): the policy, a union, applied to each run by itself (see
        `Policy`); none of them forgets nothing. The newest of a run, the newest that nobody called unhealthy, and
        tagged ones always stay. ``thin``: what `thin` leaves out of what stays, as
        ``{"drop": ["optim.*"], "keep_last": 2}``. ``run``: only this run.

        Durations are a timedelta or text with a unit ("7d", "90s"); 0 needs none. ``min_age``: from forgetting to
        purging; until then `restore` brings a checkpoint back (default: the store's setting, else 24 h, and 15 minutes
        for ephemeral ones). ``wait``: for saves in progress, in all; then the rest is left to the next gc.
        ``revoke_after``: without a sign of life, until a save is given up on (default: the store's, else 1 h).

        ``progress`` is called with the number of objects deleted so far, and of all that are to be, ``tell`` with what
        is waited for.

        Raises Damaged if a live checkpoint cannot be read: then nothing is forgotten or deleted. InvalidInput, also for
        a metric that no checkpoint has; MissingKey if ``thin`` matches nothing in what it chooses; StorageError.

        However it fails, also by an interrupt, ``error.done`` is the `GcResult` of what was forgotten, purged, restored
        and thinned by then; with ``dry_run``, of what would be.
        """
        from casckpt.upkeep.gc.gc import execute, plan_gc, preview
        from casckpt.upkeep.gc.purge import check_metrics
        from casckpt.upkeep.thin import thin_by

        check_keywords("Store.gc", keep, KeepRules)
        policy = Policy(**keep)
        wait_seconds, revoke_seconds = seconds_of(wait, "wait"), _optional(revoke_after, "revoke-after")
        thinning, repo = thinning_of(thin), self.repository
        check_metrics(repo, policy, run)
        plan = plan_gc(repo, policy, run=run, min_age=_optional(min_age, "min-age"))
        thinned = None if thinning is None else thin_by(repo, thinning, run, spare=plan.forget, dry_run=dry_run)
        if thinned is not None and not dry_run:
            plan = plan_gc(repo, policy, run=run, min_age=_optional(min_age, "min-age"))
        return preview(repo, plan, thin=thinned) if dry_run else execute(
            repo, plan, wait=wait_seconds, revoke_after=revoke_seconds,
            progress=Progress(progress), tell=tell or (lambda waiting: None), thin=thinned,
        )  # fmt: skip

    @property
    def settings(self) -> StoreSettings:
        """The settings of the store, read each time. Raises NotFound if there is no store."""
        return settings_from(self.repository.settings)

    def change_settings(self, **changes: Unpack[SettingChanges]) -> StoreSettings:
        """Change some settings, for everybody who uses the store from now on. None unsets one.

        Durations are a timedelta or text with a unit ("7d", "90s"). See `StoreSettings` for what there is. Raises
        InvalidInput, which names the setting; NotFound where there is no store; StorageError.
        """
        check_names(changes)
        fields = duration_fields(changes)
        if "mirror" in changes:
            mirror = changes["mirror"]
            fields["mirror"] = None if mirror is None else repository_of(mirror, None).storage.url
            if fields["mirror"] == self.url:
                raise InvalidInput(f"mirror: {self.url} cannot be its own mirror; give another store")
        if "compress" in changes:
            fields["compress"] = None if changes["compress"] is None else usable_compress(changes["compress"])
        if "mirror_thinned" in changes:
            fields["mirror_thinned"] = changes["mirror_thinned"]
        return settings_from(self.repository.change_settings(**fields))

    def transactions(self) -> list[SaveInProgress]:
        """Return the saves in progress, oldest first. Raises NotFound if there is no store."""
        from casckpt.upkeep.saves import saves_in_progress

        return saves_in_progress(self.repository)

    def revoke(self, txid: str) -> None:
        """Give up on a save in progress: nothing of it will be visible. Raises NotFound, Conflict if it has ended."""
        from casckpt.upkeep.saves import revoke_save

        revoke_save(self.repository, TxId(txid))

    def give_up(self, txid: str) -> None:
        """End a transaction whose record, and so its checkpoint, is lost or unreadable. Raises NotFound, Conflict.

        Until then no gc deletes anything.
        """
        from casckpt.upkeep.saves import give_up

        give_up(self.repository, TxId(txid))

    # checking and copying

    def doctor(self) -> Iterator[Finding]:
        """Find out whether the storage is safe for a store, check by check. It needs no store there."""
        from casckpt.upkeep.doctor import examine

        return examine(self.repository)

    def reindex(self) -> int:
        """Rebuild this host's catalogue of the store. Return how many checkpoints it knows. Raises StorageError."""
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
        """Check everything that live checkpoints need, or those that ``refs`` name. Mark damaged blobs in the store.

        ``mode``: "full" reads every blob and compares its hash, "exists" looks at presence and size. ``sample``: the
        fraction of the blobs to look at, drawn at random. ``decode``: decode coded cells, too, and compare them.
        ``progress`` is called with the bytes read so far, and the bytes in all. The result lists what is damaged.
        Raises NotFound, InvalidInput, StorageError.
        """
        from casckpt.upkeep.repair.verify import verify

        chosen, shown = [plain(ref) for ref in refs] or None, Progress(progress)
        return verify(self.repository, refs=chosen, mode=mode, sample=sample, decode=decode, progress=shown)

    def repair(self, *sources: Store | str | os.PathLike[str], progress: Shown | None = None) -> RepairResult:
        """Put right bytes back where `verify`, or a save, found damage, or where blobs are gone.

        They come from other copies in this store, or in ``sources``, which are only read. ``progress`` is called with
        the bytes put back. The result lists what cannot be repaired. Raises NotFound, StorageError.
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
        """Copy what ``refs`` name (ranges of steps too), or all that is visible, into another store.

        It transfers only what ``target`` lacks. Copies keep ids, times and order. Each is verified on the way, and
        visible in ``target`` once it is complete and durable there. If ``target`` does not exist, it is made, with the
        cell and blob size of this store. What it has forgotten stays forgotten, unless you name it. After a kill, the
        next copy continues where this one stopped. ``run``: only of this run. ``tags``: set the tags there, too.
        ``jobs``: files to copy at once. ``part``: (rank, number of ranks), if several processes share the work.
        ``blob_bytes``: repack into files of this many bytes (deltas keep their files); then ``target`` may be this very
        store, whose small and worn files are packed together. ``compress``: "always" stores floats in fewer bytes (a
        checkpoint that is stored so in part stays as it is); "off" and None store them as they are here. ``check``:
        once all others are copied, raise what went wrong; without it, that is in ``failed`` of the result.
        ``progress`` is called with the bytes that are there now.

        Raises Damaged (naming blob and keys), Gone, Refused, or Conflict if ``target`` has another checkpoint under the
        run and step. Nothing of that checkpoint is visible there, and all others are copied. NotFound, StorageError.
        """
        from casckpt.upkeep.copies import copy as copying

        other = repository_of(target, self.repository.cache_dir)
        if compress not in {None, "off", "always"}:
            raise InvalidInput(f"compress={compress!r} is not usable in a copy; give 'always' or 'off'")
        plan = copying.plan_copy(
            self.repository, other, map(plain, refs), run=run, blob_bytes=blob_bytes, compress=compress == "always"
        )
        if dry_run:
            return copying.preview(self.repository, other, plan)
        shown = Progress(progress)
        result = copying.execute(self.repository, other, plan, with_tags=tags, jobs=jobs, part=part, progress=shown)
        if check:
            result.raise_failure()
        return result

    def mirror_lag(self) -> MirrorLag:
        """Return how far the mirror is behind: checkpoints and bytes not safe there yet, and the age of the oldest.

        Raises InvalidInput for a store that was opened without one, StorageError.
        """
        return self._its_mirror().lag()

    def wait_for_mirror(self, timeout: float | None = None) -> None:
        """Wait until everything that is committed now is safe in the mirror, before a program ends for instance.

        What is not copied when the program ends, or dies, is copied when the store is opened with its mirror again.
        After one more attempt it raises what stands in the way (StorageError, Damaged, ...); StorageError after
        ``timeout`` seconds.
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
    """What lies under a store that is open, or that is named. Raises InvalidInput or Unsupported for a bad URL."""
    return store.repository if isinstance(store, Store) else open_repository(store, cache_dir=cache_dir)
