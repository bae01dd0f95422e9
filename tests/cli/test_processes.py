"""The command line as a separate process: exit statuses, pipes, interrupts, and its imports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import casckpt
from casckpt.history.transactions import begin

CASCKPT = (sys.executable, "-m", "casckpt")


def run(*args: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*CASCKPT, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_the_version_matches_the_package() -> None:
    assert run("--version").stdout == f"casckpt {casckpt.__version__}\n"


def test_exit_statuses_and_output_streams_are_as_documented(saved: Path) -> None:
    assert len(json.loads(run("list", saved, "--json").stdout)) == 4
    missing = run("show", saved, "a@9", status=3)
    assert (missing.stdout, missing.stderr.count("\n")) == ("", 1)
    assert json.loads(run("init", saved, "--json", status=5).stdout)["error"]["kind"] == "conflict"
    run("list", status=2)


def test_commands_without_tensors_do_not_import_torch(saved: Path) -> None:
    store, s = casckpt.open(saved), str(saved)
    id = store.get("a@1").id
    lines = [
        ["list", s], ["show", s, "a@1", "--tensors"], ["diff", s, "a@1", "a@2"], ["stats", s], ["verify", s],
        ["tag", s, "best", "a@2"], ["tag", s], ["forget", s, "a@1"], ["list", s, "--all"], ["restore", s, id],
        ["transactions", s], ["status", s], ["reindex", s], ["repair", s], ["gc", s, "--keep-last", "1"],
        ["init", f"{s}-new"], ["copy", s, f"{s}-copy"], ["watch", s, "a", "--after", "start", "--timeout", "0"],
    ]  # fmt: skip
    code = (
        "import sys\n"
        "from casckpt.cli.main import cli\n"
        f"for line in {lines!r}:\n"
        "    assert not cli.main(line, standalone_mode=False), line\n"
        "    assert 'torch' not in sys.modules, line\n"
        f"    cli.main([*line, '--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'help'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after_list_all = "1 checkpoint forgotten: `casckpt stats` shows what a gc frees\n"
    assert (done.returncode, done.stderr) == (0, after_list_all)


@pytest.mark.parametrize(
    ("options", "modules"),
    [([], {"casckpt.upkeep.gc.gc", "numpy"}), (["--json"], {"rich", "numpy"})],
    ids=["table", "json"],
)
def test_list_imports_only_what_it_needs(saved: Path, options: list[str], modules: set[str]) -> None:
    """Importing everything takes longer than listing a thousand checkpoints."""
    code = (
        "import sys\n"
        "from casckpt.cli.main import cli\n"
        f"cli.main(['list', {str(saved)!r}, *{options!r}], standalone_mode=False)\n"
        f"assert not {modules!r} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_closed_pipe_ends_the_command_quietly(saved: Path) -> None:
    with subprocess.Popen(
        [*CASCKPT, "list", str(saved), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_full_disk_that_receives_stdout_is_reported(saved: Path, option: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*CASCKPT, "list", str(saved), *option], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("casckpt: OSError: [Errno 28]")
    assert "Traceback" not in done.stderr


def test_a_command_works_without_stdout(saved: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *CASCKPT, "list", str(saved)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_a_command_without_a_traceback(saved: Path, store: casckpt.Store) -> None:
    store.forget("a@1")
    transaction = begin(store.repository, "a", 9)
    # a shell that starts the tests in the background ignores interrupts, and its children inherit that
    command = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from casckpt.cli.main import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command, "gc", str(saved), "--min-age", "0", "--wait", "1h"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting for the save of a@9")
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    transaction.abort("test")
    assert process.returncode == 130
    said, note = said.strip().splitlines()
    assert said == "casckpt: interrupted"
    assert note.startswith("before this error, gc had forgotten nothing; purged a@1 ")


@pytest.mark.parametrize(("signals", "status", "steps"), [(0, 0, [1, 2]), (1, 0, [1]), (2, -signal.SIGTERM, [])])
def test_a_watch_ends_after_the_checkpoint_that_it_is_storing(
    tmp_path: Path, signals: int, status: int, steps: list[int]
) -> None:
    """It receives so many signals during its first import, or one when it waits. A second one ends it at once."""
    for step in (1, 2):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    code = (
        "import os, signal\n"
        "from casckpt.cli.main import main\n"
        "from casckpt.frontends.files import watching\n"
        "save = watching.save_listing\n"
        "def and_signal(*args, **options):\n"
        f"    for _ in range({signals}):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return save(*args, **options)\n"
        "watching.save_listing = and_signal\n"
        "main()\n"
    )
    store = tmp_path / "store"
    arguments = [store, tmp_path / "out", "--format", "files", "--run", "r", "--watch", "--settle", "0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", code, "import", *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        stored = [json.loads(line)["step"] for _, line in zip(steps, process.stdout, strict=False)]
        if not signals:
            process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
    assert (process.returncode, stored) == (status, steps)
