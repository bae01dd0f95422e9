"""Save a model and an optimizer in one commit, and load them in place; on one rank or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from casckpt.checkpoint.arguments import Rename
from casckpt.checkpoint.handle import Checkpoint
from casckpt.checkpoint.load_plan import Unread
from casckpt.checkpoint.ranks import open_ranks
from casckpt.checkpoint.store import Store
from casckpt.checkpoint.unread import is_within, tell
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.training_state.hub_config import config_files
from casckpt.frontends.training_state.loading import Loading
from casckpt.frontends.training_state.model import model_state
from casckpt.frontends.training_state.optimizer import states_to_save
from casckpt.frontends.training_state.parts import AnyModel, AnyOptimizer, as_model, as_optimizers
from casckpt.frontends.training_state.together import find, make_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def save_model_and_optim_state(
    store: AnyStore,
    model: AnyModel,
    optim: AnyOptimizer | None = None,
    *,
    run: str,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
    **options: Any,
) -> Checkpoint:
    """Save ``model`` and ``optim`` (None: the model alone) as one checkpoint. Neither is changed in any way.

    Either may be a list: the parts of the model that this rank has, several optimizers that share out the parameters.
    Every rank of ``process_group`` (None: all) makes the call, with its own shards of one model, or with its own part
    of the model's parameters. Nothing is gathered: what `torch.distributed.fsdp` calls state_dict_type does not matter.
    A buffer that ranks have in common is stored as the lowest of them has it; where they differ, the log says so once.
    Of a model of Transformers its config travels along, unless ``attachments`` has another one: so `casckpt.export`
    makes a folder that loads.

    Before the first step an optimizer has no state, and none is made for it. ``options``: further ones of `Store.save`
    (``overwrite``, ``ephemeral``, ``attachments``, ``dedup``, ``allow_pickle``, ``threads``, ``no_dist``, ...).

    Raises InvalidInput for an optimizer that was made for another model, for extra state that is not plain data and for
    FSDP without use_orig_params; Conflict, StorageError and RankFailed as `Store.save` does; on every rank alike. After
    an error nothing of the save is visible.
    """
    ranks = open_ranks(process_group, no_dist=bool(options.get("no_dist")))
    opened: list[Store] = []

    def make() -> dict[str, Any]:
        opened.append(as_store(store))
        return state_of(model, optim)

    state = make_state(ranks, make)
    given = options.get("attachments") or {}
    if isinstance(given, Mapping):  # else `Store.save` refuses it, where all ranks hear of that
        options["attachments"] = config_files(model) | dict(given)
    return opened[0].save(state, run=run, step=step, metadata=metadata, process_group=process_group, **options)


def state_of(model: AnyModel, optim: AnyOptimizer | None) -> dict[str, Any]:
    """What this rank saves of them: live tensors under plain names. Raises InvalidInput."""
    whole, optims = as_model(model), as_optimizers(optim)
    state: dict[str, Any] = {"model": model_state(whole)}
    if optims:
        state["optim"] = states_to_save(whole, optims)
    return state


def load_model_and_optim_state(
    store: AnyStore,
    ref: str | Checkpoint,
    model: AnyModel,
    optim: AnyOptimizer | None = None,
    *,
    strict: bool = True,
    ignore_mismatched: Sequence[str] | None = None,
    unread: Unread = "warn",
    rename: Rename = None,
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
    the keys that the checkpoint lacks; a parameter that is tied to one that is loaded is not missing.
    ``ignore_mismatched``: fnmatch patterns of the model's names, as ``head.*``, that are left as they are where the
    checkpoint lacks them or has another shape (``mismatched_keys``); the optimizer's state for them, too. ``rename``:
    from a key of the model here, ``model.<name>``, to one of the checkpoint, as `Store.load` takes it; what was saved
    of an optimizer goes with its parameter. ``unread``: "warn": whole subtrees that are left, other than an optimizer's
    that was not asked for, are told of in the log; "ignore". ``options``: ``cast`` (of the model), ``verify``, ... as
    in `Store.load`.

    Raises Conflict if ranks name different checkpoints, NotFound, MissingKey, Mismatch or InvalidInput before anything
    changes; Damaged or StorageError during the
    read, after which model and optimizer are undefined; on every rank alike.
    """
    ranks = open_ranks(process_group, no_dist=no_dist)
    stored, groups = find(
        ranks, store, ref, optimizer=lambda: bool(as_optimizers(optim)), required=strict, allow_pickle=allow_pickle
    )
    loading = Loading(stored, groups, strict, rename, ignore_mismatched)
    ranks.exchange(lambda: loading.plan(as_model(model), as_optimizers(optim)), loading.check_unused)
    loaded = stored.store.load(
        loading.state, stored.checkpoint, strict=strict, ignore_mismatched=loading.ignored, unread="ignore",
        rename=loading.saved_key, allow_pickle=allow_pickle, process_group=process_group, no_dist=no_dist, **options,
    )  # fmt: skip
    loaded = loading.install(loaded)
    if ranks.rank == 0 and unread == "warn":
        left = [key for key in loaded.unread_subtrees if optim is not None or not is_within(key, "optim")]
        tell(loaded.run, loaded.step, left, 'pass unread="ignore"')
    return loaded
