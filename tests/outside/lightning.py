"""Lightning's tests with CasCheckpointIO in place of TorchCheckpointIO: it writes pointers to checkpoints in a store.

Where Lightning or a test reads a file with ``torch.load``, it gets what `restore_checkpoint` makes of its pointer. With
CASCKPT_OUTSIDE_ASYNC=1, the plug-in saves in the background. If the environment has TensorFlow, three of Lightning's
own tests fail, because TensorBoard then uses file systems of TensorFlow, which do not know ``memory://``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = [
    f"tests/tests_pytorch/{name}"
    for name in (
        "checkpointing/test_checkpoint_callback_frequency.py",  # the legacy tests need files that no checkout has
        "checkpointing/test_model_checkpoint.py",
        "checkpointing/test_torch_saving.py",
        "checkpointing/test_trainer_checkpoint.py",
        "plugins/test_async_checkpoint.py",
        "plugins/test_checkpoint_io_plugin.py",
        "callbacks/test_model_checkpoint_additional_cases.py",
        "callbacks/test_model_checkpoint_edge_cases.py",
        "callbacks/test_model_checkpoint_manual_opt.py",
        "callbacks/test_model_checkpoint_step_interval_val_metric.py",
        "callbacks/test_weight_averaging.py",
        "core/test_saving.py",
        "models/test_restore.py",
        "trainer/connectors/test_checkpoint_connector.py",
    )
]
SOURCE = "src"
SAVES = [
    "lightning.fabric.plugins.io.torch_io.TorchCheckpointIO.save_checkpoint",
    "lightning.fabric.strategies.strategy.Strategy.save_checkpoint",
    "lightning.pytorch.strategies.strategy.Strategy.save_checkpoint",
]
REASONS = {
    r"test_checkpoint_callback_frequency.*assert 0 == \d+.*call_count": "count calls of torch.save, which are none",
    r"test_model_checkpoint_no_extraneous_invocations.*call_count": "count calls of torch.save, which are none",
    "TypeError: save_checkpoint does not accept storage_options": "mocks Lightning's plug-in, which is not used",
    r"non_existing_checkpoint|test_hpc_restore_attempt.*does not exist; pass": "want Lightning's words in an error",
    "test_checkpoint_plugin_called: a test that saves wrote to no store": "saves with a plug-in of its own",
}


def install(store: Callable[[], str]) -> None:
    """Replace Lightning's default plug-in, and let ``torch.load`` read pointers."""
    import lightning.pytorch  # noqa: F401  (imports all modules that name the plug-in)
    import torch
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    from casckpt.frontends.lightning import CasCheckpointIO, restore_checkpoint
    from casckpt.frontends.lightning.files import Pointer

    load = torch.load

    class OfStore(CasCheckpointIO):
        def __init__(self) -> None:
            in_background = bool(os.environ.get("CASCKPT_OUTSIDE_ASYNC"))
            super().__init__(store(), run="tests", async_save=in_background, allow_pickle=True)

    OfStore.__qualname__ = "OfStore"
    globals()["OfStore"] = OfStore  # so that it can be pickled

    def load_any(file: Any, *args: Any, **options: Any) -> Any:
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        named = Pointer(path).read() if isinstance(path, str | os.PathLike) else None
        if named is None:
            return load(file, *args, **options)
        with tempfile.TemporaryDirectory() as folder:
            restored = restore_checkpoint(store(), named, Path(folder) / "restored.ckpt", allow_pickle=True)
            return load(restored, *args, **options)

    vars(torch)["load"] = load_any
    for name, module in list(sys.modules.items()):
        is_user = name.startswith("lightning.") and name != TorchCheckpointIO.__module__
        if is_user and vars(module).get("TorchCheckpointIO") is TorchCheckpointIO:
            vars(module)["TorchCheckpointIO"] = OfStore
