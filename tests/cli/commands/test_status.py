"""``casckpt status`` names each trouble, and its exit status says whether somebody must act."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import casckpt
from casckpt.contents import blobs
from casckpt.format.keys import manifest_key
from casckpt.format.names import BlobHash
from casckpt.history.commits import Commit
from casckpt.history.tags import set_tag
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from tests.cli.conftest import AsJson, Run
from tests.support.checkpoints import array, only_blob, save_arrays
from tests.support.gcs import begin_elsewhere, run_gc
from tests.support.pages import blocks_below
from tests.support.repositories import repository, save
from tests.test_packaging import ROOT


@pytest.fixture
def repo(tmp_path: Path, store_path: Path) -> Repository:
    """A store whose clock says 2023."""
    return repository(tmp_path, LocalStore(store_path))


@pytest.fixture
def one(repo: Repository) -> Commit:
    """A checkpoint of ``repo``."""
    return save_arrays(repo, {"w": array(1)}, "a", 1)


def set_mirror(repo: Repository, one: Commit) -> None:
    repo.change_settings(mirror=f"{repo.storage.url}-mirror")
    casckpt.open(repo.storage.url).copy_to(f"{repo.storage.url}-mirror")
    save(repo, "a", 2)


def begin_two(repo: Repository, one: Commit) -> None:
    begin_elsewhere(repo)
    begin_elsewhere(casckpt.open(repo.storage.url).repository, step=8)  # now


TROUBLES: dict[str, tuple[Callable[[Repository, Commit], object], str, str, str]] = {
    "hung save": (begin_two, "--max-save-age", "1d", "saving: other@7, since 2023-11-14"),
    "old gc": (lambda repo, one: run_gc(repo), "--max-gc-age", "1d", "last gc       2023-11-14"),
    "no gc": (lambda repo, one: None, "--max-gc-age", "36500d", "none has finished"),
    "mirror behind": (set_mirror, "--max-mirror-age", "1d", "lacks 1 checkpoint since 2023-11-14"),
    "full disk": (lambda repo, one: None, "--min-free", "900000TB", "B free"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_limit_that_is_exceeded_is_named_and_the_status_is_1(
    repo: Repository, one: Commit, run: Run, as_json: AsJson, trouble: str
) -> None:
    plant, option, limit, shown = TROUBLES[trouble]
    plant(repo, one)
    assert "no limit is exceeded" in (alone := run("status", repo.storage.url).stdout)
    found = run("status", repo.storage.url, option, limit, status=1).stdout
    assert re.sub(" +", " ", shown) in re.sub(" +", " ", alone)
    assert "no limit is exceeded" not in found
    (line,) = as_json("status", repo.storage.url, option, limit, status=1)["exceeded"]
    assert f"exceeded: {line.split()[0]} " in found  # its age has grown
    if trouble != "no gc":  # all is better than these
        run("status", repo.storage.url, option, "36500d" if option != "--min-free" else "1")


def damaged_blob(repo: Repository, one: Commit) -> str:
    key = only_blob(repo, one)
    blobs.mark_damaged(repo, one.txid, BlobHash(Path(key).stem), "its disk failed")
    return key


def missing_manifest(repo: Repository, one: Commit) -> str:
    repo.storage.delete(key := manifest_key(one.txid, one.id))
    return key


@pytest.mark.parametrize("plant", [damaged_blob, missing_manifest])
def test_damage_is_named_and_the_status_is_4(
    repo: Repository, one: Commit, run: Run, as_json: AsJson, plant: Callable[..., str]
) -> None:
    run("status", repo.storage.url)
    key = plant(repo, one)
    assert f"damaged: {key}: " in run("status", repo.storage.url, "--max-gc-age", "1d", status=4).stdout
    assert [damaged["key"] for damaged in as_json("status", repo.storage.url, status=4)["damaged"]] == [key]


def test_the_text_shows_who_holds_what(repo: Repository, one: Commit, store_path: Path, run: Run) -> None:
    repo.user = "ann"
    set_tag(repo, "best", save(repo, "b", 1))
    run_gc(repo)
    text = run("status", store_path).stdout
    assert re.search(r"^oldest tag +best on b@1 \(.*, ann@", text, re.MULTILINE)
    assert re.search(r"^last gc .* UTC, ann@.*; left: checkpoints 0, saves in progress 0, refused files 0$", text, re.M)
    runs, users = (
        re.findall(r"^(\S+) +[\d.]+ KiB$", part, re.M) for part in text.partition("\nRUN")[2].split("\nUSER")
    )
    assert ({*runs}, {*users}) == ({"a", "b", "(none)"}, {"ann", one.committed.who.partition("@")[0], "(none)"})


METRICS = blocks_below(ROOT / "docs" / "running.md", "Alerts", "bash")[0]
_LINE = re.compile(r'casckpt_\w+(\{\w+="(?:[^"\\\n]|\\[\\"n])*"\})? -?\d+(\.\d+)?')


def test_the_metrics_of_the_page_name_fields_that_exist(saved: Path, as_json: AsJson) -> None:
    assert {*re.findall(r"[ (]\.(\w+)", METRICS)} <= {*as_json("status", saved), "key", "value"}


@pytest.mark.skipif(shutil.which("jq") is None, reason="the page's example needs jq")
def test_the_metrics_of_the_page_are_metrics(repo: Repository, one: Commit, store_path: Path, tmp_path: Path) -> None:
    repo.user = 'a "quoted\\ user'
    save(repo, "b", 1)
    begin_elsewhere(repo)
    program = METRICS.replace("/data/ckpts", str(store_path)).replace("/metrics/", f"{tmp_path}/")
    program = program.replace("casckpt status", f"{sys.executable} -m casckpt status")
    subprocess.run(["bash", "-c", program], check=True)
    lines = (tmp_path / "casckpt.prom").read_text().splitlines()
    assert [line for line in lines if not _LINE.fullmatch(line)] == []
    assert {line.rpartition(" ")[0] for line in lines} >= {
        "casckpt_damaged", 'casckpt_age_seconds{of="save"}', "casckpt_disk_bytes", 'casckpt_run_bytes{run="a"}',
        'casckpt_user_bytes{user="a \\"quoted\\\\ user"}',
    }  # fmt: skip
    assert "casckpt_damaged 0" in lines
    repo.storage.delete("casckpt.json")
    for failing in (program, program.replace("-m casckpt", "-m none")):
        failed = subprocess.run(["bash", "-c", failing], check=False, capture_output=True)
        assert failed.returncode != 0
        assert (tmp_path / "casckpt.prom").read_text().splitlines() == lines  # the last good ones
