"""A repair that rewrites a checkpoint, and is killed before or after any of its changes, or gets no response.

At every instant, exactly one commit is valid for the ID, and no leftovers remain at the end.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from casckpt.contents import manifests
from casckpt.contents.refs import resolve
from casckpt.errors import CasckptError
from casckpt.format.keys import manifest_key
from casckpt.format.names import ManifestId
from casckpt.history import commits, tags
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.repair.repair import repair
from casckpt.upkeep.repair.verify import verify
from tests.support.announced import undecided
from tests.support.checkpoints import array, content, read_arrays, save_arrays
from tests.support.coded import code
from tests.support.dying import WAYS, Dying, Killed
from tests.support.gcs import collect
from tests.support.repositories import again, memory, objects_of, repository

pytestmark = pytest.mark.sweep
KEPT = {"a": array(1, 3), "new": array(7)}


def near(data: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the same data, except for a few elements."""
    changed = data.copy()
    changed[::100] = 0
    return changed


class Damaged:
    """A store in which run@1 is damaged, and run@2 is its successor.

    The damage is one of the following:

    - A blob is unrecoverable because it holds dead cells.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.other = repository(folder / "other", seed=2)
        repo = repository(folder / "first", memory())
        old = {"a": KEPT["a"], "dead": array(9)} if what != "coded" else {key: near(KEPT[key]) for key in KEPT}
        older, twin = save_arrays(repo, old), save_arrays(repo, old, step=3)
        newer = save_arrays(repo, KEPT, step=1, reuse=twin if what == "manifest" else older)
        if what == "coded":
            newer = code(Store(repo), "run@1", "run@0")
        save_arrays(repo, {"x": array(20)}, step=2)
        self.id = newer.id
        tags.set_tag(repo, "best", newer)
        save_arrays(self.other, KEPT)
        gone = {older.txid, twin.txid} | ({newer.txid} if what == "coded" else set())
        refs = [ref for ref in manifests.get(repo, newer).blobs if ref.uploader in gone]
        assert len(refs) == len({ref.uploader for ref in refs})
        if what != "manifest":
            for one in (older, twin):
                commits.forget(repo, one)
            collect(repo)
            for ref in refs:
                repo.storage.delete(f"objects/{ref.uploader}/{ref.hash}.safetensors")
        else:
            self._copy_manifest(repo, newer)
            repo.storage.delete(manifest_key(newer.txid, newer.id))
        verify(repo)
        self.objects = objects_of(repo.storage)

    def _copy_manifest(self, repo: Repository, commit: commits.Commit) -> None:
        from tests.support.repairs import copy_into

        copy_into(self.other, repo, commit)


def check_now(repo: Repository, id: ManifestId) -> None:
    """Check the invariants."""
    listed = list_commits(repo)
    (visible,) = (one for one in listed.visible() if one.id == id)
    assert resolve(repo, "run@1") == resolve(repo, id) == resolve(repo, "tag:best") == visible
    assert resolve(repo, "run@latest").step == 2
    for one in listed.visible():
        with suppress(CasckptError):
            assert one.id != id or read_arrays(repo, one) == content(KEPT)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["blob", "manifest", "coded"])
def test_a_repair_killed_at_any_change_loses_nothing(
    tmp_path: Path, what: str, way: str, seed: int, full: bool
) -> None:
    damaged, stride = Damaged(tmp_path, what), 1 if full else 2
    at, ended = seed % stride, False
    while not ended:
        at += stride
        folder, storage = tmp_path / f"{way} {at}", again(damaged.objects)
        dying = Dying(storage, at, way)
        with suppress(Killed, CasckptError):
            repair(repository(folder / "cut off", dying, seed=3), sources=[damaged.other])
        ended = dying.changes < at
        repo = repository(folder / "next", storage, seed=4)
        check_now(repo, damaged.id)
        assert not repair(repo, sources=[damaged.other]).is_damaged
        check_now(repo, damaged.id)
        assert read_arrays(repo, resolve(repo, damaged.id)) == content(KEPT)
        for _ in range(3):
            collect(repo, wait=0.0, revoke_after=0.0)
            check_now(repo, damaged.id)
        assert not verify(repo).is_damaged
        listed = list_commits(repo)
        assert listed.live() == listed.visible()
        assert (undecided(repo), list(storage.list("transactions/"))) == ([], [])
        assert read_arrays(repository(folder / "new", storage, seed=5), resolve(repo, damaged.id)) == content(KEPT)
    assert at > 6
