"""Hostile forms and inner tensors of wrappers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import strategies as st

from casckpt.errors import InvalidInput, Refused
from casckpt.format.forms import Form, encode_form
from casckpt.tensors.wrappers import Opened, opened, rebuilt

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
TENSORS = st.sampled_from([
    torch.zeros(0), torch.zeros(()), torch.zeros(2, 2), torch.full((2,), 2**62), torch.tensor([-1, 7]),
    torch.zeros(3, dtype=torch.uint8), torch.ones(4, dtype=torch.bool), torch.zeros(1, dtype=torch.complex64),
])  # fmt: skip


def changed(form: Any, draw: st.DataObject) -> Any:
    """Return JSON in which one value at any depth was replaced, removed or added."""
    form = copy.deepcopy(form)
    at = form
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw.draw(st.sampled_from(keys)) if keys else None
        if key is not None and isinstance(at[key], dict | list) and draw.draw(st.booleans()):
            at = at[key]
            continue
        if key is not None and draw.draw(st.integers(0, 3)) == 0:
            del at[key]
        elif isinstance(at, dict):
            at[draw.draw(st.text(max_size=5)) if key is None else key] = draw.draw(VALUES)
        elif key is not None:
            at[key] = draw.draw(VALUES)
        return form


def check_rebuilt(found: Opened, draw: st.DataObject) -> None:
    """Change the form or an inner tensor. The result is either a wrapper with this form, or a refusal."""
    form: Form = changed(found.form, draw) if draw.draw(st.booleans()) else found.form
    parts = dict(found.parts)
    if draw.draw(st.booleans()):
        parts[draw.draw(st.sampled_from(sorted(parts)))] = draw.draw(TENSORS)
    try:
        made = rebuilt("w", form, parts)
    except (Refused, InvalidInput):  # nothing else may be raised
        return
    again = opened("w", made)
    assert again is not None
    assert encode_form(again.form) == encode_form(form)
