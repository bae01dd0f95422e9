"""Loads wrappers (see `casckpt.tensors.kinds`): compares those of a template with those of a checkpoint.

A template's wrapper must be equal to the stored one, except for the values of its tensors. With ``cast=True``, a plain
tensor is filled with the values of a stored wrapper, which is rebuilt on the CPU for this purpose and dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from casckpt.contents.contents import Contents
from casckpt.errors import Mismatch, Refused
from casckpt.format.forms import differences
from casckpt.format.regions import Box, Region, Shape, full_box
from casckpt.format.tree import TENSOR, Element, Node, Wrapper, kind_of
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.kinds import KINDS, dequantized
from casckpt.tensors.memory import Destination, note_writes, tensor_bytes
from casckpt.tensors.shards import LocalTensor, local_tensor
from casckpt.tensors.state import LeafValue
from casckpt.tensors.untrusted import misread

_SHOWN = 3


def has_wrapper(contents: Contents, key: str, name: str, here: Wrapper, inner: Sequence[tuple[LeafValue, str]]) -> bool:
    """Return whether the checkpoint has all of the wrapper ``name``. Raises Mismatch if it does not fit the template.

    ``here``: the template's node at ``key``. ``inner``: the template's inner tensors, each with its saved key.
    """
    there = contents.wrappers.get(name)
    if there is None:
        if name in contents.tensors or name in contents.objects:
            kind = "a plain tensor" if name in contents.tensors else "plain data"
            raise Mismatch(
                f"{key!r} is a wrapper of other tensors here, but {kind} in {contents.where} (key {name!r}); "
                f"ignore_mismatched= leaves it unchanged",
                key=key,
            )
        return False
    differ = list(islice(_differ(here, there, inner, contents), _SHOWN))
    if differ:
        raise Mismatch(
            f"{key!r} does not fit {contents.where} (key {name!r}): {'; '.join(differ)}. Create it as it was created "
            f"for the save; ignore_mismatched= leaves it unchanged",
            key=key,
        )
    return not any(contents.manifest.lacks(contents.tensor(saved)) for _, saved in inner)


def _differ(here: Wrapper, there: Wrapper, inner: Sequence[tuple[LeafValue, str]], contents: Contents) -> Iterator[str]:
    if here.in_parts and not there.in_parts:
        yield "it was saved whole and cannot be cut, and is sharded here"
    elif there.in_parts and (not here.in_parts or any(_moved(here, there, name) for name in here.nodes)):
        yield f"it was saved in {len(there.nodes)} parts that cannot be cut, and has a different sharding here"
    else:
        yield from forms_differ(here, there)
        for leaf, saved in inner:
            entry, local = contents.tensors.get(saved), local_tensor(leaf.key, leaf.value)
            own = (dtype_name(local.dtype), local.shape)
            if entry is not None and own != (entry.dtype, entry.shape):
                saved_as = f"{entry.dtype} of shape {list(entry.shape)}"
                yield f"{leaf.path[-1]!r} is {own[0]} of shape {list(own[1])} here, but {saved_as}"


def _moved(here: Wrapper, there: Wrapper, name: Element) -> bool:
    """Return whether the checkpoint lacks a part with the same elements as the one here."""
    own, saved = here.nodes[name], there.nodes.get(name)
    if isinstance(own, Wrapper) and isinstance(saved, Wrapper):
        return bool(own.fields.get("regions") != saved.fields.get("regions"))
    return saved is None


def forms_differ(here: Wrapper, there: Wrapper) -> Iterator[str]:
    """Yield the differences between two wrappers, except those of their tensors."""
    if here.form != there.form:
        kinds = list(differences(here.fields.get("kind"), there.fields.get("kind"), "kind"))
        yield from kinds or differences(here.fields, there.fields)
    if not here.in_parts and here.nodes.keys() != there.nodes.keys():
        yield f"it consists of {', '.join(map(str, here.nodes))} here, but {', '.join(map(str, there.nodes))}"
    for name in here.nodes.keys() & there.nodes.keys():
        own, saved = here.nodes[name], there.nodes[name]
        if isinstance(own, Wrapper) and isinstance(saved, Wrapper):
            yield from forms_differ(own, saved)
        elif kind_of(own) != kind_of(saved):
            yield f"{name!r} is a {kind_of(own)} here, but a {kind_of(saved)}"


# values


def dequantizes(node: Node) -> bool:
    """Return whether casckpt can return the values of a stored wrapper as a plain tensor."""
    if not isinstance(node, Wrapper):
        return node == TENSOR
    if node.in_parts:
        return all(map(dequantizes, node.nodes.values()))
    kind = KINDS.get(str(node.fields["kind"]))
    return kind is not None and kind.rebuild is not None and kind.dequantize is not None


def fill_dequantized(key: str, node: Wrapper, value: Any, local: LocalTensor) -> None:
    """Copy the values of a stored wrapper into the local pieces of a plain tensor, and convert them."""
    parts: Mapping[Element, tuple[Node, Any]] = {0: (TENSOR, value)}
    if node.in_parts:
        parts = {name: (below, value.tensors[str(name)]) for name, below in node.nodes.items()}
    filled = 0
    for name, (below, part) in parts.items():
        start, values = 0, dequantized(part).detach()
        with misread(lambda why: Refused(f"the parts of {key!r} are invalid: {why}", key=key)):
            regions = _regions(name, below, tuple(values.shape), node.shape)
        for region in regions:
            _copy(region, values.reshape(-1)[start : start + region.numel].contiguous(), local)
            start += region.numel
        filled += start
    if filled != math.prod(node.shape):
        raise Refused(f"the parts of {key!r} have {filled} elements, but its shape is {list(node.shape)}", key=key)
    note_writes(piece.data for piece in local.pieces)


def _regions(first: Element, node: Node, part: Shape, shape: Shape) -> list[Region]:
    """Return the regions of a part, in the order of its elements. ``first``: the number of its first element."""
    if isinstance(node, Wrapper):
        rows = node.fields["regions"]
        return [Region(Box(tuple(offset), tuple(extents)), lo, hi) for offset, extents, lo, hi in rows]
    numel = math.prod(part)
    if len(part) != len(shape) or not numel:
        return [Region(full_box(shape), int(first), int(first) + numel)]
    return [Region(Box(tuple(map(int, np.unravel_index(int(first), shape))), part), 0, numel)]


def _copy(region: Region, values: torch.Tensor, local: LocalTensor) -> None:
    buffer = tensor_bytes(values)
    for piece in local.pieces:
        if buffer is not None and region.numel and piece.data.numel():
            Destination(piece.region, piece.data, values.dtype).copy_in(region, buffer)
