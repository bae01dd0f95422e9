"""Every rank refuses an invalid load before any tensor changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.frontends import megatron
from casckpt.frontends.megatron import ShardedObject, ShardedTensor, StrictHandling
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import files

State = dict[str, Any]


def tensor(key: str, *shape: int, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, -1.0), **more)


def half(rank: int, *, at: int | None = None, of: int = 2, **more: Any) -> ShardedTensor:
    part = torch.full((2, 3), -1.0)
    return ShardedTensor.from_rank_offsets("w", part, (0, rank if at is None else at, of), **more)


def obj(at: int, of: int, replica_id: int = 0) -> ShardedObject:
    return ShardedObject("o", None, (of,), (at,), replica_id)


@pytest.fixture
def where(tmp_path: Path) -> str:
    place = f"{tmp_path}#a@1"
    objects = [ShardedObject("o", i, (2,), (i,)) for i in range(2)]
    whole = ShardedTensor.from_rank_offsets("w", torch.arange(12.0).view(4, 3))
    megatron.save({"w": whole, "b": tensor("b", 5), "objects": objects, "common": 1}, place)
    return place


@dataclass(frozen=True)
class Bad:
    """A state dict for each rank, the text of the error, and the arguments of the load."""

    make: Callable[[int], State]
    message: str
    options: dict[str, Any] = field(default_factory=dict)


BAD = {
    "two main replicas": Bad(lambda r: {"w": half(r, at=0)}, r"'w': \[0:2\]x\[0:3\] of rank 0 and .* of rank 1"),
    "no main replica": Bad(lambda r: {"w": half(r, replica_id=1)}, r"'w': no rank has a main replica of \[0:4\]"),
    "a hole": Bad(lambda r: {"w": half(0)} if r == 0 else {}, r"'w': no rank has .*\(ranks that hold parts of it: 0\)"),
    "another cut on rank 1": Bad(
        lambda r: {"w": half(0) if r == 0 else tensor("w", 4, 3)},
        r"'w': local shape is \(2, 3\) on rank 0, .* on rank 1",
    ),
    "another shape on rank 1": Bad(lambda r: {"w": half(r, of=2 + r)}, r"rank 1: 'w' has global shape|^'w' has global"),
    "another shape": Bad(lambda r: {"w": tensor("w", 5, 3, replica_id=r)}, r"'w' has global shape \[5, 3\] here, but"),
    "an object at a wrong offset": Bad(lambda r: {"w": half(r), "o": obj(2 * r, 2)}, r"'o' at \(2,\) of \(2,\)"),
    "an object of another shape": Bad(
        lambda r: {"w": half(r), "o": obj(r, 3)}, r"'o' at .* of \(3,\); it has the object at"
    ),
    "an object twice": Bad(lambda r: {"w": half(r), "o": obj(0, 2)}, r"'o': .* at \(0,\) .*ranks 0 and 1"),
    "a place that is taken": Bad(
        lambda r: {"w" if r else "common": half(r)}, r"same position, at \('common',\): 1 and"
    ),
    "a strictness that is none": Bad(lambda r: {"w": half(r)}, "strict='no' is not a known value", {"strict": "no"}),
    "no such checkpoint": Bad(lambda r: {"w": half(r)}, "has no step 9", {"ref": "a@9"}),
}


def refused(rank: int, size: int, where: str, name: str) -> tuple[bool, str, bool]:
    """Return the error, and whether the tensors and the store are unchanged."""
    state, options = BAD[name].make(rank), dict(BAD[name].options)
    path, _, ref = where.partition("#")
    before = files(Path(path))
    place = f"{path}#{options.pop('ref', ref)}"
    error = outcome_of(lambda: megatron.load(state, place, **options))
    tensors = [one.data for one in state.values() if isinstance(one, ShardedTensor)]
    unchanged = all(bool((data == -1).all()) for data in tensors if data is not None)
    return isinstance(error, megatron.CheckpointingException), str(error), unchanged and files(Path(path)) == before


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_load_is_rejected_on_every_rank(name: str, where: str, ranks: Pool) -> None:
    found = ranks.run(2, refused, where, name)
    for right_kind, text, unchanged in found:
        assert (right_kind, unchanged) == (True, True), text
        assert re.search(BAD[name].message, text), text


RAISES = {"assume_ok_unexpected": "unexpected", "raise_unexpected": "unexpected", "raise_all": "unexpected missing"}


def strictly(rank: int, size: int, where: str, strict: str) -> list[tuple[str, bool]]:
    """First, only rank 1 requests a missing key. Then no rank requests one of the checkpoint's keys."""
    results = []
    for more in ({"x": tensor("x", 2)} if rank else {}, {}):
        state = {"w": half(rank), "o": obj(rank, 2)} | more
        found = outcome_of(lambda state=state: megatron.load(state, where, strict=strict))  # type: ignore[misc]  # a default binds the loop variable
        changed = bool((torch.as_tensor(state["w"].data) != -1).any())
        results.append((str(found) if isinstance(found, Exception) else "", changed))
    return results


@pytest.mark.parametrize("strict", [one.value for one in StrictHandling])
def test_each_strictness_raises_on_all_ranks_or_on_none(strict: str, where: str, ranks: Pool) -> None:
    for unexpected, missing in ranks.run(2, strictly, where, strict):
        wanted = {"unexpected": unexpected, "missing": missing}
        for what, key in (("unexpected", "'x'"), ("missing", "'b'")):
            text, changed = wanted[what]
            raised = what in RAISES.get(strict, "").split()
            assert (key in text, changed) == (raised, not raised), (what, text)
