"""Whole weights and optimizer state out of a checkpoint, without a model: each tensor once, in new memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.ranks import this_rank
from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.manifest import Entry
from casckpt.format.tree import Element
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.model import is_extra_state
from casckpt.frontends.training_state.optimizer import by_number
from casckpt.frontends.training_state.stored import STATE, Stored, is_step, new_tensor, steps_on_cpu


def unshard_model_state(
    store: AnyStore,
    ref: str | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    keys: Sequence[str] | None = None,
    rank0_only: bool = False,
    no_dist: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The model's state_dict, ``{name: tensor}``, in new tensors on ``device``.

    ``keys``: fnmatch patterns on the names (or, where a pattern matches none of them, on whole keys of the checkpoint).
    ``rank0_only``: ``{}`` on every other rank. ``no_dist``: no rank waits for another. ``options``: as in `Store.read`.

    Raises MissingKey if nothing matches, NotFound, Damaged and StorageError as `Store.read` does, InvalidInput (a
    ValueError) for ``no_dist`` with ``rank0_only`` off rank 0.
    """
    if not _is_wanted(rank0_only, no_dist):
        return {}
    opened = as_store(store)
    stored = Stored(opened, opened.get(ref))
    names = stored.keys_below("model")
    if not names:
        raise MissingKey(f"{stored.where} holds no model; `casckpt show` lists its keys", keys=("model",))
    patterns = [_pattern(pattern, names, stored.where) for pattern in (["*"] if keys is None else keys)]
    state = opened.read(stored.checkpoint, keys=patterns, device=device, **options)
    found: OrderedDict[str, Any] = OrderedDict()
    for key, value in _named_values(state, ""):
        if key.startswith("model."):
            found[key.removeprefix("model.")] = value
    metadata = getattr(state.get("model"), "_metadata", None)
    if metadata is not None:
        vars(found)["_metadata"] = metadata
    return found


def _pattern(pattern: str, names: Sequence[str], where: str) -> str:
    """A pattern on names as one on whole keys."""
    if any(fnmatchcase(name, pattern) for name in names):
        return f"model.{pattern}"
    if any(fnmatchcase(f"model.{name}", pattern) for name in names):
        return pattern
    raise _unmatched(pattern, "the model", where)


def _unmatched(pattern: str, what: str, where: str) -> MissingKey:
    return MissingKey(
        f"nothing of {what} in {where} matches {pattern!r}; `casckpt show` lists its keys", keys=(pattern,)
    )


def _named_values(state: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Tensors and other values by flat key; extra state is one value, whatever it is made of."""
    for element, value in state.items():
        key = f"{prefix}{element}"
        if isinstance(value, Mapping) and not is_extra_state(key):
            yield from _named_values(value, f"{key}.")
        else:
            yield key, value


def unshard_optim_state(
    store: AnyStore,
    ref: str | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    keys: Sequence[str] | None = None,
    rank0_only: bool = False,
    no_dist: bool = False,
    by_name: bool = False,
    allow_pickle: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The optimizer's state, ``{"state": {id: {...}}, "param_groups": [...]}``, in new tensors on ``device``.

    That is what ``optim.load_state_dict`` of an optimizer with the same groups takes; ``by_name`` has the names of
    parameters in the place of ids. Counts of steps are on the CPU where optimizers want them there.

    ``keys``: fnmatch patterns on names of parameters, on ``<name>.<what>``, or on whole keys of the checkpoint,
    whichever matches first; the groups are always whole. ``options``: as in `Store.read`.

    Raises as `unshard_model_state`, and MissingKey for a checkpoint without an optimizer.
    """
    if not _is_wanted(rank0_only, no_dist):
        return {}
    opened = as_store(store)
    stored = Stored(opened, opened.get(ref))
    groups = stored.groups(allow_pickle=allow_pickle)
    target = torch.device(device)
    on_cpu = {name: steps_on_cpu(None, group) for group in groups for name in group["params"]}

    def place(name: Element, key: str, entry: Entry) -> torch.Tensor:
        stays = is_step(entry, key) and on_cpu.get(str(name), False)
        return new_tensor(entry, None, torch.device("cpu") if stays else target)

    wanted = None if keys is None else _wanted(stored, keys, list(on_cpu))
    state = stored.template(stored.nodes(on_cpu), place, lambda key: wanted is None or key in wanted)
    opened.load({"optim": {"state": state}}, stored.checkpoint, allow_pickle=allow_pickle, no_dist=True, **options)
    return {"state": state, "param_groups": groups} if by_name else by_number(state, groups)


def _wanted(stored: Stored, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The keys, below ``optim.state``, that the patterns choose."""
    below = stored.keys_below(STATE)
    wanted: set[str] = set()
    for pattern in patterns:
        owners = [name for name in names if fnmatchcase(name, pattern)]
        starts = tuple(f"{name}." for name in owners)
        chosen = [key for key in below if key in owners or key.startswith(starts)] if owners else []
        chosen = chosen or [key for key in below if fnmatchcase(key, pattern) or fnmatchcase(f"{STATE}.{key}", pattern)]
        if not chosen and not owners:
            raise _unmatched(pattern, f"the optimizer ({STATE})", stored.where)
        wanted.update(owners, chosen)
    return wanted


def _is_wanted(rank0_only: bool, no_dist: bool) -> bool:
    """Is this rank to read anything? Raises InvalidInput for ``no_dist`` with ``rank0_only`` off rank 0."""
    rank = this_rank()
    if rank0_only and no_dist and rank != 0:
        raise InvalidInput(f"rank0_only with no_dist on rank {rank}: only rank 0 may call it so; leave no_dist out")
    return rank == 0 or not rank0_only
