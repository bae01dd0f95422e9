"""The train state: what a rank needs for an exact resume in addition to the model and the optimizer."""

from __future__ import annotations

import gc
import logging
import random
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from casckpt.base.digest import hex_digest
from casckpt.base.text import listed, warn_once
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.format.tree import TENSOR
from casckpt.frontends.training_state.optimizer import tensors_below
from casckpt.loading.fit import memory_of
from casckpt.ranks.ranks import this_rank
from casckpt.tensors.state import GENERATORS, holds_object, is_object

_NUMPYS = (np.random.Generator, np.random.RandomState)
"""Random generators of numpy. Their states are plain data, which is stored unchanged."""
_ITERATORS = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw a new order for each epoch."""


def plain_state(value: Any, key: str) -> Any:
    """Return ``value`` with each object replaced with its state; ``value`` itself if it contains no objects.

    The function does not copy tensors. Raises InvalidInput, which names the key, for a DataLoader that cannot save its
    position.
    """
    if is_object(value):
        check_part(value, key)
        name = _methods(value)[0]
        with noted(f"raised in {name} of {key!r}"):
            state = getattr(value, name)()
        if state == {} and isinstance(value, nn.Module):
            warn_once(
                log,
                "%r, a %s, has an empty state_dict, so nothing of it is restored. Metrics of torchmetrics have one "
                "after persistent(True)", key.rpartition(".")[2], type(value).__name__,
            )  # fmt: skip
        return state
    if not holds_object(value):
        return value
    if isinstance(value, Mapping):
        return {name: plain_state(child, f"{key}.{name}") for name, child in value.items()}
    return type(value)([plain_state(child, f"{key}.{number}") for number, child in enumerate(value)])


def check_part(value: Any, key: str) -> None:
    """Raise InvalidInput for a DataLoader that cannot save its position."""
    if isinstance(value, DataLoader) and not hasattr(value, "state_dict"):
        raise InvalidInput(
            f"{key!r} is a torch DataLoader, which cannot save its position. Pass a StatefulDataLoader from "
            "torchdata, which accepts the same arguments, or leave it out",
            key=key,
        )


def warn_of_data(train_state: Any) -> None:
    """Log a warning if a DataLoader that this process iterates over cannot continue by the train state.

    The search for iterators takes about 20 ms.
    """
    if not isinstance(train_state, Mapping | None):  # an object with a state of its own
        return
    data = [one for one in (train_state or {}).values() if isinstance(one, DataLoader | Sampler | Dataset)]
    for found in gc.get_referrers(*_ITERATORS):
        with suppress(AttributeError):  # they are private in torch
            _warn_of_iterator(found, data)


def _warn_of_iterator(found: Any, data: Collection[Any]) -> None:
    if type(found) not in _ITERATORS or not found._num_yielded:
        return
    sampler: Any = getattr(found._index_sampler, "sampler", None)
    if found._num_workers and any(found._dataset is one for one in data):
        log.warning(
            "the train state has a dataset that the workers of a DataLoader copy, so its position in this process "
            "stays that of the start: pass a StatefulDataLoader from torchdata instead, or use num_workers=0"
        )
    elif not data and type(sampler) in _DRAWN and sampler.generator is None and found._num_yielded < len(found):
        log.warning(
            "a DataLoader is at batch %d of %d, and the train state has neither this position nor the shuffled "
            "order: after a resume, a new order repeats some samples of the epoch and skips others. Pass a "
            "StatefulDataLoader from torchdata in the train state, or save at the end of epochs",
            found._num_yielded, len(found),
        )  # fmt: skip


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def _methods(value: Any) -> tuple[str, str]:
    """Return the names of the methods that get and set the state of ``value``."""
    if isinstance(value, random.Random):
        return "getstate", "setstate"
    return ("get_state", "set_state") if isinstance(value, torch.Generator) else ("state_dict", "load_state_dict")


def draws(value: Any) -> bool:
    """Return whether ``value`` is or contains random generators.

    They are loaded last, because other objects may draw random numbers.
    """
    return isinstance(value, GENERATORS + _NUMPYS) or getattr(value, "holds_rng", False)


def fill(value: Any, state: Any, key: str) -> Any:
    """Fill ``value`` in place with ``state``. Return ``value``, or ``state`` if that is not possible.

    Objects, generators, tensors, arrays, dicts and lists keep their identity. Raises InvalidInput for an object
    without load_state_dict, MissingKey for an object in a container that was saved without it, and Mismatch for a list
    that contains objects and has a different length. Errors from an object have a note with its key.
    """
    if is_object(value):
        _load_into(value, state, key)
        return value
    if holds_object(value):
        objects_within(value, state, key)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _copied(value, state, key)
    if isinstance(value, MutableMapping) and isinstance(state, Mapping):
        if lost := [name for name in value if name not in state]:
            log.warning("%r loses %s, which the checkpoint lacks: set such values after the load", key, listed(lost))
        new = {name: fill(value.get(name), child, f"{key}.{name}") for name, child in state.items()}
        value.clear()
        value.update(new)  # update() of a Counter adds, so it must be empty
    elif isinstance(value, list | deque | tuple) and isinstance(state, list | deque | tuple):
        kept = [*value, *[None] * len(state)]
        items = [fill(kept[number], child, f"{key}.{number}") for number, child in enumerate(state)]
        if isinstance(value, tuple):
            return type(state)(items)
        value.clear()
        value.extend(items)
    elif isinstance(value, np.random.RandomState) and isinstance(state, np.random.RandomState):
        value.set_state(state.get_state(legacy=False))
    elif isinstance(value, np.random.Generator) and type(value.bit_generator) is type(
        getattr(state, "bit_generator", None)
    ):
        value.bit_generator.state = state.bit_generator.state
    else:
        return state
    return value


def objects_within(value: Any, state: Any, key: str) -> dict[Any, Any]:
    """Return the items of a container that are or contain objects. ``state``: the saved container.

    Raises Mismatch if ``state`` is a different kind of container, or a list of a different length. Raises MissingKey
    if it lacks such an item.
    """
    within = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    alike = isinstance(state, list | tuple) and len(value) == len(state)
    if not (isinstance(state, Mapping) if isinstance(value, Mapping) else alike):
        raise Mismatch(
            f"{key!r} is a {type(value).__name__} with objects, of length {len(value)}, but the checkpoint has "
            "a different container there; pass as many items as were saved, or leave it out",
            key=key,
        )
    objects = {name: child for name, child in within.items() if holds_object([child])}
    lacking = [name for name in objects if isinstance(state, Mapping) and name not in state]
    if lacking:
        raise MissingKey(
            f"{key!r} was saved without {lacking[0]!r}; leave that item out", keys=(f"{key}.{lacking[0]}",)
        )
    return objects


def check_kind(value: Any, saved: Any, key: str, read: Callable[[str], Any] | None) -> None:
    """Raise Mismatch or MissingKey if ``value`` is or contains an object that ``saved`` does not match.

    ``saved``: a node of the checkpoint's tree, or, if ``read`` is None, the value itself.
    """
    if not holds_object([value]):
        return
    if read is not None and isinstance(saved, int):
        saved, read = torch.empty(0, device="cpu") if saved == TENSOR else read(key), None
    if not is_object(value):
        for name, child in objects_within(value, saved, key).items():
            check_kind(child, saved[name], f"{key}.{name}", read)
        return
    is_dict = isinstance(saved, Mapping) and not isinstance(value, GENERATORS)
    if not is_dict and _shape(saved) != _shape(plain_state(value, key)):
        raise Mismatch(
            f"{key!r} is a {type(value).__name__}, but a {type(saved).__name__} in the checkpoint; pass "
            "the type that was saved, or leave this part out of the TrainState",
            key=key,
        )


def _shape(value: Any) -> list[bool]:
    return [isinstance(value, kind) for kind in (Mapping, list | tuple, torch.Tensor)]


def _load_into(value: Any, state: Any, key: str) -> None:
    load = getattr(value, _methods(value)[1], None)
    if load is None:
        kind = type(value).__name__
        raise InvalidInput(f"{key!r} cannot be loaded: a {kind} has a state_dict but no load_state_dict", key=key)
    if isinstance(state, Mapping) and not state and plain_state(value, key):
        log.warning("%r stays as it is: the checkpoint has an empty state for it, as for an object that was off", key)
        return
    with noted(f"raised in {_methods(value)[1]} of {key!r}; earlier parts are already loaded, so repeat the load"):
        load(state)


def _copied(value: Any, state: Any, key: str) -> Any:
    """Copy ``state`` into a tensor or array, and return that. If shape, dtype or type differ, return ``state``."""
    alike = isinstance(state, torch.Tensor if isinstance(value, torch.Tensor) else np.ndarray)
    if not alike or value.shape != state.shape or value.dtype != state.dtype:
        log.warning(
            "%r has a different shape or dtype in the checkpoint: it is replaced instead of filled in place", key
        )
        return state
    with torch.no_grad():
        value[...] = state
    return value


log = logging.getLogger("casckpt")

RNG = "rng"


def rng_state() -> dict[str, Any]:
    """Return the states of this process's random generators: those of Python, numpy, torch and the CUDA device."""
    state: dict[str, Any] = {
        "rank": this_rank(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - libraries draw from the global generator
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's own
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the random generators to ``state``, a result of `rng_state`.

    If the job now has more ranks, the state may come from a different rank. In that case, the generators are seeded
    with that state and this rank's number. Ranks then draw different numbers, and each resume draws the same numbers.
    Raises MissingKey.
    """
    missing = [name for name in ("rank", "python", "numpy", "torch") if name not in state]
    if missing:
        raise MissingKey(
            f"the state of the random number generators lacks {missing[0]!r}; pass the result of rng_state", keys=(RNG,)
        )
    if state["rank"] != this_rank():
        seed = int(hex_digest(state["torch"].numpy().tobytes() + b"%d" % this_rank())[:16], 16)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # noqa: NPY002 - see rng_state
        torch.manual_seed(seed)
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - see rng_state
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class TrainState(UserDict[str, Any]):
    """This rank's random generators, and ``parts`` by name.

    ``parts``: objects with state_dict and load_state_dict (schedulers, data loaders, samplers), random generators of
    torch and numpy, and plain data. Read and set plain data with expressions such as ``train["epoch"]``. A load fills
    dicts, lists, arrays and tensors in place. ``rng``: include the generators of `rng_state`. Raises InvalidInput for
    a torch DataLoader, which cannot save its position.
    """

    holds_rng = True

    def __init__(self, *, rng: bool = True, **parts: Any) -> None:  # parts have any type
        if not isinstance(rng, bool):
            raise InvalidInput(
                f"rng says whether to include the random number generators, and cannot be a {type(rng).__name__}; "
                "choose a different name for your part"
            )
        self._rng = rng
        super().__init__(parts)

    def __setitem__(self, name: str, value: Any) -> None:
        if name == RNG and self._rng:
            raise InvalidInput(
                f"{RNG!r} is reserved for the random number generators of a TrainState; choose a different name"
            )
        check_part(value, name)
        super().__setitem__(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the current state of all parts."""
        state = {name: plain_state(part, name) for name, part in self.items()}
        return {RNG: rng_state(), **state} if self._rng else state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> list[str]:
        """Set all parts, with the random generators last. Return the names of missing parts, which are left unchanged.

        ``strict``: raise MissingKey for a missing part before anything changes. The log lists saved parts that this
        object lacks.
        """
        beside = [name for name in state if name not in self and name != RNG]
        if beside:
            log.warning("the saved train state also has %s, which is skipped", ", ".join(map(repr, beside)))
        return self.set_parts(state, strict=strict)

    def set_parts(self, state: Mapping[str, Any], *, strict: bool) -> list[str]:
        """Set the parts like `load_state_dict`, but without logging."""
        missing = self._missing(state, strict=strict)
        names = sorted((name for name in self if name not in missing), key=lambda name: draws(self[name]))
        for number, name in enumerate(names):
            with noted(f"parts of the train state that are loaded by then: {listed(names[:number]) or 'none'}"):
                self[name] = fill(self[name], state[name], name)
        if self._rng and RNG not in missing:
            restore_rng(state[RNG])
        return missing

    def _missing(self, saved: Collection[str], *, strict: bool) -> list[str]:
        missing = [name for name in (*self, *((RNG,) if self._rng else ())) if name not in saved]
        if missing and strict:
            without = " (rng=False leaves out the random number generators)" if RNG in missing else ""
            raise MissingKey(
                f"the saved train state has no {missing[0]!r}; it has {', '.join(map(repr, saved)) or 'no parts'}. "
                f"Leave this part out of the TrainState{without}, or load a different checkpoint",
                keys=tuple(missing),
            )
        return missing


def as_parts(train_state: Any) -> TrainState | None:
    """Return the parts of a `TrainState` or mapping; None for None and for other objects with load_state_dict."""
    if train_state is None or isinstance(train_state, TrainState) or hasattr(train_state, "load_state_dict"):
        return train_state if isinstance(train_state, TrainState) else None
    parts = TrainState(rng=False)
    parts.data = train_state
    return parts


def check_apart(train_state: Any, state: Mapping[str, Any], model: Any, at: str) -> None:
    """Raise Mismatch if ``state`` would overwrite the model, whose memory is part of the train state.

    ``at``: the key of the train state.
    """
    modules = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else [model]
    tensors = (one for each in modules if isinstance(each, nn.Module) for one in (*each.parameters(), *each.buffers()))
    memory, saved = set(map(memory_of, tensors)), dict(tensors_below(state, at))
    for key, value in tensors_below(train_state, at):
        if memory_of(value) in memory and key in saved and not torch.equal(value, saved[key].to(value.device)):
            raise Mismatch(
                f"{key!r} is a tensor of the model, and has a different value in the checkpoint, with which the load "
                "would overwrite the model: pass a copy, such as copy.deepcopy(model.state_dict())",
                key=key,
            )


def check_fillable(train_state: Any) -> None:
    """Raise InvalidInput for a train state that a load cannot fill."""
    if not isinstance(train_state, MutableMapping | None) and not hasattr(train_state, "load_state_dict"):
        kind = type(train_state).__name__
        raise InvalidInput(f"a {kind} cannot be loaded into: pass a TrainState or a dict, or use the result of load")


def check_parts(
    train_state: Any, saved: Mapping[Any, Any], at: str, *, strict: bool, read: Callable[[str], Any]
) -> None:
    """Raise the errors that setting ``train_state`` would raise for missing parts and for parts of the wrong type.

    ``saved``: the tree of the saved parts at the key ``at``. ``read``: a function that reads the object at a key.
    """
    parts = as_parts(train_state)
    if parts is not None:
        for name in sorted(parts.keys() - parts._missing(saved, strict=strict)):
            check_kind(parts[name], saved[name], f"{at}.{name}", read)
