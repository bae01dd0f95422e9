"""Transformers' trainer tests, with `CasTrainerMixin` mixed into `Trainer`.

Each checkpoint is also exported to the folder that the tests expect, and such a folder stands for its step of the run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = [f"tests/trainer/test_trainer_{name}.py" for name in ("checkpointing", "callback")]
SOURCE = None
SAVES = ["transformers.Trainer._save_checkpoint"]
REASONS = {
    r"JITCheckpointTest.*enable_jit_checkpoint": "enable_jit_checkpoint is refused: the mixin itself saves on SIGTERM",
    r"TrainerCallbackTest.*'_Watch'": "the mixin adds a callback",
    r"test_can_resume_training: .*False is not true": "to resume from nothing is no error, or has another message",
    r"test_(save_checkpoints|save_best_checkpoint|load_best_model_(at_end|from_safetensors)): .*False is not true":
        "the optimizer and the scheduler are in the store, and not in the exported folder",
    r"test_best_model_checkpoint_behavior: .*assert 2 == 1": "save_total_limit does not count the best checkpoint",
}  # fmt: skip


def install(store: Callable[[], str]) -> None:
    """Let `Trainer` be a class with the mixin."""
    import transformers
    import transformers.trainer

    from casckpt.frontends.transformers import CasTrainerMixin

    class Trainer(CasTrainerMixin):
        def __init__(self, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
            named |= {"store": store(), "run": _run(args.output_dir), "settings": {"overwrite": True}}
            super().__init__(model, args, *more, **named)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            self.checkpointer.wait()
            newest, output = f"{self._run}@{self.state.global_step}", Path(self.args.output_dir)
            folder = output / f"checkpoint-{self.state.global_step}"
            self._store.export(newest, folder, format="hf", force=True)
            for name in self._store.attachments(newest):  # an export has only those of the model
                (folder / name).write_bytes(self._store.read_attachment(newest, name))
            kept = {f"checkpoint-{checkpoint.step}" for checkpoint in self._store.checkpoints(self._run)}
            for old in output.glob("checkpoint-*"):
                if old.name not in kept:
                    shutil.rmtree(old)

        def train(self, resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
            found = re.fullmatch("(.+)/checkpoint-([0-9]+)", str(resume_from_checkpoint))
            given = f"{_run(found[1])}@{found[2]}" if found else resume_from_checkpoint
            result = super().train(given, *more, **named)
            run, _, step = str(self.state.best_model_checkpoint).rpartition("@")
            if run == self._run:
                self.state.best_model_checkpoint = f"{self.args.output_dir}/checkpoint-{step}"
            return result

    for module in (transformers, transformers.trainer):
        vars(module)["Trainer"] = Trainer


def _run(output: str) -> str:
    return re.sub("[^A-Za-z0-9._/-]", "-", str(Path(output).absolute()).strip("/"))
