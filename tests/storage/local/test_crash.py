"""A killed put leaves either the complete object or nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from casckpt.storage.base import AlreadyExists
from casckpt.storage.local.newfile import Naming
from casckpt.storage.local.store import LocalStore
from tests.support import crash
from tests.support.afresh import afresh
from tests.support.local import require
from tests.support.shared import made_once

pytestmark = pytest.mark.kill

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.support.crash"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder of stores, one for each way, size and step at which the put was killed.

    By default, only every seventh step is used.
    """
    command = [*COMMAND, "1" if request.config.getoption("--full") else "7"]
    return made_once(tmp_path_factory, "puts", lambda folder: subprocess.run([*command, folder], cwd=ROOT, check=True))


@pytest.mark.parametrize("way", list(Naming), ids=lambda way: way.name)
@pytest.mark.parametrize("size", crash.SIZES)
def test_a_put_killed_at_any_step_leaves_a_complete_object_or_none(
    killed: Path, way: Naming, size: int, tmp_path: Path
) -> None:
    require(way, tmp_path)
    steps = [int(path.name.rpartition("-")[2]) for path in killed.glob(f"{way.name}-{size}-*")]
    assert len(steps) > 8
    outcomes = set()
    for step in steps:
        store = LocalStore(killed / f"{way.name}-{size}-{step}")
        data = crash.content(size, step)
        there = [entry.key for entry in store.list("")] == [crash.KEY]
        hidden = [path for path in store.path.rglob("*") if path.name.startswith(".")]
        outcomes.add((there, bool(hidden)))
        try:
            store.put(crash.KEY, data)
        except AlreadyExists:
            assert there
        assert (store.path / crash.KEY).read_bytes() == data
        store.sweep("objects/x")
        assert [path.name for path in store.path.rglob("*") if path.is_file()] == ["a"]
    assert outcomes >= {(False, False), (True, False)}
    assert ((False, True) in outcomes) == (way is not Naming.UNNAMED)


@pytest.mark.parametrize("lines", [1, 2, 3, 5, 8])
def test_a_put_killed_at_any_time_leaves_a_complete_object_or_none(tmp_path: Path, lines: int) -> None:
    context = afresh()
    heard, tell = context.Pipe(duplex=False)
    process = context.Process(target=crash.endless, args=(tmp_path, tell))
    process.start()
    for _ in range(lines):
        heard.recv()
    process.kill()
    process.join()
    store = LocalStore(tmp_path)
    numbers = sorted(int(entry.key.rpartition("/")[2]) for entry in store.list(""))
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= lines - 1
    for number in numbers:
        size = (3 << 20) + number
        assert store.get(f"objects/x/{number}", limit=size) == crash.content(size, number)
