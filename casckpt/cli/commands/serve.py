"""``casckpt serve``."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from casckpt.cli.session import Session, store_command
from casckpt.cli.text import printable, say
from casckpt.cli.types import SIZE
from casckpt.errors import InvalidInput, StorageError, Unsupported


@store_command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to answer at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one.")
@click.option("--token-file", type=click.Path(path_type=Path, dir_okay=False), help="Tokens, one a line.")
@click.option("--no-token", is_flag=True, help="Answer everybody who reaches the address.")
@click.option("--view", type=click.Path(path_type=Path, dir_okay=False), help="How all checkpoints are seen: JSON.")
@click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Of safetensors files.")
def command(
    session: Session, *, host: str, port: int, token_file: Path | None, no_token: bool, view: Path | None,
    max_shard_size: int,
) -> None:  # fmt: skip
    """Answer as a Hugging Face Hub.

    With HF_ENDPOINT set to what is printed, from_pretrained, hf download, HfFileSystem and engines that load from a hub
    take any checkpoint: the run is the repository, a step, a tag, latest, main or an id the revision. Files are made
    while they are sent, and every byte is verified. The page at / says what there is. Nothing is ever written but
    leases. Beyond this machine it answers only who has a token.
    """
    try:
        from casckpt.frontends.serve.access import is_loopback, tokens_in
        from casckpt.frontends.serve.app import app_of
        from casckpt.frontends.serve.hub import Hub
        from casckpt.frontends.serve.server import endpoint_of, listen, server_of
        from casckpt.frontends.serve.view_file import read_rules
    except ModuleNotFoundError as error:
        raise Unsupported(f"{error.name} is not installed, and serve needs it: pip install 'casckpt[serve]'") from error

    if not (is_loopback(host) or token_file or no_token):
        raise InvalidInput(f"at {host} others reach the store: give --token-file, or say --no-token")
    tokens = None if token_file is None else tokens_in(_text(token_file).decode("utf-8", "replace"), str(token_file))
    rules = None if view is None else read_rules(_text(view), str(view))
    hub = Hub(session.store, rules=rules, max_shard_size=max_shard_size)
    app = app_of(hub, tokens=tokens, checks_host=is_loopback(host))
    try:
        listening = listen(host, port)
    except OSError as error:
        raise StorageError(f"{host}:{port} cannot be listened at: {error.strerror}; give another --port") from error
    logging.getLogger("casckpt.frontends.serve").setLevel(logging.INFO)
    found = {"store": hub.store.url, "endpoint": endpoint_of(host, listening)}
    say(json.dumps(found) if session.as_json else _shown(found))
    server_of(app).run(sockets=[listening])


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error


def _shown(found: dict[str, str]) -> str:
    return f"serving {printable(found['store'])}; for clients: export HF_ENDPOINT={found['endpoint']}"
