"""The settings of a `Checkpointer`, their checks, and the choice of the steps at which it saves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict

from casckpt.base.names import check_new_run, check_step
from casckpt.base.units import parse_size
from casckpt.errors import InvalidInput
from casckpt.frontends.trainer.saves import OnEvent
from casckpt.plan.retention import Policy, Rotation, thinning_of
from casckpt.store.types import Metrics, Owners, StateArguments, StateOptions

Kind: TypeAlias = Literal["permanent", "ephemeral"]
Keep: TypeAlias = Policy | Mapping[str, Any] | int | None
"""The permanent checkpoints to keep: a `Policy`, its fields (`keep_last`, ...) by name, or a number."""
Count: TypeAlias = int | None
"""An int of 1 or more, or None."""


class TrainerArguments(StateArguments, total=False):
    """The keyword arguments of `Checkpointer` except store, run and process_group; see there."""

    create: bool | None
    save_interval: int | None
    fixed_steps: Iterable[int] | None
    last_step: int | None
    max_checkpoints: int | None
    keep: Keep
    thin: Mapping[str, Any] | None
    ephemeral_save_interval: int | None
    ephemeral_cooldown: int | None
    max_steps_at_risk: int | None
    max_failures: int | None
    gc: bool
    min_free: str | int | None
    overwrite: bool
    owners: Owners
    on_event: OnEvent | None
    save_threads: int | None
    load_threads: int | None
    throttle: int | None
    work_dir: str | os.PathLike[str] | None
    pre_download: bool


class DueArguments(TypedDict, total=False):
    """The keyword arguments of `Checkpointer.save_if_due`, as for `Store.save`."""

    metadata: Mapping[str, Any] | None
    metrics: Metrics | None
    healthy: bool | None


class StepArguments(DueArguments, total=False):
    """The keyword arguments of `Checkpointer.save`; see there."""

    ephemeral: bool
    overwrite: bool | None
    attachments: Mapping[str, bytes] | None


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(StateOptions):
    """The declaration of the settings of a `Checkpointer`. Raises InvalidInput for invalid values.

    docs/settings.md shows the comments. `TrainerArguments` repeats the types, for the keywords of a call.
    """

    #: the run; required by `Checkpointer`
    run: str = "default"
    #: as for `casckpt.open`, also for a store that is already open
    create: bool | None = None
    #: the number of steps between permanent checkpoints
    save_interval: Count = None
    #: steps that are always saved and never forgotten
    fixed_steps: Iterable[int] | None = None
    #: the last step of the training, which is always saved
    last_step: int | None = None
    #: how many permanent checkpoints to keep
    max_checkpoints: Count = None
    #: additional [retention rules](retention.md#rules)
    keep: Keep = None
    #: what to [drop](retention.md#thin) from older checkpoints, and how many checkpoints to keep whole
    thin: Mapping[str, Any] | None = None
    #: the number of steps between ephemeral checkpoints, each of which is removed once a newer checkpoint exists
    ephemeral_save_interval: Count = None
    #: the minimum number of steps between an ephemeral checkpoint and any other checkpoint
    ephemeral_cooldown: Count = None
    #: the maximum number of steps that a crash may lose
    max_steps_at_risk: Count = None
    #: the number of consecutive saves that may fail, over at least 15 minutes, before the next failure is raised
    max_failures: Count = 3
    #: runs a gc of the run after each save, and when a save meets a full disk
    gc: bool = False
    #: how much of the disk a save must leave free, such as `"20GB"`; see [a full disk](disk_usage.md#a-full-disk)
    min_free: str | int | None = None
    #: replaces existing steps, and allows a training that did not resume to [save them
    #: again](resume.md#who-may-continue-a-run)
    overwrite: bool = False
    #: a function that receives [events](training.md#events)
    on_event: OnEvent | None = None
    #: the number of threads on each rank for saves
    save_threads: Count = None
    #: the number of threads on each rank for loads
    load_threads: Count = None
    #: the maximum number of ranks on a node that upload at the same time
    throttle: Count = None
    #: a folder on the node for the locks of `throttle`; by default, a folder in the temporary folder
    work_dir: str | os.PathLike[str] | None = None
    #: fetches a checkpoint into the node's cache before loading it
    pre_download: bool = False

    def __post_init__(self) -> None:
        check_new_run(self.run)
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.type == "Count" and value is not None and (type(value) is not int or value < 1):
                raise InvalidInput(f"{setting.name}={value!r} is not valid; pass an int of 1 or more, or None")
        if self.on_event is not None and not callable(self.on_event):
            raise InvalidInput(f"on_event={self.on_event!r:.40} is not valid; pass a function of a CheckpointEvent")
        if not isinstance(self.fixed_steps, Iterable | None):
            raise InvalidInput(f"fixed_steps={self.fixed_steps!r} is not valid; pass a list of steps, or None")
        steps = None if self.fixed_steps is None else frozenset(check_step(step) for step in self.fixed_steps)
        object.__setattr__(self, "fixed_steps", steps)
        if self.last_step is not None:
            object.__setattr__(self, "last_step", check_step(self.last_step))
        if self.min_free is not None:
            try:
                parse_size(str(self.min_free))
            except InvalidInput as error:
                raise InvalidInput(f"min_free: {error}") from error
        policy_of(self.keep)
        self.check_choices()
        thinning_of(self.thin)
        self._check_risk()

    def _check_risk(self) -> None:
        most, gap = self.max_steps_at_risk, self.longest_gap
        if most is not None and (gap is None or most < gap):
            found = "there is no save interval" if gap is None else f"there can be {gap} steps between two saves"
            raise InvalidInput(
                f"max_steps_at_risk={most} is too small: {found}; pass a save_interval or an "
                "ephemeral_save_interval of at most this many steps"
            )

    @property
    def longest_gap(self) -> int | None:
        """The maximum number of steps between two due saves; None if there is no limit."""
        gaps = [] if self.save_interval is None else [self.save_interval]
        if self.ephemeral_save_interval is not None:
            gaps.append(self.ephemeral_save_interval + max((self.ephemeral_cooldown or 1) - 1, 0))
        return min(gaps, default=None)

    def due(self, step: int, last: int | None) -> Kind | None:
        """Return the kind of checkpoint that is due at ``step``, if any.

        ``last``: the step of the newest checkpoint, or None. A permanent checkpoint is due every ``save_interval``
        steps, at ``fixed_steps`` and at ``last_step``. An ephemeral checkpoint is due every ``ephemeral_save_interval``
        steps, but not within ``ephemeral_cooldown`` steps after the last checkpoint of either kind. Retention forgets
        an ephemeral checkpoint when a newer checkpoint exists.
        """
        if step == self.last_step or step in (self.fixed_steps or ()) or _is_multiple(step, self.save_interval):
            return "permanent"
        near = last is not None and 0 <= step - last < (self.ephemeral_cooldown or 0)
        return "ephemeral" if _is_multiple(step, self.ephemeral_save_interval) and not near else None

    @property
    def rotation(self) -> Rotation:
        """The retention rules that apply after a save."""
        return Rotation(
            keep=policy_of(self.keep), max_checkpoints=self.max_checkpoints, fixed=frozenset(self.fixed_steps or ()),
            thin=thinning_of(self.thin),
        )  # fmt: skip


def _is_multiple(step: int, interval: int | None) -> bool:
    return interval is not None and step > 0 and step % interval == 0


def policy_of(keep: Keep) -> Policy | None:
    """Return the policy for the setting ``keep``. Raises InvalidInput."""
    if keep is None or isinstance(keep, Policy):
        return keep
    if type(keep) is int:
        return Policy(keep_last=keep)
    rules = {rule.name for rule in fields(Policy)}
    if not isinstance(keep, Mapping) or not rules.issuperset(keep):
        raise InvalidInput(
            f"keep={keep!r} is not valid; pass a number, or a dict with any of {', '.join(sorted(rules))}"
        )
    return Policy(**keep)
