"""torchtune's full_finetune_single_device recipe: a seed, epochs, and a schedule that is rebuilt at its position."""

import logging
import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import casckpt
from casckpt.frontends.trainer import Checkpointer, TrainState
from tests.programs.shared import ended, options, ran, starts

log = logging.getLogger("recipe")


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int
) -> torch.optim.lr_scheduler.LambdaLR:
    def lr_lambda(current_step: int) -> float:
        if current_step < num_warmup_steps:
            return current_step / max(1, num_warmup_steps)
        progress = (current_step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda, last_epoch)


class FullFinetuneRecipe:
    """Trains all weights."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.seed = 1234
        self.epochs_run = 0
        self.total_epochs = cfg.steps
        self.max_steps_per_epoch = 6
        self.global_step = 0
        torch.manual_seed(self.seed)

    def setup(self) -> None:
        self._model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 32))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=2e-2)
        data = TensorDataset(torch.arange(64).square() % 32)
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
        self._sampler, self._dataloader = sampler, DataLoader(data, batch_size=8, sampler=sampler)
        self._checkpointer = Checkpointer(self.cfg.store, run="tune", max_checkpoints=3, gc=True)
        self._steps_per_epoch = self.max_steps_per_epoch
        self._state = TrainState(
            seed=self.seed, total_epochs=self.total_epochs, max_steps_per_epoch=self.max_steps_per_epoch
        )
        last = self._checkpointer.resume(self._model, self._optimizer, self._state) if self.cfg.resume else None
        starts(last.step if last else None)
        if last:
            self._update_recipe_state(last)
        self.global_step = self.epochs_run * self._steps_per_epoch
        self._lr_scheduler = get_cosine_schedule_with_warmup(
            self._optimizer,
            num_warmup_steps=4,
            num_training_steps=self.total_epochs * self._steps_per_epoch,
            last_epoch=self.global_step - 1,
        )

    def _update_recipe_state(self, last: casckpt.Checkpoint) -> None:
        self.epochs_run = last.step
        if self.seed != self._state["seed"]:
            log.warning("the config's seed does not match the checkpoint's, which is used")
            self.seed = self._state["seed"]
        if self.total_epochs != self._state["total_epochs"]:
            log.warning("the config's total_epochs does not match the checkpoint's; the config's is used")
            self._state["total_epochs"] = self.total_epochs

    def save_checkpoint(self, epoch: int) -> None:
        self._checkpointer.save(epoch + 1, self._model, self._optimizer, self._state)

    def train(self) -> None:
        self._optimizer.zero_grad()
        for curr_epoch in range(self.epochs_run, self.total_epochs):
            self._sampler.set_epoch(curr_epoch)
            for idx, (tokens,) in enumerate(self._dataloader):
                if idx == self.max_steps_per_epoch:
                    break
                loss = cross_entropy(self._model(tokens), tokens)
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self._lr_scheduler.step()
                self.global_step += 1
            self.epochs_run += 1
            self.save_checkpoint(epoch=curr_epoch)
            ran(curr_epoch + 1, self._lr_scheduler.get_last_lr()[0])

    def cleanup(self) -> None:
        self._checkpointer.close()
        ended(self._model.state_dict())


recipe = FullFinetuneRecipe(options())
recipe.setup()
recipe.train()
recipe.cleanup()
