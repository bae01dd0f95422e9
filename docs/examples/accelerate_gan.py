"""Accelerate with a generator and a discriminator, each with its own optimizer. Needs casckpt[transformers].

$ python accelerate_gan.py
starting
epoch 2: discriminator ..., generator ...
epoch 4: discriminator ..., generator ...
epoch 6: discriminator ..., generator ...

If you kill it and restart it, it continues after its newest checkpoint, and the losses are bit-identical.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from casckpt.frontends.accelerate import AcceleratorCheckpointer

EPOCHS = 6

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
g_optim = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
d_optim = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
g_scheduler = torch.optim.lr_scheduler.ExponentialLR(g_optim, 0.98)
data = DataLoader(TensorDataset(torch.randn(32, 2) + 3), batch_size=8, shuffle=True)
generator, discriminator, g_optim, d_optim, g_scheduler, data = accelerator.prepare(
    generator, discriminator, g_optim, d_optim, g_scheduler, data
)

with AcceleratorCheckpointer(accelerator, "checkpoints", run="gan", save_interval=2, last_step=EPOCHS) as checkpointer:
    last = checkpointer.resume()  # instead of accelerator.load_state
    accelerator.print(f"resuming after epoch {last.step}" if last else "starting")
    for epoch in range(last.step + 1 if last else 1, EPOCHS + 1):
        for (real,) in data:
            fake = generator(torch.randn(len(real), 4))
            d_loss = (softplus(-discriminator(real)) + softplus(discriminator(fake.detach()))).mean()
            d_optim.zero_grad()
            accelerator.backward(d_loss)
            d_optim.step()
            g_loss = softplus(-discriminator(fake)).mean()
            g_optim.zero_grad()
            accelerator.backward(g_loss)
            g_optim.step()
            g_scheduler.step()
        checkpointer.save_if_due(epoch)  # instead of accelerator.save_state
        if epoch % 2 == 0:
            accelerator.print(f"epoch {epoch}: discriminator {d_loss:.4f}, generator {g_loss:.4f}")
