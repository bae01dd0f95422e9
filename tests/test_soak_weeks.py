"""``tools/soak weeks``: a tiny soak, what it draws, and that it detects what is wrong."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import casckpt
from casckpt.errors import Damaged
from casckpt.format.names import TxId
from casckpt.plan.retention import Policy, SavedCheckpoint, reasons_to_keep
from casckpt.store.store import Store
from soaking.books import Books, Wrong
from soaking.weeks import children, driver, plan, result
from soaking.weeks.jobs import ALONE, RunningJob
from soaking.weeks.ledger import NEWEST, RUN, Ledger, Saved, digests, kept, rules
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
KEEP = rules(3000)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    subprocess.run(["umount", tmp_path / "disk"], check=False, capture_output=True)


def test_a_commit_that_does_not_exist_is_refused_before_the_soak_has_a_plan(tmp_path: Path) -> None:
    tools = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}"}
    done = run_script("soaking", "weeks", "1", "--folder", tmp_path, "--before", "none", environment=tools)
    assert done.status == 1
    assert "'none' is not a commit" in done.told
    assert not (tmp_path / "plan.json").exists()


def test_a_folder_in_use_and_one_without_results_end_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for options, text in ([], "is in use by another soak"), (["--write"], "no soak has ended in"):
            with pytest.raises(SystemExit):
                driver.main(["1", "--folder", str(tmp_path), *options])
            assert text in capsys.readouterr().err


def soak(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "soaking", "weeks", "0", "--folder", folder, "--saves", "30", "--longest", "20"]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    return subprocess.Popen([*map(str, command)], env=environ, stdout=-1, stderr=-1, text=True)


def wait_for_saves(books: Books, running: subprocess.Popen[str], count: int) -> None:
    while len(list(books.lines("saved"))) < count:
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_soak_of_weeks_goes_on_where_it_was_stopped_or_killed(folder: Path) -> None:
    books = Books(folder)
    with soak(folder) as first:
        wait_for_saves(books, first, 2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
    with soak(folder) as second:
        wait_for_saves(books, second, 6)
        second.kill()
    with soak(folder) as third:
        printed, said = third.communicate()
    assert third.returncode == 0, said
    found = json.loads(printed)
    assert " in 3 runs, " in found["wall time"]
    assert int(found["saves"].split()[0]) >= 30
    assert found["lost mirrors, rebuilt"] == "1"
    assert not (folder / "failures").exists()


def test_every_kind_of_event_is_drawn() -> None:
    jobs = [plan.draw(7, number, part=number / 40, most=40, interval=14, last_ranks=1) for number in range(40)]
    assert jobs[5] == plan.draw(7, 5, part=5 / 40, most=40, interval=14, last_ranks=1)
    assert {one.end for one in jobs} == set(plan.ENDS)
    assert {name for one in jobs for name in one.upkeep} == {one.beside for one in jobs} == set(plan.UPKEEP)
    assert {one.key for one in jobs} == set(range(plan.KEYS))
    assert {one.library for one in jobs} == {one.other for one in jobs} == {"before", "after"}
    assert {one.ranks for one in jobs} == {2, 3}
    assert jobs[-1].ahead - jobs[0].ahead > 0.9 * plan.SPAN


@pytest.mark.parametrize("end", ["end", "one rank"])
def test_a_rank_may_work_longer_than_the_others_unless_one_was_killed(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = (plan.draw(7, number, part=0.5, most=40, interval=14, last_ranks=1) for number in range(1000))
    job = next(one for one in drawn if one.end == end)
    ledger = SimpleNamespace(by_job={job.number: 0}, saved={})
    noted: list[str] = []
    weeks: Any = SimpleNamespace(
        place=SimpleNamespace(free=lambda: None, folder=tmp_path), interval=lambda: 14.0, ledger=ledger,
        note_event=lambda event, **_: noted.append(event),
        children={f"rank {rank}": Mock(**{"poll.return_value": None}) for rank in range(job.ranks)},
    )  # fmt: skip
    now = [0.0]
    monkeypatch.setattr("soaking.weeks.jobs.time", SimpleNamespace(monotonic=lambda: now[0]))
    running = RunningJob(weeks, job)
    running.struck, left = True, running.ranks[1:]
    running._act(left)
    now[0] = ALONE + 1
    running._act(left)
    assert noted == (["a rank did not end"] * len(left) if end == "one rank" else [])
    if end == "end":
        now[0] = running.late + 1
        with pytest.raises(Wrong, match=f"job {job.number} did not end"):
            running._act(left)
        weeks.children[left[0]].send_signal.assert_called_once_with(signal.SIGABRT)


@pytest.mark.parametrize("seed", range(20))
def test_the_soak_knows_what_the_rules_keep(seed: int) -> None:
    drawn, saved = random.Random(seed), list[Saved]()
    for step in range(1, 200):
        created = 1.8e9 + step * plan.DAY / 4 + drawn.uniform(-plan.STEP, plan.STEP)
        saved.append(Saved(step, 0, f"{step:064x}", created, drawn.choice([0.5, 1.0, drawn.random()])))
    as_policies_see_it = [
        SavedCheckpoint(TxId(one.id), RUN, one.step, round(one.created * 1e6), {"loss": one.loss}) for one in saved
    ]
    reasons = reasons_to_keep(as_policies_see_it, Policy(keep_last=NEWEST, **KEEP), round(2e15))
    assert kept(saved, KEEP) == {int(txid, 16) for txid in reasons}


@pytest.fixture
def signed(tmp_path: Path) -> Store:
    """A store with three checkpoints that the books know."""
    for words in (("genpkey", "-algorithm", "ed25519"), ("pkey", "-in", tmp_path / "key", "-pubout")):
        made = tmp_path / ("key" if words[0] == "genpkey" else "pub")
        subprocess.run(["openssl", *words, "-out", made], check=True, capture_output=True)
    store = casckpt.open(tmp_path / "store", sign_with=tmp_path / "key", cache_dir=tmp_path / "cache")
    for step in (1, 2, 3):
        state = {"model": {"w": torch.arange(50_000) + step}, "optim": {"m": torch.zeros(3)}}
        Books(tmp_path).note("begun", step=step, job=0, key=0, digests=digests(state))
        store.save(state, run=RUN, step=step, metadata={"job": 0}, metrics={"loss": 1.0})
    return store


def check(tmp_path: Path) -> None:
    children.check({"folder": str(tmp_path), "store": str(tmp_path / "store"), "keys": [str(tmp_path / "pub")]})


@pytest.mark.process
def test_the_last_check_compares_all_checkpoints(
    signed: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed.thin(f"{RUN}@1", drop="optim.*")
    signed.gc(min_age=0)
    check(tmp_path)
    assert json.loads(capsys.readouterr().out)["steps"] == [1, 2, 3]


@pytest.mark.process
def test_a_flipped_byte_fails_the_last_check(signed: Store, tmp_path: Path) -> None:
    blob = max((tmp_path / "store" / "objects").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[5000] ^= 1
    blob.write_bytes(data)
    with pytest.raises((Wrong, Damaged), match="not what was written"):
        check(tmp_path)


@pytest.mark.process
@pytest.mark.parametrize(
    ("state", "job", "told"),
    [({"w": torch.ones(3)}, 0, "is not what was saved: model.w"), ({"w": torch.zeros(3)}, 1, "its save never began")],
)
def test_a_checkpoint_that_was_never_saved_fails_the_last_check(
    signed: Store, tmp_path: Path, state: dict[str, torch.Tensor], job: int, told: str
) -> None:
    optim = {"m": torch.zeros(3)}
    known = digests({"model": {"w": torch.zeros(3)}, "optim": optim})
    Books(tmp_path).note("begun", step=4, job=0, key=0, digests=known)
    signed.save({"model": state, "optim": optim}, run=RUN, step=4, metadata={"job": job})
    with pytest.raises(Wrong, match=told):
        check(tmp_path)


@pytest.mark.process
def test_a_file_that_nobody_needs_fails_the_last_check(signed: Store, tmp_path: Path) -> None:
    blob = next((tmp_path / "store" / "objects").rglob("*.safetensors"))
    shutil.copy(blob, blob.with_stem("0" * 64))
    with pytest.raises(Wrong, match="there and not needed"):
        check(tmp_path)


def test_the_books_are_read_as_they_grow(tmp_path: Path) -> None:
    books = Books(tmp_path)
    ledger = Ledger(books)
    books.note("begun", step=1, job=0, digests={})
    with (tmp_path / "begun").open("a") as file:
        file.write('{"step": 2, "job": ')
        file.flush()
        ledger.read()
        file.write('0, "digests": {}}\n')
    assert list(ledger.begun) == [(1, 0)]
    ledger.read()
    assert list(ledger.begun) == [(1, 0), (2, 0)]
    for id in ("a", "b"):
        books.note("saved", step=1, job=0, id=id, created=1.0, loss=1.0)
    with pytest.raises(Wrong, match="saved twice"):
        ledger.read()


@pytest.mark.process  # matplotlib asks for the fonts
def test_results_and_curves_are_written_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "docs" / "reliability.md").write_text(f"before\n{result.BEGIN}old{result.END}\nafter\n")
    books = Books(tmp_path)
    for at in range(0, 7200, 600):
        for library in ("before", "after"):
            books.note(f"samples.follow-{library}.7.1", at=at, rss=at << 20, files=9, listing=0.01)
        names = {name for _, names in result.PANELS.values() for name in names if "." not in name}
        books.note("sizes", at=at, **dict.fromkeys(names, at))
        books.note("costs", at=at, durable_seconds=0.5)
    (tmp_path / result.FILE).write_text(json.dumps({"saves": "3,000", "wall time": f"{datetime.now(UTC):%Y}"}))
    result.write(books)
    page = (tmp_path / "docs" / "reliability.md").read_text()
    assert page.startswith("before\n<!-- weeks -->\n| six weeks in a day | |\n|---|---|\n| saves | 3,000 |\n")
    assert page.endswith("(pictures/weeks.svg)\n<!-- end of weeks -->\nafter\n")
    assert (tmp_path / "docs" / "pictures" / "weeks.svg").read_text().count("<path") > 20
