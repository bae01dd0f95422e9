"""The worker processes as the main process sees them: one per rank, called over pipes, one call at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any

from benchmarks.environments import python_of
from benchmarks.measure import Measured, together
from benchmarks.results import OURS

_TOOLS = Path(__file__).resolve().parent.parent
_TIMEOUT = 1800.0  # seconds: the time limit of a call
_GRACE = 60.0  # seconds that the other ranks have after one of them has failed
_FAREWELL = 10.0


class CallFailed(Exception):
    """A worker raised an error. ``kind``: the name of the error's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Team:
    """``ranks`` workers in one environment. If there are several, they form a gloo process group."""

    def __init__(
        self,
        folder: Path,
        environment: str = "",
        ranks: int = 1,
        *,
        quick: bool = False,
        tree: Path | None = None,
        inside: Callable[[int], Sequence[str]] = lambda rank: (),
    ) -> None:
        """Start the workers. ``folder``: for logs and the rendezvous.

        ``quick``: see `Here`. ``tree``: the source tree of casckpt and the tasks. ``inside``: the beginning of the
        command line of a rank, such as ``ip netns exec NAME``.

        Raises `Absent` if the environment is absent.
        """
        python = python_of(environment)
        self._other_tree = tree is not None
        self.broken = False
        self._folder = Path(mkdtemp(prefix="team-", dir=folder))
        self._workers = [
            _Worker(
                (*inside(rank), str(python)),
                tree or _TOOLS.parent,
                self._folder,
                {"rank": rank, "ranks": ranks, "quick": quick},
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.close(_FAREWELL if not self.broken else 0.0)

    def call(self, task: str, **arguments: Any) -> list[Any]:
        """Call ``task`` (such as "saves:save") in every worker. Return the results by rank. Raises `CallFailed`.

        If a call gets no response, the team is ``broken``.
        """
        if self._other_tree and "peer" in arguments:
            arguments["peer"] = OURS
        for worker in self._workers:
            worker.ask(task, arguments)
        answers: dict[int, Any] = {}
        failures: list[CallFailed] = []
        pending = {worker.output: rank for rank, worker in enumerate(self._workers)}
        while pending:
            ready = select.select(list(pending), [], [], _GRACE if failures else _TIMEOUT)[0]
            if not ready:
                failures.append(CallFailed("TimeoutError", f"no answer from ranks {sorted(pending.values())}"))
                self.broken = True
                break
            for output in ready:
                rank = pending.pop(output)
                try:
                    answers[rank] = self._workers[rank].answer()
                except CallFailed as error:
                    failures.append(error)
        self.broken = self.broken or any(error.kind == "Died" for error in failures)
        if failures:
            raise min(failures, key=lambda error: error.kind != "WrongBytes")
        return [answers[rank] for rank in range(len(self._workers))]

    def measure(self, task: str, **arguments: Any) -> Measured:
        """Call a task that measures, and combine the results of the ranks."""
        return together([Measured(**answer) for answer in self.call(task, **arguments)])


def _path(tree: Path) -> str:
    """Return a worker's module path, with ``tree`` first."""
    return os.pathsep.join(filter(None, (str(tree / "tools"), os.environ.get("PYTHONPATH"))))


class _Worker:
    def __init__(self, python: Sequence[str], tree: Path, folder: Path, about: dict[str, int]) -> None:
        self._log = folder / f"rank-{about['rank']}.log"
        text = json.dumps(about | {"rendezvous": str(folder / "rendezvous")})
        command = (*python, "-m", "benchmarks.worker", text)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": _path(tree), "PYTHONWARNINGS": "ignore"},
                cwd=tree,  # the first location where Python looks for casckpt
                start_new_session=True,  # Ctrl-C ends the main process, which then ends this one
            )

    def ask(self, task: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        with suppress(BrokenPipeError):  # the response contains the error
            self._process.stdin.write(json.dumps({"task": task, "arguments": arguments}).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def output(self) -> IO[bytes]:
        """Return the stream of responses."""
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        return self._process.stdout

    def answer(self) -> Any:
        """Return the response to the last request. Raises `CallFailed`."""
        line = self.output.readline()
        if not line:
            raise CallFailed("Died", f"a worker ended with {self._process.wait()}: {self._last_words()}")
        found = json.loads(line)
        if "error" in found:
            raise CallFailed(found["error"], found["text"])
        return found["result"]

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["no message"]
        return lines[-1][:300]

    def close(self, patience: float) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
