"""The part of a parameter that this process holds, and the same part of optimizer state with the parameter's shape."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from casckpt.format.sections.index import Entry
from casckpt.format.tree import Wrapper
from casckpt.frontends.training_state.flat import FlatPart
from casckpt.tensors.dtensors import described_like, from_local, is_dtensor, local_of
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.kinds import is_wrapper, kind_of
from casckpt.tensors.memory import new_empty
from casckpt.tensors.objects import Archived
from casckpt.tensors.shards import inner_names
from casckpt.tensors.values import Shard
from casckpt.tensors.wrappers import blank, opened


@dataclass(frozen=True)
class Holding:
    """A parameter on this process: whole, a DTensor, or the ``part`` of an FSDP flat parameter.

    ``name``: the name in messages.
    """

    name: str
    parameter: torch.Tensor
    part: FlatPart | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter.

        Under FSDP, it is the dtype of the part, because mixed precision may have changed the parameter's dtype.
        """
        return self.parameter.dtype if self.part is None else self.part.data.dtype

    @property
    def whole(self) -> Any:
        """The parameter, or the `Shard` of it that is the part."""
        return self.parameter if self.part is None else self.part.shard(self.part.data)

    @property
    def is_nothing(self) -> bool:
        """Whether this rank has no elements of the parameter, and therefore neither gradient nor optimizer state.

        FSDP2 does create a gradient and optimizer state in that case, but FSDP and Megatron-FSDP do not.
        """
        if self.part is not None:
            return self.part.lo == self.part.hi
        return hasattr(self.parameter, "_megatron_fsdp_model") and local_of(self.parameter).numel() == 0

    # saving

    def as_saved(self, value: Any) -> Any:
        """Return nested optimizer state to save. Tensors with the parameter's shape are sharded like the parameter."""
        if isinstance(value, torch.Tensor):
            return self._tensor_as_saved(value)
        if isinstance(value, Mapping):
            changed = copy.copy(value) if isinstance(value, dict) else dict(value)
            for key, child in value.items():
                changed[key] = self.as_saved(child)
            return changed
        if type(value) in (list, tuple):
            return type(value)([_alone(self.as_saved(child)) for child in value])
        return value

    def _tensor_as_saved(self, value: torch.Tensor) -> Any:
        shape = tuple(value.shape)
        if self.part is not None:
            if self.part.has_form(shape):
                return self.part.shard(value)
        elif not is_dtensor(self.parameter):
            if not is_dtensor(value) and inner_names(value) and not (is_wrapper(value) and kind_of(value).rebuild):
                return Archived(value)
            alike = shape == tuple(self.parameter.shape) and shape and not is_dtensor(value)
            return Shard(value, shape, replicated=True) if alike else value
        return described_like(value, self.parameter)

    # loading

    def destination(
        self,
        entry: Entry,
        there: torch.Tensor | None,
        device: torch.device,
        taken: set[int],
        *,
        added: bool,
        plain: bool = False,
    ) -> Any:
        """Return the tensor that a load fills with a state tensor: ``there`` if it matches, else a new tensor.

        ``taken``: the memory addresses that other state uses, because in some optimizers, parameters share one
        ``step``. ``added``: whether a user, not the optimizer, created the state. ``plain``: whether it was saved as a
        plain tensor.
        """
        part, parameter = self.part, self.parameter
        if part is not None and entry.shape == part.shape:
            fits = there is not None and part.has_form(tuple(there.shape)) and _fits(there, entry, taken)
            return part.shard(there if fits and there is not None else _new_like(part.data, entry))
        if there is not None and tuple(there.shape) == entry.shape and _fits(there, entry, taken):
            return there
        alike, is_own = tuple(parameter.shape) == entry.shape, parameter.device == device
        if is_dtensor(parameter):
            is_own = not (plain or _is_plain(there, entry, parameter, added=added))
            if is_own and not alike:  # replicated
                return parameter.new_empty(entry.shape, dtype=torch_dtype(entry.dtype), requires_grad=False)
        return _new_like(parameter, entry) if is_own and alike else new_empty(entry, device)

    def wrapper(
        self, key: str, node: Wrapper, entries: Mapping[str, Entry], there: torch.Tensor | None, *, is_plain: bool
    ) -> Any:
        """Return the tensor that a load fills with a stored wrapper: ``there``, or else a new one.

        The registered function for its kind creates a new one for this rank's part of the parameter. If a wrapper of
        this kind cannot be cut for that part, or if ``is_plain`` is set, the result is a plain tensor, into which only
        a load with ``cast`` is possible. Raises Unsupported if no function is registered.
        """
        part, parameter = self.part, self.parameter
        if there is not None:
            return there if part is None else part.shard(there)
        is_sharded = is_dtensor(parameter) or part is not None
        local = local_of(parameter) if part is None else part.data
        new = None
        if node.in_parts and not is_plain:
            mine = opened(key, parameter if part is None else part.shard(part.data), apart=True)
            for name in mine.parts if mine is not None else ():
                below = node.nodes.get(name)
                if isinstance(below, Wrapper):
                    new = blank(f"{key}.{name}", below, entries, tuple(local.shape), local.device)
        elif not is_plain:
            new = blank(key, node, entries, tuple(local.shape) if is_sharded else None, local.device)
        new = torch.empty_like(local, requires_grad=False) if new is None else new
        if part is not None:
            return part.shard(new)
        return from_local(new, parameter) if is_dtensor(parameter) else new


def _alone(value: Any) -> Any:
    """Put a `Shard` into its own list, because a list of several shards stands for the pieces of one tensor."""
    return [value] if isinstance(value, Shard) else value


def apart(value: Any) -> Any:
    """Return a template for `Store.load` in which each shard in a list is a separate tensor."""
    if isinstance(value, dict):
        for key, child in value.items():
            value[key] = apart(child)
        return value
    if type(value) in (list, tuple):
        return type(value)([_alone(apart(child)) for child in value])
    return value


def unwrapped(value: Any, device: torch.device | None = None) -> Any:
    """Convert a filled template to the state that an optimizer accepts.

    Tensors that were saved as `Archived` are moved to ``device``.
    """
    if isinstance(value, Shard):
        return value.data
    if isinstance(value, dict):
        for key, child in value.items():
            value[key] = unwrapped(child, device)
        return value
    if isinstance(value, torch.Tensor) and device is not None and not is_dtensor(value) and inner_names(value):
        return value if value.device == device else value.to(device)
    if type(value) is list and len(value) == 1 and isinstance(value[0], Shard):
        return value[0].data
    if type(value) in (list, tuple):
        return type(value)([unwrapped(child, device) for child in value])
    return value


def _new_like(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=torch_dtype(entry.dtype), requires_grad=False)


def _fits(there: torch.Tensor, entry: Entry, taken: set[int]) -> bool:
    here = local_of(there)
    alike = here.dtype == torch_dtype(entry.dtype) and here.layout is torch.strided and not is_wrapper(here)
    # an optimizer cannot update a tensor that was created in inference mode
    return alike and not here.is_inference() and here.is_contiguous() and here.data_ptr() not in taken


def _is_plain(there: torch.Tensor | None, entry: Entry, parameter: torch.Tensor, *, added: bool) -> bool:
    """Return whether a DTensor parameter's state is a plain tensor: it is one now, or a load creates it as one."""
    if there is not None:
        return not is_dtensor(there)
    return (added or entry.shape == ()) and entry.shape != tuple(parameter.shape)
