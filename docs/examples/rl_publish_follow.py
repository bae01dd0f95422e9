"""RL with two processes: a trainer publishes each step, and an actor updates its weights and generates text.

$ python rl_publish_follow.py --steps 3
...
actor: step 3: updated by ... MB in ... s; a load takes ... MB in ... s; says ...

``python rl_publish_follow.py`` starts both processes with a new store in the temporary folder. To start them
yourself, on one host or on two hosts that share a store, run ``python rl_publish_follow.py train STORE`` and
``python rl_publish_follow.py act STORE``.

The policy is a small GPT over letters, in bfloat16, which is what inference engines use. The trainer also has float32
weights. As in real RL, a step at 1e-6 changes about one percent of the bfloat16 weights, so little data is written and
read. For each update, the actor prints the bytes and seconds, and compares them with those of a full load. With such a
small policy, a lease and a few small requests take most of the time; only the bytes grow with the size of the policy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import casckpt

LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"
CONTEXT = 32
RUN = "policy"


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        more: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + more


class Policy(nn.Module):
    """A GPT over letters."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (batch, time, letters) for the letter that follows each of the words (batch, time)."""
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, count: int) -> Tensor:
        """Draw ``count`` texts of `CONTEXT` letters."""
        words = torch.full((count, 1), LETTERS.index("\n"))
        while words.shape[1] < CONTEXT:
            odds = self(words)[:, -1].float().softmax(-1)
            words = torch.cat([words, torch.multinomial(odds, 1)], dim=1)
        return words


def train(store: casckpt.Store, steps: int) -> None:
    """Publish each step. A save stores only what changed."""
    torch.manual_seed(0)
    policy = Policy()
    published = {key: value.bfloat16() for key, value in policy.state_dict().items()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    for step in range(steps + 1):
        if step:
            policy_gradient(policy, optimizer)
        for key, value in policy.state_dict().items():
            published[key].copy_(value)
        start = time.perf_counter()
        saved = store.save(published, run=RUN, step=step, compress="auto")
        seconds = time.perf_counter() - start
        print(f"trainer: step {step}: {size(saved.stats.bytes_written)} written in {seconds:.3f} s", flush=True)


def policy_gradient(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Run one step of REINFORCE, which rewards vowels."""
    texts = policy.generate(8)
    vowels = torch.tensor([letter in "aeiou" for letter in LETTERS])
    reward = vowels[texts].float().mean(dim=1)
    chosen = policy(texts[:, :-1]).log_softmax(-1).gather(-1, texts[:, 1:, None]).squeeze(-1).sum(dim=1)
    optimizer.zero_grad()
    (-(reward - reward.mean()) * chosen).mean().backward()
    optimizer.step()


def act(store: casckpt.Store, steps: int) -> None:
    """Update to each version as it arrives, and generate text with it."""
    policy = Policy().bfloat16()
    weights = policy.state_dict()  # the parameters themselves, so an update changes the policy
    whole = {key: torch.empty_like(value) for key, value in weights.items()}
    held = None
    for new in store.watch(RUN, after="start", latest_only=True, timeout="5m", poll="0.1s"):
        with Cost() as update, store.lease(new.checkpoint):
            held = store.update(weights, new.checkpoint, held=held)
        with Cost() as load:
            store.load(whole, new.checkpoint)
        assert all(torch.equal(weights[key], whole[key]) for key in whole)
        text = "".join(LETTERS[letter] for letter in policy.generate(1)[0, 1:]).replace("\n", "/")
        print(f"actor: step {held.step}: updated by {update}; a load takes {load}; says {text!r}", flush=True)
        if held.step >= steps:
            return


class Cost:
    """Counts all bytes that this process reads in a ``with`` block, and the seconds that the block takes."""

    def __enter__(self) -> Cost:
        self.nbytes, self.seconds = -bytes_read(), -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes += bytes_read()
        self.seconds += time.perf_counter()

    def __str__(self) -> str:
        return f"{size(self.nbytes)} in {self.seconds:.3f} s"


def bytes_read() -> int:
    """Return the bytes that this process has read so far, as counted by Linux."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def size(nbytes: int) -> str:
    """Format a number of bytes."""
    return f"{nbytes / 1e6:.2f} MB"


def main() -> int:
    """Run the requested part, or start both parts if none is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["train", "act"])
    parser.add_argument("store", nargs="?")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    if asked.part is not None:
        {"train": train, "act": act}[asked.part](casckpt.open(asked.store), asked.steps)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = asked.store or f"{folder}/store"
        parts = [
            subprocess.Popen([sys.executable, __file__, part, place, "--steps", str(asked.steps)])
            for part in ("act", "train")
        ]
        return max(part.wait() for part in parts)


if __name__ == "__main__":
    sys.exit(main())
