"""Local S3 servers on the loopback interface. They are started for a test session and stopped at its end.

Each server is a process that dies with its parent in all cases. A missing binary is an error, and tests are not
skipped because of it: tools/setup installs all binaries.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

KEY, SECRET = "casckpt-test", "casckpt-test-secret"
_START_SECONDS = 60.0
_VOLUMES = 100_000  # SeaweedFS uses one volume for each bucket. By default, it allows one per free GiB of the disk.
_ATTEMPTS = 3  # a different process may take a free port first
_PORTS = range(10_000, 32_768)  # below the ports of outgoing connections, thousands of which tests open
_DRAW = random.SystemRandom()  # tests seed the default generator, so all workers would draw the same ports from it
# Every client reads the description of all AWS services, which takes longer than most tests, so clients share it here.
botocore.session.create_loader = cache(botocore.session.create_loader)
# The process turns into the command. The kernel kills it when the thread that started it ends.
_BOUND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass
class Server:
    """A server with its files in ``folder``.

    ``command``: its command line for some free ports, the first of which is for S3.
    """

    name: str
    command: Callable[[Path, Sequence[int]], Sequence[str]]
    ports: int
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    speaks_s3: bool = True
    start_seconds: float = _START_SECONDS
    buckets: int = 0
    places: int = 0
    _taken: list[int] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _client: Any = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._taken[0]}"

    @property
    def options(self) -> dict[str, Any]:
        """Return the ``storage_options`` of a store on this server."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}

    @property
    def client(self) -> Any:
        """Return a boto3 client for direct access."""
        if self._client is None or self._client.meta.endpoint_url != self.endpoint:
            config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
            self._client = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=KEY,
                aws_secret_access_key=SECRET,
                region_name="us-east-1",
                config=config,
            )
        return self._client

    def new_bucket(self) -> str:
        """Return an unused bucket name."""
        self.buckets += 1
        name = f"bucket-{self.buckets}"
        self.client.create_bucket(Bucket=name)
        return name

    def new_place(self) -> str:
        """Return a bucket and an unused prefix. SeaweedFS slows down with each bucket."""
        self.places += 1
        if self.places == 1:
            self.client.create_bucket(Bucket="places")
        return f"places/{self.places}"

    def look(self, place: str, key: str) -> bytes | None:
        """Return the bytes of an object in a bucket or below a prefix, or None if there is none."""
        bucket, *prefix = place.split("/")
        try:
            found: bytes = self.client.get_object(Bucket=bucket, Key="/".join((*prefix, key)))["Body"].read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            return None
        return found

    def start(self) -> None:
        """Start the server on free ports, and wait until it responds."""
        for _ in range(_ATTEMPTS):
            self._taken = free_ports(self.ports)
            if self._answers():
                return
        log = (self.folder / "log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.name} did not start; its log ends with:\n{log}")

    def start_again(self) -> None:
        """Start the server on its previous ports."""
        if not self._answers():
            raise RuntimeError(f"{self.name} did not come back; its log is {self.folder / 'log'}")

    def pause(self, *, paused: bool) -> None:
        """Stop the process, or continue it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def kill(self) -> None:
        """Stop the server as a crash would."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # some servers have child processes
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        """Start the process, and wait until it lists buckets. Return False if it ends before that."""
        command = self.command(self.folder, self._taken)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOUND, *command], stdout=log, stderr=log, cwd=self.folder,
                env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), **self.environment}, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + self.start_seconds
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError, BotoCoreError, ClientError):
                self._ask()
                return True
            time.sleep(0.05)  # between polls of the server's process; nothing depends on the duration
        self.kill()
        return False

    def _ask(self) -> None:
        """Send a request. Raise the client's error if the server does not respond yet."""
        if self.speaks_s3:
            self.client.list_buckets()
        else:
            socket.create_connection(("127.0.0.1", self._taken[0]), timeout=1).close()


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start the server, and kill it at the end of the block."""
    server.start()
    try:
        yield server
    finally:
        server.kill()


def free_ports(count: int) -> list[int]:
    """Return distinct free ports."""
    found: list[int] = []
    for port in _DRAW.sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} ports from {_PORTS.start} to {_PORTS.stop - 1} are free")


_MOTO = "import sys; sys.setswitchinterval(1); from moto.server import main; main()"
"""moto checks whether a key exists and creates it slightly later, so no other thread may run in between."""


def moto(folder: Path) -> Server:
    """Return a fast emulator that keeps everything in memory."""

    def command(_: Path, ports: Sequence[int]) -> Sequence[str]:
        return [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(ports[0])]

    return Server("moto", command, 1, folder, {"PYTHONWARNINGS": "ignore"})


def seaweed(folder: Path, memory: str = "256MiB") -> Server:
    """Return a real server that stores everything in ``folder``. With less ``memory``, it collects garbage
    more often."""

    def command(data: Path, ports: Sequence[int]) -> Sequence[str]:
        names = ("s3", "master", "volume", "filer")
        given = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
        given += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[len(names) :], strict=True)]
        return [
            binary("weed"), "server", "-s3", f"-dir={data / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *given,
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", f"-volume.max={_VOLUMES}",
            "-master.electionTimeout=500ms", "-master.heartbeatInterval=100ms",  # otherwise, a restart takes 20 s
        ]  # fmt: skip

    (folder / "data").mkdir()
    credentials = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    return Server("seaweedfs", command, 8, folder, {"GOMEMLIMIT": memory, **credentials})


def rclone(folder: Path) -> Server:
    """Return a server that silently ignores the condition of a put."""

    def command(data: Path, ports: Sequence[int]) -> Sequence[str]:
        return [binary("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{ports[0]}", "--auth-key", f"{KEY},{SECRET}",
                str(data / "data")]  # fmt: skip

    (folder / "data").mkdir()
    return Server("rclone", command, 1, folder)


def web(folder: Path) -> Server:
    """Return a web server for ``folder``/data."""

    def command(data: Path, ports: Sequence[int]) -> Sequence[str]:
        return [binary("rclone"), "serve", "http", "--addr", f"127.0.0.1:{ports[0]}", str(data / "data")]

    (folder / "data").mkdir()
    return Server("web", command, 1, folder, speaks_s3=False)


def binary(name: str) -> str:
    """Return the path of a program in this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise RuntimeError(f"{name} is not installed beside {sys.executable}: run tools/setup")
    return found
