"""The advice that the command line gives."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")

import casckpt
from casckpt.cli.main import cli
from casckpt.errors import InvalidInput
from casckpt.format.keys import commit_key
from casckpt.frontends.serve import server
from casckpt.repository.repository import Repository
from tests.hints.conftest import Run, changed_blob
from tests.support.hints import Messages, follows
from tests.support.servers import Server
from tests.support.signing import pair

Store = casckpt.Store


@follows(
    "cli/commands/copy.py:command", "--storage-option applies to STORE, which is a local folder; use --dst-option for"
)
def test_the_suggested_flag_sets_storage_options_of_a_copy_target(
    saved: Store, store_path: Path, moto_server: Server, messages: Messages, run: Run
) -> None:
    command = ("copy", store_path, f"s3://{moto_server.new_bucket()}/store")
    options = [f"{name}={value}" for name, value in moto_server.options.items()]
    advice = messages.text(run(*command, *beside("--storage-option", options), status=2).output)
    run(*command, *beside(advice.says("--dst-option"), options))
    copied = casckpt.open(command[2], storage_options=moto_server.options)
    assert copied.get("a@1").id == saved.get("a@1").id


def beside(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


class Once:
    """A server that ends before its first response."""

    def __init__(self, _: object) -> None: ...

    def run(self, sockets: Iterable[socket.socket]) -> None:
        for listening in sockets:
            listening.close()


@pytest.fixture
def not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server would never return."""
    monkeypatch.setattr(server, "server_of", Once)


@pytest.mark.usefixtures("not_served")
@follows("cli/commands/export.py:serve", "can reach the store at …: pass --token-file or --no-token")
@pytest.mark.parametrize("option", ["--token-file", "--no-token"])
def test_a_server_on_a_public_address_can_run_with_or_without_a_token_as_advised(
    saved: Store, tmp_path: Path, messages: Messages, run: Run, option: str
) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    command = ("serve", saved.url, "--host", "0.0.0.0", "--port", "0")
    advice = messages.text(run(*command, status=1).output)
    more = [tmp_path / "tokens"] if option == "--token-file" else []
    assert "serving" in run(*command, advice.says(option), *more).output


@pytest.mark.usefixtures("not_served")
@follows("cli/commands/export.py:serve", "cannot listen on …:…: …; change --port or --host")
def test_serve_works_with_the_port_that_the_error_suggests(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        advice = messages.text(run("serve", store_path, "--port", taken.getsockname()[1], status=1).output)
        assert "serving" in run("serve", store_path, advice.says("--port"), "0").output


@follows("cli/commands/list.py:checkpoint_rows", "the record of %s cannot be read; run `casckpt verify` for details")
@follows("cli/commands/tag.py:_rows", "tag %s names a checkpoint with an unreadable record (run `casckpt verify`")
def test_verify_explains_an_unreadable_record(saved: Store, store_path: Path, messages: Messages, run: Run) -> None:
    record = store_path / commit_key(saved.get("a@1").commit.txid)
    saved.tag("best", "a@1")
    record.chmod(0o600)
    record.write_bytes(b"not a record")
    for command in ("list", "tag"):
        advice = messages.text(run(command, store_path).output)
        assert record.name in run(*advice.command("verify"), store_path, status=4).output


@follows("cli/commands/tag.py:_rows", "or one that this store does not have: set the tag again, or delete it")
@pytest.mark.parametrize("way", ["set", "delete"])
def test_a_tag_on_a_checkpoint_that_the_store_lacks_is_set_or_deleted(
    saved: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    """A copy by hand copied commits/ first, and then tags/."""
    copy = shutil.copytree(saved.url, tmp_path / "copy")
    saved.save({"w": torch.ones(2)}, run="a", step=9)
    saved.tag("new", "a@9")
    shutil.copytree(Path(saved.url, "tags"), copy / "tags", dirs_exist_ok=True)
    advice = messages.text(run("tag", copy).output)
    advice.says("set the tag again, or delete it")
    run("tag", copy, *(("new", "a@1") if way == "set" else ("--delete", "new")))
    assert "does not have" not in run("tag", copy).output


@follows("cli/commands/settings.py:command", "--set and --unset both name …: pass only one of them")
@pytest.mark.parametrize("option", ["--set", "--unset"])
def test_a_setting_can_be_set_or_unset_as_advised(
    saved: Store, store_path: Path, messages: Messages, run: Run, option: str
) -> None:
    command = ("settings", store_path)
    given = {"--set": "min_age=2h", "--unset": "min_age"}
    advice = messages.text(run(*command, "--set", given["--set"], "--unset", given["--unset"], status=2).output)
    run(*command, advice.says(option), given[option])
    assert (saved.settings.min_age is None) == (option == "--unset")


@follows("upkeep/gc/ages.py:min_age_of", "is less than the store's setting")
@pytest.mark.parametrize("way", ["at least that", "lower it"])
def test_gc_accepts_the_minimum_age_of_the_store_or_a_lower_setting_later(
    saved: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    saved.save({"w": torch.zeros(7)}, run="a", step=2)
    saved.change_settings(min_age="7d")
    saved.forget("a@1")
    with messages.error(InvalidInput) as advice:
        saved.gc(min_age="1h")
    if way == "at least that":
        advice.says("pass at least that")
        assert saved.gc(min_age="7d").purged == ()
        return
    run(*advice.command("settings", STORE=store_path, **{"min_age=VALUE": "min_age=1h"}))
    advice.says("counts 7d later")
    for path in filter(Path.is_file, store_path.rglob("*")):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    assert [one.step for one in saved.gc(min_age="1h").purged] == [1]


@follows("cli/commands/show.py:_chosen", "omit --keys to list all tensors")
def test_show_without_the_pattern_lists_all_keys_as_advised(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    advice = messages.text(run("show", store_path, "a@1", "--tensors", "--keys", "x.*", status=3).output)
    advice.says("omit --keys to list all tensors")
    assert {"w", "b"} <= set(run("show", store_path, "a@1", "--tensors").output.split())


@follows("cli/commands/tag.py:command", "--expires requires a tag to set: pass NAME and REF")
@follows("cli/commands/tag.py:command", "--delete accepts a single name: omit all other arguments")
def test_a_tag_can_be_set_temporarily_and_deleted_as_advised(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    advice = messages.text(run("tag", store_path, "--expires", "1d", status=2).output)
    names = advice.says("NAME and REF").replace("NAME", "best").replace("REF", "a@1").split(" and ")
    run("tag", store_path, *names, "--expires", "1d")
    assert list(saved.tags()) == ["best"]
    advice = messages.text(run("tag", store_path, "--delete", "best", "a@1", status=2).output)
    run("tag", store_path, advice.says("--delete"), "best")
    assert list(saved.tags()) == []


@follows("cli/commands/report.py:stats", "--run applies to --plan")
def test_the_growth_of_a_run_is_shown_as_advised(saved: Store, store_path: Path, messages: Messages, run: Run) -> None:
    advice = messages.text(run("stats", store_path, "--run", "a", status=2).output)
    assert "grows by" in run("stats", store_path, "--run", "a", advice.says("--plan")).output


@follows("cli/commands/tag.py:_rows", "set it with `casckpt tag STORE … REF`")
def test_a_missing_tag_is_created_with_the_suggested_command(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    advice = messages.text(run("tag", store_path, "best", status=3).output)
    run(*advice.command("tag", STORE=store_path, REF="a@1"))
    assert saved.get("tag:best").step == 1


@follows("cli/commands/list.py:transactions", "--revoke is for a save in progress, and --give-up for a damaged one")
@follows("cli/commands/list.py:_txid", "`casckpt transactions STORE` lists")
def test_a_save_in_progress_can_be_revoked_by_name_as_advised(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    from casckpt.history.transactions import begin

    save = begin(saved.repository, "a", 3)
    save.leave()  # its thread would otherwise live until the next collection of garbage
    command = ("transactions", store_path)
    advice = messages.text(run(*command, "--revoke", save.txid, "--give-up", save.txid, status=2).output)
    option = advice.says("--revoke")
    advice = messages.text(run(*command, option, "a@3", status=2).output)
    listed = run(*advice.command("transactions", STORE=store_path)).output.split()
    run(*command, option, next(word for word in listed if word == save.txid))
    assert saved.transactions() == []


# messages that accompany results


@follows("cli/commands/export.py:", "use --format hf for a folder that from_pretrained can load")
def test_the_suggested_option_exports_a_model_without_its_config(
    store: Store, tmp_path: Path, messages: Messages, run: Run
) -> None:
    state = {"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}}
    store.save(state, run="a", step=1, attachments={"config.json": b"{}"})
    advice = messages.text(run("export", store.url, "a@1", tmp_path / "all", "--format", "safetensors").output)
    run("export", store.url, "a@1", tmp_path / "out", *advice.says("--format hf").split())
    assert (tmp_path / "out" / "config.json").exists()


@follows("upkeep/copies/copy.py:_with_tags", "the target has it on a different checkpoint; --tags (tags=True) moves it")
def test_the_suggested_option_moves_a_tag_of_the_target(
    saved: Store, store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    saved.tag("best", "a@1")
    saved.copy_to(tmp_path / "copy")
    saved.save({"w": torch.zeros(7)}, run="a", step=2)
    saved.tag("best", "a@2")
    advice = messages.text(run("copy", store_path, tmp_path / "copy").output)
    assert casckpt.open(tmp_path / "copy").get("tag:best").step == 1
    run("copy", store_path, tmp_path / "copy", *advice.says("--tags").split())
    assert casckpt.open(tmp_path / "copy").get("tag:best").step == 2


@follows("cli/commands/gc.py:_say_space", "--min-age 0 deletes them immediately, and they cannot be restored")
def test_the_suggested_option_deletes_forgotten_checkpoints_immediately(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    """The option is added to the call that was made, so checkpoints of other runs can still be restored."""
    other = saved.save({"w": torch.ones(9)}, run="b", step=1)
    saved.save({"w": torch.zeros(7)}, run="a", step=2)
    saved.forget(other)
    rule = ("gc", store_path, "--run", "a", "--keep-last", 1)
    advice = messages.text(run(*rule).output)
    run(*rule, *advice.says("--min-age 0").split())
    assert len(list(store_path.rglob("*.safetensors"))) == 2
    assert saved.restore(other).step == 1


@follows("cli/commands/list.py:command", "(--all lists them)")
@follows("cli/commands/list.py:command", "`casckpt stats` shows what a gc frees")
def test_the_suggested_options_list_and_count_forgotten_checkpoints(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    saved.save({"w": torch.zeros(7)}, run="a", step=2)
    id = saved.get("a@1").id[:12]
    saved.forget("a@1")
    advice = messages.text(run("list", store_path).output)
    assert id in run("list", store_path, advice.says("--all")).output
    assert "a gc frees" in run(*advice.command("stats"), store_path).output


@follows("cli/commands/verify.py:repaired_text", "or exported with `casckpt export --keys`. To give up the checkpoints")
@pytest.mark.parametrize("way", ["--from", "forget"])
def test_damage_can_be_repaired_from_a_copy_or_its_checkpoint_forgotten_as_advised(
    saved: Store, tmp_path: Path, messages: Messages, run: Run, way: str
) -> None:
    path = tmp_path / "store"
    shutil.copytree(path, tmp_path / "copy")
    next(path.rglob("*.manifest")).unlink()
    advice = messages.text(run("repair", path, status=4).output)
    if way == "--from":
        run("repair", path, advice.says(way), tmp_path / "copy")
    else:
        run(*advice.command("forget"), path, "a@1")
        run("gc", path, *advice.says("--run RUN --min-age 0").replace("RUN", "a").split())
        assert not list(path.rglob("*.safetensors"))
        run(*advice.command("copy"), tmp_path / "copy", path, "a@1")
    assert saved.read("a@1").keys() == {"w", "b"}


@follows("cli/commands/verify.py:repaired_text", "The undamaged tensors of these checkpoints can still be loaded")
def test_undamaged_tensors_of_a_lost_blob_can_be_exported_as_advised(
    saved: Store, store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    saved.save({"w": torch.ones(3)}, run="a", step=2)
    changed_blob(store_path)
    run("verify", store_path, status=4)
    (lost,) = json.loads(run("repair", store_path, "--json", status=4).output)["lost"]
    (key,) = {"w", "b"} - {*lost["keys"]}
    advice = messages.text(run("repair", store_path, status=4).output)
    assert saved.read("a@1", keys=[key]).keys() == {key}
    command, option = advice.command("export")
    run(command, store_path, "a@1", tmp_path / "out.safetensors", option, key)
    assert (tmp_path / "out.safetensors").exists()


@follows("cli/commands/report.py:text", "could not be read; run `casckpt verify` for details")
def test_verify_explains_a_checkpoint_that_cannot_be_measured(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    id = saved.get("a@1").id
    next(store_path.rglob("*.manifest")).unlink()
    advice = messages.text(run("report", store_path).output)
    assert id in run(*advice.command("verify"), store_path, status=4).output


@follows("cli/commands/verify.py:_to_do", "damaged: run `casckpt repair`")
def test_known_damage_can_be_repaired_as_advised(saved: Store, tmp_path: Path, messages: Messages, run: Run) -> None:
    path = tmp_path / "store"
    shutil.copytree(path, tmp_path / "copy")
    changed_blob(path)
    advice = messages.text(run("verify", path, status=4).output)
    run(*advice.command("repair"), path, "--from", tmp_path / "copy")
    assert "all is well" in run("verify", path).output


@follows("cli/commands/show.py:_text", "list all of them with --tensors, or some of them with --keys PATTERN")
def test_the_suggested_options_show_tensors(saved: Store, store_path: Path, messages: Messages, run: Run) -> None:
    saved.save({f"t{number}": torch.ones(1) for number in range(100)}, run="a", step=2)
    advice = messages.text(run("show", store_path, "a@2").output)
    assert {"t1", "t99"} <= set(run("show", store_path, "a@2", advice.says("--tensors")).output.split())
    some = run("show", store_path, "a@2", *advice.says("--keys PATTERN").replace("PATTERN", "t1").split()).output
    assert "t1" in some.split()
    assert "t99" not in some.split()


@follows("cli/commands/show.py:_signers", "not checked here: use `casckpt verify --require-signature`")
@follows("cli/commands/verify.py:_to_do", "not signed: if you trust them, run `casckpt sign`")
def test_signatures_are_verified_and_created(
    saved: Store, store_path: Path, tmp_path: Path, messages: Messages, run: Run
) -> None:
    alice, bob = pair(tmp_path / "keys"), pair(tmp_path / "keys", "bob")
    run("sign", store_path, "a@1", "--key", alice.private)
    advice = messages.text(run("show", store_path, "a@1").output)
    command = [*advice.says("verify --require-signature").split(), alice.public, store_path]
    run(*command)
    said = messages.text(run(*command[:2], bob.public, store_path, status=1).output)
    run(*said.command("sign"), store_path, "a@1", "--key", bob.private)
    run(*command[:2], bob.public, store_path)


@follows("cli/commands/gc.py:thinned_text", "--min-age 0 frees them immediately, but purges all forgotten checkpoints")
def test_the_suggested_option_frees_thinned_bytes_immediately(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    advice = messages.text(run("thin", store_path, "a@1", "--drop", "b").output)
    run("gc", store_path, *advice.says("--min-age 0").split())
    assert run("thin", store_path, "a@1", "--drop", "b").output.startswith("0 tensors")


@follows("cli/commands/verify.py:about_records", "restore the files from a backup of the store's files")
@pytest.mark.parametrize("way", ["put back", "give up"])
def test_a_damaged_record_can_be_replaced_or_its_checkpoint_forgotten_as_advised(
    saved: Store, store_path: Path, messages: Messages, run: Run, way: str
) -> None:
    saved.tag("best", "a@1")
    first = store_path / "commits" / saved.get("a@1").commit.txid
    records = [first, next((store_path / "tags" / "best").iterdir())]
    before = [record.read_bytes() for record in records]
    for record in records:
        record.chmod(0o600)
        record.write_bytes(b"not a record")
    advice = messages.text(run("verify", store_path, status=4).output)
    if way == "put back":
        advice.says("restore the files from a backup")
        for record, data in zip(records, before, strict=True):
            record.write_bytes(data)
    else:
        advice.says("set the tags again")
        saved.save({"x": 1}, run="b", step=1)
        run("tag", store_path, "best", "b@1")
        run(*advice.command("transactions", STORE=store_path, TXID=first.name))
    run("verify", store_path)


@follows("cli/failures.py:Reporter._hint", "Rerun the command with --debug to see where the error occurred.")
def test_the_debug_option_shows_where_a_bug_occurred(
    saved: Store, store_path: Path, messages: Messages, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Repository, "check_exists", broken)
    advice = messages.text(run("tag", store_path, status=1).output)
    shown = CliRunner().invoke(cli, ["tag", str(store_path), advice.says("--debug")])
    assert "in broken" in shown.output


@follows("cli/failures.py:_show_usage", "Try '… --help'.")
def test_the_help_explains_a_command(saved: Store, store_path: Path, messages: Messages, run: Run) -> None:
    advice = messages.text(run("gc", store_path, "--keep-last", "many", status=2).output)
    assert "--keep-last N" in run(*advice.says("casckpt gc --help").split()[1:]).output


@follows("cli/text.py:shortened", "(--json lists all)")
def test_json_output_contains_the_whole_of_a_list_that_was_shortened(
    saved: Store, store_path: Path, messages: Messages, run: Run
) -> None:
    steps = range(2, 24)
    for step in steps:
        saved.save({"x": step}, run="a", step=step)
    command = ("gc", store_path, "--keep-last", 1, "--dry-run")
    advice = messages.text(run(*command).output)
    assert len(json.loads(run(*command, advice.says("--json")).stdout)["forgotten"]) == len(steps)
