"""The train state: what each rank needs beside the model and the optimizer to resume exactly."""

from __future__ import annotations

import logging
import random
from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from casckpt.base.digest import hex_digest
from casckpt.errors import InvalidInput, MissingKey
from casckpt.frontends.training_state.plain_state import check_kind, check_part, draws, fill, plain_state
from casckpt.ranks.ranks import this_rank

log = logging.getLogger("casckpt")

RNG = "rng"


def rng_state() -> dict[str, Any]:
    """Return the states of the random generators of this process: Python's, numpy's, torch's and its CUDA device's."""
    state: dict[str, Any] = {
        "rank": this_rank(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is what libraries draw from
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's own
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the random generators to ``state``, which `rng_state` returned.

    If another rank took the state, because the job has more ranks now, the state and the number of this rank are the
    seed of the generators. So ranks draw different numbers, and the same numbers in each resume. Raises MissingKey.
    """
    missing = [name for name in ("rank", "python", "numpy", "torch") if name not in state]
    if missing:
        raise MissingKey(f"the state of random generators lacks {missing[0]!r}; give what rng_state made", keys=(RNG,))
    if state["rank"] != this_rank():
        _seed(int(hex_digest(state["torch"].numpy().tobytes() + b"%d" % this_rank())[:16], 16))
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - see rng_state
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - see rng_state
    torch.manual_seed(seed)


class TrainState(UserDict[str, Any]):
    """The random generators of this rank, and ``parts`` by name.

    ``parts``: objects with state_dict and load_state_dict (schedulers, data loaders, samplers), random generators of
    torch and numpy, and plain data, which you read and set as ``train["epoch"]``. A load fills dicts, lists, arrays and
    tensors in place. ``rng``: include the generators of `rng_state`. Raises InvalidInput for a DataLoader of torch,
    which cannot save its position.
    """

    holds_rng = True

    def __init__(self, *, rng: bool = True, **parts: Any) -> None:  # of any type: what is to be saved
        self._rng = rng
        super().__init__(parts)

    def __setitem__(self, name: str, value: Any) -> None:
        if name == RNG and self._rng:
            raise InvalidInput(f"{RNG!r} is where a TrainState has the random generators; give another name")
        check_part(value, name)
        super().__setitem__(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the current state of all parts."""
        state = {name: plain_state(part, name) for name, part in self.items()}
        return {RNG: rng_state(), **state} if self._rng else state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> list[str]:
        """Set all parts, the random generators last. Return the names of missing parts, which stay as they are.

        ``strict``: raise MissingKey for a missing part, before anything changes. The log names other saved parts.
        """
        beside = [name for name in state if name not in self and name != RNG]
        if beside:
            log.warning("the saved train state also has %s, which is left out", ", ".join(map(repr, beside)))
        return self.set_parts(state, strict=strict)

    def set_parts(self, state: Mapping[str, Any], *, strict: bool) -> list[str]:
        """Set the parts like `load_state_dict`, without a line in the log."""
        missing = self._missing(state, strict=strict)
        for name in sorted((name for name in self if name not in missing), key=lambda name: draws(self[name])):
            self[name] = fill(self[name], state[name], name)
        if self._rng and RNG not in missing:
            restore_rng(state[RNG])
        return missing

    def _missing(self, saved: Collection[str], *, strict: bool) -> list[str]:
        missing = [name for name in (*self, *((RNG,) if self._rng else ())) if name not in saved]
        if missing and strict:
            without = " (rng=False: without the random generators)" if RNG in missing else ""
            raise MissingKey(
                f"the saved train state has no {missing[0]!r}, but {', '.join(map(repr, saved)) or 'nothing'}; leave "
                f"that part out of the TrainState{without}, or load another checkpoint",
                keys=tuple(missing),
            )
        return missing


def as_parts(train_state: Any) -> TrainState | None:
    """Return the parts of a `TrainState` or a mapping; None for None and for an object with load_state_dict."""
    if train_state is None or isinstance(train_state, TrainState) or hasattr(train_state, "load_state_dict"):
        return train_state if isinstance(train_state, TrainState) else None
    parts = TrainState(rng=False)
    parts.data = train_state
    return parts


def check_parts(
    train_state: Any, saved: Mapping[Any, Any], at: str, *, strict: bool, read: Callable[[str], Any]
) -> None:
    """Raise the errors that setting ``train_state`` would raise for missing parts and for parts of another kind.

    ``saved``: the tree of the saved parts, which are at the key ``at``. ``read``: reads the object at a key.
    """
    parts = as_parts(train_state)
    if parts is not None:
        for name in sorted(parts.keys() - parts._missing(saved, strict=strict)):
            check_kind(parts[name], saved[name], f"{at}.{name}", read)
