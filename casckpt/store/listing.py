"""Defines `Listing`, a snapshot of a store's checkpoints and tags. Does not require torch or numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from casckpt.base.lazy import cached_property
from casckpt.base.units import time_of
from casckpt.contents.checkpoint import Checkpoint
from casckpt.history import commits as commit_log
from casckpt.history import tags as tag_log
from casckpt.history.commits import Commit, CommitList
from casckpt.history.tags import TagList
from casckpt.repository.repository import Repository


@dataclass(frozen=True, slots=True)
class NamedTag:
    """A tag. ``expires``: when it expires, or None for never. ``holder``: who set it, as user@host:pid."""

    checkpoint: Checkpoint
    expires: datetime | None
    holder: str


@dataclass(frozen=True)
class Listing:
    """The tags and commits of a store, each from one LIST.

    Tags are listed first, so every tag's commit is included.
    """

    _repo: Repository
    _commits: CommitList
    _tags: TagList

    @property
    def visible(self) -> list[Checkpoint]:
        """The visible checkpoints, including superseded ones, oldest first."""
        return self._checkpoints(self._commits.visible())

    @property
    def standing(self) -> list[Checkpoint]:
        """The visible and forgotten checkpoints, also at their old places, oldest first."""
        return self._checkpoints(self._commits.placed())

    @property
    def forgotten(self) -> list[Checkpoint]:
        """The forgotten checkpoints, which `Store.restore` can restore, oldest first."""
        return self._checkpoints(commit for commit in self._commits.live() if commit.is_forgotten)

    @cached_property
    def superseded(self) -> frozenset[Checkpoint]:
        """The visible checkpoints to which their run and step do not refer."""
        return frozenset(self._checkpoints(self._commits.superseded()))

    @cached_property
    def tags(self) -> Mapping[str, NamedTag]:
        """The tags in name order, except those in `damaged_tags` and `lost_tags`."""
        tags = {}
        for name, commit in self._named.items():
            if commit is not None:
                tag = self._tags.tags[name]
                expires = None if tag.expires is None else time_of(tag.expires)
                tags[name] = NamedTag(Checkpoint(self._repo, commit), expires, tag.holder)
        return tags

    @property
    def damaged_tags(self) -> list[str]:
        """The names of tags whose record cannot be read."""
        return list(self._tags.damaged)

    @property
    def lost_tags(self) -> list[str]:
        """The names of tags whose checkpoint's record cannot be read."""
        return [name for name, commit in self._named.items() if commit is None]

    @property
    def damaged_records(self) -> list[str]:
        """The transactions that have unreadable records."""
        return list(self._commits.damaged)

    def tags_of(self, checkpoint: Checkpoint) -> list[str]:
        """Return the sorted names of a checkpoint's tags."""
        return tag_log.tags_of(self._tags.tags, checkpoint.commit.id)

    def about_run(self, run: str) -> str:
        """Return a message that explains why ``run`` has no visible checkpoint and lists the runs."""
        from casckpt.contents.refs import about_run

        return about_run(self._repo, self._commits, run)

    @cached_property
    def _named(self) -> dict[str, Commit | None]:
        return {name: tag_log.named_by(tag, self._commits) for name, tag in self._tags.tags.items()}

    def _checkpoints(self, commits: Iterable[Commit]) -> list[Checkpoint]:
        return [Checkpoint(self._repo, commit) for commit in commits]


def list_store(repo: Repository) -> Listing:
    """List a store's tags, and then its commits. Raises NotFound if there is no store, and StorageError."""
    repo.check_exists()
    tags = tag_log.list_tags(repo)
    return Listing(repo, commit_log.list_commits(repo), tags)
