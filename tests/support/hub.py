"""Small Transformers models with random weights, created without a network, and checks of their exported folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from casckpt.cli.main import cli
from tests.support.training import identical


def gpt2(seed: int = 3) -> Any:
    """Return a three-layer GPT-2 whose head is tied to its embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=97, n_positions=16, bos_token_id=0, eos_token_id=0)
    return _random(GPT2LMHeadModel(config), seed)


def llama(seed: int = 3, *, tied: bool = True) -> Any:
    """Return a two-layer Llama in bfloat16. All parameter names except that of the head begin with "model."."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=97,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return _random(LlamaForCausalLM(config).bfloat16(), seed)


def mixtral(seed: int = 3) -> Any:
    """Return a two-layer Mixtral with three experts, which Transformers fuses."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=3,
    )  # fmt: skip
    return _random(MixtralForCausalLM(config), seed)


def _random(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def trained(model: Any) -> torch.optim.Optimizer:
    """Train one step. Return the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.arange(12).view(2, 6)
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    return optimizer


def check_loads(folder: Path, model: Any) -> None:
    """Check that ``from_pretrained`` loads this model bit for bit without a warning."""
    found, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert identical(dict(found.state_dict()), dict(model.state_dict()))


def export(store: str | os.PathLike[str], ref: str, out: Path, *options: object, status: int = 0) -> dict[str, Any]:
    """Run ``casckpt export``. Return its JSON."""
    done = CliRunner().invoke(cli, ["export", str(store), ref, str(out), "--json", *map(str, options)])
    assert done.exit_code == status, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found
