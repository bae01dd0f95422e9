"""``casckpt import``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casckpt.cli.describe import brief, summary
from casckpt.cli.progress import progress
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, printable, say, shortened, size


@store_command("import")
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE_OR_FOLDER")
@click.option("--run", default="default", show_default=True, help="The run to save it under.")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to save it under.")
@click.option("--overwrite", is_flag=True, help="Forget what is there under this run and step.")
def command(session: Session, path: Path, run: str, step: int, overwrite: bool) -> None:
    """Save safetensors files as a checkpoint.

    One file, or a Hugging Face folder. Of a folder, config, tokenizer and other small files travel along. The store is
    made if there is none.
    """
    from casckpt.frontends.convert import find_sources, import_safetensors

    sources = find_sources(path)
    with progress("importing", sources.nbytes) as done:
        made = import_safetensors(session.store, path, run=run, step=step, overwrite=overwrite, progress=done)
    result = brief(made) | {"stats": summary(made)["stats"], "files": [str(file) for file in sources.weights]}
    session.give(result | {"attachments": list(sources.attachments), "skipped": list(sources.skipped)}, _text)


def _text(result: dict[str, Any]) -> None:
    stats = result["stats"]
    say(f"saved {name(result)}: {size(stats['bytes_total'])}, of which {size(stats['bytes_written'])} were new")
    if result["attachments"]:
        say(f"with {printable(', '.join(shortened(result['attachments'], 8)))}")
