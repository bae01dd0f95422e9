"""Followers: after a kill at any time, the folder contains one complete version. The command runs at each switch."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import mmap
import os
import random
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import casckpt
from casckpt.cli.main import cli
from casckpt.errors import Conflict, InvalidInput, MissingKey, NotFound, StorageError
from casckpt.frontends.follow import CURRENT, Follower
from casckpt.frontends.interchange.safetensors.exporting import Base, export_safetensors
from casckpt.frontends.interchange.safetensors.files import SUFFIX
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from tests.support.dying_follower import dying
from tests.support.faulty import Call, FaultyStore, call_first, fail_before
from tests.support.hub import check_loads, llama
from tests.support.reads import blob_bytes
from tests.support.saves import CELL, blob_keys, cells, files, flip, small_folder, trained
from tests.support.tensors import raw
from tests.support.versions import changed

ROOT = Path(__file__).parents[2]


def state(step: int) -> dict[str, torch.Tensor]:
    return {"a.weight": cells(3, seed=step), "b.weight": cells(0.5, seed=step + 100)}


def save(store: Store, step: int) -> None:
    store.save(state(step), run="run", step=step, attachments={"notes.txt": b"%d" % step})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = small_folder(tmp_path / "store")
    save(made, 0)
    return made


def test_a_folder_in_the_store_is_refused(store: Store, tmp_path: Path) -> None:
    before = sorted((tmp_path / "store").rglob("*"))
    with pytest.raises(InvalidInput, match="inside the store's own folder"):
        next(Follower(store, "run", tmp_path / "store" / "objects" / "out").follow(once=True))
    assert sorted((tmp_path / "store").rglob("*")) == before


def test_a_url_is_refused_because_a_bucket_has_no_links(store: Store, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["follow", store.url, "run", "--to", "s3://bucket/x", "--once"])
    assert done.exit_code == 1
    assert "s3://bucket/x is a URL" in done.output
    assert not (tmp_path / "s3:").exists()


def is_at(folder: Path, step: int) -> bool:
    held = load_file(folder / CURRENT / "model.safetensors")
    return (
        all(torch.equal(held[key], value) for key, value in state(step).items())
        and (folder / CURRENT / "notes.txt").read_bytes() == b"%d" % step
    )


def once(store: Store, folder: Path, **options: Any) -> list[int]:
    return [one.checkpoint.step for one in Follower(store, "run", folder, **options).follow(once=True)]


def test_the_newest_checkpoint_becomes_the_current_folder_and_old_folders_are_kept(
    store: Store, tmp_path: Path
) -> None:
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
    assert list(store.repository.storage.list("leases/")) == [], "each version was held by one lease, which ended"


def test_following_once_raises_an_error_if_there_is_no_checkpoint(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    for of, run, match in (
        (casckpt.open(tmp_path / "none"), "run", "there is no store at"),
        (store, "runs", r"no checkpoint of run 'runs' in .*did you mean run\?"),
    ):
        with pytest.raises(NotFound, match=match):
            list(Follower(of, run, folder).follow(once=True))
    assert once(store, folder) == [0]
    store.forget("run@..")
    assert once(store, folder) == [], "the current version remains current"


def test_follow_writes_only_the_selected_keys(store: Store, tmp_path: Path) -> None:
    assert once(store, tmp_path / "to", keys=["a.*"]) == [0]
    assert set(load_file(tmp_path / "to" / CURRENT / "model.safetensors")) == {"a.weight"}


def test_a_failed_command_keeps_the_previous_folder(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    fails = f"echo $CASCKPT_ID >> {tmp_path}/told; test ! -e {tmp_path}/bad"
    once(store, folder, command=fails, keep=0)
    (tmp_path / "bad").touch()
    save(store, 1)
    once(store, folder, command=fails, keep=0)
    assert len(list(folder.glob("0*"))) == 2
    once(store, folder, command=fails, keep=0)  # the command is rerun
    assert len(list(folder.glob("0*"))) == 2
    (tmp_path / "bad").unlink()
    once(store, folder, command=fails, keep=0)
    assert [one.name[:6] for one in folder.glob("0*")] == ["000002"]
    ids = [store.get(f"run@{step}").id for step in (0, 1, 1, 1)]
    assert subprocess.check_output(["cat", tmp_path / "told"], text=True).split() == ids


@pytest.mark.process
def test_the_command_of_a_follower_receives_an_absolute_path(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that reads the path runs in a different folder."""
    monkeypatch.chdir(tmp_path)
    once(store, Path("to"), command="echo $CASCKPT_FOLDER > told")
    assert (tmp_path / "told").read_text().strip() == f"{tmp_path}/to/{os.readlink('to/current')}"


def test_a_file_in_place_of_the_folder_is_rejected(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file cannot be written: File exists; choose a different location"):
        once(store, tmp_path / "file")


def test_a_folder_with_other_contents_is_rejected(store: Store, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").touch()
    with pytest.raises(InvalidInput, match="mine"):
        once(store, tmp_path / "to")
    following = Follower(store, "run", tmp_path / "other").follow()
    next(following)
    with pytest.raises(Conflict, match="another process"):
        once(store, tmp_path / "other")


# the content of a new version


def trained_state(step: int) -> dict[str, torch.Tensor]:
    return {"w": trained(64, step), "still": cells(4, seed=1)}


@pytest.mark.parametrize("way", ["copied", "in full"])
def test_a_follower_reads_only_differences(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower does not write to a formerly current file."""
    if way == "in full":
        monkeypatch.setattr(os, "copy_file_range", lambda *_: fail(errno.EOPNOTSUPP))
    store, folder = small_folder(tmp_path / "store"), tmp_path / "to"
    for step in range(8):
        store.save(trained_state(step), run="run", step=step, compress="auto", attachments={"n": b"%d" % step})
        before = files(folder)
        with blob_bytes(store) as read:
            assert once(store, folder) == [step]
        now = files(folder)
        stayed = [path for path in before if path in now and CURRENT not in path.parts]
        assert all(now[path] == before[path] for path in stayed)
        assert step == 0 or len(stayed) == 2
        found = load_file(folder / CURRENT / "model.safetensors")
        assert all(torch.equal(found[key], value) for key, value in trained_state(step).items())
        assert (folder / CURRENT / "n").read_bytes() == b"%d" % step
        assert step == 0 or (sum(read) < 20 * CELL) == (way != "in full")


@pytest.mark.parametrize("window", [3000, 3 * CELL, 64 << 20])
def test_updated_files_are_identical_to_newly_written_files(
    tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have several shards and windows and every kind of content, and any part may change."""
    monkeypatch.setattr("casckpt.loading.regions.WINDOW_BYTES", window)
    monkeypatch.setattr("casckpt.loading.regions._BLOCK", 700)
    store = small_folder(tmp_path / "store")
    dtypes = ("float64", "complex64", "float32", "bfloat16", "bool", "float8_e4m3fn", "uint8")
    before: dict[str, bytes] = {}
    found = {f"{name}.{shape}": raw(name, shape) for name in dtypes for shape in ((), (0, 3), (61, 97), (4099,))}
    for step in range(4):
        store.save(found, run="run", step=step, compress="always")
        full, made = tmp_path / f"full{step}", tmp_path / f"made{step}"
        base = Base(store.get(f"run@{step - 1}"), tmp_path / f"made{step - 1}") if step else None
        export_safetensors(store, f"run@{step}", full, max_shard_size=30_000)
        export_safetensors(store, f"run@{step}", made, max_shard_size=30_000, base=base)
        written, revised = ({one.name: one.read_bytes() for one in folder.iterdir()} for folder in (full, made))
        assert written == revised
        assert len(written) > 4
        equal = [name for name, data in written.items() if data == before.get(name) and name.endswith(SUFFIX)]
        assert step == 0 or 0 < len(equal) < len(written)
        before = written
        found = {
            key: changed(one, step) if one.numel() and key.startswith(("float32", "bool")) else one
            for key, one in found.items()
        }


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_files_with_a_changed_layout_or_damage_are_rewritten(tmp_path: Path) -> None:
    store, folder = small_folder(tmp_path / "store"), tmp_path / "to"
    shapes = [(64, 64), (64, 64), (65, 64), (65, 64)]
    for step, shape in enumerate(shapes):
        state = {"w": torch.full(shape, float(step)), "same": torch.arange(2048)}
        store.save(state, run="run", step=step)
        for path in folder.glob(f"0*-{step - 1}-*/model.safetensors"):
            with path.open("r+b") as file:
                file.seek(-64 * 64 * 4 - 300, os.SEEK_END)  # in a part that does not change
                file.write(b"bad")
        once(store, folder)
        found = load_file(folder / CURRENT / "model.safetensors")
        assert all(torch.equal(found[key], value) for key, value in state.items())


def test_the_previous_checkpoint_can_be_purged_or_missing(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    once(store, folder)
    save(store, 1)
    store.gc(keep_last=1, min_age=0, wait=0)
    assert once(store, folder) == [1]
    shutil.rmtree(folder / os.readlink(folder / CURRENT))
    assert once(store, folder) == [1]
    assert is_at(folder, 1)


def test_the_newest_checkpoint_takes_the_place_of_a_forgotten_one(store: Store, tmp_path: Path) -> None:
    """Regression: --once left a forgotten checkpoint current, and exited with 0."""
    folder = tmp_path / "to"
    save(store, 1)
    assert once(store, folder) == [1]
    store.forget("run@1")
    assert once(store, folder) == [0]
    assert is_at(folder, 0)
    assert once(store, folder) == []
    store.gc(min_age=0, wait=0)
    save(store, 2)
    assert once(store, folder) == [2]


@pytest.mark.process
def test_a_command_that_fails_again_is_reported_again(store: Store, tmp_path: Path) -> None:
    """Regression: the second run with --once exited with 0."""
    follow = ["follow", store.url, "run", "--to", str(tmp_path / "to"), "--once", "--exec"]
    done = [CliRunner().invoke(cli, [*follow, way]).exit_code for way in ("exit 7", "exit 7", "true", "exit 7")]
    assert done == [1, 1, 0, 0]


def test_a_file_that_a_reader_has_mapped_remains_readable(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    once(store, folder)
    with (folder / CURRENT / "model.safetensors").open("rb") as file:
        before = file.read()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for step in (1, 2, 3):
        save(store, step)
        once(store, folder)
        assert mapped[:] == before
    mapped.close()


# failures


class Slept(Exception):
    """Raised after too many retries."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A follower's pauses. In these tests, they take no time."""
    found: list[float] = []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        if len(found) > 20:
            raise Slept

    monkeypatch.setattr("casckpt.frontends.follow.time.sleep", sleep)
    return found


def test_a_follower_retries_after_store_failures(
    store: Store, tmp_path: Path, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStore(store.repository.storage)
    failing, folder = Store(Repository(faulty)), tmp_path / "to"
    faulty.inject(fail_before("get", times=3), fail_before("open", times=2), fail_before("put", key="leases/*"))
    following: Any = Follower(failing, "run", folder).follow()
    assert next(following).checkpoint.step == 0
    assert pauses == [2**n for n in range(len(pauses))]
    assert caplog.text.count("will retry in") == len(pauses) > 2
    assert is_at(folder, 0)
    save(store, 1)
    faulty.inject(fail_before("open", times=2))
    pauses.clear()
    assert next(following).checkpoint.step == 1
    assert pauses[0] == 1
    following.close()
    faulty.inject(fail_before("open", times=99))
    save(store, 2)
    with pytest.raises(StorageError):
        once(failing, folder)
    assert is_at(folder, 1)


def test_a_follower_of_a_store_that_is_not_writable_warns_once(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStore(store.repository.storage)
    faulty.inject(fail_before("put", times=99))
    following: Any = Follower(Store(Repository(faulty)), "run", tmp_path / "to").follow()
    assert next(following).checkpoint.step == 0
    save(store, 1)
    assert next(following).checkpoint.step == 1
    following.close()
    assert is_at(tmp_path / "to", 1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.partition(":")[0] for text in warnings] == [
        "cannot acquire a lease, so a gc may delete data that is being copied"
    ]


def test_a_follower_logs_once_that_it_is_waiting(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The follower logs this once, however often it polls."""
    faulty, asked = FaultyStore(store.repository.storage), itertools.count()

    def come(_: Call) -> None:
        if "casckpt is waiting for" in caplog.text and next(asked) == 3:
            store.save(state(5), run="other", step=5)

    faulty.inject(call_first("list", come, key="runs/*", times=10**6))
    following: Any = Follower(Store(Repository(faulty)), "other", tmp_path / "to").follow(poll="0.1s")
    assert next(following).checkpoint.step == 5
    following.close()
    assert (
        caplog.text.count("no checkpoint of run 'other'")
        == caplog.text.count("casckpt is waiting for the first checkpoint")
        == 1
    )


def test_a_follower_retries_when_the_disk_is_full(
    store: Store, tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [errno.ENOSPC, errno.ENOSPC, errno.EDQUOT]
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: fail(left.pop()) if left else real(file))
    assert next(Follower(store, "run", tmp_path / "to").follow()).checkpoint.step == 0
    assert pauses
    assert is_at(tmp_path / "to", 0)


def test_a_follower_skips_a_damaged_checkpoint(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "to"
    once(store, folder)
    there = set(blob_keys(store))
    save(store, 1)
    for key in set(blob_keys(store)) - there:
        flip(store, key, 5000)
    assert once(store, folder) == []
    assert "skipping " in caplog.text
    assert is_at(folder, 0)
    save(store, 2)
    assert once(store, folder) == [2]
    assert len(list(folder.iterdir())) == 4


def test_a_follower_detects_that_its_store_was_replaced(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, average = tmp_path / "to", tmp_path / "average"
    once(store, folder)
    once(store, average, merge="ema:0.5")
    other = small_folder(tmp_path / "other")
    save(other, 7)
    assert once(other, folder) == [7]
    assert is_at(folder, 7)
    assert not caplog.text
    assert once(other, average, merge="ema:0.5") == [7]
    assert "does not know" in caplog.text


def test_a_pattern_without_a_match_ends_a_follower(store: Store, tmp_path: Path, pauses: list[float]) -> None:
    with pytest.raises(MissingKey, match="nothing"):
        next(Follower(store, "run", tmp_path / "to", keys=["nothing.*"]).follow())
    assert pauses == []


# kills


def test_a_follower_killed_at_any_point_leaves_a_complete_folder(store: Store, tmp_path: Path, full: bool) -> None:
    """The test kills a switch between two versions at each system call, or by default at every twelfth one."""
    folder, told = tmp_path / "to", tmp_path / "told"
    command, seen, at = f'echo $CASCKPT_STEP >> "{told}"', [0, 1], 1
    for step in seen:
        if step:
            save(store, step)
        once(store, folder, command=command, keep=0)
    with dying(tmp_path / "store", folder) as killed_at:
        for step, call in enumerate(itertools.count(1, 1 if full else 12), start=2):
            save(store, step)
            was_killed = killed_at(call)
            at = next(one for one in (step, at) if is_at(folder, one))
            seen += [at, step]
            if not was_killed:
                break
            once(store, folder, command=command, keep=0)
            assert is_at(folder, step)
            assert len(list(folder.iterdir())) <= 3
            at = step
    heard = list(map(int, told.read_text().split()))
    assert heard == sorted(heard)
    assert set(heard) == set(seen)
    assert max(heard) > (60 if full else 8), "all calls were counted"


def test_a_follower_killed_at_any_point_continues_its_average(store: Store, tmp_path: Path, full: bool) -> None:
    """The test kills the follower at each system call, or by default at every 60th one."""
    folder, told, merge = tmp_path / "to", tmp_path / "told", "ema:0.75"
    command, seen = f'echo $CASCKPT_STEP >> "{told}"', [0]
    average = {key: value.clone() for key, value in state(0).items()}
    once(store, folder, command=command, keep=0, merge=merge)
    with dying(tmp_path / "store", folder, merge=merge) as killed_at:
        for step, call in enumerate(itertools.count(1, 1 if full else 60), start=1):
            save(store, step)
            before = {key: value.clone() for key, value in average.items()}
            for key, value in state(step).items():
                average[key] = average[key] * 0.75 + value * 0.25
            was_killed = killed_at(call)
            held = load_file(folder / CURRENT / "model.safetensors")
            assert any(all(torch.equal(held[key], one[key]) for key in one) for one in (before, average))
            seen += [step]
            if not was_killed:
                break
            once(store, folder, command=command, keep=0, merge=merge)
            held = load_file(folder / CURRENT / "model.safetensors")
            assert all(torch.equal(held[key], average[key]) for key in average)
            assert len(list(folder.iterdir())) == 4, "the two links, and the current version with its average"
    heard = list(map(int, told.read_text().split()))
    assert heard == sorted(heard)
    assert set(heard) == set(seen)
    assert max(heard) > (300 if full else 5), "all calls were counted"


@pytest.mark.filterwarnings("ignore")  # Transformers warns about devices
def test_two_followers_survive_repeated_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """A training run saves, and gc keeps only the newest checkpoint. Each folder always contains a version that
    loads."""
    pytest.importorskip("transformers", reason="needs casckpt[transformers]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    store, model, draw = small_folder(tmp_path / "store"), llama(), random.Random(22)
    optim, folders = torch.optim.AdamW(model.parameters(), lr=1e-4), [tmp_path / name / "to" for name in "ab"]
    words, saved = torch.arange(12).view(2, 6), list[tuple[str, Any]]()
    seen: list[list[int]] = [[] for _ in folders]

    def train() -> None:
        model(input_ids=words, labels=words).loss.backward()
        optim.step()
        made = casckpt.save_model_and_optim_state(store, model, optim, run="run", step=len(saved), compress="auto")
        saved.append((made.id, deepcopy(model)))

    def look() -> None:
        for folder, steps in zip(folders, seen, strict=True):
            if (folder / CURRENT).exists():
                _, step, id = os.readlink(folder / CURRENT).split("-")
                assert id == saved[int(step)][0]
                check_loads(folder / CURRENT, saved[int(step)][1])
                steps.append(int(step))

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        followers = [stack.enter_context(dying(tmp_path / "store", folder)) for folder in folders]
        for _ in range(300 if full else 4):
            train()
            killed = [pool.submit(one, draw.randrange(1, 80)) for one in followers]
            store.gc(keep_last=1, min_age=0, wait=0)
            assert {one.result() for one in killed} <= {False, True}
            look()
        assert [one(1 << 30) for one in followers] == [False, False]
        look()
    for folder, steps in zip(folders, seen, strict=True):
        heard = list(map(int, (folder.parent / "told").read_text().split()))
        assert heard == sorted(heard)
        assert set(heard) == set(steps)
        assert steps[-1] == len(saved) - 1
    assert not store.verify(decode=True).is_damaged


# engines


class Engine(BaseHTTPRequestHandler):
    """An engine that loads from a folder on request.

    SGLang responds with 400 and "success": false if it cannot load. In its development mode, vLLM calls a worker
    method by name, and responds with 500 if the method raises, even for an unknown keyword. vLLM keeps its cache of
    earlier prompts until a request clears it.
    """

    held: ClassVar[list[dict[str, torch.Tensor]]] = []
    stale: ClassVar[list[bool]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = json.loads(body) if body else {}
        if self.path == "/reset_prefix_cache":
            self.stale.clear()
            self.answer(200, {})
        elif self.path == "/update_weights_from_disk":
            is_there = self.load(asked["model_path"])
            self.answer(200 if is_there else 400, {"success": is_there, "message": ""})
        elif self.path == "/collective_rpc":
            self.stale.append(True)
            try:
                self.reload_weights(**{"reload_weights": asked["kwargs"]}[asked["method"]])
            except (KeyError, TypeError, FileNotFoundError):
                self.answer(500, {})
            else:
                self.answer(200, {"results": [None]})

    def reload_weights(self, weights_path: str, *, is_checkpoint_format: bool = True) -> None:
        """The method as the workers of vLLM 0.16 to 0.33 define it."""
        assert is_checkpoint_format
        if not self.load(weights_path):
            raise FileNotFoundError(weights_path)

    def load(self, folder: str) -> bool:
        path = Path(folder, "model.safetensors")
        if path.exists():
            self.held.append(load_file(path))
        return path.exists()

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.mark.parametrize("url", ["localhost:30000/update_weights_from_disk", "localhost:8000/collective_rpc"])
def test_documented_server_recipes_work(store: Store, tmp_path: Path, url: str) -> None:
    page = (ROOT / "docs" / "follow.md").read_text()
    recipe = next(one for one in re.findall(r"--exec '\n(.*?)'\n", page, re.DOTALL) if url in one)
    Engine.held.clear()
    Engine.stale.clear()
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
                assert not Engine.stale
            wrong = Follower(store, "run", tmp_path / "other", command=command.replace("FOLDER", "X"))
            assert [one.status for one in wrong.follow(once=True)] == [22]  # curl's status for a server error
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.filterwarnings("ignore")  # Transformers warns about devices
def test_transformers_loads_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs casckpt[transformers]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    store, folder, model = small_folder(tmp_path / "store"), tmp_path / "to", llama()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(4):
        casckpt.save_model_and_optim_state(store, model, optim, run="run", step=step)
        assert once(store, folder, keep=0) == [step]
        check_loads(folder / CURRENT, model)
        words = torch.arange(12).view(2, 6)
        model(input_ids=words, labels=words).loss.backward()
        optim.step()
