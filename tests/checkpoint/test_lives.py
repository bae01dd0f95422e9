"""One store object in many lives: pickled, forked, used while its process ends."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import casckpt

SECONDS = 120  # a hung child fails the test


def test_a_store_pickles_whatever_it_did(store: casckpt.Store) -> None:
    store.save({"w": torch.ones(3)}, step=1)
    store.save_async({"w": torch.ones(3)}, step=2).result()
    copy = pickle.loads(pickle.dumps(store))
    assert [one.step for one in copy.checkpoints()] == [1, 2]
    assert copy.save_async({"w": torch.ones(3)}, step=3).result() in store.checkpoints()


def test_a_forked_child_saves_in_the_background_of_its_own(store: casckpt.Store) -> None:
    """The thread of the parent is not there in the child; waiting for it would take for ever."""
    store.save_async({"w": torch.ones(3)}, step=1).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: what is tested here
        pid = os.fork()
    if not pid:
        status = 1
        try:
            store.save_async({"w": torch.zeros(3)}, step=2).result(SECONDS)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [one.step for one in store.checkpoints()] == [1, 2]


def test_saves_in_the_background_are_finished_when_the_interpreter_ends(store_path: Path) -> None:
    code = (
        "import sys, casckpt, torch\n"
        "store = casckpt.open(sys.argv[1])\n"
        "for step in range(4):\n"
        "    store.save_async({'w': torch.full((2_000_000,), float(step))}, step=step)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(store_path)], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
    store = casckpt.open(store_path)
    assert [one.step for one in store.checkpoints()] == [0, 1, 2, 3]
    assert not store.verify().is_damaged
