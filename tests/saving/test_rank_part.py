"""One rank's part of a save. It is complete, although its values arrive one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from casckpt.base.progress import silent
from casckpt.contents import manifests
from casckpt.format.keys import blob_key
from casckpt.history.transactions import begin_save
from casckpt.plan.reuse import ReusableCells
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import Prepared, prepare
from casckpt.saving.rank_part import write_part
from casckpt.saving.reuse_offer import ReuseOffer
from casckpt.store.opening import open as open_store
from tests.support.saves import CELL, cells, same_state, small

NOTHING = ReusableCells(None, [], lambda ref: False)


def test_values_are_uploaded_individually_and_described_together() -> None:
    repo = small().repository
    transaction, _, _ = begin_save(repo, "a", 1)
    stored: list[int] = []

    def prepared() -> Iterator[Prepared]:
        for key in "xy":
            yield prepare({key: cells(2)}, {f"{key}.txt": b"text"}, rank=0, allow_pickle=False)
            stored.append(sum(entry.size for entry in repo.storage.list("objects/")))

    options = SaveOptions(run="a", step=1).checked()
    part = write_part(repo, transaction.txid, ReuseOffer(), prepared(), options, known=NOTHING, progress=silent)
    transaction.abort("the test ended")
    assert 2 * CELL <= stored[0] < stored[1]
    assert [key for _, key, _, _ in part.share.extents] == ["x", "y"]
    assert len(part.share.refs) == 2
    assert [attachment.name for attachment in part.attachments] == ["x.txt", "y.txt"]


def test_a_cell_that_is_equal_in_two_rounds_is_stored_once() -> None:
    repo, same = small().repository, cells(2)
    transaction, _, _ = begin_save(repo, "a", 1)
    prepared = (prepare({key: same}, None, rank=0, allow_pickle=False) for key in "xy")
    options = SaveOptions(run="a", step=1).checked()
    part = write_part(repo, transaction.txid, ReuseOffer(), prepared, options, known=NOTHING, progress=silent)
    transaction.leave()
    assert len(part.share.refs) == 1
    assert len(list(repo.storage.list("objects/"))) == 1


def test_cells_of_missing_blobs_are_stored_again_in_blob_order(tmp_path: Path) -> None:
    saved = {
        "a": torch.arange(40.0).double(),  # is in columns, and the others are not
        "b": torch.arange(7, dtype=torch.uint8)[::2],
        "c": torch.arange(5, dtype=torch.int64)[::2],
    }
    store = open_store(tmp_path / "store")
    (ref,) = manifests.get(store.repository, store.save(saved, step=0).commit).blobs
    (tmp_path / "store" / blob_key(ref.uploader, ref.hash)).unlink()
    store.save(saved, step=1)
    assert same_state(store.read("latest"), saved)
    assert ref not in manifests.get(store.repository, store.get("latest").commit).blobs
