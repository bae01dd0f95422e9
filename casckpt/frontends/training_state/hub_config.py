"""The files with which Transformers, PEFT and Diffusers load a model. They are saved with the weights.

As a result, these libraries can load an export. The libraries' own functions write the files to a temporary folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from casckpt.base.names import HUB_FILE, is_attachment_name
from casckpt.errors import Unsupported
from casckpt.frontends.training_state.hub_names import adapter_parts, globs, is_transformers, rules_of, saved_parts
from casckpt.frontends.training_state.model import model_state
from casckpt.frontends.training_state.names import class_names, unwrapped_model
from casckpt.frontends.training_state.stored import MODEL
from casckpt.loading.fit import shape_of

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)

ADAPTER_STEM, DIFFUSERS_STEM = "adapter_model", "diffusion_pytorch_model"
_MAX_BYTES = 1 << 20  # of the names

_PEFT = "peft.peft_model.PeftModel"
_DIFFUSERS = "diffusers.models.modeling_utils.ModelMixin"


_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Any]]] = WeakKeyDictionary()
"""For each model, what its names depend on, and the contents of `HUB_FILE`."""


def hub_files(model: Any, processor: Any = None) -> dict[str, bytes]:
    """Return the files with which an export of ``model`` can be loaded, to be saved as attachments.

    They are the configs of a Transformers or Diffusers model, the code of a custom class, or the configs of its PEFT
    adapters. In a dict of models, "model" is used. Other models, and a list of parts, have no such files.
    ``processor``: a tokenizer or processor whose files are added.
    """
    files = {} if processor is None else _written(processor.save_pretrained)
    if isinstance(model, Mapping):
        model = model.get(MODEL)
    inner = unwrapped_model(model[0] if isinstance(model, list | tuple) and len(model) == 1 else model)
    try:
        if _PEFT in class_names(inner) or getattr(inner, "_hf_peft_config_loaded", False):
            files |= _adapter_files(inner)
        elif is_transformers(inner):
            files |= _config_files(inner) | hub_names(**_names_of(inner, _transformers_names))
        elif _DIFFUSERS in class_names(inner):
            config = json.loads(inner.to_json_string())
            files |= {"config.json": _dumped(config)} | hub_names({DIFFUSERS_STEM: {}})
    except Exception as error:  # noqa: BLE001 - the libraries cannot write them either; the save must not fail
        _warn_once("the config of the %s was not saved, so an export lacks it: %s", type(inner).__name__, str(error))
    return files


def with_hub_files(model: Any, attachments: Any, files: Mapping[str, bytes] = MappingProxyType({})) -> Any:
    """Return ``attachments`` merged with ``files`` and `hub_files`.

    ``attachments``: None or a mapping. Any other value is returned unchanged, and `Store.save` rejects it. The names in
    it, which may be those of an imported folder, do not replace the names of the model.
    """
    given, own = attachments or {}, hub_files(model)
    names = {name: data for name, data in own.items() if name == HUB_FILE}
    return own | dict(files) | dict(given) | names if isinstance(given, Mapping) else given


# Transformers


def _config_files(model: Any) -> dict[str, bytes]:
    """Return the files that ``save_pretrained`` writes beside the weights."""
    kinds = (base for base in type(model).__mro__ if all(above.__name__ != "FSDPModule" for above in base.__mro__))
    kind = next(kinds)  # not the class that fully_shard creates
    config, files = model.config, dict[str, bytes]()
    if getattr(kind, "_auto_class", None) is not None or getattr(config, "_auto_class", None) is not None:
        config = deepcopy(config)
        files = _written(lambda folder: _write_code(kind, config, folder))
    content: dict[str, Any] = json.loads(config.to_json_string())
    content["architectures"] = [kind.__name__]
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), None)
    if dtype is not None:  # the current dtype of the weights
        content.pop("torch_dtype", None)  # its old name
        content["dtype"] = str(dtype).removeprefix("torch.")
    files["config.json"] = _dumped(content)
    if getattr(model, "generation_config", None) is not None:
        files["generation_config.json"] = _dumped(json.loads(model.generation_config.to_json_string()))
    return files


def _write_code(kind: Any, config: Any, folder: str) -> None:
    """Copy the modules of a custom class into a folder, and register the class in ``config``."""
    from transformers.dynamic_module_utils import custom_object_save

    for one in (kind.__new__(kind), config):  # the function uses only the class of an object
        if one._auto_class is not None:
            custom_object_save(one, folder, config=config)


def _transformers_names(model: Any) -> dict[str, Any]:
    """Return the names that ``save_pretrained`` gives to the tensors, unless they are the names of the model."""
    content: dict[str, Any] = {"views": {}}
    try:
        rules = rules_of(saved_parts(model, _shapes(model)))
        content["views"] = {"model": rules} if rules else {}
    except Unsupported as error:
        note = (
            f"the tensors have the names of Transformers 5, which save_pretrained would convert, because {error}; to "
            "convert them, load the checkpoint into a new model and call its save_pretrained"
        )
        content["notes"] = [note]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    untied = {one: other for one, other in ties.items() if parameters.get(one) is not parameters.get(other)}
    return content | {"tied": untied}


# PEFT


def _adapter_files(model: Any) -> dict[str, bytes]:
    """Return the configs of all adapters and the names of their tensors, in the folders that PEFT gives them."""
    files, folders = dict[str, bytes](), dict[str, str]()
    for adapter, config in model.peft_config.items():
        folders[adapter] = "" if adapter == "default" else f"{adapter}/"
        written = _written(lambda folder, config=config: _write_adapter(model, config, folder))
        files |= {f"{folders[adapter]}{name}": data for name, data in written.items()}
        if not all(map(is_attachment_name, files)):
            raise Unsupported(f"the adapter's name {adapter!r:.200} cannot be the name of a folder")

    def names(model: Any) -> dict[str, Any]:
        return {"views": {f"{folder}{ADAPTER_STEM}": _adapter_view(model, one) for one, folder in folders.items()}}

    return files | hub_names(**_names_of(model, names))


def _write_adapter(model: Any, config: Any, folder: str) -> None:
    config = copy(config)
    config.inference_mode = True
    auto = None
    if config.task_type is None and hasattr(model, "_get_base_model_class"):
        base = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
        auto = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(folder, auto_mapping_dict=auto)


def _adapter_view(model: Any, adapter: str) -> dict[str, Any]:
    shapes = _shapes(model)
    parts = adapter_parts(model, shapes, adapter)
    return {"strip_prefix": MODEL, "keys": [f"{MODEL}.{one}" for one in globs(parts, shapes)], **rules_of(parts)}


# files


def _names_of(model: Any, make: Any) -> dict[str, Any]:
    """Return the result of ``make`` for a model, or an earlier one if nothing that it depends on has changed."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    depends = [(name, id(value), tuple(value.shape)) for name, value in named], list(getattr(model, "peft_config", ()))
    known = _KNOWN.get(model)
    if known is None or known[0] != depends:
        known = _KNOWN[model] = depends, make(model)
    return known[1]


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, value in model_state(model).items() if (shape := shape_of(value)) is not None}


def _written(write: Any) -> dict[str, bytes]:
    """Return the files that ``write`` writes into a temporary folder."""
    with TemporaryDirectory(prefix="casckpt-") as folder:
        write(folder)
        return {name: path.read_bytes() for name, path in files_below(Path(folder))}


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder and its subfolders, in order, with their relative paths."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def hub_names(views: Mapping[str, Any], **more: Any) -> dict[str, bytes]:
    """Return `HUB_FILE` with ``views``, which maps the stem of each root to a view; {} if it would be empty."""
    content = {name: value for name, value in {"views": views, **more}.items() if value}
    text = json.dumps(content, separators=(",", ":")).encode()
    if len(text) > _MAX_BYTES:
        raise Unsupported(f"the rules for its names have more than {_MAX_BYTES >> 20} MiB")
    return {HUB_FILE: text} if content else {}


def _dumped(content: Any) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
