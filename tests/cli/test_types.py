from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import casckpt
from casckpt.cli.main import cli
from casckpt.cli.types import SETTING
from tests.cli.conftest import AsJson, Run, named


def test_the_error_for_a_storage_option_names_it(run: Run, saved: Path) -> None:
    assert "remove ['anon']" in run("list", saved, "--storage-option", "anon=true", status=1).stderr
    assert "KEY=VALUE" in run("list", saved, "--storage-option", "anon", status=2).stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=true", True),
        ("a=8", 8),
        ('a={"b": 1}', {"b": 1}),
        ("a=text", "text"),
        ('a="8"', "8"),
        ("a=x=y", "x=y"),
        ("a=", ""),
    ],
)
def test_storage_option_values_are_json_or_strings(text: str, value: Any) -> None:
    assert SETTING.convert(text, None, None) == ("a", value)


def test_a_metric_that_no_checkpoint_has_does_not_forget_or_thin_anything(
    saved: Path, store: casckpt.Store, as_json: AsJson, run: Run
) -> None:
    key = next(iter(store.get("a@1").tensors))
    for command in (("gc",), ("gc", "--dry-run"), ("thin", "--drop", key)):
        told = run(command[0], saved, *command[1:], "--keep-best", "los:min:3", status=1).stderr
        assert "no checkpoint here has a metric 'los'; none of them has any" in told
    store.save({"w": 1}, run="c", step=1, metrics={"loss": 1.0})
    told = run("gc", saved, "--keep-best", "los:min:3", "--run", "c", status=1).stderr
    assert "no checkpoint of run c has a metric 'los'; the existing metrics are loss" in told
    for command in (("gc",), ("thin", "--drop", key)):
        told = run(*command, saved, "--keep-best", "loss:3").stderr
        assert told.count("no checkpoint of run a, b has a number for 'loss', so gc keeps all of them") == 1
    assert named(as_json("list", saved)) == ["a@1", "a@2", "a@3", "b@1", "c@1"]
    assert not any(row["dropped"] for row in as_json("list", saved))


def offered(*words: object, **environment: str) -> list[str]:
    """Return the completions of the last word, which may be a prefix."""
    line = ["casckpt", *map(str, words)]
    asked = {"_CASCKPT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    result = CliRunner().invoke(cli, [], env=asked | environment)
    assert result.exit_code == 0, result.output
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


def test_commands_options_and_paths_are_completed(saved: Path) -> None:
    assert offered("li") == ["list"]
    assert "--run" in offered("list", saved, "--r")
    asked = {"_CASCKPT_COMPLETE": "bash_complete", "COMP_WORDS": "casckpt list /tm", "COMP_CWORD": "2"}
    assert CliRunner().invoke(cli, [], env=asked).stdout == "file,/tm\n"


@pytest.mark.process  # click runs the shell to read its version
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_completion_script(shell: str) -> None:
    result = CliRunner().invoke(cli, [], env={"_CASCKPT_COMPLETE": f"{shell}_source"})
    assert "_CASCKPT_COMPLETE" in result.stdout
