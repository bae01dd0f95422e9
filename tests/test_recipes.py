"""The training programs in docs/examples resume as if they had never been killed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import casckpt
from tests.support.pages import commands_of, pattern
from tests.support.recipes import Batch, Seen, Start, Training, says_kill_it, train
from tests.support.saves import hashes
from tests.support.torch_versions import needs_torch

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"


@dataclass(frozen=True)
class Recipe:
    """An example, which is killed in call number ``dies_at`` of backward, and continues after call number ``goes_on``.

    ``needs``: modules of packages that may be missing. ``others``: another number of ranks for the resume, where
    ``batch`` is evaluated.
    """

    name: str
    run: str
    dies_at: int
    goes_on: int
    ranks: int = 0
    needs: tuple[str, ...] = ()
    batch: Batch | None = None
    others: int = 0


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.arange(32).view(4, 8),)


def features() -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-1, 1, 4 * 256).view(4, 256),)


def points() -> tuple[torch.Tensor, ...]:
    return torch.linspace(-1, 1, 8).view(4, 2), torch.arange(4)


RECIPES = (
    Recipe("fsdp2", "fsdp2", 13, 10, ranks=2, batch=features, others=1),
    Recipe("nanogpt", "nanogpt", 18, 10, ranks=1, batch=tokens, others=2),
    Recipe("olmo_like", "olmo", 18, 10, ranks=2, batch=tokens, others=1),
    Recipe("diffusion_ema", "diffusion", 18, 10, ranks=1, batch=points, others=2),
    Recipe("ddp_swa", "swa", 18, 15, ranks=2),
    Recipe("rl_replay", "dqn", 23, 20),
    Recipe("accelerate_gan", "gan", 2 * 4 * 4 + 7, 2 * 4 * 4, needs=("accelerate", "casckpt.frontends.accelerate")),
    Recipe("lightning_fit", "fit", 11, 8, needs=("lightning.pytorch", "casckpt.frontends.lightning")),
    Recipe("transformers_trainer", "sft", 11, 8, needs=("transformers.trainer", "casckpt.frontends.transformers")),
    Recipe("trl_sft", "lora", 11, 8, needs=("trl.trainer.sft_trainer", "peft", "datasets")),
)

LIKE_OTHERS = {"fsdp2", "olmo_like", "ddp_swa"}
"""Examples that resume on the same number of ranks only with --full. Others cover what they use of casckpt."""


def test_every_restartable_example_survives_a_kill() -> None:
    assert {one.name for one in RECIPES} == {path.stem for path in EXAMPLES.glob("*.py") if says_kill_it(path)}


@pytest.mark.process
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=[pytest.mark.soak] if one.name in LIKE_OTHERS else []) for one in RECIPES],
    ids=lambda one: str(one.name),
)
def test_training_resumes_bit_for_bit_after_a_kill(recipe: Recipe, tmp_path: Path) -> None:
    missing = [name for name in recipe.needs if find_spec(name.partition(".")[0]) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    path = EXAMPLES / f"{recipe.name}.py"
    starts = [*up_to_the_kill(recipe), Start("resumed", "killed", ranks=recipe.ranks)]
    seen = train(Training(path, tmp_path, imports=recipe.needs), starts)
    for whole, killed, resumed in zip(seen["whole"], seen["killed"], seen["resumed"], strict=True):
        assert (whole.status, killed.status, resumed.status) == (0, -9, 0), whole.told + killed.told + resumed.told
        assert killed.losses == whole.losses[: recipe.dies_at]
        assert resumed.losses == whole.losses[recipe.goes_on :]
    assert last_checkpoint(tmp_path / "killed", recipe.run) == last_checkpoint(tmp_path / "whole", recipe.run)
    assert_prints(seen["whole"], path, 0)


@needs_torch("2.8", "FSDP2 on the CPU, which the example uses")
@pytest.mark.process
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=[] if one.name == "fsdp2" else [pytest.mark.soak]) for one in RECIPES if one.batch],
    ids=lambda one: str(one.name),
)
def test_training_resumes_on_a_different_number_of_ranks(recipe: Recipe, tmp_path: Path) -> None:
    starts = [*up_to_the_kill(recipe), Start("resumed", "killed", ranks=recipe.others)]
    path = EXAMPLES / f"{recipe.name}.py"
    seen = train(Training(path, tmp_path, batch=recipe.batch), starts)
    assert [one.status for one in seen["resumed"]] == [0] * recipe.others, seen["resumed"][0].told
    for rank in seen["resumed"]:
        assert rank.resumed == {recipe.goes_on: seen["killed"][0].saved[recipe.goes_on]}
        names = " ".join(rank.resumed[recipe.goes_on])
        assert all(word in names for word in (".weight", ".exp_avg", ".step", ".lr", "evaluated"))
    whole, resumed = of_all(seen["whole"])[recipe.goes_on :], of_all(seen["resumed"])
    assert len(resumed) == len(whole) == 20
    assert resumed == pytest.approx(whole, rel=1e-5, abs=0)
    assert_prints(seen["resumed"], path, 1)


def up_to_the_kill(recipe: Recipe) -> list[Start]:
    return [
        Start("whole", "whole", ranks=recipe.ranks),
        Start("killed", "killed", ranks=recipe.ranks, dies_at=recipe.dies_at),
    ]


def last_checkpoint(folder: Path, run: str) -> dict[str, str]:
    """Return the hashes of the tensors by key. Lightning's keys contain paths, and other values may be times."""
    found = hashes(casckpt.open(folder / "checkpoints"), f"{run}@latest")
    return {key.replace(str(folder), ""): digest for key, digest in found.items()}


def assert_prints(ranks: list[Seen], path: Path, number: int) -> None:
    """Check the output in the docstring for its first command, or for its second if it has one."""
    printed = re.sub(r"(?m)^\[Gloo\].*\n", "", "".join(one.printed for one in ranks))  # as torch 2.9 does
    for _, expected in commands_of(path)[number : number + 1]:
        assert re.fullmatch(pattern(expected), printed.strip())


def of_all(ranks: list[Seen]) -> list[float]:
    """Return the losses of whole batches, of which each rank has an equal part."""
    return [sum(losses) / len(losses) for losses in zip(*(one.losses for one in ranks), strict=True)]
