"""What the two programs with Transformers' Trainer share: a small model, its data, and a callback that prints."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TRANSFORMERS_VERBOSITY": "warning"}

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

from tests.programs.shared import ran, starts


class Print(TrainerCallback):
    """Prints where the training starts, and the completed steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        starts(state.global_step or None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ran(state.global_step, kwargs["lr_scheduler"].get_last_lr()[0])


def model() -> GPT2LMHeadModel:
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16))


def words() -> list[dict[str, torch.Tensor]]:
    """16 examples: 8 steps of each epoch."""
    return [{"input_ids": torch.arange(n, n + 12), "labels": torch.arange(n, n + 12)} for n in range(16)]


def arguments(output_dir: str, steps: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
        save_steps=6,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **more,
    )
