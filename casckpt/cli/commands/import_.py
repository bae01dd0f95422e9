"""``casckpt import`` and ``casckpt merge``, which make a checkpoint from files, or from other checkpoints."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import click

from casckpt.cli.describe import brief, summary
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, printable, say, shortened, size
from casckpt.cli.types import DURATION, NAMES_FILE
from casckpt.errors import InvalidInput

if TYPE_CHECKING:
    from casckpt.contents.checkpoint import Checkpoint
    from casckpt.store.exports import MergeOptions

_NATIVE = ("as_is", "parameter_names", "allow_pickle")


@store_command("import")
@click.argument("path", metavar="FILE_OR_FOLDER")
@click.option(
    "--format", type=click.Choice(["files"]),
    help="files: store the file or folder of any program as it is.  [default: by its content]",
)  # fmt: skip
@click.option("--run", default="default", show_default=True, help="The run to save the checkpoint under.")
@click.option("--step", type=click.IntRange(min=0), help="The step to save the checkpoint under. Required.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint with this run and step.")
@click.option(
    "--watch", is_flag=True,
    help="With --format files, instead of --step: store each checkpoint that a program completes in FILE_OR_FOLDER.",
)  # fmt: skip
@click.option(
    "--layout", metavar="NAME|PATTERN",
    help='With --watch: how the program names checkpoints, such as "step_{step}/model.pt".  [default: detected]',
)  # fmt: skip
@click.option("--settle", type=DURATION, help="With --watch: how long a checkpoint must be unchanged.  [default: 60s]")
@click.option("--once", is_flag=True, help="With --watch: store what is complete, and exit.")
@click.option("--follow-links", is_flag=True, help="With --format files: store what links out of the folder lead to.")
@click.option("--compress", type=click.Choice(["off", "always"]), help="always: encode floats to save space.")
@click.option("--as-is", is_flag=True, help="Keep the structure of a torch.save file.")
@click.option("--parameter-names", type=NAMES_FILE, help="A JSON list of the optimizer's parameter names, in order.")
@click.option("--allow-pickle", is_flag=True, help="Unpickle values. This runs code from the file.")
def command(session: Session, path: str, *, format: str | None, **options: Any) -> None:
    """Save files of other programs as a checkpoint.

    Detects the format: a safetensors file, a Hugging Face folder, a torch.save file, a torch.distributed.checkpoint
    folder (including Megatron's torch_dist), or an OLMo-core folder. PATH may be a URL. Small files next to the
    weights become attachments, and an export of an imported Hugging Face folder contains them. The command creates the
    store if necessary.

    If a torch.save file holds a model and its optimizer, casckpt stores the optimizer by parameter name, and the rest
    as train state, so that training can resume from it. --as-is keeps the file's own structure.

    --format files stores the files themselves, of any program, byte for byte. `casckpt export` gives them back. Their
    tensors are stored once across steps and runs, but only the program that wrote the files can load them.

    --watch stores each checkpoint of a training that is running. The step is in its name. It runs until SIGTERM or
    SIGINT: it then finishes the checkpoint that it is storing, and exits with 0. A second signal ends it at once.
    """
    _check(options, "--format files", format is not None, only=("follow_links", "watch"), never=_NATIVE)
    watch = options.pop("watch", False)
    _check(options, "--watch", watch, only=("layout", "settle", "once"), never=("step", "overwrite"))
    if watch:
        _watch_files(session, path, options)
        return
    if options["step"] is None:
        raise click.UsageError("Missing option '--step'.")
    if format is not None:
        with progress_bar("importing") as done:
            made = session.store.import_files(path, progress=done, **options)
        session.give(_described(made), _saved)
        return
    from casckpt.frontends.convert import import_any, looked_at
    from casckpt.frontends.interchange.new_files import file_attachments

    with looked_at(path) as found, progress_bar("importing") as done:
        made = import_any(session.store, found, progress=done, **options)
    sources = found.sources
    result = brief(made) | {"stats": summary(made)["stats"], "files": [str(file) for file in sources.weights]}
    result |= {"kind": found.kind, "attachments": file_attachments(session.store, made), "skipped": [*sources.skipped]}
    result |= {"notes": [*made.notes]}
    session.give(result, _text)


def _check(options: dict[str, Any], to: str, is_given: bool, only: Sequence[str], never: Sequence[str]) -> None:
    """Remove the options that do not apply. Raise InvalidInput if any of them is given."""
    for one in never if is_given else only:
        value = options.pop(one)
        if value is not None and value is not False:  # but 0 is given
            raise InvalidInput(f"--{one.replace('_', '-')} {'does not apply' if is_given else 'applies'} to {to}")


def _watch_files(session: Session, path: str, options: dict[str, Any]) -> None:
    with _until_signal() as stop:
        from casckpt.frontends.files.watching import watch_files

        given = {one: value for one, value in options.items() if value is not None}
        for made in watch_files(session.store, path, stop=stop, **given):
            row = _described(made)
            say(json.dumps(row)) if session.as_json else _saved(row)


@contextmanager
def _until_signal() -> Iterator[Callable[[], bool]]:
    """Yield whether a signal to end was received. A second one ends the process at once."""
    received = list[int]()

    def note(number: int, _: object) -> None:
        received.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _described(made: Checkpoint) -> dict[str, Any]:
    return {**brief(made), "stats": summary(made)["stats"], **made.metadata["folder"], **made.lineage["imported_from"]}


def _text(result: dict[str, Any]) -> None:
    _saved(result)
    if result["attachments"]:
        say(f"with {printable(', '.join(shortened(result['attachments'], 8)))}")


@store_command("merge", loads=True)
@click.argument("refs", nargs=-1, required=True, metavar="REF...")
@click.option("--run", required=True, help="The run to save the result under.")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to save the result under.")
@click.option(
    "--weights",
    metavar="W,W,...",
    callback=lambda ctx, param, given: given and given.split(","),
    help="The weight of each checkpoint, such as 0.5,1/3,-1.  [default: the mean]",
)
@click.option("--ema", metavar="DECAY", help="Compute the exponential moving average, with this decay per checkpoint.")
@click.option(
    "--keys", multiple=True, metavar="PATTERN",
    help="Merge only what matches. May be repeated.  [default: all except optimizers and other training state]",
)  # fmt: skip
@click.option("--keep", multiple=True, metavar="PATTERN", help="Take what matches from the last REF. May be repeated.")
@click.option("--dtype", metavar="DTYPE", help="The dtype of the combined tensors.  [default: that in the last REF]")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint with this run and step.")
def merge(session: Session, refs: tuple[str, ...], run: str, step: int, **options: Unpack[MergeOptions]) -> None:
    """Save the mean or a weighted sum of checkpoints.

    Adds weight times value in the order of the checkpoints. Other tensors and values are those of the last REF, as are
    metadata and attachments. RUN@100..500 names several checkpoints, in the order of their steps. A warning lists what
    differs and was taken from the last REF.
    """
    options["keys"] = options["keys"] or None
    with progress_bar("merging") as done:
        options["progress"] = done
        made = session.store.merge(*refs, run=run, step=step, **options)
    session.give(brief(made) | {"stats": summary(made)["stats"], "notes": [*made.notes]}, _saved)


def _saved(result: dict[str, Any]) -> None:
    stats = result["stats"]
    say(f"saved {name(result)}: {size(stats['bytes_total'])}, {size(stats['bytes_written'])} written")
