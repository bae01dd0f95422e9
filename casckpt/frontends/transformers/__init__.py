"""Transformers: a `Trainer` that saves into a store, and a callback for trainers whose class you cannot change.

`CasTrainerMixin` saves and loads the training itself, on any number of ranks and with sharded models.
`CasCheckpointCallback` saves each checkpoint folder that a `Trainer` has written, and `restore_checkpoint` restores the
folder.
"""

from __future__ import annotations

try:
    import transformers  # noqa: F401 - a missing package raises here, with the advice
except ImportError as error:
    raise ImportError(
        "casckpt.frontends.transformers needs Transformers: pip install 'casckpt[transformers]'"
    ) from error

from casckpt.frontends.transformers.callback import CasCheckpointCallback, restore_checkpoint
from casckpt.frontends.transformers.mixin import CasTrainerMixin

__all__ = ["CasCheckpointCallback", "CasTrainerMixin", "restore_checkpoint"]
