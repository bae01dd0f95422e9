"""One rank's part of a save. The rank stores new cells, and describes all of its cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress
from casckpt.contents import blobs
from casckpt.format.blob_writer import LEAF_BYTES
from casckpt.format.encodings.frames import MIN_CELL
from casckpt.format.keys import uploader_folder
from casckpt.format.manifest import Attachment, ObjectEntry
from casckpt.format.names import TxId
from casckpt.format.sections.blobs import BlobRef
from casckpt.plan.reuse import ReusableCells
from casckpt.plan.writers import Words
from casckpt.repository.repository import Repository
from casckpt.saving.encoder import coding
from casckpt.saving.health_scan import HealthScan, ScanReport
from casckpt.saving.local_entries import SmallCells, plan_work
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, tensors_of
from casckpt.saving.reuse_offer import ReuseOffer
from casckpt.saving.shares import Share, joined, share_of
from casckpt.saving.upload import PlacedCell, Upload
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
    known: ReusableCells,
    progress: Progress,
) -> RankPart:
    """Find or store every cell of ``prepared`` in transaction ``txid``. All cells are durable when this returns.

    ``prepared``: iterated lazily, so that the values need not all be in memory together. ``known``: the cells of
    ``offer``.
    """
    scan = None if offer.unscanned is None else HealthScan(offer.unscanned)
    threads, cell_bytes = usable_threads(options.threads), repo.marker.cell_bytes
    shares, objects, attachments = [], list[ObjectEntry](), list[Attachment]()
    with coding(repo, known, options, offered=offer.compress) as coder:
        upload = Upload(repo, txid, (), known, threads, coder, scan, progress)  # of all rounds, to find equal cells
        for each in prepared:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
                wait_for_gpus(tensors_of(each))
            work = plan_work(each.sources, cell_bytes, known, each.streams, LEAF_BYTES if coder is None else MIN_CELL)
            upload.sources = each.sources
            if coder is not None:
                coder.expect(each.sources, work)
            places = blobs.store(repo, txid, partial(upload.place, work), partial(_used, upload), known.exclude)
            if any(upload.refs[len(known.blobs) :]):
                repo.storage.settle(uploader_folder(txid))
            shares.append(share_of(each, work, places, upload))
            objects += each.objects
            attachments += each.attachments
    return RankPart(joined(shares), objects, attachments, {} if scan is None else scan.report)


def _used(upload: Upload, places: Iterable[Iterable[PlacedCell | SmallCells]]) -> Iterator[BlobRef]:
    numbers = {number for placed in places for place in placed for number in place.needs}
    return (ref for number in sorted(numbers) if (ref := upload.refs[number]) is not None)
