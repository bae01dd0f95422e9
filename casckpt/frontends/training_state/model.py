"""A model's state under plain names: what is saved, and what a load fills."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from casckpt.errors import InvalidInput
from casckpt.frontends.training_state.names import plain_name

_EXTRA_STATE = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Is it what `torch.nn.Module.get_extra_state` gave, and not a parameter or buffer?"""
    return name.rpartition(".")[2] == _EXTRA_STATE


def model_state(model: nn.Module) -> OrderedDict[str, Any]:
    """The state_dict of ``model`` under plain names; the tensors are the live ones. Changes nothing."""
    raw = model.state_dict()
    state: OrderedDict[str, Any] = OrderedDict()
    for key, name in _plain_names(model, raw).items():
        state[name] = raw[key]
    metadata = getattr(raw, "_metadata", None)
    if metadata is not None:  # versions of modules; a wrapper's own gives way to that of what it wraps
        vars(state)["_metadata"] = {plain_name(model, path): value for path, value in metadata.items()}
    return state


def _plain_names(model: nn.Module, raw: Mapping[str, Any]) -> dict[str, str]:
    names = {key: plain_name(model, key) for key in raw}
    if len(set(names.values())) != len(names):
        twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
        raise InvalidInput(f"two keys of the model's state_dict have the plain name {twice!r}; rename one", key=twice)
    return names


class ModelTemplate:
    """What a load fills: the model's own tensors, so that no copy is made, and its extra state, to be replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._raw = model.state_dict(keep_vars=True)
        self._names = _plain_names(model, self._raw)
        self.values: dict[str, Any] = {
            name: None if is_extra_state(name) else self._raw[key] for key, name in self._names.items()
        }

    def install(self, missing: Collection[str], strict: bool) -> None:
        """Hand what was loaded to the model, all but the names ``missing``.

        Its parameters and buffers are filled by then: torch copies a tensor onto itself, which does nothing. Extra
        state, hooks, and tensors that the model's state_dict makes anew get their due.
        """
        for key, name in self._names.items():
            if name in missing:
                del self._raw[key]
            else:
                self._raw[key] = self.values[name]
        self._model.load_state_dict(self._raw, strict=strict)
