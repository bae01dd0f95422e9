"""The names and metadata with which Transformers stores torchao's weights in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, Unsupported
from casckpt.tensors.kinds import KINDS, WEIGHTS
from casckpt.tensors.untrusted import misread
from casckpt.tensors.wrappers import opened

TENSOR_NAMES: Final = "tensor_names"
"""The key in a file's metadata that lists the names of the described tensors, as JSON."""


def torchao_names(contents: Contents, keys: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of tensors in a folder of Transformers, and the metadata of its files.

    By torchao's rule, the tensor ``qdata`` of ``a.weight`` has the name ``a._weight_qdata``. Raises InvalidInput for a
    wrapper that torchao cannot read from a file, and for names that its rule makes ambiguous.
    """
    if contents.outer.keys().isdisjoint(keys):
        return list(names), {}
    written, metadata, starts = list[str](), dict[str, str](), dict[str, str]()
    inner: dict[str, list[str]] = {}
    for key, name in zip(keys, names, strict=True):
        outer = contents.outer.get(key, key)
        suffix = key.removeprefix(outer)
        unit = name.removesuffix(suffix)
        above, _, last = unit.rpartition(".")
        if suffix and not (above and name.endswith(suffix)):
            raise InvalidInput(
                f"{outer!r} would have the name {name!r}, which torchao cannot read: rename it", key=outer
            )
        start = f"{above}._{last}_"
        starts[start] = unit
        written.append(start + suffix[1:] if suffix else name)
        inner.setdefault(outer, []).append(suffix[1:])
        metadata[unit] = _described(contents, outer, inner[outer]) if suffix else json.dumps({"_type": "Tensor"})
    for name in written:
        if len(parts := [unit for start, unit in starts.items() if name.startswith(start)]) > 1:
            raise InvalidInput(f"torchao would read {name!r} as a part of {parts[0]!r} and of {parts[1]!r}: rename one")
    return written, metadata | {TENSOR_NAMES: json.dumps(list(metadata))}


def torchao_weights(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the tensors of files, with torchao's weights in place of their parts. The inverse of `torchao_names`.

    ``metadata``: the metadata of the files. The parts of an incomplete or invalid weight remain. Raises Unsupported if
    there are such weights, but torchao is not installed.
    """
    made = dict(tensors)
    for name, text in metadata.items():
        try:
            with misread(InvalidInput):
                _join(made, name, text)
        except Unsupported:
            raise
        except InvalidInput:
            continue
    return made


def _join(tensors: dict[str, Any], name: str, text: str) -> None:
    """Replace the parts of a weight with the weight that ``text`` describes, if this loses nothing."""
    described = json.loads(text)
    kind, (above, _, last) = described["_type"], name.rpartition(".")
    rebuild = KINDS[f"torchao:{kind}"].rebuild if kind in WEIGHTS and name not in tensors else None
    if rebuild is None:
        return
    keys = {part: f"{above}._{last}_{part}" for part in described["_tensor_data_names"]}
    inner = {part: tensors[key] for part, key in keys.items()}
    is_free = tensors.keys().isdisjoint(f"{name}.{part}" for part in inner)
    if is_free and all(isinstance(tensor, torch.Tensor) for tensor in inner.values()):
        weight = rebuild(inner, described["_data"], (), torch.float32)
        found = opened(name, weight)
        if found is not None and found.parts.keys() == inner.keys():
            tensors[name] = weight
            for key in keys.values():
                del tensors[key]


def _described(contents: Contents, key: str, names: Sequence[str]) -> str:
    form = contents.wrappers[key].fields
    package, _, kind = str(form.get("kind", ": a wrapper in parts")).partition(":")
    if package != "torchao" or kind not in WEIGHTS:
        raise InvalidInput(
            f"Transformers cannot read {key!r} ({kind}) from a file: load it with cast=True into a plain model, and "
            "export a checkpoint of that model",
            key=key,
        )
    return json.dumps({"_type": kind, "_data": form["context"], "_tensor_data_names": list(names)})
