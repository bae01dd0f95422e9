"""``casckpt import`` and ``casckpt merge``, which make a checkpoint from files, or from other checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from casckpt.cli.describe import brief, summary
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, printable, say, shortened, size
from casckpt.cli.types import NAMES_FILE, REF, RUN
from casckpt.errors import InvalidInput

if TYPE_CHECKING:
    from casckpt.store.exports import MergeOptions


@store_command("import")
@click.argument("path", metavar="FILE_OR_FOLDER")
@click.option(
    "--format", type=click.Choice(["files"]),
    help="files: store the file or folder of any program as it is.  [default: by its content]",
)  # fmt: skip
@click.option("--run", default="default", show_default=True, type=RUN, help="The run to save the checkpoint under.")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to save the checkpoint under.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint with this run and step.")
@click.option("--follow-links", is_flag=True, help="With --format files: store what links out of the folder lead to.")
@click.option("--compress", type=click.Choice(["off", "always"]), help="always: encode floats to save space.")
@click.option("--as-is", is_flag=True, help="Keep the structure of a torch.save file.")
@click.option("--parameter-names", type=NAMES_FILE, help="A JSON list of the optimizer's parameter names, in order.")
@click.option("--allow-pickle", is_flag=True, help="Unpickle values. This runs code from the file.")
def command(session: Session, path: str, *, format: str | None, **options: Any) -> None:
    """Save files of other programs as a checkpoint.

    Detects the format: a safetensors file, a Hugging Face folder, a torch.save file, a torch.distributed.checkpoint
    folder (including Megatron's torch_dist), or an OLMo-core folder. PATH may be a URL. Small files next to the
    weights become attachments, and an export restores the files of an imported Hugging Face folder. The command creates
    the store if necessary.

    If a torch.save file holds a model and its optimizer, casckpt stores the optimizer by parameter name, and the rest
    as train state, so that training can resume from it. --as-is keeps the file's own structure.

    --format files stores the files themselves, of any program, byte for byte. `casckpt export` gives them back. Their
    tensors are stored once across steps and runs, but only the program that wrote the files can load them.
    """
    if format is not None:
        session.give(_import_files(session, path, options), _saved)
        return
    if options.pop("follow_links"):
        raise InvalidInput("--follow-links applies to --format files")
    from casckpt.frontends.convert import import_any, looked_at
    from casckpt.frontends.interchange.new_files import file_attachments

    with looked_at(path) as found, progress_bar("importing") as done:
        made = import_any(session.store, found, progress=done, **options)
    sources = found.sources
    result = brief(made) | {"stats": summary(made)["stats"], "files": [str(file) for file in sources.weights]}
    result |= {"kind": found.kind, "attachments": file_attachments(session.store, made), "skipped": [*sources.skipped]}
    result |= {"notes": [*made.notes]}
    session.give(result, _text)


def _import_files(session: Session, path: str, options: dict[str, Any]) -> dict[str, Any]:
    for other in ("as_is", "parameter_names", "allow_pickle"):
        if options.pop(other):
            raise InvalidInput(f"--{other.replace('_', '-')} does not apply to --format files, which keeps all bytes")
    with progress_bar("importing") as done:
        made = session.store.import_files(path, progress=done, **options)
    return {**brief(made), "stats": summary(made)["stats"], **made.metadata["folder"]}


def _text(result: dict[str, Any]) -> None:
    _saved(result)
    if result["attachments"]:
        say(f"with {printable(', '.join(shortened(result['attachments'], 8)))}")


@store_command("merge", loads=True)
@click.argument("refs", nargs=-1, required=True, type=REF, metavar="REF...")
@click.option("--run", required=True, type=RUN, help="The run to save the result under.")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to save the result under.")
@click.option(
    "--weights",
    metavar="W,W,...",
    callback=lambda ctx, param, given: given and given.split(","),
    help="The weight of each checkpoint, such as 0.5,1/3,-1.  [default: the mean]",
)
@click.option("--ema", metavar="DECAY", help="Compute the exponential moving average, with this decay per checkpoint.")
@click.option("--half-life", metavar="STEPS", help="The same, with a decay of 0.5 in this number of steps.")
@click.option(
    "--keys", multiple=True, metavar="PATTERN",
    help="Merge only what matches. May be repeated.  [default: all except optimizers and other training state]",
)  # fmt: skip
@click.option("--keep", multiple=True, metavar="PATTERN", help="Take what matches from the last REF. May be repeated.")
@click.option("--dtype", metavar="DTYPE", help="The dtype of the combined tensors.  [default: that in the last REF]")
@click.option(
    "--accumulate", type=click.Choice(["float32", "float64"]), default="float32", show_default=True,
    help="The dtype to compute in, unless a tensor has a wider one.",
)  # fmt: skip
@click.option("--no-strict", "strict", flag_value=False, default=True, help="Leave out keys that a REF lacks.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint with this run and step.")
def merge(session: Session, refs: tuple[str, ...], run: str, step: int, **options: Unpack[MergeOptions]) -> None:
    """Save the mean or a weighted sum of checkpoints.

    Adds weight times value in the order of the checkpoints. Other tensors and values are those of the last REF, as are
    metadata and attachments. RUN@100..500 names several checkpoints, in the order of their steps. A warning lists what
    was left out, and what differs and was taken from the last REF.
    """
    options["keys"] = options["keys"] or None
    with progress_bar("merging") as done:
        options["progress"] = done
        made = session.store.merge(*refs, run=run, step=step, **options)
    session.give(brief(made) | {"stats": summary(made)["stats"], "notes": [*made.notes]}, _saved)


def _saved(result: dict[str, Any]) -> None:
    stats = result["stats"]
    say(f"saved {name(result)}: {size(stats['bytes_total'])}, {size(stats['bytes_written'])} written")
