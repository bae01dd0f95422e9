"""Wrappers: tensors that consist of other tensors, such as quantized weights. A save stores these inner tensors.

`opened` returns a wrapper's inner tensors and its form (see `casckpt.format.forms`). `rebuilt` is its inverse, and only
calls functions that casckpt or the user has registered for the kind. A load into a wrapper needs no such function.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from casckpt.errors import InvalidInput, Refused, Unsupported
from casckpt.format.forms import Form, are_sizes, decode_form, encode_form
from casckpt.format.regions import Region, Shape, check_shape, flat_boxes, normalise, whole
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Element, Wrapper
from casckpt.tensors.dtensors import is_dtensor, local_boxes
from casckpt.tensors.dtypes import dtype_name, torch_dtype
from casckpt.tensors.kinds import KINDS, Inner, Kind, flattened, is_wrapper, kind_of
from casckpt.tensors.shards import local_tensor
from casckpt.tensors.untrusted import misread
from casckpt.tensors.values import Shard

# saving


class Opened(NamedTuple):
    """An opened wrapper. ``parts``: its inner tensors by name: tensors, shards, lists of shards, or `Opened`."""

    form: Form
    parts: Mapping[str, Any]


def opened(key: str, value: Any, *, apart: bool = False) -> Opened | None:
    """Open a wrapper, or a DTensor or `Shard` of one. Return None for any other value. Nothing is copied.

    A sharded wrapper is opened as shards of global inner tensors if its kind can be cut at the edges of this part.
    Otherwise, this part is opened on its own, and only a load with the same sharding can read it. ``apart``: open a
    part in this way even if it is plain or could be cut. Raises InvalidInput for a wrapper that cannot be stored.
    """
    if isinstance(value, Wrapped):
        return _again(value)
    if isinstance(value, Shard):
        local, shape, regions = value.data, value.global_shape, value.regions()
    elif is_dtensor(value):
        local, shape = value._local_tensor, tuple(value.shape)
        if not apart and not is_wrapper(local):
            return None
        regions = [Region(box, 0, box.numel) for box, _ in local_boxes(key, value) if box.numel]
    else:
        return _whole(key, value, tuple(value.shape), value.dtype) if is_wrapper(value) else None
    if not apart and not is_wrapper(local):
        return None
    regions = [normalise(region, shape) for region in regions if region.numel]
    if not apart and regions == [whole(shape)] and tuple(local.shape) == shape:
        return _replicated(_whole(key, local, shape, getattr(value, "dtype", local.dtype)))
    cut = None if apart else _cut(key, local, shape, getattr(value, "dtype", local.dtype), regions)
    return _in_parts(key, value, local, shape, regions) if cut is None else cut


def _whole(key: str, value: Any, shape: Shape, dtype: torch.dtype) -> Opened:
    """Open a wrapper with its own inner tensors. ``shape``, ``dtype``: the values to store in its form."""
    kind = kind_of(value)
    inner, context = (kind.flatten or flattened)(value)
    _check_inner(key, value, inner)
    form: Form = {"kind": kind.name, "dtype": dtype_name(dtype), "shape": list(shape)}
    if kind.cut is not None:
        form["cut"] = _checked_cut(key, kind, kind.cut(value))
    try:
        form["context"] = _json(context)
        if orders := {name: order for name, part in inner.items() if (order := _order(part))}:
            form["strides"] = orders
        encode_form(form)
    except (InvalidInput, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidInput(
            f"{key!r}: the context of a {type(value).__name__} {why}; pass a flatten that returns plain values to "
            f"casckpt.register_wrapper",
            key=key,
        ) from error
    return Opened(form, {name: opened(key, part) or part for name, part in inner.items()})


def _check_inner(key: str, value: Any, inner: Inner) -> None:
    for name, part in (inner or {"": None}).items():
        if not str(name).isidentifier() or not isinstance(part, torch.Tensor) or part is value:
            raise InvalidInput(
                f"{key!r}: {name!r:.80}, which the __tensor_flatten__ of a {type(value).__name__} lists, is not the "
                f"name of a tensor in it; correct that method, or pass a flatten to casckpt.register_wrapper",
                key=key,
            )


def _order(part: torch.Tensor) -> list[int]:
    """Return the order of dimensions in memory, or an empty list for row-major order."""
    if part.layout is not torch.strided or is_wrapper(part) or part.is_contiguous():
        return []
    strides = part.stride()
    order = sorted(range(part.ndim), key=lambda dim: -strides[dim])
    return [] if order == [*range(part.ndim)] else order


def _cut(key: str, local: Any, shape: Shape, dtype: torch.dtype, regions: Sequence[Region]) -> Opened | None:
    """Open a part as shards of global inner tensors. Return None if a wrapper of this kind cannot be cut there."""
    own = _whole(key, local, shape, dtype)
    cut: dict[str, int] = own.form.get("cut", {})
    if not cut or cut.keys() != own.parts.keys():
        return None
    numel, most = math.prod(shape), max(cut.values())
    flat = [(region.lo, region.hi) for region in regions if region.box.shape == shape]
    is_range = len(flat) == len(regions) <= 1
    if most > 1 and not (
        is_range and numel % most == 0 and all(end % q == 0 for pair in flat for end in pair for q in cut.values() if q)
    ):
        return None
    parts: dict[str, Any] = {}
    for name, part in own.parts.items():
        if (q := cut[name]) == 0:
            parts[name] = Shard(part, tuple(part.shape), replicated=True)
        elif is_range:
            ranges = [(lo // q, hi // q) for lo, hi in flat]
            parts[name] = Shard(part, shape if q == 1 else (numel // q,), flat=ranges, replicated=True)
        elif len(regions) == 1:
            parts[name] = Shard(part, shape, regions[0].box.offset, replicated=True)
        else:
            return None
    return Opened(own.form, parts)


def _in_parts(key: str, value: Any, local: Any, shape: Shape, regions: Sequence[Region]) -> Opened:
    """Open a value that is stored in parts: a wrapper as a single part, a plain tensor as one part per region."""
    form = parts_form(dtype_name(getattr(value, "dtype", local.dtype)), shape)
    if not is_wrapper(local):
        pieces = ((normalise(piece.region, shape), piece.data) for piece in local_tensor(key, value).pieces)
        plain = {part_name(region, shape): data for region, data in pieces if region.numel}
        return _replicated(Opened(form, plain))
    if not regions:
        return Opened(form, {})
    own = _whole(key, local, tuple(local.shape), local.dtype)
    own.form["regions"] = [[list(one.box.offset), list(one.box.shape), one.lo, one.hi] for one in regions]
    return Opened(form, {part_name(regions[0], shape): _replicated(own)})


def parts_form(dtype: str, shape: Shape) -> Form:
    """Return the form of a tensor that is stored in parts."""
    return {"dtype": dtype, "shape": list(shape)}


def part_name(region: Region, shape: Shape) -> str:
    """Return the name of a part: the number of its first element in row-major order."""
    first = next(flat_boxes(region))[0].offset
    return str(int(np.ravel_multi_index(first, shape)) if shape else 0)


def _replicated(wrapper: Opened) -> Opened:
    """Return the wrapper with inner tensors that count as equal on all ranks that hold them."""

    def shared(part: Any) -> Any:
        return _replicated(part) if isinstance(part, Opened) else Shard(part, tuple(part.shape), replicated=True)

    return Opened(wrapper.form, {name: shared(part) for name, part in wrapper.parts.items()})


def _checked_cut(key: str, kind: Kind, cut: Any) -> dict[str, int]:
    if not (isinstance(cut, Mapping) and are_sizes(cut.values())):
        raise InvalidInput(f"{key!r}: the cut of {kind.name} is {cut!r:.80}, not a dict of non-negative ints", key=key)
    return dict(cut)


def _json(value: Any) -> Any:
    """Return a context as JSON, in torchao's own scheme. Raises InvalidInput."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"_type": "torch.device", "_data": None}  # a load may use a different device
    name = type(value).__name__
    if isinstance(value, enum.Enum):
        return {"_type": name, "_data": value.name}
    fields = getattr(value, "_fields" if isinstance(value, tuple) else "__dataclass_fields__", None)
    if fields is not None and not isinstance(value, type):
        kept = [field for field in fields if field != "requires_grad"]  # in NF4, where freezing does not change it
        return {"_type": name, "_data": {field: _json(getattr(value, field)) for field in kept}}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, Mapping) and all(type(field) is str and field not in ("_type", "_data") for field in value):
        return {field: _json(item) for field, item in value.items()}
    raise InvalidInput(f"contains a {name}, which cannot be stored as JSON")


# rebuilding


@dataclass(frozen=True)
class Wrapped:
    """A stored wrapper that cannot be rebuilt here. ``tensors``: its inner tensors or parts, by name.

    ``form``: JSON that describes it. A save stores it again unchanged.
    """

    form: str
    tensors: Mapping[str, Any]


def _again(value: Wrapped) -> Opened:
    parts = {name: _again(part) if isinstance(part, Wrapped) else part for name, part in value.tensors.items()}
    return Opened(decode_form(value.form), parts)


def restored(key: str, node: Wrapper, values: Mapping[Element, Any]) -> Any:
    """Return a new wrapper with these inner tensors, or a `Wrapped` if its kind or its library is unknown here."""
    tensors = {str(name): value for name, value in values.items()}
    try:
        return rebuilt(key, node.fields, tensors)
    except Unsupported:
        return Wrapped(node.form, tensors)


def rebuilt(key: str, form: Form, tensors: Mapping[str, Any]) -> torch.Tensor:
    """Return a new wrapper. Raises Unsupported if its kind is unknown here, and Refused if its form is invalid."""
    kind = KINDS.get(str(form.get("kind")))
    if kind is None or kind.rebuild is None:
        raise Unsupported(
            f"{key!r} is a {form.get('kind', 'wrapper in parts')!r:.80}, which casckpt cannot rebuild: pass a rebuild "
            "to casckpt.register_wrapper, or load it into an existing one",
            key=key,
        )
    with misread(lambda why: _invalid(key, kind.name, why)):
        shape, orders = check_shape(tuple(form["shape"])), form.get("strides", {})
        inner = {name: _in_order(part, orders.get(name)) for name, part in tensors.items()}
        made = kind.rebuild(inner, form["context"], shape, torch_dtype(form["dtype"]))
        own = _whole(key, made, tuple(made.shape), made.dtype)
    if encode_form(own.form) != encode_form({name: form[name] for name in form if name != "regions"}):
        raise _invalid(key, kind.name, f"it describes {encode_form(own.form):.200}")
    return made


def blank(
    key: str, node: Wrapper, entries: Mapping[str, Entry], shape: Shape | None, device: torch.device
) -> torch.Tensor | None:
    """Return a new wrapper of zeros for a part of a stored wrapper. ``shape``: the part's shape, or None for the whole.

    Return None if the stored wrapper cannot be cut into such parts. ``entries``: the stored entries. Raises the errors
    of `rebuilt`.
    """
    form, full = node.fields, node.shape
    cut, shape = form.get("cut", {}), full if shape is None else shape
    numel, tensors = math.prod(shape), dict[str, Any]()
    if shape != full and not (cut and all(numel % max(q, 1) == 0 for q in cut.values())):
        return None
    for name, below in node.nodes.items():
        inner, q = f"{key}.{name}", cut.get(name, 0) if shape != full else 0
        if isinstance(below, Wrapper):
            tensors[str(name)] = blank(inner, below, entries, None, device)
        else:
            size = entries[inner].shape if q == 0 else shape if q == 1 else (numel // q,)
            tensors[str(name)] = torch.zeros(size, dtype=torch_dtype(entries[inner].dtype), device=device)
    return rebuilt(key, {**form, "shape": list(shape)}, tensors)


def _invalid(key: str, kind: str, why: str) -> Refused:
    return Refused(f"{key!r}: the form of a stored {kind} is invalid: {why}", key=key)


def _in_order(part: Any, order: Sequence[int] | None) -> Any:
    """Return a tensor whose dimensions have this order in memory."""
    if not order:
        return part
    return part.permute(*order).contiguous().permute(*np.argsort(order).tolist())
