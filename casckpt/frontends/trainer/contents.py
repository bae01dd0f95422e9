"""The contents of a training loop's checkpoint: model, optimizer, and the train state of each rank.

The train state of rank 3 is ``train.3``: ranks may hold other things each, in other nestings.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound
from casckpt.frontends.trainer.train_state import check_parts
from casckpt.frontends.training_state.loading import Keeps, TrainingStateLoad, normal_tensors
from casckpt.frontends.training_state.objects import is_optimizer, load_objects, made_of
from casckpt.frontends.training_state.optimizer import tensors_below
from casckpt.frontends.training_state.parts import AnyModel, AnyOptimizer, as_model, as_optimizers
from casckpt.frontends.training_state.plain_state import plain_state
from casckpt.frontends.training_state.save_load import state_of
from casckpt.frontends.training_state.stored import StoredTraining
from casckpt.frontends.training_state.together import Groups, Made, find, is_sharded, made_by_name, make_state
from casckpt.loading.arguments import Renaming, renamer
from casckpt.loading.options import LoadOptions
from casckpt.loading.unread import EVERYTHING, is_generator, that_hold, warn_moved, warn_unread
from casckpt.ranks.ranks import Ranks, on_each
from casckpt.store.objects import is_of_optimizer
from casckpt.store.store import Store
from casckpt.store.types import MatchArguments

log = logging.getLogger("casckpt")

TRAIN, OPTIM = "train", "optim"
_NO_OPTIMIZER = "%s holds no optimizer that can be loaded, but %s: the one that was given stays as it is"
_MEANT = 'pass unread="ignore" (or load_optim_state=False, load_trainer_state=False)'


@runtime_checkable
class TrainModule(Protocol):
    """An object that says by itself what is saved, nested: ``{"model": {...}, "optim": {...}}``, as OLMo-core has it.

    Its `state_dict_to_load` gives what a load is to fill. It is called with an object whose ``state_dict_metadata``
    has the keys of the checkpoint, and both may take ``optim``: is the optimizer's state wanted?
    """

    def state_dict_to_save(self) -> Mapping[str, Any]:
        """Give what to save."""

    def state_dict_to_load(self, metadata: StoredKeys) -> dict[str, Any]:
        """Give what to fill."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Take over what was filled."""


@runtime_checkable
class HasState(Protocol):
    """A train state that is an object, such as `TrainState`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Give what to save of it on this rank."""


TrainModel: TypeAlias = AnyModel | TrainModule | Mapping[str, Any]
"""A model; an object that says by itself what it has; or several models by name, with what else `Store.save` takes."""
AnyTrainState: TypeAlias = Mapping[str, Any] | HasState | None
GroupOptions: TypeAlias = Literal["checkpoint", "keep"]
"""Whether a load sets the options of the optimizer's groups, as learning rates, or keeps those that are there."""
Missing: TypeAlias = Literal["raise", "warn"]
"""What a resume does where something cannot be restored."""


@dataclass(frozen=True)
class StoredKeys:
    """``state_dict_metadata``: what is known of each tensor of a checkpoint, by its key."""

    state_dict_metadata: Mapping[str, Any]


def state_to_save(
    ranks: Ranks, model: TrainModel, optim: AnyOptimizer | None, train_state: AnyTrainState
) -> dict[str, Any]:
    """This rank's part of a checkpoint. Every rank makes the call; what goes wrong on one is raised on all."""

    def make() -> Made:
        state, named = _contents(model, optim)
        if TRAIN in state and (train_state is not None or isinstance(model, Mapping)):
            raise InvalidInput(f"the model gives a key {TRAIN!r}, where the train state goes; rename it")
        if train_state is not None:
            state[TRAIN] = {ranks.rank: _of_one_rank(plain_state(train_state, TRAIN))}
        return state, named

    return make_state(ranks, make)


def _of_one_rank(state: Any) -> Any:
    """A train state. Raises InvalidInput for a tensor in it of which this rank has only a part."""
    with suppress(RecursionError):  # of what contains itself: the save refuses that by its key
        for key, tensor in tensors_below(state, TRAIN):
            if is_sharded(tensor):
                raise InvalidInput(
                    f"{key!r} is sharded over ranks, and a train state is of one rank. Give it beside the model, as in "
                    'save(step, {"model": model, "ema": ema}, optim, train_state), and load it in the same way',
                    key=key,
                )
    return state


def _contents(model: TrainModel, optim: AnyOptimizer | None) -> Made:
    if isinstance(model, Mapping):
        return made_of(_with(model, optim))
    if not isinstance(model, TrainModule):
        return state_of(model, optim)
    if optim is not None:
        raise InvalidInput("a model with state_dict_to_save says by itself what it has; give no optimizer beside it")
    return made_by_name(dict(model.state_dict_to_save()))


def _with(model: Mapping[str, Any], optim: AnyOptimizer | None) -> dict[str, Any]:
    """A dict of whole objects, and the optimizer that was given beside it."""
    if optim is not None and OPTIM in model:
        raise InvalidInput(f"the dict of models has {OPTIM!r}, and an optimizer is given beside it; give one of them")
    beside = optim[0] if isinstance(optim, list | tuple) and len(optim) == 1 else optim
    whole = dict(model) if optim is None else {**model, OPTIM: beside}
    for key in filter(lambda key: is_of_optimizer(whole[key]), whole):
        raise InvalidInput(
            f"{key!r} is the state_dict of an optimizer, and no resume could load it into the optimizer; give the "
            'optimizer itself, beside its module, as in save(step, {"model": model}, optim)',
            key=key,
        )
    return whole


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What a load is asked for. None: if it is there. True: it must be. False: not.

    ``given``: for `Store.load`. ``pre_download``: into the cache of this host first. ``options``: those of the
    optimizer's groups, of the checkpoint or as they are. ``missing``: of a resume, which tells by itself of what is
    left; None for another load. "raise": a train module must find all that it has. "warn": an optimizer that was saved
    by number is left out, rather than refused, and so are tensors of another shape. ``train_state``: what a resume
    sets; without one it reads none.
    """

    optim: bool | None
    train: bool | None
    given: LoadOptions
    pre_download: bool
    options: GroupOptions
    missing: Missing | None = None
    train_state: Any = None


class Restoring:
    """One load, on one rank: the checkpoint that was found, and what goes where."""

    def __init__(self, ranks: Ranks, store: Store, wanted: LoadRequest) -> None:
        self._ranks, self._store, self._wanted, self._given = ranks, store, wanted, wanted.given

    def load(self, ref: str | Checkpoint, model: TrainModel, optim: AnyOptimizer | None) -> tuple[Checkpoint, Any]:
        """Load in place: (checkpoint, this rank's train state or None). Every rank makes the call."""
        optims, wanted = list[Optimizer](), self._wanted
        says_itself = isinstance(model, TrainModule | Mapping)

        def wanted_optimizers() -> list[str]:
            if wanted.optim and optim is None and not says_itself:
                raise InvalidInput("load_optim_state=True needs an optimizer to load into; give optim")
            if wanted.options not in get_args(GroupOptions):
                raise InvalidInput(f'options={wanted.options!r:.80} is not usable; give "checkpoint" or "keep"')
            if wanted.options == "keep" and isinstance(model, TrainModule):
                raise InvalidInput(
                    'a model with load_state_dict sets its optimizer by itself; leave out options="keep"'
                )
            optims.extend(() if wanted.optim is False or says_itself else as_optimizers(optim))
            return [OPTIM] if optims else []

        with normal_tensors():
            stored, groups = find(
                self._ranks, self._store, ref, optimizers=wanted_optimizers, required=False,
                allow_pickle=self._given.allow_pickle, lenient=wanted.missing == "warn",
            )  # fmt: skip
        train = self._train = self._train_template(stored)
        self._given = replace(self._given, meant=self._meant(has_train=bool(train)))
        if isinstance(model, TrainModule):
            state, loaded = self._load_module(stored, model, train)
        elif isinstance(model, Mapping):
            state, loaded = self._load_objects(stored, _with(model, optim), train)
        else:
            state, loaded = self._load_named(stored, groups, model, optims, train)
            if self._ranks.rank == 0 and optims and groups[OPTIM] is None and wanted.missing is None:
                log.warning(_NO_OPTIMIZER, stored.where, stored.at_the_top())
        if self._ranks.rank == 0 and self._given.unread == "warn":
            left = [key for key in loaded.unread_subtrees if not that_hold(self._given.meant, [key])]
            warn_unread(loaded.run, loaded.step, [] if says_itself else left, _MEANT)
            warn_moved(loaded.run, loaded.step, _parts_of(stored) if train else {}, self._ranks.size)
        return loaded, next(iter(state[TRAIN].values())) if train else None

    @property
    def _keeps(self) -> Keeps:
        leave_resized = self._wanted.missing == "warn" and not self._given.strict
        return {"keep_options": self._wanted.options == "keep", "leave_resized": leave_resized}

    def _meant(self, *, has_train: bool) -> list[str]:
        """Below which keys nothing unread is named. Other ranks have had train states. A resume names all itself."""
        if self._wanted.missing is not None:
            return [EVERYTHING]
        meant = [OPTIM] if self._wanted.optim is False else []
        return [*meant, TRAIN] if has_train or self._wanted.train is False else meant

    def _check_there(self, stored: StoredTraining, has_optimizer: bool) -> None:
        """In an exchange: ranks may want other things each."""
        for what, name, is_wanted, there in (
            ("an optimizer", "load_optim_state", self._wanted.optim, has_optimizer),
            ("a train state", "load_trainer_state", self._wanted.train, bool(_ranks_of(stored))),
        ):
            if is_wanted and not there:
                raise NotFound(
                    f"{stored.where} was saved without {what} that could be loaded; it has {stored.at_the_top()}. Pass "
                    f'{name}=None (to resume: missing="warn") to go on without, or choose another checkpoint'
                )
        read, wanted = partial(stored.value, allow_pickle=self._given.allow_pickle), self._wanted
        for at in [f"{TRAIN}.{rank}" for rank in self._train.get(TRAIN, ())]:
            check_parts(wanted.train_state, stored.below(at), at, strict=wanted.missing != "warn", read=read)

    def _train_template(self, stored: StoredTraining) -> dict[str, Any]:
        wanted, mine = self._wanted, self._ranks.rank
        is_set = wanted.missing is None or wanted.train_state is not None
        ranks = _ranks_of(stored) if is_set and wanted.train is not False else []
        return {TRAIN: {mine if mine in ranks else min(ranks): None}} if ranks else {}

    @normal_tensors()
    def _load_named(
        self, stored: StoredTraining, groups: Groups, model: AnyModel, optims: list[Optimizer], train: dict[str, Any]
    ) -> tuple[dict[str, Any], Checkpoint]:
        def make() -> nn.Module:
            self._check_there(stored, stored.has_optimizer())
            return as_model(model)

        loading = TrainingStateLoad(stored, groups, self._given, **self._keeps)
        loading.prepare(self._ranks, make, {OPTIM: optims})
        loading.state.update(train)
        given = replace(self._given, rename=loading.rename, ignore_mismatched=loading.ignored, unread="ignore")
        return loading.state, loading.install(self._fill(stored, loading.state, given))

    def _load_objects(
        self, stored: StoredTraining, whole: dict[str, Any], train: dict[str, Any]
    ) -> tuple[dict[str, Any], Checkpoint]:
        wanted, optims = self._wanted, [key for key, value in whole.items() if is_optimizer(value)]
        has_any, absent = any(map(stored.has_optimizer, optims)), list[str]()
        on_each(self._ranks, lambda: self._check_there(stored, has_any))
        for key in optims:
            is_wanted = stored.has_optimizer(key) or wanted.optim or wanted.missing == "raise"
            if wanted.optim is False or not is_wanted:
                del whole[key]
            if not is_wanted:
                absent.append(f"{key}.param_groups")
            if not is_wanted and self._ranks.rank == 0 and wanted.missing is None:
                log.warning(_NO_OPTIMIZER, stored.where, stored.at_the_top())

        state = whole | train
        loaded = load_objects(
            self._store, self._ranks, state, stored.checkpoint, given=self._given_for_all,
            load=lambda template, _, given: self._fill(stored, template, given), **self._keeps,
        )  # fmt: skip
        return state, replace(loaded, missing_keys=(*loaded.missing_keys, *absent))

    def _saved_key(self, key: str) -> str:
        """The key of the checkpoint for one here. The train state's are no names of a user."""
        return key if key.startswith(f"{TRAIN}.") else renamer(self._given.rename)(key)

    def _load_module(
        self, stored: StoredTraining, model: TrainModule, train: dict[str, Any]
    ) -> tuple[dict[str, Any], Checkpoint]:
        optim = self._wanted.optim
        if optim is None:
            optim = self._wanted.missing == "raise" or bool(stored.keys_below(OPTIM))

        def make() -> dict[str, Any]:
            self._check_there(stored, bool(stored.keys_below(OPTIM)))
            return dict(_template_of(model, StoredKeys(stored.manifest.tensors), optim=optim))

        state = on_each(self._ranks, make) | train
        filled = self._fill(stored, state, self._given_for_all)
        loaded = {key: value for key, value in state.items() if key != TRAIN}
        on_each(self._ranks, lambda: model.load_state_dict(loaded))
        return state, filled

    @property
    def _given_for_all(self) -> LoadOptions:
        return replace(self._given, rename=Renaming(self._saved_key, self._given.rename))

    def _fill(self, stored: StoredTraining, state: dict[str, Any], given: LoadOptions) -> Checkpoint:
        match: MatchArguments = {
            "rename": given.rename, "strict": given.strict, "ignore_mismatched": given.ignore_mismatched
        }  # fmt: skip
        if self._wanted.pre_download:
            on_each(self._ranks, lambda: self._store.pre_download(stored.checkpoint, state, **match))
        return self._store._load(state, stored.checkpoint, given)


def _template_of(model: TrainModule, metadata: StoredKeys, *, optim: bool) -> Mapping[str, Any]:
    """What a load is to fill. The method is given what it takes: not every train module takes both."""
    method: Callable[..., Mapping[str, Any]] = model.state_dict_to_load
    parameters = inspect.signature(method).parameters
    options = {"optim": optim} if "optim" in parameters else {}
    given = [metadata] if parameters.keys() - {"optim"} else []
    return method(*given, **options)


def _parts_of(stored: StoredTraining) -> dict[str, list[int]]:
    """The ranks that saved each part of a train state, but for random generators."""
    found = defaultdict[str, list[int]](list)
    for rank in _ranks_of(stored):
        for part in stored.below(f"{TRAIN}.{rank}"):
            if not is_generator(str(part)):
                found[f"{TRAIN}.{part}"].append(rank)
    return found


def _ranks_of(stored: StoredTraining) -> list[int]:
    """The ranks that saved a train state."""
    return sorted(element for element in stored.below(TRAIN) if isinstance(element, int))
