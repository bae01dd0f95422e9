"""Accelerate's tests of states, models, and loaders, with `AcceleratorCheckpointer` for its own saves and loads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = [f"tests/test_{name}.py" for name in ("state_checkpointing", "accelerator", "data_loader", "scheduler")]
SOURCE = "src"
SAVES = ["accelerate.Accelerator.save_state", "accelerate.Accelerator.save_model"]
REASONS = {
    r"test_save_load_model_with_hooks.*the accelerator has hooks": "hooks that write files to a folder are refused",
    r"test_(with_save_limit|checkpoint_deletion).*AssertionError": "a checkpoint is not a folder",
}


def install(store: Callable[[], str]) -> None:
    """Let an accelerator save and load its state in a store. ``checkpoint_3`` is step 3 of the run ``checkpoint``."""
    import accelerate
    from accelerate.utils.modeling import get_state_dict_offloaded_model, has_offloaded_params

    import casckpt
    from casckpt.frontends.accelerate import AcceleratorCheckpointer

    class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no types
        def save_state(self, output_dir: Any = None, safe_serialization: bool = True) -> None:
            config = self.project_configuration
            if config.automatic_checkpoint_naming:
                output_dir = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
            run, step = _run_and_step(output_dir)
            self._checkpointer(run).save(step)
            config.iteration += 1

        def load_state(self, input_dir: Any = None, **_: Any) -> None:
            if input_dir is None:
                self._checkpointer(_run_and_step(Path(self.project_dir, "checkpoints", "checkpoint"))[0]).resume()
            else:
                run, step = _run_and_step(input_dir)
                self._checkpointer(run).load(f"{run}@{step}")

        def save_model(
            self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
        ) -> None:
            is_offloaded = any(has_offloaded_params(module) for module in model.modules())
            weights = get_state_dict_offloaded_model(model) if is_offloaded else self.get_state_dict(model)
            opened, run = casckpt.open(store()), _run_and_step(save_directory)[0]
            saved = opened.save({"model": weights}, run=run, step=0, overwrite=True)
            opened.export(saved, save_directory, format="hf", max_shard_size=max_shard_size, force=True)

        def _checkpointer(self, run: str) -> AcceleratorCheckpointer:
            known: dict[str, AcceleratorCheckpointer] = self.__dict__.setdefault("_casckpt", {})
            if run not in known:
                limit = self.project_configuration.total_limit
                known[run] = AcceleratorCheckpointer(self, store(), run=run, max_checkpoints=limit, overwrite=True)
            return known[run]

    for name in ("save_state", "load_state", "save_model", "_checkpointer"):
        setattr(accelerate.Accelerator, name, vars(Accelerator)[name])


def _run_and_step(folder: Any) -> tuple[str, int]:
    """Return the run and the step for which a folder stands."""
    name = re.sub("[^A-Za-z0-9._/-]", "-", os.path.abspath(folder).strip("/"))
    run, _, step = name.rpartition("_")
    return (run, int(step)) if step.isdigit() and run else (name, 0)
