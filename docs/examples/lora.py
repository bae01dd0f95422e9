"""LoRA without a library. Every checkpoint holds the whole model with its frozen base, but writes only the adapters.

$ python lora.py
base: 4.0 MiB in the store
step 1: 4.2 MiB in the checkpoint, ... KiB written
step 2: 4.2 MiB in the checkpoint, ... KiB written
step 3: 4.2 MiB in the checkpoint, ... KiB written
loaded step 3 whole: the adapters, and the base that was stored once
"""

import torch
from torch import nn

import casckpt


class Lora(nn.Module):
    """A frozen linear layer plus a trained low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer and the update. ``x``: [..., in_features]."""
        changed: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return changed


torch.manual_seed(0)
store = casckpt.open("checkpoints")
layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
base = store.save({f"layer{n}": layer.state_dict() for n, layer in enumerate(layers)}, run="base", step=0)
print(f"base: {base.stats.bytes_written / 2**20:.1f} MiB in the store")

model = nn.Sequential(*(Lora(layer) for layer in layers))
optim = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
frozen = ["model.*.base.*"]  # a promise that these do not change: a save checks only a sample
with casckpt.Checkpointer(store, run="lora", frozen=frozen) as checkpointer:
    for step in range(1, 4):
        model(torch.randn(16, 512)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        stats = checkpointer.save(step, model, optim).stats
        print(
            f"step {step}: {stats.bytes_total / 2**20:.1f} MiB in the checkpoint, "
            f"{stats.bytes_written / 2**10:.0f} KiB written"
        )

fresh = nn.Sequential(*(Lora(nn.Linear(512, 512, bias=False)) for _ in range(4)))
casckpt.load_model_and_optim_state(store, "lora@latest", fresh)
assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))
print("loaded step 3 whole: the adapters, and the base that was stored once")
