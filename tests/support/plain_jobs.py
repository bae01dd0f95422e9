"""Commands as users start them, each on a small store, and what must hold however one of them ended.

A command runs in its own process: a script that saves, or `casckpt` with its arguments. `check` then looks at what it
left, runs the same command again, and collects garbage.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file

import casckpt.frontends.convert  # otherwise, each fork would import it # noqa: F401
from casckpt.cli.main import cli
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.killed_saves import check_clean
from tests.support.saves import CELL, cells, files, same_state, trained

ROOT = Path(__file__).parents[2]
NEW: Final = 9  # the step of what a job saves
KEPT: Final = (2, 3)  # the steps that nothing may forget
SCRIPT = """\
import sys

import casckpt
import torch

store, state = sys.argv[1:]
casckpt.open(store).save(torch.load(state), step=9)
"""
_LARGE = 800  # cells of a tensor that is written with direct I/O


def state(step: int) -> dict[str, Any]:
    """Return a state of several blobs, with tensors that are the same, similar, or new in each step."""
    return {"kept": cells(30, seed=1), "new": cells(_LARGE, seed=step), "told": trained(20, step), "step": step}


class Place(NamedTuple):
    """A folder with all files of a job."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def away(self) -> Path:
        """The target of a copy."""
        return self.folder / "away"

    @property
    def source(self) -> Path:
        """What is saved or imported."""
        return self.folder / "source"

    @property
    def out(self) -> Path:
        """The target of an export."""
        return self.folder / "out"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def opened(self, path: Path) -> Store:
        """Open a store with an empty catalogue of its own."""
        return Store(Repository(LocalStore(path), self.folder / "checked"))

    def environment(self) -> dict[str, str]:
        """Return the environment of the job's process."""
        return os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "CASCKPT_CACHE_DIR": str(self.cache), "XDG_CACHE_HOME": str(self.folder / "home"),
        }  # fmt: skip

    def fill(self) -> None:
        """Create a store with four checkpoints, of which one is forgotten, and what the jobs import."""
        for folder in (self.folder, self.source, self.source / "step-9", self.folder / "scripts"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "scripts" / "save.py").write_text(SCRIPT)
        store = self.opened(self.store)
        store.create(cell_bytes=CELL)
        for step in range(4):
            store.save(state(step), step=step)
        store.forget("default@0")
        torch.save(state(NEW), self.folder / "scripts" / "state.pt")
        tensors = {name: value for name, value in state(NEW).items() if isinstance(value, torch.Tensor)}
        for path in (self.source / "model.safetensors", self.source / "step-9" / "model.safetensors"):
            save_file(tensors, path, metadata={"format": "pt"})
        torch.save({"state": cells(40, seed=NEW)}, self.source / "step-9" / "optim.pt")
        (self.source / "step-9" / "trainer.json").write_text('{"step": 9}')


class Job(NamedTuple):
    """A command. ``words``: its arguments. ``did``: reports whether a store or folder holds its whole effect."""

    words: Callable[[Place], list[str]]
    did: Callable[[Place], bool]


def visible(store: Store) -> set[tuple[str, int]]:
    """Return the run and step of all visible checkpoints."""
    return {(one.run, one.step) for one in store.checkpoints()}


def _is_saved(run: str) -> Callable[[Place], bool]:
    return lambda place: (run, NEW) in visible(place.opened(place.store))


def _is_collected(place: Place) -> bool:
    return visible(place.opened(place.store)) == {("default", step) for step in KEPT}


def _is_copied(place: Place) -> bool:
    return visible(place.opened(place.away)) == visible(place.opened(place.store))


def _is_exported(place: Place) -> bool:
    want = {key: value for key, value in state(KEPT[-1]).items() if isinstance(value, torch.Tensor)}
    return same_state(dict(sorted(load_file(place.out / "model.safetensors").items())), dict(sorted(want.items())))


def _import(*options: str, of: str, run: str) -> Callable[[Place], list[str]]:
    return lambda place: ["import", str(place.store), str(place.source / of), "--run", run, "--step", "9", *options]


JOBS: dict[str, Job] = {
    "save": Job(
        lambda place: [str(place.folder / "scripts/save.py"), str(place.store), str(place.folder / "scripts/state.pt")],
        _is_saved("default"),
    ),
    "gc": Job(
        lambda place: ["gc", str(place.store), "--keep-last", "2", "--min-age", "0s", "--wait", "0s"], _is_collected
    ),
    "copy": Job(lambda place: ["copy", str(place.store), str(place.away)], _is_copied),
    "import": Job(_import(of="model.safetensors", run="imported"), _is_saved("imported")),
    "import files": Job(_import("--format", "files", of="step-9", run="files"), _is_saved("files")),
    "export": Job(lambda place: ["export", str(place.store), "default@3", str(place.out)], _is_exported),
}


def command(name: str, place: Place) -> list[str]:
    """Return the command line of a job."""
    return [sys.executable, *(["-m", "casckpt"] if name != "save" else []), *JOBS[name].words(place)]


def check(name: str, place: Place, ended_well: bool) -> None:
    """Check what a job left, run it again, and collect garbage. ``ended_well``: whether the job succeeded."""
    here, there = visible(place.opened(place.store)), KEPT if name == "gc" else (1, *KEPT)
    assert here >= {("default", step) for step in there}, f"only {here} are left"
    check_stores(place)
    assert not ended_well or JOBS[name].did(place), "it succeeded, but did not do everything"
    status, told = again(name, place)
    assert status == 0 or (status == 5 and JOBS[name].did(place)), f"the next call ended with {status}: {told}"
    assert JOBS[name].did(place), "the next call did not do everything"
    check_stores(place)
    for path in (place.store, place.away):
        if path.exists():
            store = place.opened(path)
            assert not store.gc(min_age=0, wait=0).waiting
            check_clean(store)
    check_stores(place)
    if name == "export":
        assert [path.name for path in place.out.iterdir()] == ["model.safetensors"], list(place.out.iterdir())


def check_stores(place: Place) -> None:
    """Check that all that is visible is complete."""
    for path in (place.store, place.away):
        if (path / "casckpt.json").exists():
            store = place.opened(path)
            for one in store.checkpoints():
                _check_whole(store, one.run, one.step, place)
            found = store.verify()
            assert not found.is_damaged, found
            assert not found.failed, found


def _check_whole(store: Store, run: str, step: int, place: Place) -> None:
    if run == "files":
        to = place.folder / "compared"
        shutil.rmtree(to, ignore_errors=True)
        status, told = _ended(lambda: cli(["export", str(store.url), f"{run}@{step}", str(to)]))
        assert status == 0, told
        source = place.source / "step-9"
        there = {path.relative_to(source): data for path, data in files(source).items()}
        assert {path.relative_to(to): data for path, data in files(to).items()} == there
        return
    want = state(step)
    if run == "imported":
        want = {key: value for key, value in want.items() if isinstance(value, torch.Tensor)}
    found = store.read(f"{run}@{step}")
    assert same_state(dict(sorted(found.items())), dict(sorted(want.items()))), f"{run}@{step} differs"


def start(name: str, place: Place) -> int:
    """Run a job in this process. Return 0, or raise SystemExit or the script's error."""
    os.environ.update(place.environment())
    words = JOBS[name].words(place)
    if name != "save":
        cli(words)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def again(name: str, place: Place) -> tuple[int, str]:
    """Run a job in this process. Return its exit status, and what it printed."""
    return _ended(lambda: start(name, place))


def _ended(call: Callable[[], object]) -> tuple[int, str]:
    told = StringIO()
    try:
        with redirect_stdout(told), redirect_stderr(told):
            call()
    except SystemExit as ended:
        return int(ended.code or 0), told.getvalue()
    except Exception as error:  # noqa: BLE001 - the caller judges it
        return getattr(error, "exit_status", 1), "".join(traceback.format_exception(error))
    return 0, told.getvalue()
