"""``casckpt export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casckpt.checkpoint.handle import Checkpoint
from casckpt.cli.completion import REF
from casckpt.cli.describe import brief
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, shortened, size
from casckpt.cli.types import SIZE
from casckpt.errors import InvalidInput


@store_command("export")
@click.argument("ref", type=REF)
@click.argument("out")
@click.option(
    "--format", type=click.Choice(["safetensors", "dcp", "torch"]), default="safetensors", show_default=True,
    help="Of what is written.",
)  # fmt: skip
@click.option("--max-shard-size", type=SIZE, help="Of safetensors files in a folder.  [default: 5GB]")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only tensors whose key matches. May be repeated.")
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
def command(session: Session, ref: str, out: str, *, format: str, allow_pickle: bool, **options: Any) -> None:
    """Write a checkpoint for other programs.

    As safetensors: to one file if OUT ends in .safetensors, else to a folder, which gets model.safetensors, or several
    files with an index, and what travelled along. What is no tensor is left out, and named. --keys is for this format.

    As dcp: to a folder that torch.distributed.checkpoint loads. As torch: to a file that torch.load loads, without what
    travelled along. Else both hold all of the checkpoint. OUT may be a URL.
    """
    checkpoint = session.store.get(ref)
    with progress_bar("exporting") as done:
        if format == "safetensors":
            result = _safetensors(session, checkpoint, out, progress=done, **options)
        else:
            result = _whole(session, checkpoint, out, format, allow_pickle=allow_pickle, progress=done, **options)
    session.give(brief(checkpoint) | {"format": format} | result, _text)


def _safetensors(
    session: Session, checkpoint: Checkpoint, out: str, *, max_shard_size: int | None, **options: Any
) -> dict[str, Any]:
    from casckpt.frontends.convert import export_safetensors

    limit: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    found = export_safetensors(session.store, checkpoint, out, **limit, **options)
    return {
        "files": [str(path) for path in found.files],
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "attachments": list(found.attachments),
        "left_out": list(found.left_out),
    }


def _whole(
    session: Session, checkpoint: Checkpoint, out: str, format: str, *, keys: tuple[str, ...],
    max_shard_size: int | None, attachments: bool, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    from casckpt.frontends.convert import casckpt_to_dcp, casckpt_to_torch_save
    from casckpt.frontends.dcp.folder import METADATA

    if keys:
        raise InvalidInput(f"--keys is for safetensors: --format {format} writes all of a checkpoint")
    if max_shard_size is not None:
        raise InvalidInput(f"--max-shard-size is for safetensors: --format {format} knows no such limit")
    if format == "dcp":
        casckpt_to_dcp(session.store, checkpoint, out, attachments=attachments, **options)
    else:
        casckpt_to_torch_save(session.store, checkpoint, out, **options)
    there = list(session.store.attachments(checkpoint))
    written, left_out = (there, []) if format == "dcp" and attachments else ([], there)
    place = Path(out).expanduser()
    names = [METADATA, *sorted(path.name for path in place.glob("*.distcp")), *written]
    files = [place / name for name in names] if place.is_dir() else [out]
    tensors = checkpoint.tensors
    return {
        "files": [str(path) for path in files],
        "tensors": len(tensors),
        "bytes": sum(info.bytes for info in tensors.values()),
        "attachments": written,
        "left_out": left_out,
    }


_LEFT_OUT = {
    "safetensors": "for they are no tensors",
    "dcp": "as --no-attachments says",
    "torch": "for a file of torch.save holds no attachments",
}


def _text(result: dict[str, Any]) -> None:
    say(f"exported {name(result)}: {count(result['tensors'], 'tensor')}, {size(result['bytes'])}")
    for path in shortened(result["files"]):
        say(f"  {printable(path)}")
    if result["left_out"]:
        say(f"left out, {_LEFT_OUT[result['format']]}: {printable(', '.join(shortened(result['left_out'], 8)))}")
