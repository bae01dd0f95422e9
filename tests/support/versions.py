"""Versions of states. Each version differs slightly from the previous one."""

from __future__ import annotations

import random
from typing import Any

import torch

from casckpt.store.store import Store
from tests.support.coded import chain, code
from tests.support.tensors import bytes_of, raw

STEPS = 4
_LOW_BITS = bytes(byte & 15 for byte in range(256))


def made_of(data: bytearray, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).view(like.dtype).view(like.shape)


def changed(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the tensor with one bit changed in a few of its bytes."""
    data, draw = bytearray(bytes_of(tensor)), random.Random(seed)
    for _ in range(1 + len(data) // 500):
        data[draw.randrange(len(data))] ^= 1
    return made_of(data, tensor)


def versions(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    found = [tensor]
    for step in range(1, count):
        found.append(changed(found[-1], step))
    return found


def smooth(shape: tuple[int, ...], name: str = "int32") -> torch.Tensor:
    """Return data that can be compressed by planes."""
    data = raw(name, shape, 1)
    return made_of(bytearray(bytes_of(data).translate(_LOW_BITS)), data)


def states(count: int = STEPS) -> list[dict[str, Any]]:
    """Return versions of several tensors: two equal ones, a constant one, one without whole cells, and an object's
    buffer."""
    w, odd = (versions(smooth((rows, 256)), count) for rows in (90, 41))
    same = versions(smooth((64, 64)), 1)[0]
    return [
        {"m": {"w": w[n], "tied": w[n].clone(), "odd": odd[n]}, "same": same, "o": bytes(9000 + n), "n": n}
        for n in range(count)
    ]


def saved(store: Store, found: list[dict[str, Any]], *, planes: bool = False) -> Store:
    """Return a store with these versions, each encoded against the previous one.

    ``planes``: the first version is encoded without a base.
    """
    for step, state in enumerate(found):
        store.save(state, step=step, threads=1)  # cells are stored in order, so that reads span the same gaps each time
    if planes:
        code(store, "default@0")
    chain(store, [f"default@{step}" for step in range(len(found))])
    return store
