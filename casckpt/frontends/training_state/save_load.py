"""`save_model_and_optim_state` and `load_model_and_optim_state`, on one rank or many."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Unpack

from casckpt.base.names import check_keywords
from casckpt.contents.checkpoint import Checkpoint
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.hub_config import with_hub_files
from casckpt.frontends.training_state.loading import TrainingStateLoad, normal_tensors
from casckpt.frontends.training_state.model import model_to_save
from casckpt.frontends.training_state.optimizer import states_to_save
from casckpt.frontends.training_state.parts import AnyModel, AnyOptimizer, as_model, as_optimizers
from casckpt.frontends.training_state.stored import MODEL, OPTIM
from casckpt.frontends.training_state.together import Made, find, made_by_name, make_state
from casckpt.loading.options import LoadArguments, LoadOptions
from casckpt.loading.unread import is_within, warn_unread
from casckpt.ranks.ranks import open_ranks
from casckpt.saving.options import SaveArguments


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
    `Store.save` (``metadata``, ``overwrite``, ``ephemeral``, ``attachments``, ``dedup``, ``allow_pickle``,
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
        state[OPTIM] = states_to_save(whole, optims)
    return made_by_name(state)


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
