"""The cost of an operation: the time, CPU seconds, additional memory, and bytes of this process and its children."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from tests.support.counting import IoCounts

_RESET_PEAK = "5"


@dataclass
class Measured:
    """The cost of one operation in one round, in seconds and bytes.

    ``blocked``: the time until the caller may continue and change the state. ``durable``: the time until all bytes are
    on disk (for a load: until all tensors are filled). ``peak``: the peak of additional resident memory, or None if
    the kernel does not report it. ``written``, ``read``: bytes to and from the storage device. ``asked``: bytes
    requested by read calls. ``stored``: the growth of the checkpoint's folder on disk.
    """

    blocked: float = 0.0
    durable: float = 0.0
    cpu: float = 0.0
    peak: int | None = None
    written: int = 0
    read: int = 0
    asked: int = 0
    stored: int = 0
    load_average: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


def io_counts(storage: Any) -> IoCounts:
    """Return the counters of the calls to one storage. They begin with the first call of this function."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tests.support.counting import count_io

    return count_io(storage)


def together(parts: list[Measured]) -> Measured:
    """Combine the costs of concurrent ranks: the time of the slowest rank, and the sums of all other costs."""
    peaks = [part.peak for part in parts if part.peak is not None]
    return Measured(
        blocked=max(part.blocked for part in parts),
        durable=max(part.durable for part in parts),
        cpu=sum(part.cpu for part in parts),
        peak=sum(peaks) if len(peaks) == len(parts) else None,
        written=sum(part.written for part in parts),
        read=sum(part.read for part in parts),
        asked=sum(part.asked for part in parts),
        stored=max(part.stored for part in parts),
        load_average=parts[0].load_average,
        extra=parts[0].extra,
    )


class Meter:
    """Measures the cost from its creation until `stop` is called.

    `mark_blocked` marks the time at which the caller may continue, which is the end by default.

    ``together`` is called before the clock starts. It waits for the other ranks, because creating a meter takes time.
    """

    def __init__(self, together: Callable[[], object] = lambda: None) -> None:
        gc.collect()
        _trim()
        self._tree = _Tree()
        self._blocked: float | None = None
        self._load = os.getloadavg()[0]
        together()
        self._start = time.perf_counter()

    def mark_blocked(self) -> None:
        """Mark that the caller may continue."""
        self._blocked = time.perf_counter() - self._start

    def stop(self) -> Measured:
        """Return the cost so far."""
        durable = time.perf_counter() - self._start
        blocked = durable if self._blocked is None else self._blocked
        return self._tree.since(Measured(blocked=blocked, durable=durable, load_average=self._load))


class Clock:
    """Measures the time inside its blocks, and the CPU time that this process uses during that time."""

    def __init__(self) -> None:
        self.time = self.cpu = 0.0

    def __enter__(self) -> None:
        self.time -= time.perf_counter()
        self.cpu -= time.process_time()

    def __exit__(self, *_: object) -> None:
        self.cpu += time.process_time()
        self.time += time.perf_counter()

    def write(self, measured: Measured) -> None:
        """Store the result in the measurement."""
        measured.blocked = measured.durable = self.time
        measured.cpu, measured.load_average = self.cpu, os.getloadavg()[0]


class _Tree:
    """Counters of this process and its children at one instant."""

    def __init__(self) -> None:
        self._resident: dict[int, int] = {}
        self._seconds, self._io = self._counters()
        for pid in _pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
                self._resident[pid] = _memory(pid)[0]

    def _counters(self) -> tuple[float, list[int]]:
        own = os.times()
        seconds = time.process_time() + own.children_user + own.children_system
        io = [0, 0, 0]
        for pid in _pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if pid != os.getpid():
                    times = process.cpu_times()
                    seconds += times.user + times.system
                found = process.io_counters()
                io = [io[0] + found.write_bytes, io[1] + found.read_bytes, io[2] + found.read_chars]
        return seconds, io

    def since(self, measured: Measured) -> Measured:
        """Add the usage since ``self`` to a measurement."""
        measured.peak = self._peak()
        seconds, io = self._counters()
        measured.cpu = seconds - self._seconds
        measured.written, measured.read, measured.asked = (max(0, b - a) for a, b in zip(self._io, io, strict=True))
        return measured

    def _peak(self) -> int | None:
        if os.getpid() not in self._resident:
            return None
        extra = 0
        for pid in _pids():
            with suppress(OSError):
                _, peak, shared = _memory(pid)
                if pid != os.getpid():
                    peak = max(0, peak - shared)  # memory shared with the parent is counted there
                extra += max(0, peak - self._resident.get(pid, 0))
        return extra


def _pids() -> list[int]:
    """Return this process and its descendants. psutil would examine every process on the machine."""
    found = [os.getpid()]
    for pid in found:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _memory(pid: int) -> tuple[int, int, int]:
    """Return (resident, highest resident since the last reset, shared) bytes of a process."""
    found = dict.fromkeys(("VmRSS", "VmHWM", "RssShmem"), 0)
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) << 10
    resident = found["VmRSS"] - (found["RssShmem"] if pid != os.getpid() else 0)
    return resident, found["VmHWM"], found["RssShmem"]


def _trim() -> None:
    """Return freed memory to the system, so that this operation does not benefit from the previous one."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
