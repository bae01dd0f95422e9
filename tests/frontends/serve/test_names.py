from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.names import check_run
from casckpt.frontends.serve.names import commit_of, is_repo, reference, repo_of, run_of

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
