"""The checkpointer of a training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from casckpt.base.keywords import check_keywords
from casckpt.base.names import check_attachment_name, check_step
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, InvalidInput
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.trainer.contents import (
    OPTIM,
    TRAIN,
    AnyTrainState,
    GroupOptions,
    HasState,
    LoadRequest,
    Missing,
    Restoring,
    TrainModel,
    state_to_save,
)
from casckpt.frontends.trainer.failures import Failures, HeardFuture, will_repeat
from casckpt.frontends.trainer.janitor import Janitor
from casckpt.frontends.trainer.resumed import Resumed, check_given, of_all_ranks, outcome_of
from casckpt.frontends.trainer.run_checkpoints import RunCheckpoints, newest_together
from casckpt.frontends.trainer.settings import DueArguments, Kind, StepArguments, TrainerArguments, TrainerSettings
from casckpt.frontends.trainer.summary import SaveSummary
from casckpt.frontends.trainer.throttle import throttled
from casckpt.frontends.trainer.train_state import restore_rng, rng_state
from casckpt.frontends.training_state.hub_config import config_files
from casckpt.frontends.training_state.parts import AnyOptimizer, as_optimizers
from casckpt.frontends.training_state.stored import MODEL
from casckpt.loading.options import LoadOptions
from casckpt.ranks.ranks import Ranks, everyone, open_ranks, this_rank
from casckpt.store.types import CheckReplicas, FillArguments, MatchArguments, Rename, SaveArguments, Unread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


class _Overrides(TrainerArguments, total=False):
    run: str


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig(TrainerSettings):
    """The keyword arguments of `Checkpointer`, which describes them. Raises InvalidInput for what makes no sense."""

    def build(
        self, store: AnyStore, process_group: ProcessGroup | None = None, **overrides: Unpack[_Overrides]
    ) -> Checkpointer:
        """A checkpointer for ``store``, with ``overrides`` over these settings. Every rank makes the call."""
        settings = vars(self)
        unknown = sorted(overrides.keys() - settings.keys())
        if unknown:
            raise InvalidInput(f"a checkpointer has no setting {unknown[0]!r}; it has {', '.join(sorted(settings))}")
        return Checkpointer(store, process_group=process_group, **(settings | dict(overrides)))


class Checkpointer(RunCheckpoints):
    """Saves and loads the checkpoints of one run, and keeps their number down. Every rank makes the same calls.

    ``keep``, ``max_checkpoints``, ``fixed_steps``: what of the permanent checkpoints stays once a new one is committed
    (see `Rotation`; with neither of the first two everything stays, ephemeral ones too). ``thin``: what those that stay
    leave out, and which of them stay whole, as ``{"drop": ["optim.*"], "keep_last": 2}``. ``save_interval``,
    ``fixed_steps``, ``last_step``, ``ephemeral_save_interval``, ``ephemeral_cooldown``: when `save_if_due` saves (see
    `due`). ``last_step``: of the training. None: `close` warns of steps since the last save.
    ``max_steps_at_risk``: `save_if_due` waits for the save in the background before more steps than that could be lost,
    whenever the job dies; no less than the interval. None: it waits when the next save is due, so up to two intervals.
    ``max_failures``: after so many saves in the background that failed in a row, over 15 minutes or more, the next one
    is made in the foreground and raises its failure. None: failures that may pass, as of the storage, are only logged.
    ``gc``: after a save, delete what is forgotten and needed by nobody, on rank 0, beside the training.

    ``overwrite``: of steps that exist. ``save_threads``, ``load_threads``: of each rank. ``throttle``: at most so many
    ranks of a node upload at the same time. ``work_dir``: a folder of this node for the locks of that (default: in the
    folder for temporary files). ``pre_download``: fetch a checkpoint into the cache of this node before it is loaded.
    ``frozen``: tensors that do not change, as `Store.save` takes them: of these only a sample is looked at.
    ``compress``: store what changed of each tensor, as for `Store.save`. ``health``: look for NaN in what changed; a
    checkpoint that holds any is unhealthy, and so retention keeps the newest healthy one beside it.
    ``check_replicas``, ``owners``: of what several ranks hold, as for `Store.save`. ``allow_pickle``: for train state,
    and entries of an optimizer's state, that are neither tensors nor plain data. Raises InvalidInput.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        run: str,
        process_group: ProcessGroup | None = None,
        **settings: Unpack[TrainerArguments],
    ) -> None:
        check_keywords("Checkpointer", settings, TrainerArguments)
        self.config = CheckpointerConfig(run=run, **settings)
        super().__init__(throttled(as_store(store), self.config.throttle, self.config.work_dir), run)
        self.summary: SaveSummary | None = None
        self.process_group = process_group
        self._rotation = self.config.rotation
        self._janitor = Janitor(self.store)
        self._files: dict[str, bytes] = {}
        self._pending: _Pending | None = None
        self._failures = Failures(self.config.max_failures, self.store.repository.clock)
        self.saved_step: int | None = None
        self._begun: int | None = None
        self._reached: int | None = None
        self._told_of_space = False
        self._checked: bool | None = None  # False: before the optimizer had state
        self.resumed: Resumed | None = None
        """What the last `resume` did; None if it found nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._settle()

    # saving

    def save(
        self,
        step: int,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: AnyTrainState = None,
        **options: Unpack[StepArguments],
    ) -> Checkpoint:
        """Save, and return once the checkpoint is durable and visible; then forget what retention does not keep.

        ``model``, ``optim``: or lists of them; or as the model an object with state_dict_to_save, state_dict_to_load
        and load_state_dict, or a dict of several models, as ``{"model": model, "ema": ema}``, which may hold all that
        `Store.save` takes. ``train_state``: of this rank: a nested mapping of tensors, plain data and objects with
        state_dict, or one such object, as `TrainState`. ``overwrite``: None for the checkpointer's setting.
        ``ephemeral``, ``attachments``, ``metadata``, ``metrics``, ``healthy``: as for `Store.save`.

        Raises as `Store.save` does, on every rank alike; then nothing of the save is visible, and the same step can be
        saved again.
        """
        check_keywords("Checkpointer.save", options, StepArguments)
        begun = time.monotonic()
        ranks, _ = self._begin()
        state = state_to_save(ranks, model, optim, train_state)
        saved = self.store.save(state, run=self.run, step=step, **self._save_arguments(model, **options))
        self._files.clear()
        self._failures.note(None)
        self.saved_step = saved.step
        seconds = time.monotonic() - begun
        self._after(saved, seconds, seconds, leads=ranks.rank == 0)
        return saved

    def save_async(
        self,
        step: int,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: AnyTrainState = None,
        **options: Unpack[StepArguments],
    ) -> Future[Checkpoint]:
        """Like `save`, but returns once the state is copied; it may change from then on. One save runs at a time.

        It raises what goes wrong before that. What goes wrong later, the future raises, and `wait` and `close` do. The
        next save raises it on every rank if it would fail alike (InvalidInput, or Conflict over a step that is already
        saved), unless all ranks have asked the future. What may pass, such as StorageError, the next save or load logs.
        After ``max_failures`` of these this call waits for its save, and raises its failure.
        """
        check_keywords("Checkpointer.save_async", options, StepArguments)
        begun = time.monotonic()
        ranks, waits = self._begin()
        state = state_to_save(ranks, model, optim, train_state)
        saving = self.store.save_async(state, run=self.run, step=step, **self._save_arguments(model, **options))
        blocked = time.monotonic() - begun
        done = HeardFuture()

        def finish(saving: Future[Checkpoint]) -> None:
            try:
                saved = saving.result()
                self._after(saved, blocked, time.monotonic() - begun, leads=ranks.rank == 0)
            except BaseException as error:  # noqa: BLE001 - the future raises it; without, it would never end
                done.set_exception(error)
            else:
                done.set_result(saved)

        self._pending = _Pending(done, step, self.saved_step, self._files)
        self._files, self.saved_step = {}, step
        saving.add_done_callback(finish)
        if waits:
            self.wait()
        return done

    def check(self, model: TrainModel, optim: AnyOptimizer | None = None, train_state: AnyTrainState = None) -> None:
        """Raise what `save` would raise for these before it writes anything. Nothing is written, nothing changes.

        Every rank makes the call: names, shapes and samples of what several ranks hold are compared. `resume` makes it,
        but for the samples, and so do the first steps, see `check_first_steps`. It costs what a save costs before it
        reads weights: for 1,000 tensors some 20 ms. Raises InvalidInput and Unsupported, on every rank alike.
        """
        self._check(model, optim, train_state, self.config.check_replicas)

    def check_first_steps(
        self, model: TrainModel, optim: AnyOptimizer | None = None, train_state: AnyTrainState = None
    ) -> None:
        """Call `check` at the first call, and at the first at which the optimizer of any rank has state; until a save.

        An optimizer makes its state in its first step. `save_if_due` makes this call. It is for who decides otherwise
        which step is saved, after each step that is not. Until the optimizer has state, ranks exchange a message.
        """
        if self._checked:
            return

        def is_stepped() -> bool:
            return optim is None or any(getattr(one, "state", True) for one in as_optimizers(optim))

        ranks, is_first = open_ranks(self.process_group), self._checked is None
        has_state = ranks.exchange(is_stepped, lambda found: everyone(any(found), ranks.size))
        if has_state or is_first:
            self.check(model, optim, train_state)
        self._checked = has_state  # not if the check raised: the next call checks again

    def due(self, step: int) -> Kind | None:
        """Say whether ``step`` is to be saved, and as what; the same on every rank. See `TrainerSettings.due`."""
        return self.config.due(check_step(step), self.saved_step)

    def save_if_due(
        self,
        step: int,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: AnyTrainState = None,
        *,
        last: bool = False,
        **options: Unpack[DueArguments],
    ) -> Future[Checkpoint] | None:
        """Call `save_async` if ``step`` is due; otherwise return None. Call it after each step.

        Where nothing is due, it makes the call `check_first_steps`.

        ``last``: this is the last step of the training, and due; the same on every rank.

        With ``max_steps_at_risk`` it raises the error of the save in the background once the next step would be one too
        many. The training stops rather than put more at risk. ``metadata``, ``metrics``, ``healthy``: as for
        `Store.save`.
        """
        check_keywords("Checkpointer.save_if_due", options, DueArguments)
        kind, saving = self.due(step), None
        if last:
            kind = "permanent"
        if self._begun is None:
            self._begun = step - 1
        self._reached = step
        if kind is not None:
            saving = self.save_async(step, model, optim, train_state, ephemeral=kind == "ephemeral", **options)
        else:
            self.check_first_steps(model, optim, train_state)
        self._bound_risk(step)
        return saving

    def write_file(self, name: str, contents: str | bytes, *, step: int | None = None) -> None:
        """Attach a file to the next save. Rank 0's files count.

        ``step``: the step that it is meant for. Raises Conflict if that is already saved, because a checkpoint never
        changes. Raises InvalidInput for a name that is not a relative path.
        """
        if step is not None and f"{self.run}@{step}" in self.store:
            raise Conflict(
                f"{name!r} was not attached: {self.run}@{step} is saved, and never changes; write files before the save"
            )
        data = contents.encode() if isinstance(contents, str) else contents
        if not isinstance(data, bytes):
            raise InvalidInput(f"the contents of {name!r} are text or bytes, not {type(contents).__name__}")
        self._files[check_attachment_name(name)] = data

    def wait(self) -> None:
        """Wait for the save in the background. Raises what it raised."""
        error = self._end_pending()
        if error is not None:
            raise error

    def close(self) -> None:
        """`wait`, and also wait for a gc that is running. The log warns of steps that are in no checkpoint."""
        try:
            self.wait()
        finally:
            self._janitor.close()
        self._warn_of_unsaved()

    # loading

    def load(
        self,
        ref: str | Checkpoint,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        *,
        load_optim_state: bool | None = None,
        load_trainer_state: bool | None = None,
        unread: Unread = "warn",
        cast: bool = False,
        options: GroupOptions = "checkpoint",
        **match: Unpack[MatchArguments],
    ) -> Any:
        """Load into ``model`` and ``optim``. Return this rank's train state, or rank 0's if there are more ranks now.

        ``load_optim_state``, ``load_trainer_state``: True: raise NotFound if it is not there. None: load it if it is
        there; otherwise return None, and warn in the log of an optimizer that was passed in vain. False: do not read
        it. A checkpoint of weights alone loads. ``unread``: the log names whole subtrees that are left, unless
        "ignore". ``cast``, ``strict``, ``ignore_mismatched``, ``rename``: see `load_model_and_optim_state`.
        ``options``: those of the optimizer's groups, such as learning rates, are set to the "checkpoint"'s, or "keep"
        what they are. Raises as `Store.load` does.
        """
        check_keywords("Checkpointer.load", match, MatchArguments)
        wanted = LoadRequest(
            optim=load_optim_state, train=load_trainer_state, pre_download=self.config.pre_download, options=options,
            given=self._load_options(unread=unread, cast=cast, **match),
        )  # fmt: skip
        return self._restore(ref, model, optim, wanted)[1]

    def resume(
        self,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: MutableMapping[str, Any] | HasState | None = None,
        *,
        missing: Missing = "raise",
        unread: Unread = "warn",
        healthy: bool = False,
        cast: bool = False,
        strict: bool | None = None,
        rename: Rename = None,
        options: GroupOptions = "checkpoint",
    ) -> Checkpoint | None:
        """Load the newest checkpoint of the run, if there is one, the same on all ranks. Set ``train_state``, too.

        ``healthy``: the newest that was not saved with ``healthy=False``; NotFound if there is none. ``missing``: if
        something that you pass cannot be restored, "raise" NotFound, MissingKey or Mismatch, or "warn" in the log and
        go on with the rest: an optimizer, a train state or parts of it, and, unless ``strict`` is True, layers and
        parameters of the optimizer that only one side has, and tensors that have another shape. ``strict``: None is
        False with "warn", else True. ``unread``, ``cast``, ``rename``, ``options``: as for `load`. ``train_state``:
        a dict is filled in place. The log, and ``resumed``, say what was restored, and what was left and why.

        Afterwards, or if it finds nothing, it calls `check`, so that what cannot be saved is heard of before the
        training. If it finds nothing, but a run whose name is similar, the log warns. Raises as `load` and `check` do,
        and InvalidInput for a train state that is neither a dict nor has load_state_dict.
        """
        self.resumed, before = None, dict[str, float]()
        found = self._find_together(
            None, lambda: before.update(check_given(train_state, missing, model, optim)), healthy=healthy
        )
        if found is not None:
            given = [*model] if isinstance(model, Mapping) else [MODEL]
            given += [name for name, one in ((OPTIM, optim), (TRAIN, train_state)) if one is not None]
            demand = True if missing == "raise" else None
            strict = missing == "raise" if strict is None else strict
            wanted = LoadRequest(
                optim=demand if OPTIM in given else None, train=demand if TRAIN in given else None,
                given=self._load_options(unread=unread, cast=cast, strict=strict, rename=rename),
                pre_download=self.config.pre_download, options=options, missing=missing, train_state=train_state,
            )  # fmt: skip
            found, state = self._restore(found, model, optim, wanted)
            ranks, mine = open_ranks(self.process_group), (found, given, wanted, state, before, model, optim)
            self.resumed = Resumed(found, *ranks.exchange(lambda: outcome_of(*mine), of_all_ranks))
            if ranks.rank == 0:
                self.resumed.log()
        self._check(model, optim, train_state, "off")  # not samples: ranks may be made equal later, as by DDP
        return found

    def newest_of_all_ranks(self, step: int | None = None) -> Checkpoint | None:
        """The newest of the run, or that of a step, as rank 0 finds it: the same on every rank, which all call it."""
        return self._find_together(step, lambda: None)

    # inside

    def _check(
        self, model: TrainModel, optim: AnyOptimizer | None, train_state: AnyTrainState, compared: CheckReplicas
    ) -> None:
        """``compared``: what of the values that several ranks hold, as ``check_replicas`` says it."""
        generators = rng_state()
        try:
            state = state_to_save(open_ranks(self.process_group), model, optim, train_state)
            arguments = self._save_arguments(model)
            arguments["check_replicas"] = compared
            self.store.check(state, run=self.run, **arguments)
        finally:
            restore_rng(generators)  # a data loader may draw from them when it is asked for its state

    def _restore(
        self, ref: str | Checkpoint, model: TrainModel, optim: AnyOptimizer | None, wanted: LoadRequest
    ) -> tuple[Checkpoint, Any]:
        """(the checkpoint, with what was left of it; this rank's train state)."""
        self._settle()
        loaded, train = Restoring(open_ranks(self.process_group), self.store, wanted).load(ref, model, optim)
        self.saved_step, self._begun = (loaded.step if loaded.run == self.run else None), None
        self._reached = None
        return loaded, train

    def _load_options(self, **given: Unpack[FillArguments]) -> LoadOptions:
        return LoadOptions(
            allow_pickle=self.config.allow_pickle, process_group=self.process_group, threads=self.config.load_threads,
            **given,
        )  # fmt: skip

    def _find_together(
        self, step: int | None, check: Callable[[], None], *, healthy: bool = False
    ) -> Checkpoint | None:
        self._settle()
        return newest_together(open_ranks(self.process_group), self.store, self.run, step, check, healthy=healthy)

    def _save_arguments(self, model: TrainModel, **given: Unpack[StepArguments]) -> SaveArguments:
        """For `Store.save`, which checks them where all ranks hear of it."""
        overwrite, files = given.get("overwrite"), given.get("attachments")
        if files is None or isinstance(files, Mapping):
            files = config_files(model) | self._files | dict(files or {})
        return {
            "ephemeral": given.get("ephemeral", False),
            "metadata": given.get("metadata"),
            "metrics": given.get("metrics"),
            "healthy": given.get("healthy"),
            "overwrite": self.config.overwrite if overwrite is None else overwrite,
            "attachments": files,
            "frozen": self.config.frozen,
            "compress": self.config.compress,
            "health": self.config.health,
            "check_replicas": self.config.check_replicas,
            "owners": self.config.owners,
            "allow_pickle": self.config.allow_pickle,
            "process_group": self.process_group,
            "threads": self.config.save_threads,
        }

    def _after(self, saved: Checkpoint, blocked: float, durable: float, *, leads: bool) -> None:
        """Do, on rank 0, what is due once a checkpoint is committed. It is there whatever goes wrong here."""
        if not leads:
            return
        gone, thinned = list[Checkpoint](), list[Checkpoint]()
        try:
            gone = self.store.rotate(self.run, self._rotation)
            thinned = self.store.thin_now(self.run, self._rotation.thin)
        except CasckptError as error:
            log.warning("after %s@%d nothing was forgotten: %s", saved.run, saved.step, error)
        steps = tuple(one.step for one in gone)
        self.summary = SaveSummary(checkpoint=saved, blocked=blocked, durable=durable, forgotten=steps)
        log.info("%s", self.summary)
        if self.config.gc:
            self._janitor.ask(self.run)
        elif (gone or thinned) and not self._told_of_space:
            self._told_of_space = True
            log.warning(
                "checkpoints of %s that are not kept take space until a gc: make the Checkpointer with gc=True, or run "
                "`casckpt gc %s`", self.run, self.store.url,
            )  # fmt: skip

    def _bound_risk(self, step: int) -> None:
        """Wait for the save in the background, if without it the step after ``step`` would be one too many."""
        limit = self.config.max_steps_at_risk
        if limit is None:
            return
        durable = self.saved_step if self._pending is None else self._pending.saved_step
        if step + 1 - ((self._begun or 0) if durable is None else durable) > limit:
            self.wait()

    def _warn_of_unsaved(self) -> None:
        """Of the steps that `save_if_due` was told of since the last save; once, and not on every rank of all."""
        after, reached = self._begun if self.saved_step is None else self.saved_step, self._reached
        self._reached = None
        if reached is None or after is None or reached <= after or (this_rank() and self.process_group is None):
            return
        log.warning(
            "steps %d to %d of %s are in no checkpoint; give the Checkpointer last_step=%d, or the last save_if_due "
            "last=True", after + 1, reached, self.run, reached,
        )  # fmt: skip

    def _begin(self) -> tuple[Ranks, bool]:
        """Before a save: wait for the one in the background. (the ranks; shall all of them wait for this one, too?).

        Raises on all ranks, if any failed with an error that would repeat.
        """
        error = self._settle(to_save=True)
        self._checked = True
        ranks = open_ranks(self.process_group)

        def look() -> bool:
            if error is not None:
                raise error
            return self._failures.too_many

        waits = ranks.exchange(look, lambda found: everyone(any(found), ranks.size))
        if waits and ranks.rank == 0:
            log.warning(
                "%d saves of %s in a row failed: training waits for the next one", self._failures.count, self.run
            )
        return ranks, waits

    def _settle(self, *, to_save: bool = False) -> BaseException | None:
        """Wait for the save in the background, and log it if it failed.

        ``to_save``: an error that the next save would repeat is not logged but returned, unless the caller knows of it.
        """
        pending, heard = self._pending, self._pending is not None and self._pending.future.is_heard
        error = self._end_pending()
        if pending is None or error is None:
            return None
        if to_save and will_repeat(error) and not heard:
            return error
        log.error("the save of %s@%d failed, and nothing of it is visible: %s", self.run, pending.step, error)
        return None

    def _end_pending(self) -> BaseException | None:
        """Wait for the save in the background, if there is one; what it failed with. Then its files are not lost."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        error = pending.future.unheard_exception()
        self._failures.note(error)
        if error is not None:
            self._files = pending.files | self._files
            self.saved_step = pending.saved_step
        return error


@dataclass(frozen=True)
class _Pending:
    """A save in the background. ``saved_step``, ``files``: as they were before it."""

    future: HeardFuture
    step: int
    saved_step: int | None
    files: dict[str, bytes]
