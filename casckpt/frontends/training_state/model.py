"""The state of a model under plain names, for a save or as the template of a load."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from casckpt.base.text import listed
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
    live = {name: raw[key] for key, name in _plain_names(model, raw).items()}
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in live.items():
        part = parts.get(id(value))
        full = value.to(dtypes[id(value)]) if id(value) in dtypes else value
        state[name] = full if part is None else part.shard(part.data)
    unread = passed_by(model, live, strict=False)
    packed_weights(live, unread)
    if unread and this_rank() == 0:
        _warn_once(listed(list(unread)))
    metadata = getattr(raw, "_metadata", None)
    if metadata is not None:  # module versions; a wrapped module replaces its wrapper
        vars(state)["_metadata"] = {plain_name(model, path): value for path, value in metadata.items()}
    return state


def model_to_save(model: nn.Module) -> OrderedDict[str, Any]:
    """Return `model_state` with buffers marked, because their values may differ across ranks; see `may_differ`."""
    state = model_state(model)
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


@cache
def _warn_once(names: str) -> None:
    log.warning(
        "the model's state_dict has %s, which its load_state_dict does not read. They are saved, but a load into such "
        "a model is refused unless ignore_mismatched leaves their modules unchanged. This is logged once",
        names,
    )


def _reads(module: nn.Module, name: str) -> bool:
    """Return whether the default load_state_dict of ``module`` reads ``name``."""
    takes = type(module).set_extra_state is not nn.Module.set_extra_state
    return name in module._parameters or name in module._buffers or (name == _EXTRA_STATE and takes)


def _loads(module: nn.Module, *, is_root: bool) -> bool:
    """Return whether ``module`` customizes its load. Hooks of torch.distributed read no keys."""
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    homes = [str(getattr(getattr(hook, "hook", hook), "__module__", "")) for hook in hooks]
    own = _has_own(module, "_load_from_state_dict") or (is_root and _has_own(module, "load_state_dict"))
    return own or not all(home.startswith("torch.distributed.") for home in homes)


def _has_own(module: nn.Module, method: str) -> bool:
    home = str(getattr(getattr(module, method), "__module__", ""))
    return not home.startswith(("torch.nn.", "torch.distributed.", "torch._dynamo."))


class ModelTemplate:
    """The template of a load. A load fills the model's tensors without a copy, and replaces all other values."""

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

    def _place(self, name: str, value: Any) -> Any:
        part = self._parts.get(id(value))
        if part is not None:
            return part.shard(part.data)
        if id(value) in self._dtypes:
            return torch.empty_like(value, dtype=self._dtypes[id(value)])
        return None if is_extra_state(name) or PACKED in name else value

    def install(self, missing: Collection[str], strict: bool) -> None:
        """Call the model's load_state_dict without the names ``missing``, whose values are left unchanged.

        Parameters and buffers have already been filled, so torch copies each tensor onto itself, which has no effect.
        The call sets extra state, runs hooks, and sets tensors that each call of state_dict creates anew. Wrappers are
        left out, because many cannot be copied. So are the statistics of packed weights.
        """
        filled = {name for name, value in self.values.items() if holds_wrapper(value)}
        for weight in self.packed:
            filled |= weight.values.keys() - {weight.name}
            if weight.fields not in missing:
                weight.install(self.values)
        for key, name in self._names.items():
            if name in missing or name in filled:
                del self._raw[key]
            elif not isinstance(value := self.values.get(name, self._placed[name]), Shard):
                self._raw[key] = value  # a tensor that was filled in parts is not among the values
        with without_fsdp_hooks(self._model), torch.inference_mode() if self._is_of_inference() else nullcontext():
            self._model.load_state_dict(self._raw, strict=strict and not missing and not filled)
        drop_gathered(self._model)

    def _is_of_inference(self) -> bool:
        """Return whether any tensor was created in inference mode. Outside that mode, torch cannot copy onto it."""
        with torch._C.DisableTorchFunctionSubclass():  # a ShardedTensor would raise an error
            return any(isinstance(value, torch.Tensor) and value.is_inference() for value in self._raw.values())
