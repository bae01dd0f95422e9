"""Scripts and modules, run as ``python`` and ``torchrun`` run them, in processes forked from one that imported torch.

To import it is the greater part of what a short script takes. Its warnings are not heard.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.afresh import afresh
from tests.support.servers import free_ports

PATIENCE = 280.0  # seconds; none is meant to take as long


class Done(NamedTuple):
    """``status``: 0, if each process ended with 0. ``printed``: by all of them; ``told``: on stderr."""

    status: int
    printed: str
    told: str


def run_script(
    what: Path | str, *arguments: str, cwd: Path, ranks: int = 0, environment: Mapping[str, str] | None = None
) -> Done:
    """Run a file, or a module by its name. ``ranks``: on so many, as torchrun would start them."""
    given = dict(environment or {}) | {"OMP_NUM_THREADS": "1"}
    if ranks:
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        given |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    outputs = [cwd.with_name(f"{cwd.name}-{rank}") for rank in range(max(1, ranks))]
    processes = []
    for rank, output in enumerate(outputs):
        own = given | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {})
        processes.append(afresh().Process(target=_run, args=(what, arguments, cwd, own, output)))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
        process.join()
    status = max((abs(process.exitcode or 0) for process in processes), default=0)
    printed, told = (
        "".join(output.with_suffix(suffix).read_text() for output in outputs) for suffix in (".out", ".err")
    )
    return Done(status, printed, told)


def _run(what: Path | str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], output: Path) -> None:
    os.environ.update(environment)
    os.chdir(cwd)
    for number, suffix in ((1, ".out"), (2, ".err")):
        with output.with_suffix(suffix).open("wb") as file:
            os.dup2(file.fileno(), number)
    warnings.simplefilter("ignore")
    sys.argv = [str(what), *arguments]
    if isinstance(what, Path):
        sys.path.insert(0, str(what.parent))
        runpy.run_path(str(what), run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)
