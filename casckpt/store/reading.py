"""The read methods of `Store`: loads, downloads, comparisons and attachments.

Like `Store`'s methods, these functions accept a reference as a string or a `Checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from casckpt.base.progress import Progress
from casckpt.base.units import Duration, optional_seconds, seconds_of
from casckpt.contents import refs
from casckpt.contents.checkpoint import Arrival, Checkpoint, warn_if_forgotten
from casckpt.errors import Damaged, InvalidInput, NotFound
from casckpt.history.commits import Commit, exists, gone
from casckpt.history.leases import Lease
from casckpt.loading.options import LoadOptions, MatchArguments
from casckpt.repository.blob_cache import AT_ONCE
from casckpt.repository.fetching import BlobDamaged
from casckpt.repository.repository import Repository
from casckpt.saving.options import SaveOptions
from casckpt.store import objects

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from casckpt.loading.comparison import Comparison
    from casckpt.plan.difference import Difference
    from casckpt.ranks.ranks import Ranks

_MOST_OFTEN = 0.1  # minimum seconds between two polls of a watch


def plain(ref: str | Checkpoint) -> str | Commit:
    """Return a string reference unchanged, or the commit of a checkpoint."""
    return ref.commit if isinstance(ref, Checkpoint) else ref


def resolve(repo: Repository, ref: str | Checkpoint) -> Commit:
    """Return the commit that ``ref`` names. Raises NotFound, InvalidInput, Gone, and StorageError."""
    return refs.resolve(repo, plain(ref))


def resolve_to_load(repo: Repository, ref: str | Checkpoint) -> Commit:
    """Return the commit that ``ref`` names, and log a warning if it is forgotten.

    Raises Unsigned, and the errors of `resolve`.
    """
    commit = resolve(repo, ref)
    warn_if_forgotten(commit)
    if repo.trusted is not None:
        from casckpt.contents.signatures import check_trusted  # slow to import

        check_trusted(repo, commit.id, str(commit))
    return commit


def lease(repo: Repository, ref: str | Checkpoint, seconds: float) -> Lease:
    """Return a lease on the checkpoint that ``ref`` names. Raises NotFound if it is not visible."""
    commit = resolve(repo, ref)
    try:
        return Lease(repo, commit, seconds)
    except NotFound:
        if resolve(repo, ref) == commit:
            raise
    return lease(repo, ref, seconds)  # RUN@latest may now name a different checkpoint


def load(repo: Repository, store: object, state: Any, ref: str | Checkpoint, given: LoadOptions) -> Checkpoint:
    """Load into ``state`` as described in `Store.load` and `Store.update`.

    ``store``: the `Store`, needed for objects.
    """
    from casckpt.ranks.ranks import open_ranks
    from casckpt.tensors.state import holds_object

    ranks = open_ranks(given.process_group, no_dist=given.no_dist)
    tensors = partial(_load_tensors, repo, ranks)
    if not holds_object(state):
        return tensors(state, ref, given)
    loaded: Checkpoint = objects.home().load_objects(store, ranks, state, ref, given=given, load=tensors)
    return loaded


def _load_tensors(repo: Repository, ranks: Ranks, state: Any, ref: str | Checkpoint, given: LoadOptions) -> Checkpoint:
    from casckpt.loading.load import load_together

    return load_together(repo, ranks, state, ref, given, resolve=partial(resolve_to_load, repo, ref))


def pre_download(
    repo: Repository, ref: str | Checkpoint, state: Any, *, threads: int | None, progress: Progress,
    match: MatchArguments,
) -> int:  # fmt: skip
    """Fetch the bytes that a load into ``state`` needs into this host's cache, or all bytes if ``state`` is None.

    Returns the number of fetched bytes. Raises the same errors as `Store.pre_download`.
    """
    from casckpt.contents.signatures import get_trusted

    commit = resolve_to_load(repo, ref)
    manifest = get_trusted(repo, commit)
    wanted = list(manifest.blobs)
    if match or state is not None:
        from casckpt.loading.load import wanted_blobs

        given = LoadOptions(cast=True, allow_pickle=True, threads=threads, **match)
        wanted = wanted if state is None else wanted_blobs(repo, manifest, state, given.checked())
    progress.expect(sum(ref.size for ref in wanted))
    try:
        return repo.blob_cache.fill(repo.storage, wanted, threads or AT_ONCE, progress)
    except BlobDamaged as error:
        if not exists(repo, commit):
            raise gone(commit, commit.id, "while it was being fetched") from error
        raise Damaged(
            f"blob {error.ref.hash} is damaged: {error}. Checkpoint {commit} needs it. Run `casckpt verify`, then "
            "`casckpt repair`, on the store",
            blob=error.ref.hash,
            checkpoints=(commit.id,),
        ) from error


def read(
    repo: Repository, ref: str | Checkpoint, keys: Sequence[str] | None, device: str | torch.device, given: LoadOptions
) -> Any:
    """Return the state in new tensors on ``device``."""
    from casckpt.loading.load import read
    from casckpt.loading.options import usable_device

    on = usable_device(device)
    if given.mapped and on.type != "cpu":
        raise InvalidInput(f"device={str(on)!r} cannot hold mapped tensors: omit mapped=True, or omit the device")
    return read(repo, resolve_to_load(repo, ref), keys=keys, device=on, options=given.checked())


def watch(
    repo: Repository, run: str, after: str | int | Checkpoint | None, *, latest_only: bool, poll: Duration,
    timeout: Duration | None,
) -> Iterator[Arrival]:  # fmt: skip
    """Check the arguments and return an iterator over new checkpoints of ``run``."""
    from casckpt.contents import watching

    seconds, limit = seconds_of(poll, "poll"), optional_seconds(timeout, "timeout")
    if seconds < _MOST_OFTEN:
        raise InvalidInput(f"poll={poll!r} is too short: pass 0.1s or more")
    behind = f"{run}@{after}" if isinstance(after, int) else None if after is None else plain(after)
    watcher = watching.Watcher(repo, run, behind, latest_only=latest_only)
    arrivals = watching.watch(watcher, poll=seconds, timeout=limit)
    return (Arrival(Checkpoint(repo, one.commit), one.late) for one in arrivals)


def compare(
    repo: Repository, state: Any, ref: str | Checkpoint, group: ProcessGroup | None, *, no_dist: bool
) -> Comparison:
    """Compare a live ``state`` with a checkpoint. Every rank of ``group`` must make the call."""
    from casckpt.loading.comparison import compare_together
    from casckpt.ranks.ranks import open_ranks

    ranks = open_ranks(group, no_dist=no_dist)
    made: Any = objects.without_objects(ranks, state, SaveOptions(step=0))[0]
    return compare_together(repo, ranks, made, ref, lambda: resolve(repo, ref))


def diff(repo: Repository, old: str | Checkpoint, new: str | Checkpoint) -> Difference:
    """Return how the tensors of two checkpoints differ according to their manifests."""
    from casckpt.contents import manifests
    from casckpt.plan.difference import difference

    before, after = (manifests.get(repo, resolve(repo, ref)) for ref in (old, new))
    for manifest in (before, after):
        manifest.ready(objects=())
    return difference(before, after)


def attachments(repo: Repository, ref: str | Checkpoint) -> dict[str, int]:
    """Return the attachments' names, and their sizes in bytes."""
    from casckpt.contents import manifests
    from casckpt.format.sections.index import ATTACHMENT

    manifest = manifests.get(repo, resolve(repo, ref))
    short = {one.key: manifest.size(one) for one in manifest.body.attachments}
    return short | {entry.key: entry.nbytes for entry in manifest.entries if entry.kind == ATTACHMENT}


def read_attachment(repo: Repository, ref: str | Checkpoint, name: str) -> bytes:
    """Return the contents of an attachment. Raises NotFound."""
    from casckpt.contents import manifests
    from casckpt.loading.load import read_attachment

    return read_attachment(repo, manifests.get(repo, resolve_to_load(repo, ref)), name, LoadOptions())
