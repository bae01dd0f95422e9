"""``casckpt export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casckpt.cli.describe import brief
from casckpt.cli.progress import progress
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, shortened, size
from casckpt.cli.types import SIZE


@store_command("export")
@click.argument("ref")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format", type=click.Choice(["safetensors"]), default="safetensors", show_default=True, help="Of what is written."
)
@click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Of the files in a folder.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only tensors whose key matches. May be repeated.")
@click.option("--force", is_flag=True, help="Write over what is there.")
def command(session: Session, ref: str, out: Path, *, format: str, **options: Any) -> None:
    """Write a checkpoint as safetensors.

    To one file if OUT ends in .safetensors, else to a folder. A folder gets model.safetensors, or several files with an
    index, and what travelled along. What is no tensor is left out, and named.
    """
    from casckpt.frontends.convert import export_safetensors

    checkpoint = session.store.get(ref)
    with progress("exporting", checkpoint.stats.bytes_total) as done:
        found = export_safetensors(session.store, checkpoint, out, progress=done, **options)
    result = brief(checkpoint) | {
        "format": format,
        "files": [str(path) for path in found.files],
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "attachments": list(found.attachments),
        "left_out": list(found.left_out),
    }
    session.give(result, _text)


def _text(result: dict[str, Any]) -> None:
    say(f"exported {name(result)}: {count(result['tensors'], 'tensor')}, {size(result['bytes'])}")
    for path in shortened(result["files"]):
        say(f"  {printable(path)}")
    if result["left_out"]:
        say(f"left out, for they are no tensors: {printable(', '.join(shortened(result['left_out'], 8)))}")
