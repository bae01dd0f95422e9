"""The repair command: replaces damaged bytes with verified bytes from other sources.

1. Manifests are restored from another store that holds the same checkpoint.
2. Blobs are rebuilt leaf by leaf, from their remains and from copies: under another uploader, in the cache of this
   host, or in another store. Copies that are damaged in different places complete each other.
3. Blobs are rebuilt cell by cell, from equal cells of other blobs. Repair reencodes encoded cells, and creates a new
   header, padding and proof.
4. If a blob cannot be rebuilt, repair rewrites the checkpoint with the live cells in new blobs. This happens if the
   blob also held cells of purged checkpoints, or if this version would encode its frames differently. Repair also
   rewrites a checkpoint whose cells have a lost base, if these cells are available elsewhere.

`repair` checks the blobs that `verify` or a save has marked, and blobs that are missing or have the wrong size. Repair
cannot correct a blob that was marked only for a wrong frame, so step 4 replaces it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from casckpt.base.groups import grouped
from casckpt.base.progress import Progress, silent
from casckpt.contents import blobs, manifests
from casckpt.errors import CasckptError, Conflict, Damaged, Gone, Refused
from casckpt.format.keys import blob_key, manifest_key, parse_object, uploader_folder
from casckpt.format.manifest import Manifest, placed
from casckpt.format.names import CellDigest, ManifestId, TxId
from casckpt.format.records import Committed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.repository.fetching import BlobDamaged, fetch
from casckpt.repository.reading import check_requirements
from casckpt.repository.repository import Repository
from casckpt.upkeep.inventory import BLOB, list_objects
from casckpt.upkeep.repair.affected import DamagedBlob, describe
from casckpt.upkeep.repair.blob_check import Checked, check_blobs
from casckpt.upkeep.repair.blob_rebuild import CellSupply, rebuild_from_copies
from casckpt.upkeep.repair.cell_sources import BlobCopies, Cells, LiveCell, by_number, live_cells, readable, related
from casckpt.upkeep.repair.relocation import Relocation
from casckpt.upkeep.repair.verify import DamagedManifest, DamagedRecord, damaged_records, survey
from casckpt.upkeep.rewrite import record_of, rewrite


def repair_manifests(
    repo: Repository, broken: Iterable[tuple[Commit, CasckptError]], sources: Sequence[Repository]
) -> tuple[list[ManifestId], list[tuple[Commit, DamagedManifest]]]:
    """Restore damaged manifests from stores that hold the same checkpoint.

    Returns the restored ids, and the manifests that could not be restored. The index is the same in every store, but
    the blobs may differ. This host's catalogue may have the blobs' locations. Otherwise, repair guesses them, and
    compares the result with the hash in the commit record. If no guess is right, it rewrites the checkpoint.
    """
    restored, lost = [], []
    for commit, error in broken:
        if _restore(repo, commit, sources):
            restored.append(commit.id)
        else:
            lost.append((commit, DamagedManifest(commit.id, commit.run, commit.step, str(error))))
    return restored, lost


def _restore(repo: Repository, commit: Commit, sources: Sequence[Repository]) -> bool:
    for source, manifest in _holders(commit.id, sources):
        try:
            data = _same_bytes(repo, commit, manifest)
            if data is None:
                return _rewrite(repo, commit, source, manifest)
        except (Conflict, Damaged, Gone, Refused):  # the source is damaged, or another process forgot the checkpoint
            continue
        repo.storage.sweep(uploader_folder(commit.txid))  # the remains of a killed repair
        repo.storage.replace(manifest_key(commit.txid, commit.id), data)
        return True
    return False


def _holders(wanted: ManifestId, sources: Sequence[Repository]) -> Iterator[tuple[Repository, Manifest]]:
    for source in sources:
        same = [commit for commit in list_commits(source).live() if commit.id == wanted]
        for _, manifest in readable(source.fresh(), same):
            yield source, manifest


def _same_bytes(repo: Repository, commit: Commit, manifest: Manifest) -> bytes | None:
    """Return the lost bytes of a manifest, whose head has the hash in the record, or None if no guess is right."""
    wanted = commit.committed.head
    known = repo.catalogue.blobs(commit.txid, wanted)
    for lists in (manifest.blob_list.data, known, _guessed(repo, commit, manifest)):
        made = None if lists is None else placed(manifest, lists)
        if made is not None and made.head == wanted:
            return made.data
    return None


def _guessed(repo: Repository, commit: Commit, manifest: Manifest) -> bytes:
    """Guess the uploader of each blob: the checkpoint itself, otherwise the first uploader of that hash."""
    own = commit.txid
    names = (name for key in sorted(list_objects(repo)) if (name := parse_object(key)) and name.kind == BLOB)
    by_hash = grouped(names, lambda name: name.hash)
    places = ([name.uploader for name in by_hash.get(ref.hash, ())] for ref in manifest.blobs)
    found = (own if own in there or not there else there[0] for there in places)
    return encode_blobs(replace(ref, uploader=uploader) for ref, uploader in zip(manifest.blobs, found, strict=True))


def _rewrite(repo: Repository, commit: Commit, source: Repository, manifest: Manifest) -> bool:
    """Rewrite a checkpoint with known locations of its blobs. Return False if a blob is not available."""

    def save(txid: TxId, listed: CommitList) -> Committed | None:
        wanted = {ref.hash: ref for ref in manifest.blobs}
        others = [one for one in listed.live() if one.txid != commit.txid]
        there = manifests.locate(repo, others, wanted)
        missing = [ref for name, ref in wanted.items() if name not in there]
        if not all(_copy(repo, txid, source, ref) for ref in missing):
            return None
        repo.storage.settle(uploader_folder(txid))
        refs = [
            replace(ref, uploader=there[ref.hash].uploader if ref.hash in there else txid) for ref in manifest.blobs
        ]
        return record_of(repo, txid, commit, placed(manifest, encode_blobs(refs)))

    return rewrite(repo, commit, save) is not None


def _copy(repo: Repository, uploader: TxId, source: Repository, ref: BlobRef) -> bool:
    try:
        data = fetch(source.storage, ref, memoryview(bytearray(ref.size)))
    except (BlobDamaged, Refused):
        return False
    blobs.put(repo, uploader, ref.hash, data)
    return True


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewritten:
    """A checkpoint with cells in new blobs, because one of its blobs could not be repaired."""

    run: str
    step: int
    id: str


@dataclass(frozen=True)
class RepairResult:
    """The result of a repair.

    ``blobs``, ``manifests``: what was repaired, by hash and id. ``lost``: what could not be repaired. ``records``:
    records that are unreadable or missing. Only a copy of the store's files can have these records. Repair cannot know
    whether that copy is current, so a user must restore them.
    """

    blobs: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    rewritten: tuple[Rewritten, ...] = ()
    lost: tuple[DamagedBlob, ...] = ()
    lost_manifests: tuple[DamagedManifest, ...] = ()
    records: tuple[DamagedRecord, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether the store still has damage."""
        return bool(self.lost or self.lost_manifests or self.records)


@dataclass
class _Repair:
    repo: Repository
    progress: Progress
    live: dict[BlobRef, set[LiveCell]] = field(default_factory=dict)
    digests: set[CellDigest] = field(default_factory=set)
    missing: dict[BlobRef, list[LiveCell]] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)

    def put_back(self, ref: BlobRef, data: bytearray | memoryview, how: str) -> None:
        """Replace a blob with ``data``, which has its hash. Also remove the remains of a killed repair."""
        self.repo.storage.sweep(uploader_folder(ref.uploader))
        self.repo.storage.replace(blob_key(ref.uploader, ref.hash), memoryview(data))
        blobs.mark_repaired(self.repo, ref.uploader, ref.hash, how)
        self.fixed.append(ref.hash)
        self.progress(ref.size)

    def from_copies(self, wrong: Sequence[BlobRef], copies: BlobCopies) -> list[BlobRef]:
        """Restore the blobs that copies can complete. Return the others."""
        rest = []
        for ref in wrong:
            rebuilt = rebuild_from_copies(self.repo, ref, copies)
            if rebuilt.is_whole:
                self.put_back(ref, rebuilt.data, "from another copy")
            else:
                rest.append(ref)
                self.digests |= {leaf.digest for leaf in rebuilt.wrong}
        return rest

    def from_cells(self, wrong: Sequence[BlobRef], source: CellSupply) -> list[BlobRef]:
        """Restore the blobs that equal cells can complete. Return the others."""
        rest = []
        for ref in wrong:
            rebuilt = source.rebuild(self.repo, ref, self.live.get(ref, ()))
            if rebuilt.is_whole and (ref not in source.misframed or rebuilt.is_untouched):
                self.put_back(ref, rebuilt.data, "rebuilt from equal cells")
            else:
                rest.append(ref)
                self.missing[ref] = [cell for cell in rebuilt.missing if source.plain(cell) is None]
        return rest


def repair(repo: Repository, *, sources: Sequence[Repository] = (), progress: Progress = silent) -> RepairResult:
    """Repair ``repo``. ``sources``: other stores that may hold missing bytes. Repair only reads them.

    ``progress``: called with the number of bytes just restored. Raises `NotFound` (also for a missing source) and
    `StorageError`. Damage that cannot be repaired is reported, not raised.
    """
    for source in sources:
        source.check_exists()
    check_requirements(repo)
    listed = list_commits(repo)
    needed = survey(repo, listed.needed())
    restored, lost_manifests = repair_manifests(repo, needed.broken, sources)
    if restored:
        needed = survey(repo, listed.needed())
    wrong = _wrong(repo, needed.refs())
    log.info("%d blobs are damaged or missing; %d manifests were restored", len(wrong), len(restored))
    work = _Repair(repo, progress)
    copies = BlobCopies(repo, sources if wrong else ())
    misframed = {blob.ref: blob for blob in wrong if blob.is_right}
    rest = [*work.from_copies([blob.ref for blob in wrong if blob.ref not in misframed], copies), *misframed]
    rewritten: dict[TxId, Rewritten] = {}
    if rest:
        users = _collect(work, needed.commits, rest)
        supply = CellSupply(Cells((repo, *sources), work.digests), copies, misframed)
        rest = work.from_cells(rest, supply)
        rewritten = _relocate(Relocation(repo, work.live, work.missing, supply), users, rest)
    still = [_described(blob) for blob in wrong if blob.ref in rest]
    # checkpoints that this or another repair has rewritten no longer need the damaged blobs
    txids = {commit.txid for commit in list_commits(repo).needed()} if still or lost_manifests else set[TxId]()
    affected = [commit for commit in needed.commits if commit.txid in txids]
    return RepairResult(
        blobs=tuple(work.fixed),
        manifests=tuple(restored),
        rewritten=tuple(rewritten.values()),
        lost=tuple(describe(repo, affected, still)),
        lost_manifests=tuple(lost for commit, lost in lost_manifests if commit.txid in txids),
        records=tuple(damaged_records(repo, list_commits(repo, anew=True), anew=True)),
    )


def _wrong(repo: Repository, refs: Sequence[BlobRef]) -> list[Checked]:
    """Return needed blobs that are misframed, or that are marked, missing or of the wrong size and fail a check."""
    sizes = list_objects(repo)
    marked, misframed = blobs.damaged_marks(repo), blobs.frame_marks(repo)
    suspects = [
        ref for ref in refs
        if (ref.uploader, ref.hash) in marked or sizes.get(blob_key(ref.uploader, ref.hash)) != ref.size
    ]  # fmt: skip
    checked = list(check_blobs(repo, suspects, silent))
    wrong = []
    for blob in checked:
        if not blob.is_right or (blob.ref.uploader, blob.ref.hash) in misframed:
            wrong.append(blob)
            continue
        repo.storage.sweep(uploader_folder(blob.ref.uploader))
        blobs.mark_repaired(repo, blob.ref.uploader, blob.ref.hash, "repair found it intact")
    return wrong


def _described(blob: Checked) -> Checked:
    why = blob.why or blob.failed or "its bytes are unchanged, but its frames do not decode to the saved cells"
    return replace(blob, why=why, ranges=blob.ranges or ((0, blob.ref.size),))


def _collect(work: _Repair, commits: Sequence[Commit], wrong: Sequence[BlobRef]) -> dict[BlobRef, list[Commit]]:
    """Return the commits that use each blob in ``wrong``. Add the cells and digests to ``work``."""
    names = {(ref.uploader, ref.hash): ref for ref in wrong}
    users: dict[BlobRef, list[Commit]] = defaultdict(list)
    for commit, manifest in readable(work.repo, commits):
        wanted = by_number(manifest, names)
        try:
            live = live_cells(manifest, wanted) if wanted else {}
        except (Damaged, Refused):
            continue
        for ref, cells in live.items():
            work.live.setdefault(ref, set()).update(cells)
            users[ref].append(commit)
        work.digests |= related(manifest, wanted) if wanted else set()
    return users


def _relocate(
    relocation: Relocation, users: dict[BlobRef, list[Commit]], lost: Sequence[BlobRef]
) -> dict[TxId, Rewritten]:
    """Rewrite the checkpoints that need ``lost``. Return them by transaction, because several may have the same id."""
    done = {}
    hit = {commit.txid: commit for ref in lost for commit in users[ref]}
    for txid in sorted(hit):
        commit = hit[txid]
        try:
            new = relocation.relocate(commit, lost)
        except (Conflict, Damaged, Gone, Refused):
            continue  # another process changed it, or an unread part of its manifest is damaged
        if new is not None:
            done[txid] = Rewritten(commit.run, commit.step, commit.id)
    return done
