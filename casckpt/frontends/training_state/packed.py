"""Loads the 4-bit and 8-bit weights of bitsandbytes in place, each together with its statistics.

The state_dict of a 4-bit layer also has the weight's statistics, such as ``weight.absmax``. Its load_state_dict does
not read them. Two of the statistics are only copies of values that the weight uses: the table for nested statistics,
and a tensor with a JSON string of all values that are not tensors. The load_state_dict of an 8-bit layer cannot read
its statistics, ``SCB``, once the layer has been used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from casckpt.errors import Refused
from casckpt.format.forms import differences
from casckpt.format.sections.index import Entry
from casckpt.loading.fit import PACKED
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.untrusted import misread

MAX_JSON = 1 << 16
"""The maximum size, in bytes, of a weight's JSON string that a load reads."""

_OFFSET = "nested_offset"
"""The only field of the JSON string that depends on the values of the weight."""


@dataclass(frozen=True)
class PackedWeight:
    """A 4-bit or 8-bit weight.

    ``values``: the weight and its statistics, by plain name. ``fields``: the name of the tensor with the JSON of a
    4-bit weight.
    """

    name: str
    values: Mapping[str, Any]
    fields: str = ""

    def differences(self, there: Mapping[str, Entry], fields: torch.Tensor | None) -> Iterator[str]:
        """Yield the differences from a saved weight. Raises Refused for invalid JSON.

        ``there``: the saved entries, by plain name. ``fields``: the saved JSON.
        """
        if fields is not None:
            here, saved = _decoded(self.values[self.fields], self.fields), _decoded(fields, self.fields)
            yield from differences(here | {_OFFSET: _OFFSET in here}, saved | {_OFFSET: _OFFSET in saved})
        for name, value in self.values.items():
            entry, own = there.get(name), (dtype_name(value.dtype), tuple(value.shape))
            if entry is None:
                yield f"{name!r} is missing"
            elif own != (entry.dtype, entry.shape) and (name != self.fields or fields is None):
                yield f"{name!r} is {own[0]} of shape {list(own[1])} here, but {entry.dtype} of shape {[*entry.shape]}"

    def install(self, values: Mapping[str, Any]) -> None:
        """Replace the two values that a state_dict has only as copies. ``values``: the loaded values, by name."""
        state = getattr(self.values[self.name], "quant_state", None)
        if state is not None and state.nested:
            state.state2.code = values[f"{self.name}.nested_quant_map"]
            state.offset = torch.full_like(state.offset, _decoded(values[self.fields], self.fields)[_OFFSET])


def packed_weights(state: Mapping[str, Any], unread: dict[str, list[str]]) -> list[PackedWeight]:
    """Return the 4-bit and 8-bit weights. Remove their statistics from ``unread``, the result of `passed_by`."""
    packed = []
    for scale in [name for name in state if name.rpartition(".")[2] == "SCB"]:
        name = f"{scale.removesuffix('SCB')}weight"
        if hasattr(state.get(name), "SCB"):
            packed.append(PackedWeight(name, {name: state[name], scale: state[scale]}))
    for fields in [name for name in unread if PACKED in name]:
        name = fields.partition(PACKED)[0]
        if getattr(state.get(name), "quant_state", None) is not None:
            values = {key: state[key] for key in unread[fields] if key == name or key.startswith(f"{name}.")}
            packed.append(PackedWeight(name, values, fields))
            for key in values:
                unread.pop(key, None)
    return packed


def _decoded(fields: torch.Tensor, name: str) -> dict[str, Any]:
    with misread(lambda why: Refused(f"{name!r} is not the JSON of a 4-bit weight: {why}", key=name)):
        decoded: dict[str, Any] = json.loads(bytes(fields.cpu().numpy()))
        offset = decoded.get(_OFFSET, 0.0)
        if type(offset) is not float or not math.isfinite(offset):
            raise ValueError(f"{_OFFSET} is not a finite number")
    return decoded
