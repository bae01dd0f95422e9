"""An error prints one message, sets the exit status, and shows a traceback only on request."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import casckpt
from casckpt.base.digest import hex_digest
from casckpt.cli import main
from casckpt.cli.main import cli, command_modules
from casckpt.cli.session import Session, store_command
from casckpt.errors import CasckptError, Conflict, Damaged, InvalidInput, MissingKey, NotFound, Revoked, StorageError
from tests.cli.conftest import AsJson, Run
from tests.support.signing import pair

WITHOUT_STORE = {"cache"}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make ``casckpt fail STORE`` raise an error."""

    def install(error: BaseException) -> None:
        @store_command("fail")
        def command(session: Session) -> None:
            raise error

        monkeypatch.setattr(main.Commands, "get_command", lambda self, ctx, name: command)

    return install


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("m; do this"), 3),
        (MissingKey("m; do this"), 3),
        (Damaged("m; do this"), 4),
        (Conflict("m; do this"), 5),
        (Revoked("m; do this"), 5),
        (InvalidInput("m; do this"), 1),
        (StorageError("m; do this"), 1),
    ],
)
def test_an_error_produces_one_message_and_an_exit_status(
    failing: Any, run: Run, as_json: AsJson, error: CasckptError, status: int
) -> None:
    failing(error)
    result = run("fail", "s", status=status)
    assert (result.stdout, result.stderr) == ("", "casckpt: m; do this\n")
    assert as_json("fail", "s", status=status) == {"error": {"kind": error.kind, "message": "m; do this"}}


def test_debug_shows_the_traceback(failing: Any) -> None:
    failing(Conflict("m"))
    result = CliRunner().invoke(cli, ["fail", "s", "--debug"])
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("casckpt: m\n")
    assert result.exit_code == 5


@pytest.mark.parametrize("error", [RuntimeError("no\nway"), PermissionError(13, "Permission denied", "/x"), EOFError()])
def test_an_unexpected_error_is_reported_in_one_line_with_a_hint(
    failing: Any, run: Run, as_json: AsJson, error: Exception
) -> None:
    failing(error)
    first, last = run("fail", "s", status=1).stderr.strip().splitlines()
    assert type(error).__name__ in first
    assert "--debug" in last
    assert as_json("fail", "s", status=1)["error"]["kind"] == "error"


def test_an_interrupt_has_its_own_exit_status(failing: Any, run: Run) -> None:
    failing(KeyboardInterrupt())
    assert run("fail", "s", status=130).stderr.strip() == "casckpt: interrupted"


def test_a_closed_pipe_does_not_cause_an_error_message(failing: Any, run: Run) -> None:
    failing(BrokenPipeError(32, "Broken pipe"))
    assert run("fail", "s", status=1).output == ""


def test_messages_contain_no_terminal_sequences(failing: Any, run: Run) -> None:
    failing(NotFound("no \x1b[2J here\nbut there"))
    assert run("fail", "s", status=3).stderr == "casckpt: no \\x1b[2J here\nbut there\n"


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["list"],
        ["list", "s", "--nonsense"],
        ["import", "s", "f", "--step", "x"],
        ["gc", "s", "--keep-last"],
        ["gc", "s", "--keep-last", "-1"],
        ["gc", "s", "--keep-every", "0"],
        ["transactions", "s", "--revoke", "a", "--give-up", "b"],
    ],
    ids=" ".join,
)
def test_a_usage_error_explains_the_usage(run: Run, as_json: AsJson, args: list[str]) -> None:
    lines = run(*args, status=2).stderr.strip().splitlines()
    assert lines[0].startswith("casckpt: ")
    assert lines[-1].startswith("Try 'casckpt")
    assert as_json(*args, status=2)["error"]["kind"] == "usage"


def test_the_help_is_shown_if_there_are_no_arguments() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 2
    assert "Commands:" in result.output


@pytest.mark.parametrize("name", sorted(set(command_modules()) - WITHOUT_STORE - {"doctor", "import", "init", "watch"}))
def test_commands_that_only_read_do_not_create_a_store(
    name: str, store_path: Path, tmp_path: Path, as_json: AsJson
) -> None:
    with cli.make_context("casckpt", ["list", "s"]) as context:
        command = cli.get_command(context, name)
    assert command is not None
    more = ["x" for one in command.params if isinstance(one, click.Argument) and one.required][1:]
    given = {
        "sign": ["a@1", "--key", str(pair(tmp_path / "keys").private)],
        "diff": ["a@1", "a@2"],
        "export": ["a@1", "out"],
        "thin": ["--drop", "x", "--keep-last", "1"],
        "follow": ["a", "--to", str(tmp_path / "to"), "--once"],
        "merge": ["a@1", "--run", "m", "--step", "1"],
    }
    more = given.get(name, ["a@1"] if more else [])
    assert as_json(name, store_path, *more, status=3)["error"]["kind"] == "not-found"
    assert not store_path.exists()


@pytest.mark.parametrize("name", sorted(command_modules()))
def test_every_command_has_the_common_options(name: str) -> None:
    with cli.make_context("casckpt", ["list", "s"]) as context:
        command = cli.get_command(context, name)
    assert command is not None
    assert command.name == name
    options = {option for one in command.params for option in one.opts}
    assert {"--json", "--verbose", "--debug"} <= options
    assert not any(isinstance(one, click.Option) and one.prompt for one in command.params)
    if name not in WITHOUT_STORE:
        assert command.params[0].human_readable_name == "STORE"
        assert {"--storage-option", "--cache-dir"} <= options


def test_verbose_shows_the_log_and_then_restores_the_log_settings(
    failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @store_command("talk")
    def command(session: Session) -> None:
        logging.getLogger("casckpt.x").info("info")
        logging.getLogger("casckpt.x").debug("debug")
        logging.getLogger("casckpt.x").warning("warning \x1b")

    monkeypatch.setattr(main.Commands, "get_command", lambda self, ctx, name: command)
    log = logging.getLogger("casckpt")
    before = (list(log.handlers), log.level)
    said = ["casckpt: info: info", "casckpt: debug: debug", r"casckpt: warning: warning \x1b"]
    for option, shown in (([], said[2:]), (["-v"], [said[0], said[2]]), (["-vv"], said)):
        result = CliRunner().invoke(cli, ["talk", "s", *option])
        assert result.stderr.splitlines() == shown
    assert (list(log.handlers), log.level) == before


def test_a_damaged_record_affects_only_its_own_line_in_a_list(saved: Path, run: Run, as_json: AsJson) -> None:
    record = min((saved / "commits").iterdir())
    record.chmod(0o600)
    record.write_bytes(b"nonsense")
    result = run("list", saved, "--json")
    assert len(json.loads(result.stdout)) == 3
    assert f"the record of {record.name} cannot be read" in result.stderr
    verified = run("verify", saved, status=4).stdout
    assert "1 record damaged: restore the files from a backup" in verified
    assert "casckpt repair" not in verified  # there is no other copy of the record
    assert as_json("gc", saved, status=4)["error"]["kind"] == "damaged"


def test_a_record_with_an_impossible_time_affects_only_its_own_line_in_a_list(
    saved: Path, run: Run, as_json: AsJson
) -> None:
    record = min((saved / "commits").iterdir())
    fields = json.loads(record.read_bytes().split(b"\n")[0])
    line = json.dumps(fields | {"created_at": 1 << 62}).encode()
    record.chmod(0o600)
    record.write_bytes(line + b"\n" + hex_digest(line).encode() + b"\n")
    assert len(as_json("list", saved)) == 3
    assert "is not a date" in run("verify", saved, status=4).stdout


def test_a_tag_on_a_checkpoint_with_a_damaged_record_is_reported(saved: Path, store: casckpt.Store, run: Run) -> None:
    store.tag("best", "a@1")
    record = min((saved / "commits").iterdir())
    record.chmod(0o600)
    record.write_bytes(b"nonsense")
    assert "tag best names a checkpoint with an unreadable record" in run("tag", saved).stderr


def test_a_stray_file_with_an_impossible_date_is_ignored(saved: Path, as_json: AsJson) -> None:
    for folder in ("commits", "transactions"):
        (saved / folder).mkdir(exist_ok=True)
        (saved / folder / f"20269999T000000000000Z-{'0' * 16}-{'0' * 16}-1").write_bytes(b"x")
    assert as_json("transactions", saved) == []
    assert as_json("gc", saved, "--dry-run")["waiting"] == []


def test_a_store_can_have_any_name_that_a_folder_can_have(saved: Path, tmp_path: Path, as_json: AsJson) -> None:
    odd = tmp_path / os.fsdecode(b"not utf-8 \xff\x1b")
    saved.rename(odd)
    assert len(as_json("list", odd)) == 4
    assert as_json("verify", odd)["checked_checkpoints"] == 4
    assert len(as_json("copy", odd, tmp_path / os.fsdecode(b"\xfe"))["copied"]) == 4


def test_a_damaged_tag_does_not_affect_checkpoints(
    saved: Path, store: casckpt.Store, run: Run, as_json: AsJson
) -> None:
    for name in ("good", "bad"):
        store.tag(name, "a@1")
    record = saved / "tags" / "bad" / "0"
    record.chmod(0o600)
    record.write_bytes(b"nonsense")
    assert json.loads(run("show", saved, "a@1", "--json").stdout)["tags"] == ["good"]
    listed = run("tag", saved, "--json")
    assert [tag["name"] for tag in json.loads(listed.stdout)] == ["good"]
    assert "cannot read the record of tag bad" in listed.stderr
    assert "--delete bad" in as_json("gc", saved, status=4)["error"]["message"]
    run("tag", saved, "--delete", "bad")
    run("gc", saved)
