"""Many small tensors are read together, with the same results, errors and counts as if read one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from casckpt.contents import manifests
from casckpt.errors import Damaged
from casckpt.format.keys import blob_key, manifest_key
from casckpt.format.sections.head import decode_head
from casckpt.loading.planned_reads import SmallReads
from casckpt.store.store import Store
from tests.support.progress_calls import ProgressCalls
from tests.support.rewrites import move
from tests.support.saves import CELL, cells, content, counted, flip, reopened, same_state, small, small_folder

COUNT = 300


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return small() if request.param == "memory" else small_folder(tmp_path / "store")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the number of cells of each group that a load delivers."""
    sizes: list[int] = []
    deliver = SmallReads.deliver

    def counted_deliver(self: SmallReads, data: memoryview) -> None:
        sizes.append(self.cells)
        deliver(self, data)

    monkeypatch.setattr(SmallReads, "deliver", counted_deliver)
    yield sizes
    assert sizes, "no cells were read together"


def state(count: int = COUNT) -> dict[str, torch.Tensor]:
    """Return many tensors of 1 KiB, each with its own values."""
    return {f"w{n:03}": cells(1 / 4, seed=n) for n in range(count)}


def zeros(like: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) for key, value in like.items()}


def place_of(store: Store, key: str) -> tuple[str, str, int]:
    """Return the storage key and the hash of the blob that holds a tensor, and the tensor's offset in it."""
    manifest = manifests.get(store.repository, store.get("default@1").commit)
    (only,) = manifest.extents(manifest.tensors[key]).stored_cells()
    ref = manifest.blob(only.blob)
    return blob_key(ref.uploader, ref.hash), ref.hash, only.offset


@pytest.mark.parametrize("verify", [True, False])
def test_small_tensors_of_all_kinds_are_loaded(store: Store, together: list[int], verify: bool) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64, torch.uint8]
    saved: dict[str, Any] = state()
    saved |= {f"typed{n}": cells(1 / 8, seed=n).abs().to(dtypes[n % 7]).reshape(-1, 4) for n in range(70)}
    saved |= {f"odd{n}": torch.arange(n + 1) for n in range(40)} | {f"scalar{n}": torch.tensor(n) for n in range(5)}
    saved |= {"empty": torch.empty(0, 3), "full": cells(1), "long": cells(3.5), "half": cells(1 / 2).half()}
    saved |= {"strided": cells(1 / 4).reshape(16, 16), "parameter": torch.nn.Parameter(cells(1 / 4))}
    saved |= {"tied0": saved["w000"].clone(), "tied1": saved["w000"].clone(), "part": cells(1 / 4)}
    store.save(saved, step=1)
    target = zeros(saved) | {"strided": torch.zeros(16, 16).t(), "half": torch.zeros(512)}
    target["parameter"] = torch.nn.Parameter(torch.zeros(256))
    target["tied1"] = target["tied0"]
    target["part"] = torch.zeros(512)[100:356]
    before = {key: value._version for key, value in target.items()}
    store.load(target, "default@1", verify=verify, cast=True)
    saved["half"] = saved["half"].float()
    assert all(torch.equal(target[key], saved[key]) for key in saved)
    assert target["parameter"].requires_grad
    assert all(target[key]._version > before[key] for key in target if target[key].numel())
    assert sum(together) > COUNT


def test_a_wrong_cell_among_many_is_named_with_its_blob(store: Store) -> None:
    store.save(state(), step=1)
    key, name, offset = place_of(store, "w150")
    flip(store, key, offset + 1000)
    target = zeros(state())
    with pytest.raises(Damaged, match="'w150'") as caught:
        reopened(store).load(target, "default@1")
    assert (caught.value.key, caught.value.blob) == ("w150", name)
    assert f"its bytes {offset} to {offset + 1024} are not what was written" in str(caught.value)
    assert not target["w150"].any()
    reopened(store).load(target, "default@1", verify=False)
    assert [key for key, value in state().items() if not torch.equal(target[key], value)] == ["w150"]


def test_a_missing_blob_names_its_first_tensor(store: Store) -> None:
    store.save(state(), step=1)
    key, name, _ = place_of(store, "w100")
    first = min(one for one in state() if place_of(store, one)[0] == key)
    store.repository.storage.delete(key)
    with pytest.raises(Damaged) as caught:
        reopened(store).load(zeros(state()), "default@1")
    assert (caught.value.key, caught.value.blob) == (first, name)


def test_cells_that_are_wrong_in_one_commit_are_read_from_a_different_one(
    store: Store, together: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    store.save(state(), step=1)
    move(store.repository, store.get("default@1").commit)
    key, _, offset = place_of(store, "w150")
    flip(store, key, offset)
    target, told = zeros(state()), ProgressCalls()
    with caplog.at_level("INFO", logger="casckpt"):
        reopened(store).load(target, "default@1", progress=told)
    assert "the load continues with a different commit" in caplog.text
    assert same_state(target, state())
    assert told.done == told.total == COUNT * 1024


@pytest.mark.parametrize("section", ["cells", "rows"])
def test_a_damaged_part_of_the_manifest_is_named_with_its_tensor(store: Store, section: str) -> None:
    store.save(state(), step=1)
    ckpt = store.get("default@1")
    key = manifest_key(ckpt.commit.txid, ckpt.commit.id)
    found = decode_head(content(store, key))[section]
    flip(store, key, found.offset + found.length // 2)
    with pytest.raises(Damaged, match=f"its section '{section}' does not match its hash") as caught:
        reopened(store).load(zeros(state()), "default@1")
    assert caught.value.key in state()


def test_a_subset_of_small_tensors_with_gaps_is_read_in_few_requests(tmp_path: Path, together: list[int]) -> None:
    store = small_folder(tmp_path / "store")
    store.save(state(), step=1)
    wanted = list(state())[::3]
    with counted(store) as around:
        store.read("default@1", keys=[])
    with counted(store) as io:
        found = store.read("default@1", keys=wanted)
    assert same_state(found, {key: state()[key] for key in wanted})
    assert io.reads - around.reads == len({place_of(store, key)[0] for key in wanted})


def test_the_progress_of_a_load_counts_equal_cells_once(store: Store, together: list[int]) -> None:
    saved = state() | {f"zero{n:03}": torch.zeros(256) for n in range(100)} | {"long": cells(3)}
    store.save(saved, step=1)
    target, told = {key: torch.ones_like(value) for key, value in saved.items()}, ProgressCalls()
    store.load(target, "default@1", progress=told)
    assert same_state(target, saved)
    assert told.done == told.total == (COUNT + 1) * 1024 + 3 * CELL
    assert sum(together) == COUNT + 1
