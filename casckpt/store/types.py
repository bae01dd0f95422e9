"""The types of what the methods of `Store` take and return, beside `Checkpoint`, for those who call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from casckpt.history.folding import Commit as Commit
from casckpt.loading.arguments import Rename as Rename
from casckpt.loading.options import FillArguments as FillArguments
from casckpt.loading.options import MatchArguments as MatchArguments
from casckpt.loading.options import Unread as Unread
from casckpt.saving.options import CheckReplicas as CheckReplicas
from casckpt.saving.options import Compress as Compress
from casckpt.saving.options import Frozen as Frozen
from casckpt.saving.options import ImportArguments as ImportArguments
from casckpt.saving.options import Metrics as Metrics
from casckpt.saving.options import Owners as Owners
from casckpt.saving.options import SaveArguments as SaveArguments
from casckpt.saving.options import SaveOptions

if TYPE_CHECKING:  # results of gc, copies and reports, whose modules take a while to import
    from casckpt.upkeep.copies.copy import CopyResult as CopyResult
    from casckpt.upkeep.footprint import RuleUsage as RuleUsage
    from casckpt.upkeep.gc.gc import GcResult as GcResult
    from casckpt.upkeep.gc.purge import Deferred as Deferred
    from casckpt.upkeep.gc.rotation import Rotation as Rotation
    from casckpt.upkeep.history import Added as Added
    from casckpt.upkeep.history import Heat as Heat
    from casckpt.upkeep.history import History as History
    from casckpt.upkeep.repair.verify import Mode as Mode
    from casckpt.upkeep.usage import Freed as Freed
    from casckpt.upkeep.usage import RunUsage as RunUsage
    from casckpt.upkeep.usage import StoreUsage as StoreUsage


def check_save_arguments(arguments: SaveArguments) -> None:
    """Raise InvalidInput for what no `Store.save` would take, whatever its state."""
    SaveOptions(step=0, **arguments).checked()
