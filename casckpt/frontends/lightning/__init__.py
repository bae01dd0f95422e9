"""Lightning: its checkpoints lie in a store, and where it looks for a file there is a small one that names them.

::

    callbacks = [CasCheckpointCheck(), ModelCheckpoint(save_top_k=2, save_last=True)]
    trainer = Trainer(plugins=[CasCheckpointIO(store, run="sft")], callbacks=callbacks)
    trainer.fit(model, ckpt_path="last")              # or a path, "best", or a reference into the store: "sft@latest"

In the store: weights under ``model``, as every front end has them, and all else under ``lightning``. Each file has a
tag, so that no policy of the store forgets what Lightning wants to keep; what Lightning removes is forgotten.

Models that are sharded over ranks are saved as they lie there by `CasModelParallelStrategy`, which takes the place of
Lightning's ModelParallelStrategy. `LightningModule.load_from_checkpoint`, FSDPStrategy and DeepSpeedStrategy read files
by themselves: `restore_checkpoint` makes one for them.
"""

from __future__ import annotations

try:
    import lightning.pytorch  # noqa: F401 - said here, where the advice can stand beside it
except ImportError as error:
    raise ImportError("casckpt.frontends.lightning needs Lightning: pip install 'casckpt[lightning]'") from error

from casckpt.frontends.lightning.io import CasCheckpointCheck, CasCheckpointIO, restore_checkpoint
from casckpt.frontends.lightning.strategy import CasModelParallelStrategy

__all__ = ["CasCheckpointCheck", "CasCheckpointIO", "CasModelParallelStrategy", "restore_checkpoint"]
