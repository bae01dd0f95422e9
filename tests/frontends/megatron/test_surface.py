"""The surface of Megatron's ``dist_checkpointing``: every name is there, flat, and a test says how it behaves.

`TABLE` names for each the test of this folder. That test must be there, use the name, by itself or by what it calls in
its module or in tests/support, and assert something.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from casckpt.frontends import megatron
from tests.support.megatron_core import core

TABLE = """
ShardedTensor                               test_mapping.test_fields_that_contradict_each_other
ShardedTensor.key                           test_mapping.test_the_fields_of_a_part
ShardedTensor.data                          test_mapping.test_the_fields_of_a_part
ShardedTensor.dtype                         test_mapping.test_the_fields_of_a_part
ShardedTensor.local_shape                   test_mapping.test_the_fields_of_a_part
ShardedTensor.global_shape                  test_mapping.test_the_fields_of_a_part
ShardedTensor.global_offset                 test_mapping.test_the_fields_of_a_part
ShardedTensor.axis_fragmentations           test_mapping.test_the_fields_of_a_part
ShardedTensor.replica_id                    test_mapping.test_the_fields_of_a_part
ShardedTensor.prepend_axis_num              test_resharding.test_any_cut_loads_from_any_other
ShardedTensor.allow_shape_mismatch          test_loading.test_another_shape_is_padded_and_cut
ShardedTensor.flattened_range               test_mapping.test_a_flat_part_counts_in_its_local_shape
ShardedTensor.from_rank_offsets             test_mapping.test_the_fields_of_a_part
ShardedTensor.from_rank_offsets_flat        test_mapping.test_flat_data_that_does_not_fit
ShardedTensor.global_slice                  test_mapping.test_coordinates_are_those_of_the_elements
ShardedTensor.global_coordinates            test_mapping.test_coordinates_are_those_of_the_elements
ShardedTensor.local_coordinates             test_mapping.test_coordinates_are_those_of_the_elements
ShardedTensor.max_allowed_chunks            test_mapping.test_an_axis_that_does_not_divide
ShardedTensor.narrow                        test_parts.test_all_parts_together_are_the_narrowed_tensor
ShardedTensor.without_data                  test_mapping.test_what_has_a_key_is_a_sharded_base
ShardedTensor.init_data                     test_mapping.test_data_is_made_only_where_there_is_none
ShardedObject                               test_mapping.test_an_object_with_one_offset_too_few_is_refused
ShardedObject.key                           test_mapping.test_the_fields_of_an_object
ShardedObject.data                          test_mapping.test_the_fields_of_an_object
ShardedObject.global_shape                  test_mapping.test_the_fields_of_an_object
ShardedObject.global_offset                 test_mapping.test_the_fields_of_an_object
ShardedObject.replica_id                    test_mapping.test_the_fields_of_an_object
ShardedObject.unique_key                    test_mapping.test_an_object_has_a_key_of_its_own
ShardedObject.without_data                  test_mapping.test_what_has_a_key_is_a_sharded_base
ShardedTensorFactory                      test_strictness.test_a_factory_of_which_a_part_is_unexpected_is_left_out_whole
ShardedTensorFactory.key                    test_mapping.test_the_fields_of_a_factory
ShardedTensorFactory.data                   test_mapping.test_the_fields_of_a_factory
ShardedTensorFactory.build_fn               test_mapping.test_the_fields_of_a_factory
ShardedTensorFactory.merge_fn               test_mapping.test_the_fields_of_a_factory
ShardedTensorFactory.replica_id             test_mapping.test_the_fields_of_a_factory
ShardedTensorFactory.flattened_range        test_mapping.test_the_fields_of_a_factory
ShardedTensorFactory.build                  test_mapping.test_a_factory_builds_with_three_arguments_or_four
ShardedTensorFactory.merge                  test_mapping.test_the_fields_of_a_factory
ShardedTensorFactory.without_data           test_mapping.test_what_has_a_key_is_a_sharded_base
ShardedBase                                 test_mapping.test_what_has_a_key_is_a_sharded_base
LocalNonpersistentObject                    test_loading.test_what_is_not_persistent_is_put_back
LocalNonpersistentObject.unwrap             test_mapping.test_what_is_not_saved_has_two_spellings
LocalNonpersitentObject                     test_mapping.test_what_is_not_saved_has_two_spellings
LocalNonpersitentObject.unwrap              test_mapping.test_what_is_not_saved_has_two_spellings
StateDict                                   test_mapping.test_there_are_names_for_annotations
CommonStateDict                             test_mapping.test_there_are_names_for_annotations
ShardedStateDict                            test_mapping.test_there_are_names_for_annotations
ReplicaId                                   test_mapping.test_there_are_names_for_annotations
FactoryBuildFn                              test_mapping.test_there_are_names_for_annotations
FactoryMergeFn                              test_mapping.test_there_are_names_for_annotations
apply_factories                             test_mapping.test_factories_are_replaced_in_place_and_undone
apply_factory_merges                        test_mapping.test_a_factory_without_a_place_is_refused
is_main_replica                             test_mapping.test_the_main_replica_is_zero_or_all_zeros
save                                        test_gpt.test_it_loads_in_another_configuration
load                                        test_loading.test_tensors_are_filled_in_place_and_plain_values_are_ignored
load_common_state_dict                      test_reading.test_parts_of_a_checkpoint
load_plain_tensors                          test_reading.test_parts_of_a_checkpoint
load_tensors_metadata                       test_reading.test_parts_of_a_checkpoint
load_sharded_objects                        test_loading.test_objects_are_replaced_in_place
load_sharded_metadata                       test_reading.test_parts_of_a_checkpoint
load_content_metadata                       test_reading.test_parts_of_a_checkpoint
validate_sharding_integrity                 test_integrity.test_validation_gathers_by_itself
StrictHandling                              test_strictness.test_strictness
StrictHandling.requires_explicit_ckpt_mismatch_check test_strictness.test_what_a_strictness_requires
StrictHandling.requires_global_app_metadata test_strictness.test_what_a_strictness_requires
StrictHandling.requires_returning_mismatch_keys test_strictness.test_what_a_strictness_requires
parse_strict_flag                           test_strictness.test_what_a_strictness_requires
AsyncRequest                                test_background.test_in_the_background
get_optim_param_to_id_map                   test_optimizer.test_parameters_are_numbered_and_tied_ones_have_one_number
get_param_id_to_sharded_param_map           test_optimizer.test_parameters_are_found_by_identity
make_sharded_optimizer_tensor               test_optimizer.test_state_of_another_shape_is_refused
optim_state_to_sharding_state               test_optimizer.test_a_whole_optimizer_goes_round
CheckpointingConfig                         test_config.test_the_config_of_what_was_saved
CheckpointingConfig.sharded_backend         test_config.test_the_fields_of_a_config
CheckpointingConfig.sharded_backend_version test_config.test_the_fields_of_a_config
CheckpointingConfig.common_backend          test_config.test_the_fields_of_a_config
CheckpointingConfig.common_backend_version  test_config.test_the_fields_of_a_config
CheckpointingException                      test_errors.test_errors_are_those_of_casckpt_too
check_is_distributed_checkpoint             test_config.test_a_config_that_is_none
maybe_load_config                           test_config.test_a_config_that_is_none
save_config                                 test_config.test_a_config_is_written_where_none_is
dict_list_map_inplace                       test_nesting.test_maps_in_place_and_into_new_containers
dict_list_map_outplace                      test_nesting.test_maps_in_place_and_into_new_containers
dict_map                                    test_nesting.test_dict_map_descends_into_lists_and_gives_the_innermost_key
dict_map_with_key                           test_nesting.test_dict_map_descends_into_lists_and_gives_the_innermost_key
diff                                        test_nesting.test_diff_gives_paths_and_types
extract_matching_values                     test_nesting.test_extract_splits_and_closes_the_gaps_of_lists
inspect_types                               test_nesting.test_inspect_types_prints_a_tree
map_reduce                                  test_nesting.test_map_reduce_groups_then_reduces
merge                                       test_nesting.test_merge_puts_the_second_into_the_first
nested_items_iter                           test_nesting.test_leaves_come_in_order_and_tuples_are_leaves
nested_values                               test_nesting.test_leaves_come_in_order_and_tuples_are_leaves
add_prefix_for_sharding                     test_kinds.test_a_prefix_goes_before_every_key
apply_prefix_mapping                        test_kinds.test_the_first_prefix_that_fits_is_replaced
replace_prefix_for_sharding                 test_kinds.test_a_prefix_that_some_key_lacks_is_refused
extract_nonpersistent                       test_kinds.test_parts
extract_sharded_base                        test_kinds.test_parts
extract_sharded_tensors                     test_kinds.test_parts
extract_sharded_tensors_and_factories       test_kinds.test_parts
extract_sharded_tensors_or_nonpersistent    test_kinds.test_parts
CasSaveShardedStrategy                      test_strategies.test_core_loads_in_another_configuration
CasLoadShardedStrategy                      test_strategies.test_core_loads_in_another_configuration
register_strategies                         test_strategies.test_core_finds_the_strategy_that_is_registered
remove_sharded_tensors                      test_dropping.test_what_begins_with_a_prefix_is_removed
forget_removed                              test_removing.test_what_lies_in_folders_that_are_gone_is_forgotten
install                                     test_training_loop.test_the_loop_saves_into_the_store_and_resumes
Installed                                   test_training_loop.test_all_is_as_before_when_it_is_undone
Installed.undo                              test_training_loop.test_all_is_as_before_when_it_is_undone
write_folder                                test_folders.test_a_folder_made_of_what_our_own_save_wrote
"""
ROWS: dict[str, str] = dict(line.split() for line in TABLE.strip().splitlines())


TESTS = Path(__file__).parents[2]


@cache
def functions(module: str) -> dict[str, ast.FunctionDef]:
    """The functions at the top of a test module, and of the modules of tests/support that it imports from."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text())
    imported = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    support = [TESTS.parent / f"{name.replace('.', '/')}.py" for name in imported if name.startswith("tests.support.")]
    trees = [*(ast.parse(path.read_text()) for path in support), tree]
    return {node.name: node for one in trees for node in one.body if isinstance(node, ast.FunctionDef)}


def words(node: ast.AST) -> Iterator[str]:
    """What it names: variables, attributes, arguments (of fixtures, too), and texts."""
    for part in ast.walk(node):
        for name in ("id", "attr", "arg", "value"):
            word = getattr(part, name, None)
            if isinstance(word, str):
                yield word


def reached(module: str, name: str) -> list[ast.FunctionDef]:
    """A function and all that it uses of its module."""
    found, queue = {}, [name]
    while queue:
        function = functions(module)[queue.pop()]
        found[function.name] = function
        queue += [word for word in words(function) if word in functions(module) and word not in found]
    return list(found.values())


@pytest.mark.parametrize("name", ROWS)
def test_a_name_is_there_and_a_test_says_how_it_behaves(name: str) -> None:
    core()  # with its warnings ignored
    owner, _, member = name.rpartition(".")
    kind: Any = getattr(megatron, owner) if owner else megatron
    assert hasattr(kind, member) or member in {field.name for field in fields(kind)}
    module, _, test = ROWS[name].partition(".")
    assert test.startswith("test_")
    assert test in functions(module), f"{ROWS[name]} does not exist"
    used = reached(module, test)
    assert any(member in words(function) for function in used), f"{ROWS[name]} does not use {name}"
    asserting = {word for function in used for word in words(function)} & {"raises"}
    assert asserting or any(isinstance(part, ast.Assert) for function in used for part in ast.walk(function))


def test_nothing_public_is_missing_in_the_table() -> None:
    assert {*megatron.__all__, *dir(megatron)} <= ROWS.keys()
    for name in ("ShardedTensor", "ShardedObject", "ShardedTensorFactory", "CheckpointingConfig"):
        assert {f"{name}.{field.name}" for field in fields(getattr(megatron, name))} <= ROWS.keys()


OURS_ALONE = {"fully_parallel", "process_group", "no_dist", "allow_pickle", "attachments", "overwrite", "options"}
OTHER = {"validate_sharding_integrity", "CheckpointingException"}  # it gathers by itself; it is an error of casckpt


def member(of: Any, name: str) -> Any:
    for part in name.split("."):
        of = getattr(of, part, None)
    return of


def parameters(function: Any) -> dict[str, Any]:
    """Names and defaults, in order; of a default that is a function or an enum its name."""
    found = inspect.signature(function).parameters.values()
    return {one.name: getattr(one.default, "name", getattr(one.default, "__name__", one.default)) for one in found}


@pytest.mark.parametrize(
    "module", ["mapping", "dict_utils", "utils", "serialization", "optimizer", "core", "validation"]
)
def test_arguments_have_the_names_order_and_defaults_of_megatron(module: str) -> None:
    theirs = core(f".{module}")
    names = [name for name in ROWS if getattr(member(theirs, name), "__module__", None) == theirs.__name__]
    assert names
    for name in set(names) - OTHER:
        wanted, found = parameters(member(theirs, name)), parameters(member(megatron, name))
        ours = [(key, value) for key, value in found.items() if key not in OURS_ALONE]
        assert ours == list(wanted.items()) or name == "ShardedTensor.from_rank_offsets_flat", name


def test_megatron_core_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from casckpt.frontends.megatron import *\n"
        "import casckpt.frontends.megatron as m; assert 'CasSaveShardedStrategy' in dir(m)\n"
        "try: m.CasSaveShardedStrategy\nexcept ImportError: print('none')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatron.nothing
