"""The names and metadata with which Transformers stores torchao's weights in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput
from casckpt.tensors.kinds import WEIGHTS

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
