"""Every name of Megatron's surface is there, flat, and has a test."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from casckpt.frontends import megatron

SURFACE = {
    "ShardedTensor": "key data dtype local_shape global_shape global_offset axis_fragmentations replica_id "
    "prepend_axis_num allow_shape_mismatch flattened_range from_rank_offsets from_rank_offsets_flat global_slice "
    "global_coordinates local_coordinates max_allowed_chunks without_data init_data",
    "ShardedObject": "key data global_shape global_offset replica_id unique_key without_data",
    "ShardedTensorFactory": "key data build_fn merge_fn replica_id build without_data",
    "LocalNonpersistentObject": "unwrap",
    "LocalNonpersitentObject": "unwrap",
    "ShardedBase": "without_data",
    "CheckpointingConfig": "sharded_backend sharded_backend_version common_backend common_backend_version",
}
FUNCTIONS = (
    "apply_factories apply_factory_merges is_main_replica save load load_common_state_dict load_plain_tensors "
    "load_tensors_metadata load_sharded_objects load_sharded_metadata validate_sharding_integrity "
    "get_optim_param_to_id_map get_param_id_to_sharded_param_map make_sharded_optimizer_tensor "
    "optim_state_to_sharding_state check_is_distributed_checkpoint maybe_load_config save_config "
    "dict_list_map_inplace dict_list_map_outplace dict_map dict_map_with_key diff extract_matching_values "
    "inspect_types map_reduce merge nested_items_iter nested_values add_prefix_for_sharding apply_prefix_mapping "
    "replace_prefix_for_sharding extract_nonpersistent extract_sharded_base extract_sharded_tensors "
    "extract_sharded_tensors_and_factories extract_sharded_tensors_or_nonpersistent load_content_metadata"
)
ARGUMENTS = {
    "save": "sharded_state_dict checkpoint_dir sharded_strategy common_strategy validate_access_integrity "
    "async_sharded_save preprocess_common_before_consistancy_check content_metadata",
    "load": "sharded_state_dict checkpoint_dir sharded_strategy common_strategy validate_access_integrity strict",
}
TESTS = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))


@pytest.mark.parametrize("name", SURFACE)
def test_a_class_has_its_fields_and_methods(name: str) -> None:
    kind = getattr(megatron, name)
    there = {*dir(kind), *inspect.signature(kind).parameters}
    assert set(SURFACE[name].split()) <= there


@pytest.mark.parametrize("name", [*FUNCTIONS.split(), *SURFACE, "CheckpointingException", "StrictHandling"])
def test_a_name_is_there_and_is_tested(name: str) -> None:
    assert callable(getattr(megatron, name))
    assert name in megatron.__all__
    assert re.search(rf"\b(?:megatron\.)?{name}\b", TESTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_the_names_order_and_defaults_of_megatron(name: str) -> None:
    found = inspect.signature(getattr(megatron, name)).parameters
    wanted = ARGUMENTS[name].split()
    assert list(found)[: len(wanted)] == wanted
    assert found["validate_access_integrity"].default is True
    assert found["sharded_strategy"].default is found["common_strategy"].default is None


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
