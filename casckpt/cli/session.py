"""The parts that all commands share: the STORE argument, common options and output."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from casckpt.base.lazy import cached_property
from casckpt.cli.text import printable
from casckpt.cli.types import ENV_STORE, SETTING, STORE

if TYPE_CHECKING:
    from casckpt.store.store import Store

Function: TypeAlias = Callable[..., int | None]
"""A command's function. It returns an exit status, or None for 0."""


@dataclass
class Output:
    """The output of a command: JSON if ``as_json``, text otherwise."""

    as_json: bool = False

    def give(self, result: Any, text: Callable[[Any], None]) -> None:
        """Print a result that consists of plain data."""
        if self.as_json:
            click.echo(json.dumps(finite(result), indent=2, allow_nan=False))
        else:
            text(result)


@dataclass
class Session(Output):
    """A single run of a command on a store."""

    url: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may contain secrets
    cache_dir: Path | None = None
    single_writer: bool = False
    require_signature: tuple[str, ...] = ()

    @cached_property
    def store(self) -> Store:
        """The store object. Creating this object neither reads nor creates the store itself."""
        from casckpt.store.opening import open as open_store

        return open_store(
            self.url, storage_options=self.storage_options, cache_dir=self.cache_dir, single_writer=self.single_writer,
            require_signature=self.require_signature or None,
        )  # fmt: skip


def finite(value: Any) -> Any:
    """Replace NaN and infinities in ``value`` with null, because JSON cannot represent them."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


STORE_ARGUMENT = click.Argument(["store"], metavar="STORE", type=STORE)
COMMON: tuple[click.Parameter, ...] = (
    click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
    click.Option(["-v", "--verbose"], count=True, help="Log more. Repeat the option to log everything."),
    click.Option(["--debug"], is_flag=True, help="Show an error's traceback."),
)
ON_STORES: tuple[click.Parameter, ...] = (
    click.Option(
        ["-s", "--store", "named_store"],
        metavar="STORE",
        type=STORE,
        envvar=ENV_STORE,
        show_envvar=True,
        help="The store. Replaces the argument STORE.",
    ),
    click.Option(
        ["--storage-option", "storage_options"],
        type=SETTING,
        multiple=True,
        help="An option for the client of remote storage. The value is JSON or a string. May be repeated.",
    ),
    click.Option(
        ["--cache-dir"],
        type=click.Path(path_type=Path, file_okay=False),
        envvar="CASCKPT_CACHE_DIR",
        show_envvar=True,
        help="The folder that holds the catalogue and the blob cache.",
    ),
    click.Option(
        ["--single-writer"],
        is_flag=True,
        help="Promise that no other process writes to the store. Required for storage without exclusive creates.",
    ),
)


REQUIRE_SIGNATURE = click.Option(
    ["--require-signature"],
    metavar="KEY",
    multiple=True,
    help="Require a signature by this public key: a file, or 64 hex digits. May be repeated: one matching key is "
    "enough.",
)


class Command(click.Command):
    """A command that refuses a repeated option of which only the last value would count."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError for an option that may not be repeated."""
        _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        for option in given:
            is_single = isinstance(option, click.Option) and not (option.multiple or option.is_flag or option.count)
            if is_single and given.count(option) > 1:
                raise click.UsageError(f"{max(option.opts, key=len)} accepts a single value: pass it once", ctx)
        return super().parse_args(ctx, args)


class StoreCommand(Command):
    """A command whose first argument is STORE unless an option or the environment sets the store."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, without STORE if an option or the environment sets it."""
        options = args[: args.index("--")] if "--" in args else args
        if os.environ.get(ENV_STORE) or any(re.fullmatch(r"-s|--store(=.*)?", one) for one in options):
            ctx.meta[ENV_STORE] = True
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            hint = _about_store(error)
            if hint:
                raise click.UsageError(f"{error.format_message().rstrip('.')} ({hint})", ctx) from error
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, without STORE if the environment sets it."""
        params = super().get_params(ctx)
        return [one for one in params if one is not STORE_ARGUMENT] if ENV_STORE in ctx.meta else params


def _about_store(error: click.UsageError) -> str:
    """Return a hint about STORE for a command line with a usage error. It is empty if there is no hint."""
    if os.environ.get(ENV_STORE):
        return f"{ENV_STORE} already names the store: omit STORE, or name a different store with -s"
    is_missing = isinstance(error, click.MissingParameter) and error.param is STORE_ARGUMENT
    return f"a folder or a URL; you can also set it with -s or {ENV_STORE}" if is_missing else ""


def store_command(name: str, *, loads: bool = False) -> Callable[[Function], click.Command]:
    """Define a command on a store. Its first argument is STORE. The function gets a `Session` and its own options.

    ``loads``: whether the command loads checkpoints. If it does, it has an option that requires signatures.
    """

    def decorate(function: Function) -> click.Command:
        @wraps(function)
        def call(
            *,
            storage_options: Any,
            cache_dir: Path | None,
            single_writer: bool,
            named_store: str | None,
            store: str = "",
            require_signature: tuple[str, ...] = (),
            **options: Any,  # the command's own options, by click's names
        ) -> int | None:
            as_json, url = _take_common(options), named_store or store
            return function(
                Session(as_json, url, dict(storage_options), cache_dir, single_writer, require_signature), **options
            )

        made = click.command(name, cls=StoreCommand)(call)
        trust = [REQUIRE_SIGNATURE] if loads else []
        made.params = [STORE_ARGUMENT, *made.params, *trust, *ON_STORES, *COMMON]
        return made

    return decorate


def plain_command(name: str) -> Callable[[Function], click.Command]:
    """Define a command without a store. The function gets an `Output` and its own options."""

    def decorate(function: Function) -> click.Command:
        @wraps(function)
        def call(**options: Any) -> int | None:  # see `store_command`
            return function(Output(_take_common(options)), **options)

        made = click.command(name, cls=Command)(call)
        made.params = [*made.params, *COMMON]
        return made

    return decorate


def _take_common(options: dict[str, Any]) -> bool:
    """Remove the common options, apply them, and return whether the output is JSON."""
    del options["debug"]  # `casckpt.cli.main` handles this one
    click.get_current_context().with_resource(_log_to_stderr(options.pop("verbose")))
    return bool(options.pop("as_json"))


class _Handler(logging.Handler):
    """A log handler that writes to the current stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"casckpt: {record.levelname.lower()}: {printable(record.getMessage(), lines=True)}", err=True)


@contextmanager
def _log_to_stderr(verbose: int) -> Iterator[None]:
    log, handler = logging.getLogger("casckpt"), _Handler()
    level = log.level
    log.addHandler(handler)
    log.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
