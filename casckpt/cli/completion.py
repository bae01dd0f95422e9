"""Shell completion of folders for STORE, and of a store's runs and references."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from casckpt.base.names import LATEST, TAG
from casckpt.cli.text import SHORT_ID
from casckpt.errors import CasckptError

if TYPE_CHECKING:
    from casckpt.store.listing import Listing

ENV_STORE: Final = "CASCKPT_STORE"
_AT_MOST: Final = 200  # checkpoints to offer, newest first


class StoreType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """A folder or a URL."""

    name = "store"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Ask the shell to complete folders."""
        return [CompletionItem(incomplete, type="dir")]


class OfStoreType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """A name from the store on the same command line. ``offered`` is a function that yields all candidates."""

    def __init__(self, name: str, offered: Callable[[Listing], Iterator[str]]) -> None:
        self.name, self._offered = name, offered

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the candidates with this prefix. The list is empty if the store cannot be read."""
        url = ctx.params.get("named_store") or os.environ.get(ENV_STORE) or ctx.params.get("store")
        url = url or next(iter(ctx.args), None)  # click does not parse arguments if an option lacks its value
        if not url:
            return []
        logging.disable(logging.CRITICAL)
        try:
            found = dict.fromkeys(self._offered(_listing(url, ctx.params)))
        except (CasckptError, OSError):
            return []
        finally:
            logging.disable(logging.NOTSET)
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def _runs(listing: Listing) -> Iterator[str]:
    return (checkpoint.run for checkpoint in listing.visible)


def _refs(listing: Listing) -> Iterator[str]:
    """Return the tags, `latest`, and the newest checkpoint of each run."""
    checkpoints = listing.visible
    yield from (f"{TAG}{name}" for name in [*listing.tags, *listing.lost_tags])
    yield from [LATEST] * bool(checkpoints)
    yield from (f"{one.run}@{LATEST}" for one in checkpoints)
    yield from (f"{one.run}@{one.step}" for one in checkpoints[: -_AT_MOST - 1 : -1])


def _forgotten(listing: Listing) -> Iterator[str]:
    return (checkpoint.id[:SHORT_ID] for checkpoint in listing.forgotten[: -_AT_MOST - 1 : -1])


def _listing(url: str, params: dict[str, Any]) -> Listing:
    from casckpt.store.opening import open as open_store

    options, cache_dir = dict(params.get("storage_options") or ()), params.get("cache_dir")
    return open_store(url, storage_options=options, cache_dir=cache_dir).listing()


STORE = StoreType()
RUN, REF, FORGOTTEN = OfStoreType("text", _runs), OfStoreType("ref", _refs), OfStoreType("id", _forgotten)
