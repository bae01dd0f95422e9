"""Followers: the folder is always one whole version, whatever kills them, and the command hears of each switch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from casckpt.errors import Conflict, InvalidInput
from casckpt.frontends.follow import CURRENT, Follower
from casckpt.store.store import Store
from tests.support.saves import cells, files, small_folder

ROOT = Path(__file__).parents[2]
FOLLOW = """
import os, signal, subprocess, sys
from pathlib import Path
import casckpt
from casckpt.frontends.follow import Follower

left = int(sys.argv[3])

def dying(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call

for name in ("open", "fsync", "symlink", "replace", "rename", "mkdir", "unlink", "rmdir", "readlink"):
    setattr(os, name, dying(getattr(os, name)))
subprocess.run = dying(subprocess.run)
store = casckpt.open(sys.argv[1])
command = 'echo $CASCKPT_STEP >> "$CASCKPT_FOLDER/../../told"'
list(Follower(store, "run", Path(sys.argv[2]), command=command, keep=0).follow(once=True))
"""


def state(step: int) -> dict[str, torch.Tensor]:
    return {"a.weight": cells(3, seed=step), "b.weight": cells(0.5, seed=step + 100)}


def save(store: Store, step: int) -> None:
    store.save(state(step), run="run", step=step, attachments={"notes.txt": b"%d" % step})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = small_folder(tmp_path / "store")
    save(made, 0)
    return made


def is_at(folder: Path, step: int) -> bool:
    held = load_file(folder / CURRENT / "model.safetensors")
    return (
        all(torch.equal(held[key], value) for key, value in state(step).items())
        and (folder / CURRENT / "notes.txt").read_bytes() == b"%d" % step
    )


def once(store: Store, folder: Path, **options: Any) -> list[int]:
    return [one.checkpoint.step for one in Follower(store, "run", folder, **options).follow(once=True)]


def test_the_newest_is_current_and_what_was_current_stays_as_it_is(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    assert once(store, folder) == [0]
    assert once(store, folder) == []
    mapped = (folder / CURRENT / "model.safetensors").open("rb")
    before = files(folder / os.readlink(folder / CURRENT))
    for step in (1, 2, 3):
        save(store, step)
        assert once(store, folder, keep=9) == [step]
        assert is_at(folder, step)
    assert files(next(folder.glob("000001-*"))) == before
    assert len(list(folder.glob("0*"))) == 4
    save(store, 4)
    assert once(store, folder) == [4]
    assert sorted(one.name[:6] for one in folder.glob("0*")) == ["000004", "000005"]
    with mapped:
        assert mapped.read() in before.values()


def test_only_some_keys(store: Store, tmp_path: Path) -> None:
    assert once(store, tmp_path / "to", keys=["a.*"]) == [0]
    assert set(load_file(tmp_path / "to" / CURRENT / "model.safetensors")) == {"a.weight"}


def test_a_command_that_fails_keeps_what_was_before(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    fails = f"echo $CASCKPT_ID >> {tmp_path}/told; test ! -e {tmp_path}/bad"
    once(store, folder, command=fails, keep=0)
    (tmp_path / "bad").touch()
    save(store, 1)
    once(store, folder, command=fails, keep=0)
    assert len(list(folder.glob("0*"))) == 2
    once(store, folder, command=fails, keep=0)  # it is called again
    assert len(list(folder.glob("0*"))) == 2
    (tmp_path / "bad").unlink()
    once(store, folder, command=fails, keep=0)
    assert [one.name[:6] for one in folder.glob("0*")] == ["000002"]
    ids = [store.get(f"run@{step}").id for step in (0, 1, 1, 1)]
    assert subprocess.check_output(["cat", tmp_path / "told"], text=True).split() == ids


def test_a_folder_of_somebody_else_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").touch()
    with pytest.raises(InvalidInput, match="mine"):
        once(store, tmp_path / "to")
    following = Follower(store, "run", tmp_path / "other").follow()
    next(following)
    with pytest.raises(Conflict, match="another process"):
        once(store, tmp_path / "other")


def killed_at(call: int, store: Path, folder: Path) -> bool:
    """Run a follower that is killed at a call of the system."""
    ended = subprocess.run(
        [sys.executable, "-c", FOLLOW, str(store), str(folder), str(call)], cwd=ROOT, check=False, capture_output=True
    )
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr.decode()
    return ended.returncode != 0


@pytest.mark.parametrize("part", range(2))
def test_killed_anywhere(store: Store, tmp_path: Path, part: int) -> None:
    folder, calls = tmp_path / "to", iter(range(1 + part, 1000, 11))
    once(store, folder)
    (tmp_path / "told").write_text("0\n")
    step, at, seen = 0, 0, [0]
    while killed_at(next(calls), tmp_path / "store", folder):
        at = next(one for one in (step, at) if is_at(folder, one))
        seen.append(at)
        if at == step:
            step += 1
            save(store, step)
    while once(store, folder, command=f'echo $CASCKPT_STEP >> "{tmp_path}/told"', keep=0):
        pass
    assert is_at(folder, step)
    assert sorted(one.name for one in folder.iterdir())[:2] == [".told", next(folder.glob("0*")).name]
    assert len(list(folder.iterdir())) == 3
    told = list(map(int, (tmp_path / "told").read_text().split()))
    assert told == sorted(told)
    assert set(told) == {*seen, step}


class Engine(BaseHTTPRequestHandler):
    """What an engine does that loads from a folder when it is told to, as SGLang's `/update_weights_from_disk` does."""

    held: ClassVar[list[dict[str, torch.Tensor]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        folder = Path(asked["kwargs"]["weights_path"] if "kwargs" in asked else asked["model_path"])
        is_there = (folder / "model.safetensors").exists()
        if is_there:
            self.held.append(load_file(folder / "model.safetensors"))
        self.send_response(200 if is_there else 400)
        self.end_headers()


@pytest.mark.parametrize("url", ["localhost:30000/update_weights_from_disk", "localhost:8000/collective_rpc"])
def test_the_recipes_for_servers(store: Store, tmp_path: Path, url: str) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    recipe = next(one for one in re.findall(r"--exec '\n(.*?)'\n", page, re.DOTALL) if url in one)
    Engine.held.clear()
    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            command = recipe.replace(url.split("/", maxsplit=1)[0], f"127.0.0.1:{server.server_port}")
            for step in (1, 2):
                save(store, step)
                (made,) = Follower(store, "run", tmp_path / "to", command=command).follow(once=True)
                assert made.status == 0
                assert torch.equal(Engine.held[-1]["a.weight"], state(step)["a.weight"])
            wrong = Follower(store, "run", tmp_path / "other", command=command.replace("FOLDER", "X"))
            assert [one.status for one in wrong.follow(once=True)] == [22]  # that of curl for an error of the server
        finally:
            server.shutdown()
            serving.join()
