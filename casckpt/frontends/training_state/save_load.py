"""Save a model and an optimizer in one commit, and load them in place; on one rank or many."""

from __future__ import annotations

from typing import Any, Unpack

from casckpt.base.keywords import check_keywords
from casckpt.contents.checkpoint import Checkpoint
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.hub_config import with_config
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
from casckpt.store.store import Store


def save_model_and_optim_state(
    store: AnyStore,
    model: AnyModel,
    optim: AnyOptimizer | None = None,
    *,
    run: str,
    step: int,
    **options: Unpack[SaveArguments],
) -> Checkpoint:
    """Save ``model`` and ``optim`` (None: the model alone) as one checkpoint. Neither is changed in any way.

    Either may be a list: the parts of the model that this rank has, several optimizers that share out the parameters.
    Every rank of ``process_group`` (None: all) makes the call, with its own shards of one model, or with its own part
    of the model's parameters. Nothing is gathered: what `torch.distributed.fsdp` calls state_dict_type does not matter.
    A buffer that ranks have in common is stored as the lowest of them has it; where they differ, the log says so once.
    A parameter that differs is refused; see ``check_replicas`` of `Store.save`.
    Of a model of Transformers its config travels along, unless ``attachments`` has another one: so `casckpt.export`
    makes a folder that loads.

    Before the first step an optimizer has no state, and none is made for it. ``options``: those of `Store.save`
    (``metadata``, ``overwrite``, ``ephemeral``, ``attachments``, ``dedup``, ``allow_pickle``, ``threads``, ...).

    Raises InvalidInput for an optimizer that was made for another model, for extra state that is not plain data and for
    FSDP without use_orig_params; Conflict, StorageError and RankFailed as `Store.save` does; on every rank alike. After
    an error nothing of the save is visible.
    """
    check_keywords("save_model_and_optim_state", options, SaveArguments)
    ranks = open_ranks(options.get("process_group"), no_dist=options.get("no_dist", False))
    opened: list[Store] = []

    def make() -> Made:
        opened.append(as_store(store))
        return state_of(model, optim)

    state = make_state(ranks, make)
    options["attachments"] = with_config(model, options.get("attachments"))
    return opened[0].save(state, run=run, step=step, **options)


def state_of(model: AnyModel, optim: AnyOptimizer | None) -> Made:
    """Give what this rank saves of them: live tensors under plain names. Raises InvalidInput."""
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
    """Load into the tensors of ``model`` and ``optim``. No optimizer step is taken.

    What state the optimizer has not made yet is made in the dtype in which it was saved, on the parameter's device.
    Parameters are matched by name, whatever the number and order of groups; where saved groups that are one group here
    differ in an option, the one here stays. ``optim=None``: what was saved of an optimizer is not read. Every rank of
    ``process_group`` makes the call; ``no_dist``: this process loads alone.

    ``strict``: the names of the model and of the optimizer's parameters must be those of the checkpoint, and it must
    hold an optimizer if one is given; else what only one side has is left as it is. ``missing_keys`` of the result are
    the keys that the checkpoint lacks; a parameter that is tied to one that is loaded is not missing.
    ``ignore_mismatched``: fnmatch patterns of the model's names, as ``head.*``, that are left as they are where the
    checkpoint lacks them or has another shape (``mismatched_keys``); the optimizer's state for them, too. ``rename``:
    from a key of the model here, ``model.<name>``, to one of the checkpoint, as `Store.load` takes it; what was saved
    of an optimizer goes with its parameter. The names of the model may stand at the top of the checkpoint; what has
    none of its own is looked for by the name that it had before PEFT put adapters into the model. ``cast``: convert to
    the dtypes of the model; state that was saved in the dtype of its parameter follows it, and all other state, and
    ``step``, stay as they were saved. ``unread``: "warn" (the default): the log says what is left of the model and of
    the checkpoint, other than an optimizer that was not asked for, and a load that would fill nothing, or misses more
    than a tenth of the model by its names, raises MissingKey with the ``rename`` that helps; "ignore". ``options``:
    also ``verify``, ... as in `Store.load`.

    A module that saves keys which load_state_dict does not read (bitsandbytes' Linear4bit) is a Mismatch that names
    them, unless ``ignore_mismatched`` matches all names of the module: then it is left as it is.

    Raises Conflict if ranks name different checkpoints, NotFound, MissingKey, Mismatch or InvalidInput before anything
    changes; Damaged or StorageError during the read, after which both are undefined; on every rank alike.
    """
    check_keywords("load_model_and_optim_state", options, LoadArguments)
    given = LoadOptions(**options)
    ranks = open_ranks(given.process_group, no_dist=given.no_dist)
    stored, groups = find(
        ranks, store, ref, optimizers=lambda: [OPTIM] if as_optimizers(optim) else [], required=given.strict,
        allow_pickle=given.allow_pickle,
    )  # fmt: skip
    loading = TrainingStateLoad(stored, groups, given)
    loading.prepare(ranks, lambda: as_model(model), {OPTIM: as_optimizers(optim)})
    options |= {"ignore_mismatched": loading.ignored, "unread": "ignore", "rename": loading.rename}
    loaded = loading.install(stored.store.load(loading.state, stored.checkpoint, **options))
    if ranks.rank == 0 and given.unread == "warn":
        left = [key for key in loaded.unread_subtrees if optim is not None or not is_within(key, OPTIM)]
        warn_unread(loaded.run, loaded.step, left, 'pass unread="ignore"')
    return loaded
