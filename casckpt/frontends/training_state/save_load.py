"""Save a model and an optimizer in one commit, and load them in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.ranks import everyone, open_ranks
from casckpt.checkpoint.store import Store
from casckpt.errors import Mismatch
from casckpt.format.manifest import Entry
from casckpt.format.tree import Element
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.groups import Match, check, listed, match
from casckpt.frontends.training_state.model import ModelTemplate, is_extra_state, model_state
from casckpt.frontends.training_state.optimizer import (
    Named,
    install,
    named_groups,
    optimizer_state,
    tensors_below,
)
from casckpt.frontends.training_state.stored import GROUPS, STATE, Stored, is_step, new_tensor, steps_on_cpu

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def save_model_and_optim_state(
    store: AnyStore,
    model: nn.Module,
    optim: Optimizer | None = None,
    *,
    run: str,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
    **options: Any,
) -> Checkpoint:
    """Save ``model`` and ``optim`` (None: the model alone) as one checkpoint. Neither is changed in any way.

    Before the first step an optimizer has no state, and none is made for it. ``options``: further ones of `Store.save`
    (``overwrite``, ``ephemeral``, ``attachments``, ``dedup``, ``allow_pickle``, ``threads``, ...).

    Raises InvalidInput for an optimizer that was made for another model, and for extra state that is not plain data;
    Conflict and StorageError as `Store.save` does. After an error nothing of the save is visible.
    """
    state: dict[str, Any] = {"model": model_state(model)}
    if optim is not None:
        state["optim"] = optimizer_state(model, optim)
    return as_store(store).save(state, run=run, step=step, metadata=metadata, process_group=process_group, **options)


def load_model_and_optim_state(
    store: AnyStore,
    ref: str | Checkpoint,
    model: nn.Module,
    optim: Optimizer | None = None,
    *,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    **options: Any,
) -> Checkpoint:
    """Load into the tensors of ``model`` and ``optim``. No optimizer step is taken.

    What state the optimizer has not made yet is made in the dtype in which it was saved, on the parameter's device.
    Parameters are matched by name, whatever the number and order of groups; where saved groups that are one group here
    differ in an option, the one here stays. ``optim=None``: what was saved of an optimizer is not read. Every rank of
    ``process_group`` makes the call; ``no_dist``: this process loads alone.

    ``strict``: the names of the model and of the optimizer's parameters must be those of the checkpoint, and it must
    hold an optimizer if one is given; else what only one side has is left as it is. ``missing_keys`` of the result are
    the keys that the checkpoint lacks. ``options``: ``cast`` (of the model), ``verify``, ... as in `Store.load`.

    Raises NotFound, MissingKey, Mismatch or InvalidInput before anything changes; Damaged or StorageError during the
    read, after which model and optimizer are undefined.
    """
    opened = as_store(store)
    ranks = open_ranks(process_group, no_dist=no_dist)
    commit = ranks.exchange(lambda: None, lambda _: everyone(opened.get(ref).commit, ranks.size))
    loading = _Loading(opened, Checkpoint(opened.repository, commit), strict)
    ranks.exchange(lambda: loading.plan(model, optim, allow_pickle=allow_pickle), lambda done: done)
    loaded = opened.load(
        loading.state, loading.checkpoint, strict=strict, allow_pickle=allow_pickle, process_group=process_group,
        no_dist=no_dist, **options,
    )  # fmt: skip
    return loading.install(loaded)


class _Loading:
    """One rank's part of a load: a template of the model and of the optimizer."""

    def __init__(self, store: Store, checkpoint: Checkpoint, strict: bool) -> None:
        self.checkpoint = checkpoint
        self.state: dict[str, Any] = {}
        self._store, self._strict = store, strict
        self._optimizer: _OptimizerPlan | None = None
        self._absent: tuple[str, ...] = ()

    def plan(self, model: nn.Module, optim: Optimizer | None, *, allow_pickle: bool) -> None:
        """Check all of it. Raises MissingKey, Mismatch or InvalidInput."""
        stored = Stored(self._store, self.checkpoint)
        self._model = ModelTemplate(model)
        if self._strict:
            _check_model_keys(stored, self._model)
        self.state["model"] = self._model.values
        if optim is not None and not self._strict and not stored.has_optimizer:
            self._absent = (GROUPS,)
        elif optim is not None:
            self._optimizer = _OptimizerPlan(stored, model, optim, self._strict, allow_pickle=allow_pickle)
            self._absent = tuple(f"{STATE}.{name}" for name in self._optimizer.match.missing)
            self.state["optim"] = {"state": self._optimizer.template}

    def install(self, loaded: Checkpoint) -> Checkpoint:
        """Hand what was loaded to the model and the optimizer."""
        self._model.install({key.removeprefix("model.") for key in loaded.missing_keys}, self._strict)
        unread = loaded.unread_keys
        if self._optimizer is not None:
            self._optimizer.install()
            unread = _without_groups(unread)
        return replace(loaded, missing_keys=(*loaded.missing_keys, *self._absent), unread_keys=unread)


def _without_groups(keys: Collection[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key != GROUPS and not key.startswith(f"{GROUPS}."))


def _check_model_keys(stored: Stored, weights: ModelTemplate) -> None:
    """Raise Mismatch for keys of the checkpoint's model that this model does not have."""
    extra = tuple(f"{name}." for name in weights.values if is_extra_state(name))
    unknown = [name for name in stored.keys_below("model") if name not in weights.values and not name.startswith(extra)]
    if unknown:
        raise Mismatch(
            f"the model in {stored.where} has {listed(unknown)}, which this model has not; pass strict=False to leave "
            "them out",
            keys=tuple(unknown),
        )


@dataclass(frozen=True)
class _Home:
    """Where the state of one parameter goes: beside the parameter, into the tensors that are there already."""

    parameter: torch.Tensor
    steps_on_cpu: bool
    there: Mapping[str, torch.Tensor]


class _OptimizerPlan:
    """What a load does to an optimizer, known in full before anything is read."""

    def __init__(self, stored: Stored, model: nn.Module, optim: Optimizer, strict: bool, *, allow_pickle: bool) -> None:
        self._optim = optim
        here = named_groups(model, optim)
        saved = stored.groups(allow_pickle=allow_pickle)
        self.match: Match = match(here, saved)
        if strict:
            check(self.match, getattr(optim, "defaults", {}), saved, stored.where)
        self._parameters = {
            self.match.saved[id(one.parameter)]: one.parameter
            for group in here
            for one in group
            if id(one.parameter) in self.match.saved
        }
        self._without = [one.parameter for group in here for one in group if id(one.parameter) not in self.match.saved]
        self._homes = dict(self._each_home(here))
        self._taken = {parameter.data_ptr() for parameter in model.parameters()}
        unused = set(self.match.unused)
        nodes = stored.nodes(dict.fromkeys([*self._parameters, *unused]))
        nodes = {name: node for name, node in nodes.items() if name not in unused}
        self.template = stored.template(nodes, self._place, lambda key: True)

    def _each_home(self, here: list[list[Named]]) -> list[tuple[str, _Home]]:
        homes = []
        for group, options, members in zip(self._optim.param_groups, self.match.options, here, strict=True):
            now = {**group, **options}
            for one in members:
                if id(one.parameter) in self.match.saved:
                    there = dict(tensors_below(self._optim.state.get(one.parameter, {}), ""))
                    home = _Home(one.parameter, steps_on_cpu(self._optim, now), there)
                    homes.append((self.match.saved[id(one.parameter)], home))
        return homes

    def _place(self, name: Element, key: str, entry: Entry) -> torch.Tensor:
        """The tensor to load one piece of state into."""
        home = self._homes.get(str(name))
        if home is None:
            return new_tensor(entry, None, torch.device("cpu"))
        there = home.there.get(f".{key}")
        if there is not None and self._fits(there, entry):
            self._taken.add(there.data_ptr())
            return there
        on_cpu = home.steps_on_cpu and is_step(entry, key)
        return new_tensor(entry, home.parameter, torch.device("cpu") if on_cpu else home.parameter.device)

    def _fits(self, there: torch.Tensor, entry: Entry) -> bool:
        """Can it be filled? Not if another one lies in the same memory: some optimizers share one ``step``."""
        alike = tuple(there.shape) == entry.shape and str(there.dtype) == f"torch.{entry.dtype}"
        return alike and there.layout is torch.strided and there.is_contiguous() and there.data_ptr() not in self._taken

    def install(self) -> None:
        """Hand over what was loaded. Parameters that the checkpoint lacks keep what they have."""
        state: dict[Any, Any] = {}
        for parameter in self._without:
            if parameter in self._optim.state:
                state[parameter] = self._optim.state[parameter]
        for name, value in self.template.items():
            state[self._parameters.get(str(name), name)] = value
        install(self._optim, state, self.match.options)
