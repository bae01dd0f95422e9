"""The contents of a training loop's checkpoint: model, optimizer, and the train state of each rank.

The train state of rank 3 is ``train.3``: ranks may hold other things each, in other nestings.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from casckpt.checkpoint.arguments import Rename, renamer
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.loading.load_plan import LoadOptions, MatchArguments, RankArguments, Unread
from casckpt.checkpoint.loading.unread import is_generator, is_within, tell, warn_moved
from casckpt.checkpoint.ranks import Ranks
from casckpt.errors import InvalidInput, Mismatch, NotFound
from casckpt.frontends.training_state.loading import Keeps, TrainingStateLoad, normal_tensors
from casckpt.frontends.training_state.objects import is_optimizer, load_objects, made_of
from casckpt.frontends.training_state.optimizer import tensors_below
from casckpt.frontends.training_state.parts import AnyModel, AnyOptimizer, as_model, as_optimizers
from casckpt.frontends.training_state.plain_state import plain_state
from casckpt.frontends.training_state.save_load import state_of
from casckpt.frontends.training_state.stored import GROUPS, StoredGroups, StoredTraining
from casckpt.frontends.training_state.together import Made, find, is_sharded, made_by_name, make_state
from casckpt.store.store import Store

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
    if optim is None:
        return dict(model)
    if OPTIM in model:
        raise InvalidInput(f"the dict of models has {OPTIM!r}, and an optimizer is given beside it; give one of them")
    return {**model, OPTIM: optim[0] if isinstance(optim, list | tuple) and len(optim) == 1 else optim}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a load is asked for. None: if it is there. True: it must be. False: not.

    ``pre_download``: into the cache of this host first. ``strict``: the names here must be those of the checkpoint, as
    ``rename`` gives them. ``cast``: other dtypes are converted. ``is_train_state_set``: False: a train state is left
    unread, which is told of. ``whole``: a train module must find all that it has. ``lenient``: an optimizer that was
    saved by number is left out, rather than refused, and so are tensors of another shape. ``options``: those of the
    optimizer's groups, of the checkpoint or as they are. ``is_resume``: what is left is told of by that.
    """

    optim: bool | None
    train: bool | None
    pre_download: bool
    strict: bool = True
    ignore_mismatched: Sequence[str] | None = None
    unread: Unread = "warn"
    rename: Rename = None
    cast: bool = False
    is_train_state_set: bool = True
    whole: bool = False
    lenient: bool = False
    options: GroupOptions = "checkpoint"
    is_resume: bool = False


class Restoring:
    """One load, on one rank: the checkpoint that was found, and what goes where."""

    def __init__(self, ranks: Ranks, store: Store, wanted: Wanted, options: RankArguments) -> None:
        self._ranks, self._store, self._wanted, self._options = ranks, store, wanted, options

    def load(self, ref: str | Checkpoint, model: TrainModel, optim: AnyOptimizer | None) -> tuple[Checkpoint, Any]:
        """Load in place: (checkpoint, this rank's train state or None). Every rank makes the call."""
        optims: list[Optimizer] = []

        says_itself = isinstance(model, TrainModule | Mapping)

        def wanted_optimizers() -> list[str]:
            if self._wanted.optim and optim is None and not says_itself:
                raise InvalidInput("load_optim_state=True needs an optimizer to load into; give optim")
            if self._wanted.options not in get_args(GroupOptions):
                raise InvalidInput(f'options={self._wanted.options!r:.80} is not usable; give "checkpoint" or "keep"')
            if self._wanted.options == "keep" and isinstance(model, TrainModule):
                raise InvalidInput(
                    'a model with load_state_dict sets its optimizer by itself; leave out options="keep"'
                )
            optims.extend(() if self._wanted.optim is False or says_itself else as_optimizers(optim))
            return [OPTIM] if optims else []

        stored, groups = self._find(ref, wanted_optimizers)
        train = self._train_template(stored)
        if isinstance(model, TrainModule):
            state, loaded = self._load_module(stored, model, train)
        elif isinstance(model, Mapping):
            state, loaded = self._load_objects(stored, _with(model, optim), train)
        else:
            wanted = self._wanted
            loading = TrainingStateLoad(
                stored, groups, wanted.strict, wanted.rename, wanted.ignore_mismatched, cast=wanted.cast, **self._keeps
            )
            state, loaded = self._load_named(loading, stored, model, optims, train)
            if self._ranks.rank == 0 and optims and groups[OPTIM] is None and not wanted.is_resume:
                log.warning(_NO_OPTIMIZER, stored.where, stored.at_the_top())
        if self._ranks.rank == 0 and self._wanted.unread == "warn":
            if not self._wanted.is_resume and (not says_itself or self._unread_of_module == "ignore"):
                tell(loaded.run, loaded.step, self._left(loaded.unread_subtrees, has_train=bool(train)), _MEANT)
            warn_moved(loaded.run, loaded.step, _parts_of(stored) if train else {}, self._ranks.size)
        return loaded, next(iter(state[TRAIN].values())) if train else None

    @property
    def _keeps(self) -> Keeps:
        wanted = self._wanted
        return {"keep_options": wanted.options == "keep", "leave_resized": wanted.lenient and not wanted.strict}

    @normal_tensors()
    def _find(
        self, ref: str | Checkpoint, optimizers: Callable[[], list[str]]
    ) -> tuple[StoredTraining, dict[str, StoredGroups | None]]:
        find_stored = partial(find, self._ranks, self._store, ref, required=False)
        allow_pickle = self._options.get("allow_pickle", False)
        try:
            return find_stored(optimizers=optimizers, allow_pickle=allow_pickle)
        except Mismatch as error:
            if not self._wanted.lenient or error.key != GROUPS:
                raise
        stored, _ = find_stored(optimizers=lambda: (), allow_pickle=allow_pickle)
        return stored, {OPTIM: None}

    def _left(self, subtrees: Sequence[str], *, has_train: bool) -> list[str]:
        """Of what was left unread, that of which the caller did not say so. Other ranks have had train states, too."""
        meant = [OPTIM] if self._wanted.optim is False else []
        meant += [TRAIN] if has_train or self._wanted.train is False else []
        return [key for key in subtrees if not any(is_within(key, one) for one in meant)]

    def _check_there(self, stored: StoredTraining, has_optimizer: bool) -> None:
        """In an exchange: ranks may want other things each."""
        for what, name, wanted, there in (
            ("an optimizer", "load_optim_state", self._wanted.optim, has_optimizer),
            ("a train state", "load_trainer_state", self._wanted.train, bool(_ranks_of(stored))),
        ):
            if wanted and not there:
                raise NotFound(
                    f"{stored.where} was saved without {what} that could be loaded; it has {stored.at_the_top()}. Pass "
                    f'{name}=None (to resume: missing="warn") to go on without, or choose another checkpoint'
                )

    def _train_template(self, stored: StoredTraining) -> dict[str, Any]:
        wanted = self._wanted.train is not False and self._wanted.is_train_state_set
        ranks = _ranks_of(stored) if wanted else []
        if not ranks:
            return {}
        return {TRAIN: {self._ranks.rank if self._ranks.rank in ranks else min(ranks): None}}

    @normal_tensors()
    def _load_named(
        self,
        loading: TrainingStateLoad,
        stored: StoredTraining,
        model: AnyModel,
        optims: Sequence[Optimizer],
        train: dict[str, Any],
    ) -> tuple[dict[str, Any], Checkpoint]:

        def make() -> nn.Module:
            self._check_there(stored, stored.has_optimizer())
            return as_model(model)

        loading.choose(self._ranks, make, self._wanted.unread)
        self._ranks.exchange(lambda: loading.plan({OPTIM: optims}), loading.check_unused)
        loading.state.update(train)
        loaded = self._fill(stored, loading.state, loading.saved_key, loading.ignored)
        return loading.state, loading.install(loaded)

    def _load_objects(
        self, stored: StoredTraining, whole: dict[str, Any], train: dict[str, Any]
    ) -> tuple[dict[str, Any], Checkpoint]:
        wanted, optims = self._wanted, [key for key, value in whole.items() if is_optimizer(value)]
        has_any, absent = any(map(stored.has_optimizer, optims)), list[str]()
        self._ranks.exchange(lambda: self._check_there(stored, has_any), lambda done: done)
        for key in optims:
            is_wanted = stored.has_optimizer(key) or wanted.optim or wanted.whole
            if wanted.optim is False or not is_wanted:
                del whole[key]
            if not is_wanted:
                absent.append(f"{key}.param_groups")
            if not is_wanted and self._ranks.rank == 0 and not wanted.is_resume:
                log.warning(_NO_OPTIMIZER, stored.where, stored.at_the_top())

        def load(template: Any, _: Checkpoint, to_fill: LoadOptions) -> Checkpoint:
            return self._fill(stored, template, to_fill.rename, to_fill.ignore_mismatched, to_fill.unread)

        given = LoadOptions(
            strict=wanted.strict, ignore_mismatched=wanted.ignore_mismatched, rename=self._saved_key, cast=wanted.cast,
            unread=self._unread_of_module, **self._options,
        )  # fmt: skip
        state = whole | train
        about = (self._store, self._ranks, state, stored.checkpoint)
        loaded = load_objects(*about, given=given, load=load, **self._keeps)
        return state, replace(loaded, missing_keys=(*loaded.missing_keys, *absent))

    def _saved_key(self, key: str) -> str:
        """The key of the checkpoint for one here. The train state's are no names of a user."""
        return key if key.startswith(f"{TRAIN}.") else renamer(self._wanted.rename)(key)

    def _load_module(
        self, stored: StoredTraining, model: TrainModule, train: dict[str, Any]
    ) -> tuple[dict[str, Any], Checkpoint]:
        made: list[dict[str, Any]] = []
        optim = self._wanted.whole or _has_optimizer(stored) if self._wanted.optim is None else self._wanted.optim

        def make() -> None:
            self._check_there(stored, _has_optimizer(stored))
            made.append(dict(_template_of(model, StoredKeys(stored.manifest.tensors), optim=optim)))

        self._ranks.exchange(make, lambda done: done)
        state = made[0] | train
        filled = self._fill(stored, state, self._saved_key, self._wanted.ignore_mismatched, self._unread_of_module)
        loaded = {key: value for key, value in state.items() if key != TRAIN}
        self._ranks.exchange(lambda: bool(model.load_state_dict(loaded)), lambda done: done)
        return state, filled

    @property
    def _unread_of_module(self) -> Unread:
        """`Store.load` says what is left, unless the caller wants a part alone."""
        meant = self._wanted.optim is False or self._wanted.train is False
        return "ignore" if meant else self._wanted.unread

    def _fill(
        self,
        stored: StoredTraining,
        state: dict[str, Any],
        rename: Rename,
        ignored: Sequence[str] | None,
        unread: Unread = "ignore",
    ) -> Checkpoint:
        ref = stored.checkpoint
        match: MatchArguments = {"rename": rename, "strict": self._wanted.strict, "ignore_mismatched": ignored}
        if self._wanted.pre_download:
            self._ranks.exchange(lambda: self._store.pre_download(ref, state, **match), lambda done: done)
        return self._store.load(state, ref, unread=unread, cast=self._wanted.cast, **match, **self._options)


def _template_of(model: TrainModule, metadata: StoredKeys, *, optim: bool) -> Mapping[str, Any]:
    """What a load is to fill. The method is given what it takes: not every train module takes both."""
    method: Callable[..., Mapping[str, Any]] = model.state_dict_to_load
    parameters = inspect.signature(method).parameters
    options = {"optim": optim} if "optim" in parameters else {}
    given = [metadata] if parameters.keys() - {"optim"} else []
    return method(*given, **options)


def _has_optimizer(stored: StoredTraining) -> bool:
    return bool(stored.keys_below(OPTIM))


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
