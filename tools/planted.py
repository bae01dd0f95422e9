"""Bugs to plant one at a time. Each breaks a guarantee in one location, and names a test that detects it."""

from __future__ import annotations

from _places import Planted

BUGS: dict[str, tuple[str, str, str, str]] = {
    "a damaged copy is dropped without a lock": (
        "BlobReader.distrust",
        'failed instead of returning wrong bytes.\n        """\n        with self._lock:',
        'failed instead of returning wrong bytes.\n        """\n        if True:',
        "tests/loading/test_blob_readers.py::test_a_damaged_cached_blob_is_dropped_once_and_read_from_the_store",
    ),
    "the status of a store names what a gc deletes meanwhile": (
        "known_damage",
        "list_commits(repo).placed() if wrong else ()",
        "use.readable",
        "tests/upkeep/test_status.py::test_what_a_gc_deletes_meanwhile_is_not_damaged",
    ),
    "the status of a bucket misses a manifest that this host has read": (
        "known_damage",
        " or objects.get(key) != commit.committed.manifest_bytes:",
        ":",
        "tests/upkeep/test_status.py::test_damage_is_named",
    ),
    "autograd does not notice the writes of a load": (
        "EntryReader._fill",
        "note_writes(written)",
        "pass",
        "tests/loading/test_load_autograd.py::test_an_autograd_graph_with_values_from_before_a_load_is_rejected",
    ),
    "a second consumer of the same bytes gets none": (
        "EntryReader._items",
        "items[name].takers.append(taker)",
        "pass",
        "tests/loading/test_load.py::test_a_load_with_cast_writes_into_any_layout",
    ),
    "objects are not loaded": (
        "LoadPlan.add",
        "self._add_object(key, stored)",
        "pass",
        "tests/loading/test_load.py::test_every_value_is_filled_in_place_or_replaced",
    ),
    "keys that a template lacks are not reported": (
        "Template._add",
        "return errors, lacking",
        "return (errors, errors)",
        "tests/loading/test_template.py::test_a_load_that_would_fill_nothing_raises_an_error_unless_allowed",
    ),
    "a part of a read begins at the start of the read": (
        "_targets",
        "offset > start",
        "False",
        "tests/loading/test_load_autograd.py::test_an_autograd_graph_over_shard_data_is_rejected",
    ),
    "every data loader is asked for its position": (
        "_Loader.state_dict",
        "if self._stateful else None",
        "",
        "tests/frontends/test_accelerate.py::test_a_data_loader_resumes_at_its_position",
    ),
    "Accelerate's checkpointer does not wait for its last save": (
        "AcceleratorCheckpointer.close",
        "self.checkpointer.close()",
        "pass",
        "tests/frontends/test_accelerate.py::test_close_warns_about_unsaved_steps",
    ),
    "a folder of OLMo-core is not recognized by its files": (
        "_kind_of_folder",
        'has(OLMO_METADATA) and has("rank_0.safetensors")',
        "False",
        "tests/frontends/interchange/test_olmo_import.py::test_an_olmo_core_folder_is_imported",
    ),
    "a file of the old torch.save is not recognized": (
        "_kind_of_file",
        "or head[:2] in ",
        "or head[:] in ",
        "tests/frontends/interchange/test_torch_files.py::test_the_kind_of_a_path_is_detected_from_its_content",
    ),
    "a set in DCP's metadata may hold anything": (
        "_short_set",
        "not all(isinstance(item, str | int | float | bytes | None) for item in listed)",
        "False",
        "tests/frontends/dcp/test_folder_described.py::test_a_set_in_metadata_can_contain_only_strings_and_numbers",
    ),
    "anything with offsets and sizes counts as a chunk of DCP": (
        "_is_inside",
        "not isinstance(chunk, dcp.ChunkStorageMetadata) or not _is_shape(offsets) or not _is_shape(sizes",
        "(not _is_shape(offsets) or not _is_shape(sizes)",
        "tests/frontends/dcp/test_folder_described.py::test_invalid_metadata_raises_an_error",
    ),
    "the size of an exported chunk is given in elements": (
        "EntrySlice.nbytes",
        "(self.hi - self.lo) * self.entry.itemsize",
        "(self.hi - self.lo)",
        "tests/frontends/dcp/test_converters.py::test_a_dcp_folder_is_imported_and_exported",
    ),
    "a tensor in an export to DCP has no chunks": (
        "split",
        "range(0, shape[0],",
        "range(shape[0], 0,",
        "tests/frontends/dcp/test_converters.py::test_an_export_splits_tensors_into_few_boxes_of_whole_rows",
    ),
    "the metadata of an export to DCP lacks the positions of chunks": (
        "_Writer._write_chunk",
        "self._note(dcp.MetadataIndex(chunk.entry.key, box.offset), file, name, file.tell() - start)",
        "pass",
        "tests/frontends/dcp/test_converters.py::test_a_dcp_folder_is_imported_and_exported",
    ),
    "a row of an export to DCP counts as the whole tensor": (
        "split",
        "prod(shape[1:])",
        "prod(shape[:])",
        "tests/frontends/dcp/test_converters.py::test_an_export_splits_tensors_into_few_boxes_of_whole_rows",
    ),
    "the metadata of a tensor in a DCP folder is not compared with its data": (
        "Folder.resolve_data",
        "untyped_storage().nbytes() ",
        "untyped_storage().offset() ",
        "tests/frontends/dcp/test_folder.py::test_megatron_objects_are_unwrapped_from_their_lists",
    ),
    "an object of DCP is not stored": (
        "_add_opaque",
        "values.objects.append(entry)",
        "pass",
        "tests/frontends/dcp/test_items.py::test_loading_a_pickle_requires_allow_pickle",
    ),
    "every item of DCP counts as part of a save on one rank": (
        "tensors_of",
        "alone and sizes != shape",
        "(sizes != shape)",
        "tests/frontends/dcp/test_pitfalls.py::test_04_a_tensor_with_a_hole_is_rejected",
    ),
    "the keys of a note for DCP count as its planner data": (
        "read_note",
        "if keys is None else list(keys), None",
        ", None if keys is None else list(keys)",
        "tests/frontends/dcp/test_schema.py::test_a_list_that_is_only_partly_described_by_dcp_is_loaded",
    ),
    "the note of a save on one rank has sizes in place of offsets": (
        "Note.encoded",
        ", c.offset, c.",
        ", c.shape, c.",
        "tests/frontends/dcp/test_session.py::test_ranks_can_save_without_collectives",
    ),
    "the metadata for DCP does not name its save": (
        "DcpContents.metadata",
        "stamp(metadata, commit.run, commit.step, commit.txid)",
        "pass",
        "tests/frontends/dcp/test_contents.py::test_the_metadata_has_every_field_that_torch_defines",
    ),
    "a chunk of a save on one rank is found by its size": (
        "DcpContents.tensor",
        "part.offset =",
        "part.shape =",
        "tests/frontends/dcp/test_session.py::test_ranks_can_save_without_collectives",
    ),
    "a value from a different process keeps its old mark": (
        "value_of",
        "data[len(MAGIC) :",
        "data[:",
        "tests/frontends/dcp/test_planners.py::test_planners_work_without_pickle",
    ),
    "a DCP reader that receives a different path reads the old one": (
        "StorageReader.read_metadata",
        "self._opened = None",
        "pass",
        "tests/frontends/dcp/test_reader.py::test_a_reused_reader_names_missing_keys",
    ),
    "a reader searches again for a missing checkpoint": (
        "StorageReader._of_all",
        "self._absent = True",
        "pass",
        "tests/frontends/dcp/test_reader.py::test_every_kind_of_error_is_raised_by_a_reader",
    ),
    "values that are not tensors are not loaded through DCP": (
        "StorageReader.read_data",
        "self._read_values([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)",
        "pass",
        "tests/frontends/dcp/test_reader.py::test_a_planner_can_rename_on_load",
    ),
    "tensors that a planner creates count as one byte per element": (
        "_windows",
        "numel() * 8, WINDOW_BYTES",
        "numel(), WINDOW_BYTES",
        "tests/frontends/dcp/test_reader.py::test_a_planner_that_recreates_tensors_holds_only_a_few_at_a_time",
    ),
    "each leaf of DCP is also a container": (
        "tree_of",
        "in path[:-1]:",
        "in path[:]:",
        "tests/frontends/dcp/test_schema.py::test_a_planner_can_rename_on_save",
    ),
    "the path of a nested DCP leaf begins with its end": (
        "_Walk.node",
        "node(child, (*path, step),",
        "node(child, (step, step),",
        "tests/frontends/dcp/test_schema.py::test_a_model_and_its_optimizer_load_through_dcp_and_the_native_api",
    ),
    "a list in a list is always one value": (
        "_Walk._opens",
        "child, (*home, element)",
        "(*home, element), child",
        "tests/frontends/dcp/test_schema.py::test_keys_do_not_depend_on_the_front_end_that_saved",
    ),
    "ranks may store one tensor in two dtypes through DCP": (
        "_all_streams",
        "name[0] == TENSOR and forms.setdefault(name, form) != form",
        "False",
        "tests/frontends/dcp/test_pitfalls.py::test_03_a_tensor_whose_dtype_differs_across_ranks_is_not_saved",
    ),
    "a flat tensor of Megatron stays flat": (
        "_cuts",
        "-1]) <= {1} for",
        "-1]) < {1} for",
        "tests/frontends/megatron/test_torch_dist.py::test_torch_dist_metadata_is_read_if_pickle_is_allowed",
    ),
    "a box always extends to the end of its chunk": (
        "FlatBox.out_of",
        ": self.start + box.numel()",
        ":",
        "tests/frontends/megatron/test_torch_dist.py::test_a_box_is_extracted_from_the_middle_of_a_chunk",
    ),
    "a thread saves again where it saved before": (
        "StorageWriter.set_up_storage_writer",
        "place.used = True",
        "pass",
        "tests/frontends/dcp/test_ids.py::test_the_id_set_by_a_thread_overrides_later_ids_set_by_other_threads",
    ),
    "a suffix of a different format is not refused": (
        "export",
        "_check_suffix(chosen, path)",
        "pass",
        "tests/frontends/interchange/test_export.py::test_the_suffix_of_a_different_format_is_rejected",
    ),
    "the suffix of an existing folder counts": (
        "_check_suffix",
        'of in (None, format) or (of, format) == ("safetensors", "hf") or os.path.isdir(path',
        '(of in (None, format) or (of, format) == ("safetensors", "hf")',
        "tests/frontends/interchange/test_export.py::test_a_folder_name_can_have_a_suffix",
    ),
    "a follower removes the current generation": (
        "Follower._tidy",
        "every.index(current) + 1 ",
        "",
        "tests/frontends/test_follow.py::test_follow_writes_only_the_selected_keys",
    ),
    "a follower writes all tensors": (
        "Follower._make",
        "list(self.keys) or None",
        "(None)",
        "tests/frontends/test_follow.py::test_follow_writes_only_the_selected_keys",
    ),
    "the removal of a Lightning file does not forget its checkpoint": (
        "RunFiles.remove",
        "self._let_go(named)",
        "pass",
        "tests/frontends/lightning/test_files.py::test_lightning_paths_can_be_remote",
    ),
    "a URL with an @ counts as a reference": (
        "RunFiles.named",
        'not is_reference(text) or "://" in text or (',
        "not is_reference(text) or (",
        "tests/frontends/lightning/test_files.py::test_a_missing_path_raises_not_found",
    ),
    "a list declares more items than it contains": (
        "few",
        "if len(names) > most",
        "if len(names) >= most",
        "tests/frontends/megatron/test_integrity.py::test_the_error_names_the_first_gap_and_counts_the_others",
    ),
    "an object on one rank counts as an object on two": (
        "_check_object",
        "len(ranks) > 1:",
        "len(ranks) >= 1:",
        "tests/frontends/megatron/test_loading.py::test_an_object_can_contain_any_plain_data",
    ),
    "the common.pt of a different save is accepted": (
        "check_common",
        "path.read_bytes() != stored.store.read_attachment(stored.checkpoint, COMMON_NAME)",
        "False",
        "tests/frontends/megatron/test_folders.py::test_a_failed_save_into_a_folder_keeps_the_old_checkpoint",
    ),
    "the common.pt of a folder is not the one that was saved": (
        "write_folder",
        "stored.file or write_archive(load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle",
        "(write_archive(load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle)",
        "tests/frontends/megatron/test_folders.py::test_a_failed_save_into_a_folder_keeps_the_old_checkpoint",
    ),
    "non-persistent entries are not extracted": (
        "extract_sharded_tensors_or_nonpersistent",
        "is_sharded_tensor(value) or is_factory(value) or is_nonpersistent(value",
        "(is_sharded_tensor(value) or is_factory(value)",
        "tests/frontends/megatron/test_kinds.py::test_each_extract_function_selects_one_kind_of_part",
    ),
    "a part without data has data": (
        "ShardedBase.without_data",
        "other.data = None",
        "pass",
        "tests/frontends/megatron/test_loading.py::test_a_part_without_data_is_loaded_into_a_new_tensor_of_its_dtype",
    ),
    "any replica with several numbers counts as the main one": (
        "is_main_replica",
        "all(number == 0 ",
        "all(number >= 0 ",
        "tests/frontends/megatron/test_mapping.py::test_the_main_replica_has_the_id_zero_or_all_zeros",
    ),
    "diff examines one index too many": (
        "diff",
        "len(x1) - 1, len",
        "len(x1), len",
        "tests/frontends/megatron/test_stored.py::test_parts_of_a_checkpoint_can_be_loaded",
    ),
    "a text that fits exactly is truncated": (
        "_text",
        "text) <= _SHOWN ",
        "text) < _SHOWN ",
        "tests/frontends/megatron/test_nesting.py::test_inspect_types_prints_a_tree",
    ),
    "a tensor is compared with anything": (
        "_equal",
        "isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor",
        "(isinstance(x1, torch.Tensor)",
        "tests/frontends/megatron/test_nesting.py::test_diff_compares_the_values_of_leaves",
    ),
    "a flat part without elements is narrowed, not left out": (
        "ShardedTensor.narrow",
        "length) * row)\n        if lo >= hi:",
        "length) * row)\n        if lo > hi:",
        "tests/frontends/megatron/test_mapping_parts.py::test_narrowing_returns_views_and_also_works_without_data",
    ),
    "the data of a reshaped part is not copied into it": (
        "RankLoad.read",
        "target.copy_(source)",
        "pass",
        "tests/frontends/megatron/test_reshaped.py::test_a_reshaped_tensor_loads_into_any_sharding",
    ),
    "a narrowed flat part has an empty range": (
        "ShardedTensor.narrow",
        "flattened_range=slice(lo - ",
        "flattened_range=slice(hi - ",
        "tests/frontends/megatron/test_mapping_parts.py::test_all_parts_together_form_the_narrowed_tensor",
    ),
    "unsharded values are lost if tensors are removed": (
        "drop",
        "name is None or not name.startswith(key_prefix",
        "(not name.startswith(key_prefix)",
        "tests/frontends/megatron/test_dropping.py::test_a_prefix_that_matches_no_key_is_reported",
    ),
    "replicas are saved without a request": (
        "Saving.select",
        'if self.fully_parallel or self.check_replicas == "raise" else set()',
        "",
        "tests/frontends/megatron/test_saving.py::test_replicas_are_used_only_to_share_the_writing_or_for_a_comparison",
    ),
    "Megatron's functions cannot save lists": (
        "_check_lists",
        "set(kinds)) > 1:",
        "set(kinds)) >= 1:",
        "tests/frontends/megatron/test_loading.py::test_tensors_are_filled_in_place_and_plain_values_are_ignored",
    ),
    "every rank saves the common part": (
        "Saving.state",
        "self.rank == 0",
        "self.rank >= 0",
        "tests/frontends/megatron/test_saving.py::test_only_rank_0_saves_the_common_part",
    ),
    "one of several shards is read from a whole object": (
        "MegatronCheckpoint.object_key",
        "prod(wanted.global_shape) == 1 and find(self.contents.tree, wanted.key) is not None",
        "(find(self.contents.tree, wanted.key) is not None)",
        "tests/frontends/megatron/test_loading.py::test_objects_are_replaced_in_place",
    ),
    "a missing object is found": (
        "MegatronCheckpoint.object_key",
        "alone and wanted.key not in self.tensors",
        "(wanted.key not in self.tensors)",
        "tests/frontends/megatron/test_loading.py::test_objects_are_replaced_in_place",
    ),
    "common.pt is not stored": (
        "CasSaveShardedStrategy._prepared",
        "cache(lambda: _common(state, folder) if ranks.rank == 0 else [])",
        "cache(list[_Common])",
        "tests/frontends/megatron/test_folders.py::test_classes_that_other_loads_need_are_logged_once",
    ),
    "a failed background save of Megatron is finished": (
        "CasSaveShardedStrategy.async_save.finalize",
        "future.result()",
        "pass",
        "tests/frontends/megatron/test_folders.py::test_the_error_of_a_background_save_is_raised_at_its_end",
    ),
    "classes that a load elsewhere needs are reported at every save": (
        "CasSaveShardedStrategy._warn_of_classes",
        "self._warned = True",
        "pass",
        "tests/frontends/megatron/test_folders.py::test_classes_that_other_loads_need_are_logged_once",
    ),
    "casckpt's strategy receives Megatron's own": (
        "_dispatching.method",
        "*arguments[1:]",
        "*arguments[:]",
        "tests/frontends/megatron/test_training_loop.py::test_the_loop_saves_into_the_store_and_resumes",
    ),
    "modules saved beside an adapter count as the model's": (
        "",
        '("base_layer", "modules_to_save", "lora_A"',
        '("base_layer", "base_layer", "lora_A"',
        "tests/frontends/views/test_model_part.py::test_a_model_with_adapters_is_rejected_unless_it_is_selected_explicitly",
    ),
    "the prefix that DDP adds to names stays": (
        "plain_names",
        "name.startswith(f",
        "name.endswith(f",
        "tests/frontends/views/test_model_part.py::test_the_model_is_found_in_saved_training_states",
    ),
    "a new folder counts as the folder of a different process": (
        "new_folder",
        "not exists and path.is_dir(",
        "(not exists",
        "tests/frontends/interchange/test_new_files.py::test_the_second_of_two_exports_to_a_path_raises_conflict",
    ),
    "only the first entries of a model may be buffers or frozen": (
        "_names",
        "- sum(positions) ",
        "",
        "tests/frontends/interchange/test_optimizer_names.py::test_a_lightning_file_with_several_optimizers_is_imported",
    ),
    "a part that was cut off has no elements": (
        "_within",
        "+ min(hi, count)",
        "",
        "tests/frontends/views/test_recut.py::test_splitting_and_concatenating_restores_the_tensors",
    ),
    "a safetensors file accepts a dtype that it cannot name": (
        "file_type",
        "name is None or ",
        "",
        "tests/frontends/interchange/safetensors/test_files.py::test_the_error_for_an_unsupported_dtype_names_the_key",
    ),
    "the shape of an F4 tensor in a file has an extra axis": (
        "_place",
        "*shape[:-1], shape",
        "*shape[:], shape",
        "tests/frontends/interchange/safetensors/test_files.py::test_the_library_reads_every_dtype",
    ),
    "an import skips all links": (
        "_is_attachable",
        "not path.is_symlink() or _leads_inside(folder, path",
        "(not path.is_symlink()",
        "tests/frontends/interchange/safetensors/test_importing.py::test_links_to_files_outside_the_folder_are_not_attached",
    ),
    "an unknown keyword of an import is ignored": (
        "import_safetensors",
        'check_keywords("import_safetensors", options, ImportArguments)',
        "pass",
        "tests/frontends/test_convert.py::test_an_unknown_keyword_of_an_import_is_rejected_before_anything_is_read",
    ),
    "an export of several files has no index": (
        "lay_out",
        "len(files) > 1:",
        "False:",
        "tests/frontends/interchange/safetensors/test_layout.py::test_a_layout_determines_every_byte_before_anything_is_written",
    ),
    "tensors in a file have the order of the state": (
        "_file",
        "sorted(tensors, key=lambda tensor: order(_header(tensor)))",
        "list(tensors)",
        "tests/frontends/interchange/safetensors/test_layout.py::test_casckpt_writes_the_same_file_as_the_library_for_any_key_order",
    ),
    "an index is written before the files of a component": (
        "FolderPlan.lay_out",
        'sorted(files, key=lambda file: file.name.endswith(".json"))',
        "files",
        "tests/frontends/interchange/safetensors/test_heads.py::test_indexes_are_written_after_the_files_of_all_components",
    ),
    "a stored head is used for tensors of a different shape": (
        "ImportedModel.fits",
        "(found.entry.dtype, found.entry.shape) != (tensor.dtype, tensor.shape)",
        "found.entry.dtype != tensor.dtype",
        "tests/frontends/interchange/safetensors/test_heads.py::test_a_changed_model_is_exported_to_new_files",
    ),
    "one file holds all tensors of any size": (
        "plan_shards",
        "list(in_batches(streams, lambda tensor: tensor.entry.nbytes, most))",
        "[list(streams)]",
        "tests/frontends/interchange/safetensors/test_layout.py::test_a_layout_determines_every_byte_before_anything_is_written",
    ),
    "the error for an unsupported value does not name its key": (
        "order",
        "dtype, _ = file_type(tensor.key, tensor.dtype, tensor.shape)",
        "dtype = NAMES[tensor.dtype]",
        "tests/frontends/interchange/safetensors/test_exporting.py::test_a_dtype_that_safetensors_lacks_is_named_before_anything_is_written",
    ),
    "a folder with all names of a model counts as a part of it": (
        "FolderPlan.is_no_model",
        "names <= {tensor",
        "names < {tensor",
        "tests/frontends/interchange/safetensors/test_planned.py::test_exports_never_load_with_random_weights",
    ),
    "an export of anything other than a model drops all attachments": (
        "FolderPlan._is_skipped",
        "name == CONFIG and self.is_no_model",
        "(self.is_no_model)",
        "tests/frontends/interchange/safetensors/test_planned.py::test_exporting_part_of_a_model_omits_the_config",
    ),
    "the metadata of an imported file is not exported": (
        "file_metadata",
        "isinstance(imported, dict) and all(isinstance(value, str) for value in imported.values())",
        "False",
        "tests/frontends/test_convert.py::test_an_imported_file_is_exported_byte_for_byte",
    ),
    "an attachment replaces the file that describes a view": (
        "ServedFolders._made",
        "file.name not in files and file.name != VIEW_FILE",
        "(file.name not in files)",
        "tests/frontends/serve/test_folders.py::test_a_view_can_split_and_concatenate_tensors",
    ),
    "the digest of a file does not depend on its contents": (
        "etag_of",
        '_add(hasher, f"{source.lo} {source.hi} {source.entry.numel}".encode(), manifest.raw_cells(source.entry))',
        "pass",
        "tests/frontends/serve/test_folders.py::test_an_etag_changes_only_if_the_tensors_of_its_file_change",
    ),
    "the hub searches for a repository named main": (
        "Hub.refs",
        "checkpoint(repo, MAIN)",
        "checkpoint(MAIN, repo)",
        "tests/frontends/serve/test_hub.py::test_leases_are_not_listed_as_tags",
    ),
    "a server ends leases without holding its lock": (
        "Leases.close",
        'End all leases."""\n        with self._lock:',
        'End all leases."""\n        if True:',
        "tests/frontends/serve/test_sending.py::test_simultaneous_requests_for_a_checkpoint_share_a_lease",
    ),
    "an expired lease counts as valid": (
        "Leases._end",
        "del self._held[id]",
        "pass",
        "tests/frontends/serve/test_sending.py::test_the_number_of_idle_leases_is_limited",
    ),
    "one plain part makes a name plain": (
        "is_repo",
        "plain = all(_PART.",
        "plain = any(_PART.",
        "tests/frontends/serve/test_hub.py::test_runs_are_mapped_to_repository_names",
    ),
    "the page of a server shows no run": (
        "page_of",
        '"".join(_run(repo, of_run, tags) for repo, of_run in repos.items()) or "<p>There are no checkpoints yet.</p>"',
        '("<p>There are no checkpoints yet.</p>")',
        "tests/frontends/serve/test_app.py::test_pages_of_the_server_have_security_headers",
    ),
    "a range of a file begins where it ends": (
        "parse_range",
        "_number(first), min(_number(last) + 1, size) if last else size",
        "(min(_number(last) + 1, size) if last else size, min(_number(last) + 1, size) if last else size)",
        "tests/frontends/serve/test_app.py::test_the_server_answers_range_requests",
    ),
    "every range of a file is empty": (
        "File._elements",
        'skip in the first."""\n        if start >= stop:',
        'skip in the first."""\n        if start >= start:',
        "tests/frontends/serve/test_app.py::test_the_server_answers_range_requests",
    ),
    "a sent buffer is not reused": (
        "BufferPool._take_back",
        "self._free.append(buffer)",
        "pass",
        "tests/frontends/serve/test_sending.py::test_a_window_needed_by_several_clients_is_read_once",
    ),
    "a hanging server stops without a message": (
        "Connection._watch",
        "self._is_stuck:",
        "False:",
        "tests/frontends/serve/test_server.py::test_a_client_that_never_reads_is_disconnected",
    ),
    "a container in a file of torch.save becomes a dict": (
        "_of_plain_kinds",
        "if isinstance(node, defaultdict) else container(type(node), below, node)",
        "",
        "tests/frontends/interchange/test_torch_files.py::test_a_torch_save_file_is_imported_and_exported",
    ),
    "a wrapper prefix is removed if any name has it": (
        "_unwrapped",
        "if all(str(key",
        "if any(str(key",
        "tests/frontends/interchange/test_optimizer_names.py::test_only_a_prefix_of_all_names_counts_as_a_wrapper",
    ),
    "a note of an import has its reason in place of its name": (
        "laid_out",
        "repr(name), str(error",
        "str(error), repr(name",
        "tests/frontends/interchange/test_optimizer_names.py::test_an_optimizer_without_matching_names_keeps_its_numbers_and_is_reported",
    ),
    "torchtitan waits twice for a save": (
        "CasCheckpointManager._wait_for_saving",
        "self.save_future = None",
        "pass",
        "tests/frontends/test_torchtitan.py::test_interrupted_training_resumes_bit_for_bit",
    ),
    "torchtitan's manager leaves its checkpointer open": (
        "CasCheckpointManager._close",
        "self.checkpointer.close()",
        "pass",
        "tests/frontends/test_torchtitan.py::test_settings_that_do_not_apply_to_a_store_are_rejected",
    ),
    "integers of exported weights are converted": (
        "_Weights._converted",
        "if floating and value.dtype != self._dtype else value",
        "",
        "tests/frontends/test_torchtitan.py::test_interrupted_training_resumes_bit_for_bit",
    ),
    "torchtitan's schedulers count as its data loader": (
        "CasCheckpointManager.__init__",
        "(lr_schedulers",
        "(dataloader",
        "tests/frontends/test_torchtitan.py::test_interrupted_training_resumes_bit_for_bit",
    ),
    "a summary shows the time since the host started": (
        "Checkpointer.save",
        "seconds = time.monotonic() - begun",
        "seconds = time.monotonic()",
        "tests/frontends/trainer/test_saves.py::test_a_summary_includes_the_time_that_the_loop_waited",
    ),
    "training stops a step too early": (
        "Checkpointer._bound_risk",
        "durable) > limit:",
        "durable) >= limit:",
        "tests/frontends/trainer/test_checkpointer.py::test_a_failed_save_stops_the_training_before_more_steps_are_at_risk",
    ),
    "a conflict over a step is logged at every save": (
        "Checkpointer._begin",
        "        error = self._settle(to_save=True)\n",
        "        error = self._settle()\n",
        "tests/frontends/trainer/test_checkpointer.py::test_a_conflict_in_a_background_save_is_raised_by_the_next_save",
    ),
    "every rank warns about the missing optimizer": (
        "Restoring.load",
        "self._ranks.rank == 0 and lacks_optimizer",
        "self._ranks.rank >= 0 and lacks_optimizer",
        "tests/frontends/training_state/test_contents.py::test_one_rank_logs_that_the_optimizer_is_missing",
    ),
    "a metric that no save has does not cause an error": (
        "rotate",
        "_warn_of_metrics(run, visible, rotation)",
        "pass",
        "tests/frontends/trainer/test_rotation.py::test_a_metric_that_every_save_lacks_is_logged_at_intervals",
    ),
    "FSDP is used where it is not imported": (
        "_fsdp_modules",
        "home is not None and isinstance(one, home.FullyShardedDataParallel",
        "(isinstance(one, home.FullyShardedDataParallel)",
        "tests/frontends/training_state/test_flat.py::test_fsdp_is_detected_without_importing_it",
    ),
    "an option is compared with a tensor": (
        "_same",
        "isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor",
        "(isinstance(second, torch.Tensor)",
        "tests/frontends/training_state/test_groups.py::test_group_options_are_equal_only_if_their_types_are_equal",
    ),
    "the state of a flat part is loaded as a whole tensor": (
        "Holding.destination",
        "part is not None and entry.shape == part.shape",
        "False",
        "tests/frontends/training_state/test_holding.py::test_state_of_a_flat_part_covers_the_same_elements",
    ),
    "no rank has any part of a flat parameter": (
        "Holding.is_nothing",
        "self.part.lo ==",
        "self.part.hi ==",
        "tests/frontends/training_state/test_holding.py::test_state_of_a_flat_part_covers_the_same_elements",
    ),
    "parts of a model are named by numbers": (
        "plain_name",
        "if isinstance(module, Parts):",
        "if False:",
        "tests/frontends/training_state/test_parts.py::test_lists_of_models_and_optimizers_act_as_one_model_and_one_optimizer",
    ),
    "every rank warns about unread keys": (
        "load_model_and_optim_state",
        "ranks.rank == 0",
        "ranks.rank >= 0",
        "tests/frontends/training_state/test_ranks.py::test_only_one_rank_reports_unread_keys",
    ),
    "a save stores any number of metrics": (
        "stored_metrics",
        " and len(stored) < MAX_METRICS",
        "",
        "tests/format/test_metrics.py::test_of_too_many_metrics_those_in_first_and_the_first_by_name_are_stored",
    ),
    "files of random generators are not recognized": (
        "",
        '"optimizer.pt", re.compile(r"rng_state(_\\d+)?\\.pth',
        '("optimizer.pt", "optimizer.pt',
        "tests/frontends/transformers/test_callback.py::test_training_on_several_ranks_resumes_bit_for_bit",
    ),
    "the best model of a trainer is not tagged": (
        "CasCheckpointCallback._set_tag",
        "self.store.tag(tag, ref)",
        "pass",
        "tests/frontends/transformers/test_callback.py::test_the_retention_rules_of_a_store_keep_the_best_checkpoint",
    ),
    "a folder of FSDP is saved as a model": (
        "",
        "pytorch_model_fsdp",
        "optimizer_",
        "tests/frontends/transformers/test_callback.py::test_several_files_and_subfolders_are_attached",
    ),
    "the buffer of windows does not grow": (
        "RegionReader._planned",
        "self._buffer.nbytes < total",
        "False",
        "tests/frontends/test_convert.py::test_an_imported_file_is_exported_byte_for_byte",
    ),
    "a file is updated where the last change ended": (
        "RegionReader.revise",
        "file.seek(start + len(window))",
        "pass",
        "tests/frontends/test_follow.py::test_updated_files_are_identical_to_newly_written_files",
    ),
    "the body of a response may begin at any offset": (
        "PutBody.__init__",
        "self._data = data\n        self._at = 0",
        "self._data = data\n        pass",
        "tests/storage/remote/s3/test_direct.py::test_response_bodies_of_aiobotocore_2_are_read",
    ),
    "a response may have any length": (
        "read_whole",
        "len(data) > limit",
        "False",
        "tests/storage/remote/test_calls.py::test_a_response_is_read_only_up_to_its_expected_size",
    ),
    "asynchronous file systems are called in the wrong thread": (
        "Calls.__call__",
        "self._loop is not None",
        "False",
        "tests/storage/remote/test_calls.py::test_asynchronous_clients_are_called_in_their_event_loop",
    ),
    "a read through fsspec ends at its beginning": (
        "FsspecObject.read",
        "+ sum(buffer.nbytes for buffer in buffers)",
        "",
        "tests/storage/remote/test_fsspec_client.py::TestOneWriter::test_ranges_of_an_object_are_read",
    ),
    "an object of exactly the allowed size is too large": (
        "FsspecClient.get",
        "size > limit:",
        "size >= limit:",
        "tests/storage/remote/test_fsspec_client.py::TestOneWriter::test_an_object_can_be_read_after_a_put",
    ),
    "a call in an event loop is not awaited": (
        "_result",
        "result(max(request",
        "result(min(request",
        "tests/storage/remote/test_patience.py::test_the_timeout_of_a_client_is_one_second_longer_than_its_call",
    ),
    "a delete in a versioned bucket hides the bytes": (
        "S3Client._delete_versions",
        'self.call("delete_object", Key=version["Key"], VersionId=version["VersionId"])',
        "pass",
        "tests/storage/remote/s3/test_client.py::test_a_delete_in_a_versioned_bucket_frees_the_bytes_of_the_object",
    ),
    "a response with the whole object counts as a range": (
        "DirectReads.read",
        ".status != 206",
        ".status > 206",
        "tests/storage/remote/s3/test_direct.py::test_responses_of_other_kinds_are_left_to_the_client",
    ),
    "a direct read has no timeout": (
        "_wait_for",
        "connection.settimeout(left)",
        "pass",
        "tests/storage/remote/s3/test_direct.py::test_a_connection_waits_only_for_the_remaining_time",
    ),
    "a direct read is not signed": (
        "sign",
        "await client.get_object(**arguments)",
        "pass",
        "tests/storage/remote/s3/test_direct.py::test_a_response_for_the_wrong_range_is_rejected",
    ),
    "requests to a busy server are not repeated": (
        "_explain_answer",
        'later", again=True)',
        'later", again=False)',
        "tests/storage/remote/test_faults.py::test_a_put_with_network_faults_raises_conflict_if_the_key_exists",
    ),
    "a bucket without object locks counts as locked": (
        "_lock",
        'lock.get("ObjectLockEnabled") != "Enabled"',
        "False",
        "tests/storage/remote/s3/test_facts.py::test_object_locks_are_reported",
    ),
    "unreadable lifecycle rules count as absent": (
        "_rules",
        (
            'call("get_bucket_lifecycle_configuration").get("Rules", ())\n'
            "    except ClientError as error:\n"
            "        if status_of(error) != 404:"
        ),
        (
            'call("get_bucket_lifecycle_configuration").get("Rules", ())\n'
            "    except ClientError as error:\n"
            "        if status_of(error) > 404:"
        ),
        "tests/storage/remote/s3/test_facts.py::test_lifecycle_rules_that_affect_the_store_are_reported",
    ),
    "a call ends only after a pause that exceeds its time limit": (
        "RemoteStore.again",
        "(pause or 0):",
        "((0)):",
        "tests/storage/remote/test_fsspec_client.py::test_a_retry_is_skipped_if_its_pause_exceeds_the_remaining_time",
    ),
    "partial sums are saved unchanged": (
        "local_boxes",
        "check_added_up(key, tensor)\n    mesh",
        "mesh",
        "tests/tensors/test_dtensors.py::test_unreduced_sums_are_rejected",
    ),
    "a rank has everything after the start of its shard": (
        "_held",
        ": (coordinate + 1) * chunk",
        ":",
        "tests/tensors/test_dtensors.py::test_a_rank_outside_the_mesh_holds_nothing",
    ),
    "a pickle with external bytes is read": (
        "refuse_pickle",
        'always requires it."""\n    if parts:',
        'always requires it."""\n    if False:',
        "tests/tensors/test_objects.py::test_a_pickle_with_external_bytes_is_rejected_without_reading_it",
    ),
    "pickles run without permission": (
        "read_archive",
        "weights_only=True)",
        "weights_only=False)",
        "tests/frontends/dcp/test_items.py::test_loading_a_pickle_requires_allow_pickle",
    ),
    "a state that contains itself causes an endless loop": (
        "_Flattener.node",
        "self.open.add(id(value))",
        "pass",
        "tests/tensors/test_state.py::test_states_of_a_module_and_an_optimizer_are_flattened",
    ),
    "a save lists live commits before its transaction begins": (
        "begin_save",
        """    transaction = begin(repo, run, step, after=[latest] if latest else [], seen=seen)
    try:
        return transaction, newest_reusable(repo, run), replaced
""",
        """    parent = newest_reusable(repo, run)
    transaction = begin(repo, run, step, after=[latest] if latest else [], seen=seen)
    try:
        return transaction, parent, replaced
""",
        "tests/saving/test_leader.py::test_the_parents_log_is_read_after_the_transaction_begins_and_before_the_first_upload",
    ),
    "a save reuses blobs that only a purged checkpoint names": (
        "is_live",
        "    return commit.live\n",
        "    return commit.last != 'revoked'\n",
        "tests/saving/test_leader.py::test_cells_of_a_purged_checkpoint_are_not_reused",
    ),
    "shared blocks count as written before they are": (
        "_Part.write",
        """        at = offset
        with usable(self._path):
""",
        """        at = offset + sum(view.nbytes for view in views)
        with usable(self._path):
            count = -(-at // BLOCK) - offset // BLOCK
            write_all(self._fd, memoryview(_THERE * count), self._states + offset // BLOCK)
            at = offset
""",
        "tests/repository/test_host_reads.py::test_a_rank_killed_at_any_system_call_leaves_only_correct_bytes",
    ),
    "a rank that has not announced its reads counts as one that reads nothing": (
        "HostReads._read_others",
        "if len(paths) >= self._sharing - 1:",
        "if True:",
        "tests/repository/test_host_reads.py::test_a_second_rank_reuses_what_the_first_rank_has_read",
    ),
    "a rank that reads alone counts as one that shares its reads": (
        "_resolved.find",
        " if request.shares)",
        ")",
        "tests/store/test_share_reads.py::test_ranks_remove_what_they_share_even_if_one_of_them_reads_alone",
    ),
    "memory that other users could write is used": (
        "BlobCache._is_private",
        " and not status.st_mode & 0o077",
        "",
        "tests/repository/test_host_reads.py::test_a_folder_that_others_could_change_is_not_used",
    ),
    "a forked child keeps the lock on shared bytes": (
        "_Part.locked",
        "            _lock(self._fd, self._path, fcntl.F_UNLCK, lo, hi - lo)",
        "            pass",
        "tests/repository/test_host_reads.py::test_a_child_forked_during_a_read_does_not_keep_the_lock",
    ),
    "a rank does not wait for bytes that another rank of its host brings": (
        "HostReads.wait",
        "if number not in self.passed:",
        "if True:",
        "tests/repository/test_host_reads.py::test_a_rank_waits_until_the_bytes_that_it_needs_have_arrived",
    ),
    "bytes of a blob that do not arrive are never released": (
        "_release",
        "        reads.release(blob, 0, size)",
        "        pass",
        "tests/store/test_job_reads.py::test_after_a_broken_connection_the_next_load_shares_its_reads",
    ),
    "a failed read is passed on as if it were bytes of the blob": (
        "JobReads._send.read",
        "data[-1] = is_right",
        "data[-1] = True",
        "tests/store/test_job_reads.py::test_a_failed_read_is_not_passed_on_as_bytes",
    ),
    "hosts share a group after one of its connections has failed": (
        "run_together",
        "if job is not None and has_failed:",
        "if False:",
        "tests/store/test_job_reads.py::test_after_a_broken_connection_the_next_load_shares_its_reads",
    ),
    "ranks number groups for bytes by their own failures": (
        "GroupRanks.beside",
        "self.exchanges)",
        "self._beside.generation + 1 if self._beside else 0)",
        "tests/ranks/test_ranks.py::test_ranks_that_disagree_on_a_failure_can_pass_on_bytes_later",
    ),
    "hosts pass on blobs in a DCP load of only some ranks": (
        "StorageReader.prepare_global_plan",
        "[one.rank for one in seen] == list(range(job_size()))",
        "True",
        "tests/store/test_job_reads.py::test_a_dcp_load_of_some_ranks_shares_reads_within_each_host",
    ),
    "hosts pass on blobs to ranks that number them differently": (
        "deals",
        " and need.manifest == manifest",
        "",
        "tests/loading/test_job_reads.py::test_nothing_is_passed_on_if_only_one_host_could_use_it",
    ),
    "all DCP loads with the same reader have the same name": (
        "StorageReader.prepare_global_plan",
        "load_id = str(uuid4())",
        "load_id = self._load_id",
        "tests/store/test_job_reads.py::test_a_dcp_reader_can_be_used_for_several_loads",
    ),
    "an update announces only a part of its reads": (
        "Update._take",
        "reader.reads.begin(self.ranges())",
        "pass",
        "tests/store/test_share_reads.py::test_updates_by_several_ranks_share_their_reads",
    ),
    "a host receives more than it has room for": (
        "_deal",
        " and host.room >= size",
        "",
        "tests/loading/test_job_reads.py::test_nothing_is_passed_on_if_only_one_host_could_use_it",
    ),
    "wrong shared bytes count as damage of the store": (
        "BlobReader.distrust",
        "elif self.reads is not None and not failed:",
        "elif False:",
        "tests/store/test_share_reads.py::test_damage_to_shared_bytes_never_reaches_a_tensor",
    ),
    "a gc counts purged commits as live": (
        "CommitList._live",
        "for commit in self.commits.values() if commit.live",
        "for commit in self.commits.values() if commit.last != 'revoked'",
        "tests/upkeep/gc/test_gc.py::test_gc_frees_disk_space_in_a_folder",
    ),
    "of two commits of a checkpoint, the thinned one answers": (
        "in_order",
        "commit.rank",
        "commit.lacking",
        "tests/upkeep/copies/test_replication.py::test_copies_of_different_places_do_not_share_a_transaction",
    ),
    "rules remove a checkpoint whose log has an unreadable record": (
        "rotate",
        "if commit.txid not in listed.damaged",
        "if commit.txid",
        "tests/upkeep/test_saves.py::test_rules_leave_a_log_with_an_unreadable_record_alone_until_it_is_given_up",
    ),
    "the latest of a run is its last commit, although an earlier one has more entries": (
        "_newest_or_fuller",
        "not found.lacking",
        "True",
        "tests/upkeep/copies/test_replication.py::test_copies_of_different_places_do_not_share_a_transaction",
    ),
    "gc forgets a commit with entries that the other one of its checkpoint lacks": (
        "plan_retiring",
        "        if other in reasons:\n            reasons.setdefault",
        "        if False:\n            reasons.setdefault",
        "tests/upkeep/copies/test_replication.py::test_a_copy_with_other_entries_gets_a_log_of_its_own",
    ),
    "rotation forgets a commit with entries that the other one of its checkpoint lacks": (
        "plan_rotation",
        "if other not in gone}",
        "if False}",
        "tests/upkeep/copies/test_replication.py::test_a_copy_with_other_entries_gets_a_log_of_its_own",
    ),
    "a record is announced after it exists": (
        "commit",
        """    announce(repo, [(record.txid, 0)], seen=seen)
    try:
        repo.put_record(key, record)
""",
        """    try:
        repo.put_record(key, record)
        announce(repo, [(record.txid, 0)], seen=seen)
""",
        "tests/history/test_announcements.py::test_each_commit_and_restore_is_announced_before_it_exists",
    ),
    "the last announcement counts as the latest checkpoint": (
        "_bound",
        "if one is not None and one.seen is not None and one.seen >= low - 1)",
        "if one is not None)",
        "tests/history/test_following.py::test_following_a_run_returns_the_same_commits_as_a_listing",
    ),
    "a file of a stored folder may be below a link": (
        "_check_paths",
        """        if kind == ItemKind.FOLDER:
            folders.add(path)
""",
        "        folders.add(path)\n",
        "tests/format/sections/test_recipe.py::test_a_recipe_that_breaks_a_rule_is_refused",
    ),
    "a link of a stored folder may lead out of it through another link": (
        "_checked_target",
        "or _UP in behind or",
        "or",
        "tests/format/sections/test_recipe.py::test_a_recipe_that_breaks_a_rule_is_refused",
    ),
    "files of a stored folder may share bytes of an entry": (
        "_pieces",
        "        ends[number] = start + length\n",
        "        ends[number] = max(start, length)\n",
        "tests/format/sections/test_recipe.py::test_a_recipe_decodes_to_the_items_that_were_encoded",
    ),
    "a fresh host lists transactions/ after commits/": (
        "look_at_all",
        """            names = open_names(repo, hashed)
            names |= _of_run((txid for txid, _ in list_names(repo)), hashed)
""",
        """            names = _of_run((txid for txid, _ in list_names(repo)), hashed)
            names |= open_names(repo, hashed)
""",
        "tests/history/test_following.py::test_a_fresh_host_saves_later_than_saves_that_were_announced_but_not_committed",
    ),
    "a fresh host trusts listed names of a store that may have been replaced": (
        "_load",
        "    if head <= known.head:",
        "    if True:",
        "tests/history/test_following.py::test_a_fresh_host_lists_names_instead_of_reading_many_announcements",
    ),
    "a rewrite whose slot is taken commits with the next number": (
        "Transaction.rewrite",
        "            self._repo.put_record(commit_key(log, number), record)\n",
        """            try:
                self._repo.put_record(commit_key(log, number), record)
            except Conflict:
                self._repo.put_record(commit_key(log, number + 1), record)
""",
        "tests/upkeep/test_rewrite.py::test_whoever_takes_the_slot_first_wins",
    ),
    "a rewriter without a response gives up while its slot is free": (
        "Transaction.abort",
        "revoke(self._repo, self.txid, text, _slots(self.began))",
        "revoke(self._repo, self.txid, text)",
        "tests/upkeep/test_rewrite.py::test_a_rewriter_that_gets_no_response_takes_its_slot_before_it_fails",
    ),
    "a forgotten checkpoint is rewritten": (
        "rewrite",
        "if not base.visible or refresh",
        "if not base.live or refresh",
        "tests/upkeep/test_rewrite.py::test_a_rewrite_of_an_older_state_changes_nothing",
    ),
    "a gap in a listed log is not read": (
        "_entries",
        "        for number in range(highest):\n",
        "        for number in {0, highest - 1}:\n",
        "tests/history/test_folding.py::test_a_log_names_places_and_which_of_them_are_current",
    ),
    "a load fails if gc deleted its blobs": (
        "EntryReader._run",
        "            other = self._other(tried)\n",
        "            other = None\n",
        "tests/loading/test_rewritten.py::test_a_load_continues_from_the_new_location_of_a_rewritten_checkpoint",
    ),
    "a load whose blobs are gone tries only current places": (
        "others",
        "list_commits(repo).placed() if",
        "list_commits(repo).live() if",
        "tests/loading/test_rewritten.py::test_a_load_continues_at_old_places_with_entries_that_the_current_ones_lack",
    ),
    "a load keeps the locations of its first commit": (
        "EntryReader._run",
        "        left = [changed(want, table=None) for want in wants]\n",
        "        left = list(wants)\n",
        "tests/loading/test_rewritten.py::test_a_load_continues_from_the_new_location_of_a_rewritten_checkpoint",
    ),
    "a restored checkpoint counts as mirrored if its copy is forgotten": (
        "_counted",
        "    return () if was_hidden else copy.existing\n",
        "    return copy.existing\n",
        "tests/upkeep/copies/test_mirrored.py::test_a_copy_that_is_still_hidden_after_a_restore_does_not_count",
    ),
    "places with the same entries as mirrored ones must themselves be in the mirror": (
        "_lacking",
        "any(other.holds(one) for other in held)",
        "any(other.record.head == one.record.head for other in held)",
        "tests/upkeep/copies/test_mirrored.py::test_all_existing_entries_must_be_in_the_mirror",
    ),
    "a number whose response was lost is skipped": (
        "_announce",
        "            except Conflict:\n                # another",
        "            except CasckptError:\n                # another",
        "tests/history/test_announcements.py::test_a_failed_announcement_does_not_leave_a_gap_in_the_numbers",
    ),
    "a save that slept may use an announcement number that gc has deleted": (
        "_announce",
        "if number and _is_deleted(repo, run, number - 1):",
        "if False:",
        "tests/upkeep/gc/test_recovery_logs.py::test_a_save_that_slept_uses_no_number_that_was_deleted",
    ),
    "a look does not notice that gc deletes the announcement that it has read last": (
        "_read_on",
        "return not _is_deleted(repo, run, known.head)",
        "return True",
        "tests/upkeep/gc/test_recovery_logs.py::test_announcements_that_are_deleted_during_a_look_are_noticed",
    ),
    "a host whose announcements gc has deleted takes the store for another one": (
        "look",
        "if _lowest(repo, run) > known.head and _is_same_store(repo):",
        "if False:",
        "tests/upkeep/gc/test_recovery_logs.py::test_a_host_whose_announcements_are_all_deleted_reads_on",
    ),
    "gc deletes announcements that were just created": (
        "_is_needed",
        "record.time > since or ",
        "",
        "tests/upkeep/gc/test_recovery_logs.py::test_the_newest_announcement_stays",
    ),
    "a watch behind a checkpoint whose log is deleted yields only later saves": (
        "Watcher._begin_behind",
        " and not self._is_over(commit.txid)",
        "",
        "tests/upkeep/gc/test_recovery_logs.py::test_a_watch_behind_a_checkpoint_whose_log_is_deleted_yields_old_copies_too",
    ),
    "an announced record that does not exist yet is dropped": (
        "_log_of",
        "    if commit is not None and not commit.live:\n",
        "    if commit is None or not commit.live:\n",
        "tests/history/test_announcements.py::test_announced_records_that_do_not_exist_yet_are_read_later",
    ),
    "a follower does not notice a replaced store": (
        "_read_on",
        "    if head is None or (isinstance(head, Announced) and before not in (None, head)):\n",
        "    if False:\n",
        "tests/history/test_announcements.py::test_a_run_is_read_again_after_its_backup_was_restored",
    ),
    "a watch drops announced records that do not exist yet": (
        "Expected.judge",
        """        if seen is None:
            self._wait(txid)
""",
        """        if seen is None:
            self.drop(txid)
""",
        "tests/contents/test_watching.py::test_a_checkpoint_is_not_yielded_before_its_record_exists",
    ),
    "a watch ignores saves in progress": (
        "Watcher._begin_at_head",
        """        self._note_open()
        last = newest""",
        """        last = newest""",
        "tests/contents/test_watching.py::test_a_save_in_progress_is_yielded_regardless_of_when_it_was_announced",
    ),
    "a watch does not notice a replaced store": (
        "Watcher._poll",
        "self._expected.polls % _CHECK == 0",
        "False",
        "tests/contents/test_watching.py::test_saves_into_a_restored_backup_of_the_store_are_yielded",
    ),
    "a listing shows forgotten checkpoints as visible": (
        "Listing.visible",
        "self._commits.visible()",
        "self._commits.standing()",
        "tests/store/test_listing.py::test_a_listing_shows_forgotten_checkpoints_separately",
    ),
    "a load closes its old blobs before it reads": (
        "resolve_held",
        "        commit = held.enter_context(lease(repo, ref, AN_HOUR)).commit\n",
        """        with lease(repo, ref, AN_HOUR) as let_go:
            commit = let_go.commit
""",
        "tests/store/test_leases.py::test_a_load_holds_a_lease_on_its_checkpoint_until_it_ends",
    ),
    "no process fills a number whose announced record never appeared": (
        "settle",
        "                if number:\n                    keep(repo, txid, number)\n",
        "                if number:\n                    continue\n",
        "tests/upkeep/gc/test_recovery.py::test_gc_fills_log_numbers_that_were_announced_long_ago",
    ),
    "gc deletes blobs of forgotten checkpoints": (
        "spare_roots",
        "for commit, places in every if places.txid",
        "for commit, places in every if not commit.is_forgotten and places.txid",
        "tests/upkeep/gc/test_wait.py::test_a_checkpoint_committed_and_forgotten_during_the_wait_is_kept",
    ),
    "a gc does not restore a tagged checkpoint that a gc forgot": (
        "execute",
        "        bring_back(repo, plan, done)\n",
        "",
        "tests/upkeep/gc/test_purge.py::test_the_next_gc_restores_tagged_checkpoints",
    ),
    "a gc restores a leased checkpoint that a user forgot": (
        "_without_end",
        "    return {name: tag for name, tag in named.items() if tag.expires is None}\n",
        "    return dict(named)\n",
        "tests/upkeep/gc/test_purge.py::test_an_expiring_tag_protects_its_checkpoint_until_an_hour_after_its_end",
    ),
    "a gc restores under a later number": (
        "bring_back",
        "    _each_unless_changed(repo, partial(append, kind=Restored), wanted, done.restored, done.refused)\n",
        """    wanted = [list_commits(repo).commits[commit.txid] for commit in wanted]
    _each_unless_changed(repo, partial(append, kind=Restored), wanted, done.restored, done.refused)
""",
        "tests/upkeep/gc/test_purge.py::test_a_restore_by_gc_takes_effect_only_if_it_gets_the_next_log_number",
    ),
    "a gc that restores lists tags before it reads logs": (
        "plan_retiring",
        "    now = repo.clock()\n",
        "    commits, now = list_commits(repo), repo.clock()\n",
        "tests/upkeep/gc/test_purge.py::test_gc_reads_logs_before_it_lists_tags",
    ),
    "a gc undoes a thinning although a tag is about to move": (
        "thinned_though_claimed",
        " and one.old and one.moved_at <= since]",
        " and one.old]",
        "tests/upkeep/test_thin.py::test_gc_brings_back_what_was_thinned_although_a_process_that_died_had_tagged_it",
    ),
    "a tagged checkpoint stays thinned after a killed thin": (
        "settle",
        "    for commit in thinned_though_claimed(repo, listed, since):\n",
        "    for commit in ():\n",
        "tests/upkeep/test_thin.py::test_gc_brings_back_what_was_thinned_although_a_process_that_died_had_tagged_it",
    ),
    "a tag accepts a checkpoint that was thinned meanwhile": (
        "set_tag",
        "if not now.visible or _needed(now, commit) != now.places:",
        "if not now.visible:",
        "tests/upkeep/test_thin.py::test_a_tag_set_during_thinning_keeps_the_checkpoint_complete",
    ),
    "tags are not listed again immediately before a purge": (
        "retire",
        "    held = _barred(repo, due)\n",
        "    held: set[TxId] = set()\n",
        "tests/upkeep/gc/test_purge.py::test_a_tag_set_on_a_twin_after_the_plan_prevents_the_purge",
    ),
    "tags are listed before a gc forgets": (
        "retire",
        """    _each_unless_changed(repo, forget, plan.forget, done.forgotten, done.refused)
    now = {commit.txid: commit for commit in done.forgotten}  # as this gc last read them
    due = [now.get(commit.txid, commit).at(commit.places) for commit in plan.purge]
    check_requirements(repo)  # again, because there may be new requirements for writers
    held = _barred(repo, due)
""",
        """    named = _tags_now(repo)
    _each_unless_changed(repo, forget, plan.forget, done.forgotten, done.refused)
    now = {commit.txid: commit for commit in done.forgotten}  # as this gc last read them
    due = [now.get(commit.txid, commit).at(commit.places) for commit in plan.purge]
    check_requirements(repo)  # again, because there may be new requirements for writers
    claims, by_log = _Claims(named, list_commits(repo)), grouped(due, lambda commit: commit.txid)
    held = {txid for txid, ends in by_log.items() if claims.on(ends[-1], ends)}
""",
        "tests/upkeep/gc/test_purge.py::test_a_lease_granted_while_gc_forgets_protects_its_checkpoint",
    ),
    "the clock is read after tags are listed": (
        "list_tags.read",
        "        return _read_newest(repo, prefix, _newest_entries(repo, prefix, listed), since, anew=anew)\n",
        (
            "        entries = _newest_entries(repo, prefix, listed)\n"
            "        return _read_newest(repo, prefix, entries, repo.clock() - slack, anew=anew)\n"
        ),
        "tests/upkeep/gc/test_purge.py::test_gc_reads_the_clock_before_it_lists_tags",
    ),
    "a tag is recorded before it is set": (
        "set_tag",
        "    tag = write_generation(repo, name, number + 1, commit)\n",
        "    record_tag(repo, commit, name, number + 1)\n    tag = write_generation(repo, name, number + 1, commit)\n",
        "tests/history/test_tags.py::test_exactly_one_of_eight_simultaneous_moves_of_a_tag_succeeds",
    ),
    "a tag that is set is not recorded": (
        "set_tag",
        "            record_tag(repo, now, name, tag.generation)\n",
        "",
        "tests/history/test_tags.py::test_a_tag_that_a_restored_copy_lacks_is_damaged_until_it_is_set_or_deleted",
    ),
    "a lost tag that is set again begins at its first generation": (
        "set_tag",
        "newest_generation(repo, name, listed)",
        "newest_generation(repo, name)",
        "tests/history/test_tags.py::test_a_tag_that_a_restored_copy_lacks_is_damaged_until_it_is_set_or_deleted",
    ),
    "a lost tag cannot be deleted": (
        "delete_tag",
        "newest_generation(repo, name, list_commits(repo))",
        "newest_generation(repo, name)",
        "tests/history/test_tags.py::test_a_tag_that_a_restored_copy_lacks_is_damaged_until_it_is_set_or_deleted",
    ),
    "a tag that one listing lacks counts as lost": (
        "_generations",
        "    if lost and again:\n",
        "    if lost and not again:\n",
        "tests/history/test_tags.py::test_a_tag_deleted_and_cleaned_up_while_tags_are_listed_is_not_missing",
    ),
    "a gc does not notice that tags are lost": (
        "plan_retiring",
        ", slack=FOREIGN_CLOCKS, listed=commits)",
        ", slack=FOREIGN_CLOCKS)",
        "tests/upkeep/test_saves.py::test_rules_refuse_a_store_that_was_restored_without_its_tags",
    ),
    "a rotation does not notice that tags are lost": (
        "rotate",
        "tags(repo, slack=FOREIGN_CLOCKS, listed=listed)",
        "tags(repo, slack=FOREIGN_CLOCKS)",
        "tests/upkeep/test_saves.py::test_rules_refuse_a_store_that_was_restored_without_its_tags",
    ),
    "a rule that thins does not notice that tags are lost": (
        "plan_thin",
        "_barring(repo, tagged=tagged, listed=listed)",
        "_barring(repo, tagged=tagged)",
        "tests/upkeep/test_saves.py::test_rules_refuse_a_store_that_was_restored_without_its_tags",
    ),
    "a gc counts checkpoints of another store": (
        "plan_retiring",
        "    check_own(repo, commits.visible())\n",
        "",
        "tests/upkeep/test_saves.py::test_rules_refuse_checkpoints_of_another_store_until_they_are_forgotten",
    ),
    "a rotation counts checkpoints of another store": (
        "rotate",
        "    check_own(repo, visible)\n",
        "",
        "tests/upkeep/test_saves.py::test_rules_refuse_checkpoints_of_another_store_until_they_are_forgotten",
    ),
    "a rule that thins counts checkpoints of another store": (
        "plan_thin",
        "        check_own(repo, listed.visible())\n",
        "",
        "tests/upkeep/test_saves.py::test_rules_refuse_checkpoints_of_another_store_until_they_are_forgotten",
    ),
    "the record of a copied checkpoint names the store that it came from": (
        "Transaction.commit",
        "store=self._repo.marker.store_id, who",
        "store=record.store, who",
        "tests/history/test_transactions.py::test_a_commit_names_the_store_in_which_it_was_made_and_by_whom",
    ),
    "a purge takes a later number": (
        "append",
        "        if _holds(now, wanted):\n            return now\n",
        (
            "        if _holds(now, wanted):\n            return now\n"
            "        if now.last in _AFTER[wanted]:\n            return append(repo, now, kind)\n"
        ),
        "tests/upkeep/gc/test_purge.py::test_a_purge_takes_effect_only_if_it_gets_the_next_log_number",
    ),
    "a tag protects only its own commit from purges": (
        "tagged_txids",
        "    return {commit.txid for commit in commits if commit.id in named}",
        (
            "    named = {tag.txid for tag in found.values()}  # type: ignore[misc]\n"
            "    return {commit.txid for commit in commits if commit.txid in named}"
        ),
        "tests/upkeep/gc/test_purge.py::test_a_tag_set_on_a_twin_after_the_plan_prevents_the_purge",
    ),
    "a forgotten twin frees the blobs of a tagged checkpoint": (
        "_Claims.__init__",
        "grouped(listed.visible() if named else (), lambda commit: commit.id)",
        """{
            id: some if len(some) > 1 else [one for one in some if one.visible]
            for id, some in grouped(listed.live(), lambda commit: commit.id).items()
        }""",
        "tests/upkeep/gc/test_purge.py::test_a_forgotten_twin_does_not_allow_a_purge",
    ),
    "an overwritten checkpoint returns when its replacement is forgotten": (
        "_forgotten_though_tagged",
        " and last[one.run, one.step] == one.id]",
        "]",
        "tests/upkeep/gc/test_purge.py::test_an_overwritten_checkpoint_remains_forgotten_if_its_successor_is_forgotten",
    ),
    "a gc ignores a tag that expired by its own clock": (
        "_tags_now",
        "    return tags(repo, slack=FOREIGN_CLOCKS)\n",
        "    return tags(repo)\n",
        "tests/upkeep/gc/test_purge.py::test_gc_reads_the_clock_before_it_lists_tags",
    ),
    "a lease is granted on a forgotten checkpoint": (
        "_granted",
        "    if not now.visible:\n        take_back",
        "    if not now.live:\n        take_back",
        "tests/history/test_leases.py::test_a_tag_is_not_granted_if_its_checkpoint_disappears_in_the_meantime",
    ),
    "the log is read before a lease is put": (
        "hold",
        "    tag = write_generation(repo, name, number + 1, commit, expires=_end(repo.clock, seconds))\n",
        (
            "    seen = refresh(repo, commit)\n"
            "    tag = write_generation(repo, name, number + 1, commit, expires=_end(repo.clock, seconds))\n"
            "    if seen.visible:\n        return tag, seen\n"
        ),
        "tests/history/test_leases.py::test_a_tag_is_not_granted_if_its_checkpoint_disappears_in_the_meantime",
    ),
    "a late renewal is not checked again": (
        "renew",
        "    if lease.expires is not None and clock() <= lease.expires:",
        "    if lease.expires is not None:",
        "tests/history/test_leases.py::test_a_late_renewal_takes_a_new_lease_if_its_checkpoint_is_still_visible",
    ),
    "the clock of a renewal is read before its put": (
        "renew",
        """    end = _end(clock, seconds)
    try:
        made = write_generation(repo, lease.name, lease.generation + 1, commit, expires=end)
""",
        """    end, read = _end(clock, seconds), clock()
    clock = lambda: read
    try:
        made = write_generation(repo, lease.name, lease.generation + 1, commit, expires=end)
""",
        "tests/history/test_leases.py::test_a_late_renewal_takes_a_new_lease_if_its_checkpoint_is_still_visible",
    ),
    "a lease that another process ended is renewed": (
        "renew",
        "        if lease.name not in found.tags:\n",
        "        if False:\n",
        "tests/history/test_leases.py::test_a_lease_that_a_different_process_ended_is_not_renewed_even_after_a_gc",
    ),
    "the generation that ends a lease is deleted at once": (
        "_is_over",
        "    return record.txid is None if record.expires is None else record.expires < since\n",
        "    return record.txid is None or (record.expires is not None and record.expires < since)\n",
        "tests/history/test_leases.py::test_a_lease_that_a_different_process_ended_is_not_renewed_even_after_a_gc",
    ),
    "a lease that expired less than an hour ago is deleted": (
        "remove_old_generations",
        "    since = repo.clock() - FOREIGN_CLOCKS",
        "    since = repo.clock()",
        "tests/history/test_leases.py::test_gc_deletes_a_lease_an_hour_after_it_expired",
    ),
    "a lease of a process that may not delete does not end": (
        "end_lease",
        "        end_generation(repo, lease.name, lease.generation + 1, lease)\n",
        "        pass\n",
        "tests/history/test_leases.py::test_the_leases_of_a_process_that_may_not_delete_also_end",
    ),
    "the newest generation of an expired tag is deleted": (
        "remove_old_generations",
        "((PREFIX, 1), (LEASES, 0))",
        "((PREFIX, 0), (LEASES, 0))",
        "tests/history/test_tags.py::test_only_the_newest_generation_of_an_expired_tag_is_kept",
    ),
    "old generations are deleted while the newest counts": (
        "remove_old_generations",
        "not isinstance(record, CasckptError) and _is_over(record, since)",
        "not isinstance(record, CasckptError)",
        "tests/history/test_tags.py::test_only_the_newest_generation_of_an_expired_tag_is_kept",
    ),
    "a gc does not check the requirements for writers": (
        "_Collection._finish",
        "        check_requirements(self.repo)\n        _settle_records(",
        "        _settle_records(",
        "tests/upkeep/gc/test_purge.py::test_a_requirement_added_during_a_gc_stops_its_deletion",
    ),
    "a transaction checks the requirements before it is open": (
        "begin",
        """    repo.put_record(transaction_key(txid), began)
    return _allowed(repo, Transaction(repo, began, seen=seen))
""",
        """    check_requirements(repo)
    repo.put_record(transaction_key(txid), began)
    return Transaction(repo, began, seen=seen)
""",
        "tests/repository/test_reading.py::test_a_transaction_begun_while_a_requirement_is_set_is_rejected",
    ),
    "an existing record counts as durable": (
        "Repository._put_once",
        "                self.settle(key)\n",
        "                pass\n",
        "tests/repository/test_repository.py::test_a_record_that_does_not_become_durable_raises_an_error",
    ),
    "an existing commit counts as durable": (
        "Transaction._committed",
        "            self._repo.settle(commit_key(self.txid))\n",
        "            pass\n",
        "tests/store/test_durable.py::test_a_save_whose_names_do_not_become_durable_raises_an_error",
    ),
    "the name of a commit is not made durable": (
        "LocalStore._create.create",
        "            if settle:  # even",
        "            if settle and folder != 'commits':  # even",
        "tests/store/test_power.py::test_everything_present_after_a_power_loss_is_complete",
    ),
    "a gc deletes blobs for records that are not durable": (
        "_Collection._finish",
        """        _settle_records(self.repo)
        self.deleted |= _delete(""",
        "        self.deleted |= _delete(",
        "tests/upkeep/gc/test_gc.py::test_gc_makes_the_records_it_read_durable_before_it_deletes",
    ),
    "a tag that is not granted remains": (
        "set_tag",
        """            if refresh(repo, now) == now:  # for example, another checkpoint took its run and step
                take_back(repo, tag, before.tags.get(name))
""",
        "            if refresh(repo, now) == now:  # for example, another checkpoint took its run and step\n",
        "tests/history/test_tags.py::test_a_tag_is_undone_if_its_checkpoint_is_being_purged_or_overwritten",
    ),
    "a signature of another checkpoint counts": (
        "message",
        '    return DOMAIN + id.encode() + b"\\n"',
        "    return DOMAIN",
        "tests/store/test_signatures.py::test_tampered_stores_are_rejected",
    ),
    "only the head of a manifest is verified": (
        "PieceReader._has_hash",
        "        return cell_digest(data) == self._hashes[_HASH * group : _HASH * (group + 1)]\n",
        "        return True\n",
        "tests/store/test_forged.py::test_all_readers_reject_different_bytes_under_a_signed_id",
    ),
    "a section that the index does not name is copied": (
        "Manifest.section",
        "            if name in _READERS and not getattr(self, _READERS[name]).prove(data):\n",
        "            if False:\n",
        "tests/store/test_forged.py::test_a_forged_thinned_checkpoint_is_rejected",
    ),
    "a cached manifest matches any id": (
        "_read",
        "    if held is not None and held.id == record.manifest and not held.is_damaged:\n",
        "    if held is not None and not held.is_damaged:\n",
        "tests/store/test_forged.py::test_a_verified_manifest_is_not_used_for_a_different_id",
    ),
    "a local store is not checked for signatures": (
        "as_trusting",
        "    opened.repository.trusted = like.repository.trusted\n",
        "",
        "tests/frontends/megatron/test_training_loop.py::test_unsigned_checkpoints_are_rejected_from_folders_if_signatures_are_required",
    ),
    "verify=False is allowed although signatures are required": (
        "check_verified",
        "    if repo.trusted is not None and not verify:",
        "    if False:",
        "tests/store/test_signatures.py::test_verify_false_is_rejected_if_signatures_are_required",
    ),
    "a forged record of a different commit with the same id is accepted": (
        "use",
        "left = [one for one in others(repo, commit.id, tried) if _shared_fields(one.committed) == shared]",
        "left = others(repo, commit.id, tried)",
        "tests/store/test_signatures.py::test_tampered_stores_are_rejected",
    ),
    "a commit record may belong to another run and step": (
        "_checked",
        "    if isinstance(record, Committed) and (run_hash(record.run), record.step) != (name.run_hash, name.step):",
        "    if False:",
        "tests/store/test_signatures.py::test_tampered_stores_are_rejected",
    ),
    "a checkpoint found by its id has the record's present content": (
        "_by_its_log",
        "now is not None and now.live and now.id == commit.id else None",
        "now is not None and now.live else None",
        "tests/store/test_signatures.py::test_either_all_ranks_load_a_signed_checkpoint_or_none_does",
    ),
    "unsigned metadata of the record is used although a signature is required": (
        "Checkpoint.metadata",
        "        if self.repo.trusted is not None:  # a signature does not cover the record\n",
        "        if False:\n",
        "tests/store/test_signatures.py::test_metadata_comes_from_the_signed_manifest_not_the_record",
    ),
    "a save is signed after its commit": (
        "Leader.conclude",
        """        sign_save(self.repo, record.manifest)
        self._transaction.commit(record)
""",
        """        self._transaction.commit(record)
        sign_save(self.repo, record.manifest)
""",
        "tests/store/test_signatures.py::test_a_save_that_cannot_be_signed_is_not_committed",
    ),
    "a gc deletes signatures of live checkpoints": (
        "remove_signatures",
        "    gone = purged - {commit.id for commit in commits.live()} - copied",
        "    gone = purged",
        "tests/store/test_signatures.py::test_signatures_remain_valid_after_repair_repacking_thinning_and_copies",
    ),
    "a copy skips signatures": (
        "execute",
        """    copy_signatures(source, target, {commit.id for commit in (*plan.missing, *plan.present)})
""",
        "",
        "tests/upkeep/copies/test_replication.py::test_a_copy_copies_signatures_before_its_commit",
    ),
    "the mirror is not checked again immediately before a purge": (
        "execute",
        "        plan = without_unmirrored(repo, plan)  # again",
        "        # again",
        "tests/upkeep/gc/test_gc.py::test_gc_respects_a_mirror_that_was_set_after_the_plan",
    ),
    "errors of a delete are ignored": (
        "_delete.delete",
        "        with noting(refused):\n            repo.storage.delete(key)\n",
        "        with suppress(OSError):\n            repo.storage.delete(key)\n",
        "tests/upkeep/gc/test_candidates.py::test_a_failed_deletion_is_reported_and_the_next_gc_continues",
    ),
    "partially loaded cells are not verified": (
        "Transfer._deliver_all",
        "            elif self.verify and (wrong := _first_wrong(",
        "            elif in_place and (wrong := _first_wrong(",
        "tests/store/test_damage.py::test_a_whole_cell_is_verified_even_if_a_load_needs_only_part_of_it",
    ),
    "only half of a digest is compared": (
        "_first_wrong",
        "!= digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]",
        "[:16] != digests[number * DIGEST_BYTES :][:16]",
        "tests/store/test_damage.py::test_a_verification_compares_every_byte_of_a_digest",
    ),
    "only the first of several cells that are read together is verified": (
        "_first_wrong",
        "    for at in range(0, data.nbytes, step):",
        "    for at in range(0, 1):",
        "tests/loading/test_transfer.py::test_a_wrong_cell_among_consecutive_cells_is_named",
    ),
    "a wrong cell among several that are read together is reported as the first one": (
        "_first_wrong",
        "unit=steps(unit)[number]",
        "unit=steps(unit)[0]",
        "tests/loading/test_transfer.py::test_a_wrong_cell_among_consecutive_cells_is_named",
    ),
    "reads that overlap are merged without limit": (
        "EntryReader._reads",
        "if overlap:",
        "if not items:",
        "tests/loading/test_transfer.py::test_a_long_chain_of_overlapping_ranges_is_read_in_several_parts",
    ),
    "the cells of small tensors are not verified": (
        "Transfer._deliver_small",
        "        wrong = cells.wrong(data) if self.verify else None",
        "        wrong = None",
        "tests/loading/test_small_cells.py::test_a_wrong_cell_among_many_is_named_with_its_blob",
    ),
    "a wrong cell among small tensors is reported as the first one": (
        "SmallReads.wrong",
        "return self._read(int(rows[differ.any(axis=1).argmax()]))",
        "return self._read(int(rows[differ.any(axis=1).argmin()]))",
        "tests/loading/test_small_cells.py::test_a_wrong_cell_among_many_is_named_with_its_blob",
    ),
    "a damaged part of a manifest counts as the cell of a small tensor": (
        "Manifest.whole_cells",
        "found.is_whole & has_cells & has_rows",
        "found.is_whole & has_rows",
        "tests/loading/test_small_cells.py::test_a_damaged_part_of_the_manifest_is_named_with_its_tensor",
    ),
    "a decoded cell is not verified": (
        "Transfer._decode",
        "            if not self.verify or cell_digest(into) == cell.digest:",
        "            if into:",
        "tests/loading/test_frames.py::test_only_a_load_with_verification_computes_hashes",
    ),
    "separate ranges of a buffer are copied to a GPU in one copy": (
        "Runs.add",
        "(run.box, run.hi, run.stop) == (unit.box, unit.lo, start)",
        "(run.box, run.hi) == (unit.box, unit.lo)",
        "tests/loading/test_planned_reads.py::test_units_that_are_not_adjacent_in_both_are_copied_individually",
    ),
    "an unchanged small tensor in a blob that must not be reused is reused": (
        "Upload._write_small",
        "~(usable[rows] & self._same_small(",
        "~(self._same_small(",
        "tests/saving/test_local_entries.py::test_small_tensors_in_worn_blobs_are_stored_again",
    ),
    "small tensors count as unchanged if the first of them is unchanged": (
        "Upload._write_small",
        "rows = rows[1:][~(usable[1:] &",
        "rows = rows[:0]  # ~(usable[1:] &",
        "tests/saving/test_local_entries.py::test_small_tensors_are_stored_like_cells",
    ),
    "a new small tensor remains after the known ones that preceded it in the buffer": (
        "Upload._add_small",
        "buffer[at : at + nbytes] = buffer[lo : lo + nbytes]",
        "buffer[lo : lo + nbytes] = buffer[lo : lo + nbytes]",
        "tests/saving/test_local_entries.py::test_small_tensors_are_stored_like_cells",
    ),
    "a small tensor that equals an encoded cell is described as a raw one": (
        "Upload._add_small",
        "if place.frame is not None:",
        "if place.frame is not None and place.blob >= len(self.known.blobs):",
        "tests/saving/test_local_entries.py::test_a_small_tensor_that_equals_an_encoded_cell_is_stored_in_full",
    ),
    "a save does not keep the memory of small tensors": (
        "block_of",
        "nbytes, storage)",
        "nbytes, torch.UntypedStorage())",
        "tests/saving/test_local_entries.py::test_planned_cells_keep_the_memory_of_their_tensors_alive",
    ),
    "a tensor that the parent divides differently counts as a single new cell": (
        "_small_cells",
        "source.dtype, source.shape) is None",
        "source.dtype, source.shape) is None or True",
        "tests/saving/test_local_entries.py::test_a_small_tensor_is_split_like_the_parents",
    ),
    "a rank that writes a part of a tensor in columns writes all of it": (
        "_limited",
        "limits == [(0, prod(source.shape))]",
        "limits != [(0, 0)]",
        "tests/saving/test_layout.py::test_an_owned_tensor_is_saved_from_its_owner",
    ),
    "groups that begin with a large cell lie between small ones": (
        "plan_work",
        "label + (cells[0].nbytes < LEAF_BYTES)",
        "label",
        "tests/saving/test_local_entries.py::test_small_tensors_are_stored_like_cells",
    ),
    "cells of the parent that are only partly in a shard are reused": (
        "_cuts",
        "if region.lo <= stored.lo and stored.hi <= region.hi:",
        "if stored.lo < region.hi:",
        "tests/plan/test_cells.py::test_a_save_from_more_ranks_shares_the_cells_that_new_boundaries_do_not_split",
    ),
    "separate cells are copied from a GPU in one copy": (
        "Copier.copy",
        "if other.memory is not cell.memory or other.start != stop or",
        "if other.memory is not cell.memory or",
        "tests/saving/test_upload.py::test_nonconsecutive_cells_are_copied_separately",
    ),
    "a part of a tensor on a GPU counts as its start": (
        "_Tensors._together",
        "return self._flat[region.lo - held.lo : region.hi - held.lo]",
        "return self._flat[: region.hi - region.lo]",
        "tests/tensors/test_gpu.py::test_a_load_converts_dtypes",
    ),
    "a coded cell is replaced by its last base": (
        "new_item",
        "    return PlannedRead(unit, key, [], root, frames[::-1])",
        "    return PlannedRead(unit, key, [], root)",
        "tests/loading/test_frames.py::test_each_version_of_a_chain_loads_unchanged",
    ),
    "the bases of a damaged cell are not verified": (
        "decoded",
        "    if cell_digest(plain) != cell.digest:",
        "    if base is not None and cell_digest(plain) != cell.digest:",
        "tests/loading/test_frames.py::test_a_damage_error_names_the_blob_and_all_its_checkpoints",
    ),
    "a prefetch omits bases": (
        "EntryReader.blobs",
        "sorted({batch.blob for batch in self._reads(wants).every})",
        "sorted({batch.blob for batch in self._reads(wants).batches})",
        "tests/loading/test_frames.py::test_a_prefetch_fetches_everything_that_a_load_needs",
    ),
    "an extent may end one past its blob": (
        "_extents",
        "_check(blob, offset, (hi - lo) * itemsize, blob_sizes)",
        "_check(blob, offset, (hi - lo - 1) * itemsize, blob_sizes)",
        "tests/format/sections/test_tables.py::test_an_extent_beyond_the_end_of_its_blob_is_rejected",
    ),
    "a row of a table may cross the end of its span": (
        "_extents",
        "if not cells or number > last:",
        "if not cells:",
        "tests/format/sections/test_tables.py::test_rows_that_do_not_match_their_cells_are_rejected",
    ),
    "a copy does not make the names of its blobs durable": (
        "_Copy._copy_blobs",
        "        self.target.storage.settle(uploader_folder(self.txid))\n",
        "",
        "tests/upkeep/copies/test_replication.py::test_blob_names_are_durable_before_the_record",
    ),
    "another rank's manifest in a shared copy is not checked": (
        "_Copy._existing_manifest",
        "        if blobs.check(self.target, there.blobs):",
        "        if False:",
        "tests/upkeep/copies/test_replication.py::test_a_leftover_manifest_with_missing_blobs_is_not_committed",
    ),
    "the digest covers the caller's memory instead of the written buffer": (
        "Upload._write",
        "source, digest = self.sources[cell.source], cell_digest(target)",
        "source, digest = self.sources[cell.source], cell_digest(cell.data())",
        "tests/saving/test_leader.py::test_written_bytes_match_the_hashed_bytes_even_if_the_tensor_changes",
    ),
    "a new file is not synced": (
        "FileMaker._create",
        "                self._fill(fd, data)\n                syscalls.link_unnamed",
        "                write_all(fd, data, 0)\n                syscalls.link_unnamed",
        "tests/storage/local/test_newfile.py::TestEachWay::test_after_a_failed_fsync_the_object_is_written_to_a_new_file",
    ),
    "an exclusive create in memory overwrites": (
        "MemoryStore.put",
        """            if key in self._objects:
                raise AlreadyExists(key)
            self._objects[key] = content
""",
        """            self._objects[key] = content
""",
        "tests/storage/test_memory.py::TestContract::test_put_never_replaces_an_object",
    ),
    "an exclusive create in a folder overwrites": (
        "FileMaker._create",
        "                syscalls.link_unnamed(fd, folder, name)",
        (
            "                with suppress(FileNotFoundError):\n                    os.unlink(name, dir_fd=folder)\n"
            "                syscalls.link_unnamed(fd, folder, name)"
        ),
        "tests/storage/local/test_store.py::TestContract::test_exactly_one_of_several_threads_creates_a_key",
    ),
    "reused blobs are not checked before the commit": (
        "_used",
        "for number in sorted(numbers) if",
        "for number in () if",
        "tests/saving/test_reuse.py::TestDamage::test_cells_of_a_missing_or_truncated_blob_are_stored_again",
    ),
    "commits made while gc waits do not count as roots": (
        "_Collection._finish",
        "        spare_roots(self.repo, found, self.plan.min_age)\n",
        "",
        "tests/upkeep/gc/test_interleavings.py::test_live_blobs_are_never_lost_and_all_others_are_deleted",
    ),
    "gc does not wait for open transactions": (
        "_Collection._finish",
        "        if self.still:\n            return False",
        "        if False:\n            return False",
        "tests/upkeep/gc/test_wait.py::test_gc_reports_a_timeout_and_the_next_gc_continues",
    ),
    "a minimum age is ignored": (
        "plan_retiring",
        "        elif until > now and",
        "        elif until > now + (1 << 60) and",
        "tests/upkeep/gc/test_gc.py::test_forgotten_checkpoints_are_kept_for_a_day",
    ),
    "a rule removes the newest checkpoint of a run": (
        "_kept_by_rules",
        'yield from (("newest", [last]), ("newest',
        'yield from (("newest", []), ("newest',
        "tests/plan/test_retention.py::test_keep_every_keeps_multiples_of_a_step",
    ),
    "a run is erased although a gc has not yet waited for saves": (
        "execute",
        "if plan.erase and not gc.still",
        "if plan.erase",
        "tests/upkeep/gc/test_erasing.py::test_a_lost_manifest_is_no_sign_that_a_gc_has_waited",
    ),
    "the floor holds for an erased run, too": (
        "MinAge.young",
        " and one.run != self.erased",
        "",
        "tests/upkeep/gc/test_erasing.py::test_nothing_of_the_run_is_left_but_what_others_share",
    ),
    "records of an erased run stay while others share its blobs": (
        "_due",
        "held if is_erased else uploaders",
        "uploaders",
        "tests/upkeep/gc/test_erasing.py::test_nothing_of_the_run_is_left_but_what_others_share",
    ),
    "an erased run waits for the mirror": (
        "without_unmirrored",
        " if one.run != plan.erase}",
        "}",
        "tests/upkeep/gc/test_erasing.py::test_no_answer_of_the_mirror_is_needed",
    ),
    "who may not delete begins to erase a run": (
        "let_go",
        "repo.storage.delete(new_name(repo.clock, repo.entropy))  #",
        "pass  #",
        "tests/upkeep/gc/test_erasing.py::test_who_may_not_delete_erases_nothing",
    ),
    "an idle run is dropped although a save of it is in progress": (
        "idle_runs",
        "run_hash(run) in opened or ",
        "",
        "tests/upkeep/gc/test_idle.py::test_an_idle_run_is_spared_if_somebody_holds_or_names_it",
    ),
    "an idle run is dropped although a visible checkpoint came from it": (
        "idle_runs",
        " or any(naming[one] - {run} for one in names)",
        "",
        "tests/upkeep/gc/test_idle.py::test_an_idle_run_is_spared_if_somebody_holds_or_names_it",
    ),
    "the ephemeral checkpoints of a dropped run are purged at once": (
        "plan_retiring",
        "{commit.run for commit in commits.visible()} - idle",
        "{commit.run for commit in commits.visible()}",
        "tests/upkeep/gc/test_idle.py::test_a_dropped_run_can_be_restored_for_a_week_even_if_it_is_ephemeral",
    ),
    "verify puts a blob into several parts": (
        "verify",
        "int(ref.hash[:8], 16) % parts == index",
        "int(ref.hash[:8], 16) % parts >= index",
        "tests/upkeep/repair/test_verify.py::test_parts_cover_each_blob_once_even_if_others_are_saved_in_between",
    ),
    "a rule removes tagged checkpoints": (
        "plan_retiring",
        "(commit for commit in wanted if commit.txid in tagged)",
        "()",
        "tests/upkeep/gc/test_gc.py::test_tagged_checkpoints_are_neither_forgotten_nor_purged",
    ),
    "a number without a unit is a duration": (
        "_seconds",
        'return 0.0 if duration.strip() == "0" else None',
        "return float(duration) if duration.strip().isdecimal() else None",
        "tests/base/test_units.py::test_the_error_for_a_number_without_a_unit_suggests_a_duration",
    ),
    "gc runs although records are lost": (
        "spare_roots",
        "    check_recorded(repo, pending.sizes, commits.recorded)\n",
        "",
        "tests/upkeep/test_saves.py::test_lost_records_prevent_gc_and_count_as_damage",
    ),
    "a rule forgets checkpoints although records are lost": (
        "_check_first",
        "    check_recorded(repo, stock.sizes, plan.listed.recorded)\n",
        "",
        "tests/upkeep/test_saves.py::test_rules_forget_nothing_after_records_were_lost",
    ),
    "marked blobs are reused": (
        "make_offer",
        "frozenset(blobs.damaged_marks(repo) if commits else ())",
        "frozenset()",
        "tests/saving/test_reuse.py::TestDamage::test_a_marked_blob_is_not_reused",
    ),
    "ranks may name different references": (
        "check_same",
        "    if len(ranks_of) > 1:",
        "    if len(ranks_of) > len(given):",
        "tests/ranks/test_agreement.py::test_the_error_lists_the_checkpoint_named_by_each_rank",
    ),
    "ranks may use different stores": (
        "StoreIdentity.check_shared",
        '            raise self._apart(repo, "a copy of it")',
        "            return",
        "tests/ranks/test_agreement.py::test_a_store_created_by_a_different_host_may_appear_late",
    ),
    "the result of an update is not verified": (
        "_is_made",
        "    if cell_digest(plain) != step.cell.digest:\n",
        "    if False:\n",
        "tests/loading/test_update.py::test_an_update_with_check_repairs_changed_memory",
    ),
    "a verified update skips unchanged cells": (
        "Update._plan",
        "        if old == cell.digest and not self.check:\n",
        "        if old == cell.digest:\n",
        "tests/loading/test_update.py::test_an_update_with_check_repairs_changed_memory",
    ),
    "tied weights get a difference once for each name": (
        "Update._plan",
        "steps.setdefault((old, cell.digest), ",
        "steps.setdefault((id(at.sink), old, cell.digest), ",
        "tests/loading/test_update.py::test_an_update_changes_tied_weights_only_once",
    ),
    "autograd does not notice an update of equal values": (
        "Update.run",
        "        note_writes(tensors)\n",
        "",
        "tests/loading/test_update.py::test_an_autograd_graph_with_values_from_before_an_update_is_rejected",
    ),
    "older generations are deleted before the command succeeds": (
        "Follower._old",
        "        if current not in every or current != self._at(_TOLD):\n",
        "        if current not in every:\n",
        "tests/frontends/test_follow.py::test_a_failed_command_keeps_the_previous_folder",
    ),
    "a command is not repeated after a kill": (
        "Follower._switches",
        "        if held is not None and held != self._at(_TOLD):\n",
        "        if False:\n",
        "tests/frontends/test_follow.py::test_a_failed_command_keeps_the_previous_folder",
    ),
    "a new generation trusts the previous one unchecked": (
        "RegionReader.revise",
        "plan_update(self._reader, wants, held, 0, check=True)",
        "plan_update(self._reader, wants, held, 0, check=False)",
        "tests/frontends/test_follow.py::test_files_with_a_changed_layout_or_damage_are_rewritten",
    ),
    "two followers share one folder": (
        "_alone",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/frontends/test_follow.py::test_a_folder_with_other_contents_is_rejected",
    ),
    "a follower accepts any folder": (
        "_alone",
        "        if not is_ours and not _AVERAGE.fullmatch(path.name) and not _LEFT.fullmatch(path.name):\n",
        "        if False:\n",
        "tests/frontends/test_follow.py::test_a_folder_with_other_contents_is_rejected",
    ),
    "a file is served by a name that may have moved": (
        "_get",
        "    if rest[0] != commit:\n",
        "    if False:\n",
        "tests/frontends/serve/test_hub.py::test_a_tag_or_step_redirects_to_the_commit",
    ),
    "a server accepts any token": (
        "Guard._refusal",
        "        if not any([hmac.compare_digest(given.encode(), one.encode()) for one in self.tokens]):",
        "        if not given:",
        "tests/frontends/serve/test_app.py::test_only_requests_with_a_valid_token_are_answered",
    ),
    "a server accepts any host name": (
        "Guard._refusal",
        "            is_ours = name in _LOCAL or is_loopback(name)\n",
        "            is_ours = True\n",
        "tests/frontends/serve/test_app.py::test_dns_rebinding_is_rejected",
    ),
    "a file is not protected while it is sent": (
        "Leases._taken",
        "                taken.enter_context(self._store.lease(checkpoint, expires=_EXPIRES))\n",
        "                pass\n",
        "tests/frontends/serve/test_hub.py::test_leases_are_not_listed_as_tags",
    ),
    "leases are tags of a hub": (
        "Hub.tags",
        " for name, tagged in self.store.tags().items() if not _LEASE.fullmatch(name)}",
        " for name, tagged in self.store.tags().items()}",
        "tests/frontends/serve/test_hub.py::test_leases_are_not_listed_as_tags",
    ),
    "a conditional range request returns a different version": (
        "_file",
        '    is_current = request.headers.get("if-range", etag) == etag\n',
        "    is_current = True\n",
        "tests/frontends/serve/test_answers.py::test_head_and_conditional_requests_are_answered",
    ),
    "a save fails if it may not remove the files of its transaction": (
        "Transaction._remove_files",
        "        except CasckptError as error:  # for example if writers may not delete\n",
        "        except Conflict as error:\n",
        "tests/store/test_least_rights.py::test_writers_need_no_delete_permission_if_a_different_process_cleans_up",
    ),
    "a probe fails if it may not delete its file": (
        "probe",
        "            with suppress(StorageError):  # writers may lack the permission to delete\n",
        "            with suppress(KeyError):\n",
        "tests/store/test_least_rights.py::test_writers_need_no_delete_permission_if_a_different_process_cleans_up",
    ),
    "parts that a load did not fill count as loaded": (
        "LoadPlan._add_tensor",
        "        is_new = key in self._not_held or entry.key in self._unread\n",
        "        is_new = False\n",
        "tests/loading/test_update_misused.py::test_keys_that_the_load_did_not_fill_are_read",
    ),
    "a cell at a different offset counts as loaded": (
        "common",
        "        if extent.lo != wanted.lo:  # a cell that begins elsewhere is a different cell\n",
        "        if False:\n",
        "tests/plan/test_routes.py::test_a_route_of_an_extent_is_a_route_of_each_cell",
    ),
    "a partly filled sink counts as filled": (
        "Update._left",
        "if made[id(want.sink)] < self._cells[id(want.sink)]]",
        "if not made[id(want.sink)]]",
        "tests/loading/test_update.py::test_any_version_can_be_updated_to_any_other",
    ),
    "a checkpoint that is purged during a read counts as damaged": (
        "damaged_error",
        "    if head in ended:\n",
        "    if False:\n",
        "tests/store/test_gone.py::test_a_checkpoint_purged_while_its_bytes_are_read_is_reported_as_gone",
    ),
    "a held checkpoint is not checked again": (
        "_by_its_log",
        "now is not None and now.live and now.id == commit.id else None",
        "now is not None and now.id == commit.id else None",
        "tests/contents/test_refs.py::test_a_reference_to_a_purged_commit_resolves_to_a_different_commit_of_the_checkpoint",
    ),
    "cached frames are read again": (
        "Update._moves_of",
        "is_undone, kept.get(link))",
        "is_undone, None)",
        "tests/loading/test_update_along.py::test_an_update_by_one_step_reads_what_its_save_wrote",
    ),
    "autograd does not notice a load": (
        "EntryReader._fill",
        "        note_writes(written)",
        "        pass",
        "tests/loading/test_load_autograd.py::test_an_autograd_graph_with_values_from_before_a_load_is_rejected",
    ),
    "the hash of a manifest is not compared": (
        "decode_front",
        "        if decoded[INDEX].digest.hex() != id:",
        "        if False:",
        "tests/format/test_manifest.py::test_a_different_manifest_under_the_same_name_is_reported_as_damage",
    ),
    "a manifest may differ from the one that its record names": (
        "decode_head",
        "    if wanted is not None and digest.hex() != wanted:",
        "    if False:",
        "tests/format/sections/test_head.py::test_a_head_that_differs_from_the_record_is_reported_as_damage",
    ),
    "a piece of a manifest is accepted without its hash": (
        "PieceReader._fetch",
        "self._held[group] = part if right else None",
        "self._held[group] = part",
        "tests/format/sections/test_pieces.py::test_a_flipped_byte_damages_only_its_piece",
    ),
    "a record may contradict its manifest": (
        "_read",
        "        if _shared_fields(record) != _shared_fields(body):",
        "        if False:",
        "tests/contents/test_manifests.py::test_a_record_that_contradicts_its_manifest_is_rejected",
    ),
    "a manifest is restored with other bytes": (
        "_same_manifests",
        "if made is not None and made.head == wanted:",
        "if made is not None:",
        "tests/upkeep/repair/test_repair.py::test_a_manifest_is_restored_from_a_copy_with_different_places_if_this_host_knows_its_places",
    ),
    "rotation removes checkpoints that are not in the mirror": (
        "_retire_at_once",
        "retire(repo, without_unmirrored(repo, plan), done)",
        "retire(repo, plan, done)",
        "tests/upkeep/copies/test_mirror.py::test_rotation_forgets_nothing_while_the_mirror_is_missing",
    ),
    "ranks do not compare their calls before a load": (
        "_resolved.find",
        "        check_same([request.ref for request in requests])\n",
        "",
        "tests/ranks/test_agreement.py::test_loading_different_checkpoints_is_a_conflict",
    ),
    "an exclusive create in a bucket overwrites": (
        "S3Client.create",
        'self._put(key, data, put_id, IfNoneMatch="*")',
        "self._put(key, data, put_id)",
        "tests/storage/remote/test_store.py::TestSeaweed::test_put_never_replaces_an_object",
    ),
    "a put without a response counts as that of a different writer": (
        "RemoteStore.put",
        "            if self._put_id(key) != put_id:\n                raise\n",
        "            raise\n",
        "tests/storage/remote/test_faults.py::test_a_put_succeeds_despite_network_faults",
    ),
    "an object of a different writer counts as our own": (
        "RemoteStore.put",
        "            if self._put_id(key) != put_id:",
        "            if self._put_id(key) is None:",
        "tests/storage/remote/test_store.py::TestSeaweed::test_put_never_replaces_an_object",
    ),
    "a listing of a bucket stops after one page": (
        "RemoteStore._pages",
        "            after = page.after\n            if after is None:",
        "            if True:",
        "tests/storage/remote/s3/test_client.py::test_a_listing_can_span_many_pages",
    ),
    "a read in a bucket ends a byte too early": (
        "S3Object._request",
        'f"bytes={offset}-{end - 1}"',
        'f"bytes={offset}-{end - 2}"',
        "tests/storage/remote/test_store.py::TestSeaweed::test_ranges_of_an_object_are_read",
    ),
    "a refused delete in a bucket counts as successful": (
        "S3Client.delete",
        """            answer = self.call("delete_object", Key=self.prefix + key)
        except ClientError as error:
            if status_of(error) != 404:""",
        """            answer = self.call("delete_object", Key=self.prefix + key)
        except ClientError as error:
            if status_of(error) not in (403, 404):""",
        "tests/storage/remote/test_faults.py::test_a_refused_delete_raises_an_error",
    ),
    "a reader in a bucket confuses objects of one size": (
        "S3Object._check_version",
        "        if (self._etag, self._size) != (etag, size):",
        "        if self._size != size:",
        "tests/storage/remote/test_store.py::TestSeaweed::test_an_open_reader_does_not_mix_two_objects",
    ),
    "temporary failures are not retried": (
        "RemoteStore.again",
        "pause = next(pauses, None) if failure.again else None",
        "pause = None",
        "tests/storage/remote/test_faults.py::test_a_put_succeeds_despite_network_faults",
    ),
    "a silent server has no timeout": (
        "Call.left",
        "        return self._seconds - self._spent\n",
        "        return 1e9\n",
        "tests/storage/remote/test_patience.py::test_attempts_and_pauses_share_the_time_limit_of_a_call",
    ),
    "a commit without a response counts as failed": (
        "Transaction.commit",
        """            try:
                record = self._committed(record)
            except CasckptError:
                raise error from None
""",
        "            raise\n",
        "tests/history/test_transactions.py::test_a_commit_whose_response_was_lost_is_found_or_revoked",
    ),
    "any commit with a transaction's id counts as its checkpoint": (
        "Transaction._committed",
        "        if isinstance(record, Committed) and record.manifest == wanted.manifest:",
        "        if isinstance(record, Committed):",
        "tests/history/test_transactions.py::test_a_commit_of_the_same_checkpoint_by_a_different_process_counts",
    ),
    "bytes in memory serve as a base regardless of their digest": (
        "Coder._delta",
        "if held is None or held.digest != old.digest or len(",
        "if held is None or len(",
        "tests/saving/test_encoder.py::test_simultaneous_saves_of_a_run_do_not_share_kept_cells",
    ),
    "a buffer that a save changes is kept for a later save": (
        "RunMemory.take",
        "        return self.held.pop(name, None)\n",
        "        return self.held.get(name)\n",
        "tests/saving/test_encoder.py::test_simultaneous_saves_of_a_run_do_not_share_kept_cells",
    ),
    "a frame is stored without a test decode": (
        "decodes",
        "        if _equal(into, plain):\n",
        "        if into.nbytes == plain.nbytes:\n",
        "tests/saving/test_encoder.py::test_a_frame_that_decodes_to_different_bytes_is_not_stored",
    ),
    "an older version is not compared with its manifest": (
        "_older",
        "    if [frame.base for frame in frames] != [base.digest for base in bases]:\n",
        "    if len(frames) != len(bases):\n",
        "tests/saving/test_encoder.py::test_an_older_version_is_used_only_if_it_matches_its_manifest",
    ),
    "cells that are no longer in the state remain in memory": (
        "coding",
        "if name not in coder.names:",
        "if False:",
        "tests/saving/test_run_memory.py::test_cells_of_removed_keys_are_released",
    ),
    "intact bytes clear the mark of a wrong frame": (
        "verify",
        "if decode or _name(blob) in marked]",
        "if decode]",
        "tests/upkeep/repair/test_frames.py::test_an_incorrect_frame_is_not_reused_once_detected",
    ),
    "a damaged copy of a blob is restored": (
        "_BlobCopies.fetch",
        " and not prove(reader, ref, data).why:",
        ":",
        "tests/upkeep/repair/test_repair.py::test_a_blob_is_restored_from_a_different_uploader",
    ),
    "a copy does not verify frames": (
        "_frame_of",
        "frame is not None and decodes(frame, plain)",
        "frame is not None",
        "tests/upkeep/copies/test_recoded.py::test_a_frame_that_decodes_to_different_bytes_is_not_written",
    ),
    "bases are not checked before the commit": (
        "PlacedCell.needs",
        "[self.blob, *(link.blob for link in base.chain)]",
        "[self.blob]",
        "tests/saving/test_encoder.py::test_a_missing_cell_is_not_used_as_a_base",
    ),
    "a chain may be one base too long": (
        "choose_base",
        "    if len(deltas) < MAX_DELTAS:\n",
        "    if len(deltas) <= MAX_DELTAS:\n",
        "tests/plan/test_routes.py::test_a_base_is_chosen_from_the_chain_so_that_few_links_remain",
    ),
    "ranges of a blob that only bases use are not counted": (
        "used_bytes",
        "for link in ((extent,) if extent.coding is None else extent.chain)",
        "for link in (extent,)",
        "tests/plan/test_reuse.py::test_used_bytes_include_bases",
    ),
    "a cell is reused although one of its bases must not be": (
        "ReusableCells.usable_cell",
        " and (cell.frame is None or all(self._usable[c.blob] for c in cell.chain))",
        "",
        "tests/plan/test_reuse.py::test_an_encoded_cell_is_found_together_with_its_bases",
    ),
    "blobs of frames count as worn": (
        "mark_worn",
        " and number not in framed",
        "",
        "tests/saving/test_encoder.py::test_each_version_stores_only_its_changes_and_loads_exactly",
    ),
    "bases are read over a network": (
        "Coder._open",
        "if self.repo.storage.traits.remote:",
        "if False:",
        "tests/saving/test_encoder.py::test_on_remote_storage_only_cells_in_memory_are_bases",
    ),
    "the blobs of a checkpoint omit those that hold only bases": (
        "_stored",
        "lambda base: (number(base.blob), base.offset)",
        "lambda base: (0, base.offset)",
        "tests/saving/test_encoder.py::test_each_version_stores_only_its_changes_and_loads_exactly",
    ),
    "marked blobs of a process's own last save are reused": (
        "make_offer",
        "ReuseOffer(last=parent.places.txid, damaged=frozenset(blobs.damaged_marks(repo)))",
        "ReuseOffer(last=parent.places.txid, damaged=frozenset())",
        "tests/saving/test_reuse.py::TestDamage::test_a_marked_blob_is_not_reused",
    ),
    "a process reuses its last share even if another process has saved since": (
        "make_offer",
        "last is not None and last.txid == parent.places.txid",
        "last is not None",
        "tests/saving/test_reuse.py::test_a_process_reuses_cells_that_another_process_saved_after_its_own_last_save",
    ),
    "a process that remembers its last share does not look for new tensors in other runs": (
        "make_offer",
        'has_all = dedup != "store" or',
        'has_all = dedup == "store" or',
        "tests/saving/test_reuse.py::test_a_tensor_that_a_state_gains_is_reused_from_another_run",
    ),
    "cells that the parent did not report count as known": (
        "HealthScan.scan",
        "        if not is_unchanged or source.name in self.unscanned:\n",
        "        if not is_unchanged:\n",
        "tests/saving/test_health_scan.py::test_all_cells_are_scanned_once_if_the_parent_has_no_health",
    ),
    "negative numbers are not checked for health": (
        "_top",
        '    return max(int(most(bits.view(f"<i{kind.width}"))), int(most(bits)) - (1 << (8 * kind.width - 1)))\n',
        '    return max(int(most(bits.view(f"<i{kind.width}"))), 0)\n',
        "tests/saving/test_health_scan.py::test_health_of_a_cell_matches_torch",
    ),
    "a NaN overrides the user's choice": (
        "Leader._healthy",
        "        return False if verdict is None else verdict\n",
        "        return False\n",
        "tests/saving/test_health.py::test_a_save_logs_bad_health_unless_healthy_overrides_it",
    ),
    "the digest of a tensor ignores the order of its cells": (
        "_name",
        "form.encode() + bytes(manifest.raw_cells(entry))",
        "form.encode() + bytes().join(extent.digests for extent in manifest.cells(entry).extents)",
        "tests/loading/test_comparison.py::test_equal_cells_in_a_different_order_produce_a_different_digest",
    ),
    "copies from one read have the same location": (
        "_targets",
        "loose, used = [], used + offset - start",
        "loose, used = [], 0",
        "tests/loading/test_read_bytes.py::test_a_partial_read_is_extended_to_whole_cells_only_if_verified",
    ),
    "a comparison reports positions in the cell instead of the tensor": (
        "_unequal",
        "(part.lo + int(place) for place in (places[0], places[-1]))",
        "(int(place) for place in (places[0], places[-1]))",
        "tests/loading/test_comparison.py::test_a_single_flipped_bit_is_reported",
    ),
    "shared blobs count as exclusive": (
        "BlobUse.alone",
        "numbers[counts == self._users[numbers]]",
        "numbers",
        "tests/upkeep/test_sizes.py::test_each_step_reports_the_bytes_that_only_it_uses",
    ),
    "a blob with cells of a visible checkpoint counts as one with only bases": (
        "Sizes._only_bases",
        "not in bases] if bases else own] = True",
        "not in bases] if bases else own[:0]] = True",
        "tests/upkeep/test_sizes.py::test_bytes_needed_only_as_bases_are_reported",
    ),
    "optimizer state keeps its saved dtype when its parameter is cast": (
        "_OptimizerPlan._as_cast",
        "follows = self._cast and weight",
        "follows = not self._cast and weight",
        "tests/frontends/training_state/test_loading.py::test_state_is_loaded_in_the_dtype_of_its_parameter_and_the_next_step_works",
    ),
    "optimizer state with its own dtype is cast with its parameter": (
        "_OptimizerPlan._as_cast",
        "and entry.dtype == weight.dtype and not stays",
        "and not stays",
        "tests/frontends/training_state/test_loading.py::test_state_whose_dtype_differs_from_its_parameter_keeps_its_dtype",
    ),
    "a step count is cast": (
        "keeps_dtype",
        'return name == "step" or (entry',
        'return name == "steps" or (entry',
        "tests/frontends/training_state/test_loading.py::test_state_whose_dtype_differs_from_its_parameter_keeps_its_dtype",
    ),
    "a resume forgets the cast": (
        "Checkpointer.resume",
        "unread=unread, cast=cast, strict=strict",
        "unread=unread, strict=strict",
        "tests/frontends/training_state/test_loading.py::test_a_checkpointer_loads_and_resumes_into_a_different_dtype",
    ),
    "a value that a user added counts as evidence of a different kind of optimizer": (
        "StateKind.check",
        'is_other = bool(kinds) and names != {"step"}',
        "is_other = not names <= self.keeps()",
        "tests/frontends/training_state/test_added.py::test_state_added_by_the_user_is_restored",
    ),
    "a tensor that a user added beside shards becomes a DTensor": (
        "_is_plain",
        "return (added or entry.shape == ()) and",
        "return entry.shape == () and",
        "tests/frontends/training_state/test_holding.py::test_state_is_stored_as_a_whole_unless_it_has_the_shape_of_a_shard",
    ),
    "restore_checkpoint skips pickled state": (
        "restore_checkpoint",
        "stored.checkpoint, allow_pickle=allow_pickle)",
        "stored.checkpoint)",
        "tests/frontends/transformers/test_callback.py::test_optimizer_state_added_by_the_user_is_restored",
    ),
    "restore_checkpoint refuses a folder that the same job left": (
        "restore_checkpoint",
        "force = force or _is_its_folder(opened, stored.checkpoint, target)",
        "",
        "tests/frontends/transformers/test_callback.py::test_a_frozen_encoder_is_stored_once_for_ten_checkpoints",
    ),
    "restore_checkpoint overwrites the folder of a different training run": (
        "_is_its_folder",
        "path.is_file() and path.read_bytes() == store.read_attachment(checkpoint, STATE)",
        "path.is_file()",
        "tests/frontends/transformers/test_callback.py::test_a_frozen_encoder_is_stored_once_for_ten_checkpoints",
    ),
    "a non-strict load fills modules that read only part of their saved state": (
        "TrainingStateLoad._leave",
        "        if refused:\n",
        "        if refused and self._strict:\n",
        "tests/frontends/training_state/test_model.py::test_keys_that_a_module_saves_but_does_not_read_are_rejected_before_any_change",
    ),
    "hooks of a parent module count as readers of a child's own state": (
        "passed_by",
        "readers = owners if writes else [",
        "readers = [",
        "tests/frontends/training_state/test_model.py::test_keys_that_a_module_reads_are_found_without_calling_it",
    ),
    "a skipped module loses its optimizer state": (
        "TrainingStateLoad._plan",
        "self.new: Collection[str] = {*self._left, *differs}",
        "self.new: Collection[str] = {*differs}",
        "tests/frontends/training_state/test_model.py::test_modules_with_unread_keys_can_be_left_unchanged_as_the_error_advises",
    ),
    "a load in inference mode creates state that no optimizer can update": (
        "normal_tensors",
        "with torch.inference_mode(False), torch",
        "with torch",
        "tests/frontends/training_state/test_inference.py::test_training_continues_after_a_load_in_inference_mode",
    ),
    "a load enables autograd although the caller disabled it": (
        "normal_tensors",
        "grad = torch.is_grad_enabled()",
        "grad = True",
        "tests/frontends/training_state/test_inference.py::test_a_load_does_not_change_the_autograd_mode",
    ),
    "state created in inference mode is filled in place": (
        "_fits",
        "not here.is_inference() and ",
        "",
        "tests/frontends/training_state/test_inference.py::test_state_created_in_inference_mode_is_replaced",
    ),
    "a model created in inference mode is returned outside of it": (
        "ModelTemplate.install",
        "torch.inference_mode() if self._is_of_inference() else nullcontext()",
        "nullcontext()",
        "tests/frontends/training_state/test_inference.py::test_a_model_created_in_inference_mode_is_filled",
    ),
    "replicas are divided among ranks although their samples differ": (
        "Leader.begin",
        "plan.check != self.options.check_replicas or not _agree(requests):",
        "plan.check != self.options.check_replicas:",
        "tests/saving/test_replicas.py::test_a_run_with_drifting_replicas_continues_with_one_warning",
    ),
    "a different parameter is accepted the first time": (
        "judged",
        "not layout.may_differ[row] and key not in memory.saved:\n",
        "not layout.may_differ[row] and key in memory.saved:\n",
        "tests/saving/test_replicas.py::test_a_parameter_that_differs_on_each_rank_is_rejected_on_all_ranks",
    ),
    "a run whose replicas drift apart is stopped": (
        "judged",
        "ratios[other] >= REFUSED",
        "ratios[other] > 0",
        "tests/saving/test_replicas.py::test_a_dtensor_that_drifted_is_saved_from_one_rank",
    ),
    "buffers of norms count as parameters": (
        "",
        '_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})',
        '_STATISTICS = frozenset({"num_batches_tracked"})',
        "tests/saving/test_save_ranks.py::test_differing_statistics_are_saved_from_one_rank",
    ),
    "each save reads the same cells of other ranks again": (
        "_OwnState.remember",
        "        self.memory.compared.turn += 1\n",
        "        self.memory.compared.turn += 0\n",
        "tests/saving/test_replicas.py::test_a_changed_element_is_found_within_64_saves_per_holder",
    ),
    "values with few differences are divided among ranks again": (
        "Leader._remember_replicas",
        "            self.memory.plan = None  # in the next save, one rank writes them\n",
        "            self.memory.plan = self.memory.plan\n",
        "tests/saving/test_replicas.py::test_a_changed_element_is_found_within_64_saves_per_holder",
    ),
    "uncompared values are divided among ranks": (
        "_compared",
        'return np.full(len(layout.held), check != "off")',
        "return np.full(len(layout.held), True)",
        "tests/saving/test_layout.py::test_check_replicas_compares_everything_or_nothing",
    ),
    "a failed save counts as having reported a difference": (
        "Leader.abort",
        "            self.memory.plan = None  # the differences are not noted, so the next save must find them again\n",
        "            self._differing.clear()\n",
        "tests/saving/test_replicas.py::test_a_difference_is_reported_by_the_first_save_that_stores_it",
    ),
    "values without an owner are left out": (
        "plan_writes",
        "    _check_owners(layouts, first)\n",
        "",
        "tests/saving/test_layout.py::test_an_owned_tensor_is_saved_from_its_owner",
    ),
    "a difference outside of the samples is saved although differences must fail": (
        "runs_of",
        '    return 0 if check == "raise" else RUNS\n',
        "    return RUNS\n",
        "tests/saving/test_layout.py::test_check_replicas_compares_everything_or_nothing",
    ),
    "replicas that DCP writes from one rank are not compared": (
        "WriterSession._commit",
        "compare(samples, leader.size,",
        "compare((), leader.size,",
        "tests/saving/test_replicas.py::test_dcp_and_megatron_report_drifted_keys",
    ),
    "one rank saves the state of a part of a parameter for all": (
        "decide",
        ".digest != beside.digest or beside.is_slice",
        ".digest != beside.digest and beside.is_slice",
        "tests/frontends/training_state/test_ranks.py::test_state_that_each_rank_keeps_for_its_slice_is_exact_on_the_same_ranks_and_refused_on_others",
    ),
    "a rank takes the state of another slice": (
        "check_places",
        "if pair[0] in mine)] == _places(",
        "if pair[0] in mine)] != _places(",
        "tests/frontends/training_state/test_ranks.py::test_state_that_each_rank_keeps_for_its_slice_is_exact_on_the_same_ranks_and_refused_on_others",
    ),
    "a load that fills nothing succeeds": (
        "check_fit",
        "if len(pairs) * _SHARE > fit.count or not (fit.filled or fit.misfits):",
        "if len(pairs) * _SHARE > fit.count:",
        "tests/loading/test_fit.py::test_a_complete_load_logs_nothing_and_an_empty_load_raises_an_error",
    ),
    "a third of a model's names may be missing": (
        "",
        "_SHARE = 10\n",
        "_SHARE = 3\n",
        "tests/loading/test_fit.py::test_a_load_that_misses_over_a_tenth_by_name_raises_an_error_with_the_rename",
    ),
    "values that one rank fills count as missing on others": (
        "merged",
        "fit.unfilled.items() if key not in filled}\n    return Fit(filled, unfilled, frozenset[str]()",
        "fit.unfilled.items()}\n    return Fit(filled, unfilled, frozenset[str]()",
        "tests/loading/test_fit.py::test_a_key_filled_by_any_rank_counts_as_filled",
    ),
    "a suggested rename changes the filled keys": (
        "rename_for",
        "for pattern, new in dict(found).items() if _spares(pattern, new, filled)}",
        "for pattern, new in dict(found).items()}",
        "tests/loading/test_fit.py::test_a_rename_rule_preserves_numbers_and_filled_keys",
    ),
    "a suggested rename exchanges two weights": (
        "_ending",
        "pairs[key] = max(candidates, key=partial(_common_parts, key))",
        "pairs[key] = candidates[0]",
        "tests/loading/test_fit.py::test_the_most_similar_of_equal_unwrapped_names_are_a_pair",
    ),
    "the interpretation that fills fewer keys is chosen": (
        "chosen",
        "> (len(nested.filled), len(nested.misfits))",
        "< (len(nested.filled), len(nested.misfits))",
        "tests/loading/test_fit.py::test_of_two_interpretations_of_names_the_one_that_fills_more_keys_is_used",
    ),
    "a model without adapters accepts a checkpoint with them": (
        "TrainingStateLoad.check_unused",
        "check_no_adapters(adapters if len(adapters) == sum(map(is_adapter, there)) else [], where)",
        "check_no_adapters(adapters if not there else [], where)",
        "tests/frontends/test_names_that_miss.py::test_a_model_without_adapters_rejects_adapters",
    ),
    "base weights are not found under adapter names": (
        "TrainingStateLoad._where",
        "return base if base in entries else saved",
        "return saved",
        "tests/frontends/test_names_that_miss.py::test_base_weights_load_into_a_model_with_adapters",
    ),
    "dropped leaves of a container are not reported": (
        "_unread_below",
        "    if path or len(own) < single:\n",
        "    if path and len(own) < single - 1:\n",
        "tests/loading/test_unread.py::test_leaves_that_a_container_drops_are_logged_as_unread",
    ),
    "unread per-rank parts are not named": (
        "warn_moved",
        "if set(ranks) != set(range(size))]",
        "if not set(ranks).issuperset(range(size))]",
        "tests/frontends/trainer/test_moved_parts.py::test_per_rank_values_that_move_to_a_different_rank_are_logged",
    ),
    "a partial load through DCP may fill nothing": (
        "StorageReader.read_data",
        "            self._check_fit(planner)\n",
        "",
        "tests/frontends/dcp/test_reader.py::test_a_partial_load_fails_if_the_names_do_not_match",
    ),
    "a DTensor's own description is ignored": (
        "_description",
        "    return getattr(tensor._local_tensor, CHUNK_LIST, None)\n",
        "    return None\n",
        "tests/tensors/test_described.py::test_every_layout_that_can_be_described_is_saved_exactly",
    ),
    "torch's description of every DTensor counts as its own": (
        "_description",
        """getattr(method, "__func__", None) is not vars(_dtensors().DTensor).get(CHUNK_LIST)""",
        "method is not None",
        "tests/tensors/test_described.py::test_the_custom_order_of_a_mesh_is_respected",
    ),
    "overlapping chunks are accepted": (
        "described_shards",
        "            if not any(a.box.intersect(b.box) for a, b in combinations(shards, 2)):\n",
        "            if shards is not None:\n",
        "tests/tensors/test_described.py::test_an_incorrect_description_is_rejected",
    ),
    "the shard order of a mesh is ignored": (
        "_mesh_order",
        "    return [mesh_dim for entry in entries for mesh_dim in entry.mesh_dims] or range(len(tensor.placements))\n",
        "    return range(len(tensor.placements))\n",
        "tests/tensors/test_described.py::test_the_custom_order_of_a_mesh_is_respected",
    ),
    "uneven strided shards of old versions of torch are accepted": (
        "_check_strides",
        "        if tensor.shape[dim] % ranks and any(",
        "        if not ranks and any(",
        "tests/tensors/test_dtensors.py::test_uneven_strided_shards_are_refused_with_old_versions_of_torch_unless_fsdp2_may_have_created_them",
    ),
    "optimizer state is not divided like its parameter": (
        "Holding._tensor_as_saved",
        "        return described_like(value, self.parameter)\n",
        "        return value\n",
        "tests/frontends/test_described.py::test_optimizer_state_is_described_by_the_layout_of_its_parameter",
    ),
    "data that torch plans at the wrong position is stored there": (
        "check_planned",
        "    if not any(box.inside(region.box) for region in regions):\n",
        "    if not regions:\n",
        "tests/frontends/test_described.py::test_tensors_that_dcp_would_misplace_are_rejected_by_dcp_and_saved_natively",
    ),
    "only tensors on the CPU are checked for memory of their own": (
        "_problem",
        "    is_fine = not data.numel() or has_memory(data)\n",
        "    is_fine = not data.is_cpu or not data.numel() or has_memory(data)\n",
        "tests/tensors/test_no_memory.py::test_the_error_for_a_tensor_without_memory_names_it",
    ),
    "a ZeroRedundancyOptimizer keeps its old learning rate": (
        "install",
        '            shown.update({name: value for name, value in group.items() if name != "params"})\n',
        "            shown.update({})\n",
        "tests/frontends/training_state/test_optimizer.py::test_the_zero_redundancy_optimizer_resumes_with_and_without_its_parts",
    ),
    "state that consists of other tensors is never stored": (
        "Holding._tensor_as_saved",
        "return Archived(value)",
        "return value",
        "tests/frontends/training_state/test_optimizer.py::test_tensors_composed_of_tensors_are_stored_if_pickles_are_allowed",
    ),
    "only one of several layer-wise optimizers is saved": (
        "as_optimizers",
        "layers.values() if",
        "[*layers.values()][:1] if",
        "tests/frontends/training_state/test_optimizer.py::test_an_optimizer_resumes_bit_for_bit",
    ),
    "a tensor is stored without its inner tensors": (
        "_problem",
        "(inner := inner_names(data)):",
        "(inner := inner_names(data)) and not data.data_ptr():",
        "tests/tensors/test_no_memory.py::test_the_error_for_a_tensor_without_memory_names_it",
    ),
    "placeholders of ZeRO-3 are empty tensors": (
        "_problem",
        """data.shape != getattr(data, "ds_shape", data.shape)""",
        """data.numel() and data.shape != getattr(data, "ds_shape", data.shape)""",
        "tests/tensors/test_no_memory.py::test_a_model_of_placeholders_can_be_neither_saved_nor_loaded",
    ),
    "shared memory is detected only for identical tensors": (
        "TiedTensors.check",
        "        for one, other in (*self._undecided, *self._overlapping()):\n",
        "        for one, other in self._undecided:\n",
        "tests/loading/test_tied_tensors.py::test_views_of_shared_memory_with_different_stored_values_are_rejected",
    ),
    "a conjugate counts as the same tensor": (
        "_form",
        "data.device, data.is_conj(), data.is_neg()",
        "data.device, data.is_neg()",
        "tests/loading/test_tied_tensors.py::test_views_of_shared_memory_load_their_saved_values",
    ),
    "overlapping tensors are filled at the same time": (
        "TiedTensors.in_turns",
        "            turns[_form(want.sink.data) in self._second].append(want)\n",
        "            turns[0].append(want)\n",
        "tests/loading/test_tied_tensors.py::test_overlapping_views_are_not_filled_at_the_same_time",
    ),
    "a tensor without dimensions does not count as a number": (
        "python_value",
        " else value.item()\n",
        " else value\n",
        "tests/format/test_metrics.py::test_a_value_without_dimensions_becomes_a_python_number",
    ),
    "a rank alone checks the input of a background save": (
        "Saver._checked",
        "        (checked, prepared), fits = exchange_keeping(ranks, check, compare_sizes)\n",
        "        (checked, prepared), shortage = check()\n        fits = not shortage\n",
        "tests/saving/test_async_ranks.py::test_a_failure_that_one_rank_did_not_see_stops_the_next_save_on_all_ranks",
    ),
    "each rank decides by itself whether it saves in the foreground": (
        "Saver._checked.compare_sizes",
        "            return everyone(not lacking, ranks.size)\n",
        "            return [shortage is None for shortage in found]\n",
        "tests/saving/test_async_ranks.py::test_all_ranks_save_in_the_foreground_if_the_copy_of_one_does_not_fit",
    ),
    "a save without a copy runs in the background": (
        "Saver.save_async",
        "here=not fits",
        "here=False",
        "tests/saving/test_saver.py::test_a_state_whose_copy_does_not_fit_is_saved_before_the_call_returns",
    ),
    "a rejected save keeps its claim on memory": (
        "Saver.save_async",
        """            finally:
                self._budget.settle(staging.nbytes)
            memory =""",
        """            finally:
                pass
            self._budget.settle(staging.nbytes)
            memory =""",
        "tests/saving/test_async_ranks.py::test_a_save_that_is_rejected_on_one_rank_keeps_no_memory",
    ),
    "a process adds up the copies of others before it writes its own claim": (
        "StagingBudget.claim",
        """                self._write(nbytes, 0)
                others = list(self._others())
""",
        """                self._write(0, 0)
                others = list(self._others())
                self._write(nbytes, 0)
""",
        "tests/saving/test_staging_budget.py::test_of_two_processes_that_claim_at_the_same_time_one_sees_the_claim_of_the_other",
    ),
    "a killed process keeps its claim on memory": (
        "StagingBudget._others",
        "                except BlockingIOError:\n",
        "                except BlockingIOError:\n                    pass\n                if True:\n",
        "tests/saving/test_staging_budget.py::test_a_killed_process_does_not_keep_its_claim",
    ),
    "a claim on memory is written to a file that another process has removed": (
        "StagingBudget._write",
        "while self._fd < 0 or",
        "if self._fd < 0 or",
        "tests/saving/test_staging_budget.py::test_a_claim_that_is_not_written_yet_counts_nothing_and_remains",
    ),
    "a forked child keeps its parent's claim on memory": (
        "_close_in_child",
        "        budget.close()\n",
        "        pass\n",
        "tests/saving/test_staging_budget.py::test_a_forked_child_does_not_keep_the_claim",
    ),
    "a background save is retried although it must fail again": (
        "Checkpointer._settle",
        "        if to_save and will_repeat(error) and not heard:\n",
        "        if to_save and isinstance(error, Conflict) and not heard:\n",
        "tests/frontends/trainer/test_saves.py::test_a_permanent_background_failure_is_raised_at_the_next_due_save",
    ),
    "each rank counts its failures for itself": (
        "Checkpointer._begin.decide",
        "return everyone((any(found), None if saved is None else saved.commit), ranks.size)",
        "return [(one, None if saved is None else saved.commit) for one in found]",
        "tests/frontends/trainer/test_ranks.py::test_failures_are_raised_at_the_same_step_on_all_ranks",
    ),
    "failures are raised regardless of the time passed": (
        "Failures.too_many",
        "        return self._clock() - self._first >= PATIENCE\n",
        "        return True\n",
        "tests/frontends/trainer/test_saves.py::test_temporary_failures_are_raised_after_max_failures_and_a_minimum_time",
    ),
    "a successful save does not reset the failure count": (
        "Failures.note",
        "            self.count = 0\n            return\n",
        "            return\n",
        "tests/frontends/trainer/test_saves.py::test_a_successful_save_resets_the_count_of_failures",
    ),
    "the last step of a training run is not due": (
        "TrainerSettings.due",
        "        if step == self.last_step or step in (self.fixed_steps or ()) or",
        "        if step in (self.fixed_steps or ()) or",
        "tests/frontends/trainer/test_checkpointer.py::test_the_last_training_step_is_saved",
    ),
    "unsaved steps are reported wherever a checkpoint exists": (
        "Checkpointer._warn_of_unsaved",
        "        after, reached = self._begun if self.saved_step is None else self.saved_step, self._reached\n",
        "        after, reached = self.saved_step, self._reached\n",
        "tests/frontends/trainer/test_checkpointer.py::test_unsaved_steps_at_the_end_are_logged",
    ),
    "an error suggests an argument that no function accepts": (
        "begin_save",
        '"(overwrite=True, --overwrite)"',
        '"(replace=True, --overwrite)"',
        "tests/hints/test_checkpoint.py::test_the_suggested_option_overwrites_an_existing_step",
    ),
    "values of a different shape are reported as missing": (
        "_why_unfilled",
        "[key for key in unfilled if (key in saved) is there]",
        "[key for key in unfilled if not there]",
        "tests/hints/test_checkpoint.py::test_the_suggested_option_leaves_tensors_with_different_shapes_unchanged",
    ),
    "an import of an optimizer without a model suggests names": (
        "_note",
        'advice: str = "Load"',
        'advice: str = "Import again with parameter_names=, or load"',
        "tests/hints/test_exports.py::test_a_file_with_only_an_optimizer_can_be_loaded_directly",
    ),
    "an import of OLMo-core with pickles allowed stores no pickles": (
        "import_olmo",
        "no_dist=True, **options)",
        'no_dist=True, **(options | {"allow_pickle": False}))',
        "tests/hints/test_exports.py::test_an_olmo_optimizer_can_be_imported_with_allow_pickle",
    ),
    "an optimizer belongs to the first module of a state": (
        "_owners",
        "        if wanted.issubset(ids):\n",
        "        if ids:\n",
        "tests/frontends/training_state/test_objects.py::test_an_optimizer_belongs_to_the_module_that_has_its_parameters",
    ),
    "objects that draw random numbers are loaded among the others": (
        "Objects.others",
        "        return sorted(keys, key=lambda key: draws(self.by_key[key]))\n",
        "        return keys\n",
        "tests/frontends/training_state/test_objects.py::test_objects_are_saved_in_key_order_and_generators_are_loaded_last",
    ),
    "a missing object is loaded from nothing": (
        "Objects.take",
        "            if key not in left:\n",
        "            if True:\n",
        "tests/frontends/training_state/test_objects.py::test_missing_parts_are_left_unchanged_if_allowed",
    ),
    "the states of objects are saved in the order of the caller": (
        "Objects.__init__",
        "        leaves = sorted(self._flat.leaves.items())\n",
        "        leaves = list(self._flat.leaves.items())\n",
        "tests/frontends/training_state/test_objects.py::test_objects_are_saved_in_key_order_and_generators_are_loaded_last",
    ),
    "options of an optimizer are reported as unread": (
        "_template",
        'values[key] = {**values.get(key, {}), "param_groups": None}',
        "values[key] = {**values.get(key, {})}",
        "tests/frontends/training_state/test_objects.py::test_a_fresh_optimizer_receives_its_moments_and_learning_rate",
    ),
    "a list of objects is loaded from a list of a different length": (
        "Objects.take.of",
        "or len(value) != len(here)):",
        "or False):",
        "tests/frontends/training_state/test_objects.py::test_a_list_of_objects_must_have_the_saved_length",
    ),
    "objects of a train state are lost if fewer were saved": (
        "objects_within",
        "    alike = isinstance(state, list | tuple) and len(value) == len(state)\n",
        "    alike = True\n",
        "tests/frontends/training_state/test_train_state.py::test_a_list_of_a_different_length_is_rejected",
    ),
    "equal models are confused in a suggested rename": (
        "missed_pairs",
        "for name in sorted(unread) if",
        "for name in unread if",
        "tests/loading/test_fit.py::test_a_model_is_filled_from_only_one_of_two_models_with_equal_names",
    ),
    "every unread key searches all values of ranks": (
        "Template.compare",
        "if key in held and not that_hold",
        "if key in self.per_rank and not that_hold",
        "tests/loading/test_unread.py::test_a_load_searches_for_unread_per_rank_values_only_once",
    ),
    "an optimizer state_dict without an owner is not reported": (
        "log_bare_optimizers",
        "        if is_of_optimizer(state[name]) and",
        "        if False and",
        "tests/frontends/training_state/test_objects.py::test_filling_a_state_dict_without_its_optimizer_is_logged",
    ),
    "a train state contains a part of a tensor": (
        "_of_one_rank",
        "            if is_sharded(tensor):\n                raise",
        "            if False:\n                raise",
        "tests/frontends/training_state/test_objects.py::test_an_averaged_model_is_a_second_model_on_any_number_of_ranks",
    ),
    "a load replaces a dict of a train state": (
        "fill",
        "        value.clear()\n        value.update(new)",
        "        return new\n        value.update(new)",
        "tests/frontends/training_state/test_train_state.py::test_a_resume_fills_existing_tensors_in_place",
    ),
    "a train state accepts a DataLoader": (
        "TrainState.__setitem__",
        "        check_part(value, name)\n",
        "",
        "tests/frontends/training_state/test_train_state.py::test_a_data_loader_that_cannot_save_its_position_is_rejected",
    ),
    "a train state silently skips keys that only the checkpoint has": (
        "TrainState.load_state_dict",
        "        if beside:\n",
        "        if False:\n",
        "tests/frontends/training_state/test_train_state.py::test_a_dict_receives_extra_entries_and_a_train_state_logs_them",
    ),
    "the averaged model of Lightning is not loaded": (
        "CasModelParallelStrategy.load_checkpoint",
        "        models = self._models() if has_average else module\n",
        "        models = module\n",
        "tests/frontends/lightning/test_strategy.py::test_an_averaged_model_is_saved_and_loaded_with_the_model",
    ),
    "models of an accelerator with equal names count as one": (
        "AcceleratorCheckpointer._all",
        "        if models and not _share_names(names):\n",
        "        if True:\n",
        "tests/frontends/test_accelerate.py::test_models_with_equal_parameter_names_are_stored_separately",
    ),
    "a check does not compare the values of ranks": (
        "Saver.check",
        "        if ranks.size > 1:\n            memory = GroupMemory(",
        "        if ranks.size > 4:\n            memory = GroupMemory(",
        "tests/frontends/trainer/test_checking.py::test_a_check_compares_values_across_ranks_only_during_training",
    ),
    "a check does not reset random generators after a data loader": (
        "Checkpointer._check",
        "            restore_rng(generators)",
        "            rng_state()",
        "tests/frontends/trainer/test_checking.py::test_a_check_neither_writes_nor_draws_random_numbers",
    ),
    "a resume without a checkpoint checks nothing": (
        "Checkpointer.resume",
        '        self._check(model, optim, train_state, "off", warm_up=warm_up)',
        '        if checkpoint is not None:\n            self._check(model, optim, train_state, "off")',
        "tests/frontends/trainer/test_checking.py::test_a_resume_raises_the_errors_that_later_saves_would_raise",
    ),
    "optimizer state from the first step is not checked": (
        "Checkpointer.check_first_steps",
        "        if has_state or is_first:\n",
        "        if is_first:\n",
        "tests/frontends/trainer/test_checking.py::test_a_check_finds_optimizer_state_that_cannot_be_saved",
    ),
    "each rank checks only whether its own optimizer has state": (
        "Checkpointer.check_first_steps",
        "ranks.exchange(is_stepped, lambda found: everyone(any(found), ranks.size))",
        "ranks.exchange(is_stepped, lambda found: found)",
        "tests/frontends/trainer/test_checking.py::test_optimizer_state_on_a_single_rank_is_checked_on_all_ranks",
    ),
    "a resume with a mistyped run is silent": (
        "newest_together.find",
        "tell=True",
        "tell=False",
        "tests/frontends/trainer/test_run_checkpoints.py::test_a_resume_without_a_checkpoint_suggests_a_similar_run",
    ),
    "a tensor of a different shape stops a resume that should continue": (
        "TrainingStateLoad._choose",
        '        if self._keeps.get("leave_resized"):\n',
        '        if self._keeps.get("leave_resized") and self._strict:\n',
        "tests/frontends/trainer/test_resumed.py::test_a_resume_restores_all_parts_that_match",
    ),
    "a learning rate that must be kept is overwritten": (
        "match",
        "options.append({} if keep_options else _options(",
        "options.append(_options(",
        "tests/frontends/trainer/test_resumed.py::test_a_resume_that_keeps_options_preserves_a_new_learning_rate",
    ),
    "keys that another rank read are reported as unread": (
        "of_all_ranks",
        "if why != _NOT_HERE or k in everywhere}",
        "if why}",
        "tests/frontends/trainer/test_resumed.py::test_a_resume_logs_the_keys_that_all_ranks_skipped",
    ),
    "unread parts of a saved train state are not reported": (
        "_set_parts",
        "(name for name in beside if name != RNG)",
        "()",
        "tests/frontends/trainer/test_resumed.py::test_a_resume_restores_all_parts_that_match",
    ),
    "restore_checkpoint treats a missing step as a first start": (
        "restore_checkpoint",
        "        if at != LATEST:\n",
        "        if not at:\n",
        "tests/frontends/transformers/test_callback.py::test_a_job_without_checkpoints_starts_from_the_beginning",
    ),
    "a Trainer checks its optimizer only before its first step": (
        "CasCheckpointCallback.on_step_end",
        "            self._is_step_checked = True\n            self._check(args, kwargs)\n",
        "            self._is_step_checked = True\n",
        "tests/frontends/transformers/test_callback.py::test_training_with_an_unsupported_optimizer_stops_at_the_start",
    ),
    "torchtitan trains a step before it checks": (
        "CasCheckpointManager._load",
        "        self._check()\n        return found\n",
        "        return found\n",
        "tests/frontends/test_torchtitan.py::test_an_invalid_state_is_reported_at_the_first_step",
    ),
    "Lightning's strategy checks no state of its optimizers": (
        "CasModelParallelStrategy.on_train_batch_start",
        "        super().on_train_batch_start(batch, batch_idx)\n        self._check()\n",
        "        super().on_train_batch_start(batch, batch_idx)\n",
        "tests/frontends/lightning/test_strategy.py::test_an_invalid_state_raises_an_error_on_all_ranks_at_the_start",
    ),
    "a Lightning callback checks one step too late": (
        "CasCheckpointCheck.on_train_batch_end",
        "trainer.global_step > self._begun:",
        "trainer.global_step > self._begun + 1:",
        "tests/frontends/lightning/test_io.py::test_an_invalid_state_raises_an_error_at_the_start",
    ),
    "missing ranks are not named": (
        "Wire.gather.missing",
        "if not has_come(frame)]",
        "if has_come(frame)]",
        "tests/ranks/test_waiting.py::test_every_waiting_rank_names_the_absent_rank",
    ),
    "a rank that gave up ends before the others know the reason": (
        "Meeting._verdict",
        "        if verdict:\n            self._let",
        "        if not verdict:\n            self._let",
        "tests/ranks/test_waiting.py::test_a_failed_rank_waits_until_the_others_have_received_the_error",
    ),
    "all pairs of ranks connect": (
        "_gloo",
        "    if not devices:\n",
        "    if devices:\n",
        "tests/ranks/test_ranks.py::test_a_rank_connects_only_to_rank_0",
    ),
    "a rank that does not receive its answer is forgotten": (
        "Wire.scatter",
        "self.leave_word(why)",
        "pass",
        "tests/ranks/test_wire.py::test_a_rank_that_does_not_receive_its_answer_is_named_in_the_next_exchange",
    ),
    "a rank without gloo reports this after the others connect": (
        "_connect",
        'problem and f"gloo cannot start',
        '"" and f"gloo cannot start',
        "tests/ranks/test_waiting.py::test_a_gloo_startup_failure_is_reported_on_all_ranks",
    ),
    "a session with expired credentials is kept": (
        "S3Client.renew",
        "set_session(refresh=True)",
        "set_session(refresh=False)",
        "tests/storage/remote/s3/test_errors.py::test_expired_credentials_are_looked_up_again",
    ),
    "keys that arrive late are not looked up": (
        "S3Client.renew",
        "            if began > self._renewed:\n",
        "            if began > self._renewed + 10:\n",
        "tests/store/test_nights.py::test_keys_that_arrive_after_the_old_ones_end_are_used_at_once",
    ),
    "expired keys of the machine raise an error of the client": (
        "as_failure",
        "    except RuntimeError as error:\n",
        "    except ReferenceError as error:\n",
        "tests/store/test_nights.py::test_a_program_that_prints_keys_fails_with_advice",
    ),
    "each dead connection of the client costs a timeout": (
        "BoundedSession._drop_idle",
        "                while idle:\n",
        "                while False:\n",
        "tests/storage/remote/test_faults.py::test_connections_that_died_unnoticed_cost_a_single_timeout",
    ),
    "each dead connection for ranges costs a timeout": (
        "DirectReads.read",
        "                self._silent = time.monotonic()\n",
        "                pass\n",
        "tests/storage/remote/test_faults.py::test_connections_that_died_unnoticed_cost_a_single_timeout",
    ),
    "a lease ends early if its holder's clock is set back": (
        "_never_set_back",
        "max(clock(), begun + round(1e6 * (time.monotonic() - since)))",
        "clock()",
        "tests/store/test_clock_jumps.py::test_a_renewed_lease_does_not_end_early_if_the_clock_of_its_holder_is_set_back",
    ),
    "credentials are looked up for every request": (
        "RemoteStore.again",
        "                    renewed = True\n",
        "                    renewed = attempts > 3\n",
        "tests/storage/remote/s3/test_errors.py::test_credentials_that_remain_invalid_in_a_new_session_raise_an_error",
    ),
    "a server without checksums causes an unspecific error": (
        "_explain_answer",
        "if _CHECKSUM.search(text):",
        "if _CHECKSUM.match(text):",
        "tests/storage/remote/s3/test_errors.py::test_errors_about_checksums_name_the_settings_to_change",
    ),
    "a model offloaded by accelerate counts as empty": (
        "_live_state",
        "if empty and any(",
        "if not empty and any(",
        "tests/frontends/test_accelerate.py::test_an_offloaded_model_is_rejected_and_can_be_restored",
    ),
    "the class of a mapping is lost silently": (
        "_Flattener.node",
        "type(value) not in (kind, dict)",
        "type(value) in (kind, dict)",
        "tests/saving/test_prepare.py::test_the_loss_of_a_mapping_class_is_logged_once",
    ),
    "a purged step is reported as never saved": (
        "_at_step",
        'if c.last == "purged" and (c.run,',
        'if c.last == "forgotten" and (c.run,',
        "tests/contents/test_refs.py::test_a_purged_checkpoint_is_reported_as_gone",
    ),
    "the entries of a mapping in one object are not found": (
        "Template.plan",
        "len(value) > 0 and name_of(key) in objects",
        "False and name_of(key) in objects",
        "tests/loading/test_load_plan.py::test_a_template_with_the_same_entries_is_filled_in_place",
    ),
    "large mappings of several ranks come from the lowest rank": (
        "prepare",
        "size == 1 and len(mapping)",
        "size > 0 and len(mapping)",
        "tests/loading/test_load_plan.py::test_entries_of_several_ranks_are_merged",
    ),
    "a tensor with some flat chunks is divided as if all were flat": (
        "_cuts",
        "any(not set(chunk.sizes[:-1]) <= {1}",
        "all(not set(chunk.sizes[:-1]) <= {1}",
        "tests/frontends/dcp/test_folder.py::test_a_tensor_with_a_chunk_that_is_not_flat_stays_in_chunks",
    ),
    "a background save exchanges its objects in the wrong process group": (
        "Saver._checked",
        "        state, options = self._without_objects(ranks, state, options)\n\n        def check()",
        (
            "        state, options = "
            "self._without_objects(open_ranks(options.process_group), state, options)\n\n        def check()"
        ),
        "tests/frontends/training_state/test_objects.py::test_objects_on_a_single_rank_are_rejected_on_all_ranks_without_waiting",
    ),
    "optimizer state does not follow a renamed module": (
        "TrainingStateLoad._saved_name",
        "else saved.removeprefix(self._saved_start)",
        "else saved.removeprefix(self._start)",
        "tests/frontends/training_state/test_objects.py::test_a_rename_of_a_model_also_renames_its_optimizer",
    ),
    "an optimizer is searched for only under its own key": (
        "StoredTraining.optimizer_at",
        "return renamed if self.has_optimizer(renamed) else key",
        "return key",
        "tests/frontends/training_state/test_objects.py::test_a_rename_of_a_model_also_renames_its_optimizer",
    ),
    "an error names a function that the user did not give": (
        "rename_hint",
        "    while isinstance(rename, Renaming):\n",
        "    while False and isinstance(rename, Renaming):\n",
        "tests/frontends/training_state/test_objects.py::test_an_error_suggests_a_rename_that_loads_the_objects",
    ),
    "4-bit weights are stored with a different offset": (
        "Template._check_packed",
        "if not torch.equal(value, saved.get(",
        "if False and not torch.equal(value, saved.get(",
        "tests/frontends/training_state/test_model.py::test_a_copy_of_a_value_in_a_state_dict_is_filled_only_with_equal_values",
    ),
    "a 4-bit weight keeps its offset in a load": (
        "PackedWeight.install",
        "if state is not None and state.nested:",
        "if state is not None and not state.nested:",
        "tests/frontends/training_state/test_model.py::test_a_quantized_weight_receives_the_values_that_its_state_dict_copies",
    ),
    "4-bit weights of a different kind are loaded": (
        "TrainingStateLoad._leave_packed",
        "if differ is None or",
        "if differ is not None or",
        "tests/frontends/training_state/test_model.py::test_a_quantized_weight_receives_the_values_that_its_state_dict_copies",
    ),
    "a rename of an entry inside one object is ignored": (
        "Entries.compare",
        "not in (here, there)",
        "not in (here, there, self.rename(here))",
        "tests/loading/test_load_plan.py::test_renaming_individual_entries_is_rejected",
    ),
    "a mapped blob that changed is not verified again": (
        "MappedTensors._map",
        'name = f"{key} {blob.version}"',
        "name = key",
        "tests/loading/test_mapped.py::test_a_mapped_read_reports_damage_as_an_ordinary_read_does",
    ),
    "a wrong cell is mapped": (
        "_is_right",
        "            return False\n",
        "            break\n",
        "tests/loading/test_mapped.py::test_a_mapped_read_reports_damage_as_an_ordinary_read_does",
    ),
    "torchtitan renames keys of its own run": (
        "CasCheckpointManager._load_newest",
        "rename=None if own else self.config.rename",
        "rename=self.config.rename",
        "tests/hints/test_plugins.py::test_a_model_with_new_names_can_continue_in_a_different_run",
    ),
    "a resume on fewer ranks names moved keys twice": (
        "_warn",
        "logged = [key for key in unread if not that_hold(options.meant, [key])]",
        "logged = [*unread]",
        "tests/frontends/trainer/test_moved_parts.py::test_a_resume_on_fewer_ranks_logs_moved_parts_once",
    ),
    "a learning rate that a resume replaces is not named": (
        "outcome_of",
        "        if before != value:\n            replaced[key]",
        "        if before is None:\n            replaced[key]",
        "tests/frontends/trainer/test_resumed.py::test_a_resume_logs_the_learning_rates_that_it_replaces",
    ),
    "a learning rate that a scheduler changed is named as replaced": (
        "settings_of",
        'if "initial_lr" in group or any(',
        "if any(",
        "tests/frontends/trainer/test_resumed.py::test_an_ordinary_restart_does_not_log_learning_rates",
    ),
    "a learning rate that a loop sets causes a warning": (
        "Resumed.log",
        'is_odd = f"{at}.initial_lr" in self.replaced or',
        "is_odd = bool(self.replaced) or",
        "tests/frontends/trainer/test_resumed.py::test_a_resume_without_a_scheduler_does_not_warn_that_it_replaced_a_learning_rate",
    ),
    "names of a sweep count as misspelled": (
        "similar.is_meant",
        "(is_near and _digits(other) == _digits(mine)) or",
        "is_near or",
        "tests/frontends/trainer/test_run_checkpoints.py::test_a_resume_without_a_checkpoint_suggests_a_similar_run",
    ),
    "rank 0 gives up early although another rank has come": (
        "Wire.gather.warn",
        "if len(absent) < self._size - 1 or waited",
        "if waited",
        "tests/ranks/test_waiting.py::test_rank_0_gives_up_early_only_if_no_other_rank_comes",
    ),
    "a state that makes its tensors anew is loaded into nothing": (
        "_as_dict",
        "id(value) not in again",
        "False",
        "tests/store/test_states.py::test_a_tensor_dict_that_cannot_be_filled_is_rejected",
    ),
    "a restore says that it restored a visible checkpoint": (
        "_apart",
        "if commit.txid not in visible)",
        ")",
        "tests/cli/commands/test_forget.py::test_restore_does_not_say_that_it_restored_a_visible_checkpoint",
    ),
    "a resume from a mistyped path is silent": (
        "tell_missing",
        "if near := ",
        "if near := not ",
        "tests/frontends/trainer/test_run_checkpoints.py::test_a_resume_without_a_store_suggests_a_similar_folder",
    ),
    "a train state is checked after the model is loaded": (
        "Restoring._check_there",
        "for rank in self._train.get(TRAIN, ())]",
        "for rank in ()]",
        "tests/frontends/training_state/test_train_state.py::test_a_train_state_that_does_not_match_is_rejected_before_the_model_changes",
    ),
    "an object is compared only with the tree of an object": (
        "check_kind",
        "if read is not None and isinstance(saved, int):",
        "if read is not None and saved is TENSOR:",
        "tests/frontends/training_state/test_train_state.py::test_a_resume_fills_existing_tensors_in_place",
    ),
    "optimizers of two kinds are saved under one key": (
        "_check_one_kind",
        "            if options - mine and mine - options:\n",
        "            if mine - mine:\n",
        "tests/frontends/training_state/test_together.py::test_different_optimizers_under_one_key_are_rejected",
    ),
    "a load into a resized model warns about the optimizer that is not loaded": (
        "Template._misfits",
        'for start in below if f"{start}param_groups" not in self.unread)]',
        "for start in below)]",
        "tests/frontends/training_state/test_groups.py::test_a_resized_model_is_rejected_only_because_of_its_shapes",
    ),
    "an object in the result of state_dict is flattened": (
        "make_state",
        "    return OfObjects(state)\n",
        "    return state\n",
        "tests/frontends/training_state/test_objects.py::test_an_object_inside_a_state_dict_is_stored_exactly_or_rejected",
    ),
    "exchanges at different points have the same name": (
        "exchange_keeping.answers",
        "    @wraps(decide)  # ranks compare its name to check that they are at the same point\n",
        "",
        "tests/ranks/test_ranks.py::test_a_rank_that_keeps_a_value_in_a_different_call_is_named",
    ),
    "a mismatch of calls between ranks reports inner calls": (
        "astray",
        "call, rank = away[0].call, away[0].rank",
        "call, rank = away[0].step, away[0].rank",
        "tests/ranks/test_messages.py::test_a_save_on_one_rank_and_a_load_on_the_other_fail_on_both",
    ),
    "a late failure of a Lightning save does not name the callback": (
        "CasCheckpointIO.__init__",
        "        self._is_checked = False\n",
        "        self._is_checked = True\n",
        "tests/frontends/lightning/test_io.py::test_the_first_failed_save_suggests_the_check_callback",
    ),
    "a view of any shape counts as a slice of a tensor": (
        "_index",
        "(found.shape, found.storage_offset()) != (part.shape, part.storage_offset())",
        "found is None",
        "tests/frontends/training_state/test_hub_names.py::test_tensors_that_are_not_slices_are_rejected",
    ),
    "names that no rule expresses are saved with other rules": (
        "rules_of",
        "    _check(parts, rename, split)\n",
        "",
        "tests/frontends/training_state/test_hub_names.py::test_rules_that_would_change_each_other_are_rejected",
    ),
    "a part of a fused tensor is filled from its start": (
        "_part",
        "[offset[dim] for dim in kept]",
        "[0 for dim in kept]",
        "tests/frontends/training_state/test_hub_names.py::test_a_hub_folder_loads_into_sharded_experts",
    ),
    "the names of the library replace those that the user asked for": (
        "FolderPlan._names",
        "replace(self.rules, keys=None) == Rules(model=True)",
        "self.rules.model",
        "tests/frontends/training_state/test_hub_config.py::test_selected_keys_and_other_names_apply_to_fused_experts",
    ),
    "parts by index may repeat a tensor endlessly": (
        "_indexed",
        "not runs or left < 0",
        "not runs",
        "tests/frontends/views/test_recut.py::test_a_view_with_indices_outside_a_tensor_is_rejected",
    ),
    "the code of a custom class changes the config of the model": (
        "_config_files",
        "config = deepcopy(config)",
        "config = config",
        "tests/frontends/training_state/test_hub_config.py::test_the_code_of_a_custom_class_is_exported_and_loads",
    ),
    "Megatron-FSDP computes with parameters from before a load": (
        "drop_gathered",
        "            module.synchronize_param_gather()\n",
        "            pass\n",
        "tests/frontends/training_state/test_megatron_fsdp.py::test_every_strategy_loads_and_saves_the_state_of_an_unsharded_training_run",
    ),
    "after a forward pass, Megatron-FSDP's parameters are not those of its optimizer": (
        "reshard",
        "        module._replace_param_with_distributed_if_needed()\n",
        "        pass\n",
        "tests/frontends/training_state/test_megatron_fsdp.py::test_a_save_after_a_forward_pass_saves_the_sharded_parameters",
    ),
    "a rank without elements of a Megatron-FSDP parameter gets a step count": (
        "Holding.is_nothing",
        'return hasattr(self.parameter, "_megatron_fsdp_model") and local_of(self.parameter).numel() == 0',
        "return False",
        "tests/frontends/training_state/test_megatron_fsdp.py::test_checkpoints_load_on_other_numbers_of_ranks_and_with_fsdp2",
    ),
    "ranks wait for one that cannot write a trainer's files": (
        "CasTrainerMixin._save_checkpoint",
        "on_each(open_ranks(), lambda: self._write_files(model, trial))",
        "self._write_files(model, trial)",
        "tests/frontends/transformers/test_mixin_misuse.py::test_no_rank_waits_for_a_rank_that_fails_at_a_save",
    ),
    "models that drift apart are compared": (
        "AcceleratorCheckpointer.__init__",
        '            settings.setdefault("check_replicas", "off")\n',
        "",
        "tests/frontends/test_accelerate.py::test_models_that_drift_apart_are_saved_from_rank_0_on_request",
    ),
    "a wrapper with a different context is filled": (
        "forms_differ",
        "yield from kinds or differences(here.fields, there.fields)",
        "yield from ()",
        "tests/loading/test_wrapped.py::test_a_wrapper_that_differs_is_refused_and_nothing_changes",
    ),
    "a tensor with memory of its own is stored without it": (
        "is_wrapper",
        "or has_memory(value))",
        "or False)",
        "tests/tensors/test_no_memory.py::test_the_error_for_a_tensor_without_memory_names_it",
    ),
    "a rebuilt wrapper may differ from its description": (
        "rebuilt",
        "    if encode_form(own.form) != ",
        "    if False and encode_form(own.form) != ",
        "tests/loading/test_wrapped.py::test_a_rebuilt_wrapper_must_have_the_stored_form",
    ),
    "a shard is cut between the scales of a wrapper": (
        "_cut",
        "all(end % q == 0 for",
        "all(q for",
        "tests/saving/test_apart.py::test_a_cut_within_the_elements_of_a_scale_is_stored_in_parts",
    ),
    "ranks that hold a tensor in different forms cannot save it": (
        "held_apart",
        "if len(forms[key]) > 1",
        "if len(forms[key]) > 2",
        "tests/saving/test_apart.py::test_ranks_that_hold_a_tensor_as_different_types_store_parts",
    ),
    "a part of a wrapper fills a part with other elements": (
        "_moved",
        'own.fields.get("regions") != saved.fields.get("regions")',
        'own.fields.get("kind") != saved.fields.get("kind")',
        "tests/saving/test_apart.py::test_a_part_with_the_same_first_element_but_other_elements_is_refused",
    ),
    "a pattern does not match the key of a wrapper": (
        "Manifest.matches",
        "names = {key, self.outer.get(key, key)}",
        "names = {key}",
        "tests/store/test_wrapper_keys.py::test_the_key_of_a_wrapper_selects_its_tensors",
    ),
    "a wrapper whose description changed counts as unchanged": (
        "_is_redescribed",
        "before.form != after.form or any",
        "any",
        "tests/store/test_wrapper_keys.py::test_diff_reports_a_wrapper_whose_description_changed",
    ),
    "a path that cannot be a store causes an error only at the second save": (
        "Saver._check_path",
        "if create:",
        "if not create:",
        "tests/frontends/transformers/test_mixin_misuse.py::test_a_dangling_link_raises_an_error_at_the_first_save",
    ),
    "a number replaces the tensor of a learning rate": (
        "_taken_over",
        "type(new) is float and",
        "type(new) is str and",
        "tests/frontends/training_state/test_optimizer.py::test_torch_and_torchao_load_each_others_state",
    ),
    "invalid parts of torchao's weights stop an import": (
        "torchao_weights",
        "        except InvalidInput:\n            continue",
        "        except TypeError:\n            continue",
        "tests/frontends/views/test_torchao_names.py::test_a_llama_is_exported_as_save_pretrained_writes_it",
    ),
    "a large lineage is missing in the record": (
        "Leader._record",
        "[1] or dict.fromkeys(lineage) or None",
        "[1] or None",
        "tests/contents/test_checkpoint.py::test_a_lineage_that_is_too_large_for_the_record_is_in_the_manifest",
    ),
    "an unsigned lineage is shown as if it were signed": (
        "Checkpoint.lineage",
        "self.repo.trusted is None and None not in",
        "None not in",
        "tests/contents/test_checkpoint.py::test_a_store_that_requires_signatures_shows_the_signed_lineage",
    ),
    "the container of a URL is dropped as if it were a password": (
        "_public",
        "[^/@]*:[^/@]*@",
        "[^/@]*@",
        "tests/frontends/test_convert.py::test_an_import_from_a_url_names_the_url_without_its_password",
    ),
    "a save keeps the lineage of an earlier resume": (
        "Checkpointer.resume",
        "        self.lineage = self._loaded = None\n",
        "        self._loaded = None\n",
        "tests/frontends/trainer/test_checkpointer.py::test_saves_name_the_checkpoint_that_was_last_loaded",
    ),
    "a hook that exits fails the save": (
        "Events.emit",
        "except (Exception, SystemExit):",
        "except Exception:",
        "tests/frontends/trainer/test_saves.py::test_an_error_of_the_hook_is_logged_once_and_saves_continue",
    ),
    "a failed background save is not reported": (
        "Checkpointer.save_async.finish",
        "            with self._reporting(ranks, step):\n                saved",
        "            if True:\n                saved",
        "tests/frontends/trainer/test_saves.py::test_a_failed_save_is_reported_once_with_its_error",
    ),
    "a proof ignores values that are not tensors": (
        "_objects_that_differ",
        "            yield key, _CHANGED\n",
        "            continue\n",
        "tests/frontends/training_state/test_proof.py::test_each_way_to_resume_wrongly_is_found",
    ),
    "a proof ignores values that are missing now": (
        "_look",
        "sorted(stored - flat.leaves.keys())",
        "sorted(stored - stored)",
        "tests/frontends/training_state/test_proof.py::test_each_way_to_resume_wrongly_is_found",
    ),
    "a proof ignores parameters that an optimizer without state lost": (
        "_groups_that_differ",
        "how) for name in sorted(lost))",
        "how) for name in sorted(lost - saved.keys()))",
        "tests/frontends/training_state/test_proof.py::test_a_parameter_that_an_optimizer_without_state_lost_or_gained_is_found",
    ),
    "a proof compares generators after a data loader has drawn from them": (
        "Checkpointer.prove",
        "            restore_rng(generators)\n            state = ",
        "            state = ",
        "tests/frontends/training_state/test_proof.py::test_a_loader_that_draws_a_random_number_for_its_first_state_is_proved",
    ),
    "a proof in Lightning excuses all callbacks": (
        "may_differ",
        "isinstance(one, ModelCheckpoint | Timer)",
        "one is not None",
        "tests/frontends/lightning/test_proof.py::test_what_a_callback_changed_before_the_first_step_is_found",
    ),
    "a trainer proves a resume before its random generators are restored": (
        "CasTrainerMixin._load_rng_state",
        (
            "        if found.generators is not None:\n            restore_rng(found.generators)\n"
            "        if self._is_proving:\n"
            "            self.proof = self.checkpointer.prove(self.model, self._optim(), self._train_state())\n"
        ),
        (
            "        if self._is_proving:\n"
            "            self.proof = self.checkpointer.prove(self.model, self._optim(), self._train_state())\n"
            "        if found.generators is not None:\n            restore_rng(found.generators)\n"
        ),
        "tests/frontends/transformers/test_mixin_proof.py::test_a_resume_that_restores_everything_is_proved",
    ),
    "a proof in torchtitan requires parts that were excluded from the load": (
        "CasCheckpointManager._load_newest",
        "for name in excluded}",
        "for name in excluded - excluded}",
        "tests/frontends/test_torchtitan.py::test_a_right_resume_of_torchtitan_is_proved",
    ),
    "a proof of DCP excuses all of a part that was read incompletely": (
        "StorageReader._left_by",
        "left[key if top in tops else top]",
        "left[top]",
        "tests/frontends/dcp/test_proof.py::test_keys_that_the_load_did_not_read_or_fill_are_listed",
    ),
    "a proof ignores the options in the flat state of an optimizer": (
        "_look",
        "for at in optims)",
        "for at in state)",
        "tests/frontends/dcp/test_proof.py::test_each_way_to_resume_wrongly_is_found",
    ),
    "a proof does not compare lists whose items were stored separately": (
        "_objects_that_differ",
        "or key in split)",
        ")",
        "tests/frontends/dcp/test_proof.py::test_a_list_that_dcp_stores_as_one_value_is_compared",
    ),
    "a proof of DCP does not require the names of the checkpoint": (
        "StorageReader.prove",
        "by_name=True",
        "by_name=False",
        "tests/frontends/dcp/test_proof.py::test_a_state_is_compared_under_its_exact_names",
    ),
    "a proof takes a value that cannot be encoded for any other": (
        "_objects_that_differ",
        "(live := _encoded(key, leaf.value)) is None or live != ",
        "_encoded(key, leaf.value) != ",
        "tests/frontends/dcp/test_proof.py::test_a_state_is_compared_under_its_exact_names",
    ),
    "a proof counts options that are pickles as equal": (
        "_change",
        "_PICKLED if encoded == {None} else None",
        "None",
        "tests/frontends/training_state/test_proof.py::test_options_that_are_not_plain_data_are_compared_or_listed",
    ),
    "a proof of Megatron compares only main replicas": (
        "Saving.select_all",
        "[True] * len(self.sharded)",
        "[claim.main for claim in claims_of(self.sharded)]",
        "tests/frontends/megatron/test_loading_proof.py::test_a_replica_that_differs_is_found",
    ),
    "a proof of a callback excuses the optimizer": (
        "CasCheckpointCallback._prove",
        '{f"{HOME}.rng": _FILES}',
        '{f"{HOME}.rng": _FILES, "optim": _FILES}',
        "tests/frontends/transformers/test_callback_proof.py::test_what_a_callback_changed_before_the_first_step_is_found",
    ),
    "Megatron's training loop forgets which checkpoint it resumed from": (
        "CasLoadShardedStrategy.load",
        "        self.loaded = stored.checkpoint\n",
        "",
        "tests/frontends/megatron/test_training_loop.py::test_the_loop_loads_from_the_store_named_in_a_folder",
    ),
    "a hook of one module excuses all modules below it": (
        "_hooked",
        "inner.parameters(recurse=False)",
        "inner.parameters()",
        "tests/frontends/training_state/test_proof.py::test_values_of_a_module_with_a_hook_are_listed_and_others_are_not",
    ),
    "a merge names a cell that only some checkpoints hold": (
        "_Merging._equal_cells",
        "if equal.get(cell[3:6]) == cell.digest}",
        "if cell[3:6] in equal}",
        "tests/frontends/test_merging.py::test_a_moving_average_of_a_run_reads_no_cell_twice",
    ),
    "a merge names equal cells whatever the weights": (
        "_Merging._equal_cells",
        "not self.is_average or ",
        "",
        "tests/frontends/test_merging.py::test_equal_cells_are_computed_if_the_weights_do_not_sum_to_1",
    ),
    "a merge names cells of a checkpoint that was purged": (
        "with_commit",
        "now is None or not now.live or",
        "now is None or",
        "tests/saving/test_rounds.py::test_the_cells_of_a_purged_commit_are_not_named",
    ),
    "a merge does not check the blobs that it names": (
        "_reused",
        "for number in sorted(_blobs(planned)))",
        "for number in ())",
        "tests/frontends/test_merging.py::test_cells_whose_blobs_cannot_be_reused_are_stored_again",
    ),
    "a merge updates its buffer from the wrong version": (
        "_Merging._read",
        "            before = version",
        "            before = self.last",
        "tests/frontends/test_merging.py::test_the_result_equals_that_of_torch_bit_by_bit",
    ),
    "a merge reads every version from the start": (
        "_Merging._read",
        "            before = version",
        "            before = None",
        "tests/frontends/test_merging.py::test_a_moving_average_of_a_run_reads_no_cell_twice",
    ),
    "a merge updates memory from which a tensor has moved": (
        "_Merging._read",
        "in views(window, room, _ALIGN)",
        "in views([one._replace(entry=version.entries[one.entry.name]) for one in window], room, _ALIGN)",
        "tests/frontends/test_merging.py::test_a_tensor_stays_in_its_memory_if_the_dtype_of_another_changes",
    ),
    "a merge forgets the versions that it added earlier": (
        "_Merging._combine",
        "is_first=version is self.versions[0]",
        "is_first=True",
        "tests/frontends/test_merging.py::test_the_result_equals_that_of_torch_bit_by_bit",
    ),
    "a value that equals a moving average changes it": (
        "_add",
        "else into == value",
        "else torch.zeros_like(into, dtype=torch.bool)",
        "tests/frontends/test_merging.py::test_a_moving_average_is_computed_step_by_step",
    ),
    "an average contains checkpoints that are newer than its newest": (
        "_up_to",
        '    raise NotFound(f"{newest.run}@{newest.step} was forgotten before it was averaged")',
        "    return [*new, newest]",
        "tests/frontends/test_averaging.py::test_no_checkpoint_counts_twice_if_the_newest_is_forgotten_meanwhile",
    ),
    "a moving average begins with too little weight": (
        "moving_average",
        "    return [Term(weight, Fraction(1)), ",
        "    return [Term(weight, 1 - decays[0] if decays else Fraction(1)), ",
        "tests/plan/test_averages.py::test_a_half_life_halves_what_came_before_in_that_many_steps",
    ),
    "a server may store the checksum of an upload in the object": (
        "S3Client._check_frames",
        "        if self.size(key) != size:",
        "        if self.size(key) is None:",
        "tests/store/test_places.py::test_without_the_options_of_a_place_a_save_fails_and_doctor_names_them",
    ),
    "S3 Express is asked to list part of a folder": (
        "S3Client.page",
        "if self.bucket.endswith(_DIRECTORY) else prefix",
        "if not self.bucket else prefix",
        "tests/store/test_places.py::test_part_of_a_folder_can_be_listed_on_s3_express",
    ),
    "a store is created although listings lack new objects": (
        "check_listed",
        "    for key in {*keys} - {",
        "    for key in set() & {",
        "tests/repository/test_exclusive.py::test_a_store_is_not_created_on_storage_whose_listings_lack_new_objects",
    ),
    "what a running probe wrote counts as left behind": (
        "remove_leftovers",
        "< clock() - _LONGEST",
        "< clock()",
        "tests/repository/test_exclusive.py::test_leftovers_of_killed_probes_are_removed_after_a_day_and_nothing_else",
    ),
    "a response that is not a listing counts as an empty one": (
        "S3Client.page",
        'if not answer.keys() - {"ResponseMetadata"}:',
        "if not answer:",
        "tests/storage/remote/s3/test_client.py::test_a_response_that_is_not_a_listing_does_not_count_as_an_empty_one",
    ),
    "a store is created although a rule deletes its objects": (
        "require_lasting",
        "    if finding is not None and finding.ok is False:\n",
        "    if finding is not None and finding.ok is True:\n",
        "tests/repository/test_exclusive.py::test_a_store_is_not_created_where_a_rule_is_seen_to_delete_its_objects",
    ),
    "doctor does not look for zonal buckets": (
        "FsspecClient.examine",
        'if hasattr(self._fs, "_is_zonal_bucket") and',
        'if hasattr(self._fs, "is_zonal_bucket") and',
        "tests/storage/remote/test_gcs.py::test_zonal_buckets_are_refused_because_gcsfs_replaces_objects_there",
    ),
    "the average of a follower contains only the newest of several new checkpoints": (
        "MovingAverage.advance",
        "(arrival.checkpoint for arrival in arrivals)",
        "()",
        "tests/frontends/test_averaging.py::test_each_average_equals_a_merge_of_all_checkpoints",
    ),
    "the average of a follower continues from the rounded one": (
        "MovingAverage.held_in",
        'store.get("exact@0")',
        'store.get("rounded@0")',
        "tests/frontends/test_averaging.py::test_each_average_equals_a_merge_of_all_checkpoints",
    ),
    "a follower continues an average with a different decay": (
        "MovingAverage.held_in",
        'fraction(decay, "ema") != fraction(self.decay, "ema")',
        "False",
        "tests/frontends/test_averaging.py::test_a_folder_with_an_average_is_refused_with_a_different_rule",
    ),
    "a follower that lost its average begins with the newest checkpoint": (
        "MovingAverage.advance",
        'after=after if exact else "start", ',
        'after=after or "start", ',
        "tests/frontends/test_averaging.py::test_without_an_earlier_average_a_new_one_begins",
    ),
    "a follower removes the average of its current folder": (
        "Follower._tidy",
        "if current is None or path != _average_of(current)]",
        "]",
        "tests/frontends/test_averaging.py::test_each_average_equals_a_merge_of_all_checkpoints",
    ),
    "a record about old places brings back those that ended": (
        "_changes",
        "for places in commit.existing if places.txid == record.to",
        "for places in (*commit.existing, *commit.ended) if places.txid == record.to",
        "tests/history/test_folding.py::test_a_record_that_brings_back_ended_places_changes_no_places",
    ),
    "a trim leaves the newest places instead of the current ones": (
        "_changes",
        "return _ends(commit, (commit.places,), number, commit.moved_by)",
        "return _ends(commit, commit.existing[-1:], number, commit.moved_by)",
        "tests/history/test_folding.py::test_a_log_names_places_and_which_of_them_are_current",
    ),
    "the places of a purged checkpoint have not ended": (
        "_changes",
        "_ends(commit, (), number, hid) if isinstance(record, Purged) else {}",
        "{}",
        "tests/history/test_folding.py::test_a_log_names_places_and_which_of_them_are_current",
    ),
    "an unreadable record in the middle of a log is ignored": (
        "doubt_of",
        """        if isinstance(record, CasckptError):
            return record
""",
        """        if isinstance(record, CasckptError) and number == max(log):
            return record
""",
        "tests/history/test_folding.py::test_a_record_that_cannot_be_read_puts_the_checkpoint_in_doubt",
    ),
    "a purged checkpoint changes again": (
        "fold",
        '{} if commit.last == "purged" else _changes(commit, log[number], number)',
        "_changes(commit, log[number], number)",
        "tests/history/test_folding.py::test_nothing_changes_a_purged_checkpoint",
    ),
    "places whose dropped entries are others have all entries": (
        "Places.holds",
        "mine.patterns <= theirs.patterns",
        "mine.entries <= theirs.entries",
        "tests/upkeep/copies/test_replication.py::test_a_copy_with_other_entries_gets_a_log_of_its_own",
    ),
    "a change takes the next free number of a log": (
        "add",
        "    number = commit.number + 1\n",
        "    number = refresh(repo, commit).number + 1\n",
        "tests/history/test_folding.py::test_one_of_two_changes_wins",
    ),
    "a change is retried after another change": (
        "add",
        "now == replace(commit, number=now.number, shown=None):",
        "now.last == commit.last:",
        "tests/history/test_folding.py::test_a_change_never_follows_another_that_its_writer_has_not_read",
    ),
    "the manifest of a rewrite counts as one without a record": (
        "CommitList.recorded",
        "frozenset([*self.commits, *self.damaged, *every, *self._over])",
        "frozenset([*self.commits, *self.damaged])",
        "tests/history/test_folding.py::test_a_listing_knows_which_transactions_have_a_record",
    ),
    "a rewrite is revoked while its slot is free": (
        "revoke",
        "for slot in slots if not keep(repo, *slot)):",
        "for slot in slots if repo.storage.size(commit_key(*slot))):",
        "tests/upkeep/test_rewrite.py::test_a_rewriter_that_gets_no_response_takes_its_slot_before_it_fails",
    ),
    "the file of a rewrite that lost its slot goes before it is revoked": (
        "closed_files",
        """            if one.began is not None:
                end(repo, one, "another record has its slot")
""",
        "",
        "tests/upkeep/test_rewrite.py::test_a_dead_rewrite_whose_slot_was_taken_is_revoked_before_its_file_goes",
    ),
    "a rewrite whose slot is taken counts as open": (
        "_has_ended",
        "    return one.began.slot is not None and one.began.slot in names\n",
        "    return False\n",
        "tests/upkeep/test_rewrite.py::test_a_rewrite_is_open_while_its_slot_is_free",
    ),
    "a rewrite whose file cannot be read is revoked while its slot is free": (
        "end",
        "return revoke(repo, one.txid, reason, slots)",
        "return revoke(repo, one.txid, reason, slots[:0])",
        "tests/upkeep/test_rewrite.py::test_a_rewrite_whose_file_cannot_be_read_is_ended_in_every_possible_slot",
    ),
    "a rewrite whose file cannot be read counts as open after it has committed": (
        "_has_ended",
        " or one.txid in list_commits(repo).recorded",
        "",
        "tests/upkeep/test_rewrite.py::test_a_committed_rewrite_whose_file_cannot_be_read_has_ended",
    ),
    "a transaction whose file cannot be read has ended": (
        "_has_ended",
        "return repo.storage.size(transaction_key(one.txid)) is None or",
        "return True or",
        "tests/history/test_transactions.py::test_an_unreadable_transaction_counts_as_open",
    ),
    "a rewriter that does not know how it ended removes its file": (
        "Transaction.abort",
        """a later gc revokes it: %s", self.txid, error)
            if isinstance""",
        """a later gc revokes it: %s", self.txid, error)
            self._remove_files()
            if isinstance""",
        "tests/upkeep/test_rewrite.py::test_a_rewriter_that_cannot_find_out_leaves_its_transaction_open",
    ),
    "a rewrite does not read its log again after it began": (
        "rewrite",
        "if not base.visible or refresh(repo, base) != base:",
        "if not base.visible:",
        "tests/upkeep/test_rewrite.py::test_a_change_after_the_rewrite_began_is_noticed_before_it_uploads",
    ),
    "a gc keeps only the blobs of places that exist": (
        "spare_roots",
        "for places in (*commit.existing, *commit.ended)]",
        "for places in commit.existing]",
        "tests/upkeep/gc/test_wait.py::test_blobs_committed_and_purged_during_the_wait_are_kept_by_this_gc",
    ),
    "a gc never deletes the objects of trimmed places": (
        "CommitList.ended",
        "return frozenset([*revoked, *ended, *self._over])",
        "return frozenset(revoked)",
        "tests/upkeep/gc/test_purge.py::test_old_places_are_trimmed_after_the_minimum_age",
    ),
    "old places are candidates": (
        "candidates",
        "for commit in commits.placed() if commit.places.txid not in as_purged]",
        "for commit in commits.live() if commit.places.txid not in as_purged]",
        "tests/upkeep/gc/test_purge.py::test_a_preview_deletes_nothing_of_old_places",
    ),
    "a checkpoint guards the folder of its old places after a trim": (
        "list_unguarded",
        "live = {one.places.txid: one for one in commits.placed() if one.txid not in commits.damaged}",
        """live = {
        txid: one
        for one in commits.placed()
        for txid in (one.txid, one.places.txid)
        if one.txid not in commits.damaged
    }""",
        "tests/upkeep/test_inventory.py::test_the_folder_of_trimmed_places_has_no_guard",
    ),
    "a trim ignores tags": (
        "retire",
        "for commit in due if commit.txid not in held)",
        "for commit in due if commit.is_old_places or commit.txid not in held)",
        "tests/upkeep/gc/test_purge.py::test_gc_does_not_trim_places_that_were_tagged_since_the_plan",
    ),
    "a tag on thinned places bars the trim of the whole ones": (
        "_asks_for_more",
        "    return on is None or not commit.current.holds(on)\n",
        "    return True\n",
        "tests/upkeep/gc/test_purge.py::test_a_tag_set_on_thinned_places_does_not_keep_the_older_ones",
    ),
    "a flag goes below the floor of the settings": (
        "min_age_of",
        "if wanted is not None and wanted < floor:",
        "if False:",
        "tests/upkeep/gc/test_ages.py::test_an_option_may_only_raise_the_setting",
    ),
    "a lower floor counts at once": (
        "_floor",
        "    if max(values) == values[-1]:\n",
        "    if True:\n",
        "tests/upkeep/gc/test_ages.py::test_rotation_only_forgets_until_a_lower_value_counts",
    ),
    "a writer chooses the age of what it forgets": (
        "_gone_since",
        "    if times is not None:\n",
        "    if False:\n",
        "tests/upkeep/gc/test_ages.py::test_bytes_stay_until_what_hid_them_is_old_enough",
    ),
    "a purge of a visible checkpoint counts from its save": (
        "_ends",
        "by = (hid if hid == number - 1 else number), number",
        "by = 0, number",
        "tests/upkeep/gc/test_ages.py::test_bytes_stay_until_what_hid_them_is_old_enough",
    ),
    "a record counts before those below it exist": (
        "RecordTimes.of",
        "max(time for time in times if time is not None)",
        "(times[number] or 0)",
        "tests/upkeep/gc/test_ages.py::test_a_record_counts_only_since_all_before_it_exist",
    ),
    "a gc that goes on deletes what is young for it": (
        "spare_roots",
        "    _spare_young(repo, pending.sizes, commits, min_age)\n",
        "",
        "tests/upkeep/gc/test_ages.py::test_a_gc_that_goes_on_keeps_what_is_young_for_it",
    ),
    "the minimum age of a trim counts from the save": (
        "_gone_since",
        "commit.moved_at if commit.visible else commit.changed_at",
        "commit.changed_at",
        "tests/upkeep/gc/test_purge.py::test_the_age_of_old_places_begins_with_the_rewrite",
    ),
    "a rule that thins reads the logs after it lists tags": (
        "plan_thin",
        """    listed = list_commits(repo)
    named = _barring(repo, tagged=tagged, listed=listed)
""",
        """    named = _barring(repo, tagged=tagged, listed=list_commits(repo))
    listed = list_commits(repo)
""",
        "tests/upkeep/test_thin.py::test_tagged_checkpoints_are_visible_and_complete_in_the_end",
    ),
    "a tag that expires is not recorded": (
        "hold",
        "return tag, record_tag(repo, now, name, tag.generation)",
        "return tag, now",
        "tests/history/test_leases.py::test_a_rule_that_has_not_seen_a_tag_with_a_duration_does_not_forget_its_checkpoint",
    ),
    "a lease stays on fewer entries than were brought back": (
        "take",
        "if now.txid != commit.txid or commit.places.holds(now.places):",
        "if True:",
        "tests/history/test_leases.py::test_a_lease_moves_to_the_entries_that_are_brought_back_while_it_is_taken",
    ),
    "a mirror's answer counts for a log that was read after it": (
        "retire",
        "now = {commit.txid: commit for commit in done.forgotten}",
        "now = dict(list_commits(repo).commits)",
        "tests/upkeep/copies/test_mirrored.py::test_gc_does_not_purge_what_has_changed_since_it_asked",
    ),
    "an open copy in the mirror hides later copies": (
        "_copies",
        "        elif over is None and there.storage.size(transaction_key(txid)) is None:\n",
        "        elif over is None:\n",
        "tests/upkeep/copies/test_mirrored.py::test_numbers_without_a_usable_log_do_not_end_the_search",
    ),
    "what a mirror purged counts after a restore": (
        "_counted",
        "    if not commit.restored:\n",
        "    if True:\n",
        "tests/upkeep/copies/test_mirrored.py::test_a_restored_checkpoint_is_safe_only_while_the_mirror_has_it",
    ),
    "a mirror's records need not be durable to count": (
        "ask",
        '            there.storage.settle(PREFIX.rstrip("/"))\n',
        "",
        "tests/upkeep/copies/test_mirrored.py::test_the_records_of_a_mirror_in_a_folder_are_durable_before_they_count",
    ),
    "a mirror is not asked again after its records are durable": (
        "ask",
        "            unsafe = unsafe_in(there, wanted, thinned=thinned)  # again: it may have lost power before\n",
        "",
        "tests/upkeep/copies/test_mirrored.py::test_the_records_of_a_mirror_in_a_folder_are_durable_before_they_count",
    ),
    "a mirror needs only the current places": (
        "_needed",
        "if not thinned or one == now]",
        "if one == now]",
        "tests/upkeep/copies/test_mirrored.py::test_all_existing_entries_must_be_in_the_mirror",
    ),
    "a copy joins a copy of other places": (
        "join",
        "(found.manifest, found.places) != same:",
        "found.manifest != began.manifest:",
        "tests/upkeep/copies/test_replication.py::test_copies_of_different_places_do_not_share_a_transaction",
    ),
    "a copy with more entries becomes a new log": (
        "_join",
        "(now.holds(commit.places) or commit.places.holds(now))",
        "now.holds(commit.places)",
        "tests/upkeep/copies/test_replication.py::test_a_thinned_copy_becomes_complete_in_its_own_log",
    ),
    "a copy with other entries counts as the same copy": (
        "_join",
        " and (now.holds(commit.places) or commit.places.holds(now)):",
        ":",
        "tests/upkeep/copies/test_replication.py::test_a_copy_with_other_entries_gets_a_log_of_its_own",
    ),
    "a copy fails if its places are trimmed meanwhile": (
        "replicate",
        "if not now.live or commit.places in now.existing:",
        "if True:",
        "tests/upkeep/copies/test_replication.py::test_a_copy_of_places_that_are_trimmed_meanwhile_continues_with_the_current_ones",
    ),
    "the last share of a save is keyed by the checkpoint": (
        "make_offer",
        "last.txid == parent.places.txid:",
        "last.txid == parent.txid:",
        "tests/saving/test_reuse.py::test_a_process_reuses_cells_of_its_own_last_save_where_they_are_now",
    ),
    "a watch does not wait for an announced restore": (
        "Expected.judge",
        "elif seen.live and seen.number < self._awaited[txid].number:",
        "elif False:",
        "tests/contents/test_watching.py::test_a_watch_waits_for_an_announced_restore",
    ),
    "a restore is not announced": (
        "add",
        "    if isinstance(record, Restored):\n",
        "    if False:\n",
        "tests/history/test_announcements.py::test_each_commit_and_restore_is_announced_before_it_exists",
    ),
    "a watch yields a checkpoint again after it was restored": (
        "Expected.judge",
        'seen.last == "revoked" or seen.id in self._yielded:',
        'seen.last == "revoked":',
        "tests/contents/test_watching.py::test_a_save_in_progress_is_yielded_regardless_of_when_it_was_announced",
    ),
    "a checkpoint counts as mirrored although its copy lacks entries": (
        "_lacking",
        "if not any(other.holds(one) for other in held)",
        "if not held",
        "tests/upkeep/copies/test_mirrored.py::test_all_existing_entries_must_be_in_the_mirror",
    ),
    "any checkpoint under a copy's transaction counts as the copy": (
        "_lacking",
        " if one.record.manifest == commit.id]",
        "]",
        "tests/upkeep/copies/test_mirrored.py::test_numbers_without_a_usable_log_do_not_end_the_search",
    ),
    "an unreadable copy ends the search for copies": (
        "_copies",
        "        except (Damaged, Refused):\n            continue\n",
        "        except (Damaged, Refused):\n            return\n",
        "tests/upkeep/copies/test_mirrored.py::test_numbers_without_a_usable_log_do_not_end_the_search",
    ),
    "a copy's first record is all that is read of it": (
        "_copies",
        "                yield copy if listed is not None else refresh(there, copy)\n",
        "                yield copy\n",
        "tests/upkeep/copies/test_mirrored.py::test_a_restored_checkpoint_is_safe_only_while_the_mirror_has_it",
    ),
    "a trim of what the mirror need not have asks it": (
        "_needed",
        "if now is None or not commit.is_old_places else [one for one in wanted if not now.holds(one)]",
        "if now is None or True else []",
        "tests/upkeep/copies/test_mirrored.py::test_a_trim_needs_only_the_entries_that_it_ends",
    ),
    "a mirror that cannot be asked has everything": (
        "ask",
        "        return Answer(wanted, problem=",
        "        return Answer((), problem=",
        "tests/upkeep/copies/test_mirrored.py::test_nothing_is_safe_if_a_list_of_the_mirror_cannot_be_read",
    ),
    "the mirror receives what is current instead of everything": (
        "Mirror._catch_up",
        "                self._copy(commit)\n",
        "                self._copy(listed.commits[commit.txid])\n",
        "tests/upkeep/test_thin.py::test_checkpoints_are_copied_to_the_mirror_before_they_are_thinned",
    ),
    "what is forgotten here is visible in the mirror": (
        "Mirror._copy",
        '        if commit.last == "forgotten":\n            forget(self.target, copy)\n',
        "        del copy\n",
        "tests/upkeep/copies/test_mirror.py::test_while_the_mirror_is_unreachable_saves_work_and_gc_forgets_nothing",
    ),
    "the mirror is not asked again immediately before the records": (
        "execute",
        "        plan = without_unmirrored(repo, plan)  # again: the mirror may have lost copies since\n",
        "",
        "tests/upkeep/gc/test_gc.py::test_gc_respects_a_mirror_that_was_set_after_the_plan",
    ),
    "gc ignores that its settings are lost": (
        "plan_retiring",
        "    check_settings(repo)\n",
        "",
        "tests/upkeep/test_saves.py::test_settings_that_this_host_has_seen_are_not_lost_unnoticed",
    ),
    "a fuller copy is a second commit": (
        "_join",
        "                return there, attempt\n",
        "                pass\n",
        "tests/upkeep/copies/test_replication.py::test_a_thinned_copy_becomes_complete_in_its_own_log",
    ),
    "a copy to the mirror leaves out what the mirror has elsewhere": (
        "_plan_for",
        "        if commit.txid not in unsafe and twin(",
        "        if twin(",
        "tests/upkeep/copies/test_mirror.py::test_a_checkpoint_that_was_copied_back_is_copied_to_the_mirror_under_its_new_transaction",
    ),
    "a save that may have committed deletes its objects first": (
        "Transaction.abort",
        " and not self._has_tried",
        "",
        "tests/history/test_transactions.py::test_after_a_try_to_commit_objects_go_only_if_the_answer_becomes_known",
    ),
    "a failed save does not read which record ended it": (
        "Transaction.abort",
        "if is_revoked := isinstance(found, records.RevokedRecord):",
        "if is_revoked := True:",
        "tests/history/test_transactions.py::test_after_a_try_to_commit_objects_go_only_if_the_answer_becomes_known",
    ),
    "a copy that fails removes what others uploaded for it": (
        "Transaction._remove_uploads",
        "revoked or self.began.manifest is None",
        "True",
        "tests/history/test_transactions.py::test_what_others_may_need_and_what_is_interrupted_is_left_to_gc",
    ),
    "a save that is interrupted removes its objects": (
        "Transaction._remove_uploads",
        "and not is_interrupt ",
        "",
        "tests/saving/test_save.py::test_a_save_that_is_interrupted_leaves_its_objects_to_gc",
    ),
    "a failed save removes its objects in a bucket": (
        "Transaction._remove_uploads",
        " and not self._repo.storage.traits.remote",
        "",
        "tests/history/test_transactions.py::test_in_a_bucket_a_failed_save_removes_nothing",
    ),
    "the error of a save waits until its objects are removed": (
        "run_beside",
        "threading.Thread(target=act, name=_BESIDE, daemon=True).start()",
        "act()",
        "tests/saving/test_save.py::test_the_error_of_a_save_is_raised_at_once_whether_its_clean_up_succeeds_or_not",
    ),
    "a failed save removes its objects for as long as it takes": (
        "Transaction._clean_up",
        "time.monotonic() > end",
        "False",
        "tests/history/test_transactions.py::test_a_clean_up_gives_up_after_ten_seconds",
    ),
    "a record is written into a file that another record has": (
        "_use",
        "os.fstat(fd).st_nlink == 1",
        "True",
        "tests/storage/local/test_spare.py::test_a_file_with_a_second_name_is_never_written",
    ),
    "a sync that found no room is tried again": (
        "FileMaker._twice",
        "if is_full(error):",
        "if False:",
        "tests/storage/local/test_store.py::TestFullDisk::test_a_sync_that_finds_no_room_is_not_tried_again",
    ),
    "gc does not prepare files again": (
        "_Collection.delete",
        "self.repo.storage.prepare()",
        "pass",
        "tests/upkeep/gc/test_full_disk.py::test_gc_prepares_files_again_with_what_it_has_freed_last",
    ),
    "gc ends at the first record without room": (
        "_retire_and_delete",
        "if is_full or not error.full:",
        "if True:",
        "tests/upkeep/gc/test_full_disk.py::test_gc_continues_if_the_prepared_files_do_not_suffice_for_a_part",
    ),
    "a forget on a full disk deletes nothing first": (
        "with_room",
        "execute(repo, GcPlan((), ()), wait=0)",
        "pass",
        "tests/upkeep/gc/test_full_disk.py::test_forget_and_rotation_free_what_needs_no_record_and_try_again",
    ),
    "a value that a load leaves out excuses its whole model": (
        "excuses",
        " if why == _NO_OPTIMIZER",
        "",
        "tests/frontends/training_state/test_proof.py::test_a_value_that_a_load_leaves_out_excuses_no_other_value",
    ),
    "an excuse counts for all keys that begin with its text": (
        "_excuse",
        'at.startswith(f"{start}.")',
        "at.startswith(start)",
        "tests/frontends/training_state/test_proof.py::test_a_value_that_a_load_leaves_out_excuses_no_other_value",
    ),
    "a key that a load of DCP does not read excuses all others": (
        "StorageReader._left_by",
        "key if top in tops else top",
        "top",
        "tests/frontends/dcp/test_proof.py::test_a_key_that_the_load_left_out_excuses_no_other_key",
    ),
    "every metadata.json is one of Megatron": (
        "is_megatron",
        ' and content.get("sharded_backend") == "torch_dist"',
        "",
        "tests/frontends/dcp/test_converters.py::test_only_the_metadata_json_of_megatron_puts_values_into_lists",
    ),
    "an export without metadata.json is one of Megatron": (
        "casckpt_to_dcp",
        "MEGATRON in attached",
        "MEGATRON in opened_store.attachments(checkpoint)",
        "tests/frontends/dcp/test_converters.py::test_only_the_metadata_json_of_megatron_puts_values_into_lists",
    ),
    "a save in the foreground does not note its step": (
        "Checkpointer.save",
        "self.saved_step = saved.step",
        "pass",
        (
            "tests/frontends/trainer/test_last_save.py::"
            "test_a_signal_after_the_save_of_a_step_exits_even_if_the_state_has_changed_since"
        ),
    ),
    "a new process group uses the connections of an old one with the same name": (
        "_Groups.get",
        "group.parent() is not parent",
        "group.parent() is None",
        "tests/ranks/test_wire.py::test_a_new_default_group_gets_new_connections_and_its_own_ranks",
    ),
    "any optimizer with the name of one of torch counts as torch's": (
        "StateKind.of",
        "is_torchs and name in _ALWAYS",
        "name in _ALWAYS",
        (
            "tests/frontends/training_state/test_optimizer.py::"
            "test_a_user_defined_optimizer_with_the_name_of_one_of_torchs_can_have_any_state"
        ),
    ),
    "a module whose name begins like that of torch.optim is torch's": (
        "StateKind.of",
        'startswith("torch.optim.")',
        'startswith("torch.optim")',
        (
            "tests/frontends/training_state/test_optimizer.py::"
            "test_a_user_defined_optimizer_with_the_name_of_one_of_torchs_can_have_any_state"
        ),
    ),
    "a rank keeps the gates of others open": (
        "HostReads.end",
        "os.close(self._gates.popitem()[1])",
        "self._gates.popitem()",
        "tests/repository/test_host_reads.py::test_gates_are_closed_after_the_reads",
    ),
    "a rank that has ended leaves its gate to a forked child": (
        "HostReads.bringing",
        "self.release(0, 0, 0)",
        "pass",
        "tests/repository/test_host_reads.py::test_a_child_forked_while_bytes_arrive_does_not_keep_others_waiting",
    ),
    "a rank keeps its own gate open": (
        "HostReads.bringing",
        "os.close(self._held_fd)",
        "pass",
        "tests/repository/test_host_reads.py::test_gates_are_closed_after_the_reads",
    ),
    "a default group that is made again in the same store meets the previous one": (
        "_times_met",
        "return next(number for",
        "return next(0 for",
        "tests/ranks/test_wire.py::test_a_default_group_can_be_made_again_in_the_same_store",
    ),
}
"""The function, its text, the text that replaces it, and the test: see `Planted`."""

PLANTED = tuple(Planted(name, *bug) for name, bug in BUGS.items())
