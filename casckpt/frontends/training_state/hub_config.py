"""The config files of a Transformers model. They are saved with the weights so that an export can be loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from casckpt.frontends.training_state.names import wrapped_child
from casckpt.frontends.training_state.stored import MODEL

log = logging.getLogger(__name__)

_BASE = "transformers.modeling_utils.PreTrainedModel"
_FSDP2 = "FSDP"  # the prefix of the classes that fully_shard creates


def config_files(model: Any) -> dict[str, bytes]:
    """Return config.json and generation_config.json of a Transformers model, or an empty dict for any other model.

    In a dict of models, "model" is used. For a list of parts, there are none, because no part is the whole model. For
    a model with adapters, there are none either, because its config describes the model without them.
    """
    if isinstance(model, Mapping):
        model = model.get(MODEL)
    inner = _unwrapped(model[0] if isinstance(model, list | tuple) and len(model) == 1 else model)
    # by name, because importing Transformers takes seconds; a program that has such a model has already imported it
    is_pretrained = any(f"{base.__module__}.{base.__qualname__}" == _BASE for base in type(inner).__mro__)
    if not is_pretrained or getattr(inner, "_hf_peft_config_loaded", False):
        return {}
    try:
        files = {"config.json": _config(inner)}
        if getattr(inner, "generation_config", None) is not None:
            files["generation_config.json"] = json.loads(inner.generation_config.to_json_string())
    except (
        TypeError,
        ValueError,
    ) as error:  # Transformers cannot write them either, and a save must not fail because of this
        log.warning("the config of the %s was not saved: %s", type(inner).__name__, error)
        return {}
    return {name: json.dumps(text, indent=2, sort_keys=True).encode() + b"\n" for name, text in files.items()}


def with_config(model: Any, attachments: Any, files: Mapping[str, bytes] = MappingProxyType({})) -> Any:
    """Return ``attachments`` merged with ``files`` and `config_files`.

    ``attachments``: None or a mapping. Any other value is returned unchanged, and `Store.save` rejects it.
    """
    given = attachments or {}
    return config_files(model) | dict(files) | dict(given) if isinstance(given, Mapping) else given


def _config(model: Any) -> dict[str, Any]:
    """Return the config that ``save_pretrained`` writes."""
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    name = type(model).__name__
    sharded = any(base.__name__ == "FSDPModule" for base in type(model).__mro__)
    config["architectures"] = [name.removeprefix(_FSDP2) if sharded else name]
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), None)
    if dtype is not None:  # the current dtype of the weights
        config.pop("torch_dtype", None)  # its old name
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _unwrapped(model: Any) -> Any:
    while isinstance(model, nn.Module) and (child := wrapped_child(model)) is not None:
        model = model._modules.get(child)
    return model
