"""The names under which Transformers and PEFT save the tensors of a model, as rules of a view.

The libraries' own functions compute the names, from empty tensors that stand in for the tensors of the model.
Transformers 5 fuses the experts of a layer into one parameter, but saves each expert separately. Its functions return
each expert as a view of the fused parameter, so the view shows the position of the expert.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from casckpt.base.text import in_one_line
from casckpt.errors import Unsupported
from casckpt.format.regions import Box, Shape
from casckpt.frontends.training_state.names import class_names
from casckpt.loading.fit import shape_of
from casckpt.loading.options import compiled, expanded, first_match, matches, renamer
from casckpt.tensors.memory import boxes_with_data
from casckpt.tensors.shards import local_tensor
from casckpt.tensors.values import Shard

Index: TypeAlias = tuple[int | tuple[int, int], ...]
"""An index of a tensor: a number or a range for each of its first dimensions."""
Parts: TypeAlias = Mapping[str, Mapping[str, Index]]
"""For each tensor, by name: the names of the parts that are saved instead of it, and their indices."""

_NUMBER = re.compile(r"\d+")


def is_transformers(model: Any) -> bool:
    """Return whether ``model`` is a Transformers model without adapters."""
    is_pretrained = "transformers.modeling_utils.PreTrainedModel" in class_names(model)
    return is_pretrained and not getattr(model, "_hf_peft_config_loaded", False)


def saved_parts(model: Any, shapes: Mapping[str, Shape]) -> Parts:
    """Return the parts that ``save_pretrained`` of a Transformers model writes.

    ``shapes``: the shapes of all tensors of the model. Raises Unsupported if it writes a tensor that is not a part of
    a single tensor, such as a transposed one, or if it fails.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, it saves the tensors of the model
        return {name: {name: ()} for name in shapes}
    return _parts(shapes, lambda probes: revert_weight_conversion(model, probes))


def adapter_parts(model: Any, shapes: Mapping[str, Shape], adapter: str) -> Parts:
    """Return the parts that ``save_pretrained`` writes for one adapter of a model with PEFT adapters.

    Raises Unsupported for a tensor that PEFT computes, such as the prompts of a prompt encoder.
    """
    from peft import get_peft_model_state_dict

    start = "base_model.model." if getattr(model, "_hf_peft_config_loaded", False) else ""
    config = model.peft_config[adapter]
    is_resized = _has_resized_embeddings(model, config.base_model_name_or_path)
    base, config.base_model_name_or_path = config.base_model_name_or_path, None  # PEFT would look it up on the Hub
    try:
        parts = _parts(
            shapes,
            lambda probes: get_peft_model_state_dict(
                model, probes, adapter_name=adapter, save_embedding_layers=True if is_resized else "auto"
            ),
        )
    finally:
        config.base_model_name_or_path = base
    return {name: {start + saved: index for saved, index in of.items()} for name, of in parts.items()}


def _has_resized_embeddings(model: Any, base: str | None) -> bool:
    """Return whether the vocabulary differs from that of the base model, if its config is on this machine."""
    from transformers.utils.hub import cached_file

    config: Any = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if not base or size is None:
        return False
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    try:
        found = cached_file(base, "config.json", local_files_only=True, **quiet)
        return found is not None and type(config).from_pretrained(found).vocab_size != size
    except (OSError, ValueError):  # such as a path that does not exist on this machine
        return False


def _parts(shapes: Mapping[str, Shape], convert: Callable[[dict[str, Tensor]], Mapping[str, Any]]) -> Parts:
    probes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {_memory(probe): name for name, probe in probes.items()}
    try:
        with _NoCopies(), torch.no_grad():
            converted = convert(dict(probes))
    except Exception as error:
        raise Unsupported(f"its names cannot be computed: {in_one_line(error)}") from error
    parts: dict[str, dict[str, Index]] = {}
    for saved, value in converted.items():
        name = names.get(_memory(value)) if isinstance(value, Tensor) else None
        if name is None:
            raise Unsupported(f"{saved} is not a part of one tensor of the model")
        parts.setdefault(name, {})[saved] = _index(saved, probes[name], value)
    return parts


class _NoCopies(TorchFunctionMode):
    """A mode in which `contiguous` and `clone` return the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            raise Unsupported(f"{func.__name__} changes a tensor in place")
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _index(saved: str, whole: Tensor, part: Tensor) -> Index:
    """Return the index of a view. Raises Unsupported for a view that indexing cannot make, such as a transposed one."""
    index, rest, dim = list[int | tuple[int, int]](), int(part.storage_offset()), 0
    for extent, stride in zip(whole.shape, whole.stride(), strict=True):
        start, rest = divmod(rest, stride)
        if dim < part.dim() and part.stride(dim) == stride and start + part.shape[dim] <= extent:
            index.append((start, start + part.shape[dim]))
            dim += 1
        else:
            index.append(start)
    found = whole[tuple(one if isinstance(one, int) else slice(*one) for one in index)] if part.numel() else whole
    if (found.shape, found.storage_offset()) != (part.shape, part.storage_offset()):
        raise Unsupported(f"{saved} is not a slice of a tensor of the model")
    while index and index[-1] == (0, whole.shape[len(index) - 1]):
        index.pop()
    return tuple(index)


def split_template(model: Any, values: Mapping[str, Any], is_saved: Callable[[str], bool]) -> dict[str, Any]:
    """Return the template ``values``, with parts in place of each tensor of which the checkpoint has only the parts.

    ``model``: a Transformers model. ``is_saved``: returns whether the checkpoint has a name. The parts share the
    memory of the tensor.
    """
    shapes = {name: shape for name, value in values.items() if (shape := shape_of(value)) is not None}
    if all(map(is_saved, shapes)):
        return dict(values)
    try:
        parts = saved_parts(model, shapes)
    except Unsupported:
        return dict(values)
    found = dict[str, Any]()
    for name, value in values.items():
        of = parts.get(name, {name: ()})
        if is_saved(name) or not all(map(is_saved, of)):
            found[name] = value
        else:
            found |= {saved: _part(name, value, index) for saved, index in of.items()}
    return found


def _part(key: str, value: Any, index: Index) -> list[Shard]:
    """Return what this rank holds of one part of a tensor."""
    local = local_tensor(key, value)
    ranges = [(one, one + 1) if isinstance(one, int) else one for one in index]
    ranges += [(0, extent) for extent in local.shape[len(index) :]]
    part = Box(tuple(lo for lo, _ in ranges), tuple(hi - lo for lo, hi in ranges))
    kept = [dim for dim in range(len(ranges)) if dim >= len(index) or not isinstance(index[dim], int)]
    select = tuple(slice(None) if dim in kept else 0 for dim in range(len(ranges)))
    shards = []
    for piece in local.pieces:
        for box, data in boxes_with_data(piece.region, piece.data.detach()):
            common = box.intersect(part)
            if common is not None:
                offset, shape = common.relative_to(part).offset, part.shape
                view = data[common.within(box)][select]
                shards.append(Shard(view, [shape[dim] for dim in kept], [offset[dim] for dim in kept]))
    return shards or [
        Shard(torch.empty(0, dtype=local.dtype, device="cpu"), [part.shape[dim] for dim in kept], flat=(0, 0))
    ]


def rules_of(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return ``rename`` and ``split`` of a view that shows a checkpoint under the names in ``parts``.

    Numbers that vary, such as those of layers, become groups of regular expressions. Raises Unsupported if no rules
    have exactly this effect.
    """
    rename, split = dict[str, str](), dict[str, Mapping[str, Index]]()
    for pattern, named in _patterns(parts).items():
        (first, index), *others = named.items()
        if others or index:
            split[pattern] = named
        else:
            rename[pattern] = first
    _check(parts, rename, split)
    return {key: rules for key, rules in (("rename", rename), ("split", split)) if rules}


def globs(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return fnmatch patterns that match ``names``, and none of the ``others``."""
    patterns = dict.fromkeys(_NUMBER.sub("*", name) for name in names)
    wide = [one for one in patterns if any(name not in names and matches(name, [one]) for name in others)]
    return [one for one in patterns if one not in wide] + [one for one in names if _NUMBER.sub("*", one) in wide]


def _patterns(parts: Parts) -> dict[str, Mapping[str, Index]]:
    """Map regular expressions for names to the parts, without names that stay unchanged."""
    alike = defaultdict[tuple[Any, ...], list[str]](list)
    for name, of in parts.items():
        alike[_NUMBER.sub("#", name), tuple((_NUMBER.sub("#", saved), index) for saved, index in of.items())] += [name]
    counts = Counter(shape for shape, _ in alike)
    patterns: dict[str, Mapping[str, Index]] = {}
    for (shape, _), names in alike.items():
        if all(parts[name] == {name: ()} for name in names):
            continue
        common = _common(names, parts) if counts[shape] == 1 else None
        patterns |= {re.escape(name): parts[name] for name in names} if common is None else common
    return patterns


def _common(names: Sequence[str], parts: Parts) -> dict[str, Mapping[str, Index]] | None:
    """Return one rule for names that differ only in their numbers, or None if there is none."""
    numbers = [_NUMBER.findall(name) for name in names]
    columns = list(zip(*numbers, strict=True))
    varying = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    groups = {columns[at]: rf"\g<{number}>" for number, at in enumerate(varying, 1)}
    pieces = [re.escape(piece) for piece in _NUMBER.split(names[0])]
    ways = [r"(\d+)" if at in varying else column[0] for at, column in enumerate(columns)]
    named: dict[str, Index] = {}
    for saved in zip(*(parts[name].items() for name in names), strict=True):
        columns = list(zip(*(_NUMBER.findall(name) for name, _ in saved), strict=True))
        found = [column[0] if len(set(column)) == 1 else groups.get(column) for column in columns]
        if None in found:
            return None
        named[_joined(_NUMBER.split(saved[0][0].replace("\\", r"\\")), found)] = saved[0][1]
    return {_joined(pieces, ways): named}


def _joined(pieces: Sequence[str], numbers: Sequence[str | None]) -> str:
    return "".join(f"{piece}{number or ''}" for piece, number in zip(pieces, [*numbers, ""], strict=True))


def _check(parts: Parts, rename: Mapping[str, str], split: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise Unsupported unless the rules give every tensor its parts."""
    renamed, rules = renamer(rename), compiled(split)
    for name, of in parts.items():
        found: list[str] = [renamed(name)]
        rule = first_match(rules, found[0])
        if rule is not None:
            found = [expanded(rule[0], saved) for saved in rule[1]]
        if found != list(of):
            raise Unsupported(f"{name} is saved as {next(iter(of))}, which no rule can express")
