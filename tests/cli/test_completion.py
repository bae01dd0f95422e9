"""Shell completions, requested as bash does."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import casckpt
from casckpt.cli.main import cli


def offered(*words: object, **environment: str) -> list[str]:
    """The completions of the last of ``words``, which may be a prefix."""
    line = ["casckpt", *map(str, words)]
    asked = {"_CASCKPT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    result = CliRunner().invoke(cli, [], env=asked | environment)
    assert result.exit_code == 0, result.output
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


def test_references_runs_and_folders_are_completed(saved: Path, store: casckpt.Store) -> None:
    store.tag("best", "a@2")
    refs = ["tag:best", "latest", "a@latest", "b@latest", "b@1", "a@3", "a@2", "a@1"]
    assert offered("show", saved, "") == refs
    assert offered("show", saved, "a@") == ["a@latest", "a@3", "a@2", "a@1"]
    assert offered("diff", saved, "a@1", "b") == ["b@latest", "b@1"]
    assert offered("show", "-s", saved, "t") == ["tag:best"]
    assert offered("show", "l", CASCKPT_STORE=str(saved)) == ["latest"]
    assert offered("list", saved, "--run", "") == ["a", "b"]
    assert offered("gc", saved, "--run", "b") == ["b"]
    assert offered("li") == ["list"]


def test_restore_completes_ids_of_forgotten_checkpoints(saved: Path, store: casckpt.Store) -> None:
    """It completes nothing else: RUN@STEP names visible checkpoints."""
    forgotten = [ckpt.id for ckpt in store.forget("a@1", "a@2")]
    assert offered("restore", saved, "") == [one[:12] for one in reversed(forgotten)]
    assert offered("show", saved, "a@") == ["a@latest", "a@3"]


@pytest.mark.parametrize("store", ["nowhere", "ftp://x/y"])
def test_an_unreadable_store_offers_no_completions(store: str) -> None:
    assert offered("show", store, "") == []


def test_a_store_argument_completes_folders(saved: Path) -> None:
    asked = {"_CASCKPT_COMPLETE": "bash_complete", "COMP_WORDS": "casckpt list /tm", "COMP_CWORD": "2"}
    assert CliRunner().invoke(cli, [], env=asked).stdout == "dir,/tm\n"


@pytest.mark.process  # click runs the shell to read its version
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_completion_script(shell: str) -> None:
    result = CliRunner().invoke(cli, [], env={"_CASCKPT_COMPLETE": f"{shell}_source"})
    assert "_CASCKPT_COMPLETE" in result.stdout
