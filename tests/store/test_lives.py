"""A store object that is pickled, used in forked processes, or still in use at the end of a process."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

import casckpt
from casckpt.errors import InvalidInput
from tests.support.forks import forked
from tests.support.shared import made_once

if TYPE_CHECKING:
    from tests.support.servers import Server

SECONDS = 120  # a child that hangs longer fails the test


def told(code: str, *args: object, status: int = 0) -> str:
    """Run a program that must exit with ``status``. Return its stderr."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == status, done.stderr
    return done.stderr


def test_a_used_store_can_be_pickled(store: casckpt.Store) -> None:
    store.save({"w": torch.ones(3)}, step=1)
    store.save_async({"w": torch.ones(3)}, step=2).result()
    copy = pickle.loads(pickle.dumps(store))
    assert [one.step for one in copy.checkpoints()] == [1, 2]
    assert copy.save_async({"w": torch.ones(3)}, step=3).result() in store.checkpoints()


def test_a_forked_child_can_save_in_the_background(store: casckpt.Store) -> None:
    """The parent's thread does not exist in the child, so the child must not wait for it."""
    store.save_async({"w": torch.ones(3)}, step=1).result()
    with forked(lambda: store.save_async({"w": torch.zeros(3)}, step=2).result(SECONDS)):
        pass
    assert [one.step for one in store.checkpoints()] == [1, 2]


def test_a_save_to_a_bucket_is_finished_when_the_interpreter_ends(moto_server: Server, tmp_path: Path) -> None:
    """This includes a save that has only just begun, even if no variable refers to the store.

    The S3 client uses thread pools, which Python shuts down before it waits for casckpt's thread.
    """
    url = f"s3://{moto_server.new_place()}/store"
    code = (
        "import sys, json, threading, casckpt, torch\n"
        "from casckpt.history import transactions\n"
        "from casckpt.saving import saver\n"
        "ending, real = threading.Event(), transactions.look_at_all\n"
        "threading._register_atexit(ending.set)\n"
        "def late(*args):\n"
        "    ending.wait()\n"
        "    return real(*args)\n"
        "transactions.look_at_all = late\n"
        "options = {'storage_options': json.loads(sys.argv[2]), 'cache_dir': sys.argv[3]}\n"
        "casckpt.open(sys.argv[1], **options).save_async({'w': torch.arange(3_000_000)}, step=1)\n"
    )
    assert told(code, url, json.dumps(moto_server.options), tmp_path) == ""
    store = casckpt.open(url, storage_options=moto_server.options, cache_dir=tmp_path / "here")
    assert [one.step for one in store.checkpoints()] == [1]


ENDINGS = """
import atexit, gc, json, os, sys, threading
atexit.register(os.write, 1, b"first ")  # runs last
import casckpt, torch
import torch.distributed.checkpoint as dcp
from casckpt.history import transactions
from casckpt.base import exit_status as end
from casckpt.frontends.dcp import StorageWriter
from casckpt.frontends.trainer import Checkpointer

gc.freeze()  # what is imported costs each end a second else
for path, ending in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    sys.stdout.flush()
    if not os.fork():
        os.dup2(write, 1), os.dup2(write, 2), os.close(read), os.close(write)
        break
    os.close(write)
    with open(read) as pipe:
        print(json.dumps([pipe.read(), os.waitstatus_to_exitcode(os.wait()[1])]))
else:
    os._exit(0)

atexit.register(print, "second", flush=True)
ended, real = threading.Event(), transactions.look_at_all
def failing(*args):
    ended.wait()
    raise casckpt.errors.StorageError("no space left")
def late(*args):
    assert end._ending.wait(100)
    raise casckpt.errors.StorageError("no space left")
def gone(*args):
    raise casckpt.errors.StorageError("long ago")
store = casckpt.open(path)
exec(ending)
"""


SAVE = "one = store.save_async({'w': torch.ones(3)}, step=1, overwrite=True); "
LAST = f"transactions.look_at_all = failing; {SAVE}threading._register_atexit(ended.set); "
EARLY = f"transactions.look_at_all = gone; {SAVE}store._saver.get().background.wait(); "

LATE = "transactions.look_at_all = late; "
LATE += "dcp.async_save({'w': torch.ones(3)}, storage_writer=StorageWriter(store, step=1)); "


OWNED = "transactions.look_at_all = gone; one = Checkpointer(store, run='r').save_async(1, {'w': torch.ones(3)}); "
HEARD = EARLY + "one.exception(); "
OWN = "one.result(); assert type(sys.exit) is type(len)"
FAILED = {
    LAST: 120, LAST + "sys.exit(0)": 120, LAST + "sys.exit(3)": 120, LAST + "raise ValueError": 1,
    LAST + "import logging; logging.basicConfig(stream=open(os.devnull, 'w'))": 120,
    LAST + "sys.stderr = None": 120, LATE: 120, LATE + "sys.exit(3)": 120,
    OWNED: 120,
}  # fmt: skip
FINE = {HEARD: 0, OWNED + "one.exception()": 0, SAVE + "sys.exit(0)": 0, SAVE + "sys.exit(3)": 3, SAVE + OWN: 0}
IN_BACKGROUND = """
for step in range(4):
    store.save_async({'w': torch.full((2_000_000,), float(step))}, step=step)
"""
BESIDE_A_CHILD = """
begun, go, real = threading.Event(), threading.Event(), transactions.look_at_all
def late(*args):
    begun.set()
    go.wait()
    return real(*args)
transactions.look_at_all = late
store.save_async({'w': torch.ones(3)}, step=1)
begun.wait()
child = os.fork()
if child:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go.set()
    sys.exit(status)
"""
COLLECTED = """
def main():
    store = casckpt.open(path)
    store.save({'w': 1}, step=1), store.save({'w': 1}, step=2)
    heard = store.save_async({'w': 1}, step=1).exception()
    other = casckpt.open(path)
    other.save_async({'w': 1}, step=2)
main()
gc.collect()
"""
PROGRAMS = (IN_BACKGROUND, BESIDE_A_CHILD, COLLECTED, *FAILED, *FINE)


class Ended(NamedTuple):
    """How a program ended. ``said``: its stdout and stderr."""

    said: str
    status: int
    store: casckpt.Store


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How all programs ended. They are forked from one process, because imports are slow. Each has its own store."""

    def run(folder: Path) -> None:
        programs = {str(folder / str(number)): program for number, program in enumerate(PROGRAMS)}
        command = [sys.executable, "-W", "ignore", "-c", ENDINGS, json.dumps(programs)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
        (folder / "ends").write_text(done.stdout)

    folder = made_once(tmp_path_factory, "lives", run)
    ends = map(json.loads, (folder / "ends").read_text().splitlines())
    return {
        program: Ended(said, status, casckpt.open(folder / str(number)))
        for number, (program, (said, status)) in enumerate(zip(PROGRAMS, ends, strict=True))
    }


def test_saves_in_the_background_are_finished_when_the_interpreter_ends(ended: dict[str, Ended]) -> None:
    said, status, store = ended[IN_BACKGROUND]
    assert (said, status) == ("second\nfirst ", 0)
    assert [one.step for one in store.checkpoints()] == [0, 1, 2, 3]
    assert not store.verify().is_damaged


def test_a_forked_child_can_exit_while_its_parent_saves(ended: dict[str, Ended]) -> None:
    """The child does not wait for that save, which would never end in the child."""
    said, status, store = ended[BESIDE_A_CHILD]
    assert (said, status) == ("second\nfirst " * 2, 0)
    assert [one.step for one in store.checkpoints()] == [1]


def test_an_unreported_failed_last_save_sets_the_exit_status(ended: dict[str, Ended]) -> None:
    """The other exit handlers still run. Successful saves do not change the status, and neither does `sys.exit`."""
    wanted = FAILED | FINE
    assert {program: ended[program].status for program in wanted} == wanted
    for program in wanted:
        said = ended[program].said
        assert "second\n" in said, said
        assert said.endswith("first "), said
        told = "the last background save failed, and no caller checked its future"
        assert said.count(told) == (program in FAILED and "stderr = None" not in program), said


def test_an_unreported_failed_last_save_is_logged_at_exit(ended: dict[str, Ended]) -> None:
    said, status, _ = ended[COLLECTED]
    assert status == 120
    assert said.count("failed, and no caller checked its future") == 1
    assert "default@2 already exists" in said


def test_a_deleted_store_is_recreated_by_the_next_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a notebook, a user may remove the folder while the store object still exists.

    Other processes must still be able to open the new save.
    """
    store = casckpt.open(tmp_path / "store")
    store.create(cell_bytes=8192, blob_bytes=1 << 16)
    store.save({"w": torch.ones(5000)}, step=1)
    assert not caplog.messages
    shutil.rmtree(tmp_path / "store")
    store.save({"w": torch.ones(5000)}, step=2)
    (said,) = caplog.messages
    assert f"the store at {tmp_path / 'store'} is gone" in said
    store.save({"w": torch.zeros(5000)}, step=3)
    assert len(caplog.messages) == 1
    fresh = casckpt.open(tmp_path / "store")
    assert [ckpt.step for ckpt in fresh.checkpoints()] == [2, 3]
    assert fresh.read("default@2")["w"].sum() == 5000
    assert fresh.repository.marker.cell_bytes == 8192
    assert not fresh.verify().is_damaged


def test_a_relative_or_home_cache_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store, other = (casckpt.open(tmp_path / "store", cache_dir=folder) for folder in ("~/cache", "cache"))
    store.save({"w": torch.ones(3)}, step=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for one in (store, other):
        assert len(one.checkpoints()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "elsewhere", "home", "store"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_environment_variable_can_name_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This works for programs and for the command line.

    An explicit argument wins, and an empty variable has no effect.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CASCKPT_CACHE_DIR", "there")
    store = casckpt.open(tmp_path / "store")
    store.save({"a": 1}, step=0)
    store.checkpoints()
    assert list((tmp_path / "there").rglob("catalogue.sqlite"))
    assert store.repository.cache_dir == tmp_path / "there"
    assert casckpt.open(tmp_path / "store", cache_dir=tmp_path / "mine").repository.cache_dir == tmp_path / "mine"
    monkeypatch.setenv("CASCKPT_CACHE_DIR", "")
    assert casckpt.open(tmp_path / "store").repository.cache_dir is None


def test_an_error_for_tag_reports_swapped_arguments(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path)
    saved = store.save({"w": torch.ones(2)}, run="sft", step=1)
    for name in ("sft@1", saved.id, "latest"):
        with pytest.raises(InvalidInput, match="the tag name comes first, and then the checkpoint"):
            store.tag(name, "best")
    assert not store.tags()
    store.tag("best", "sft@1")
