"""Tags that expire and leases, from the outside: what is held can be loaded, whatever gcs and policies do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from casckpt.errors import Conflict, InvalidInput, NotFound
from casckpt.repository.tags import list_tags
from casckpt.store.store import Store
from tests.support.saves import cells, same_state, small, steps


@pytest.fixture
def store() -> Store:
    """run@0 to run@2, each with a tensor of its own."""
    made = small()
    for step in range(3):
        made.save(state(step), run="run", step=step, metrics={"loss": 1.0 / (step + 1)}, healthy=step > 0)
    return made


def state(step: int) -> dict[str, Any]:
    return {"w": cells(3, seed=step)}


def gc(store: Store) -> list[int]:
    return [one.step for one in store.gc(keep_last=1, min_age=0, wait=0).purged]


def test_what_is_held_is_loaded_whatever_is_collected(store: Store) -> None:
    with store.lease("run@0") as ckpt:
        assert ckpt == store.get("run@0")
        assert gc(store) == [1]
        store.forget(ckpt, tagged=True)
        assert gc(store) == []
        with pytest.warns(UserWarning, match="forgotten"):
            assert same_state(store.read(ckpt), state(0))
    assert gc(store) == [0]
    with pytest.raises(Conflict, match="purged"), store.lease(ckpt):
        pass
    with pytest.raises(NotFound), store.lease(ckpt.id):
        pass


def test_a_tag_that_expires_is_a_tag_until_then(store: Store) -> None:
    store.tag("eval", "run@0", expires="12h")
    store.tag("eval", "run@0", expires=timedelta(hours=12))
    assert store.get("tag:eval") == store.tags()["eval"] == store.get("run@0")
    assert store.get("run@0").tags == ["eval"]
    with pytest.raises(Conflict, match="tagged"):
        store.forget("run@0")
    assert gc(store) == [1]
    store.untag("eval")
    assert gc(store) == [0]


@pytest.mark.parametrize("expires", [0, "0", "12", -1, 3600, "soon", True])
def test_a_duration_has_a_unit_and_lasts(store: Store, expires: Any) -> None:
    with pytest.raises(InvalidInput):
        store.tag("eval", "run@0", expires=expires)
    with pytest.raises(InvalidInput), store.lease("run@0", expires=expires):
        pass
    assert store.tags() == {}


def test_what_has_expired_names_nothing(store: Store) -> None:
    repo = store.repository
    store.tag("eval", "run@0", expires="1h")
    now = repo.clock
    repo.clock = lambda: now() + 2 * 3600 * 10**6
    assert store.tags() == {}
    assert store.get("run@0").tags == []
    with pytest.raises(NotFound, match="there is no tag 'eval'"):
        store.get("tag:eval")


def test_what_is_forgotten_is_neither_held_nor_restored(store: Store) -> None:
    (gone,) = store.forget("run@0")
    with pytest.raises(NotFound, match="only what is visible can be held"):
        store.tag("eval", gone.id, expires="1h")
    with pytest.raises(NotFound), store.lease(gone.id):
        pass
    assert steps(store) == [("run", 1), ("run", 2)]
    assert store.tags() == {}


def test_copies_keep_metrics_and_health_and_no_leases(store: Store) -> None:
    target = small()
    store.tag("best", "run@1")
    with store.lease("run@0"):
        store.tag("eval", "run@0", expires="1h")
        copied = store.copy_to(target, tags=True)
    assert copied.tags == ("best",)
    assert target.tags().keys() == {"best"}
    for mine, theirs in zip(store.checkpoints(), target.checkpoints(), strict=True):
        assert (mine.metrics, mine.healthy) == (theirs.metrics, theirs.healthy)
        assert mine.metrics


def test_a_lease_leaves_one_small_record_behind(store: Store) -> None:
    for _ in range(3):
        with store.lease("run@0"):
            pass
    gc(store)
    assert list_tags(store.repository).tags == {}
    assert len(list(store.repository.storage.list("tags/"))) == 3
