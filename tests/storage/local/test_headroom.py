"""Tests of how much memory a process may fill with reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.storage.local.headroom import headroom

KIB = 1 << 10


class Host:
    """The files in which a kernel reports its memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tell("meminfo", "MemTotal: 900 kB\nMemAvailable:     500 kB\n")
        self.tell("mine", "0::/\n")

    def tell(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def limit(self, folder: str, most: str, used: int, file: int) -> None:
        self.tell(f"groups/{folder}/memory.max", f"{most}\n")
        self.tell(f"groups/{folder}/memory.current", f"{used}\n")
        self.tell(f"groups/{folder}/memory.stat", f"anon 5\ninactive_file {file}\nactive_file 7\n")

    def found(self) -> int:
        return headroom(self.root / "meminfo", self.root / "mine", self.root / "groups")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_available_memory_of_the_host_is_found(host: Host) -> None:
    assert host.found() == 500 * KIB


def test_the_nearest_cgroup_limit_applies_and_reclaimable_memory_counts_as_available(host: Host) -> None:
    host.tell("mine", "0::/slice/job\n")
    host.limit("slice", str(300 * KIB), 200 * KIB, 50 * KIB)
    host.limit("slice/job", "max", 100 * KIB, 0)
    assert host.found() == 150 * KIB
    host.limit("slice/job", str(120 * KIB), 100 * KIB, 0)
    assert host.found() == 20 * KIB
    host.limit("slice/job", str(90 * KIB), 100 * KIB, 0)
    assert host.found() == 0


def test_a_container_with_its_own_cgroup_root_is_supported(host: Host) -> None:
    host.tell("mine", "0::/docker/0123\n")
    host.limit("", str(64 * KIB), 32 * KIB, 0)
    assert host.found() == 32 * KIB


def test_cgroup_v1_limits_are_found(host: Host) -> None:
    host.tell("mine", "9:cpu,cpuacct:/a\n4:memory:/job\n0::/\n")
    host.tell("groups/memory/job/memory.limit_in_bytes", "102400\n")
    host.tell("groups/memory/job/memory.usage_in_bytes", "92160\n")
    host.tell("groups/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 2048\n")
    host.tell("groups/memory/memory.limit_in_bytes", "9223372036854771712\n")
    host.tell("groups/memory/memory.usage_in_bytes", "92160\n")
    host.tell("groups/memory/memory.stat", "total_inactive_file 0\n")
    assert host.found() == 12 * KIB


@pytest.mark.parametrize("text", ["", "MemTotal: 900 kB\n"])
def test_there_is_no_limit_on_a_system_without_memory_information(host: Host, text: str) -> None:
    host.tell("meminfo", text)
    assert host.found() == 0
    (host.root / "meminfo").unlink()
    assert host.found() == 0


def test_an_unreadable_limit_counts_as_no_memory_left(host: Host) -> None:
    host.limit("", "5", 5, 5)
    host.tell("groups/memory.stat", "anon 5\n")
    assert host.found() == 0
