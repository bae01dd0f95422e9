"""tools/soak for a minute; and that it notices what is wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import _soak

ROOT = Path(__file__).resolve().parent.parent
SOAK = (sys.executable, ROOT / "tools" / "_soak.py")


def soak(hours: float, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*map(str, (*SOAK, hours, *arguments))]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, capture_output=True, text=True, timeout=250
    )


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.soak
def test_a_minute_and_another_one_that_goes_on(tmp_path: Path, seed: int) -> None:
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
def test_who_holds_more_and_more_is_told(tmp_path: Path, what: str) -> None:
    books = _soak.Books(tmp_path)
    for number in range(60):
        held = {"rss": 300 << 20, "files": 20, "threads": 6}
        held |= {what: held[what] + number * (2 << 20 if what == "rss" else 1)} if what in held else {}
        books.note("samples.live.7", **held)
    for number in range(9):  # too few to say anything
        books.note("samples.follow.8", rss=number << 30, files=number, threads=number)
    asked = _soak.arguments(["1", "--folder", str(tmp_path)])
    sampled, grown = _soak.Soak(asked, tmp_path, random.Random(1)).growth()
    assert sampled == 60
    assert [one.split(":")[1].split()[0] for one in grown] == ([what] if what != "nothing" else [])


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_a_signal_ends_it_with_all_that_was_counted(tmp_path: Path, signum: signal.Signals) -> None:
    command = [*map(str, SOAK), "1", "--folder", str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
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
def test_a_flipped_byte_ends_it(tmp_path: Path) -> None:
    counts(soak(5 / 3600, "--folder", tmp_path))
    for blob in (tmp_path / "store" / "objects").rglob("*.safetensors"):
        blob.chmod(0o600)
        data = bytearray(blob.read_bytes())
        data[5000] ^= 1
        blob.write_bytes(data)
    done = soak(60 / 3600, "--folder", tmp_path)
    assert done.returncode != 0
    assert "damaged" in done.stderr
