"""Saves and loads states that contain modules, optimizers and other objects with a state_dict.

A module is stored below its key under plain names, as in `save_model_and_optim_state`. An optimizer is stored under
the parameter names of its module, which must also be in the state. If it has parameters of several modules, their keys
are part of these names. For any other object, its state_dict is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, Unpack

from torch import nn
from torch.optim import Optimizer

from casckpt.base.text import listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, Mismatch
from casckpt.frontends.training_state.hub_config import with_hub_files
from casckpt.frontends.training_state.loading import Keeps, TrainingStateLoad, normal_tensors
from casckpt.frontends.training_state.model import model_to_save
from casckpt.frontends.training_state.names import Parameters
from casckpt.frontends.training_state.optimizer import states_to_save, tensors_below
from casckpt.frontends.training_state.parts import as_optimizers
from casckpt.frontends.training_state.slices import NamedState, is_sharded
from casckpt.frontends.training_state.stored import StoredTraining
from casckpt.frontends.training_state.together import Made, find, make_state
from casckpt.frontends.training_state.train_state import draws, fill, plain_state
from casckpt.loading.options import LoadOptions, Renaming, renamer
from casckpt.ranks.ranks import Ranks, everyone, exchange_keeping, on_each
from casckpt.saving.options import SaveOptions
from casckpt.store.store import Store
from casckpt.tensors.state import check_replaceable, flatten, inflate, is_object, replace_leaves
from casckpt.tensors.values import OfObjects, PerRank

AnyRef: TypeAlias = str | Checkpoint
Load: TypeAlias = Callable[[Any, Checkpoint, LoadOptions], Checkpoint]


def save_objects(ranks: Ranks, state: Any, options: SaveOptions) -> tuple[dict[str, Any], SaveOptions]:
    """Return the arguments of a save, with each object replaced by its state. Every rank makes the call.

    ``state``: a state, or a function that returns a state. Errors of the function are raised on all ranks.
    """
    whole = list[Any]()

    def make() -> Made:
        whole.append(state() if callable(state) else state)
        return (whole[0], ()) if isinstance(whole[0], OfObjects) else Objects(whole[0]).made()

    made = make_state(ranks, make)
    return made, replace(options, attachments=with_hub_files(whole[0], options.attachments))


def is_optimizer(value: Any) -> bool:
    """Return whether ``value`` is a torch optimizer, or a wrapper around an optimizer."""
    return hasattr(value, "param_groups") and not isinstance(value, nn.Module)


def optimizers_in(state: Any) -> list[str]:
    """Return the flat keys of the optimizers in a state."""
    return [key for key, leaf in flatten(state, objects=True).leaves.items() if is_optimizer(leaf.value)]


class Objects:
    """The objects in a state by flat key. Their state_dict methods are called in key order.

    ``owners``: the keys of each optimizer's modules. Raises InvalidInput for an optimizer without a module.
    ``without``: the keys of optimizers to leave out.
    """

    def __init__(self, state: Any, without: Collection[str] = ()) -> None:
        self._state = state
        self._flat = flatten(state, objects=True)
        leaves = sorted(self._flat.leaves.items())
        self.by_key = {key: leaf.value for key, leaf in leaves if is_object(leaf.value)}
        self.modules: dict[str, nn.Module] = {k: v for k, v in self.by_key.items() if isinstance(v, nn.Module)}
        found = {key: value for key, value in self.by_key.items() if is_optimizer(value)}
        self.optimizers: dict[str, Optimizer] = {key: found[key] for key in found if key not in without}
        for key in (*self.modules, *self.optimizers):
            if self._flat.leaves[key].per_rank:
                raise InvalidInput(f"{key!r} is in a PerRank; pass modules and optimizers without it", key=key)
        self._parameters = {key: Parameters.of(module) for key, module in self.modules.items()}
        ids = {key: parameters.names.keys() for key, parameters in self._parameters.items()}
        self.owners = {key: _owners(key, optim, ids) for key, optim in self.optimizers.items()}

    def made(self) -> Made:
        """Return the state that this rank saves. Raises InvalidInput."""
        values: dict[str, Any] = {}
        for key, value in self.by_key.items():
            if key in self.modules:
                values[key] = model_to_save(value)
            elif key in self.optimizers:
                parameters = {owner: self._parameters[owner] for owner in self.owners[key]}
                values[key] = states_to_save(Parameters.joined(parameters), as_optimizers(value))
            else:
                values[key] = plain_state(value, key)
        named = [NamedState(key, values[key], self._model_of(key, values)) for key in self.owners]
        return self.nested(values), named

    def _model_of(self, optimizer: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the modules of an optimizer, under its names for parameters."""
        first, *more = self.owners[optimizer]
        pairs = ((key, name, value) for key in (first, *more) for name, value in values[key].items())
        return {f"{key}.{name}" if more else name: value for key, name, value in pairs}

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state in new containers. ``values`` replace the objects. Objects without a value are removed."""

        def value(key: str, _: int) -> Any:
            leaf = self._flat.leaves[key]
            found = values.get(key, leaf.value)
            return PerRank(found) if leaf.per_rank else found

        made: dict[str, Any] = inflate(self._flat.tree, value, lambda key: key in values or key not in self.by_key)
        return made

    @property
    def others(self) -> list[str]:
        """The keys of the objects that are neither modules nor optimizers, in load order."""
        keys = [key for key, value in self.by_key.items() if key not in self.modules and not is_optimizer(value)]
        return sorted(keys, key=lambda key: draws(self.by_key[key]))

    @property
    def plain(self) -> list[str]:
        """The keys of the leaves that a load replaces."""
        return [key for key, leaf in self._flat.leaves.items() if not leaf.is_tensor]

    def take(self, filled: Any, left: Collection[str]) -> None:
        """Load ``filled`` into the objects, with random generators last, and its other values into the state."""

        def of(key: str) -> Any:
            here, value = self._state, filled
            for element in self._flat.leaves[key].path:
                here, value = (one.value if isinstance(one, PerRank) else one for one in (here, value))
                if isinstance(here, list | tuple) and (not isinstance(value, list | tuple) or len(value) != len(here)):
                    raise Mismatch(
                        f"{key!r} is in a {type(here).__name__} of {len(here)} items, but the checkpoint has a "
                        "different container there; pass as many items as were saved, or leave it out. The tensors "
                        "have already been loaded",
                        key=key,
                    )
                here, value = here[element], value[element]
            return value.value if isinstance(value, PerRank) else value

        for key in self.others:
            if key not in left:
                fill(self.by_key[key], of(key), key)
        replace_leaves(self._state, {key: of(key) for key in self.plain})


def _owners(key: str, optim: Optimizer, parameters: Mapping[str, Collection[int]]) -> tuple[str, ...]:
    """Return the key of the module that has all parameters of ``optim``, or the keys of all modules that have some.

    ``parameters``: the id() values by module key.
    """
    wanted = {id(parameter) for group in optim.param_groups for parameter in group["params"]}
    for name, ids in parameters.items():
        if wanted.issubset(ids):
            return (name,)
    some = tuple(name for name, ids in parameters.items() if wanted.intersection(ids))
    if some and wanted.issubset(number for name in some for number in parameters[name]):
        return some
    way = f'pass its module along with it, as in {{"model": model, "{key}": optim}}'
    if some:
        way = f"only {listed(some)} have some of them: pass the modules of the others as well"
    lacking = wanted.difference(*parameters.values())
    shape = next(list(one.shape) for group in optim.param_groups for one in group["params"] if id(one) in lacking)
    raise InvalidInput(
        f"the modules in the state lack parameters of the optimizer {key!r}, such as one of shape {shape}; {way}. "
        "If they are in no module, put them and their optimizer into the train state of a Checkpointer",
        key=key,
    )


@normal_tensors()
def load_objects(
    store: Store, ranks: Ranks, state: Any, ref: AnyRef, *, given: LoadOptions, load: Load,
    without: Collection[str] = (), **keeps: Unpack[Keeps],
) -> Checkpoint:  # fmt: skip
    """Load into a state that contains objects. Every rank makes the call.

    The checks run before anything changes. Then modules and their optimizers are loaded, then the other objects, and
    random generators last. ``load``: a function that loads into a state without objects. ``without``: the keys of
    optimizers to leave as they are. Raises the errors of `Store.load` and of an object's load_state_dict, on all ranks.
    """

    def hello() -> tuple[Objects, list[str]]:
        made = Objects(state, without)
        check_replaceable(state, made.plain)
        return made, list(made.modules)

    def unite(_: Objects, messages: Sequence[list[str]]) -> Sequence[list[str]]:
        return everyone(sorted({key for message in messages for key in message}), ranks.size)

    objects, modules = exchange_keeping(ranks, hello, unite)
    stored, groups = find(
        ranks, store, ref, optimizers=lambda: objects.optimizers, required=given.strict,
        allow_pickle=given.allow_pickle,         rename=given.rename,
    )  # fmt: skip
    places = on_each(ranks, lambda: {key: stored.optimizer_at(key, given.rename) for key in objects.optimizers})
    silent = replace(given, unread="ignore")  # `Store.load` logs the unread keys
    loads = {key: TrainingStateLoad(stored, groups, silent, at=key, places=places, **keeps) for key in modules}
    # an empty module if this rank lacks the key
    parts = {key: objects.modules.get(key, nn.Module()) for key in modules}
    for at, module_load in loads.items():
        mine = [name for name, owners in objects.owners.items() if owners[-1] == at]  # the others are prepared by then
        optims = {name: as_optimizers(objects.optimizers[name]) for name in mine}
        among = {name: [loads[owner] for owner in objects.owners[name]] for name in mine}
        module_load.prepare(ranks, partial(parts.__getitem__, at), optims, among)
    template, options = on_each(ranks, lambda: _template(objects, stored, [*loads.values()], places, given))
    loaded = load(template, stored.checkpoint, options)
    for module_load in loads.values():
        loaded = module_load.install(loaded)
    left = {*loaded.missing_keys, *loaded.mismatched_keys}
    on_each(ranks, lambda: objects.take(template, left))
    return loaded


def _template(
    objects: Objects,
    stored: StoredTraining,
    loads: Sequence[TrainingStateLoad],
    places: Mapping[str, str],
    given: LoadOptions,
) -> tuple[dict[str, Any], LoadOptions]:
    """Return the template and the options for `Store.load`. ``places``: the saved keys of the optimizers."""
    values = {key: value for module_load in loads for key, value in module_load.state.items()}
    rename = renamer(given.rename)
    for key, place in places.items():
        if stored.has_optimizer(place):  # reread, so that it does not count as unread
            values[key] = {**values.get(key, {}), "param_groups": None}
    for key in objects.others:
        has_tensors = any(name.startswith(f"{rename(key)}.") for name in stored.contents.tensors)
        state = plain_state(objects.by_key[key], key) if has_tensors else None
        # None means the whole state, newly created; if it has shards, each rank fills its own
        values[key] = state if any(is_sharded(tensor) for _, tensor in tensors_below(state, key)) else None
    models = {module_load.at: module_load.saved_key for module_load in loads}

    def saved_key(key: str) -> str:
        for at, place in places.items():
            if key.startswith(f"{at}."):  # below this key, the names are already the saved ones
                return place + key.removeprefix(at)
        return next((place for at, place in models.items() if key.startswith(f"{at}.")), rename)(key)

    ignored = [pattern for module_load in loads for pattern in module_load.ignored] or given.ignore_mismatched
    return objects.nested(values), replace(given, rename=Renaming(saved_key, given.rename), ignore_mismatched=ignored)
