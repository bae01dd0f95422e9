"""`Checkpointer`: saves, loads and resumes the checkpoints of a training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from casckpt.base.exit_status import ReportedFuture
from casckpt.base.names import check_attachment_name, check_keywords, check_step
from casckpt.base.text import in_one_line, is_news, listed
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import CasckptError, Conflict, Damaged, InvalidInput, Refused, StorageError
from casckpt.frontends.stores import AnyStore, advising, as_store
from casckpt.frontends.trainer.ownership import RunOwnership, differing_keys
from casckpt.frontends.trainer.resumed import Resumed, check_given, excuses, of_all_ranks, outcome_of, set_loaded
from casckpt.frontends.trainer.run_checkpoints import newest, newest_together
from casckpt.frontends.trainer.saves import (
    CheckpointEvent,
    Events,
    Failures,
    Janitor,
    SaveSummary,
    allowed,
    free_figure,
    of_checkpoint,
    will_repeat,
)
from casckpt.frontends.trainer.settings import DueArguments, Kind, StepArguments, TrainerArguments, TrainerSettings
from casckpt.frontends.trainer.space import RunSpace
from casckpt.frontends.training_state.contents import (
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
from casckpt.frontends.training_state.hub_config import with_hub_files
from casckpt.frontends.training_state.parts import AnyOptimizer, as_optimizers
from casckpt.frontends.training_state.proof import Proof
from casckpt.frontends.training_state.proof import prove as prove_state
from casckpt.frontends.training_state.stored import MODEL, OPTIM
from casckpt.frontends.training_state.train_state import restore_rng, rng_state, warn_of_data
from casckpt.ranks.ranks import Ranks, everyone, open_ranks, this_rank
from casckpt.store.opening import throttled
from casckpt.store.store import Store
from casckpt.store.types import (
    CheckReplicas,
    Commit,
    LoadArguments,
    MatchArguments,
    Metrics,
    Rename,
    SaveArguments,
    StateOptions,
    Unread,
    saving_here,
    usable_metrics,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


class _Overrides(TrainerArguments, total=False):
    run: str


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig(TrainerSettings):
    """The keyword arguments of `Checkpointer`, which describes them. Raises InvalidInput for invalid values."""

    def build(
        self, store: AnyStore, process_group: ProcessGroup | None = None, **overrides: Unpack[_Overrides]
    ) -> Checkpointer:
        """Return a checkpointer for ``store``. ``overrides`` replace these settings. Every rank makes the call."""
        return Checkpointer(store, process_group=process_group, **(vars(self) | dict(overrides)))


class Checkpointer:
    """Manages the checkpoints of one run: it saves, loads and forgets them. Every rank makes the same calls.

    When `save_if_due` saves:

    - ``save_interval``, ``fixed_steps``, ``ephemeral_save_interval``, ``ephemeral_cooldown``: see `due`.
    - ``last_step``: the last step of the training. If None, `close` warns about steps since the last save.
    - ``max_steps_at_risk``: how many steps a crash may lose, at least the interval. Before more are at risk,
      `save_if_due` waits for the background save. If None, it waits when the next save is due: two intervals.
    - ``max_failures``: after this number of consecutive failed saves, over 15 minutes or more, the next save runs in
      the foreground and raises its error. If None, errors that may be temporary are only logged.

    What is kept afterward:

    - ``keep``, ``max_checkpoints``, ``fixed_steps``: which permanent checkpoints (see `Rotation`). Without ``keep`` and
      ``max_checkpoints``, all are kept, including ephemeral ones.
    - ``thin``: what to drop from older checkpoints, such as ``{"drop": ["optim.*"], "keep_last": 2}``.
    - ``gc``: after a save, rank 0 runs a gc of the run in a thread. If a save meets a full disk, it does so at once,
      and the save is tried once more.
    - ``min_free``: how much of the disk each save must leave free ("20GB"); if it would not, it meets a full disk.
    - ``overwrite``: replace a step that exists.

    How it saves and loads:

    - ``frozen``, ``compress``, ``check_replicas``, ``owners``: as for `Store.save`.
    - ``health``: check changed cells for NaN. With NaN, a checkpoint is unhealthy; the newest healthy one is kept, too.
    - ``allow_pickle``: for values in the train state or an optimizer's state that are neither tensors nor plain data.
    - ``save_threads``, ``load_threads``: the number of threads per rank.
    - ``throttle``: the maximum number of ranks per node that upload at the same time.
    - ``work_dir``: a folder on this node for the lock files of ``throttle`` (default: for temporary files).
    - ``pre_download``: fetch a checkpoint into this node's cache before a load.
    - ``create``: whether a new store may be created, as for `casckpt.open`; it applies to a `Store` too.
    - ``on_event``: a function that rank 0 calls with each `CheckpointEvent`, for a background save in the save's
      thread; the next save waits for it. It must not call the checkpointer. Its errors are only logged.

    A copy (`pickle`, `copy.deepcopy`) has the same store and settings, but has loaded and saved nothing. A
    ``process_group`` cannot be pickled. Raises InvalidInput.
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
        self._opened = as_store(store, self.config.create)
        self.store, self.run = throttled(self._opened, self.config.throttle, self.config.work_dir), run
        self.summary: SaveSummary | None = None
        self.process_group = process_group
        self._rotation = self.config.rotation
        self._janitor = Janitor(self.store)
        self._files: dict[str, bytes] = {}
        self._pending: _Pending | None = None
        self._events = Events(self.config.on_event)
        self._failures = Failures(self.config.max_failures)
        self.saved_step: int | None = None
        self.lineage: dict[str, Any] | None = None
        """The checkpoint that `resume` or `load` last loaded, as `Checkpoint.lineage` of the saves since then."""
        self._loaded: tuple[Checkpoint, LoadRequest] | None = None
        self._begun: int | None = None
        self._reached: int | None = None
        self._keeps = self._looked_at_data = False
        self.ownership = RunOwnership(self.store, run, self._rotation)
        self._checked: bool | None = None  # False: checked, but before the optimizer had state
        self._space = RunSpace(self.store, self.config, self.ownership, self._events, self._janitor)
        self.resumed: Resumed | None = None
        """The result of the last `resume`; None if it found no checkpoint."""

    def __reduce__(self) -> tuple[partial[Self], tuple[Store]]:
        return partial(type(self), process_group=self.process_group, **vars(self.config)), (self._opened,)

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
        """Save a checkpoint, then forget the checkpoints that retention does not keep.

        Returns when the checkpoint is durable and visible.

        - ``model``: a module, or a list of its parts; an object with state_dict_to_save, state_dict_to_load and
          load_state_dict; or a dict of models, such as ``{"model": model, "ema": ema}``, and what else `Store.save`
          accepts.
        - ``optim``: an optimizer, or a list or dict of optimizers that share the parameters.
        - ``train_state``: this rank's: a nested mapping of tensors, plain data and objects with state_dict, or one such
          object, such as `TrainState`.
        - ``overwrite``: None uses the checkpointer's setting.
        - ``ephemeral``, ``attachments``, ``metadata``, ``metrics``, ``healthy``: as for `Store.save`.

        Raises the errors of `Store.save`, on every rank. After an error, no part of the save is visible, and you can
        retry the same step.
        """
        check_keywords("Checkpointer.save", options, StepArguments)
        begun = time.monotonic()
        ranks, _, waits, existing = self._begin(step, train_state, options)
        with self._reporting(ranks, step):
            state = state_to_save(ranks, model, optim, train_state)
            kept = existing and self._kept(existing, ranks, state, model, options)
            saved = kept or self.store.save(state, run=self.run, step=step, **self._save_arguments(model, **options))
        self._failures.note(None)
        self.saved_step = saved.step
        if kept is None:
            self._files.clear()
            seconds = time.monotonic() - begun
            summary = SaveSummary(checkpoint=saved, blocked=seconds, durable=seconds, waits=waits)
            self._after(summary, ranks, options.get("metrics"))
        return saved

    def save_async(
        self,
        step: int,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: AnyTrainState = None,
        **options: Unpack[StepArguments],
    ) -> Future[Checkpoint]:
        """Save like `save`, but return as soon as the state is copied. You may then change it.

        One save runs at a time. The call raises errors in its arguments or in the state. The future, `wait` and `close`
        raise later errors. InvalidInput and Conflict are also raised by the next save, on every rank, unless all ranks
        have read the future. Errors that may be temporary, such as StorageError, are logged by the next save or load.
        After ``max_failures`` such errors, the call waits for its own save and raises its error.
        """
        check_keywords("Checkpointer.save_async", options, StepArguments)
        begun = time.monotonic()
        ranks, is_foreground, waits, existing = self._begin(step, train_state, options)
        with self._reporting(ranks, step):
            state = state_to_save(ranks, model, optim, train_state)
            if existing and (kept := self._kept(existing, ranks, state, model, options)):
                self.saved_step, done = step, ReportedFuture[Checkpoint]()
                done.set_result(kept)
                return done
            saving = self.store.save_async(state, run=self.run, step=step, **self._save_arguments(model, **options))
        blocked = time.monotonic() - begun

        def finish() -> Checkpoint:
            with self._reporting(ranks, step):
                saved = saving.result()
            durable, copied = time.monotonic() - begun, getattr(saving, "bytes_copied", 0)
            summary = SaveSummary(checkpoint=saved, blocked=blocked, durable=durable, waits=waits, bytes_copied=copied)
            self._after(summary, ranks, options.get("metrics"))
            return saved

        done = ReportedFuture[Checkpoint]()
        self._pending = _Pending(done, step, self.saved_step, self._files)
        self._files, self.saved_step = {}, step
        done.follow(saving, finish)
        if is_foreground:
            self.wait()
        return done

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside the block, a save of the step that was loaded keeps it, with a warning, if the state has changed.

        `save_if_due` and `SaveOnSignal` save in this way. Otherwise, such a save raises Conflict.
        """
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def start(self, step: int, *, loaded: int | None = None, overwrite: bool | None = None) -> None:
        """Decide whether this training may save steps from ``step`` on to the run. Every rank makes the call.

        The first `save`, `save_async` or `save_if_due` calls it. A training may continue a run that has no checkpoint,
        or of which this object or any rank's process has loaded one. Otherwise, a warning names the newest checkpoint
        if all are earlier than ``step``, and Conflict is raised if one is not, unless you pass ``overwrite=True``.
        ``loaded``: the step of the checkpoint whose state the training has received in a different way. ``overwrite``:
        as for `save`.
        """
        ranks = open_ranks(self.process_group)

        def decide(found: Sequence[bool]) -> Sequence[bool]:
            try:
                if loaded is not None and (checkpoint := newest(self.store, self.run, loaded)) is not None:
                    self.ownership.note_load(checkpoint, overwrites=self._overwrites(overwrite))
                self.ownership.decide(step, was_loaded=any(found), overwrites=self._overwrites(overwrite))
            except (StorageError, Damaged, Refused) as error:  # it is decided before the next save
                log.info("casckpt cannot look at run %s of %s: %s", self.run, self.store.url, error)
            return everyone(self.ownership.is_decided, ranks.size)

        def look() -> bool:
            check_step(step)
            return self.ownership.was_loaded_here()

        if not self.ownership.is_decided:
            self.ownership.is_decided = ranks.exchange(look, decide)

    def begin_again(self) -> None:
        """Let later saves replace the earlier ones of this object, as after an out-of-memory error.

        The training begins again at an earlier step, such as with smaller batches.
        """
        self._settle()
        self.ownership.begin_again()

    def check(self, model: TrainModel, optim: AnyOptimizer | None = None, train_state: AnyTrainState = None) -> None:
        """Raise the errors that `save` would raise for these arguments before its first write. Nothing is saved.

        Every rank makes the call. The check compares the names, shapes and samples of tensors that several ranks hold.
        `resume` runs the same check without the samples, and `check_first_steps` runs it during the first steps. The
        check takes about 20 ms for 1,000 tensors. Raises InvalidInput and Unsupported, on every rank.
        """
        self._check(model, optim, train_state, self.config.check_replicas)

    def check_first_steps(
        self,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: AnyTrainState = None,
        *,
        warm_up: bool = False,
    ) -> None:
        """Run `check` in the first call, and once more in the first call in which an optimizer of any rank has state.

        An optimizer creates its state in its first step. `save_if_due` calls this method. If you choose the steps to
        save yourself, call it after each step that you do not save. It has no effect after the second check or after a
        save. Until then, each call costs an exchange between the ranks. ``warm_up``: the second check also prepares the
        memory for the copies of `save_async`, so that the first one blocks no longer than later ones. `save_if_due`
        sets it.
        """
        if self._checked:
            return

        def is_stepped() -> bool:
            return optim is None or any(getattr(one, "state", True) for one in as_optimizers(optim))

        ranks, is_first = open_ranks(self.process_group), self._checked is None
        has_state = ranks.exchange(is_stepped, lambda found: everyone(any(found), ranks.size))
        if has_state or is_first:
            compared = self.config.check_replicas
            self._check(model, optim, train_state, compared, warm_up=warm_up and has_state)
        self._checked = has_state  # not reached if the check raised, so the next call repeats it

    def due(self, step: int) -> Kind | None:
        """Return the kind of checkpoint that is due at ``step``; None if none is due. See `TrainerSettings.due`."""
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
        """Call `save_async` if ``step`` is due. Otherwise call `check_first_steps` and return None.

        Call this method after each step. ``last``: whether this is the last training step, which is always due. All
        ranks must pass the same value. ``metadata``, ``metrics``, ``healthy``: as for `Store.save`. If
        ``max_steps_at_risk`` is set, the method raises the background save's error before more than that many steps are
        at risk.
        """
        check_keywords("Checkpointer.save_if_due", options, DueArguments)
        kind, saving = self.due(step), None
        if last:
            kind = "permanent"
        if self._begun is None:
            self._begun = step - 1
        self._reached = step
        if kind is not None:
            with self.keeping():
                saving = self.save_async(step, model, optim, train_state, ephemeral=kind == "ephemeral", **options)
        else:
            self.start(step)
            self.check_first_steps(model, optim, train_state, warm_up=True)
        self._bound_risk(step)
        return saving

    def write_file(self, name: str, contents: str | bytes, *, step: int | None = None) -> None:
        """Attach a file to the next save. Only the files of rank 0 are saved.

        ``step``: the step that the file belongs to. Raises Conflict if that step has already been saved, because a
        checkpoint never changes. Raises InvalidInput for a name that is not a relative path.
        """
        if step is not None and f"{self.run}@{step}" in self.store:
            raise Conflict(
                f"{name!r} was not attached: {self.run}@{step} is already saved and cannot change; write files before "
                "the save"
            )
        data = contents.encode() if isinstance(contents, str) else contents
        if not isinstance(data, bytes):
            raise InvalidInput(f"the contents of {name!r} must be a string or bytes, not {type(contents).__name__}")
        self._files[check_attachment_name(name)] = data

    def wait(self) -> None:
        """Wait for the background save, and raise its error if it failed."""
        error = self._end_pending()
        if error is not None:
            raise error

    def close(self) -> None:
        """Call `wait`, wait for a running gc, and log a warning if there are steps after the last save."""
        try:
            self.wait()
        finally:
            self._janitor.close()
        self._warn_of_unsaved()
        self.ownership.warn_if_idle()

    # loading

    def load(
        self,
        ref: str | Checkpoint,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: MutableMapping[str, Any] | HasState | None = None,
        *,
        load_optim_state: bool | None = None,
        load_trainer_state: bool | None = None,
        unread: Unread = "warn",
        cast: bool = False,
        options: GroupOptions = "checkpoint",
        **match: Unpack[MatchArguments],
    ) -> Any:
        """Load into ``model`` and ``optim``, and return the train state of this rank, or else of the lowest rank.

        - ``train_state``: set it as `resume` does, and return it. The log names what this leaves or replaces.
        - ``load_optim_state``, ``load_trainer_state``: True: load it, or raise NotFound if the checkpoint lacks it.
          None: load it if it exists; otherwise, return None for the train state, and log a warning for what was given.
          False: do not read it.
        - ``options``: set the options of the optimizer's groups, such as learning rates, to those of the "checkpoint",
          or "keep" them.
        - ``unread``: unless it is "ignore", the log lists unread subtrees.
        - ``cast``, ``strict``, ``ignore_mismatched``, ``rename``: see `load_model_and_optim_state`.

        Raises the errors of `Store.load`.
        """
        check_keywords("Checkpointer.load", match, MatchArguments)
        begun = time.monotonic()
        wanted = LoadRequest(
            optim=load_optim_state, train=load_trainer_state, pre_download=self.config.pre_download, options=options,
            given=self._load_arguments(unread=unread, cast=cast, **match), train_state=train_state,
        )  # fmt: skip
        loaded, train = self._restore(ref, model, optim, wanted)
        if train_state is not None and train is not None:
            ranks = open_ranks(self.process_group)
            outcome = ranks.exchange(partial(set_loaded, wanted, train, model), of_all_ranks)
            if ranks.rank == 0:
                Resumed(loaded, *outcome).log(train_state)
            train = train_state
        self._report_load(loaded, begun)
        return train

    @advising("resume", ("unread", "cast", "strict", "rename"), "Checkpointer.load")
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
        prove: bool = False,
    ) -> Checkpoint | None:
        """Load the newest checkpoint of the run, the same on all ranks, and set ``train_state``. Return it, or None.

        The log and ``resumed`` list the restored parts, and the skipped parts with the reasons. At the end, `resume`
        runs `check`, so errors of a later save appear before the training starts. If there is a save interval, it also
        prepares the memory for background saves.

        - ``train_state``: a dict is filled in place.
        - ``missing``: what to do about an optimizer, a train state or a part of it that cannot be restored: "raise"
          NotFound, MissingKey or Mismatch, or "warn" and restore the rest. Unless ``strict`` is True, this also holds
          for layers and optimizer parameters that only one side has, and for tensors with a different shape.
        - ``strict``: None means False if ``missing`` is "warn", else True.
        - ``healthy``: load the newest checkpoint that was not saved with ``healthy=False``; if all were, raise
          NotFound.
        - ``prove``: after everything is loaded, compare the live state with the checkpoint, as the next save would
          store it. ``resumed.proof`` has the result. Raises Mismatch, which names the keys, if anything differs that no
          argument explains. Each rank hashes all its values, and copies those on a device to the host.
        - ``unread``, ``cast``, ``rename``, ``options``: as for `load`.

        First waits for saves to the run that this process still makes in the background, such as those of an
        interrupted notebook cell. Raises the errors of `load` and `check`, and InvalidInput for a train state that is
        not a dict and has no load_state_dict. If only a run with a similar name exists, a warning is logged.
        """
        begun = time.monotonic()
        wait([saving for (url, run, _), saving in [*saving_here.items()] if (url, run) == (self.store.url, self.run)])
        self.resumed, before = None, cache(partial(check_given, train_state, missing, model, optim))
        self._settle()
        self.ownership.replaces_unhealthy = healthy
        checkpoint = newest_together(
            open_ranks(self.process_group), self.store, self.run, healthy=healthy, check=before
        )
        self.lineage = self._loaded = None
        if checkpoint is not None:
            given = self._given(model, optim, train_state)
            demand = True if missing == "raise" else None
            strict = missing == "raise" if strict is None else strict
            wanted = LoadRequest(
                optim=demand if OPTIM in given else None, train=demand if TRAIN in given else None,
                given=self._load_arguments(unread=unread, cast=cast, strict=strict, rename=rename),
                pre_download=self.config.pre_download, options=options, missing=missing, train_state=train_state,
            )  # fmt: skip
            checkpoint, state = self._restore(checkpoint, model, optim, wanted)
            ranks, mine = open_ranks(self.process_group), (checkpoint, given, wanted, state, before(), model, optim)
            self.resumed = Resumed(checkpoint, *ranks.exchange(lambda: outcome_of(*mine), of_all_ranks))
            if prove:
                proof = self.prove(model, optim, train_state, excused=self.resumed.left)
                self.resumed = replace(self.resumed, proof=replace(proof, replaced=self.resumed.replaced))
            if ranks.rank == 0:
                self.resumed.log(train_state)
        warm_up = checkpoint is not None and self.config.longest_gap is not None
        # without samples, because DDP may make the ranks equal later
        self._check(model, optim, train_state, "off", warm_up=warm_up)
        if checkpoint is not None:
            self._report_load(checkpoint, begun)
        return checkpoint

    def prove(
        self,
        model: TrainModel,
        optim: AnyOptimizer | None = None,
        train_state: AnyTrainState = None,
        *,
        excused: Mapping[str, str] = MappingProxyType({}),
    ) -> Proof:
        """Compare the live state with the checkpoint that `load` or `resume` last loaded; see ``prove`` of `resume`.

        Call it on every rank after all state is applied, and before the first step. ``excused``: why other values may
        differ, by key or by the beginning of keys, such as ``{"train.loader": "starts again"}``. The result is logged.
        Raises Mismatch, which names the keys, if anything else differs, and InvalidInput if nothing was loaded.
        """
        if self._loaded is None:
            raise InvalidInput("there is no loaded checkpoint to compare the state with; call load() or resume() first")
        ranks, generators, (loaded, wanted) = open_ranks(self.process_group), rng_state(), self._loaded
        excused = {**excuses(loaded, self._given(model, optim, train_state), wanted), **excused}
        try:
            state_to_save(ranks, model, optim, train_state)  # a data loader may draw random numbers in the first call
            restore_rng(generators)
            state = state_to_save(ranks, model, optim, train_state)
            return prove_state(self.store, loaded, state, model, excused=excused, **wanted.given)
        finally:
            restore_rng(generators)  # as in `_check`

    def newest_of_all_ranks(self, step: int | None = None) -> Checkpoint | None:
        """Return the checkpoint of ``step``, or the newest one, as rank 0 finds it. Every rank makes the call."""
        self._settle()
        return newest_together(open_ranks(self.process_group), self.store, self.run, step)

    def has_loaded(self, step: int) -> bool:
        """Return whether the last `load` or `resume` loaded the checkpoint of ``step`` of this run."""
        return self._loaded is not None and (self._loaded[0].run, self._loaded[0].step) == (self.run, step)

    # the run

    def find_checkpoints(self, ephemeral: bool | None = None) -> Iterator[Checkpoint]:
        """Yield the checkpoints of one listing in step order.

        ``ephemeral``: select only ephemeral (True) or only permanent (False) checkpoints.
        """
        found = self.store.checkpoints(self.run) if self.store.repository.is_there() else []
        chosen = (one for one in found if ephemeral is None or one.ephemeral == ephemeral)
        yield from sorted(chosen, key=lambda one: one.step)

    def latest_checkpoint(self) -> Checkpoint:
        """Return the checkpoint whose save began last. Raises NotFound, which is a FileNotFoundError.

        First waits for a save in the background. If that fails, logs its error, as `load` does.
        """
        self._settle()
        return self.store.get(f"{self.run}@latest")

    def contains_checkpoint(self) -> bool:
        """Return whether the run has at least one checkpoint."""
        return newest(self.store, self.run) is not None

    @staticmethod
    def checkpoint_dirname(step: int) -> str:
        """Return a folder name for frameworks that need one."""
        return f"step{step}"

    # inside

    def _check(
        self,
        model: TrainModel,
        optim: AnyOptimizer | None,
        train_state: AnyTrainState,
        compared: CheckReplicas,
        *,
        warm_up: bool = False,
    ) -> None:
        """Implement `check`. ``compared``: the value of ``check_replicas``. ``warm_up``: prepare background saves."""
        generators = rng_state()
        try:
            state = state_to_save(open_ranks(self.process_group), model, optim, train_state)
            arguments = self._save_arguments(model)
            arguments["check_replicas"], arguments["space"] = compared, None
            nbytes = self.store.check(state, run=self.run, **arguments)
            if warm_up:
                with suppress(CasckptError):  # the first save reports it
                    self.store.warm_up(state, process_group=self.process_group)
        finally:
            restore_rng(generators)  # the state_dict of a data loader may draw from them
        if open_ranks(self.process_group).rank == 0:
            self._space.foresee(nbytes)

    @staticmethod
    def _given(model: TrainModel, optim: AnyOptimizer | None, train_state: Any) -> list[str]:
        """Return the keys of the live state."""
        names = [name for name, value in ((OPTIM, optim), (TRAIN, train_state)) if value is not None]
        return [*(model.keys() if isinstance(model, Mapping) else [MODEL]), *names]

    def _restore(
        self, ref: str | Checkpoint, model: TrainModel, optim: AnyOptimizer | None, wanted: LoadRequest
    ) -> tuple[Checkpoint, Any]:
        """Load a checkpoint. Return it, with the skipped keys, and this rank's train state."""
        self._settle()
        loaded, train = Restoring(open_ranks(self.process_group), self.store, wanted).load(ref, model, optim)
        self.saved_step, self._begun = (loaded.step if loaded.run == self.run else None), None
        self._reached = None
        self.lineage, self._loaded = loaded.child_lineage, (loaded, wanted)
        if open_ranks(self.process_group).rank == 0:
            try:
                self.ownership.note_load(loaded, overwrites=self.config.overwrite)
            except CasckptError as error:  # other ranks have the loaded state
                log.warning(
                    "retention keeps the earlier checkpoints of %s, which cannot be listed: %s", self.run, error
                )
        return loaded, train

    def _report_load(self, loaded: Checkpoint, begun: float) -> None:
        """Emit the event of a load, on rank 0. ``begun``: its beginning, in seconds of the monotonic clock."""
        if open_ranks(self.process_group).rank == 0:
            figures = {"blocked_seconds": time.monotonic() - begun, "bytes_total": loaded.stats.bytes_total}
            self._events.emit(of_checkpoint("resumed", loaded, figures))

    @contextmanager
    def _reporting(self, ranks: Ranks, step: int) -> Iterator[None]:
        """Emit an event if the save of ``step`` fails, on rank 0."""
        try:
            yield
        except BaseException as error:
            if ranks.rank == 0:
                event = CheckpointEvent(
                    kind="failed", run=self.run, step=step, error=error, reason=in_one_line(error),
                    figures=free_figure(self._space.bytes_free),
                )  # fmt: skip
                self._events.emit(event)
            raise

    def _load_arguments(self, **given: Unpack[LoadArguments]) -> LoadArguments:
        return {
            **given, "allow_pickle": self.config.allow_pickle, "process_group": self.process_group,
            "threads": self.config.load_threads,
        }  # fmt: skip

    def _save_arguments(self, model: TrainModel, **given: Unpack[StepArguments]) -> SaveArguments:
        """Return the arguments for `Store.save`, which checks them and raises any error on all ranks."""
        settings = {setting.name: getattr(self.config, setting.name) for setting in fields(StateOptions)}
        return {
            **cast("SaveArguments", settings),
            **given,
            "metrics": usable_metrics(self.run, given.get("metrics"), first=self._rotation.metrics),
            "overwrite": self._overwrites(given.get("overwrite")),
            "attachments": with_hub_files(model, given.get("attachments"), self._files),
            "lineage": self.lineage,
            "space": self._space,
            "process_group": self.process_group,
            "threads": self.config.save_threads,
        }

    def _after(self, summary: SaveSummary, ranks: Ranks, metrics: Metrics | None) -> None:
        """Forget and thin checkpoints after a save, on rank 0. ``metrics``: those that the caller passed.

        Errors are only logged, because the checkpoint is saved.
        """
        self.ownership.note_save(summary.checkpoint)
        if ranks.rank != 0:
            return
        summary = replace(summary, bytes_free=self._space.bytes_free)
        saved, figures = summary.checkpoint, summary.figures  # now, while the manifest is still in memory
        self._warn_of_others(saved)
        rotation, when = allowed(self._rotation, saved, metrics), f"after the save of {saved.run}@{saved.step}"
        gone, thinned = self._space.rotate(rotation, self.ownership.removable, when)
        purged = tuple(checkpoint.step for checkpoint in gone if checkpoint.commit.last == "purged")
        self.summary = replace(summary, forgotten=tuple(checkpoint.step for checkpoint in gone), purged=purged)
        log.info("%s", self.summary)
        self._events.emit(of_checkpoint("saved", saved, figures))
        for checkpoint in gone:
            self._events.emit(of_checkpoint("forgotten", checkpoint))
        if self.config.gc:
            self._janitor.ask(self.run)
        elif (gone or thinned) and is_news("space", self.run, self.store.url):
            log.warning(
                "forgotten checkpoints of %s take up space until a gc: create the Checkpointer with gc=True, or run "
                "`casckpt gc %s`", self.run, self.store.url,
            )  # fmt: skip

    def _warn_of_others(self, saved: Checkpoint) -> None:
        """Warn once, from the second save on, if something else saved the previous checkpoint of the run."""
        parent, is_first = saved.commit.committed.parent, self.summary is None
        is_own = parent is None or self.ownership.has_saved(parent)
        if not (is_own or is_first) and is_news("others", self.run, self.store.url):
            log.warning(
                "another program also saves to run %r of %s: the checkpoint before %s@%d is %.12s. A resume loads the "
                "newest checkpoint of either program, so give each training a run of its own",
                self.run, self.store.url, saved.run, saved.step, parent,
            )  # fmt: skip

    def _bound_risk(self, step: int) -> None:
        """Wait for the background save if the step after ``step`` would put too many steps at risk."""
        limit = self.config.max_steps_at_risk
        if limit is None:
            return
        durable = self.saved_step if self._pending is None else self._pending.saved_step
        if step + 1 - ((self._begun or 0) if durable is None else durable) > limit:
            self.wait()

    def _warn_of_unsaved(self) -> None:
        """Warn once about the steps since the last save, on rank 0 or on each rank of a ``process_group``."""
        after, reached = self._begun if self.saved_step is None else self.saved_step, self._reached
        self._reached = None
        if reached is None or after is None or reached <= after or (this_rank() and self.process_group is None):
            return
        log.warning(
            "steps %d to %d of %s are not in any checkpoint; pass last_step=%d to the Checkpointer, or last=True to "
            "the last save_if_due", after + 1, reached, self.run, reached,
        )  # fmt: skip

    def _overwrites(self, overwrite: bool | None) -> bool:
        return self.config.overwrite if overwrite is None else overwrite

    def _begin(
        self, step: int, train_state: AnyTrainState, options: StepArguments
    ) -> tuple[Ranks, bool, tuple[float, float], Checkpoint | None]:
        """Wait for the background save and for the other ranks.

        Return the ranks, whether they must also wait for the next save, the ``waits`` of its `SaveSummary`, and the
        checkpoint of ``step`` that this object has loaded or saved, unless it is to be overwritten.

        If the save failed on any rank and the next save would fail in the same way, the error is raised on all ranks.
        So is Conflict, if ``step`` exists and this object has neither loaded nor saved it.
        """
        begun = time.monotonic()
        error = self._settle(to_save=True)
        self._checked, settled = True, time.monotonic()
        ranks = open_ranks(self.process_group)

        def look() -> bool:
            if error is not None:
                raise error
            if not self._looked_at_data and ranks.rank == 0:
                warn_of_data(train_state)
            self._looked_at_data = True
            return self._failures.too_many

        def decide(found: Sequence[bool]) -> Sequence[tuple[bool, Commit | None]]:
            saved = None if self._overwrites(options.get("overwrite")) else self.ownership.find(step)
            return everyone((any(found), None if saved is None else saved.commit), ranks.size)

        self.start(step, overwrite=options.get("overwrite"))
        is_foreground, commit = ranks.exchange(look, decide)
        if is_foreground and ranks.rank == 0:
            log.warning(
                "%d consecutive saves of %s failed: the training waits for the next one", self._failures.count, self.run
            )
        existing = None if commit is None else Checkpoint(self.store.repository, commit)
        return ranks, is_foreground, (settled - begun, time.monotonic() - settled), existing

    def _kept(
        self, saved: Checkpoint, ranks: Ranks, state: Any, model: TrainModel, options: StepArguments
    ) -> Checkpoint | None:
        """Return ``saved``, which is the checkpoint of the step, if it stays. Return None if it is to be overwritten.

        Raises Conflict on every rank if the model or the optimizer differ from the saved ones, unless the step was
        loaded and this is inside `keeping`.
        """
        if self.ownership.may_replace(saved):
            options["overwrite"] = True
            return None
        given = self._loaded[1].given if self._loaded is not None and self._loaded[0].id == saved.id else {}
        differing, minor = differing_keys(self.store, saved, state, model, **self._load_arguments(**given))
        text = f"{saved.run}@{saved.step} is already saved"
        if differing and (self.ownership.has_saved(saved.id) or not self._keeps):
            raise Conflict(
                f"{text}, and {listed(differing)} changed since. Save after advancing the step counter",
                checkpoints=(saved.id,),
            )
        if ranks.rank == 0:
            self._tell_kept(text, saved.step, differing, minor)
        return saved

    def _tell_kept(self, text: str, step: int, differing: Sequence[str], minor: Sequence[str]) -> None:
        """Log that a checkpoint of the same step stays, and emit an event."""
        if differing and is_news("repeat", self.run, self.store.url):
            log.warning(
                "%s, and stays as it is, although %s changed since: this loop repeats step %d. Save after advancing "
                "the counter", text, listed(differing), step,
            )  # fmt: skip
        elif not differing:
            since = f" (changed since: {listed(minor)})" if minor else ""
            log.info("%s%s", text, since)
        reason = "step_repeated" if differing else "already_saved"
        self._events.emit(CheckpointEvent(kind="skipped", run=self.run, step=step, reason=reason))

    def _settle(self, *, to_save: bool = False) -> BaseException | None:
        """Wait for the background save, and log its error if it failed.

        ``to_save``: instead of logging an error that the next save would repeat, return it unless the caller has read
        it.
        """
        pending, heard = self._pending, self._pending is not None and self._pending.future.is_read
        error = self._end_pending()
        if pending is None or error is None:
            return None
        if to_save and will_repeat(error) and not heard:
            return error
        log.error("the save of %s@%d failed, and no part of it is visible: %s", self.run, pending.step, error)
        return None

    def _end_pending(self) -> BaseException | None:
        """Wait for the background save and return its error.

        After an error, the next save gets the files of the failed save.
        """
        pending, self._pending = self._pending, None
        if pending is None or pending.future.is_inherited:
            return None
        error = pending.future.exception()
        self._failures.note(error)
        if error is not None:
            self._files = pending.files | self._files
            self.saved_step = pending.saved_step
        return error


@dataclass(frozen=True)
class _Pending:
    """A background save. ``saved_step``, ``files``: the checkpointer's saved step and files before the save."""

    future: ReportedFuture[Checkpoint]
    step: int
    saved_step: int | None
    files: dict[str, bytes]
