"""A store served as a hub, compared with the static files of its export on the same ASGI server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.measure import Measured
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here

RAW, CODED, STATIC = "raw", "coded", "static files"
_FILE = "model.safetensors"
_TENSOR_BYTES = 32 << 20
_STATIC = """
import socket, sys, uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
listening = socket.create_server(("127.0.0.1", 0))
print('{"endpoint": "http://127.0.0.1:%d"}' % listening.getsockname()[1], flush=True)
app = Starlette(routes=[Mount("/big/resolve/main", StaticFiles(directory=sys.argv[1]))])
uvicorn.Server(uvicorn.Config(app, log_level="critical", http="h11")).run(sockets=[listening])
"""


def make(here: Here, folder: str, size: int) -> int:
    """Create two versions of some weights, raw and as deltas, and an exported folder of the second version.

    Return the size of the exported file.
    """
    import casckpt

    for name in (RAW, CODED):
        store = casckpt.open(Path(folder, name))
        for step in (1, 2):
            state = {"model": _weights(size, step)}
            store.save(state, run="big", step=step, compress="always" if name == CODED else "off")
        if name == RAW:
            store.export("big@2", Path(folder, STATIC), format="hf", max_shard_size=2 * size)
    return Path(folder, STATIC, _FILE).stat().st_size


def _weights(size: int, step: int) -> dict[str, Any]:
    """Create bfloat16 weights in which one element in 100 changes at each step."""
    import torch

    generator, found = torch.Generator().manual_seed(1), {}
    for number in range(max(1, size // _TENSOR_BYTES)):
        count = min(size, _TENSOR_BYTES) // 2
        value = torch.randn(count, generator=generator).bfloat16()
        value.view(torch.int16)[step::100] += step
        found[f"layers.{number}.weight"] = value.view(-1, 1024)
    return found


def fetch(here: Here, *, folder: str, who: str, clients: int, nbytes: int) -> Measured:
    """Let several clients get the whole file at the same time, from the page cache.

    Extra: the time to the first byte, and the server's memory. The CPU time is that of the server.
    """
    with _server(Path(folder, who), who) as (process, port):
        path = _path(Path(folder, who), who)
        wanted = _get(port, path, nbytes).digest
        first = min(_get(port, path, nbytes, stop=1).first for _ in range(3))
        before, begin = process.cpu_times(), time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            found = list(pool.map(lambda _: _get(port, path, nbytes, check=False), range(clients)))
        seconds, after = time.perf_counter() - begin, process.cpu_times()
        peak = _peak(process.pid)
        if wanted != _digest(Path(folder, STATIC, _FILE)) or any(one.nbytes != nbytes for one in found):
            raise WrongBytes(f"{who} sent different bytes than an export has")
    cpu = after.user + after.system - before.user - before.system
    return Measured(blocked=seconds, durable=seconds, cpu=cpu, extra={"first byte": first, "memory": peak})


class _Got:
    """The response to a client: the body's digest and size, and the seconds to its first byte."""

    def __init__(self) -> None:
        self._hash, self.nbytes, self.first = blake2b(), 0, 0.0

    @property
    def digest(self) -> str:
        """Return the digest of the body."""
        return self._hash.hexdigest()

    def add(self, data: memoryview, *, check: bool) -> None:
        """Add received bytes."""
        self.nbytes += len(data)
        if check:
            self._hash.update(data)


def _path(place: Path, who: str) -> str:
    import casckpt

    revision = "main" if who == STATIC else casckpt.open(place).get("big@latest").id[:40]
    return f"/big/resolve/{revision}/{_FILE}"


def _get(port: int, path: str, nbytes: int, *, stop: int = -1, check: bool = True) -> _Got:
    got, buffer, began = _Got(), memoryview(bytearray(1 << 20)), time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head = bytearray()
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        if b" 200 " not in head[:16]:
            raise WrongBytes(bytes(head[:200]).decode("latin-1"))
        got.add(memoryview(bytes(head.partition(b"\r\n\r\n")[2])), check=check)
        while (got.nbytes < nbytes if stop < 0 else got.nbytes < stop) and (count := connection.recv_into(buffer)):
            got.add(buffer[:count], check=check)
    got.first = time.perf_counter() - began
    return got


@contextmanager
def _server(place: Path, who: str) -> Iterator[tuple[psutil.Process, int]]:
    ours = [sys.executable, "-m", "casckpt", "serve", str(place), "--port", "0", "--json", "--max-shard-size", "1TB"]
    command = [sys.executable, "-c", _STATIC, str(place)] if who == STATIC else ours
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            endpoint = json.loads(next(iter(process.stdout or ()), "{}"))["endpoint"]
            yield psutil.Process(process.pid), int(endpoint.rpartition(":")[2])
        finally:
            process.kill()


def _digest(path: Path) -> str:
    return blake2b(path.read_bytes()).hexdigest()


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
