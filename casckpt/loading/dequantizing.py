"""Loads stored wrappers into plain tensors with ``cast=True``: each is rebuilt on the CPU, dequantized, and copied."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from casckpt.errors import Refused
from casckpt.format.forms import decode_form
from casckpt.format.regions import Box, Region, Shape, check_shape, full_box
from casckpt.format.tree import TENSOR, Node, Wrapper
from casckpt.tensors.kinds import KINDS, is_wrapper, kind_of
from casckpt.tensors.memory import Destination, note_writes, tensor_bytes
from casckpt.tensors.shards import LocalTensor


def dequantizes(node: Node) -> bool:
    """Return whether casckpt can return the values of a stored wrapper as a plain tensor."""
    if not isinstance(node, Wrapper):
        return node == TENSOR
    form = decode_form(node.form)
    if "kind" not in form:
        return all(map(dequantizes, node.nodes.values()))
    kind = KINDS.get(str(form["kind"]))
    return kind is not None and kind.rebuild is not None and kind.dequantize is not None


def fill_dequantized(key: str, node: Wrapper, value: Any, local: LocalTensor) -> None:
    """Copy the values of a stored wrapper into the local pieces of a plain tensor, and convert them."""
    form = decode_form(node.form)
    shape = check_shape(tuple(form["shape"]))
    whole = "kind" in form
    filled = 0
    for name, part in {"0": value}.items() if whole else value.tensors.items():
        values = (kind_of(part).dequantize or torch.clone)(part) if is_wrapper(part) else part
        start, flat = 0, values.detach().reshape(-1).contiguous()
        for region in _regions(name, None if whole else node.nodes[name], values.shape, shape):
            _copy(region, flat[start : start + region.numel], local)
            start += region.numel
        filled += start
    if filled != math.prod(shape):
        raise Refused(f"the parts of {key!r} have {filled} elements, but its shape is {list(shape)}", key=key)
    note_writes(data for _, data in local.pieces)


def _regions(name: str, node: Node | None, part: Shape, shape: Shape) -> list[Region]:
    """Return the regions of a part, in the order of its elements."""
    if isinstance(node, Wrapper):
        rows = decode_form(node.form)["regions"]
        return [Region(Box(tuple(offset), tuple(extents)), lo, hi) for offset, extents, lo, hi in rows]
    first, numel = int(name), math.prod(part)
    if len(part) != len(shape):
        return [Region(full_box(shape), first, first + numel)]
    return [Region(Box(tuple(map(int, np.unravel_index(first, shape))), tuple(part)), 0, numel)]


def _copy(region: Region, values: torch.Tensor, local: LocalTensor) -> None:
    buffer = tensor_bytes(values)
    for target, data in local.pieces:
        if buffer is not None and region.numel and data.numel():
            Destination(target, data, values.dtype).copy_in(region, buffer)
