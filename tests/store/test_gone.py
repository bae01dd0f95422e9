"""If a checkpoint is purged during a read, every front end raises Gone, and never Damaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

import casckpt
from casckpt.contents import manifests
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Gone, NotFound
from casckpt.format.keys import manifest_key
from casckpt.frontends.dcp import StorageReader
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, call_first, fail_before
from tests.support.repositories import meanwhile, memory
from tests.support.saves import reopened, same_state, small
from tests.support.versions import changed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

REF = "run@1"
Reader: TypeAlias = Callable[[Store, Checkpoint, Path], object]


def first() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {f"w{number}": torch.randn(48, 512, generator=generator).bfloat16() for number in range(3)}


def second() -> dict[str, Any]:
    return {key: changed(one, number) for number, (key, one) in enumerate(first().items())}


def zeros() -> dict[str, Any]:
    return {key: torch.zeros_like(one) for key, one in first().items()}


def update(store: Store, held: Checkpoint, _: Path) -> None:
    """Update a state, which reads frames."""
    state = zeros()
    store.update(state, REF, held=store.load(state, held))


def through_dcp(store: Store, *_: object) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a warning about a single process
            load(zeros(), storage_reader=StorageReader(store, REF))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        # If several errors were raised, DCP raises an AssertionError.
        raise Gone(str(cause)) if type(cause) is AssertionError else cause from error


def copy(store: Store, _: Checkpoint, folder: Path) -> None:
    store.copy_to(folder / "copy", REF)


READERS: dict[str, Reader] = {
    "load": lambda store, _, __: store.load(zeros(), REF),
    "update": update,
    "update of nothing": lambda store, _, __: store.update(zeros(), REF, held=None),
    "a part": lambda store, _, __: store.read(REF, keys=["w1"]),
    "not verified": lambda store, _, __: store.read(REF, verify=False),
    "dcp": through_dcp,
    "a file": lambda store, _, folder: store.export(REF, folder / "all.safetensors"),
    "a folder": lambda store, _, folder: store.export(REF, folder / "all"),
    "torch.save": lambda store, _, folder: store.export(REF, folder / "all.pt"),
    "a folder of DCP": lambda store, _, folder: store.export(REF, folder / "all", format="dcp"),
    "download": lambda store, _, __: store.pre_download(REF),
    "compare": lambda store, _, __: store.compare(zeros(), REF),
    "copy": copy,
}


@pytest.fixture
def faults() -> FaultyStore:
    return FaultyStore(memory(near=False))


@pytest.fixture
def store(faults: FaultyStore, tmp_path: Path) -> Store:
    """A store with run@0 and run@1, whose cells are deltas against those of run@0, on a host without a cache."""
    made = small(faults)
    made.save(first(), run="run", step=0)
    made.save(second(), run="run", step=1, compress="always")
    made.save(zeros(), run="run", step=2)
    return Store(Repository(faults, tmp_path / "cache"))


def purge(faults: FaultyStore) -> None:
    """Act as a gc on a different host that keeps only the newest checkpoint."""
    Store(Repository(faults.inner)).gc(keep_last=1, min_age=0, wait=0)


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_purged_while_its_bytes_are_read_is_reported_as_gone(
    store: Store, faults: FaultyStore, tmp_path: Path, reader: str
) -> None:
    held, mine = store.get("run@0"), store.get(REF)
    for ref in set(mine._manifest.blobs) - set(held._manifest.blobs):
        faults.inject(call_first("open", meanwhile(lambda: purge(faults)), key=f"*/{ref.hash}.safetensors"))
    with pytest.raises(Gone, match=r"run@1 \(.* was purged"):
        READERS[reader](store, held, tmp_path)
    assert not list(tmp_path.glob("all*")), "what was begun is not left behind"


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_purged_while_its_manifest_is_read_is_reported_as_gone(
    store: Store, faults: FaultyStore, tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "WHOLE_BYTES", 0)
    held = store.get("run@0")
    key = manifest_key(store.get(REF).commit.txid, store.get(REF).commit.id)
    faults.inject(call_first("open", meanwhile(lambda: purge(faults)), key=key))
    with pytest.raises(Gone, match=r"run@1 \(.* was purged"):
        READERS[reader](store, held, tmp_path)


def test_following_the_advice_in_a_gone_error_helps(store: Store, faults: FaultyStore) -> None:
    faults.inject(call_first("open", meanwhile(lambda: purge(faults)), key="*.safetensors"))
    with pytest.raises(NotFound, match=r"Store\.lease keeps a checkpoint") as caught:
        store.load(zeros(), REF)
    assert caught.value.checkpoints
    state = zeros()
    state["w0"] += 1
    with store.lease("run@latest") as held:
        store.load(state, held)
    assert same_state(state, zeros())


def test_a_checkpoint_with_a_lease_is_kept_during_a_read(store: Store, faults: FaultyStore) -> None:
    faults.inject(call_first("open", meanwhile(lambda: purge(faults)), key="*.safetensors"))
    state = zeros()
    with store.lease(REF) as held:
        store.load(state, held)
    assert same_state(state, second())


def test_a_server_answers_requests_for_a_purged_checkpoint_with_404(store: Store, faults: FaultyStore) -> None:
    pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
    from tests.support.serving import serving

    with serving(reopened(store)) as served:
        faults.inject(fail_before("put", key="leases/*", times=99))  # as in a read-only store, there is no lease
        faults.inject(call_first("open", meanwhile(lambda: purge(faults)), key="*.safetensors"))
        said = served.get("/run/resolve/1/model.safetensors")
    assert (said.status, said.headers["X-Error-Code"]) == (404, "RevisionNotFound")
    assert "was purged while it was read" in said.headers["X-Error-Message"]


def test_the_error_gone_is_a_kind_of_not_found() -> None:
    assert issubclass(casckpt.errors.Gone, FileNotFoundError)
    assert (Gone.kind, Gone.exit_status) == ("gone", 3)
