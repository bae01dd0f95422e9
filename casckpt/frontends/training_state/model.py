"""The state of a model under plain names, for a save or as the template of a load."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from casckpt.base.text import listed, warn_once
from casckpt.errors import InvalidInput
from casckpt.frontends.training_state.flat import drop_gathered, flat_parts, full_dtypes, let_go, without_fsdp_hooks
from casckpt.frontends.training_state.names import plain_name
from casckpt.frontends.training_state.packed import packed_weights
from casckpt.frontends.training_state.parts import Parts
from casckpt.loading.fit import PACKED
from casckpt.loading.unread import is_within, prefixes
from casckpt.ranks.ranks import this_rank
from casckpt.tensors.kinds import holds_wrapper, is_wrapper
from casckpt.tensors.values import Shard

log = logging.getLogger("casckpt")

_EXTRA_STATE = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Return whether ``name`` is the name of extra state, from `torch.nn.Module.get_extra_state`."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def model_state(model: nn.Module) -> OrderedDict[str, Any]:
    """Return the state_dict of ``model`` under plain names, with live tensors.

    The function does not change or gather anything. This rank's part of an FSDP parameter is a `Shard`. Raises the
    errors of `flat_parts`, and InvalidInput if two different tensors have the same plain name.
    """
    parts, dtypes = flat_parts(model), full_dtypes(model)
    raw = _live_state(model)
    check_initialized(raw)
    live = {name: raw[key] for key, name in _plain_names(model, raw).items()}
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in live.items():
        part = parts.get(id(value))
        full = value.to(dtypes[id(value)]) if id(value) in dtypes else value
        state[name] = full if part is None else part.shard(part.data)
    unread = passed_by(model, live, strict=False)
    packed_weights(live, unread)
    if unread and this_rank() == 0:
        warn_once(
            log,
            "the model's state_dict has %s, which its load_state_dict does not read. They are saved, but a load into "
            "such a model is refused unless ignore_mismatched leaves their modules unchanged", listed(list(unread)),
        )  # fmt: skip
    metadata = getattr(raw, "_metadata", None)
    if metadata is not None:  # module versions; a wrapped module replaces its wrapper
        vars(state)["_metadata"] = {plain_name(model, path): value for path, value in metadata.items()}
    return state


def check_initialized(values: Mapping[str, Any]) -> None:
    """Raise InvalidInput if parameters or buffers of a lazy module do not have a shape yet."""
    if lazy := [name for name, value in values.items() if is_lazy(value)]:
        raise InvalidInput(f"{listed(lazy)} of lazy modules have no shape yet: run one forward pass first", key=lazy[0])


def model_to_save(model: nn.Module) -> OrderedDict[str, Any]:
    """Return `model_state` with buffers marked, because their values may differ across ranks; see `may_differ`."""
    state = model_state(model)
    if merged := [path for path, module in model.named_modules() if getattr(module, "merged_adapters", None)]:
        warn_once(
            log,
            "the adapters of %s are merged into the weights at this save, so a model that loads it would add them "
            "twice: call unmerge_adapter() first", listed(merged),
        )  # fmt: skip
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not is_wrapper(value):
            state[name] = nn.Buffer(value)
    return state


def _live_state(model: nn.Module) -> dict[str, Any]:
    """Return the state_dict. Parameters remain `Parameter` objects, which a save requires to be equal on all ranks."""
    with without_fsdp_hooks(model):
        state = model.state_dict(keep_vars=True)
    empty = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if empty and any(map(_is_offloaded, model.modules())):
        raise InvalidInput(
            f"Accelerate has offloaded {listed(empty)}, so the model does not have their values. Load it without "
            "device_map, cpu_offload and disk_offload; accelerate.hooks.remove_hook_from_submodules(model) restores "
            "values that are offloaded to the CPU",
            key=empty[0],
        )
    return state


def _is_offloaded(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)  # Accelerate's hook, which may contain several
    return any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ())))


def _plain_names(model: nn.Module, raw: Mapping[str, Any]) -> dict[str, str]:
    names = {key: plain_name(model, key) for key in raw}
    values = dict[str, Any]()
    for key, name in names.items():
        if values.setdefault(name, raw[key]) is not raw[key]:
            raise InvalidInput(
                f"two parts of the model have the name {name!r}. Rename one; or, for several models, "
                'pass a dict of the models and their optimizers, such as {"generator": g, "discriminator": d, ...}',
                key=name,
            )
    return names


def passed_by(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> dict[str, list[str]]:
    """Return the names in the state of ``model`` that its load_state_dict would not read.

    ``state``: the state under plain names. The result maps each such name to the names that must not be loaded without
    it. The function does not call any methods of the modules. A module reads its parameters, its buffers, and extra
    state if it has a set_extra_state. Keys that a module's _save_to_state_dict adds can be read only by the module
    itself, through its _load_from_state_dict or hooks. Other added keys can also be read by any module above it.
    ``strict``: include parameters, which torch rejects in that case.
    """
    suspects = [name for name, value in state.items() if strict or not isinstance(value, nn.Parameter)]
    roots: Sequence[nn.Module] = tuple(model) if isinstance(model, Parts) else (model,)
    modules: defaultdict[str, list[nn.Module]] = defaultdict(list)
    for root in roots if suspects else ():
        for path, module in root.named_modules(remove_duplicate=False):
            modules[plain_name(root, path)].append(module)
    unread: dict[str, list[str]] = {}
    names_below = cache(lambda path: [name for name in state if not path or is_within(name, path)])
    for name in suspects:
        path, _, last = name.rpartition(".")
        if any(_reads(owner, last) for owner in modules.get(path, ())):
            continue
        above = [path for path in prefixes(name) if path in modules]
        owners = modules[above[-1]]
        writes = any(_has_own(owner, "_save_to_state_dict") for owner in owners)
        readers = owners if writes else [module for path in above for module in modules[path]]
        if not any(_loads(module, is_root=module in roots) for module in readers):
            unread[name] = names_below(above[-1]) if writes else [name]
    return unread


def _reads(module: nn.Module, name: str) -> bool:
    """Return whether the default load_state_dict of ``module`` reads ``name``."""
    takes = type(module).set_extra_state is not nn.Module.set_extra_state
    return name in module._parameters or name in module._buffers or (name == _EXTRA_STATE and takes)


def _loads(module: nn.Module, *, is_root: bool) -> bool:
    """Return whether ``module`` customizes its load. Hooks of torch.distributed read no keys."""
    own = _has_own(module, "_load_from_state_dict") or (is_root and _has_own(module, "load_state_dict"))
    return own or bool(own_hooks(module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks))


def _has_own(module: nn.Module, method: str) -> bool:
    home = str(getattr(getattr(module, method), "__module__", ""))
    return not home.startswith(("torch.nn.", "torch.distributed.", "torch._dynamo."))


# modules that convert what they load: they rename or drop names, or resize their tensors


def own_hooks(*several: Mapping[Any, Any]) -> list[Any]:
    """Return the hooks in a module's dicts of hooks, except those of torch.distributed, which read no keys."""
    hooks = [getattr(hook, "hook", hook) for by_id in several for hook in by_id.values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")]


class Converter(NamedTuple):
    """A module that may convert. ``start``: the beginning of its keys in the state_dict. ``way``: what converts.

    ``resizes``: whether it may resize tensors, which the modules of torch.nn do not. ``version``: the module's.
    """

    start: str
    way: str
    resizes: bool
    version: int | None


def converters(model: nn.Module) -> dict[str, Converter]:
    """Return the modules that may convert, outer ones first, by the beginning of the plain names in them."""
    found: dict[str, Converter] = {}
    for path, module in () if isinstance(model, Parts) else model.named_modules(remove_duplicate=False):
        names = ("_load_from_state_dict", "load_state_dict")[: 1 + (module is model)]
        methods = [(getattr(module, name), getattr(nn.Module, name)) for name in names]
        ways = [own for own, torchs in methods if getattr(own, "__func__", None) is not torchs]
        if ways := [*ways, *own_hooks(module._load_state_dict_pre_hooks)]:
            way = f"{getattr(ways[0], '__name__', repr(ways[0]))} of a {type(module).__name__}"
            resizes = not all(str(getattr(one, "__module__", "")).startswith("torch.nn.") for one in ways)
            start = f"{plain_name(model, path)}.".lstrip(".")
            found.setdefault(start, Converter(f"{path}.".lstrip("."), way, resizes, module._version))
    return found


@dataclass(frozen=True)
class Conversion:
    """What modules convert. ``starts``: the beginnings of the names in these modules: plain, and in the state_dict.

    ``new``: the saved key of each name that is read into a new tensor. ``lacking``: the names that only the model has.
    ``refusal``: why a module does not convert. ``saved``: the ``_metadata`` of the saved state_dict, if it is known.
    """

    starts: Mapping[str, str] = field(default_factory=dict)
    new: Mapping[str, str] = field(default_factory=dict)
    lacking: Collection[str] = ()
    refusal: str = ""
    saved: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, name: str) -> bool:
        """Return whether a plain name is below one of the modules."""
        return name.startswith(tuple(self.starts))

    def raw_key(self, name: str) -> str:
        """Return the key in the state_dict for a plain name below one of the modules."""
        return next(raw + name.removeprefix(start) for start, raw in self.starts.items() if name.startswith(start))


class ModelTemplate:
    """The template of a load. A load fills the model's tensors without a copy, and replaces all other values.

    A module that converts also receives what does not fit in place, as new tensors.
    """

    def __init__(self, model: nn.Module, *, strict: bool) -> None:
        let_go(model)
        self._model = model
        self._parts, self._dtypes = flat_parts(model), full_dtypes(model)
        self._raw = _live_state(model)
        self._names = _plain_names(model, self._raw)
        by_name = {name: self._raw[key] for key, name in self._names.items()}
        self.passed_by = passed_by(model, by_name, strict=strict)
        self.packed = packed_weights(by_name, self.passed_by)
        self.values: dict[str, Any] = {name: self._place(name, self._raw[key]) for key, name in self._names.items()}
        self._placed = dict(self.values)
        self._devices = {value.device for value in self._raw.values() if isinstance(value, torch.Tensor)}
        self.conversion = Conversion()

    def _place(self, name: str, value: Any) -> Any:
        part = self._parts.get(id(value))
        if part is not None:
            return part.shard(part.data)
        if id(value) in self._dtypes:
            return torch.empty_like(value, dtype=self._dtypes[id(value)])
        # a list or dict may have other entries in the checkpoint
        is_new = is_lazy(value) or not isinstance(value, torch.Tensor)
        return None if is_new or is_extra_state(name) or PACKED in name else value

    def convert(self, conversion: Conversion) -> None:
        """Let modules convert what does not fit in place."""
        self.conversion = conversion
        self.values = {name: value for name, value in self.values.items() if name not in conversion.lacking}
        self.values |= dict.fromkeys(conversion.new)

    def install(self, missing: Collection[str], strict: bool) -> tuple[list[str], list[str]]:
        """Call the model's load_state_dict without the names ``missing``, whose values are left unchanged.

        Parameters and buffers have already been filled, so torch copies each tensor onto itself, which has no effect.
        The call sets extra state, runs hooks, and sets tensors that each call of state_dict creates anew. Wrappers are
        left out, because many cannot be copied. So are the statistics of packed weights. Return the names that modules
        which convert leave: those that only the model has, and those that only the checkpoint has.
        """
        conversion, found = self.conversion, list[Any]()
        filled = {name for name, value in self.values.items() if holds_wrapper(value) and name not in conversion.new}
        for weight in self.packed:
            filled |= weight.values.keys() - {weight.name}
            if weight.fields not in missing:
                weight.install(self.values)
        known = filled.union(missing)
        for key, name in self._names.items():
            if name in known or name in conversion.lacking:
                del self._raw[key]
            elif not isinstance(value := self.values.get(name, self._placed[name]), Shard):
                self._raw[key] = self._given(name, value)  # a tensor that was filled in parts is not among the values
        added = [name for name in conversion.new if name not in self._placed]
        self._raw |= {conversion.raw_key(name): self._given(name, self.values[name]) for name in added}
        versions = getattr(self._raw, "_metadata", {})
        for path in [path for path in versions if conversion.holds(f"{plain_name(self._model, path)}.")]:
            if plain_name(self._model, path) in conversion.saved:
                versions[path] = conversion.saved[plain_name(self._model, path)]
            elif added or conversion.lacking:
                del versions[path]  # the checkpoint may be of an older version
        untyped: Any = self._model  # torch has no types for its hooks
        reporting: AbstractContextManager[Any] = nullcontext()
        if not isinstance(untyped, torch.jit.ScriptModule):  # has no hooks
            reporting = untyped.register_load_state_dict_post_hook(lambda _, keys: found.extend(keys))
        inference = torch.inference_mode() if self._is_of_inference() else nullcontext()
        with reporting, without_fsdp_hooks(self._model), inference:
            self._model.load_state_dict(self._raw, strict=strict and not known)
        drop_gathered(self._model)
        left = ([plain_name(self._model, key) for key in keys] for keys in found[-2:] or ((), ()))
        lacking, others = ([name for name in names if conversion.holds(name) and name not in known] for names in left)
        return lacking, others

    def _given(self, name: str, value: Any) -> Any:
        """Return the value that load_state_dict receives: a module that converts may change it, or keep it."""
        if isinstance(value, list):
            return [self._given(name, one) for one in value]
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            return value
        if name in self.conversion.new or self._placed.get(name) is None:
            return value.to(next(iter(self._devices))) if len(self._devices) == 1 else value
        return value.detach().clone() if self.conversion.holds(name) else value

    def _is_of_inference(self) -> bool:
        """Return whether any tensor was created in inference mode. Outside that mode, torch cannot copy onto it."""
        with torch._C.DisableTorchFunctionSubclass():  # a ShardedTensor would raise an error
            return any(isinstance(value, torch.Tensor) and value.is_inference() for value in self._raw.values())
