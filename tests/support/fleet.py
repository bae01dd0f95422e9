"""A program that works in a store with any version of casckpt: ``python -P fleet.py WORK STORE RUN FIRST LAST``.

The path decides the version (`tests.support.fleets`). The content of a checkpoint follows from its run and step, so
every version can check what any other has saved. See `tests.test_fleets`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch

import casckpt
from casckpt.errors import Conflict, MissingKey, NotFound

KEPT = 3


def state(run: str, step: int) -> dict[str, Any]:
    """Return the content of run@step: a constant part, a part that changes a little, a new part, and plain data."""
    frozen = torch.randn(60_000, generator=torch.Generator().manual_seed(7))
    near = torch.randn(60_000, generator=torch.Generator().manual_seed(len(run))).bfloat16()
    near[step::97] += step
    fresh = torch.randn(30_000, generator=torch.Generator().manual_seed(1000 * len(run) + step))
    return {"model": {"frozen": frozen, "near": near}, "optim": {"m": fresh}, "step": step, "run": run}


def check(store: casckpt.Store, checkpoint: casckpt.Checkpoint) -> None:
    """Compare a checkpoint with what was saved. A thinned one has only the model."""
    wanted = state(checkpoint.run, checkpoint.step)
    if checkpoint.dropped is not None:
        del wanted["optim"]
    found = store.read(checkpoint, keys=None if checkpoint.dropped is None else ["model.*", "step", "run"])
    for one, other in zip(_leaves(wanted), _leaves(found), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, checkpoint


def _leaves(tree: Any) -> list[Any]:
    return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])] if isinstance(tree, dict) else [tree]


def create(store: casckpt.Store, run: str, first: int, last: int) -> None:
    """Create a store of small cells and blobs."""
    del run, first, last
    store.create(cell_bytes=4096, blob_bytes=65536)


def save(store: casckpt.Store, run: str, first: int, last: int) -> None:
    """Save the steps, every other one as differences, in the background, with a tag that moves."""
    for step in range(first, last + 1):
        options: Any = {"compress": "always", "metrics": {"loss": 1 / step}} if step % 2 else {}
        store.save_async(state(run, step), run=run, step=step, **options).result()
        store.tag(f"newest-{run}", f"{run}@{step}")


def watch(store: casckpt.Store, run: str, first: int, last: int) -> None:
    """Wait for the steps, and check each that is still there. Those that others purged meanwhile may be missing."""
    for arrival in store.watch(run, after="start", timeout="120s", poll="0.1s"):
        with suppress(NotFound, MissingKey):
            check(store, store.get(arrival.checkpoint.id))
        if arrival.checkpoint.step == last:
            return
    raise AssertionError(f"{run}@{last} did not arrive after {first}")


def keep(store: casckpt.Store, run: str, first: int, last: int) -> None:
    """Thin, forget, and collect, until the last step is there."""
    while True:
        steps = [checkpoint.step for checkpoint in store.checkpoints(run)]
        if len(steps) > KEPT:
            with suppress(Conflict, NotFound, MissingKey):
                store.thin(drop="optim.*", keep_last=2)
            with suppress(Conflict, NotFound):
                store.forget(f"{run}@{steps[0]}")
            with suppress(Conflict):
                store.gc(keep_last=KEPT, min_age=0, wait="2s")
        if last in steps:
            return


def train(store: casckpt.Store, run: str, first: int, last: int) -> None:
    """Resume a model and an optimizer, and train from ``first`` to ``last``, with a rotation."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optim = torch.optim.AdamW(model.parameters())
    with casckpt.Checkpointer(store, run=run, max_checkpoints=2, gc=True) as checkpointer:
        resumed = checkpointer.resume(model, optim)
        assert (resumed.step if resumed else 0) == first - 1, resumed
        for step in range(first, last + 1):
            torch.manual_seed(step)
            model(torch.randn(8, 300)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            checkpointer.save(step, model, optim)
    print(*(float(parameter.double().sum()).hex() for parameter in model.parameters()))  # noqa: T201 - the result


def read(store: casckpt.Store, run: str, first: int, last: int) -> None:
    """Check every checkpoint and all bytes. The newest one of the run is the last step."""
    check(store, store.get(f"{run}@{last}"))
    for checkpoint in store.checkpoints():
        check(store, checkpoint)
    assert store.get(f"{run}@latest").step == last
    found = store.verify(decode=True)
    assert not found.is_damaged, found
    assert not found.failed, found


if __name__ == "__main__":
    work, url, run, first, last = sys.argv[1:]
    torch.set_num_threads(1)
    globals()[work](casckpt.open(url), run, int(first), int(last))
