"""After a run was erased, a search over all bytes of the store's folder finds only what the documentation names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.store.store import Store
from tests.support.repositories import wait_for_clean_up
from tests.support.saves import cells, files, same_state, small_folder, steps
from tests.support.signing import pair

WORDS = [b"secret", b"frieda", b"accuracy", b"0.4711", b"hans", b"berta"]
"""Of the run's name, its metadata, a metric, an attachment, and the path of a tensor."""
A_MONTH = 31 * 24 * 3600 * 10**6


def state(step: int) -> dict[str, Any]:
    return {"base": cells(4, seed=0), "berta": cells(2, seed=step), "optim": cells(2, seed=step + 50)}


@pytest.fixture
def store(store_path: Path, tmp_path: Path) -> Store:
    """A store with a run whose checkpoints had all kinds of fates, and one that shares cells with it."""
    small_folder(store_path)
    made = casckpt.open(store_path, sign_with=pair(tmp_path).private)
    for step in range(5):
        save(made, step)
    save(made, 1, overwrite=True)
    made.thin("runs/secret@2", drop="optim")
    made.tag("best", "runs/secret@3")
    made.tag("best", "runs/secret@1")
    made.forget("runs/secret@4")
    made.save({"base": cells(4, seed=0)}, run="other", step=1)
    return made


def save(store: Store, step: int, **options: Any) -> None:
    store.save(
        state(step), run="runs/secret", step=step, metadata={"of": "frieda"}, metrics={"accuracy": 0.4711},
        attachments={"hans.txt": b"by hans"}, **options,
    )  # fmt: skip


def found(folder: Path) -> list[str]:
    """Return the files with one of the words in their bytes or in their path."""
    every = {str(path.relative_to(folder)): data for path, data in files(folder).items()}
    return sorted(name for name, data in every.items() if any(one in data or one in name.encode() for one in WORDS))


def test_no_word_of_a_run_is_left(store: Store, store_path: Path) -> None:
    every = b"".join(files(store_path).values())
    assert all(word in every for word in WORDS)
    erased = store.gc(erase="runs/secret").erased
    assert erased is not None
    assert erased.finished
    assert erased.shared
    assert found(store_path) == []
    assert steps(store) == [("other", 1)]
    assert same_state(store.read("other@1"), {"base": cells(4, seed=0)})
    assert not store.verify().is_damaged


def test_what_the_documentation_names_is_left(store: Store, store_path: Path) -> None:
    def fails(done: int, total: int) -> None:
        raise RuntimeError("hans")

    with pytest.raises(RuntimeError):
        save(store, 7, progress=fails)
    wait_for_clean_up()
    store.tag("secret", "runs/secret@3")
    store.save({"base": cells(4, seed=0)}, run="heir", step=1, lineage={"merged_from": [{"run": "runs/secret"}]})
    erased = store.gc(erase="runs/secret").erased
    assert erased is not None
    assert erased.finished
    assert [one.run for one in erased.named_by] == ["heir"]
    heir = store.get("heir@1").commit.places.txid
    left = [name for name in found(store_path) if heir not in name]
    failed, tagged, tag = left
    assert (failed.split("/")[0], tagged.split("/")[0], tag.split("/")[:2]) == (
        "commits",
        "commits",
        ["tags", "secret"],
    )
    clock = store.repository.clock
    store.repository.clock = lambda: clock() + A_MONTH
    store.save(state(8), run="runs/secret", step=8)  # the newest log of a run stays
    store.gc(erase="runs/secret")
    assert [name for name in found(store_path) if heir not in name] == [tag]
