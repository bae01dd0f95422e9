"""Real training runs that change every weight and save deltas.

They are killed and resumed while gc runs, and their checkpoints are loaded on different numbers of ranks.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import casckpt
from casckpt.contents import manifests
from casckpt.format.digest import cell_digest
from casckpt.format.regions import Box
from casckpt.plan.routes import choose_base
from casckpt.store.store import Store
from tests.support.looping import killed_after
from tests.support.ranks import Pool, die
from tests.support.tensors import bytes_of
from tests.support.together import emptied, line, spread
from tests.support.torch_versions import needs_torch

if TYPE_CHECKING:
    from tests.support.servers import Server

VERSIONS, FULL_VERSIONS, KEPT = 7, 64, 5
ROWS, COLUMNS, BLOCKS = 256, 1024, 4
WHOLE = 2 * 2 * BLOCKS * ROWS * COLUMNS  # bytes of one version
# so that headers (4 KiB per blob, 50 bytes per frame) are a small fraction, as with large tensors
CELL, BLOB = (
    WHOLE >> 8,
    WHOLE >> 4,
)


@dataclass(frozen=True)
class Training:
    """One attempt. ``dies_at``: SIGKILL is sent ``after`` this many seconds in the save of that version, or later."""

    url: str
    folder: Path
    versions: int
    options: Mapping[str, Any] = field(default_factory=dict)
    dies_at: int | None = None
    after: float = 0.0

    def store(self) -> Store:
        """Open the store as a process does. This host caches reads from a bucket."""
        found = casckpt.open(self.url, storage_options=dict(self.options) or None, cache_dir=self.folder / "host")
        found.create(cell_bytes=CELL, blob_bytes=BLOB)
        return found

    def write(self, file: str, note: dict[str, Any]) -> None:
        """Append a note to a file."""
        with (self.folder / file).open("a") as notes:
            notes.write(json.dumps(note) + "\n")

    def notes(self, file: str) -> list[dict[str, Any]]:
        """Return the notes of all attempts."""
        return [json.loads(line) for line in (self.folder / file).read_text().splitlines()]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Tanh(), nn.Linear(ROWS, COLUMNS, bias=False))
            for _ in range(BLOCKS)
        )
    )


def network(size: int) -> nn.Module:
    net = model()
    fully_shard(net, mesh=line(size))
    return net


def weights(net: nn.Module) -> dict[str, DTensor]:
    """Return the weights of a float32 training run in the dtype used for inference."""
    return {key: value.detach().to(torch.bfloat16) for key, value in net.state_dict().items()}


def digest(state: Mapping[str, DTensor]) -> str:
    """Return the digest of all bytes on all ranks."""
    return cell_digest(b"".join(bytes_of(one.full_tensor()) for one in state.values())).hex()


def train(rank: int, size: int, plan: Training) -> None:
    """Save each missing version. A resumed training run repeats all steps before it."""
    store, net = plan.store(), network(size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)
    done = max((ckpt.step for ckpt in store.checkpoints()), default=0)
    for step in range(1, plan.versions + 1):
        draw = torch.Generator().manual_seed(step * size + rank)
        inputs = torch.randn(8, COLUMNS, generator=draw)
        net(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == done:
            found: dict[str, DTensor] = emptied(weights(net))
            if plan.options:  # otherwise, the cache of this host holds only blobs of which a load reads at least half
                store.pre_download(f"default@{step}", {"model": found})
            store.load({"model": found}, f"default@{step}")
            assert digest(found) == digest(weights(net))
        elif step > done:
            save(rank, store, plan, step, weights(net))


def save(rank: int, store: Store, plan: Training, step: int, state: dict[str, DTensor]) -> None:
    name = digest(state)
    if rank == 0:
        plan.write("digests", {"step": step, "digest": name})
    with killed_after(plan.after if step == plan.dies_at else None):
        made = store.save({"model": state}, step=step, compress="auto")
    if step == plan.dies_at:
        die()
    if rank:
        return
    unasked = whole_and_unasked(store, step) if step > 1 else 0
    if step > FULL_VERSIONS / 2 or step == plan.versions:
        store.gc(keep_last=KEPT, min_age=0, wait=0)
    blobs = sum(one.size for one in store.repository.storage.list("objects/") if one.key.endswith("safetensors"))
    note = {"step": step, "written": made.stats.bytes_written, "blobs": blobs, "unasked": unasked}
    plan.write("diary", note)


def whole_and_unasked(store: Store, step: int) -> int:
    """Return the bytes of the cells that were stored in full although the previous version's chains did not require
    it."""
    repo, now = store.repository, store.get(f"default@{step}").commit
    before, after = (manifests.get(repo, one) for one in (store.get(f"default@{step - 1}").commit, now))
    old = {entry.name: before.extents(entry) for entry in before.entries if entry.dtype == "bfloat16"}
    found = 0
    for entry in after.entries:
        if entry.dtype != "bfloat16":
            continue
        table, renewed = old[entry.name], list[tuple[Box, range]]()
        for row in table.extents:
            *deltas, _ = [table.stored_bytes(one) for one in row.chain]
            nbytes = (row.hi - row.lo) * table.itemsize
            if row.coding is not None and choose_base(deltas, nbytes, f"{entry.key} {row.box} {row.lo}") is None:
                renewed.append((table.boxes[row.box], range(row.lo, row.hi)))
        for cell in after.extents(entry).stored_cells():
            is_new = cell.base is None and after.blob(cell.blob).uploader == now.txid
            if is_new and not any(cell.box == box and cell.lo in row for box, row in renewed):
                found += cell.nbytes
    return found


def load(rank: int, size: int, plan: Training, *steps: list[int]) -> list[dict[int, str]]:
    """Load on any number of ranks, first some steps by rows and then some by columns. Return the reads."""
    store, mesh, read = plan.store(), line(size), list[dict[int, str]]()
    whole = model().bfloat16().state_dict()
    for dim, some in enumerate(steps):
        read.append({})
        for step in some:
            empty = spread(emptied(whole), mesh, [Shard(dim)])
            store.load({"model": empty}, f"default@{step}")
            read[dim][step] = digest(empty)
    return read


@contextmanager
def collecting(plan: Training) -> Iterator[None]:
    """Run gc repeatedly during the block."""
    store, over, failed = plan.store(), threading.Event(), list[Exception]()

    def collect() -> None:
        while not over.wait(1.0 if plan.options else 0.2):  # using a bucket slows down the other processes
            try:
                store.gc(keep_last=KEPT, min_age=0, wait=0)
            except Exception as error:  # noqa: BLE001 - raised at the end
                failed.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.soak)])
def plan(request: pytest.FixtureRequest, tmp_path: Path, full: bool) -> Training:
    versions = FULL_VERSIONS if full else VERSIONS
    if request.param == "folder":
        return Training(str(tmp_path / "store"), tmp_path, versions)
    server: Server = request.getfixturevalue("seaweed_server")
    return Training(f"s3://{server.new_place()}/store", tmp_path, versions, server.options)


@needs_torch("2.8", "FSDP2 on the CPU")
def test_kept_checkpoints_are_exact_and_use_little_space(plan: Training, ranks: Pool, seed: int, full: bool) -> None:
    draw = random.Random(seed)
    with collecting(plan):
        for at in sorted(draw.sample(range(2, plan.versions), 5 if full else 1)):
            killed = ranks.outcomes(2, train, replace(plan, dies_at=at, after=draw.uniform(0.0, 0.1)))
            assert all(outcome.died or "Failed" in outcome.text for outcome in killed)
        ranks.run(2, train, plan)
    diary, store = plan.notes("diary"), plan.store()
    kept = [ckpt.step for ckpt in store.checkpoints()]
    assert kept == list(range(plan.versions - KEPT + 1, plan.versions + 1))
    trained = {note["step"]: note["digest"] for note in plan.notes("digests") if note["step"] in kept}
    newest = kept if full else kept[-1:]
    for size in (1, 3, 4) if full else (3,):
        found = ranks.run(size, load, plan, kept, newest)
        assert found == [[trained, {step: trained[step] for step in newest}]] * size
    assert not store.verify(decode=True).is_damaged
    written = {note["step"]: note["written"] / WHOLE for note in diary if note["step"] > 1}
    assert not {note["step"]: note["unasked"] for note in diary if note["unasked"]}, "what is whole is a key's next"
    large = {step: share for step, share in written.items() if share > 0.25}
    assert not large, "no version is written whole again: keys are renewed at different saves"
    room = [note["blobs"] / WHOLE for note in diary if note["step"] > FULL_VERSIONS / 2] or [1.0]
    assert max(room) <= 2.2
    assert sum(room) / len(room) <= 1.6
