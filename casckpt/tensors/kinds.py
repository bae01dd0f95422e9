"""The kinds of wrappers (tensors that consist of other tensors), and what casckpt knows about each of them.

casckpt knows torchao's weights and optimizer states, and torch's sparse layouts. From torchao, only functions whose
paths this module names are imported, and a stored context is checked before it is passed to torchao.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, TypeAlias

import torch

from casckpt.errors import InvalidInput, Unsupported
from casckpt.format.dtypes import DTYPES
from casckpt.format.regions import Shape
from casckpt.tensors.dtensors import is_dtensor
from casckpt.tensors.memory import has_memory
from casckpt.tensors.values import Shard

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensor types that are never sharded or lazy, and that are wrappers only if their layout is sparse."""
_NO_WRAPPERS: Final = frozenset({"AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor", "LocalShardsWrapper"})
"""torch's own tensor classes that only stand for another tensor, or have a chunk list."""

Inner: TypeAlias = Mapping[str, Any]
Cut: TypeAlias = Callable[[Any], Mapping[str, int]]
Flatten: TypeAlias = Callable[[Any], tuple[Inner, Any]]
Rebuild: TypeAlias = Callable[[Inner, Any, Shape, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """What is known about a kind of wrapper. Each function may be None.

    ``name``: its top-level package and its qualified name, as in "torchao:Int8Tensor". ``rebuild``: returns a new
    wrapper from the inner tensors, the context as JSON, the shape and the dtype. ``cut``: returns, for each inner
    tensor, how it is cut along with a sharded wrapper: 1 if it has the wrapper's shape, q if element k belongs to
    elements kq to kq + q - 1 of the wrapper, and 0 if it is the same for all parts. ``flatten``: returns the inner
    tensors and the context, if not as ``__tensor_flatten__`` does. ``type``: the only class that has this kind; None
    stands for any class with this name.
    """

    name: str
    rebuild: Rebuild | None = None
    cut: Cut | None = None
    flatten: Flatten | None = None
    type: type | None = None


KINDS: dict[str, Kind] = {}
"""All known kinds, by name. `register_wrapper` adds more."""


def register_wrapper(
    cls: type[torch.Tensor],
    *,
    rebuild: Rebuild | None = None,
    cut: Cut | None = None,
    flatten: Flatten | None = None,
) -> None:
    """Tell casckpt how to handle a class of tensors that consist of other tensors.

    A class with ``__tensor_flatten__`` can be stored even without this call. Any other class needs ``flatten``, for
    example TransformerEngine's Float8Tensor.

    ``rebuild``: a function of the inner tensors by name, the context as JSON, the shape and the dtype, for
    `Store.read` and for optimizers that have no state yet. ``cut``: a function that returns how each inner tensor of a
    sharded wrapper is cut, so that a different number of ranks can load it: ``{"data": 1, "scale": 256, "table": 0}``
    for data with the shape of the wrapper, one scale for each 256 consecutive elements, and a table that all parts
    share. ``flatten``: a function that returns the inner tensors by name and the context, in place of
    ``__tensor_flatten__``, whose context must consist of JSON values, dtypes, enum members and dataclasses. Raises
    InvalidInput if a different class with the same name is registered.
    """
    given: Any = cls
    if not (isinstance(given, type) and issubclass(given, torch.Tensor)):
        raise InvalidInput(f"register_wrapper needs a subclass of torch.Tensor, not {cls!r:.80}")
    name = _class_name(cls)
    known = KINDS.get(name)
    if known is not None and known.type not in (None, cls):
        raise InvalidInput(f"a different class {name!r} is already registered: rename one of the two classes")
    KINDS[name] = Kind(name, rebuild, cut, flatten, cls)


def _class_name(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}:{cls.__qualname__}"


def kind_of(value: torch.Tensor) -> Kind:
    """Return the kind of a wrapper."""
    if value.layout is not torch.strided:
        return KINDS[layout_name(value.layout)]
    name, cls = _class_name(type(value)), type(value)
    known = KINDS.get(name)
    return known if known is not None and known.type in (None, cls) else Kind(name)


def _is_flattened(cls: type) -> bool:
    """Return whether a class is registered with a ``flatten``."""
    known = KINDS.get(_class_name(cls))
    return known is not None and known.type is cls and known.flatten is not None


def flattened(value: Any) -> tuple[Inner, Any]:
    """Return the inner tensors by name and the context that ``__tensor_flatten__`` returns."""
    names, context = value.__tensor_flatten__()
    return {str(name): getattr(value, str(name), None) for name in names}, context


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor that consists of other tensors, without memory of its own.

    Returns False for DTensors and nested tensors.
    """
    cls = type(value)
    if cls in PLAIN:
        return value.layout is not torch.strided and layout_name(value.layout) in KINDS
    if not isinstance(value, torch.Tensor) or not (hasattr(cls, "__tensor_flatten__") or _is_flattened(cls)):
        return False
    return not (is_dtensor(value) or value.is_nested or cls.__name__ in _NO_WRAPPERS or has_memory(value))


def holds_wrapper(value: Any) -> bool:
    """Return whether a tensor, a DTensor's local tensor or a shard's data is a wrapper."""
    if is_dtensor(value):
        return is_wrapper(value._local_tensor)
    return is_wrapper(value.data if isinstance(value, Shard) else value)


# torchao

_CONTEXTS: Final = frozenset({
    "Float8MMConfig", "KernelPreference", "MappingType", "PerRow", "PerTensor", "QuantizeTensorToFloat8Kwargs",
    "QuantizeTensorToInt8Kwargs", "QuantizeTensorToMXKwargs", "QuantizeTensorToNVFP4Kwargs", "ScaleCalculationMode",
    "torch.dtype",
})  # fmt: skip
"""The types that a torchao context may name."""


def _of_torchao(module: str, name: str) -> Any:
    try:
        return getattr(import_module(f"torchao.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"this needs torchao, with {name} in torchao.{module}: {error}") from error


def _check_context(value: Any) -> None:
    """Raise ValueError for a context that names anything but torchao's configurations, enum members and dtypes."""
    if isinstance(value, list):
        for item in value:
            _check_context(item)
    if not isinstance(value, dict):
        return
    kind, data = value.get("_type"), value.get("_data")
    if kind is not None:
        is_name = isinstance(data, str) and data.isidentifier() and not data.startswith("_")
        if kind not in _CONTEXTS or not (is_name or isinstance(data, dict)):
            raise ValueError(f"its context contains a {kind!r:.80}")
        if (kind == "torch.dtype") != (is_name and data in DTYPES):
            raise ValueError("its context has an invalid dtype")
    for item in value.values():
        _check_context(item)


def _weight(cls: str, inner: Inner, context: Any, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    _check_context(context)
    made: torch.Tensor = _of_torchao("prototype.safetensors.safetensors_utils", "object_from_dict")(
        {"_type": cls, "_data": {**context, **inner}}
    )
    return made


WEIGHTS: Final = (
    "Float8Tensor", "Int4PlainInt32Tensor", "Int4Tensor", "Int4TilePackedTo4dTensor", "Int8Tensor",
    "IntxUnpackedToInt8Tensor", "MXTensor", "NVFP4Tensor",
)  # fmt: skip
"""The weight classes that torchao can write to safetensors files."""


_NF4: Final = "quantization.quantize_.workflows.nf4.nf4_tensor"


def _nf4(inner: Inner, context: Any, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    sizes = [context[name] for name in ("block_size", "n_blocks", "scaler_block_size")]
    if not all(type(size) is int and size > 0 for size in sizes) or inner["nf4"].shape != (16,):
        raise ValueError("its blocks are invalid")
    meta: dict[str, Any] = context["tensor_meta"]["_data"]
    known = {"dtype": dtype, "device": inner["nf4"].device, "original_shape": torch.Size(shape), "requires_grad": False}
    args = _of_torchao(_NF4, "SubclassTensorArgs")(**{**meta, **known})
    names = ("quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4")
    made: torch.Tensor = _of_torchao(_NF4, "NF4Tensor")(args, *sizes, *(inner[name] for name in names))
    return made


_STATES: Final[Mapping[str, tuple[str, tuple[str, ...], int]]] = {
    "OptimState8bit": ("optim.subclass_8bit", ("codes", "scale", "qmap"), 256),
    "OptimState4bit": ("optim.subclass_4bit", ("codes", "scale", "qmap"), 16),
    "OptimStateFp8": ("optim.subclass_fp8", ("codes", "scale"), 0),
}
"""For each optimizer state of torchao: its module, its inner tensors, and the size of its table, or 0 for none."""


def _flat_state(value: Any) -> tuple[Inner, Any]:
    """Return inner tensors, and a context that is the same for all parts of a state."""
    inner, context = flattened(value)
    return inner, context[:-1][:1]


def _cut_state(value: Any) -> dict[str, int]:
    blocks = max(value.scale.numel(), 1)
    cut = {"codes": value.numel() // max(value.codes.numel(), 1), "scale": value.numel() // blocks}
    return {**cut, "qmap": 0} if hasattr(value, "qmap") else cut


def _state(cls: str, inner: Inner, context: Any, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    module, names, table = _STATES[cls]
    if tuple(inner) != names or (table and inner["qmap"].shape != (table,)):
        raise ValueError("its tensors are invalid")
    own = [*context, *([shape] if cls == "OptimState4bit" else []), dtype]
    made: torch.Tensor = _of_torchao(module, cls)(*(inner[name] for name in names), *own)
    return made


# torch's sparse layouts

_COMPRESSED: Final = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _flat_coo(value: torch.Tensor) -> tuple[Inner, Any]:
    data = value.detach()
    return {"indices": data._indices(), "values": data._values()}, {"is_coalesced": data.is_coalesced()}


def _coo(inner: Inner, context: Any, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    parts = inner["indices"], inner["values"]
    return torch.sparse_coo_tensor(*parts, shape, is_coalesced=context["is_coalesced"], check_invariants=True)


def _flat_compressed(value: torch.Tensor) -> tuple[Inner, Any]:
    data = value.detach()
    names = (*_COMPRESSED[data.layout], "values")
    return {name: getattr(data, name)() for name in names}, {}


def _compressed(layout: torch.layout, inner: Inner, context: Any, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    outer, index = (inner[name] for name in _COMPRESSED[layout])
    return torch.sparse_compressed_tensor(outer, index, inner["values"], shape, layout=layout, check_invariants=True)


def layout_name(layout: torch.layout) -> str:
    """Return the name of the kind of a sparse layout."""
    return str(layout).replace("torch.", "torch:")


def _known() -> list[Kind]:
    weights = [Kind(f"torchao:{name}", partial(_weight, name)) for name in WEIGHTS]
    states = [Kind(f"torchao:{name}", partial(_state, name), _cut_state, _flat_state) for name in _STATES]
    nf4 = Kind("torchao:NF4Tensor", _nf4)
    coo = Kind(layout_name(torch.sparse_coo), _coo, None, _flat_coo)
    rows = [Kind(layout_name(one), partial(_compressed, one), None, _flat_compressed) for one in _COMPRESSED]
    return [*weights, *states, nf4, coo, *rows]


KINDS.update({kind.name: kind for kind in _known()})
