"""``casckpt export``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from casckpt.cli.completion import REF
from casckpt.cli.describe import brief
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, shortened, size, summed
from casckpt.cli.types import RENAMING, SIZE

if TYPE_CHECKING:
    from casckpt.store.exports import ExportOptions

_MOST = 8
_NO_MODEL = {
    "safetensors": "these are no names of a model; for a folder that from_pretrained loads: --format hf",
    "hf": "this is a part of a model: from_pretrained would make the rest anew, of random weights",
}
"""Why a config.json that travelled along is not in a folder."""


@store_command("export", loads=True)
@click.argument("ref", type=REF)
@click.argument("out")
@click.option(
    "--format", type=click.Choice(["hf", "safetensors", "dcp", "torch"]),
    help="Of what is written.  [default: by the suffix of OUT; else hf where a config.json travels along, safetensors "
    "where none does]",
)  # fmt: skip
@click.option("--max-shard-size", type=SIZE, help="Of safetensors files in a folder.  [default: 5GB]")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only tensors whose key matches. May be repeated.")
@click.option("--strip-prefix", metavar="PREFIX", help="Only tensors below PREFIX, and named without it.")
@click.option(
    "--rename", type=RENAMING, multiple=True, callback=lambda ctx, param, given: dict(given),
    help="Tensors whose whole name matches a regular expression get another one: 'h\\.(.*)=layers.\\1'. May be "
    "repeated; the first that matches counts.",
)  # fmt: skip
@click.option(
    "--no-attachments",
    "attachments",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Leave out what travelled along.",
)
@click.option("--force", is_flag=True, help="Write over what is there.")
@click.option("--allow-pickle", is_flag=True, help="Unpickle what only a pickle could hold, which runs code from it.")
def command(session: Session, ref: str, out: str, **options: Unpack[ExportOptions]) -> None:
    """Write a checkpoint for other programs.

    As hf: to a folder that from_pretrained of Transformers loads: the weights of the model alone, under the names that
    it has, and what travelled along. As safetensors: the same with all tensors, under their keys. Both make
    model.safetensors, or several files with an index; or the one file OUT if that ends in .safetensors.

    As dcp: to a folder that torch.distributed.checkpoint loads. As torch: to a file that plain torch.load reads, for an
    OUT that ends in .pt, .pth or .bin. Both hold all of the checkpoint; torch what --keys, --strip-prefix and --rename
    choose, if they are given. OUT may be a URL.

    What is left out is named.
    """
    from casckpt.frontends.exporting import export

    checkpoint = session.store.get(ref)
    with progress_bar("exporting") as done:
        options["progress"] = done
        found = export(session.store, checkpoint, out, **options)
    result = {
        "format": found.format,
        "files": [str(path) for path in found.files],
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "attachments": list(found.attachments),
        "left_out": list(found.left_out),
        "skipped": list(found.skipped),
        "prefix": found.prefix,
    }
    is_file = len(found.files) == 1 and Path(found.files[0]).name == Path(out).name
    session.give(brief(checkpoint) | result, partial(_text, is_file=is_file, wanted=options["attachments"]))


def _text(result: dict[str, Any], *, is_file: bool, wanted: bool) -> None:
    """``wanted``: were attachments?"""
    say(f"exported {name(result)}: {count(result['tensors'], 'tensor')}, {size(result['bytes'])}")
    for path in shortened(result["files"]):
        say(f"  {printable(path)}")
    if result["left_out"]:
        say(f"left out: {printable(', '.join(shortened(list(summed(result['left_out'])), _MOST)))}")
    if result["skipped"]:
        say(f"files left out: {printable(', '.join(shortened(result['skipped'], _MOST)))}")
    if wanted and "config.json" in result["skipped"] and result["format"] in _NO_MODEL:
        say(_NO_MODEL[result["format"]])
    elif result["format"] == "hf" and "config.json" not in result["attachments"] and not is_file:
        say("there is no config.json in it, which from_pretrained needs: put that of the model there")
