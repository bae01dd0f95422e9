"""Advice of the command line."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import casckpt
from casckpt.frontends.serve import server
from tests.hints.conftest import Run
from tests.support.hints import Told, follows
from tests.support.servers import Server

Store = casckpt.Store


@follows("cli/commands/copy.py:command", "--storage-option is for STORE, which is a local folder; those of DST are")
def test_options_of_the_target_of_a_copy_are_its_own(
    saved: Store, store_path: Path, moto_server: Server, told: Told, run: Run
) -> None:
    command = ("copy", store_path, f"s3://{moto_server.new_bucket()}/store")
    options = [f"{name}={value}" for name, value in moto_server.options.items()]
    advice = told.text(run(*command, *beside("--storage-option", options), status=2).output)
    run(*command, *beside(advice.says("--dst-option"), options))
    copied = casckpt.open(command[2], storage_options=moto_server.options)
    assert copied.get("a@1").id == saved.get("a@1").id


def beside(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


@follows("cli/commands/copy.py:_part", "RANK and WORLD_SIZE in the environment must be numbers")
@follows("cli/commands/copy.py:_part", "in the environment do not fit: unset them")
def test_a_copy_is_shared_as_the_environment_says(
    saved: Store, tmp_path: Path, told: Told, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_path = saved.url
    monkeypatch.setenv("RANK", "first")
    told.text(run("copy", store_path, tmp_path / "copy", status=2).output).says("RANK and WORLD_SIZE")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told.text(run("copy", store_path, tmp_path / "copy", status=2).output).says("unset them")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    run("copy", store_path, tmp_path / "copy")
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    run("copy", store_path, tmp_path / "other")
    assert len(casckpt.open(tmp_path / "other").checkpoints()) == 1


class Once:
    """A server that ends before it answers anybody."""

    def __init__(self, _: object) -> None: ...

    def run(self, sockets: Iterable[socket.socket]) -> None:
        for listening in sockets:
            listening.close()


@pytest.fixture
def not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would go on for ever."""
    monkeypatch.setattr(server, "server_of", Once)


@pytest.mark.usefixtures("not_served")
@follows("cli/commands/export.py:serve", "at … others reach the store: give --token-file, or say --no-token")
@pytest.mark.parametrize("option", ["--token-file", "--no-token"])
def test_whom_a_server_answers_is_said(saved: Store, tmp_path: Path, told: Told, run: Run, option: str) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    command = ("serve", saved.url, "--host", "0.0.0.0", "--port", "0")
    advice = told.text(run(*command, status=1).output)
    more = [tmp_path / "tokens"] if option == "--token-file" else []
    assert "serving" in run(*command, advice.says(option), *more).output


@pytest.mark.usefixtures("not_served")
@follows("cli/commands/export.py:serve", "cannot be listened at: …; give another --port")
def test_instead_of_a_port_that_is_taken_another_is_given(saved: Store, store_path: Path, told: Told, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        advice = told.text(run("serve", store_path, "--port", taken.getsockname()[1], status=1).output)
        assert "serving" in run("serve", store_path, advice.says("--port"), "0").output


@follows("cli/commands/gc.py:command", "give --thin PATTERN, too")
def test_what_is_left_whole_comes_with_what_is_thinned(saved: Store, store_path: Path, told: Told, run: Run) -> None:
    saved.save({"w": torch.ones(2), "b": torch.ones(1)}, run="a", step=2)
    advice = told.text(run("gc", store_path, "--thin-keep-last", 1, status=2).output)
    run("gc", store_path, "--thin-keep-last", 1, *advice.says("--thin PATTERN").replace("PATTERN", "b").split())
    assert saved.get("a@1").commit.dropped is not None


@follows("cli/commands/list.py:listing", "the record of %s cannot be read; `casckpt verify` says more")
@follows("cli/commands/tag.py:_rows", "tag %s names a checkpoint whose record cannot be read; `casckpt verify` says")
def test_of_a_record_that_cannot_be_read_verify_says_more(saved: Store, store_path: Path, told: Told, run: Run) -> None:
    saved.tag("best", "a@1")
    (record,) = (store_path / "commits").iterdir()
    record.chmod(0o600)
    record.write_bytes(b"not a record")
    for command in ("list", "tag"):
        advice = told.text(run(command, store_path).output)
        assert record.name in run(*advice.command("verify"), store_path, status=4).output


@follows("cli/commands/settings.py:command", "--set and --unset both name …: give one of them")
@pytest.mark.parametrize("option", ["--set", "--unset"])
def test_a_setting_is_set_or_unset(saved: Store, store_path: Path, told: Told, run: Run, option: str) -> None:
    command = ("settings", store_path)
    given = {"--set": "min_age=2h", "--unset": "min_age"}
    advice = told.text(run(*command, "--set", given["--set"], "--unset", given["--unset"], status=2).output)
    run(*command, advice.says(option), given[option])
    assert (saved.settings.min_age is None) == (option == "--unset")


@follows("cli/commands/show.py:_chosen", "without --keys all are listed")
def test_without_a_pattern_that_matches_nothing_all_keys_are_listed(
    saved: Store, store_path: Path, told: Told, run: Run
) -> None:
    advice = told.text(run("show", store_path, "a@1", "--tensors", "--keys", "x.*", status=3).output)
    advice.says("without --keys all are listed")
    assert {"w", "b"} <= set(run("show", store_path, "a@1", "--tensors").output.split())


@follows("cli/commands/tag.py:command", "--expires is for a tag that is set: give NAME and REF")
@follows("cli/commands/tag.py:command", "--delete takes the name; give nothing behind it")
def test_a_tag_is_set_for_a_time_and_deleted(saved: Store, store_path: Path, told: Told, run: Run) -> None:
    advice = told.text(run("tag", store_path, "--expires", "1d", status=2).output)
    names = advice.says("NAME and REF").replace("NAME", "best").replace("REF", "a@1").split(" and ")
    run("tag", store_path, *names, "--expires", "1d")
    assert list(saved.tags()) == ["best"]
    advice = told.text(run("tag", store_path, "--delete", "best", "a@1", status=2).output)
    run("tag", store_path, advice.says("--delete"), "best")
    assert list(saved.tags()) == []


@follows("cli/commands/tag.py:_rows", "`casckpt tag STORE … REF` makes it")
def test_a_tag_that_is_not_there_is_made_by_the_command_that_is_shown(
    saved: Store, store_path: Path, told: Told, run: Run
) -> None:
    advice = told.text(run("tag", store_path, "best", status=3).output)
    run(*advice.command("tag", STORE=store_path, REF="a@1"))
    assert saved.get("tag:best").step == 1


@follows("cli/commands/transactions.py:command", "--revoke is for a save in progress, --give-up for a damaged one")
@follows("cli/commands/transactions.py:_txid", "`casckpt transactions STORE` lists them")
def test_a_save_in_progress_is_revoked_by_its_name(saved: Store, store_path: Path, told: Told, run: Run) -> None:
    from casckpt.repository.transactions import begin

    save = begin(saved.repository, "a", 3)
    command = ("transactions", store_path)
    advice = told.text(run(*command, "--revoke", save.txid, "--give-up", save.txid, status=2).output)
    option = advice.says("--revoke")
    advice = told.text(run(*command, option, "a@3", status=2).output)
    listed = run(*advice.command("transactions", STORE=store_path)).output.split()
    run(*command, option, next(word for word in listed if word == save.txid))
    assert saved.transactions() == []
