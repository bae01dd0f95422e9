"""repair: put right bytes back where damaged ones are, from wherever they can be had and proved right.

1. manifests, from another store that holds the same checkpoint
2. blobs, leaf by leaf: what is left of them, and of copies under another uploader's name, in the cache of this host, or
   in another store; damaged copies mend each other
3. blobs, cell by cell: equal cells of other blobs, coded again where they were; header, padding and proof made anew
4. where a blob cannot be had again because it also held dead cells, or its frames are made otherwise now: the
   checkpoint is rewritten, and the live cells lie in new blobs; so is one whose cells are told from what is lost, if
   they can be had elsewhere

`repair` looks at blobs that `verify` or a save has marked, and at those that are gone or of another size. Those that
were marked for a frame of another cell alone cannot be made right: 4 is done with them.
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
from casckpt.format.draft import placed
from casckpt.format.keys import blob_key, manifest_key, parse_object, uploader_folder
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest, ManifestId, TxId
from casckpt.format.records import Committed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.history.commits import Commit, CommitList, list_commits
from casckpt.repository.fetching import BlobDamaged, fetch
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.upkeep.inventory import BLOB, list_objects
from casckpt.upkeep.repair.affected import DamagedBlob, describe
from casckpt.upkeep.repair.blob_check import Checked, check_blobs
from casckpt.upkeep.repair.blob_rebuild import CellSupply, mend_from_copies
from casckpt.upkeep.repair.cell_sources import BlobCopies, Cells, LiveCell, live_cells, readable, related
from casckpt.upkeep.repair.relocation import Relocation
from casckpt.upkeep.repair.verify import DamagedManifest, DamagedRecord, damaged_records, survey
from casckpt.upkeep.rewrite import record_of, rewrite


def repair_manifests(
    repo: Repository, broken: Iterable[tuple[Commit, CasckptError]], sources: Sequence[Repository]
) -> tuple[list[ManifestId], list[tuple[Commit, DamagedManifest]]]:
    """Restore damaged manifests from stores that hold the same checkpoint.

    Returns the restored ids, and the manifests that could not be restored. The index is the same in every store, but
    the blobs may differ. The catalogue of this host may know where they lie; otherwise a guess is verified against the
    hash in the commit record. If no guess is right, the checkpoint is rewritten.
    """
    mended, lost = [], []
    for commit, error in broken:
        if _mend(repo, commit, sources):
            mended.append(commit.id)
        else:
            lost.append((commit, DamagedManifest(commit.id, commit.run, commit.step, str(error))))
    return mended, lost


def _mend(repo: Repository, commit: Commit, sources: Sequence[Repository]) -> bool:
    for source, manifest in _holders(commit.id, sources):
        try:
            data = _same_bytes(repo, commit, manifest)
            if data is None:
                return _rewrite(repo, commit, source, manifest)
        except (Conflict, Damaged, Gone, Refused):  # of the source, or somebody forgot the checkpoint just now
            continue
        repo.storage.sweep(uploader_folder(commit.txid))  # of a repair that was killed
        repo.storage.replace(manifest_key(commit.txid, commit.id), data)
        return True
    return False


def _holders(wanted: ManifestId, sources: Sequence[Repository]) -> Iterator[tuple[Repository, Manifest]]:
    for source in sources:
        same = [commit for commit in list_commits(source).live() if commit.id == wanted]
        for _, manifest in readable(source.fresh(), same):
            yield source, manifest


def _same_bytes(repo: Repository, commit: Commit, manifest: Manifest) -> bytes | None:
    """Return the bytes that were lost, which have the head that the record names; None if they cannot be had."""
    wanted = commit.committed.head
    known = repo.catalogue.blobs(commit.txid, wanted)
    for lists in (manifest.blob_list.data, known, _guessed(repo, commit, manifest)):
        made = None if lists is None else placed(manifest, lists)
        if made is not None and made.head == wanted:
            return made.data
    return None


def _guessed(repo: Repository, commit: Commit, manifest: Manifest) -> bytes:
    """Guess where the blobs lie: under the checkpoint's own uploader, or wherever there is one of this name."""
    own = commit.txid
    names = (name for key in sorted(list_objects(repo)) if (name := parse_object(key)) and name.kind == BLOB)
    by_hash = grouped(names, lambda name: name.hash)
    places = ([name.uploader for name in by_hash.get(ref.hash, ())] for ref in manifest.blobs)
    found = (own if own in there or not there else there[0] for there in places)
    return encode_blobs(replace(ref, uploader=uploader) for ref, uploader in zip(manifest.blobs, found, strict=True))


def _rewrite(repo: Repository, commit: Commit, source: Repository, manifest: Manifest) -> bool:
    """Rewrite a checkpoint with places that are known. False if a blob of it cannot be had."""

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
    """A checkpoint that lies at other places now, because a blob of it could not be had again."""

    run: str
    step: int
    id: str


@dataclass(frozen=True)
class RepairResult:
    """``blobs``, ``manifests``: hashes and ids of what is right again. ``lost``: what could not be repaired.

    ``records``: those that cannot be read, or are missing. No other store has them but one whose files were copied, and
    nothing there tells whether it went on by itself since; so they are put back by hand.
    """

    blobs: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    rewritten: tuple[Rewritten, ...] = ()
    lost: tuple[DamagedBlob, ...] = ()
    lost_manifests: tuple[DamagedManifest, ...] = ()
    records: tuple[DamagedRecord, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Is anything still damaged?"""
        return bool(self.lost or self.lost_manifests or self.records)


@dataclass
class _Repair:
    repo: Repository
    sources: Sequence[Repository]
    progress: Progress
    live: dict[BlobRef, set[LiveCell]] = field(default_factory=dict)
    digests: set[CellDigest] = field(default_factory=set)
    missing: dict[BlobRef, list[LiveCell]] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)

    def put_back(self, ref: BlobRef, data: bytearray | memoryview, how: str) -> None:
        """Put ``data``, which has the hash of ``ref``, in its place, and remove what a killed repair has left there."""
        self.repo.storage.sweep(uploader_folder(ref.uploader))
        self.repo.storage.replace(blob_key(ref.uploader, ref.hash), memoryview(data))
        blobs.mark_repaired(self.repo, ref.uploader, ref.hash, how)
        self.fixed.append(ref.hash)
        self.progress(ref.size)

    def from_copies(self, wrong: Sequence[BlobRef], copies: BlobCopies) -> list[BlobRef]:
        """Put back what copies give; return those for which that is not enough."""
        rest = []
        for ref in wrong:
            found = mend_from_copies(self.repo, ref, copies)
            if found.is_whole:
                self.put_back(ref, found.data, "from another copy")
            else:
                rest.append(ref)
                self.digests |= {leaf.digest for leaf in found.wrong}
        return rest

    def from_cells(self, wrong: Sequence[BlobRef], source: CellSupply) -> list[BlobRef]:
        """Put back what equal cells give, too; return those for which that is not enough."""
        rest = []
        for ref in wrong:
            found = source.mend(self.repo, ref, self.live.get(ref, ()))
            if found.is_whole and (ref not in source.misframed or found.is_untouched):
                self.put_back(ref, found.data, "rebuilt from equal cells")
            else:
                rest.append(ref)
                self.missing[ref] = [cell for cell in found.missing if source.plain(cell) is None]
        return rest


def repair(repo: Repository, *, sources: Sequence[Repository] = (), progress: Progress = silent) -> RepairResult:
    """Repair what is damaged in ``repo``. ``sources``: other stores that may hold what is missing; they are only read.

    ``progress``: called with the bytes just put back. Raises `NotFound`, also for a source that is not there,
    `StorageError`; what cannot be repaired is reported, not raised.
    """
    for other in sources:
        other.check_exists()
    check_requirements(repo)
    listed = list_commits(repo)
    found = survey(repo, listed.needed())
    mended, lost_manifests = repair_manifests(repo, found.broken, sources)
    if mended:
        found = survey(repo, listed.needed())
    wrong = _wrong(repo, found.refs())
    log.info("%d blobs are damaged or gone; %d manifests were put back", len(wrong), len(mended))
    work = _Repair(repo, sources, progress)
    copies = BlobCopies(repo, sources if wrong else ())
    misframed = {one.ref: one for one in wrong if one.is_right}
    rest = [*work.from_copies([one.ref for one in wrong if one.ref not in misframed], copies), *misframed]
    rewritten: dict[TxId, Rewritten] = {}
    if rest:
        users = _collect(work, found.commits, rest)
        source = CellSupply(Cells((repo, *sources), work.digests), copies, misframed)
        rest = work.from_cells(rest, source)
        rewritten = _relocate(Relocation(repo, work.live, work.missing, source), users, rest)
    still = [_told(one) for one in wrong if one.ref in rest]
    # what was rewritten does not need it any more, be it by another repair meanwhile
    needed = {one.txid for one in list_commits(repo).needed()} if still or lost_manifests else set[TxId]()
    hit = [commit for commit in found.commits if commit.txid in needed]
    return RepairResult(
        blobs=tuple(work.fixed),
        manifests=tuple(mended),
        rewritten=tuple(rewritten.values()),
        lost=tuple(describe(repo, hit, still)),
        lost_manifests=tuple(lost for commit, lost in lost_manifests if commit.txid in needed),
        records=tuple(damaged_records(repo, list_commits(repo, anew=True), anew=True)),
    )


def _wrong(repo: Repository, refs: Sequence[BlobRef]) -> list[Checked]:
    """Find the live blobs that are marked, gone, or of another size, and are not right now; and what is misframed."""
    sizes = list_objects(repo)
    marked, misframed = blobs.damaged_marks(repo), blobs.frame_marks(repo)
    suspects = [
        ref for ref in refs
        if (ref.uploader, ref.hash) in marked or sizes.get(blob_key(ref.uploader, ref.hash)) != ref.size
    ]  # fmt: skip
    checked = list(check_blobs(repo, suspects, silent))
    for one in checked:
        if one.is_right and (one.ref.uploader, one.ref.hash) not in misframed:
            repo.storage.sweep(uploader_folder(one.ref.uploader))
            blobs.mark_repaired(repo, one.ref.uploader, one.ref.hash, "repair found it right")
    return [one for one in checked if not one.is_right or (one.ref.uploader, one.ref.hash) in misframed]


def _told(one: Checked) -> Checked:
    """Return the same, as it is told of."""
    why = one.why or one.failed or "it is what was written, but frames in it make other cells than were saved"
    return replace(one, why=why, ranges=one.ranges or ((0, one.ref.size),))


def _collect(work: _Repair, commits: Sequence[Commit], wrong: Sequence[BlobRef]) -> dict[BlobRef, list[Commit]]:
    """Find out who uses each of ``wrong``; their cells go into ``work.live``, what may help into ``work.digests``."""
    names = {(ref.uploader, ref.hash): ref for ref in wrong}
    users: dict[BlobRef, list[Commit]] = defaultdict(list)
    for commit, manifest in readable(work.repo, commits):
        numbered = enumerate((ref.uploader, ref.hash) for ref in manifest.blobs)
        wanted = {number: names[name] for number, name in numbered if name in names}
        try:
            found = live_cells(manifest, wanted) if wanted else {}
        except (Damaged, Refused):
            continue
        for ref, cells in found.items():
            work.live.setdefault(ref, set()).update(cells)
            users[ref].append(commit)
        work.digests |= related(manifest, wanted) if wanted else set()
    return users


def _relocate(
    relocation: Relocation, users: dict[BlobRef, list[Commit]], lost: Sequence[BlobRef]
) -> dict[TxId, Rewritten]:
    """Rewrite what needs ``lost``; return it by transaction, for several checkpoints may have one id."""
    done = {}
    hit = {commit.txid: commit for ref in lost for commit in users[ref]}
    for txid in sorted(hit):
        commit = hit[txid]
        try:
            new = relocation.relocate(commit, lost)
        except (Conflict, Damaged, Gone, Refused):
            continue  # somebody changed it just now; or its manifest is damaged where nobody has looked yet
        if new is not None:
            done[txid] = Rewritten(commit.run, commit.step, commit.id)
    return done
