"""``casckpt export``, and ``casckpt serve``, which serves the same files over a network."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from casckpt.cli.describe import brief, plain
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import count, name, printable, say, say_all, shortened, size, summed
from casckpt.cli.types import RENAMING, SIZE, TEXT_SETTING
from casckpt.errors import Gone, InvalidInput, NotFound, StorageError, Unsupported

if TYPE_CHECKING:
    from casckpt.store.exports import ExportOptions

_MOST = 8
_CONFIGS = frozenset(("config.json", "adapter_config.json"))
_NO_MODEL = {
    "safetensors": "these are not the model's own names; use --format hf for a folder that from_pretrained can load",
    "hf": "this is only part of a model: from_pretrained would initialize the rest randomly",
}
"""Why the exported folder does not contain the attached config.json."""


@store_command("export", loads=True)
@click.argument("ref")
@click.argument("out")
@click.option(
    "--format", type=click.Choice(["hf", "safetensors", "dcp", "torch", "files"]),
    help="The format.  [default: files if these are stored; else by OUT's suffix; otherwise hf if a config.json is "
         "attached, else safetensors]",
)  # fmt: skip
@click.option("--max-shard-size", type=SIZE, help="The largest size of a safetensors file in a folder.  [default: 5GB]")
@click.option(
    "--keys", multiple=True, metavar="PATTERN", help="Export only tensors whose key matches. May be repeated."
)
@click.option(
    "--strip-prefix", metavar="PREFIX", help="Export only tensors below PREFIX, and drop PREFIX from their names."
)
@click.option(
    "--rename", type=RENAMING, multiple=True, callback=lambda ctx, param, given: dict(given),
    help="Rename tensors whose full name matches a regular expression: 'h\\.(.*)=layers.\\1'. May be repeated: the "
         "first match applies.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Convert floating-point tensors of 16 bits or more.",
)  # fmt: skip
@click.option(
    "--metadata", type=TEXT_SETTING, multiple=True, callback=lambda ctx, param, given: dict(given),
    help="An entry of a safetensors file's __metadata__. May be repeated.",
)  # fmt: skip
@click.option(
    "--no-attachments",
    "attachments",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Omit the attachments.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option("--if-any", is_flag=True, help="If there is no such checkpoint, write nothing, and exit with 0.")
@click.option(
    "--allow-pickle", is_flag=True, help="Unpickle values that are stored as pickles. This runs code from the store."
)
def command(session: Session, ref: str, out: str, *, if_any: bool, **options: Unpack[ExportOptions]) -> None:
    """Write a checkpoint for other programs.

    hf: a folder for from_pretrained of Transformers. It holds the model's weights under the model's own names, and the
    attachments. safetensors: a folder with all tensors under their keys, and the attachments. Both formats write
    model.safetensors, several files with an index, or a single file if OUT ends in .safetensors.

    dcp: a folder for torch.distributed.checkpoint. torch: a file for torch.load, if OUT ends in .pt, .pth or .bin. Both
    formats hold the whole checkpoint, but with torch, you can select tensors with --keys, --strip-prefix and --rename.
    OUT may be a URL. {step} in OUT stands for the step.

    files: the folder or file that `casckpt import --format files` stored. With --force, it takes the place of OUT in
    one step, and files that the checkpoint does not have are moved to OUT.before.

    The output lists the tensors and files that were omitted.
    """
    from casckpt.frontends.interchange.export import export

    try:
        checkpoint = session.store.get(ref)
    except NotFound as error:
        if not if_any or isinstance(error, Gone):
            raise
        session.give({"reason": str(error)}, lambda result: say(f"nothing to export: {result['reason']}"))
        return
    with progress_bar("exporting") as done:
        options["progress"] = done
        exported = export(session.store, checkpoint, out, **options)
    result = {name: value for name, value in plain(exported).items() if name not in ("checkpoint", "nbytes")}
    result |= {"files": [str(path) for path in exported.files], "bytes": exported.nbytes}
    is_file = len(exported.files) == 1 and Path(exported.files[0]).name == Path(out).name
    needs_config = not is_file and (options["format"] == "hf" or "config.json" in exported.skipped)
    session.give(brief(checkpoint) | result, partial(_text, needs_config=needs_config, wanted=options["attachments"]))


def _text(result: dict[str, Any], *, needs_config: bool, wanted: bool) -> None:
    """Print the result. ``needs_config``: whether a model needs one. ``wanted``: whether the user wants attachments."""
    what = count(len(result["files"]), "file") if result["format"] == "files" else count(result["tensors"], "tensor")
    say(f"exported {name(result)}: {what}, {size(result['bytes'])}")
    say_all(f"  {printable(path)}" for path in shortened(result["files"]))
    if result["left_out"]:
        say(f"omitted: {printable(', '.join(shortened(list(summed(result['left_out'])), _MOST)))}")
    if result["skipped"]:
        say(f"files omitted: {printable(', '.join(shortened(result['skipped'], _MOST)))}")
    say_all(f"note: {printable(note)}" for note in result["notes"])
    if wanted and "config.json" in result["skipped"] and result["format"] in _NO_MODEL:
        say(_NO_MODEL[result["format"]])
    elif result["format"] == "hf" and needs_config and _CONFIGS.isdisjoint(result["attachments"]):
        say("the folder has no config.json, which from_pretrained needs: copy the model's config.json into it")


@store_command("serve", loads=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The port. 0 selects a free one."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file that lists the clients' tokens, one per line.",
)
@click.option("--no-token", is_flag=True, help="Serve all clients without tokens.")
@click.option(
    "--max-shard-size",
    type=SIZE,
    help="The largest size of a safetensors file.  [default: 5GB]",
)
def serve(
    session: Session, *, host: str, port: int, token_file: Path | None, no_token: bool, max_shard_size: int | None
) -> None:
    """Serve the store in the same way as the Hugging Face Hub.

    Set HF_ENDPOINT to the printed address. Then from_pretrained, hf download, HfFileSystem and inference engines can
    load any checkpoint. The repository is the run. The revision is a step, a tag, latest, main or an id. The server
    generates files as it sends them, and verifies every byte. The server writes nothing to the store except leases.
    Clients on other machines need a token. The exit status is 3 if there is no store.
    """
    try:
        from casckpt.frontends.serve.app import app_of, is_loopback, tokens_in
        from casckpt.frontends.serve.hub import Hub
        from casckpt.frontends.serve.server import endpoint_of, listen, server_of
    except ModuleNotFoundError as error:
        raise Unsupported(f"serve needs {error.name}, which is not installed: pip install 'casckpt[serve]'") from error

    if not (is_loopback(host) or token_file or no_token):
        raise InvalidInput(f"other machines can reach the store at {host}: pass --token-file or --no-token")
    tokens = None if token_file is None else tokens_in(_content(token_file).decode("utf-8", "replace"), str(token_file))
    _ = session.store.marker  # raises NotFound, so that a mistyped store is not served as an empty one
    hub = Hub(session.store, max_shard_size=max_shard_size)
    app = app_of(hub, tokens=tokens, checks_host=is_loopback(host))
    try:
        listening = listen(host, port)
    except OSError as error:
        raise StorageError(f"cannot listen on {host}:{port}: {error.strerror}; change --port or --host") from error
    logging.getLogger("casckpt.frontends.serve").setLevel(logging.INFO)
    found = {"store": hub.store.url, "endpoint": endpoint_of(host, listening)}
    say(json.dumps(found) if session.as_json else _listening(found))
    server_of(app).run(sockets=[listening])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def _listening(found: dict[str, str]) -> str:
    return f"serving {printable(found['store'])}; for clients: export HF_ENDPOINT={found['endpoint']}"
