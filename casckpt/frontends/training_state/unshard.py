"""Reads whole weights and optimizer state from a checkpoint into new tensors, without a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Unpack

import torch

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Element
from casckpt.frontends.stores import AnyStore
from casckpt.frontends.training_state.model import is_extra_state
from casckpt.frontends.training_state.optimizer import by_number
from casckpt.frontends.training_state.slices import RANKS, refused
from casckpt.frontends.training_state.stored import OPTIM, STATE, StoredGroups, StoredTraining, is_step, steps_on_cpu
from casckpt.frontends.training_state.together import find
from casckpt.loading.load import read_together
from casckpt.loading.options import LoadOptions, ReadArguments, usable_device, usable_patterns
from casckpt.ranks.ranks import Ranks, Solo, on_each, open_ranks, this_rank
from casckpt.tensors.memory import new_empty


def unshard_model_state(
    store: AnyStore,
    ref: str | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    keys: Sequence[str] | None = None,
    rank0_only: bool = False,
    no_dist: bool = False,
    **options: Unpack[ReadArguments],
) -> dict[str, Any]:
    """Return the model's state_dict, ``{name: tensor}``, in new tensors on ``device``.

    ``keys``: fnmatch patterns of names. A pattern that does not match any name applies to whole keys of the
    checkpoint. Every rank makes the call, and all get the same checkpoint. With ``rank0_only``, the other ranks get
    ``{}``. ``no_dist``: this rank reads alone. ``options``: as in `Store.read`.

    Raises MissingKey if nothing matches, and NotFound, Damaged and StorageError in the same cases as `Store.read`, on
    every rank. Raises InvalidInput (a ValueError) if ``no_dist`` and ``rank0_only`` are combined on any rank except 0.
    """

    def read(ranks: Ranks, stored: StoredTraining, _: StoredGroups | None) -> dict[str, Any]:
        state = read_together(
            stored.store.repository, ranks, stored.checkpoint, keys=lambda: _patterns(stored, keys),
            device=lambda: usable_device(device), options=LoadOptions(**options),
        )  # fmt: skip
        values = ((key, value) for key, value in _named_values(state, "") if key.startswith("model."))
        found = OrderedDict[str, Any]((key.removeprefix("model."), value) for key, value in values)
        metadata = getattr(state.get("model"), "_metadata", None)
        if metadata is not None:
            vars(found)["_metadata"] = metadata
        return found

    return _unshard(store, ref, read, rank0_only=rank0_only, no_dist=no_dist)


def _patterns(stored: StoredTraining, keys: Sequence[str] | None) -> list[str]:
    """Convert patterns for names of the model to patterns for whole keys."""
    names = stored.keys_below("model")
    if not names:
        raise MissingKey(f"{stored.where} has no model; `casckpt show --tensors` lists its keys", keys=("model",))
    wanted = usable_patterns(["*"] if keys is None else keys) or ()
    return [_pattern(pattern, names, stored.where) for pattern in wanted]


def _pattern(pattern: str, names: Sequence[str], where: str) -> str:
    """Convert a pattern for names to a pattern for whole keys."""
    if any(fnmatchcase(name, pattern) for name in names):
        return f"model.{pattern}"
    if any(fnmatchcase(f"model.{name}", pattern) for name in names):
        return pattern
    raise _unmatched(pattern, "the model", where)


def _unmatched(pattern: str, what: str, where: str) -> MissingKey:
    said = f"nothing in {what} of {where} matches {pattern!r}; `casckpt show --tensors` lists its keys"
    return MissingKey(said, keys=(pattern,))


def _named_values(state: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield tensors and other values by flat key. Extra state always counts as one value."""
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
    **options: Unpack[ReadArguments],
) -> dict[str, Any]:
    """Return the optimizer's state, ``{"state": {id: {...}}, "param_groups": [...]}``, in new tensors on ``device``.

    The ``load_state_dict`` of an optimizer with the same groups accepts the result. ``by_name``: use parameter names
    instead of ids. Step counts are on the CPU if the optimizer keeps them there.

    ``keys``: fnmatch patterns of parameter names, of ``<name>.<what>``, or of whole keys of the checkpoint. The first
    of these kinds that matches is used. The groups are always complete. ``options``: as in `Store.read`.

    Raises the errors of `unshard_model_state`, and MissingKey for a checkpoint without an optimizer.
    """
    allow_pickle = options.get("allow_pickle", False)

    def read(ranks: Ranks, stored: StoredTraining, groups: StoredGroups | None) -> dict[str, Any]:
        if stored.below(f"{OPTIM}.{RANKS}"):
            raise refused(stored, OPTIM)
        state = on_each(ranks, lambda: _template(stored, groups or [], usable_patterns(keys), usable_device(device)))
        stored.store.load(
            {"optim": {"state": state}}, stored.checkpoint, no_dist=ranks.size == 1, strict=False, unread="ignore",
            **options,
        )  # fmt: skip
        return {"state": state, "param_groups": groups} if by_name else by_number(state, groups or [])

    return _unshard(store, ref, read, rank0_only=rank0_only, no_dist=no_dist, optimizer=True, allow_pickle=allow_pickle)


def _template(
    stored: StoredTraining, groups: StoredGroups, keys: Sequence[str] | None, target: torch.device
) -> dict[Element, Any]:
    on_cpu = {name: steps_on_cpu(None, group) for group in groups for name in group["params"]}

    def place(name: Element, key: str, entry: Entry) -> torch.Tensor:
        stays = is_step(entry, key) and on_cpu.get(str(name), False)
        return new_empty(entry, torch.device("cpu") if stays else target)

    wanted = None if keys is None else _wanted(stored, keys, list(on_cpu))
    return stored.template(stored.nodes(on_cpu), place, lambda key: wanted is None or key in wanted)


def _wanted(stored: StoredTraining, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Return the keys below ``optim.state`` that match the patterns."""
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


def _unshard(
    store: AnyStore,
    ref: str | Checkpoint,
    read: Callable[[Ranks, StoredTraining, StoredGroups | None], dict[str, Any]],
    *,
    rank0_only: bool,
    no_dist: bool,
    optimizer: bool = False,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Return the result of ``read`` for one checkpoint. With ``rank0_only``, ranks other than 0 get ``{}``.

    ``read``: its first argument is the ranks that share their reads.
    """
    rank = this_rank()
    if rank0_only and no_dist and rank != 0:
        raise InvalidInput(f"rank0_only with no_dist works only on rank 0, but this is rank {rank}; leave no_dist out")
    ranks = open_ranks(no_dist=no_dist)
    keys = [OPTIM] if optimizer else []
    stored, groups = find(ranks, store, ref, optimizers=lambda: keys, required=True, allow_pickle=allow_pickle)
    if stored.shares and not rank0_only:
        return read(ranks, stored, groups.get(OPTIM))

    def alone() -> dict[str, Any]:
        if rank0_only and rank != 0:
            return {}
        if stored.home is not None:
            stored.home.check(stored.store.repository)
        return read(Solo(), stored, groups.get(OPTIM))

    return on_each(ranks, alone)
