"""The store, as a program uses it: `open` and the methods of `Store`.

Importing this module and looking at checkpoints needs no torch; saving and loading import it when they are called.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from casckpt.checkpoint.handle import Checkpoint, warn_if_forgotten
from casckpt.errors import Conflict, InvalidInput, NotFound
from casckpt.format.keys import check_run, check_step
from casckpt.format.manifest import ATTACHMENT
from casckpt.plan.difference import Difference, difference
from casckpt.plan.retention import Policy, parse_duration
from casckpt.plan.sizes import parse_size
from casckpt.repository import commits as commit_log
from casckpt.repository import copying, manifests, refs, tags
from casckpt.repository.blob_cache import AT_ONCE as PREFETCHING
from casckpt.repository.copying import CopyResult
from casckpt.repository.forgetting import forget, plan_forget
from casckpt.repository.gc import WAIT, GcResult, Tell, execute, plan_gc, preview
from casckpt.repository.measure import StoreStats, measure
from casckpt.repository.mirror import Mirror
from casckpt.repository.mirrored import MirrorLag
from casckpt.repository.prefetching import pre_download
from casckpt.repository.repair import RepairResult, repair
from casckpt.repository.repository import Repository
from casckpt.repository.verify import Mode, VerifyResult, verify
from casckpt.storage import open_storage

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from casckpt.checkpoint.arguments import Rename
    from casckpt.checkpoint.background import Background
    from casckpt.checkpoint.job import SaveJob, State
    from casckpt.checkpoint.leader import SaveMemory
    from casckpt.checkpoint.load import LoadOptions
    from casckpt.checkpoint.prepare import Frozen

Dedup = Literal["store", "run"]
WhenBusy = Literal["wait", "refuse"]
Progress = Callable[[int], None]
log = logging.getLogger(__name__)


def open(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
    mirror: Store | str | os.PathLike[str] | None = None,
    single_writer: bool = False,
) -> Store:
    """Open a store: a path, ``s3://bucket/prefix``, ``memory://`` or another URL that fsspec knows.

    Creates nothing; the first save does. ``http://`` and ``https://`` can only be read.

    ``storage_options``: passed on to the storage's client (fsspec's). ``cache_dir``: where what is learnt of the store
    is kept on this host (default: the user's cache folder). If it is given, and the store is far away, loads also keep
    there the files that they read for the greater part, at most ``cache_bytes`` of them ("200GiB"; default: half of
    what is free on that disk; 0 for none); see `Store.pre_download`. ``mirror``: another store, to which what is
    committed here is copied in the background; see `Store.wait_for_mirror`. ``single_writer``: your word that nobody
    else writes to the store at the same time, which makes storages usable that cannot create exclusively. Raises
    InvalidInput or Unsupported for a URL that cannot be used.
    """
    cache = None if cache_dir is None else Path(cache_dir)
    storage = open_storage(url, storage_options, single_writer=single_writer)
    most = parse_size(cache_bytes) if isinstance(cache_bytes, str) else cache_bytes
    repository = Repository(storage, cache, single_writer=single_writer, cache_bytes=most)
    if mirror is None:
        return Store(repository)
    other = mirror if isinstance(mirror, Store) else open(mirror, cache_dir=cache_dir)
    if other.url == repository.storage.url:
        raise InvalidInput(f"{other.url} is to be its own mirror: give another store")
    return Store(repository, other.repository)._mirrored()


@dataclass(frozen=True, slots=True)
class At:
    """One place for a checkpoint: a run and a step of a store. As text: ``STORE#RUN@STEP``."""

    store: Store | str | os.PathLike[str]
    run: str
    step: int

    def __str__(self) -> str:
        url = self.store.url if isinstance(self.store, Store) else os.fspath(self.store)
        return f"{url}#{self.run}@{self.step}"


def at(store: Store | str | os.PathLike[str], *, run: str, step: int) -> At:
    """Where a front end that knows folders is to save or load. Raises InvalidInput for a run or step of no use."""
    return At(store, check_run(run), check_step(step))


class Store:
    """Checkpoints of any number of runs, in one folder or bucket. Made by `casckpt.open`; safe for use by threads."""

    def __init__(self, repository: Repository, mirror: Repository | None = None) -> None:
        self.repository = repository
        self._mirror = None
        if mirror is not None:
            repository.mirror = mirror.storage.url
            self._mirror = Mirror(repository, mirror)
        self._background: tuple[int, Background] | None = None
        self._memories: dict[str, SaveMemory | None] = {}

    def __reduce__(self) -> tuple[type[Store], tuple[Repository, Repository | None]]:
        return Store, (self.repository, None if self._mirror is None else self._mirror.target)

    def _mirrored(self) -> Store:
        """Itself, once the copies that wait go on in the background."""
        if self._mirror is not None:
            weakref.finalize(self, self._mirror.stop)
            self._mirror.wake()
        return self

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self.repository.storage.url

    def __repr__(self) -> str:
        return f"casckpt.open({self.url!r})"

    def create(self, **sizes: int) -> bool:
        """Make the store now, with ``cell_bytes`` and ``blob_bytes`` of one's own; False if it is there already."""
        return self.repository.create(**sizes)

    # saving and loading

    def save(
        self,
        state: State,
        *,
        run: str = "default",
        step: int,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        attachments: Mapping[str, bytes] | None = None,
        frozen: Frozen = None,
        dedup: Dedup = "store",
        check_replicas: bool = False,
        allow_pickle: bool = False,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Save ``state``, a nested mapping of tensors and plain data, and return once it is durable and visible.

        ``state`` may be a function that makes it: then its errors reach all ranks.

        Every rank of ``process_group`` (default: all, where torch.distributed is initialised) makes the call with its
        own state: shards (DTensor, `casckpt.Shard`), replicas that it shares with others, keys that only it has.
        ``no_dist``: this process saves alone.

        ``metadata``: JSON-able, shown in listings. ``attachments``: files by name that travel along (rank 0's count).
        ``overwrite``: commit, then forget what was saved under this run and step before. ``frozen``: tensors that did
        not change since the run's last checkpoint, as patterns on flat keys or a function of a key. It is the caller's
        promise: only a sample of their cells is looked at, and the manifest says so. ``dedup``: reuse cells of the
        whole store, or of this run only. ``check_replicas``: compare what several ranks hold, and refuse differences.
        ``allow_pickle``: pickle the leaves that are neither tensors nor plain data. ``threads``: that hash and write.

        Raises Conflict if the step exists, InvalidInput (naming key and rank) for what cannot be stored, StorageError,
        RankFailed; on every rank alike. After an error nothing of the save is visible.
        """
        job = self._job(
            state, attachments, frozen=frozen, allow_pickle=allow_pickle, process_group=process_group,
            no_dist=no_dist, run=run, step=step, metadata=metadata,
            overwrite=overwrite, ephemeral=ephemeral, dedup=dedup, check_replicas=check_replicas, threads=threads,
            progress=progress,
        )  # fmt: skip
        return job.run(job.prepare)

    def save_async(
        self,
        state: State,
        *,
        run: str = "default",
        step: int,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        attachments: Mapping[str, bytes] | None = None,
        frozen: Frozen = None,
        dedup: Dedup = "store",
        check_replicas: bool = False,
        allow_pickle: bool = False,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
        when_busy: WhenBusy = "wait",
    ) -> Future[Checkpoint]:
        """Like `save`, but returns once ``state`` has been copied; it may change from then on.

        Saves of one store run one after the other, and there is memory for one copy: while one runs, a second call
        waits for its end (``when_busy="wait"``), or raises Conflict on every rank if one runs on any ("refuse").

        What fails shows in the future; a failure that nobody asked the future for is raised by the next call, once.
        What `save` raises for its arguments shows in the future too.
        """
        from casckpt.checkpoint.job import failing

        job = self._job(
            state, attachments, frozen=frozen, allow_pickle=allow_pickle, process_group=process_group,
            no_dist=no_dist, run=run, step=step, metadata=metadata,
            overwrite=overwrite, ephemeral=ephemeral, dedup=dedup, check_replicas=check_replicas, threads=threads,
            progress=progress,
            purpose="async",
        )  # fmt: skip
        background = self._in_background()
        if when_busy == "refuse":
            self._refuse_busy(background, process_group, no_dist=no_dist)
        elif when_busy != "wait":
            raise InvalidInput(f"when_busy={when_busy!r} is not known; give 'wait' or 'refuse'")
        with background.lock:
            background.wait()
            failed = background.unheard()
            prepared = failing(failed) if failed else job.snapshot(background.staging)
            future = background.submit(lambda: job.run(prepared))
        if failed is not None:  # the other ranks hear of it in their futures, if they have asked for the first
            future.exception()
            raise failed
        return future

    def _refuse_busy(self, background: Background, process_group: ProcessGroup | None, *, no_dist: bool) -> None:
        from casckpt.checkpoint.ranks import everyone, open_ranks

        def decide(busy: Sequence[bool]) -> Sequence[None]:
            if any(busy):
                raise Conflict("a save still runs in the background; wait for its future, or skip this one")
            return everyone(None, len(busy))

        open_ranks(process_group, no_dist=no_dist, purpose="busy").exchange(lambda: background.busy, decide)

    def warm_up(self, state: State, *, process_group: ProcessGroup | None = None, no_dist: bool = False) -> None:
        """Make ready for `save_async` of such a state: the memory for its copy, and the connections between ranks.

        Without it the first call of `save_async` does that. Every rank makes the call. Raises InvalidInput as `save`.
        """
        from casckpt.checkpoint.prepare import tensors_of

        job = self._job(
            state, None, frozen=None, allow_pickle=True, process_group=process_group, no_dist=no_dist, purpose="async"
        )
        background = self._in_background()
        with background.lock:
            background.wait()
            background.staging.reserve(tensors_of(job.prepare()))

    def _in_background(self) -> Background:
        """What runs asynchronous saves. A forked child has one of its own: the parent's thread is not copied."""
        from casckpt.checkpoint.background import Background

        if self._background is None or self._background[0] != os.getpid():
            self._background = (os.getpid(), Background())
        return self._background[1]

    def _job(
        self,
        state: State,
        attachments: Mapping[str, bytes] | None,
        *,
        frozen: Frozen,
        allow_pickle: bool,
        process_group: ProcessGroup | None,
        no_dist: bool,
        purpose: str = "main",
        **options: Any,
    ) -> SaveJob:
        from casckpt.checkpoint.job import SaveJob
        from casckpt.checkpoint.ranks import open_ranks

        ranks = open_ranks(process_group, no_dist=no_dist, purpose=purpose)
        memory = self._memories.setdefault(ranks.name, None) or self._new_memory(ranks.name)
        return SaveJob(
            self.repository,
            ranks,
            memory,
            state,
            attachments,
            allow_pickle=allow_pickle,
            frozen=frozen,
            options=options,
        )

    def _new_memory(self, name: str) -> SaveMemory:
        from casckpt.checkpoint.leader import SaveMemory

        memory = self._memories[name] = SaveMemory()
        return memory

    def load(
        self,
        state: Any,
        ref: str | Checkpoint,
        *,
        strict: bool = True,
        rename: Rename = None,
        cast: bool = False,
        verify: bool = True,
        allow_pickle: bool = False,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Load into ``state``: its tensors are filled in place, its other leaves replaced. Keys it lacks are not read.

        ``strict``: every key of ``state`` must be in the checkpoint; else those that are not are left as they are and
        stand in ``missing_keys`` of what is returned. ``rename``: from a key of ``state`` to one of the checkpoint, a
        callable or a dict from regular expression (matched against the whole key) to replacement. ``cast``: convert
        dtypes. ``verify``: compare every cell read with its digest. Every rank of ``process_group`` makes the call,
        with its own shards, whatever ranks and shards it was saved from; ``no_dist``: this process loads alone.

        Raises NotFound, MissingKey, Mismatch or InvalidInput before anything changes; Damaged (naming key, blob and
        checkpoints) or StorageError during the read, after which the contents of ``state`` are undefined.
        """
        from casckpt.checkpoint.load import load_together
        from casckpt.checkpoint.ranks import open_ranks

        ranks = open_ranks(process_group, no_dist=no_dist)

        def options() -> LoadOptions:
            return self._load_options(
                strict=strict, rename=rename, cast=cast, verify=verify, allow_pickle=allow_pickle, threads=threads,
                rank=ranks.rank, ranks=ranks.size, progress=progress,
            )  # fmt: skip

        commit, missing, unread = load_together(
            self.repository, ranks, state, lambda: self._resolve_to_load(ref), options
        )
        return Checkpoint(self.repository, commit, missing, unread)

    def read(
        self,
        ref: str | Checkpoint,
        *,
        keys: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        verify: bool = True,
        allow_pickle: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """The state, nested as it was saved, in new tensors on ``device``. ``keys``: fnmatch patterns on flat keys."""
        from casckpt.checkpoint.arguments import usable_device
        from casckpt.checkpoint.load import read

        on = usable_device(device)
        manifest = manifests.get(self.repository, self._resolve_to_load(ref))
        options = self._load_options(verify=verify, allow_pickle=allow_pickle, threads=threads, progress=progress)
        return read(self.repository, manifest, keys=keys, device=on, options=options)

    def pre_download(
        self,
        ref: str | Checkpoint,
        state: Any = None,
        *,
        rename: Rename = None,
        strict: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Fetch what a checkpoint needs into the cache of this host, where loads find it; the bytes that were fetched.

        With ``state``: only what a load into it needs, as this rank's part; it is not changed. ``rename``, ``strict``:
        as for `load`. Each rank calls it by itself; of those of one host one fetches what several want. What is
        fetched is compared with its hash. ``progress`` is called with bytes that are here.

        Raises NotFound, Damaged (naming the blob), InvalidInput if the cache may not hold so much (``cache_bytes`` of
        `open`), StorageError.
        """
        commit = self._resolve_to_load(ref)
        manifest = manifests.get(self.repository, commit)
        refs = list(manifest.blobs)
        if state is not None:
            from casckpt.checkpoint.load import wanted_blobs

            options = self._load_options(
                strict=strict, rename=rename, cast=True, allow_pickle=True, threads=threads, progress=None
            )
            refs = wanted_blobs(self.repository, manifest, state, options)
        return pre_download(
            self.repository, commit, refs, threads=threads or PREFETCHING, progress=progress or (lambda nbytes: None)
        )

    def _load_options(self, *, threads: int | None, progress: Progress | None, **rest: Any) -> LoadOptions:
        from casckpt.checkpoint.job import usable_threads
        from casckpt.checkpoint.load import LoadOptions

        if progress is not None:
            rest["progress"] = progress
        return LoadOptions(threads=usable_threads(threads), **rest)

    def _resolve_to_load(self, ref: str | Checkpoint) -> commit_log.Commit:
        commit = self._resolve(ref)
        warn_if_forgotten(commit)
        return commit

    # looking

    def _resolve(self, ref: str | Checkpoint) -> commit_log.Commit:
        if isinstance(ref, Checkpoint):
            return ref.commit
        return refs.resolve(self.repository, ref)

    def get(self, ref: str | Checkpoint) -> Checkpoint:
        """The checkpoint that ``ref`` names. Raises NotFound, InvalidInput.

        An id (or 6 hex digits and more of it), RUN@STEP, RUN@latest, latest, or tag:NAME.
        """
        return Checkpoint(self.repository, self._resolve(ref))

    def __contains__(self, ref: str | Checkpoint) -> bool:
        try:
            self._resolve(ref)
        except NotFound:
            return False
        return True

    def checkpoints(self, run: str | None = None, *, forgotten: bool = False) -> list[Checkpoint]:
        """All checkpoints, oldest first; of one run if it is given. ``forgotten``: those that still live too."""
        found = commit_log.list_commits(self.repository)
        chosen = found.live() if forgotten else found.current()
        return [Checkpoint(self.repository, commit) for commit in chosen if run is None or commit.run == run]

    def attachments(self, ref: str | Checkpoint) -> dict[str, int]:
        """Names of the files that were saved along, and their sizes in bytes."""
        body = manifests.get(self.repository, self._resolve(ref)).body
        short = {one.name: len(one.data) for one in body.attachments}
        return short | {entry.key: entry.nbytes for entry in body.entries if entry.kind == ATTACHMENT}

    def read_attachment(self, ref: str | Checkpoint, name: str) -> bytes:
        """The contents of one of them. Raises NotFound."""
        from casckpt.checkpoint.load import read_attachment

        manifest = manifests.get(self.repository, self._resolve(ref))
        return read_attachment(self.repository, manifest, name, self._load_options(threads=None, progress=None))

    def diff(self, old: str | Checkpoint, new: str | Checkpoint) -> Difference:
        """Which tensors were added, removed, changed, and left as they were, from the manifests alone."""
        one, other = (manifests.get(self.repository, self._resolve(ref)) for ref in (old, new))
        return difference(one, other)

    def stats(self) -> StoreStats:
        """How many checkpoints and blobs there are, and their bytes."""
        return measure(self.repository)

    # keeping and removing

    def tag(self, name: str, ref: str | Checkpoint) -> None:
        """Let ``name`` name a checkpoint; every policy keeps it from then on. A forgotten one is restored.

        Raises Conflict if it was purged.
        """
        tags.set_tag(self.repository, name, self._resolve(ref))

    def tags(self) -> dict[str, Checkpoint]:
        """All tags, and the checkpoints that they name; without those whose records are damaged."""
        found, named = commit_log.list_commits(self.repository).commits, tags.list_tags(self.repository)
        for name in named.damaged:
            log.warning("the record of tag %s cannot be read: set the tag anew, or delete it", name)
        named_now = [tag for tag in named.tags.values() if tag.txid in found]
        return {tag.name: Checkpoint(self.repository, found[tag.txid]) for tag in named_now}

    def untag(self, name: str) -> None:
        """Remove a tag. Raises NotFound."""
        tags.delete_tag(self.repository, name)

    def forget(self, *refs: str | Checkpoint, tagged: bool = False, dry_run: bool = False) -> list[Checkpoint]:
        """Make checkpoints invisible, until they are restored, or purged by a gc; those named, ranges of steps too.

        ``tagged``: also those that a tag names, and the tags go too; without it they are a Conflict, and nothing is
        forgotten. ``dry_run``:
        only say which. Raises NotFound, InvalidInput, Conflict.
        """
        named = [ref.commit if isinstance(ref, Checkpoint) else ref for ref in refs]
        chosen = plan_forget(self.repository, named, tagged=tagged)
        if not dry_run:
            chosen = forget(self.repository, chosen)
        return [Checkpoint(self.repository, commit) for commit in chosen]

    def gc(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_within: str | float | None = None,
        run: str | None = None,
        min_age: float | None = None,
        wait: float = WAIT,
        revoke_after: float | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        tell: Tell | None = None,
    ) -> GcResult:
        """Forget what a policy does not keep, purge what was forgotten, delete what nothing needs; safe at any time.

        ``keep_last``, ``keep_every`` (step % N == 0), ``keep_within`` ("7d", or seconds): the policy, a union, applied
        to each run by itself; none of them forgets nothing. The newest of a run and tagged ones always stay. ``run``:
        only this run. ``min_age``: seconds from forgetting to purging (default: the store's, 0 for a folder). ``wait``:
        seconds to wait for saves in progress; then the rest is left to the next gc. ``revoke_after``: seconds without a
        sign of life after which a save is given up on. ``progress`` is called with numbers of deleted objects, ``tell``
        with what is waited for.

        Raises Damaged if a live checkpoint cannot be read: then nothing is deleted. InvalidInput, StorageError.
        """
        within = parse_duration(keep_within) if isinstance(keep_within, str) else keep_within
        plan = plan_gc(self.repository, Policy(keep_last, keep_every, within), run=run, min_age=min_age)
        if dry_run:
            return preview(self.repository, plan)
        return execute(
            self.repository, plan, wait=wait, revoke_after=revoke_after,
            progress=progress or (lambda count: None), tell=tell or (lambda waiting: None),
        )  # fmt: skip

    def verify(
        self,
        *refs: str | Checkpoint,
        mode: Mode = "full",
        sample: float = 1.0,
        progress: Progress | None = None,
    ) -> VerifyResult:
        """Check all that live checkpoints need, or those that ``refs`` name; damaged blobs are marked in the store.

        ``mode``: "full" reads every blob and compares its hash, "exists" looks at presence and size. ``sample``: the
        fraction of the blobs to look at, drawn at random. ``progress`` is called with the bytes just read. What is
        damaged stands in the result. Raises NotFound, InvalidInput, StorageError.
        """
        chosen = [ref.commit if isinstance(ref, Checkpoint) else ref for ref in refs] or None
        return verify(
            self.repository, refs=chosen, mode=mode, sample=sample, progress=progress or (lambda nbytes: None)
        )

    def repair(self, *sources: Store | str | os.PathLike[str], progress: Progress | None = None) -> RepairResult:
        """Put right bytes back where `verify`, or a save, found damage, or where blobs are gone.

        They come from other copies in this store, or in ``sources``, which are only read. ``progress`` is called with
        the bytes put back. What cannot be repaired stands in the result. Raises NotFound, StorageError.
        """
        cache = self.repository.cache_dir
        stores = [one if isinstance(one, Store) else open(one, cache_dir=cache) for one in sources]
        others = [store.repository for store in stores]
        return repair(self.repository, sources=others, progress=progress or (lambda nbytes: None))

    def copy_to(
        self,
        target: Store | str | os.PathLike[str],
        *refs: str | Checkpoint,
        run: str | None = None,
        tags: bool = False,
        jobs: int | None = None,
        part: tuple[int, int] = (0, 1),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> CopyResult:
        """Copy what ``refs`` name (ranges of steps too), or all that is visible, into another store.

        Only what it lacks is moved. Copies keep ids, times and order. Each is verified on the way, and visible in
        ``target`` once it is whole and durable there. ``target`` is made, with the cell and blob size of this store, if
        there is none. What it has forgotten stays forgotten, unless it is named. A copy that was killed goes on where
        it was. ``run``: only of this run. ``tags``: set the tags there too. ``jobs``: files on their way at once.
        ``part``: (rank, number of ranks), where several processes share the work. ``progress`` is called with bytes
        that are there now.

        Raises Damaged (naming blob and keys), Refused, or Conflict if ``target`` has another checkpoint under the run
        and step: of that checkpoint nothing is visible there, and all others are copied. NotFound, StorageError.
        """
        other = target if isinstance(target, Store) else open(target, cache_dir=self.repository.cache_dir)
        named = [ref.commit if isinstance(ref, Checkpoint) else ref for ref in refs]
        plan = copying.plan_copy(self.repository, other.repository, named, run=run)
        if dry_run:
            return copying.preview(self.repository, other.repository, plan)
        result = copying.execute(
            self.repository, other.repository, plan, with_tags=tags, jobs=jobs, part=part,
            progress=progress or (lambda nbytes: None),
        )  # fmt: skip
        result.raise_failure()
        return result

    def mirror_lag(self) -> MirrorLag:
        """How far the mirror is behind: checkpoints and bytes that are not safe there, and the age of the oldest.

        Raises InvalidInput for a store that was opened without one, StorageError.
        """
        return self._its_mirror().lag()

    def wait_for_mirror(self, timeout: float | None = None) -> None:
        """Return once all that is committed now is safe in the mirror: before a program ends, for instance.

        What is not copied when it ends, or dies, is copied when the store is opened with its mirror again. Raises what
        stands in the way (StorageError, Damaged, ...) after one more attempt; StorageError after ``timeout`` seconds.
        """
        self._its_mirror().wait(timeout)

    def _its_mirror(self) -> Mirror:
        if self._mirror is None:
            raise InvalidInput(f"{self.url} was opened without a mirror: give casckpt.open(..., mirror=URL)")
        return self._mirror

    def restore(self, ref: str | Checkpoint) -> Checkpoint:
        """Make a forgotten checkpoint visible again. Raises Conflict if it was purged, or beside a visible twin."""
        return Checkpoint(self.repository, commit_log.restore(self.repository, self._resolve(ref)))
