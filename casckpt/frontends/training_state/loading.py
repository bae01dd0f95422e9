"""One rank's part of a load: a template of the model and of the optimizer, filled by `Store.load`, then handed over."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Mismatch
from casckpt.format.regions import Shape
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Element, Node, children
from casckpt.frontends.training_state.flat import flat_parts
from casckpt.frontends.training_state.groups import Match, check, check_unused, match
from casckpt.frontends.training_state.holding import Holding, apart, unwrapped
from casckpt.frontends.training_state.kinds import StateKind
from casckpt.frontends.training_state.model import ModelTemplate, is_extra_state
from casckpt.frontends.training_state.optimizer import install, local_optimizer, named_groups, tensors_below
from casckpt.frontends.training_state.stored import (
    MODEL,
    StoredGroups,
    StoredTraining,
    is_step,
    keeps_dtype,
    steps_on_cpu,
)
from casckpt.frontends.training_state.together import on_no_rank
from casckpt.loading.arguments import Renaming, matches, renamer, usable_patterns
from casckpt.loading.fit import (
    Fit,
    check_fit,
    check_no_adapters,
    chosen,
    is_adapter,
    log_once,
    memory_of,
    merged,
    name_without_adapters,
    shape_of,
)
from casckpt.loading.load_plan import new_empty
from casckpt.loading.options import LoadOptions
from casckpt.loading.unread import that_hold
from casckpt.ranks.ranks import Ranks, everyone
from casckpt.tensors.dtensors import described_like, local_of
from casckpt.tensors.dtypes import dtype_name


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Inside, new tensors are normal ones, though the caller be in inference mode: no optimizer could update others."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@dataclass(frozen=True)
class Unused:
    """Names in the checkpoint that a rank has no use for: of its model, of its optimizer, and of tensors at the top."""

    model: Sequence[str]
    optimizer: Sequence[str]
    beside: Sequence[str]


class Keeps(TypedDict, total=False):
    """What a load leaves as it is: options of the optimizer's groups; tensors that have another shape."""

    keep_options: bool
    leave_resized: bool


class TrainingStateLoad:
    """A load of one model, with its optimizers by key, from one checkpoint, where the model is below ``at``.

    ``groups``: those of each optimizer that is wanted; None where the checkpoint has none. ``state``: what to fill, for
    the key of the model and of each optimizer, known after `prepare`. Of ``given`` is ``rename``: from a key of the
    model, ``model.<name>``, to one of the checkpoint; its optimizer's state goes along. ``ignore_mismatched``: patterns
    of names of the model, or of keys; what does not fit there is left as it is. ``cast``: convert; state that was saved
    in the dtype of its saved parameter gets that of the parameter here.
    ``keep_options``: options of the optimizer's groups stay as they are. ``leave_resized``: so do tensors of the model
    for which the checkpoint has another shape, and the optimizer's state for them. ``places``: the keys under which the
    checkpoint has the optimizers, if these are not their own.
    Weights at the top of a checkpoint, as an import of safetensors files has them, are those of a model, too: where the
    layout does not tell, `prepare` takes the reading that fills more.
    """

    def __init__(
        self,
        stored: StoredTraining,
        groups: Mapping[str, StoredGroups | None],
        given: LoadOptions,
        *,
        at: str = MODEL,
        places: Mapping[str, str] | None = None,
        **keeps: Unpack[Keeps],
    ) -> None:
        self.state: dict[str, Any] = {}
        self.at, self._start, self._keeps = at, f"{at}.", keeps
        self._saved_start, self._optimizer_places = self._start, places or {}
        self._stored, self._groups, self._given, self._strict = stored, groups, given, given.strict
        self.ignored: tuple[str, ...] = ()
        """For `Store.load`: patterns of keys that are left as they are where they do not fit. Known after `prepare`."""
        self._bare = False
        self._places: dict[bool, dict[str, str]] = {}
        self._warns, self._filled, self._said = given.unread == "warn", "", list[str | None]()
        self._optimizers: dict[str, list[_OptimizerPlan]] = {}
        self._absent: tuple[str, ...] = ()

    def prepare(self, ranks: Ranks, make: Callable[[], nn.Module], optims: Mapping[str, Sequence[Optimizer]]) -> None:
        """Find out where the model's tensors stand, and check all before anything is read. Every rank calls it.

        ``make``: gives the model; what it raises is raised on all ranks. ``optims``: by key. Raises MissingKey,
        Mismatch or InvalidInput, and unless ``unread`` is "ignore" what `check_fit` does; on all ranks.
        """
        self._choose(ranks, make)
        ranks.exchange(lambda: self._plan(optims), self.check_unused)

    def _choose(self, ranks: Ranks, make: Callable[[], nn.Module]) -> None:
        """Find out where the model's tensors stand. Raises InvalidInput where two readings fill as many."""
        where, fits = self._stored.where, list[Fit]()

        def measure() -> list[bool]:
            given = usable_patterns(self._given.ignore_mismatched, "ignore_mismatched") or ()
            self.ignored = (*given, *(f"{self._start}{pattern}" for pattern in given))
            self._saved_key = renamer(self._given.rename)
            self._module = make()
            self._model = ModelTemplate(self._module, strict=self._strict)
            fits[:] = [self._fit(bare=bare) for bare in ((False,) if self._is_nested else (False, True))]
            return [fit.is_full for fit in fits]

        def settled(found: Sequence[list[bool]]) -> Sequence[bool | None]:
            full = [all(flags) for flags in zip(*found, strict=True)]
            return everyone(full.index(True) == 1 if full.count(True) == 1 else None, ranks.size)

        def decide(found: Sequence[list[Fit]]) -> Sequence[bool]:
            readings = [merged(of_ranks) for of_ranks in zip(*found, strict=True)]
            bare = len(readings) > 1 and chosen(where, *readings)
            self._filled = _all_of(readings[bare])
            if self._warns:
                self._said.append(check_fit(readings[bare], self._stored.weights(), where, self._given.rename))
            return everyone(bare, ranks.size)

        bare = ranks.exchange(measure, settled)
        if ranks.rank == 0 and bare is not None:
            self._filled = _all_of(fits[bare]) if ranks.size == 1 else "all"
        self._bare = ranks.exchange(lambda: fits, decide) if bare is None else bare
        self._saved_start = self._start_there()
        if self._keeps.get("leave_resized"):
            self.ignored += tuple(glob.escape(key) for key in fits[self._bare].misfits)

    @property
    def _is_nested(self) -> bool:
        """Whether the names of the model can only be below its key."""
        return self.at != MODEL or self._stored.is_nested

    def _fit(self, *, bare: bool) -> Fit:
        """How this rank's tensors fit: by name, or by the memory that they share with one that fits."""
        filled, unfilled, misfits = dict[str, str](), dict[str, Shape](), set[str]()
        manifest, values = self._stored.manifest, self._model.values
        places = self._places[bare] = {name: self._where(name, bare=bare) for name in values}
        for name, value in values.items():
            key, shape, saved = f"{self._start}{name}", shape_of(value), places[name]
            entry = manifest.tensors.get(saved)
            if shape is None:
                continue
            if entry is not None and entry.shape == shape and not manifest.lacks(entry):
                filled[key] = saved
            elif entry is None or entry.shape == shape or self._is_ignored(name):
                unfilled[key] = shape
            else:
                misfits.add(key)
        if unfilled:
            homes = {memory_of(values[key.removeprefix(self._start)]): saved for key, saved in filled.items()}
            tied = {key: homes.get(memory_of(values[key.removeprefix(self._start)])) for key in unfilled}
            filled |= {key: saved for key, saved in tied.items() if saved is not None}
        return Fit(filled, {key: shape for key, shape in unfilled.items() if key not in filled}, frozenset(misfits))

    def _where(self, name: str, *, bare: bool) -> str:
        """The key of the checkpoint for a name of the model, in one of the two readings."""
        entries = self._stored.manifest.tensors

        def place(name: str) -> str:
            """What ``rename`` makes of it; the key of a checkpoint that it gives in full is taken as it is."""
            saved = self._saved_key(f"{self._start}{name}")
            is_whole = saved != f"{self._start}{name}" and saved in entries
            return saved.removeprefix(self._start) if bare and not is_whole else saved

        saved = place(name)
        if saved in entries or (plain := name_without_adapters(name)) == name:
            return saved
        base = place(plain)
        return base if base in entries else saved

    def _start_there(self) -> str:
        """What the saved names of the model begin with: its key, unless ``rename`` puts another in its place.

        Where it does, what an optimizer was saved with tells how much of a key is the name.
        """
        saved = self._stored.manifest.tensors
        places = [place for place in self._places[self._bare].values() if place in saved]
        known = {name for groups in self._groups.values() for group in groups or () for name in group["params"]}
        above = commonprefix([place.split(".")[:-1] for place in places])  # noqa: RUF071 - of lists
        starts = [f"{'.'.join(above[:end])}." for end in range(len(above), 0, -1)]
        return max([self._start, *starts], key=lambda start: sum(one.removeprefix(start) in known for one in places))

    def _plan(self, optims: Mapping[str, Sequence[Optimizer]]) -> Unused:
        """Check all that this rank can."""
        self._left = self._leave()
        for name in self._left:
            del self._model.values[name]
        if self._model.values:
            self.state[self.at] = self._model.values
        saved = self._stored.manifest.tensors
        shapes = {name: entry.shape for name in self._model.values if (entry := saved.get(self._place(name)))}
        ignored = filter(self._is_ignored, self._model.values)
        new = {*self._left, *(name for name in ignored if shapes.get(name) != shape_of(self._model.values[name]))}
        unused = [name for at, several in optims.items() for name in self._plan_optimizers(at, several, new)]
        known = {self._saved_name(name) for name in new}
        return Unused(
            [name for name in self._unused_keys() if not self._is_ignored(name)],
            [name for name in unused if name not in known and not self._is_ignored(name)],
            [] if self._bare else self._stored.beside_model({self._place(name) for name in self._model.values}),
        )

    def _plan_optimizers(self, at: str, optims: Sequence[Optimizer], new: Collection[str]) -> list[str]:
        """The same for those that were saved together at one key. Give the names that only the checkpoint has."""
        groups, place = self._groups.get(at), self._optimizer_places.get(at, at)
        if not optims or groups is None:
            self._absent += (f"{at}.param_groups",) if optims else ()
            return []
        about = (self._stored, groups, self._module, self._saved_name)
        make = partial(
            _OptimizerPlan, at=place, start=self._saved_start, new=new, strict=self._strict, cast=self._given.cast
        )
        plans = [make(optim, *about, keep_options=self._keeps.get("keep_options", False)) for optim in optims]
        self._optimizers[at] = plans
        self._absent += tuple(f"{at}.state.{name}" for plan in plans for name in plan.match.missing)
        filled = {name: value for plan in plans for name, value in plan.template.items()}
        if filled:
            self.state[at] = {"state": filled}
        return on_no_rank([plan.match.unused for plan in plans])

    def _leave(self) -> tuple[str, ...]:
        """Names that are left as they are: load_state_dict passes by them, or by others that belong to them.

        Raises Mismatch for those that the checkpoint has, unless all that belong together are ignored.
        """
        left, refused = dict[str, None](), dict[str, str]()
        for name, together in self._model.passed_by.items():
            there = [one for one in together if self.saved_key(f"{self._start}{one}") in self._stored.keys]
            if all(self._is_ignored(one) for one in there):
                left |= dict.fromkeys(there)
            else:
                refused[name] = re.sub(r"(?<=\.)\d+(?=\.)", "*", commonprefix(together)) + "*"  # noqa: RUF071 - of names
        if refused:
            raise Mismatch(
                f"the model's state_dict has {listed(list(refused))}, which its load_state_dict does not read; what "
                f"belongs to that would be loaded without it from {self._stored.where}. Load it into modules that read "
                "all that they save, or leave these as they are, with "
                f"ignore_mismatched={list(dict.fromkeys(refused.values()))}",
                keys=tuple(refused),
            )
        return tuple(left)

    def _is_ignored(self, name: str) -> bool:
        return matches(f"{self._start}{name}", self.ignored)

    @property
    def rename(self) -> Renaming:
        """For `Store.load`."""
        return Renaming(self.saved_key, self._given.rename)

    def saved_key(self, key: str) -> str:
        """Where in the checkpoint the value for a key of ``state`` is. The optimizer's say that."""
        return self._place(key.removeprefix(self._start)) if key.startswith(self._start) else key

    def _place(self, name: str) -> str:
        """The key of the checkpoint for a name of the model."""
        return self._places[self._bare].get(name) or self._where(name, bare=self._bare)

    def _saved_name(self, name: str) -> str:
        """Give what a name of the model's was when it was saved."""
        saved = self._place(name)
        return saved if self._bare else saved.removeprefix(self._saved_start)

    def _unused_keys(self) -> list[str]:
        """Saved names of the model's that it has not."""
        wanted = {self._saved_name(name): name for name in (*self._model.values, *self._left)}
        extra = tuple(f"{saved}." for saved, name in wanted.items() if is_extra_state(name))
        there = self._stored.bare_keys() if self._bare else self._stored.keys_below(self._saved_start[:-1])
        return [name for name in there if name not in wanted and not name.startswith(extra)]

    def check_unused(self, found: Sequence[Unused]) -> Sequence[None]:
        """On rank 0: raise Mismatch for names of the checkpoint that no rank has."""
        names, where = on_no_rank([unused.model for unused in found]), self._stored.where
        if self._warns and not any(map(is_adapter, self._model.values)):
            adapters = [name for name in names if is_adapter(name)]
            there = self._stored.weights()
            check_no_adapters(adapters if len(adapters) == sum(map(is_adapter, there)) else [], where)
        if names and self._strict:
            what = f"the model in {where} has {listed(names)}, which this model does not have"
            raise Mismatch(f"{what}; pass strict=False to leave them out", keys=tuple(names))
        names += on_no_rank([unused.beside for unused in found])
        if names and self._warns:
            self._said.append(f"{where} has {listed(names)}, which this model does not have: they are left out")
        if self._strict:
            check_unused(on_no_rank([unused.optimizer for unused in found]), where)
        return [None] * len(found)

    def install(self, loaded: Checkpoint) -> Checkpoint:
        """Hand what was loaded to the model and the optimizer."""
        mismatched = (*loaded.mismatched_keys, *(f"{self._start}{name}" for name in self._left))
        without = [key for key in (*loaded.missing_keys, *mismatched) if key.startswith(self._start)]
        self._model.install({key.removeprefix(self._start) for key in without}, self._strict)
        known_left = {self.saved_key(f"{self._start}{name}") for name in self._left}
        unread = tuple(key for key in loaded.unread_keys if key not in known_left)
        for at, plans in self._optimizers.items():
            for plan in plans:
                plan.install(self.state.get(at, {}).get("state", {}))
            place = self._optimizer_places.get(at, at)
            known = (f"{place}.param_groups", *(f"{place}.state.{name}" for plan in plans for name in plan.nothing_of))
            starts = tuple(f"{key}." for key in known)
            unread = tuple(key for key in unread if key not in known and not key.startswith(starts))
        if self._filled:
            what = "the model" if self.at == MODEL else repr(self.at)
            said = f"filled {self._filled} tensors of {what} from {self._stored.where}"
            log_once(loaded.id, said, self._model.values, logging.INFO)
        for warning in self._said:
            log_once(loaded.id, warning, loaded.missing_keys)
        missing, subtrees = (*loaded.missing_keys, *self._absent), that_hold(loaded.unread_subtrees, unread)
        return replace(
            loaded, missing_keys=missing, mismatched_keys=mismatched, unread_keys=unread, unread_subtrees=subtrees
        )


def _all_of(fit: Fit) -> str:
    """How many tensors were filled, if all were: "5 of 5"; else nothing."""
    return f"{fit.count} of {fit.count}" if fit.is_full else ""


_NOWHERE = "\0"
"""A name that no parameter in a checkpoint has."""


@dataclass(frozen=True)
class _Home:
    """Where the state of one parameter goes: beside the parameter, into the tensors that are there already.

    ``options``: those of its group, as they will be.
    """

    holding: Holding
    options: Mapping[str, Any]
    there: Mapping[str, torch.Tensor]


class _OptimizerPlan:
    """What a load does to an optimizer, known in full before anything is read."""

    def __init__(
        self,
        optim: Optimizer,
        stored: StoredTraining,
        saved: StoredGroups,
        model: nn.Module,
        saved_name: Callable[[str], str],
        *,
        at: str,
        start: str,
        new: Collection[str],
        strict: bool,
        cast: bool,
        keep_options: bool,
    ) -> None:
        """``at``: the key of the optimizer. ``start``: of all keys of the model.

        ``new``: names of parameters that are left as they are, and their state with them.
        """
        self._given, optim = optim, local_optimizer(optim)
        self._optim, self._kind, self._stored, self._cast = optim, StateKind.of(optim), stored, cast
        self._kept, self._start = None if self._kind is None else self._kind.keeps(), start
        here = named_groups(model, optim)
        self.match: Match = match(
            here, saved, lambda name: _NOWHERE if name in new else saved_name(name), keep_options=keep_options
        )
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
        nodes = stored.nodes(dict.fromkeys([*self._parameters, *self.match.unused]), at)
        nodes = {name: node for name, node in nodes.items() if name not in left_out}
        self._check_kind(nodes)
        self.template = apart(stored.template(nodes, self._place, lambda key: True, at))

    def _check_kind(self, nodes: Mapping[Element, Node]) -> None:
        """Raise Mismatch if the state is that of another kind of optimizer: it would show in the next step."""
        for name, home in self._homes.items() if self._kind is not None else ():
            names = [str(element) for element, _ in children(nodes[name])] if name in nodes else []
            if self._kind is not None and names:
                self._kind.check(names, home.options, name, self._stored.where)

    def _make_homes(self, model: nn.Module) -> dict[str, _Home]:
        homes, parts = {}, flat_parts(model)
        for group, changed in zip(self._optim.param_groups, self.match.options, strict=True):
            options = {**group, **changed}
            for parameter in group["params"]:
                name = self.match.saved.get(id(parameter))
                if name is not None:
                    there = dict(tensors_below(self._optim.state.get(parameter, {}), ""))
                    homes[name] = _Home(Holding(name, parameter, parts.get(id(parameter))), options, there)
        return homes

    def _place(self, name: Element, key: str, entry: Entry) -> Any:
        """Give what to load one piece of state into."""
        home, cpu = self._homes.get(str(name)), torch.device("cpu")
        if home is None:
            return new_empty(entry, cpu)
        on_cpu = is_step(entry, key) and steps_on_cpu(self._optim, home.options)
        device = cpu if on_cpu else home.holding.parameter.device
        added = self._kept is not None and key.partition(".")[0] not in self._kept
        wanted = self._as_cast(str(name), key, entry, home.holding.dtype)
        found = home.holding.destination(wanted, home.there.get(f".{key}"), device, self._taken, added=added)
        self._taken.add(local_of(unwrapped(found)).data_ptr())
        self._taken.discard(0)  # the address of all that have no memory of their own
        return described_like(found, home.holding.parameter)

    def _as_cast(self, name: str, key: str, entry: Entry, dtype: torch.dtype) -> Entry:
        """What ``cast`` makes of a piece of state of a parameter that has ``dtype`` here.

        What was saved in the dtype of its parameter follows it. All else was meant to be of its own, as are counts.
        """
        weight = self._stored.manifest.tensors.get(f"{self._start}{name}")
        stays = keeps_dtype(entry, key) or key in getattr(self._optim, "non_castable_tensor_keys", ())  # bitsandbytes'
        follows = self._cast and weight is not None and entry.dtype == weight.dtype and not stays
        return entry.converted(dtype_name(dtype), dtype.itemsize) if follows else entry

    def install(self, loaded: Mapping[Any, Any]) -> None:
        """Hand over what was loaded. Parameters that the checkpoint lacks keep what they have."""
        state: dict[Any, Any] = {}
        for parameter in self._without:
            if parameter in self._optim.state:
                state[parameter] = self._optim.state[parameter]
        for name in self.template:
            owner = self._parameters.get(str(name))
            value = unwrapped(loaded[name], None if owner is None else owner.device)
            state[name if owner is None else owner] = value
        install(self._given, state, self.match.options)
