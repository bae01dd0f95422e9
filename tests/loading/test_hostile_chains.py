"""Manifests with correct hashes and wrong bases: loads refuse them, or return the correct bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from casckpt.errors import Damaged, Refused
from casckpt.format.extents import Frame, StoredCell, build
from casckpt.format.manifest import placed
from casckpt.format.sections.blobs import encode_blobs
from casckpt.saving.encoder import forget_run
from casckpt.store.store import Store
from casckpt.upkeep.rewrite import rewrite, rewritten
from tests.support.coded import Stored
from tests.support.saves import reopened, same_state, small, trained

STEPS = 4
Change = Callable[[StoredCell, StoredCell], StoredCell]
"""Creates a replacement for a chain's link. The second argument is the same link of the tensor's next cell."""


def saved() -> Store:
    store = small()
    for step in range(STEPS):
        store.save({"w": trained(8, step)}, step=step, compress="auto")
    return store


def changed(store: Store, link: int, change: Change) -> None:
    """Return the newest checkpoint, with a different link in the chain of its first cell."""
    mine = Stored(store, "latest")
    (entry,) = mine.manifest.entries
    table = mine.table(entry)
    cells = list(table.stored_cells())
    cells[0] = _relinked(list(cells[0].chain), list(cells[1].chain), link, change)
    moved = {entry.number: build(table.shape, table.itemsize, table.cell, cells)}
    refs = encode_blobs(mine.refs)
    repo = store.repository
    made = placed(mine.manifest, refs, moved)
    rewrite(repo, mine.commit, lambda txid: rewritten(repo, txid, mine.commit, made))


def _relinked(chain: list[StoredCell], other: list[StoredCell], link: int, change: Change) -> StoredCell:
    below = chain[link + 1] if link + 1 < len(chain) else None
    made = change(chain[link], other[link])
    if made.frame is not None and below is not None and made.base == chain[link].base:
        made = made._replace(frame=Frame(made.frame.nbytes, below))
    for one in reversed(chain[:link]):
        assert one.frame is not None
        made = one._replace(frame=Frame(one.frame.nbytes, made))
    return made


def place_of_another(cell: StoredCell, other: StoredCell) -> StoredCell:
    frame = None if cell.frame is None or other.frame is None else Frame(other.frame.nbytes, cell.base)
    return cell._replace(blob=other.blob, offset=other.offset, frame=frame)


def digest_of_another(cell: StoredCell, other: StoredCell) -> StoredCell:
    return cell._replace(digest=other.digest)


def another(cell: StoredCell, other: StoredCell) -> StoredCell:
    """Return a link with the correct location, and with the digest and bases of a different cell."""
    return other._replace(box=cell.box, lo=cell.lo, hi=cell.hi)


def without_its_base(cell: StoredCell, _: StoredCell) -> StoredCell:
    return cell._replace(frame=cell.frame and Frame(cell.frame.nbytes))


def as_it_lies(cell: StoredCell, _: StoredCell) -> StoredCell:
    return cell._replace(frame=None)


def told_from_the_one_after_next(cell: StoredCell, _: StoredCell) -> StoredCell:
    base = cell.base and cell.base.base
    return cell if base is None or cell.frame is None else cell._replace(frame=Frame(cell.frame.nbytes, base))


CHANGES = [place_of_another, digest_of_another, another, without_its_base, as_it_lies, told_from_the_one_after_next]


@pytest.mark.sweep
@pytest.mark.parametrize("link", range(STEPS))
@pytest.mark.parametrize("change", CHANGES)
def test_reads_of_hostile_chains_are_correct_or_rejected(change: Change, link: int) -> None:
    """The cell's own digest is in the cell table, which the id covers."""
    store, wanted = saved(), {"w": trained(8, STEPS - 1)}
    if change is digest_of_another and not link:
        return
    changed(store, link, change)
    for verify in (True, False):
        try:
            found = reopened(store).read("latest", verify=verify)
        except (Damaged, Refused):
            continue
        assert not verify or same_state(found, wanted)
    for step in range(STEPS - 1):
        assert same_state(reopened(store).read(f"default@{step}"), {"w": trained(8, step)})
    later = {"w": trained(8, STEPS)}
    forget_run(store.repository, "default")  # a new process, which remembers nothing about the run
    reopened(store).save(later, step=STEPS, compress="auto")
    assert same_state(reopened(store).read("latest"), later), "what a new process is told of the bases it looks at"


@pytest.mark.parametrize("change", CHANGES)
def test_a_process_with_the_bytes_in_memory_trusts_a_live_manifest(change: Change) -> None:
    """The process also trusts it for unchanged cells. The result may be damaged, but it is never wrong."""
    store, later = saved(), {"w": trained(8, STEPS)}
    changed(store, 1, change)
    store.save(later, step=STEPS, compress="auto")
    with suppress(Damaged):
        assert same_state(reopened(store).read("latest"), later)
