"""Argument and result types of `Store`, except `Checkpoint`. Front ends import them from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from casckpt.history.folding import Commit
from casckpt.loading.arguments import Rename
from casckpt.loading.options import FillArguments, LoadArguments, MatchArguments, Unread
from casckpt.saving.options import (
    CheckReplicas,
    Compress,
    Frozen,
    ImportArguments,
    Metrics,
    Owners,
    SaveArguments,
    SaveOptions,
)

if TYPE_CHECKING:  # results of gc, copies and reports, whose modules are slow to import
    from casckpt.upkeep.copies.copy import CopyResult
    from casckpt.upkeep.footprint import RuleUsage
    from casckpt.upkeep.gc.gc import GcResult
    from casckpt.upkeep.gc.purge import Deferred
    from casckpt.upkeep.history import Added, Heat, History
    from casckpt.upkeep.repair.verify import Mode
    from casckpt.upkeep.usage import Freed, RunUsage, StoreUsage

__all__ = [
    "Added", "CheckReplicas", "Commit", "Compress", "CopyResult", "Deferred", "FillArguments", "Freed", "Frozen",
    "GcResult", "Heat", "History", "ImportArguments", "LoadArguments", "MatchArguments", "Metrics", "Mode", "Owners",
    "Rename", "RuleUsage", "RunUsage", "SaveArguments", "StoreUsage", "Unread", "check_save_arguments",
]  # fmt: skip


def check_save_arguments(arguments: SaveArguments) -> None:
    """Raise InvalidInput for options that `Store.save` would refuse for any state."""
    SaveOptions(step=0, **arguments).checked()
