"""The surface of Megatron's ``dist_checkpointing``: every name exists at the top level and has a test.

`TABLE` maps each name to its test in this folder. That test must exist and assert something. It must use the name,
directly or through functions of its module or of tests/support.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from casckpt.frontends import megatron
from tests.support.megatron_core import core
from tests.support.scripts import run_script

TABLE = """
ShardedTensor                               test_mapping.test_contradictory_fields_are_rejected
ShardedTensor.key                           test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.data                          test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.dtype                         test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.local_shape                   test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.global_shape                  test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.global_offset                 test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.axis_fragmentations           test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.replica_id                    test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.prepend_axis_num              test_resharding.test_any_sharding_loads_from_any_other
ShardedTensor.allow_shape_mismatch          test_loading.test_a_different_shape_is_padded_and_truncated
ShardedTensor.flattened_range               test_mapping.test_a_flat_range_refers_to_the_local_shape
ShardedTensor.from_rank_offsets             test_mapping.test_a_part_has_the_fields_that_megatron_defines
ShardedTensor.from_rank_offsets_flat        test_mapping.test_flat_data_of_the_wrong_size_is_rejected
ShardedTensor.global_slice                  test_mapping.test_the_coordinates_of_a_flat_part_match_its_elements
ShardedTensor.global_coordinates            test_mapping.test_the_coordinates_of_a_flat_part_match_its_elements
ShardedTensor.local_coordinates             test_mapping.test_the_coordinates_of_a_flat_part_match_its_elements
ShardedTensor.max_allowed_chunks            test_mapping.test_an_axis_that_cannot_be_divided_evenly_is_rejected
ShardedTensor.narrow                        test_mapping_parts.test_all_parts_together_form_the_narrowed_tensor
ShardedTensor.without_data                  test_mapping.test_parts_objects_and_factories_are_instances_of_sharded_base
ShardedTensor.init_data                     test_mapping.test_the_data_of_a_part_is_created_only_if_it_is_missing
ShardedObject                               test_mapping.test_an_object_with_one_offset_too_few_is_rejected
ShardedObject.key                           test_mapping.test_an_object_has_the_fields_that_megatron_defines
ShardedObject.data                          test_mapping.test_an_object_has_the_fields_that_megatron_defines
ShardedObject.global_shape                  test_mapping.test_an_object_has_the_fields_that_megatron_defines
ShardedObject.global_offset                 test_mapping.test_an_object_has_the_fields_that_megatron_defines
ShardedObject.replica_id                    test_mapping.test_an_object_has_the_fields_that_megatron_defines
ShardedObject.unique_key                    test_mapping.test_each_sharded_object_has_a_unique_key
ShardedObject.without_data                  test_mapping.test_parts_objects_and_factories_are_instances_of_sharded_base
ShardedTensorFactory                      test_loading.test_a_factory_with_an_unexpected_part_is_omitted_entirely
ShardedTensorFactory.key                    test_mapping.test_a_factory_has_the_fields_that_megatron_defines
ShardedTensorFactory.data                   test_mapping.test_a_factory_has_the_fields_that_megatron_defines
ShardedTensorFactory.build_fn               test_mapping.test_a_factory_has_the_fields_that_megatron_defines
ShardedTensorFactory.merge_fn               test_mapping.test_a_factory_has_the_fields_that_megatron_defines
ShardedTensorFactory.replica_id             test_mapping.test_a_factory_has_the_fields_that_megatron_defines
ShardedTensorFactory.flattened_range        test_mapping.test_a_factory_has_the_fields_that_megatron_defines
ShardedTensorFactory.build                  test_mapping.test_a_factory_calls_its_function_with_three_or_four_arguments
ShardedTensorFactory.merge                  test_mapping.test_a_factory_has_the_fields_that_megatron_defines
ShardedTensorFactory.without_data           test_mapping.test_parts_objects_and_factories_are_instances_of_sharded_base
ShardedBase                                 test_mapping.test_parts_objects_and_factories_are_instances_of_sharded_base
LocalNonpersistentObject                    test_loading.test_nonpersistent_values_are_returned
LocalNonpersistentObject.unwrap             test_mapping.test_a_local_nonpersistent_object_has_two_names
LocalNonpersitentObject                     test_mapping.test_a_local_nonpersistent_object_has_two_names
LocalNonpersitentObject.unwrap              test_mapping.test_a_local_nonpersistent_object_has_two_names
StateDict                                   test_mapping.test_the_type_names_for_annotations_exist
CommonStateDict                             test_mapping.test_the_type_names_for_annotations_exist
ShardedStateDict                            test_mapping.test_the_type_names_for_annotations_exist
ReplicaId                                   test_mapping.test_the_type_names_for_annotations_exist
FactoryBuildFn                              test_mapping.test_the_type_names_for_annotations_exist
FactoryMergeFn                              test_mapping.test_the_type_names_for_annotations_exist
apply_factories                             test_mapping.test_factories_are_replaced_in_place_and_undone
apply_factory_merges                        test_mapping.test_a_factory_outside_a_container_is_rejected
is_main_replica                             test_mapping.test_the_main_replica_has_the_id_zero_or_all_zeros
save                                        test_gpt.test_a_model_loads_in_a_different_configuration
load                                        test_loading.test_tensors_are_filled_in_place_and_plain_values_are_ignored
load_common_state_dict                      test_stored.test_parts_of_a_checkpoint_can_be_loaded
load_plain_tensors                          test_stored.test_parts_of_a_checkpoint_can_be_loaded
load_tensors_metadata                       test_stored.test_parts_of_a_checkpoint_can_be_loaded
load_sharded_objects                        test_loading.test_objects_are_replaced_in_place
load_sharded_metadata                       test_stored.test_parts_of_a_checkpoint_can_be_loaded
load_content_metadata                       test_stored.test_parts_of_a_checkpoint_can_be_loaded
validate_sharding_integrity                 test_integrity.test_validation_gathers_metadata_if_none_is_passed
StrictHandling                              test_loading.test_each_strictness_handles_missing_and_unexpected_keys
StrictHandling.requires_explicit_ckpt_mismatch_check test_loading.test_each_strictness_agrees_with_megatron_core
StrictHandling.requires_global_app_metadata test_loading.test_each_strictness_agrees_with_megatron_core
StrictHandling.requires_returning_mismatch_keys test_loading.test_each_strictness_agrees_with_megatron_core
parse_strict_flag                           test_loading.test_each_strictness_agrees_with_megatron_core
AsyncRequest                                test_saving.test_a_background_save_stores_the_same_values
get_optim_param_to_id_map                   test_mapping.test_parameters_are_numbered_and_tied_ones_share_a_number
get_param_id_to_sharded_param_map           test_mapping.test_parameters_are_found_by_identity
make_sharded_optimizer_tensor               test_mapping.test_state_with_the_wrong_shape_is_rejected
optim_state_to_sharding_state               test_mapping.test_a_whole_optimizer_is_saved_and_loaded
CheckpointingConfig                         test_config.test_a_checkpoint_contains_the_config_of_its_save
CheckpointingConfig.sharded_backend         test_config.test_a_config_has_the_fields_that_megatron_defines
CheckpointingConfig.sharded_backend_version test_config.test_a_config_has_the_fields_that_megatron_defines
CheckpointingConfig.common_backend          test_config.test_a_config_has_the_fields_that_megatron_defines
CheckpointingConfig.common_backend_version  test_config.test_a_config_has_the_fields_that_megatron_defines
CheckpointingException                      test_errors.test_errors_are_also_casckpt_errors
check_is_distributed_checkpoint             test_config.test_an_invalid_config_is_rejected
maybe_load_config                           test_config.test_an_invalid_config_is_rejected
save_config                                 test_config.test_a_config_that_was_written_is_read_back
dict_list_map_inplace                       test_nesting.test_maps_work_in_place_and_into_new_containers
dict_list_map_outplace                      test_nesting.test_maps_work_in_place_and_into_new_containers
dict_map                                    test_nesting.test_dict_map_enters_lists_and_passes_the_innermost_key
dict_map_with_key                           test_nesting.test_dict_map_enters_lists_and_passes_the_innermost_key
diff                                        test_nesting.test_diff_returns_paths_and_types
extract_matching_values                     test_nesting.test_extract_splits_and_closes_the_gaps_of_lists
inspect_types                               test_nesting.test_inspect_types_prints_a_tree
map_reduce                                  test_nesting.test_map_reduce_groups_values_before_it_reduces_them
merge                                       test_nesting.test_merge_writes_the_second_dict_into_the_first
nested_items_iter                           test_nesting.test_leaves_are_in_order_and_tuples_are_leaves
nested_values                               test_nesting.test_leaves_are_in_order_and_tuples_are_leaves
add_prefix_for_sharding                     test_kinds.test_a_prefix_is_added_to_every_key
apply_prefix_mapping                        test_kinds.test_the_first_matching_prefix_is_replaced
replace_prefix_for_sharding                 test_kinds.test_replacing_a_prefix_that_a_key_lacks_is_rejected
extract_nonpersistent                       test_kinds.test_each_extract_function_selects_one_kind_of_part
extract_sharded_base                        test_kinds.test_each_extract_function_selects_one_kind_of_part
extract_sharded_tensors                     test_kinds.test_each_extract_function_selects_one_kind_of_part
extract_sharded_tensors_and_factories       test_kinds.test_each_extract_function_selects_one_kind_of_part
extract_sharded_tensors_or_nonpersistent    test_kinds.test_each_extract_function_selects_one_kind_of_part
CasSaveShardedStrategy                      test_strategies.test_megatron_core_loads_in_a_new_parallel_configuration
CasLoadShardedStrategy                      test_strategies.test_megatron_core_loads_in_a_new_parallel_configuration
register_strategies                         test_strategies.test_megatron_core_finds_the_strategy_that_casckpt_registers
remove_sharded_tensors                      test_dropping.test_keys_with_a_prefix_are_removed
install                                     test_training_loop.test_the_loop_saves_into_the_store_and_resumes
Installed                                   test_training_loop.test_undoing_the_patch_restores_the_original_functions
Installed.undo                              test_training_loop.test_undoing_the_patch_restores_the_original_functions
write_folder                                test_folders.test_a_folder_is_created_for_an_earlier_save
"""
ROWS: dict[str, str] = dict(line.split() for line in TABLE.strip().splitlines())


TESTS = Path(__file__).parents[2]


@cache
def functions(module: str) -> dict[str, ast.FunctionDef]:
    """Return functions at the top of a test module, and of the modules of tests/support that it imports."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text())
    imported = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    support = [TESTS.parent / f"{name.replace('.', '/')}.py" for name in imported if name.startswith("tests.support.")]
    trees = [*(ast.parse(path.read_text()) for path in support), tree]
    return {node.name: node for one in trees for node in one.body if isinstance(node, ast.FunctionDef)}


def words(node: ast.AST) -> Iterator[str]:
    """Yield the names in a function: variables, attributes, arguments (including fixtures), and strings."""
    for part in ast.walk(node):
        for name in ("id", "attr", "arg", "value"):
            word = getattr(part, name, None)
            if isinstance(word, str):
                yield word


def reached(module: str, name: str) -> list[ast.FunctionDef]:
    """Return a function, and all functions of its module that it uses."""
    found, queue = {}, [name]
    while queue:
        function = functions(module)[queue.pop()]
        found[function.name] = function
        queue += [word for word in words(function) if word in functions(module) and word not in found]
    return list(found.values())


@pytest.mark.parametrize("name", ROWS)
def test_every_name_exists_and_has_a_test(name: str) -> None:
    core()  # ignores its warnings
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


def test_the_table_lists_every_public_name() -> None:
    assert {*megatron.__all__, *dir(megatron)} <= ROWS.keys()
    for name in ("ShardedTensor", "ShardedObject", "ShardedTensorFactory", "CheckpointingConfig"):
        assert {f"{name}.{field.name}" for field in fields(getattr(megatron, name))} <= ROWS.keys()


OURS_ALONE = {"fully_parallel", "process_group", "no_dist", "allow_pickle", "attachments", "overwrite", "options"}
# the first communicates on its own; the second is a casckpt error
OTHER = {
    "validate_sharding_integrity",
    "CheckpointingException",
}


def member(of: Any, name: str) -> Any:
    for part in name.split("."):
        of = getattr(of, part, None)
    return of


def parameters(function: Any) -> dict[str, Any]:
    """Return names and defaults, in order. A default that is a function or an enum appears by its name."""
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


def test_megatron_core_is_not_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "for name in [*sys.modules]:\n"
        "    if name.startswith(('megatron.', 'casckpt.frontends.megatron')): del sys.modules[name]\n"
        "sys.modules['megatron'] = None\n"
        "from casckpt.frontends.megatron import *\n"
        "import casckpt.frontends.megatron as m; assert 'CasSaveShardedStrategy' in dir(m)\n"
        "try: m.CasSaveShardedStrategy\nexcept ImportError: print('none')\n"
    )
    assert run_script(script) == (0, "none\n", "")


def test_unknown_names_raise_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatron.nothing
