"""Checkpoints that lost a blob are rewritten: the live cells that it held lie in new blobs, and the id stays.

What is there already, as in the blob that the rewrite of another one has made for both, is named and not stored again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from casckpt.format.names import TxId
from casckpt.format.records import Committed
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository import manifests
from casckpt.repository.commits import Commit, CommitList
from casckpt.repository.fetching import Spoilt
from casckpt.repository.repository import Repository
from casckpt.upkeep.recoding import Recoding
from casckpt.upkeep.repair.mending import Mending, Source
from casckpt.upkeep.repair.salvage import LiveCell
from casckpt.upkeep.rewriting import record_of, rewrite

_MEMORY = 1 << 30  # bytes of mended blobs


@dataclass(frozen=True)
class Relocation:
    """Rewrites checkpoints of ``repo``. ``live``: the cells that they need, by lost blob; they come from ``source``."""

    repo: Repository
    live: Mapping[BlobRef, Collection[LiveCell]]
    source: Source
    _mended: dict[BlobRef, Mending] = field(default_factory=dict)

    def relocate(self, commit: Commit, lost: Sequence[BlobRef]) -> Commit | None:
        """Rewrite ``commit`` so that it needs none of ``lost``; None if cells are missing.

        Raises `Conflict` if ``commit`` is not visible any more, or was changed by somebody else; `StorageError`.
        """
        manifest = manifests.get(self.repo, commit)
        refs = {(ref.uploader, ref.hash): ref for ref in lost}
        moving = {number for number, ref in enumerate(manifest.blobs) if (ref.uploader, ref.hash) in refs}

        def read(ref: BlobRef, offset: int, views: Sequence[memoryview]) -> None:
            for view in views:
                view[:] = self._mend(refs[ref.uploader, ref.hash]).part(offset, len(view))
                offset += len(view)

        def save(txid: TxId, listed: CommitList) -> Committed | None:
            recoding = Recoding(self.repo, self.repo, manifest, txid, listed, moving, jobs=1, read=read)
            try:
                return record_of(self.repo, txid, commit, recoding.run())
            except Spoilt:
                return None

        return rewrite(self.repo, commit, save)

    def _mend(self, ref: BlobRef) -> Mending:
        """Return what there is of a lost blob; the last ones are held."""
        if ref not in self._mended:
            while sum(one.size for one in (*self._mended, ref)) > _MEMORY and self._mended:
                del self._mended[next(iter(self._mended))]
            self._mended[ref] = self.source.mend(self.repo, ref, self.live[ref])
        return self._mended[ref]
