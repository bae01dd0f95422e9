"""The repositories and revisions that a hub lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

import casckpt
from casckpt.base.names import check_run
from casckpt.frontends.serve.hub import commit_of, is_repo, reference, repo_of, run_of
from casckpt.store.store import Store
from tests.support.forging import gone_to
from tests.support.saves import small, small_folder
from tests.support.serving import Served, serving

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")


WEIGHTS = "/sft/resolve/main/model.safetensors"


@pytest.mark.parametrize("revision", ["main", "latest", "1", "64 digits"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_tag_or_step_redirects_to_the_commit(small_store: Store, served: Served, revision: str, method: str) -> None:
    id = small_store.get("sft@1").id
    for repo, path in (("sft", "config.json"), ("runs/sft", "sub/x.bin"), ("sft", "sub%2Fx.bin")):
        asked = f"/{repo}/resolve/{id if revision == '64 digits' else revision}/{path}"
        led = served.ask(asked, method)
        assert (led.status, led.headers["X-Repo-Commit"]) == (307, commit_of(id))
        assert urljoin(asked, led.headers["Location"]) == f"/{repo}/resolve/{commit_of(id)}/{path}"


def test_a_download_never_mixes_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = pytest.importorskip("huggingface_hub", reason="needs casckpt[transformers]")
    downloads: Any = pytest.importorskip("huggingface_hub.file_download", reason="needs casckpt[transformers]")
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.arange(9)}}, run="sft", step=1)
    get_of = downloads.http_get

    def after_a_save(*args: Any, **options: Any) -> None:
        store.save({"model": {"w": torch.arange(9) + 1}}, run="sft", step=2)
        get_of(*args, **options)

    monkeypatch.setattr(downloads, "http_get", after_a_save)
    with serving(store) as served:
        options = {"endpoint": served.endpoint, "cache_dir": tmp_path / "hub", "token": False}
        found = Path(hub.hf_hub_download("sft", "model.safetensors", **options))
    assert commit_of(store.get("sft@1").id) in str(found)
    assert torch.equal(load(found.read_bytes())["w"], torch.arange(9))


def test_leases_are_not_listed_as_tags(tmp_path: Path) -> None:
    store = small_folder(tmp_path / "store")
    store.save({"model": {"w": torch.arange(9)}}, run="sft", step=1)
    store.tag("best", "sft@1")
    with serving(store) as served:
        served.body(WEIGHTS)
        assert any(name.startswith("lease-") for name in store.tags())
        assert [one["name"] for one in served.json("/api/models/sft/refs")["tags"]] == ["1", "best"]


def test_a_run_named_like_the_alias_of_another_run_is_served() -> None:
    store, name = small(), repo_of("exp/a/b")
    for run, step in ((name, 1), ("exp/a/b", 2)):
        store.save({"model": {"w": torch.arange(9)}}, run=run, step=step)
    with serving(store) as served:
        (listed,) = served.json("/api/models")
        found = served.json(f"/api/models/{name}")
    assert listed["sha"] == found["sha"] == commit_of(store.get(f"{name}@1").id)


# damage


def test_only_signed_checkpoints_are_served(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs casckpt[sign]")
    from tests.support.signing import pair

    alice = pair(tmp_path / "alice")
    store = casckpt.open(tmp_path / "store")
    store.save({"model": {"w": torch.ones(3)}}, run="sft", step=1)
    with serving(casckpt.open(tmp_path / "store", require_signature=alice.public)) as served:
        refused = served.get("/sft/resolve/1/model.safetensors")
        assert (refused.status, "no valid signature" in refused.headers["X-Error-Message"]) == (403, True)
        store.sign("sft@1", key=alice.private)
        assert served.get("/sft/resolve/1/model.safetensors").status == 200


def test_a_forged_record_does_not_serve_a_different_revision(tmp_path: Path) -> None:
    store = casckpt.open(tmp_path / "store")
    for step in (1, 2):
        store.save({"model": {"w": torch.full((3,), step)}}, run="sft", step=step)
    gone_to(store, "sft@2", "sft@1")
    with serving(casckpt.open(tmp_path / "store")) as served:
        assert served.get("/sft/resolve/1/model.safetensors").status == 200
        assert served.get("/sft/resolve/2/model.safetensors").status == 422


hub = pytest.importorskip("huggingface_hub.utils", reason="needs casckpt[transformers]")

RUNS = st.from_regex(re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}"), fullmatch=True)


@given(run=RUNS)
def test_every_run_has_a_name_that_clients_accept(run: str) -> None:
    hub.validate_repo_id(repo_of(check_run(run)))


@given(run=RUNS)
def test_a_valid_run_name_is_served_unchanged(run: str) -> None:
    if is_repo(run):
        assert repo_of(run) == run
    else:
        assert repo_of(run) != run


@given(runs=st.lists(RUNS, unique=True, max_size=6))
def test_every_repository_maps_back_to_its_run(runs: list[str]) -> None:
    for run in runs:
        assert run_of(repo_of(run), runs) == run_of("runs/" + repo_of(run), runs) == run


@pytest.mark.parametrize(
    ("run", "repo"),
    [
        ("sft", "sft"),
        ("exp/a", "exp/a"),
        ("exp/a/b", "exp-a-b-6e04346e"),
        ("a--b", "a-b-4b5b0d26"),
        ("api/x", "api-x-b4d31a1e"),
        ("a/tree", "a-tree-8d8c2f8f"),
        ("a.git", "a-git-02d8fbb4"),
        ("Datasets", "Datasets-3ed3a1e0"),
        ("runs/x", "runs-x-12345678"),
        ("runs", "runs"),
    ],
)
def test_runs_are_mapped_to_repository_names(run: str, repo: str) -> None:
    assert re.sub("[0-9a-f]{8}$", "", repo_of(run)) == re.sub("[0-9a-f]{8}$", "", repo)


def test_a_run_named_like_the_alias_of_another_run_keeps_its_name() -> None:
    alias = repo_of("exp/a/b")
    assert run_of(alias, ["exp/a/b"]) == "exp/a/b"
    assert run_of(alias, ["exp/a/b", alias]) == alias
    assert run_of(alias, []) == alias


@pytest.mark.parametrize(
    ("revision", "ref"),
    [
        ("main", "r@latest"),
        ("latest", "r@latest"),
        ("100", "r@100"),
        ("0", "r@0"),
        ("best", "tag:best"),
        ("a" * 40, "a" * 40),
        ("1" * 40, "1" * 40),
        ("a" * 64, "a" * 64),
        ("a" * 39, "tag:" + "a" * 39),
        ("1" * 20, "tag:" + "1" * 20),
        ("refs/pr/1", None),
        ("", None),
        ("..", None),
        ("HEAD", None),
        ("100..200", "tag:100..200"),
        ("tag:best", None),
        ("r@100", None),
        ("x" * 101, None),
    ],
)
def test_revisions_are_resolved_to_checkpoints(revision: str, ref: str | None) -> None:
    assert reference("r", revision) == ref


def test_the_commit_of_a_revision_has_40_hex_digits() -> None:
    assert commit_of("ab" * 32) == "ab" * 20
