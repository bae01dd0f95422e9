"""casckpt treats a process on this host as alive unless it can prove that the process is dead."""

from __future__ import annotations

import fcntl
import getpass
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from casckpt.format.records import Process
from casckpt.repository import processes
from casckpt.repository.processes import alone_on_this_host, is_dead, this_process, who
from tests.support.forks import forked


def changed(process: Process, **fields: object) -> Process:
    return Process(**{name: getattr(process, name) for name in process.__struct_fields__} | fields)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "from casckpt.repository.processes import this_process as p; from casckpt.format.records import encode;"
        "print(encode(p()).decode().splitlines()[0], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def identity(child: subprocess.Popen[bytes]) -> Process:
    import msgspec

    assert child.stdout is not None
    return msgspec.json.decode(child.stdout.readline(), type=Process)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
def test_a_killed_process_is_recognized_as_dead(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert process.pid == child.pid
    assert not is_dead(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it ended, and is a zombie
    assert is_dead(process)
    child.wait()
    assert is_dead(process)


@needs_proc
def test_the_current_process_is_recognized_as_alive() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert me.started > 0
    assert me.boot_id
    assert me.pid_namespace
    assert not is_dead(me)


@needs_proc
def test_a_process_counts_as_dead_if_its_pid_was_reused() -> None:
    me = this_process()
    assert is_dead(changed(me, started=me.started - 1))


@needs_proc
@pytest.mark.parametrize(
    "fields",
    [
        {"boot_id": "another boot, maybe another host"},
        {"boot_id": ""},
        {"pid_namespace": "pid:[1]"},
        {"pid_namespace": ""},
        {"started": 0},
        {"started": -5},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 40},
    ],
)
def test_a_process_of_uncertain_status_is_not_considered_dead(
    child: subprocess.Popen[bytes], fields: dict[str, object]
) -> None:
    process = identity(child)
    child.kill()
    child.wait()
    assert is_dead(process)
    assert not is_dead(changed(process, **fields))


def test_no_process_is_considered_dead_without_the_proc_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = this_process()
    monkeypatch.setattr(processes, "PROC", tmp_path)
    me = this_process()
    assert (me.boot_id, me.pid_namespace, me.started) == ("", "", 0)
    assert me.pid == os.getpid()
    assert not is_dead(me)
    assert not is_dead(before)


@needs_proc
def test_a_process_that_the_proc_file_system_hides_is_not_considered_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = this_process()
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(me.boot_id)
    (tmp_path / "self").symlink_to("/proc/self")  # as with hidepid=2: only some entries are visible
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert this_process().boot_id == me.boot_id
    assert not is_dead(me)


@needs_proc
@pytest.mark.parametrize(("state", "alive", "dead"), [("S", 1, False), ("Z", 1, True), ("Z", 2, False), ("X", 0, True)])
def test_a_process_is_recognized_with_any_name_and_after_its_main_thread_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, alive: int, dead: bool
) -> None:
    me = this_process()
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(me.boot_id)
    (tmp_path / "self").symlink_to("/proc/self")
    (tmp_path / str(me.pid)).mkdir()
    fields = [state, *["0"] * 16, str(alive), "0", str(me.started), "0"]
    (tmp_path / str(me.pid) / "stat").write_text(f"{me.pid} (a) Z 1 ) 2) {' '.join(fields)}\n")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert is_dead(me) is dead


def is_free(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_lock_is_held_and_released(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with alone_on_this_host(path):
        assert not is_free(path)
    assert is_free(path)
    with pytest.raises(KeyError), alone_on_this_host(path):
        raise KeyError
    assert is_free(path)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A data loader's worker lives as long as the training run, and a mirror would wait for it to end."""
    path = tmp_path / "lock"
    held = alone_on_this_host(path)
    with held:
        child = forked(lambda: None)
        child.__enter__()
    try:
        assert is_free(path)
    finally:
        child.__exit__(None, None, None)


# the user


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a user without a name, as in a container without /etc/passwd."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    processes._user.cache_clear()
    yield
    processes._user.cache_clear()


def test_who_runs_a_process_is_named_by_user_and_host() -> None:
    assert who() == f"{getpass.getuser()}@{socket.gethostname()}"
    assert who("ann") == f"ann@{socket.gethostname()}"


@pytest.mark.usefixtures("unknown_user")
def test_a_user_without_a_name_is_named_by_number() -> None:
    assert who().startswith(f"{os.getuid()}@")


def test_a_name_of_the_system_is_shown_in_at_most_200_printable_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node\n3\udcff" + "x" * 300)
    assert who("ann") == "ann@node?3?" + "x" * 189
