"""RL with a replay buffer (deep Q-learning). Two networks, the buffer, the world and random generators are resumed.

$ python rl_replay.py
starting
step 10: loss ..., ... steps in the buffer
step 20: loss ..., ... steps in the buffer
step 30: loss ..., ... steps in the buffer

If you kill it and restart it, it continues after its newest checkpoint, and the losses are bit-identical.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

import casckpt
from casckpt.frontends.trainer import TrainState

STEPS, CAPACITY, BATCH = 30, 256, 16


class Walk:
    """A world: a walk with wind along a line, which ends at either side."""

    def __init__(self) -> None:
        self.at, self.wind = 0.0, np.random.default_rng(0)

    def move(self, action: int) -> tuple[float, bool]:
        """Move left or right, and return the reward and whether the walk has ended."""
        self.at += (0.3 if action else -0.3) + float(self.wind.normal(0, 0.1))
        reward, ended = float(self.at > 1), abs(self.at) > 1
        self.at = 0.0 if ended else self.at
        return reward, ended

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"at": self.at, "wind": self.wind.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.at, self.wind.bit_generator.state = state["at"], state["wind"]


torch.manual_seed(0)
q, target = (nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
target.load_state_dict(q.state_dict())
optim = torch.optim.Adam(q.parameters(), lr=1e-2)
world = Walk()
replay = {name: torch.zeros(CAPACITY) for name in ("seen", "action", "reward", "ended", "next")}
models = {"q": q, "target": target}
train = TrainState(world=world, replay=replay, written=0)  # and the random generators

with casckpt.Checkpointer(
    "checkpoints", run="dqn", save_interval=5, last_step=STEPS, max_checkpoints=2, gc=True
) as checkpointer:
    last = checkpointer.resume(models, optim, train)
    print(f"resuming after step {last.step}" if last else "starting")
    for step in range(last.step + 1 if last else 1, STEPS + 1):
        for _ in range(BATCH):  # act, sometimes at random
            seen = world.at
            action = int(torch.randint(2, ()) if torch.rand(()) < 0.2 else q(torch.tensor([seen])).argmax())
            reward, ended = world.move(action)
            for name, value in zip(replay, (seen, action, reward, ended, world.at), strict=True):
                replay[name][train["written"] % CAPACITY] = float(value)
            train["written"] += 1
        drawn = torch.randint(min(train["written"], CAPACITY), (BATCH,))
        now = {name: values[drawn] for name, values in replay.items()}
        with torch.no_grad():
            wanted = now["reward"] + 0.9 * (1 - now["ended"]) * target(now["next"][:, None]).amax(1)
        values = q(now["seen"][:, None]).gather(1, now["action"].long()[:, None])[:, 0]
        loss = nn.functional.smooth_l1_loss(values, wanted)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % 4 == 0:
            target.load_state_dict(q.state_dict())
        checkpointer.save_if_due(step, models, optim, train, metrics={"loss": loss})
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {min(train['written'], CAPACITY)} steps in the buffer")
