"""``casckpt demo``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from casckpt.cli.session import Output, plain_command
from casckpt.cli.text import bold, printable, say
from casckpt.errors import Conflict

if TYPE_CHECKING:
    from casckpt.frontends.demo import Training


@plain_command("demo")
@click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[FOLDER]")
def command(output: Output, folder: Path | None) -> None:
    """Show how casckpt works, on a small model.

    Trains the model in this process, and then shows saves, the bytes that they share, a load and a gc. This takes a
    few seconds and downloads nothing. If you name a FOLDER, it becomes the store and is kept. Otherwise, the demo
    deletes its store at the end.
    """
    from casckpt.frontends.demo import Training

    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="casckpt-demo-"))) / "store"
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Conflict(f"{folder} is not empty; pass an empty folder, or omit it")
        tour = Tour(output, folder, Training)
        tour.run()
    if output.as_json:
        output.give({"folder": str(folder), "steps": tour.steps}, lambda result: None)


@dataclass
class Tour:
    """The demo, which runs in a folder. ``training``: a function that creates the training run in its initial state."""

    output: Output
    folder: Path
    training: Callable[[], Training]
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Return whether all steps succeeded."""
        return all(step["result"] for step in self.steps if step["command"] is None)

    def run(self) -> None:
        """Show all steps."""
        from casckpt.cli.commands import gc, list, report, show, verify
        from casckpt.cli.describe import plain
        from casckpt.frontends.demo import RUN, STEPS, loads_exactly, train_and_save
        from casckpt.store.opening import open as open_store

        store = open_store(self.folder)
        first, last = f"{RUN}@{STEPS[0]}", f"{RUN}@{STEPS[-1]}"
        train_and_save(store, self.training())
        rows = list.checkpoint_rows(store.listing())
        self._show(
            "Three saves of a model with a frozen backbone; NEW is the size of the data that each one wrote",
            "list",
            rows,
            list.text,
        )
        what = "From the first to the last, only the head and its optimizer changed"
        self._show(what, f"diff {first} {last}", show.differences(store, first, last), show.difference_text)
        self._show("The store holds the backbone only once", "stats", plain(store.stats()), report.stats_text)
        exact = loads_exactly(store, first, self.training())
        self._show(f"store.load(state, {first!r}), compared with the weights at that step", None, exact, _exactness)
        self._show("Every byte matches its hash", "verify", plain(store.verify()), verify.text)
        done, line = gc.described(store.gc(run=RUN, keep_last=1)), f"gc --run {RUN} --keep-last 1"
        self._show("Keep the newest checkpoint of this run; the others can be restored for a day", line, done, gc.text)
        rows = list.checkpoint_rows(store.listing())
        self._show("The remaining checkpoint", "list", rows, list.text)

    def _show(self, title: str, line: str | None, result: Any, text: Callable[[Any], None]) -> None:
        self.steps.append({"title": title, "command": line, "result": result})
        if self.output.as_json:
            return
        say(bold(f"# {title}"))
        if line is not None:
            name, _, rest = line.partition(" ")
            say(f"$ casckpt {name} {printable(str(self.folder))} {rest}".rstrip())
        text(result)
        say()


def _exactness(exact: bool) -> None:
    say("every bit is identical" if exact else "NOT identical: please report this")
