"""Lightning: saves its checkpoints to a store, and puts a small file that names the checkpoint at each path.

::

    callbacks = [CasCheckpointCheck(), ModelCheckpoint(save_top_k=2, save_last=True)]
    trainer = Trainer(plugins=[CasCheckpointIO(store, run="sft")], callbacks=callbacks)
    trainer.fit(model, ckpt_path="last")              # or a path, "best", or a reference into the store: "sft@latest"

casckpt stores the weights under ``model``, as every front end does, and all other values under ``lightning``. Each
file has a tag, so no retention policy of the store forgets a checkpoint that Lightning keeps. If Lightning removes a
checkpoint, casckpt forgets it.

`CasModelParallelStrategy` saves models that are sharded across ranks without gathering them. It replaces Lightning's
ModelParallelStrategy. `LightningModule.load_from_checkpoint`, FSDPStrategy and DeepSpeedStrategy read files directly:
use `restore_checkpoint` to write a file for them.
"""

from __future__ import annotations

try:
    import lightning.pytorch  # noqa: F401 - a missing package raises here, with the advice
except ImportError as error:
    raise ImportError("casckpt.frontends.lightning needs Lightning: pip install 'casckpt[lightning]'") from error

from casckpt.frontends.lightning.io import CasCheckpointCheck, CasCheckpointIO, restore_checkpoint
from casckpt.frontends.lightning.strategy import CasModelParallelStrategy

__all__ = ["CasCheckpointCheck", "CasCheckpointIO", "CasModelParallelStrategy", "restore_checkpoint"]
