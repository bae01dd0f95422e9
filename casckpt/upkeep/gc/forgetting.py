"""Forgetting of named checkpoints, without a policy."""

from __future__ import annotations

from collections.abc import Iterable

from casckpt.contents.refs import resolve_many
from casckpt.errors import Conflict
from casckpt.history import commits
from casckpt.history.commits import Commit
from casckpt.history.tags import delete_tag, tags, tags_of
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements


def plan_forget(repo: Repository, refs: Iterable[str | Commit], *, tagged: bool = False) -> list[Commit]:
    """Return the checkpoints that ``refs`` name (ranges too), each once, as they are now. Writes nothing.

    ``tagged``: allow checkpoints with a tag; otherwise they raise `Conflict`. Raises as `resolve_many`; `Damaged` or
    `Refused` if a tag cannot be read.
    """
    chosen = resolve_many(repo, refs)
    named = tags(repo)
    protected = [(commit, names) for commit in chosen if (names := tags_of(named, commit.id))]
    if protected and not tagged:
        shown = "; ".join(f"{commit} by {', '.join(names)}" for commit, names in protected[:5])
        raise Conflict(
            f"{len(protected)} of them tagged: {shown}. Nothing was forgotten; delete the tags, or say --tagged "
            "(tagged=True)",
            checkpoints=tuple(commit.id for commit, _ in protected),
        )
    return chosen


def forget(repo: Repository, chosen: Iterable[Commit]) -> list[Commit]:
    """Forget what `plan_forget` chose. Tags on these checkpoints are deleted first, because tags prevent a purge.

    Tags that expire stay until their end, because their holders rely on them.
    """
    check_requirements(repo)
    named = {name: tag for name, tag in tags(repo).items() if tag.expires is None}
    done = []
    for commit in chosen:
        for name in tags_of(named, commit.id):
            delete_tag(repo, name)
        done.append(commits.forget(repo, commit))
    return done
