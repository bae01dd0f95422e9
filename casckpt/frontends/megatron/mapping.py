"""Classes for the sharded values of a state dict: `ShardedTensor`, `ShardedObject`, factories.

They have the fields, defaults and constructors of ``megatron.core.dist_checkpointing.mapping`` (0.15.3, with
``flattened_range``), so that code needs to change only its imports. Shapes and offsets are in elements or, for a
`ShardedObject`, in shards.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, Self, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from casckpt.format.regions import Box, Shape, flat_boxes
from casckpt.frontends.megatron.errors import CheckpointingException, refused
from casckpt.frontends.megatron.kinds import extract_sharded_tensors_and_factories, is_factory
from casckpt.frontends.megatron.nesting import Nested, Path, dict_list_map_inplace, nested_values
from casckpt.tensors.dtensors import is_dtensor, local_of
from casckpt.tensors.foreign import flat_range, megatron_data, megatron_region
from casckpt.tensors.memory import has_memory, narrow
from casckpt.tensors.values import Shard


def _with(shape: Shape, axis: int, extent: int) -> Shape:
    return (*shape[:axis], extent, *shape[axis + 1 :])


Copies: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of (target, source)."""


def copies(value: Any, data: torch.Tensor, stored: Shape, part: Shape) -> tuple[list[Shard], Copies]:
    """Plan how to fill the ``data`` of a Megatron-style tensor from the stored parts that it overlaps.

    Return the shards to read into new memory, and the views to copy afterwards.
    """
    shards: list[Shard] = []
    pairs: Copies = []
    pieces = list(boxes_of(value, data))
    for at in _parts(megatron_region(value).box, part):
        buffer = torch.empty(stored[-1], dtype=data.dtype, device="cpu")
        here = Box(tuple(i * n for i, n in zip(at, part, strict=True)), part)
        overlaps = [(piece, target, common) for piece, target in pieces if (common := piece.intersect(here))]
        for piece, target, common in overlaps:
            source = narrow(buffer.view(part), common.relative_to(here))
            pairs.append((narrow(target, common.relative_to(piece)), source))
        if overlaps:
            shards.append(Shard(buffer.view((1,) * len(at) + stored[-1:]), stored, (*at, 0)))
    return shards, pairs


def _parts(box: Box, part: Shape) -> Iterator[Shape]:
    """Yield the indices of the parts that a box overlaps."""
    ends = zip(box.offset, box.end, part, strict=True)
    return product(*(range(start // extent, -(-end // extent)) for start, end, extent in ends))


def boxes_of(value: Any, data: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield (box of the global tensor, view of the data) for each box that the value holds."""
    region, local = megatron_region(value), megatron_data(value, data)
    if flat_range(value) is None:
        yield region.box, local
        return
    for box, start in flat_boxes(region):
        yield box, local[start - region.lo :][: box.numel].view(box.shape)


ReplicaId: TypeAlias = int | tuple[int, ...]
FactoryBuildFn: TypeAlias = Callable[..., Nested]
FactoryMergeFn: TypeAlias = Callable[[Nested], Any]


class ShardedBase(ABC):
    """A value with its own key in a checkpoint, regardless of its position in the state dict."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointingException if the fields contradict each other."""

    def without_data(self) -> Self:
        """Return a copy whose data is None."""
        other = copy(self)
        other.data = None
        return other

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"


class _Given(TypedDict, total=False):
    allow_shape_mismatch: bool


class _GivenFlat(_Given, total=False):
    replica_id: ReplicaId
    prepend_axis_num: int


def is_main_replica(replica_id: ReplicaId | Iterable[int]) -> bool:
    """Return whether a save writes this replica. This is true for 0, only zeros, and an empty tuple."""
    return replica_id == 0 if isinstance(replica_id, int) else all(number == 0 for number in replica_id)


@dataclass
class ShardedTensor(ShardedBase):
    """The part of a global tensor that a process holds.

    ``local_shape``: the shape of the part, without the ``prepend_axis_num`` leading axes of extent 1 that only the
    global tensor has. ``global_offset``: the offset of the part. ``axis_fragmentations``: the number of parts along
    each axis, or None if the parts are uneven. ``replica_id``: 0 (or zeros) on the one process that writes the part.
    ``allow_shape_mismatch``: a load accepts a different global shape and sets elements that the checkpoint lacks to 0.
    ``flattened_range``: ``data`` is only this slice of the flattened part. Raises CheckpointingException if the fields
    contradict each other.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: Shape
    global_shape: Shape
    global_offset: Shape
    axis_fragmentations: Shape | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    @override
    def validate_metadata_integrity(self) -> None:
        problem = self._problem()
        if problem:
            raise refused(self.key, f"{problem} ({self!r})")

    def _problem(self) -> str | None:
        if len(self.global_shape) != len(self.global_offset):
            return "global_shape and global_offset differ in length"
        if len(self.local_shape) + self.prepend_axis_num != len(self.global_shape):
            return "local_shape and prepend_axis_num do not add up to the dimensions of global_shape"
        if self.axis_fragmentations is not None and any(extent and start % extent for start, extent in self._axes()):
            return "global_offset is not a multiple of local_shape; for uneven parts, pass axis_fragmentations=None"
        if self.flattened_range is not None and self.flattened_range.step is not None:
            return "flattened_range has a step, which is not supported"
        return None if self.data is None else self._problem_of(self.data)

    def _axes(self) -> Iterator[tuple[int, int]]:
        """Yield the (offset, extent) of each axis that ``data`` has."""
        return zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)

    def _before(self) -> Shape:
        """Return the offsets along the prepended axes."""
        return self.global_offset[: self.prepend_axis_num]

    def _problem_of(self, data: torch.Tensor) -> str | None:
        if data.dtype != self.dtype:
            return f"data is {data.dtype}, but dtype is {self.dtype}"
        expected: Sequence[int] = self.local_shape if self.flattened_range is None else (len(self.flat_elements()),)
        if tuple(data.shape) != tuple(expected):
            what = "local_shape" if self.flattened_range is None else "flattened_range"
            return f"data has shape {list(data.shape)}, but {what} requires {list(expected)}"
        return None

    def flat_elements(self) -> range:
        """Return the elements of the part that ``data`` holds, numbered in row-major order."""
        every = range(prod(self.local_shape))
        return every if self.flattened_range is None else every[self.flattened_range]

    @property
    def has_regular_grid(self) -> bool:
        """Whether the global tensor is split into equal parts along each axis."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of this part in the global tensor: ints for prepended axes, slices for the others."""
        return (*self._before(), *(slice(start, start + extent) for start, extent in self._axes()))

    def local_coordinates(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Return the index arrays, within the part, of the elements of ``flattened_range``.

        Raises CheckpointingException if there is no ``flattened_range``.
        """
        if self.flattened_range is None:
            raise refused(
                self.key, "coordinates exist only for a flattened_range, which it does not have; use global_slice()"
            )
        if not self.local_shape:  # numpy has no index arrays for zero dimensions
            return ()
        return tuple(np.unravel_index(np.asarray(self.flat_elements(), dtype=np.int64), self.local_shape))

    def global_coordinates(self) -> tuple[int | npt.NDArray[np.int64], ...]:
        """Return the index arrays of these elements in the global tensor, with one number for each prepended axis."""
        local = self.local_coordinates()
        return (*self._before(), *(index + start for index, (start, _) in zip(local, self._axes(), strict=True)))

    def local_chunk_offset_in_global(self) -> Shape:
        """Return the index of this part in the grid of parts."""
        return (*self._before(), *(start // extent if extent else 0 for start, extent in self._axes()))

    def max_allowed_chunks(self) -> Shape:
        """Return ``global_shape // axis_fragmentations``.

        Raises CheckpointingException for uneven parts and, unless ``allow_shape_mismatch`` is set, for an axis that is
        not divisible.
        """
        if self.axis_fragmentations is None:
            raise CheckpointingException(f"{self.key!r} does not have a regular grid", key=self.key)
        pairs = list(zip(self.global_shape, self.axis_fragmentations, strict=True))
        for extent, count in pairs:
            if extent % count and not self.allow_shape_mismatch:
                why = (
                    f"an axis of {extent} is not a multiple of {count}; pass allow_shape_mismatch=True if it is padded"
                )
                raise refused(self.key, why)
        return tuple(extent // count for extent, count in pairs)

    def narrow(self, dim: int, start: int, length: int) -> list[Self]:
        """Keep ``length`` elements along an axis, starting at ``start``. The new data is a view.

        ``dim`` does not count the prepended axes. The new global tensor consists of the elements that all parts keep.
        Returns one part, or none if the ``flattened_range`` has none of these elements. Raises CheckpointingException
        for elements outside the part, for uneven parts, and for flat data along any axis other than the first.
        """
        problem = self._problem_of_narrowing(dim, start, length)
        if problem:
            raise refused(self.key, f"it cannot be narrowed: {problem}")
        extent, axis = self.local_shape[dim], dim + self.prepend_axis_num
        result = replace(
            self,
            data=None,
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, self.global_shape[axis] // extent * length),
            global_offset=_with(self.global_offset, axis, self.global_offset[axis] // extent * length),
            flattened_range=None,
        )
        if self.flattened_range is None:
            return [replace(result, data=None if self.data is None else self.data.narrow(dim, start, length))]
        row, flat = prod(self.local_shape[1:]), self.flat_elements()
        lo, hi = max(flat.start, start * row), min(flat.stop, (start + length) * row)
        if lo >= hi:
            return []
        data = None if self.data is None else self.data[lo - flat.start : hi - flat.start]
        return [replace(result, data=data, flattened_range=slice(lo - start * row, hi - start * row))]

    def _problem_of_narrowing(self, dim: int, start: int, length: int) -> str | None:
        if not 0 <= dim < len(self.local_shape):
            return f"it has {len(self.local_shape)} axes, but dim is {dim}"
        extent, axis = self.local_shape[dim], dim + self.prepend_axis_num
        if min(start, length) < 0 or start + length > extent:
            return f"{length} elements starting at {start} exceed the extent {extent} of axis {dim}"
        if not extent or self.global_shape[axis] % extent or self.global_offset[axis] % extent:
            return f"the parts are not equal along axis {dim}"
        if self.flattened_range is not None and dim != 0:
            return f"flat data can be narrowed along the first axis only, not along axis {dim}"
        return None

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Set ``data`` to ``init_fn(shape, dtype=..., device=...)`` if it is None."""
        if self.data is not None:
            return
        shape = self.local_shape if self.flattened_range is None else (len(self.flat_elements()),)
        self.data = init_fn(shape, dtype=self.dtype, device=device)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Unpack[_Given],
    ) -> Self:
        """Create a part of a regular grid.

        ``rank_offsets``: (axis, index of the part, number of parts) for each axis that is split. Axis numbers include
        the prepended axes. If an axis has two triples, the last one is used. Raises CheckpointingException for an
        invalid triple.
        """
        if flattened_range is not None:
            raise refused(key, "for a flattened_range, use from_rank_offsets_flat")
        parts = [1] * prepend_axis_num + list(data.shape)
        offset, counts = [0] * len(parts), [1] * len(parts)
        for triple in rank_offsets:
            axis, which, count = _checked(key, triple, len(parts))
            offset[axis], counts[axis] = which * parts[axis], count
        shape, whole = tuple(data.shape), tuple(part * count for part, count in zip(parts, counts, strict=True))
        return cls(
            key,
            data,
            data.dtype,
            shape,
            whole,
            tuple(offset),
            tuple(counts),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Sequence[int],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | None = None,
        **kwargs: Unpack[_GivenFlat],
    ) -> Self:
        """Create the slice ``flattened_range`` of a flattened part of shape ``non_flat_local_shape``. ``data`` is 1-d.

        Everything else is as in `from_rank_offsets`. Raises CheckpointingException if slice and data do not match.
        """
        if flattened_range is None:
            raise refused(key, "it needs a flattened_range; pass one, or use from_rank_offsets")
        if data.ndim != 1:
            raise refused(key, f"flat data must be 1-d, but it has shape {list(data.shape)}")
        whole = torch.empty(tuple(non_flat_local_shape), dtype=data.dtype, device="meta")
        part = cls.from_rank_offsets(key, whole, *rank_offsets, **kwargs)
        return replace(part, data=data, flattened_range=flattened_range)


def _checked(key: str, triple: Sequence[int], dims: int) -> Sequence[int]:
    if len(triple) != 3 or not (0 <= triple[0] < dims and 0 <= triple[1] < triple[2]):
        raise refused(key, f"{triple} is not a rank offset: pass (axis below {dims}, part, number of parts above it)")
    return triple


@dataclass
class ShardedObject(ShardedBase):
    """One shard of an object. A load never reshards objects: each shard loads exactly as it was saved.

    ``global_shape``: the number of shards along each axis. ``global_offset``: the index of this shard. Raises
    CheckpointingException if the two differ in length.
    """

    key: str
    data: Any
    global_shape: Shape
    global_offset: Shape
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    @override
    def validate_metadata_integrity(self) -> None:
        if len(self.global_shape) != len(self.global_offset):
            lengths = f"global_shape {self.global_shape} and global_offset {self.global_offset} differ in length"
            raise refused(self.key, lengths)

    @property
    def unique_key(self) -> str:
        """The key in a checkpoint: ``<key>/shard_<offset>_<shape>``, with numbers joined by dots."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> Self:
        """Create the object, without data, from a `unique_key`. Raises CheckpointingException for any other string."""
        key, separator, rest = unique_key.rpartition("/shard_")
        try:
            offset, shape = (tuple(int(n) for n in part.split(".") if n) for part in rest.split("_"))
        except ValueError:
            separator = ""
            offset = shape = ()
        if not separator:
            raise CheckpointingException(f"{unique_key!r} does not name a shard of an object", key=unique_key)
        if len(shape) + 1 == len(offset):
            shape += (-1,)  # old versions of Megatron truncated the last number
        return cls(key, None, shape, offset, replica_id)


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is converted before a save.

    ``build_fn`` converts it to a sharded state dict, and ``merge_fn`` undoes this. ``build_fn(key, data, replica_id,
    flattened_range)``; the last parameter is optional. The function must depend only on its arguments, because it also
    builds optimizer state, with a different key and different data.
    """

    key: str
    data: torch.Tensor | None
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Nested:
        """Build the sharded state dict.

        Raises CheckpointingException if ``build_fn`` cannot accept a flattened_range.
        """
        if _takes_four(self.build_fn):
            return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)
        if self.flattened_range is not None:
            raise refused(self.key, "its build_fn accepts three arguments, but the flattened_range would be the fourth")
        return self.build_fn(self.key, self.data, self.replica_id)

    def merge(self, built: Nested) -> Any:
        """Merge the loaded values of a built state dict with ``merge_fn``."""
        return self.merge_fn(built)

    def validate_metadata_integrity(self) -> None:
        """Do nothing, because a factory has no metadata before `build`."""


def _takes_four(build_fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(build_fn).bind(None, None, None, None)
    except TypeError:
        return False
    except ValueError:  # functions in C may have no signature
        return True
    return True


class LocalNonpersistentObject:
    """A value that is not saved. A load returns this process's own value for it."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


LocalNonpersitentObject = LocalNonpersistentObject
"""Megatron's former spelling of the name."""


def apply_factories(sharded_state_dict: Nested) -> None:
    """Replace every factory with the state dict that it builds, in place."""
    dict_list_map_inplace(lambda x: x.build() if is_factory(x) else x, sharded_state_dict)


def apply_factory_merges(x1: Nested, x2: Nested, key: Path = ()) -> Any:
    """Undo `apply_factories` in ``x1``, in place, with the factories at the same positions in ``x2``. Return ``x1``.

    Where ``x1`` has a list, ``x2`` may have a dict with the indices as keys. Raises CheckpointingException (a
    ValueError), naming the path, for a position that ``x1`` lacks.
    """
    if is_factory(x2):
        return x2.merge_fn(x1)
    if (
        not isinstance(x1, dict | list)
        or not isinstance(x2, dict | list)
        or (isinstance(x1, dict) and isinstance(x2, list))
    ):
        raise CheckpointingException(
            f"at {key}, the factories are in a {type(x2).__name__}, which does not match {type(x1).__name__}"
        )
    if isinstance(x2, list) and len(x1) != len(x2):
        raise CheckpointingException(
            f"at {key}, the list has length {len(x1)}, but the factories are in a list of length {len(x2)}"
        )
    for k, factories in x2.items() if isinstance(x2, dict) else enumerate(x2):
        there = k in x1 if isinstance(x1, dict) else type(k) is int and 0 <= k < len(x1)
        if not there:
            raise CheckpointingException(f"at {(*key, k)}, a factory has nothing to merge")
        x1[k] = apply_factory_merges(x1[k], factories, (*key, k))
    return x1


log = logging.getLogger(__name__)


def _memory(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Return the address of the tensor's elements and its shape, or () for a tensor without memory."""
    local = None if tensor is None else local_of(tensor)
    return () if local is None or not local.numel() or not has_memory(local) else (local.data_ptr(), *local.shape)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """Map ``id(parameter)`` to its number in the optimizer. A tied parameter has its first number."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(param), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: Nested, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, Any]:
    """Map each parameter's number in the optimizer to its ShardedTensor or factory in the model's state dict.

    Parameters are matched by identity, so the state dict must hold the parameters themselves (``keep_vars=True``), or
    the local part of a DTensor. Logs a warning if no parameter is found.
    """
    params = list(optim_params_iter)
    numbers = get_optim_param_to_id_map(params)
    # Each call of to_local creates a new tensor with the same memory.
    memories = {at: number for number, param in enumerate(params) if is_dtensor(param) and (at := _memory(param))}
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    by_number = {}
    for value in nested_values(sharded):
        number = numbers.get(id(value.data), memories.get(_memory(value.data)))
        if number is not None:
            by_number[number] = value
    if not by_number:
        log.warning(
            "no tensor of the model's state dict is a parameter of the optimizer; create the state dict with "
            "keep_vars=True, and "
            "transform parameters only with a ShardedTensorFactory"
        )
    return by_number


def make_sharded_optimizer_tensor(model_param: Any, optim_param: torch.Tensor, prefix: str) -> Any:
    """Return a copy of ``model_param`` with the key ``<prefix>.<its key>`` and the data of ``optim_param``.

    Raises CheckpointingException if the shape of ``optim_param`` differs from that of the parameter.
    """
    data, key = local_of(optim_param), f"{prefix}.{model_param.key}"
    if is_factory(model_param):
        return replace(model_param, key=key, data=data)
    if getattr(model_param, "flattened_range", None) is None and tuple(data.shape) != tuple(model_param.local_shape):
        raise CheckpointingException(
            f"{key!r} has shape {list(data.shape)}, but the parameter has shape {list(model_param.local_shape)}; "
            "put state of "
            "a different shape, such as 'step', into exclude_keys",
            key=key,
        )
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any], id_to_sharded_param_map: Mapping[int, Any], exclude_keys: Collection[str] = ()
) -> None:
    """Convert an optimizer's state dict to a sharded one, in place.

    The state ``name`` of a parameter gets the key ``optimizer.state.<name>.<key of the parameter>``, unless it is in
    ``exclude_keys``. The groups are replaced by copies whose ``params`` are not saved. Raises CheckpointingException (a
    ValueError) for the state of a parameter that the map lacks.
    """
    sharded: dict[Any, dict[str, Any]] = {}
    for number, state in optim_state_dict["state"].items():
        wanted = {name: value for name, value in state.items() if name not in exclude_keys}
        if wanted and number not in id_to_sharded_param_map:
            raise CheckpointingException(f"parameter {number} of the optimizer is not a sharded parameter of the model")
        sharded[number] = {
            name: make_sharded_optimizer_tensor(id_to_sharded_param_map[number], value, f"optimizer.state.{name}")
            for name, value in wanted.items()
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"], optim_state_dict["state"] = groups, sharded
