"""The store, as a program uses it: `open`, and saving and loading. What needs no tensors is in `Archive`, its base.

Importing this module and looking at checkpoints needs no torch; saving and loading import it when they are called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from casckpt.checkpoint.archive import Archive, repository_of
from casckpt.checkpoint.handle import Checkpoint, warn_if_forgotten
from casckpt.errors import InvalidInput
from casckpt.format.manifest import ATTACHMENT
from casckpt.plan.progress import Progress, Shown
from casckpt.repository import manifests
from casckpt.repository.blob_cache import AT_ONCE as PREFETCHING
from casckpt.repository.commits import Commit
from casckpt.repository.opening import open_repository
from casckpt.repository.prefetching import pre_download
from casckpt.repository.repository import Repository
from casckpt.storage.forking import PerProcess

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from casckpt.checkpoint.arguments import Rename
    from casckpt.checkpoint.job import State
    from casckpt.checkpoint.load_plan import LoadOptions, Unread
    from casckpt.checkpoint.prepare import Frozen
    from casckpt.checkpoint.saver import Saver
    from casckpt.frontends.exported import Exported, Format

Dedup = Literal["store", "run"]
WhenBusy = Literal["wait", "refuse"]


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
    here = open_repository(
        url, storage_options=storage_options, cache_dir=cache_dir, cache_bytes=cache_bytes, single_writer=single_writer
    )
    if mirror is None:
        return Store(here)
    there = repository_of(mirror, None if cache_dir is None else Path(cache_dir))
    if there.storage.url == here.storage.url:
        raise InvalidInput(f"{there.storage.url} is to be its own mirror: give another store")
    return Store(here, there)._mirrored()


class Store(Archive):
    """Checkpoints of any number of runs, in one folder or bucket. Made by `casckpt.open`; safe for use by threads."""

    def __init__(self, repository: Repository, mirror: Repository | None = None) -> None:
        super().__init__(repository, mirror)
        self._saver = PerProcess(partial(_new_saver, repository))  # a forked child has no thread of the parent's

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
        progress: Shown | None = None,
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
        return self._saver.get().save(
            state, run=run, step=step, metadata=metadata, overwrite=overwrite, ephemeral=ephemeral,
            attachments=attachments, frozen=frozen, dedup=dedup, check_replicas=check_replicas,
            allow_pickle=allow_pickle, process_group=process_group, no_dist=no_dist, threads=threads, progress=progress,
        )  # fmt: skip

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
        progress: Shown | None = None,
        when_busy: WhenBusy = "wait",
    ) -> Future[Checkpoint]:
        """Like `save`, but returns once ``state`` has been copied; it may change from then on.

        Saves of one store run one after the other, and there is memory for one copy: while one runs, a second call
        waits for its end (``when_busy="wait"``), or raises Conflict on every rank if one runs on any ("refuse").

        What fails shows in the future; a failure that nobody asked the future for is raised by the next call, once.
        What `save` raises for its arguments shows in the future too.
        """
        return self._saver.get().save_async(
            state, run=run, step=step, metadata=metadata, overwrite=overwrite, ephemeral=ephemeral,
            attachments=attachments, frozen=frozen, dedup=dedup, check_replicas=check_replicas,
            allow_pickle=allow_pickle, process_group=process_group, no_dist=no_dist, threads=threads, progress=progress,
            when_busy=when_busy,
        )  # fmt: skip

    def warm_up(self, state: State, *, process_group: ProcessGroup | None = None, no_dist: bool = False) -> None:
        """Make ready for `save_async` of such a state: the memory for its copy, and the connections between ranks.

        Without it the first call of `save_async` does that. Every rank makes the call. Raises InvalidInput as `save`.
        """
        self._saver.get().warm_up(state, process_group=process_group, no_dist=no_dist)

    def load(
        self,
        state: Any,
        ref: str | Checkpoint,
        *,
        strict: bool = True,
        ignore_mismatched: Sequence[str] | None = None,
        unread: Unread = "warn",
        rename: Rename = None,
        cast: bool = False,
        verify: bool = True,
        allow_pickle: bool = False,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        threads: int | None = None,
        progress: Shown | None = None,
    ) -> Checkpoint:
        """Load into ``state``: its tensors are filled in place, its other leaves replaced. Keys it lacks are not read.

        The empty ``state`` of a fresh optimizer's state_dict is filled, with new tensors; `load_state_dict` then hands
        them over. ``strict``: every key of ``state`` must be in the checkpoint; else those that are not are left as
        they are and stand in ``missing_keys`` of what is returned. A tensor that shares its memory with one that is
        loaded is not missing. ``ignore_mismatched``: fnmatch patterns of keys of ``state`` that are left as they are
        where the checkpoint lacks them or holds another shape, dtype or kind (``mismatched_keys``).

        Whole containers of which no rank read anything are in ``unread_subtrees``, and told of in the log, once of a
        run; ``unread="ignore"`` says that it is meant. ``rename``: from a key of ``state`` to one of the checkpoint, a
        callable or a dict from regular expression (matched against the whole key) to replacement. ``cast``: convert
        dtypes. ``verify``: compare every cell read with its digest. Every rank of ``process_group`` makes the call,
        with its own shards, whatever ranks and shards it was saved from; ``no_dist``: this process loads alone.

        Raises Conflict if ranks give different references, or stores; NotFound, MissingKey, Mismatch or InvalidInput;
        all before anything changes. Damaged (naming key, blob and checkpoints) or StorageError during the read, after
        which the contents of ``state`` are undefined.
        """
        from casckpt.checkpoint.load import load_together
        from casckpt.checkpoint.load_plan import load_options
        from casckpt.checkpoint.ranks import open_ranks

        ranks = open_ranks(process_group, no_dist=no_dist)

        def options() -> LoadOptions:
            return load_options(
                strict=strict, ignore_mismatched=ignore_mismatched, unread=unread, rename=rename, cast=cast,
                verify=verify, allow_pickle=allow_pickle, threads=threads, rank=ranks.rank, ranks=ranks.size,
                progress=progress,
            )  # fmt: skip

        loaded = load_together(
            self.repository, ranks, state, ref, resolve=lambda: self._resolve_to_load(ref), options=options
        )
        return Checkpoint(
            self.repository, loaded.commit, missing_keys=loaded.missing, unread_keys=loaded.unread,
            mismatched_keys=loaded.mismatched, unread_subtrees=tuple(key for key in loaded.subtrees if key),
        )  # fmt: skip

    def read(
        self,
        ref: str | Checkpoint,
        *,
        keys: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        verify: bool = True,
        allow_pickle: bool = False,
        threads: int | None = None,
        progress: Shown | None = None,
    ) -> Any:
        """The state, nested as it was saved, in new tensors on ``device``. ``keys``: fnmatch patterns on flat keys."""
        from casckpt.checkpoint.arguments import usable_device
        from casckpt.checkpoint.load import read
        from casckpt.checkpoint.load_plan import load_options

        on = usable_device(device)
        manifest = manifests.get(self.repository, self._resolve_to_load(ref))
        options = load_options(verify=verify, allow_pickle=allow_pickle, threads=threads, progress=progress)
        return read(self.repository, manifest, keys=keys, device=on, options=options)

    def pre_download(
        self,
        ref: str | Checkpoint,
        state: Any = None,
        *,
        rename: Rename = None,
        strict: bool = True,
        ignore_mismatched: Sequence[str] | None = None,
        threads: int | None = None,
        progress: Shown | None = None,
    ) -> int:
        """Fetch what a checkpoint needs into the cache of this host, where loads find it; the bytes that were fetched.

        With ``state``: only what a load into it needs, as this rank's part; it is not changed. ``rename``,
        ``strict``, ``ignore_mismatched``: as for `load`. Each rank calls it by itself; of those of one host one
        fetches what several want. What is fetched is compared with its hash. ``progress`` is called with bytes that
        are here.

        Raises NotFound, Damaged (naming the blob), InvalidInput if the cache may not hold so much (``cache_bytes`` of
        `open`), StorageError.
        """
        commit = self._resolve_to_load(ref)
        manifest = manifests.get(self.repository, commit)
        refs = list(manifest.blobs)
        if state is not None:
            from casckpt.checkpoint.load import wanted_blobs
            from casckpt.checkpoint.load_plan import load_options

            options = load_options(
                strict=strict, ignore_mismatched=ignore_mismatched, rename=rename, cast=True, allow_pickle=True,
                threads=threads,
            )  # fmt: skip
            refs = wanted_blobs(self.repository, manifest, state, options)
        return pre_download(self.repository, commit, refs, threads=threads or PREFETCHING, progress=Progress(progress))

    def export(
        self,
        ref: str | Checkpoint,
        path: str | os.PathLike[str],
        *,
        format: Format | None = None,
        keys: Sequence[str] | None = None,
        strip_prefix: str | None = None,
        rename: Rename = None,
        max_shard_size: int | str | None = None,
        force: bool = False,
        allow_pickle: bool = False,
        attachments: bool = True,
        progress: Shown | None = None,
    ) -> Exported:
        """Write a checkpoint for other programs: a folder for ``from_pretrained``, safetensors, DCP or torch.save.

        See `casckpt.export`.
        """
        from casckpt.frontends.exporting import export  # from the layer above: formats are front ends

        return export(
            self, ref, path, format=format, keys=keys, strip_prefix=strip_prefix, rename=rename,
            max_shard_size=max_shard_size, force=force, allow_pickle=allow_pickle,
            attachments=attachments, progress=progress,
        )  # fmt: skip

    def attachments(self, ref: str | Checkpoint) -> dict[str, int]:
        """Names of the files that were saved along, and their sizes in bytes."""
        body = manifests.get(self.repository, self._resolve(ref)).body
        short = {one.name: len(one.data) for one in body.attachments}
        return short | {entry.key: entry.nbytes for entry in body.entries if entry.kind == ATTACHMENT}

    def read_attachment(self, ref: str | Checkpoint, name: str) -> bytes:
        """The contents of one of them. Raises NotFound."""
        from casckpt.checkpoint.load import read_attachment
        from casckpt.checkpoint.load_plan import load_options

        manifest = manifests.get(self.repository, self._resolve(ref))
        return read_attachment(self.repository, manifest, name, load_options())

    def _resolve_to_load(self, ref: str | Checkpoint) -> Commit:
        commit = self._resolve(ref)
        warn_if_forgotten(commit)
        return commit


def _new_saver(repository: Repository) -> Saver:
    from casckpt.checkpoint.saver import Saver

    return Saver(repository)
