"""Saves and loads the contents of a training checkpoint: a model, its optimizer, and the train state of each rank.

Each rank has its own key, such as ``train.3``, because train states may differ in content and nesting.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeAlias, Unpack, get_args, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from casckpt.base.names import check_keywords
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.hub_config import with_hub_files
from casckpt.frontends.training_state.loading import Keeps, TrainingStateLoad, normal_tensors, renamed_beside
from casckpt.frontends.training_state.model import model_to_save
from casckpt.frontends.training_state.names import Parameters
from casckpt.frontends.training_state.objects import Objects, load_objects, optimizers_in
from casckpt.frontends.training_state.optimizer import states_to_save, tensors_below
from casckpt.frontends.training_state.parts import AnyModel, AnyOptimizer, Several, as_model, as_optimizers
from casckpt.frontends.training_state.settings import check_schedules
from casckpt.frontends.training_state.slices import is_sharded
from casckpt.frontends.training_state.stored import MODEL, OPTIM, StoredTraining
from casckpt.frontends.training_state.together import Groups, Made, find, made_by_name, make_state
from casckpt.frontends.training_state.train_state import check_fillable, check_parts, plain_state
from casckpt.loading.options import LoadOptions
from casckpt.loading.unread import EVERYTHING, is_generator, is_within, that_hold, warn_moved, warn_unread
from casckpt.ranks.ranks import Ranks, on_each, open_ranks
from casckpt.store.objects import is_of_optimizer
from casckpt.store.store import Store
from casckpt.store.types import LoadArguments, MatchArguments, SaveArguments

log = logging.getLogger("casckpt")

TRAIN = "train"
_NO_OPTIMIZER = "%s has no optimizer that can be loaded (it has %s): the given optimizer is left unchanged"
_NO_TRAIN = "%s has no train state (it has %s): the given train state is left unchanged"
_MEANT = 'pass unread="ignore" (or load_optim_state=False, load_trainer_state=False)'


@runtime_checkable
class SavedModule(Protocol):
    """An object that returns its own nested state, such as ``{"model": {...}, "optim": {...}}`` in OLMo-core."""

    def state_dict_to_save(self) -> Mapping[str, Any]:
        """Return the state to save."""


@runtime_checkable
class TrainModule(SavedModule, Protocol):
    """A `SavedModule` that can also load its state.

    `state_dict_to_load` returns the state that a load fills. The ``state_dict_metadata`` of its argument has the keys
    of the checkpoint. Both methods may accept ``optim``, which says whether to include the optimizer's state.
    """

    def state_dict_to_load(self, metadata: Any) -> dict[str, Any]:
        """Return the state to fill."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Load the filled state."""


@runtime_checkable
class HasState(Protocol):
    """An object with a train state, such as `TrainState`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state to save on this rank."""


TrainModel: TypeAlias = AnyModel | SavedModule | Mapping[str, Any]
"""A model, an object that returns its own state, or a dict with models by name and other values for `Store.save`."""
AnyTrainState: TypeAlias = Mapping[str, Any] | HasState | None
GroupOptions: TypeAlias = Literal["checkpoint", "keep"]
"""Whether a load overwrites the options of the optimizer's groups, such as learning rates, or keeps them."""
Missing: TypeAlias = Literal["raise", "warn"]
"""What a resume does about state that it cannot restore."""


def save_model_and_optim_state(
    store: AnyStore,
    model: AnyModel,
    optim: AnyOptimizer | None = None,
    *,
    run: str,
    step: int,
    **options: Unpack[SaveArguments],
) -> Checkpoint:
    """Save ``model`` and ``optim`` as one checkpoint, without changing them.

    If ``optim`` is None, save the model alone. Either may be a list: the parts of the model on this rank, or several
    optimizers that share the parameters. Every rank of ``process_group`` (None: all ranks) makes the call, with its
    own shards of one model, or with its own part of the model's parameters. Tensors are not gathered, and the
    state_dict_type of `torch.distributed.fsdp` does not matter. If the values of a buffer differ across ranks, the
    value of the lowest rank is stored, and the log mentions this once. If the values of a parameter differ, an error
    is raised; see ``check_replicas`` of `Store.save`. The config of a Transformers model is attached unless
    ``attachments`` has one, so that Transformers can load the export.

    Before its first step, an optimizer has no state, and the save does not create any. ``options``: the options of
    `Store.save` (``metadata``, ``overwrite``, ``ephemeral``, ``attachments``, ``allow_pickle``,
    ``threads``, ...).

    Raises InvalidInput for an optimizer of a different model, for extra state that is not plain data, and for FSDP
    without use_orig_params. Raises Conflict, StorageError and RankFailed in the same cases as `Store.save`. All errors
    are raised on every rank. After an error, no part of the save is visible.
    """
    check_keywords("save_model_and_optim_state", options, SaveArguments)
    ranks = open_ranks(options.get("process_group"), no_dist=options.get("no_dist", False))
    opened = cache(partial(as_store, store))

    def make() -> Made:
        opened()  # opened here so that all ranks raise its error
        return state_of(model, optim)

    state = make_state(ranks, make)
    options["attachments"] = with_hub_files(model, options.get("attachments"))
    return opened().save(state, run=run, step=step, **options)


def state_of(model: AnyModel, optim: AnyOptimizer | None) -> Made:
    """Return the state that this rank saves, with live tensors under plain names. Raises InvalidInput."""
    whole, optims = as_model(model), as_optimizers(optim)
    state: dict[str, Any] = {MODEL: model_to_save(whole)}
    if optims:
        state[OPTIM] = states_to_save(Parameters.of(whole), optims)
    return made_by_name(state)


def state_to_save(
    ranks: Ranks, model: TrainModel, optim: AnyOptimizer | None, train_state: AnyTrainState
) -> dict[str, Any]:
    """Return this rank's part of a checkpoint. Every rank makes the call. An error on one rank is raised on all."""

    def make() -> Made:
        state, named = _contents(model, optim)
        if TRAIN in state and (train_state is not None or isinstance(model, Mapping)):
            raise InvalidInput(f"the model has the key {TRAIN!r}, which is reserved for the train state; rename it")
        if train_state is not None:
            state[TRAIN] = {ranks.rank: _of_one_rank(plain_state(train_state, TRAIN))}
        return state, named

    return make_state(ranks, make)


def _of_one_rank(state: Any) -> Any:
    """Return the train state ``state``.

    Raises InvalidInput if it contains a tensor of which this rank has only a part.
    """
    with suppress(RecursionError):  # the state contains itself: the save rejects it and names the key
        for key, tensor in tensors_below(state, TRAIN):
            if is_sharded(tensor):
                raise InvalidInput(
                    f"{key!r} is sharded across ranks, but a train state belongs to one rank. Pass it next to the "
                    'model, as in save(step, {"model": model, "ema": ema}, optim, train_state), and load it in the '
                    "same way",
                    key=key,
                )
    return state


def _contents(model: TrainModel, optim: AnyOptimizer | None) -> Made:
    if isinstance(model, Mapping):
        return Objects(_with(model, optim)).made()
    if not isinstance(model, SavedModule):
        return state_of(model, optim)
    if optim is not None:
        raise InvalidInput(
            "a model with state_dict_to_save also returns its optimizer's state; do not pass an optimizer"
        )
    return made_by_name(dict(model.state_dict_to_save()))


def _with(model: Mapping[str, Any], optim: AnyOptimizer | None) -> dict[str, Any]:
    """Return a dict of models with the separate optimizers added as one."""
    if optim is not None and OPTIM in model:
        raise InvalidInput(
            f"the dict of models has the key {OPTIM!r}, but an optimizer was also passed separately; pass only one of "
            "them"
        )
    optims = as_optimizers(optim)
    whole = {**model, OPTIM: optims[0] if len(optims) == 1 else Several(optims)} if optims else dict(model)
    for key in filter(lambda key: is_of_optimizer(whole[key]), whole):
        raise InvalidInput(
            f"{key!r} is the state_dict of an optimizer, which a resume cannot load into the optimizer; pass the "
            'optimizer itself along with its module, as in save(step, {"model": model}, optim)',
            key=key,
        )
    return whole


@normal_tensors()
def load_model_and_optim_state(
    store: AnyStore,
    ref: str | Checkpoint,
    model: AnyModel,
    optim: AnyOptimizer | None = None,
    **options: Unpack[LoadArguments],
) -> Checkpoint:
    """Load into the tensors of ``model`` and ``optim``, without running an optimizer step.

    If the optimizer lacks state for a parameter, the load creates it with the saved dtype on the parameter's device.
    Parameters are matched by name. The number and order of groups do not matter. If several saved groups correspond to
    one group of ``optim`` and differ in an option, the current value of the option is kept. ``optim=None``: do not
    read a saved optimizer. Every rank of ``process_group`` makes the call. ``no_dist``: this process loads alone.

    ``strict``: the model and the optimizer must have the same names as the checkpoint, and the checkpoint must have an
    optimizer if you pass one. If ``strict`` is False, the load skips names that only one side has. The ``missing_keys``
    of the result are the keys that the checkpoint lacks. A parameter that is tied to a loaded one is not missing.
    ``ignore_mismatched``: fnmatch patterns of the model's names, such as ``head.*``. If the checkpoint lacks a matching
    name or has a different shape for it, the tensor and its optimizer state are left unchanged (``mismatched_keys``).
    ``rename``: maps a key of the model, ``model.<name>``, to a key of the checkpoint, as in `Store.load`. Saved
    optimizer state is renamed along with its parameter. The model's names may also be at the top level of the
    checkpoint. If the checkpoint lacks a name, the load also tries the name that the parameter had before PEFT added
    adapters. ``cast``: convert to the model's dtypes. State that was saved in the dtype of its parameter is converted
    with it. All other state, including ``step``, keeps the saved dtype. ``unread``: with "warn" (the default), the log
    lists the skipped names of the model and of the checkpoint, except for an optimizer that you do not load. A load
    that would fill nothing, or that misses more than a tenth of the model's names, raises MissingKey and suggests a
    ``rename``. "ignore" disables both. ``options``: also accepts ``verify`` and other options of `Store.load`.

    Modules with a `_load_from_state_dict` or a pre-hook of their own, and a model with its own load_state_dict, receive
    names and shapes that do not fit in place. If something still does not fit, the load raises Mismatch after the rest
    of the model has been loaded. Sharded tensors are not converted.

    Some modules save keys that load_state_dict does not read. For such a module, the load raises a Mismatch that names
    the keys. If ``ignore_mismatched`` matches all names of the module, it is left unchanged instead. The quantized
    weights of bitsandbytes are loaded together with their statistics, or raise Mismatch if they were quantized in a
    different way.

    Raises Conflict if the ranks name different checkpoints, and NotFound, MissingKey, Mismatch and InvalidInput, all
    before anything changes. During the read, raises Damaged or StorageError, after which the contents of ``model`` and
    ``optim`` are undefined. All errors are raised on every rank.
    """
    check_keywords("load_model_and_optim_state", options, LoadArguments)
    given = LoadOptions(**options)
    ranks = open_ranks(given.process_group, no_dist=given.no_dist)
    stored, groups = find(
        ranks, store, ref, optimizers=lambda: [OPTIM] if as_optimizers(optim) else [], required=given.strict,
        allow_pickle=given.allow_pickle,
    )  # fmt: skip
    loaded = TrainingStateLoad(stored, groups, given).load(
        ranks, lambda: as_model(model), {OPTIM: as_optimizers(optim)},
        lambda state, given: stored.store._load(state, stored.checkpoint, given),
    )  # fmt: skip
    if ranks.rank == 0 and given.unread == "warn":
        left = [key for key in loaded.unread_subtrees if optim is not None or not is_within(key, OPTIM)]
        warn_unread(loaded.run, loaded.step, left, 'pass unread="ignore"')
    return loaded


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The arguments of a load.

    ``optim``, ``train``: whether to load the optimizer and the train state; None: if the checkpoint has them.
    ``given``: the arguments for `Store.load`. ``pre_download``: first fetch the checkpoint into this host's cache.
    ``options``: whether to overwrite the options of the optimizer's groups, or to keep them. ``missing``: the
    ``missing`` argument of a resume, which logs unread keys itself; None for any other load. If it is "raise", the
    checkpoint must have all state of a train module. If it is "warn", the load skips an optimizer that was saved by
    number, and tensors with a different shape. ``train_state``: the given one, which is set after the load. If it is
    None, a resume does not read a train state.
    """

    optim: bool | None
    train: bool | None
    given: LoadArguments
    pre_download: bool
    options: GroupOptions
    missing: Missing | None = None
    train_state: Any = None


class Restoring:
    """A load on one rank."""

    def __init__(self, ranks: Ranks, store: Store, wanted: LoadRequest) -> None:
        self._ranks, self._store, self._wanted, self._given = ranks, store, wanted, LoadOptions(**wanted.given)

    def load(self, ref: str | Checkpoint, model: TrainModel, optim: AnyOptimizer | None) -> tuple[Checkpoint, Any]:
        """Load in place. Return the checkpoint, and this rank's train state or None. Every rank makes the call."""
        wanted, says_itself = self._wanted, isinstance(model, TrainModule | Mapping)
        optims = cache(lambda: [] if wanted.optim is False or says_itself else [*as_optimizers(optim)])

        def wanted_optimizers() -> list[str]:
            check_fillable(wanted.train_state)
            if wanted.optim and optim is None and not says_itself:
                raise InvalidInput("load_optim_state=True requires an optimizer to load into; pass optim")
            if wanted.options not in get_args(GroupOptions):
                raise InvalidInput(f'options={wanted.options!r:.80} is not valid; pass "checkpoint" or "keep"')
            if wanted.options == "keep" and isinstance(model, TrainModule):
                raise InvalidInput(
                    'a model with load_state_dict sets the state of its optimizer itself; omit options="keep"'
                )
            return [OPTIM] if optims() else []

        with normal_tensors():
            stored, groups = find(
                self._ranks, self._store, ref, optimizers=wanted_optimizers, required=False,
                allow_pickle=self._given.allow_pickle, lenient=wanted.missing == "warn",
            )  # fmt: skip
        train = self._train = self._train_template(stored)
        self._given = replace(self._given, meant=self._meant())
        if isinstance(model, TrainModule):
            loaded = self._load_module(stored, model)
        elif isinstance(model, Mapping):
            loaded = self._load_objects(stored, _with(model, optim))
        else:
            loaded = self._load_named(stored, groups, model, optims())
        lacks_optimizer = any(key.endswith(".param_groups") for key in loaded.missing_keys)
        if self._ranks.rank == 0 and lacks_optimizer and wanted.missing is None:
            log.warning(_NO_OPTIMIZER, stored.where, stored.at_the_top())
        is_left = wanted.missing is None and wanted.train_state is not None and wanted.train is not False and not train
        if self._ranks.rank == 0 and is_left:
            log.warning(_NO_TRAIN, stored.where, stored.at_the_top())
        if self._ranks.rank == 0 and self._given.unread == "warn":
            left = [key for key in loaded.unread_subtrees if not that_hold(self._given.meant, [key])]
            warn_unread(loaded.run, loaded.step, [] if says_itself else left, _MEANT)
            warn_moved(loaded.run, loaded.step, _parts_of(stored) if train else {}, self._ranks.size)
        return loaded, next(iter(train[TRAIN].values())) if train else None

    @property
    def _keeps(self) -> Keeps:
        leave_resized = self._wanted.missing == "warn" and not self._given.strict
        return {"keep_options": self._wanted.options == "keep", "leave_resized": leave_resized}

    def _meant(self) -> list[str]:
        """Return the keys whose unread parts are not logged here.

        For a resume, these are all keys, because it logs them itself.
        """
        if self._wanted.missing is not None:
            return [EVERYTHING]
        meant = [OPTIM] if self._wanted.optim is False else []
        return [*meant, TRAIN] if self._train or self._wanted.train is False else meant

    def _check_there(self, stored: StoredTraining, has_optimizer: bool) -> None:
        """Raise NotFound, Mismatch or MissingKey if a part that this rank must load is missing or does not fit."""
        for what, name, is_wanted, there in (
            ("optimizer", "load_optim_state", self._wanted.optim, has_optimizer),
            ("train state", "load_trainer_state", self._wanted.train, bool(_ranks_of(stored))),
        ):
            if is_wanted and not there:
                raise NotFound(
                    f"{stored.where} has no {what} that can be loaded; it has {stored.at_the_top()}. To continue "
                    f'without it, pass {name}=None (in a resume: missing="warn"), or choose a different checkpoint'
                )
        read, wanted = partial(stored.value, allow_pickle=self._given.allow_pickle), self._wanted
        for at in [f"{TRAIN}.{rank}" for rank in self._train.get(TRAIN, ())]:
            check_parts(wanted.train_state, stored.below(at), at, strict=wanted.missing != "warn", read=read)
            if wanted.options == "keep" and wanted.train_state is not None:
                check_schedules(wanted.train_state, read(at))

    def _train_template(self, stored: StoredTraining) -> dict[str, Any]:
        wanted, mine = self._wanted, self._ranks.rank
        is_set = wanted.missing is None or wanted.train_state is not None
        ranks = _ranks_of(stored) if is_set and wanted.train is not False else []
        return {TRAIN: {mine if mine in ranks else min(ranks): None}} if ranks else {}

    @normal_tensors()
    def _load_named(self, stored: StoredTraining, groups: Groups, model: Any, optims: list[Optimizer]) -> Checkpoint:
        def make() -> nn.Module:
            self._check_there(stored, stored.has_optimizer())
            return as_model(model)

        loading = TrainingStateLoad(stored, groups, self._given, **self._keeps)
        return loading.load(
            self._ranks, make, {OPTIM: optims}, lambda state, given: self._fill(stored, state | self._train, given)
        )

    def _load_objects(self, stored: StoredTraining, whole: dict[str, Any]) -> Checkpoint:
        optims = on_each(self._ranks, lambda: optimizers_in(whole))
        there = set(filter(stored.has_optimizer, optims))
        on_each(self._ranks, lambda: self._check_there(stored, bool(there)))
        is_required = self._wanted.optim or self._wanted.missing == "raise"
        absent = [] if is_required else [key for key in optims if key not in there]
        loaded = load_objects(
            self._store, self._ranks, whole | self._train, stored.checkpoint, given=renamed_beside(self._given, TRAIN),
            load=lambda template, _, given: self._fill(stored, template, given),
            without=optims if self._wanted.optim is False else absent, **self._keeps,
        )  # fmt: skip
        return replace(loaded, missing_keys=(*loaded.missing_keys, *(f"{key}.param_groups" for key in absent)))

    def _load_module(self, stored: StoredTraining, model: TrainModule) -> Checkpoint:
        optim = self._wanted.optim
        if optim is None:
            optim = self._wanted.missing == "raise" or bool(stored.keys_below(OPTIM))

        def make() -> dict[str, Any]:
            self._check_there(stored, bool(stored.keys_below(OPTIM)))
            return dict(_template_of(model, SimpleNamespace(state_dict_metadata=stored.contents.tensors), optim=optim))

        state = on_each(self._ranks, make) | self._train
        loaded = self._fill(stored, state, renamed_beside(self._given, TRAIN))
        on_each(self._ranks, lambda: model.load_state_dict({k: v for k, v in state.items() if k != TRAIN}))
        return loaded

    def _fill(self, stored: StoredTraining, state: dict[str, Any], given: LoadOptions) -> Checkpoint:
        match: MatchArguments = {
            "rename": given.rename, "strict": given.strict, "ignore_mismatched": given.ignore_mismatched
        }  # fmt: skip
        if self._wanted.pre_download:
            on_each(self._ranks, lambda: self._store.pre_download(stored.checkpoint, state, **match))
        return self._store._load(state, stored.checkpoint, given)


def _template_of(model: TrainModule, metadata: SimpleNamespace, *, optim: bool) -> Mapping[str, Any]:
    """Return the state to fill. The method of a train module may lack either parameter."""
    method: Callable[..., Mapping[str, Any]] = model.state_dict_to_load
    parameters = inspect.signature(method).parameters
    options = {"optim": optim} if "optim" in parameters else {}
    given = [metadata] if parameters.keys() - {"optim"} else []
    return method(*given, **options)


def _parts_of(stored: StoredTraining) -> dict[str, list[int]]:
    """Return, for each part of a train state except the random generators, the ranks that saved it."""
    found = defaultdict[str, list[int]](list)
    for rank in _ranks_of(stored):
        for part in stored.below(f"{TRAIN}.{rank}"):
            if not is_generator(str(part)):
                found[f"{TRAIN}.{part}"].append(rank)
    return found


def _ranks_of(stored: StoredTraining) -> list[int]:
    """Return the ranks that saved a train state."""
    return sorted(element for element in stored.below(TRAIN) if isinstance(element, int))
