"""Bugs whose places a seed drew (`tools/mutants --draw`), by file: (name, before, after, tests), see `planted`.

Left out of what was drawn: what changes nothing that can be seen, and what no type checker lets pass.
"""

from __future__ import annotations

DRAWN: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "casckpt/loading/blob_readers.py": (
        (
            "a copy that is wrong is dropped without a lock",
            'may be right?"""\n        with self._lock:',
            'may be right?"""\n        if True:',
            "tests/loading/test_blob_readers.py",
        ),
    ),
    "casckpt/loading/entry_reader.py": (
        (
            "autograd is not told of what a load wrote",
            "note_writes(tensor for want in wants for tensor in want.sink.written)",
            "pass",
            "tests/loading/test_load_autograd.py",
        ),
        (
            "who wants the same bytes, too, gets none",
            "items[name].takers.append(taker)",
            "pass",
            "tests/loading/test_load.py",
        ),
    ),
    "casckpt/loading/load_plan.py": (
        ("objects are not loaded", "self._add_object(key, one)", "pass", "tests/loading/test_load.py"),
    ),
    "casckpt/loading/template.py": (
        (
            "what a template lacks is not told",
            "return errors, lacking",
            "return (errors, errors)",
            "tests/loading/test_template.py",
        ),
    ),
    "casckpt/loading/transfer.py": (
        (
            "a part of a read is taken from its beginning",
            "offset > start",
            "False",
            "tests/loading/test_load_autograd.py",
        ),
    ),
    "casckpt/frontends/accelerate.py": (
        (
            "every data loader is asked where it is",
            "if self._stateful else None",
            "",
            "tests/frontends/test_accelerate.py",
        ),
        (
            "Accelerate's checkpointer does not wait for its last save",
            "self.checkpointer.close()",
            "pass",
            "tests/frontends/test_accelerate.py",
        ),
    ),
    "casckpt/frontends/convert.py": (
        (
            "a folder of OLMo-core is not known by its files",
            '(folder / OLMO_METADATA).is_file() and (folder / "rank_0.safetensors").is_file()',
            "False",
            "tests/frontends/test_convert_torch.py",
        ),
        (
            "a file of the old torch.save is not known",
            "or head[:2] in ",
            "or head[:] in ",
            "tests/frontends/test_convert_torch.py",
        ),
    ),
    "casckpt/frontends/dcp/described.py": (
        (
            "a set in DCP's metadata may hold anything",
            "not all(isinstance(item, str | int | float | bytes | None) for item in found)",
            "False",
            "tests/frontends/test_hostile_imports.py",
        ),
        (
            "anything with offsets and sizes is a chunk of DCP's",
            "not isinstance(chunk, dcp.ChunkStorageMetadata) or not _is_shape(offsets) or not _is_shape(sizes",
            "(not _is_shape(offsets) or not _is_shape(sizes)",
            "tests/frontends/test_hostile_imports.py",
        ),
    ),
    "casckpt/frontends/dcp/exporting.py": (
        (
            "the size of an exported chunk is counted in elements",
            "* torch_dtype(self.entry.dtype).itemsize",
            "",
            "tests/frontends/test_convert_torch.py",
        ),
        (
            "a tensor that is exported to DCP has no chunks",
            "range(0, shape[0],",
            "range(shape[0], 0,",
            "tests/frontends/test_convert_torch.py",
        ),
        (
            "metadata of an export to DCP do not say where chunks lie",
            "self._note(dcp.MetadataIndex(chunk.key, chunk.box.offset), file, name, file.tell() - start)",
            "pass",
            "tests/frontends/test_convert_torch.py",
        ),
        (
            "a row of an export to DCP counts as the whole tensor",
            "prod(shape[1:])",
            "prod(shape[:])",
            "tests/frontends/test_convert_torch.py",
        ),
    ),
    "casckpt/frontends/dcp/folder.py": (
        (
            "a tensor in a folder of DCP is not compared with its data",
            "untyped_storage().nbytes() ",
            "untyped_storage().offset() ",
            "tests/frontends/test_convert_torch.py",
        ),
    ),
    "casckpt/frontends/dcp/items.py": (
        ("an object of DCP is not stored", "values.objects.append(entry)", "pass", "tests/frontends/test_dcp.py"),
        (
            "every part of DCP's is taken for one of a rank that saves alone",
            "alone and sizes != shape",
            "(sizes != shape)",
            "tests/frontends/test_dcp_pitfalls.py",
        ),
    ),
    "casckpt/frontends/dcp/note.py": (
        (
            "the keys of a note for DCP are taken for its planner data",
            "if keys is None else list(keys), None",
            ", None if keys is None else list(keys)",
            "tests/frontends/test_dcp.py",
        ),
        (
            "the note of what a rank saved alone has sizes for offsets",
            ", c.offset, c.",
            ", c.nbytes, c.",
            "tests/frontends/test_dcp_ranks.py",
        ),
    ),
    "casckpt/frontends/dcp/contents.py": (
        (
            "metadata for DCP do not say of which save they are",
            "stamp(made, commit.run, commit.step, commit.txid)",
            "pass",
            "tests/frontends/test_dcp_ids.py",
        ),
        (
            "a chunk that a rank saved alone is looked for by its size",
            "part.offset =",
            "part.nbytes =",
            "tests/frontends/test_dcp_ranks.py",
        ),
    ),
    "casckpt/frontends/dcp/planners.py": (
        (
            "a value that went to another process keeps the mark before it",
            "data[len(MAGIC) :",
            "data[:",
            "tests/frontends/test_dcp.py",
        ),
    ),
    "casckpt/frontends/dcp/reader.py": (
        (
            "a reader of DCP that is told another place reads the old one",
            "self._opened = None",
            "pass",
            "tests/frontends/test_dcp.py",
        ),
        (
            "what a reader did not find is looked for once more",
            "self._absent = True",
            "pass",
            "tests/frontends/test_dcp.py",
        ),
        (
            "what is no tensor is not loaded through DCP",
            "self._read_values([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)",
            "pass",
            "tests/frontends/test_dcp.py",
        ),
        (
            "tensors that a planner makes anew are counted as if they had a byte an element",
            "numel() * 8, WINDOW_BYTES",
            "numel(), WINDOW_BYTES",
            "tests/frontends/test_dcp.py",
        ),
    ),
    "casckpt/frontends/dcp/schema.py": (
        ("each leaf of DCP's is a container, too", "in path[:-1]:", "in path[:]:", "tests/frontends/test_dcp.py"),
        (
            "the path of a nested leaf of DCP's begins with its end",
            "node(child, (*path, step),",
            "node(child, (step, step),",
            "tests/frontends/test_dcp.py",
        ),
        (
            "a list in a list is one value, whatever is in it",
            "child, (*home, element)",
            "(*home, element), child",
            "tests/frontends/test_dcp.py",
        ),
    ),
    "casckpt/frontends/dcp/session.py": (
        (
            "ranks may store one tensor in two dtypes through DCP",
            "name[0] == TENSOR and forms.setdefault(name, form) != form",
            "False",
            "tests/frontends/test_dcp_pitfalls.py",
        ),
    ),
    "casckpt/frontends/dcp/unflattened.py": (
        (
            "a flat tensor of Megatron's stays flat",
            "-1]) <= {1} for",
            "-1]) < {1} for",
            "tests/frontends/megatron/test_torch_dist.py",
        ),
        (
            "a box is cut out of a chunk to its end",
            ": self.start + box.numel()",
            ":",
            "tests/frontends/megatron/test_torch_dist.py",
        ),
    ),
    "casckpt/frontends/dcp/writer.py": (
        ("where a thread saved once it saves again", "place.used = True", "pass", "tests/frontends/test_dcp_ids.py"),
    ),
    "casckpt/frontends/interchange/export.py": (
        (
            "a suffix that names another format is not refused",
            "_check_suffix(chosen, path)",
            "pass",
            "tests/frontends/interchange/test_export.py",
        ),
        (
            "the suffix of a folder that is there counts",
            'of in (None, format) or (of, format) == ("safetensors", "hf") or os.path.isdir(path',
            '(of in (None, format) or (of, format) == ("safetensors", "hf")',
            "tests/frontends/interchange/test_export.py",
        ),
    ),
    "casckpt/frontends/follow.py": (
        ("a follower removes what is current", "every.index(current) + 1 ", "", "tests/frontends/test_follow.py"),
        ("a follower writes all tensors", "list(self.keys) or None", "(None)", "tests/frontends/test_follow.py"),
    ),
    "casckpt/frontends/lightning/files.py": (
        (
            "a file of Lightning's that is removed leaves its checkpoint",
            "self._let_go(named)",
            "pass",
            "tests/frontends/test_lightning.py",
        ),
        (
            "a URL without a suffix is taken for a reference",
            'text.startswith(("/", ".")) or "://" in text or (',
            '(text.startswith(("/", ".")) or ',
            "tests/frontends/test_lightning.py",
        ),
    ),
    "casckpt/format/tree.py": (
        (
            "no more than were named are said to be more",
            "if len(names) > most",
            "if len(names) >= most",
            "tests/frontends/megatron/test_integrity.py",
        ),
    ),
    "casckpt/frontends/megatron/claims.py": (
        (
            "the largest tensors are not shared out first",
            "sorted(wanted.items(), key=lambda item: -item[0][1].numel",
            "list(wanted.items()",
            "tests/frontends/megatron/test_sharing.py",
        ),
        (
            "an object on one rank is on two",
            "len(ranks) > 1:",
            "len(ranks) >= 1:",
            "tests/frontends/megatron/test_loading.py",
        ),
    ),
    "casckpt/frontends/megatron/folders.py": (
        (
            "a common.pt of another save is taken for the right one",
            "path.read_bytes() != stored.store.read_attachment(stored.checkpoint, COMMON_NAME)",
            "False",
            "tests/frontends/megatron/test_core_failures.py",
        ),
        (
            "the common.pt of a folder is not the one that was saved",
            "stored.file or write_archive(load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle",
            "(write_archive(load_common_state_dict(checkpoint_dir, allow_pickle=allow_pickle)",
            "tests/frontends/megatron/test_core_failures.py",
        ),
    ),
    "casckpt/frontends/megatron/kinds.py": (
        (
            "what is not persistent is not extracted",
            "is_sharded_tensor(value) or is_factory(value) or is_nonpersistent(value",
            "(is_sharded_tensor(value) or is_factory(value)",
            "tests/frontends/megatron/test_selecting.py",
        ),
    ),
    "casckpt/frontends/megatron/mapping.py": (
        ("a part without data has data", "other.data = None", "pass", "tests/frontends/megatron/test_loading.py"),
        (
            "any replica with several numbers is the main one",
            "all(one == 0 ",
            "all(one >= 0 ",
            "tests/frontends/megatron/test_mapping.py",
        ),
    ),
    "casckpt/frontends/megatron/nesting.py": (
        (
            "one place more than there is left over is looked at",
            "len(x1) - 1, len",
            "len(x1), len",
            "tests/frontends/megatron/test_loading.py",
        ),
        (
            "a text that just fits is cut",
            "text) <= _SHOWN ",
            "text) < _SHOWN ",
            "tests/frontends/megatron/test_nesting.py",
        ),
        (
            "a tensor is compared with anything",
            "isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor",
            "(isinstance(x1, torch.Tensor)",
            "tests/frontends/megatron/test_nesting.py",
        ),
    ),
    "casckpt/frontends/megatron/parts.py": (
        (
            "a flat part without elements is narrowed to nothing rather than left out",
            "length) * row)\n    if lo >= hi:",
            "length) * row)\n    if lo > hi:",
            "tests/frontends/megatron/test_narrowing.py",
        ),
        (
            "what was read for a reshaped part is not copied into it",
            "target.copy_(source)",
            "pass",
            "tests/frontends/megatron/test_reshaped.py",
        ),
        (
            "a narrowed flat part has an empty range",
            "flattened_range=slice(lo - ",
            "flattened_range=slice(hi - ",
            "tests/frontends/megatron/test_narrowing.py",
        ),
    ),
    "casckpt/frontends/megatron/removing.py": (
        (
            "what is not sharded has no place where tensors are removed",
            "name is None or not name.startswith(key_prefix",
            "(not name.startswith(key_prefix)",
            "tests/frontends/megatron/test_dropping.py",
        ),
    ),
    "casckpt/frontends/megatron/saving.py": (
        (
            "replicas are handed in though nobody asked for it",
            'if self.fully_parallel or self.check_replicas == "raise" else set()',
            "",
            "tests/frontends/megatron/test_replicas.py",
        ),
        (
            "no list may be saved by Megatron's functions",
            "set(kinds)) > 1:",
            "set(kinds)) >= 1:",
            "tests/frontends/megatron/test_loading.py",
        ),
        (
            "every rank hands in the common part",
            "self.rank == 0",
            "self.rank >= 0",
            "tests/frontends/megatron/test_replicas.py",
        ),
    ),
    "casckpt/frontends/megatron/stored.py": (
        (
            "a shard of several is read from an object that is whole",
            "prod(wanted.global_shape) == 1 and find(self._tree, wanted.key) is not None",
            "(find(self._tree, wanted.key) is not None)",
            "tests/frontends/megatron/test_loading.py",
        ),
        (
            "an object that is not there is found",
            "alone and wanted.key not in self.tensors",
            "(wanted.key not in self.tensors)",
            "tests/frontends/megatron/test_loading.py",
        ),
    ),
    "casckpt/frontends/megatron/strategies.py": (
        (
            "common.pt does not go into the store",
            "common.extend(_common(state, folder))",
            "pass",
            "tests/frontends/megatron/test_core_failures.py",
        ),
        (
            "a save of Megatron's in the background that failed is finished",
            "future.result()",
            "pass",
            "tests/frontends/megatron/test_core_failures.py",
        ),
        (
            "classes that a load elsewhere needs are told at every save",
            "self._said = True",
            "pass",
            "tests/frontends/megatron/test_core_failures.py",
        ),
    ),
    "casckpt/frontends/megatron/training_loop.py": (
        (
            "our strategy is handed Megatron's own",
            "*arguments[1:]",
            "*arguments[:]",
            "tests/frontends/megatron/test_training_loop.py",
        ),
    ),
    "casckpt/frontends/views/model_part.py": (
        (
            "modules that were saved beside an adapter are the model's",
            "modules_to_save",
            "base_layer",
            "tests/frontends/views/test_view.py",
        ),
        (
            "what DDP puts before names stays",
            "name.startswith(f",
            "name.endswith(f",
            "tests/frontends/views/test_view.py",
        ),
    ),
    "casckpt/frontends/interchange/new_files.py": (
        (
            "a new folder is taken for one that somebody made meanwhile",
            "not there and path.is_dir(",
            "(not there",
            "tests/frontends/interchange/test_new_files.py",
        ),
    ),
    "casckpt/frontends/interchange/optimizer_names.py": (
        (
            "only what stands first may be no parameter",
            "- sum(positions) ",
            "",
            "tests/frontends/interchange/test_torch_layout.py",
        ),
    ),
    "casckpt/frontends/views/recut.py": (
        ("a part that is cut off has no elements", "+ min(hi, count)", "", "tests/frontends/views/test_recut.py"),
    ),
    "casckpt/frontends/interchange/safetensors/files.py": (
        (
            "a safetensors file takes a dtype that it has no name for",
            "name is None or ",
            "",
            "tests/frontends/interchange/safetensors/test_files.py",
        ),
        (
            "the shape of a file's F4 has an axis more",
            "*shape[:-1], shape",
            "*shape[:], shape",
            "tests/frontends/interchange/safetensors/test_files.py",
        ),
    ),
    "casckpt/frontends/interchange/safetensors/importing.py": (
        (
            "no link travels with an import",
            "not path.is_symlink() or _leads_inside(folder, path",
            "(not path.is_symlink()",
            "tests/frontends/test_convert.py",
        ),
        (
            "a keyword that no import has is swallowed",
            'check_keywords("import_safetensors", options, ImportArguments)',
            "pass",
            "tests/frontends/test_convert.py",
        ),
    ),
    "casckpt/frontends/interchange/safetensors/layout.py": (
        (
            "an export of several files has no index",
            "len(files) == 1:",
            "len(files) >= 1:",
            "tests/frontends/interchange/safetensors/test_layout.py",
        ),
        (
            "tensors lie in a file in the order of the state",
            "sorted(tensors, key=lambda one: (-rank_of(one.entry.dtype), one.name)",
            "list(tensors",
            "tests/frontends/interchange/safetensors/test_layout.py",
        ),
        (
            "the index is no file of its folder",
            "+ ([INDEX] if self.index is not None else [])",
            "",
            "tests/frontends/interchange/safetensors/test_layout.py",
        ),
        (
            "the index is never among the names of a folder",
            "INDEX] if self.index is not None else [",
            "",
            "tests/frontends/interchange/safetensors/test_layout.py",
        ),
        (
            "one file takes all tensors, however large",
            "shards.append([])",
            "pass",
            "tests/frontends/interchange/safetensors/test_layout.py",
        ),
        (
            "what a file cannot hold is named without its key",
            "file_type(one.name, one.entry.dtype, one.entry.shape)",
            "pass",
            "tests/frontends/test_convert.py",
        ),
    ),
    "casckpt/frontends/interchange/safetensors/planned.py": (
        (
            "a folder of all names of a model counts as a part of it",
            "names <= {one",
            "names < {one",
            "tests/frontends/interchange/test_export.py",
        ),
        (
            "all attachments are left out of what is no model",
            "name == CONFIG and self.is_no_model",
            "(self.is_no_model)",
            "tests/frontends/interchange/test_export.py",
        ),
        (
            "what an imported file said of itself does not come out again",
            "isinstance(said, dict) and all(isinstance(value, str) for value in said.values())",
            "False",
            "tests/frontends/test_convert.py",
        ),
    ),
    "casckpt/frontends/serve/folders.py": (
        (
            "an attachment takes the place of the file that describes a view",
            "one.name not in files and one.name != VIEW_FILE",
            "(one.name not in files)",
            "tests/frontends/serve/test_folders.py",
        ),
        (
            "the digest of a file does not tell its contents",
            '_add(hasher, f"{source.lo} {source.hi} {source.entry.numel}".encode(), manifest.raw_cells(source.entry))',
            "pass",
            "tests/frontends/serve/test_folders.py",
        ),
    ),
    "casckpt/frontends/serve/hub.py": (
        (
            "the hub looks for a repository named main",
            "checkpoint(repo, MAIN)",
            "checkpoint(MAIN, repo)",
            "tests/frontends/serve/test_answers.py",
        ),
    ),
    "casckpt/frontends/serve/leases.py": (
        (
            "leases of a server end without its lock",
            'all of them."""\n        with self._lock:',
            'all of them."""\n        if True:',
            "tests/frontends/serve/test_leases.py",
        ),
        ("an ended lease counts as held", "del self._held[id]", "pass", "tests/frontends/serve/test_leases.py"),
    ),
    "casckpt/frontends/serve/names.py": (
        (
            "one plain part makes a name plain",
            "plain = all(_PART.",
            "plain = any(_PART.",
            "tests/frontends/serve/test_names.py",
        ),
    ),
    "casckpt/frontends/serve/app.py": (
        (
            "the page of a server lists no run",
            '"".join(_run(repo, found, tags) for repo, found in repos.items()) or "<p>There is no checkpoint yet.</p>"',
            '("<p>There is no checkpoint yet.</p>")',
            "tests/frontends/serve/test_answers.py",
        ),
    ),
    "casckpt/frontends/serve/ranges.py": (
        (
            "a range begins where it ends",
            "_number(first), min(_number(last) + 1, size) if last else size",
            "(min(_number(last) + 1, size) if last else size, min(_number(last) + 1, size) if last else size)",
            "tests/frontends/serve/test_answers.py",
        ),
        (
            "every range is empty",
            'lie before."""\n        if start >= stop:',
            'lie before."""\n        if start >= start:',
            "tests/frontends/serve/test_answers.py",
        ),
    ),
    "casckpt/frontends/serve/sending.py": (
        (
            "a buffer that was sent is not used again",
            "self._free.append(buffer)",
            "pass",
            "tests/frontends/serve/test_answers.py",
        ),
    ),
    "casckpt/frontends/serve/server.py": (
        (
            "a server that is stuck ends in silence",
            "self._is_stuck:",
            "False:",
            "tests/frontends/serve/test_answers.py",
        ),
    ),
    "casckpt/frontends/interchange/torch_files.py": (
        (
            "a container in a file of torch.save becomes a dict",
            "if isinstance(node, defaultdict) else container(type(node), found, node)",
            "",
            "tests/frontends/test_convert_torch.py",
        ),
        (
            "a wrapper is taken off where one name has it",
            "if all(str(key",
            "if any(str(key",
            "tests/frontends/interchange/test_torch_layout.py",
        ),
        (
            "a note of an import has the reason for the name",
            "repr(name), str(error",
            "str(error), repr(name",
            "tests/frontends/interchange/test_torch_layout.py",
        ),
    ),
    "casckpt/frontends/torchtitan.py": (
        (
            "torchtitan waits for a save that was waited for",
            "self.save_future = None",
            "pass",
            "tests/frontends/test_torchtitan.py",
        ),
        (
            "torchtitan's manager leaves its checkpointer open",
            "self.checkpointer.close()",
            "pass",
            "tests/frontends/test_torchtitan.py",
        ),
        (
            "integers of exported weights are converted",
            "if floating and value.dtype != self._dtype else value",
            "",
            "tests/frontends/test_torchtitan.py",
        ),
        (
            "the schedulers of torchtitan are its data loader",
            "(lr_schedulers",
            "(dataloader",
            "tests/frontends/test_torchtitan.py",
        ),
    ),
    "casckpt/frontends/trainer/checkpointer.py": (
        (
            "a summary tells the time since the host began",
            "seconds = time.monotonic() - begun",
            "seconds = time.monotonic()",
            "tests/frontends/trainer/test_checkpointer.py",
        ),
        (
            "training stops a step too early",
            "durable) > limit:",
            "durable) >= limit:",
            "tests/frontends/trainer/test_checkpointer.py",
        ),
        (
            "a conflict over a step is logged at every save",
            "        error = self._settle(to_save=True)\n",
            "        error = self._settle()\n",
            "tests/frontends/trainer/test_checkpointer.py",
        ),
    ),
    "casckpt/frontends/trainer/contents.py": (
        (
            "every rank warns that there is no optimizer",
            "self._ranks.rank == 0 and optims",
            "self._ranks.rank >= 0 and optims",
            "tests/frontends/trainer/test_ranks.py",
        ),
    ),
    "casckpt/frontends/trainer/rotation.py": (
        (
            "a metric that no save has is not told",
            "_tell_of_metrics(run, visible, rotation)",
            "pass",
            "tests/frontends/trainer/test_retention.py",
        ),
    ),
    "casckpt/frontends/training_state/flat.py": (
        (
            "FSDP is asked for where it is not loaded",
            "home is not None and isinstance(one, home.FullyShardedDataParallel",
            "(isinstance(one, home.FullyShardedDataParallel)",
            "tests/frontends/test_training_state_models.py",
        ),
    ),
    "casckpt/frontends/training_state/groups.py": (
        (
            "an option is compared with a tensor",
            "isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor",
            "(isinstance(other, torch.Tensor)",
            "tests/frontends/test_training_state_matching.py",
        ),
    ),
    "casckpt/frontends/training_state/holding.py": (
        (
            "state of a flat part is loaded whole",
            "part is not None and entry.shape == part.shape",
            "False",
            "tests/frontends/test_training_state_models.py",
        ),
        (
            "no rank holds anything of a flat parameter",
            "self.part.lo ==",
            "self.part.hi ==",
            "tests/frontends/test_training_state_models.py",
        ),
    ),
    "casckpt/frontends/training_state/parts.py": (
        (
            "parameters are named by themselves",
            "plain_name(part, name), parameter",
            "(parameter, parameter)",
            "tests/frontends/trainer/test_checkpointer.py",
        ),
    ),
    "casckpt/frontends/training_state/save_load.py": (
        (
            "every rank tells what was not read",
            "ranks.rank == 0",
            "ranks.rank >= 0",
            "tests/frontends/test_training_state_ranks.py",
        ),
    ),
    "casckpt/frontends/transformers.py": (
        ("a trainer may log any number of metrics", "[:MAX_METRICS]", "[:]", "tests/frontends/test_transformers.py"),
        (
            "files of random generators are not known",
            '"optimizer.pt", re.compile(r"rng_state(_\\d+)?\\.pth',
            '("optimizer.pt", "optimizer.pt',
            "tests/frontends/test_transformers.py",
        ),
        (
            "the best model of a trainer is not tagged",
            "self.store.tag(tag, ref)",
            "pass",
            "tests/frontends/test_transformers.py",
        ),
        (
            "a folder of FSDP is saved as if it were a model",
            "pytorch_model_fsdp",
            "optimizer_",
            "tests/frontends/test_transformers.py",
        ),
    ),
    "casckpt/frontends/views/windows.py": (
        (
            "the buffer of windows does not grow",
            "self._buffer.nbytes < total",
            "False",
            "tests/frontends/test_convert.py",
        ),
        (
            "a file is revised where the last change ended",
            "file.seek(start + len(window))",
            "pass",
            "tests/frontends/test_follow.py",
        ),
    ),
    "casckpt/storage/remote/bodies.py": (
        (
            "a body begins somewhere",
            "self._data = data\n        self._at = 0",
            "self._data = data\n        pass",
            "tests/storage/remote/s3/test_direct.py",
        ),
        ("an answer may be of any length", "len(data) > limit", "False", "tests/storage/remote/s3/test_body.py"),
    ),
    "casckpt/storage/remote/calls.py": (
        (
            "asynchronous file systems are called in another thread",
            "self._loop is not None",
            "False",
            "tests/storage/remote/test_calls.py",
        ),
    ),
    "casckpt/storage/remote/fsspec_client.py": (
        (
            "a read through fsspec ends where it begins",
            "+ sum(buffer.nbytes for buffer in buffers)",
            "",
            "tests/storage/remote/test_fsspec_client.py",
        ),
        (
            "an object of as many bytes as are allowed is too large",
            "size > limit:",
            "size >= limit:",
            "tests/storage/remote/test_fsspec_client.py",
        ),
    ),
    "casckpt/storage/remote/loop.py": (
        ("a call in a loop is not waited for", "result(max(one", "result(min(one", "tests/storage/remote/test_loop.py"),
    ),
    "casckpt/storage/remote/s3/client.py": (
        (
            "a delete in a bucket with versions hides the bytes",
            'self.call("delete_object", Key=one["Key"], VersionId=one["VersionId"])',
            "pass",
            "tests/storage/remote/test_store.py",
        ),
    ),
    "casckpt/storage/remote/s3/direct.py": (
        (
            "an answer that is whole is taken for a part",
            ".status != 206",
            ".status > 206",
            "tests/storage/remote/s3/test_direct.py",
        ),
        (
            "a direct read waits for as long as the server likes",
            "connection.settimeout(left)",
            "pass",
            "tests/storage/remote/s3/test_direct.py",
        ),
        (
            "a read past the client is not signed",
            "await client.get_object(**arguments)",
            "pass",
            "tests/storage/remote/s3/test_direct.py",
        ),
    ),
    "casckpt/storage/remote/s3/errors.py": (
        (
            "a busy server is asked once",
            'well", again=True)',
            'well", again=False)',
            "tests/storage/remote/test_faults.py",
        ),
    ),
    "casckpt/storage/remote/s3/facts.py": (
        (
            "a bucket whose objects are not locked is said to lock them",
            'found.get("ObjectLockEnabled") != "Enabled"',
            "False",
            "tests/storage/remote/s3/test_facts.py",
        ),
        (
            "rules that nobody may see are said to be none",
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
            "tests/storage/remote/s3/test_facts.py",
        ),
    ),
    "casckpt/storage/remote/store.py": (
        (
            "a call is given up after a pause that it had no time for",
            "(pause or 0):",
            "((0)):",
            "tests/storage/remote/test_fsspec_client.py",
        ),
    ),
    "casckpt/tensors/dtensors.py": (
        (
            "partial sums are saved as they are",
            "check_added_up(key, tensor)\n    mesh",
            "mesh",
            "tests/tensors/test_dtensors.py",
        ),
        ("a rank holds all behind its shard", ": (coordinate + 1) * chunk", ":", "tests/tensors/test_dtensors.py"),
    ),
    "casckpt/tensors/objects.py": (
        (
            "a pickle with bytes elsewhere is read",
            'always does."""\n    if parts:',
            'always does."""\n    if False:',
            "tests/tensors/test_objects.py",
        ),
        ("pickles run without leave", "weights_only=True)", "weights_only=False)", "tests/frontends/test_dcp.py"),
    ),
    "casckpt/tensors/shards.py": (),
    "casckpt/tensors/state.py": (
        (
            "a state that holds itself is followed without an end",
            "self.open.add(id(value))",
            "pass",
            "tests/tensors/test_state.py",
        ),
    ),
}
