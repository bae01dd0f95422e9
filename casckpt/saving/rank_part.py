"""One rank's part of a save. The rank stores new cells, and describes all of its cells."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress
from casckpt.contents import blobs
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.encodings.frames import MIN_CELL
from casckpt.format.keys import uploader_folder
from casckpt.format.manifest import Attachment, ObjectEntry
from casckpt.format.names import TxId
from casckpt.plan.reuse import ReusableCells
from casckpt.plan.writers import Words
from casckpt.repository.repository import Repository
from casckpt.saving.encoder import coding
from casckpt.saving.health_scan import HealthScan, ScanReport
from casckpt.saving.local_entries import plan_work
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, tensors_of
from casckpt.saving.reuse_offer import LastShare, ReuseOffer, reusable_cells
from casckpt.saving.shares import Share, joined, share_of
from casckpt.saving.upload import Upload
from casckpt.tensors.gpu import wait_for_gpus


@dataclass(frozen=True)
class RankPart:
    """The durable result of one rank.

    ``tree``: set only by a rank that saves alone. ``reread``: see `casckpt.saving.replicas.Compared.read_again`.
    """

    share: Share
    objects: Sequence[ObjectEntry]
    attachments: Sequence[Attachment]
    health: ScanReport
    tree: bytes = b""
    reread: tuple[int, Words] | None = None


def write_part(
    repo: Repository,
    txid: TxId,
    offer: ReuseOffer,
    prepared: Iterable[Prepared],
    options: SaveOptions,
    *,
    progress: Progress,
    last: LastShare | None = None,
) -> RankPart:
    """Find or store every cell of ``prepared`` in transaction ``txid``. All cells are durable when this returns.

    ``prepared``: iterated lazily, so that the values need not all be in memory together. ``last``: this rank's last
    share.
    """
    known = reusable_cells(repo, options.run, offer, last)
    scan = None if offer.unscanned is None else HealthScan(offer.unscanned)
    threads, cell_bytes = usable_threads(options.threads), repo.marker.cell_bytes
    shares, objects, attachments = [], list[ObjectEntry](), list[Attachment]()
    with coding(repo, known, options, offered=offer.compress) as coder:
        upload = Upload(repo, txid, (), known, threads, coder, scan, progress)  # of all rounds, to find equal cells
        for each in prepared:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
                wait_for_gpus(tensors_of(each))
            work = plan_work(each.sources, cell_bytes, known, each.streams, LEAF_BYTES if coder is None else MIN_CELL)
            total = sum(cell.nbytes for cells in work for cell in cells)
            upload.sources = each.sources
            if coder is not None:
                coder.expect(each.sources, work)
            while True:
                progress.expect(total)
                places = upload.place(work)
                reused = {number for placed in places for place in placed for number in place.needs}
                if not exclude_missing(repo, txid, known, reused):
                    break
            if any(upload.written):
                repo.storage.settle(uploader_folder(txid))
            shares.append(share_of(each, work, places, known=known, written=upload.written, cell_bytes=cell_bytes))
            objects += each.objects
            attachments += each.attachments
    return RankPart(joined(shares), objects, attachments, {} if scan is None else scan.report)


def exclude_missing(repo: Repository, txid: TxId, known: ReusableCells, reused: Collection[int]) -> bool:
    """Find the ``reused`` blobs that are missing or truncated. Mark them, so that no save reuses them from now on.

    Return whether there are any. If so, the caller must place the cells again.
    """
    lost = blobs.check_reused(repo, txid, [known.blobs[number] for number in sorted(reused)])
    if repo.cache_saves:
        for number in reused:
            repo.blob_cache.touch(known.blobs[number])
    names = {(ref.uploader, ref.hash) for ref in lost}
    missing = {number for number in reused if (known.blobs[number].uploader, known.blobs[number].hash) in names}
    for number in missing:
        known.exclude(number)
    return bool(missing)
