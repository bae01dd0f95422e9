from __future__ import annotations

from typing import Any

from casckpt.store.store import Store
from tests.support.saves import cells, small
from tests.upkeep.test_sizes import filled


def state(step: int) -> dict[str, Any]:
    return {"model": {"base": cells(300, 0), "head": cells(20, step)}, "optim": {"m": cells(600, step + 100)}}


def freed(store: Store, **rules: Any) -> int:
    """Run gc with these rules. Return the number of bytes that it frees."""
    return store.gc(min_age="0s", **rules).deleted_bytes


def test_each_step_reports_the_bytes_that_only_it_uses() -> None:
    store = filled(small())
    steps = store.footprint().steps
    assert [(one.run, one.step, one.state, one.until, one.tags) for one in steps] == [
        ("r", step, "visible", None, ()) for step in range(4)
    ]
    assert sum(one.bytes_new for one in steps) == store.stats().bytes_blobs
    assert steps[0].bytes_new == steps[0].bytes_used > steps[0].bytes_alone
    for one, saved in zip(steps[1:], store.checkpoints()[1:], strict=True):
        assert one.bytes_new == one.bytes_alone == saved.stats.bytes_written
        assert one.bytes_logical == saved.stats.bytes_total
    store.forget("r@1")
    assert freed(store) == steps[1].bytes_alone


def test_bytes_that_two_runs_use_are_not_exclusive_to_either_run() -> None:
    store = filled(small())
    store.save(state(3), run="other", step=0)
    (one,) = store.footprint("other").steps
    assert one.bytes_alone == one.bytes_new == 0 < one.bytes_used
    assert store.footprint("r").steps[3].bytes_alone == 0
