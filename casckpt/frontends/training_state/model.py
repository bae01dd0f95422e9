"""A model's state under plain names: what is saved, and what a load fills."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from casckpt.errors import InvalidInput
from casckpt.frontends.training_state.flat import flat_parts, full_dtypes, let_go, without_fsdp_hooks
from casckpt.frontends.training_state.names import plain_name
from casckpt.tensors.values import Shard

_EXTRA_STATE = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Tell whether it is what `torch.nn.Module.get_extra_state` gave, and not a parameter or buffer."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def model_state(model: nn.Module) -> OrderedDict[str, Any]:
    """The state_dict of ``model`` under plain names; the tensors are the live ones. Changes nothing, gathers nothing.

    What FSDP has of a parameter on this rank is a `Shard`. Raises InvalidInput, Unsupported as `flat_parts` does.
    """
    parts, dtypes = flat_parts(model), full_dtypes(model)
    raw = _live_state(model)
    state: OrderedDict[str, Any] = OrderedDict()
    for key, name in _plain_names(model, raw).items():
        value = raw[key]
        part = parts.get(id(value))
        state[name] = part.shard(part.data) if part is not None else _in_full(value, dtypes)
    metadata = getattr(raw, "_metadata", None)
    if metadata is not None:  # versions of modules; a wrapper's own gives way to that of what it wraps
        vars(state)["_metadata"] = {plain_name(model, path): value for path, value in metadata.items()}
    return state


def _live_state(model: nn.Module) -> dict[str, Any]:
    """Parameters as such, which are known to be the same on all ranks that have them."""
    with without_fsdp_hooks(model):
        return model.state_dict(keep_vars=True)


def _in_full(value: Any, dtypes: Mapping[int, torch.dtype]) -> Any:
    dtype = dtypes.get(id(value))
    return value if dtype is None else value.to(dtype)


def _plain_names(model: nn.Module, raw: Mapping[str, Any]) -> dict[str, str]:
    names = {key: plain_name(model, key) for key in raw}
    if len(set(names.values())) != len(names):
        twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
        raise InvalidInput(f"two keys of the model's state_dict have the plain name {twice!r}; rename one", key=twice)
    return names


class ModelTemplate:
    """What a load fills: the model's own tensors, so that no copy is made, and its extra state, to be replaced."""

    def __init__(self, model: nn.Module) -> None:
        let_go(model)
        self._model = model
        self._parts, self._dtypes = flat_parts(model), full_dtypes(model)
        self._raw = _live_state(model)
        self._names = _plain_names(model, self._raw)
        self.values: dict[str, Any] = {name: self._place(name, self._raw[key]) for key, name in self._names.items()}

    def _place(self, name: str, value: Any) -> Any:
        part = self._parts.get(id(value))
        if part is not None:
            return part.shard(part.data)
        if id(value) in self._dtypes:
            return torch.empty_like(value, dtype=self._dtypes[id(value)])
        return None if is_extra_state(name) else value

    def install(self, missing: Collection[str], strict: bool) -> None:
        """Hand what was loaded to the model, all but the names ``missing``, which it keeps as they are.

        Its parameters and buffers are filled by then: torch copies a tensor onto itself, which does nothing. Extra
        state, hooks, and tensors that the model's state_dict makes anew get their due.
        """
        for key, name in self._names.items():
            if name in missing:
                del self._raw[key]
            elif not isinstance(self.values[name], Shard):
                self._raw[key] = self.values[name]
        with without_fsdp_hooks(self._model):
            self._model.load_state_dict(self._raw, strict=strict and not missing)
