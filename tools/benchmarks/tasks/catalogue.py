"""A store with many checkpoints that is created without saves, and the cost of listing it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import Measured, Meter
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here
    from casckpt.format.extents import ExtentTable
    from casckpt.format.manifest import Draft
    from casckpt.format.sections.blobs import BlobRef
    from casckpt.format.sections.index import Name
    from casckpt.repository.repository import Repository

_BLOB = 1 << 20
_RUN = "bench"


def build(here: Here, folder: str, checkpoints: int, blobs: int, first: int = 0) -> int:
    """Add checkpoints of ``blobs`` blobs each, which are files without content. Return the number of objects."""
    repo = _open(folder, Path(folder).with_name("builder.cache"))
    repo.create()
    draw = random.Random(first)  # noqa: S311 - names for a benchmark
    for step in range(first, first + checkpoints):
        _add(repo, Path(folder), draw, step, blobs)
    return (first + checkpoints) * (blobs + 1)


def _add(repo: Repository, path: Path, draw: random.Random, step: int, count: int) -> None:
    from casckpt.contents import manifests
    from casckpt.format.keys import blob_key
    from casckpt.format.names import BlobHash
    from casckpt.format.records import Committed
    from casckpt.format.sections.blobs import BlobRef
    from casckpt.history import commits

    txid = repo.new_txid(_RUN, step)
    refs = [BlobRef(BlobHash(draw.randbytes(32).hex()), _BLOB + 4096, txid) for _ in range(count)]
    for number, ref in enumerate(refs):
        where = path / blob_key(txid, ref.hash)
        if not number:
            where.parent.mkdir(parents=True)
        fd = os.open(where, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444)
        os.ftruncate(fd, ref.size)  # takes no disk space
        os.close(fd)
    made = manifests.put(repo, txid, _draft(refs, step, draw))
    commits.commit(
        repo,
        Committed(
            txid=txid, run=_RUN, step=step, time=repo.clock(), manifest=made.id, head=made.head,
            manifest_bytes=len(made.data), created_at=step, bytes_total=count * _BLOB, tensors=count,
            store=repo.marker.store_id, who=repo.who,
        ),
    )  # fmt: skip


def _draft(refs: list[BlobRef], step: int, draw: random.Random) -> Draft:
    """Return a manifest with one tensor in each blob."""
    from casckpt._version import __version__
    from casckpt.format.extents import StoredCell, build
    from casckpt.format.manifest import Draft
    from casckpt.format.metrics import encode_metadata
    from casckpt.format.names import CellDigest
    from casckpt.format.regions import full_box
    from casckpt.format.sections.index import TENSOR
    from casckpt.format.sections.tables import Extents

    shape = (_BLOB // 4,)
    streams: dict[Name, tuple[str, ExtentTable]] = {}
    for number in range(len(refs)):
        place = StoredCell(number, 4096, _BLOB, full_box(shape), 0, shape[0], CellDigest(draw.randbytes(32)))
        streams[TENSOR, f"model.{number:05}", 0, None] = ("float32", build(shape, 4, shape[0], [place]))
    return Draft(
        casckpt=__version__, torch="", run=_RUN, step=step, created_at=step, parent=None, world_size=1,
        cell_bytes=_BLOB, metadata=encode_metadata({})[0], blobs=refs, streams=Extents.of(streams), tree=b"",
    )  # fmt: skip


def look(here: Here, *, folder: str, cache: str, what: str, checkpoints: int, blobs: int) -> Measured:
    """List, measure, or plan a gc, as the command line does: the store is reopened."""
    from casckpt.store.opening import open as open_store

    meter = Meter()
    store = open_store(folder, cache_dir=cache)
    if what == "list":
        found, wanted = len(store.checkpoints()), checkpoints
    elif what == "stats":
        found, wanted = store.stats().blobs, checkpoints * blobs
    else:
        plan = store.gc(keep_last=max(1, checkpoints // 2), dry_run=True)
        found, wanted = len(plan.forgotten), checkpoints - max(1, checkpoints // 2)
    measured = meter.stop()
    if found != wanted:
        raise WrongBytes(f"{what} found {found} instead of {wanted}")
    return measured


def _open(folder: str, cache: Path) -> Repository:
    import casckpt

    repo: Repository = casckpt.open(folder, cache_dir=cache).repository
    return repo
