"""``casckpt import``."""

from __future__ import annotations

from typing import Any

import click

from casckpt.cli.describe import brief, summary
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, printable, say, shortened, size
from casckpt.cli.types import RUN


@store_command("import")
@click.argument("path", metavar="FILE_OR_FOLDER")
@click.option("--run", default="default", show_default=True, type=RUN, help="The run to save the checkpoint under.")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to save the checkpoint under.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint with this run and step.")
@click.option("--compress", type=click.Choice(["off", "always"]), help="always: encode floats to save space.")
@click.option("--as-is", is_flag=True, help="Keep the structure of a torch.save file.")
@click.option("--allow-pickle", is_flag=True, help="Unpickle values. This runs code from the file.")
def command(session: Session, path: str, **options: Any) -> None:
    """Save files of other programs as a checkpoint.

    Detects the format: a safetensors file, a Hugging Face folder, a torch.save file, a torch.distributed.checkpoint
    folder (including Megatron's torch_dist), or an OLMo-core folder. PATH may be a URL. Small files next to the
    weights become attachments, and an export restores the files of an imported Hugging Face folder. The command creates
    the store if necessary.

    If a torch.save file holds a model and its optimizer, casckpt stores the optimizer by parameter name, and the rest
    as train state, so that training can resume from it. --as-is keeps the file's own structure.
    """
    from casckpt.frontends.convert import import_any, looked_at
    from casckpt.frontends.interchange.new_files import file_attachments

    with looked_at(path) as found, progress_bar("importing") as done:
        made = import_any(session.store, found, progress=done, **options)
    sources = found.sources
    result = brief(made) | {"stats": summary(made)["stats"], "files": [str(file) for file in sources.weights]}
    result |= {"kind": found.kind, "attachments": file_attachments(session.store, made), "skipped": [*sources.skipped]}
    result |= {"notes": [*made.notes]}
    session.give(result, _text)


def _text(result: dict[str, Any]) -> None:
    stats = result["stats"]
    say(f"saved {name(result)}: {size(stats['bytes_total'])}, {size(stats['bytes_written'])} written")
    if result["attachments"]:
        say(f"with {printable(', '.join(shortened(result['attachments'], 8)))}")
