"""One rank's part of a save. It is complete, although its values arrive one by one."""

from __future__ import annotations

from collections.abc import Iterator

from casckpt.base.progress import silent
from casckpt.history.transactions import begin_save
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, prepare
from casckpt.saving.rank_part import write_part
from casckpt.saving.reuse_offer import ReuseOffer
from tests.support.saves import CELL, cells, small


def test_values_are_uploaded_individually_and_described_together() -> None:
    repo = small().repository
    transaction, _, _ = begin_save(repo, "a", 1)
    stored: list[int] = []

    def prepared() -> Iterator[Prepared]:
        for key in "xy":
            yield prepare({key: cells(2)}, {f"{key}.txt": b"text"}, rank=0, allow_pickle=False)
            stored.append(sum(entry.size for entry in repo.storage.list("objects/")))

    options = SaveOptions(run="a", step=1).checked()
    part = write_part(repo, transaction.txid, ReuseOffer(), prepared(), options, progress=silent)
    transaction.abort("the test ended")
    assert 2 * CELL <= stored[0] < stored[1]
    assert [key for _, key, _, _ in part.share.extents] == ["x", "y"]
    assert len(part.share.refs) == 2
    assert [attachment.name for attachment in part.attachments] == ["x.txt", "y.txt"]
