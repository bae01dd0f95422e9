"""Shell completion: folders for STORE, and the runs and references that a store has."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from casckpt.cli.text import SHORT_ID
from casckpt.errors import CasckptError

if TYPE_CHECKING:
    from casckpt.repository.repository import Repository

ENV_STORE: Final = "CASCKPT_STORE"
_AT_MOST: Final = 200  # of the newest checkpoints: nobody reads more


class StoreType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """A folder or a URL."""

    name = "store"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Folders, by the shell itself."""
        return [CompletionItem(incomplete, type="dir")]


class OfStoreType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 takes none
    """Something that the store of the same line has. ``offered``: all that may stand there."""

    def __init__(self, name: str, offered: Callable[[Repository], Iterator[str]]) -> None:
        self.name, self._offered = name, offered

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Those that begin so. None at all if the store cannot be read: a prompt is no place for errors."""
        url = ctx.params.get("named_store") or os.environ.get(ENV_STORE) or ctx.params.get("store")
        url = url or next(iter(ctx.args), None)  # click stops before the arguments where an option has no value yet
        if not url:
            return []
        logging.disable(logging.CRITICAL)
        try:
            found = dict.fromkeys(self._offered(_open(url, ctx.params)))
        except (CasckptError, OSError):
            return []
        finally:
            logging.disable(logging.NOTSET)
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def _runs(repo: Repository) -> Iterator[str]:
    from casckpt.history.commits import list_commits

    return (commit.run for commit in list_commits(repo).visible())


def _refs(repo: Repository) -> Iterator[str]:
    """Tags, the newest of all, and the newest of each run."""
    from casckpt.base.names import LATEST, TAG
    from casckpt.history.commits import list_commits
    from casckpt.history.tags import list_tags

    commits = list_commits(repo).visible()
    yield from (f"{TAG}{name}" for name in sorted(list_tags(repo).tags))
    yield from [LATEST] * bool(commits)
    yield from (f"{commit.run}@{LATEST}" for commit in commits)
    yield from (f"{commit.run}@{commit.step}" for commit in commits[: -_AT_MOST - 1 : -1])


def _forgotten(repo: Repository) -> Iterator[str]:
    from casckpt.history.commits import list_commits

    forgotten = [commit for commit in list_commits(repo).live() if commit.is_forgotten]
    return (commit.id[:SHORT_ID] for commit in forgotten[: -_AT_MOST - 1 : -1])


def _open(url: str, params: dict[str, Any]) -> Repository:
    from casckpt.repository.opening import open_repository

    options, cache_dir = dict(params.get("storage_options") or ()), params.get("cache_dir")
    return open_repository(url, storage_options=options, cache_dir=cache_dir)


STORE = StoreType()
RUN, REF, FORGOTTEN = OfStoreType("text", _runs), OfStoreType("ref", _refs), OfStoreType("id", _forgotten)
