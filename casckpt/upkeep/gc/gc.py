"""The phases of gc. gc is safe at any time, even during saves and during gc on other hosts.

gc does not take a lock, and its safety does not depend on clocks. Writers and other gc processes may pause and
continue at any time. "How objects are deleted" in docs/format.md defines the steps. tests/model explores all their
interleavings.

1. Restore tagged checkpoints, forget checkpoints that the policy does not keep, and purge those that have reached
   their minimum age.
2. List objects, except in folders that have a guard.
3. List commits. The candidates are the objects that no live commit names.
4. List open transactions.
5. Wait until each of them has ended, and revoke the dead ones.
6. Relist commits. Keep the objects that they name, except the objects of commits that were already purged or revoked
   in step 3. If the candidates include a manifest without a record, records are lost, and gc does not delete anything.
7. Delete the other candidates.

A gc that runs out of time stores its candidates, and the next gc continues with step 5.

On a full disk, gc puts its records with prepared files (`casckpt.storage.local.spare`). If they are used up, it repeats
all steps: first for what it has retired so far, then for a few checkpoints at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypedDict, TypeVar, Unpack

from casckpt.base.names import Runs
from casckpt.base.parallel import in_parallel
from casckpt.base.progress import Progress, silent
from casckpt.base.text import few
from casckpt.contents import blobs
from casckpt.contents.signatures import remove_signatures
from casckpt.errors import CasckptError, Conflict, NotFound, StorageError, Unsupported
from casckpt.format import notes
from casckpt.format.keys import parse_object, ran_key, uploader_folder
from casckpt.format.names import TxId
from casckpt.format.notes import PausedGc
from casckpt.format.records import Ran
from casckpt.history.commits import PREFIX as COMMITS
from casckpt.history.commits import Commit, CommitList, list_commits, list_names
from casckpt.history.tags import remove_old_generations
from casckpt.history.transactions import OpenTransaction, closed_files, end, has_died, open_transactions
from casckpt.plan.retention import Policy
from casckpt.repository.exclusive import remove_leftovers
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Repository
from casckpt.storage.failures import noting, unless_full
from casckpt.upkeep.gc.ages import ages_of
from casckpt.upkeep.gc.candidates import Candidates, Unreadable, candidates, commits_without_doubt, spare_roots
from casckpt.upkeep.gc.purge import (
    Deferred,
    GcPlan,
    RefusedFile,
    RetireProgress,
    bring_back,
    check_metrics,
    plan_retiring,
    refusals,
    retire,
    waiting_for,
    without_unmirrored,
)
from casckpt.upkeep.gc.recovery import settle
from casckpt.upkeep.inventory import BLOB, BlobUse, Inventory, list_unguarded, sums_of
from casckpt.upkeep.saves import check_recorded

T = TypeVar("T")
Sleep: TypeAlias = Callable[[float], None]

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between checks of the open transactions
SEEN_NOTE = "gc-signs-of-life"


@dataclass
class Limits:
    """How long gc waits in total, and how long a transaction may be silent before gc revokes it, in seconds.

    ``done``: receives the transactions that gc revokes, and what this user may not do.
    """

    wait: float
    revoke_after: float
    sleep: Sleep
    slept: float = 0.0
    pause: float = FIRST_PAUSE
    done: RetireProgress = field(default_factory=RetireProgress)

    def rest(self) -> None:
        """Sleep until the next check. The wait counts its sleeps instead of reading a clock, so it always ends."""
        seconds = min(self.pause, self.wait - self.slept)
        self.sleep(seconds)
        self.slept += seconds
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


def wait_until_closed(
    repo: Repository, waits: Iterable[TxId], patience: Limits, tell: Callable[[Sequence[OpenTransaction]], None]
) -> list[OpenTransaction]:
    """Wait until every transaction of ``waits`` has ended (steps 4 and 5 of the protocol).

    A transaction ends when it commits, or when its save or this function revokes it. This function revokes it if its
    process is provably dead, or if it shows no new sign of life for ``patience.revoke_after`` seconds. gc counts the
    signs of life. It measures the time between checks with this host's clock only, and never compares clocks. Revoking
    is always safe: at worst, a live save fails and is repeated. A transaction that this user may not revoke
    is still open. ``tell``: called at each check with the open transactions.

    Returns the transactions that did not end in time. Raises `StorageError`.
    """
    wanted, still = set(waits), list[OpenTransaction]()
    while wanted:
        looked = {one.txid: one for one in open_transactions(repo, list_names(repo))}
        wanted &= looked.keys()  # a transaction without its file has ended
        silent = _silence(repo, looked)
        still = []
        for txid in sorted(wanted):
            why = _why_dead(repo, looked[txid], silent[txid], patience.revoke_after)
            still.append(looked[txid])
            if why:
                with noting(patience.done.refused):
                    if end(repo, looked[txid], why):
                        patience.done.revoked.append(txid)
                    still.pop()
        if not still or patience.slept >= patience.wait:
            break
        tell(still)
        patience.rest()
    return still


def _why_dead(repo: Repository, transaction: OpenTransaction, silent: float, revoke_after: float) -> str:
    if transaction.began is not None and has_died(repo, transaction):
        return f"process {transaction.began.process.pid} on {transaction.began.process.host} is dead"
    if silent >= revoke_after:
        return f"no sign of life for {silent:.0f} seconds"
    return ""


def _silence(repo: Repository, looked: dict[TxId, OpenTransaction]) -> dict[TxId, float]:
    """Return the seconds since this host last saw a new sign of life, by transaction.

    A file stores the counts for the next gc.
    """
    before = notes.decode(repo.catalogue.note(SEEN_NOTE), notes.SIGNS_OF_LIFE) or {}
    now = repo.clock()
    seen = {}
    for txid, one in looked.items():
        signs, since = before.get(txid, (one.signs, now))
        seen[txid] = (signs, since) if signs == one.signs and since <= now else (one.signs, now)
    if seen != before:
        repo.catalogue.set_note(SEEN_NOTE, notes.encode(seen) if seen else None)
    return {txid: (now - since) / 1e6 for txid, (_, since) in seen.items()}


RESUME_NOTE = "gc-paused"


def load_resume_state(repo: Repository, commits: CommitList) -> PausedGc | None:
    """Return the state that a gc on this host stored for this store, or None. ``commits``: a new listing.

    An old state is safe to use: object keys are never reused, and a commit that was not purged when gc chose the
    candidates remains a root. Both hold only for the same store. Therefore, gc compares the URL and the ended
    transactions, and ignores the state of any copy of the store.
    """
    state = notes.decode(repo.catalogue.note(RESUME_NOTE), notes.PAUSED_GC)
    if state is None or state.url != repo.storage.url or None in map(parse_object, state.candidates):
        return None
    return state if state.ended <= commits.ended else None


log = logging.getLogger(__name__)

WAIT, REVOKE_AFTER = 60.0, 3600.0  # seconds
ATTEMPTS = 5
_NAMED_AT_MOST = 20
_RECORDS_EACH = 4  # prepared files for one checkpoint: forgotten, purged, and two that other processes may take
RECORDS = ("commits", "transactions", "settings", "tags", "leases", "damaged", "signatures", "probes", "runs", "ran")
"""The folders of a store, without objects/."""

Tell = Callable[[Sequence[Deferred]], None]
Age: TypeAlias = float | None


class GcOptions(TypedDict, total=False):
    """The options of `execute`."""

    wait: float
    revoke_after: float | None
    progress: Progress
    tell: Tell


@dataclass(frozen=True)
class GcResult:
    """The result of a gc or, with ``dry_run``, the expected result. Counts and sizes of blobs do not include manifests.

    ``later_blobs``, ``later_bytes``: number and size of the kept blobs that gc can delete once recently forgotten
    checkpoints are purged. ``waiting``: the work that remains for a later gc, with reasons. ``revoked``: transactions
    that were revoked. ``foreign``: keys under objects/ that casckpt did not create, and that gc ignores. ``restored``:
    checkpoints that received a tag while an earlier gc was forgetting them, if that gc was killed before it could
    restore them. ``refused``: files of other users that gc may not delete or create. If it may not create a record of a
    checkpoint, it does not purge that checkpoint. ``kept``: why the other visible checkpoints stay, by run@step:
    "newest", "keep-last 2", "tag best", or "no rule".

    If gc fails, its error has this result as ``done``. It lists the changes to checkpoints before the error, and all
    its counts are 0.
    """

    forgotten: tuple[Commit, ...] = ()
    restored: tuple[Commit, ...] = ()
    purged: tuple[Commit, ...] = ()
    deleted_blobs: int = 0
    deleted_bytes: int = 0
    deleted_manifests: int = 0
    kept_blobs: int = 0
    kept_bytes: int = 0
    later_blobs: int = 0
    later_bytes: int = 0
    waiting: tuple[Deferred, ...] = ()
    revoked: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    dry_run: bool = False
    refused: tuple[RefusedFile, ...] = ()
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)


def _counted(
    repo: Repository,
    done: GcResult,
    plan: GcPlan,
    stock: Inventory,
    *,
    deleted: Mapping[str, int],
    opened: Iterable[OpenTransaction],
    listed: CommitList,
) -> GcResult:
    """Return ``done`` with a gc's final counts. ``opened``: transactions that gc would have to wait for.

    ``listed``: the last listing that gc made.
    """
    gone, kept = sums_of(deleted.items()), stock.total(but=deleted)
    named = BlobUse(repo, listed.placed() if plan.young else ())
    later = named.alone(plan.young)
    return replace(
        done,
        deleted_blobs=gone.blobs,
        deleted_bytes=gone.blob_bytes,
        deleted_manifests=gone.manifests,
        kept_blobs=kept.blobs,
        kept_bytes=kept.blob_bytes,
        later_blobs=later.blobs,
        later_bytes=later.blob_bytes,
        foreign=tuple(stock.foreign),
        kept=plan.kept,
        waiting=(*plan.waiting, *map(waiting_for, opened)),
    )


def collect(
    repo: Repository,
    policy: Policy,
    *,
    run: Runs = None,
    min_age: float | None = None,
    dry_run: bool = False,
    **options: Unpack[GcOptions],
) -> GcResult:
    """Run a complete gc: `plan_gc`, and then `execute`, or `preview` with ``dry_run``.

    Raises InvalidInput for a metric that no checkpoint has, and the errors of these functions.
    """
    check_metrics(repo, policy, run, trims=True)
    plan = plan_gc(repo, policy, run=run, min_age=min_age)
    return preview(repo, plan) if dry_run else execute(repo, plan, **options)


def plan_gc(repo: Repository, policy: Policy | None = None, *, run: Runs = None, min_age: Age = None) -> GcPlan:
    """Plan which checkpoints gc forgets and purges. Writes nothing.

    ``policy``: the retention rules (None: forget nothing). ``run``: forget and purge only checkpoints of these runs.
    ``min_age``: seconds between forgetting and purging a checkpoint (None: the store's setting, or else 24 h, and 15
    minutes for ephemeral checkpoints). The plan leaves out checkpoints that are not safe in the store's mirror.

    Raises `NotFound` if there is no store, `Damaged` if records or tags cannot be read, `Unsupported` for storage on
    which gc cannot work, and `StorageError`.
    """
    _check_storage(repo)
    ages = ages_of(repo, min_age)  # before the listing: what it alone has is new
    commits = commits_without_doubt(repo, anew=not repo.storage.traits.remote)  # only if reading is cheap
    return without_unmirrored(repo, plan_retiring(repo, commits, policy or Policy(), ages, run))


def preview(repo: Repository, plan: GcPlan) -> GcResult:
    """Return the result that `execute` would have with ``plan``. Writes nothing.

    Counts deleted objects as if all purges had happened and no open transaction would commit. Raises the errors of
    `execute`, with the plan as ``done``.
    """
    as_purged = {commit.places.txid for commit in plan.purge}
    done = GcResult(plan.forget, plan.restore, plan.purge, waiting=plan.waiting, dry_run=True)
    with _noting(lambda: done):
        stock = list_unguarded(repo, plan.listed, as_purged=as_purged)
        found, listed = _candidates(repo, stock, plan, as_purged)
        check_recorded(repo, found.sizes, listed.recorded)
        opened = open_transactions(repo, listed.names) if found.sizes else []
        return _counted(repo, done, plan, stock, deleted=found.sizes, opened=opened, listed=listed)


def execute(
    repo: Repository,
    plan: GcPlan,
    *,
    wait: float = WAIT,
    revoke_after: float | None = None,
    progress: Progress = silent,
    tell: Tell = lambda waiting: None,
    sleep: Sleep = time.sleep,
) -> GcResult:
    """Carry out ``plan``, and delete the objects that no checkpoint needs.

    ``wait``: total seconds to wait for open transactions. After that, gc ends, and the next gc continues from there.
    ``revoke_after``: seconds without a new sign of life after which gc revokes a transaction (None: the store's
    setting, or else an hour). ``progress``: called with the number of objects just deleted. ``tell``: called with the
    transactions that gc is waiting for.

    Raises `Damaged`, with the checkpoints, if a manifest or a record cannot be read. In that case, gc does not delete
    anything. If it finds the damage early enough, it does not forget or purge anything either. Raises `Conflict` if
    other gc processes interfere repeatedly. Raises `Unsupported` for unsuitable storage, or if this version does not
    know one of the store's requirements for writers. Raises `StorageError`. Every error, including an interrupt, has
    the earlier changes to checkpoints as ``done``.
    """
    _check_storage(repo)
    settings = check_requirements(repo)
    if revoke_after is None:
        known = settings.revoke_after_seconds
        revoke_after = REVOKE_AFTER if known is None else known
    done = RetireProgress()
    plan = plan if plan.min_age is not None else replace(plan, min_age=ages_of(repo))
    gc = _Collection(repo, plan, Limits(wait, revoke_after, sleep, done=done), progress, tell)
    with _noting(lambda: _so_far(plan, done)):
        if plan.forget or plan.purge:
            _check_first(repo, plan)
        with unless_full():
            bring_back(repo, plan, done)
        plan = without_unmirrored(repo, plan)  # again: the mirror may have lost copies since
        _retire_and_delete(gc, plan)
        listed = settle(repo, revoke_after, done.refused)
        so_far = _so_far(plan, done)
        note_gc(repo, waiting=len(plan.waiting), refused=len(so_far.refused), opened=len(gc.still))
        return _counted(repo, so_far, plan, gc.stock, deleted=gc.deleted, opened=gc.still, listed=listed)


def with_room(repo: Repository, act: Callable[[], T]) -> T:
    """Return the result of ``act``. If there is no room for its records, delete what needs none, and try once more."""
    try:
        return act()
    except StorageError as error:
        if not error.full:
            raise
        log.info("%s; gc deletes what it can", error)
    with suppress(CasckptError):
        execute(repo, GcPlan((), ()), wait=0)
    return act()


def _retire_and_delete(gc: _Collection, plan: GcPlan) -> None:
    """Perform step 1 and all others. If there is no room for records, repeat them for a part of the plan at a time.

    A part has as many checkpoints as there are prepared files for, and is purged before the next one is forgotten.
    """
    repo, done = gc.repo, gc.patience.done
    logs, is_full = sorted({commit.txid for commit in (*plan.forget, *plan.purge)}), False
    count = len(logs) if repo.storage.bytes_free() is None else _part_size(repo)
    while logs and not (is_full and gc.still):  # otherwise, the objects of purged checkpoints would have to wait, too
        part = _part(plan, done, logs[:count])
        try:
            retire(repo, without_unmirrored(repo, part) if is_full else part, done)
            logs = logs[count:]
        except StorageError as error:
            if is_full or not error.full:
                raise
            is_full = True
        if is_full:
            gc.delete()
            count = _part_size(repo)
    if logs:
        log.warning("%s is full: %d checkpoints are left for the next gc", repo.storage.url, len(logs))
    if not is_full:
        gc.delete()


def _part_size(repo: Repository) -> int:
    return max(1, repo.storage.prepare() // _RECORDS_EACH)


def _part(plan: GcPlan, done: RetireProgress, logs: Container[TxId]) -> GcPlan:
    """Return what is left to do of a plan for some checkpoints."""
    forgotten, purged = {one.txid for one in done.forgotten}, {one.places.txid for one in done.purged}
    forget = tuple(one for one in plan.forget if one.txid in logs and one.txid not in forgotten)
    purge = tuple(one for one in plan.purge if one.txid in logs and one.places.txid not in purged)
    return replace(plan, forget=forget, purge=purge)


def _check_first(repo: Repository, plan: GcPlan) -> None:
    """Before gc forgets or purges a checkpoint, find errors that would prevent deletion."""
    stock = list_unguarded(repo, plan.listed)
    # if records are lost, the listing for the policy is incomplete
    check_recorded(repo, stock.sizes, plan.listed.recorded)
    _candidates(repo, stock, plan, {commit.places.txid for commit in plan.purge})


def _so_far(plan: GcPlan, done: RetireProgress) -> GcResult:
    """Return the partial results. ``waiting`` contains only checkpoints that this gc has forgotten."""
    forgotten = {places.txid for commit in done.forgotten for places in commit.existing}
    return GcResult(
        forgotten=tuple(done.forgotten),
        restored=tuple(done.restored),
        purged=tuple(done.purged),
        waiting=tuple(deferred for deferred in plan.waiting if deferred.txid in forgotten),
        revoked=tuple(done.revoked),
        refused=refusals(done.refused, plan.listed),
    )


@contextmanager
def _noting(done: Callable[[], GcResult]) -> Iterator[None]:
    """Attach the partial results to an error or interrupt, both as ``done`` and as a note in the traceback.

    A purge is final, so callers must be able to find out which checkpoints were purged.
    """
    try:
        yield
    except BaseException as error:
        result = done()
        vars(error)["done"] = result
        changes = {"forgotten": result.forgotten, "purged": result.purged, "restored": result.restored}
        if any(changes.values()) and not result.dry_run:
            named = (f"{how} {few(some, _NAMED_AT_MOST) or 'nothing'}" for how, some in changes.items())
            error.add_note(f"before this error, gc had {'; '.join(named)}")
        raise


@dataclass
class _Collection:
    """Steps 2 to 7 of a gc. Steps 3 and 6 make their own listings. Only step 2 may use an older listing."""

    repo: Repository
    plan: GcPlan
    patience: Limits
    progress: Progress
    tell: Tell
    deleted: dict[str, int] = field(default_factory=dict)
    stock: Inventory = field(default_factory=Inventory)
    still: Sequence[OpenTransaction] = ()

    def run(self) -> None:
        """Finish the work of an interrupted gc, then perform all steps."""
        guards = commits_without_doubt(self.repo)
        paused = load_resume_state(self.repo, guards)
        if paused is not None:
            if not self._finish_paused(paused):
                self.stock = list_unguarded(self.repo, guards)  # used to count the remaining objects
                return None
            guards = commits_without_doubt(self.repo)
        for _ in range(ATTEMPTS):
            with suppress(Unreadable):
                return self._pass(guards)
            guards = commits_without_doubt(self.repo)
        raise Conflict(
            "other gc processes repeatedly purged checkpoints that this one was reading; run one gc at a time"
        )

    def delete(self) -> None:
        """Perform steps 2 to 7, clean up, and prepare for a full disk."""
        self.run()
        _tidy(self.repo, self.stock, self.deleted, self.patience.done.refused)
        self.repo.storage.prepare()

    def _finish_paused(self, paused: PausedGc) -> bool:
        """Continue an interrupted gc at step 5. Return False if it has to wait longer."""
        check_requirements(self.repo)
        try:
            finished = self._finish(Candidates(paused.candidates, paused.ended), paused.waits)
        except Unreadable:
            finished = True  # another gc has deleted a manifest
        if finished:
            self.repo.catalogue.set_note(RESUME_NOTE, None)
        return finished

    def _pass(self, guards: CommitList) -> None:
        """Perform steps 2 to 7. ``guards``: an earlier listing. Raises `Unreadable` if gc must start over."""
        self.stock = list_unguarded(self.repo, guards)
        found, listed = candidates(self.repo, self.stock, self.plan.min_age)
        waits = frozenset(one.txid for one in open_transactions(self.repo, listed.names))
        live, spare = len(listed.live()), len(found.sizes)
        log.info("%s: %d live checkpoints, %d objects that none of them needs", self.repo.storage.url, live, spare)
        if found.sizes:
            if not self._finish(found, waits):
                paused = PausedGc(self.repo.storage.url, found.sizes, found.ended, waits)
                self.repo.catalogue.set_note(RESUME_NOTE, notes.encode(paused))
        else:  # do not wait, but revoke dead transactions
            look = replace(self.patience, wait=0, slept=0.0)
            wait_until_closed(self.repo, waits, look, lambda still: None)

    def _finish(self, found: Candidates, waits: Iterable[TxId]) -> bool:
        """Perform steps 5 to 7. Return False if the time is up."""
        self.still = wait_until_closed(
            self.repo, waits, self.patience, lambda still: self.tell([waiting_for(one) for one in still])
        )
        if self.still:
            return False
        spare_roots(self.repo, found, self.plan.min_age)
        check_requirements(self.repo)
        _settle_records(self.repo)
        self.deleted |= _delete(self.repo, found.sizes, self.progress, self.patience.done.refused)
        return True


def _candidates(repo: Repository, stock: Inventory, plan: GcPlan, gone: set[TxId]) -> tuple[Candidates, CommitList]:
    for _ in range(ATTEMPTS):
        with suppress(Unreadable):
            return candidates(repo, stock, plan.min_age, as_purged=gone)
    raise Conflict("another gc is purging checkpoints; run gc again when it finishes")


def _settle_records(repo: Repository) -> None:
    """Make other processes' records in commits/ durable, because these processes may have died before doing so.

    Otherwise, a power failure could undo a purge but not the deletions that followed it.
    """
    repo.storage.settle(COMMITS.rstrip("/"))


def _delete(
    repo: Repository, sizes: Mapping[str, int], progress: Progress, refused: list[StorageError]
) -> dict[str, int]:
    """Delete the objects, and return the deleted ones. Nothing else deletes any, but a failed save deletes its own.

    Deletes blobs first, because another gc can continue as long as a purged checkpoint's manifest exists. Any order is
    safe for live checkpoints, and a later gc deletes the remaining objects, such as those that are ``refused``.
    """
    deleted = dict[str, int]()

    def delete(key: str) -> None:
        with noting(refused):
            repo.storage.delete(key)
            deleted[key] = sizes[key]

    keys = sorted(sizes, key=lambda key: not key.endswith(BLOB))
    progress.expect(len(keys))
    blobs = sum(key.endswith(BLOB) for key in keys)
    for part in (keys[:blobs], keys[blobs:]):
        for _ in in_parallel(repo.storage.traits.parallel, delete, part, name="gc"):
            progress(1)
    return deleted


def _tidy(repo: Repository, stock: Inventory, deleted: Mapping[str, int], refused: list[StorageError]) -> None:
    """Remove files of closed transactions, old generations of tags and leases, and leftovers of failed puts.

    This does not disturb a put in progress: an objects folder is cleaned only if it has no open transaction. In
    addition, the folder must belong to a closed transaction, have held a deleted object, or have no guard.
    """
    ended = list_commits(repo).names  # of transactions that are over, too
    _settle_records(repo)
    files, opened = closed_files(repo, ended)
    uploaders = {name.uploader for key in deleted if (name := parse_object(key)) is not None}
    uploaders |= {*stock.loose, *files.values()}
    steps: tuple[Callable[[], object], ...] = (
        *(partial(repo.storage.sweep, uploader_folder(uploader)) for uploader in sorted(uploaders - opened)),
        *(partial(repo.storage.delete, key) for key in files),
        partial(remove_old_generations, repo), partial(remove_signatures, repo),
        partial(blobs.remove_marks, repo, deleted), partial(remove_leftovers, repo.storage, repo.clock),
        *(partial(repo.storage.sweep, folder, below=bool(folder)) for folder in ("", *RECORDS)),
    )  # fmt: skip
    for step in steps:
        with noting(refused):
            step()


def note_gc(repo: Repository, *, waiting: int, refused: int, opened: int) -> None:
    """Record that a gc has finished, and delete older notes. See `Ran`. A failure is no failure of the gc."""
    record = Ran(time=repo.clock(), who=repo.who, waiting=waiting, refused=refused, opened=opened)
    with suppress(CasckptError):
        repo.fresh().check_exists()  # it may have been moved or deleted: a note would create its folder again
        older = repo.numbered("ran/")
        repo.put_record(ran_key(max(older, default=-1) + 1), record)
        for number in older:
            repo.storage.delete(ran_key(number))


def last_gc(repo: Repository) -> Ran | None:
    """Return the newest note, or None if there is none.

    Raises `NotFound` if there is no store, `Damaged`, `Refused`, and `StorageError`.
    """
    repo.check_exists()
    for _ in range(ATTEMPTS):
        numbers = repo.numbered("ran/")
        with suppress(NotFound):  # another gc has just finished
            return repo.get_record(ran_key(max(numbers)), Ran) if numbers else None
    return None


def _check_storage(repo: Repository) -> None:
    if repo.storage.traits.stale:
        raise Unsupported(f"gc cannot run, because the listings may be out of date: {repo.storage.traits.stale}")
    refuses = repo.storage.traits.exclusive
    known = repo.settings.exclusive_create if refuses is None else refuses
    if known is False and not repo.single_writer:
        raise Unsupported(
            f"{repo.storage.url} does not refuse a second create, so a save and a gc could both create the same "
            "key: stop all saves, then open the store with single_writer"
        )
