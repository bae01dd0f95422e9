"""Runs tools/soak for a minute, and checks that it detects errors."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import Revoked
from casckpt.history.tags import tags
from casckpt.history.transactions import Transaction, begin
from casckpt.store.store import Store
from casckpt.upkeep.copies.copy import CopyResult
from casckpt.upkeep.gc import purge as retiring
from soaking import cli, looks, workers
from soaking.books import Books, Wrong
from soaking.growth import growth
from soaking.master import Soak
from soaking.states import RUNS, state
from soaking.workers import Worker

ROOT = Path(__file__).resolve().parent.parent
SOAK = (sys.executable, "-m", "soaking")
ENVIRON = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}


def soak(hours: float, *arguments: object, program: Sequence[str] = SOAK) -> subprocess.CompletedProcess[str]:
    command = [*map(str, (*program, hours, *arguments))]
    return subprocess.run(command, env=os.environ | ENVIRON, check=False, capture_output=True, text=True, timeout=250)


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.soak
def test_a_soak_runs_and_can_be_continued(tmp_path: Path, seed: int) -> None:
    first = counts(soak(60 / 3600, "--folder", tmp_path, "--seed", seed, "--pause", 15))
    second = counts(soak(30 / 3600, "--folder", tmp_path, "--seed", seed + 1))
    assert second["seconds"] > first["seconds"] >= 60
    done = ("save", "gc", "killed", "verify", "copy", "load under a lease", "update", "round of one process")
    assert min(second[what] for what in done) > 5
    assert second["save"] > first["save"]
    assert second["grown"] == []
    assert first["pause"] > 1
    assert first["sampled"] >= 15  # in one process, which outlived the pauses


@pytest.mark.parametrize("what", ["rss", "files", "threads", "nothing"])
def test_growing_memory_is_reported(tmp_path: Path, what: str) -> None:
    books = Books(tmp_path)
    for number in range(60):
        held = {"rss": 300 << 20, "files": 20, "threads": 6}
        held |= {what: held[what] + number * (2 << 20 if what == "rss" else 1)} if what in held else {}
        books.note("samples.live.7.1000", **held)
        books.note("samples.live.7.999", rss=number << 30, files=number, threads=number)  # of an earlier run
    for number in range(9):  # too few for a result
        books.note("samples.follow.8.1000", rss=number << 30, files=number, threads=number)
    sampled, grown = growth(books, 1000)
    assert sampled == 60
    assert [one.split(":")[1].split()[0] for one in grown] == ([what] if what != "nothing" else [])


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_a_soak_ended_by_a_signal_reports_its_counts(tmp_path: Path, signum: signal.Signals) -> None:
    command = [*map(str, SOAK), "1", "--folder", str(tmp_path)]
    with subprocess.Popen(
        command, env=os.environ | ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        while not (tmp_path / "ledger").exists():  # a save has returned
            assert running.poll() is None
            time.sleep(0.1)
        running.send_signal(signum)
        told = json.loads(running.communicate(timeout=120)[0])
    assert running.returncode == 0
    assert told["save"] >= 1
    counted = json.loads((tmp_path / "counts.json").read_text())
    assert told == counted | {"sampled": told["sampled"], "grown": []}


@pytest.mark.soak
def test_a_flipped_byte_ends_a_soak(tmp_path: Path) -> None:
    counts(soak(5 / 3600, "--folder", tmp_path))
    for blob in (tmp_path / "store" / "objects").rglob("*.safetensors"):
        blob.chmod(0o600)
        data = bytearray(blob.read_bytes())
        data[5000] ^= 1
        blob.write_bytes(data)
    done = soak(60 / 3600, "--folder", tmp_path)
    assert done.returncode != 0
    assert "damaged" in done.stderr
    assert "damaged" in (tmp_path / "failures").read_text()


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    here, there = (casckpt.open(tmp_path / name, cache_dir=tmp_path / "cache") for name in ("store", "copy"))
    made = Worker(here, there, Books(tmp_path), random.Random(1))
    looks.make(made)
    return made


def counted(worker: Worker) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in worker.books.lines(f"counts.{os.getpid()}"):
        found[one["did"]] += one["times"]
    return found


@pytest.mark.filterwarnings("ignore::casckpt.errors.ForgottenWarning")
def test_deleting_a_leased_checkpoint_in_gc_is_detected(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        assert workers.save(worker, RUNS[0])
    oldest = worker.store.get(f"{RUNS[0]}@0")
    monkeypatch.setattr(worker, "wait", lambda most: workers.overtake(worker))
    workers.load_under_lease(worker, oldest)
    assert counted(worker)["forgotten under a lease"] == counted(worker)["load under a lease"] == 1
    worker.store.restore(oldest)
    without_end = {name: tag for name, tag in tags(worker.store.repository).items() if tag.expires is None}
    monkeypatch.setattr(retiring, "tags", lambda repo, **more: without_end)
    with pytest.raises(Wrong, match=r"alpha@0.* is gone, under a lease"):
        workers.load_under_lease(worker, oldest)


def test_a_lease_on_a_purged_checkpoint_does_not_count(worker: Worker) -> None:
    workers.save(worker, RUNS[0])
    gone = worker.store.get(f"{RUNS[0]}@0")
    worker.store.forget(gone)
    workers.load_under_lease(worker, gone)
    assert counted(worker)["lease of what was gone"] == 1


def test_a_copy_that_does_nothing_is_detected(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(6):
        workers.save(worker, RUNS[0])
        worker.store.copy_to(worker.copy)
        worker.copy.gc(keep_last=4, min_age=0)
    looks.look(worker)
    assert len(worker.copy.checkpoints()) == 6  # the copy named the ones that it had rotated out
    workers.save(worker, RUNS[0])
    monkeypatch.setattr(Store, "copy_to", lambda *given, **more: CopyResult())
    with pytest.raises(Wrong, match=r"not there after a copy: .*alpha@6"):
        looks.look(worker)


def test_a_gc_that_keeps_too_few_checkpoints_is_detected(worker: Worker) -> None:
    for _ in range(3):
        workers.save(worker, RUNS[1])
    worker.store.gc(keep_last=2, min_age=0)
    looks.look(worker)
    worker.store.gc(keep_last=1, min_age=0)
    with pytest.raises(Wrong, match=r"beta/lora@1 was saved, but does not exist: \[2\]"):
        looks.look(worker)


def test_a_saved_checkpoint_may_be_missing_if_newer_saves_are_unknown(worker: Worker) -> None:
    workers.save(worker, RUNS[0])
    for step in (1, 2):  # both were killed before they could record it
        worker.store.save(state(RUNS[0], step), run=RUNS[0], step=step)
    worker.store.gc(keep_last=2, min_age=0)
    looks.look(worker)


def test_a_revoked_save_is_counted_and_leaves_nothing_behind(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Store.save
    commit = Transaction.commit

    def overtaken(self: Transaction, *given: Any, **more: Any) -> Any:
        workers.overtake(worker)
        return commit(self, *given, **more)

    logger = logging.getLogger(workers.TELLS_OF_REVOKED)
    monkeypatch.setattr(logger, "handlers", [workers.BegunAnew(worker)])
    for drawn in (0.1, 0.9):  # save_async, and save
        monkeypatch.setattr(worker.random, "random", lambda drawn=drawn: drawn)
        monkeypatch.setattr(Transaction, "commit", overtaken)
        assert not workers.save(worker, RUNS[0])
        monkeypatch.setattr(Transaction, "commit", commit)
    assert counted(worker)["save revoked"] == 2
    assert counted(worker)["save given up on, and begun anew"] == 2
    assert counted(worker)["transactions revoked by gc"] == 4
    assert workers.save(worker, RUNS[0])

    def lies(store: Store, *given: Any, **more: Any) -> None:
        real(store, *given, **more)
        raise Revoked("of it nothing is visible")

    monkeypatch.setattr(Store, "save", lies)
    with pytest.raises(Wrong, match="alpha@1 was revoked, but exists"):
        workers.save(worker, RUNS[0])


def test_a_gc_reports_what_it_deletes_and_that_it_is_complete(worker: Worker) -> None:
    for _ in range(4):
        workers.save(worker, RUNS[0])
    in_the_way = begin(worker.store.repository, RUNS[1], 0)
    worker.collect(worker.store, keep_last=2, min_age=0, wait=0)
    waited = worker.warm
    assert "blobs deleted by gc" not in counted(worker)
    worker.store.revoke(in_the_way.txid)
    worker.collect(worker.store, keep_last=2, min_age=0, wait=0)
    assert (waited, worker.warm) == (False, True)
    assert counted(worker)["blobs deleted by gc"] > 1


PLANTED = """
import os, signal, sys
from soaking import cli, workers
def dies(worker):
    os.kill(os.getpid(), signal.{signal})
workers.ROLES["{role}"] = dies
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("role", "name"), [("read", "SIGSEGV"), pytest.param("live", "SIGKILL", marks=pytest.mark.soak)]
)
def test_a_process_killed_by_an_unexpected_signal_ends_a_soak(tmp_path: Path, role: str, name: str) -> None:
    program = [sys.executable, "-c", PLANTED.format(role=role, signal=name)]
    done = soak(60 / 3600, "--folder", tmp_path, "--every", 0.1, "--pause", 3, "--seed", 1, program=program)
    assert done.returncode == 1
    (told,) = Books(tmp_path).lines("failures")
    assert f"{role}, pid " in told["text"]
    assert f"ended by itself: {name}" in told["text"]


def master(folder: Path) -> Soak:
    return Soak(cli.arguments(["1", "--folder", str(folder)]), folder, random.Random(1))


def test_the_counts_of_a_soak_are_added_up_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text('{"save": 5, "seconds": 60}')
    soaked = master(tmp_path)
    soaked.gathered -= 7.9
    for _ in range(2):
        soaked.books.note("counts.77", did="save", times=1)
        soaked.books.note("counts.78", did="blobs deleted by gc", times=20)
        soaked.books.note("counts.78", did="save")  # from a version that only counted lines
        soaked._gather()
    assert json.loads((tmp_path / "counts.json").read_text()) == {"save": 9, "seconds": 67, "blobs deleted by gc": 40}


@pytest.mark.process
def test_a_soak_run_names_its_commit(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text('{"save": 5}')
    for _ in range(2):
        master(tmp_path)._note_run()
    before, *those = Books(tmp_path).lines("runs")
    assert before["commit"] is None  # that version did not write this file
    assert len({one["commit"] for one in those}) == 1
    assert len(those) == 2
