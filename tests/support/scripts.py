"""Runs scripts and modules as ``python`` and ``torchrun`` do, in processes forked from one that has imported torch.

The import takes most of the time of a short script. Warnings of the import are suppressed.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.afresh import afresh
from tests.support.servers import free_ports

OUT, ERR = ".out", ".err"
PATIENCE = 280.0  # seconds; no script takes as long


class Done(NamedTuple):
    """The result. ``status``: 0 if every process exited with 0. ``printed``: the stdout of all. ``told``:
    their stderr."""

    status: int
    printed: str
    told: str


def run_script(
    what: Path | str,
    *arguments: str | Path,
    cwd: Path | None = None,
    ranks: int = 0,
    environment: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
    forks: bool = False,
) -> Done:
    """Run a file, or a module by name. ``ranks``: start this many processes, as torchrun does.

    ``patience``: seconds for each process. ``forks``: the Python scripts that it starts are forks, too.
    """
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, own in enumerate(environments(ranks)):
            given, output = {**(environment or {}), **own}, Path(folder, str(rank))
            played = (what, words, cwd or Path.cwd(), given, output)
            processes.append(afresh().Process(target=play, args=played, kwargs={"forks": forks}))
            processes[-1].start()
        for process in processes:
            process.join(patience)
            process.kill()
            process.join()
        printed, told = (
            "".join(path.read_text() for path in sorted(Path(folder).glob(f"*{end}"))) for end in (OUT, ERR)
        )
    return Done(max(abs(process.exitcode or 0) for process in processes), printed, told)


def environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment that torchrun sets for each process. 0 ranks: one process without torchrun."""
    given = {"OMP_NUM_THREADS": "1"}
    if not ranks:
        return [given]
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    given |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [given | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def play(
    what: Path | str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    output: Path,
    *,
    forks: bool = False,
) -> None:
    """Become the process of the script. Its output goes to files whose names begin with ``output``."""
    os.environ.update(environment)
    os.chdir(cwd)
    for number, suffix in ((1, OUT), (2, ERR)):
        with output.with_suffix(suffix).open("wb") as file:
            os.dup2(file.fileno(), number)
    warnings.simplefilter("ignore")
    if forks:
        subprocess.Popen = Fork  # type: ignore[assignment,misc]
    _run(what, arguments)


def _run(what: Path | str, arguments: Sequence[str]) -> None:
    sys.argv = [str(what), *arguments]
    if isinstance(what, Path):
        sys.path.insert(0, str(what.parent))
        runpy.run_path(str(what), run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


class Fork:
    """Stands in for `subprocess.Popen` where a script starts a Python script."""

    def __init__(self, command: Sequence[str]) -> None:
        python, script, *arguments = command
        assert python == sys.executable
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(Path(script), arguments))
        self._process.start()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0
