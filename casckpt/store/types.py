"""Argument and result types of `Store`, except `Checkpoint`, and its settings. Front ends import them from here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypedDict

from casckpt.base.units import Duration, optional_seconds
from casckpt.errors import InvalidInput
from casckpt.format.records import Settings
from casckpt.history.folding import Commit
from casckpt.history.tags import set_tag
from casckpt.loading.options import FillArguments, LoadArguments, MatchArguments, ReadArguments, Rename, Unread
from casckpt.repository.processes import loaded_here, saved_here, saving_here
from casckpt.repository.repository import Repository
from casckpt.saving.options import (
    CheckReplicas,
    Compress,
    Metrics,
    Owners,
    SaveArguments,
    StateArguments,
    StateOptions,
    usable_compress,
    usable_metrics,
)

if TYPE_CHECKING:  # results of gc, copies and reports, whose modules are slow to import
    from casckpt.upkeep.copies.copy import CopyResult
    from casckpt.upkeep.gc.gc import GcResult
    from casckpt.upkeep.gc.purge import Deferred
    from casckpt.upkeep.repair.verify import Mode
    from casckpt.upkeep.sizes import Freed, RunUsage, StoreUsage

__all__ = [
    "CheckReplicas", "Commit", "Compress", "CopyResult", "Deferred", "FillArguments", "Freed", "GcResult",
    "LoadArguments", "MatchArguments", "Metrics", "Mode", "Owners", "ReadArguments", "Rename", "RunUsage",
    "SaveArguments", "StateArguments", "StateOptions", "StoreUsage", "Unread", "loaded_here", "saved_here",
    "saving_here", "set_tag", "usable_metrics",
]  # fmt: skip


DURATIONS: Final = ("min_age", "min_age_ephemeral", "revoke_after")
NAMES: Final = (*DURATIONS, "mirror", "mirror_thinned", "compress")


class SettingChanges(TypedDict, total=False):
    """The keyword arguments of `casckpt.Store.change_settings`. None unsets a setting."""

    min_age: Duration | None
    min_age_ephemeral: Duration | None
    revoke_after: Duration | None
    mirror: str | os.PathLike[str] | None
    mirror_thinned: bool | None
    compress: Compress | None


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The settings of a store. None means that the default applies.

    ``min_age``, ``min_age_ephemeral``: time between forgetting and purging (default: 24 h, and 15 minutes for
    ephemeral checkpoints). ``revoke_after``: time without a sign of life after which gc revokes a save (default: 1 h).
    ``mirror``: the mirror's URL. gc keeps checkpoints that are not yet safe there. ``mirror_thinned``: thin the same
    checkpoints in the mirror (default: the mirror keeps them whole). ``compress``: the default for saves that do not
    pass this option ("auto", "off", "always"; see `casckpt.Store.save`).
    """

    min_age: timedelta | None = None
    min_age_ephemeral: timedelta | None = None
    revoke_after: timedelta | None = None
    mirror: str | None = None
    mirror_thinned: bool | None = None
    compress: str | None = None


def settings_from(record: Settings) -> StoreSettings:
    """Convert the stored record to `StoreSettings`."""
    fields: dict[str, Any] = {name: getattr(record, name) for name in NAMES if name not in DURATIONS}
    seconds = {name: getattr(record, f"{name}_seconds") for name in DURATIONS}
    fields |= {name: None if found is None else timedelta(seconds=found) for name, found in seconds.items()}
    return StoreSettings(**fields)


def change_settings(repo: Repository, changes: SettingChanges) -> StoreSettings:
    """Write ``changes``, and return all settings. ``mirror`` is a URL. InvalidInput names the invalid setting."""
    for name in changes:
        if name not in NAMES:
            raise InvalidInput(f"there is no setting {name!r}: use one of {', '.join(NAMES)}")
    fields: dict[str, Any] = {name: value for name, value in changes.items() if name not in DURATIONS}
    given: dict[str, Any] = {name: value for name, value in changes.items() if name in DURATIONS}
    for name, value in given.items():
        fields[f"{name}_seconds"] = optional_seconds(value, name)
    if fields.get("compress") is not None:
        fields["compress"] = usable_compress(fields["compress"])
    return settings_from(repo.change_settings(**fields))
