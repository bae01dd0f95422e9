"""Saves and loads over S3 by casckpt and by raw clients, on a server on this machine.

The server is the one that the tests use. It belongs to the worker that starts it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files, values
from benchmarks.measure import Measured, Meter, io_counts
from benchmarks.peers.remote import BUCKET, prefix_of
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    import torch

    import casckpt
    from benchmarks.worker import Here

_BLOB, _RANGE = 32 << 20, 8 << 20
_LOADED = "loaded"
_NUMBERS = itertools.count()


def start(here: Here, folder: str, state: str) -> dict[str, str]:
    """Start the server with its data in ``folder``. Store what loads read: a checkpoint, and raw objects.

    Return the arguments of `reach`.
    """
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from tests.support import servers

    path = Path(folder)
    path.mkdir(parents=True)
    server = servers.seaweed(path, memory="2GiB")  # with less, garbage collection takes most of the time of puts
    server.start()
    here.kept["server"], here.kept["bucket"], here.kept["folder"] = server, server.new_bucket(), path
    _store(here, _LOADED).save({"model": here.states[state]}, step=0)
    _put_all(here, f"raw-{_LOADED}", state, 4)
    return {**server.options, "bucket": here.kept["bucket"]}


def reach(here: Here, endpoint_url: str, key: str, secret: str, bucket: str) -> None:
    """Set the variables by which other libraries find the server."""
    os.environ |= {
        BUCKET: bucket,
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


def remove(here: Here, folder: str) -> None:
    """Remove what another library saved, and the empty folder that stood for it."""
    _fs(here).rm(f"{here.kept['bucket']}/{prefix_of(Path(folder))}", recursive=True)
    shutil.rmtree(Path(folder).parent, ignore_errors=True)


def stop(here: Here) -> None:
    """Kill the server, and remove its data."""
    here.kept["server"].kill()
    shutil.rmtree(here.kept["folder"])


def save(here: Here, state: str) -> Measured:
    """Save once into a new store, and then remove it."""
    store = _store(here, f"store-{next(_NUMBERS)}")
    store.create()
    meter = Meter()
    made = store.save({"model": here.states[state]}, step=0)
    measured = meter.stop()
    measured.extra = {"blobs": float(made.stats.blobs_written)}
    _remove(store)
    return measured


def load(here: Here, state: str, verify: bool) -> Measured:
    """Load once into touched memory, and compare the result."""
    wanted = here.states[state]
    if "s3" not in here.kept:
        here.kept["s3"] = values.poisoned(wanted)
    target: dict[str, torch.Tensor] = here.kept["s3"]
    values.poison(target)
    store = _store(here, _LOADED)
    counts = io_counts(store.repository.storage)
    before = counts.bytes_read
    meter = Meter()
    store.load({"model": target}, "latest", verify=verify)
    measured = meter.stop()
    measured.asked = counts.bytes_read - before
    if any(not values.as_bytes(wanted[name]).equal(values.as_bytes(target[name])) for name in wanted):
        raise WrongBytes("casckpt: what was loaded from the bucket is not what was saved")
    return measured


def raw_put(here: Here, state: str, client: str, parallel: int) -> Measured:
    """Put all bytes of a state as objects of 32 MiB, with ``parallel`` puts in flight."""
    prefix = f"raw-{next(_NUMBERS)}"
    meter = Meter()
    if client == "obstore":
        _obstore_put(here, prefix, state, parallel)
    else:
        _put_all(here, prefix, state, parallel)
    measured = meter.stop()
    _fs(here).rm(f"{here.kept['bucket']}/{prefix}", recursive=True)
    return measured


def raw_get(here: Here, state: str, client: str, parallel: int) -> Measured:
    """Get all bytes of a state in ranges of 8 MiB, ``parallel`` of them in flight, into the client's own memory."""
    size = values.size_of(here.states[state])
    meter = Meter()
    if client == "obstore":
        _obstore_get(here, size, parallel)
    else:
        _get_all(here, size, parallel)
    return meter.stop()


def has(here: Here, client: str) -> bool:
    """Return whether a client is installed."""
    return importlib.util.find_spec(client) is not None


def _store(here: Here, name: str) -> casckpt.Store:
    """Return a store in the bucket without a blob cache. For equal names, it is the same store."""
    import casckpt

    key = f"store {name}"
    if key not in here.kept:
        url = f"s3://{here.kept['bucket']}/{name}"
        here.kept[key] = casckpt.open(url, storage_options=here.kept["server"].options)
    found: casckpt.Store = here.kept[key]
    return found


def _remove(store: casckpt.Store) -> None:
    storage = store.repository.storage
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda entry: storage.delete(entry.key), storage.list("")))


def _bodies(here: Here, state: str) -> Iterator[bytes]:
    """Return a state as objects of 32 MiB."""
    import torch

    flat = torch.cat([values.as_bytes(tensor) for tensor in here.states[state].values()]).numpy()
    for start_, length in files.pieces(flat.size, _BLOB):
        yield flat[start_ : start_ + length].tobytes()


def _kept_bodies(here: Here, state: str) -> Sequence[bytes]:
    """Return the objects. They are created once, so that a raw client's time does not include this."""
    if "bodies" not in here.kept:
        here.kept["bodies"] = list(_bodies(here, state))
    found: list[bytes] = here.kept["bodies"]
    return found


def _fs(here: Here) -> Any:
    from s3fs import S3FileSystem

    return S3FileSystem(
        **here.kept["server"].options,
        use_listings_cache=False,
        config_kwargs={"max_pool_connections": 64, "read_timeout": 60},
    )


def _put_all(here: Here, prefix: str, state: str, parallel: int) -> None:
    fs, bucket = _fs(here), here.kept["bucket"]
    calls = [
        (lambda name=f"{bucket}/{prefix}/{number:04}", body=body: fs._pipe_file(name, body))
        for number, body in enumerate(_kept_bodies(here, state))
    ]
    _together(fs, calls, parallel)


def _ranges(size: int) -> Iterator[tuple[int, int, int]]:
    """Return (object, offset, length) for each range."""
    for number, (_, whole) in enumerate(files.pieces(size, _BLOB)):
        for offset, length in files.pieces(whole, _RANGE):
            yield number, offset, length


def _get_all(here: Here, size: int, parallel: int) -> None:
    fs, bucket = _fs(here), here.kept["bucket"]
    calls = [
        (lambda n=f"{bucket}/raw-{_LOADED}/{number:04}", a=offset, b=offset + length: fs._cat_file(n, start=a, end=b))
        for number, offset, length in _ranges(size)
    ]
    _together(fs, calls, parallel)


def _together(fs: Any, calls: Sequence[Callable[[], Any]], parallel: int) -> None:
    async def run() -> None:
        left = iter(calls)

        async def work() -> None:
            for call in left:
                await call()

        await asyncio.gather(*(work() for _ in range(parallel)))

    asyncio.run_coroutine_threadsafe(run(), fs.loop).result()


def _obstore(here: Here) -> Any:
    from obstore.store import S3Store

    options = here.kept["server"].options
    config = {
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
        "aws_region": "us-east-1",
        "endpoint": options["endpoint_url"],
    }
    return S3Store(here.kept["bucket"], config=config, client_options={"allow_http": True})


def _obstore_put(here: Here, prefix: str, state: str, parallel: int) -> None:
    import obstore

    store = _obstore(here)
    todo = list(enumerate(_kept_bodies(here, state)))
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(lambda one: obstore.put(store, f"{prefix}/{one[0]:04}", one[1], use_multipart=False), todo))


def _obstore_get(here: Here, size: int, parallel: int) -> None:
    import obstore

    store = _obstore(here)

    def get(one: tuple[int, int, int]) -> None:
        obstore.get_range(store, f"raw-{_LOADED}/{one[0]:04}", start=one[1], length=one[2])

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(get, _ranges(size)))
