from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import encode_delta
from casckpt.format.extents import StoredCell
from casckpt.format.regions import full_box
from casckpt.saving import encoder as coding
from casckpt.saving.previous_cells import HeldCell, HeldFrame
from casckpt.store.store import Store
from tests.saving.test_encoder import check, first, links, stepped, versions
from tests.support.saves import CELL, reopened, same_state, small, small_folder
from tests.support.tensors import bytes_of

NUMEL = 40 * CELL // 2  # elements of 2 bytes


def weights(seed: int = 0, numel: int = NUMEL, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return small() if request.param == "memory" else small_folder(tmp_path / "store")


def test_an_older_version_is_used_only_if_it_matches_its_manifest() -> None:
    """After a rollback, a run may reach the same version in a different way, in a different process."""
    first, second = (bytearray(bytes_of(one)) for one in (weights(numel=CELL), stepped(weights(numel=CELL), 1)))
    frame = encode_delta(memoryview(second), 2, memoryview(first))
    assert frame is not None
    was, now = (
        StoredCell(0, 0, CELL, full_box((CELL // 2,)), 0, CELL // 2, cell_digest(one)) for one in (first, second)
    )
    held = HeldCell(now.digest, second, (HeldFrame(frame, was.digest),))
    assert coding._older(held, [now]) is None
    assert coding._older(held, [was, was]) is None
    assert coding._older(held, [was]) == HeldCell(was.digest, first)
    assert held.plain == first, "in place"


def test_simultaneous_saves_of_a_run_do_not_share_kept_cells(store: Store) -> None:
    """The second save has the same parent. It begins and ends while the first save encodes a cell."""
    states, encode = versions(4), encode_delta
    store.save(states[0], step=0, compress="auto")
    other = states[0] | {"w": stepped(states[0]["w"], 77)}

    def beside(plain: memoryview, width: int, base: memoryview) -> bytes | None:
        store.save(other, step=10, compress="auto", threads=1)
        return encode(plain, width, base)

    with patch.object(coding, "encode_delta", first(encode, beside)):
        store.save(states[1], step=1, compress="auto", threads=1)
    for step in (2, 3):
        store.save(states[step], step=step, compress="auto")
    check(store, states)
    assert same_state(reopened(store).read("default@10"), other)
    assert max(links(store, "default@1")) == max(links(store, "default@10")) == 1
