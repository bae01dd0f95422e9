"""Each hint has a case, and each case has a hint."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.support.hints import PACKAGE, Advice, Case, Hint, hints, hints_in, is_advice

HERE = Path(__file__).parent
ROOT = PACKAGE.parent

NOT_HERE = {
    "pip install": "a test installs nothing; that the extra exists is tested below",
    "install aiobotocore": "a test installs nothing",
    "install tzdata": "a test installs nothing",
    "pgrade": "a later version is not here yet",
}
"""Hints that no test can follow, and why."""

NO_HINTS = {
    Case("saving/save.py:_OwnState.request", "(check_replicas=…)"): "names what a rank gave",
    Case("frontends/serve/folders.py:", "bytes="): "is a regular expression",
    Case("frontends/trainer/resumed.py:", "all options are left unchanged"): "tells what was asked for",
    Case("frontends/trainer/resumed.py:", "the given schedule continues at the saved position"): "the same",
    Case("tensors/values.py:Shard.__repr__", "Shard(… of …, …)"): "is no message",
}
"""Messages that look like advice but are not, and why."""

_WATCHED = "tests/frontends/files/test_watching.py::test_"
FOLLOWED_ELSEWHERE: dict[Case, str] = {
    Case("frontends/files/watching.py:_Watch.stored", "(see --layout)"): (
        f"{_WATCHED}a_pattern_says_which_paths_are_checkpoints_and_of_which_step"
    ),
    Case("frontends/files/watching.py:_Watch._found", "See --layout"): (
        f"{_WATCHED}a_pattern_says_which_paths_are_checkpoints_and_of_which_step"
    ),
    Case("frontends/files/watching.py:_Watch._look", "pass a shorter --settle"): (
        f"{_WATCHED}nothing_is_stored_while_it_changes_more_often_than_it_may_and_after_a_while_this_is_told"
    ),
    Case("ranks/ranks.py:_tried", "set GLOO_SOCKET_IFNAME to a network interface"): (
        "tests/ranks/test_waiting.py::test_a_gloo_startup_failure_is_reported_on_all_ranks"
    ),
    Case("loading/load_plan.py:no_entry", "Map the whole mapping, with rename="): (
        "tests/loading/test_load_plan.py::test_renaming_individual_entries_is_rejected"
    ),
    Case("frontends/views/view.py:_check_no_wrappers", "call its save_pretrained"): (
        "tests/frontends/views/test_torchao_exports.py::test_a_quantized_model_is_exported_by_its_library"
    ),
    Case("frontends/interchange/safetensors/importing.py:_check_whole", "with consolidate_safetensors_files"): (
        "tests/frontends/interchange/safetensors/test_importing.py::"
        "test_parts_of_several_ranks_are_refused_with_two_ways_to_join_them"
    ),
    Case("frontends/interchange/safetensors/importing.py:import_safetensors", "call from_pretrained on the folder"): (
        "tests/frontends/views/test_torchao_exports.py::test_an_imported_folder_is_exported_with_the_same_tensors"
    ),
    Case("tensors/shards.py:_problem", "its values() and offsets()"): (
        "tests/loading/test_wrapped.py::test_unsupported_tensor_layouts_are_refused_at_the_start_with_advice"
    ),
    Case("tensors/shards.py:_problem", "q_scale() and q_zero_point()"): (
        "tests/loading/test_wrapped.py::test_unsupported_tensor_layouts_are_refused_at_the_start_with_advice"
    ),
    Case("tensors/shards.py:_problem", "q_per_channel_scales() and q_per_channel_zero_points()"): (
        "tests/loading/test_wrapped.py::test_unsupported_tensor_layouts_are_refused_at_the_start_with_advice"
    ),
    Case("loading/template.py:Template._check_packed", "call casckpt.load_model_and_optim_state with the model"): (
        "tests/frontends/training_state/test_packed.py::test_a_load_into_a_state_dict_refuses_statistics_that_differ"
    ),
    Case("frontends/training_state/loading.py:TrainingStateLoad._leave_packed", "quantize it as it was for the save"): (
        "tests/frontends/training_state/test_packed.py::test_a_4_bit_weight_that_does_not_fit_is_refused"
    ),
    Case("frontends/training_state/contents.py:_with", "is the state_dict of an optimizer"): (
        "tests/frontends/trainer/test_resumed.py::test_the_state_dict_of_an_optimizer_is_rejected_before_it_is_saved"
    ),
    Case("frontends/training_state/model.py:_live_state", "remove_hook_from_submodules(model) restores"): (
        "tests/frontends/test_accelerate.py::test_an_offloaded_model_is_rejected_and_can_be_restored"
    ),
    Case("frontends/accelerate.py:_Progress.refuse_hooks", "call accelerator.register_for_checkpointing"): (
        "tests/frontends/test_accelerate.py::test_hooks_of_save_state_are_refused_by_name_unless_they_are_ignored"
    ),
    Case("storage/local/store.py:_outsiders", "make a copy without links"): (
        "tests/hints/test_store.py::test_a_store_of_links_can_be_copied_as_doctor_advises"
    ),
    Case("frontends/interchange/torch_files.py:", "call torch_save_to_casckpt of casckpt.frontends.convert there"): (
        "tests/frontends/interchange/test_torch_files.py::test_the_error_for_a_class_from_the_saving_script_names_the_class"
    ),
    Case("storage/remote/s3/errors.py:", "set AWS_REQUEST_CHECKSUM_CALCULATION"): (
        "tests/storage/remote/s3/test_errors.py::test_the_settings_named_by_the_error_help_with_servers_without_checksums"
    ),
    Case("cli/commands/export.py:_listening", "for clients: export HF_ENDPOINT=…"): (
        "tests/frontends/serve/test_clients.py::test_from_pretrained_needs_only_an_endpoint"
    ),
    Case("frontends/megatron/folders.py:check_common", "restores the saved file"): (
        "tests/frontends/megatron/test_folders.py::test_a_failed_save_into_a_folder_keeps_the_old_checkpoint"
    ),
    Case(
        "frontends/training_state/optimizer.py:_state_of", "in a TrainState, or save its state_dict() with store.save"
    ): (
        "tests/frontends/training_state/test_optimizer.py::test_an_optimizer_with_additional_state_is_saved_as_an_object"
    ),
    Case("frontends/training_state/optimizer.py:local_optimizer", "create it without overlap_with_ddp"): (
        "tests/frontends/training_state/test_optimizer.py::test_the_zero_redundancy_optimizer_resumes_with_and_without_its_parts"
    ),
    Case("tensors/objects.py:encode_object", "pass allow_pickle=True to store it as torch.save does"): (
        "tests/frontends/training_state/test_optimizer.py::test_tensors_composed_of_tensors_are_stored_if_pickles_are_allowed"
    ),
    Case(
        "history/commits.py:gone", "Store.lease keeps a checkpoint"
    ): "tests/store/test_gone.py::test_following_the_advice_in_a_gone_error_helps",
}
"""Hints that a test elsewhere triggers and follows, and that test."""


@cache
def all_hints() -> tuple[Hint, ...]:
    """Return all hints of casckpt. They are read on demand, so that workers do not read them during collection."""
    return tuple(hints())


@cache
def cases() -> tuple[Case, ...]:
    """Return the cases of all tests. The tests are parsed and not imported, because some need packages that may be
    missing."""
    nodes = [node for path in sorted(HERE.glob("test_*.py")) for node in ast.walk(ast.parse(path.read_text()))]
    marks = [mark for node in nodes if isinstance(node, ast.FunctionDef) for mark in node.decorator_list]
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "follows"]
    return (*(Case(*map(ast.literal_eval, call.args)) for call in calls), *FOLLOWED_ELSEWHERE)


def test_every_hint_has_a_test_that_follows_it() -> None:
    missing = [
        str(hint)
        for hint in all_hints()
        if not any(case.covers(hint) for case in cases())
        and not any(text in hint.text for text in NOT_HERE)
        and not any(case.covers(hint) for case in NO_HINTS)
    ]
    assert not missing, "\n".join(missing)


def test_every_case_has_a_hint() -> None:
    stale = [case for case in (*cases(), *NO_HINTS) if not any(case.covers(hint) for hint in all_hints())]
    assert not stale, "\n".join(map(str, stale))
    assert all(any(text in hint.text for hint in all_hints()) for text in NOT_HERE)


def test_every_test_listed_for_hints_outside_this_folder_exists() -> None:
    for test in FOLLOWED_ELSEWHERE.values():
        path, _, name = test.partition("::")
        named = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in named, test


JUDGED_BY_SUCCESS = {
    "test_a_damaged_record_can_be_replaced_or_its_checkpoint_forgotten_as_advised",
    "test_a_method_that_lists_no_tensor_can_be_corrected_as_advised",
    "test_a_region_that_was_found_out_by_a_redirect_can_be_set_as_advised",
    "test_a_registered_function_can_rebuild_an_unknown_wrapper",
    "test_a_store_can_load_a_checkpoint_with_wrappers_as_advised",
    "test_an_average_that_cannot_continue_begins_in_a_different_folder",
    "test_credentials_can_be_passed_outside_the_url_as_advised",
    "test_gc_works_on_storage_that_replaces_objects_if_there_is_a_single_writer",
    "test_signatures_are_verified_and_created",
    "test_the_force_option_lets_an_export_overwrite_a_url",
    "test_the_megatron_patch_can_be_undone_before_other_saves_as_advised",
}
"""Tests whose advice has no other result than that the call, or `casckpt verify`, succeeds."""


def test_every_test_that_follows_a_hint_judges_the_result() -> None:
    """A call that succeeds may have done harm: a test must look at what it did."""
    unjudged = set()
    for path in sorted(HERE.glob("test_*.py")):
        functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        for name, function in functions.items():
            called = [functions[n.id] for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in functions]
            below = [node for one in (function, *called) for node in ast.walk(one)]
            judges = any(isinstance(node, ast.Assert) or getattr(node, "attr", "") == "raises" for node in below)
            if not judges and any(ast.unparse(mark).startswith("follows(") for mark in function.decorator_list):
                unjudged.add(name)
    assert unjudged == JUDGED_BY_SUCCESS


def test_every_extra_that_a_hint_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [hint.text.partition("'casckpt[")[2].partition("]")[0] for hint in all_hints() if "'casckpt[" in hint.text]
    assert named
    assert {name for name in named if name != "…"} <= set(extras)


@pytest.mark.parametrize(
    "text",
    [
        "x is taken; pass overwrite=True",
        "see `casckpt list`",
        "give --force",
        "set GLOO_SOCKET_IFNAME",
        "store.read takes it",
        "call mark_as_sharded() first",
        "pass the reader to dcp.load",
        "it belongs into exclude_keys",
        "pass a different cache_dir",
    ],
)
def test_a_message_counts_as_advice_if_it_names_something_to_use(text: str) -> None:
    assert is_advice(text)


@pytest.mark.parametrize("text", ["jobs=… is not valid: pass a positive number", "no name is given", "casckpt would"])
def test_a_message_that_only_states_an_error_does_not_count_as_advice(text: str) -> None:
    assert not is_advice(text)


def test_hints_are_found_in_errors_and_log_messages_and_their_parts() -> None:
    source = '''
"""A docstring: pass it=True."""
_ADVICE = "pass " + "this=True"

class A:
    def f(self, x):
        if x:
            raise ValueError(f"{x} is wrong; " f"see `casckpt list {x}`")
        log.warning("%s: pass %s", x, "that=1 instead")
'''
    found = list(hints_in("m.py", source))
    assert found == [
        Hint("m.py:", "pass this=True", "part"),
        Hint("m.py:A.f", "… is wrong; see `casckpt list …`", "raise"),
        Hint("m.py:A.f", "that=1 instead", "log"),
    ]


def test_a_test_can_follow_only_advice_that_the_message_contains() -> None:
    advice = Advice("pass rename={'a': 'b'} or unread=\"ignore\" (or x=1): see `casckpt tag STORE NAME`")
    assert advice.argument("rename") == {"rename": {"a": "b"}}
    assert advice.argument("unread") == {"unread": "ignore"}
    assert advice.command("tag", STORE="there") == ["tag", "there", "NAME"]
    with pytest.raises(AssertionError):
        advice.argument("strict")
    with pytest.raises(AssertionError):
        advice.command("list")
