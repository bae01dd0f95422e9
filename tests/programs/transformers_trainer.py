"""A fine-tuning script with Transformers' Trainer and casckpt's callback."""

from tests.programs import hf  # isort: skip # it sets the environment
import torch
from transformers import Trainer

import casckpt
from casckpt.frontends.transformers import CasCheckpointCallback, restore_checkpoint
from tests.programs.shared import ended, options

args = options()
store = casckpt.open(args.store)
trainer = Trainer(
    model=hf.model(),
    args=hf.arguments("out", args.steps, save_total_limit=1),
    train_dataset=hf.words(),
    callbacks=[CasCheckpointCallback(store, run="sft", max_checkpoints=3, gc=True), hf.Print()],
)
last = restore_checkpoint(store, "sft@latest", "out") if args.resume else None
trainer.train(resume_from_checkpoint=last)
assert isinstance(trainer.model, torch.nn.Module)
ended(trainer.model.state_dict())
