"""The small files that say how a model of Transformers is made: saved with its weights, an export of them loads."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from casckpt.frontends.training_state.names import wrapped_child

_BASE = "transformers.modeling_utils.PreTrainedModel"
_FSDP2 = "FSDP"  # fully_shard puts it before the name of a class, and its own class before that one


def config_files(model: Any) -> dict[str, bytes]:
    """config.json, and generation_config.json where there is one; nothing for a model of another kind.

    Of several parts of a model none is known to be it. Nor is a model with adapters what its config says.
    """
    inner = _unwrapped(model[0] if isinstance(model, list | tuple) and len(model) == 1 else model)
    if not _is_pretrained(inner) or getattr(inner, "_hf_peft_config_loaded", False):
        return {}
    config = json.loads(inner.config.to_json_string())
    name = type(inner).__name__
    sharded = any(base.__name__ == "FSDPModule" for base in type(inner).__mro__)
    config["architectures"] = [name.removeprefix(_FSDP2) if sharded else name]
    config["dtype"] = str(inner.dtype).removeprefix("torch.")  # the weights', whatever they were loaded as
    config.pop("torch_dtype", None)  # its old name
    found = {"config.json": config}
    if getattr(inner, "generation_config", None) is not None:
        found["generation_config.json"] = json.loads(inner.generation_config.to_json_string())
    return {name: json.dumps(text, indent=2, sort_keys=True).encode() + b"\n" for name, text in found.items()}


def _unwrapped(model: Any) -> Any:
    while isinstance(model, nn.Module) and (child := wrapped_child(model)) is not None:
        model = model._modules.get(child)
    return model


def _is_pretrained(model: Any) -> bool:
    """Asked by name: Transformers takes seconds to import, and whoever has such a model has done so."""
    return any(f"{base.__module__}.{base.__qualname__}" == _BASE for base in type(model).__mro__)
