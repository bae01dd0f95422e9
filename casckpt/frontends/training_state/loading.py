"""One rank's part of a load: a template of the model and of the optimizer, filled by `Store.load`, then handed over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from casckpt.checkpoint.arguments import Rename, matches, renamer, usable_patterns
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.loading.load_plan import new_empty
from casckpt.checkpoint.loading.unread import that_hold
from casckpt.errors import Mismatch
from casckpt.format.sections.index import StreamEntry
from casckpt.format.tree import Element, Node, children
from casckpt.frontends.training_state.flat import flat_parts
from casckpt.frontends.training_state.groups import Match, check, check_unused, listed, match
from casckpt.frontends.training_state.holding import Holding, apart, unwrapped
from casckpt.frontends.training_state.kinds import Kind
from casckpt.frontends.training_state.model import ModelTemplate, is_extra_state
from casckpt.frontends.training_state.optimizer import install, named_groups, tensors_below
from casckpt.frontends.training_state.stored import GROUPS, STATE, StoredGroups, StoredTraining, is_step, steps_on_cpu
from casckpt.frontends.training_state.together import on_no_rank
from casckpt.tensors.dtensors import described_like, local_of
from casckpt.tensors.values import Shard


@dataclass(frozen=True)
class Unused:
    """Names in the checkpoint that a rank has no use for: of its model, and of its optimizer."""

    model: Sequence[str]
    optimizer: Sequence[str]


class TrainingStateLoad:
    """A load of one checkpoint, with its optimizer's groups if they are wanted.

    ``rename``: from a key of the model, ``model.<name>``, to one of the checkpoint; its optimizer's state goes along.
    ``ignore_mismatched``: patterns of names of the model, or of keys; what does not fit there is left as it is.
    A checkpoint of weights at its top, as an import of safetensors files makes it, is one of a model.
    """

    def __init__(
        self,
        stored: StoredTraining,
        groups: StoredGroups | None,
        strict: bool,
        rename: Rename = None,
        ignore_mismatched: Sequence[str] | None = None,
    ) -> None:
        self.state: dict[str, Any] = {}
        self._stored, self._groups, self._strict, self._rename = stored, groups, strict, rename
        self._ignore_mismatched = ignore_mismatched
        self.ignored: tuple[str, ...] = ()
        """For `Store.load`: patterns of keys that are left as they are where they do not fit. Known after `plan`."""
        self._bare = groups is None and not stored.keys_below("model")
        self._optimizers: list[_OptimizerPlan] = []
        self._absent: tuple[str, ...] = ()

    def plan(self, model: nn.Module, optims: Sequence[Optimizer] = ()) -> Unused:
        """Check all that this rank can. Raises MissingKey, Mismatch or InvalidInput."""
        given = usable_patterns(self._ignore_mismatched, "ignore_mismatched") or ()
        self.ignored = (*given, *(f"model.{pattern}" for pattern in given))
        self._model = ModelTemplate(model)
        if self._model.values:
            self.state["model"] = self._model.values
        self._saved_key = renamer(self._rename)
        values = self._model.values.items()
        new = {name for name, value in values if self._is_ignored(name) and not self._fits(name, value)}
        if optims and self._groups is None:
            self._absent = (GROUPS,)
        elif self._groups is not None and optims:
            groups = self._groups
            plans = [
                _OptimizerPlan(self._stored, groups, model, optim, self._saved_name, new=new, strict=self._strict)
                for optim in optims
            ]
            self._absent = tuple(f"{STATE}.{name}" for plan in plans for name in plan.match.missing)
            filled = {name: value for plan in plans for name, value in plan.template.items()}
            if filled:
                self.state["optim"] = {"state": filled}
            self._optimizers = plans
        known = {self._saved_name(name) for name in new}
        unused = on_no_rank([plan.match.unused for plan in self._optimizers]) if self._optimizers else ()
        return Unused(
            [name for name in self._unused_keys() if not self._is_ignored(name)],
            [name for name in unused if name not in known and not self._is_ignored(name)],
        )

    def _is_ignored(self, name: str) -> bool:
        return matches(f"model.{name}", self.ignored)

    def _fits(self, name: str, value: Any) -> bool:
        """Tell whether there is a tensor of this shape in the checkpoint."""
        entry = self._stored.manifest.tensors.get(self.saved_key(f"model.{name}"))
        shape = value.global_shape if isinstance(value, Shard) else getattr(value, "shape", None)
        return entry is not None and shape is not None and entry.shape == tuple(shape)

    def saved_key(self, key: str) -> str:
        """For `Store.load`: where in the checkpoint the value for a key of ``state`` is. The optimizer's say that."""
        if not key.startswith("model."):
            return key
        saved = self._saved_key(key)
        return saved.removeprefix("model.") if self._bare else saved

    def _saved_name(self, name: str) -> str:
        """Give what a name of the model's was when it was saved."""
        return self._saved_key(f"model.{name}").removeprefix("model.")

    def _unused_keys(self) -> list[str]:
        """Saved names of the model's that it has not."""
        wanted = {self._saved_name(name): name for name in self._model.values}
        extra = tuple(f"{saved}." for saved, name in wanted.items() if is_extra_state(name))
        there = self._stored.bare_keys() if self._bare else self._stored.keys_below("model")
        if self._bare and wanted.keys().isdisjoint(there):
            return []  # no weights stand there: what is missing says more
        return [name for name in there if name not in wanted and not name.startswith(extra)]

    def check_unused(self, found: Sequence[Unused]) -> Sequence[None]:
        """On rank 0: raise Mismatch for names of the checkpoint that no rank has."""
        if self._strict:
            names, where = on_no_rank([unused.model for unused in found]), self._stored.where
            if names:
                what = f"the model in {where} has {listed(names)}, which this model has not"
                raise Mismatch(f"{what}; pass strict=False to leave them out", keys=tuple(names))
            check_unused(on_no_rank([unused.optimizer for unused in found]), where)
        return [None] * len(found)

    def install(self, loaded: Checkpoint) -> Checkpoint:
        """Hand what was loaded to the model and the optimizer."""
        left = (*loaded.missing_keys, *loaded.mismatched_keys)
        self._model.install({key.removeprefix("model.") for key in left}, self._strict)
        unread = loaded.unread_keys
        if self._optimizers:
            for plan in self._optimizers:
                plan.install(self.state.get("optim", {}).get("state", {}))
            known = (GROUPS, *(f"{STATE}.{name}" for plan in self._optimizers for name in plan.nothing_of))
            starts = tuple(f"{key}." for key in known)
            unread = tuple(key for key in unread if key not in known and not key.startswith(starts))
        missing, subtrees = (*loaded.missing_keys, *self._absent), that_hold(loaded.unread_subtrees, unread)
        return replace(loaded, missing_keys=missing, unread_keys=unread, unread_subtrees=subtrees)


_NOWHERE = "\0"
"""A name that no parameter in a checkpoint has."""


@dataclass(frozen=True)
class _Home:
    """Where the state of one parameter goes: beside the parameter, into the tensors that are there already."""

    holding: Holding
    steps_on_cpu: bool
    there: Mapping[str, torch.Tensor]


class _OptimizerPlan:
    """What a load does to an optimizer, known in full before anything is read."""

    def __init__(
        self,
        stored: StoredTraining,
        saved: StoredGroups,
        model: nn.Module,
        optim: Optimizer,
        saved_name: Callable[[str], str],
        *,
        new: Collection[str],
        strict: bool,
    ) -> None:
        """``new``: names of parameters that are left as they are, and their state with them."""
        self._optim = optim
        here = named_groups(model, optim)
        self.match: Match = match(here, saved, lambda name: _NOWHERE if name in new else saved_name(name))
        if strict:
            lacking = tuple(name for name in self.match.missing if name not in new)
            check(replace(self.match, missing=lacking), getattr(optim, "defaults", {}), saved, stored.where)
        members = [one.parameter for group in here for one in group]
        self._parameters = {self.match.saved[id(one)]: one for one in members if id(one) in self.match.saved}
        self._without = [one for one in members if id(one) not in self.match.saved]
        self._homes = self._make_homes(model)
        self.nothing_of = {name for name, home in self._homes.items() if home.holding.is_nothing}
        self._taken = {local_of(parameter).data_ptr() for parameter in model.parameters()} - {0}
        left_out = self.nothing_of | set(self.match.unused)
        nodes = stored.nodes(dict.fromkeys([*self._parameters, *self.match.unused]))
        nodes = {name: node for name, node in nodes.items() if name not in left_out}
        self._check_kind(nodes, stored.where)
        self.template = apart(stored.template(nodes, self._place, lambda key: True))

    def _check_kind(self, nodes: Mapping[Element, Node], where: str) -> None:
        """Raise Mismatch if the state is that of another kind of optimizer: it would show in the next step."""
        kind = Kind.of(self._optim)
        for group, options in zip(self._optim.param_groups, self.match.options, strict=True):
            for name in (self.match.saved.get(id(parameter)) for parameter in group["params"]):
                node = None if name is None else nodes.get(name)
                names = [] if node is None else [str(element) for element, _ in children(node)]
                if kind is not None and names:
                    kind.check(names, {**group, **options}, str(name), where)

    def _make_homes(self, model: nn.Module) -> dict[str, _Home]:
        homes = {}
        parts = flat_parts(model)
        for group, options in zip(self._optim.param_groups, self.match.options, strict=True):
            on_cpu = steps_on_cpu(self._optim, {**group, **options})
            for parameter in group["params"]:
                name = self.match.saved.get(id(parameter))
                if name is not None:
                    there = dict(tensors_below(self._optim.state.get(parameter, {}), ""))
                    holding = Holding(name, parameter, parts.get(id(parameter)))
                    homes[name] = _Home(holding, on_cpu, there)
        return homes

    def _place(self, name: Element, key: str, entry: StreamEntry) -> Any:
        """Give what to load one piece of state into."""
        home = self._homes.get(str(name))
        cpu = torch.device("cpu")
        if home is None:
            return new_empty(entry, cpu)
        on_cpu = home.steps_on_cpu and is_step(entry, key)
        device = cpu if on_cpu else home.holding.parameter.device
        found = home.holding.destination(entry, home.there.get(f".{key}"), device, self._taken)
        self._taken.add(local_of(unwrapped(found)).data_ptr())
        self._taken.discard(0)  # the address of all that have no memory of their own
        return described_like(found, home.holding.parameter)

    def install(self, loaded: Mapping[Any, Any]) -> None:
        """Hand over what was loaded. Parameters that the checkpoint lacks keep what they have."""
        state: dict[Any, Any] = {}
        for parameter in self._without:
            if parameter in self._optim.state:
                state[parameter] = self._optim.state[parameter]
        for name in self.template:
            value = loaded[name]
            state[self._parameters.get(str(name), name)] = unwrapped(value)
        install(self._optim, state, self.match.options)
