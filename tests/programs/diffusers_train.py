"""diffusers' train_unconditional.py: Accelerate, gradients of several batches, and an average of the weights.

With ``--hooks 1`` the average stays in the hooks of `accelerator.save_state`, as the script has it. By default, it is
registered with the accelerator.
"""

import math
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from casckpt.frontends.accelerate import AcceleratorCheckpointer
from tests.programs.shared import ended, options, ran, starts


def save_model_hook(models: list[torch.nn.Module], weights: list[Any], output_dir: str) -> None:
    torch.save(ema_model.state_dict(), f"{output_dir}/unet_ema.pt")
    for _ in models:
        weights.pop()


def load_model_hook(models: list[torch.nn.Module], input_dir: str) -> None:
    ema_model.load_state_dict(torch.load(f"{input_dir}/unet_ema.pt"))


args = options(hooks=0)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
ema_model = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.95, 0.999), weight_decay=1e-6)
dataloader: Any = DataLoader(torch.randn(48, 8), batch_size=4, shuffle=True)
lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=4, num_training_steps=args.steps)
model, optimizer, dataloader, lr_scheduler = accelerator.prepare(model, optimizer, dataloader, lr_scheduler)
if args.hooks:
    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
else:
    accelerator.register_for_checkpointing(ema_model)

num_update_steps_per_epoch = math.ceil(len(dataloader) / accelerator.gradient_accumulation_steps)
num_epochs = math.ceil(args.steps / num_update_steps_per_epoch)
global_step = first_epoch = resume_step = 0

checkpointer = AcceleratorCheckpointer(
    accelerator, args.store, run="ddpm", save_interval=10, last_step=args.steps, max_checkpoints=3, gc=True
)
last = checkpointer.resume() if args.resume else None
starts(last.step if last else None)
if last:
    global_step = last.step
    first_epoch = global_step // num_update_steps_per_epoch
    resume_step = (global_step % num_update_steps_per_epoch) * accelerator.gradient_accumulation_steps

for epoch in range(first_epoch, num_epochs):
    model.train()
    for step, clean_images in enumerate(dataloader):
        if epoch == first_epoch and step < resume_step:  # skip steps until we reach the resumed step
            continue
        noise, timesteps = torch.randn_like(clean_images), torch.rand(len(clean_images), 1)
        noisy_images = (1 - timesteps) * clean_images + timesteps * noise
        with accelerator.accumulate(model):
            loss = mse_loss(model(torch.cat([noisy_images, timesteps], 1)), noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
            global_step += 1
            checkpointer.save_if_due(global_step)
            ran(global_step, lr_scheduler.get_last_lr()[0])
            if global_step >= args.steps:
                break

checkpointer.close()
accelerator.end_training()
average = {f"ema.{number}": value for number, value in enumerate(ema_model.shadow_params)}
ended({**accelerator.unwrap_model(model).state_dict(), **average})
