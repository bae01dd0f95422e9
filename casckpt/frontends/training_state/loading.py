"""A load on one rank: creates the template for a model and its optimizers, and updates both after the load."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from os.path import commonprefix
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from casckpt.base.lazy import cached_property
from casckpt.base.text import in_one_line, listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import Mismatch
from casckpt.format.regions import Shape
from casckpt.format.sections.index import Entry
from casckpt.format.tree import Element, Node, Wrapper, children
from casckpt.frontends.training_state.flat import FlatPart
from casckpt.frontends.training_state.groups import Match, check, check_unused, match
from casckpt.frontends.training_state.holding import Holding, apart, unwrapped
from casckpt.frontends.training_state.hub_names import is_transformers, split_template
from casckpt.frontends.training_state.model import Conversion, ModelTemplate, check_initialized, converters
from casckpt.frontends.training_state.names import Parameters, unwrapped_model
from casckpt.frontends.training_state.optimizer import StateKind, install, local_optimizer, named_groups, tensors_below
from casckpt.frontends.training_state.packed import MAX_JSON
from casckpt.frontends.training_state.slices import PLAIN, RANKS, check_places
from casckpt.frontends.training_state.stored import (
    MODEL,
    StoredGroups,
    StoredTraining,
    is_step,
    keeps_dtype,
    steps_on_cpu,
)
from casckpt.frontends.training_state.together import on_no_rank
from casckpt.loading.fit import (
    PACKED,
    Fit,
    check_fit,
    check_no_adapters,
    chosen,
    is_adapter,
    log_once,
    memory_of,
    merged,
    name_without_adapters,
    rename_hint,
    shape_of,
)
from casckpt.loading.options import LoadOptions, Renaming, matches, renamer, usable_patterns
from casckpt.loading.unread import that_hold
from casckpt.ranks.ranks import Ranks, everyone, exchange_keeping
from casckpt.tensors.dtensors import described_like, local_of
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.kinds import holds_wrapper
from casckpt.tensors.memory import new_empty
from casckpt.tensors.state import is_part


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Disable inference mode in the context, because an optimizer cannot update tensors created in that mode."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def renamed_beside(given: LoadOptions, home: str) -> LoadOptions:
    """Return the options with a ``rename`` that does not apply to the keys below ``home``."""

    def saved_key(key: str) -> str:
        return key if key.startswith(f"{home}.") else renamer(given.rename)(key)

    return replace(given, rename=Renaming(saved_key, given.rename))


@dataclass(frozen=True)
class Unused:
    """Saved names that a rank does not load: in the model, in the optimizer, and among the top-level tensors."""

    model: Sequence[str]
    optimizer: Sequence[str]
    beside: Sequence[str]


class Keeps(TypedDict, total=False):
    """What a load leaves unchanged: the options of the optimizer's groups, and tensors with a different shape."""

    keep_options: bool
    leave_resized: bool


class TrainingStateLoad:
    """Loads one model and its optimizers from one checkpoint. The model is below the key ``at``.

    ``groups``: the saved groups of each requested optimizer; None if the checkpoint has none. ``state``: the template,
    with the keys of the model and of each optimizer. `prepare` sets it. ``given``: the options of the load. Its
    ``rename`` maps a key of the model, ``model.<name>``, to a key of the checkpoint. It also applies to the
    optimizer's state. Its ``ignore_mismatched`` has patterns of names or keys of the model. Matching tensors that do
    not fit are left unchanged. With ``cast``, state that was saved in the dtype of its parameter is converted to the
    dtype that the parameter has now. ``keep_options``: keep the options of the optimizer's groups. ``leave_resized``:
    keep tensors that have a different shape in the checkpoint, and their optimizer state. ``places``: the optimizers'
    keys in the checkpoint, where they differ. The model may also be at the top level of the checkpoint, as after an
    import of safetensors files. If the layout is ambiguous, `prepare` chooses the interpretation that fills more
    tensors.
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
        """Patterns for `Store.load`. Matching keys that do not fit are left unchanged. `prepare` sets the patterns."""
        self._bare = False
        self._left: tuple[str, ...] = ()
        self._places: dict[bool, dict[str, str]] = {}
        self._conversions: dict[bool, Conversion] = {}
        self._warns, self._filled, self._said = given.unread == "warn", "", list[str | None]()
        self._optimizers: dict[str, _OptimizerPlan] = {}
        self._absent: tuple[str, ...] = ()

    def load(
        self,
        ranks: Ranks,
        make: Callable[[], nn.Module],
        optims: Mapping[str, Sequence[Optimizer]],
        fill: Callable[[dict[str, Any], LoadOptions], Checkpoint],
    ) -> Checkpoint:
        """Call `prepare`, ``fill`` and `install`.

        ``fill``: a function that loads into a state with the given options.
        """
        self.prepare(ranks, make, optims)
        rename = Renaming(self.saved_key, self._given.rename)
        given = replace(self._given, rename=rename, ignore_mismatched=self.ignored, unread="ignore")
        return self.install(fill(self.state, given))

    def prepare(
        self,
        ranks: Ranks,
        make: Callable[[], nn.Module],
        optims: Mapping[str, Sequence[Optimizer]],
        among: Mapping[str, Sequence[TrainingStateLoad]] | None = None,
    ) -> None:
        """Find the model's tensors in the checkpoint, and run all checks before the first read.

        Every rank makes the call. ``make``: a function that returns the model. ``optims``: the optimizers by key.
        ``among``: the loads of the modules that have an optimizer's parameters, by its key. The last is this load.
        Raises MissingKey, Mismatch or InvalidInput, the errors of ``make``, and the errors of `check_fit` unless
        ``unread`` is "ignore". All errors are raised on all ranks.
        """
        self._among = among or {}
        self._ranks = ranks
        self._choose(ranks, make)
        ranks.exchange(lambda: self._plan(optims), self.check_unused)

    def _choose(self, ranks: Ranks, make: Callable[[], nn.Module]) -> None:
        """Choose one of two interpretations. Raises InvalidInput if both fill the same number of tensors."""
        where = self._stored.where

        def measure() -> tuple[list[Fit], list[bool]]:
            given = usable_patterns(self._given.ignore_mismatched, "ignore_mismatched") or ()
            self.ignored = (*given, *(f"{self._start}{pattern}" for pattern in given))
            self._saved_key = renamer(self._given.rename)
            self._module = make()
            self._model, self._converters = ModelTemplate(self._module, strict=self._strict), converters(self._module)
            only_nested = self.at != MODEL or self._stored.is_nested
            readings = (False,) if only_nested else (False, True)
            self._split(readings)
            mine = [self._fit(bare=bare) for bare in readings]
            return mine, [fit.is_full for fit in mine]

        def settled(_: list[Fit], found: Sequence[list[bool]]) -> Sequence[bool | None]:
            full = [all(flags) for flags in zip(*found, strict=True)]
            return everyone(full.index(True) == 1 if full.count(True) == 1 else None, ranks.size)

        def decide(found: Sequence[list[Fit]]) -> Sequence[bool]:
            readings = [merged(of_ranks) for of_ranks in zip(*found, strict=True)]
            bare = len(readings) > 1 and chosen(where, *readings)
            self._filled = _all_of(readings[bare])
            if self._warns:
                self._said.append(check_fit(readings[bare], self._stored.weights(), where, self._given.rename))
            return everyone(bare, ranks.size)

        fits, bare = exchange_keeping(ranks, measure, settled)
        if ranks.rank == 0 and bare is not None:
            self._filled = _all_of(fits[bare]) if ranks.size == 1 else "all"
        self._bare = ranks.exchange(lambda: fits, decide) if bare is None else bare
        self._saved_start = self._start_there()
        conversion = self._conversions.get(self._bare, Conversion())
        self._model.convert(conversion)
        self._places[self._bare] |= conversion.new
        if self._keeps.get("leave_resized"):
            resized = (key for key in fits[self._bare].misfits if key.removeprefix(self._start) not in conversion.new)
            self.ignored += tuple(map(glob.escape, resized))

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of the model after `_choose`."""
        return Parameters.of(self._module)

    @cached_property
    def taken(self) -> set[int]:
        """The memory addresses of the parameters, and of the optimizer state that is planned so far."""
        return {local_of(parameter).data_ptr() for parameter in self._module.parameters()} - {0}

    def _split(self, readings: Sequence[bool]) -> None:
        """Replace the fused tensors of a Transformers model with their parts, if the checkpoint has the parts."""
        inner, tensors = unwrapped_model(self._module), self._stored.contents.tensors

        def is_saved(name: str) -> bool:
            return any(self._where(name, bare=bare) in tensors for bare in readings)

        if is_transformers(inner):
            self._model.values = split_template(inner, self._model.values, is_saved)

    def _fit(self, *, bare: bool) -> Fit:
        """Return the fit of this rank's tensors.

        A tensor fits by its name, or because it shares memory with a tensor that fits.
        """
        filled, unfilled, misfits = dict[str, str](), dict[str, Shape](), set[str]()
        stored, values = self._stored, self._model.values
        places = self._places[bare] = {name: self._where(name, bare=bare) for name in values}
        for name, value in values.items():
            key, shape, saved = f"{self._start}{name}", shape_of(value), places[name]
            there = stored.shapes.get(saved)
            if shape is None:
                continue
            if there == shape and not stored.lacks(saved):
                filled[key] = saved
            elif there in (None, shape) or self._is_ignored(name):
                unfilled[key] = shape
            else:
                misfits.add(key)
        if unfilled:
            homes = {memory_of(values[key.removeprefix(self._start)]): saved for key, saved in filled.items()}
            tied = {key: homes.get(memory_of(values[key.removeprefix(self._start)])) for key in unfilled}
            filled |= {key: saved for key, saved in tied.items() if saved is not None}
        fit = Fit(filled, {key: shape for key, shape in unfilled.items() if key not in filled}, frozenset(misfits))
        return self._convert(fit, bare=bare) if self._converters else fit

    def _convert(self, fit: Fit, *, bare: bool) -> Fit:
        """Choose the modules that convert: something in them does not fit, or the checkpoint is of an older version.

        Outer modules come first. Return the fit of the rest.
        """
        start, stored, values, places = self._start, self._stored, self._model.values, self._places[bare]
        above = next((at.removesuffix(name) for name, at in places.items() if at.endswith(name)), "" if bare else start)
        self._bare, self._saved_start = bare, above  # until both interpretations are known
        others = {
            name: stored.shapes.get(above + name) for name in self._unused_keys() if not stored.lacks(above + name)
        }
        absent = (name for name, at in places.items() if at not in stored.keys and f"{start}{name}" not in fit.filled)
        lacking = dict.fromkeys(absent)
        resized = {key.removeprefix(start) for key in fit.misfits}
        unfit = dict.fromkeys(name for name in (*lacking, *resized, *others) if not self._is_ignored(name))
        starts, mine, pairs, refusal = dict[str, str](), list[str](), dict[str, str](), ""
        saved = dict(known := stored.metadata(above.removesuffix(".")))
        for name, at in places.items():  # a ``rename`` may map to modules of other names
            here, there = name.split("."), at.removeprefix(above).split(".")
            while here and there and here.pop() == there.pop():
                if (path := ".".join(there)) in known:
                    saved[".".join(here)] = known[path]
        for path, converter in self._converters.items():
            was = saved.get(path.removesuffix("."), {}).get("version", converter.version)
            whole = not any(is_part(value) for name, value in values.items() if name.startswith(path))
            here = [name for name in unfit if name.startswith(path) and (converter.resizes or name not in resized)]
            held = {name: values[name] for name in here if values.get(name) is not None}
            fixed = [name for name, value in held.items() if is_part(value) or holds_wrapper(value)]
            for name in fixed:
                alike = [one for one in here if one in others and others[one] == shape_of(values[name])]
                pairs |= {f"{start}{name}": above + alike[0]} if len(alike) == 1 else {}
                refusal = refusal or (
                    f"the checkpoint lacks {name!r}, or has a different shape. {converter.way} may convert that, but "
                    "not for a tensor that is sharded here, or is a wrapper"
                )
            is_there = not lacking.keys() >= {*here} or any(key.startswith(start + path) for key in fit.filled)
            if is_there and not fixed and (here or (was != converter.version and whole)):
                starts[path] = converter.start
                mine += here
        new = {name: places.get(name, above + name) for name in mine if name not in lacking}
        hint = rename_hint(pairs, fit.filled, self._given.rename)
        self._conversions[bare] = Conversion(
            starts, new, lacking.keys() & {*mine}, f"{refusal}. {hint}" if refusal else "", saved
        )
        converted = fit.unfilled.keys() & {f"{start}{name}" for name in mine}
        unfilled = {key: shape for key, shape in fit.unfilled.items() if key not in converted}
        return Fit(fit.filled, unfilled, fit.misfits | converted)

    def _where(self, name: str, *, bare: bool) -> str:
        """Return the key in the checkpoint for a name of the model under one of the two interpretations."""
        entries = self._stored.shapes

        def place(name: str) -> str:
            """Apply ``rename``. If the result is a whole key of the checkpoint, use it unchanged."""
            saved = self._saved_key(f"{self._start}{name}")
            is_whole = saved != f"{self._start}{name}" and saved in entries
            return saved.removeprefix(self._start) if bare and not is_whole else saved

        saved = place(name)
        if saved in entries or (plain := name_without_adapters(name)) == name:
            return saved
        base = place(plain)
        return base if base in entries else saved

    def _start_there(self) -> str:
        """Return the prefix of the model's saved keys: the model's key, unless ``rename`` replaces it.

        In that case, the parameter names in the saved optimizer show where a name begins.
        """
        saved = self._stored.shapes
        places = [place for place in self._places[self._bare].values() if place in saved]
        known = {name for groups in self._groups.values() for group in groups or () for name in group["params"]}
        above = commonprefix([place.split(".")[:-1] for place in places])  # noqa: RUF071 - of lists
        starts = [f"{'.'.join(above[:end])}." for end in range(len(above), 0, -1)]
        return max([self._start, *starts], key=lambda start: sum(one.removeprefix(start) in known for one in places))

    def _plan(self, optims: Mapping[str, Sequence[Optimizer]]) -> Unused:
        """Create the template, and run all checks that involve only this rank."""
        self._left = self._leave()
        if self._model.conversion.refusal and self._strict:
            raise Mismatch(f"the model does not fit {self._stored.where}: {self._model.conversion.refusal}")
        for name in self._left:
            self._model.values.pop(name, None)
        if self._model.values:
            self.state[self.at] = self._model.values
        saved = self._stored.shapes
        shapes = {name: saved.get(self._place(name)) for name in self._model.values}
        ignored = filter(self._is_ignored, self._model.values)
        differs = (name for name in ignored if shapes.get(name) != shape_of(self._model.values[name]))
        self.new: Collection[str] = {*self._left, *differs}
        """The names of parameters that are left unchanged, together with their optimizer state."""
        unused = [name for at, several in optims.items() for name in self._plan_optimizers(at, several)]
        return Unused(
            [name for name in self._unused_keys() if not self._is_ignored(name)],
            unused,
            [] if self._bare else self._stored.beside_model({self._place(name) for name in self._model.values}),
        )

    def _plan_optimizers(self, at: str, optims: Sequence[Optimizer]) -> list[str]:
        """Plan the load of the optimizers at one key. Return the names that only the checkpoint has."""
        groups, place = self._groups.get(at), self._optimizer_places.get(at, at)
        if not optims or groups is None:
            self._absent += (f"{at}.param_groups",) if optims else ()
            return []
        check_initialized(dict(self._module.named_parameters()))
        plan = self._optimizers[at] = _OptimizerPlan(self._among.get(at, [self]), optims, groups, self._ranks, at=place)
        self._absent += tuple(f"{at}.state.{name}" for name in plan.match.missing)
        if plan.template:
            self.state[at] = {"state": plan.template}
        if plan.own:
            self.state.setdefault(at, {})[RANKS] = {self._ranks.rank: {"state": plan.own}}
        return plan.unused

    def _leave(self) -> tuple[str, ...]:
        """Return the names that the load leaves unchanged because load_state_dict does not read their whole module.

        Raises Mismatch if the checkpoint has such names, unless ``ignore_mismatched`` matches all names of the module.
        """
        left, refused = self._leave_packed(), dict[str, str]()
        for name, together in self._model.passed_by.items():
            there = [one for one in together if self.saved_key(f"{self._start}{one}") in self._stored.keys]
            if all(self._is_ignored(one) for one in there):
                left |= dict.fromkeys(there)
            else:
                refused[name] = re.sub(r"(?<=\.)\d+(?=\.)", "*", commonprefix(together)) + "*"  # noqa: RUF071 - of names
        if refused:
            raise Mismatch(
                f"the model's state_dict has {listed(list(refused))}, which its load_state_dict does not read. The "
                f"rest of their modules would be loaded from {self._stored.where} without these keys. Load into "
                "modules that read all keys that they save, or leave these modules unchanged with "
                f"ignore_mismatched={list(dict.fromkeys(refused.values()))}",
                keys=tuple(refused),
            )
        return tuple(left)

    def _leave_packed(self) -> dict[str, None]:
        """Return the names of packed weights that do not fit, and that ``ignore_mismatched`` matches.

        Raises Mismatch for other packed weights that do not fit, and Refused for invalid data.
        """
        left, packed, tensors = dict[str, None](), self._model.packed, self._stored.contents.tensors
        places = {name: self._place(name) for weight in packed for name in weight.values}
        there = {name: tensors[key] for name, key in places.items() if key in tensors and not self._stored.lacks(key)}
        names = [weight.fields for weight in packed if weight.fields in there]
        keys = {name: places[name] for name in names if there[name].nbytes <= MAX_JSON}
        if fields := dict[str, Any].fromkeys(keys.values()):
            self._stored.store.load(fields, self._stored.checkpoint, no_dist=True, unread="ignore")
        for weight in packed:
            differ = next(weight.differences(there, fields.get(keys.get(weight.fields, ""))), None)
            if differ is None or there.keys().isdisjoint(weight.values):
                continue
            if not self._is_ignored(weight.name):
                raise Mismatch(
                    f"the quantized weight {weight.name!r} does not fit {self._stored.where}: {differ}. Create and "
                    f"quantize it as it was for the save, or pass ignore_mismatched=[{weight.name + '*'!r}]",
                    key=weight.name,
                )
            left |= dict.fromkeys(weight.values)
        return left

    def _is_ignored(self, name: str) -> bool:
        return matches(f"{self._start}{name}", self.ignored)

    def saved_key(self, key: str) -> str:
        """Return the key in the checkpoint for a key of ``state``. Optimizer keys are returned unchanged."""
        return self._place(key.removeprefix(self._start)) if key.startswith(self._start) else key

    def _place(self, name: str) -> str:
        """Return the key in the checkpoint for a name of the model."""
        return self._places[self._bare].get(name) or self._where(name, bare=self._bare)

    def _saved_name(self, name: str) -> str:
        """Return the saved name for a name of the model."""
        saved = self._place(name)
        return saved if self._bare else saved.removeprefix(self._saved_start)

    def _unused_keys(self) -> list[str]:
        """Return the saved names that the model does not have."""
        wanted = {self._saved_name(name): name for name in (*self._model.values, *self._left)}
        extra = tuple(f"{saved}." for saved, name in wanted.items() if self._model.values.get(name) is None)
        there = self._stored.bare_keys() if self._bare else self._stored.keys_below(self._saved_start[:-1])
        return [name for name in there if name not in wanted and not name.startswith(extra)]

    def check_unused(self, unused_of_ranks: Sequence[Unused]) -> Sequence[None]:
        """On rank 0, raise Mismatch for names in the checkpoint that no rank has."""
        names, where = on_no_rank([unused.model for unused in unused_of_ranks]), self._stored.where
        if self._warns and not any(map(is_adapter, self._model.values)):
            adapters = [name for name in names if is_adapter(name)]
            there = self._stored.weights()
            check_no_adapters(adapters if len(adapters) == sum(map(is_adapter, there)) else [], where)
        if names and self._strict:
            what = f"the model in {where} has {listed(names)}, which this model lacks"
            is_quantized = any(PACKED in name or name.endswith("SCB") for name in names)
            lacks = [name for name in self._model.values if self._place(name) not in self._stored.keys]
            advice = "quantize the model before the load" if is_quantized else "pass strict=False to skip them"
            if lacks and not is_quantized:  # strict=False would leave these as they are, which is often random
                advice = f"it has {listed(lacks)} instead. Build it as it was for the save, or map names with rename="
            raise Mismatch(f"{what}; {advice}", keys=tuple(names))
        names += on_no_rank([unused.beside for unused in unused_of_ranks])
        if names and self._warns:
            self._said.append(f"{where} has {listed(names)}, which this model lacks: they are skipped")
        if self._strict:
            check_unused(on_no_rank([unused.optimizer for unused in unused_of_ranks]), where)
        return [None] * len(unused_of_ranks)

    def _install_model(self, without: Collection[str]) -> tuple[list[str], list[str]]:
        """Call `ModelTemplate.install` without the names ``without``. Return the skipped keys of both sides."""
        before = dict(self._module.named_parameters(remove_duplicate=False))
        try:
            lacking, others = self._model.install(without, self._strict)
            if self._strict and (lacking or others):
                raise RuntimeError(f"missing names: {listed(lacking)}; unexpected names: {listed(others)}")
        except RuntimeError as error:
            if not self._model.conversion.starts:
                raise
            text = (
                f"the model does not fit {self._stored.where}, even after its modules have converted what they can. "
                f"What fits is loaded by now. {in_one_line(error)}"
            )
            if not self._keeps.get("leave_resized"):
                raise Mismatch(text) from error
            self._said.append(text)
            lacking, others = [], []
        now = dict(self._module.named_parameters(remove_duplicate=False))
        self.replaced = {id(one): now[name] for name, one in before.items() if now.get(name, one) is not one}
        missing, unread = [f"{self._start}{name}" for name in lacking], [self._place(name) for name in others]
        if self._warns and (left := [*missing, *unread]):
            self._said.append(f"{listed(left)} are not in both the model and {self._stored.where}: they are skipped")
        return missing, unread

    def install(self, loaded: Checkpoint) -> Checkpoint:
        """Load the filled state into the model and the optimizers. Return ``loaded`` with the skipped keys.

        Raises Mismatch if modules that convert do not fit in the end.
        """
        mismatched = (*loaded.mismatched_keys, *(f"{self._start}{name}" for name in self._left))
        without = [key for key in (*loaded.missing_keys, *mismatched) if key.startswith(self._start)]
        lacking, others = self._install_model({key.removeprefix(self._start) for key in without})
        known_left = {self.saved_key(f"{self._start}{name}") for name in self._left}
        unread = (*(key for key in loaded.unread_keys if key not in known_left), *others)
        for at, plan in self._optimizers.items():
            plan.install(self.state.get(at, {}))
            place = self._optimizer_places.get(at, at)
            known = tuple(f"{place}.{key}" for key in ("param_groups", PLAIN, RANKS))
            known += tuple(f"{place}.state.{name}" for name in plan.nothing_of)
            starts = tuple(f"{key}." for key in known)
            unread = tuple(key for key in unread if key not in known and not key.startswith(starts))
        if self._filled:
            what = "the model" if self.at == MODEL else repr(self.at)
            said = f"filled {self._filled} tensors of {what} from {self._stored.where}"
            log_once(loaded.id, said, self._model.values, logging.INFO)
        for warning in self._said:
            log_once(loaded.id, warning, loaded.missing_keys)
        missing, subtrees = (*loaded.missing_keys, *lacking, *self._absent), that_hold(loaded.unread_subtrees, unread)
        return replace(
            loaded, missing_keys=missing, mismatched_keys=mismatched, unread_keys=unread, unread_subtrees=subtrees
        )


def _all_of(fit: Fit) -> str:
    """Return a string such as "5 of 5" if all tensors are filled; otherwise, an empty string."""
    return f"{fit.count} of {fit.count}" if fit.is_full else ""


_NOWHERE = "\0"
"""A name that no saved parameter has."""


@dataclass(frozen=True)
class _Home:
    """The destination of one parameter's state: the parameter and its current state ``there``.

    ``optim``: its optimizer, of the kind ``kind``. ``options``: the options of its group after the load.
    """

    holding: Holding
    optim: Optimizer
    kind: StateKind | None
    options: Mapping[str, Any]
    there: Mapping[str, torch.Tensor]


class _OptimizerPlan:
    """The changes that a load will make to optimizers. The plan is complete before the first read."""

    def __init__(
        self,
        loads: Sequence[TrainingStateLoad],
        optims: Sequence[Optimizer],
        saved: StoredGroups,
        ranks: Ranks,
        *,
        at: str,
    ) -> None:
        """Plan a load of the optimizers that share the key ``at`` in the checkpoint.

        ``loads``: the loads of their modules. If there are several, a parameter's name begins with the module's key.
        """
        *others, load = loads
        start = "" if others else load._start  # what a key has before the name
        self._at, self._start, self._cast = at, "" if others else load._saved_start, load._given.cast
        self._optims, self._loads, stored = optims, loads, load._stored
        self._taken = set.union(*(one.taken for one in loads)) if others else load.taken
        self._stored, parameters = stored, Parameters.joined({one.at: one.parameters for one in loads})
        new = {f"{one._start}{name}".removeprefix(start) for one in loads for name in one.new}

        def saved_name(name: str) -> str:
            own = next((one for one in loads if name.startswith(one._start)), load)
            return own.saved_key(name) if others else load._saved_name(name)

        local = [local_optimizer(optim) for optim in optims]
        here = [group for optim in local for group in named_groups(parameters, optim)]
        self._groups = [(optim, group) for optim in local for group in optim.param_groups]
        self.match: Match = match(
            here, saved, lambda name: _NOWHERE if name in new else saved_name(name),
            keep_options=load._keeps.get("keep_options", False),
        )  # fmt: skip
        if load._strict:
            lacking = tuple(name for name in self.match.missing if name not in new)
            defaults = [getattr(optim, "defaults", {}) for optim, _ in self._groups]
            check(replace(self.match, missing=lacking), defaults, saved, stored.where)
        members = [one.parameter for group in here for one in group]
        self._parameters = {self.match.saved[id(one)]: one for one in members if id(one) in self.match.saved}
        known = {saved_name(name) for name in new}
        ignored = [pattern for one in loads for pattern in one.ignored]
        self.unused = [
            name for name in self.match.unused if name not in known and not matches(f"{start}{name}", ignored)
        ]
        self._homes = self._make_homes(parameters.parts)
        check_places(stored, at, {name: home.holding.whole for name, home in self._homes.items()}, ranks)
        mine = f"{at}.{RANKS}.{ranks.rank}"
        own = stored.nodes({}, mine)
        own = {name: node for name, node in own.items() if name in self._parameters}
        self.own = stored.template(own, self._place_own, lambda key: True, mine)
        plain = f"{at}.{PLAIN}"
        self._plain = set(stored.value(plain, allow_pickle=False)) if plain in stored.keys else set[str]()
        self.nothing_of = {name for name, home in self._homes.items() if home.holding.is_nothing}
        left_out = self.nothing_of | set(self.match.unused)
        nodes = stored.nodes(dict.fromkeys([*self._parameters, *self.match.unused]), at)
        nodes = {name: node for name, node in nodes.items() if name not in left_out}
        self._check_kind(nodes)
        self.template = apart(stored.template(nodes, self._place, lambda key: True, at, self._place_wrapper))

    def _check_kind(self, nodes: Mapping[Element, Node]) -> None:
        """Raise Mismatch if a different kind of optimizer saved the state, because the next step would fail."""
        for name, home in self._homes.items():
            names = [str(element) for element, _ in children(nodes[name])] if name in nodes else []
            if home.kind is not None and names:
                home.kind.check(names, home.options, name, self._stored.where)

    def _make_homes(self, parts: Mapping[int, FlatPart]) -> dict[str, _Home]:
        homes = {}
        for (optim, group), changed in zip(self._groups, self.match.options, strict=True):
            options, kind = {**group, **changed}, StateKind.of(optim)
            for parameter in group["params"]:
                name = self.match.saved.get(id(parameter))
                if name is not None:
                    there = dict(tensors_below(optim.state.get(parameter, {}), ""))
                    holding = Holding(name, parameter, parts.get(id(parameter)))
                    homes[name] = _Home(holding, optim, kind, options, there)
        return homes

    def _place(self, name: Element, key: str, entry: Entry) -> Any:
        """Return the tensor to fill with one state tensor."""
        home, cpu = self._homes.get(str(name)), torch.device("cpu")
        if home is None:
            return new_empty(entry, cpu)
        on_cpu = is_step(entry, key) and steps_on_cpu(home.optim, home.options)
        device = cpu if on_cpu else home.holding.parameter.device
        added = home.kind is not None and key.partition(".")[0] not in home.kind.keeps()
        wanted = self._as_cast(str(name), key, entry, home)
        found = home.holding.destination(
            wanted, home.there.get(f".{key}"), device, self._taken, added=added, plain=f"{name}.{key}" in self._plain
        )
        self._taken.add(local_of(unwrapped(found)).data_ptr())
        self._taken.discard(0)  # the address that empty tensors have
        return described_like(found, home.holding.parameter)

    def _place_own(self, name: Element, key: str, entry: Entry) -> torch.Tensor:
        return new_empty(entry, self._parameters[str(name)].device)

    def _place_wrapper(self, name: Element, key: str, node: Wrapper) -> Any:
        """Return the wrapper to fill with one state tensor, or None if the load creates it."""
        home = self._homes.get(str(name))
        if home is None:
            return None
        entries = self._stored.contents.tensors
        start = f"{self._at}.state.{name}.{key}"
        # torch's own optimizers create plain state for a plain parameter, and cannot update a wrapper
        is_plain = type(home.optim).__module__.startswith("torch.optim.") and not holds_wrapper(home.holding.parameter)
        return home.holding.wrapper(start, node, entries, home.there.get(f".{key}"), is_plain=is_plain)

    def _as_cast(self, name: str, key: str, entry: Entry, home: _Home) -> Entry:
        """Return the entry for a state tensor, converted if ``cast`` requires it.

        State that was saved in the dtype of its parameter is converted along with the parameter. All other state, such
        as counts, keeps its own dtype.
        """
        dtype = home.holding.dtype  # the parameter's current dtype
        weight = self._stored.contents.tensors.get(f"{self._start}{name}")
        stays = keeps_dtype(entry, key) or key in getattr(home.optim, "non_castable_tensor_keys", ())  # bitsandbytes'
        follows = self._cast and weight is not None and entry.dtype == weight.dtype and not stays
        return entry.converted(dtype_name(dtype), dtype.itemsize) if follows else entry

    def install(self, loaded: Mapping[Any, Any]) -> None:
        """Load the filled state into the optimizers. Parameters that the checkpoint lacks keep their current state.

        The optimizers also get the parameters with which modules have replaced theirs.
        """
        replaced = {number: one for load in self._loads for number, one in load.replaced.items()}
        for _, group in self._groups if replaced else ():
            group["params"][:] = [replaced.get(id(one), one) for one in group["params"]]
        self._parameters = {name: replaced.get(id(one), one) for name, one in self._parameters.items()}
        state, options = dict[Any, Any](), iter(self.match.options)
        for name in self.template:
            owner = self._parameters.get(str(name))
            value = unwrapped(loaded["state"][name], None if owner is None else owner.device)
            state[name if owner is None else owner] = value
        for mine in loaded[RANKS].values() if self.own else ():
            for name, entries in mine["state"].items():
                owner = self._parameters[name]
                state[owner] = {**state.get(owner, {}), **unwrapped(entries, owner.device)}
        beside = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        for given in self._optims:
            optim = local_optimizer(given)
            members = [one for group in optim.param_groups for one in group["params"]]
            kept = (one for one in members if one in optim.state and id(one) not in self.match.saved)
            own = {one: optim.state[one] for one in kept} | {one: state[one] for one in members if one in state}
            install(given, own | beside, list(islice(options, len(optim.param_groups))))
