"""TRL's SFT script, with casckpt's mixin. As TRL may be absent, its trainer is an imitation that writes a card."""

from tests.programs import hf  # isort: skip # it sets the environment
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from casckpt.frontends.transformers import CasTrainerMixin
from tests.programs.shared import ended, options


class SFTTrainer(Trainer):
    """Writes a model card with each checkpoint, as TRL's trainers do."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        assert self.args.output_dir is not None
        Path(self.args.output_dir).mkdir(exist_ok=True)
        Path(self.args.output_dir, "README.md").write_text(f"# A model after {self.state.global_step} steps\n")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.create_model_card()
        super()._save_checkpoint(model, trial)


class MyTrainer(CasTrainerMixin, SFTTrainer):
    """Saves into the store."""


args = options()
trainer = MyTrainer(
    model=hf.model(),
    args=hf.arguments(
        "out", args.steps, save_total_limit=2, eval_strategy="steps", eval_steps=6, metric_for_best_model="eval_loss"
    ),
    train_dataset=hf.words(),
    eval_dataset=hf.words()[:4],
    callbacks=[hf.Print()],
    store=args.store,
    run="sft",
    settings={"gc": True},
)
trainer.train(resume_from_checkpoint=args.resume or None)
assert isinstance(trainer.model, torch.nn.Module)
ended(trainer.model.state_dict())
