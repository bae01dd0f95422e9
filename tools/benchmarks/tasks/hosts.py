"""Loads by replicas on imitated hosts, from a bucket on a server outside them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import values
from benchmarks.measure import Measured, Meter, io_counts
from benchmarks.tasks.states import make
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.worker import Here

_STATE, _STEP = "hosts", 1


def start(here: Here, folder: str, size: int, address: str) -> dict[str, Any]:
    """Start the server, save a checkpoint, and return how the hosts open the store. ``address``: of this machine."""
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    import casckpt
    from tests.support import servers

    path = Path(folder)
    path.mkdir(parents=True)
    server = servers.seaweed(path, memory="2GiB")
    local = server.command

    def everywhere(data: Path, ports: Sequence[int]) -> Sequence[str]:
        return [one.replace("-ip.bind=127.0.0.1", "-ip.bind=0.0.0.0") for one in local(data, ports)]

    server.command = everywhere
    server.start()
    here.kept["server"], here.kept["folder"] = server, path
    url = f"s3://{server.new_bucket()}/store"
    make(here, name=_STATE, kind="model", size=size)
    casckpt.open(url, storage_options=server.options).save({"model": here.states[_STATE]}, step=_STEP)
    return {"url": url, "options": server.options | {"endpoint_url": server.endpoint.replace("127.0.0.1", address)}}


def stop(here: Here) -> None:
    """Kill the server, and remove its data."""
    if "server" in here.kept:
        here.kept["server"].kill()
        shutil.rmtree(here.kept["folder"])


def prepare(here: Here, *, memory: str, hosts: int, size: int, url: str, options: dict[str, Any]) -> None:
    """Open the store on one of ``hosts`` hosts. ``memory``: contains the memory of all hosts."""
    import casckpt
    from casckpt.repository import blob_cache

    blob_cache.MEMORY = Path(memory, str(here.rank % hosts))
    blob_cache.MEMORY.mkdir(exist_ok=True)
    make(here, name=_STATE, kind="model", size=size)
    here.kept["store"] = casckpt.open(url, storage_options=options)
    here.kept["target"] = values.poisoned(here.states[_STATE])


def load(here: Here, shared: bool) -> Measured:
    """Load once, and compare the result. Without ``shared``, hosts do not pass on what they read."""
    from casckpt.loading import job_reads

    job_reads.HOSTS = 64 if shared else 1
    store, target, wanted = here.kept["store"], here.kept["target"], here.states[_STATE]
    values.poison(target)
    counts = io_counts(store.repository.storage)
    before = counts.bytes_read
    meter = Meter(here.barrier)
    store.load({"model": target}, f"default@{_STEP}")
    measured = meter.stop()
    measured.asked = counts.bytes_read - before
    if any(not values.as_bytes(wanted[name]).equal(values.as_bytes(target[name])) for name in wanted):
        raise WrongBytes("casckpt: what was loaded is not what was saved")
    return measured
