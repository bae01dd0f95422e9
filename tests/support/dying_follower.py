"""Followers that die at a chosen system call. See `tests.frontends.test_follow`."""

from __future__ import annotations

import io
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import casckpt
from casckpt.frontends.follow import Follower
from casckpt.loading.update import Update
from tests.support.afresh import afresh

_CALLS = ("open", "fsync", "symlink", "replace", "rename", "mkdir", "unlink", "rmdir", "copy_file_range")


@contextmanager
def dying(store: Path, folder: Path, **options: object) -> Iterator[Callable[[int], bool]]:
    """Run a follower that dies at the system call with this number. Return whether it died.

    The command of each follower adds a line to the file "told" beside the folder.
    """
    ours, theirs = afresh().Pipe()
    process = afresh().Process(target=_serve, args=(theirs, store, folder, options))
    process.start()
    theirs.close()

    def killed_at(call: int) -> bool:
        ours.send(call)
        status = ours.recv()
        assert status in (0, -signal.SIGKILL)
        return bool(status)

    with ours:
        yield killed_at
    process.join()


def _serve(asked: Connection, store: Path, folder: Path, options: dict[str, Any]) -> None:
    """Fork a follower for each number."""
    while True:
        try:
            left = asked.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            try:
                _follow(left, store, folder, options)
                os._exit(0)
            finally:
                os._exit(1)
        asked.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _follow(left: int, store: Path, folder: Path, options: dict[str, Any]) -> None:
    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    def run(update: Update) -> None:
        update_run(update)
        deadly(lambda: None)()

    update_run = Update.run
    for name in _CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    io.open, subprocess.run = deadly(io.open), deadly(subprocess.run)
    Update.run = run  # type: ignore[method-assign,assignment]
    command = 'echo $CASCKPT_STEP >> "$CASCKPT_FOLDER/../../told"'
    list(Follower(casckpt.open(store), "run", folder, command=command, keep=0, **options).follow(once=True))
